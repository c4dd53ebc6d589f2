"""Start, end, and questions about the world: ranks, sizes, and what this build can do."""

from __future__ import annotations

from collections.abc import Iterable
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
    given = list(comm) if isinstance(comm, Iterable) else [] if comm is None else range(getattr(comm, "size", 0))
    if (given and sorted(given) != list(range(size))) or (
        comm is not None and not isinstance(comm, Iterable) and not given
    ):
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


def shutdown() -> None:
    """End Horovod's part of this process; also done as it ends. Operations of others that need this rank fail."""
    worlds.shutdown()


def is_initialized() -> bool:
    """Return whether ``init`` has been called, and ``shutdown`` not since."""
    return worlds.is_initialized()


def rank() -> int:
    """Return the number of this process."""
    return worlds.world_for("rank").environment.rank


def size() -> int:
    """Return the number of processes."""
    return worlds.world_for("size").environment.world_size


def local_rank() -> int:
    """Return the number of this process on its node."""
    return worlds.world_for("local_rank").environment.local_rank


def local_size() -> int:
    """Return the number of processes on this node."""
    return worlds.world_for("local_size").environment.local_world_size


def cross_rank() -> int:
    """Return the number of this node among those with a process of this local rank."""
    return worlds.world_for("cross_rank").environment.node_rank


def cross_size() -> int:
    """Return the number of nodes."""
    return worlds.world_for("cross_size").environment.node_count


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


def _enabled(backend: str) -> bool:
    return dist.is_initialized() and backend in backends().values()


def mpi_enabled() -> bool:
    """Return whether the ranks talk over MPI."""
    worlds.world_for("mpi_enabled")
    return _enabled("mpi")


def gloo_enabled() -> bool:
    """Return whether the ranks talk over gloo."""
    worlds.world_for("gloo_enabled")
    return _enabled("gloo")


def mpi_threads_supported() -> bool:
    """Return True under MPI, which is started for many threads; raise ValueError where it is not in use."""
    worlds.world_for("mpi_threads_supported")
    if not _enabled("mpi"):
        raise ValueError("MPI is not in use; start the ranks with mpiexec, with zeromesh[mpi] installed")
    return True


def mpi_built() -> bool:
    """Return whether MPI can be used here."""
    return dist.is_mpi_available() or not mpi.missing()


def gloo_built() -> bool:
    """Return whether torch has gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """Return whether torch has nccl, as 1 or 0."""
    return int(dist.is_nccl_available())


def cuda_built() -> bool:
    """Return whether torch has CUDA."""
    return torch.backends.cuda.is_built() and torch.version.hip is None


def rocm_built() -> bool:
    """Return whether torch has ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Return False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: oneCCL is not used."""
    return False


__all__ = [
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "init",
    "is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "rocm_built", "shutdown", "size", "start_timeline",
    "stop_timeline",
]  # fmt: skip
