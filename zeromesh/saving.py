"""What of a run goes into a checkpoint, and how it comes back."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from zeromesh.agree import attempt, share, together
from zeromesh.checkpoint.boxes import (
    DRAFT,
    MANIFEST,
    Box,
    Reader,
    commit,
    latest,
    locate,
    pack,
    remove,
    require_json,
    require_tag,
    unpack,
    write_json,
    write_latest,
    write_shard,
)
from zeromesh.config.errors import nearest
from zeromesh.dist.collectives import Group
from zeromesh.dist.mesh import Mesh
from zeromesh.model.piece import Piece
from zeromesh.precision.scaler import LossScaler
from zeromesh.shard.sharded import Sharded
from zeromesh.shard.unit import Flat

_log = logging.getLogger(__name__)

FORMAT = 1

Shapes = dict[str, tuple[int, ...]]

MOST_SHOWN = 20
"""So many tensors of each kind are named when a checkpoint does not fit."""


class Run(Protocol):
    """What of an engine is saved."""

    sharded: Sharded
    mesh: Mesh
    optimizer: Optimizer | None
    lr_scheduler: Any
    loss_scaler: LossScaler | None
    global_steps: int
    global_samples: int
    micro_steps: int
    skipped_steps: int

    def train_batch_size(self) -> int:
        """Samples per update over all ranks."""


def save(engine: Run, folder: Path, tag: str | None, client_state: dict[str, Any], save_latest: bool) -> Path:
    """Write a checkpoint; all ranks call it. ``folder/latest`` names it afterwards.

    Raises:
        OSError: a rank could not write; every rank raises, and what was there before is untouched.
        TypeError: the client state holds something that JSON cannot.
        ValueError: a checkpoint cannot have that tag, or an optimizer's state cannot be cut.
    """
    tag = tag or f"global_step{engine.global_steps}"
    draft, final = folder / f"{tag}{DRAFT}", folder / tag
    rank, world = engine.mesh.rank, engine.mesh.group("world")

    def begin() -> None:
        require_tag(tag)
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
                write_latest(folder, tag)

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
        "global_samples": engine.global_samples,
        "micro_steps": engine.micro_steps,
        "skipped_steps": engine.skipped_steps,
        "loss_scaler": engine.loss_scaler.state_dict() if engine.loss_scaler else None,
        "scheduler": pack(scheduler),
        "optimizer": type(engine.optimizer).__name__,
        "groups": [pack(_options(group)) for group in groups],
        "client_state": pack(client_state),
    }


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters, of which every rank has others; tensors of one number as numbers."""
    options = {key: _numbers(value) for key, value in group.items() if key not in ("params", "param_names")}
    return {key: value for key, value in options.items() if _plain(value)}


def _numbers(value: Any) -> Any:
    """The value with numbers in the place of tensors of one element, also in a list or tuple."""
    if isinstance(value, list | tuple):
        return type(value)(map(_numbers, value)) if type(value) in (list, tuple) else value
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _restored(present: Any, saved: Any) -> Any:
    """What an option becomes; a tensor stays the same object, since schedulers and captured graphs hold it."""
    if isinstance(present, torch.Tensor) and isinstance(saved, int | float):
        present.detach().fill_(saved)
        return present
    if isinstance(present, list | tuple) and isinstance(saved, list | tuple) and len(present) == len(saved):
        return type(saved)(_restored(old, new) for old, new in zip(present, saved, strict=True))
    return saved


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
            if buffer.numel():
                yield Box(f"buffer/{name}", tuple(buffer.shape), 0, buffer.numel(), buffer.flatten())
    state = random_state()
    yield Box(f"random/{sharded.mesh.rank}", tuple(state.shape), 0, state.numel(), state)


def _held(sharded: Sharded, flat: Flat) -> tuple[torch.Tensor, int]:
    """The part of a flat buffer from which parameters are saved, and where in the layout it begins."""
    if flat.layout.trainable:
        return flat.master, flat.own.start
    return (flat.home, flat.shard.start) if sharded.sharded else (flat.full, 0)


