"""The lock of a folder that one process at a time may write to."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".lock"  # file in a folder, as long as a process writes there; one that a killed process has left is taken over
# Seconds for which a lock of another host is waited for: a file server may need a while to notice that a machine is
# gone.
OTHER_HOST = 60.0

_log = logging.getLogger("zeromesh")


class FolderInUse(OSError):
    """Another process writes to the folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if it is missing; without locks in its file system there is a warning.

    Raises:
        FolderInUse: another process has it; the message names process, host and time.
        OSError: the folder cannot be made, or not be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    descriptor = _take(path)
    try:
        yield
    finally:
        if descriptor is not None:
            try:
                with suppress(OSError):  # a disk that fails must not hide why the work ended
                    path.unlink(missing_ok=True)  # before the lock goes: nobody else deletes a file that is locked
            finally:
                os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Return whether a process writes to a folder; asking takes no lock, which that process would find taken."""
    try:
        words = json.loads((folder / LOCK).read_bytes())
        if words["host"] == socket.gethostname() and os.name != "nt":  # there it would end the process
            os.kill(words["process"], 0)
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return True  # of another user, or just taken
    return True


def _take(path: Path) -> int | None:
    end = time.monotonic() + OTHER_HOST
    while True:
        descriptor = _open(path)
        try:
            flock(descriptor)
        except OSError as error:
            # ``os.pread`` is missing on Windows.
            with os.fdopen(descriptor, "rb") as file:
                host, holder = _holder(file.read(4096))
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                if host not in (None, socket.gethostname()) and time.monotonic() < end:
                    time.sleep(1.0)
                    continue
                raise FolderInUse(errno.EBUSY, f"{holder} writes to {path.parent}") from None
            _log.warning("%s: there are no locks here (%s); start no second run there", path, error.strerror)
            return None
        if _is_at(path, descriptor):
            break
        os.close(descriptor)  # who had it before has just deleted the file
    words = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(words).encode(), 0)
    return descriptor


def _open(path: Path) -> int:
    """Open the file of a lock, which is made if it is missing; raise OSError for what another one has put there."""
    # It is overwritten, so that a link to a file of the user's, symbolic or hard, would be an order to destroy that.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        descriptor = None
    state = None if descriptor is None else os.fstat(descriptor)
    if descriptor is not None and state is not None:
        if stat.S_ISREG(state.st_mode) and state.st_nlink <= 1:
            return descriptor
        os.close(descriptor)
    raise OSError(
        errno.EPERM, "the file of the lock is a link, or no regular file, and is not written to; delete it", str(path)
    )


def flock(descriptor: int, waits: bool = False) -> None:
    """Lock a file for this process; raise OSError if another one has it, or if there are no locks."""
    # The kernel gives it back however the process ends, so that none is left by one that was killed.
    try:
        import fcntl
    except ImportError:
        raise OSError(errno.ENOSYS, "Python has no fcntl on this system") from None
    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(written: bytes) -> tuple[str | None, str]:
    """Return the host of the process that has the lock, if it is known, and the process in words."""
    try:
        words = json.loads(written)
        return words["host"], f"process {words['process']} on {words['host']}, since {words['since']},"
    except (ValueError, KeyError, TypeError, RecursionError):
        return None, "another process"  # it has just taken the lock, and not written yet who it is
