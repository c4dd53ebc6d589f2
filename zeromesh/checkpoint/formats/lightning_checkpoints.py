"""Checkpoints of Lightning: one file with the module's state dict, the optimizers' and the schedulers' states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.formats.form import Contents, group_options
from zeromesh.checkpoint.formats.pickles import read_tensors

Shapes = Mapping[str, tuple[int, ...]]

IsTrained = Callable[[str], bool | None]
"""True for a trained parameter, by its name; None for a tensor that is not a parameter."""


def read(path: Path, is_trained: IsTrained = bool) -> Contents:
    """Return the contents of a .ckpt file."""
    checkpoint = read_tensors(path)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ValueError(f"{path} has no 'state_dict', and is not a checkpoint of Lightning; name another file")
    contents = Contents("a Lightning checkpoint")
    state = contents.take_extra(checkpoint["state_dict"])
    contents.take(tied=shared_names(state))
    state = {name: tensor for name, tensor in state.items() if name not in contents.tied}
    for name, tensor in state.items():
        contents.add(f"parameter/{name}", tensor)
    optimizers = checkpoint.get("optimizer_states") or []
    if len(optimizers) > 1:
        contents.left.append(f"the states of {len(optimizers)} optimizers: an engine has one optimizer")
    elif optimizers:
        add_numbered(contents, state, optimizers[0], is_trained)
    schedulers = checkpoint.get("lr_schedulers") or []
    if len(schedulers) == 1:
        contents.scheduler = schedulers[0], None
    elif schedulers:
        contents.left.append(f"the states of {len(schedulers)} schedulers: an engine has one scheduler")
    contents.progress = {"global_steps": int(checkpoint.get("global_step", 0))}
    contents.client = {key: checkpoint[key] for key in ("epoch", "hyper_parameters") if checkpoint.get(key)}
    contents.left += [f"{key!r}, which only Lightning reads" for key in ("loops", "callbacks") if checkpoint.get(key)]
    return contents


def shared_names(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the first name of each tensor that a state dict has under several names, by the other names."""
    first: dict[Any, str] = {}
    # torch.save keeps which tensors share their memory.
    places = {name: (t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in state.items() if t.numel()}
    owners = {name: first.setdefault(place, name) for name, place in places.items()}
    return {name: owner for name, owner in owners.items() if owner != name}


def add_numbered(
    contents: Contents,
    state: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Any],
    is_trained: IsTrained,
    masters: Sequence[torch.Tensor] = (),
) -> dict[str, torch.Tensor]:
    """Take the state dict of an optimizer, which numbers the parameters of a model's state dict.

    ``masters`` are the values that it updates instead of them, in its order; they are returned by name.
    """
    states, groups = optimizer["state"], optimizer["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    values = dict(zip(numbers, masters, strict=False))
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if is_trained(name) is not None}
    like = {number: shape for number, entry in states.items() if (shape := _shape(entry))}
    names = names_by_number(shapes, groups, like | {number: tuple(v.shape) for number, v in values.items()}, is_trained)
    members = {names[number]: place for place, group in enumerate(groups) for number in group["params"]}
    contents.take(groups=[group_options(group) for group in groups], members=members)
    for number, entry in states.items():
        for key, value in entry.items():
            contents.add_state(names[number], key, value)
    return {names[number]: value for number, value in values.items()}


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of a parameter's states; None if there are only numbers."""
    return next((tuple(v.shape) for v in state.values() if isinstance(v, torch.Tensor) and v.ndim), None)


def names_by_number(
    shapes: Shapes, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, tuple[int, ...]], is_trained: IsTrained
) -> dict[Any, str]:
    """Return the names of the parameters that an optimizer's state knows by numbers, in the order of the state dict.

    ``shapes`` are those of the parameters by name, ``states`` those of the optimizer's states by number.
    """
    numbers = [number for group in groups for number in group["params"]]
    if all(group.get("param_names") for group in groups):
        return dict(zip(numbers, (name for group in groups for name in group["param_names"]), strict=True))
    # An optimizer has all parameters of the model, or those that are trained.
    for names in (list(shapes), [name for name in shapes if is_trained(name)]):
        by_number = _in_order({name: shapes[name] for name in names}, groups, states)
        if len(names) == len(numbers) and by_number is not None:
            return by_number
    raise ValueError(
        f"the optimizer has {len(numbers)} parameters in {len(groups)} groups and the state dict {len(shapes)} "
        "tensors, so that it is not known which are parameters and which are buffers, frozen or tied, or in which "
        "group; pass --model, make the optimizer of model.named_parameters() before it is saved, or pass --weights-only"
    )


def _in_order(
    shapes: Shapes, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, tuple[int, ...]]
) -> dict[Any, str] | None:
    """Return the names by number if only one choice keeps the model's order in each group; else None."""
    by_shape: dict[Any, list[tuple[int, Any]]] = {}
    for place, group in enumerate(groups):
        for number in group["params"]:
            # In one group the order tells also those that have no states yet.
            by_shape.setdefault(states.get(number) if len(groups) > 1 else 0, []).append((place, number))
    by_number: dict[Any, str] = {}
    for shape, numbers in by_shape.items():
        names = [name for name in shapes if len(groups) == 1 or shapes[name] == shape]
        # Of two groups with matrices of one shape, either could have a matrix.
        if len(names) != len(numbers) or len({place for place, _ in numbers}) > 1:
            return None
        by_number |= {number: name for (_, number), name in zip(numbers, names, strict=True)}
    order = {name: at for at, name in enumerate(shapes)}
    for group in groups:
        places = [order[by_number[number]] for number in group["params"]]
        if places != sorted(places) or any(
            states.get(number, shapes[by_number[number]]) != shapes[by_number[number]] for number in group["params"]
        ):
            return None
    return by_number