def _parameter_boxes(sharded: Sharded, flat: Flat) -> Iterator[Box]:
    held, offset = _held(sharded, flat)
    for index, start, stop in flat.layout.owned(flat.shard.start, flat.shard.stop):
        segment = flat.layout.segments[index]
        data = held[start - offset : stop - offset]
        yield Box(f"parameter/{segment.name}", tuple(segment.shape), start - segment.start, stop - segment.start, data)


def _overlap(flat: Flat, piece: Piece) -> tuple[int, int]:
    """The part of a piece, in elements of its parameter, that lies in this rank's shard."""
    segment = next(s for s in flat.layout.segments if s.name == piece.name)
    low, high = flat.shard.start - segment.start, flat.shard.stop - segment.start
    return max(piece.start, low), min(piece.stop, high)


def _whole(flat: Flat) -> bool:
    """Whether this rank updates whole parameters."""
    return flat.own.stop - flat.own.start == flat.layout.size


def _optimizer_boxes(engine: Run, flat: Flat, piece: Piece) -> Iterator[Box]:
    assert engine.optimizer is not None
    start, stop = _overlap(flat, piece)
    for key, value in engine.optimizer.state.get(piece.parameter, {}).items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or start >= stop:
            continue
        name, shape = f"optimizer/{key}/{piece.name}", tuple(value.shape)
        if _whole(flat) and shape != piece.parameter.shape:
            # As Adafactor's rows and columns: what it stands for is known to the optimizer only, so it is not cut.
            if start == 0:
                yield Box(name, shape, 0, value.numel(), value.flatten())
            continue
        if value.numel() != piece.stop - piece.start:
            raise ValueError(f"optimizer state {key!r} of {piece.name} has shape {shape}, not its parameter's")
        yield Box(name, piece.shape, start, stop, value.flatten()[start - piece.start : stop - piece.start])


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
    engine: Run, folder: Path, tag: str | None, optimizer_states: bool, scheduler_states: bool, *, strict: bool = True
) -> tuple[str | None, dict[str, Any]]:
    """Continue from a checkpoint; all ranks call it.

    Args:
        engine: what continues.
        folder: where its checkpoints are.
        tag: which of them; None is the latest.
        optimizer_states: whether to load the optimizer's states.
        scheduler_states: whether to load the scheduler's.
        strict: refuse a checkpoint that lacks tensors of the model, or has others. Else those that it lacks keep their
            values, and the others are ignored.

    Returns:
        Its path and the client state; (None, {}) if the folder holds none.

    Raises:
        FileNotFoundError: a file of it is missing.
        ValueError: it is of another model or optimizer, not what was written, or not the same on all ranks. Nothing has
            been loaded then.
        RuntimeError: another rank could not read it.
    """
    mesh, world = engine.mesh, engine.mesh.group("world")
    chosen, failure = attempt(lambda: tag or latest(folder))
    share(world, "find the latest checkpoint", failure)
    _require_same_tag(world, folder, chosen)
    if chosen is None:
        return None, {}
    optimizer = engine.optimizer if optimizer_states else None
    reader, failure = attempt(lambda: _open(engine.sharded, optimizer, folder, chosen, strict))
    share(world, "open the checkpoint", failure)
    assert reader is not None
    # All files before the first value: a damaged one must not leave half of another run behind.
    together(world, "read the checkpoint", lambda: reader.verify(mesh.rank, mesh.world_size))
    together(world, "load the checkpoint", lambda: _load_tensors(engine.sharded, optimizer, reader))
    state = reader.manifest
    engine.sharded.updated()
    engine.global_steps, engine.micro_steps = state["global_steps"], state["micro_steps"]
    engine.skipped_steps = state["skipped_steps"]
    engine.global_samples = state.get("global_samples", engine.global_steps * engine.train_batch_size())
    if engine.loss_scaler is not None and state["loss_scaler"]:
        engine.loss_scaler.load_state_dict(state["loss_scaler"])
    if engine.lr_scheduler is not None and scheduler_states and state["scheduler"]:
        engine.lr_scheduler.load_state_dict(unpack(state["scheduler"]))
        if engine.optimizer is not None and not optimizer_states:
            _set_learning_rates(engine.optimizer, engine.lr_scheduler)
    return str(reader.folder), unpack(state["client_state"])


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
    seen = [f"{_some(map(str, found), 'ranks')}: {name or 'none'}" for name, found in ranks.items()]
    raise ValueError(
        f"the ranks would load different checkpoints from {folder}: by rank, {'; '.join(seen)}; all ranks need the "
        "same: use a folder that all of them see, or pass the same tag"
    )


