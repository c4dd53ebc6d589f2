"""What of a run goes into a checkpoint, and how it comes back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from zeromesh.agree import together
from zeromesh.checkpoint.boxes import (
    LATEST,
    MANIFEST,
    Box,
    Reader,
    commit,
    latest,
    pack,
    remove,
    require_json,
    unpack,
    write_json,
    write_shard,
)
from zeromesh.dist.mesh import Mesh
from zeromesh.model.piece import Piece
from zeromesh.precision.scaler import LossScaler
from zeromesh.shard.sharded import Sharded
from zeromesh.shard.unit import Flat

FORMAT = 1


class Run(Protocol):
    """What of an engine is saved."""

    sharded: Sharded
    mesh: Mesh
    optimizer: Optimizer | None
    lr_scheduler: Any
    loss_scaler: LossScaler | None
    global_steps: int
    micro_steps: int
    skipped_steps: int


def save(engine: Run, folder: Path, tag: str | None, client_state: dict[str, Any], save_latest: bool) -> Path:
    """Write a checkpoint; all ranks call it. ``folder/latest`` names it afterwards.

    Raises:
        OSError: a rank could not write; every rank raises, and what was there before is untouched.
        TypeError: the client state holds something that JSON cannot.
    """
    tag = tag or f"global_step{engine.global_steps}"
    draft, final = folder / f"{tag}.draft", folder / tag
    rank, world = engine.mesh.rank, engine.mesh.group("world")

    def begin() -> None:
        _require_json(engine, client_state)
        if rank == 0:
            _prepare(draft)

    def write() -> None:
        entry = write_shard(draft, rank, list(_boxes(engine)))
        write_json(draft / f"rank_{rank:05d}.json", {"shard": entry, "scalars": _scalars(engine)})

    def finish() -> None:
        if rank == 0:
            write_json(draft / MANIFEST, _state(engine, client_state) | _joined(draft))
            commit(draft, final)
            if save_latest:
                (folder / f"{LATEST}.draft").write_text(tag)
                (folder / f"{LATEST}.draft").rename(folder / LATEST)

    try:
        for part in (begin, write, finish):
            together(world, "save the checkpoint", part)
    except Exception:
        if rank == 0:
            remove(draft)
        raise
    return final


def _joined(draft: Path) -> dict[str, Any]:
    """What the ranks wrote about their shards, in one; their own files go away."""
    import json

    shards: list[Any] = []
    scalars: dict[str, Any] = {}
    for path in sorted(draft.glob("rank_*.json")):
        part = json.loads(path.read_text())
        shards.append(part["shard"])
        scalars |= part["scalars"]
        path.unlink()
    return {"shards": shards, "scalars": scalars}


def _prepare(draft: Path) -> None:
    remove(draft)
    draft.mkdir(parents=True)


def _require_json(engine: Run, client_state: dict[str, Any]) -> None:
    require_json("client_state", client_state)
    if engine.lr_scheduler is not None:
        require_json("the scheduler's state", engine.lr_scheduler.state_dict())


def _state(engine: Run, client_state: dict[str, Any]) -> dict[str, Any]:
    scheduler = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None
    groups = engine.optimizer.param_groups if engine.optimizer else []
    return {
        "format": FORMAT,
        "world_size": engine.mesh.world_size,
        "global_steps": engine.global_steps,
        "micro_steps": engine.micro_steps,
        "skipped_steps": engine.skipped_steps,
        "loss_scaler": engine.loss_scaler.state_dict() if engine.loss_scaler else None,
        "scheduler": pack(scheduler),
        "optimizer": type(engine.optimizer).__name__,
        "groups": [pack(_options(group)) for group in groups],
        "client_state": pack(client_state),
    }


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters, of which every rank has others."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names") and _plain(value)}


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(item, int | float) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _pieces(sharded: Sharded) -> Iterator[tuple[Flat, slice, Piece]]:
    for flat in sharded.flats:
        for _, local, piece in flat.pieces:
            yield flat, local, piece


def _boxes(engine: Run) -> Iterator[Box]:
    """The ranges that this rank is to write: its shard, whatever it holds beyond; replicas write nothing twice."""
    sharded = engine.sharded
    if sharded.mesh.replicate.rank == 0:
        for flat in sharded.flats:
            yield from _parameter_boxes(sharded, flat)
        if engine.optimizer is not None:
            for flat, _, piece in _pieces(sharded):
                yield from _optimizer_boxes(engine, flat, piece)
    if sharded.mesh.rank == 0:
        for name, buffer in _buffers(sharded):
            yield Box(f"buffer/{name}", tuple(buffer.shape), 0, buffer.numel(), buffer.flatten())
    state = random_state()
    yield Box(f"random/{sharded.mesh.rank}", tuple(state.shape), 0, state.numel(), state)


def _parameter_boxes(sharded: Sharded, flat: Flat) -> Iterator[Box]:
    held, offset = flat.master, flat.own.start
    if not flat.layout.trainable:
        held, offset = (flat.home, flat.shard.start) if sharded.sharded else (flat.full, 0)
    for index, start, stop in flat.layout.owned(flat.shard.start, flat.shard.stop):
        segment = flat.layout.segments[index]
        data = held[start - offset : stop - offset]
        yield Box(f"parameter/{segment.name}", tuple(segment.shape), start - segment.start, stop - segment.start, data)


def _overlap(flat: Flat, piece: Piece) -> tuple[int, int]:
    """The part of a piece, in elements of its parameter, that lies in this rank's shard."""
    segment = next(s for s in flat.layout.segments if s.name == piece.name)
    low, high = flat.shard.start - segment.start, flat.shard.stop - segment.start
    return max(piece.start, low), min(piece.stop, high)


