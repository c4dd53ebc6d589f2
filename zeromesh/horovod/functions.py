"""Broadcasts of parameters, optimizers and other objects."""

from __future__ import annotations

import hmac
import pickle
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from zeromesh.checkpoint.packing import share_value
from zeromesh.comm.trust import SECRET, sign
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
        ValueError: on every rank, if ranks have tensors of other shapes or dtypes under a name.
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
    members = included_members(process_set, "broadcast_optimizer_state")
    is_root = members.ranks[members.rank] == root_rank
    state = optimizer.state_dict() if is_root else None
    state = broadcast_value(tree_map_only(torch.Tensor, torch.Tensor.cpu, state), root_rank, "optimizer", process_set)
    if is_root:
        return
    groups = list(optimizer.param_groups)
    optimizer.load_state_dict(state)
    # Schedules and wrappers made before keep these dicts, and ``load_state_dict`` has made others.
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.update(loaded)
    optimizer.param_groups[:] = groups


def broadcast_value(value: Any, root_rank: int, name: str, process_set: ProcessSet) -> Any:
    """Return the value of ``root_rank``, which a checkpoint could hold; nothing is pickled. Raise ValueError if not."""
    numbers = count()
    return share_value(
        value,
        f"{name} of rank {root_rank}",
        world_for(name).environment.rank == root_rank,
        lambda data: broadcast_(data, root_rank, f"{name}.{next(numbers)}", process_set),
        torch.device("cpu"),
    )


def _pickled(call: str, obj: Any) -> bytes:
    """Return an object with its signature; raise ValueError where the ranks have no secret to sign it with."""
    key = world_for(call).key
    if not key:
        raise ValueError(
            f"{call} unpickles what other ranks send, and nothing proves that it comes from them: the ranks of several "
            f"nodes share no secret; set {SECRET} to at least 16 characters that nobody else knows, the same on all "
            "ranks, before you start them, or use zeromesh launch"
        )
    data = pickle.dumps(obj)
    return sign(key, data) + data


def _unpickled(call: str, signed: bytes) -> Any:
    """Return an object that a rank of this run has sent."""
    signature, data = signed[:32], signed[32:]
    if not hmac.compare_digest(signature, sign(world_for(call).key, data)):
        raise ValueError(f"{call} received what no rank of this run has sent: a stranger has connected; start it anew")
    return pickle.loads(data)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of ``root_rank``, which is pickled and signed; other ranks' objects are not used."""
    is_root = world_for("broadcast_object").environment.rank == root_rank
    data = torch.frombuffer(bytearray(_pickled("broadcast_object", obj if is_root else None)), dtype=torch.uint8)
    signed = broadcast_value(data, root_rank, name or "object", process_set)
    return obj if is_root else _unpickled("broadcast_object", signed.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, by rank; they are pickled and signed."""
    name = name or "object"
    data = torch.frombuffer(bytearray(_pickled("allgather_object", obj)), dtype=torch.uint8)
    sizes = synchronize(allgather_async(torch.tensor([data.numel()]), f"{name}.size", process_set)).tolist()
    rows = synchronize(allgather_async(data, f"{name}.data", process_set)).split(sizes)
    return [_unpickled("allgather_object", row.numpy().tobytes()) for row in rows]


__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
