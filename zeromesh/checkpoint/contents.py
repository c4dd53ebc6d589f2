"""Contents of a checkpoint: names of a run's tensors, and their places in memory.

Names: ``parameter/NAME`` are the values that the optimizer updates (fp32 masters of 16-bit parameters), ``buffer/NAME``
buffers, ``optimizer/KEY/NAME`` one state of one parameter, ``random/RANK`` the generators of a rank as bytes,
``extra/RANK/NUMBER`` tensors in the extra state of modules. A NAME is the model's own, without those of wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from zeromesh.base.buffer_memory import EXTRA, plain_name
from zeromesh.base.piece import Piece
from zeromesh.base.placement import Tier
from zeromesh.base.quantized_layers import fingerprint, layers, states, weight_of
from zeromesh.base.split import Held
from zeromesh.checkpoint.boxes import Box
from zeromesh.checkpoint.manifest import dtype_name
from zeromesh.checkpoint.packing import StoredTensors, pack
from zeromesh.checkpoint.random_state import random_state
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.optim.scaler import LossScaler
from zeromesh.shard.optim.schedules import RateSchedule
from zeromesh.shard.optim.spikes import SpikeWatch
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.sharded import ShardedModel
from zeromesh.shard.store.window import PiecePart, StateWindow, pieces_in

if TYPE_CHECKING:
    from zeromesh.base.loader import Loader, Position


MEMBERS = ("params", "param_names")  # entries of a parameter group that are not options

FROZEN_LEFT_OUT = "frozen_left_out"  # entry of the manifest: the checkpoint has no parameters that are not trained


class RunState(Protocol):
    """State of an engine that is saved."""

    sharded: ShardedModel
    mesh: Mesh
    config: Any
    optimizer: Optimizer | None
    lr_scheduler: Any
    loss_scaler: LossScaler | None
    training_dataloader: Loader | None
    data_position: Position | None
    global_steps: int
    global_samples: int
    micro_steps: int

    @property
    def skipped_steps(self) -> int:
        """Number of updates that were left out because a gradient was not finite, or as spikes."""

    @property
    def spikes(self) -> SpikeWatch:
        """Comparison of updates with those before them."""

    def train_batch_size(self) -> int:
        """Samples per update over all ranks."""

    def resume(self, global_steps: int, global_samples: int, micro_steps: int, skipped_steps: int) -> None:
        """Take the counters of a checkpoint."""

    def resume_data(self) -> None:
        """Take the position of the training data's loader as that of the last update."""


def boxes(
    engine: RunState, read: bool = True, exclude_frozen: bool = False, of_client: Iterable[Box] = ()
) -> Iterator[Box]:
    """Yield the boxes that this rank writes, each valid until the next; without ``read`` their data are any.

    Those ``of_client``, of the user's values, come last, on the first rank.
    """
    plain = plain_names(engine.sharded.model)
    for box in _own_boxes(engine, read, exclude_frozen):
        kind, _, name = box.name.rpartition("/")
        yield box if (bare := plain(name)) == name else replace(box, name=f"{kind}/{bare}")
    if engine.mesh.rank == 0:
        yield from of_client


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Return a function of a tensor's name in the model that leaves out the names of wrappers."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    # Users have modules that they call "module".
    prefixes = [
        f"{path}.module.".removeprefix(".") for path, module in model.named_modules() if isinstance(module, parallel)
    ]

    def plain(name: str) -> str:
        for prefix in reversed(prefixes):  # the innermost first
            if name.startswith(prefix):
                name = prefix.removesuffix("module.") + name.removeprefix(prefix)
        return plain_name(name)

    return plain


def model_names(model: nn.Module, names: Iterable[str]) -> Callable[[str], str]:
    """Return a function of a saved name, with or without those of wrappers, that returns the one of ``names``."""
    plain = plain_names(model)
    by_plain = {plain(name): name for name in names}
    return lambda name: by_plain.get(name) or by_plain.get(plain_name(name), name)


def extra_modules(sharded: ShardedModel) -> dict[str, nn.Module]:
    """Return the modules of this stage with a state beside parameters and buffers, by the name of that state."""
    return {
        name: module
        for path, module in sharded.model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
        and (name := f"{path}.{EXTRA}".removeprefix(".")) not in sharded.idle
    }


def extra_state(sharded: ShardedModel) -> tuple[dict[str, Any], StoredTensors]:
    """Return the extra state of the modules of this stage as JSON, by name, and its tensors; the first rank's counts.

    Raises:
        TypeError: it cannot be kept; the message names the module.
    """
    apart, plain = StoredTensors(f"extra/{sharded.mesh.rank}"), plain_names(sharded.model)
    members = extra_modules(sharded) if sharded.mesh.group("stage").rank == 0 else {}
    packed = {
        plain(name): pack(
            module.get_extra_state(), f"the extra state of {name.removesuffix(EXTRA)} {type(module)}", apart
        )
        for name, module in members.items()
    }
    return packed, apart


