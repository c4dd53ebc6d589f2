"""Failures of a run: ranks that cannot start, and the rank that failed first with its reason."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Signals that end ranks because another one is gone: the first is the launcher's, the second that of nccl's watchdog.
CONSEQUENCES = (signal.SIGTERM, signal.SIGABRT)

# Exit status of a run that a signal ended after it was saved; the same command, resumed, goes on. It is EX_TEMPFAIL.
SAVED_AND_ENDED = 75

SAVED = "saved"  # file in the launcher's folder; it exists once the ranks have saved the run

HASTE = 1.0  # seconds of ``grace`` for all signals but SIGTERM, such as Ctrl-C's


def grace(number: int) -> float:
    """Return the seconds from a signal to the launcher until its ranks get SIGKILL."""
    if number != signal.SIGTERM:
        return HASTE
    # After SIGTERM ranks may save. Slurm, too, waits for 30 seconds by default.
    try:
        return max(HASTE, float(os.environ.get("ZEROMESH_GRACE", "30")))
    except ValueError:
        return 30.0


@contextmanager
def handled_signals(handler: Callable[[int, Any], object], numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Handle signals in this context; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)  # None: one that is not Python's


# By name, as Windows does not have all of them.
HINTS = {
    "SIGKILL": "if nobody sent it, the kernel did because memory ran out (see dmesg): start fewer ranks on this "
    "machine, make the micro-batches smaller, or shard more of the states",
    "SIGSEGV": "native code used memory that it must not; PYTHONFAULTHANDLER=1 shows where",
    "SIGBUS": "a file in shared memory could not grow: make /dev/shm larger, or use fewer loader workers",
}


class StartError(RuntimeError):
    """The ranks found no rendezvous, or do not fit together; the message says why and what to do."""


class RankFailure(RuntimeError):
    """A rank that was started by ``launch`` failed.

    Attributes:
        rank: the rank that failed first.
        summary: one line that says why.
        exitcode: its exit status; 128 + the signal's number if a signal ended it.
    """

    def __init__(self, rank: int, summary: str, details: str = "", exitcode: int = 1, waits: bool = False) -> None:
        self.rank = rank
        self.summary = summary
        self.exitcode = exitcode
        # A rank that waited for another one, which failed or ended, names that in its summary.
        super().__init__(f"{'' if waits else f'rank {rank} failed first: '}{summary}\n{details}".rstrip())


def first_failure(folder: Path, exitcodes: Mapping[int, int]) -> RankFailure:
    """Return the failure to show; ``exitcodes`` are those of failed ranks, negative numbers of signals among them."""
    records = {int(file.stem): json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.failure")}
    deciding = [rank for rank in records if records[rank]["lingers"]]
    if deciding:  # the run was ended on purpose, and with it ranks that are killed
        first = min(deciding, key=lambda rank: float(records[rank]["at"]))
        return _recorded(first, records[first])
    # A rank that was killed, or left no record, comes before those with records: they may have failed because of it.
    killed = {rank: -code for rank, code in exitcodes.items() if code < 0}
    for rank, number in sorted(killed.items()):
        if number not in CONSEQUENCES:
            return _killed(rank, number, folder)
    silent = sorted(rank for rank, code in exitcodes.items() if code > 0 and rank not in records)
    if silent:  # it left by itself, such as with os._exit
        return RankFailure(silent[0], f"exited with status {exitcodes[silent[0]]}", "", exitcodes[silent[0]])
    if records:
        # torchrun looks at the ranks ten times a second, and a rank whose peer is gone fails sooner than that; so the
        # order is taken from the times that the ranks themselves wrote down.
        first = min(records, key=lambda rank: (records[rank].get("waits", False), float(records[rank]["at"])))
        aborted = [f"rank {rank} was ended by SIGABRT" for rank in sorted(killed) if killed[rank] == signal.SIGABRT]
        details = "\n".join([records[first]["details"].rstrip(), *aborted])
        return _recorded(first, records[first] | {"details": details})
    # Only consequences are left: what nccl's watchdog ended says more than what the launcher ended afterwards.
    rank, number = min(killed.items(), key=lambda pair: (CONSEQUENCES.index(pair[1]) == 0, pair[0]))
    return _killed(rank, number, folder)


def _recorded(rank: int, record: Mapping[str, Any]) -> RankFailure:
    return RankFailure(rank, record["summary"], record["details"], record["status"], record.get("waits", False))


def _killed(rank: int, number: int, folder: Path) -> RankFailure:
    signal_names = {member.value: member.name for member in signal.Signals}  # most real-time signals have no name
    hint = f"; {HINTS[name]}" if (name := signal_names.get(number, f"signal {number}")) in HINTS else ""
    file = folder / f"{rank}.step"
    step = f" in step {file.read_text(encoding='ascii')}" if file.exists() else ""
    return RankFailure(rank, f"killed by {name}{step}{hint}", "", 128 + number)
