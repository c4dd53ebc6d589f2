"""The whole model on one rank, or on all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zeromesh.checkpoint.contents import own_buffers, tied
from zeromesh.checkpoint.fit import some
from zeromesh.checkpoint.stages import State, of_all_stages, on_all_ranks, on_first_rank, shows
from zeromesh.comm.agreement import agree_run
from zeromesh.shard.sharded import ShardedModel


def gathered_state_dict(sharded: ShardedModel) -> State:
    """Whole parameters and buffers as CPU tensors on rank 0, empty elsewhere; one unit is gathered at a time."""
    found = State()
    for state in on_first_rank(sharded.mesh, _parts(sharded)):
        found |= state
    names = of_all_stages(sharded.mesh, tied(sharded))
    return found | {name: found[own] for name, own in names.items()} if found else found


def _parts(sharded: ShardedModel) -> Iterator[State]:
    """Return the tensors of this rank's stage, on the ranks that show them."""
    shown = shows(sharded.mesh)
    for unit in sharded.units:
        with sharded.gathered([unit]):
            flats = filter(sharded.is_first, unit.flats) if shown else ()
            members = [parameter for flat in flats for parameter in flat.parameters]
            state = {sharded.names[id(parameter)]: parameter.detach().cpu().clone() for parameter in members}
        yield state
    yield {name: buffer.detach().cpu().clone() for name, buffer in own_buffers(sharded) if shown}


def add_stages(sharded: ShardedModel, state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """This rank's state dict with the tensors of the other stages. All ranks call it."""
    own = {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name.removeprefix(prefix) not in sharded.idle
    }
    return state | on_all_ranks(sharded.mesh, own)


def load_here(sharded: ShardedModel, state: Mapping[str, Any], strict: bool) -> Any:
    """Load a state of all stages, as the model's own ``load_state_dict``. Collective; all ranks raise.

    Raises:
        RuntimeError: with ``strict``, names are missing or unknown; or a tensor does not fit.
    """
    if sharded.mesh.sizes["pipeline"] == 1:
        return sharded.model.load_state_dict(state, strict)
    here = dict.fromkeys(sharded.model.state_dict(keep_vars=True))
    elsewhere = of_all_stages(sharded.mesh, here).keys() - here.keys()
    mine = {name: value for name, value in state.items() if name not in elsewhere}
    world = sharded.mesh.group("world")
    result = agree_run(world, "load its part of the state", lambda: sharded.model.load_state_dict(mine, strict=False))
    result.missing_keys.extend(sorted(elsewhere - state.keys()))
    if strict and (result.missing_keys or result.unexpected_keys):
        raise RuntimeError(
            f"the state lacks {some(result.missing_keys, 'names') or 'nothing'}, and has "
            f"{some(result.unexpected_keys, 'names') or 'nothing'} that the model does not; strict=False takes what is "
            "in both"
        )
    return result
