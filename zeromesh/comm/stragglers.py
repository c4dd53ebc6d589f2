"""Find ranks that compute much longer than the others, for which these wait in every update."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from zeromesh.comm.mesh import Mesh

RATIO = 2.0  # times the others' median from which on a rank is named
INTERVAL = 60.0  # seconds between two warnings, at least
LEAST_UPDATES = 10  # that a warning is about: one slow update, such as one that saves, says little

_log = logging.getLogger("zeromesh")


@dataclass(frozen=True)
class Busy:
    """Seconds of work of all ranks in some updates, without waits for each other."""

    updates: int
    seconds: list[float]  # by rank
    usual: list[float]  # median of the ranks beside it; 0 where there is none
    idle: float  # sum over the updates of what the slowest rank worked longer than is usual beside it


class Stragglers:
    """Comparison of the time that ranks compute between updates; warns of a slow one, once per ``INTERVAL``.

    Args:
        mesh: the ranks.
        clock: returns seconds.
        turns: ranks that take turns in telling their seconds, one of them in each update.
    """

    def __init__(self, mesh: Mesh, clock: Callable[[], float] = time.monotonic, turns: int = 1) -> None:
        self._mesh = mesh
        self._clock = clock
        self._turns, self._turn = turns, 0
        self._since: list[tuple[float, float]] = []  # of each update since this rank's last turn
        self._told: list[tuple[Sequence[float], Sequence[float]]] = []  # in each turn, by slot
        self._mark: tuple[float, float] | None = None  # time, and seconds waited, at the last call of ``busy``
        self._began = clock()
        self._updates = 0
        self._busy = [0.0] * mesh.world_size
        self._begun: tuple[float, float] | None = None  # as the mark, at the beginning of an update
        self._taken = self._nothing

    @property
    def _nothing(self) -> Busy:
        ranks = self._mesh.world_size
        return Busy(0, [0.0] * ranks, [0.0] * ranks, 0.0)

    def begin(self) -> None:
        """Let the work of an update begin here, where its batches are there; without it, it begins with the last."""
        if (waited := self._mesh.waited) is not None:
            self._begun = self._clock(), waited

    def busy(self) -> tuple[float, float]:
        """Return the seconds in which this rank did not wait: since the last call, and of them in the update.

        0 at first.
        """
        waited, now, before, begun = self._mesh.waited, self._clock(), self._mark, self._begun
        if waited is None:  # nccl's waits are on the device: nothing is known, and nobody is named
            return 0.0, 0.0
        self._mark, self._begun = (now, waited), None
        if before is None:
            return 0.0, 0.0
        since, in_update = (max(0.0, now - at - (waited - then)) for at, then in (before, begun or before))
        return since, in_update

    def tell(self) -> tuple[float, float]:
        """Return ``busy()`` summed over the updates since this rank's last turn; 0 in the turns of others."""
        self._since.append(self.busy())
        if self._mesh.rank % self._turns != self._turn:
            return 0.0, 0.0
        since, self._since = self._since, []
        measured = all(busy > 0.0 for busy, _ in since)
        return (sum(busy for busy, _ in since), sum(work for _, work in since)) if measured else (0.0, 0.0)

    def hear(self, busy: Sequence[float], work: Sequence[float]) -> None:
        """Take what the ranks have told in this update, by slot; compare all ranks after the last turn."""
        self._turn = (self._turn + 1) % self._turns
        if self._mesh.rank:
            return
        self._told.append((busy, work))
        if self._turn == 0:
            columns = [[*chain.from_iterable(zip(*turns, strict=True))] for turns in zip(*self._told, strict=True)]
            self._told.clear()
            self.compare(*(column[: self._mesh.world_size] for column in columns))

    def compare(self, busy: Sequence[float], work: Sequence[float]) -> None:
        """Take each rank's seconds since the last comparison and of them in updates; warn on the first rank if due."""
        if self._mesh.rank or not all(seconds > 0.0 for seconds in busy):
            return
        # Ranks at other places of a pipeline are not compared, as stages may differ.
        columns = [*zip(*self._mesh.lines("pipeline"), strict=True)]
        self._take_in(columns, work)
        self._updates += self._turns
        self._busy = [before + seconds for before, seconds in zip(self._busy, busy, strict=True)]
        if self._updates < LEAST_UPDATES or self._clock() - self._began < INTERVAL:
            return
        for rank, usual in enumerate(_usual(columns, self._busy)):
            if usual and self._busy[rank] >= RATIO * usual:
                _log.warning(
                    "rank %d computed %.1f times as long as the others in the last %d updates (%.3g s instead of "
                    "%.3g s each), and all wait for it; look for other programs, heat or slow memory on its "
                    "machine, or for a data loader that is slow there",
                    rank,
                    self._busy[rank] / usual,
                    self._updates,
                    self._busy[rank] / self._updates,
                    usual / self._updates,
                )
        self._began, self._updates, self._busy = self._clock(), 0, [0.0] * len(self._busy)

    def _take_in(self, columns: Sequence[Sequence[int]], work: Sequence[float]) -> None:
        taken, usual = self._taken, _usual(columns, work)
        late = max(
            seconds - usual_seconds if usual_seconds else 0.0
            for seconds, usual_seconds in zip(work, usual, strict=True)
        )
        self._taken = Busy(
            taken.updates + self._turns,
            [*map(sum, zip(taken.seconds, work, strict=True))],
            [*map(sum, zip(taken.usual, usual, strict=True))],
            taken.idle + max(0.0, late),
        )

    def take(self) -> Busy | None:
        """Return the work since the last call; None where it is not known, and on all ranks but the first."""
        taken, self._taken = self._taken, self._nothing
        return taken if taken.updates else None


def _usual(columns: Sequence[Sequence[int]], seconds: Sequence[float]) -> list[float]:
    """Return for each rank the median of the others in its column; 0 where there is none."""
    usual = [0.0] * len(seconds)
    for ranks in columns:
        for rank, median in zip(ranks, medians_of_others([seconds[rank] for rank in ranks]), strict=True):
            usual[rank] = median
    return usual


def medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each value the median of all others, from one sorting; 0 where there is no other."""
    count = len(values)
    if count < 2:
        return [0.0] * count
    order = sorted(range(count), key=values.__getitem__)
    medians = [0.0] * count
    # Without the value at a place, those behind it move up by one.
    low, high = (count - 2) // 2, (count - 1) // 2
    for place, index in enumerate(order):
        below = values[order[low + (place <= low)]]
        medians[index] = below if low == high else (below + values[order[high + (place <= high)]]) / 2
    return medians
