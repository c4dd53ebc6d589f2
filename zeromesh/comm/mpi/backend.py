"""MPI below the backend ``mpi``: its start and end, and what ranks tell each other before they have a process group."""

# Imports of mpi4py, and of modules that import it, are inside functions: nothing here needs MPI before it is asked for.

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from importlib.util import find_spec
from secrets import token_hex
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zeromesh.base.requirements import pip_install
from zeromesh.comm.interface import own_address
from zeromesh.comm.launchers import OPEN_MPI
from zeromesh.comm.messages import gather_texts
from zeromesh.comm.trust import TOKEN

REMEDY = pip_install("mpi4py")

ABI = "MPI4PY_MPIABI"  # mpi4py's variable for the family of libraries that it loads
_ABI_OF_OPEN_MPI = "openmpi"
_CHOICES = (ABI, "MPI4PY_LIBMPI")  # who sets one of them has chosen the library

READERS = 1.0  # seconds that a rank which ends all others gives mpiexec to read what it said

_carried: WeakKeyDictionary[Any, WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()
"""Groups whose messages MPI carries, by torch's, for each process group of all ranks."""


def missing() -> str:
    """Return a sentence on what this Python lacks to use MPI, and the remedy; "" if nothing. Loads MPI."""
    if find_spec("mpi4py") is None:
        return f"mpi4py is not installed; {REMEDY} brings it, and an MPI"
    try:
        version = _load().Get_library_version().split("\n")
    except (ImportError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if os.environ.get(ABI) == _ABI_OF_OPEN_MPI:
            return f"mpi4py finds no Open MPI ({reason}); add the folder of its libmpi.so.40 to LD_LIBRARY_PATH"
        return f"mpi4py finds no MPI library ({reason}); {REMEDY} brings one, or install your system's and its mpi4py"
    # MPICH as its wheel brings it aborts in MPI_Init under a launcher that speaks PMIx, as Open MPI's.
    if "PMIX_RANK" in os.environ and version[0].startswith("MPICH") and "pmix" not in " ".join(version):
        return (
            f"the launcher speaks PMIx, and mpi4py has loaded {' '.join(version[0].split())}, which does not; start "
            "the ranks with MPICH's mpiexec, which is the one beside python where it came with pip, or let mpi4py load "
            f"Open MPI, with {ABI}={_ABI_OF_OPEN_MPI}"
        )
    return ""


def carry(timeout: timedelta | None = None) -> None:
    """Let MPI carry the messages of engines in the process group of all ranks. Collective.

    From now on a process that ends because of an exception ends all the others. ``timeout`` is that of a message; None
    is torch's default, 30 minutes. Raise RuntimeError if MPI takes calls from the main thread only.
    """
    _start()
    from zeromesh.comm.mpi.mpi_messages import runtime

    runtime.timeout = (timeout or dist.default_pg_timeout).total_seconds()
    _carried[dist.group.WORLD] = WeakKeyDictionary()


def carries() -> bool:
    """Return whether MPI carries the messages of engines."""
    return dist.group.WORLD is not None and dist.group.WORLD in _carried


def group_of(group: Any) -> Any:
    """Return the ``MpiGroup`` of a process group of torch. The first call for a group is collective."""
    from zeromesh.comm.mpi.mpi_messages import MpiGroup

    groups = _carried[dist.group.WORLD]
    if group not in groups:
        groups[group] = MpiGroup(group)
    return groups[group]


def rank_and_size() -> tuple[int, int]:
    """Return MPI's rank of this process and its number of processes. Starts MPI."""
    world = _start().COMM_WORLD
    return world.Get_rank(), world.Get_size()


def hosts() -> list[str]:
    """Return the name of each rank's host. Collective."""
    return _gathered(_start().Get_processor_name())


def _gathered(value: Any) -> list[Any]:
    """Return every rank's value, which JSON holds, by rank. Collective."""
    from zeromesh.comm.mpi.mpi_messages import runtime

    def exchange(vector: torch.Tensor) -> torch.Tensor:
        rows = torch.empty(runtime.notes.Get_size(), len(vector), dtype=vector.dtype)
        runtime.notes.Allgather(vector.numpy(), rows.numpy())  # in lower case it would unpickle what ranks send
        return rows

    return [json.loads(text) for text in gather_texts(json.dumps(value), exchange)]


def agree_on_master() -> tuple[str, int]:
    """Return an address of rank 0 that all others reach, loopback on one host, and a free TCP port. Collective.

    The ranks get a token, too, by which they know each other there.
    """
    names = hosts()
    master = None
    if rank_and_size()[0] == 0:
        address = _own_address(names)
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))  # 0: the system chooses a free port
            master = (address, int(probe.getsockname()[1]), token_hex())
    address, port, token = _gathered(master)[0]
    os.environ.setdefault(TOKEN, token)
    return address, port


def _own_address(names: Sequence[str]) -> str:
    """Return an address of this host, the first of ``names``, that the others can reach."""
    others = [name for name in names if name != names[0]]
    if not others:
        return "127.0.0.1"
    for name in others:
        with contextlib.suppress(OSError):
            return own_address(name, 9)
    return socket.gethostbyname(names[0])


def _load() -> Any:
    """Return mpi4py's module, without starting MPI."""
    import mpi4py

    # With several libraries installed mpi4py takes the one beside python, which is MPICH with our extra ``mpi``.
    if any(name in os.environ for name in OPEN_MPI.marks) and not any(name in os.environ for name in _CHOICES):
        os.environ[ABI] = _ABI_OF_OPEN_MPI
    before = mpi4py.rc.initialize, mpi4py.rc.finalize
    # mpi4py reads these once, as MPI is imported. ``install`` starts MPI, with threads, and ends it.
    mpi4py.rc(initialize=False, finalize=False)
    try:
        from mpi4py import MPI
    finally:
        mpi4py.rc(initialize=before[0], finalize=before[1])
    return MPI


def _start() -> Any:
    """Start MPI, with the thread that drives it, unless it is; return mpi4py's module."""
    mpi = _load()
    from zeromesh.comm.mpi.mpi_messages import runtime

    if runtime.notes == mpi.COMM_NULL:
        atexit.register(_leave, runtime.start())
    return mpi


def await_readers(streams: Sequence[int] = (1, 2)) -> None:
    """Let mpiexec read what this process wrote to these file descriptors."""
    # Absent on Windows, where there is no such backend.
    import fcntl
    import termios

    end = time.monotonic() + READERS
    for stream in streams:
        with contextlib.suppress(OSError):  # it is closed
            while stat.S_ISFIFO(os.fstat(stream).st_mode) and time.monotonic() < end:
                if not any(fcntl.ioctl(stream, termios.FIONREAD, bytes(4))):
                    break
                time.sleep(0.01)


def _leave(ours: bool) -> None:
    """End the other ranks after an exception, else tell them, and end MPI. Runs as the process ends."""
    from zeromesh.comm.mpi.mpi_messages import runtime

    mpi = _load()
    if mpi.Is_finalized():
        return
    # torch puts a hook of its own around every ``sys.excepthook``, in which output is held back: so here, not there.
    failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    if not failed and not runtime.leave():
        failed = True  # MPI's finalisation would wait for these messages for ever
        print("zeromesh: this rank ends with messages that nobody took; so all ranks are ended", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if failed:
        await_readers()  # an abort throws away what is in the pipes
        mpi.COMM_WORLD.Abort(1)
    if ours:
        mpi.Finalize()
