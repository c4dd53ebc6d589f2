"""Layers that give parts of activations, and layers that take them, with the ends of the code between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from zeromesh.base.dry.model_copy import files_of
from zeromesh.base.split import Split
from zeromesh.base.substitution import of_library
from zeromesh.parallel.follow.split_activation import (
    Sealed,
    SplitActivation,
    SplitDim,
    TensorAxis,
    part_of,
    refusing,
    whole,
)
from zeromesh.parallel.follow.split_rules import as_split
from zeromesh.parallel.tensor.operators import move
from zeromesh.parallel.tensor.split_plan import CONTAINERS, Member, SplitPlan


class LeavingParts:
    """End of the outputs of a layer split by columns: gathered, at once or when something needs the whole."""

    def __init__(self, member: Member, split: Split, axis: TensorAxis) -> None:
        self._size, self._axis = split.size, axis
        self._sections, self._sources = member.rule.sections or (split.size,), frozenset([member.name])
        self._padded = split.size < split.length * axis.size
        self._keeps = member.style.follows and not self._padded

    def __call__(self, y: Tensor, at_once: bool) -> Tensor:
        """Return the whole, or this rank's part in its place."""
        if self._padded:
            return move(y, "join", self._axis.group, self._axis.tag, -1)[..., : self._size]
        split_dim = SplitDim(y.ndim - 1, self._sections, self._sources)
        return as_split(y, split_dim, self._axis) if self._keeps and not at_once else self._axis.gather(y, split_dim)


class TakingParts:
    """Begin of the inputs of a layer split by rows, which are whole, or parts already."""

    def __init__(self, member: Member, split: Split, axis: TensorAxis) -> None:
        self._name, self._style, self._axis = member.name, member.rule.style, axis
        self._size, self._padding = split.size, split.length * axis.size - split.size
        self._sections = member.rule.sections or (split.size,)

    def __call__(self, x: Tensor) -> Tensor:
        """Return this rank's part. Raise ValueError for another width than that of the layer."""
        split_dim = SplitDim(x.ndim - 1, self._sections)
        if isinstance(x, SplitActivation):
            if x.split_dim == replace(split_dim, sources=x.split_dim.sources):
                return part_of(x)
            x = whole(x)
        if x.shape[-1] != self._size:
            raise ValueError(
                f"{self._name}, of the style {self._style}, reads {self._size} entries, but was given {x.shape[-1]}; "
                "what comes before it must be whole, as of the style colwise_gather_output, or know that it is a part, "
                "as of colwise_parts"
            )
        if not self._padding:
            return self._axis.take(x, split_dim)
        return move(pad(x, (0, self._padding)), "split", self._axis.group, self._axis.tag, -1)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let a module compute by another function; the module, which users and the engine hold, stays the same object."""
    if isinstance(forward, partial):
        update_wrapper(forward, module.forward, assigned=(), updated=())  # libraries ask for its signature
    module.forward = forward


def join_parts(
    resolved: SplitPlan, modules: dict[str, nn.Module], blocks: Collection[str], ends: Iterable[str]
) -> None:
    """Let no part of an activation leave the block around the layer that gives it, nor reach other split modules."""
    layers = [member.name for member in resolved.members if member.style.follows and member.style.cut == "outputs"]
    if not layers:
        return
    guard_functions({type(module) for module in modules.values() if not of_library(module)})
    # Code outside of a pipeline's blocks hands its values to several stages.
    outside = [name for name in layers if blocks and not any(f"{name}.".startswith(f"{block}.") for block in blocks)]
    around = [_block_around(name, modules) for name in layers]
    for name in dict.fromkeys(around):
        # torch's compiler takes the shape of a part for that of the whole.
        replace_forward(modules[name], partial(torch.compiler.disable(_run), modules[name].forward))
    # The model's own output, too: transformers' models take activations out of their blocks by hooks.
    for name in dict.fromkeys([*blocks, *ends, *outside, *around, ""]):
        modules[name].register_forward_hook(torch.compiler.disable(_whole_output))
    for member in resolved.members:
        if member.parameter is None and member.kind != "linear":
            member.module.register_forward_pre_hook(torch.compiler.disable(_whole_inputs), with_kwargs=True)


def guard_functions(kinds: Collection[type]) -> None:
    """Let functions of torch without an override protocol refuse parts, also where modules import them."""
    setattr(torch.Tensor, "_make_subclass", staticmethod(_MAKE_SUBCLASS))  # noqa: B010
    for file in (torch, torch._C, torch.utils.dlpack, *files_of(kinds)):
        for name in [name for name, function in vars(file).items() if function is _TO_DLPACK.__wrapped__]:
            setattr(file, name, _TO_DLPACK)


_MAKE_SUBCLASS = refusing(torch.Tensor._make_subclass)
_TO_DLPACK: Any = refusing(torch._C._to_dlpack)


def _block_around(name: str, modules: dict[str, nn.Module]) -> str:
    """Return the name of the block that a layer is in, or of the part of the model."""
    around = name.rpartition(".")[0]
    while "." in around and not isinstance(modules[around.rpartition(".")[0]], CONTAINERS):
        around = around.rpartition(".")[0]
    return around


def _run(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    # Functions that the block's own code has compiled, too.
    try:
        with torch.compiler.set_stance("force_eager"), Sealed():
            return forward(*args, **kwargs)
    except Exception as error:
        if type(error).__module__.startswith("torch._dynamo."):
            error.add_note(
                "layers that are split send messages, which torch's compiler cannot trace, as torch.cond does: write "
                "the condition as an if, or in tensor_parallel.plan give the layers inside of it the style replicate"
            )
        raise


def _whole_output(module: nn.Module, args: Any, output: Any) -> Any:
    return whole(output)


def _whole_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return whole(args), whole(kwargs)
