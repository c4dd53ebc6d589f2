"""The file of a process on a disk: its name, lock and space, direct reads and writes of blocks, and their traffic."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import mmap
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zeromesh.base.lock import flock

_log = logging.getLogger(__name__)

# Bytes: addresses, offsets and lengths of direct I/O are multiples of it, on disks with sectors of 512 or 4096.
ALIGNMENT = 4096

_numbers = itertools.count()


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to whole blocks."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def host_name() -> str:
    """This host, as it stands in names of files."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname()) or "host"


class SwapFile:
    """A file that is this process' own, empty at first, and deleted by ``delete``.

    Raises:
        OSError: the folder is missing or cannot be written to, or its file system has no locks.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        if sys.platform != "linux":
            raise OSError(errno.ENOSYS, f"the NVMe tier needs Linux, and this is {sys.platform}; offload to the host")
        folder = folder.absolute()  # the process may go elsewhere before it deletes the file
        _require(folder)
        # A file whose lock can be had was left by a process that was killed, as the kernel takes the lock away however
        # a process ends. It is worth nothing without its process.
        sweep(folder)
        self.path, self._plain = _create(folder, rank)
        self.nbytes = 0
        self._inode = os.fstat(self._plain).st_ino
        self._owner = os.getpid()
        self._descriptor = self._plain
        self._warned_deleted = False
        try:
            self._open_direct()
        except BaseException:
            self.delete()
            raise

    @property
    def direct(self) -> bool:
        """True if reads and writes pass by the page cache."""
        return self._descriptor != self._plain

    def _open_direct(self) -> None:
        """Open it once more for direct I/O, if a block written and read that way shows that there is such a thing."""
        descriptor = -1
        with mmap.mmap(-1, ALIGNMENT) as block:  # begins at a page
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_DIRECT)
                os.pwritev(descriptor, [block], 0)
                os.preadv(descriptor, [block], 0)
                os.ftruncate(self._plain, 0)
            except OSError as error:
                if descriptor >= 0:
                    os.close(descriptor)
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise _because(
                        error, f"cannot write to {self.path}", "name a folder on a disk that works"
                    ) from error
                _log.warning(
                    "the file system of %s has no direct I/O: the NVMe tier works through the page cache, "
                    "which is slower and takes host memory; a local disk with ext4 or XFS has it",
                    self.path.parent,
                )
                os.ftruncate(self._plain, 0)
            else:
                self._descriptor = descriptor

    def reserve(self, nbytes: int) -> None:
        """Let the file have a size, and the disk space for it."""
        missing, folder = nbytes - self.nbytes, self.path.parent
        if missing <= 0:
            return
        remedy = "make room, or name a folder on a larger disk"
        status = os.fstatvfs(self._plain)
        free = status.f_bavail * status.f_frsize
        needs = f"the NVMe tier needs {missing:,} bytes more in {folder}"
        if free < missing:
            raise OSError(errno.ENOSPC, f"{needs}, where {free:,} are free; {remedy}")
        try:
            # Through this descriptor: where a file system cannot reserve, the C library writes single bytes.
            os.posix_fallocate(self._plain, self.nbytes, missing)
        except OSError as error:
            os.ftruncate(self._plain, self.nbytes)
            limit = "or raise the limit on the size of files (ulimit -f), " if error.errno == errno.EFBIG else ""
            raise _because(error, f"{needs}, which cannot be reserved", limit + remedy) from error
        self.nbytes = nbytes

    def check(self) -> None:
        """Notice that somebody changed the file's size or deleted it."""
        status = os.fstat(self._plain)
        if status.st_size != self.nbytes:
            raise OSError(
                errno.EIO,
                f"{self.path} was changed by somebody else: it has {status.st_size:,} bytes and had {self.nbytes:,}; "
                "what it held is lost; start again from the last checkpoint, and keep others out of the folder",
            )
        if not status.st_nlink and not self._warned_deleted:
            self._warned_deleted = True
            _log.warning("%s was deleted by another process; its space is freed when this process ends", self.path)

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill ``memory`` (whole blocks of bytes, at a multiple of ``ALIGNMENT``) from the file; blocks."""
        self._transfer(memory, offset, writes=False)

    def write(self, memory: memoryview, offset: int) -> None:
        """Write all of ``memory``, as ``read`` reads it; blocks."""
        self._transfer(memory, offset, writes=True)

    def _transfer(self, memory: memoryview, offset: int, writes: bool) -> None:
        done, verb = 0, "writing" if writes else "reading"
        while done < len(memory):
            try:
                count = (os.pwritev if writes else os.preadv)(self._descriptor, [memory[done:]], offset + done)
            except OSError as error:
                what = f"{verb} {len(memory) - done:,} bytes at {offset + done:,} of {self.path} failed"
                raise _because(error, what, "see the kernel's log (dmesg) about the disk") from error
            aligned = count // ALIGNMENT * ALIGNMENT  # what is left must begin at a block again
            if not aligned:
                raise OSError(
                    errno.EIO,
                    f"{verb} {len(memory) - done:,} bytes at {offset + done:,} of {self.path} ended after {count}: the "
                    "file was cut off by somebody else, or the disk is full; start again from the last checkpoint",
                )
            done += aligned
        if not self.direct:
            os.posix_fadvise(self._descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)

    def delete(self) -> None:
        """Delete and close it; nothing if that was done. A process that was forked only closes it."""
        plain, self._plain, descriptor = self._plain, -1, self._descriptor
        self._descriptor = -1
        if plain < 0:
            return
        try:
            if os.getpid() == self._owner:
                with contextlib.suppress(FileNotFoundError):
                    if os.stat(self.path).st_ino == self._inode:  # else it is somebody else's by now
                        os.unlink(self.path)
        finally:
            for each in {plain, descriptor}:
                os.close(each)


def sweep(folder: Path) -> list[Path]:
    """Remove the swap files that processes which were killed have left in a folder; returns which, and logs them."""
    # On a file system that other hosts may share, they need not see each other's locks: their files are only named.
    local = os.major(folder.stat().st_dev) != 0  # it lies on a block device of this machine
    mine = f"zeromesh-{host_name()}-rank"
    removed = []
    for path in sorted(folder.glob("zeromesh-*-rank*-pid*.swap")):
        with contextlib.suppress(OSError):  # another user's, or in use, or gone meanwhile
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                flock(descriptor)
                size = os.fstat(descriptor).st_size
                if local or path.name.startswith(mine):
                    path.unlink()
                    removed.append(path)
                    _log.warning("removed %s (%s bytes), left by a process that was killed", path, f"{size:,}")
                else:
                    _log.warning("%s (%s bytes) is another host's; remove it if nothing runs there", path, f"{size:,}")
            finally:
                os.close(descriptor)
    return removed


def _require(folder: Path) -> None:
    """Raise OSError if it is not a folder. It is not made: a disk that is not mounted would go unnoticed."""
    if not folder.exists():
        raise FileNotFoundError(
            errno.ENOENT, f"the folder {folder} of the NVMe tier does not exist; mount the disk, or make the folder"
        )
    if not folder.is_dir():
        raise NotADirectoryError(
            errno.ENOTDIR, f"{folder}, which the NVMe tier is to use, is not a folder; name a folder"
        )


def _create(folder: Path, rank: int) -> tuple[Path, int]:
    while True:
        path = folder / f"zeromesh-{host_name()}-rank{rank}-pid{os.getpid()}-{next(_numbers)}.swap"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:  # of a process with this number in another container
            continue
        except OSError as error:
            remedy = "name a folder that can be written to"
            raise _because(error, f"cannot make a swap file in {folder}", remedy) from error
        try:
            flock(descriptor, waits=True)  # waits for who just tries whether it is left over
            if os.fstat(descriptor).st_nlink:
                return path, descriptor
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            remedy = "name a folder whose file system has flock"
            raise _because(error, f"cannot lock a swap file in {folder}", remedy) from error
        os.close(descriptor)  # it was removed before it could be locked


def _because(error: OSError, what: str, remedy: str) -> OSError:
    return OSError(error.errno, f"{what} ({error.strerror}); {remedy}")


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
