"""Trial of an optimizer on small tensors: whether it updates pieces of a parameter as it updates the parameter."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeromesh.config.keys import UNSHARDED
from zeromesh.kernels.rules import update_class

_STEPS = 3
_ELEMENTS = 6912  # as many as let quantized states of other libraries be quantized
_SHAPES: tuple[tuple[int, ...], ...] = ((_ELEMENTS,), (_ELEMENTS,), (72, 96), (8, 9, 96), (8, 9, 8, 12))
_CUT = 2500  # no multiple of a row or of a usual block


def require_pieces(optimizer: Optimizer) -> None:
    """Raise ValueError unless an optimizer updates pieces of parameters as whole ones, which a trial shows.

    Copies of it update small tensors, whole and in two parts: a mean over rows, a norm, a whole matrix or a block of
    quantized states makes another result of the parts.
    """
    kind = type(optimizer).__name__
    remedy = f"use {UNSHARDED}, or an optimizer that updates each element by itself, such as AdamW"
    if all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
        raise ValueError(
            f"the train() and eval() of {kind} exchange weights, of which each rank has pieces where they are sharded: "
            f"{remedy}"
        )
    if update_class(optimizer) is Optimizer:
        raise ValueError(
            f"a method of this {kind} was replaced in the object itself, and would be given pieces of parameters: put "
            f"it into a subclass, whose update of pieces can be tried, or {remedy}"
        )
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            (joint,), parts = _updated(optimizer, [slice(None)]), _updated(optimizer, [slice(_CUT), slice(_CUT, None)])
    except Exception as error:  # whatever a class of somebody's raises
        raise ValueError(
            f"{kind} is not known to update each element by itself, as it must where parameters are sharded, and a "
            f"trial of it on small tensors failed ({type(error).__name__}: {error}): {remedy}"
        ) from error
    for number, value in enumerate(joint):
        pieces = torch.cat([part[number] for part in parts])
        if not torch.allclose(value.flatten(), pieces, rtol=1e-3, atol=1e-5):
            raise ValueError(
                f"{kind} would be wrong on sharded parameters: it updates pieces of a parameter otherwise than all of "
                f"it, as a trial on small tensors shows: {remedy}"
            )


def _updated(optimizer: Optimizer, cuts: Sequence[slice]) -> list[list[torch.Tensor]]:
    """Return small tensors, a list for each cut, after some steps of a copy of the optimizer."""
    found = []
    for cut in cuts:
        small = _copied(optimizer, cut)
        members = [parameter for group in small.param_groups for parameter in group["params"]]
        for step in range(_STEPS):
            for parameter, gradient in zip(members, _numbers(members, cut, 1 + step), strict=True):
                parameter.grad = gradient
            small.step()
        if all(torch.equal(one, value) for one, value in zip(members, _numbers(members, cut, 0), strict=True)):
            raise RuntimeError("its step changed nothing")
        found.append([parameter.detach() for parameter in members])
    return found


def _copied(optimizer: Optimizer, cut: slice) -> Any:
    """Return a copy of an optimizer over small tensors, one for each number of dims in a group."""
    # By ``id``, as for ``deepcopy``: parameters and their states are not copied, wherever the optimizer holds them.
    memo: dict[int, Any] = {}
    groups = []
    for group in optimizer.param_groups:
        chosen: dict[int, nn.Parameter] = {}
        for parameter in group["params"]:
            dims = min(parameter.ndim, len(_SHAPES) - 1)
            if dims not in chosen:
                like = torch.empty(_ELEMENTS, device="cpu" if parameter.is_meta else parameter.device)[cut]
                chosen[dims] = nn.Parameter(like.view(_SHAPES[dims]) if cut == slice(None) else like)
            memo[id(parameter)] = chosen[dims]
            for value in optimizer.state.get(parameter, {}).values():
                if torch.is_tensor(value) and value.shape == parameter.shape and value.numel():
                    memo[id(value)] = value.new_full(memo[id(parameter)].shape, float(value.flatten()[0]))
        groups.append([*chosen.values()])
    small: Any = type(optimizer).__new__(type(optimizer))
    memo[id(optimizer)] = small
    skipped = {name for name in vars(optimizer) if name.endswith("_hooks")}
    methods = {name for name in vars(optimizer) if name in ("step", "zero_grad")}  # a schedule's, of the optimizer
    vars(small).update({k: copy.deepcopy(v, memo) for k, v in vars(optimizer).items() if k not in skipped | methods})
    vars(small).update({name: OrderedDict() for name in skipped})
    for group, members in zip(small.param_groups, groups, strict=True):
        group["params"] = members
        if isinstance(group.get("lr"), float | int):
            group["lr"] = 0.1  # a schedule may have begun at 0
    members = [parameter for group in groups for parameter in group]
    for parameter, value in zip(members, _numbers(members, cut, 0), strict=True):
        parameter.data.copy_(value)
    return small


def _numbers(members: Sequence[nn.Parameter], cut: slice, seed: int) -> list[torch.Tensor]:
    """Return the elements of a cut of random numbers, of another size at the end than at the beginning."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.linspace(0.1, 8, _ELEMENTS)
    return [(torch.randn(_ELEMENTS, generator=generator) * size)[cut].view_as(one).to(one) for one in members]
