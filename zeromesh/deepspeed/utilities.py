"""Small functions of ``deepspeed.utils``, ``deepspeed.runtime.utils`` and their neighbours."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeromesh import zero
from zeromesh.base.containers import map_tensors
from zeromesh.base.signatures import refuse
from zeromesh.deepspeed.device_interface import get_accelerator
from zeromesh.engine import owners
from zeromesh.parallel.pipeline.schedule.partition import partition

logger = logging.getLogger("zeromesh")

# Of DeepSpeed's launcher, beside which accelerate writes variables for other nodes.
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")


class ZeRORuntimeException(Exception):
    """DeepSpeed's error about what ZeRO cannot do."""


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks, all with ``[-1]``; by default on the first."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank in (ranks or (0,)) or list(ranks or ()) == [-1]:
        logger.log(level, "[Rank %d] %s", rank, message)


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the number of a level of the log, such as ``"warning"``."""
    level = logging.getLevelNamesMapping().get(log_level_str.upper())
    if level is None:
        raise ValueError(
            f"{log_level_str!r} is not a level of logging; use one of debug, info, warning, error, critical"
        )
    return level


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of the log, such as ``"warning"``."""
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory in use on the first rank, if ``force``."""
    if force:
        names = "memory_allocated", "max_memory_allocated", "available_memory"
        used, most, free = ((getattr(get_accelerator(), name)() or 0) / 2**30 for name in names)
        log_dist(f"{message} | in use {used:.2f} GB, at most {most:.2f} GB, free {free:.2f} GB")


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> torch.Tensor:
    """Clip gradients: those of an engine's parameters over all ranks, others as torch does. Return their norm."""
    refuse("clip_grad_norm_", "mpu", mpu, "leave it out; the engine knows which ranks share a model")
    tensors: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(owners.engine_of(tensor) is not None or owners.is_elsewhere(tensor) for tensor in tensors):
        return zero.clip_grad_norm_(tensors, max_norm, norm_type)
    return nn.utils.clip_grad_norm_(tensors, max_norm, norm_type)


def get_global_norm_of_tensors(
    input_tensors: Iterable[torch.Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> torch.Tensor:
    """Return the norm of all elements of this rank's tensors."""
    for name, value in (("mpu", mpu), ("moe_ep_group", moe_ep_group)):
        refuse("get_global_norm_of_tensors", name, value, "leave it out, and use engine.get_global_grad_norm()")
    return nn.utils.get_total_norm([*input_tensors], float(norm_type))


def clip_tensors_by_global_norm(
    input_tensors: Iterable[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: Any = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> Any:
    """Scale tensors in place where their norm is larger than ``max_norm``; return the norm."""
    tensors = [tensor.detach() for tensor in input_tensors]
    norm = get_global_norm_of_tensors(tensors, mpu=mpu) if global_norm is None else global_norm
    factor = min(1.0, max_norm / (float(norm) + eps))
    for tensor in tensors if factor < 1 else ():
        tensor.mul_(factor)
    return norm


def has_inf_or_nan(x: torch.Tensor) -> torch.Tensor:
    """Return whether a tensor has an element that is infinite or no number."""
    return ~x.float().isfinite().all()


class CheckOverflow:
    """Check of gradients for elements that are infinite or no number, over all ranks, whatever ``mpu`` is given."""

    def __init__(
        self, param_groups: Any = None, mpu: Any = None, zero_reduce_scatter: bool = False, deepspeed: Any = None
    ) -> None:
        self.params = list(chain.from_iterable(param_groups or ()))

    def check(self, param_groups: Any = None) -> bool:
        """Return whether a gradient of any rank has such an element. Collective where there are several ranks."""
        return self.has_overflow(self.params if param_groups is None else chain.from_iterable(param_groups))

    def has_overflow(self, params: Iterable[nn.Parameter], has_moe_params: bool | None = None) -> bool:
        """Return whether the gradient of one of these parameters has such an element, on any rank."""
        overflows = torch.tensor([float(self.has_overflow_serial(params))])
        if dist.is_initialized() and dist.get_world_size() > 1:
            overflows = overflows.to(get_accelerator().current_device_name())
            dist.all_reduce(overflows, dist.ReduceOp.MAX)
        return bool(overflows)

    def has_overflow_serial(self, params: Iterable[nn.Parameter]) -> bool:
        """Return whether the gradient of one of these parameters has such an element, on this rank."""
        return any(parameter.grad is not None and bool(has_inf_or_nan(parameter.grad)) for parameter in params)

    _has_inf_or_nan = staticmethod(lambda x, i: has_inf_or_nan(x))


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Return the sums of the first item, the first two, and so on."""
    return list(accumulate(weights))


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as text, such as ``f(1, a=2)``."""
    return f"{base}({', '.join([*(repr(value) for value in args), *(f'{key}={kwargs[key]!r}' for key in kwargs)])})"


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Return whether torch's version is in a range, whose ends count."""
    if min_version is None and max_version is None:
        raise AssertionError("required_torch_version needs min_version or max_version; pass one of them")
    have, low, high = (
        tuple(int(part) for part in re.findall(r"\d+", str(text))[:2])
        for text in (torch.__version__, min_version or 0, max_version or 10**6)
    )
    return low <= have[: len(low)] and have[: len(high)] <= high


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the bounds of parts of equal sizes, of which the first ones may have one item more."""
    return [part * (num_items // num_parts) + min(part, num_items % num_parts) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the bounds of consecutive parts whose largest sum of weights is as small as possible."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return [*partition(weights, num_parts), len(weights)]


def move_to_device(item: Any, device: Any, criterion_func: Callable[[torch.Tensor], bool] | None = None) -> Any:
    """Return a copy of nested containers whose tensors are on a device, or those of a criterion are."""
    return map_tensors(
        item, lambda value: value.to(device) if criterion_func is None or criterion_func(value) else value
    )


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Return a copy of nested containers whose tensors are clones on a device.

    A tensor that is a view is saved by torch with all of the memory that it is a view of; its clone is not.
    """
    return map_tensors(item, lambda tensor: tensor.detach().to(device, copy=True))


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype
) -> Callable[..., torch.Tensor]:
    """Return a constructor of tensors on this process's device, whose floating-point ones have a dtype."""

    def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = fn(*args, **{"device": get_accelerator().current_device_name(), **kwargs})
        return tensor.to(target_fp_dtype) if tensor.is_floating_point() else tensor

    return construct


class RepeatingLoader:
    """An iterator over a loader, or anything else that can be iterated again and again, that begins anew at its end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            # An empty loader raises StopIteration here, and not for ever.
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


@contextmanager
def on_device(dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> Iterator[None]:
    """Make modules on a device, and their floating-point parameters in a dtype; ``enabled=False`` does nothing.

    The device ``"meta"`` makes shapes alone, for weights that are loaded afterwards.
    """
    before = torch.get_default_dtype()
    with torch.device(device) if enabled else nullcontext():
        torch.set_default_dtype(dtype if enabled else before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
