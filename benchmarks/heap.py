"""The live heap of this process: bytes in malloc blocks that are in use. Needs Linux with glibc 2.33, and no compiler.

Resident memory, which the kernel counts, also has what malloc keeps after a free, and code. CPU tensors are malloc
blocks; Python's own small objects mostly are not.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class Peak:
    """The most bytes that were live while somebody looked."""

    def __init__(self) -> None:
        self.bytes = 0


class Heap:
    """Asks glibc.

    Raises:
        OSError: the C library is not glibc, or too old.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "mallinfo2"):
            raise OSError("the live heap can be measured with glibc 2.33 and newer only")
        self._mallinfo = libc.mallinfo2
        self._mallinfo.restype = _Mallinfo

    def live(self) -> int:
        """Bytes in use now: in blocks with a mapping of their own, whole pages, and in all others."""
        found = self._mallinfo()
        return int(found.hblkhd + found.uordblks)

    @contextmanager
    def watch(self, interval: float = 0.0005) -> Iterator[Peak]:
        """Look every ``interval`` seconds, in a thread, while the context lasts."""
        peak, done = Peak(), threading.Event()

        def look() -> None:
            while not done.is_set():
                peak.bytes = max(peak.bytes, self.live())
                time.sleep(interval)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield peak
        finally:
            peak.bytes = max(peak.bytes, self.live())
            done.set()
            thread.join()
