"""Writing a checkpoint: each rank what it owns, the first rank the manifest."""

from __future__ import annotations

import json
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.boxes import Box, write_shard
from zeromesh.checkpoint.contents import (
    FROZEN_LEFT_OUT,
    RunState,
    boxes,
    model_fields,
    parameters,
    scheduler_name,
    tied,
)
from zeromesh.checkpoint.folder import (
    DRAFT,
    begin,
    commit,
    keep_last,
    remove,
    require_free,
    require_tag,
    unwritable,
    write_json,
    write_latest,
    write_manifest,
)
from zeromesh.checkpoint.optimizer import options, scalars
from zeromesh.checkpoint.packing import pack
from zeromesh.comm.agreement import agree_run, require_agreement
from zeromesh.tiers.lock import FolderInUse, locked

MANIFEST_BYTES = 400  # estimated bytes of the manifest for each box

ONE_FOLDER = "save to a folder that all ranks see"


def save(
    engine: RunState, folder: Path, tag: str | None, client_state: dict[str, Any], *, save_latest: bool = True,
    exclude_frozen: bool = False,
) -> Path:  # fmt: skip
    """Write a checkpoint; ``folder/latest`` names it afterwards. Collective; see ``Engine.save_checkpoint``."""
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    draft, final = folder / f"{tag}{DRAFT}", folder / tag
    rank, world = engine.mesh.rank, engine.mesh.group("world")
    mine: list[Box] = []
    kept: dict[str, Any] = {}
    of_client: list[Box] = []
    # Or the ranks would write into different folders.
    require_agreement(world, "the tag of save_checkpoint", tag)

    def collect() -> None:
        require_tag(tag)
        if rank == 0:
            require_free(final)
        apart: dict[str, torch.Tensor] = {}
        kept.update(pack(dict(client_state), "client_state", apart))
        _scheduler_state(engine)  # raises what cannot be kept, before anything is written
        if rank == 0:
            filled = ((name, tensor) for name, tensor in apart.items() if tensor.numel())
            of_client.extend(Box(name, tuple(one.shape), 0, one.numel(), one.flatten()) for name, one in filled)
        # Sizes and names only; data of states on NVMe are read when they are written.
        mine.extend((*boxes(engine, False, exclude_frozen), *of_client))

    def write() -> None:
        if not draft.is_dir():
            raise OSError(f"rank {rank} does not see {draft}, which the first rank made; {ONE_FOLDER}")
        entry = write_shard(draft, rank, mine, chain(boxes(engine, True, exclude_frozen), of_client))
        numbers = {"shard": entry, "scalars": scalars(engine)}
        if engine.mesh.group("stage").rank == 0:
            numbers |= {"parameters": parameters(engine.sharded), "tied": tied(engine.sharded)}
        write_json(draft / f"rank_{rank:05d}.json", numbers)

    def finish() -> None:
        if rank == 0:
            write_manifest(
                draft, _state(engine, kept) | {FROZEN_LEFT_OUT: exclude_frozen} | _merged_entries(draft, world.size)
            )
            commit(draft, final)
            if save_latest:
                write_latest(folder, tag)

    agree_run(world, "save the checkpoint", collect)
    # Ranks share the disk, so that the sum of what they write has to fit.
    sizes = world.exchange(torch.tensor([sum(box.data.nbytes + MANIFEST_BYTES for box in mine)]))
    # The first rank alone holds the lock: it makes, renames and deletes folders for all.
    with ExitStack() as held:
        agree_run(world, "save the checkpoint", lambda: _lock(held, folder) if rank == 0 else None)
        try:
            agree_run(world, "save the checkpoint", lambda: begin(draft, int(sizes.sum())) if rank == 0 else None)
            agree_run(world, "save the checkpoint", write)
            agree_run(world, "save the checkpoint", finish)
        except Exception:
            if rank == 0:
                remove(draft)
            raise
        # After the new one has its name, so that at no time there are fewer.
        if rank == 0 and save_latest and (count := engine.config.checkpoint.keep_last) is not None:
            keep_last(folder, tag, count)
    return final


def _lock(held: ExitStack, folder: Path) -> None:
    try:
        held.enter_context(locked(folder))
    except FolderInUse as error:
        raise FolderInUse(error.errno, f"{error.strerror}; let each run save to a folder of its own") from None
    except OSError as error:
        raise unwritable(folder, error) from error


def _merged_entries(draft: Path, ranks: int) -> dict[str, Any]:
    """Merge the ranks' descriptions of their shards; their own files are deleted."""
    shards: list[Any] = []
    merged: dict[str, dict[str, Any]] = {"scalars": {}, "parameters": {}, "tied": {}}
    for path in sorted(draft.glob("rank_*.json")):
        part = json.loads(path.read_text(encoding="utf-8"))
        shards.append(part["shard"])
        for key, found in merged.items():
            found |= part.get(key, {})
        path.unlink()
    if len(shards) != ranks:
        raise OSError(f"the first rank sees the files of {len(shards)} of {ranks} ranks in {draft}; {ONE_FOLDER}")
    return {"shards": shards, **merged}


def _scheduler_state(engine: RunState) -> Any:
    scheduler = engine.lr_scheduler
    return None if scheduler is None else pack(scheduler.state_dict(), "the scheduler's state")


def _state(engine: RunState, client_state: dict[str, Any]) -> dict[str, Any]:
    groups = engine.optimizer.param_groups if engine.optimizer else []
    sharded, loader = engine.sharded, engine.training_dataloader
    return {
        "zeromesh": version("zeromesh"),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "world_size": engine.mesh.world_size,
        "mesh": engine.mesh.sizes,
        "placement": {state: getattr(sharded.row, state).value for state in ("parameter", "gradient", "optimizer")},
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "train_batch_size": engine.train_batch_size(),
        "micro_steps": engine.micro_steps,
        "skipped_steps": engine.skipped_steps,
        "data": None if loader is None or engine.data_position is None else loader.state(engine.data_position),
        "loss_scaler": engine.loss_scaler.state_dict() if engine.loss_scaler else None,
        "scheduler": _scheduler_state(engine),
        "scheduler_type": scheduler_name(engine.lr_scheduler),
        "optimizer": type(engine.optimizer).__name__,
        "groups": [pack(options(group)) for group in groups],
        "client_state": client_state,
        "model": model_fields(engine),
    }
