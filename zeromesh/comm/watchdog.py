"""End runs whose ranks wait for each other for ever, and say where each of them is.

From inside one rank a message that nobody sends looks like a slow peer. Three things tell the difference, and each ends
the run: every rank has waited for ``PATIENCE`` seconds and none got any further; a rank gives no sign of life while
another one waits; or the store through which ranks exchange these facts does not answer.

One rank of each machine passes the signs of its ranks on (see ``signs.py``), and that of the first machine reads them
all. If the reader gives no sign itself, that of the next machine reads: being busy, it ends nothing, and being gone, it
is missed like any other rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.base.worker import Worker
from zeromesh.comm.rank import write_failure
from zeromesh.comm.relay import SILENT, TICKS, Relay
from zeromesh.comm.signs import LONGEST, Board

PATIENCE = 30.0  # seconds that every rank must have waited, each in one collective, before they are given up
OWN = 10  # times PATIENCE that collectives of the program's own may take: nothing is known of their size
# Bytes per second of the slowest link that ranks are thought to train over; a large collective may take longer.
SLOWEST_LINK = 5e6

LEAVE = 2.0  # seconds that a process which ends waits for an answer of the store
EXIT_CODE = 70  # EX_SOFTWARE

_PACKAGES = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep, contextlib.__file__)

# Parts of the names of torch's functions in which a program waits for all ranks of a group.
_OWN_WAITS = ("barrier", "broadcast", "reduce", "gather", "scatter", "all_to_all")


class Watchdog:
    """Watchdog over this rank's waits, and over the signs of life of the others; see ``PATIENCE``."""

    def __init__(self, store: Any, rank: int, world_size: int, patience: float) -> None:
        self.waited = 0.0  # seconds that this rank has spent in collectives
        self._rank = rank
        self._world_size = world_size
        self._patience = patience
        self._thread = threading.get_ident()
        self._waits = 0
        self._depth = 0
        self._began = self._due = 0.0
        self._what = ""
        self._own: tuple[str, int] | None = None
        self._own_began = self._since = 0.0
        self._what_queued = ""
        self._stream: Any = None  # on which the device waits for the last collective
        self._event: Any = None  # behind all that the stream had to do when no collective had come for a tick
        self._event_began, self._queued_seen = 0.0, 0
        self._beat, self._beat_judged, self._silent_ticks = 0, -1, 0
        self._ends = False
        self._board, self._owner = Board.of(store, rank), object()
        self._relay = Relay(store, self._board, rank, world_size, patience)
        # Before the thread does: a rank that is stopped at once has to be missed, too.
        self._board.give(self._owner, {"long": False, "due": False, "wait": None})
        gone = threading.Event()
        # Threads of their own, as the main one waits in native code. They must not keep the engine alive, nor outlive
        # it: a rank without an engine, which may prepare data for hours, owes nobody a sign.
        threads = [
            Worker(partial(_repeat, weakref.ref(self), patience / TICKS, gone, act, at_end))
            for act, at_end in (
                (Watchdog.check, partial(self._relay.leave, self._owner)),
                (Watchdog.judge, lambda: None),
            )
        ]
        for thread in threads:
            thread.start()
        weakref.finalize(self, _stop, gone, threads)

    def begin(self, what: str, nbytes: int = 0) -> None:
        """Note that a wait begins, for a collective that carries so many bytes."""
        self._depth += 1
        if self._depth > 1:
            return
        self._thread = threading.get_ident()
        self._waits += 1
        self._began = time.monotonic()
        self._what, self._due = what[:LONGEST], self._began + self._patience + nbytes / SLOWEST_LINK

    def end(self) -> None:
        """Note that the wait is over."""
        self._depth -= 1
        if self._depth == 0:
            self._what = ""
            self.waited += time.monotonic() - self._began

    def queued(self, what: str, device: torch.device) -> None:
        """Note that the device waits for a collective, and not this process, as with nccl."""
        self._thread = threading.get_ident()
        self._waits += 1
        self._what_queued, self._stream = what[:LONGEST], torch.accelerator.current_stream(device)

    def check(self) -> None:
        """Give a sign of life. Where this rank does so for others, pass theirs on, and look for a reason to end."""
        self._beat += 1
        if self._give_sign():
            if why := self._board.ended:
                self._end(why)
            self._relay.tick(self._end)

    def _give_sign(self) -> bool:
        wait, now = self._wait(), time.monotonic()
        # Ranks say what they wait for only once they have waited for long.
        long = wait is not None and now >= self._since + self._patience
        due = long and now >= (self._due if self._what else self._since + OWN * self._patience)
        return self._board.give(self._owner, {"long": long, "due": due, "wait": wait if long else None})

    def _wait(self) -> dict[str, Any] | None:
        """Return what this rank waits for: a collective of the engine, or one that the program called itself."""
        what, number, frame = self._what, self._waits, sys._current_frames().get(self._thread)
        if what:
            self._since = self._began
            return {"what": what, "number": number, "where": where(frame)}
        if self._stream is not None and (since := self._device_waits(number)):
            self._since = since
            return {"what": self._what_queued, "number": number, "where": where(frame)}
        function_name, calls = _own_wait(frame), _calls()
        if function_name is None or calls is None:
            self._own = None
            return None
        if self._own != (function_name, calls):
            self._own, self._own_began = (function_name, calls), time.monotonic()
        self._since = self._own_began
        return {"what": f"{function_name} of the program's own", "number": calls, "where": where(frame)}

    def _device_waits(self, number: int) -> float:
        """Return since when the device has not finished what it had to do; 0 if it has, or gets more."""
        if number != self._queued_seen:
            self._queued_seen, self._event = number, None
            return 0.0
        if self._event is None:
            self._event, self._event_began = self._stream.record_event(), time.monotonic()
        return 0.0 if self._event.query() else self._event_began

    def judge(self) -> None:
        """End the run if the store has not answered ``check`` for many ticks and a rank waits."""
        self._silent_ticks = ticks = self._silent_ticks + 1 if self._beat == self._beat_judged else 0
        self._beat_judged = self._beat
        waits = self._what or self._relay.waiting or self._board.waits_here
        if ticks < TICKS or not (waits or _own_wait(sys._current_frames().get(self._thread))):
            return
        seconds = ticks * self._patience / TICKS
        text = (
            f"the store through which ranks meet has not answered rank {self._rank} for {seconds:.0f} s: the process "
            "that holds it, rank 0 or the launcher of the first node, was stopped, or its machine is gone"
        )
        if ticks == TICKS:
            print(f"zeromesh: {text}", file=sys.stderr, flush=True)
        if ticks >= TICKS * (1 if self._relay.holder_is_stopped() else SILENT):
            self._end(text)

    def _end(self, why: str) -> None:
        """Say why, and where this rank is; leave the others the time to say where they are; end the process."""
        if self._ends:
            return
        self._ends = True
        self._board.tell_end(why)
        print(f"zeromesh: {why}\nThis rank, {self._rank}, was here:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        pause = 2.5 * self._patience / TICKS
        stack = io.StringIO()
        traceback.print_stack(sys._current_frames().get(self._thread), file=stack)
        write_failure(why.splitlines()[0].rstrip(":"), f"{why}\n{stack.getvalue()}", EXIT_CODE, pause)
        time.sleep(pause)
        # The waiting thread is inside gloo, which cannot be interrupted.
        os._exit(EXIT_CODE)


def where(frame: FrameType | None) -> str:
    """Return ``FILE:LINE`` of the innermost call outside this package and torch; empty if there is none."""
    for outer_frame in _outwards(frame):
        if not outer_frame.f_code.co_filename.startswith(_PACKAGES):
            return f"{outer_frame.f_code.co_filename[-LONGEST:]}:{outer_frame.f_lineno}"
    return ""


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _own_wait(frame: FrameType | None) -> str | None:
    """Return the name of torch's function that the program waits in; None if it waits in none."""
    function_name = None
    for outer_frame in _outwards(frame):
        if os.path.basename(outer_frame.f_code.co_filename) not in ("distributed_c10d.py", "c10d_logger.py"):
            break
        if any(part in outer_frame.f_code.co_name for part in _OWN_WAITS):
            function_name = outer_frame.f_code.co_name
    return function_name


def _calls() -> int | None:
    """Return how many collectives this process has called; None where a backend does not count, such as MPI's."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    try:
        return sum(int(group._get_sequence_number_for_group()) for group in groups)
    except RuntimeError:
        return None


def _stop(gone: threading.Event, threads: list[Worker]) -> None:
    """End the threads, also as the process ends: one that comes back from the store when Python is gone aborts it."""
    gone.set()
    for thread in threads:
        if thread is not threading.current_thread():  # the garbage collector may run in any thread
            thread.join(LEAVE)


def _repeat(
    watchdog: weakref.ref[Watchdog],
    pause: float,
    gone: threading.Event,
    act: Callable[[Watchdog], None],
    at_end: Callable[[], None],
) -> None:
    with contextlib.suppress(RuntimeError):
        while not gone.wait(pause):
            alive = watchdog()
            if alive is None:
                break
            try:
                act(alive)
            except RuntimeError:
                gone.set()  # the process group and its store are gone
            del alive
        at_end()
