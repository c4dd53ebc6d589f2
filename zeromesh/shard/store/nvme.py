"""The NVMe tier: states that rest in a swap file, and come and go by several direct requests at a time.

Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", 2021.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from zlib import crc32

import torch

from zeromesh.base.kernels import sums
from zeromesh.base.kernels.native import library
from zeromesh.base.worker import Worker
from zeromesh.shard.store.memory import Buffer
from zeromesh.shard.store.swap_file import ALIGNMENT, Meter, SwapFile, aligned

_log = logging.getLogger(__name__)

MIB = 1 << 20


def checksum(memory: memoryview) -> int:
    """Return a number from all bytes and their order, the same for the same bytes within a process."""
    if library() is None:
        return crc32(memory)  # without Python's lock, too, but at 2 GB/s per core
    return sums.checksum(torch.frombuffer(memory, dtype=torch.uint8), threads=1)


class PendingRequest:
    """A read or write that was begun. Nothing else may touch its buffer until ``wait`` has returned."""

    def __init__(self, what: str, requests: int, meter: Meter, patience: float) -> None:
        self.what = what
        self._requests = self._left = requests
        self._meter = meter
        self._patience = patience
        self._error: BaseException | None = None
        self._raised = False
        self._ended = threading.Condition()

    def done(self) -> bool:
        """Return whether it has ended, well or not."""
        return not self._left

    def wait(self) -> None:
        """Wait until all its requests have ended; whenever that takes another ``patience`` seconds, the log says so.

        Raises:
            OSError: the disk failed, or what was read is not what was written.
            RuntimeError: the store was closed before it was done.
        """
        self.settle()
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Wait; do not raise an error again that was raised before."""
        began = time.monotonic()
        with self._ended:
            while self._left:
                if not self._ended.wait(self._patience):
                    _log.warning(
                        "%s is not done after %.3g s of waiting: %d of %d requests are left; the disk has done %.3g "
                        "MB/s so far",
                        self.what,
                        time.monotonic() - began,
                        self._left,
                        self._requests,
                        self._meter.traffic().rate / 1e6,
                    )
        if self._error is not None and not self._raised:
            self._raised = True
            raise self._error

    def end_one(self, error: BaseException | None) -> None:
        """One of its requests has ended."""
        with self._ended:
            self._left -= 1
            self._error = self._error or error
            if not self._left:
                self._ended.notify_all()


@dataclass(eq=False)
class _Place:
    """Place of a version of a region in the file."""

    offset: int  # a multiple of `ALIGNMENT`, as `nbytes`
    nbytes: int
    # Of each request's bytes, as they were written; None if they were not. Empty before all writes.
    checksums: list[int | None] = field(default_factory=list)
    transfer: PendingRequest | None = None  # what is done with it, or was done last

    @property
    def written(self) -> bool:
        return bool(self.checksums) and None not in self.checksums

    def begin(self, transfer: PendingRequest) -> None:
        self.transfer = transfer

    def forget(self, requests: int) -> None:
        self.checksums = [None] * requests


@dataclass(eq=False)
class Region:
    """Bytes of a store, which are read into, and written from, buffers."""

    nbytes: int  # as it was asked for
    _current: _Place
    _next: _Place | None = field(default=None, repr=False)

    @property
    def padded(self) -> int:
        """Bytes that it takes in the file, and that a buffer for it must have."""
        return self._current.nbytes

    def provide(self, spare: _Place) -> None:
        """Write provisionally to this place from here on."""
        # What an update computes may have to be dropped, as when the norm is not finite: the region stays as it is.
        assert self._next is None
        self._next = spare

    def commit(self) -> _Place:
        """Let the provisional place be the region's; return the old one."""
        assert self._next is not None
        old, self._current, self._next = self._current, self._next, None
        return old

    def drop(self) -> _Place:
        """Forget the provisional place and return it."""
        assert self._next is not None
        spare, self._next = self._next, None
        return spare


@dataclass(frozen=True)
class Disk:
    """Folder of a tier of files, and the use of the disk."""

    folder: Path
    # Flat buffers whose states are in host memory at most: one is used, the next are read and the last are written.
    buffers: int = 4
    block_size: int = 1 << 20  # bytes of a request
    queue_depth: int = 8  # requests at a time


