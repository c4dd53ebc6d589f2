"""Linear layers split by columns and by rows, whose input gradients travel while weight gradients are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from zeromesh.base.in_place import version
from zeromesh.base.linear_arithmetic import Columns, Product, Ticket, WeightGradient, is_keeping
from zeromesh.comm.collectives import Group, Pending
from zeromesh.parallel.head.logits import Using
from zeromesh.parallel.tensor.operators import move, scatter
from zeromesh.parallel.tensor.random_streams import RandomStreams
from zeromesh.parallel.tensor.sequence import Stack
from zeromesh.parallel.tensor.split_guard import Apart
from zeromesh.parallel.tensor.spread_sequence import sequence_dim

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


@dataclass(frozen=True)
class SplitPlace:
    """Arguments of ``apply`` that hooks need, and the random numbers of this rank."""

    group: Group
    streams: RandomStreams
    stacks: tuple[Stack, ...]
    using: Using

    def spreads(self, name: str) -> bool:
        """Return whether a module reads, or gives, a part of the sequence."""
        return any(stack.spreads(name) for stack in self.stacks)


class Entrance:
    """Entrance of an activation into the layers of one module that are split by columns."""

    # Which columns read the same activation is seen when they are called: all that are children of one module and are
    # given the very same tensor share one entry, so the gradient of that activation is summed once.

    def __init__(self, place: SplitPlace, tag: int, separates: bool, spread: bool, opens: bool, name: str) -> None:
        self.layers: list[Callable[[], Columns]] = []  # by number, this rank's part of each
        self.spread = spread
        # Random numbers drawn inside are each rank's own if it separates; it opens if the layers gather a spread
        # sequence themselves, and not the module around them.
        self._place, self._tag, self._separates, self._opens = place, tag, separates, opens
        self.ranks = place.group.size
        self._apart = Apart(name)
        self._key: tuple[Any, int] | None = None
        self._entered: Tensor | None = None
        self._columns: list[Columns] = []  # with which the layers of this pass were made
        self._ready: list[Layer] = []
        self._waiting: set[int] = set()

    def admit(self, x: Tensor, index: int, training: bool) -> tuple[Tensor, Layer | None]:
        """Return the activation that layer ``index`` reads, and the layer for this pass if gradients are computed."""
        if self._separates and training:
            self._place.streams.separate()
        # The same object that was written to since is another activation.
        same_activation = self._key is not None and self._key[0]() is x and self._key[1] == version(x)
        if not same_activation or index not in self._waiting:
            self._enter(x, self.spread and self._opens)
            self._key = ref(x), version(x)
        assert self._entered is not None
        # A weight that functional_call gives the layer for this call is another one.
        same = bool(self._ready) and self.layers[index]().weight is self._columns[index].weight
        entered, layer = self._entered, self._ready[index] if same else None
        self._waiting.discard(index)
        if not self._waiting:
            self.forget()
        return entered, layer

    def open(self, x: Tensor) -> Tensor:
        """Gather the activation of which this rank has a part, for the layers inside."""
        self._enter(x, True)
        assert self._entered is not None
        self._key = ref(self._entered), version(self._entered)
        return self._entered

    def _enter(self, x: Tensor, spread: bool) -> None:
        self._columns = columns = [columns() for columns in self.layers]
        dim = sequence_dim(x) if spread else None
        if dim is not None:
            self._apart.check(x, dim)
        self._entered, self._ready = enter(x, columns, self._place.group, self._tag, dim)
        self._waiting = set(range(len(self.layers)))

    def forget(self) -> None:
        """Forget the activation that entered last: no other layer is to read it."""
        self._key, self._entered, self._columns, self._ready, self._waiting = None, None, [], [], set()


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