def _optimizer_boxes(engine: Run, flat: Flat, piece: Piece) -> Iterator[Box]:
    assert engine.optimizer is not None
    start, stop = _overlap(flat, piece)
    for key, value in engine.optimizer.state.get(piece.parameter, {}).items():
        if isinstance(value, torch.Tensor) and value.ndim > 0 and start < stop:
            if value.numel() != piece.stop - piece.start:
                shape = tuple(value.shape)
                raise ValueError(f"optimizer state {key!r} of {piece.name} has shape {shape}, not its parameter's")
            data = value.flatten()[start - piece.start : stop - piece.start]
            yield Box(f"optimizer/{key}/{piece.name}", piece.shape, start, stop, data)


def _scalars(engine: Run) -> dict[str, dict[str, Any]]:
    """Optimizer states that are single numbers, by parameter; ranks that hold pieces of one parameter have the same.

    A tensor is written as its value and its dtype.
    """
    found: dict[str, dict[str, Any]] = {}
    for _, _, piece in _pieces(engine.sharded) if engine.optimizer else ():
        for key, value in engine.optimizer.state.get(piece.parameter, {}).items() if engine.optimizer else ():
            if not isinstance(value, torch.Tensor):
                found.setdefault(piece.name, {})[key] = value
            elif value.ndim == 0:
                found.setdefault(piece.name, {})[key] = [value.item(), str(value.dtype).removeprefix("torch.")]
    return found


def _buffers(sharded: Sharded) -> Iterator[tuple[str, torch.Tensor]]:
    persistent = {id(buffer) for buffer in sharded.buffers.state()}
    return ((name, buffer) for name, buffer in sharded.model.named_buffers() if id(buffer) in persistent)


def random_state() -> torch.Tensor:
    """The states of Python's, numpy's (if it is in use) and torch's generators as bytes."""
    import json

    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state().tolist()}
    if "numpy" in sys.modules:
        import numpy

        kind, key, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        states["numpy"] = [kind, [int(word) for word in key], position, has_gauss, cached]
    if torch.accelerator.is_available() and torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().tolist()
    return torch.tensor(list(json.dumps(states).encode()), dtype=torch.uint8)


def restore_random_state(packed: torch.Tensor) -> None:
    """Put the generators back to where ``random_state`` found them."""
    import json

    states = json.loads(bytes(packed.tolist()))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if "numpy" in states:
        import numpy

        kind, key, *rest = states["numpy"]
        numpy.random.set_state((kind, numpy.array(key, dtype=numpy.uint32), *rest))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))


def load(
    engine: Run, folder: Path, tag: str | None, optimizer_states: bool, scheduler_states: bool
) -> tuple[str | None, dict[str, Any]]:
    """Continue from a checkpoint; all ranks call it.

    Returns:
        Its path and the client state; (None, {}) if the folder holds none.

    Raises:
        FileNotFoundError: a file of it is missing.
        ValueError: it is of another model or optimizer, or not what was written. Nothing has been loaded then.
    """
    tag = tag or latest(folder)
    if tag is None:
        return None, {}
    reader = Reader(folder / tag)
    _require_same_model(engine.sharded, reader)
    if optimizer_states:
        _require_same_optimizer(engine.optimizer, reader)
    mesh, world = engine.mesh, engine.mesh.group("world")
    # All files before the first value: a damaged one must not leave half of another run behind.
    together(world, "read the checkpoint", lambda: reader.verify(mesh.rank, mesh.world_size))
    together(world, "load the checkpoint", lambda: _load_tensors(engine, reader, optimizer_states))
    state = reader.manifest
    engine.sharded.updated()
    engine.global_steps, engine.micro_steps = state["global_steps"], state["micro_steps"]
    engine.skipped_steps = state["skipped_steps"]
    if engine.loss_scaler is not None and state["loss_scaler"]:
        engine.loss_scaler.load_state_dict(state["loss_scaler"])
    if engine.lr_scheduler is not None and scheduler_states and state["scheduler"]:
        engine.lr_scheduler.load_state_dict(unpack(state["scheduler"]))
    return str(folder / tag), unpack(state["client_state"])


