"""One-sided reads: a rank has parameters from the shards of other ranks, whose programs take no part.

Fetches are collectives, in an order that all ranks know. A use out of that order may be of this rank alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
import torch.distributed as dist

from zeromesh.base.worker import Worker
from zeromesh.comm.mesh import Mesh
from zeromesh.comm.trust import connect_again
from zeromesh.shard.parameters.unit import Unit
from zeromesh.shard.store.memory import allocate

PATIENCE = 2.0  # seconds after which a rank fetches by itself what not all have asked for: a rank may wait elsewhere
PAUSE, LONGEST_PAUSE = 0.0005, 0.02  # seconds between two looks at the store
LEAVE = 2.0  # seconds that the end of an engine waits for the thread that serves
BLOCK = 4 << 20  # bytes of a value in the store, which refuses more than 8 MiB
TOGETHER, ALONE = b"together", b"alone"

Place = tuple[int, int]  # in the order of events that all ranks share
Stamp = tuple[int, int]  # of shards: updates so far, and forwards of the model that have ended since then
MOST_STAMPS = 64


class OneSided:
    """Serves this rank's shards to the other ranks, and reads theirs."""

    # Messages go through the store: a thread of its own answers while the program computes, or waits for a collective.

    def __init__(self, units: Sequence[Unit], mesh: Mesh, place: Callable[[], Place]) -> None:
        self._units = {unit.index: unit for unit in units}
        self._mesh, self._place, self._store = mesh, place, mesh.store
        self._ranks = dist.get_process_group_ranks(mesh.shard.process_group)
        name = f"zeromesh/one-sided/{self._ranks[0]}"
        # All ranks make their engines in one order, and none makes the next before all have this one.
        self._base = f"{name}/{(self._store.add(name, 1) - 1) // len(self._ranks)}"
        self._asked: tuple[Place, str] | None = None  # the last question to all ranks, and of what use
        self._alone: Place | None = None  # where the answer was that not all ranks fetch the same
        self._keys: list[str] = []  # of questions to which some rank may still come
        self._reads = 0
        stream = None if mesh.device.type == "cpu" else torch.Stream(mesh.device)
        self._stream: Any = stream  # not the one that computes, which may wait for the rank that asks
        self._stamp: Stamp = (0, 0)
        # What the device had been given at each stamp. To wait for what came later may be to wait for who asks.
        self._written: dict[Stamp, Any] = {}
        self.mark()
        queue = f"{self._base}/to {mesh.rank}"
        worker = Worker(partial(_serve, ref(self), connect_again(self._store), queue))
        self.close = finalize(self, _stop, self._store, queue, worker)
        worker.start()

    def mark(self, forwards: int = 0, again: bool = False) -> None:
        """Note that shards are whole, after an update or ``forwards``, once the device has done what it was given."""
        updates = self._place()[0]
        stamp = (updates, forwards + self._stamp[1] if updates == self._stamp[0] else 0)
        if again or stamp not in self._written:
            stream = None if self._stream is None else torch.accelerator.current_stream(self._mesh.device)
            self._written[stamp] = None if stream is None else stream.record_event()
        if len(self._written) > MOST_STAMPS:
            del self._written[next(iter(self._written))]
        self._stamp = stamp  # last: from here on the thread answers

    def is_shared(self, unit: Unit) -> bool:
        """Return whether all ranks ask this next, of the same unit: then they fetch it together."""
        place = self._place()
        if place == self._alone:
            return False
        question = f"{self._base}/at {place[0]}.{place[1]}"
        use = f"{unit.index} {torch.is_grad_enabled()}"  # a backward must come on all ranks, or on none
        count, answer = f"{question}/{use}", f"{question}/answer"
        self._asked = place, use
        if self._store.add(count, 1) == len(self._ranks):
            self._store.compare_set(answer, "", TOGETHER)
        due, pause = time.monotonic() + PATIENCE, PAUSE
        while not self._store.check([answer]):
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            if time.monotonic() > due:
                self._store.compare_set(answer, "", ALONE)
            self._ask({"answer": answer, "place": place, "use": use})
        together = bool(self._store.get(answer) == TOGETHER)
        if together or (self._alone or place)[0] != place[0]:  # all ranks are past what was asked before
            for key in self._keys:
                self._store.delete_key(key)
            self._keys = []
        self._keys += [count, answer]
        self._alone = None if together else place
        return together

    def read(self, unit: Unit) -> torch.UntypedStorage:
        """Return new memory with a unit's parameters, as they are after the last update.

        Raises:
            RuntimeError: another rank has other parameters, or does not answer.
        """
        self._reads += 1
        to = f"{self._base}/for {self._mesh.rank}.{self._reads}"
        self._ask({"to": to, "unit": unit.index, "stamp": self._stamp})
        storage = allocate(unit.nbytes, self._mesh.device)
        for number, (flat, full) in enumerate(zip(unit.flats, unit.fulls(storage), strict=True)):
            for rank, part in zip(self._ranks, full.chunk(len(self._ranks)), strict=True):
                if rank == self._mesh.rank:
                    part.copy_(flat.shard)
                    continue
                for block, target in enumerate(part.view(torch.uint8).split(BLOCK)):
                    key = f"{to}/{rank}.{number}.{block}"
                    self._mesh.pending(f"parameters of {unit} from rank {rank}", _Message(self._store, key)).wait()
                    data = bytearray(self._store.get(key))
                    self._store.delete_key(key)
                    if not data:
                        raise RuntimeError(
                            f"the parameters of {unit} were updated on rank {rank}, and not on rank {self._mesh.rank}, "
                            "which uses them at another place of the program; use them in the same step on all ranks"
                        )
                    target.copy_(torch.frombuffer(data, dtype=torch.uint8))
        return storage

    def _ask(self, message: dict[str, Any]) -> None:
        for rank in self._ranks:
            if rank != self._mesh.rank:
                _put(self._store, f"{self._base}/to {rank}", json.dumps(message))

    def answer(self, message: dict[str, Any], store: Any) -> bool:
        """Send another rank this rank's shard, or tell it that this rank is elsewhere; False if it is too early."""
        if "answer" in message:
            place, asked = tuple(message["place"]), self._asked
            if self._place() > place or (asked is not None and asked[0] == place and asked[1] != message["use"]):
                store.compare_set(message["answer"], "", ALONE)
            return True
        unit, stamp = self._units[message["unit"]], tuple(message["stamp"])
        if stamp > self._stamp:
            return False  # here the update still runs, or the forward that may have written to parameters
        written, current = self._written.get(stamp), stamp[0] == self._stamp[0]
        if written is not None:
            written.synchronize()
        for number, flat in enumerate(unit.flats):
            with nullcontext() if self._stream is None else self._stream:
                shard = flat.at_rest.to(flat.layout.dtype).cpu()
            for block, data in enumerate(shard.view(torch.uint8).split(BLOCK)):
                value = data.numpy().tobytes() if current else b""
                store.set(f"{message['to']}/{self._mesh.rank}.{number}.{block}", value)
        return True


class _Message:
    """A message that comes through the store."""

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key

    def wait(self) -> None:
        """Wait until it is there."""
        pause = PAUSE
        while not self._store.check([self._key]):
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def _put(store: Any, queue: str, text: str) -> None:
    store.set(f"{queue}/{store.add(queue, 1)}", text)


def _serve(reader: ref[OneSided], store: Any, queue: str) -> None:
    """Answer what comes in the queue, until it is an empty text."""
    number = 1
    with suppress(RuntimeError):  # the process group and its store are gone
        while True:
            key = f"{queue}/{number}"
            try:
                store.wait([key], timedelta(minutes=5))
            except dist.DistStoreError:
                continue
            text = store.get(key)
            store.delete_key(key)
            if not text:
                return
            while not _answered(reader(), json.loads(text), store):
                time.sleep(PAUSE)
            number += 1


def _answered(reader: OneSided | None, message: dict[str, Any], store: Any) -> bool:
    return reader is None or not reader.close.alive or reader.answer(message, store)


def _stop(store: Any, queue: str, worker: Worker) -> None:
    with suppress(RuntimeError):
        _put(store, queue, "")
    worker.join(LEAVE)
