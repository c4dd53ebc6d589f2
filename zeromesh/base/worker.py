"""Threads, whose end is told by an event of their own; and modes of this library in threads that others start."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


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


started_by_code: ContextVar[bool] = ContextVar(
    "whether this thread was started under modes of this library", default=False
)
"""True in threads whose messages would come in any order, which may be another one on each rank."""


def follow_threads() -> None:
    """Have threads that are started under modes of this library, and tasks of pools, run under the same ones."""
    # torch has one stack of modes for each thread.
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit
    if start.__module__ == __name__:
        return

    def start_under_modes(thread: threading.Thread) -> None:
        # A pool's thread lives on; its tasks have modes of their own.
        code = getattr(thread, "_target", None) or thread.run
        if not str(getattr(code, "__module__", "")).startswith(("concurrent.", "torch.", "zeromesh.")):
            vars(thread)["run"] = _under_modes(thread.run)
        start(thread)

    def submit_under_modes(pool: ThreadPoolExecutor, task: Any, /, *args: Any, **kwargs: Any) -> Any:
        return submit(pool, _under_modes(task), *args, **kwargs)

    setattr(threading.Thread, "start", start_under_modes)  # noqa: B010
    setattr(ThreadPoolExecutor, "submit", submit_under_modes)  # noqa: B010


def _under_modes(task: Callable[..., Any]) -> Callable[..., Any]:
    every = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    modes = [mode for mode in every if type(mode).__module__.startswith("zeromesh.")]
    return partial(_run, modes, task) if modes else task


def _run(modes: Sequence[Any], task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    token = started_by_code.set(True)
    try:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            return task(*args, **kwargs)
    finally:
        started_by_code.reset(token)
