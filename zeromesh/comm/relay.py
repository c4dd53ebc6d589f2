"""Relay of signs of life: one rank of each place passes the signs of its ranks on, and one rank of all reads them."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zeromesh.base.words import counted
from zeromesh.base.worker import Worker
from zeromesh.comm.course import EVALUATES, REMEDIES, UNEQUAL, remedy
from zeromesh.comm.interface import own_address
from zeromesh.comm.peers import named
from zeromesh.comm.signs import FRESH, PLACE, Board, life, read_lines, read_over
from zeromesh.comm.trust import connect_again

TICKS = 6  # looks per PATIENCE
SILENT = 10  # times PATIENCE without a sign of life after which a rank on another host, or the store, is given up
SAME = 4  # reads that show the same waits of all ranks, so that each of them has given a sign in between
SAME_APART = 2  # the same of ranks that wait in different calls of the engine

# The times PATIENCE for which a rank may give no sign, by what is known of its process, and what to say of it; native
# code may keep Python from running for as long as it likes.
LIVES: dict[str, tuple[int | None, str]] = {
    "stopped": (1, ": it is stopped, or gone"),
    "alive": (None, ", though its process runs: native code keeps Python from running there"),
    "unknown": (SILENT, "; it was stopped, or its machine is gone or has run out of memory"),
}

_TCPStore = dist.TCPStore  # type: ignore[attr-defined]


class Relay:
    """This rank's part in passing signs on. It calls the store while it writes for its place, and else never."""

    def __init__(self, store: Any, board: Board, rank: int, world_size: int, patience: float) -> None:
        self.waiting = False  # a rank of this place waits for long
        self.over: list[dict[str, Any]] = []  # what the first rank that ended has left, if one waits for long
        self._main_store, self._store = store, None  # the second connection: a wait holds the first
        self._board, self._rank, self._world_size = board, rank, world_size
        self._tick_seconds = patience / TICKS
        self._patience = patience
        self._counted = False  # in the counter of places whose ranks wait
        self._reader: tuple[str, int] = "", 0  # its last beat, and looks since it came
        self._beats: dict[int, tuple[str, int]] = {}  # the same of each place
        self._reads = 0  # since no rank waited
        self._same: tuple[list[Any], int] = [], 0  # waits of all ranks, and how often they were seen
        self._warned: set[int] = set()
        self._echo: tuple[Any, list[Any] | None] | None = None  # the store that answers, and where
        self._probe: Worker | None = None

    def tick(self, end: Callable[[str], None]) -> None:
        """Pass on what the ranks of this place say, unless another of them does; read all if nobody else does.

        Args:
            end: ends the run for a reason.
        """
        line = self._board.line()
        number = self._board.number
        self.waiting = line is not None and line["waiting"] is not None
        if line is None or number is None:
            return
        store = self._store = self._store or connect_again(self._main_store)
        self.over = read_over(store) if self.waiting else []
        if why := last_said(store, "zeromesh/ended"):
            end(why)
        self._serve_echo(store)
        line["echo"] = None if self._echo is None else self._echo[1]
        store.set(f"zeromesh/nodes/{number}", json.dumps(line))
        waits = self.waiting or bool(line["waits"])
        if waits != self._counted:  # what a rank that has ended has counted only costs reads
            store.add("zeromesh/waiting", 1 if waits else -1)
            self._counted = waits
        if number and not self._reader_is_silent(store, number):
            return
        store.set("zeromesh/reader", line["beat"])
        if int(store.add("zeromesh/waiting", 0)) <= 0:
            self._reads, self._same = 0, ([], 0)
            self._warned.clear()
            return
        lines = read_lines(store)
        self._reads = self._reads + 1 if any(line["waiting"] for line in lines.values()) else 0
        if why := self._reason(lines):
            store.set("zeromesh/ended", why)
            end(why)

    def leave(self, owner: object) -> None:
        """Give no more signs for an engine that is gone; let others of this place pass theirs on, if there are any."""
        self._board.leave(owner)
        number = self._board.number
        if self._store is not None and number is not None:
            nobody = {"beat": "", "processes": {}, "quiet": {}, "waits": [], "due": 0, "waiting": None, "echo": None}
            self._store.set(f"zeromesh/nodes/{number}", json.dumps(nobody))

    def holder_is_stopped(self) -> bool:
        """Return whether rank 0, which mostly holds the store, is of this place, and stopped."""
        process = self._board.process_of(0)
        return process is not None and life(process, PLACE) == "stopped"

    def _reader_is_silent(self, store: Any, number: int) -> bool:
        """Return whether this place is the one that reads, as those before it give no sign."""
        before, count = self._reader
        beat = last_said(store, "zeromesh/reader")
        self._reader = beat, count = beat, count + 1 if beat == before else 0
        reads = beat.partition(":")[0] == str(self._rank)
        # One after the other, so that mostly one of them reads.
        return reads or count >= TICKS + 2 * number

    def _reason(self, lines: Mapping[int, dict[str, Any]]) -> str:
        """Return why the run is to end; empty if it may go on."""
        waiting = next((line["waiting"] for line in lines.values() if line["waiting"]), None)
        quiet: dict[int, tuple[int, str, int, str]] = {}
        present: set[int] = set()
        for number, line in lines.items():
            before, count = self._beats.get(number, ("", 0))
            self._beats[number] = line["beat"], count = line["beat"], count + 1 if line["beat"] == before else 0
            processes = {int(rank): process for rank, process in line["processes"].items()}
            if count >= FRESH:
                state = self._state_of(line)
                quiet |= {
                    rank: (count, life(process, line["place"]) if state == "unknown" else state, process, line["host"])
                    for rank, process in processes.items()
                }
                continue
            silent = {int(rank): (count, state) for rank, (count, state) in line["quiet"].items()}
            quiet |= {rank: (*state, processes[rank], line["host"]) for rank, state in silent.items()}
            present |= processes.keys() - silent.keys()
        for rank in quiet.keys() - present:
            if waiting is not None and (why := self._silence(rank, *quiet[rank], waiting)):
                return why
        waits = [wait for line in lines.values() for wait in line["waits"]]
        if quiet.keys() - present or sum(len(ranks) for _, ranks in waits) < self._world_size:
            waits = []
        self._same = waits, self._same[1] + 1 if waits and waits == self._same[0] else 0
        due = sum(line["due"] for line in lines.values()) >= self._world_size and self._same[1] >= SAME
        # On one machine, ranks in different calls do not wait for a slow link; between machines they may.
        soon = len(lines) == 1 and self._same[1] >= SAME_APART
        if (due or soon) and _are_apart(waits):
            return _all_wait(waits, "ranks wait for each other in different calls")
        text = f"every rank has waited for {self._patience:.0f} s or more and none got any further"
        return _all_wait(waits, text) if due else ""

    def _silence(self, rank: int, count: int, state: str, process: int, host: str, waiting: tuple[int, Any]) -> str:
        """Warn of a rank that gives no sign of life; return why the run is to end, or nothing."""
        count = min(count, self._reads)  # how long it was quiet while nobody waited counts for nothing
        if count < TICKS // 2:
            return ""
        limit, text = LIVES[state]
        text = (
            f"rank {rank} (process {process} on {host}) has given no sign of life for "
            f"{count * self._tick_seconds:.0f} s{text}; rank {waiting[0]} waits for {_described(waiting[1])}"
        )
        if rank not in self._warned:
            self._warned.add(rank)
            print(f"zeromesh: {text}", file=sys.stderr, flush=True)
        return text if limit is not None and count >= TICKS * limit else ""

    def _serve_echo(self, store: Any) -> None:
        """Let other machines see that this process runs where Python does not: torch's store needs none of it."""
        if self._echo is not None or int(store.add("zeromesh/nodes", 0)) < 2:
            return
        master, _, port = getattr(store, "where", "").rpartition(":")
        try:
            listener = socket.create_server((own_address(master, int(port)), 0))
        except (OSError, ValueError):  # the others then take it for gone after some time
            self._echo = None, None
            return
        address, port = listener.getsockname()[:2]
        limit = timedelta(seconds=self._patience)
        echo = _TCPStore(address, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())
        self._echo = echo, [address, port]

    def _state_of(self, line: Mapping[str, Any]) -> str:
        """Return whether the process that has passed a place's signs on runs: alive, or unknown."""
        if not line["echo"] or (self._probe is not None and not self._probe.over):
            return "unknown"
        heard: list[Any] = []
        (address, port), limit = line["echo"], timedelta(seconds=self._tick_seconds)

        def ask() -> None:  # in a thread, as torch waits for ever on a process that is stopped
            with contextlib.suppress(RuntimeError):
                heard.append(_TCPStore(address, port, None, False, limit, wait_for_workers=False))

        self._probe = Worker(ask)
        self._probe.start()
        self._probe.join(self._tick_seconds)
        return "alive" if heard else "unknown"


