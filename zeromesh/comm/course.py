"""Course of a rank: how many updates it has made, what it is doing, how it ended; and what those who wait for it say.

A rank that ends leaves a record on the board of its machine, and the first of a run also one in the store. A rank whose
collective cannot be finished reads it, and says who ended, in which call it waits itself, and what usually mends that.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from zeromesh.base.words import counted
from zeromesh.base.worker import Worker
from zeromesh.comm.rank import FAILURES
from zeromesh.comm.signs import LONGEST, Board, read_over

NOTICE = 3.0  # seconds in which a rank that has ended must have left its record; a killed one leaves none
LEAVE = 2.0  # seconds that a process which ends waits for an answer of the store

_PACKAGES = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep, contextlib.__file__)

UNEQUAL = (
    "Give every rank as many batches (DistributedSampler, drop_last=True, or training_data= of initialize), and let a "
    "stop condition hold on all ranks at once."
)
_EVALUATION = (
    "Ranks that evaluate must run as many forwards as the others: give each as many batches (DistributedSampler, "
    "drop_last=True), and let no rank call the model alone; only at ZeRO stages 0 to 2, and where ranks share neither "
    "experts nor layers, a forward needs no other rank."
)

EVALUATES = "a forward without gradients"

# By what a rank waits in; the first row whose word is in it counts.
REMEDIES: Mapping[str, str] = {
    "generate()": "At ZeRO-3, and where ranks share experts, all ranks take part in each token: pass synced_gpus=True "
    "to generate, on all ranks.",
    "save": "All ranks take part in a save: call it on every rank, not under `if rank == 0:`.",
    "load": "All ranks take part in loading: call it on every rank, not under `if rank == 0:`.",
    "state_dict()": "All ranks take part: call it on every rank, not under `if rank == 0:`; to write the model, call "
    "engine.save_16bit_model(folder) on every rank.",
    "eval_batch()": _EVALUATION,
    EVALUATES: _EVALUATION,
}


class PeerLost(RuntimeError):
    """A collective could not be finished, because another rank ended or did not answer in time.

    Attributes:
        brief: True if the message says it all, so that no traceback needs to be shown.
    """

    def __init__(self, message: str, brief: bool = False) -> None:
        super().__init__(message)
        self.brief = brief


class Course:
    """Course of this process. There is one, as a process ends with all of its engines."""

    def __init__(self) -> None:
        self.rank = 0
        self._updates = 0
        self._doing: list[str] = []  # calls of the engine, the outermost first
        self.evaluated = 0  # forwards without gradients since the last update
        self._board: Board | None = None
        self._store: Callable[[], Any] = lambda: None
        self._over = False  # this rank has left its record
        self._process = os.getpid()

    def follow(self, board: Board, store: Callable[[], Any], rank: int) -> None:
        """Leave a record on the board when this process ends, and read those of others.

        ``store`` returns the store of all ranks, or None once it is gone: who keeps it keeps its port.
        """
        if self._board is None:
            # Late, so that it comes first at the end: the links to other ranks must still be there.
            atexit.register(self.leave)
            sys.excepthook = partial(_show, sys.excepthook)
        self._board, self._store, self.rank, self._over, self._process = board, store, rank, False, os.getpid()

    def reach(self, updates: int) -> None:
        """Note how many updates have been made."""
        self._updates, self.evaluated = updates, 0

    @contextmanager
    def within(self, call: str) -> Iterator[None]:
        """Note what the engine does in this context."""
        self._doing.append(call)
        self.evaluated += call == EVALUATES
        try:
            yield
        finally:
            self._doing.pop()

    def position(self, frame: FrameType | None) -> str:
        """Return where this process is: the update, and what the engine does, or the model by itself in ``frame``."""
        generates = any(outer_frame.f_code.co_name == "generate" for outer_frame in outwards(frame))
        doing = "generate()" if generates else next(iter(self._doing), "")
        if doing and not doing.startswith("the "):
            return f"{doing} after {counted(self._updates, 'update')}"
        return ", in ".join(filter(None, (f"update {self._updates + 1}", doing)))

    def leave(self, failure: str = "") -> None:
        """Leave the record of this process, which ends, with its failure if Python does not know it."""
        if self._board is None or self._over or os.getpid() != self._process:
            return  # a fork's end is not its parent's
        self._over, store = True, self._store()
        words: dict[str, Any] = {"rank": self.rank, "updates": self._updates, "at": time.time()}
        words |= {"how": "failed", "said": failure[:LONGEST]} if failure else _end_of_process()
        self._board.tell_over(words)
        if store is None or words["how"] == "lost":
            return

        def tell() -> None:
            with suppress(RuntimeError):
                store.compare_set("zeromesh/over", "", json.dumps(words))

        teller = Worker(tell)
        teller.start()
        teller.join(LEAVE)

    def first_over(self, records: Iterable[dict[str, Any]], ranks: Collection[int] = ()) -> dict[str, Any] | None:
        """Return the record of the rank that ended first, of ``ranks`` if there are any; None if no other one has."""
        others = [words for words in records if words["rank"] != self.rank and (not ranks or words["rank"] in ranks)]
        # Ranks that lost another one are no cause.
        return min((words for words in others if words["how"] != "lost"), key=lambda words: words["at"], default=None)

    def _all_over(self) -> list[dict[str, Any]]:
        """Return the records of this machine, and that of the first rank of the run."""
        records = [] if self._board is None else self._board.over()
        with suppress(RuntimeError):  # the store may be gone
            records += read_over(self._store())
        return records

    def lost(self, what: str, frame: FrameType, error: Exception) -> PeerLost:
        """Return the error for a collective that could not be finished, which names the rank that is gone."""
        end = time.monotonic() + NOTICE
        gone: list[int] = []
        while (words := self.first_over(self._all_over())) is None and time.monotonic() < end:
            gone = [] if self._board is None else self._board.gone()
            if self._board is None or gone:  # killed, it leaves no record
                break
            time.sleep(0.05)
        if words is not None:
            return PeerLost(self.told(words, what, frame), brief=True)
        who = f"rank {gone[0]} is stopped, or gone" if gone else "another rank is gone, or did not answer in time"
        return PeerLost(
            f"{what} could not be finished: {who}, and has left no word; what started the ranks, or dmesg where memory "
            f"ran out, may say why. ({error})"
        )

    def told(self, words: Mapping[str, Any], what: str, frame: FrameType | None) -> str:
        """Return what this rank says that waits in ``what``, called in ``frame``, for one that has left ``words``."""
        updates, position, line = counted(words["updates"], "update"), self.position(frame), where(frame)
        # Of "all_gather over the axis data, tag 3 (parameters of unit 'a')" the last part says enough.
        purpose = what.partition(" (")[2].removesuffix(")") or what.partition(",")[0]
        here = f"{position} ({purpose}{line and f', at {line}'})"
        if words["how"] == "failed":
            return f"rank {words['rank']} failed after {updates}: {words['said']}; rank {self.rank} waits in {here}"
        advice = remedy([position])
        cause = f"Rank {self.rank} has more batches, or goes on alone. " if advice is UNEQUAL else ""
        return f"rank {words['rank']} ended after {updates}; rank {self.rank} waits in {here}.\n{cause}{advice}"

    def say_once(self, text: str) -> None:
        """Print a message, unless another rank has."""
        with suppress(RuntimeError):
            store = self._store()
            if store is not None and int(store.add("zeromesh/said", 1)) > 1:
                return
        print(f"zeromesh: {text}", file=sys.stderr, flush=True)

    def note(self, error: BaseException, frame: FrameType | None) -> None:
        """Add to an error of gloo's, in a collective that the program calls itself, which rank has ended."""
        if (words := self.first_over(self._all_over())) is not None:
            error.add_note(self.told(words, "a collective of the program's own", frame))


