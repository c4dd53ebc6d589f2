"""Steps of an optimizer that rows take late: those without a gradient take theirs when they are next used."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from itertools import islice

import torch

from zeromesh.base.kernels.update_pass import UpdatePiece, UpdateStep, update
from zeromesh.shard.tables.row_memory import RowMemory

_log = logging.getLogger(__name__)

WINDOW = 1 << 18  # elements that take all their steps before others do: a processor's cache has them and their states
MOST_MISSED = 1000  # steps that are kept for a row; one that misses more takes them, used or not


class RowSteps:
    """Steps that the rows of one table have taken, and those that they miss."""

    def __init__(self, memory: RowMemory, rows: int, name: str) -> None:
        self._memory, self._name = memory, name
        self.missed = torch.zeros(rows, dtype=torch.int64)  # steps of each row that are to be made up for
        self.last: deque[UpdateStep] = deque()  # the last steps, as many as any row misses

    def take(self, step: UpdateStep, ids: torch.Tensor, gradients: torch.Tensor) -> None:
        """Take a step of the rows ``ids``, whose gradients have shape (k, width); all others miss it."""
        if self.last and self.last[-1].group == step.group:
            step = UpdateStep(step.rule, self.last[-1].group, step.number)  # its options are kept once
        wide = gradients.to("cpu", self._memory.planes[0].dtype)
        place_of = {row: place for place, row in enumerate(ids.tolist())}

        def change(row: int, values: list[torch.Tensor]) -> bool:
            take_steps(values, [*self._missed_by(row), step], wide[place_of[row]])
            self.missed[row] = -1
            return True

        try:
            self._memory.in_place(ids, change)
        except Exception as error:  # nobody hears of it if this was the last step
            _log.error("the update of %s failed, whose next use raises the error: %r", self._name, error)
            raise
        finally:  # after an error the rows that have not taken it miss it
            self.last.append(step)
            self.missed += 1
        self.make_up((self.missed > MOST_MISSED).nonzero().flatten())
        self._forget()

    def make_up(self, rows: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Let some rows, int64 on the host, take the steps that they miss, and copy their weights to ``weights``."""
        wanted = rows if weights is not None else rows[self.missed[rows] > 0]
        if not wanted.numel():
            return
        places = iter(weights if weights is not None else ())

        def change(row: int, values: list[torch.Tensor]) -> bool:
            behind = bool(self.missed[row] > 0)
            if behind:
                take_steps(values, self._missed_by(row), None)
                self.missed[row] = 0
            if weights is not None:
                next(places).copy_(values[0])
            return behind

        self._memory.in_place(wanted, change)
        self._forget()

    def _missed_by(self, row: int) -> list[UpdateStep]:
        return [*islice(reversed(self.last), int(self.missed[row]))][::-1]

    def _forget(self) -> None:
        most = int(self.missed.max()) if self.missed.numel() else 0
        while len(self.last) > most:
            self.last.popleft()


def take_steps(values: list[torch.Tensor], steps: Sequence[UpdateStep], last: torch.Tensor | None) -> None:
    """Take steps with gradients of zero, of which the last one has the gradient ``last`` unless that is None."""
    master, *states = values
    zeros = torch.zeros(min(WINDOW, master.numel()), dtype=master.dtype)
    for start in range(0, master.numel(), WINDOW):
        window = slice(start, min(start + WINDOW, master.numel()))
        parts, size = tuple(state[window] for state in states), window.stop - start
        for step in steps:
            has_gradient = last is not None and step is steps[-1]
            gradient = last[window] if last is not None and has_gradient else zeros[:size]
            update([UpdatePiece(step, gradient, master[window], parts)])
