"""Continuing from a checkpoint: everything is checked before the first value is taken."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from zeromesh.checkpoint.boxes import Reader
from zeromesh.checkpoint.contents import RunState, buffers, held
from zeromesh.checkpoint.fit import require_same_model, shapes, some
from zeromesh.checkpoint.folder import latest, locate
from zeromesh.checkpoint.optimizer import load_optimizer, read_held, require_same_optimizer, set_learning_rates
from zeromesh.checkpoint.packing import unpack
from zeromesh.checkpoint.random_state import derive_random_state, restore_random_state, share_random_state
from zeromesh.checkpoint.schedule import require_same_scheduler
from zeromesh.comm.agreement import agree_run, require_agreement
from zeromesh.comm.collectives import Group
from zeromesh.comm.detect import may_restart
from zeromesh.shard.sharded import ShardedModel

_log = logging.getLogger(__name__)


def load(
    engine: RunState, folder: Path, tag: str | None, optimizer_states: bool, scheduler_states: bool, *,
    strict: bool = True, data_position: bool = True, progress: bool = True,
) -> tuple[str | None, dict[str, Any]]:  # fmt: skip
    """Continue from a checkpoint; all ranks call it.

    Args:
        engine: what continues.
        folder: where its checkpoints are.
        tag: which of them; None is the latest.
        optimizer_states: whether to load the optimizer's states.
        scheduler_states: whether to load the scheduler's.
        strict: refuse a checkpoint that lacks tensors of the model, or has others. Else those that it lacks keep their
            values, and the others are ignored.
        data_position: whether the loader of the training data goes on where it was.
        progress: whether to load counters, the loss scale and the random state.

    Returns:
        Its path and the client state; (None, {}) if the folder holds none.

    Raises:
        FileNotFoundError: a file of it is missing.
        ValueError: it is of another model, optimizer, scheduler or data set, not what was written, or not the same on
            all ranks. Nothing has been loaded then.
        RuntimeError: another rank could not read it.
    """
    mesh, world = engine.mesh, engine.mesh.group("world")
    parts = {"optimizer": optimizer_states, "lr_scheduler": scheduler_states, "strict": strict, "data": data_position}
    parts["progress"] = progress
    require_agreement(world, "what load_checkpoint is to take", "\n".join(f"{k}: {v}" for k, v in parts.items()))
    chosen = agree_run(world, "find the latest checkpoint", lambda: latest(folder) if tag is None else str(tag))
    _require_same_tag(world, folder, chosen)
    if chosen is None:
        return None, {}
    optimizer = engine.optimizer if optimizer_states else None
    loader = engine.training_dataloader if data_position else None

    wanted = shapes(engine.sharded)

    def prepare() -> Reader:
        reader = _open(folder, chosen)
        require_same_model(engine, reader, wanted, strict)
        if may_restart():
            _require_same_batch(engine, reader.manifest.get("train_batch_size"))
        if optimizer is not None:
            require_same_optimizer(engine.sharded, optimizer, reader)
        if scheduler_states:
            require_same_scheduler(engine, reader)
        if loader is not None:
            loader.require_same_data(reader.manifest.get("data"))
        return reader

    reader = agree_run(world, "open the checkpoint", prepare)
    digest = hashlib.sha256(json.dumps(reader.manifest).encode()).hexdigest()
    seen = f"written {reader.manifest.get('written')}, SHA-256 {digest}"
    require_agreement(world, f"the manifest of {chosen} in {folder}", seen)
    # All of it before the first value: a damaged file must not leave half of another run behind.
    needed = {name for name in reader.names if optimizer_states or not name.startswith("optimizer/")}
    agree_run(world, "read the checkpoint", lambda: reader.verify(mesh.rank, mesh.world_size, needed))
    agree_run(world, "load the checkpoint", lambda: _load_tensors(engine.sharded, optimizer, reader))
    engine.sharded.updated()
    if progress:
        _load_progress(engine.sharded, reader)
        _load_numbers(engine, reader.manifest, scheduler_states)
    if engine.optimizer is not None and engine.lr_scheduler is not None and scheduler_states and not optimizer_states:
        set_learning_rates(engine.optimizer, engine.lr_scheduler)
    if loader is not None:
        engine.data_position = loader.go_to(reader.manifest.get("data"))
        if mesh.rank == 0:
            _log.info("training_data goes on in pass %d, after %d of its samples", *engine.data_position)
    return str(reader.folder), unpack(reader.manifest["client_state"], reader.tensor)


def _require_same_tag(world: Group, folder: Path, tag: str | None) -> None:
    """Raise ValueError on every rank unless all of them are to load the same checkpoint."""
    data = torch.tensor(list((tag or "").encode()), dtype=torch.uint8)
    sizes = world.exchange(torch.tensor([data.numel()])).flatten().tolist()
    padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
    padded[: data.numel()] = data
    rows = world.exchange(padded).tolist()
    ranks: dict[str, list[int]] = {}
    for rank, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        ranks.setdefault(bytes(row[:size]).decode(), []).append(rank)
    if len(ranks) == 1:
        return
    seen = [f"{some(map(str, found), 'ranks')}: {name or 'none'}" for name, found in ranks.items()]
    raise ValueError(
        f"the ranks would load different checkpoints from {folder}: by rank, {'; '.join(seen)}; all ranks need the "
        "same: use a folder that all of them see, or pass the same tag"
    )


def _require_same_batch(engine: RunState, saved: int | None) -> None:
    """Under a launcher that restarts the ranks, nobody would see that a new world has silently changed the batch."""
    if saved is not None and saved != engine.train_batch_size():
        raise ValueError(
            f"the checkpoint was trained with {saved} samples per update, and the {engine.mesh.world_size} ranks now "
            f"take {engine.train_batch_size()}; set train_batch_size to {saved}, so that the number of ranks does not "
            "change it"
        )


def _open(folder: Path, tag: str) -> Reader:
    path = locate(folder, tag)
    if path != folder / tag:
        _log.warning("%s is missing: a process ended as it was replaced; the one before it is loaded", folder / tag)
    return Reader(path)


def _load_tensors(sharded: ShardedModel, optimizer: Optimizer | None, reader: Reader) -> None:
    for flat in sharded.flats:
        flat.load_states(write=True)
        values, low = held(sharded, flat)
        for index, start, stop in flat.layout.owned(low, low + values.numel()):
            segment = flat.layout.segments[index]
            name, out = f"parameter/{segment.name}", values[start - low : stop - low]
            if name in reader.names:
                read_held(reader, name, segment.held, start - segment.start, stop - segment.start, out)
    if optimizer is not None:
        load_optimizer(sharded, optimizer, reader)
    for name, buffer in buffers(sharded):
        if f"buffer/{name}" in reader.names:
            buffer.copy_(reader.tensor(f"buffer/{name}"))


def _load_progress(sharded: ShardedModel, reader: Reader) -> None:
    """Random numbers go on as in the run that was saved."""
    _load_random_state(reader, sharded.mesh.rank)
    share_random_state(sharded.mesh.group("tensor"))
    if reader.manifest.get("mesh", {}).get("pipeline", 1) != sharded.mesh.sizes["pipeline"]:
        share_random_state(sharded.mesh.group("pipeline"))  # or they would draw different samples


def _load_random_state(reader: Reader, rank: int) -> None:
    """Each rank takes its own; one that the checkpoint has not, a seed that follows from the first rank's."""
    if f"random/{rank}" in reader.names:
        restore_random_state(reader.tensor(f"random/{rank}"))
    elif "random/0" in reader.names:
        derive_random_state(reader.tensor("random/0"), rank)


def _load_numbers(engine: RunState, state: dict[str, Any], scheduler_states: bool) -> None:
    engine.global_steps, engine.micro_steps = state["global_steps"], state["micro_steps"]
    engine.skipped_steps = state["skipped_steps"]
    engine.global_samples = state.get("global_samples", engine.global_steps * engine.train_batch_size())
    if engine.loss_scaler is not None and state["loss_scaler"]:
        engine.loss_scaler.load_state_dict(state["loss_scaler"])
    if engine.lr_scheduler is not None and scheduler_states and state["scheduler"]:
        engine.lr_scheduler.load_state_dict(unpack(state["scheduler"]))
