"""Writing a checkpoint: each rank what it owns, the first rank the manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zeromesh.base.axes import AXES, GRID
from zeromesh.base.version import VERSION
from zeromesh.checkpoint.boxes import Box
from zeromesh.checkpoint.checkpoint_folder import Draft, require_free, require_tag
from zeromesh.checkpoint.contents import (
    FROZEN_LEFT_OUT,
    RunState,
    boxes,
    extra_state,
    members,
    model_fields,
    options,
    parameters,
    plain_names,
    scalars,
    scheduler_name,
    tied,
)
from zeromesh.checkpoint.copies.background import WHAT, BackgroundSaves, Failures, explained, wait_for_ranks
from zeromesh.checkpoint.packing import pack
from zeromesh.checkpoint.rank_manifests import write_part
from zeromesh.checkpoint.shard_writer import ShardWriter
from zeromesh.comm.agreement import agree_run, catch, require_agreement
from zeromesh.comm.mesh import Mesh

MANIFEST_BYTES = 400  # estimated bytes of the manifest for each box

ONE_FOLDER = "save to a folder that all ranks see"


def save(
    engine: RunState,
    folder: Path,
    tag: str | None,
    client_state: dict[str, Any],
    *,
    save_latest: bool = True,
    exclude_frozen: bool = False,
    background: BackgroundSaves | None = None,
) -> Path:
    """Write a checkpoint; ``folder/latest`` names it afterwards. Collective; see ``Engine.save_checkpoint``.

    With ``background`` the state is only copied when this returns, and a thread writes it.
    """
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    draft, rank, world = Draft(folder, tag), engine.mesh.rank, engine.mesh.group("world")
    mine: list[Box] = []
    client: dict[str, Any] = {}
    of_client: list[Box] = []
    # Or the ranks would write into different folders.
    require_agreement(world, "the tag of save_checkpoint", tag)

    def collect() -> None:
        require_tag(tag)
        if rank == 0:
            require_free(draft.final)
        packed, tensors = pack_client_state(client_state)
        client.update(packed)
        of_client.extend(tensors)
        _scheduler_state(engine)  # raises what cannot be kept, before anything is written
        # Sizes and names only; data of states on NVMe are read when they are written.
        mine.extend(boxes(engine, False, exclude_frozen, of_client))
        if background is not None:
            background.reserve(mine, engine.mesh.device)

    def read() -> _Part:
        """Write this rank's boxes, or copy them to memory; all that training changes is read here."""
        if not draft.path.is_dir():
            raise OSError(f"rank {rank} does not see {draft.path}, which the first rank made; {ONE_FOLDER}")
        writer = ShardWriter(draft.path, rank, mine)
        resources.callback(writer.close)
        copies = []
        try:
            for box in boxes(engine, True, exclude_frozen, of_client):
                if background is None or box.from_disk:
                    writer.write(box)
                else:
                    copies.append(background.copy(box))
        except BaseException:
            writer.close()  # before the draft is removed
            raise
        if background is not None:
            background.synchronize(engine.mesh.device)
        state = run_state(engine, client) | {FROZEN_LEFT_OUT: exclude_frozen} if rank == 0 else {}
        return _Part(draft, rank, world.size, writer, copies, numbers(engine), state)

    def finish(part: _Part) -> None:
        if (seen := len([*draft.path.glob("rank_*.jsonl")])) != world.size:
            raise OSError(
                f"the first rank sees the files of {seen} of {world.size} ranks in {draft.path}; {ONE_FOLDER}"
            )
        draft.finish(part.state, world.size, save_latest, engine.config.checkpoint.keep_last)

    agree_run(world, WHAT, collect)
    # Ranks share the disk, so that the sum of what they write has to fit.
    sizes = world.exchange(torch.tensor([sum(box.nbytes + MANIFEST_BYTES for box in mine)]))
    # The first rank alone holds the lock: it makes, renames and deletes folders for all.
    with ExitStack() as resources:
        agree_run(world, WHAT, lambda: draft.hold(resources) if rank == 0 else None)
        try:
            agree_run(world, WHAT, lambda: draft.begin(int(sizes.sum())) if rank == 0 else None)
            if background is not None:
                part = agree_run(world, WHAT, read)
                background.start(draft.final, partial(part.write_beside, finish), resources.pop_all())
                return draft.final
            part = agree_run(world, WHAT, lambda: read().written())
            agree_run(world, WHAT, lambda: finish(part) if rank == 0 else None)
        except Exception:
            if rank == 0:
                draft.discard()
            raise
    return draft.final


