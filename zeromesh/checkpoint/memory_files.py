"""Files in memory that outlive the ranks: their folder on this node, and the mark in a run that leads to it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from zeromesh.comm.rank import has_failed
from zeromesh.config.keys import PEER_COPIES
from zeromesh.observe.machine import memory
from zeromesh.tiers.lock import locked

MEMORY = "ZEROMESH_MEMORY"  # variable with a folder in memory; by default that of the system

MARK = "copies.json"  # file in a run's folder of checkpoints, which leads to its copies


def root() -> Path:
    """Return the folder in memory for files of this node."""
    shared = Path("/dev/shm")
    return Path(os.environ.get(MEMORY) or (shared if shared.is_dir() else tempfile.gettempdir()))


def marked(folder: Path) -> str | None:
    """Return the name of the copies of the run that saves to ``folder``; None if there are none on any node."""
    try:
        name = str(json.loads((folder / MARK).read_text(encoding="utf-8"))["name"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    # Folders of this name are deleted, so it must not lead elsewhere.
    return name if re.fullmatch(r"zeromesh-\d+-[0-9a-f]{16}", name) else None


def unmark(folder: Path) -> None:
    """Let nothing lead to the copies any more, whose state is not that of the run."""
    with suppress(OSError):
        (folder / MARK).unlink()


class Exchange(threading.Thread):
    """Thread that sends this rank's part of a copy to other nodes, and takes theirs."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="zeromesh copies", daemon=True)
        self.failure: Exception | None = None
        self._work = work

    def run(self) -> None:
        """Send and receive, and keep a failure."""
        try:
            self._work()
        except Exception as error:  # the next copy raises it
            self.failure = error
        finally:
            del self._work  # which holds the engine's copies


@dataclass
class Kept:
    """Files of copies, and what is to be let go with them; it knows no engine, and so outlives it."""

    folder: Path  # of the run's checkpoints
    name: str
    rank: int
    leads: bool  # the first rank of its node
    lock: ExitStack = field(default_factory=ExitStack)
    held: bool = False
    exchange: Exchange | None = None

    @property
    def here(self) -> Path:
        """Folder on this node."""
        return root() / self.name

    def slot(self, sequence: int) -> Path:
        """Return the folder of one of the two copies."""
        return self.here / f"copy_{sequence % 2}"

    def hold(self) -> None:
        """Make the folder, and lock it for the ranks of this node."""
        if self.leads and not self.held:
            self.here.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.lock.enter_context(locked(self.here))
            self.held = True
            for sequence in range(2):
                self.slot(sequence).mkdir(exist_ok=True)

    def begin(self, exchange: Exchange) -> None:
        """Let the nodes exchange their parts."""
        self.exchange = exchange
        exchange.start()

    def leave(self, failed: bool | None = None) -> None:
        """Delete the copies, unless this rank has failed: it may be started again, and need them.

        None: it ends, and has failed if an exception ends it.
        """
        if failed is None:
            failed = sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None or has_failed()
        if self.exchange is not None and not failed:
            self.exchange.join()
        if not failed and self.rank == 0 and marked(self.folder) == self.name:
            unmark(self.folder)
        self.lock.close()
        if not failed:  # by each rank, as the last of a node may still write while the first deletes
            shutil.rmtree(self.here, ignore_errors=True)


def allocate(path: Path, nbytes: int) -> None:
    """Make a file of ``nbytes``; raise OSError unless its file system and the host have room for them."""
    available, free = memory()["available_bytes"], shutil.disk_usage(path.parent).free
    room = free if available is None else min(free, available)
    try:
        if room < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):  # writing to a mapped file without room would end the process
                os.posix_fallocate(file.fileno(), 0, nbytes)
            else:
                file.truncate(nbytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise OSError(
            error.errno,
            f"a copy of the state takes {nbytes:,} bytes in {root()}, of two that take turns, and {room:,} are free "
            f"there ({error.strerror}); set {PEER_COPIES} to 0, let {MEMORY} name a folder in memory with more room "
            "(in Docker: --shm-size), or use more ranks",
        ) from None


def user() -> int:
    """Return the number of the user; 0 on a system without any."""
    return os.getuid() if hasattr(os, "getuid") else 0


def description(slot: Path, rank: int) -> Path:
    """Return the file that describes the part of a rank in a copy; with it the part is complete."""
    return slot / f"rank_{rank:05d}.json"