this_rank = Course()


def remedy(positions: Collection[str]) -> str:
    """Return what mends ranks that wait in these positions."""
    rows = (text for word, text in REMEDIES.items() if any(word in position for position in positions))
    return next(rows, UNEQUAL)


def where(frame: FrameType | None) -> str:
    """Return ``FILE:LINE`` of the innermost call outside this package and torch; empty if there is none."""
    for outer_frame in outwards(frame):
        if not outer_frame.f_code.co_filename.startswith(_PACKAGES):
            return f"{outer_frame.f_code.co_filename[-LONGEST:]}:{outer_frame.f_lineno}"
    return ""


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, that which called it, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _end_of_process() -> dict[str, str]:
    """Return how this process ends: it has lost another rank, has failed, or simply ends."""
    error: BaseException | None = getattr(sys, "last_value", None)
    if isinstance(error, PeerLost):
        return {"how": "lost", "said": ""}
    if error is not None:
        return {"how": "failed", "said": traceback.format_exception_only(error)[-1].strip()[:LONGEST]}
    with suppress(OSError, ValueError):  # of an exit with a status, or of a function
        record = Path(os.environ.get(FAILURES, ""), f"{os.environ.get('RANK')}.failure")
        words = json.loads(record.read_text(encoding="utf-8"))
        return {"how": "lost" if words["waits"] else "failed", "said": words["summary"][:LONGEST]}
    return {"how": "ended", "said": ""}


def _show(
    previous: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show an uncaught exception: a lost peer in a line, by whoever started the ranks, or by one of all ranks."""
    if isinstance(error, PeerLost) and error.brief and not os.path.isdir(os.environ.get(FAILURES, "")):
        this_rank.say_once(str(error))
        return
    if isinstance(error, RuntimeError) and not isinstance(error, PeerLost) and "gloo" in str(error):
        frames = [frame for frame, _ in traceback.walk_tb(trace)]
        this_rank.note(error, frames[-1] if frames else None)
    previous(kind, error, trace)
