"""Linear layers whose weight gradients are computed at another time than their input gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
class Ticket:
    """What a layer leaves for the node of its weight's gradient: its input, and the gradient of its output."""

    operands: tuple[Tensor, Tensor] | None = None


def multiply(x: Tensor, columns: Columns) -> Tensor:
    """What a layer gives, as plain torch computes it."""
    weight = columns.weight.t() if columns.transposed else columns.weight
    return torch.nn.functional.linear(x, weight, columns.bias)


class WeightGradient(torch.autograd.Function):
    """Nothing but the place in autograd's order, or the backward, in which a weight's gradient is computed."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, ticket: Ticket, transposed: bool, then: Callable[[], None] | None
    ) -> Tensor:
        """An empty tensor, whose gradient leads here; ``then`` is called when the weight's is there."""
        ctx.settings = ticket, transposed, then
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """Of weight and bias, if the product has left what they are made of."""
        ticket, transposed, then = ctx.settings
        if ticket.operands is None:  # the product gave the gradients itself
            return None, None, None, None, None
        x, gradient = ticket.operands
        ticket.operands = None
        weight, bias = _gradients(x, gradient, transposed, ctx.needs_input_grad[:2])
        if then is not None:
            then()
        return weight, bias, None, None, None


class Product(torch.autograd.Function):
    """What a layer gives, whose backward leaves the weight's gradient to the node of ``WeightGradient``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, token: Tensor | None, weight: Tensor, bias: Tensor | None, ticket: Ticket, transposed: bool
    ) -> Tensor:
        """Of ``x``; without a ``token`` the ticket's node must be run by somebody."""
        ctx.save_for_backward(x, weight)
        ctx.settings = ticket, transposed
        return multiply(x, Columns(weight, bias, transposed))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Of ``x``; also of the weight and the bias where they cannot be left for later."""
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
