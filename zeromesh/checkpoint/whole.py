"""Whole model on one rank or on all, gathered from the stages of a pipeline; with one stage nothing is sent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from zeromesh.base.buffer_memory import is_extra
from zeromesh.base.words import some
from zeromesh.checkpoint.contents import extra_modules, own_buffers, plain_names
from zeromesh.checkpoint.packing import Move, broadcast_value, move_tensors
from zeromesh.comm.agreement import agree_run
from zeromesh.comm.collectives import Group
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.parameters.unit import Unit
from zeromesh.shard.sharded import ShardedModel
from zeromesh.shard.tables.table import Table

_log = logging.getLogger(__name__)

State = dict[str, torch.Tensor]

Places = Mapping[int, tuple[Sequence[str], torch.Tensor]]
"""Names of tensors in what is shown, and what is shown of them, by their ``id``; a part of a tensor stands for it."""


Together = Callable[[Unit | Table], Sequence[Unit | Table]]
"""Units that are whole at once with one of them."""


class To(Enum):
    """Ranks that get tensors of all stages."""

    FIRST = "the first rank"
    EVERY = "every rank"


STATE_TAG = 12  # tag on the pipeline axis of tensors that are shown or saved whole


def of_all_stages(mesh: Mesh, values: Mapping[str, Any]) -> dict[str, Any]:
    """Merge values by name over all stages, such as extra state; the first stage that has a name counts. Collective."""
    if mesh.sizes["pipeline"] == 1:
        return dict(values)
    merged: dict[str, Any] = {}
    for place in range(mesh.sizes["pipeline"]):
        part = broadcast_value(values, place, mesh.group("pipeline"))
        merged |= {name: value for name, value in part.items() if name not in merged}
    return merged


def shows(mesh: Mesh, to: To) -> bool:
    """Return whether this rank's tensors are shown: it is such a rank, or sends its stage there."""
    # Other pipelines have the same stages, but gathering within a stage is for all of its ranks.
    return to is To.EVERY or 0 in _line(mesh)


def shown_states(mesh: Mesh, to: To, states: Iterable[State]) -> Iterator[State]:
    """Yield the tensors of all stages on some ranks, one of the ``states`` at a time, as they are there.

    Those of other stages are on the CPU of the first rank, or on the device of every rank. All ranks call it and go
    through it to its end.
    """
    group, line = mesh.group("pipeline"), _line(mesh)
    sends = group.size > 1 and (to is To.EVERY or (0 in line and mesh.rank != 0))
    for place in range(group.size):
        is_here = place == group.rank
        if to is To.EVERY:
            move: Move = partial(group.broadcast, root=place)
        else:
            move = partial(_point_to_point, group, line.index(0) if is_here and sends else place, is_here)
        if is_here:
            for state in filter(None, states):  # an empty one would end the series
                if sends:
                    _send(move, mesh.device, state)
                if to is To.EVERY or mesh.rank == 0:
                    yield state
            if sends:
                _send(move, mesh.device, {})
        elif to is To.EVERY or mesh.rank == 0:
            while state := dict(move_tensors(move, mesh.device, None)):
                yield state if to is To.EVERY else {name: value.cpu() for name, value in state.items()}


def _line(mesh: Mesh) -> list[int]:
    """Return the ranks of this one's pipeline, by their place along it."""
    return next(line for line in mesh.lines("pipeline") if mesh.rank in line)


def _point_to_point(group: Group, peer: int, sends: bool, message: torch.Tensor) -> None:
    """Send a message to a rank of the pipeline, or receive it from there."""
    sent, received = ({peer: message}, {}) if sends else ({}, {peer: message})
    group.send_and_receive(sent, received, STATE_TAG, "whole tensors").wait()


def _send(move: Move, device: torch.device, state: State) -> None:
    """Send tensors to other ranks of the pipeline; an empty state ends the series."""
    for _ in move_tensors(move, device, state):
        pass


def whole_units(
    sharded: ShardedModel, together: Together | None = None, of_first: bool = True
) -> Iterator[list[torch.Tensor]]:
    """Yield the parameters of each unit, whole until the next unit is taken. All ranks go through it to its end.

    ``of_first`` leaves out what an earlier stage has, too.
    """
    # One at a time, so that no rank holds the whole model on its device.
    for unit in sharded.parts:
        with sharded.gathered([unit] if together is None else together(unit)):
            flats = [flat for flat in unit.flats if not of_first or sharded.is_first(flat)]
            yield [parameter for flat in flats for parameter in flat.parameters]


def keys_of(model: nn.Module) -> tuple[dict[int, list[str]], dict[str, Any]]:
    """Return the keys of the model's state dict by ``id`` of the tensor, and what it has beside parameters and buffers.

    Hooks of modules rename some and leave out others.
    """
    members = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    keys: dict[int, list[str]] = {}
    others = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if id(value) in members:
            keys.setdefault(id(value), []).append(key)
        else:
            others[key] = value
    return keys, others