def _some(items: Iterable[str], what: str, separator: str = ", ") -> str:
    """The first of them, and how many more there are."""
    listed = list(items)
    more = [f"and {len(listed) - MOST_SHOWN} more {what}"] if len(listed) > MOST_SHOWN else []
    return separator.join(listed[:MOST_SHOWN] + more)


def _open(sharded: Sharded, optimizer: Optimizer | None, folder: Path, tag: str, strict: bool) -> Reader:
    """A reader of a checkpoint that fits."""
    path = locate(folder, tag)
    if path != folder / tag:
        _log.warning("%s is missing: a process ended as it was replaced; the one before it is loaded", folder / tag)
    reader = Reader(path)
    _require_same_model(sharded, reader, strict)
    if optimizer is not None:
        _require_same_optimizer(sharded, optimizer, reader)
    return reader


def _require_same_model(sharded: Sharded, reader: Reader, strict: bool) -> None:
    kinds = ("parameter/", "buffer/")
    saved = {name: reader.shape(name) for name in reader.names if name.startswith(kinds)}
    wanted = {f"parameter/{s.name}": tuple(s.shape) for flat in sharded.flats for s in flat.layout.segments}
    wanted |= {f"buffer/{name}": tuple(buffer.shape) for name, buffer in _buffers(sharded)}
    # Of a tensor without elements there is nothing to write.
    saved, wanted = ({name: shape for name, shape in found.items() if 0 not in shape} for found in (saved, wanted))
    missing = {name: shape for name, shape in wanted.items() if name not in saved}
    extra = {name: saved[name] for name in sorted(saved) if name not in wanted}
    other = [f"{_bare(name)}: saved {saved[name]}, wanted {shape}" for name, shape in wanted.items()
             if saved.get(name, shape) != shape]  # fmt: skip
    if not strict and not other:
        if (missing or extra) and sharded.mesh.rank == 0:
            kept = _some(map(_bare, missing), "tensors") or "none"
            ignored = _some(map(_bare, extra), "tensors") or "none"
            _log.warning("not in %s, and left as they are: %s; only in it: %s", reader.folder, kept, ignored)
        return
    lacking = _unmatched(missing, extra, "not in the checkpoint")
    unknown = _unmatched(extra, missing, "not in the model")
    if other or lacking or unknown:
        hint = "" if other else "\nload_module_strict=False loads those that are in both"
        text = "\n".join(_some(lines, "like these", "\n") for lines in (other, lacking, unknown) if lines)
        raise ValueError(f"{reader.folder} is of another model:\n{text}{hint}")


def _bare(name: str) -> str:
    return name.split("/", 1)[1]


def _unmatched(names: Shapes, others: Shapes, what: str) -> list[str]:
    """One line per tensor that has no counterpart, with the nearest name of one on the other side that could be it."""
    lines = [f"{_bare(name)}: {what}" for name in names]
    for number, (name, shape) in enumerate(list(names.items())[:MOST_SHOWN]):  # comparing words takes long
        kind = name.removesuffix(_bare(name))
        similar = nearest(_bare(name), [_bare(o) for o in others if o.startswith(kind) and others[o] == shape])
        lines[number] += f"; did you mean {similar!r}?" if similar else ""
    return lines


def _require_same_optimizer(sharded: Sharded, optimizer: Optimizer, reader: Reader) -> None:
    saved = (reader.manifest["optimizer"], len(reader.manifest["groups"]))
    wanted = (type(optimizer).__name__, len(optimizer.param_groups))
    if saved != wanted:
        raise ValueError(
            f"{reader.folder} is of {saved[0]} with {saved[1]} parameter groups, but this run has {wanted[0]}"
            f" with {wanted[1]}; make the same optimizer, or pass load_optimizer_states=False to take parameters only"
        )
    keys = _state_keys(reader)
    for flat, _, piece in _pieces(sharded):
        for name in (f"optimizer/{key}/{piece.name}" for key in keys):
            if not _whole(flat) and name in reader.names and reader.shape(name) != piece.shape:
                raise ValueError(
                    f"{name} in {reader.folder} has shape {reader.shape(name)} and cannot be cut as its parameter of "
                    f"shape {piece.shape}; load it with ZeRO-0, or pass load_optimizer_states=False"
                )


