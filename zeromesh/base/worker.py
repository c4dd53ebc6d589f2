"""Threads, whose end is told by an event of their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Worker(threading.Thread):
    """Thread that runs ``work``; ``join`` may be interrupted, and then waits again.

    Before ``join`` has returned without a limit of time, what the work uses must not be used for anything else.
    """

    # CPython 3.11 takes a ``join`` that Ctrl-C interrupts for the end of the thread: the next ``join`` returns at once,
    # and ``is_alive`` is False, while the thread goes on.

    def __init__(self, work: Callable[[], object], name: str | None = None, daemon: bool = True) -> None:
        super().__init__(name=name, daemon=daemon)
        self._work = work
        self._over = threading.Event()
        self._process = os.getpid()

    @property
    def over(self) -> bool:
        """True once the work is over, and in a forked process, which has no thread of its parent's."""
        return self._over.is_set() or self._process != os.getpid()

    def start(self) -> None:
        """Start the thread; raise RuntimeError if the system has no more."""
        try:
            super().start()
        except RuntimeError:
            self._over.set()  # nobody may wait for it
            raise

    def run(self) -> None:
        """Run the work, and forget what it holds."""
        try:
            self._work()
        finally:
            del self._work
            self._over.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the work is over, at most ``timeout`` seconds."""
        if not self.over:
            self._over.wait(timeout)
