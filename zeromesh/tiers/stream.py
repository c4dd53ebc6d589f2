"""Regions one after the other in a few buffers: read ahead, changed, written behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable

from zeromesh.tiers.buffers import Buffer, Buffers
from zeromesh.tiers.nvme import FileStore, PendingRequest, Region


def stream(
    store: FileStore, regions: Iterable[Region], buffers: Buffers, write: bool = True, provisional: bool = False
) -> Generator[Buffer]:
    """Yield each region in a buffer, in order: while one is computed with, the next are read and the last are written.

    With three buffers all three go on at once. With one they take turns. The caller has a buffer until it asks for the
    next one; what it launched on an accelerator with it, it says by ``Buffer.record``.

    Args:
        store: that has the regions.
        regions: in order of use, each once.
        buffers: at least one must be free that holds the largest region.
        write: whether what is in the buffer after its use is written back.
        provisional: whether that counts only after ``FileStore.commit``.

    Raises:
        OSError: the disk failed, or the file was changed. All buffers are back in the pool then, as they are when the
            caller leaves early, in which case its last buffer is not written.
    """
    waiting = deque(regions)
    reading: deque[tuple[Region, Buffer, PendingRequest]] = deque()
    writing: deque[tuple[Buffer, PendingRequest]] = deque()
    lent: list[Buffer] = []
    try:
        while waiting or reading:
            while writing and writing[0][1].done():
                _finish(writing, lent, buffers)
            while waiting and (buffer := buffers.take(waiting[0].padded)) is not None:
                lent.append(buffer)
                reading.append((waiting[0], buffer, store.read(waiting[0], buffer)))
                waiting.popleft()
            if not reading:
                assert writing, f"no buffer of the pool holds a region of {waiting[0].padded} bytes"
                _finish(writing, lent, buffers)
                continue
            region, buffer, pending = reading.popleft()
            pending.wait()
            yield buffer
            if write:
                writing.append((buffer, store.write(region, buffer, provisional)))
            else:
                lent.remove(buffer)
                buffers.give(buffer)
        while writing:
            _finish(writing, lent, buffers)
    finally:
        for buffer in lent:  # the first error, if any, is on its way to the caller
            buffers.give_settled(buffer)


def _finish(writing: deque[tuple[Buffer, PendingRequest]], lent: list[Buffer], buffers: Buffers) -> None:
    """Wait for the oldest write and return its buffer."""
    buffer, pending = writing.popleft()
    pending.wait()
    lent.remove(buffer)
    buffers.give(buffer)