def _own_boxes(engine: RunState, read: bool, exclude_frozen: bool) -> Iterator[Box]:
    sharded = engine.sharded
    # Replicas write nothing twice: of each value, one rank is the writer.
    if sharded.mesh.is_first_copy:
        for flat in filter(sharded.is_first, sharded.flats):
            if exclude_frozen and not flat.layout.trainable:
                continue
            assert flat.store is not None
            on_disk = flat.optimizer_tier is Tier.NVME
            for window in flat.store.windows(flat, read=read):
                for box in _window_boxes(sharded, window, engine.optimizer):
                    yield replace(box, from_disk=True) if on_disk else box
    if sharded.mesh.group("stage").rank == 0:
        for name, buffer in own_buffers(sharded):
            if buffer.numel():
                yield Box.whole(f"buffer/{name}", buffer)
    for name, value in extra_state(sharded)[1].items():
        if value.numel():
            yield Box.whole(name, value)
    yield Box.whole(f"random/{sharded.mesh.rank}", random_state(sharded.model))


def _window_boxes(sharded: ShardedModel, window: StateWindow, optimizer: Optimizer | None) -> Iterator[Box]:
    # The rank's shard, also where it holds more, as of parameters that are not sharded.
    flat, (values, offset) = window.flat, held(window)
    low, high = max(flat.shard_range.start, offset), min(flat.shard_range.stop, offset + values.numel())
    for index, start, stop in flat.layout.owned(low, high):
        segment = flat.layout.segments[index]
        data, first = values[start - offset : stop - offset], segment.start
        yield from _boxes(f"parameter/{segment.name}", segment.held, start - first, stop - first, data)
    if optimizer is not None:
        for part in pieces_in(window):
            names = sharded.store.names(flat, part.piece.parameter)
            windowed = dict(zip(names, (window.rows or [])[1:], strict=False))
            yield from _optimizer_boxes(optimizer, flat, part, windowed)


def held(window: StateWindow) -> tuple[torch.Tensor, int]:
    """Return the elements of a window as parameters are saved from them, and their start in the layout."""
    flat = window.flat
    if flat.layout.trainable:
        return window.master, flat.own.start + window.elements.start
    return (flat.shard, flat.shard_range.start) if flat.sharded else (flat.full, 0)


def _boxes(name: str, held_part: Held, start: int, stop: int, data: torch.Tensor) -> Iterator[Box]:
    """Yield the boxes that this rank writes of elements ``[start, stop)``, which are ``data``, of a tensor."""
    for box in held_part.boxes(start, stop):
        if not box.owned:
            continue
        parts = [data[low - start : high - start] for low, high in box.runs]
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        place = (None, None) if held_part.split is None else (box.offsets, box.sizes)
        yield Box.of(name, held_part.whole, box.start, values, *place)


def updates_whole(flat: Flat) -> bool:
    """Return whether this rank updates whole parameters."""
    return flat.own.stop - flat.own.start == flat.layout.size


def elements_of(flat: Flat, part: PiecePart) -> tuple[int, int]:
    """Return the first element, and the one after the last, of a part in what this rank holds of its parameter."""
    begin = flat.own.start - flat.layout.segments[part.number].start
    return begin + part.elements.start, begin + part.elements.stop


