"""Where the time of an update goes, from the spans of several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zeromesh.observe.spans import Clock, Span, Spans

BEFORE_FORWARD = ("forward", "evaluation")
DATA, OTHER = "data", "other"
"""What lies between phases: waiting for a batch where a forward follows, else the user's own code."""


@dataclass(frozen=True)
class Breakdown:
    """Mean seconds per update.

    Attributes:
        updates: how many.
        total: from the end of one update to that of the next.
        phases: parts of ``total``; they add up to it.
        inside: per phase the kinds of spans in it, each without the spans inside of it; the rest is the phase's own.
    """

    updates: int
    total: float
    phases: dict[str, float]
    inside: dict[str, dict[str, float]]

    def text(self) -> str:
        """A table."""
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
    """Takes breakdowns of what ``spans`` saw since the last one."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self.begin()

    def begin(self) -> None:
        """Count from here on."""
        self._spans.phases = []
        self._since = self._spans.clock.mark()

    def take(self, updates: int) -> Breakdown:
        """The breakdown of so many updates, which is all since ``begin``. Waits for the device."""
        clock, now = self._spans.clock, self._spans.clock.mark()
        clock.settle(now)
        return breakdown(self._spans.phases, clock, self._since, now, updates)


def breakdown(phases: Sequence[Span], clock: Clock, begin: Any, end: Any, updates: int) -> Breakdown:
    """Add up what lies between two marks of the clock."""
    total = clock.seconds(begin, end) / updates
    parts: dict[str, float] = defaultdict(float, {DATA: 0.0})
    inside: dict[str, dict[str, float]] = {}
    for phase in phases:
        parts[DATA if phase.kind in BEFORE_FORWARD else OTHER] += clock.seconds(begin, phase.begin) / updates
        parts[phase.kind] += clock.seconds(phase.begin, phase.end) / updates
        begin = phase.end
        kinds = inside.setdefault(phase.kind, defaultdict(float))
        for span in _spans_in(phase):
            kinds[span.kind] += own_seconds(span, clock) / updates
    parts[OTHER] = parts.pop(OTHER, 0.0) + clock.seconds(begin, end) / updates  # as the last one
    return Breakdown(updates, total, dict(parts), {kind: dict(kinds) for kind, kinds in inside.items()})


def own_seconds(span: Span, clock: Clock) -> float:
    """The time of a span without that of the spans inside of it."""
    return clock.seconds(span.begin, span.end) - sum(clock.seconds(part.begin, part.end) for part in span.inside)


def _spans_in(span: Span) -> Iterator[Span]:
    """All spans inside of one, at every depth."""
    for part in span.inside:
        yield part
        yield from _spans_in(part)
