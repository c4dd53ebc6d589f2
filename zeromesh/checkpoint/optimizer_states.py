"""States of optimizers and the options of their groups, as they come back from a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from zeromesh.base.kernels.update_rules import RULES, rule_of, state_dtype
from zeromesh.base.optimizer_table import row_of
from zeromesh.base.piece import Piece
from zeromesh.base.split import Held
from zeromesh.checkpoint.boxes import Reader
from zeromesh.checkpoint.contents import MEMBERS, elements_of, pieces, plain_numbers, updates_whole
from zeromesh.checkpoint.packing import is_like, unpack
from zeromesh.shard.optim.schedules import RateSchedule
from zeromesh.shard.sharded import ShardedModel
from zeromesh.shard.store.memory import unloaded
from zeromesh.shard.store.window import StateWindow, pieces_in
from zeromesh.shard.tables.row_rules import RULE_KEY

STRANGE = "it is not what was written; choose another checkpoint, or pass load_optimizer_states=False"


def _restored(present: Any, saved: Any) -> Any:
    """Return the new value of an option."""
    # The same object, since schedulers and compiled graphs hold it.
    if isinstance(present, torch.Tensor) and isinstance(saved, int | float):
        present.detach().fill_(saved)
        return present
    if isinstance(present, list | tuple) and isinstance(saved, list | tuple) and len(present) == len(saved):
        return type(saved)(_restored(old, new) for old, new in zip(present, saved, strict=True))
    return saved


def require_same_optimizer(sharded: ShardedModel, optimizer: Optimizer, reader: Reader) -> None:
    """Raise ValueError unless the checkpoint is of such an optimizer, and its states can be cut as is needed."""
    named, count = reader.manifest["optimizer"], len(reader.manifest["groups"])
    # Files of other libraries may not name the class: then all count whose states have the same names.
    names = named if isinstance(named, list) else [named]
    class_name, groups = type(optimizer).__name__, len(optimizer.param_groups)
    if (names and class_name not in names) or count != groups:
        raise ValueError(
            f"{reader.folder} is of {' or '.join(names) or 'an optimizer'} with {count} parameter groups, but this "
            f"run has {class_name} with {groups}; make the same optimizer, or pass load_optimizer_states=False to take "
            "parameters only"
        )
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, reader.manifest["groups"], strict=True)):
        options = unpack(saved)
        for key, value in options.items():
            present: Any = group.get(key)
            lists = isinstance(present, list | tuple) and isinstance(value, list | tuple)
            if key in MEMBERS or not is_like(present, value) or (lists and len(present) != len(value)):
                raise ValueError(
                    f"{reader.folder} has {key} = {str(value)[:80]!r} in group {number}, but this run has "
                    f"{str(present)[:80]!r}: {STRANGE}"
                )
        before, now = options.get(RULE_KEY), group.get(RULE_KEY)
        if before != now:
            raise ValueError(
                f"{reader.folder} has {RULE_KEY} = {before!r} in group {number}, but this run has {now!r}: the states "
                "of tables are others; use the same update, or pass load_optimizer_states=False"
            )
    module = type(optimizer).__module__
    is_known = module.split(".")[0] == "zeromesh" or module.startswith("torch.optim")
    # Most known here have states like their parameters, but for single numbers.
    is_elementwise = is_known and not row_of(type(optimizer)).reduces_states
    keys = _state_keys(reader)  # once: it goes through all names
    groups_of, scalars_of = reader.manifest.get("members", {}), reader.manifest["scalars"]
    of_group: dict[Any, set[str]] = {}
    of_tables = {"step"} if _is_uncounted(optimizer) else set()
    for flat, piece in pieces(sharded):
        tensors = [key for key in keys if f"optimizer/{key}/{piece.name}" in reader.names]
        # An update reads all states of a parameter or, before the first one, makes all; it would stop in its middle.
        states = {*tensors, *scalars_of.get(piece.name, {})} - of_tables
        # Files that do not name the groups of parameters do not tell which have the same.
        alike = of_group.setdefault(groups_of[piece.name], states) if states and piece.name in groups_of else states
        if is_elementwise and alike != states and f"parameter/{piece.name}" in reader.names:
            raise ValueError(
                f"{reader.folder} has the states {', '.join(sorted(states))} of {piece.name}, and "
                f"{', '.join(sorted(alike))} of others in its group: {STRANGE}"
            )
        for name in (f"optimizer/{key}/{piece.name}" for key in tensors):
            shape, dtype = reader.shape(name), reader.dtype(name)
            # Kernels trust the size and the kind of a state, and would read behind its end.
            fits = shape == piece.shape or _by_row(piece, shape)
            if is_elementwise and (not fits or dtype.is_floating_point != piece.parameter.is_floating_point()):
                raise ValueError(
                    f"{name} in {reader.folder} is {dtype} of shape {shape}, but its parameter is "
                    f"{piece.parameter.dtype} of shape {piece.shape}: {STRANGE}"
                )
            if not updates_whole(flat) and not fits:
                raise ValueError(
                    f"{name} in {reader.folder} has shape {shape} and cannot be cut as its parameter of "
                    f"shape {piece.shape}; load it with ZeRO-0 (zero_optimization.stage = 0), or pass "
                    "load_optimizer_states=False"
                )


def _is_uncounted(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is one that counts no steps."""
    rules = [rule_of(optimizer, group) for group in optimizer.param_groups]
    return all(rule is not None and not RULES[rule].counted for rule in rules)


