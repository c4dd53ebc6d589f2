"""Experts that are called with rows in the order of the experts: one tensor of them all, or rows and their numbers.

Both become rows sorted by expert and the number of rows of each. They travel to the owners of the experts, which call
the module's own forward with what arrived, and the results travel back to the places of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain as flattened
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeromesh.base.containers import tensors_of
from zeromesh.comm.collectives import Group
from zeromesh.parallel.expert.dispatch import RowExchange
from zeromesh.parallel.follow.activation_parts import replace_forward
from zeromesh.parallel.tensor.operators import move

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Entry = list[int]
"""Numbers that the owner of an expert is told of a rank's calls of it, the number of rows first."""


@dataclass(frozen=True)
class ExpertSharing:
    """Ranks that share the experts of one layer."""

    exchange: RowExchange
    count: int  # experts of all ranks
    lines: Group | None = None  # ranks that are given the same rows, of which each sends a part
    tag: int = 0  # on ``lines``, of two messages

    @property
    def name(self) -> str:
        """Name of the experts."""
        return self.exchange.name

    @property
    def local(self) -> range:
        """Experts of this rank."""
        each = self.count // self.exchange.group.size
        return range(self.exchange.group.rank * each, (self.exchange.group.rank + 1) * each)


class CallChain:
    """Graph in which all ranks come to all messages of a call's backward, also those that have no rows.

    Args:
        module: the module that is called.
        *arguments: its arguments. The call has a backward if any of them, or of the parameters, needs a gradient.
    """

    def __init__(self, module: nn.Module, *arguments: Any) -> None:
        tensors = (*tensors_of(arguments), *module.parameters())
        needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        self._token = torch.empty(0, requires_grad=True) if needed else None

    def __call__(self, x: Tensor, copy: bool = False) -> Tensor:
        """Return ``x`` with a graph that leads to all that was chained before; a copy, if it may be written to."""
        if self._token is None:
            return x
        x, self._token = _Chain.apply(x, self._token, copy)  # type: ignore[no-untyped-call]
        return x


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, copy: bool) -> tuple[Tensor, Tensor]:
        # torch's checkpoint ends a recomputation with the last saved tensor, which is behind the messages on all ranks.
        after = token.new_empty(0)
        ctx.save_for_backward(after)
        return x.clone() if copy else x.data, after

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients, None


Compute = Callable[[Tensor, list[list[Entry]]], Tensor]
"""Results of rows that are sorted by sender and expert, from these and the entries of each sender."""


