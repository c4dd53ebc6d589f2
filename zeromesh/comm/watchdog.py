"""End runs whose ranks wait for each other for ever, and say where each of them is.

From inside one rank a message that nobody sends looks like a slow peer. Three things tell the difference, and each ends
the run: every rank has waited for ``PATIENCE`` seconds and none got any further; a rank gives no sign of life while
another one waits; or the store through which ranks exchange these facts does not answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.base.worker import Worker
from zeromesh.comm.rank import write_failure
from zeromesh.comm.trust import connect_again

PATIENCE = 30.0  # seconds that every rank must have waited, each in one collective, before they are given up
OWN = 10  # times PATIENCE that collectives of the program's own may take: nothing is known of their size
TICKS = 6  # looks per PATIENCE
SILENT = 10  # times PATIENCE without a sign of life after which a rank on another host, or the store, is given up

# The same by what is known of its process, and what to say; native code may keep Python from running for as long as it
# likes.
LIVES: dict[str, tuple[int | None, str]] = {
    "stopped": (1, ": it is stopped, or gone"),
    "alive": (None, ", though its process runs: native code keeps Python from running there"),
    "unknown": (SILENT, "; it was stopped, or its machine is gone or has run out of memory"),
}
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
        self._store = store = connect_again(store)
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
        self._published: dict[str, Any] | None = None  # an engine before this one may have left word of a wait
        self._seen: tuple[list[Any], list[str]] | None = None
        self._beat, self._beat_judged, self._silent_ticks = 0, -1, 0
        self._quiet: dict[int, tuple[str, int]] = {}
        self._warned: set[int] = set()
        self._ends = False
        self._holder = ""  # the sign of the rank that mostly holds the store
        self._give_sign()  # before the thread does: a rank that is stopped at once has to be missed, too
        gone = threading.Event()
        # Threads of their own, as the main one waits in native code. They must not keep the engine alive, nor outlive
        # it: a rank without an engine, which may prepare data for hours, owes nobody a sign.
        threads = [
            Worker(partial(_repeat, weakref.ref(self), patience / TICKS, gone, act, at_end))
            for act, at_end in (
                (Watchdog.check, partial(store.set, f"zeromesh/signs/{rank}", "")),
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
        self._what, self._due = what, self._began + self._patience + nbytes / SLOWEST_LINK

    def end(self) -> None:
        """Note that the wait is over."""
        self._depth -= 1
        if self._depth == 0:
            self._what = ""
            self.waited += time.monotonic() - self._began

    def check(self) -> None:
        """Give a sign of life. If this rank has waited for long, look for a reason to end the run."""
        self._beat += 1
        self._give_sign()
        self._holder = self._holder or last_said(self._store, "zeromesh/signs/0")
        if why := last_said(self._store, "zeromesh/ended"):
            self._end(why, publish=False)
        wait, now = self._wait(), time.monotonic()
        # Ranks say what they wait for, and read what others say, only once they have waited for long, so a run in which
        # all is well pays next to nothing.
        if wait is None or now < self._since + self._patience:
            self._quiet.clear()
            self._warned.clear()
            signs = None
        else:
            signs = [last_said(self._store, f"zeromesh/signs/{rank}") for rank in range(self._world_size)]
            self._look_for_silent(wait, signs)
        if wait is None or signs is None or now < (self._due if self._what else self._since + OWN * self._patience):
            self._publish({})
            self._seen = None
            return
        self._publish(wait)
        states = [wait_of(self._store, rank) for rank in range(self._world_size)]
        if self._seen is None or self._seen[0] != states:
            self._seen = states, signs
        still = self._wait()
        # All must have given a sign since these states were first seen: what a stopped rank has said may be old.
        alive = all(sign != before for sign, before in zip(signs, self._seen[1], strict=True))
        if all(states) and alive and still is not None and still["number"] == wait["number"]:
            self._give_up(states)

    def _give_sign(self) -> None:
        self._store.set(f"zeromesh/signs/{self._rank}", f"{self._beat} {PLACE} {os.getpid()} {socket.gethostname()}")

    def _wait(self) -> dict[str, Any] | None:
        """Return what this rank waits for: a collective of the engine, or one that the program called itself."""
        what, number, frame = self._what, self._waits, sys._current_frames().get(self._thread)
        if what:
            self._since = self._began
            return {"what": what, "number": number, "where": where(frame)}
        function_name, calls = _own_wait(frame), _calls()
        if function_name is None or calls is None:
            self._own = None
            return None
        if self._own != (function_name, calls):
            self._own, self._own_began = (function_name, calls), time.monotonic()
        self._since = self._own_began
        return {"what": f"{function_name} of the program's own", "number": calls, "where": where(frame)}

    def _publish(self, state: dict[str, Any]) -> None:
        if state != self._published:
            self._store.set(f"zeromesh/waits/{self._rank}", json.dumps(state))
            self._published = state

    def _look_for_silent(self, wait: dict[str, Any], signs: Sequence[str]) -> None:
        """End the run if a rank has given no sign for long: it was stopped, or its machine is gone."""
        for rank, sign in enumerate(signs):
            before, count = self._quiet.get(rank, ("", 0))
            # Looks are counted instead of seconds, as this process may be stopped, too.
            count = count + 1 if sign and sign == before else 0
            self._quiet[rank] = sign, count
            if count < TICKS // 2 or rank == self._rank:
                continue
            limit, life = LIVES[_life(sign)]
            _, _, process, host = sign.split(" ", 3)
            text = (
                f"rank {rank} (process {process} on {host}) has given no sign of life for "
                f"{count * self._patience / TICKS:.0f} s"
                f"{life}; rank {self._rank} waits for {_described(wait)}"
            )
            if rank not in self._warned:
                self._warned.add(rank)
                print(f"zeromesh: {text}", file=sys.stderr, flush=True)
            if limit is not None and count >= TICKS * limit:
                self._end(text, publish=True)

    def _give_up(self, states: list[Any]) -> None:
        lines = [
            f"  rank {rank} waits in its collective {s['number']}: {_described(s)}" for rank, s in enumerate(states)
        ]
        advice = "All ranks must run the same forwards, backwards and steps in the same order."
        if len({state["what"] for state in states}) > 1 and any("parameters of" in state["what"] for state in states):
            advice += (
                " Where ranks use a block that they use several times in different numbers, or in different orders, "
                "it must stay in memory: raise slots.parameter to the number of blocks, or use "
                "zero_optimization.stage 2."
            )
        text = f"every rank has waited for {self._patience:.0f} s or more and none got any further"
        self._end("\n".join([f"{text}:", *lines, advice]), publish=True)

    def judge(self) -> None:
        """End the run if the store has not answered ``check`` for many ticks and this rank waits."""
        self._silent_ticks = ticks = self._silent_ticks + 1 if self._beat == self._beat_judged else 0
        self._beat_judged = self._beat
        if ticks < TICKS or not (self._what or _own_wait(sys._current_frames().get(self._thread))):
            return
        seconds = ticks * self._patience / TICKS
        text = (
            f"the store through which ranks meet has not answered rank {self._rank} for {seconds:.0f} s: the process "
            "that holds it, rank 0 or the launcher of the first node, was stopped, or its machine is gone"
        )
        if ticks == TICKS:
            print(f"zeromesh: {text}", file=sys.stderr, flush=True)
        stopped = bool(self._holder) and _life(self._holder) == "stopped"
        if ticks >= TICKS * (1 if stopped else SILENT):
            self._end(text, publish=False)

    def _end(self, why: str, publish: bool) -> None:
        """Say why, and where this rank is; leave the others the time to say where they are; end the process."""
        if self._ends:
            return
        self._ends = True
        if publish:
            self._store.set("zeromesh/ended", why)
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
            return f"{outer_frame.f_code.co_filename}:{outer_frame.f_lineno}"
    return ""


def wait_of(store: Any, rank: int) -> dict[str, Any]:
    """Return what a rank has said that it waits for; empty if it has not waited for long."""
    wait: dict[str, Any] = json.loads(last_said(store, f"zeromesh/waits/{rank}") or "{}")
    return wait


def last_said(store: Any, key: str) -> str:
    """Return the last text under a key of the store; empty if there is none."""
    return str(store.get(key).decode()) if store.check([key]) else ""


def _described(state: dict[str, Any]) -> str:
    return f"{state['what']}, at {state['where']}" if state.get("where") else str(state["what"])


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


# Tells machines, and containers on one, apart: process numbers of another one mean nothing here.
try:
    PLACE = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
except OSError:
    PLACE = f"{socket.gethostname()}/?"


def _life(sign: str) -> str:
    """Return what the kernel says of the process that gave the sign: a key of ``LIVES``."""
    _, place, process, _ = sign.split(" ", 3)
    if place != PLACE or place.endswith("?"):
        return "unknown"
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return "stopped"
    return "stopped" if stat.rpartition(")")[2].split()[0] in ("T", "t", "Z", "X") else "alive"


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