class FileStore:
    """Regions in a swap file of this process, which is deleted when the store is closed or forgotten, or Python ends.

    Raises:
        ValueError: a number is out of range.
        OSError: the folder cannot be used; the message says why.
    """

    def __init__(
        self, folder: str | Path, rank: int = 0, block_size: int = MIB, queue_depth: int = 8, patience: float = 30.0
    ) -> None:
        if block_size < ALIGNMENT or block_size % ALIGNMENT:
            raise ValueError(f"block_size is {block_size}; direct I/O takes a positive multiple of {ALIGNMENT}")
        if queue_depth < 1:
            raise ValueError(f"queue_depth is {queue_depth}; at least one request is with the disk at a time, say 8")
        self._block_size = block_size
        self._patience = patience  # seconds of waiting for a transfer after which the log says that the disk is slow
        self._file = SwapFile(Path(folder), rank)
        self.path, self.direct = self._file.path, self._file.direct  # direct: requests pass by the page cache
        self._meter = Meter()
        self.traffic = self._meter.traffic
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._end = 0
        self._spare: list[_Place] = []
        self._provisional: list[Region] = []
        # The threads know the file, not the store, so that it can be forgotten while they work. At Python's end nobody
        # waits for them but ``_close``, which does not let them finish what is left.
        work = partial(_work, self._requests, self._file, self._meter)
        threads = [Worker(work, f"nvme-{n}") for n in range(queue_depth)]
        self._close = weakref.finalize(self, _close, self._requests, threads, self._file)
        for thread in threads:
            thread.start()

    def __enter__(self) -> FileStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """The size of the swap file."""
        return self._file.nbytes

    def allocate(self, nbytes: int) -> Region:
        """A region of ``nbytes`` bytes, to be used after the next ``reserve``."""
        assert nbytes > 0, "a region without bytes"
        return Region(nbytes, self._place(nbytes))

    def allocate_spare(self, nbytes: int, count: int = 1) -> None:
        """Room for ``count`` provisional writes of regions of this size at once, after the next ``reserve``."""
        self._spare += [self._place(nbytes) for _ in range(count)]

    def reserve(self) -> None:
        """Take the disk space of all that was allocated."""
        self._require_open()
        self._file.reserve(self._end)

    def read(self, region: Region, buffer: Buffer) -> PendingRequest:
        """Begin to read a region, as it was last committed or written, into the front of a buffer."""
        return self._begin(region._current, buffer, writes=False)

    def write(self, region: Region, buffer: Buffer, provisional: bool = False) -> PendingRequest:
        """Begin to write a region from the front of a buffer; with ``provisional`` it counts from ``commit`` on."""
        place = region._current
        if provisional:
            if region._next is None:
                region.provide(self._take_spare(place.nbytes))
                self._provisional.append(region)
            assert region._next is not None
            place = region._next
        else:
            assert region._next is None, "a region is written while a provisional write of it awaits commit or drop"
        return self._begin(place, buffer, writes=True)

    def holds(self, region: Region, buffer: Buffer) -> bool:
        """Return whether the front of a buffer is what a region was last written with, by its checksums."""
        place = region._current
        _settle(place)
        both = zip(self._blocks(place), place.checksums, strict=True) if place.written else ()
        return place.written and all(checksum(buffer.view[block]) == expected for block, expected in both)

    def commit(self) -> None:
        """Let all regions hold what was written provisionally; waits until it is on the disk."""
        try:
            for region in self._provisional:
                assert region._next is not None
                assert region._next.transfer is not None
                region._next.transfer.wait()  # also an error that was raised before
        except BaseException:
            self.drop()
            raise
        for region in self._provisional:
            # Reads of the old place that are under way end well: who writes to it next waits for them.
            self._spare.append(region.commit())
        self._provisional.clear()

    def drop(self) -> None:
        """Forget what was written provisionally, also what failed."""
        for region in self._provisional:
            assert region._next is not None
            with suppress(OSError, RuntimeError):
                _settle(region._next)
            self._spare.append(region.drop())
        self._provisional.clear()

    def close(self) -> None:
        """Wait for the requests that are with the disk, forget the others, and delete the file."""
        self._close()

    def _require_open(self) -> None:
        if not self._close.alive:
            raise RuntimeError(f"the store in {self.path.parent} was closed, and its file is deleted; open another one")

    def _place(self, nbytes: int) -> _Place:
        place = _Place(self._end, aligned(nbytes))
        self._end += place.nbytes
        return place

    def _take_spare(self, nbytes: int) -> _Place:
        place = next((place for place in self._spare if place.nbytes == nbytes), None)
        assert place is not None, f"no spare place of {nbytes} bytes is left: see allocate_spare"
        self._spare.remove(place)
        return place

    def _begin(self, place: _Place, buffer: Buffer, writes: bool) -> PendingRequest:
        """Cut a transfer into requests and hand them to the threads."""
        self._require_open()
        assert place.offset + place.nbytes <= self._file.nbytes, "a region is used that was not reserved"
        assert buffer.nbytes >= place.nbytes, f"a buffer of {buffer.nbytes} bytes for a region of {place.nbytes}"
        # One thread uses the store. Of several operations on one region, or with one buffer, each waits for the last
        # one.
        _settle(place)
        _settle(buffer)
        assert writes or place.written, "a region is read that was never written, or not to its end"
        self._file.check()
        blocks = list(self._blocks(place))
        if writes:
            place.forget(len(blocks))
        what = f"{'writing' if writes else 'reading'} {place.nbytes:,} bytes at {place.offset:,} of {self.path}"
        pending = PendingRequest(what, len(blocks), self._meter, self._patience)
        place.begin(pending)
        buffer.begin(pending)
        for index, block in enumerate(blocks):
            memory, offset = buffer.view[block], place.offset + block.start
            # Several at a time: the kernel's calls leave Python's lock alone, so they overlap with each other.
            self._requests.put(_Request(pending, place, index, offset, memory, writes))
        return pending

    def _blocks(self, place: _Place) -> Iterator[slice]:
        """Yield the part of a buffer that each request for a place moves."""
        for begin in range(0, place.nbytes, self._block_size):
            yield slice(begin, min(begin + self._block_size, place.nbytes))


