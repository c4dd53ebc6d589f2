"""Trial of an optimizer on small tensors: whether it updates pieces of a parameter as it updates the parameter."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeromesh.base.kernels.update_rules import update_class

_ELEMENTS = 6912  # as many as let quantized states of other libraries be quantized
_SHAPES: tuple[tuple[int, ...], ...] = ((_ELEMENTS,), (_ELEMENTS,), (72, 96), (8, 9, 96), (8, 9, 8, 12))
_CUT = 2503  # a prime: no multiple of a row or of a block

# Some rules act on numbers below or above some size only: gradients grow in each step, and begin small or large.
_GROWTH = 4.0
_SCALES = (1.0, _GROWTH**-7, _GROWTH**7)
# Others act from some step on, or in each tenth or hundredth: counters go on at another number.
_STEPS, _LATER = 7, 996

# What of the first parameter of a group, and of the others; and what two ranks may have of them.
_Cuts = tuple[slice | None, slice | None]
_WHOLE: _Cuts = (slice(None), slice(None))
_RANKS: tuple[_Cuts, ...] = ((None, slice(_CUT)), (slice(None), slice(_CUT, None)))


def require_pieces(optimizer: Optimizer) -> None:
    """Raise ValueError unless an optimizer updates pieces of parameters as whole ones, which a trial shows.

    Copies of it update small tensors, whole and as ranks have them: a mean over rows, a norm, a whole matrix, a block
    of quantized states or a place in a group makes another result of the parts.
    """
    kind = type(optimizer).__name__
    remedy = (
        "use ZeRO-0 (zero_optimization.stage = 0) without mesh.tensor and mesh.expert, or an optimizer that updates "
        "each element by itself, such as AdamW"
    )
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
    for scale in _SCALES:
        try:
            full_values, *parts = [_updated(optimizer, cuts, scale) for cuts in (_WHOLE, *_RANKS)]
        except Exception as error:  # whatever a class of somebody's raises
            raise ValueError(
                f"{kind} is not known to update each element by itself, as it must where parameters are sharded, and a "
                f"trial of it on small tensors failed ({type(error).__name__}: {error}): {remedy}"
            ) from error
        for number, value in full_values.items():
            pieces = torch.cat([part[number] for part in parts if number in part])
            if not torch.allclose(value, pieces, rtol=1e-5, atol=1e-6 * float(value.abs().max())):
                raise ValueError(
                    f"{kind} would be wrong on sharded parameters: it updates pieces of a parameter otherwise than all "
                    f"of it, as a trial on small tensors shows: {remedy}"
                )
        _require_change(kind, full_values, scale)


def require_groups(optimizer: Optimizer) -> None:
    """Raise ValueError if a step updates other parameters than the groups hold, which will be the fp32 masters."""
    try:
        full_values = _updated(optimizer, _WHOLE, 1.0)
    except Exception:  # of its step, which the first update raises, too
        return
    _require_change(type(optimizer).__name__, full_values, 1.0)


def _require_change(kind: str, updated: Mapping[int, torch.Tensor], scale: float) -> None:
    if all(torch.equal(value, _numbers(0, scale).to(value)) for value in updated.values()):
        raise ValueError(
            f"the step of {kind} changes nothing of the parameters in its param_groups, as a trial on small tensors "
            "shows: read self.param_groups in it, into which the engine puts what a rank updates, and no list of the "
            "parameters that the constructor was given"
        )


@torch.enable_grad()
def _updated(optimizer: Optimizer, cuts: _Cuts, scale: float) -> dict[int, torch.Tensor]:
    """Return the elements of small tensors, by number, after some steps of a copy of the optimizer."""
    with torch.random.fork_rng():
        small, members = _copied(optimizer, cuts, scale)
        for step in range(1, 1 + 2 * _STEPS):
            values = _numbers(step, scale * _GROWTH ** (step % _STEPS - 3))
            for cut, member in members.values():
                member.grad = values[cut].view_as(member).to(member, copy=True)
            small.step()
            if step == _STEPS:
                for place in (vars(small), *small.param_groups, *small.state.values()):
                    counters = {name: value for name, value in place.items() if _is_counter(value)}
                    place.update({name: value + (_LATER - _STEPS) for name, value in counters.items()})
    return {number: member.detach().flatten() for number, (_, member) in members.items()}


def _is_counter(value: Any) -> bool:
    is_number = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float)
    return is_number and float(value) == _STEPS


def _copied(optimizer: Optimizer, cuts: _Cuts, scale: float) -> tuple[Any, dict[int, tuple[slice, nn.Parameter]]]:
    """Return a copy of an optimizer over small tensors, or over cuts of them, and these by number."""
    small: Any = type(optimizer).__new__(type(optimizer))
    state: dict[nn.Parameter, dict[str, Any]] = defaultdict(dict)
    # By ``id``, as for ``deepcopy``: what is large is not copied, and parameters outside of the groups are none of it.
    memo: dict[int, Any] = {id(optimizer): small, id(optimizer.state): state}
    memo |= {id(p): nn.Parameter(torch.empty(0)) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        if name not in ("step", "zero_grad"):  # a schedule's, of the optimizer
            vars(small)[name] = OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value, memo)
    members: dict[int, tuple[slice, nn.Parameter]] = {}
    number = 0
    for group, original in zip(small.param_groups, optimizer.param_groups, strict=True):
        every = original["params"]
        # The first one, which a rank may lack, and one for each number of dims.
        examples = [*range(len(every))[:1], *{p.ndim: place for place, p in enumerate(every)}.values()]
        present = []
        for order, place in enumerate(examples):
            number += 1
            if (cut := cuts[min(order, 1)]) is not None:
                member = _small(every[place], cut, scale)
                state[member].update(_states(optimizer.state.get(every[place], {}), every[place].shape, member))
                members[number] = cut, member
                present.append((place, member))
        group["params"] = [member for _, member in present]
        if "param_names" in group:
            group["param_names"] = [original["param_names"][place] for place, _ in present]
        if group.get("lr") is not None:
            group["lr"] = 0.1  # a schedule may have begun at 0
    return small, members


def _small(like: nn.Parameter, cut: slice, scale: float) -> nn.Parameter:
    """Return a small parameter in the place of another one, or a cut of it, which is flat."""
    value = _numbers(0, scale)[cut].to("cpu" if like.is_meta else like.device)
    member = nn.Parameter(value.view(_SHAPES[min(like.ndim, 4)]) if cut == slice(None) else value)
    vars(member).update(vars(like))
    return member


def _states(states: Mapping[str, Any], shape: torch.Size, member: nn.Parameter) -> dict[str, Any]:
    """Return for a small parameter what an optimizer has made for one of a shape when it was built."""
    return {
        name: torch.full_like(member, float(value.flatten()[0]), requires_grad=False)
        if torch.is_tensor(value) and value.shape == shape and value.numel()
        else copy.deepcopy(value)
        for name, value in states.items()
    }


def _numbers(seed: int, scale: float) -> torch.Tensor:
    """Return random numbers, of another size at the end than at the beginning."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(_ELEMENTS, generator=generator) * torch.linspace(0.1 * scale, 8 * scale, _ELEMENTS)
