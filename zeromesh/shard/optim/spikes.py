"""Updates whose loss or gradient norm is far above those before them.

Leaving out the batches of a spike, from a state before it, lets training go on as if it had not been. Source: Chowdhery
et al., "PaLM: Scaling Language Modeling with Pathways", 2022, section 5.1.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from zeromesh.base.words import counted

_log = logging.getLogger("zeromesh")

LEAST = 10  # updates before one is called usual
MOST_SKIPPED = 10  # spikes in a row, after which the level is not a spike
IN_A_ROW = "in a row"


@dataclass(frozen=True)
class Spike:
    """An update that is far above those before it."""

    update: int
    name: str  # loss or gradient norm
    value: float
    usual: float  # the median of the last updates
    skipped: bool

    def __str__(self) -> str:
        """Return a sentence."""
        done = "left out" if self.skipped else "made"
        return (
            f"update {self.update} is {done}: its {self.name} of {self.value:.4g} is "
            f"{self.value / self.usual:.1f} times the median of those before, {self.usual:.4g}"
        )


class SpikeWatch:
    """Compares updates with those before them; all ranks come to the same answers.

    A spike is above a multiple of the median of the last ``window`` values; a limit of None does not look.
    """

    def __init__(self, loss: float | None, norm: float | None, window: int, skips: bool) -> None:
        self._window, self._skips = window, skips
        self._limits = {"loss": loss, "gradient norm": norm}
        self._seen: dict[str, deque[float]] = {name: deque(maxlen=window) for name in self._limits}
        self._in_a_row = 0
        self._warned = False  # that the loss is not known
        self.last: Spike | None = None  # what the last update was, if it was a spike

    def look(self, update: int, loss: float | None, norm: float) -> Spike | None:
        """Return what is wrong with an update before it is made, or None.

        Args:
            update: its number.
            loss: mean over ranks and micro-batches; None where it is not known.
            norm: of the gradient, before clipping.

        Raises:
            FloatingPointError: so many updates in a row were left out that it is not a spike.
        """
        self.last = None
        values = {"loss": loss, "gradient norm": norm}
        for name, value in values.items():
            limit, seen = self._limits[name], self._seen[name]
            if limit is not None and value is None and not self._warned:
                self._warned = True
                _log.warning(
                    "spikes of the loss cannot be detected, because the engine does not see the loss: call "
                    "engine.backward(loss), or watch the gradient norm"
                )
            if limit is None or value is None or len(seen) < min(LEAST, self._window):
                continue
            if value > limit * median(seen) > 0:
                self.last = Spike(update, name, value, median(seen), self._skips)
                break
        left_out = self.last is not None and self._skips
        self._in_a_row = self._in_a_row + 1 if left_out else 0
        if self._in_a_row >= MOST_SKIPPED:
            raise FloatingPointError(
                f"{counted(MOST_SKIPPED, 'update')} in a row were left out as spikes, so this is a new level; "
                f"{self.last}; raise spikes.loss and spikes.norm and resume, or start again with a lower learning rate"
            )
        if not left_out:
            for name, value in values.items():
                if value is not None:
                    self._seen[name].append(value)
        return self.last

    def state(self) -> dict[str, list[float]]:
        """Return what a checkpoint keeps, so that a run that is resumed answers as one that was not."""
        return {name: list(values) for name, values in self._seen.items()} | {IN_A_ROW: [self._in_a_row]}

    def load(self, state: dict[str, Sequence[float]]) -> None:
        """Take what a checkpoint has kept; nothing is what older ones have."""
        for name, values in self._seen.items():
            values.clear()
            values.extend(state.get(name, ()))
        self._in_a_row, self.last = int(*state.get(IN_A_ROW, (0,))), None