def last_said(store: Any, key: str) -> str:
    """Return the last text under a key of the store; empty if there is none."""
    return str(store.get(key).decode()) if store.check([key]) else ""


def _described(state: dict[str, Any]) -> str:
    return f"{state['what']}, at {state['where']}" if state.get("where") else str(state["what"])


def _are_apart(waits: list[Any]) -> bool:
    """Return whether ranks wait in different calls of the engine, as each of them has said."""
    positions = [state.get("doing") for state, _ in waits]
    return all(positions) and len(set(positions)) > 1


def _all_wait(waits: list[Any], text: str) -> str:
    verb = {True: "waits", False: "wait"}
    lines = [
        f"  {named(ranks)} {verb[len(ranks) == 1]} in {'its' if len(ranks) == 1 else 'their'} collective "
        f"{state['number']}{', in ' * bool(state.get('doing'))}{state.get('doing', '')}: {_described(state)}"
        for state, ranks in waits
    ]
    advice = remedy([state.get("doing", "") for state, _ in waits])
    evaluated = {state.get("evaluated", 0): named(ranks) for state, ranks in waits}
    if advice is UNEQUAL and len(evaluated) > 1:  # a forward of one rank has met another one's of training
        counts = "; ".join(f"{counted(count, 'forward')} on {ranks}" for count, ranks in evaluated.items())
        lines.append(f"Without gradients, since the last update: {counts}.")
        advice = REMEDIES[EVALUATES]
    states = [state["what"] for state, _ in waits]
    if advice is UNEQUAL:
        advice = (
            "All ranks must run the same forwards, backwards and steps in the same order: none may leave one out, or "
            "run one alone."
        )
        if len(set(states)) > 1 and any("parameters of" in state for state in states):
            advice += (
                " Where ranks use a block that they use several times in different numbers, or in different orders, "
                "it must stay in memory: raise slots.parameter to the number of blocks, or use "
                "zero_optimization.stage 2."
            )
    return "\n".join([f"{text}:", *lines, advice])