def file_names(model: nn.Module, hooks: bool = True) -> Callable[[str], str | None]:
    """Return a function of a tensor's name in the model that returns its name in files; None for one without."""
    plain, keys = plain_names(model), keys_of(model)[0] if hooks else {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    choices = {name: keys.get(id(tensor), []) for name, tensor in tensors} if hooks else {}

    def named(name: str) -> str | None:
        choice = choices.get(name, [name])
        return plain(name if name in choice else choice[0]) if choice else None  # of tied ones, the name stays

    return named


def tensor_states(sharded: ShardedModel) -> State:
    """Return the extra state of modules by name, of those where it is a tensor; tell of others, which files lack."""
    states = {name: module.get_extra_state() for name, module in extra_modules(sharded).items()}
    others = [name for name, state in states.items() if not isinstance(state, torch.Tensor)]
    if others:
        _log.warning("%s is not a tensor, and not written to safetensors; save_checkpoint() keeps it", some(others))
    return {name: state for name, state in states.items() if name not in others}


def tensors(
    sharded: ShardedModel,
    to: To,
    places: Places,
    copy: Callable[[State], State],
    together: Together | None = None,
    others: State | None = None,
) -> Iterator[State]:
    """Yield the model's whole tensors on some ranks, those of one unit at a time, then the buffers.

    All ranks call it and go through it to its end. Tied tensors come once, from the first stage that has them.

    Args:
        sharded: the model.
        to: the ranks that get them: the first one on the CPU, every one on its device.
        places: of tensors that are shown; others are left out.
        copy: returns what is yielded of a unit's tensors, whose values are there until it returns.
        together: gives the units that are whole at once.
        others: what is yielded at the end, beside parameters and buffers.
    """
    shown = shows(sharded.mesh, to)

    def states() -> Iterator[State]:
        for members in chain(whole_units(sharded, together), [[buffer for _, buffer in own_buffers(sharded)]]):
            entries = (places[id(tensor)] for tensor in members if id(tensor) in places)
            yield copy({name: tensor for names, tensor in entries for name in names}) if shown else {}
        if others:
            yield copy(others) if shown else {}

    return shown_states(sharded.mesh, to, states())


def gathered_state_dict(sharded: ShardedModel) -> State:
    """Return whole parameters and buffers as CPU tensors, and extra state, on rank 0, {} elsewhere."""
    state = State()
    keys, others = keys_of(sharded.model)
    members = {id(tensor): tensor for tensor in (*sharded.model.parameters(), *sharded.model.buffers())}
    places = {key: (names[:1], members[key]) for key, names in keys.items()}
    for part in tensors(sharded, To.FIRST, places, copied):
        state |= part
    names = of_all_stages(sharded.mesh, {name: some[0] for some in keys.values() for name in some[1:]})
    extra = of_all_stages(sharded.mesh, {k: value for k, value in others.items() if k not in sharded.idle})
    return state | {name: state[saved_name] for name, saved_name in names.items()} | extra if state else state


def copied(state: State) -> State:
    """Return copies on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}


def parameter_copies(sharded: ShardedModel) -> dict[int, torch.Tensor]:
    """Return copies of the whole parameters of this stage, by their ``id``. Collective."""
    copies: dict[int, torch.Tensor] = {}
    for members in whole_units(sharded, of_first=False):
        copies |= {id(parameter): parameter.detach().clone() for parameter in members}
    return copies


def add_stages(sharded: ShardedModel, state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return this rank's state dict with the tensors of the other stages. Collective."""
    here = {name: value for name, value in state.items() if name.removeprefix(prefix) not in sharded.idle}
    members = {n: value for n, value in here.items() if isinstance(value, torch.Tensor) and not is_extra(n)}
    extra = of_all_stages(sharded.mesh, {name: value for name, value in here.items() if is_extra(name)})
    every = State()
    for part in shown_states(sharded.mesh, To.EVERY, [members]):
        every |= part | every  # the first stage with a name counts
    return state | every | extra


def load_here(sharded: ShardedModel, state: Mapping[str, Any], strict: bool) -> Any:
    """Load a state of all stages, as the model's own ``load_state_dict``. Collective; all ranks raise."""
    here = dict.fromkeys(sharded.model.state_dict(keep_vars=True))
    if sharded.mesh.sizes["pipeline"] == 1:
        result = sharded.model.load_state_dict(state, strict)
        if state and here and len(result.unexpected_keys) == len(state):
            raise RuntimeError(
                f"nothing was loaded: the state has {some(state, 'names')}, and the model {some(here, 'names')}; pass "
                "the model's own names"
            )
        return result
    # Torch would call tensors of other stages unexpected, and miss none of them.
    elsewhere = of_all_stages(sharded.mesh, here).keys() - here.keys()
    mine = {name: value for name, value in state.items() if name not in elsewhere}
    world = sharded.mesh.group("world")
    result = agree_run(world, "load its part of the state", lambda: sharded.model.load_state_dict(mine, strict=False))
    result.missing_keys.extend(sorted(elsewhere - state.keys()))
    if strict and (result.missing_keys or result.unexpected_keys):
        lacks, has = (some(names, "names", most=20) or "nothing" for names in result[:2])
        raise RuntimeError(
            f"the state lacks {lacks}, and has {has} that the model does not; strict=False takes what is in both"
        )
    return result
