"""Giving values to parameters that were made on the meta device: replayed from a recording, or initialised."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from zeromesh.shard.deferred import Source, is_deferred, replayed, source_of


def materialiser(model: nn.Module, seed: int = 0) -> Callable[[str, nn.Parameter], Source | None]:
    """A function that makes a parameter real, in place, or returns the source where its values rest.

    Raises:
        ValueError: a parameter or buffer is left without a value.
    """
    with torch.no_grad():
        for prefix, module in model.named_modules():
            _materialise_buffers(model, prefix, module, seed)

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
            _require_known(model, path, name)
            values = _initialised(model, path, seed)
            _require_value(model, name, values[last])
            replace(parameter, values[last])
        return source

    return materialise


def replace(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Give a parameter a value, whatever its device is: the object stays the same."""
    # Not torch.utils.swap_tensors: it refuses where something refers to the parameter weakly, as an LSTM does.
    torch._C._swap_tensor_impl(parameter, nn.Parameter(value.detach(), requires_grad=parameter.requires_grad))


def _materialise_buffers(model: nn.Module, path: str, module: nn.Module, seed: int) -> None:
    meta = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
    if not meta:
        return
    values = {} if all(map(is_deferred, meta.values())) else _initialised(model, path, seed)
    for name, buffer in meta.items():
        if not is_deferred(buffer):
            full = f"{path}.{name}".removeprefix(".")
            _require_known(model, path, full)
            _require_value(model, full, values[name])
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
        own = [*module._parameters.items(), *module._buffers.items()]
        values = {name: tensor.detach() for name, tensor in own if tensor is not None}
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


def _require_known(model: nn.Module, path: str, name: str) -> None:
    """Raise ValueError unless the class of the module alone decides on its initial values, or transformers' model."""
    parts = path.split(".") if path else []
    around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
    if any(hasattr(one, "base_model_prefix") and hasattr(one, "_init_weights") for one in around):
        return
    # A constructor may have given parameters of its parts any values, which are lost.
    others = [one for one in around if not type(one).__module__.startswith("torch.nn.")]
    others += [one for one in around[:-1] if isinstance(one, nn.Transformer | nn.MultiheadAttention)]
    if others:
        raise ValueError(
            f"{name} is on the meta device, and what the constructor of {type(others[0]).__name__} made of it is lost; "
            "build the model under zeromesh.zero.Init() instead of torch.device('meta'), or make it real, with its "
            "values, before initialize"
        )


def _require_value(model: nn.Module, name: str, value: torch.Tensor) -> None:
    unset = _unset(value)
    if not bool(((value == unset) | ((value != value) & (unset != unset))).any()):
        return
    path = name.rpartition(".")[0]
    raise ValueError(
        f"{name} is on the meta device, and {type(model.get_submodule(path)).__name__} has no reset_parameters that "
        "gives it a value; build the model under zeromesh.zero.Init() instead of torch.device('meta')"
    )


def _initialisers(model: nn.Module, path: str) -> Iterator[Callable[[], Any]]:
    """Return the functions that give a module its first values, in the order in which its constructor calls them."""
    module = model.get_submodule(path)
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(module, name, None)):
            yield getattr(module, name)
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        around = getattr(model.get_submodule(".".join(parts[:depth])), "_init_weights", None)
        if callable(around) and len(inspect.signature(around).parameters) == 1:
            yield partial(around, module)
            return
