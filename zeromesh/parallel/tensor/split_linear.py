"""Linear layers split by columns and by rows, whose input gradients travel while weight gradients are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zeromesh.base.linear_arithmetic import Columns, Product, Ticket, WeightGradient, is_keeping
from zeromesh.comm.collectives import Group, Pending
from zeromesh.parallel.tensor.operators import move, scatter

Layer = Callable[[Tensor], Tensor]
"""Layer split by columns, for one pass through an entry: ``(..., inputs)`` to ``(..., part of the outputs)``."""


def _layer(columns: Columns, passage: _Passage) -> Layer:
    ticket, (weight, bias) = Ticket(), (columns.weight, columns.bias)
    how = ticket, columns.transposed, columns.arithmetic
    token = WeightGradient.apply(weight, bias, ticket, passage.advance)  # type: ignore[no-untyped-call]
    return lambda x: Product.apply(x, token, weight, bias, *how)  # type: ignore[no-untyped-call]


def enter(
    x: Tensor, columns: Sequence[Columns], group: Group, tag: int, dim: int | None = None
) -> tuple[Tensor, list[Layer]]:
    """Bring an activation to layers that are split by columns: operator f of "Megatron-LM", or g over the sequence.

    ``x`` is the same on all ranks, or this rank's part of ``dim``. Messages take the tag and the next one.

    Returns:
        The whole activation, and the layers in their order; no layers where they are to be called as they are.
    """
    # Under autocast products are cast where autograd does not see it, anomaly mode reads gradients before
    # their messages have come, and under keeping() weight gradients are computed later.
    plain = torch.is_autocast_enabled(x.device.type) or torch.is_anomaly_enabled() or is_keeping()
    if group.size == 1 or plain or not torch.is_grad_enabled():
        return (move(x, "copy", group, tag) if dim is None else move(x, "gather", group, tag, dim)), []
    # Autograd runs, of the nodes that are ready, the one that was made last. So three kinds of nodes are made here in
    # this order: one that waits for the sum of the input's gradient, one for the gradient of each layer's weight, and
    # one that begins the sum. The sum begins once all layers have added to it, and travels while weight gradients are
    # computed.
    passage = _Passage(group, tag, dim)
    waiting: Tensor = _Wait.apply(x, passage)  # type: ignore[no-untyped-call]
    layers = [_layer(layer_columns, passage) for layer_columns in columns]
    entered: Tensor = _Begin.apply(waiting, passage)  # type: ignore[no-untyped-call]
    return entered, layers


def leave(partial: Tensor, bias: Tensor | None, group: Group, tag: int, dim: int | None = None) -> Tensor:
    """Sum the outputs of layers split by rows over the ranks, operator g, and add the bias; keep a part of ``dim``."""
    # All ranks have the bias, so it is added after the sum. Of a part of the sequence it gets that part's gradient,
    # which is summed over the ranks later, as that of every parameter that is used on parts of the sequence.
    total = move(partial, "sum", group, tag) if dim is None else move(partial, "scatter", group, tag, dim)
    return total if bias is None else total + bias


class _Passage:
    """Gradient of one activation on its way to all ranks."""

    def __init__(self, group: Group, tag: int, dim: int | None) -> None:
        self.group, self.tag, self.dim = group, tag, dim
        self._first: Any = None
        self._second: Pending | None = None

    def begin(self, gradient: Tensor) -> Tensor:
        """Start the sum; the returned tensor holds it after ``finish``."""
        if self.dim is not None:
            part, self._second = scatter(gradient, self.group, self.tag + 1, self.dim)
            return part
        total = gradient.clone(memory_format=torch.contiguous_format)  # others may hold the gradient as it is
        self._first = self.group.begin_all_reduce(total.view(-1), self.tag + 1)
        return total

    def advance(self) -> None:
        """Start the second half of an all-reduce, if there is one under way."""
        if self._first is not None:
            self._first, self._second = None, self._first()

    def finish(self) -> None:
        """Wait for the sum."""
        self.advance()
        if self._second is not None:
            self._second.wait()
            self._second = None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, passage: _Passage) -> Tensor:
        ctx.passage = passage
        same: Tensor = x.view_as(x)
        return same

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.passage.finish()
        return gradient, None


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, passage: _Passage) -> Tensor:
        ctx.passage = passage
        if passage.dim is None:
            same: Tensor = x.view_as(x)
            return same
        return move(x, "gather", passage.group, passage.tag, passage.dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        passage = ctx.passage
        if torch.is_grad_enabled():  # create_graph: this gradient is differentiated itself
            if passage.dim is None:
                return move(gradient, "sum", passage.group, passage.tag + 1), None
            return move(gradient, "scatter", passage.group, passage.tag + 1, passage.dim), None
        return passage.begin(gradient), None