def _settle(used: _Place | Buffer) -> None:
    """Wait for what is done with a place or a buffer; what goes wrong is raised, unless it was raised before."""
    if used.transfer is not None:
        used.transfer.settle()


@dataclass(frozen=True)
class _Request:
    pending: PendingRequest
    place: _Place
    index: int  # of the part
    offset: int  # of its first byte in the file
    memory: memoryview  # of the buffer
    writes: bool

    def run(self, file: SwapFile, meter: Meter) -> None:
        if self.writes:
            written = checksum(self.memory)  # before: what somebody changes meanwhile is noticed when it is read
            with meter.count(len(self.memory), writes=True):
                file.write(self.memory, self.offset)
            self.place.checksums[self.index] = written
            return
        with meter.count(len(self.memory), writes=False):
            file.read(self.memory, self.offset)
        if checksum(self.memory) != self.place.checksums[self.index]:
            raise OSError(
                errno.EIO,
                f"{len(self.memory):,} bytes at {self.offset:,} of {file.path} are not those that were written there: "
                "the file was changed by somebody else, or the disk is failing (see dmesg); start again from the last "
                "checkpoint",
            )


def _work(requests: SimpleQueue[_Request | None], file: SwapFile, meter: Meter) -> None:
    while (request := requests.get()) is not None:
        error: BaseException | None = None
        try:
            request.run(file, meter)
        except BaseException as caught:  # whoever waits for it raises it
            error = caught
        request.pending.end_one(error)
        del request, error  # or the buffer would live until the next one comes


def _close(requests: SimpleQueue[_Request | None], threads: Sequence[Worker], file: SwapFile) -> None:
    """End the threads, then the file: whoever closes a file under a thread's hands has it write to another one."""
    try:
        with suppress(Empty):
            while (request := requests.get_nowait()) is not None:
                error = RuntimeError(f"{request.pending.what} was not done: its store was closed before")
                request.pending.end_one(error)
        _end(requests, threads, file)
    except BaseException:  # as Ctrl-C: threads may be with the disk yet, and somebody has to wait for them
        Worker(partial(_end, requests, threads, file), "nvme-end").start()
        raise


def _end(requests: SimpleQueue[_Request | None], threads: Sequence[Worker], file: SwapFile) -> None:
    for _ in threads:
        requests.put(None)
    for thread in threads:
        # One that could not be started has nothing to end; the current one may be the one that collects garbage.
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join()
    file.delete()
