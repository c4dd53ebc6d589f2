"""Asynchronous second steps of collectives, which run as soon as the messages of the first step have arrived."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

import torch

from zeromesh.base.worker import Worker

LEAVING = 1.0  # seconds for which an exiting process waits for unfinished steps


class SecondSteps:
    """Runner of the second steps of collectives; ``device`` is that of the tensors that the messages carry."""

    # Ranks may wait for their collectives in different orders, and a second step needs the second steps of other ranks.
    # If a step ran only when its caller waited for it, such ranks would deadlock. On the host each step therefore runs
    # in a daemon thread of its own; on an accelerator all steps run on one separate stream.

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None
        self._last: dict[int, _Thread] = {}

    def run(self, step: Callable[[], None], tag: int) -> Any:
        """Start a step, without gradients, and return its handle; ``wait()`` blocks until done and raises its error."""
        if self._device.type == "cpu":
            self._last[tag] = thread = _Thread(step)
            return thread
        self._stream = self._stream or torch.Stream(self._device)
        return _OnStream(self._stream, step)

    def finish(self, tag: int) -> None:
        """Wait for the last step with this tag, so that the next collective's messages cannot overtake its messages."""
        if (last := self._last.pop(tag, None)) is not None:
            last.wait()


class _Thread:
    running: ClassVar[WeakSet[_Thread]] = WeakSet()

    def __init__(self, step: Callable[[], None]) -> None:
        self._failure: BaseException | None = None
        # Only the thread keeps the step and its buffers alive: this object stays until the next collective of its tag.
        self._thread = Worker(partial(self._run, step), "zeromesh-second-step")
        self._thread.start()
        self.running.add(self)

    @classmethod
    def leave(cls) -> None:
        """Wait up to ``LEAVING`` seconds for all running steps."""
        # A thread that returns from gloo after the interpreter has shut down aborts the process (SIGABRT).
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
        # The step reads what the current stream has written.
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
        with stream, torch.no_grad():
            step()
        self._device, self._done = stream.device, stream.record_event()
        # The buffers were allocated on the current stream: freed now, their memory would be reused while in use here.
        self._step: Callable[[], None] | None = step

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._done)
        self._step = None
