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


_MMAP_THRESHOLD = -3
"""``M_MMAP_THRESHOLD`` of malloc.h."""


class Peak:
    """The most bytes that were live while somebody looked."""

    def __init__(self) -> None:
        self.bytes = 0


class Heap:
    """Asks glibc.

    Args:
        smallest: count only blocks of at least so many bytes, and only those that are allocated from now on; 0 counts
            all. malloc gives each of them a mapping of its own from here on, so allocating gets slower.

    Raises:
        OSError: the C library is not glibc, or too old.
    """

    def __init__(self, smallest: int = 0) -> None:
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "mallinfo2"):
            raise OSError("the live heap can be measured with glibc 2.33 and newer only")
        self._mallinfo = libc.mallinfo2
        self._mallinfo.restype = _Mallinfo
        self._large = smallest > 0
        if self._large and not libc.mallopt(_MMAP_THRESHOLD, smallest):
            raise OSError(f"malloc cannot be told to map blocks of {smallest} bytes; choose fewer, 1 to 32 MiB")

    def live(self) -> int:
        """Bytes in use now: in blocks with a mapping of their own, whole pages, and in all others."""
        found = self._mallinfo()
        return int(found.hblkhd if self._large else found.hblkhd + found.uordblks)

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
