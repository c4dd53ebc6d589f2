"""Giving values to parameters that were made on the meta device: replayed from a recording, or initialised."""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from zeromesh.shard.parameters.deferred import Source, is_deferred, replayed, source_of

_log = logging.getLogger("zeromesh")

_REMEDY = (
    "build the model under zeromesh.zero.Init() instead of torch.device('meta'), or make it real, with its values, "
    "before initialize"
)


def materialiser(model: nn.Module, seed: int = 0) -> Callable[[str, nn.Parameter], Source | None]:
    """A function that makes a parameter real, in place, or returns the source where its values rest.

    Raises:
        ValueError: a parameter or buffer is left without a value.
    """
    without = _without_parameters(model)
    if unmade := names_without_values(model):
        _log.warning(
            "%d parameters and buffers are on the meta device, %s among them: their first values are drawn anew by "
            "torch's own rules or those of transformers; load a checkpoint, or %s",
            len(unmade),
            unmade[0],
            _REMEDY,
        )
    with torch.no_grad():
        for prefix, module in model.named_modules():
            _materialise_buffers(without, prefix, module, seed)

    def materialise(name: str, parameter: nn.Parameter) -> Source | None:
        source = source_of(parameter)
        if source is not None:
            replace(parameter, torch.empty(0, dtype=parameter.dtype))
        elif is_deferred(parameter):
            replace(parameter, replayed(parameter))
        elif parameter.device.type == "meta":
            # By its module's `reset_parameters`, and `_init_weights` of a module around it, as Hugging Face models have
            # it; each module is seeded by its name, so that the order, and what other ranks make, do not matter.
            path, _, last = name.rpartition(".")
            _require_known(without, path, name)
            values = _initialised(without, path, seed)
            _require_value(without, name, parameter, values[last])
            replace(parameter, values[last])
        return source

    return materialise


def names_without_values(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers on the meta device whose construction was not recorded."""
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in named if tensor.is_meta and not is_deferred(tensor)]


def refuse_without_values(model: nn.Module) -> None:
    """Raise ValueError if a parameter or buffer has no value."""
    if unmade := names_without_values(model):
        raise ValueError(f"{unmade[0]} of {type(model).__name__} is on the meta device, without a value; {_REMEDY}")


def replace(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Give a parameter a value, whatever its device is: the object stays the same."""
    # Not torch.utils.swap_tensors: it refuses where something refers to the parameter weakly, as an LSTM does.
    torch._C._swap_tensor_impl(parameter, nn.Parameter(value.detach(), requires_grad=parameter.requires_grad))


def _without_parameters(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters are on the meta device: initialisers of a module reach for those of its parts."""
    if not names_without_values(model):
        return model
    # What is not a parameter stays the same object: stand-ins of other stages, and results of autograd, have no copies.
    attributes = (value for module in model.modules() for value in vars(module).values())
    memo = {id(value): value for value in attributes if isinstance(value, torch.Tensor)}
    tensors = [*model.parameters(), *filter(is_deferred, model.buffers())]
    memo |= {id(tensor): torch.empty_like(tensor, device="meta") for tensor in tensors}
    return copy.deepcopy(model, memo)


def _materialise_buffers(model: nn.Module, path: str, module: nn.Module, seed: int) -> None:
    meta = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
    if not meta:
        return
    values = {} if all(map(is_deferred, meta.values())) else _initialised(model, path, seed)
    for name, buffer in meta.items():
        if not is_deferred(buffer):
            full = f"{path}.{name}".removeprefix(".")
            _require_known(model, path, full)
            _require_value(model, full, buffer, values[name])
        module._buffers[name] = replayed(buffer) if is_deferred(buffer) else values[name]


def _initialised(model: nn.Module, path: str, seed: int) -> dict[str, torch.Tensor]:
    """Values for a module's own parameters and buffers from its initialisers; the module stays as it is."""
    module = model.get_submodule(path)
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{path}".encode()).digest()[:7], "big"))
    with _without_values(module), torch.no_grad():
        for initialise in _initialisers(model, path):
            initialise()
        entries = [*module._parameters.items(), *module._buffers.items()]
        values = {name: tensor.detach() for name, tensor in entries if tensor is not None}
    generator.set_state(state)
    return values


@contextmanager
def _without_values(module: nn.Module) -> Iterator[None]:
    """Give the module real tensors of its own in this context, without values."""
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    for name, parameter in parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(_unset(parameter), requires_grad=parameter.requires_grad)
    for name, buffer in buffers.items():
        if buffer is not None:
            module._buffers[name] = _unset(buffer)
    try:
        yield
    finally:
        module._parameters.update(parameters)
        module._buffers.update(buffers)


def _unset(like: torch.Tensor) -> torch.Tensor:
    """Full of what no initialiser gives: NaN, or the least integer."""
    wide = like.is_floating_point() or like.is_complex()
    value = float("nan") if wide else 0 if like.dtype is torch.bool else torch.iinfo(like.dtype).min
    return torch.empty_like(like, device="cpu").fill_(value)


def _around(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the modules on the way to a module, the model first and the module last."""
    parts = path.split(".") if path else []
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]


def _is_of_transformers(around: list[nn.Module]) -> bool:
    return any(hasattr(module, "base_model_prefix") and hasattr(module, "_init_weights") for module in around)


def _require_known(model: nn.Module, path: str, name: str) -> None:
    """Raise ValueError unless the class of the module alone decides on its initial values, or transformers' model."""
    around = _around(model, path)
    if _is_of_transformers(around):
        return
    # A constructor may have given parameters of its parts any values, which are lost.
    others = [module for module in around if not type(module).__module__.startswith("torch.nn.")]
    others += [module for module in around[:-1] if isinstance(module, nn.Transformer | nn.MultiheadAttention)]
    if others:
        raise ValueError(
            f"{name} is on the meta device, and what the constructor of {type(others[0]).__name__} made of it is lost; "
            f"{_REMEDY}"
        )


def _require_value(model: nn.Module, name: str, like: torch.Tensor, value: torch.Tensor) -> None:
    """Raise ValueError if initialisers gave no value, or something has changed the tensor after they did."""
    unset, around = _unset(value), _around(model, name.rpartition(".")[0])
    if bool(((value == unset) | ((value != value) & (unset != unset))).any()):
        raise ValueError(
            f"{name} is on the meta device, and {type(around[-1]).__name__} has no reset_parameters that gives it a "
            f"value; {_REMEDY}"
        )
    # Torch counts changes in place, of which ``_unset`` made one.
    if like._version >= value._version and not _is_of_transformers(around):
        raise ValueError(f"{name} is on the meta device, and was changed there, which has no effect; {_REMEDY}")


def _initialisers(model: nn.Module, path: str) -> Iterator[Callable[[], Any]]:
    """Yield the functions that give a module its first values, in the order in which its constructor calls them."""
    around = _around(model, path)
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(around[-1], name, None)):
            yield getattr(around[-1], name)
    calls: list[Callable[[], Any]] = []
    initialise: Any = None
    for module in around:
        method = getattr(module, "_init_weights", None)
        initialise = method if callable(method) and len(inspect.signature(method).parameters) == 1 else initialise
        if initialise is not None:
            calls.append(partial(initialise, module))
    # From the inside out, as transformers calls them: a model may set weights of a module's parts.
    yield from reversed(calls)
