"""Notices that all ranks wait for each other for ever, and says what each of them waits for.

Ranks that issue different collectives, or the same ones in different orders, wait for messages that nobody sends. From
inside one rank that looks like a slow peer. It is different when every rank has been waiting for a while and none has
got any further: then nobody is left who could send. The ranks tell each other through the process group's store,
but only once they have waited for ``PATIENCE`` seconds, so that a run in which all is well pays next to nothing.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import weakref
from typing import Any

PATIENCE = 30.0
"""Seconds that every rank must have waited, each in one collective, before they are given up."""

SLOWEST_LINK = 5e6
"""Bytes per second of the slowest link that ranks are thought to train over; a large collective may take longer."""

EXIT_CODE = 70


class Watchdog:
    """Watches over this rank's waits.

    Args:
        store: the process group's key-value store.
        rank: this rank.
        world_size: number of ranks.
        patience: usually ``PATIENCE``.
    """

    def __init__(self, store: Any, rank: int, world_size: int, patience: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._patience = patience
        self._waits = 0
        self._due = 0.0
        self._what = ""
        self._told: dict[str, Any] | None = None  # an engine before this one may have left word of a wait
        self._seen: list[Any] | None = None
        gone = threading.Event()
        weakref.finalize(self, gone.set)
        threading.Thread(target=_watch, args=(weakref.ref(self), patience / 3, gone), daemon=True).start()

    def begin(self, what: str, nbytes: int = 0) -> None:
        """A wait begins, for a collective that carries so many bytes."""
        self._waits += 1
        self._what, self._due = what, time.monotonic() + self._patience + nbytes / SLOWEST_LINK

    def end(self) -> None:
        """It is over."""
        self._what = ""

    def check(self) -> None:
        """Tell the others what this rank waits for, if it has for long; end the process if all have, and still do."""
        what, number = self._what, self._waits
        if not what or time.monotonic() < self._due:
            self._tell({})
            self._seen = None
            return
        self._tell({"what": what, "number": number})
        states = self._states()
        if all(states) and states == self._seen and self._waits == number and self._what:
            self._give_up(states)
        self._seen = states

    def _tell(self, state: dict[str, Any]) -> None:
        if state != self._told:
            self._store.set(f"zeromesh/waits/{self._rank}", json.dumps(state))
            self._told = state

    def _states(self) -> list[Any]:
        keys = [f"zeromesh/waits/{rank}" for rank in range(self._world_size)]
        return [json.loads(self._store.get(key)) if self._store.check([key]) else {} for key in keys]

    def _give_up(self, states: list[Any]) -> None:
        lines = [f"  rank {rank} waits in its collective {s['number']}: {s['what']}" for rank, s in enumerate(states)]
        print(
            f"zeromesh: every rank has waited for {self._patience:.0f} s or more and none got any further:\n"
            + "\n".join(lines)
            + "\n"
            "All ranks must run the same forwards, backwards and steps in the same order. This rank was here:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(all_threads=True)
        # The waiting thread is inside gloo, which cannot be interrupted.
        os._exit(EXIT_CODE)


def _watch(watchdog: weakref.ref[Watchdog], pause: float, gone: threading.Event) -> None:
    while not gone.wait(pause):
        alive = watchdog()
        if alive is None:
            return
        try:
            alive.check()
        except RuntimeError:
            return  # the process group and its store are gone
        del alive
