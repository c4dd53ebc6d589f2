"""The update of an optimizer on the host: one pass over memory, for many pieces at once.

The bits of the result depend neither on the number of threads, nor on how memory is cut into pieces, nor on the
instruction set. Without the native kernels, and on other devices, torch computes it in several passes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import nn

from zeromesh.base.kernels import halves, rounding
from zeromesh.base.kernels.native import CPU, PIECE, PIECE_BYTES, TYPES, RuleRow, check, library, threads_of
from zeromesh.base.kernels.update_rules import RULES, Group

# From so many elements on, results that go elsewhere are written past the caches, which could not keep them.
STREAMED = 1 << 20

# Elements that torch updates at a time, so that its intermediate results are small beside the states; and their bytes
# for each of those elements, at the most.
WINDOW, WINDOW_BYTES = 1 << 22, 45


@dataclass(frozen=True)
class UpdateStep:
    """A rule of ``RULES`` with the hyperparameters of a group, and which step it is, the first being 1."""

    rule: str
    group: Group
    number: int

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule is {self.rule!r}; the kernel has {', '.join(RULES)}")
        if self.number < 1:
            raise ValueError(f"the number of the step is {self.number}; the first step is 1")


@dataclass(slots=True)
class UpdatePiece:
    """Elements that are updated alike: 1-D contiguous tensors on a device, all of the same length, which may be 0.

    What is written shares no memory with anything else, but for what is updated in place, and for an output of the
    gradient's dtype in the place of the gradient.
    """

    step: UpdateStep
    gradient: torch.Tensor  # fp32, bf16 or fp16
    # fp32; or float64, the states, too, which torch updates; or, with a remainder, the upper half: the bf16 parameter.
    master: torch.Tensor
    # fp32 or bf16, which takes what is new by `rounding`; as the rule names them. At the first step they are zeros;
    # SGD's momentum may then be anything.
    states: tuple[torch.Tensor, ...]
    output: torch.Tensor | None = None  # fp32, bf16 or fp16: takes the new parameter, too, rounded to nearest even
    # Take what is new, in the old ones' dtypes; None and () for where those are. A step so written can be dropped.
    new_master: torch.Tensor | None = None
    new_states: tuple[torch.Tensor, ...] = field(default=())
    remainder: torch.Tensor | None = None  # int16, the lower half of the master; None: it is whole
    new_remainder: torch.Tensor | None = None


class StatesApart(NamedTuple):
    """Master and states that are not the optimizer's tensors, as in ``UpdatePiece``: 1-D, of the same elements."""

    master: torch.Tensor
    states: Sequence[torch.Tensor]  # the first ones of the rule, in its order, or more than it has
    begin: int  # where their elements begin in the parameter
    remainder: torch.Tensor | None = None


class StepInput(NamedTuple):
    """A parameter or a part of it, its gradient, the output for the new value, and what is apart from the optimizer."""

    parameter: nn.Parameter
    gradient: torch.Tensor
    output: torch.Tensor | None = None
    apart: StatesApart | None = None


def update(
    pieces: Sequence[UpdatePiece], factor: float = 1.0, threads: int | None = None, instructions: str | None = None
) -> None:
    """Take one step for all pieces, in one native call.

    Args:
        pieces: what to update; see ``UpdatePiece``. Their steps may differ.
        factor: gradients are multiplied with it, in fp32.
        threads: how many work at most, by default as many as torch uses; small work is done by fewer.
        instructions: the instruction set, by default the best one; for tests.

    Raises:
        ValueError: a tensor is not as it must be, or the processor lacks the instruction set.
    """
    for piece in pieces:
        _check(piece, CPU)
    workers, native = threads_of(threads), library()
    natively = []
    for piece in pieces:
        if native is None or piece.master.dtype is torch.float64 or RULES[piece.step.rule].code is None:
            _update_by_windows(piece, factor)
        else:
            natively.append(piece)
    if native is None or not (pieces := natively):
        return
    steps = {id(piece.step): piece.step for piece in pieces}
    numbers = {key: number for number, key in enumerate(steps)}
    rows = (RuleRow * len(steps))(*(_row(step, factor) for step in steps.values()))
    table = ctypes.create_string_buffer(PIECE_BYTES * len(pieces))
    for index, piece in enumerate(pieces):
        struct.pack_into(PIECE, table, PIECE_BYTES * index, *_described(piece), numbers[id(piece.step)], _narrow(piece))
    stream = sum(piece.master.numel() for piece in pieces) >= STREAMED
    native.handle.zeromesh_update(native.choose(instructions), rows, table, len(pieces), stream, workers)


def update_on_device(pieces: Sequence[UpdatePiece], factor: float = 1.0) -> None:
    """Take one step for all pieces by torch, on the device of each one's master; ``factor`` is as in ``update``.

    Raises:
        ValueError: a tensor is not as it must be.
    """
    for piece in pieces:
        _check(piece, piece.master.device)
    for piece in pieces:
        _update_by_windows(piece, factor)


def _update_by_windows(piece: UpdatePiece, factor: float) -> None:
    for begin in range(0, piece.master.numel(), WINDOW):
        _update_by_torch(_part(piece, slice(begin, begin + WINDOW)), factor)


