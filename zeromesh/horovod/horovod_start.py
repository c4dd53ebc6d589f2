"""Start, end, and questions about the world: ranks, sizes, and what this build can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.comm.environment import backends
from zeromesh.comm.mpi import backend as mpi
from zeromesh.horovod import world as worlds
from zeromesh.horovod.sets import ProcessSet, add_process_set, global_process_set


def init(comm: Any = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """Start the ranks, unless they have been. Collective.

    Args:
        comm: None, or all ranks; a part of them is a process set.
        process_sets: sets to make usable, in the same order on all ranks. "dynamic", Horovod's leave for later ones,
            is always given.

    Raises:
        ValueError: ``comm`` is something else, or a set is not valid.
        StartError: a RuntimeError: the ranks do not find each other; see ``zeromesh.init_distributed``.
    """
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(f'process_sets is {process_sets!r}, but must be a list of hvd.ProcessSet, or "dynamic"')
    if worlds.is_initialized():
        return
    world = worlds.start()
    size = world.environment.world_size
    # An empty list is all ranks, as in Horovod; communicators of MPI have a size.
    ranks = list(comm) or range(size) if isinstance(comm, Iterable) else range(getattr(comm, "size", 0))
    if comm is not None and sorted(ranks) != list(range(size)):
        worlds.shutdown()
        raise ValueError(
            f"comm is {comm!r}, but must be None or all {size} ranks; "
            "give a part of them as process_sets=[hvd.ProcessSet([...])], and process_set= to the operations"
        )
    global_process_set.take(0, range(size))
    try:
        for process_set in process_sets if not isinstance(process_sets, str) and process_sets else ():
            process_set.take(None, process_set.ranks)  # perhaps from an earlier init
            add_process_set(process_set)
    except BaseException:
        worlds.shutdown()
        raise


shutdown, is_initialized = worlds.shutdown, worlds.is_initialized


def _place(name: str, attribute: str, text: str) -> Callable[[], int]:
    """Return the public function ``name``, which tells one number of this process's environment."""

    def number() -> int:
        return int(getattr(worlds.world_for(name).environment, attribute))

    return worlds.named(number, name, f"Return the number of {text}.")


rank = _place("rank", "rank", "this process")
size = _place("size", "world_size", "processes")
local_rank = _place("local_rank", "local_rank", "this process on its node")
local_size = _place("local_size", "local_world_size", "processes on this node")
cross_rank = _place("cross_rank", "node_rank", "this node, among those with a process of this local rank")
cross_size = _place("cross_size", "node_count", "nodes")


def is_homogeneous() -> bool:
    """Return whether all nodes have as many processes."""
    return worlds.world_for("is_homogeneous").homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record this rank's operations until ``stop_timeline``, for Chrome's trace viewer; rank 0 alone writes.

    ``mark_cycles`` changes nothing: there are no cycles.
    """
    world = worlds.world_for("start_timeline")
    if world.environment.rank == 0:
        world.timeline.start(file_path)


def stop_timeline() -> None:
    """Write the timeline."""
    worlds.world_for("stop_timeline").timeline.close()


def _enabled(name: str, backend: str) -> Callable[[], bool]:
    """Return the public function ``name``, which tells whether the ranks talk over a backend."""

    def enabled() -> bool:
        worlds.world_for(name)
        return backend in backends().values()

    return worlds.named(enabled, name, f"Return whether the ranks talk over {backend}.")


mpi_enabled = _enabled("mpi_enabled", "mpi")
gloo_enabled = _enabled("gloo_enabled", "gloo")


def mpi_threads_supported() -> bool:
    """Return True over a torch that was built with MPI; raise ValueError where MPI is not in use."""
    if not mpi_enabled():
        raise ValueError("MPI is not in use: tensors go over gloo or nccl; leave the call out")
    return True


def _built(name: str, answer: Callable[[], bool]) -> Callable[[], bool]:
    """Return the public function ``name``, which tells whether this installation has a library."""
    return worlds.named(lambda: answer(), name, f"Return whether {name.partition('_')[0]} can be used here.")


mpi_built = _built("mpi_built", lambda: dist.is_mpi_available() or not mpi.missing())
gloo_built = _built("gloo_built", dist.is_gloo_available)
cuda_built = _built("cuda_built", lambda: torch.backends.cuda.is_built() and torch.version.hip is None)
rocm_built = _built("rocm_built", lambda: torch.version.hip is not None)
ddl_built = _built("ddl_built", lambda: False)  # of IBM
ccl_built = _built("ccl_built", lambda: False)  # of Intel


def nccl_built() -> int:
    """Return the version of torch's nccl, 21003 for 2.10.3, or 0."""
    if not dist.is_nccl_available():
        return 0
    major, minor, patch, *_ = torch.cuda.nccl.version()
    return int(10000 * major + 100 * minor + patch)


__all__ = [
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "init",
    "is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "rocm_built", "shutdown", "size", "start_timeline",
    "stop_timeline",
]  # fmt: skip
