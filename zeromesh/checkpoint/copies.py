"""Copies of the state in host memory that outlive the ranks: on their node, and on the nodes after it.

Each rank writes what it would write to a checkpoint to a file in memory, and sends it to a rank of the next nodes. Two
such copies take turns, so that one is complete at any time. A run that is started again puts the newest one together.
Source of the idea: Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints",
2023.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import socket
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.checkpoint.boxes import Box, ShardLayout, shard_file
from zeromesh.checkpoint.contents import RunState, boxes
from zeromesh.checkpoint.folder import latest, locate, write_manifest, write_text
from zeromesh.checkpoint.manifest import MANIFEST, read_manifest
from zeromesh.checkpoint.memory_files import MARK, Exchange, Kept, allocate, description, marked, root, user
from zeromesh.checkpoint.save import merged, numbers, pack_client_state, run_state
from zeromesh.comm.agreement import agree_run, texts
from zeromesh.comm.mesh import Mesh
from zeromesh.comm.peers import named
from zeromesh.tiers.lock import FolderInUse
from zeromesh.tiers.memory import lock_pages

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
        self._leave: weakref.finalize[..., Any] | None = None
        self._sequence = 0  # of the newest copy
        self._files: dict[Path, torch.Tensor] = {}  # mapped to memory
        # A node is what shares a folder in memory: its ranks' parts are lost together. Ranks by node, in order.
        where = texts(self._world, f"{socket.gethostname()} {os.environ.get('GROUP_RANK')} {root()}")
        self._nodes = [[rank for rank, one in enumerate(where) if one == node] for node in dict.fromkeys(where)]
        self._node = next(number for number, ranks in enumerate(self._nodes) if self._rank in ranks)
        # Of their own, as a thread uses them beside the other collectives.
        self._links = dist.new_group(backend="gloo") if len(self._nodes) > 1 else None

    @property
    def _leads(self) -> bool:
        return self._rank == self._nodes[self._node][0]

    def _targets(self, rank: int) -> list[int]:
        """Return the ranks that keep copies of a rank's part."""
        node = next(number for number, ranks in enumerate(self._nodes) if rank in ranks)
        place, others = self._nodes[node].index(rank), range(1, min(self._count, len(self._nodes) - 1) + 1)
        after = [self._nodes[(node + other) % len(self._nodes)] for other in others]
        return [ranks[place % len(ranks)] for ranks in after]

    def save(self, engine: RunState, folder: Path, client_state: dict[str, Any]) -> None:
        """Copy the state of a run that saves its checkpoints to ``folder``. Collective; see ``Engine.save_to_memory``.

        It returns when the copy is complete on this node; the next nodes get theirs while training goes on.
        """
        folder = folder.absolute()
        # All nodes have the copy before this one then, so that the one before that is not needed any more.
        agree_run(self._world, WHAT, self._settle)
        if self._kept is None or self._kept.folder != folder:
            self._begin(folder)
        assert self._kept is not None
        self._sequence += 1
        slot = self._kept.slot(self._sequence)
        data, text = agree_run(self._world, WHAT, lambda: self._write(slot, engine, client_state))
        if self._links is not None:
            sources = [rank for rank in range(self._world.size) if self._rank in self._targets(rank)]
            self._kept.begin(Exchange(partial(self._send, slot, (data, text), sources)))

    def _settle(self) -> None:
        exchange = None if self._kept is None else self._kept.exchange
        if exchange is not None:
            exchange.join()
            if exchange.failure is not None:
                raise exchange.failure

    def _begin(self, folder: Path) -> None:
        """Mark the run's folder, and forget what was kept of it or of another one."""
        self.forget()

        def mark() -> tuple[str | None, str]:
            if self._rank:
                return None, ""
            old, name = marked(folder), f"zeromesh-{user()}-{secrets.token_hex(8)}"
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / MARK, json.dumps({"name": name}))
            return old, name

        old, name = json.loads(texts(self._world, json.dumps(agree_run(self._world, WHAT, mark)))[0])
        if old is not None and self._leads:
            shutil.rmtree(root() / old, ignore_errors=True)
        self._hold(Kept(folder, name, self._rank, self._leads))

    def _hold(self, kept: Kept) -> None:
        agree_run(self._world, WHAT, kept.hold)
        self._kept, self._leave = kept, weakref.finalize(self, kept.leave)

    def _write(self, slot: Path, engine: RunState, client_state: dict[str, Any]) -> tuple[torch.Tensor, str]:
        """Write this rank's part; return its data, and its description."""
        packed, tensors = pack_client_state(client_state)

        def listed(read: bool) -> Iterator[Box]:
            yield from boxes(engine, read)
            yield from tensors if self._rank == 0 else ()

        if self._leads:
            self._tidy(slot)
        layout = ShardLayout([*listed(False)])
        data = self._room(slot, self._rank, layout.nbytes)
        data[: len(layout.header)].copy_(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))
        for box in listed(True):
            begin, end = layout.place(box)
            data[begin:end].view(box.data.dtype).copy_(box.data.detach(), non_blocking=True)
            layout.add(box, (begin, end), None)
        words = {
            "sequence": self._sequence, "ranks": self._world.size, "global_steps": engine.global_steps,
            "shard": layout.entry(shard_file(self._rank), hashed=False), **numbers(engine),
        }  # fmt: skip
        if self._rank == 0:
            words["state"] = run_state(engine, packed)
        text = json.dumps(words)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        write_text(description(slot, self._rank), text, flush=False)
        return data, text

    def _tidy(self, slot: Path) -> None:
        """Delete the parts that are not for this node, but were put together here for a start."""
        own = self._nodes[self._node]
        wanted = {rank for rank in range(self._world.size) if rank in own or {*own} & {*self._targets(rank)}}
        for path in slot.glob("rank_*"):
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
        found = self._files.get(path)
        if found is None or not nbytes <= found.numel() <= 2 * nbytes + SLACK:
            # A little more, as the length of some states, such as those of random numbers in JSON, is not always the
            # same: new memory is slow. The file is of any length at least ``nbytes``.
            size = -(-nbytes // SLACK) * SLACK + SLACK
            if not path.is_file() or path.stat().st_size != size:
                path.unlink(missing_ok=True)
                allocate(path, size)
            # Shared: what is written there is in the file at once, whatever becomes of this process.
            found = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
            if self._device.type == "cuda":
                with suppress(RuntimeError):  # so much cannot be page-locked; copies take longer then
                    lock_pages(found.untyped_storage())
            self._files[path] = found
        return found[:nbytes]

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

    def find(self, folder: Path) -> Path | None:
        """Return the folder with the newest copy of the run that saves to ``folder``, complete on this node.

        None if there is none, or a checkpoint on the disk is newer. Later copies of this engine follow it. Collective.
        """
        folder = folder.absolute()
        look = lambda: (marked(folder), _steps_on_disk(folder)) if self._rank == 0 else None  # noqa: E731
        name, on_disk = json.loads(texts(self._world, json.dumps(agree_run(self._world, "look for copies", look)))[0])
        if name is None:
            return None
        kept = Kept(folder, name, self._rank, self._leads)
        mine = agree_run(self._world, "look for copies", lambda: _parts(kept) if self._leads else [])
        by_rank = [json.loads(text) for text in texts(self._world, json.dumps(mine))]
        on_node = [by_rank[ranks[0]] for ranks in self._nodes]
        if None in on_node:
            _log.info("the copies in memory are another process's; the checkpoint on the disk is loaded")
            kept.lock.close()
            return None
        newest = _newest(on_node)
        if newest is None or newest.steps < on_disk or not self._fetch(kept, newest, on_node):
            kept.lock.close()
            return None
        agree_run(self._world, "put copies together", lambda: _put_together(kept, newest) if self._leads else None)
        self._hold(kept)
        self._sequence = newest.sequence
        _log.info("the run goes on from the copy in memory of step %d", newest.steps)
        return kept.slot(newest.sequence)

    def _fetch(self, kept: Kept, copy: _Copy, on_node: list[list[list[int]]]) -> bool:
        """Let all nodes have all parts of a copy. Return False if one has no room for them."""
        slot = kept.slot(copy.sequence)
        has = [{rank: size for sequence, rank, _, _, size in found if sequence == copy.sequence} for found in on_node]
        needed = sum(next(own[rank] for own in has if rank in own) for rank in range(copy.ranks)
                     if rank not in has[self._node])  # fmt: skip
        room = 1.0 if shutil.disk_usage(root()).free > needed else 0.0
        if not bool(self._world.exchange(torch.tensor([room])).all()):
            _log.warning("a node has no room in %s for the parts of the others; the disk is used", root())
            return False
        # In one order on all ranks, so that none waits for another that waits for it.
        for rank in range(copy.ranks):
            source = next(self._nodes[node][0] for node, own in enumerate(has) if rank in own)
            for node, own in enumerate(has):
                target = self._nodes[node][0]
                if rank not in own and self._rank == source:
                    text = description(slot, rank).read_text(encoding="utf-8")
                    size = has[self._node][rank]
                    data = torch.from_file(str(slot / shard_file(rank)), shared=True, size=size, dtype=torch.uint8)
                    for number, message in enumerate(_messages((data, text))):
                        dist.send(message, target, self._links, number)
                elif rank not in own and self._rank == target:
                    slot.mkdir(parents=True, exist_ok=True)
                    self._receive(slot, rank, source)
        return True

    def forget(self, failed: bool = False) -> None:
        """Delete the copies, unless this rank has failed."""
        if self._leave is not None and self._leave.detach() is not None and self._kept is not None:
            self._kept.leave(failed)
        self._kept, self._leave = None, None
        self._files.clear()


@dataclass(frozen=True)
class _Copy:
    """A copy of which all parts are in memory."""

    sequence: int
    ranks: int
    steps: int


def _parts(kept: Kept) -> list[list[int]] | None:
    """Return the parts on this node: sequence, rank, ranks, updates, bytes; None if another process writes them."""
    if not kept.here.is_dir() or kept.here.stat().st_uid != user():
        return []
    try:
        kept.hold()
    except FolderInUse:
        return None
    found = []
    for path in sorted(kept.here.glob("copy_*/rank_*.json")):
        words = json.loads(path.read_text(encoding="utf-8"))
        data = path.with_suffix(".safetensors")
        found.append(
            [words["sequence"], int(path.stem[5:]), words["ranks"], words["global_steps"], data.stat().st_size]
        )
    return found


def _newest(on_node: list[list[list[int]]]) -> _Copy | None:
    """Return the newest copy with all its parts on some node; warn where a newer one lacks some."""
    parts: dict[_Copy, set[int]] = {}
    for sequence, rank, ranks, steps, _ in (part for found in on_node for part in found):
        parts.setdefault(_Copy(sequence, ranks, steps), set()).add(rank)
    for copy in sorted(parts, key=lambda copy: copy.sequence, reverse=True):
        lacking = sorted(set(range(copy.ranks)) - parts[copy])
        if not lacking:
            return copy
        _log.info("the copy in memory of step %d lacks the parts of %s", copy.steps, named(lacking))
    return None


def _put_together(kept: Kept, copy: _Copy) -> None:
    """Write the manifest of a copy, so that it is read as a checkpoint."""
    slot = kept.slot(copy.sequence)
    parts = [json.loads(description(slot, rank).read_text(encoding="utf-8")) for rank in range(copy.ranks)]
    write_manifest(slot, parts[0]["state"] | merged(parts))


def _steps_on_disk(folder: Path) -> int:
    """Return the updates of the newest checkpoint on the disk; -1 if there is none that can be read."""
    if not folder.is_dir() or (tag := latest(folder)) is None:
        return -1
    try:
        return int(read_manifest(locate(folder, tag))["global_steps"])
    except (OSError, ValueError, LookupError):
        return -1


def _messages(part: tuple[torch.Tensor, str]) -> list[torch.Tensor]:
    data, words = part[0], torch.frombuffer(bytearray(part[1].encode()), dtype=torch.uint8)
    return [torch.tensor([data.numel(), words.numel()]), data, words]
