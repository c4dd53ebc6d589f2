"""What tells whether bytes came back from the disk as they went there."""

from __future__ import annotations

import zlib


def checksum(memory: memoryview) -> int:
    """A number from all bytes and their order: one changed block in 2^32 goes unnoticed, runs of up to 32 bits never.

    CRC-32, as the standard library has it: without the interpreter's lock, 2 GB/s per core. Sums of 64-bit words with
    weights modulo 2^64 are twice as fast in numpy, and do not see that two signs have changed.
    """
    return zlib.crc32(memory)
