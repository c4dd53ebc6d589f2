"""SIGTERM and SIGUSR1 in a run: save, and end or go on, after the update that all ranks agree on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType

from zeromesh.dist.failure import SAVED, SAVED_AND_ENDED
from zeromesh.dist.rank import FAILURES
from zeromesh.engine import Engine


class Request(IntEnum):
    """What a signal asks for; the largest one of all ranks counts."""

    NOTHING = 0
    SAVE = 1
    SAVE_AND_END = 2


SIGNALS = {signal.SIGTERM: Request.SAVE_AND_END, signal.SIGUSR1: Request.SAVE}


class Ended(SystemExit):
    """The run was saved and ends, as a signal asked."""

    def __init__(self) -> None:
        super().__init__(SAVED_AND_ENDED)


@contextmanager
def heeded(engine: Engine) -> Iterator[None]:
    """In this context the engine hears of signals at its next update. A second SIGTERM ends the process at once.

    Only the main thread of a process can do so; elsewhere nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
        engine.ask(SIGNALS[signal.Signals(number)])

    before = {number: signal.signal(number, ask) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def leave_word() -> None:
    """Let the launcher of this rank know that the run was saved before it ended."""
    folder = os.environ.get(FAILURES)
    if folder is not None and os.path.isdir(folder):
        Path(folder, SAVED).touch()
