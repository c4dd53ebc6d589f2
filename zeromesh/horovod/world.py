"""Start and end of Horovod's world, and the threads that negotiate and run its operations.

Every rank sends its requests to rank 0, whose coordinator decides the order. A thread on each rank runs what has been
decided, on process groups of its own, so that collectives of the program itself are not disturbed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zeromesh.base.worker import Worker
from zeromesh.comm.environment import Environment, backends, init_distributed
from zeromesh.comm.environment import shutdown as end_group
from zeromesh.comm.messages import gather_json
from zeromesh.comm.signs import PLACE
from zeromesh.comm.trust import SealedStore, connect_again, prove, shared_key, shared_store
from zeromesh.horovod import moves
from zeromesh.horovod.negotiation import Decision, Negotiator, Request, key_of, shown
from zeromesh.horovod.timeline import OperationTimeline

BLOCKED = 2.0
"""Seconds of waiting after which a rank says so, for rank 0 to see when all wait for each other."""
LEAVING = 5.0
"""Seconds that rank 0, which keeps the messages, waits for the others before it ends."""
NEVER = timedelta(days=20)
"""Limit of a wait for a message; longer ones overflow in torch."""

F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger("zeromesh")


class HorovodInternalError(RuntimeError):
    """An operation failed: ranks contradict each other, or one has ended."""


class Contradiction(HorovodInternalError, ValueError):
    """Ranks gave an operation different arguments, which they would do again after a restart."""


class WrongArgument(ValueError, RuntimeError):
    """An operation cannot take an argument. Horovod raises one class or the other, by operation."""


ERRORS: dict[str, type[RuntimeError]] = {
    "lost": HorovodInternalError,
    "contradiction": Contradiction,
    "argument": WrongArgument,
}
"""Kinds of failures of the negotiation."""


class Handle(Future[Any]):
    """Operation in progress; see ``synchronize`` and ``poll``. Calling it is the same as ``synchronize``.

    Args:
        key: name of the operation among all.
        tensors: its contiguous inputs.
        finish: makes the result of the ranks' joint results; called once, by the thread that runs operations.
    """

    def __init__(self, key: str, tensors: list[torch.Tensor], finish: Callable[[Any], Any]) -> None:
        super().__init__()
        self.key, self.tensors, self.finish = key, tensors, finish
        self.begun = time.monotonic()

    def __call__(self) -> Any:
        """Wait, and return the result or raise the error."""
        return self.result() if self.done() else world_for("synchronize").wait(self)

    def end(self, result: Any, error: str = "", kind: str = "lost") -> None:
        """Take the result, or the failure."""
        self.tensors = []
        if error:
            self.set_exception(ERRORS[kind](error))
        else:
            self.set_result(result)


class World:
    """All ranks, between ``init`` and ``shutdown``. Making it is collective.

    Args:
        environment: place of this process.
        peers: of each rank, the number of ranks on its node, its machine, and its process number.
        owns_group: whether torch's process group has been started for this, and ends with it.
    """

    def __init__(self, environment: Environment, peers: Sequence[tuple[int, str, int]], owns_group: bool) -> None:
        self.environment = environment
        self.homogeneous = len({local_size for local_size, *_ in peers}) == 1
        path = os.environ.get("HOROVOD_TIMELINE", "") if environment.rank == 0 else ""
        self.timeline = OperationTimeline("" if path == "DYNAMIC" else path)
        self._limits = _stall_limits()
        self._owns_group = owns_group
        ranks = range(environment.world_size)
        self.members = {0: moves.Members(_new_group(ranks), ranks, environment.rank)}
        # Whoever waits looks after the processes of its own machine; launchers look after the machines.
        place_known = not PLACE.endswith("?")
        self._neighbours = {rank: pid for rank, (_, place, pid) in enumerate(peers) if place_known and place == PLACE}
        self._store = _store(environment)
        self._handles: dict[str, Handle] = {}
        self._counts: dict[tuple[int, str], int] = defaultdict(int)
        self._lock = threading.Lock()
        self._broken = ""  # why nothing can be run any more
        # Each thread needs a connection of its own, which a wait for a message holds.
        roles = [self._execute, self._coordinate] if environment.rank == 0 else [self._execute]
        stores = [connect_again(self._store) for _ in roles]
        # All have connected before rank 0, which has the store, can leave.
        gather_json(None)
        self.key = shared_key(environment)  # signs objects, which are unpickled
        for store in [self._store, *stores]:
            store.set_timeout(NEVER)
        started = zip(roles, stores, strict=True)
        self._threads = [Worker(partial(role, store)) for role, store in started]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        kind: str,
        name: str | None,
        number: int,
        tensors: Sequence[torch.Tensor],
        finish: Callable[[Any], Any] = lambda results: results,
        **fields: Any,
    ) -> Handle:
        """Ask for an operation on process set ``number``; ``fields`` are those of the kind."""
        if name is None:
            self._counts[number, kind] += 1
            name = f"noname.{self._counts[number, kind]}"
        request: Request = {
            "kind": kind,
            "name": name,
            "set": number,
            "shapes": [list(tensor.shape) for tensor in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "devices": sorted({tensor.device.type for tensor in tensors}),
            "splits": None,
            "ranks": [],
            "problem": "",
        } | fields
        dense = [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
        handle = Handle(key_of(request), dense, finish)
        _synchronize(tensors)  # another thread goes on, with a stream of its own
        with self._lock:
            if self._broken:
                raise HorovodInternalError(f"{shown(handle.key)}: {self._broken}")
            if handle.key in self._handles:
                raise WrongArgument(
                    f"{shown(handle.key)} is in progress already; synchronize its handle first, or use another name"
                )
            self._handles[handle.key] = handle
        self._say({"submit": request})
        return handle

    def wait(self, handle: Handle) -> Any:
        """Block until an operation is done; return its result or raise its error."""
        while True:
            try:
                return handle.result(BLOCKED)
            except TimeoutError:
                gone = [rank for rank, pid in self._neighbours.items() if _has_ended(pid)]
                waited = time.monotonic() - handle.begun
                self._say({"wait": handle.key, "seconds": waited, "gone": gone})

    def close(self) -> None:
        """End the threads, and the process group if it was started for this world."""
        self._say({"leave": True})
        end = time.monotonic() + LEAVING
        self._threads[0].join(LEAVING)
        if self.environment.rank == 0:
            self._threads[1].join(max(0.0, end - time.monotonic()))
            self._say({"end": True})
            self._threads[1].join(LEAVING)
        self.timeline.close()
        self._fail_all("shutdown() was called")
        if self._owns_group:
            end_group()

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 has ended, which the other thread sees, too
            self._store.queue_push("requests", json.dumps(message | {"rank": self.environment.rank}))

    def _coordinate(self, store: Any) -> None:
        """Answer requests until all ranks have left."""
        negotiator = Negotiator(self.environment.world_size, _log.warning, *self._limits)
        while negotiator.present:
            try:
                message = json.loads(store.queue_pop("requests"))
            except RuntimeError:
                return
            rank = message["rank"]
            for ranks, decision in _answer(negotiator, rank, message):
                for receiver in ranks:
                    store.queue_push(f"decisions/{receiver}", json.dumps(decision))
            if "end" in message:
                return

    def _execute(self, store: Any) -> None:
        """Run what has been decided, until this rank leaves."""
        queue_key = f"decisions/{self.environment.rank}"
        while True:
            try:
                decision = json.loads(store.queue_pop(queue_key))
            except RuntimeError as lost:
                self._fail_all(f"rank 0, which keeps the ranks' messages, has ended ({str(lost).splitlines()[0]})")
                return
            if "stop" in decision:
                self._fail_all(decision["stop"])
                return
            with self._lock:
                handle = self._handles.get(decision["key"])
            error = decision["error"]
            begun, results = time.monotonic(), None
            try:
                results = None if error else self._run(decision, handle)
                if handle is not None and not error:
                    self.timeline.add(shown(handle.key), handle.begun, begun, time.monotonic())
            except Exception as problem:  # a peer is gone, or memory is
                error = f"{shown(decision['key'])}: {problem}"
            with self._lock:
                handle = self._handles.pop(decision["key"], None)
            if handle is not None:  # else this rank has joined, or all has failed
                handle.end(results, error, decision.get("kind", "lost"))

    @torch.no_grad()
    def _run(self, decision: dict[str, Any], handle: Handle | None) -> Any:
        """Run an operation, with zeros if this rank has joined, and return its result."""
        like = decision["like"]
        kind = like["kind"]
        if kind == "join":
            self._counts.clear()  # ranks have made different numbers of calls, and count alike from here
            return decision["last"]
        if kind == "add_process_set":
            ranks, own_rank = like["ranks"], self.environment.rank
            place = ranks.index(own_rank) if own_rank in ranks else -1
            self.members[decision["id"]] = moves.Members(_new_group(ranks), ranks, place)
            return decision["id"]
        if kind == "remove_process_set":
            members = self.members.pop(like["removed"])
            return members.rank >= 0 and dist.destroy_process_group(members.group)
        if kind == "barrier":
            return None
        tensors = _zeros(like) if handle is None else handle.tensors
        results = moves.MOVES[kind](self.members[like["set"]], decision, tensors)
        results = results if handle is None else handle.finish(results)
        _synchronize(tensors)  # the program goes on with a stream of its own
        return results

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            self._broken = self._broken or reason
            handles, self._handles = self._handles, {}
        for key, handle in handles.items():
            handle.end(None, f"{shown(key)}: {reason}")


def _answer(negotiator: Negotiator, rank: int, message: dict[str, Any]) -> list[Decision]:
    """Return what follows from a message of a rank."""
    if "submit" in message:
        return negotiator.submit(rank, message["submit"])
    if "wait" in message:
        left = [decision for gone in message["gone"] for decision in negotiator.leave(gone)]
        return [*left, *negotiator.wait(rank, message["wait"], message["seconds"])]
    if "end" in message:
        return [(negotiator.present, {"stop": "rank 0 has ended: its program ended, or called shutdown()"})]
    return [*negotiator.leave(rank), ([rank], {"stop": "shutdown() was called"})]


def _stall_limits() -> tuple[float, float]:
    """Return the seconds of waiting after which to warn, and to fail (0: never), of Horovod's variables."""
    patience, limit, off = (
        os.environ.get(f"HOROVOD_STALL_{name}") or default
        for name, default in (("CHECK_TIME_SECONDS", "60"), ("SHUTDOWN_TIME_SECONDS", "0"), ("CHECK_DISABLE", "0"))
    )
    try:
        return (float(patience) if off == "0" else math.inf), float(limit)
    except ValueError:
        raise ValueError(
            f"HOROVOD_STALL_CHECK_TIME_SECONDS and HOROVOD_STALL_SHUTDOWN_TIME_SECONDS are {patience!r} and {limit!r}, "
            "but must be numbers of seconds"
        ) from None


