"""Traffic of a disk, and the time that it was at work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class DiskTraffic:
    """Traffic of a store so far."""

    bytes_read: int
    bytes_written: int
    read_seconds: float  # with at least one read at the disk
    write_seconds: float
    busy_seconds: float  # with any request at the disk: less than both together, where they overlap

    @property
    def rate(self) -> float:
        """Bytes per second while the disk was busy, both directions together."""
        return (self.bytes_read + self.bytes_written) / self.busy_seconds if self.busy_seconds else 0.0


class _Busy:
    """Counts bytes, and the seconds in which at least one request was under way."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._active = 0
        self._since = self._seconds = 0.0

    def begin(self, now: float) -> None:
        if not self._active:
            self._since = now
        self._active += 1

    def end(self, now: float, nbytes: int) -> None:
        self._active -= 1
        self.nbytes += nbytes
        if not self._active:
            self._seconds += now - self._since

    def seconds(self, now: float) -> float:
        return self._seconds + (now - self._since if self._active else 0.0)


class Meter:
    """The traffic of a store, counted in its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read, self._written, self._any = _Busy(), _Busy(), _Busy()

    @contextmanager
    def count(self, nbytes: int, writes: bool) -> Iterator[None]:
        """Measure a request, which is with the disk in this context; its bytes count if it ends well."""
        both = (self._written if writes else self._read, self._any)
        with self._lock:
            now = time.perf_counter()
            for busy in both:
                busy.begin(now)
        moved = 0
        try:
            yield
            moved = nbytes
        finally:
            with self._lock:
                now = time.perf_counter()
                for busy in both:
                    busy.end(now, moved)

    def traffic(self) -> DiskTraffic:
        """Return the traffic so far, with the requests under way."""
        with self._lock:
            now = time.perf_counter()
            seconds = (busy.seconds(now) for busy in (self._read, self._written, self._any))
            return DiskTraffic(self._read.nbytes, self._written.nbytes, *seconds)
