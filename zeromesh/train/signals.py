"""SIGTERM and SIGUSR1 in a run: save, and end or go on, after the update that all ranks agree on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType

from zeromesh.comm.failure import SAVED, SAVED_AND_ENDED
from zeromesh.comm.rank import FAILURES
from zeromesh.engine import Engine


class Request(IntEnum):
    """Request of a signal; the largest one of all ranks counts."""

    NOTHING = 0
    SAVE = 1
    SAVE_AND_END = 2


SAME = 5.0
"""Seconds in which another SIGTERM is the same one."""

SIGNALS = {signal.SIGTERM: Request.SAVE_AND_END, signal.SIGUSR1: Request.SAVE}


class Ended(SystemExit):
    """The run was saved and ends, as a signal asked."""

    def __init__(self) -> None:
        super().__init__(SAVED_AND_ENDED)


@contextmanager
def heeded(engine: Engine) -> Iterator[None]:
    """In this context the engine hears of signals at its next update. A second SIGTERM ends the process at once.

    One that comes soon after the first is the same: batch systems tell the launcher and the ranks, and the launcher
    tells the ranks again. Only the main thread of a process can do so; elsewhere nothing happens.
    """
    first: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            first.append(time.monotonic())
            if first[-1] - first[0] > SAME:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        engine.ask(SIGNALS[signal.Signals(number)])

    before = {number: signal.signal(number, ask) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def ignore_requests() -> None:
    """Let SIGUSR1, which asks for a checkpoint, do nothing where there is nothing to save."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def leave_word() -> None:
    """Let the launcher of this rank know that the run was saved before it ended."""
    folder = os.environ.get(FAILURES)
    if folder is not None and os.path.isdir(folder):
        Path(folder, SAVED).touch()