def _has_ended(process: int) -> bool:
    """Return True if a process of this machine is gone, or waits only for its parent to take notice of its end."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def _synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until devices have computed what was asked of them."""
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.synchronize(device)


def _new_group(ranks: Sequence[int]) -> Any:
    """Return a process group that carries CPU tensors, too, which one of nccl alone refuses. Collective."""
    group_backends = backends()
    missing = ",".join(f"{device}:{name}" for device, name in ({"cpu": "gloo"} | group_backends).items())
    return prove(dist.new_group(list(ranks), backend=None if "cpu" in group_backends else missing))


def _zeros(like: Request) -> list[torch.Tensor]:
    """Return the part of a rank that has joined."""
    device = torch.device(like["devices"][0])
    device = torch.device("cpu") if device.type == "cpu" else torch.accelerator.current_accelerator() or device
    dtypes = [getattr(torch, dtype) for dtype in like["dtypes"]]
    return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in zip(like["shapes"], dtypes, strict=True)]


def _store(environment: Environment) -> Any:
    """Return a key-value store with queues that all ranks share, with keys of this world alone. Collective."""
    group_store: Any = shared_store()
    agreed, server = ("", 0), None
    if environment.rank == 0:
        try:
            group_store.queue_len("horovod")
            queues = environment.world_size > 1  # in a store of one process, a wait for a message is not woken
        except (RuntimeError, NotImplementedError):  # a store in a file
            queues = False
        if not queues:
            server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
        agreed = uuid.uuid4().hex, server.port if server else 0
    token, port = gather_json(agreed)[0]
    if port and not environment.one_node:
        raise ValueError(
            "the process group's store is a file, which carries no messages between nodes; start the group with "
            "init_method env:// or tcp://, or let hvd.init() start it"
        )
    if port:  # not a clone, as rank 0's store keeps the server
        connection: Any = server or dist.TCPStore("127.0.0.1", port, None, False)  # type: ignore[attr-defined]
    else:
        connection = connect_again(group_store)
    prefix = f"horovod/{token}"
    if isinstance(connection, SealedStore):
        return connection.part(prefix)
    # Of a group that was started elsewhere; the ranks alone know the token.
    return SealedStore(dist.PrefixStore(prefix, connection), token.encode(), "the master")  # type: ignore[attr-defined]


