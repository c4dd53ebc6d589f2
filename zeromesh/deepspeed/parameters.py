"""Attributes ``ds_*`` of parameters, and the functions of ``deepspeed.zero`` that ZeroMesh has no use for itself."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from inspect import signature
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from zeromesh import zero
from zeromesh.base.dtypes import keep_wide
from zeromesh.base.precision import Precision
from zeromesh.config.adopt import adopt
from zeromesh.config.settings import Settings
from zeromesh.deepspeed.start_group import init_distributed
from zeromesh.engine import owners
from zeromesh.shard.parameters.absent_guard import is_unloaded
from zeromesh.shard.parameters.deferred import is_deferred, replayed
from zeromesh.shard.parameters.materialise import replace
from zeromesh.shard.parameters.unit import State, Unit
from zeromesh.shard.sharded import ShardedModel

_NUMBERS: Any = WeakIdKeyDictionary()  # ``ds_id``, given when it is first asked for
_next = count()


class ZeroParamStatus(Enum):
    """State of a parameter under ZeRO-3."""

    AVAILABLE = 1  # whole, in memory
    NOT_AVAILABLE = 2  # in parts on the ranks
    INFLIGHT = 3  # being gathered


# Parameters that were built under ``ZeroInit``, which are DeepSpeed's kind before there is an engine, and their state.
_BUILT: Any = WeakIdKeyDictionary()
_HELD: Any = WeakIdKeyDictionary()  # contexts of ``parameter.all_gather()``, left by ``parameter.partition()``


class ZeroInit(zero.Init):
    """``zeromesh.zero.Init``, under which parameters have ``ds_id`` and the other attributes at once.

    A ``dtype``, or that of the configuration if it is given, is that of the parameters which are made. Groups are
    accepted that are all ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = signature(zero.Init).bind(*args, **kwargs).arguments
        dtype, self._before = arguments.pop("dtype", None), torch.get_default_dtype()
        if isinstance(dtype, str):
            raise ValueError(f"zero.Init: dtype is {dtype!r}; pass a dtype of torch, such as torch.bfloat16")
        config = arguments.get("config_dict_or_path") or arguments.get("config")
        asked = Precision() if config is None else Settings.load(adopt(config)[0], tells=False).precision
        self._precision = asked if dtype is None else dataclasses.replace(asked, compute=dtype)
        self._roots: dict[nn.Module, None] = {}  # modules that were built here, and are in no other
        self._notes: list[Any] = []  # hooks that find them; an object may be entered again inside of itself
        for name in ("data_parallel_group", "zero_param_parallel_group", "sequence_data_parallel_group"):
            group = arguments.get(name)
            if isinstance(group, dist.ProcessGroup) and group.size() == dist.get_world_size():
                del arguments[name]
        super().__init__(**arguments)
        # As in DeepSpeed, the first use of it may be what starts the process group.
        if arguments.get("enabled", True) and not dist.is_initialized():
            init_distributed()
        for parameter in arguments["module"].parameters() if arguments.get("module") is not None else ():
            _BUILT[parameter] = ZeroParamStatus.NOT_AVAILABLE

    def __enter__(self) -> ZeroInit:
        if _transformers_loads():
            self.defers = False
        self._before = torch.get_default_dtype()
        if self.defers and self._precision.compute is not None:
            torch.set_default_dtype(self._precision.compute)
        super().__enter__()
        self._notes.append(register_module_module_registration_hook(self._note_module))
        # Small tensors are real ones even here, so that only their registration tells where they were built.
        if self.defers:
            self._entered.append(register_module_parameter_registration_hook(_note))
        return self

    def _note_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        self._roots[module] = None
        if child is not None:
            self._roots.pop(child, None)

    def __exit__(self, *error: Any) -> None:
        self._notes.pop().remove()
        if not self._notes:
            roots, self._roots = self._roots, {}
            for root in () if any(error) else roots:
                # Before weights are read into them: what is read in 16 bits is rounded for good.
                keep_wide(root, self._precision)
        if self.defers:
            torch.set_default_dtype(self._before)
            self._entered.pop().__exit__(*error)
        super().__exit__(*error)


def _transformers_loads() -> bool:
    """Return whether transformers loads weights as under ZeRO-3: the first rank writes them into gathered parameters.

    Parameters are whole on each rank then. Memory of a rank that nothing is written to is not allocated, and
    ``initialize`` takes the first rank's values, so that one rank reads the files, once.
    """
    integration = sys.modules.get("transformers.integrations.deepspeed")
    return integration is not None and bool(integration.is_deepspeed_zero3_enabled())


