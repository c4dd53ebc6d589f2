"""Asynchronous saves: a copy of the state in host memory, which a thread writes while training goes on.

The thread calls no collectives: the first rank finds the others' results as files in the draft's folder, and their
failures, of which a disk may take no note, in the ranks' store.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zeromesh.base.machine import memory
from zeromesh.base.placement import Tier
from zeromesh.base.worker import Worker
from zeromesh.checkpoint.boxes import Box
from zeromesh.checkpoint.checkpoint_folder import DRAFT
from zeromesh.checkpoint.rank_manifests import part_file, shard_file
from zeromesh.comm.agreement import agree_success
from zeromesh.comm.collectives import Group
from zeromesh.comm.mesh import Mesh
from zeromesh.comm.trust import connect_again
from zeromesh.shard.store.memory import empty_on

_log = logging.getLogger("zeromesh")

# Seconds in which another rank's files do not grow, after which it counts as gone. Flushing a file to a slow disk
# takes a part of it.
QUIET = 300.0

MOST_ASKED = 16  # ranks that are still writing of whose files the sizes are asked for

ALIGNMENT = 64  # bytes; every dtype may begin at a multiple of it

WHAT = "save the checkpoint"

# Remedies by the number of the error; the last is that of all others.
_REMEDIES = {
    errno.ENOSPC: "make room, set checkpoint.keep_last, or save to another folder",
    errno.EDQUOT: "raise the quota, set checkpoint.keep_last, or save to another folder",
    errno.EFBIG: "raise the limit (`ulimit -f`), or save from more ranks",
    errno.ENOENT: "let nothing delete the folder while a checkpoint is written",
}
_REMEDY = "save to a folder that can be written to"

# Numbers of saves, by the process group of all ranks, which begin the same ones.
_numbers: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()


class BackgroundSaves:
    """Saves of one engine beside its training, one at a time.

    The memory of the copy is kept for the next save.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._world: Group = mesh.group("world")
        self._thread: _SaveThread | None = None
        self._known = False  # whether the failure of the last save was raised or accepted on all ranks
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def reserve(self, boxes: list[Box], device: torch.device) -> None:
        """Make room for a copy of the boxes that rest in memory, page-locked if they come from a GPU.

        Raises:
            OSError: the host has less memory than that.
        """
        assert self._thread is None or self._thread.over, "the memory is being written"
        self._used = 0
        needed = sum(_padded(box.nbytes) for box in boxes if not box.from_disk)
        if needed <= self._memory.numel():
            return
        self._memory = torch.empty(0, dtype=torch.uint8)  # before the larger one is made
        available = memory()["available_bytes"]
        if available is not None and available < needed:
            raise OSError(
                errno.ENOMEM,
                f"an asynchronous checkpoint copies {needed:,} bytes to host memory, of which {available:,} are "
                "available; set checkpoint.asynchronous to false, or use more ranks",
            )
        try:
            self._memory = empty_on(Tier.HOST, needed, torch.uint8, device)
        except RuntimeError:  # so much cannot be page-locked; copies to other memory take longer
            self._memory = empty_on(Tier.HOST, needed, torch.uint8, device, pin=False)

    def copy(self, box: Box) -> Box:
        """Return the box with a copy of its data in the reserved memory; ``synchronize`` waits for copies."""
        data = box.data()
        here = self._memory[self._used :][: data.nbytes].view(data.dtype)
        here.copy_(data, non_blocking=True)
        self._used += _padded(data.nbytes)
        return replace(box, read=lambda: here)

    @staticmethod
    def synchronize(device: torch.device) -> None:
        """Wait for the copies from a GPU."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def start(self, folder: Path, work: Callable[[Failures], None], resources: ExitStack) -> None:
        """Run ``work``, which writes the checkpoint ``folder``, in a thread; it closes ``resources`` in the end."""
        self._known = False
        failures = Failures(self._mesh.store, next(_numbers.setdefault(dist.group.WORLD, count())))
        self._thread = _SaveThread(folder, partial(work, failures), resources)
        try:
            self._thread.start()
        except RuntimeError:  # the system has no more threads
            self._thread.write()

    def failed(self) -> bool:
        """Return True if the last save has failed here, and the ranks have not agreed on it yet."""
        return not self._known and self._thread is not None and self._thread.failure is not None

    def surface(self, raises: bool) -> None:
        """Raise the failure of a save on all ranks, or only note it: the thread has logged it. Collective."""
        assert self._thread is not None
        self._known = True
        if raises:
            agree_success(self._world, WHAT, self._thread.failure)

    def finish(self, raises: bool) -> None:
        """Wait until no save is under way on any rank; raise a failure that is not known yet. Collective."""
        if self._thread is None:
            return
        self._thread.join()
        raises, self._known = raises and not self._known, True
        try:
            agree_success(self._world, WHAT, self._thread.failure)
        except Exception:
            if raises:
                raise

    def wait(self) -> Path | None:
        """Wait for the last save and return its folder, None if there was none; raise its failure. Collective."""
        if self._thread is None:
            return None
        self._known = False
        self.finish(raises=True)
        return self._thread.folder

    def close(self) -> None:
        """Wait for the save of this rank, and give up the memory; raise a failure that is not known yet."""
        if (thread := self._thread) is not None:
            thread.join()
        self._thread = None  # not before: who interrupts the wait, and goes on, waits again
        self._memory, self._used = torch.empty(0, dtype=torch.uint8), 0
        if thread is not None and thread.failure is not None and not self._known:
            raise thread.failure


class _SaveThread(Worker):
    """Thread that writes one checkpoint. It is no daemon: the end of the program waits for it."""

    # It holds Python's lock only between system calls and hashes of megabytes each; see ADR 26.

    def __init__(self, folder: Path, work: Callable[[], None], resources: ExitStack) -> None:
        super().__init__(self.write, f"zeromesh save {folder.name}", daemon=False)
        self.folder, self.failure = folder, cast(Exception | None, None)
        self._writes, self._held = work, resources

    def write(self) -> None:
        """Write the checkpoint, and keep and log a failure."""
        try:
            with self._held:
                self._writes()
        except BaseException as error:  # whatever it was, the program must hear of it
            self.failure = error if isinstance(error, Exception) else RuntimeError(f"the save ended with {error!r}")
            _log.warning("%s", self.failure)
        finally:
            del self._writes  # which holds what it wrote


class SaveFailed(OSError):
    """An asynchronous save failed; the message names the folder, the reason and the remedy."""


def explained(folder: Path, error: Exception) -> Exception:
    """Return the error of a write with the file, the rule and the remedy."""
    if isinstance(error, SaveFailed) or not isinstance(error, OSError):
        return error
    reason = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    return SaveFailed(
        error.errno or errno.EIO,
        f"the checkpoint {folder} was not written ({reason}); earlier ones are as they were, and the next "
        f"save_checkpoint is another try: {_REMEDIES.get(error.errno or 0, _REMEDY)}",
    )


class Failures:
    """Failures of ranks to write their parts of a save, which threads tell each other in the ranks' store, if any."""

    def __init__(self, store: Any, number: int) -> None:
        self._store, self._key = store, f"zeromesh/saves/{number}"
        self._own: dict[int, str] = {}

    def tell(self, rank: int, error: Exception) -> None:
        """Note why this rank could not write its part."""
        self._own[rank] = text = str(error) or type(error).__name__
        if self._store is not None:
            with suppress(RuntimeError):  # the first rank, which holds the store, may have ended
                store = connect_again(self._store)
                store.set(f"{self._key}/{rank}", text)
                store.set(f"{self._key}/any", "")

    def among(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the failures of some ranks that are known so far, by rank."""
        failures = {rank: self._own[rank] for rank in ranks if rank in self._own}
        if self._store is not None and self._store.check([f"{self._key}/any"]):
            keys = {rank: f"{self._key}/{rank}" for rank in ranks if rank not in failures}
            failures |= {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
        return failures


def wait_for_ranks(draft: Path, ranks: int, failures: Failures) -> None:
    """Wait until all ranks have described their parts, or told why they could not write them.

    Raises:
        FileNotFoundError: the folder is gone.
        SaveFailed: a rank could not write its part, or none of the missing ones has written for ``QUIET`` seconds.
    """
    failed: dict[int, str] = {}
    missing, before = list(range(ranks)), (-1, -1)
    since, pause = time.monotonic(), 0.01
    while True:
        # One listing, and the sizes of a few files: for large runs, whose file server should not be asked of each rank.
        names = {*os.listdir(draft)}
        missing = [rank for rank in missing if part_file(rank) not in names]
        failed |= failures.among(missing)
        missing = [rank for rank in missing if rank not in failed]
        if not missing:
            break
        files = [draft / name for name in map(shard_file, missing[:MOST_ASKED]) if name in names]
        now = len(missing), sum(path.stat().st_size for path in files)
        if now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > QUIET:
            raise SaveFailed(
                errno.ETIMEDOUT,
                f"the checkpoint {str(draft).removesuffix(DRAFT)} was not written: rank {missing[0]} has written "
                f"nothing to it for {QUIET:.0f} s; see whether the rank is alive, and its disk",
            )
        time.sleep(pause)
        pause = min(1.0, 1.5 * pause)
    for rank in sorted(failed):
        raise SaveFailed(errno.EIO, f"rank {rank} could not {WHAT}: {failed[rank]}")


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
