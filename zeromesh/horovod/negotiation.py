"""Agreement of ranks on the next operations, by name; plain Python, without messages.

Rank 0 keeps one ``Negotiator``. It hears every request in one order and decides when an operation can start, so that
all ranks start operations in the same order, and a contradiction reaches every rank as an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from zeromesh.comm.peers import named, ranges

Request = dict[str, Any]
"""One rank's part in an operation: kind, name, set, and the fields in ``AGREED``."""

Decision = tuple[list[int], dict[str, Any]]
"""Ranks, and what they are told."""


class ReduceOp(IntEnum):
    """Reductions, with Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


REDUCED = ("dtypes", "shapes", "devices", "op", "prescale_factor", "postscale_factor")
GATHERED = ("dtypes", "devices", "shapes after the first dimension")

AGREED: dict[str, tuple[str, ...]] = {
    "allreduce": REDUCED,
    "reducescatter": REDUCED,
    "allgather": GATHERED,
    "alltoall": GATHERED,
    "broadcast": ("dtypes", "shapes", "devices", "root_rank"),
    "barrier": (),
    "join": (),
    "add_process_set": ("ranks",),
    "remove_process_set": ("removed",),
}
"""Kind of operation -> fields that are the same on all ranks."""

INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
REDUCIBLE = (*INTEGERS, "float16", "bfloat16", "float32", "float64", "bool")
NEUTRAL = (ReduceOp.Sum, ReduceOp.Average, ReduceOp.Adasum)
"""Reductions in which zeros of a rank that has joined change nothing."""


class Negotiator:
    """State of the agreement of ``size`` ranks.

    Args:
        size: number of ranks.
        warn: is called with a text about an operation that ranks wait for too long.
        patience: seconds of waiting after which to warn.
        limit: seconds of waiting after which an operation fails; 0 is no limit.
    """

    def __init__(
        self, size: int, warn: Callable[[str], None] = lambda text: None, patience: float = 60.0, limit: float = 0.0
    ) -> None:
        self.sets: dict[int, list[int]] = {0: list(range(size))}
        self._next_set = 1
        self._warn, self._patience, self._limit = warn, patience, limit
        self._warned: set[str] = set()
        self._pending: dict[str, dict[int, Request]] = {}  # key -> requests by rank
        self._joined: list[int] = []  # in the order in which they joined
        self._left: set[int] = set()
        self._waits: dict[int, str] = {}  # rank -> key of the operation that it is blocked in

    def submit(self, rank: int, request: Request) -> list[Decision]:
        """Take a rank's request; return what follows."""
        key = key_of(request)
        if request["set"] not in self.sets:
            return [_failure([rank], key, f"process set {request['set']} has been removed")]
        if request["kind"] == "join":
            self._joined.append(rank)
        self._pending.setdefault(key, {})[rank] = request
        decisions = self._decide([key])
        # A rank that joins may be the last one that others wait for.
        return decisions + (self._decide(list(self._pending)) if request["kind"] == "join" else [])

    def wait(self, rank: int, key: str, seconds: float) -> list[Decision]:
        """Record that a rank has been blocked in an operation for some seconds."""
        if key not in self._pending:
            return []  # it has been decided meanwhile
        self._waits[rank] = key
        if not key.startswith("0/join"):  # which waits for the others' training
            text = f"rank {rank} has waited {seconds:.0f} s for {self._state_of(key)}"
            if 0 < self._limit <= seconds:
                return self._fail([key], f"{text}; HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is {self._limit:g}")
            if seconds >= self._patience and key not in self._warned:
                self._warned.add(key)
                self._warn(text)
        active = [rank for rank in self.sets[0] if rank not in self._left and rank not in self._joined]
        if not active or any(rank not in self._waits for rank in active):
            return []
        waits = [f"  rank {rank} waits for {self._state_of(self._waits[rank])}" for rank in active]
        reason = (
            "every rank waits for an operation that another one has not called; call the same operations, with the "
            "same names, on all ranks of a process set:\n" + "\n".join(waits)
        )
        return self._fail([key for key in self._pending if not key.startswith("0/join")], reason)

    def leave(self, rank: int) -> list[Decision]:
        """Record that a rank has shut down or died, and fail the operations that need it."""
        self._left.add(rank)
        return self._decide(list(self._pending))

    @property
    def present(self) -> list[int]:
        """Ranks that have not left."""
        return [rank for rank in self.sets[0] if rank not in self._left]

    def _decide(self, keys: Iterable[str]) -> list[Decision]:
        decisions = []
        for key in keys:
            requests = self._pending[key]
            first = next(iter(requests.values()))
            members = self.sets.get(first["set"], [])
            missing = [rank for rank in members if rank not in requests]
            if gone := [rank for rank in missing if rank in self._left]:
                decisions += self._fail([key], f"{named(gone)} ended before: its program ended, or called shutdown()")
            elif not missing or (first["kind"] != "join" and set(missing) <= set(self._joined)):
                decisions += self._start(key, members)
        return decisions

    def _start(self, key: str, members: Sequence[int]) -> list[Decision]:
        """Return the decision to start an operation, or to fail it on all its ranks."""
        requests = self._pending[key]
        first = next(iter(requests.values()))
        joined = [rank for rank in members if rank not in requests]
        kind, problem = problem_of(requests, members, joined)
        if not problem:
            kind, problem = "argument", self._problem_of_set(first)
        if problem:
            return self._fail([key], problem, kind)
        decision: dict[str, Any] = {"key": key, "like": first, "error": ""}
        decision["firsts"] = [[shape[0] if shape else 1 for shape in requests.get(r, first)["shapes"]] for r in members]
        decision["splits"] = [requests.get(rank, first)["splits"] for rank in members]
        if first["kind"] == "join":
            decision["last"] = self._joined[-1]
            self._joined = []
        elif first["kind"] == "add_process_set":
            decision["id"], self._next_set = self._next_set, self._next_set + 1
            self.sets[decision["id"]] = first["ranks"]
        self._forget(key)
        if first["kind"] != "remove_process_set":
            return [(list(members), decision)]
        del self.sets[first["removed"]]
        inside = [other for other in self._pending if other.startswith(f"{first['removed']}/")]
        return [*self._fail(inside, "the process set has been removed"), (list(members), decision)]

    def _problem_of_set(self, first: Request) -> str:
        ranks, size = first["ranks"], len(self.sets[0])
        if first["kind"] == "remove_process_set" and first["removed"] not in self.sets:
            return f"process set {first['removed']} has been removed before"
        if first["kind"] != "add_process_set":
            return ""
        if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= rank < size for rank in ranks):
            return f"the ranks are {ranks}, but must be different ones from 0 to {size - 1}, at least one"
        same = next((number for number, members in self.sets.items() if members == ranks), None)
        return "" if same is None else f"process set {same} has the ranks {ranks}, too; use that one"

    def _fail(self, keys: Iterable[str], reason: str, kind: str = "lost") -> list[Decision]:
        decisions = []
        for key in list(keys):
            decisions.append(_failure(list(self._pending[key]), key, reason, kind))
            self._forget(key)
        return decisions

    def _forget(self, key: str) -> None:
        del self._pending[key]
        self._warned.discard(key)
        self._waits = {rank: other for rank, other in self._waits.items() if other != key}

    def _state_of(self, key: str) -> str:
        requests = self._pending[key]
        members = self.sets.get(next(iter(requests.values()))["set"], [])
        missing = [rank for rank in members if rank not in requests and rank not in self._joined]
        return f"{shown(key)}, which {named(missing)} did not call"


