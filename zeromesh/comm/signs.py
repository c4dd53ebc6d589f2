"""Signs of life: each rank gives its own in memory that the ranks of its machine share, and one of them passes all on.

However many ranks there are, a rank calls the store only while it writes for its machine, and then a fixed number of
times in each tick.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

_log = logging.getLogger("zeromesh")

RECORD = 12288  # bytes of one rank's record: three texts of four bytes a character; pages without data take no memory
LONGEST = 1000  # characters of a text in a record
FRESH = 3  # looks without a new sign, from which on a rank is quiet, and the next one of its machine writes

_boards: WeakKeyDictionary[Any, Board] = WeakKeyDictionary()  # by the store of the ranks

# Tells machines, and containers on one, apart: process numbers of another one mean nothing here.
try:
    PLACE = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
except OSError:
    PLACE = f"{socket.gethostname()}/?"


class Board:
    """Records of the ranks of one place. The first of them that comes makes the memory, and tells the store of it."""

    def __init__(self, store: Any, rank: int) -> None:
        self._rank, self._beat = rank, 0
        self._left = False  # True once this process ends
        self._lost = False  # True once a record could not be written
        self._signs: dict[object, dict[str, Any]] = {}  # by the engine's watchdog
        self._still: dict[int, tuple[int, int]] = {}  # by rank, its last beat, and looks since it came
        self._lock = threading.Lock()
        self._shared = hasattr(os, "memfd_create")
        self._file = os.memfd_create("zeromesh-signs") if self._shared else _own_file()
        token = secrets.token_hex(8)
        self._write(0, {"token": token})
        mine = f"{os.getpid()} {self._file} {token}"
        first = store.compare_set(f"zeromesh/places/{PLACE}", "", mine).decode() if self._shared else mine
        if first == mine or not self._join(first):
            self._write(0, {"token": token, "number": int(store.add("zeromesh/nodes", 1)) - 1})

    @classmethod
    def of(cls, store: Any, rank: int) -> Board:
        """Return this process's board for a store."""
        if store not in _boards:
            _boards[store] = cls(store, rank)
        return _boards[store]

    def _join(self, first: str) -> bool:
        """Take the memory of the first rank of this place in place of this one's; return False if it is not there."""
        process, file, token = first.split(" ")
        alone = self._file
        try:
            self._file = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # it is another user's, or has ended
            self._shared = False
            return False
        if (self._read(0) or {}).get("token") == token:
            os.close(alone)
            return True
        os.close(self._file)
        self._file, self._shared = alone, False
        return False

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._file)

    @property
    def number(self) -> int | None:
        """Number of this place, in the order in which they came; None while its first rank has not told."""
        return (self._read(0) or {}).get("number")

    @property
    def ended(self) -> str:
        """Why the run ends; empty while it goes on."""
        return str((self._read(0) or {}).get("ended", ""))

    def tell_end(self, why: str) -> None:
        """Let the other ranks of this place end, too."""
        self._write(0, (self._read(0) or {}) | {"ended": why[: 3 * LONGEST // 2]})

    def tell_over(self, words: dict[str, Any]) -> None:
        """Give no more signs, as this process ends; leave ``words`` about how."""
        with self._lock:
            self._left = True
            self._write(1 + self._rank, {"over": words, "process": os.getpid()})

    def over(self) -> list[dict[str, Any]]:
        """Return what ranks of this place have left that have ended."""
        records = [self._read(1 + rank) or {} for rank in self._ranks()]
        return [record["over"] for record in records if "over" in record]

    def gone(self) -> list[int]:
        """Return ranks of this place whose process is stopped, or gone without a word."""
        records = {rank: self._read(1 + rank) or {} for rank in self._ranks()}
        living = {rank: record["process"] for rank, record in records.items() if record and "over" not in record}
        return [rank for rank, process in living.items() if life(process, PLACE) == "stopped"]

    def process_of(self, rank: int) -> int | None:
        """Return the number of the process of a rank that has an engine in this place; None if there is none."""
        return (self._read(1 + rank) or {}).get("process")

    def give(self, owner: object, sign: dict[str, Any]) -> bool:
        """Give a sign of life; return whether ``owner`` is the one of this process that looks at the others'."""
        with self._lock:
            self._signs[owner] = sign
            self._beat += 1
            # Of two engines one may wait while the other one rests.
            most = max(self._signs.values(), key=lambda sign: (sign["due"], sign["long"]))
            if not self._left:
                self._write(1 + self._rank, {"beat": self._beat, "process": os.getpid(), **most})
            return next(iter(self._signs)) is owner

    @property
    def waits_here(self) -> bool:
        """True if an engine of this process has waited for long; another one's watchdog may be the one that looks."""
        with self._lock:
            return any(sign["long"] for sign in self._signs.values())

    def leave(self, owner: object) -> None:
        """Give no more signs: a process without an engine, which may prepare data for hours, owes none."""
        with self._lock:
            self._signs.pop(owner, None)
            if not self._signs and not self._left:
                self._write(1 + self._rank, None)

    def line(self) -> dict[str, Any] | None:
        """Return what this rank is to pass on of its place; None if a rank before it does that."""
        processes: dict[int, int] = {}
        quiet: dict[int, tuple[int, str]] = {}
        waits: dict[str, tuple[Any, list[int]]] = {}
        waiting, due = None, 0
        for rank in self._ranks():
            record = self._read(1 + rank)
            if not record or "over" in record:
                self._still.pop(rank, None)
                continue
            before, count = self._still.get(rank, (-1, 0))
            # Looks are counted instead of seconds, as this process may be stopped, too.
            self._still[rank] = record["beat"], count = record["beat"], count + 1 if record["beat"] == before else 0
            if rank < self._rank and count < FRESH:
                return None
            processes[rank] = record["process"]
            if count >= FRESH and rank != self._rank:
                quiet[rank] = count, life(record["process"], PLACE)
            elif record["due"] or record.get("soon"):
                due += record["due"]
                waits.setdefault(json.dumps(record["wait"]), (record["wait"], []))[1].append(rank)
            if waiting is None and record["long"] and rank not in quiet:
                waiting = rank, record["wait"]
        return {
            "beat": f"{self._rank}:{self._beat}",
            "place": PLACE,
            "host": socket.gethostname(),
            "processes": processes,
            "quiet": quiet,
            "waits": [*waits.values()],
            "due": due,
            "waiting": waiting,
        }

    def _ranks(self) -> Iterator[int]:
        """Yield the ranks that have given a sign here, ascending."""
        if not self._shared:
            yield self._rank
            return
        begin = RECORD
        with contextlib.suppress(OSError):  # no data is behind the last of them
            while True:
                begin = os.lseek(self._file, begin, os.SEEK_DATA)
                end = os.lseek(self._file, begin, os.SEEK_HOLE)
                yield from (offset // RECORD - 1 for offset in range(begin - begin % RECORD, end, RECORD))
                begin = end

    def _write(self, place: int, words: dict[str, Any] | None) -> None:
        body = json.dumps(words, ensure_ascii=False).encode(errors="replace")  # escaped it would be longer
        try:
            os.pwrite(self._file, f"{zlib.crc32(body):08x}{len(body):08x}".encode() + body, place * RECORD)
        except OSError as error:  # a limit of the size of files counts for memory, too
            if not self._lost:
                _log.warning(
                    "rank %d cannot give signs of life (%s), so that a hang may not be seen: set ulimit -f to at least "
                    "%d kB",
                    self._rank,
                    error.strerror,
                    (place + 1) * RECORD // 1024,
                )
            self._lost = True

    def _read(self, place: int) -> dict[str, Any] | None:
        """Return a record; the last one that could be read where another rank is writing it; None if there is none."""
        for _ in range(10):
            data = os.pread(self._file, RECORD, place * RECORD)
            with contextlib.suppress(ValueError):
                body = data[16 : 16 + int(data[8:16], 16)]
                if zlib.crc32(body) == int(data[:8], 16):
                    words: dict[str, Any] | None = json.loads(body)
                    return words
            if not data.strip(b"\0"):
                break
        return None


def _own_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read_lines(store: Any) -> dict[int, dict[str, Any]]:
    """Return the last line of each place, by its number, with three calls of the store."""
    keys = [f"zeromesh/nodes/{number}" for number in range(int(store.add("zeromesh/nodes", 0)))]
    if not store.check(keys):  # one that has come has passed nothing on so far
        keys = [key for key in keys if store.check([key])]
    return {
        int(key.rpartition("/")[2]): json.loads(text) for key, text in zip(keys, store.multi_get(keys), strict=True)
    }


def read_waits(store: Any) -> dict[int, dict[str, Any]]:
    """Return what each rank waits for that has waited for long."""
    return {rank: wait for line in read_lines(store).values() for wait, ranks in line["waits"] for rank in ranks}


def read_over(store: Any) -> list[dict[str, Any]]:
    """Return what the first rank of the run that ended has left; nothing if none has, or there is no store."""
    has_ended = store is not None and store.check(["zeromesh/over"])
    return [json.loads(store.get("zeromesh/over"))] if has_ended else []


def life(process: int, place: str) -> str:
    """Return what the kernel says of a process: stopped, alive, or unknown if it is in another place."""
    if place != PLACE or place.endswith("?"):
        return "unknown"
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return "stopped"
    return "stopped" if stat.rpartition(")")[2].split()[0] in ("T", "t", "Z", "X") else "alive"


def network_place() -> str:
    """Name the machine and the container: ranks in networks of their own count as on several machines."""
    try:
        return f"{PLACE} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return PLACE
