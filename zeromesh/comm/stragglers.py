"""Find ranks that compute much longer than the others, for which these wait in every update."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

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
    idle: float  # sum over the updates of what the slowest rank worked longer than the median of those beside it


class Stragglers:
    """Comparison of the time that ranks compute between updates; warns of a slow one, once per ``INTERVAL``."""

    def __init__(self, mesh: Mesh, clock: Callable[[], float] = time.monotonic) -> None:
        self._mesh = mesh
        self._clock = clock
        self._mark: tuple[float, float] | None = None  # time, and seconds waited, at the last call of ``busy``
        self._began = clock()
        self._updates = 0
        self._busy = [0.0] * mesh.world_size
        self._taken = Busy(0, [0.0] * mesh.world_size, 0.0)

    def busy(self) -> float:
        """Return the seconds since the last call in which this rank did not wait for others; 0 at first."""
        waited, now, before = self._mesh.waited, self._clock(), self._mark
        if waited is None:  # nccl's waits are on the device: nothing is known, and nobody is named
            return 0.0
        self._mark = now, waited
        return 0.0 if before is None else max(0.0, now - before[0] - (waited - before[1]))

    def compare(self, busy: Sequence[float]) -> None:
        """Take each rank's seconds, and warn on the first rank if a warning is due."""
        if self._mesh.rank or not all(seconds > 0.0 for seconds in busy):
            return
        taken, columns = self._taken, [*zip(*self._mesh.lines("pipeline"), strict=True)]
        # Of the stages that wait for each other, the one with the slowest rank counts.
        late = max(max(own) - median(own) for own in ([busy[rank] for rank in ranks] for ranks in columns))
        seconds = [before + one for before, one in zip(taken.seconds, busy, strict=True)]
        self._taken = Busy(taken.updates + 1, seconds, taken.idle + late)
        self._updates += 1
        self._busy = [before + seconds for before, seconds in zip(self._busy, busy, strict=True)]
        if self._updates < LEAST_UPDATES or self._clock() - self._began < INTERVAL:
            return
        # Ranks at other places of a pipeline are not compared, as stages may differ.
        for ranks in columns:
            for rank in ranks:
                others = [self._busy[other] for other in ranks if other != rank]
                usual = median(others) if others else 0.0
                if usual and self._busy[rank] >= RATIO * usual:
                    _log.warning(
                        "rank %d computed %.1f times as long as the others in the last %d updates (%.3g s instead of "
                        "%.3g s each), and all wait for it; look for other programs, heat or slow memory on its "
                        "machine, or for a data loader that is slow there",
                        rank, self._busy[rank] / usual, self._updates,
                        self._busy[rank] / self._updates, usual / self._updates,
                    )  # fmt: skip
        self._began, self._updates, self._busy = self._clock(), 0, [0.0] * len(self._busy)

    def take(self) -> Busy | None:
        """Return the work since the last call; None where it is not known, and on all ranks but the first."""
        taken, self._taken = self._taken, Busy(0, [0.0] * self._mesh.world_size, 0.0)
        return taken if taken.updates else None
