"""Files in memory that outlive the ranks: their folder on this node, and the mark in a run that leads to it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from zeromesh.base.files import read_text, write_text
from zeromesh.base.lock import FolderInUse, locked
from zeromesh.base.machine import memory
from zeromesh.base.worker import Worker
from zeromesh.comm.agreement import catch

MEMORY = "ZEROMESH_MEMORY"  # variable with a folder in memory; by default that of the system

PATIENCE = 10.0  # seconds for which the lock of a folder is waited for
SECONDS = 5.0  # for which parts are still sent when a rank has failed

MARK = "copies.json"  # file in a run's folder of checkpoints, which leads to its copies


def root() -> Path:
    """Return the folder in memory for files of this node."""
    shared = Path("/dev/shm")
    return Path(os.environ.get(MEMORY) or (shared if shared.is_dir() else tempfile.gettempdir()))


def place() -> str:
    """Return what is the same for all processes that share the folder in memory, and differs elsewhere."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    status = root().stat()
    return f"{boot.read_text().strip() if boot.is_file() else socket.gethostname()} {status.st_dev} {status.st_ino}"


def mark(folder: Path, name: str) -> None:
    """Let a run's folder lead to its copies."""
    write_text(folder / MARK, json.dumps({"name": name, "of": str(folder.absolute())}))


def marked(folder: Path) -> str | None:
    """Return the name of the copies of the run that saves to ``folder``; None if there are none on any node."""
    try:
        record = json.loads(read_text(folder / MARK))
        name, of = str(record["name"]), record["of"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    # Folders of this name are deleted, so it must not lead elsewhere; nor is a copied folder that of the run.
    return name if re.fullmatch(r"zeromesh-\d+-[0-9a-f]{16}", name) and of == str(folder.absolute()) else None


def discard(folder: Path) -> None:
    """Let nothing lead to the copies of a run's folder any more, and delete this node's, unless a process uses them."""
    if (name := marked(folder)) is None:
        return
    with suppress(OSError), ExitStack() as stack:  # such as FolderInUse; the rank that calls this is alone
        if (root() / name).is_dir():
            stack.enter_context(locked(root() / name))
        (folder / MARK).unlink(missing_ok=True)
        shutil.rmtree(root() / name, ignore_errors=True)


class Exchange(Worker):
    """Thread that sends this rank's part of a copy to other nodes, and takes theirs."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.failure: Exception | None = None

        def exchange() -> None:
            self.failure = catch(work)[1]  # the next copy raises it

        super().__init__(exchange, "zeromesh copies")


@dataclass
class Kept:
    """Files of the copies of a run on this node."""

    folder: Path  # of the run's checkpoints
    name: str
    rank: int
    beside: list[int]  # ranks of this node
    lock: ExitStack = field(default_factory=ExitStack)
    held: bool = False
    wrote: bool = False  # whether this process made one of the copies
    exchange: Exchange | None = None

    @property
    def here(self) -> Path:
        """Folder on this node."""
        return root() / self.name

    @property
    def leads(self) -> bool:
        """True on the first rank of the node, which makes and locks the folder."""
        return self.rank == self.beside[0]

    def slot(self, sequence: int) -> Path:
        """Return the folder of one of the two copies."""
        return self.here / f"copy_{sequence % 2}"

    def hold(self) -> None:
        """Make the folder, and lock it for the ranks of this node.

        Raises:
            FolderInUse: another process has had it for ``PATIENCE`` seconds.
            PermissionError: others can read it, or it is another user's.
        """
        if not self.leads or self.held:
            return
        with suppress(FileExistsError):
            self.here.mkdir(mode=0o700)
        status = self.here.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != user() or status.st_mode & 0o077:
            raise PermissionError(errno.EACCES, "it is not a folder of this user alone; delete it", str(self.here))
        end = time.monotonic() + PATIENCE
        while not self.held:
            try:
                self.lock.enter_context(locked(self.here))
                self.held = True
            except FolderInUse:  # workers of a killed rank, such as those of its data loader, have it for a moment
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
        for path in self.here.glob("done_*"):
            path.unlink()  # of ranks that ended well, when another one failed
        for sequence in range(2):
            self.slot(sequence).mkdir(exist_ok=True)

    def own(self) -> None:
        """Take the copies as made by this process, which deletes them in the end."""
        self.wrote = True

    def begin(self, exchange: Exchange) -> None:
        """Let the nodes exchange their parts."""
        self.exchange = exchange
        exchange.start()

    def settle(self) -> None:
        """Wait until the nodes have exchanged their parts; raise what went wrong, once."""
        if (exchange := self.exchange) is not None:
            exchange.join()
            self.exchange = None  # not before: who interrupts the wait, and goes on, waits again
            if exchange.failure is not None:
                raise exchange.failure

    def leave(self, failed: bool) -> None:
        """Let go; the last rank of a node deletes what this run has made, unless one of them has failed."""
        if self.exchange is not None:
            # A thread that waits for a node that has gone must not hold up the end; one that sends may finish.
            self.exchange.join(SECONDS if failed else None)
        if self.wrote and not failed:
            with suppress(OSError):
                (self.here / f"done_{self.rank}").touch()
            if all((self.here / f"done_{rank}").exists() for rank in self.beside):
                if 0 in self.beside and marked(self.folder) == self.name:
                    with suppress(OSError):
                        (self.folder / MARK).unlink()
                shutil.rmtree(self.here, ignore_errors=True)
        self.lock.close()
        self.held = False


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
            f"there ({error.strerror}); set checkpoint.peer_copies to 0, let {MEMORY} name a folder in memory "
            "with more room "
            "(in Docker: --shm-size), or use more ranks",
        ) from None


def user() -> int:
    """Return the number of the user; 0 on a system without any."""
    return os.getuid() if hasattr(os, "getuid") else 0


def description(slot: Path, rank: int) -> Path:
    """Return the file that describes the part of a rank in a copy; with it the part is complete."""
    return slot / f"rank_{rank:05d}.json"
