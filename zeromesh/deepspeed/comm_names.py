"""``deepspeed.comm``: the names that torch.distributed lacks or spells differently; all others are torch's own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, wraps
from inspect import isfunction
from typing import Any

import torch.distributed as dist

from zeromesh.base.signatures import refuse
from zeromesh.comm.detect import Environment
from zeromesh.deepspeed.device_interface import get_accelerator
from zeromesh.engine.owners import newest_engine

_log = logging.getLogger("zeromesh")

LOGGING = ("prof", "log_name", "debug")
"""Arguments of DeepSpeed's log of collectives."""

# torch 2.13 gave two functions new names, and warns of the old ones.
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
_OTHER = {
    "inference_all_reduce": "all_reduce",
    "get_all_ranks_from_group": "get_process_group_ranks",
    **dict.fromkeys(("all_gather_into_tensor", "allgather_fn"), _GATHER),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_fn"), _SCATTER),
}
"""Functions of torch that do what DeepSpeed's of other names do."""


_THERE = (
    "has_all_gather_into_tensor",
    "has_reduce_scatter_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
)
"""Questions about versions of torch, which every one that is supported answers alike."""


def __getattr__(name: str) -> Any:
    if name in _THERE:
        return lambda: True
    value = getattr(dist, _OTHER.get(name, name))
    return _logged(value) if isfunction(value) else value


@cache
def _logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch's that takes the arguments of DeepSpeed's log, too."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name not in LOGGING})

    return call


def get_local_rank() -> int:
    """Return this process's place on its machine."""
    return Environment.detect().local_rank if "LOCAL_RANK" not in os.environ else int(os.environ["LOCAL_RANK"])


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the rank of a member of a group."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False, **logged: Any
) -> None:
    """Wait for all ranks, and say which did not come; a barrier where the backend is not gloo."""
    if dist.get_backend(group) == "gloo":
        dist.monitored_barrier(group, timeout, wait_all_ranks)
    else:
        dist.barrier(group)


def configure(deepspeed_config: Any = None, enabled: bool | None = None, **settings: Any) -> None:
    """Accept the settings of DeepSpeed's log of collectives: engines always count theirs."""
    if enabled:
        _log.info("collectives of engines are always counted: comm.log_summary() or engine.traffic_report() shows them")


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, dict[str, float]] | None:
    """Log the traffic of the newest engine by collective and axis, or return it; see ``engine.traffic_report``."""
    advice = "engines name slow ranks in the log by themselves"
    refuse("log_summary", "show_straggler", show_straggler, advice, False)
    engine = newest_engine()
    if engine is None:
        raise RuntimeError("there is no engine whose collectives could be shown; call this after initialize")
    report = engine.traffic_report()
    if return_dict:
        return report
    if dist.get_rank() == 0:
        lines = (
            f"\n  {name:<28}{row['calls']:>10.0f} calls{row['bytes']:>16.0f} bytes" for name, row in report.items()
        )
        _log.info("collectives of rank 0 since the last reset:%s", "".join(lines))
    return None


def reset_log() -> None:
    """Let ``log_summary`` count anew."""
    engine = newest_engine()
    if engine is not None:
        engine.traffic_report(reset=True)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """Return a torch DeviceMesh of the current device."""
    from torch.distributed.device_mesh import init_device_mesh

    kind = get_accelerator().device_name()
    return init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))
