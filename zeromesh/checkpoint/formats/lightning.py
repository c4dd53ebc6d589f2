"""Checkpoints of Lightning: one file with the module's state dict, the optimizers' and the schedulers' states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.formats.form import Contents, group_options
from zeromesh.checkpoint.formats.pickles import read_tensors

Shapes = Mapping[str, tuple[int, ...]]


def read(path: Path, is_parameter: Callable[[str], bool] = bool) -> Contents:
    """Return the contents of a .ckpt file; ``is_parameter`` tells a parameter from other tensors by its name."""
    held = read_tensors(path)
    if not isinstance(held, dict) or "state_dict" not in held:
        raise ValueError(f"{path} has no 'state_dict', and is no checkpoint of Lightning; name another file")
    contents = Contents("a Lightning checkpoint")
    for name, tensor in held["state_dict"].items():
        contents.add(f"parameter/{name}", tensor)
    optimizers = held.get("optimizer_states") or []
    if len(optimizers) > 1:
        contents.left.append(f"the states of {len(optimizers)} optimizers: an engine has one optimizer")
    elif optimizers:
        states, groups = optimizers[0]["state"], optimizers[0]["param_groups"]
        tensors = held["state_dict"].items()
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors if is_parameter(name)}
        like = {number: shape for number, state in states.items() if (shape := _shape(state))}
        names = names_by_number(shapes, groups, like)
        contents.groups = [group_options(group) for group in groups]
        for number, group in enumerate(groups):
            contents.members |= {names[one]: number for one in group["params"]}
        for one, state in states.items():
            for key, value in state.items():
                contents.add_state(names[one], key, value)
    schedulers = held.get("lr_schedulers") or []
    if len(schedulers) == 1:
        contents.scheduler = schedulers[0], None
    elif schedulers:
        contents.left.append(f"the states of {len(schedulers)} schedulers: an engine has one scheduler")
    contents.progress = {"global_steps": int(held.get("global_step", 0))}
    contents.client = {key: held[key] for key in ("epoch", "hyper_parameters") if held.get(key)}
    contents.left += [f"{key!r}, which only Lightning reads" for key in ("loops", "callbacks") if held.get(key)]
    return contents


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of a parameter's states; None if there are only numbers."""
    return next((tuple(v.shape) for v in state.values() if isinstance(v, torch.Tensor) and v.ndim), None)


def names_by_number(
    shapes: Shapes, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, tuple[int, ...]]
) -> dict[Any, str]:
    """Return the names of the parameters that an optimizer's state knows by numbers, in the order of the state dict.

    ``shapes`` are those of the parameters by name, ``states`` those of the optimizer's states by number.
    """
    numbers = [number for group in groups for number in group["params"]]
    if all(group.get("param_names") for group in groups):
        return dict(zip(numbers, (name for group in groups for name in group["param_names"]), strict=True))
    if len(groups) > 1:
        # Its numbers follow the groups, and no file says how the script made those.
        raise ValueError(
            f"the optimizer has {len(groups)} parameter groups without the names of their parameters; make it of "
            "model.named_parameters() before it is saved, or pass --weights-only"
        )
    return dict(zip(numbers, _in_order(shapes, [states.get(number) for number in numbers]), strict=True))


def _in_order(shapes: Shapes, wanted: Sequence[tuple[int, ...] | None]) -> list[str]:
    """Return the names of tensors with these shapes, in order; raise ValueError if more than one choice fits."""
    names = list(shapes)
    # Buffers, frozen and tied parameters may be among the tensors. With as many as there are states all is clear.
    spare = len(names) - len(wanted)
    if spare == 0 and all(shape in (None, shapes[name]) for shape, name in zip(wanted, names, strict=True)):
        return names
    raise ValueError(
        f"the optimizer has {len(wanted)} parameters and the state dict {len(names)} tensors, so that it is not known "
        "which are parameters and which are buffers, frozen or tied; pass --model, or --weights-only"
    )