def _require_same_model(sharded: Sharded, reader: Reader) -> None:
    prefix = "parameter/"
    saved = {name.removeprefix(prefix): reader.shape(name) for name in reader.names() if name.startswith(prefix)}
    wanted = {s.name: tuple(s.shape) for flat in sharded.flats for s in flat.layout.segments}
    problems = [f"{name}: saved {saved[name]}, wanted {wanted[name]}" for name in wanted if name in saved
                and saved[name] != wanted[name]]  # fmt: skip
    problems += [f"{name}: not in the checkpoint" for name in wanted if name not in saved]
    problems += [f"{name}: not in the model" for name in saved if name not in wanted]
    if problems:
        raise ValueError(f"{reader.folder} is of another model:\n" + "\n".join(problems[:20]))


def _require_same_optimizer(optimizer: Optimizer | None, reader: Reader) -> None:
    if optimizer is None:
        return
    saved = (reader.manifest["optimizer"], len(reader.manifest["groups"]))
    wanted = (type(optimizer).__name__, len(optimizer.param_groups))
    if saved != wanted:
        raise ValueError(
            f"{reader.folder} is of {saved[0]} with {saved[1]} parameter groups, but this run has {wanted[0]}"
            f" with {wanted[1]}; make the same optimizer, or pass load_optimizer_states=False to take parameters only"
        )


def _load_tensors(engine: Run, reader: Reader, optimizer_states: bool) -> None:
    sharded = engine.sharded
    for flat in sharded.flats:
        held, low = flat.master, flat.own.start
        if not flat.layout.trainable:
            held, low = (flat.home, flat.shard.start) if sharded.sharded else (flat.full, 0)
        for index, start, stop in flat.layout.owned(low, low + held.numel()):
            segment = flat.layout.segments[index]
            out = held[start - low : stop - low]
            reader.read(f"parameter/{segment.name}", start - segment.start, stop - segment.start, out)
    if engine.optimizer is not None and optimizer_states:
        _load_optimizer(engine, reader)
    for name, buffer in _buffers(sharded):
        flat_buffer = torch.empty(buffer.numel(), dtype=buffer.dtype)
        reader.read(f"buffer/{name}", 0, buffer.numel(), flat_buffer)
        buffer.copy_(flat_buffer.view(buffer.shape))
    own = f"random/{sharded.mesh.rank}"
    if reader.manifest["world_size"] == sharded.mesh.world_size and own in reader.names():
        packed = torch.empty(reader.shape(own), dtype=torch.uint8)
        reader.read(own, 0, packed.numel(), packed)
        restore_random_state(packed)


def _load_optimizer(engine: Run, reader: Reader) -> None:
    assert engine.optimizer is not None
    for group, saved in zip(engine.optimizer.param_groups, reader.manifest["groups"], strict=True):
        group.update(unpack(saved))
    keys = sorted({name.split("/")[1] for name in reader.names() if name.startswith("optimizer/")})
    for _, _, piece in _pieces(engine.sharded):
        state = engine.optimizer.state[piece.parameter]
        state.clear()
        for key in keys:
            name = f"optimizer/{key}/{piece.name}"
            if name in reader.names():
                state[key] = torch.empty_like(piece.parameter.data)
                reader.read(name, piece.start, piece.stop, state[key])
        for key, value in reader.manifest["scalars"].get(piece.name, {}).items():
            state[key] = torch.tensor(value[0], dtype=getattr(torch, value[1])) if isinstance(value, list) else value


def gathered_state_dict(sharded: Sharded) -> dict[str, torch.Tensor]:
    """Whole parameters and buffers as CPU tensors on rank 0, empty elsewhere; one unit is gathered at a time."""
    found: dict[str, torch.Tensor] = {}
    keep = sharded.mesh.rank == 0
    for unit in sharded.units:
        with sharded.events.gathered([unit]):
            for flat in unit.flats:
                for segment, parameter in zip(flat.layout.segments, flat.parameters, strict=True):
                    if keep:
                        found[segment.name] = parameter.detach().cpu().clone()
    if keep:
        for name, parameter in sharded.model.named_parameters(remove_duplicate=False):
            found.setdefault(name, found[sharded.names[id(parameter)]])
        found |= {name: buffer.detach().cpu().clone() for name, buffer in _buffers(sharded)}
    return found


def save_model(sharded: Sharded, folder: Path, filename: str) -> bool:
    """Write the gathered state as one safetensors file; a shared parameter once, under its first name."""
    state = gathered_state_dict(sharded)

    def write() -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        unique = {id(tensor): (name, tensor) for name, tensor in reversed(state.items())}
        save_file({name: tensor.contiguous() for name, tensor in unique.values()}, folder / filename, {"format": "pt"})

    together(sharded.mesh.group("world"), "write the model", write if sharded.mesh.rank == 0 else lambda: None)
    return True
