"""Start and end of Horovod's world, and the threads that negotiate and run its operations.

Every rank sends its requests to rank 0, whose coordinator decides the order. A thread on each rank runs what has been
decided, on process groups of its own, so that collectives of the program itself are not disturbed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.comm.environment import Environment, backends, init_distributed
from zeromesh.comm.environment import shutdown as end_group
from zeromesh.comm.mpi import backend as mpi
from zeromesh.horovod import moves
from zeromesh.horovod.negotiation import Decision, Negotiator, Request, key_of, shown
from zeromesh.horovod.timeline import OperationTimeline

BLOCKED = 2.0
"""Seconds of waiting after which a rank says so, for rank 0 to see when all wait for each other."""
LEAVING = 5.0
"""Seconds that rank 0, which keeps the messages, waits for the others before it ends."""
NEVER = timedelta(days=20)
"""Limit of a wait for a message; longer ones overflow in torch."""

_log = logging.getLogger("zeromesh")


class HorovodInternalError(RuntimeError):
    """An operation failed: ranks contradict each other, or one has ended."""


@dataclass(eq=False)
class Handle:
    """An operation in progress; see ``synchronize`` and ``poll``."""

    key: str
    tensors: list[torch.Tensor]
    finish: Callable[[Any], Any]  # makes what ``synchronize`` returns of the results
    begun: float = field(default_factory=time.monotonic)
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: Exception | None = None

    def complete(self, results: Any) -> None:
        """Take the results."""
        self.result = self.finish(results)
        self.tensors = []
        self.done.set()

    def outcome(self) -> Any:
        """Return the result, or raise the error, of an operation that is done."""
        if self.error is not None:
            raise self.error
        return self.result

    def fail(self, reason: str) -> None:
        """Take the failure."""
        self.error = HorovodInternalError(reason)
        self.done.set()


class World:
    """All ranks, between ``init`` and ``shutdown``. Making it is collective.

    Args:
        environment: place of this process.
        local_sizes: number of ranks on the node of each rank.
        owns_group: whether torch's process group has been started for this, and ends with it.
    """

    def __init__(self, environment: Environment, local_sizes: Sequence[int], owns_group: bool) -> None:
        self.environment = environment
        self.homogeneous = len(set(local_sizes)) == 1
        self.timeline = OperationTimeline(os.environ.get("HOROVOD_TIMELINE", "") if environment.rank == 0 else "")
        self._owns_group = owns_group
        ranks = range(environment.world_size)
        self.members = {0: moves.Members(dist.new_group(list(ranks)), ranks, environment.rank)}
        self._store = _store(environment)
        self._handles: dict[str, Handle] = {}
        self._counts: dict[tuple[int, str], int] = defaultdict(int)
        self._lock = threading.Lock()
        self._broken = ""  # why nothing can be run any more
        self._patience = float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS") or 60)
        # Each thread needs a connection of its own, which a wait for a message holds.
        self._threads = [threading.Thread(target=self._execute, args=(self._store.clone(),), daemon=True)]
        if environment.rank == 0:
            store = self._store.clone()
            self._threads.append(threading.Thread(target=self._coordinate, args=(store,), daemon=True))
        for thread in self._threads:
            thread.start()

    def submit(
        self, kind: str, name: str | None, number: int, tensors: Sequence[torch.Tensor],
        finish: Callable[[Any], Any] = lambda results: results, **fields: Any,
    ) -> Handle:  # fmt: skip
        """Ask for an operation on process set ``number``; ``fields`` are those of the kind."""
        if name is None:
            self._counts[number, kind] += 1
            name = f"noname.{self._counts[number, kind]}"
        request: Request = {
            "kind": kind, "name": name, "set": number, "shapes": [list(tensor.shape) for tensor in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "devices": sorted({tensor.device.type for tensor in tensors}), "splits": None, "ranks": [], "problem": "",
        } | fields  # fmt: skip
        handle = Handle(key_of(request), [tensor.detach().contiguous() for tensor in tensors], finish)
        for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)  # another thread goes on, with a stream of its own
        with self._lock:
            if self._broken:
                raise HorovodInternalError(f"{shown(handle.key)}: {self._broken}")
            if handle.key in self._handles:
                raise HorovodInternalError(
                    f"{shown(handle.key)} is in progress already; synchronize its handle first, or use another name"
                )
            self._handles[handle.key] = handle
        self._say({"submit": request})
        return handle

    def wait(self, handle: Handle) -> Any:
        """Block until an operation is done; return its result or raise its error."""
        while not handle.done.wait(BLOCKED):
            waited = time.monotonic() - handle.begun
            self._say({"wait": handle.key, "seconds": waited, "limit": self._patience})
        return handle.outcome()

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
        negotiator = Negotiator(self.environment.world_size, _log.warning)
        while negotiator.present:
            try:
                message = json.loads(store.queue_pop("requests"))
            except RuntimeError:
                return
            rank = message["rank"]
            for ranks, decision in _answer(negotiator, rank, message):
                for one in ranks:
                    store.queue_push(f"decisions/{one}", json.dumps(decision))
            if "end" in message:
                return

    def _execute(self, store: Any) -> None:
        """Run what has been decided, until this rank leaves."""
        own = f"decisions/{self.environment.rank}"
        while True:
            try:
                decision = json.loads(store.queue_pop(own))
            except RuntimeError as error:
                self._fail_all(f"rank 0, which keeps the ranks' messages, has ended ({str(error).splitlines()[0]})")
                return
            if "stop" in decision:
                self._fail_all(decision["stop"])
                return
            with self._lock:
                handle = self._handles.get(decision["key"])
            if decision["error"]:
                self._end(handle, decision["key"], None, decision["error"])
                continue
            try:
                begun = time.monotonic()
                results = self._run(decision, handle)
                self.timeline.add(shown(decision["key"]), handle.begun if handle else begun, begun, time.monotonic())
                self._end(handle, decision["key"], results, "")
            except Exception as error:  # a peer is gone, or memory is
                self._end(handle, decision["key"], None, f"{shown(decision['key'])}: {error}")

    @torch.no_grad()
    def _run(self, decision: dict[str, Any], handle: Handle | None) -> Any:
        like = decision["like"]
        kind = like["kind"]
        if kind == "join":
            self._counts.clear()  # ranks have made different numbers of calls, and count alike from here
            return decision["last"]
        if kind == "add_process_set":
            ranks, own = like["ranks"], self.environment.rank
            group = dist.new_group(ranks)
            self.members[decision["id"]] = moves.Members(group, ranks, ranks.index(own) if own in ranks else -1)
            return decision["id"]
        if kind == "remove_process_set":
            members = self.members.pop(like["removed"])
            return members.rank >= 0 and dist.destroy_process_group(members.group)
        if kind == "barrier":
            return None
        tensors = _zeros(like) if handle is None else handle.tensors
        results = moves.run(self.members[like["set"]], decision, tensors)
        for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        return results

    def _end(self, handle: Handle | None, key: str, results: Any, error: str) -> None:
        with self._lock:
            self._handles.pop(key, None)
        if handle is None:
            return  # this rank has joined
        if error:
            handle.fail(error)
        else:
            with torch.no_grad():
                handle.complete(results)

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            self._broken = self._broken or reason
            handles, self._handles = self._handles, {}
        for key, handle in handles.items():
            handle.fail(f"{shown(key)}: {reason}")


def _answer(negotiator: Negotiator, rank: int, message: dict[str, Any]) -> list[Decision]:
    """Return what follows from a message of a rank."""
    if "submit" in message:
        return negotiator.submit(rank, message["submit"])
    if "wait" in message:
        return negotiator.wait(rank, message["wait"], message["seconds"], message["limit"])
    if "end" in message:
        return [(negotiator.present, {"stop": "rank 0 has ended: its program ended, or called shutdown()"})]
    return [*negotiator.leave(rank), ([rank], {"stop": "shutdown() was called"})]


def _zeros(like: Request) -> list[torch.Tensor]:
    """Return the part of a rank that has joined."""
    device = torch.device(like["devices"][0])
    device = torch.device("cpu") if device.type == "cpu" else torch.accelerator.current_accelerator() or device
    dtypes = [getattr(torch, dtype) for dtype in like["dtypes"]]
    return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in zip(like["shapes"], dtypes, strict=True)]


def _store(environment: Environment) -> Any:
    """Return a key-value store with queues that all ranks share, with keys of this world alone. Collective."""
    ours = "mpi" in backends().values() and mpi.is_ours()
    found: Any = mpi.store() if ours else dist.distributed_c10d._get_default_store()
    agreed: list[Any] = [None]
    server = None
    if environment.rank == 0:
        try:
            found.queue_len("horovod")
            queues = environment.world_size > 1  # in a store of one process, a wait for a message is not woken
        except (RuntimeError, NotImplementedError):  # a store in a file
            queues = False
        if not queues:
            server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
        agreed = [(uuid.uuid4().hex, server.port if server else 0)]
    dist.broadcast_object_list(agreed)
    token, port = agreed[0]
    if port and not environment.one_node:
        raise ValueError(
            "the process group's store is a file, which carries no messages between nodes; start the group with "
            "init_method env:// or tcp://, or let hvd.init() start it"
        )
    if port:  # not a clone, as rank 0's store keeps the server
        own: Any = server or dist.TCPStore("127.0.0.1", port, None, False)  # type: ignore[attr-defined]
    else:
        own = found.clone()
    store: Any = dist.PrefixStore(f"horovod/{token}", own)  # type: ignore[attr-defined]
    store.set_timeout(NEVER)
    return store


def make_world() -> World:
    """Start the process group unless it has been, and return the world of its ranks. Collective."""
    owns = not dist.is_initialized()
    environment = init_distributed()
    sizes: list[Any] = [None] * environment.world_size
    dist.all_gather_object(sizes, environment.local_world_size)
    return World(environment, sizes, owns)


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