def _note(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if parameter is not None:
        _BUILT[parameter] = ZeroParamStatus.NOT_AVAILABLE


def is_zero_param(parameter: object) -> bool:
    """Return whether this is a parameter under ZeRO-3, in parts or gathered."""
    if not isinstance(parameter, nn.Parameter):
        return False
    engine = owners.engine_of(parameter)
    return parameter in _BUILT if engine is None else engine.sharded.sharded


def _number(parameter: nn.Parameter) -> int:
    return int(_NUMBERS.setdefault(parameter, next(_next)))


def _status(parameter: nn.Parameter) -> ZeroParamStatus:
    if owners.engine_of(parameter) is None:
        return _BUILT[parameter]  # type: ignore[no-any-return]
    unit = zero.place_of(parameter)[0]
    if isinstance(unit, Unit) and unit.state is State.FETCHING:
        return ZeroParamStatus.INFLIGHT
    # A unit that was read ahead of its use may be evicted before anybody looks: it counts as not there.
    return ZeroParamStatus.NOT_AVAILABLE if is_unloaded(parameter) else ZeroParamStatus.AVAILABLE


def _part(parameter: nn.Parameter) -> torch.Tensor:
    if owners.engine_of(parameter) is None:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        size = -(-parameter.numel() // ranks)
        # A view: it is still on the meta device, or small and whole.
        return parameter.detach().reshape(-1)[rank * size : (rank + 1) * size]
    _, flat, index = zero.place_of(parameter)
    segment = flat.layout.segments[index]
    first = flat.shard_range.start
    start, stop = (
        min(max(at - first, 0), flat.layout.shard_size) for at in (segment.start, segment.start + segment.shape.numel())
    )
    flat.load_shard()
    if flat.shard is flat.master:
        flat.load_states(write=True)  # a program may write to it, and torch would not count it
    return flat.shard.detach()[start:stop]


@contextmanager
def GatheredParameters(
    params: nn.Parameter | Iterable[nn.Parameter | None] | None,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """``zeromesh.zero.GatheredParameters``, also of what was built under ``ZeroInit`` and has no engine yet.

    Such parameters are made at the first call and stay whole on each rank until ``initialize``, with the first rank's
    values.
    """
    members = zero.tensors_of(params)
    early = [member for member in members if enabled and member in _BUILT and owners.engine_of(member) is None]
    for parameter in early:
        if is_deferred(parameter):
            replace(parameter, replayed(parameter))
        _send(parameter, 0)  # small ones were made by each rank
        _BUILT[parameter] = ZeroParamStatus.AVAILABLE
    # As in DeepSpeed, what is written counts only if a rank is named whose values do.
    before = [member.detach().clone() for member in early if modifier_rank is None]
    with zero.GatheredParameters(members, modifier_rank, fwd_module, enabled):
        yield
    with torch.no_grad():
        for parameter, value in zip(early, before or early, strict=True):
            parameter.copy_(value)
            _send(parameter, modifier_rank or 0)
            _BUILT[parameter] = ZeroParamStatus.NOT_AVAILABLE


def _send(parameter: nn.Parameter, rank: int) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(parameter.detach(), rank)


def _gather(parameter: nn.Parameter, *ignored: Any, **options: Any) -> None:
    """Make a parameter whole until ``partition()``. Collective."""
    if parameter not in _HELD:
        _HELD[parameter] = GatheredParameters([parameter], modifier_rank=0)
        _HELD[parameter].__enter__()


def _scatter(parameter: nn.Parameter, *ignored: Any, **options: Any) -> None:
    """End what ``all_gather()`` has begun; values written meanwhile are the first rank's. Collective."""
    if parameter in _HELD:
        _HELD.pop(parameter).__exit__(None, None, None)


def _persists(parameter: nn.Parameter) -> bool:
    """Return whether DeepSpeed would keep the parameter whole on each rank, by its size."""
    engine: Any = owners.engine_of(parameter)
    return engine is not None and parameter.numel() <= engine.zero_param_persistence_threshold()


_ATTRIBUTES: dict[str, Callable[[nn.Parameter], Any]] = {
    "ds_id": _number,
    "ds_shape": lambda parameter: parameter.shape,
    "ds_numel": lambda parameter: parameter.numel(),
    "ds_status": _status,
    "ds_persist": _persists,
    "all_gather": lambda parameter: partial(_gather, parameter),
    "partition": lambda parameter: partial(_scatter, parameter),
    "partition_numel": lambda parameter: lambda: _part(parameter).numel(),
    "ds_tensor": _part,
    # Modules that compute with it now: programs clear it before they generate.
    "ds_active_sub_modules": lambda parameter: set(),
}


def _reader(name: str, read: Callable[[nn.Parameter], Any]) -> property:
    def get(self: nn.Parameter) -> Any:
        # An AttributeError, because programs ask with hasattr() whether a parameter is in parts.
        if not is_zero_param(self):
            raise AttributeError(
                f"this parameter has no {name}: it is whole on every rank, as no engine has sharded it"
            )
        return read(self)

    return property(get)


def add_attributes() -> None:
    """Give parameters DeepSpeed's attributes; those that are not sharded have none of them."""
    for name, read in _ATTRIBUTES.items():
        setattr(nn.Parameter, name, _reader(name, read))
    # In a forward a weight is a plain tensor, which programs ask whether they have to gather it.
    setattr(torch.Tensor, "ds_status", property(lambda tensor: ZeroParamStatus.AVAILABLE))  # noqa: B010  mypy


add_attributes()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Accept that a module uses a parameter of another one; the engine fetches parameters wherever they are used."""
    _require("register_external_parameter", module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Accept what ``register_external_parameter`` accepts."""
    _require("unregister_external_parameter", module, parameter)


def _require(call: str, *arguments: object) -> None:
    for argument, kind in zip(arguments, (nn.Module, nn.Parameter), strict=True):
        if not isinstance(argument, kind):
            raise RuntimeError(f"{call} needs a torch.nn.{kind.__name__}, not a {type(argument).__name__}")


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model that was given, with all parameters whole on every rank, to generate with."""
    with GatheredParameters(model.parameters()):
        yield model


class _Whole:
    """The model as DeepSpeed's own functions see it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of other modules that it uses; they need not be known."""
        return iter(())


class ParameterOffload:
    """Stands for what gathers parameters in DeepSpeed, whose hooks programs remove before they generate.

    ZeroMesh's hooks do nothing to gathered parameters, so there are none to remove.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self.module = _Whole(sharded.model)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """Accept what puts DeepSpeed's hooks back."""

    _register_hooks_recursively = _register_deepspeed_module

    def empty_partition_cache(self) -> None:
        """Give up the memory of gathered parameters. Collective."""
        self._sharded.rest()

    partition_all_parameters = empty_partition_cache
