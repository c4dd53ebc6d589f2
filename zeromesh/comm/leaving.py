"""Waits at the end of a process, which would end by SIGABRT otherwise."""

from __future__ import annotations

import atexit
import time
from pathlib import Path

LIMIT = 1.0  # seconds after which the process ends all the same

# Consecutive times that no thread may be busy: one that waits for the lock looks idle between two tries.
QUIET = 3

_GLOO = "pt_gloo_runloop"  # torch's name of the threads that run gloo's collectives


def prepare() -> None:
    """Have this process wait as it ends; a second call changes nothing."""
    atexit.unregister(await_gloo)
    atexit.register(await_gloo)


def await_gloo() -> None:
    """Wait until torch's threads of gloo have released the tensors of the last collectives."""
    # They do so after a collective is reported as done, and need Python's lock for it. A thread that wants the lock
    # when the interpreter is gone is ended amid C++ code, which aborts the process.
    end, quiet = time.monotonic() + LIMIT, 0
    while quiet < QUIET and time.monotonic() < end:
        # Gives the lock away, which is all that helps where threads cannot be listed.
        time.sleep(0.01)
        quiet = 0 if _busy() else quiet + 1


def _busy() -> bool:
    """Return whether such a thread runs or wants to; one that waits for a message may go on doing so."""
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended meanwhile
            continue
        if name == _GLOO and rest.split()[0] == "R":
            return True
    return False
