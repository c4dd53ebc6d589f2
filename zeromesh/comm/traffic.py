"""Counters of what a rank sends."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from zeromesh.comm.ordered_sums import CHUNK

Listener = Callable[[str, str, int], None] | None  # of a collective's name, its axis, and the bytes sent


@dataclass
class Traffic:
    """Counters of the data that this rank sent since the last reset, by (collective, axis)."""

    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))  # to all ranks
    across: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))  # bytes to other nodes
    # Sums of squares of the rounding errors and of the values of compressed messages; fp64, shape (2,).
    errors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    _listener: Listener = None
    _lock: threading.Lock = field(default_factory=threading.Lock)  # second steps add errors in their own threads

    def listen(self, listener: Listener) -> Listener:
        """Call ``listener`` for each collective from now on; return the one before."""
        before, self._listener = self._listener, listener
        return before

    def add(self, collective: str, axis: str, sent: int, across: int = 0) -> None:
        """Count one call that sends ``sent`` bytes from this rank, ``across`` of them to other nodes."""
        self.calls[collective, axis] += 1
        self.bytes[collective, axis] += sent
        self.across[collective, axis] += across
        if self._listener is not None:
            self._listener(collective, axis, sent)

    def add_error(self, collective: str, axis: str, true: torch.Tensor, written: torch.Tensor) -> None:
        """Add the rounding error of a compressed message: values before it and decoded values, shapes ``(n,)``."""
        squares = torch.zeros(2, dtype=torch.float64, device=true.device)
        # In chunks, so that no fp64 copy of a whole message is made.
        for exact_chunk, other in zip(true.split(CHUNK), written.split(CHUNK), strict=True):
            wide = exact_chunk.double()
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
