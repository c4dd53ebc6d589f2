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
import gc
import io
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.base.worker import Worker
from zeromesh.comm.course import outwards, this_rank, where
from zeromesh.comm.rank import write_failure
from zeromesh.comm.relay import SILENT, TICKS, Relay
from zeromesh.comm.signs import LONGEST, Board

PATIENCE = 30.0  # seconds that every rank must have waited, each in one collective, before they are given up
OWN = 10  # times PATIENCE that collectives of the program's own may take: nothing is known of their size
# Bytes per second of the slowest link that ranks are thought to train over; a large collective may take longer.
SLOWEST_LINK = 5e6

LEAVE = 2.0  # seconds that a process which ends waits for an answer of the store
EXIT_CODE = 70  # EX_SOFTWARE
LINGERS = 0.1  # seconds, above 0: what this rank says is the cause, whatever others say

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
        self._ranks: Sequence[int] = ()  # that take part in what this one waits for, or waited for last
        self._own: tuple[str, int] | None = None
        self._own_began = self._since = 0.0
        self._what_queued = ""
        self._stream: Any = None  # on which the device waits for the last collective
        self._event: Any = None  # behind all that the stream had to do when no collective had come for a tick
        self._event_began, self._queued_seen = 0.0, 0
        self._beat, self._beat_judged, self._silent_ticks = 0, -1, 0
        self._ends = False
        self._board, self._owner = Board.of(store, rank), object()
        this_rank.follow(self._board, weakref.ref(store), rank)
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

    def begin(self, what: str, nbytes: int = 0, ranks: Sequence[int] = ()) -> None:
        """Note that a wait begins, for a collective of ``ranks`` that carries so many bytes."""
        self._depth += 1
        if self._depth > 1:
            return
        self._thread = threading.get_ident()
        self._waits += 1
        self._began, self._ranks = time.monotonic(), ranks
        self._what, self._due = what[:LONGEST], self._began + self._patience + nbytes / SLOWEST_LINK

    def end(self) -> None:
        """Note that the wait is over."""
        self._depth -= 1
        if self._depth == 0:
            self._what = ""
            self.waited += time.monotonic() - self._began

    def queued(self, what: str, device: torch.device, ranks: Sequence[int] = ()) -> None:
        """Note that the device waits for a collective, and not this process, as with nccl."""
        self._thread = threading.get_ident()
        self._waits += 1
        self._ranks = ranks
        self._what_queued, self._stream = what[:LONGEST], torch.accelerator.current_stream(device)

    def check(self) -> None:
        """Give a sign of life. Where this rank does so for others, pass theirs on, and look for a reason to end."""
        self._beat += 1
        self._end_without_peer()
        if self._give_sign():
            if why := self._board.ended:
                self._end(why)
            self._relay.tick(self._end)

    def _give_sign(self) -> bool:
        wait, now = self._wait(), time.monotonic()
        # Ranks say what they wait for only once they have waited for long, or for what cannot take so long.
        long = wait is not None and now >= self._since + self._patience
        due = long and now >= (self._due if self._what else self._since + OWN * self._patience)
        soon = wait is not None and self._is_overdue(now)
        return self._board.give(
            self._owner, {"long": long, "due": due, "soon": soon, "wait": wait if long or soon else None}
        )

    def _is_overdue(self, now: float) -> bool:
        """Return whether a collective of the engine takes a tick longer than its bytes could.

        What a device waits for may be computation instead, queued for many seconds: it is given the full patience.
        """
        if self._what:
            return now >= self._due - self._patience + self._patience / TICKS
        waits = self._event is not None and self._since == self._event_began  # else the program does, in its own
        return waits and now >= self._since + self._patience

    def _end_without_peer(self) -> None:
        """End this rank if it waits for one that has ended: nccl and MPI do not notice that."""
        wait = self._wait() if self._ranks else None
        if wait is None or not self._is_overdue(time.monotonic()):
            return
        words = this_rank.first_over([*self._board.over(), *self._relay.over], self._ranks)
        if words is not None:
            self._end(this_rank.told(words, wait["what"], self._frame), alone=True)

    @property
    def _frame(self) -> FrameType | None:
        """Return what the thread that waits runs."""
        # Python 3.11 may stop for good where garbage is collected inside of that call (its issue 106883).
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(self._thread)
        finally:
            if collects:
                gc.enable()

    def _wait(self) -> dict[str, Any] | None:
        """Return what this rank waits for: a collective of the engine, or one that the program called itself."""
        number, frame = self._waits, self._frame
        if self._what:
            self._since, what = self._began, self._what
        elif self._stream is not None and (since := self._device_waits(number)):
            self._since, what = since, self._what_queued
        else:
            function_name, calls = _own_wait(frame), _calls()
            if function_name is None or calls is None:
                self._own = None
                return None
            if self._own != (function_name, calls):
                self._own, self._own_began = (function_name, calls), time.monotonic()
            self._since, what, number = self._own_began, f"{function_name} of the program's own", calls
        place = {"where": where(frame), "doing": this_rank.position(frame), "evaluated": this_rank.evaluated}
        return {"what": what, "number": number, **place}

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
        if ticks < TICKS or not (waits or _own_wait(self._frame)):
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

    def _end(self, why: str, alone: bool = False) -> None:
        """Say why, and where this rank is, unless that says it; end the process, and unless ``alone`` all others."""
        if self._ends:
            return
        self._ends = True
        if not alone:
            self._board.tell_end(why)
        if alone or "\n" in why:  # it has a line of code for each rank
            pause = 0.0
            if not write_failure(why, "", EXIT_CODE, 0.0 if alone else LINGERS, waits=True):
                this_rank.say_once(why)
            if not alone:
                this_rank.leave(why.splitlines()[0].rstrip(":"))
        else:
            pause = 2.5 * self._patience / TICKS  # others, too, say where they are
            print(f"zeromesh: {why}\nThis rank, {self._rank}, was here:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
            stack = io.StringIO()
            traceback.print_stack(self._frame, file=stack)
            write_failure(why.splitlines()[0].rstrip(":"), f"{why}\n{stack.getvalue()}", EXIT_CODE, pause)
        time.sleep(pause)
        # The waiting thread is inside gloo, which cannot be interrupted.
        os._exit(EXIT_CODE)


def _own_wait(frame: FrameType | None) -> str | None:
    """Return the name of torch's function that the program waits in; None if it waits in none."""
    function_name = None
    for outer_frame in outwards(frame):
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
