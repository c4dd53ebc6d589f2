"""Linear layers: the arithmetic of their three products, and weight gradients that are computed at another time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

ARITHMETIC = "_zeromesh_arithmetic"  # attribute of a linear layer whose products are not torch's own


class Arithmetic(Protocol):
    """The three products of a linear layer. A weight has shape ``(outputs, inputs)``."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output of ``x``, shape ``(..., inputs)``, and tensors that are kept for the backward."""

    def receive(self, gradient: Tensor) -> Any:
        """Return the output's gradient as both products of the backward read it."""

    def of_input(self, received: Any, weight: Tensor, saved_tensors: Sequence[Tensor]) -> Tensor:
        """Return the gradient of the input."""

    def of_weight(self, received: Any, x: Tensor, saved_tensors: Sequence[Tensor], transposed: bool) -> Tensor:
        """Return the gradient of the weight, in the layer's own order of dims if ``transposed``."""


class Plain:
    """Products of torch in the dtype of the operands."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See ``Arithmetic``."""
        return torch.nn.functional.linear(x, weight, bias), ()

    def receive(self, gradient: Tensor) -> Tensor:
        """See ``Arithmetic``."""
        return gradient

    def of_input(self, received: Tensor, weight: Tensor, saved_tensors: Sequence[Tensor]) -> Tensor:
        """See ``Arithmetic``."""
        return received @ weight

    def of_weight(self, received: Tensor, x: Tensor, saved_tensors: Sequence[Tensor], transposed: bool) -> Tensor:
        """See ``Arithmetic``."""
        inputs, outputs = x.flatten(0, -2), received.flatten(0, -2)
        return inputs.t() @ outputs if transposed else outputs.t() @ inputs


PLAIN = Plain()


@dataclass(frozen=True)
class Columns:
    """The part of a linear layer that this rank has."""

    weight: Tensor  # shape (part of the outputs, inputs); the other way round if transposed
    bias: Tensor | None  # shape (part of the outputs,)
    transposed: bool = False  # as in GPT-2's Conv1D
    arithmetic: Arithmetic = PLAIN


def is_transposed(module: nn.Module) -> bool:
    """Return whether it is a linear layer whose weight has shape (inputs, outputs), as GPT-2's Conv1D."""
    return isinstance(module, transposed_class())


def transposed_class() -> tuple[type[nn.Module], ...]:
    """Return GPT-2's class of linear layers, if transformers has been imported."""
    kind = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return () if kind is None else (kind,)


def input_of(args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> Tensor:
    """Return the only argument of a layer's call, which layers of torch and of transformers name differently."""
    (x,) = (*args, *kwargs.values())
    return x


def columns_of(module: Any) -> Columns:
    """Return what this rank has of a linear layer now."""
    return Columns(module.weight, module.bias, is_transposed(module), vars(module).get(ARITHMETIC, PLAIN))


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
                "their own, as zb-h1 and 1f1b have, that cannot be: choose another schedule, such as gpipe"
            )


# Node where the gradient of a weight can be asked for, and its computation, for each call of a layer.
Kept = list[tuple[Tensor, Ticket]]


# The last one holds for the whole process, and not for a thread: autograd's own threads may run a backward and call
# layers again.
_modes: list[Kept | None] = [None]


@contextmanager
def keeping(tickets: Kept | None) -> Iterator[None]:
    """Let layers leave their weights' gradients for later in this context, and add them to ``tickets``; None: not."""
    _modes.append(tickets)
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
    tickets = _modes[-1]
    if tickets is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    ticket = Ticket(is_kept=True)
    token: Tensor = WeightGradient.apply(weight, bias, ticket, None)  # type: ignore[no-untyped-call]
    tickets.append((token, ticket))
    return ticket


def multiply(x: Tensor, columns: Columns) -> Tensor:
    """Return a layer's output in its arithmetic; ``keeping`` says when its weight gradient is computed."""
    weight, bias = columns.weight, columns.bias
    ticket = postponed(weight, bias) if x.requires_grad and x.ndim > 1 else None
    if ticket is None and columns.arithmetic is PLAIN:
        return torch.nn.functional.linear(x, weight.t() if columns.transposed else weight, bias)
    if ticket is not None:  # the product itself gives them no gradient
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    operands = autocast(x), None, autocast(weight), None if bias is None else autocast(bias)
    y: Tensor = Product.apply(*operands, ticket, columns.transposed, columns.arithmetic)  # type: ignore[no-untyped-call]
    return y


def autocast(value: Tensor) -> Tensor:
    """Return a tensor in the dtype of torch's autocast, where that is on."""
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
        weight, bias = (None if tensor is None else tensor.to(ctx.dtype) for tensor in (weight, bias))
        if then is not None:
            then()
        return weight, bias, None, None


class Product(torch.autograd.Function):
    """Linear layer whose backward leaves the weight gradient to the node of ``WeightGradient``, if it has a ticket."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        token: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        ticket: Ticket | None,
        transposed: bool,
        arithmetic: Arithmetic,
    ) -> Tensor:
        """Return the layer's output; with a ticket and no ``token`` somebody must run the ticket's node."""
        y, saved_tensors = arithmetic.output(x, weight.t() if transposed else weight, bias)
        # Only the weight's gradient reads the input: adapters on frozen layers would keep that of every layer.
        keeps = ctx.needs_input_grad[2] or ticket is not None
        ctx.save_for_backward(x if keeps else None, weight, *saved_tensors)
        ctx.settings = ticket, transposed, arithmetic
        # A view that was made here could not be written to, as activations are by ReLU(inplace=True).
        return y.data if not torch.compiler.is_compiling() and y._is_view() else y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of ``x``, and of weight and bias where they are not postponed."""
        (x, weight, *saved_tensors), (ticket, transposed, arithmetic) = ctx.saved_tensors, ctx.settings
        received = arithmetic.receive(gradient)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = arithmetic.of_input(received, weight.t() if transposed else weight, saved_tensors)
        token = gradient.new_empty(0) if ctx.needs_input_grad[1] else None

        def gradients(needs: Sequence[bool]) -> Gradients:
            of_weight = arithmetic.of_weight(received, x, saved_tensors, transposed) if needs[0] else None
            return of_weight, gradient.reshape(-1, gradient.shape[-1]).sum(0) if needs[1] else None

        # With create_graph, or called several times, the operands of one call would not be all.
        if ticket is None or torch.is_grad_enabled() or ticket.due is not None:
            if ticket is not None:
                ticket.refuse_second()
            return of_x, token, *gradients(ctx.needs_input_grad[2:4]), None, None, None
        ticket.put(gradients)
        return of_x, token, None, None, None, None, None
