"""Counters of what a rank sends."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from zeromesh.comm.sums import CHUNK


@dataclass
class Traffic:
    """Counters of the data that this rank sent since the last reset, by (collective, axis).

    Attributes:
        calls: number of collectives.
        bytes: bytes sent to all ranks.
        across: bytes sent to other nodes.
        errors: sums of squares of the rounding errors and of the values of compressed messages; fp64, shape ``(2,)``.
        listener: called with (collective, axis, bytes) for each collective.
    """

    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    across: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    errors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    listener: Callable[[str, str, int], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, collective: str, axis: str, sent: int, across: int = 0) -> None:
        """Count one call that sends ``sent`` bytes from this rank, ``across`` of them to other nodes."""
        self.calls[collective, axis] += 1
        self.bytes[collective, axis] += sent
        self.across[collective, axis] += across
        if self.listener is not None:
            self.listener(collective, axis, sent)

    def add_error(self, collective: str, axis: str, true: torch.Tensor, written: torch.Tensor) -> None:
        """Add the rounding error of a compressed message.

        Args:
            collective: name of the collective.
            axis: name of the mesh axis.
            true: the values before compression, shape ``(n,)``.
            written: the decoded values, shape ``(n,)``.
        """
        squares = torch.zeros(2, dtype=torch.float64, device=true.device)
        for one, other in zip(true.split(CHUNK), written.split(CHUNK), strict=True):
            wide = one.double()
            squares += torch.stack([(other.double() - wide).square().sum(), wide.square().sum()])
        total = squares.cpu()
        with self._lock:
            self.errors[collective, axis] = self.errors.get((collective, axis), 0) + total

    def relative_error(self, collective: str, axis: str) -> float | None:
        """Return the RMS of the rounding errors divided by the RMS of the values; None if nothing was compressed."""
        if (collective, axis) not in self.errors:
            return None
        error, size = self.errors[collective, axis].tolist()
        return float((error / size) ** 0.5) if size else 0.0

    def reset(self) -> None:
        """Set all counters to zero."""
        for counts in (self.calls, self.bytes, self.across, self.errors):
            counts.clear()
