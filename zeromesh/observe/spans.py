"""Spans: named stretches of time inside an update, for the breakdown and for traces. Free while nobody looks.

The engine opens a *phase*: forward, backward, step. What it calls says with ``span`` what it is doing; that goes to
whoever watches the phase that is going on. Time is the host's on a CPU. On an accelerator it is taken with events on
the current stream, which are read later, so that nothing has to wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.autograd.profiler import record_function

PREFIX = "zeromesh."
"""Names of spans in a trace begin with it."""

NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Clock:
    """``mark`` takes a mark, ``seconds`` tells the time between two, ``settle`` waits until a mark can be read."""

    mark: Callable[[], Any]
    seconds: Callable[[Any, Any], float]
    settle: Callable[[Any], object]


def clock_of(device: torch.device) -> Clock:
    """The host's clock, or events on the device's current stream."""
    if device.type == "cpu":
        return Clock(time.perf_counter, lambda begin, end: float(end - begin), lambda mark: None)

    def mark() -> torch.Event:
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    return Clock(mark, lambda begin, end: begin.elapsed_time(end) / 1000, lambda event: event.synchronize())


class Span:
    """One stretch of time between two marks of the clock, with the spans directly inside of it. Entered once."""

    def __init__(self, spans: Spans, kind: str, of: object, is_phase: bool) -> None:
        self._spans = spans
        self._of = of
        self._outermost = is_phase and spans.phase_now is None
        self._function: Any = None
        self._before: Spans | None = None
        self.kind = kind
        self.begin: Any = None
        self.end: Any = None
        self.inside: list[Span] = []

    def __enter__(self) -> None:
        global _watching
        spans = self._spans
        if self._outermost:
            self._before, _watching, spans.phase_now = _watching, spans, self.kind
        if spans.traced:
            self._function = record_function(f"{PREFIX}{self.kind} {self._of}".rstrip())
            self._function.__enter__()
        if spans.timed:
            spans.open.append(self)
            self.begin = spans.clock.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        global _watching
        spans = self._spans
        if self.begin is not None:
            self.end = spans.clock.mark()
            spans.open.pop()
            spans.add(self, self._outermost)
        if self._function is not None:
            self._function.__exit__(kind, error, where)
        if self._outermost:
            _watching, spans.phase_now = self._before, None


class Spans:
    """Recorder of the phases of one engine.

    Attributes:
        timed: whether spans are kept, to be read.
        traced: whether torch's profiler gets their names.
        phases: phases that have ended and were not taken yet.
        phase_now: name of the phase that is going on.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = clock_of(device)
        self.timed = False
        self.traced = False
        self.phases: list[Span] = []
        self.phase_now: str | None = None
        self._threads = threading.local()
        self._unattached: list[Span] = []

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return the context of a phase of the engine; a phase inside of another one is a part of that."""
        return Span(self, name, "", is_phase=True) if self.timed or self.traced else NOTHING

    @property
    def open(self) -> list[Span]:
        """The spans of this thread that have begun. On an accelerator the backward runs in a thread of its own."""
        found: list[Span] | None = getattr(self._threads, "open", None)
        if found is None:
            found = self._threads.open = []
        return found

    def add(self, span: Span, outermost: bool) -> None:
        """A span has ended."""
        if outermost:
            span.inside += self._unattached
            self._unattached = []
            self.phases.append(span)
        elif self.open:
            self.open[-1].inside.append(span)
        else:
            self._unattached.append(span)  # the phase is open in another thread, which waits for this one


_watching: Spans | None = None
"""Watcher of the current phase."""


def span(kind: str, of: object = "") -> AbstractContextManager[None]:
    """Return the context of a named piece of work: one word, and its object for traces."""
    if _watching is None:
        return NOTHING
    return Span(_watching, kind, of, is_phase=False)


def collective(name: str, axis: str, sent: int) -> None:
    """A collective over an axis begins that sends so many bytes from this rank: a moment, for traces."""
    if _watching is not None and _watching.traced:
        with record_function(f"{PREFIX}{name} {axis} {sent} bytes"):
            pass
