"""Linear layers split by columns and by rows, whose input gradients travel while weight gradients are computed.

An activation enters a part of the model that is split by columns once, however many layers read it. Of nodes that are
ready, autograd runs the one that was made last. So three kinds are made at the entry, in this order: one that waits for
the sum of the input's gradient, one for the gradient of each layer's weight, and one that begins the sum. Backward the
sum begins as soon as all layers have given their part of it, and travels while the weights' gradients are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeromesh.dist.collectives import Group, Pending
from zeromesh.tensor.operators import move, scatter


@dataclass(frozen=True)
class Columns:
    """The part of a linear layer that this rank has.

    Attributes:
        weight: shape ``(part of the outputs, inputs)``; the other way round if ``transposed``.
        bias: shape ``(part of the outputs,)``, or None.
        transposed: as in GPT-2's Conv1D.
    """

    weight: Tensor
    bias: Tensor | None
    transposed: bool = False


@dataclass
class _Ticket:
    """What a layer leaves for the node of its weight's gradient: its input, and the gradient of its output."""

    operands: tuple[Tensor, Tensor] | None = None


class Layer:
    """A layer for one pass through an entry."""

    def __init__(self, columns: Columns, passage: _Passage) -> None:
        self._columns, self._ticket = columns, _Ticket()
        self._token: Tensor = _WeightGradient.apply(  # type: ignore[no-untyped-call]
            columns.weight, columns.bias, self._ticket, columns.transposed, passage
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Shape ``(..., inputs)`` to ``(..., part of the outputs)``."""
        columns = self._columns
        y: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            x, self._token, columns.weight, columns.bias, self._ticket, columns.transposed
        )
        return y


def enter(
    x: Tensor, columns: Sequence[Columns], group: Group, tag: int, dim: int | None = None
) -> tuple[Tensor, list[Layer]]:
    """Bring an activation to layers that are split by columns.

    Args:
        x: the same on all ranks; with ``dim``, this rank's part of that dim.
        columns: the layers that will read it, or something made of it.
        group: the ranks along the tensor axis.
        tag: distinguishes operators that are under way at the same time; this one, and the next, are used.
        dim: which one is spread over the ranks outside (sequence parallelism); None: none is.

    Returns:
        The whole activation, and the layers in their order; none where there are no gradients to be computed, or one
        rank only, and layers are to be called as they are. A layer that is called otherwise works, too.
    """
    # Under autocast products are cast where autograd does not see it.
    plain = torch.is_autocast_enabled(x.device.type) or torch.is_anomaly_enabled()
    if group.size == 1 or plain or not torch.is_grad_enabled():
        return (move(x, "copy", group, tag) if dim is None else move(x, "gather", group, tag, dim)), []
    passage = _Passage(group, tag, dim)
    waiting: Tensor = _Wait.apply(x, passage)  # type: ignore[no-untyped-call]
    layers = [Layer(one, passage) for one in columns]
    entered: Tensor = _Begin.apply(waiting, passage)  # type: ignore[no-untyped-call]
    return entered, layers


def multiply(x: Tensor, columns: Columns) -> Tensor:
    """What a layer gives, as plain torch computes it."""
    weight = columns.weight.t() if columns.transposed else columns.weight
    return torch.nn.functional.linear(x, weight, columns.bias)


def leave(partial: Tensor, bias: Tensor | None, group: Group, tag: int, dim: int | None = None) -> Tensor:
    """Sum what layers split by rows give on each rank, and add the bias, which all ranks have, once.

    With ``dim`` this rank keeps its part of it only; the bias then gets the gradient of that part, which is to be
    summed over the ranks as that of every parameter that is used on parts of the sequence.
    """
    total = move(partial, "sum", group, tag) if dim is None else move(partial, "scatter", group, tag, dim)
    return total if bias is None else total + bias


class _Passage:
    """The gradient of one activation on its way to all ranks."""

    def __init__(self, group: Group, tag: int, dim: int | None) -> None:
        self.group, self.tag, self.dim = group, tag, dim
        self._first: Any = None
        self._second: Pending | None = None

    def begin(self, gradient: Tensor) -> Tensor:
        """Start the sum; what is returned holds it after ``finish``."""
        if self.dim is not None:
            found, self._second = scatter(gradient, self.group, self.tag + 1, self.dim)
            return found
        total = gradient.clone(memory_format=torch.contiguous_format)
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


class _WeightGradient(torch.autograd.Function):
    """Nothing but the place in autograd's order at which a weight's gradient is computed."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, ticket: _Ticket, transposed: bool, passage: _Passage
    ) -> Tensor:
        ctx.settings = ticket, transposed, passage
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        ticket, transposed, passage = ctx.settings
        if ticket.operands is None:  # the product gave the gradients itself
            return None, None, None, None, None
        x, gradient = ticket.operands
        ticket.operands = None
        weight, bias = _gradients(x, gradient, transposed, ctx.needs_input_grad[:2])
        passage.advance()
        return weight, bias, None, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, token: Tensor, weight: Tensor, bias: Tensor | None, ticket: _Ticket, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = ticket, transposed
        return multiply(x, Columns(weight, bias, transposed))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (ticket, transposed) = ctx.saved_tensors, ctx.settings
        of_x = gradient @ (weight.t() if transposed else weight) if ctx.needs_input_grad[0] else None
        token = gradient.new_empty(0) if ctx.needs_input_grad[1] else None
        if torch.is_grad_enabled() or ticket.operands is not None:  # create_graph, or called several times
            of_weight, of_bias = _gradients(x, gradient, transposed, ctx.needs_input_grad[2:4])
            return of_x, token, of_weight, of_bias, None, None
        ticket.operands = x, gradient
        return of_x, token, None, None, None, None


def _gradients(
    x: Tensor, gradient: Tensor, transposed: bool, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    inputs, outputs = x.flatten(0, -2), gradient.flatten(0, -2)
    weight = bias = None
    if needs[0]:
        weight = inputs.t() @ outputs if transposed else outputs.t() @ inputs
    if needs[1]:
        bias = outputs.sum(0)
    return weight, bias