def _optimizer_boxes(
    optimizer: Optimizer, flat: Flat, part: PiecePart, windowed: Mapping[str, torch.Tensor]
) -> Iterator[Box]:
    """Yield the boxes of the states of a part of a piece; those in ``windowed`` are its window's."""
    # Of its piece, a rank writes what lies in its shard; in row 0 that is less.
    piece, (begin, end) = part.piece, elements_of(flat, part)
    first = flat.layout.segments[part.number].start
    start, stop = max(begin, flat.shard_range.start - first), min(end, flat.shard_range.stop - first)
    for key, value in optimizer.state.get(piece.parameter, {}).items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or start >= stop:
            continue
        name, shape = f"optimizer/{key}/{piece.name}", tuple(value.shape)
        if piece.by_row and piece.shape[1] != 1 and value.numel() * piece.shape[1] == piece.stop - piece.start:
            rows = piece.shape[:1]
            if piece.held.rank == 0:  # ranks along the tensor axis have copies
                yield Box.of(name, rows, start // piece.shape[1], value)
            continue
        if updates_whole(flat) and shape != piece.parameter.shape:
            # As Adafactor's rows and columns: what it stands for is known to the optimizer only, so it is not cut.
            if start == 0:
                yield Box.whole(name, value)
            continue
        if value.numel() != piece.stop - piece.start:
            raise ValueError(f"optimizer state {key!r} of {piece.name} has shape {shape}, not its parameter's")
        # A view where it is contiguous, so that a large state is not doubled.
        if key in windowed:
            data = windowed[key][part.within][start - begin : stop - begin]
        else:
            data = value.flatten()[start - piece.start : stop - piece.start]
        yield from _boxes(name, piece.held, start, stop, data)


def pieces(sharded: ShardedModel) -> Iterator[tuple[Flat, Piece]]:
    """Return the pieces that this rank updates."""
    return ((flat, piece) for flat in sharded.flats if flat.layout.trainable for _, _, piece in flat.pieces)


def options(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint holds of a parameter group; tensors of one number as numbers."""
    # Every rank has other parameters, so that they are no part of what is written.
    entries = {key: plain_numbers(value) for key, value in group.items() if key not in MEMBERS}
    return {key: value for key, value in entries.items() if _plain(value)}


def plain_numbers(value: Any) -> Any:
    """Return the value with numbers in the place of tensors of one element, also in a list or tuple."""
    if isinstance(value, list | tuple):
        return type(value)(map(plain_numbers, value)) if type(value) in (list, tuple) else value
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(item, int | float) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def scalars(engine: RunState) -> dict[str, dict[str, Any]]:
    """Return the optimizer's states that are single numbers, by parameter; tensors as their value and their dtype."""
    numbers: dict[str, dict[str, Any]] = {}
    if engine.optimizer is None:
        return numbers
    # Ranks that hold pieces of one parameter have the same numbers, so that it does not matter whose is kept.
    for _, piece in pieces(engine.sharded):
        for key, value in engine.optimizer.state.get(piece.parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                numbers.setdefault(piece.name, {})[key] = value
            elif value.ndim == 0:
                numbers.setdefault(piece.name, {})[key] = [value.item(), dtype_name(value.dtype)]
    return numbers


def members(engine: RunState) -> dict[str, int]:
    """Return the number of the parameter group of each parameter that this rank updates a piece of."""
    if engine.optimizer is None:
        return {}
    groups = {id(p): number for number, group in enumerate(engine.optimizer.param_groups) for p in group["params"]}
    return {
        piece.name: groups[id(piece.parameter)] for _, piece in pieces(engine.sharded) if id(piece.parameter) in groups
    }


def buffers(sharded: ShardedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the buffers here that are part of the model's state, by name."""
    persistent = {id(buffer) for buffer in sharded.buffers.state()}
    return ((name, buffer) for name, buffer in sharded.model.named_buffers() if id(buffer) in persistent)


def own_buffers(sharded: ShardedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the buffers that this stage computes with; the values of the others are another stage's."""
    return ((name, buffer) for name, buffer in buffers(sharded) if name not in sharded.idle)


def parameters(sharded: ShardedModel) -> dict[str, dict[str, Any]]:
    """Return the compute dtype of each parameter here, and whether it is trained, by name."""
    facts: dict[str, dict[str, Any]] = {
        segment.name: {"dtype": dtype_name(flat.layout.dtype), "trainable": flat.layout.trainable}
        for flat in sharded.flats
        for segment in flat.layout.segments
    }
    # Scales of quantized weights are not saved, as the same ones are made of the base model again.
    for name, text in quantized_by(sharded).items():
        facts[name]["quantized"] = text
    return facts


def quantized_by(sharded: ShardedModel) -> dict[str, str]:
    """Return a hash of the scales of each quantized weight of bitsandbytes."""
    return {
        sharded.names[id(weight_of(layer))]: fingerprint(layer) for _, layer in layers(sharded.model) if states(layer)
    }


def tied(sharded: ShardedModel) -> dict[str, str]:
    """Return the other names of parameters that have several, with the one under which they are saved."""
    names = sharded.model.named_parameters(remove_duplicate=False)
    return {name: owner for name, parameter in names if (owner := sharded.names.get(id(parameter), name)) != name}


def model_fields(engine: RunState) -> dict[str, Any]:
    """Return the numbers and words of the model's own configuration, if it has one."""
    model_config = getattr(engine.sharded.model, "config", None)
    config = engine.config.model if model_config is None else model_config
    # Shapes follow from them, so that an error can say which field differs.
    fields = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    plain = {key: value for key, value in fields.items() if isinstance(value, bool | int | str)}
    return {key: value for key, value in plain.items() if isinstance(key, str) and not key.startswith("_")}


def scheduler_name(scheduler: Any) -> str | None:
    """Return the class of a scheduler, with those that it is made of; None if there is none."""
    if scheduler is None:
        return None
    name = scheduler.name if isinstance(scheduler, RateSchedule) else type(scheduler).__name__
    parts = getattr(scheduler, "_schedulers", None)  # of torch's SequentialLR and ChainedScheduler
    return f"{name}({', '.join(str(scheduler_name(part)) for part in parts)})" if parts else name


def own_names(names: Collection[str], buffers: Collection[str], tied: Mapping[str, str]) -> dict[str, str | None]:
    """Return new names of tensors from a file that does not tell buffers, or the other names of tied parameters.

    Args:
        names: all tensors of the checkpoint.
        buffers: names of the model's buffers.
        tied: other names of the model's parameters, with the one under which they are saved.

    Returns:
        By the present name; None for a second copy.
    """
    new_names: dict[str, str | None] = {}
    for full in names:
        kind, _, name = full.rpartition("/")
        if kind == "parameter" and name in buffers:
            new_names[full] = f"buffer/{name}"
        elif name in tied and kind.split("/")[0] in ("parameter", "optimizer"):
            owner = f"{kind}/{tied[name]}"
            new_names[full] = None if owner in names else owner
    return new_names
