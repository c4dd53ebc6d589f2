"""``deepspeed.utils.groups``: the ranks along the axes of the newest engine's mesh; before there is one, all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from zeromesh.engine.owners import newest_engine

AXES = {
    "data_parallel": "data",
    "sequence_data_parallel": "shard",
    "model_parallel": "tensor",
    "tensor_model_parallel": "tensor",
    "sequence_parallel": "context",
    "pipeline_parallel": "pipeline",
    "expert_parallel": "expert",
    "max_expert_parallel": "expert",
    "expert_data_parallel": "expert_data",
}
"""Group of the mesh for each of DeepSpeed's."""

# Groups of one rank, by the default group with which they end.
_alone: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def group_of(kind: str, engine: Any = None) -> Any:
    """Return torch's group of this rank along an axis of an engine's mesh; by default of the newest one's."""
    engine = newest_engine() if engine is None else engine
    if engine is None:
        group = dist.group.WORLD if kind in ("data_parallel", "sequence_data_parallel") else None
    else:
        group = engine.mesh.group(AXES[kind]).process_group
    if group is None:
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError(f"there is no {kind} group yet; call initialize or init_distributed first")
        if world not in _alone:
            # Made by each rank for itself, where an ordinary group needs all of them.
            _alone[world] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        group = _alone[world]
    return group


_ANSWERS: dict[str, Callable[[str], Any]] = {
    "group": group_of,
    "world_size": lambda kind: dist.get_world_size(group_of(kind)),
    "rank": lambda kind: dist.get_rank(group_of(kind)),
    "group_ranks": lambda kind: dist.get_process_group_ranks(group_of(kind)),
    "src_rank": lambda kind: dist.get_process_group_ranks(group_of(kind))[0],
}
"""Ends of the names of functions; ``get_data_parallel_rank`` is ``get``, one of ``AXES``, and one of these."""


def __getattr__(name: str) -> Any:
    kind, end = "", ""
    if "get_" in name:
        asked_name = name.removeprefix("_").removeprefix("get_")
        # The longest end that fits: ``get_X_group_ranks`` ends in ``group_ranks``.
        end = max((ending for ending in _ANSWERS if asked_name.endswith(f"_{ending}")), key=len, default="")
        kind = asked_name.removesuffix(f"_{end}") if end else ""
    if "expert" in kind and kind in AXES:
        return lambda group_name=None: _ANSWERS[end](kind if _is_size(group_name) else "")
    if kind in AXES:
        return lambda: _ANSWERS[end](kind)
    if end in _OF_ONE and kind in ("expert_model_parallel", "expert_tensor_parallel"):
        return lambda group_name=None: _OF_ONE[end]  # each expert is whole on one rank
    raise AttributeError(f"groups has no {name!r}; it has get_X_Y, X of {', '.join(AXES)}, Y of {', '.join(_ANSWERS)}")


_OF_ONE = {"world_size": 1, "rank": 0}


def _get_max_expert_size() -> int:
    engine = newest_engine()
    return 1 if engine is None else int(engine.mesh.sizes["expert"])


def _is_size(group_name: str | None) -> bool:
    """Return True if it is the name of the groups of experts; raise ValueError if it is another one."""
    if group_name not in (None, name := _get_max_expert_size_name()):
        raise ValueError(
            f"there are no groups {group_name!r} of experts, but {name!r}: all experts are shared by the ranks of "
            "mesh.expert, which is the ep_size of the MoE layers unless the configuration says it; ask after initialize"
        )
    return True


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    return {_get_max_expert_size_name(): group_of("expert_parallel")}


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    return {_get_max_expert_size_name(): group_of("expert_data_parallel")}


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Accept DeepSpeed's call that makes groups of experts: the mesh has all groups, by the layers' ``ep_size``."""
    if mpu is not None:
        raise NotImplementedError(f"groups.initialize(mpu={mpu}): set the sizes of the mesh in the configuration")