@dataclass(frozen=True)
class _Part:
    """A rank's part of a checkpoint: what is to be written yet, and nothing that training changes."""

    draft: Draft
    rank: int
    ranks: int
    writer: ShardWriter
    copies: list[Box]
    numbers: dict[str, Any]
    state: dict[str, Any]  # of the run; on the first rank

    def written(self) -> _Part:
        """Write what is left, and this rank's description."""
        try:
            for box in self.copies:
                self.writer.write(box)
            entry = self.writer.finish()
        finally:
            self.writer.close()
        write_part(self.draft.path, self.rank, entry, self.numbers)
        return self

    def write_beside(self, finish: Callable[[_Part], None], failures: Failures) -> None:
        """Write it without collectives; the first rank waits for the others and finishes.

        Raises:
            SaveFailed: the files could not be written, here or, on the first rank, on any rank.
        """
        _, failure = catch(self.written)
        if failure is not None:
            failure = explained(self.draft.final, failure)
            failures.tell(self.rank, failure)
        if self.rank == 0:
            # Also after a failure: the draft is removed when nobody writes to it any more.
            _, problem = catch(partial(wait_for_ranks, self.draft.path, self.ranks, failures))
            if problem is None:
                _, problem = catch(partial(finish, self))
            if problem is not None:
                failure = failure or explained(self.draft.final, problem)
                with suppress(OSError):  # what cannot be removed goes with the next save
                    self.draft.discard()
        if failure is not None:
            raise failure


def pack_client_state(client_state: Mapping[str, Any]) -> tuple[dict[str, Any], list[Box]]:
    """Return the user's values as JSON, and their tensors; raise TypeError for what cannot be kept."""
    apart: dict[str, torch.Tensor] = {}
    packed: dict[str, Any] = pack(dict(client_state), "client_state", apart)
    return packed, [Box.whole(name, tensor) for name, tensor in apart.items() if tensor.numel()]


def numbers(engine: RunState) -> dict[str, Any]:
    """Return what this rank describes of its shard, beside the boxes."""
    plain = plain_names(engine.sharded.model)
    facts: dict[str, Any] = {"scalars": scalars(engine), "members": members(engine)}
    if engine.mesh.group("stage").rank == 0:
        names = {name: plain(owner) for name, owner in tied(engine.sharded).items()}
        facts |= {"parameters": parameters(engine.sharded), "tied": names}
    named = {key: {plain(name): value for name, value in part.items()} for key, part in facts.items()}
    segments = (segment for flat in engine.sharded.flats for segment in flat.layout.segments)
    experts = [plain(segment.name) for segment in segments if segment.held.axis == "expert"]
    return named | {"extra": extra_state(engine.sharded)[0]} | _place(engine.mesh, experts)


def _place(mesh: Mesh, experts: Sequence[str]) -> dict[str, Any]:
    """Return which share of each tensor this rank has, and on which ranks the other ones are."""
    strides: list[list[int]] = []
    ranks = 1
    for axis in reversed(GRID):
        if AXES[axis].shards and mesh.sizes[axis] > 1:
            strides.append([mesh.sizes[axis], ranks])
        ranks *= mesh.sizes[axis]
    place: dict[str, Any] = {"share": mesh.shard.rank, "strides": strides}
    if experts:
        share = {"share": mesh.shards_of("expert").rank, "strides": _expert_strides(mesh.sizes)}
        place["elsewhere"] = share | {"parameters": experts}
    return place


def _expert_strides(sizes: Mapping[str, int]) -> list[list[int]]:
    """Return the axes along which shares of experts are counted; see ``holders``. Empty where none say it."""
    inner, stages, size = sizes["context"] * sizes["tensor"], sizes["pipeline"], sizes["expert"]
    shares = sizes["data"] * inner // size
    if stages == 1 or size % inner == 0:
        return [[shares, size * stages]]
    return [[inner // size, size], [sizes["data"], stages * inner]] if inner % size == 0 else []


def _scheduler_state(engine: RunState) -> Any:
    scheduler = engine.lr_scheduler
    return None if scheduler is None else pack(scheduler.state_dict(), "the scheduler's state")


def run_state(engine: RunState, client_state: dict[str, Any]) -> dict[str, Any]:
    """Return what the first rank writes of the run, to the manifest; ``client_state`` is packed."""
    groups = engine.optimizer.param_groups if engine.optimizer else []
    sharded, loader = engine.sharded, engine.training_dataloader
    return {
        "zeromesh": VERSION,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "world_size": engine.mesh.world_size,
        "mesh": engine.mesh.sizes,
        "placement": {state: getattr(sharded.row, state).value for state in ("parameter", "gradient", "optimizer")},
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "train_batch_size": engine.train_batch_size(),
        "micro_steps": engine.micro_steps,
        "skipped_steps": engine.skipped_steps,
        "spikes": engine.spikes.state(),
        "data": None if loader is None or engine.data_position is None else loader.state(engine.data_position),
        "loss_scaler": engine.loss_scaler.state_dict() if engine.loss_scaler else None,
        "scheduler": _scheduler_state(engine),
        "scheduler_type": scheduler_name(engine.lr_scheduler),
        "optimizer": type(engine.optimizer).__name__,
        "groups": [pack(options(group)) for group in groups],
        "client_state": client_state,
        "model": model_fields(engine),
    }