def _load_tensors(sharded: Sharded, optimizer: Optimizer | None, reader: Reader) -> None:
    for flat in sharded.flats:
        held, low = _held(sharded, flat)
        for index, start, stop in flat.layout.owned(low, low + held.numel()):
            segment = flat.layout.segments[index]
            name, out = f"parameter/{segment.name}", held[start - low : stop - low]
            if name in reader.names:
                reader.read(name, start - segment.start, stop - segment.start, out)
    if optimizer is not None:
        _load_optimizer(sharded, optimizer, reader)
    for name, buffer in _buffers(sharded):
        if f"buffer/{name}" in reader.names:
            values = torch.empty(buffer.numel(), dtype=buffer.dtype)
            reader.read(f"buffer/{name}", 0, buffer.numel(), values)
            buffer.copy_(values.view(buffer.shape))
    own = f"random/{sharded.mesh.rank}"
    if reader.manifest["world_size"] == sharded.mesh.world_size and own in reader.names:
        packed = torch.empty(reader.shape(own), dtype=torch.uint8)
        reader.read(own, 0, packed.numel(), packed)
        restore_random_state(packed)


def _state_keys(reader: Reader) -> list[str]:
    return sorted({name.split("/")[1] for name in reader.names if name.startswith("optimizer/")})


def _load_optimizer(sharded: Sharded, optimizer: Optimizer, reader: Reader) -> None:
    for group, saved in zip(optimizer.param_groups, reader.manifest["groups"], strict=True):
        group.update({key: _restored(group.get(key), value) for key, value in unpack(saved).items()})
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    keys = _state_keys(reader)
    for _, _, piece in _pieces(sharded):
        if f"parameter/{piece.name}" not in reader.names:
            continue
        state = optimizer.state[piece.parameter]
        state.clear()
        for key in keys:
            name = f"optimizer/{key}/{piece.name}"
            if name in reader.names:
                state[key] = _read_state(reader, name, piece)
        for key, value in reader.manifest["scalars"].get(piece.name, {}).items():
            state[key] = _state_number(key, value, piece.parameter, groups.get(id(piece.parameter), {}))


def _read_state(reader: Reader, name: str, piece: Piece) -> torch.Tensor:
    """A state in its parameter's shape; or in its own, whole, if it was written so."""
    parameter, shape, dtype = piece.parameter, reader.shape(name), reader.dtype(name)
    start, stop = (piece.start, piece.stop) if shape == piece.shape else (0, torch.Size(shape).numel())
    dtype = parameter.dtype if dtype.is_floating_point else dtype
    state = torch.empty(stop - start, dtype=dtype, device=parameter.device)
    reader.read(name, start, stop, state)
    return state.view(parameter.shape if shape == piece.shape else shape)


def _state_number(key: str, saved: Any, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
    """A state that is one number; a tensor where torch's own ``load_state_dict`` puts it.

    That is with the parameter, but ``step`` on the host unless the update's kernel reads it.
    """
    if not isinstance(saved, list):
        return saved
    number, dtype = saved[0], getattr(torch, saved[1])
    if key != "step":
        return torch.tensor(number, dtype=dtype, device=parameter.device)
    if group.get("fused") or group.get("capturable"):
        return torch.tensor(number, dtype=torch.float32, device=parameter.device)
    return torch.tensor(number, dtype=dtype)


def _set_learning_rates(optimizer: Optimizer, scheduler: Any) -> None:
    """Put a scheduler's last learning rates into the groups, from which torch's schedulers go on."""
    rates = scheduler.get_last_lr() if hasattr(scheduler, "get_last_lr") else []
    if len(rates) == len(optimizer.param_groups):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = _restored(group["lr"], _numbers(rate))


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
