"""Breakdown of an update's time, from the spans of several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zeromesh.observe.spans import Clock, Span, Spans

BEFORE_FORWARD = ("forward", "evaluation")
DATA, OTHER = "data", "other"
"""Time between phases: waiting for a batch where a forward follows, else the user's own code."""

MOST_PHASES = 1000
"""Most phases that are kept without an update, as in a long evaluation."""


@dataclass(frozen=True)
class Breakdown:
    """Mean seconds per update.

    Attributes:
        total: from the end of one update to that of the next.
        phases: parts of ``total``; they add up to it.
        inside: per phase the kinds of spans in it, each without the spans inside of it; the rest is the phase's own.
    """

    updates: int
    total: float
    phases: dict[str, float]
    inside: dict[str, dict[str, float]]

    def __add__(self, other: Breakdown) -> Breakdown:
        """Return the breakdown of the updates of both."""
        updates = self.updates + other.updates

        def mean(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
            sums = {
                kind: first.get(kind, 0.0) * self.updates + second.get(kind, 0.0) * other.updates
                for kind in first | second
            }
            return {kind: value / updates for kind, value in sums.items()}

        inside = {
            phase: mean(self.inside.get(phase, {}), other.inside.get(phase, {})) for phase in self.phases | other.phases
        }
        total = (self.total * self.updates + other.total * other.updates) / updates
        return Breakdown(updates, total, mean(self.phases, other.phases), inside)

    def text(self) -> str:
        """Return a table."""
        lines = [f"{self.updates} updates, {1e3 * self.total:.2f} ms each", f"  {'phase':<22}{'ms':>10}{'share':>8}"]
        for phase, seconds in self.phases.items():
            lines.append(self._line(phase, seconds, 2))
            parts = sorted(self.inside.get(phase, {}).items(), key=lambda part: -part[1])
            lines += [self._line(kind, part, 4) for kind, part in parts]
        return "\n".join(lines)

    def _line(self, name: str, seconds: float, indent: int) -> str:
        share = seconds / self.total if self.total > 0 else 0.0
        return f"{' ' * indent}{name:<{24 - indent}}{1e3 * seconds:>10.2f}{share:>8.1%}"


class Timer:
    """Timer that takes breakdowns of ``spans``; the memory that it needs does not grow with the updates."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self.begin()

    def begin(self) -> None:
        """Count from here on."""
        self._spans.phases = []
        self._sums = Sums(self._spans.clock, self._spans.clock.mark())
        self._before = 0

    def after_update(self) -> None:
        """Add up the phases of the update before this one: they are over on the device, too, so nobody waits for it."""
        self._add(self._before)
        self._before = len(self._spans.phases)

    def after_phases(self) -> None:
        """Add up phases where there are very many without an update."""
        if len(self._spans.phases) > MOST_PHASES:
            self._add(MOST_PHASES // 2)
            self._before = 0

    def take(self, updates: int) -> Breakdown:
        """The breakdown of so many updates, which is all since ``begin``. Waits for the device."""
        now = self._spans.clock.mark()
        self._spans.clock.settle(now)
        self._add(len(self._spans.phases))
        return self._sums.breakdown(now, updates)

    def _add(self, count: int) -> None:
        self._sums.add(self._spans.phases[:count])
        del self._spans.phases[:count]


class Sums:
    """Phases, one after the other from a mark of the clock on, added up by kind."""

    def __init__(self, clock: Clock, begin: Any) -> None:
        self._clock, self._begin, self._last = clock, begin, begin
        self._parts: dict[str, float] = defaultdict(float, {DATA: 0.0})
        self._inside: dict[str, dict[str, float]] = {}

    def add(self, phases: Sequence[Span]) -> None:
        """Add up phases that follow those before."""
        clock = self._clock
        if phases:
            clock.settle(phases[-1].end)
        for phase in phases:
            self._parts[DATA if phase.kind in BEFORE_FORWARD else OTHER] += clock.seconds(self._last, phase.begin)
            self._parts[phase.kind] += clock.seconds(phase.begin, phase.end)
            self._last = phase.end
            kinds = self._inside.setdefault(phase.kind, defaultdict(float))
            for span in _spans_in(phase):
                kinds[span.kind] += own_seconds(span, clock)

    def breakdown(self, end: Any, updates: int) -> Breakdown:
        """Return the means per update, with the time between the last phase and a mark of the clock."""
        rest = self._parts.get(OTHER, 0.0) + self._clock.seconds(self._last, end)
        parts = {kind: seconds for kind, seconds in self._parts.items() if kind != OTHER} | {OTHER: rest}  # as the last
        return Breakdown(
            updates,
            self._clock.seconds(self._begin, end) / updates,
            {kind: seconds / updates for kind, seconds in parts.items()},
            {
                phase: {kind: seconds / updates for kind, seconds in kinds.items()}
                for phase, kinds in self._inside.items()
            },
        )


def own_seconds(span: Span, clock: Clock) -> float:
    """The time of a span without that of the spans inside of it."""
    return clock.seconds(span.begin, span.end) - sum(clock.seconds(part.begin, part.end) for part in span.inside)


def _spans_in(span: Span) -> Iterator[Span]:
    """All spans inside of one, at every depth."""
    for part in span.inside:
        yield part
        yield from _spans_in(part)