def make_world() -> World:
    """Start the process group unless it has been, and return the world of its ranks. Collective."""
    owns = not dist.is_initialized()
    environment = init_distributed()
    return World(environment, gather_json((environment.local_world_size, PLACE, os.getpid())), owns)


_current: World | None = None


def start() -> World:
    """Return the world, after making it if there is none. Collective."""
    global _current
    if _current is None:
        _current = make_world()
        atexit.register(shutdown)
    return _current


def shutdown() -> None:
    """End Horovod's world, if there is one. Operations of other ranks that need this one fail."""
    global _current
    world, _current = _current, None
    if world is not None:
        atexit.unregister(shutdown)
        world.close()


def is_initialized() -> bool:
    """Return whether ``init`` has been called, and ``shutdown`` not since."""
    return _current is not None


def world_for(call: str) -> World:
    """Return the world; raise ValueError, which names the call, if there is none."""
    if _current is None:
        raise ValueError(f"{call}() was called before hvd.init(); call hvd.init() once at the start of the script")
    return _current


def named(function: F, name: str, text: str | None, **more: Any) -> F:
    """Return a function that has been made for the public name ``name``, with its docstring and other attributes."""
    for attribute, value in {"name": name, "qualname": name, "doc": text, **more}.items():
        setattr(function, f"__{attribute}__", value)
    return function
