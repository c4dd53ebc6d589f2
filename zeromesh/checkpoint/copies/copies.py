"""Copies of the state in host memory that outlive the ranks: on their node, and on the nodes after it.

Each rank writes what it would write to a checkpoint to a file in memory, and sends it to a rank of the next nodes. Two
such copies take turns, so that one is complete at any time. A run that is started again puts the newest one together.
Source of the idea: Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints",
2023.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zeromesh.base.files import write_text
from zeromesh.base.lock import FolderInUse, locked
from zeromesh.checkpoint.checkpoint_folder import latest, locate, step_of
from zeromesh.checkpoint.contents import RunState, boxes
from zeromesh.checkpoint.copies.memory_files import (
    Exchange,
    Kept,
    allocate,
    description,
    mark,
    marked,
    place,
    root,
    user,
)
from zeromesh.checkpoint.copies.needed_parts import deliveries, needed_parts
from zeromesh.checkpoint.manifest import MANIFEST, read_manifest
from zeromesh.checkpoint.rank_manifests import shard_file, write_manifests
from zeromesh.checkpoint.save import numbers, pack_client_state, run_state
from zeromesh.checkpoint.shard_writer import ShardLayout
from zeromesh.comm.agreement import agree_run, catch, texts
from zeromesh.comm.mesh import Mesh
from zeromesh.comm.peers import named
from zeromesh.comm.trust import prove
from zeromesh.shard.store.memory import lock_pages

SLACK = 1 << 16  # bytes

WHAT = "copy the state to memory"

_log = logging.getLogger("zeromesh")


class MemoryCopies:
    """Copies of one engine's state.

    Args:
        mesh: of the engine.
        count: nodes after its own that keep a copy of a rank's part; fewer where there are fewer.
    """

    def __init__(self, mesh: Mesh, count: int) -> None:
        self._world, self._device = mesh.group("world"), mesh.device
        self._rank = mesh.rank
        self._count = count
        self._kept: Kept | None = None
        self._sequence = 0  # of the newest copy
        self._life = ""  # drawn when copies begin, and at each start that goes on from some: parts of two do not mix
        self._files: dict[Path, torch.Tensor] = {}  # mapped to memory
        # A node is what shares a folder in memory: its ranks' parts are lost together. Ranks by node, in order.
        where = texts(self._world, place())
        self._nodes = [
            [rank for rank, location in enumerate(where) if location == node] for node in dict.fromkeys(where)
        ]
        self._node_of = {rank: number for number, ranks in enumerate(self._nodes) for rank in ranks}
        self._node = self._node_of[self._rank]
        # Of their own, as a thread uses them beside the other collectives.
        self._links = prove(dist.new_group(backend="gloo")) if len(self._nodes) > 1 else None

    @property
    def _leads(self) -> bool:
        return self._rank == self._nodes[self._node][0]

    def _targets(self, rank: int) -> list[int]:
        """Return the ranks that keep copies of a rank's part."""
        node = self._node_of[rank]
        place, others = self._nodes[node].index(rank), range(1, min(self._count, len(self._nodes) - 1) + 1)
        after = [self._nodes[(node + other) % len(self._nodes)] for other in others]
        return [ranks[place % len(ranks)] for ranks in after]

    def _kept_parts(self, node: int) -> set[int]:
        """Return the ranks whose parts a node keeps: its own, and those of the nodes before it."""
        count, before = len(self._nodes), min(self._count, len(self._nodes) - 1)
        near = {rank for distance in range(before + 1) for rank in self._nodes[(node - distance) % count]}
        return {
            rank for rank in near if node in {self._node_of[rank], *(self._node_of[t] for t in self._targets(rank))}
        }

    def save(self, engine: RunState, folder: Path, client_state: dict[str, Any]) -> None:
        """Copy the state of a run that saves its checkpoints to ``folder``. Collective; see ``Engine.save_to_memory``.

        It returns when the copy is complete on this node; the next nodes get theirs while training goes on.
        """
        folder = folder.absolute()
        # All nodes have the copy before this one then, so that the one before that is not needed any more.
        agree_run(self._world, WHAT, self._settle)
        if self._kept is None or self._kept.folder != folder:
            self._begin(folder)
        run_copies = self._kept
        assert run_copies is not None
        slot = run_copies.slot(self._sequence + 1)
        data, text = agree_run(self._world, WHAT, lambda: self._write(slot, engine, client_state))
        self._sequence += 1  # only now: another try must not write over the copy before
        run_copies.own()
        if self._links is not None:
            sources = [rank for rank in range(self._world.size) if self._rank in self._targets(rank)]
            sizes = self._world.exchange(torch.tensor([data.numel()], device="cpu")).flatten().tolist()
            # Here, where all ranks hear of it if there is no room.
            agree_run(self._world, WHAT, lambda: [self._room(slot, rank, sizes[rank]) for rank in sources])
            run_copies.begin(Exchange(partial(self._send, slot, (data, text), sources)))

    def _settle(self) -> None:
        if self._kept is not None:
            self._kept.settle()

    def _begin(self, folder: Path) -> None:
        """Mark the run's folder, and delete what there is of it, or of another one."""
        self.forget()

        def begin() -> list[str | None]:
            if self._rank:
                return []
            folder.mkdir(parents=True, exist_ok=True)
            return [marked(folder), f"zeromesh-{user()}-{secrets.token_hex(8)}"]

        old, name = json.loads(texts(self._world, json.dumps(agree_run(self._world, WHAT, begin)))[0])
        agree_run(self._world, WHAT, lambda: self._delete(old) if old is not None and self._leads else None)
        agree_run(self._world, WHAT, lambda: mark(folder, name) if self._rank == 0 else None)
        self._life, self._sequence = name, 0
        self._kept = self._kept_of(folder, name)
        agree_run(self._world, WHAT, self._kept.hold)

    def _delete(self, old: str) -> None:
        """Delete copies of a run before; raise FolderInUse if a process has them."""
        if (root() / old).is_dir():
            with locked(root() / old):
                shutil.rmtree(root() / old)

    def _kept_of(self, folder: Path, name: str) -> Kept:
        return Kept(folder, name, self._rank, self._nodes[self._node])

    def holds(self, folder: Path) -> bool:
        """Return whether the copies that the folder leads to are this engine's."""
        return self._kept is not None and marked(folder) == self._kept.name

    def _write(self, slot: Path, engine: RunState, client_state: dict[str, Any]) -> tuple[torch.Tensor, str]:
        """Write this rank's part; return its data, and its description."""
        packed, tensors = pack_client_state(client_state)
        if self._leads:
            self._tidy(slot)
        layout = ShardLayout([*boxes(engine, False, of_client=tensors)])
        data = self._room(slot, self._rank, layout.nbytes)
        data[: len(layout.header)].copy_(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))
        for box in boxes(engine, of_client=tensors):
            begin, end = layout.place(box)
            data[begin:end].view(box.dtype).copy_(box.data(), non_blocking=True)
            layout.add(box, (begin, end), [])
        words = {
            "life": self._life,
            "sequence": self._sequence + 1,
            "ranks": self._world.size,
            "global_steps": engine.global_steps,
            "shard": layout.entry(shard_file(self._rank), hashed=False),
            **numbers(engine),
        }
        if self._rank == 0:
            words["state"] = run_state(engine, packed)
        text = json.dumps(words)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        write_text(description(slot, self._rank), text, flush=False)
        return data, text

    def _tidy(self, slot: Path) -> None:
        """Delete the parts that are not for this node, but were brought here for a start."""
        wanted = self._kept_parts(self._node)
        for path in sorted(slot.glob("rank_*")):  # descriptions first: they say that a part is complete
            if int(path.name[5:10]) not in wanted:
                path.unlink()

    def _room(self, slot: Path, rank: int, nbytes: int) -> torch.Tensor:
        """Return memory for the part of a rank, shape ``(nbytes,)``, dtype uint8; what was there does not count more.

        Raises:
            OSError: there is too little.
        """
        description(slot, rank).unlink(missing_ok=True)
        (slot / MANIFEST).unlink(missing_ok=True)
        path = slot / shard_file(rank)
        memory = self._files.get(path)
        if memory is None or not nbytes <= memory.numel() <= 2 * nbytes + SLACK:
            # A little more, as the length of some states, such as those of random numbers in JSON, is not always the
            # same: new memory is slow. The file is of any length at least ``nbytes``.
            size = -(-nbytes // SLACK) * SLACK + SLACK
            if not path.is_file() or path.stat().st_size != size:
                path.unlink(missing_ok=True)
                allocate(path, size)
            # Shared: what is written there is in the file at once, whatever becomes of this process.
            memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
            if self._device.type == "cuda":
                with suppress(RuntimeError):  # so much cannot be page-locked; copies take longer then
                    lock_pages(memory.untyped_storage())
            self._files[path] = memory
        return memory[:nbytes]

    def _send(self, slot: Path, part: tuple[torch.Tensor, str], sources: list[int]) -> None:
        """Send this rank's part to those that keep it, and take those of ``sources``."""
        works: list[Any] = []
        for number, message in enumerate(_messages(part)):
            works += [dist.isend(message, to, self._links, number) for to in self._targets(self._rank)]
        for source in sources:
            self._receive(slot, source, source)
        for work in works:
            work.wait()

    def _receive(self, slot: Path, rank: int, source: int) -> None:
        """Take the part of a rank from a rank that has it."""
        sizes = torch.empty(2, dtype=torch.int64)
        dist.recv(sizes, source, self._links, 0)
        data, words = self._room(slot, rank, int(sizes[0])), torch.empty(int(sizes[1]), dtype=torch.uint8)
        dist.recv(data, source, self._links, 1)
        dist.recv(words, source, self._links, 2)
        write_text(description(slot, rank), bytes(words.tolist()).decode(), flush=False)

    def find(self, folder: Path, engine: RunState) -> Path | None:
        """Return the folder with the newest copy of the run that saves to ``folder``: the parts that this node needs.

        None if there is none, or a checkpoint on the disk is newer. Later copies of this engine follow it. Collective.
        """
        folder = folder.absolute()
        agree_run(self._world, "look for copies", self._settle)

        def look() -> list[Any]:
            return [marked(folder), _steps_on_disk(folder), secrets.token_hex(8)] if self._rank == 0 else []

        answer = texts(self._world, json.dumps(agree_run(self._world, "look for copies", look)))[0]
        name, on_disk, life = json.loads(answer)
        run_copies = self._kept
        if run_copies is None or run_copies.name != name:  # or this engine goes back to its own copy
            self.forget()
            if name is None:
                return None
            run_copies = self._kept_of(folder, name)
        copy = self._choose(run_copies, on_disk, engine)
        if copy is None:
            run_copies.leave(failed=True)
            self._kept = None
            return None
        self._kept, self._sequence, self._life = run_copies, copy.sequence, life
        _log.info("the run continues from the copy in memory of step %d", copy.steps)
        return run_copies.slot(copy.sequence)

    def _choose(self, run_copies: Kept, on_disk: int, engine: RunState) -> _Copy | None:
        """Return the copy to go on from, after each node has its parts; None for the disk's ``on_disk`` updates."""
        node_parts = agree_run(self._world, "look for copies", lambda: _parts(run_copies) if self._leads else [])
        by_rank = [json.loads(text) for text in texts(self._world, json.dumps(node_parts))]
        on_node = [by_rank[ranks[0]] for ranks in self._nodes]
        if None in on_node:
            if self._rank == 0:
                _log.warning("the copies in memory are in use by another process; the checkpoint on the disk is loaded")
            return None
        newest = _newest(on_node)
        if newest is None or newest.steps < on_disk:
            return None
        agree_run(self._world, "look for copies", run_copies.hold)  # also on nodes that have none yet
        has = [{rank for rank, *copy in parts if _Copy(*copy) == newest} for parts in on_node]
        slot = run_copies.slot(newest.sequence)
        texts_of_parts = self._descriptions(slot, newest, has)
        parts = [json.loads(text) for text in texts_of_parts]
        if not self._fetch(slot, engine, parts, texts_of_parts, has):
            return None

        def put_together() -> None:
            # So that it is read as a checkpoint; some of its files may be on other nodes.
            if self._leads:
                write_manifests(slot, parts[0]["state"], parts)

        agree_run(self._world, "put copies together", put_together)
        return newest

    def _descriptions(self, slot: Path, copy: _Copy, has: list[set[int]]) -> list[str]:
        """Return the descriptions of all parts of a copy. Collective."""
        # Every node tells those that it is the first to have, its ranks in turn.
        first = {part: node for node in reversed(range(len(has))) for part in has[node]}
        own_parts = [
            part for part, node in first.items() if (ranks := self._nodes[node])[part % len(ranks)] == self._rank
        ]

        def read() -> dict[int, str]:
            return {part: description(slot, part).read_text(encoding="utf-8") for part in own_parts}

        answers = texts(self._world, json.dumps(agree_run(self._world, "look for copies", read)))
        by_part = {part: text for answer in answers for part, text in json.loads(answer).items()}
        return [by_part[str(part)] for part in range(copy.ranks)]

    def _fetch(
        self,
        slot: Path,
        engine: RunState,
        parts: list[dict[str, Any]],
        descriptions: list[str],
        has: list[set[int]],
    ) -> bool:
        """Bring each node the parts that its ranks load, and those that it keeps; False if one has no room."""
        needs = agree_run(self._world, "look for copies", lambda: sorted(needed_parts(engine, parts)))
        needs_of = [json.loads(text) for text in texts(self._world, json.dumps(needs))]
        missing: list[set[int]] = []
        for node, ranks in enumerate(self._nodes):
            wanted = {part for rank in ranks for part in needs_of[rank]}
            if len(parts) == self._world.size:  # else the next copy is cut anew
                wanted |= self._kept_parts(node)
            missing.append(wanted - has[node])
        # Files may be longer, by other lengths on each node.
        sizes = [max(box["bytes"][1] for box in part["shard"]["boxes"]) for part in parts]

        def make_room() -> None:  # by one rank of a node: each alone would see the memory that is free for all
            for part in missing[self._node] if self._leads else ():
                self._room(slot, part, sizes[part])

        failure = catch(make_room)[1]
        lacks = self._world.exchange(torch.tensor([float(failure is not None)], device="cpu"))
        if bool(lacks.any()):
            if self._rank == 0:
                _log.warning("a node has no room for the parts of the others; the checkpoint on the disk is loaded")
            return False
        plan = deliveries(self._nodes, has, missing)
        received = [delivery for delivery in plan if delivery.target == self._rank]
        # All at once: who takes has room for them, and who sends has them in memory.
        works: list[Any] = [
            dist.irecv(self._room(slot, part, sizes[part]), source, self._links, part) for part, source, _ in received
        ]
        for part, source, target in plan:
            if source == self._rank:
                path = str(slot / shard_file(part))
                data = torch.from_file(path, shared=True, size=sizes[part], dtype=torch.uint8)
                works.append(dist.isend(data, target, self._links, part))
        for work in works:
            work.wait()
        for part, _, _ in received:
            write_text(description(slot, part), descriptions[part], flush=False)
        if missing[self._node]:
            self._files.clear()  # another rank of this node writes some of them next
        return True

    def forget(self, failed: bool = False) -> None:
        """Let go of the copies, and delete those that this engine has made, unless a rank has failed."""
        if self._kept is not None:
            self._kept.leave(failed)
        self._kept = None
        self._files.clear()


class _Copy(NamedTuple):
    """A copy, whose parts have the same of each."""

    life: str
    sequence: int
    ranks: int
    steps: int


def _parts(run_copies: Kept) -> list[list[Any]] | None:
    """Return the parts on this node, each its rank and its copy's fields; None if another process writes them."""
    if not run_copies.here.is_dir():
        return []
    try:
        run_copies.hold()
    except FolderInUse:
        return None
    parts = []
    for path in sorted(run_copies.here.glob("copy_*/rank_*.json")):
        data = path.with_suffix(".safetensors")
        with suppress(OSError, ValueError, LookupError, TypeError):  # half of a part is none
            words, size = json.loads(path.read_text(encoding="utf-8")), data.stat().st_size
            named_by = (words["life"], words["sequence"], words["ranks"], words["global_steps"])
            if size >= max((box["bytes"][1] for box in words["shard"]["boxes"]), default=0):
                parts.append([int(path.stem[5:]), *named_by])
    return parts


def _newest(on_node: list[list[list[Any]]]) -> _Copy | None:
    """Return the newest copy with all its parts on some node; tell where a newer one lacks some."""
    parts: dict[_Copy, set[int]] = {}
    for rank, *fields in chain.from_iterable(on_node):
        parts.setdefault(_Copy(*fields), set()).add(rank)
    for copy in sorted(parts, key=lambda copy: copy.sequence, reverse=True):
        lacking = sorted(set(range(copy.ranks)) - parts[copy])
        if not lacking:
            return copy
        _log.info("the copy in memory of step %d lacks the parts of %s", copy.steps, named(lacking))
    return None


def _steps_on_disk(folder: Path) -> int:
    """Return the updates of the newest checkpoint on the disk; -1 if there is none that can be read."""
    if not folder.is_dir() or (tag := latest(folder)) is None:
        return -1
    try:
        return step_of(read_manifest(locate(folder, tag)))
    except (OSError, ValueError):
        return -1


def _messages(part: tuple[torch.Tensor, str]) -> list[torch.Tensor]:
    data, words = part[0], torch.frombuffer(bytearray(part[1].encode()), dtype=torch.uint8)
    return [torch.tensor([data.numel(), words.numel()]), data, words]
