"""Time of a run by what it went to, kept in a file of its folder over failures and restarts.

Goodput is the share of a run's time in steps that count. Source: Jiang et al., "MegaScale: Scaling Large Language Model
Training to More Than 10,000 GPUs", 2024, which calls it the effective training time rate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field, TypeAdapter

from zeromesh.apps.train.metrics import read_records
from zeromesh.base.files import Count, Form, ListOf, Number, added_to, record_type


class Spent(StrEnum):
    """Work that time goes to."""

    STEPS = "steps that count"
    IDLE = "waiting for a rank"  # in steps: work of the slowest beyond the median of all
    REDONE = "steps taken again"  # results of which a failure lost, as no checkpoint held them
    COMPILATION = "compilation"
    DATA = "waiting for data"
    EVALUATION = "evaluation"
    CHECKPOINTS = "checkpoints"
    START = "starting"  # from the command to the first step
    DOWN = "down"  # from the last record of an attempt that failed to the command of the next
    OTHER = "other"


KINDS = {str(kind): kind for kind in Spent}
"""Kinds of work by their names."""


class TimeLog:
    """Clock of a rank that is in one kind of work at any time.

    Args:
        path: file to which this attempt at the run appends its times; None on all ranks but the first.
        began: start of the command, in seconds since the epoch.
        step: updates of the checkpoint from which the attempt goes on.
        again: keep what the file has of earlier attempts.
        compiled: returns the seconds that compilation has taken so far, inside of other work.
    """

    def __init__(
        self, path: Path | None, began: float, step: int, again: bool, compiled: Callable[[], float] = float
    ) -> None:
        self._path, self._compiled = path, compiled
        self._seconds = dict.fromkeys(Spent, 0.0)
        self._recorded: dict[Spent, float] = {}
        self._kind, self._since = Spent.START, time.monotonic() - max(0.0, time.time() - began)
        if path is not None and not again:
            path.unlink(missing_ok=True)
        self._append({"began": began, "step": step})

    @contextmanager
    def spend(self, kind: Spent) -> Iterator[None]:
        """Count the time of this context to a kind of work, and to no other."""
        before, compiled = self._switch(kind), self._compiled()
        try:
            yield
        finally:
            self._switch(Spent.OTHER if before is Spent.START else before)
            compiled = self._compiled() - compiled
            self._seconds[kind] -= compiled
            self._seconds[Spent.COMPILATION] += compiled

    def move(self, kind: Spent, other: Spent, seconds: float) -> None:
        """Count seconds to another kind of work; at most those since the last record."""
        seconds = min(seconds, self._seconds[kind] - self._recorded.get(kind, 0.0))
        self._seconds[kind] -= seconds
        self._seconds[other] += seconds

    def record(self, step: int, ends: bool = False) -> None:
        """Write the times so far, at a step; ``ends`` says that the run ends here and has not failed."""
        self._switch(self._kind)
        seconds = {kind: round(seconds, 3) for kind, seconds in self._seconds.items() if seconds}
        self._recorded = dict(self._seconds)
        self._append({"at": time.time(), "step": step, "seconds": seconds, "ends": ends})

    def note(self, step: int, **values: object) -> None:
        """Write what was seen of the ranks at a step: ``work``, their seconds in an update, or ``health``, a check."""
        self._append({"seen": time.time(), "step": step, **values})

    def _switch(self, kind: Spent) -> Spent:
        now, before = time.monotonic(), self._kind
        self._seconds[before] += now - self._since
        self._kind, self._since = kind, now
        return before

    def _append(self, record: dict[str, object]) -> None:
        if self._path is None:
            return
        # A full disk ends no run: what is not written here counts as other work, or as down.
        with suppress(OSError), added_to(self._path) as file:
            file.write("\n" + json.dumps(record) + "\n")  # after half a line that a full disk may have left


@dataclass
class Stretch:
    """Seconds of an attempt between two of its records."""

    begin: float  # since the epoch
    end: float
    step: int  # at the end
    seconds: dict[Spent, float]


@dataclass
class Attempt:
    """One command, from its start to its end or failure."""

    began: float
    step: int
    stretches: list[Stretch] = field(default_factory=list)
    ends: bool = False

    @property
    def last(self) -> float:
        """Time of the last record."""
        return self.stretches[-1].end if self.stretches else self.began


Moment = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=-1e10, le=1e10, allow_inf_nan=False)]


_SLOW = record_type({"name": str, "since": Count, "value": Number, "usual": Number, "unit": str})
_CHECK = record_type(
    {
        "products": list[Number],
        "memory": list[Number],
        "slow": ListOf[_SLOW],
        "links": list[Annotated[list[Number], Field(min_length=3, max_length=3)]],  # two ranks, and the speed
    }
)
_FORMS: dict[str, Form] = {
    "began": TypeAdapter(record_type({"began": Moment, "step": Count})),
    "seconds": TypeAdapter(record_type({"at": Moment, "step": Count, "seconds": dict[str, Seconds], "ends": bool})),
    "work": TypeAdapter(record_type({"step": Count, "work": list[Seconds], "usual": NotRequired[list[Seconds]]})),
    "health": TypeAdapter(record_type({"step": Count, "health": _CHECK})),
}
"""Forms of records, by the field that tells them."""
_OTHER: Form = TypeAdapter(dict[str, Any])  # of other versions


def read_times(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a file of times, and the number of its lines that are none."""
    return read_records(path, lambda line: next((_FORMS[key] for key in _FORMS if key in line), _OTHER))


def read_attempts(path: Path) -> list[Attempt]:
    """Return the attempts at a run in order, with the steps that were taken again, and the time until the next."""
    attempts: list[Attempt] = []
    before: dict[Spent, float] = {}
    for record in read_times(path)[0]:
        if "began" in record:
            before = {}
            attempt = Attempt(max(record["began"], attempts[-1].last if attempts else 0.0), record["step"])
            attempts.append(attempt)
        elif attempts and "seconds" in record:
            now = dict.fromkeys(Spent, 0.0)
            for kind, seconds in record["seconds"].items():
                now[KINDS.get(kind, Spent.OTHER)] += seconds  # other versions may know other kinds
            spent = {kind: seconds - before.get(kind, 0.0) for kind, seconds in now.items()}
            attempt.stretches.append(Stretch(attempt.last, record["at"], record["step"], spent))
            attempt.ends = record["ends"]
            before = now
    for attempt, later in pairwise(attempts):
        for stretch in (stretch for stretch in attempt.stretches if stretch.step > later.step):
            lost = stretch.seconds.pop(Spent.STEPS, 0.0)
            stretch.seconds[Spent.REDONE] = stretch.seconds.get(Spent.REDONE, 0.0) + lost
        if not attempt.ends:
            down = {Spent.DOWN: later.began - attempt.last}
            attempt.stretches.append(Stretch(attempt.last, later.began, later.step, down))
    return attempts


def totals(attempts: list[Attempt]) -> dict[Spent, float]:
    """Return the seconds of all attempts by kind of work, none left out."""
    seconds_of = dict.fromkeys(Spent, 0.0)
    for stretch in (stretch for attempt in attempts for stretch in attempt.stretches):
        for kind, seconds in stretch.seconds.items():
            seconds_of[kind] += seconds
    return seconds_of
