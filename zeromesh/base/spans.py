"""Spans: named stretches of time inside an update, for the breakdown and for traces. Free while nobody looks.

The engine opens a *phase*: forward, backward, step. What it calls says with ``span`` what it is doing; that goes to
whoever watches the phase that is going on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import record_function

PREFIX = "zeromesh."  # of the names of spans in a trace
NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Clock:
    """A host's or a device's time."""

    mark: Callable[[], Any]
    seconds: Callable[[Any, Any], float]  # between two marks
    settle: Callable[[Any], object]  # waits until a mark can be read


def clock_of(device: torch.device) -> Clock:
    """Return the host's clock for a CPU, else events on the device's current stream."""
    if device.type == "cpu":
        return Clock(time.perf_counter, lambda begin, end: float(end - begin), lambda mark: None)

    def mark() -> torch.Event:  # read later, so that nothing has to wait
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    return Clock(mark, lambda begin, end: begin.elapsed_time(end) / 1000, lambda event: event.synchronize())


class Span:
    """One stretch of time between two marks of the clock, with the spans directly inside of it. Entered once."""

    def __init__(self, spans: Spans, kind: str, of: object, is_phase: bool) -> None:
        self._spans = spans
        self._of = of
        self._outermost = is_phase and not spans.in_phase  # a phase inside of another one is a part of that
        self._function: Any = None
        self._before: Spans | None = None
        self.kind = kind
        self.begin: Any = None
        self.end: Any = None
        self.inside: list[Span] = []

    def __enter__(self) -> None:
        spans = self._spans
        if self._outermost:
            self._before = spans.watch()
        if spans.traced:
            self._function = record_function(f"{PREFIX}{self.kind} {self._of}".rstrip())
            self._function.__enter__()
        if spans.timed:
            spans.open.spans.append(self)
            self.begin = spans.clock.mark()

    def __exit__(self, *error: Any) -> None:
        spans = self._spans
        if self.begin is not None:
            self.end = spans.clock.mark()
            spans.open.spans.pop()
            spans.add(self, self._outermost)
        if self._function is not None:
            self._function.__exit__(*error)
        if self._outermost:
            spans.unwatch(self._before)


class _Open(threading.local):
    """Spans of a thread that have begun. On an accelerator the backward runs in a thread of its own."""

    def __init__(self) -> None:  # called in each thread
        self.spans: list[Span] = []


class Spans:
    """Recorder of the phases of one engine."""

    def __init__(self, device: torch.device, timed: bool = False) -> None:
        self.clock = clock_of(device)
        self.timed = timed  # True if spans are kept, to be read
        self.traced = False  # True if torch's profiler gets their names
        self.phases: list[Span] = []  # those that have ended and were not taken yet
        self.in_phase = False
        self.open = _Open()
        self._unattached: list[Span] = []

    def time(self, timed: bool) -> None:
        """Keep spans from now on, or no longer."""
        self.timed = timed

    def trace(self, traced: bool) -> None:
        """Name spans to torch's profiler from now on, or no longer."""
        self.traced = traced

    def watch(self) -> Spans | None:
        """Begin a phase, and return the watcher of the one that it interrupts: engines may run inside of each other."""
        global _watching
        before, _watching, self.in_phase = _watching, self, True
        return before

    def unwatch(self, before: Spans | None) -> None:
        """End the phase."""
        global _watching
        _watching, self.in_phase = before, False

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return the context of a phase of the engine."""
        return Span(self, name, "", is_phase=True) if self.timed or self.traced else NOTHING

    def add(self, span: Span, outermost: bool) -> None:
        """Take in a span that has ended."""
        if outermost:
            span.inside.extend(self._unattached)
            self._unattached.clear()
            self.phases.append(span)
        elif self.open.spans:
            self.open.spans[-1].inside.append(span)
        else:
            self._unattached.append(span)  # the phase is open in another thread, which waits for this one


_watching: Spans | None = None  # watcher of the current phase


def span(kind: str, of: object = "") -> AbstractContextManager[None]:
    """Return the context of a named piece of work: ``kind``, one word, and its object for traces."""
    if _watching is None:
        return NOTHING
    return Span(_watching, kind, of, is_phase=False)


def collective(name: str, axis: str, sent: int) -> None:
    """Mark in a trace the moment in which a collective begins that sends so many bytes from this rank."""
    if _watching is not None and _watching.traced:
        with record_function(f"{PREFIX}{name} {axis} {sent} bytes"):
            pass
