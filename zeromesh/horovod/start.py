"""Start, end, and questions about the world: ranks, sizes, and what this build can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

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
    given = list(comm) or range(size) if isinstance(comm, Iterable) else range(getattr(comm, "size", 0))
    if comm is not None and sorted(given) != list(range(size)):
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
T = TypeVar("T")


def _question(name: str, text: str, answer: Callable[[worlds.World], T]) -> Callable[[], T]:
    """Return the public function ``name``, which answers a question about the world."""

    def function() -> T:
        return answer(worlds.world_for(name))

    return worlds.named(function, name, text)


rank = _question("rank", "Return the number of this process.", lambda w: w.environment.rank)
size = _question("size", "Return the number of processes.", lambda w: w.environment.world_size)
local_rank = _question(
    "local_rank", "Return the number of this process on its node.", lambda w: w.environment.local_rank
)
local_size = _question(
    "local_size", "Return the number of processes on this node.", lambda w: w.environment.local_world_size
)
cross_rank = _question(
    "cross_rank", "Return the number of this node among those with this local rank.", lambda w: w.environment.node_rank
)
cross_size = _question("cross_size", "Return the number of nodes.", lambda w: w.environment.node_count)
is_homogeneous = _question(
    "is_homogeneous", "Return True if nodes have equally many processes.", lambda w: w.homogeneous
)
mpi_enabled = _question(
    "mpi_enabled", "Return True if the ranks talk over MPI.", lambda _: "mpi" in backends().values()
)
gloo_enabled = _question(
    "gloo_enabled", "Return True if the ranks talk over gloo.", lambda _: "gloo" in backends().values()
)


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


def mpi_threads_supported() -> bool:
    """Return True under MPI, which is started for many threads; raise ValueError where it is not in use."""
    if not mpi_enabled():
        raise ValueError("MPI is not in use; start the ranks with mpiexec, with zeromesh[mpi] installed")
    return True


def mpi_built() -> bool:
    """Return whether MPI can be used here."""
    return dist.is_mpi_available() or not mpi.missing()


def gloo_built() -> bool:
    """Return whether torch has gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """Return the version of torch's nccl, 21003 for 2.10.3, or 0."""
    if not dist.is_nccl_available():
        return 0
    major, minor, patch, *_ = torch.cuda.nccl.version()
    return 10000 * major + 100 * minor + patch


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
