"""Breakdown of an update's time, from the spans of several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from zeromesh.base.spans import Span, Spans
from zeromesh.base.words import counted

# Time between phases: waiting for a batch where a forward follows, else the user's own code.
DATA, OTHER = "data", "other"
BEFORE_FORWARD = ("forward", "evaluation")

MOST_PHASES = 1000  # that are kept without an update, as in a long evaluation


@dataclass(frozen=True)
class Breakdown:
    """Mean seconds per update."""

    updates: int
    total: float  # from the end of one update to that of the next
    phases: dict[str, float]  # parts of ``total``; they add up to it
    # Per phase the kinds of spans in it, each without the spans inside of it; the rest is the phase's own.
    inside: dict[str, dict[str, float]]

    def __add__(self, other: Breakdown) -> Breakdown:
        """Return the breakdown of the updates of both."""
        updates = self.updates + other.updates

        def mean(first: float, second: float) -> float:
            return (first * self.updates + second * other.updates) / updates

        def means(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
            return {kind: mean(first.get(kind, 0.0), second.get(kind, 0.0)) for kind in first | second}

        phases = means(self.phases, other.phases)
        inside = {phase: means(self.inside.get(phase, {}), other.inside.get(phase, {})) for phase in phases}
        return Breakdown(updates, mean(self.total, other.total), phases, inside)

    def text(self) -> str:
        """Return a table."""

        def line(name: str, seconds: float) -> str:
            return f"{name:<24}{1e3 * seconds:>10.2f}{seconds / self.total if self.total > 0 else 0.0:>8.1%}"

        updates = counted(self.updates, "update")
        lines = [f"{updates}, {1e3 * self.total:.2f} ms each", f"  {'phase':<22}{'ms':>10}{'share':>8}"]
        for phase, seconds in self.phases.items():
            lines.append(line(f"  {phase}", seconds))
            parts = sorted(self.inside.get(phase, {}).items(), key=lambda part: -part[1])
            lines += [line(f"    {kind}", part) for kind, part in parts]
        return "\n".join(lines)


class Timer:
    """Timer that adds up the phases of ``spans`` by kind; the memory that it needs does not grow with the updates."""

    def __init__(self, spans: Spans) -> None:
        self._spans, self._clock = spans, spans.clock
        self.begin()

    def begin(self) -> None:
        """Count from here on."""
        self._spans.phases.clear()
        self._begin = self._last = self._clock.mark()
        self._phases: dict[str, float] = defaultdict(float, {DATA: 0.0})
        self._inside: dict[str, dict[str, float]] = {}
        self._before = 0

    def after_update(self) -> None:
        """Add up the phases of the update before this one."""
        self._add(self._before)  # they are over on the device, too, so nobody waits for it
        self._before = len(self._spans.phases)

    def after_phases(self) -> None:
        """Add up phases where there are very many without an update."""
        if len(self._spans.phases) > MOST_PHASES:
            self._add(MOST_PHASES // 2)
            self._before = 0

    def take(self, updates: int) -> Breakdown:
        """Return the breakdown of so many updates, which is all since ``begin``. Waits for the device."""
        now, clock = self._clock.mark(), self._clock
        clock.settle(now)
        self._add(len(self._spans.phases))
        rest = self._phases.get(OTHER, 0.0) + clock.seconds(self._last, now)
        phases = {kind: seconds for kind, seconds in self._phases.items() if kind != OTHER} | {
            OTHER: rest
        }  # as the last

        def means(sums: dict[str, float]) -> dict[str, float]:
            return {kind: seconds / updates for kind, seconds in sums.items()}

        inside = {phase: means(kinds) for phase, kinds in self._inside.items()}
        return Breakdown(updates, clock.seconds(self._begin, now) / updates, means(phases), inside)

    def _add(self, count: int) -> None:
        """Add up the first ``count`` phases that are left."""
        clock, phases = self._clock, self._spans.phases[:count]
        if phases:
            clock.settle(phases[-1].end)
        for phase in phases:
            self._phases[DATA if phase.kind in BEFORE_FORWARD else OTHER] += clock.seconds(self._last, phase.begin)
            self._phases[phase.kind] += clock.seconds(phase.begin, phase.end)
            self._last = phase.end
            kinds = self._inside.setdefault(phase.kind, defaultdict(float))
            for span in _spans_in(phase):
                parts = sum(clock.seconds(part.begin, part.end) for part in span.inside)
                kinds[span.kind] += clock.seconds(span.begin, span.end) - parts
        del self._spans.phases[:count]


def _spans_in(span: Span) -> Iterator[Span]:
    """Yield all spans inside of one, at every depth."""
    for part in span.inside:
        yield part
        yield from _spans_in(part)
