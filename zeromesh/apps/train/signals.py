"""Signals in a run, after an update on which all ranks agree: SIGTERM saves and ends, SIGUSR1 saves, SIGUSR2 checks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntFlag
from pathlib import Path
from types import FrameType

from zeromesh import Engine
from zeromesh.comm.failure import SAVED, SAVED_AND_ENDED, handled_signals
from zeromesh.comm.rank import FAILURES


class Request(IntFlag):
    """Requests of signals; those of all ranks count."""

    CHECK = 1
    SAVE = 2
    END = 4


# A second SIGTERM within this time is a copy: batch systems send it to the launcher and to the ranks, and the launcher
# passes it on.
REPEAT_SECONDS = 5.0

# Windows has only the first.
_REQUESTS = {"SIGTERM": Request.SAVE | Request.END, "SIGUSR1": Request.SAVE, "SIGUSR2": Request.CHECK}
SIGNALS = {number: _REQUESTS[number.name] for number in signal.Signals if number.name in _REQUESTS}


class Ended(SystemExit):
    """End of a run after a signal and a checkpoint."""

    def __init__(self) -> None:
        super().__init__(SAVED_AND_ENDED)


@contextmanager
def forward_signals(engine: Engine) -> Iterator[None]:
    """Pass signals to the engine, which reads them at its next update. A second SIGTERM ends the process at once."""
    first: list[float] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            first.append(time.monotonic())
            if first[-1] - first[0] > REPEAT_SECONDS:
                # The default action ends the process with the exit status of the signal.
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        # Only noted here: a handler may run in the middle of a collective.
        engine.ask(SIGNALS[signal.Signals(number)])

    try:
        with handled_signals(ask, SIGNALS):
            yield
    except Ended:
        # ``srun --kill-on-bad-exit`` ends all ranks with the first, and the status is that of the highest number.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise


def ignore_requests() -> None:
    """Ignore SIGUSR1 and SIGUSR2 until there is something to save or to check."""
    # Their default action would end the process.
    if threading.current_thread() is threading.main_thread():
        for number, request in SIGNALS.items():
            if Request.END not in request:
                signal.signal(number, signal.SIG_IGN)


def mark_saved() -> None:
    """Leave a file for the launcher of this rank: the run was saved before it ended."""
    folder = os.environ.get(FAILURES)
    if folder is not None and os.path.isdir(folder):  # another launcher than ours sets none
        Path(folder, SAVED).touch()
