"""The lowest loss of a run's evaluations, and whether the run has gone on long enough without a lower one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from zeromesh.apps.train.train_settings import EarlyStop

BEST = "best"  # tag of the checkpoint; without a number, so that checkpoint.keep_last never deletes it


@dataclass
class BestLoss:
    """Lowest evaluation loss so far. A resumed run continues from ``state``."""

    loss: float | None = None  # nats per label; None before the first evaluation
    step: int = 0  # of the lowest
    level: float | None = None  # loss that the next must be below by min_delta
    waited: int = 0  # evaluations since that was reached

    @classmethod
    def of(cls, state: Mapping[str, Any] | None) -> BestLoss:
        """Return what a checkpoint's client state holds."""
        return cls(**state) if state else cls()

    @property
    def state(self) -> dict[str, Any]:
        """Values for the client state of a checkpoint."""
        return asdict(self)

    def add(self, step: int, loss: float, stop: EarlyStop | None) -> bool:
        """Take in an evaluation, and return whether it is the lowest. A loss that is not finite is none."""
        needed = 0.0 if stop is None else stop.min_delta
        self.waited += 1
        if self.level is None or loss < self.level - needed:
            self.level, self.waited = loss, 0
        if self.loss is not None and not loss < self.loss:
            return False
        self.loss, self.step = loss, step
        return True

    def ends(self, stop: EarlyStop | None) -> bool:
        """Return whether the run stops here."""
        return stop is not None and self.waited >= stop.patience