def key_of(request: Mapping[str, Any]) -> str:
    """Return the key by which requests of ranks belong to one operation."""
    return f"{request['set']}/{request['kind']}.{request['name']}"


def shown(key: str) -> str:
    """Return a key for messages."""
    number, _, name = key.partition("/")
    return name + ("" if number == "0" else f" of process set {number}")


def _failure(ranks: list[int], key: str, reason: str, kind: str = "lost") -> Decision:
    return ranks, {"key": key, "error": f"{shown(key)}: {reason}", "kind": kind}


def problem_of(requests: Mapping[int, Request], members: Sequence[int], joined: Sequence[int]) -> tuple[str, str]:
    """Return the kind of what is wrong with the requests of an operation's ranks, and a message; "" if nothing is."""
    first = next(iter(requests.values()))
    for name in AGREED[first["kind"]]:
        values = {rank: _value(request, name) for rank, request in sorted(requests.items())}
        if any(value != next(iter(values.values())) for value in values.values()):
            lines = [f"  rank {rank}: {value}" for rank, value in values.items()]
            return "contradiction", "\n".join([f"{name} must be the same on all ranks, but differ:", *lines])
    for rank, request in requests.items():
        if problem := request["problem"] or _problem_of_one(request, members):
            return "argument", f"rank {rank}: {problem}"
    if joined and (first["kind"] != "allreduce" or first["op"] not in NEUTRAL):
        what = first["kind"] if first["kind"] != "allreduce" else f"allreduce with op {ReduceOp(first['op']).name}"
        return "contradiction", f"{named(joined)} called join(), after which {what} has no meaning"
    return "", ""


def _value(request: Request, name: str) -> Any:
    if name == "shapes after the first dimension":
        return [shape[1:] for shape in request["shapes"]]
    return ReduceOp(request[name]).name if name == "op" else request[name]


def _problem_of_one(request: Request, members: Sequence[int]) -> str:
    """Return what is wrong with one rank's request alone."""
    kind, dtypes, shapes = request["kind"], request["dtypes"], request["shapes"]
    if kind in ("allgather", "alltoall", "reducescatter") and not all(shapes):
        return f"{kind} works along the first dimension, and a tensor has none; use tensor.reshape(1)"
    if kind in ("allreduce", "reducescatter"):
        op = ReduceOp(request["op"])
        if unknown := [dtype for dtype in dtypes if dtype not in REDUCIBLE]:
            return f"tensors of {unknown[0]} cannot be reduced, only {', '.join(REDUCIBLE)}"
        if "bool" in dtypes and op not in (ReduceOp.Min, ReduceOp.Max, ReduceOp.Product):
            return f"op {op.name} of bool has no meaning; use Max (or), Min (and), or tensor.int()"
        if op is ReduceOp.Adasum and (set(dtypes) & {*INTEGERS, "bool"}):
            return "Adasum needs floating-point tensors"
        if op is ReduceOp.Adasum and not math.log2(len(members)).is_integer():
            return f"Adasum needs a power of two of ranks, and there are {len(members)}"
    if kind == "broadcast" and request["root_rank"] not in members:
        return f"root_rank is {request['root_rank']}, which is not among the ranks {ranges(members)}"
    if kind == "alltoall":
        rows, splits = shapes[0][0], request["splits"]
        if splits is None and rows % len(members):
            return f"the first dimension, {rows}, cannot be divided by {len(members)} ranks; give splits"
        are_counts = splits is None or all(isinstance(split, int) and split >= 0 for split in splits)
        if splits is not None and (not are_counts or len(splits) != len(members) or sum(splits) != rows):
            return (
                f"splits is {splits}, but must be {len(members)} whole numbers with the sum {rows}, the number of rows"
            )
    return ""
