"""Broadcasts of parameters, optimizers and other objects."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from zeromesh.horovod.operations import allgather_async, broadcast_, broadcast_async_, synchronize
from zeromesh.horovod.sets import ProcessSet, global_process_set, included_members
from zeromesh.horovod.world import world_for


def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Give every rank the tensors of ``root_rank``, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, or tensors.
        root_rank: global rank.
        process_set: ranks that take part.

    Raises:
        HorovodInternalError: on every rank, if ranks have tensors of other shapes or dtypes under a name.
    """
    if not isinstance(params, Iterable) or isinstance(params, torch.Tensor | str):
        raise ValueError(f"params are of {type(params).__name__}; pass model.state_dict() or named_parameters()")
    # Sorted, so that ranks agree on the order where state dicts were filled in another one.
    pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    handles = []
    for pair in pairs:
        name, tensor = pair if isinstance(pair, tuple) else (None, pair)
        if tensor is not None:
            handles.append(broadcast_async_(tensor, root_rank, name, process_set))
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None, process_set: ProcessSet = global_process_set
) -> None:
    """Give every rank the optimizer's states and options of ``root_rank``.

    ``model`` changes nothing. States that ``root_rank`` does not have yet stay unmade.
    """
    own = included_members(process_set, "broadcast_optimizer_state")
    # On the CPU: pickled tensors come back on the root's own device, which is another rank's here.
    held = optimizer.state_dict() if own.ranks[own.rank] == root_rank else None
    state = tree_map_only(torch.Tensor, torch.Tensor.cpu, held)
    state = broadcast_object(state, root_rank, "optimizer", process_set)
    if own.ranks[own.rank] == root_rank:
        return
    groups = list(optimizer.param_groups)
    optimizer.load_state_dict(state)
    # Schedules and wrappers made before keep these dicts, and ``load_state_dict`` has made others.
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.update(loaded)
    optimizer.param_groups[:] = groups


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of ``root_rank``, which is pickled; other ranks' objects are not used."""
    name = name or "object"
    is_root = world_for("broadcast_object").environment.rank == root_rank
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8) if is_root else torch.empty(0)
    size = broadcast_(torch.tensor([data.numel()]), root_rank, f"{name}.size", process_set)
    if not is_root:
        data = torch.empty(int(size), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.data", process_set)
    return obj if is_root else pickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, by rank; they are pickled."""
    name = name or "object"
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    sizes = synchronize(allgather_async(torch.tensor([data.numel()]), f"{name}.size", process_set)).tolist()
    rows = synchronize(allgather_async(data, f"{name}.data", process_set)).split(sizes)
    return [pickle.loads(row.numpy().tobytes()) for row in rows]


__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