def compute_at_owners(
    rows: Tensor, table: Sequence[Entry], sharing: ExpertSharing, chain: CallChain, compute: Compute
) -> Tensor:
    """Return the results of rows, in their order. Collective.

    Args:
        rows: sorted by expert, shape ``(rows, width)``.
        table: the entry of each expert.
        sharing: the owners.
        chain: of this call.
        compute: called once, with the rows that arrive, shape ``(any, width)``; returns shape ``(any, other width)``.

    Raises:
        RuntimeError: ranks whose rows have different widths or dtypes.
    """
    total, lines = len(rows), sharing.lines
    if lines is not None:
        part = -(-total // lines.size)
        first, stop = (min(part * rank, total) for rank in (lines.rank, lines.rank + 1))
        rows = move(_padded(rows, part * lines.size), "split", lines, sharing.tag)[: stop - first]
        table = _clipped(table, first, stop)
    width, dtype = (rows.shape[-1], DTYPES.index(rows.dtype)) if total else (0, 0)  # other ranks know it
    by_rank = [table[start : start + len(sharing.local)] for start in range(0, len(table), len(sharing.local))]
    message = torch.tensor([[*flattened(*entries), width, dtype] for entries in by_rank], device="cpu")
    told = sharing.exchange.counts(message)[1].tolist()
    forms = sorted({(width, dtype) for *_, width, dtype in told if width})
    if len(forms) > 1:
        shown = " and ".join(f"{width} values of {DTYPES[dtype]}" for width, dtype in forms)
        raise RuntimeError(f"{sharing.name}: ranks call these experts with rows of {shown}, which must be alike")
    if not total and forms and forms[0] != (rows.shape[-1], DTYPES.index(rows.dtype)):  # nothing was called here
        rows = rows.new_empty(0, forms[0][0], dtype=DTYPES[forms[0][1]])
    size = len(table[0])
    senders = [[row[start : start + size] for start in range(0, len(row) - 2, size)] for row in told]
    sends, receives = ([sum(entry[0] for entry in rank) for rank in ranks] for ranks in (by_rank, senders))
    (arrived,) = sharing.exchange.send([chain(rows)], sends, receives)
    results = chain(compute(chain(arrived), senders))
    (returned,) = sharing.exchange.send([results], receives, sends, back=True)
    returned = chain(returned)
    return returned if lines is None else move(_padded(returned, part), "join", lines, sharing.tag + 1)[:total]


def _padded(rows: Tensor, total: int) -> Tensor:
    return F.pad(rows, (0, 0, 0, total - len(rows))) if total > len(rows) else rows


def _clipped(table: Sequence[Entry], first: int, stop: int) -> list[Entry]:
    """Return the table of rows ``first`` to ``stop`` alone."""
    clipped, start = [], 0
    for count, *rest in table:
        clipped.append([max(0, min(start + count, stop) - max(start, first)), *rest])
        start += count
    return clipped


def by_expert(rows: Tensor, senders: list[list[Entry]]) -> list[list[Tensor]]:
    """Return rows that are sorted by sender and expert in pieces: for each expert, one of each sender."""
    pieces = iter(rows.split([entry[0] for entries in senders for entry in entries]))
    of_sender = [[next(pieces) for _ in entries] for entries in senders]
    return [list(of_expert) for of_expert in zip(*of_sender, strict=True)]


def by_sender(pieces: list[list[Tensor]]) -> Tensor:
    """Put the pieces of ``by_expert`` together again."""
    return torch.cat([piece for of_sender in zip(*pieces, strict=True) for piece in of_sender])


def odd_output(name: str, output: Any, wanted: str) -> RuntimeError:
    """Return the error about the output of experts."""
    shown = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    return RuntimeError(f"{name} returned {shown}; ranks can share experts that return a tensor, {wanted}")


def _stacked(forward: Callable[..., Any], module: nn.Module, sharing: ExpertSharing, x: Tensor) -> Tensor:
    """Compute ``(experts, rows, ...)`` or ``(experts * rows, width)``: the same but for the last dim."""
    count, shape, flat = sharing.count, x.shape, x.ndim == 2
    if x.ndim < 2 or shape[0] % count or not (flat or shape[0] == count):
        raise RuntimeError(
            f"{sharing.name} was called with shape {tuple(shape)}; ranks can share experts that are stacked if it is "
            f"called with ({count}, rows, width), or ({count} x rows, width)"
        )
    each = shape[0] // count if flat else shape[1]

    def compute(arrived: Tensor, senders: list[list[Entry]]) -> Tensor:
        rows = torch.stack([torch.cat(of_expert) for of_expert in by_expert(arrived, senders)])
        inner = rows.shape[:1].numel() * rows.shape[1] if flat else rows.shape[:2]
        y = forward(rows.flatten(0, 1) if flat else rows.view(*rows.shape[:2], *shape[2:]))
        if not isinstance(y, Tensor) or y.shape[: -1 if flat else 2] != ((inner,) if flat else inner):
            raise odd_output(sharing.name, y, "one row for each row")
        parts = y.reshape(*rows.shape[:2], prod(y.shape[1 if flat else 2 :])).split([told[0][0] for told in senders], 1)
        return torch.cat([part.flatten(0, 1) for part in parts])

    rows = x.reshape(count * each, prod(shape[1 if flat else 2 :]))
    y = compute_at_owners(rows, [[each]] * count, sharing, CallChain(module, x), compute)
    return y if flat else y.view(count, each, *shape[2:-1], y.shape[-1] // prod(shape[2:-1]))


def _sorted(forward: Callable[..., Any], module: nn.Module, sharing: ExpertSharing, rows: Tensor, sizes: Any) -> Tensor:
    """Compute rows that are sorted by expert, shape ``(rows, width)``; sizes, a list or a tensor, say how many each."""
    counts = [int(size) for size in (sizes.tolist() if isinstance(sizes, Tensor) else sizes)]
    if len(counts) != sharing.count or rows.ndim != 2 or sum(counts) != len(rows):
        raise RuntimeError(
            f"{sharing.name} was called with shape {tuple(rows.shape)} and sizes {counts}; ranks can share it if it is "
            f"called with rows sorted by expert, and {sharing.count} sizes that sum up to their number"
        )

    def compute(arrived: Tensor, senders: list[list[Entry]]) -> Tensor:
        pieces = by_expert(arrived, senders)
        lengths = [sum(map(len, of_expert)) for of_expert in pieces]
        local: Any = sizes.new_tensor(lengths) if isinstance(sizes, Tensor) else type(sizes)(lengths)
        y = forward(torch.cat([piece for of_expert in pieces for piece in of_expert]), local)
        if not isinstance(y, Tensor) or y.ndim != 2 or len(y) != sum(lengths):
            raise odd_output(sharing.name, y, "one row for each row")
        parts = zip(y.split(lengths), pieces, strict=True)
        return by_sender([list(part.split([*map(len, of_expert)])) for part, of_expert in parts])

    return compute_at_owners(rows, [[count] for count in counts], sharing, CallChain(module, rows), compute)


def share_stacked(module: nn.Module, sharing: ExpertSharing) -> None:
    """Let a module that is called with one tensor of all experts' rows compute on the ranks that have the experts."""
    replace_forward(module, torch.compiler.disable(partial(_stacked, module.forward, module, sharing)))


def share_sorted(module: nn.Module, sharing: ExpertSharing) -> None:
    """Let a module that is called with rows sorted by expert and their sizes compute on the ranks that have them."""
    replace_forward(module, torch.compiler.disable(partial(_sorted, module.forward, module, sharing)))
