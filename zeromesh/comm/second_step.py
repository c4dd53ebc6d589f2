"""What is done when messages have arrived, without anybody waiting for it meanwhile."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakSet

import torch

LEAVING = 1.0
"""Seconds that a process which ends gives to steps under way."""


class Later:
    """Runs the second step of collectives: beside the caller, so that it does not depend on what the caller waits for.

    Ranks may wait for their collectives in different orders; the second step of one needs other ranks' second steps.
    On the host each runs in a thread of its own, which ends with the process; on an accelerator in the order of a
    stream of its own.

    Args:
        device: where the tensors of the messages are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None
        self._last: dict[int, _Thread] = {}

    def run(self, step: Callable[[], None], tag: int) -> Any:
        """Start it; what is returned has a ``wait`` that blocks until it is done, and raises what it raised."""
        if self._device.type == "cpu":
            self._last[tag] = thread = _Thread(step)
            return thread
        self._stream = self._stream or torch.Stream(self._device)
        return _OnStream(self._stream, step)

    def finish(self, tag: int) -> None:
        """Wait for the last step with this tag: messages of the next collective must not come before its messages."""
        last = self._last.pop(tag, None)
        if last is not None:
            last.wait()


class _Thread:
    running: ClassVar[WeakSet[_Thread]] = WeakSet()

    def __init__(self, step: Callable[[], None]) -> None:
        self._failure: BaseException | None = None
        # The step, with its buffers, is the thread's alone: this object stays until the next collective of its tag.
        self._thread = threading.Thread(target=self._run, args=(step,), name="zeromesh-later", daemon=True)
        self._thread.start()
        self.running.add(self)

    @classmethod
    def leave(cls) -> None:
        """As the process ends: a thread that comes back from gloo when the interpreter is gone ends it by SIGABRT."""
        limit = time.monotonic() + LEAVING
        for step in list(cls.running):
            step._thread.join(max(0.0, limit - time.monotonic()))

    def _run(self, step: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                step()
        except BaseException as error:
            self._failure = error

    def wait(self) -> None:
        self._thread.join()
        if self._failure is not None:
            raise self._failure


atexit.register(_Thread.leave)


class _OnStream:
    def __init__(self, stream: torch.Stream, step: Callable[[], None]) -> None:
        # It begins after what the current stream wrote, and whoever waits goes on after it.
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
        with stream, torch.no_grad():
            step()
        self._device, self._done = stream.device, stream.record_event()
        # Its buffers are of the current stream, whose next tensors would else get their memory while it is in use.
        self._step: Callable[[], None] | None = step

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._done)
        self._step = None