def _by_row(piece: Piece, shape: tuple[int, ...]) -> bool:
    """Return whether a state of this shape has one number for each row of the parameter."""
    return piece.by_row and shape == piece.shape[:1]


def _state_keys(reader: Reader) -> list[str]:
    return sorted({name.split("/")[1] for name in reader.names if name.startswith("optimizer/")})


def load_options(optimizer: Optimizer, reader: Reader) -> None:
    """Load the options of the groups, on which it depends what states there are."""
    # Updated in place: schedulers hold the groups.
    foreign = "imported" in reader.manifest
    for group, saved in zip(optimizer.param_groups, reader.manifest["groups"], strict=True):
        # An option that this optimizer does not have may be one of another library's.
        restorable = {key: value for key, value in unpack(saved).items() if key in group or not foreign}
        group.update({key: _restored(group.get(key), value) for key, value in restorable.items()})


def load_optimizer(sharded: ShardedModel, optimizer: Optimizer, reader: Reader) -> None:
    """Load the states of the pieces that this rank updates; ``load_options`` and ``load_rows`` come first."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    keys = _state_keys(reader)
    for flat, piece in pieces(sharded):
        # Without ``strict`` the checkpoint may lack it; then its state stays with the value that it is of.
        if f"parameter/{piece.name}" not in reader.names:
            continue
        if not flat.keeps_states:
            flat.load_states(write=True)
        state, in_rows = optimizer.state[piece.parameter], sharded.store.names(flat, piece.parameter)
        state.clear()  # a state that the checkpoint lacks must not stay from before
        for key in keys:
            name = f"optimizer/{key}/{piece.name}"
            if name in reader.names:
                rests_in_rows = key in in_rows  # by ``load_rows``
                narrow = key in sharded.store.states.narrow and not flat.wide_states
                dtype = state_dtype(narrow, piece.parameter.dtype)
                state[key] = (
                    unloaded(torch.empty_like(piece.parameter, dtype=dtype, device="meta"))
                    if rests_in_rows
                    else _read_state(reader, name, piece, dtype)
                )
        for key, value in reader.manifest["scalars"].get(piece.name, {}).items():
            state[key] = state_number(key, value, piece.parameter, groups.get(id(piece.parameter), {}))
        if _is_uncounted(optimizer) and flat not in sharded.tables.flats:
            state.pop("step", None)
        elif _is_uncounted(optimizer) and state:  # a table counts all the same, to tell the first step from others
            state.setdefault("step", torch.tensor(1.0))


def load_rows(sharded: ShardedModel, window: StateWindow, reader: Reader) -> None:
    """Load the states that a window has as rows; ``load_optimizer`` tells the optimizer of them."""
    assert window.rows is not None
    for part in pieces_in(window):
        piece, (start, stop) = part.piece, elements_of(window.flat, part)
        names = sharded.store.names(window.flat, piece.parameter)
        for key, row in zip(names, window.rows[1:], strict=False):
            name = f"optimizer/{key}/{piece.name}"
            if {name, f"parameter/{piece.name}"} <= reader.names:
                read_held(reader, name, piece.held, start, stop, row[part.within])


def _read_state(reader: Reader, name: str, piece: Piece, wanted: torch.dtype) -> torch.Tensor:
    """Return a state in its parameter's shape; or in its own, whole, if it was written so."""
    parameter, shape, dtype = piece.parameter, reader.shape(name), reader.dtype(name)
    held_part, start, stop = _state_place(piece, shape)
    # The run's own precision: a checkpoint may be of masters or states in another one.
    dtype = wanted if dtype.is_floating_point else dtype
    state = torch.empty(stop - start, dtype=dtype, device=parameter.device)
    read_held(reader, name, held_part, start, stop, state)
    return state.view(parameter.shape if shape == piece.shape else state.shape if piece.by_row else shape)


