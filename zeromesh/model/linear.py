"""Linear layers whose weight gradients are computed at another time than their input gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Columns:
    """The part of a linear layer that this rank has."""

    weight: Tensor  # shape (part of the outputs, inputs); the other way round if transposed
    bias: Tensor | None  # shape (part of the outputs,)
    transposed: bool = False  # as in GPT-2's Conv1D


Gradients = tuple[Tensor | None, Tensor | None]
"""Gradients of a weight and a bias."""

Due = Callable[[Sequence[bool]], Gradients]
"""Computes a layer's weight gradients, given which of the two are needed."""


@dataclass
class Ticket:
    """Place where a layer's backward leaves the computation of its weight gradients."""

    due: Due | None = None
    is_kept: bool = False  # the node is run later, by ``keeping``'s user, and nobody else gives the weight a gradient

    def put(self, due: Due) -> None:
        """Leave the computation."""
        self.due = due

    def take(self) -> Due | None:
        """Return the computation, which is given up; None if the product gave the gradients itself."""
        due, self.due = self.due, None
        return due

    def refuse_second(self) -> None:
        """Raise RuntimeError if the computation is kept for later: that of one call would not be all."""
        if self.is_kept:
            raise RuntimeError(
                "a gradient through a linear layer is computed twice, or with create_graph, as by "
                "torch.autograd.grad inside of a forward; where a pipeline's schedule has weight gradients of "
                "their own, as zb-h1 and zb-v have, that cannot be: choose another schedule, such as 1f1b"
            )


# Node where the gradient of a weight can be asked for, and its computation, for each call of a layer.
Kept = list[tuple[Tensor, Ticket]]


# The last one holds for the whole process, and not for a thread: autograd's own threads may run a backward and call
# layers again.
_modes: list[Kept | None] = [None]


@contextmanager
def keeping(kept: Kept | None) -> Iterator[None]:
    """Let layers leave their weights' gradients for later in this context, and add them to ``kept``; None: not."""
    _modes.append(kept)
    try:
        yield
    finally:
        _modes.pop()


def is_keeping() -> bool:
    """Return whether weights' gradients are left for later."""
    return _modes[-1] is not None


def postponed(weight: Tensor, bias: Tensor | None) -> Ticket | None:
    """Return a ticket for weight gradients that are computed later; None outside of ``keeping``, or if there are none.

    The product itself is then to be given detached operands, and its backward to put the computation on the ticket.
    """
    kept = _modes[-1]
    if kept is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    ticket = Ticket(is_kept=True)
    token: Tensor = WeightGradient.apply(weight, bias, ticket, None)  # type: ignore[no-untyped-call]
    kept.append((token, ticket))
    return ticket


def multiply(x: Tensor, columns: Columns) -> Tensor:
    """Return a layer's output, as plain torch computes it; ``keeping`` says when its weight gradient is computed."""
    weight, bias = columns.weight, columns.bias
    ticket = postponed(weight, bias) if x.requires_grad and x.ndim > 1 else None
    if ticket is None:
        return torch.nn.functional.linear(x, weight.t() if columns.transposed else weight, bias)
    # Detached: the product itself gives them no gradient.
    fixed = _cast(weight.detach()), None if bias is None else _cast(bias.detach())
    y: Tensor = Product.apply(_cast(x), None, *fixed, ticket, columns.transposed)  # type: ignore[no-untyped-call]
    return y


def _cast(value: Tensor) -> Tensor:
    """Cast a tensor as autocast does, where it is on."""
    device = value.device.type
    if not torch.is_autocast_enabled(device) or value.dtype is torch.float64:
        return value
    return value.to(torch.get_autocast_dtype(device))


class WeightGradient(torch.autograd.Function):
    """Place in autograd's order, or in the backward, in which a weight's gradient is computed."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, ticket: Ticket, then: Callable[[], None] | None
    ) -> Tensor:
        """Return an empty tensor, whose gradient leads here; ``then`` is called when the weight's is there."""
        ctx.settings, ctx.dtype = (ticket, then), weight.dtype
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of weight and bias, if the product has left their computation."""
        ticket, then = ctx.settings
        if (due := ticket.take()) is None:
            return None, None, None, None
        weight, bias = due(ctx.needs_input_grad[:2])
        weight, bias = (None if one is None else one.to(ctx.dtype) for one in (weight, bias))
        if then is not None:
            then()
        return weight, bias, None, None


class Product(torch.autograd.Function):
    """Linear layer whose backward leaves the weight gradient to the node of ``WeightGradient``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, token: Tensor | None, weight: Tensor, bias: Tensor | None, ticket: Ticket, transposed: bool
    ) -> Tensor:
        """Return the layer's output; without a ``token`` somebody must run the ticket's node."""
        ctx.save_for_backward(x, weight)
        ctx.settings = ticket, transposed
        return multiply(x, Columns(weight, bias, transposed))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of ``x``, and of weight and bias where they cannot be postponed."""
        (x, weight), (ticket, transposed) = ctx.saved_tensors, ctx.settings
        of_x = gradient @ (weight.t() if transposed else weight) if ctx.needs_input_grad[0] else None
        token = gradient.new_empty(0) if ctx.needs_input_grad[1] else None
        # With create_graph, or called several times, the operands of one call would not be all.
        if torch.is_grad_enabled() or ticket.due is not None:
            ticket.refuse_second()
            of_weight, of_bias = _gradients(x, gradient, transposed, ctx.needs_input_grad[2:4])
            return of_x, token, of_weight, of_bias, None, None
        ticket.put(partial(_gradients, x, gradient, transposed))
        return of_x, token, None, None, None, None


def _gradients(x: Tensor, gradient: Tensor, transposed: bool, needs: Sequence[bool]) -> Gradients:
    inputs, outputs = x.flatten(0, -2), gradient.flatten(0, -2)
    weight = bias = None
    if needs[0]:
        weight = inputs.t() @ outputs if transposed else outputs.t() @ inputs
    if needs[1]:
        bias = outputs.sum(0)
    return weight, bias
