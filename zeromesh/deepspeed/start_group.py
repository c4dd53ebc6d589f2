"""``init_distributed`` of the drop-in: the start of the process group, with what Accelerate must hear about it."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed as dist

from zeromesh.comm import environment
from zeromesh.comm.environment import Environment
from zeromesh.comm.launchers import DEFAULT_PORT, FILE, LOOPBACK


def init_distributed(*args: Any, **kwargs: Any) -> Environment:
    """Start the process group unless there is one; ``zeromesh.init_distributed`` describes the arguments."""
    run_environment = environment.init_distributed(*args, **kwargs)
    # DeepSpeed sets them for a process without a launcher, and programs read them afterwards.
    address = LOOPBACK[0] if run_environment.master_address.startswith(FILE) else run_environment.master_address
    for name, value in {
        "RANK": run_environment.rank,
        "WORLD_SIZE": run_environment.world_size,
        "LOCAL_RANK": run_environment.local_rank,
        "MASTER_ADDR": address,
        "MASTER_PORT": run_environment.master_port or DEFAULT_PORT,
    }.items():
        os.environ.setdefault(name, str(value))
    _tell_accelerate()
    return run_environment


def is_initialized() -> bool:
    """Return whether there is a process group; Accelerate asks before it would start one."""
    there = bool(dist.is_initialized())
    if there:
        _tell_accelerate()
    return there


def _tell_accelerate() -> None:
    """Let Accelerate count the ranks of a run on processors, where it looks for the group under DeepSpeed.

    It looks for a backend before that, finds none without an accelerator, and would take each rank for a
    run of its own. ``InitProcessGroupKwargs(backend="gloo")`` and ``TrainingArguments(use_cpu=True)`` say the same.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    # While it is being made, as it is when it asks for the group, its state is there, and has no number of processes.
    shared = {} if state is None else state._shared_state
    if "backend" in shared and shared["backend"] is None and "num_processes" not in shared:
        shared["backend"] = dist.get_backend()