def _state_place(piece: Piece, shape: tuple[int, ...]) -> tuple[Held, int, int]:
    """Return which elements of a state of a shape belong to a piece, and of what."""
    if shape == piece.shape:
        return piece.held, piece.start, piece.stop
    if _by_row(piece, shape):
        return Held(shape), piece.start // piece.shape[1], piece.stop // piece.shape[1]
    return Held(shape), 0, torch.Size(shape).numel()


def require_states(sharded: ShardedModel, reader: Reader) -> None:
    """Open the manifests of the states that this rank updates; raise ValueError for what they lack."""
    keys = _state_keys(reader)
    for _, piece in pieces(sharded):
        for name in (f"optimizer/{key}/{piece.name}" for key in keys):
            if {name, f"parameter/{piece.name}"} <= reader.names:
                require_held(reader, name, *_state_place(piece, reader.shape(name)))


def read_held(reader: Reader, name: str, held_part: Held, start: int, stop: int, out: torch.Tensor) -> None:
    """Copy elements ``[start, stop)`` of what this rank holds of a tensor into ``out``; see ``Reader.read``."""
    if held_part.split is None:
        reader.read(name, start, stop, out)
        return

    def read(first: int, last: int) -> torch.Tensor:
        values = torch.empty(last - first, dtype=out.dtype)
        reader.read(name, first, last, values)
        return values

    out.copy_(held_part.read(read, start, stop))


def require_held(reader: Reader, name: str, held_part: Held, start: int, stop: int) -> None:
    """Raise ValueError unless ``read_held`` can read these elements; see ``Reader.require``."""

    def require(first: int, last: int) -> torch.Tensor:
        reader.require(name, first, last)
        return torch.empty(last - first, device="meta")

    held_part.read(require, start, stop)


def state_number(key: str, saved: Any, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
    """Return a state that is one number; a tensor where torch's own ``load_state_dict`` puts it."""
    if not isinstance(saved, list):
        return saved
    number, dtype = saved[0], getattr(torch, saved[1])
    if key != "step":
        return torch.tensor(number, dtype=dtype, device=parameter.device)
    # With the parameter only where the update's kernel reads it; else each step would wait for the device.
    if group.get("fused") or group.get("capturable"):
        return torch.tensor(number, dtype=torch.float32, device=parameter.device)
    return torch.tensor(number, dtype=dtype)


def set_learning_rates(optimizer: Optimizer, scheduler: Any) -> None:
    """Put the last learning rates of a scheduler of torch's into the groups, from which it goes on."""
    ours = isinstance(scheduler, RateSchedule)  # which computes each rate from the number of updates
    rates = scheduler.get_last_lr() if hasattr(scheduler, "get_last_lr") and not ours else []
    if len(rates) == len(optimizer.param_groups):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = _restored(group["lr"], plain_numbers(rate))
