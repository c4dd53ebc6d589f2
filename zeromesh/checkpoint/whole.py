"""Whole model on one rank or on all, gathered from the stages of a pipeline; with one stage nothing is sent."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from zeromesh.base.buffer_memory import is_extra
from zeromesh.base.words import some
from zeromesh.checkpoint.contents import extra_modules, own_buffers, plain_names
from zeromesh.checkpoint.packing import Move, broadcast_value, move_tensors
from zeromesh.comm.agreement import agree_run, texts
from zeromesh.comm.collectives import Group
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.parameters.unit import Unit
from zeromesh.shard.sharded import ShardedModel
from zeromesh.shard.tables.table import Table

_log = logging.getLogger(__name__)

State = dict[str, torch.Tensor]

STATE_TAG = 12  # tag on the pipeline axis of tensors that are shown or saved whole


def of_all_stages(mesh: Mesh, values: Mapping[str, Any]) -> dict[str, Any]:
    """Merge JSON values by name over all stages; the first stage that has a name counts. Collective."""
    if mesh.sizes["pipeline"] == 1:
        return dict(values)
    merged: dict[str, Any] = {}
    for text in texts(mesh.group("pipeline"), json.dumps(values)):
        # Tied tensors are on several stages.
        merged = merged | {name: value for name, value in json.loads(text).items() if name not in merged}
    return merged


def on_all_ranks(mesh: Mesh, stage_state: State) -> State:
    """Return the tensors of all stages, copies of those of others; the first stage with a name counts. Collective."""
    state = State()
    for part in on_every_rank(mesh, [stage_state]):
        state |= part | state
    return state


def shows(mesh: Mesh) -> bool:
    """Return whether this rank takes part in ``on_first_rank``: it is the first rank, or sends its stage there."""
    return 0 in _line(mesh)


def on_first_rank(mesh: Mesh, states: Iterable[State]) -> Iterator[State]:
    """Yield the tensors of all stages on the first rank, one of the ``states`` at a time; empty ones elsewhere.

    All ranks call it and go through it to its end.
    """
    ranks = _line(mesh)
    # Other pipelines have the same stages, but gathering within a stage is for all of its ranks.
    if ranks == [0] or 0 not in ranks:
        yield from states
        return
    group, first = mesh.group("pipeline"), ranks.index(0)
    if mesh.rank != 0:
        send = partial(_point_to_point, group, first, True)
        for state in states:
            # An empty state would end the series.
            if state:
                _send(send, mesh.device, state)
            yield {}
        _send(send, mesh.device, {})
        return
    for place in range(group.size):
        if place == first:
            yield from states
            continue
        while state := dict(move_tensors(partial(_point_to_point, group, place, False), mesh.device, None)):
            yield {name: value.cpu() for name, value in state.items()}


def on_every_rank(mesh: Mesh, states: Iterable[State]) -> Iterator[State]:
    """Yield the tensors of all stages on every rank, one of the ``states`` at a time; values are on the device.

    All ranks call it and go through it to its end.
    """
    group = mesh.group("pipeline")
    for place in range(group.size):
        move = partial(group.broadcast, root=place)
        if place != group.rank:
            while state := dict(move_tensors(move, mesh.device, None)):
                yield state
            continue
        for state in filter(None, states):
            if group.size > 1:
                _send(move, mesh.device, state)
            yield state
        if group.size > 1:
            _send(move, mesh.device, {})


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
    sharded: ShardedModel, together: Callable[[Unit | Table], Sequence[Unit | Table]] = lambda unit: [unit],
    of_first: bool = True,
) -> Iterator[list[torch.Tensor]]:  # fmt: skip
    """Yield the parameters of each unit, whole until the next unit is taken. All ranks go through it to its end.

    ``together`` gives the units that are whole at once; ``of_first`` leaves out what an earlier stage has, too.
    """
    # One at a time, so that no rank holds the whole model on its device.
    for unit in sharded.parts:
        with sharded.gathered(together(unit)):
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
        _log.warning("%s is no tensor, and not written to safetensors; save_checkpoint() keeps it", some(others))
    return {name: state for name, state in states.items() if name not in others}


def extra_of_all_stages(mesh: Mesh, states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra state of modules of all stages, by name. Collective."""
    if mesh.sizes["pipeline"] == 1:
        return dict(states)
    extra: dict[str, Any] = {}
    for place in range(mesh.sizes["pipeline"]):
        extra = broadcast_value(states, place, mesh.group("pipeline")) | extra  # the first stage with a name counts
    return extra


def gathered_state_dict(sharded: ShardedModel) -> State:
    """Return whole parameters and buffers as CPU tensors, and extra state, on rank 0, {} elsewhere."""
    state = State()
    keys, others = keys_of(sharded.model)
    for part in on_first_rank(sharded.mesh, _shown(sharded, keys)):
        state |= part
    names = of_all_stages(sharded.mesh, {name: some[0] for some in keys.values() for name in some[1:]})
    extra = extra_of_all_stages(sharded.mesh, {k: value for k, value in others.items() if k not in sharded.idle})
    return state | {name: state[saved_name] for name, saved_name in names.items()} | extra if state else state


def _shown(sharded: ShardedModel, keys: Mapping[int, list[str]]) -> Iterator[State]:
    """Yield the tensors of this rank's stage, by their first ``keys``, on the ranks that show them."""
    shown = shows(sharded.mesh)
    for members in chain(whole_units(sharded), [[buffer for _, buffer in own_buffers(sharded)]]):
        chosen = [tensor for tensor in members if shown and id(tensor) in keys]
        yield {keys[id(tensor)][0]: tensor.detach().to("cpu", copy=True) for tensor in chosen}


def add_stages(sharded: ShardedModel, state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return this rank's state dict with the tensors of the other stages. Collective."""
    tensors = {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name.removeprefix(prefix) not in sharded.idle and not is_extra(name)
    }
    here = {name: v for name, v in state.items() if is_extra(name) and name.removeprefix(prefix) not in sharded.idle}
    extra = extra_of_all_stages(sharded.mesh, here)
    return state | on_all_ranks(sharded.mesh, tensors) | extra


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