def _part(piece: UpdatePiece, elements: slice) -> UpdatePiece:
    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(tensor[elements] for tensor in value)
        return value[elements] if isinstance(value, torch.Tensor) else value

    return UpdatePiece(**{part.name: cut(getattr(piece, part.name)) for part in fields(piece)})


@torch.no_grad()
def _update_by_torch(piece: UpdatePiece, factor: float) -> None:
    """Take the step without the native library, in several passes over memory."""
    target = piece.master if piece.new_master is None else piece.new_master
    if piece.remainder is not None:
        master = halves.join(piece.master, piece.remainder)
    else:
        master = target if target is piece.master else target.copy_(piece.master)
    step, written = piece.step, piece.new_states or piece.states
    gradient = piece.gradient.to(torch.promote_types(piece.gradient.dtype, master.dtype)) * factor
    random = None
    if any(state.dtype is rounding.NARROW for state in piece.states):
        signed = -gradient if step.group.get("maximize") else gradient
        random = rounding.random_bits(signed, master, _salt(step))
    pairs = zip(written, piece.states, strict=True)
    # What rests in fp32 is updated where it goes.
    states = [
        old.float() if old.dtype is rounding.NARROW else new if new is old else new.copy_(old) for new, old in pairs
    ]
    RULES[step.rule].by_torch(step.group, step.number, gradient, master, states)
    for index, (new, state) in enumerate(zip(written, states, strict=True)):
        if random is not None and new.dtype is rounding.NARROW:
            new.copy_(rounding.round_randomly(state, random, index))
    if piece.remainder is not None:
        upper, lower = halves.split(master)
        target.copy_(upper)
        (piece.remainder if piece.new_remainder is None else piece.new_remainder).copy_(lower)
    if piece.output is not None:
        piece.output.copy_(master)


def _salt(step: UpdateStep) -> int:
    """Return the random bits' share of the step's number, which is not known of rules that do not count."""
    return rounding.salt_of(step.number if RULES[step.rule].counted else 0)


def _row(step: UpdateStep, factor: float) -> RuleRow:
    rule = RULES[step.rule]
    values = {"decay": 1.0, "salt": _salt(step), "scale": -factor if step.group.get("maximize") else factor}
    return RuleRow(rule=rule.code, **values | rule.row(step.group, step.number))


def _described(piece: UpdatePiece) -> tuple[int, ...]:
    """The fields of ``struct piece`` up to the row."""
    read = [piece.master.data_ptr(), *(state.data_ptr() for state in piece.states)]
    new = [piece.new_master, *(piece.new_states or piece.states)]
    write = [old if tensor is None else tensor.data_ptr() for old, tensor in zip(read, new, strict=True)]
    missing = [0] * (3 - len(read))
    lower = piece.remainder
    new_lower = lower if piece.new_remainder is None else piece.new_remainder
    remainders = (0 if tensor is None else tensor.data_ptr() for tensor in (lower, new_lower))
    output = piece.output
    addresses = (piece.gradient.data_ptr(), 0 if output is None else output.data_ptr(), *read, *missing, *write)
    types = (TYPES[piece.gradient.dtype], 0 if output is None else TYPES[output.dtype])
    return (*addresses, *missing, *remainders, piece.master.numel(), *types)


def _narrow(piece: UpdatePiece) -> int:
    """Return which states are bf16, as bits of a number."""
    return sum(1 << index for index, state in enumerate(piece.states) if state.dtype is rounding.NARROW)


_EXACT, _WIDE = (torch.float32,), (torch.float64,)
_ANY = tuple(TYPES)


def _check(piece: UpdatePiece, device: torch.device) -> None:
    elements, names = piece.master.numel(), RULES[piece.step.rule].states(piece.step.group)
    if len(piece.states) != len(names):
        raise ValueError(f"{piece.step.rule} has the states {names}, and {len(piece.states)} are given")
    if piece.new_states and len(piece.new_states) != len(names):
        raise ValueError(f"{len(names)} states are read, and {len(piece.new_states)} are to be written; name as many")
    wide = piece.master.dtype is torch.float64
    exact, others = (_WIDE, (*_WIDE, *_ANY)) if wide else (_EXACT, _ANY)
    masters = exact if piece.remainder is None else (torch.bfloat16,)
    check("gradient", piece.gradient, elements, others, device)
    check("master", piece.master, elements, masters, device)
    for name, state in zip(names, piece.states, strict=True):
        check(name, state, elements, exact if wide else (*exact, rounding.NARROW), device)
    if piece.output is not None:
        check("output", piece.output, elements, others, device)
    if piece.new_master is not None:
        check("new master", piece.new_master, elements, masters, device)
    for name, state, old in zip(names, piece.new_states, piece.states, strict=False):
        check(f"new {name}", state, elements, (old.dtype,), device)
    if piece.new_remainder is not None and piece.remainder is None:
        raise ValueError("a new remainder is given, and no remainder that is read; give both or neither")
    if piece.remainder is not None and (piece.new_master is None) != (piece.new_remainder is None):
        raise ValueError("one half of the new master is given, and one is not; give new_master and new_remainder")
    for name, remainder in (("remainder", piece.remainder), ("new remainder", piece.new_remainder)):
        if remainder is not None:
            check(name, remainder, elements, (torch.int16,), device)
