"""RowExchange of rows between the ranks that share experts, forward and backward.

A rank says first how many rows it has for each of the others, which costs one read of the device by the host, and then
sends the rows, one message to each rank. What a rank has nothing for gets no message. Every sum runs in one order, so
that its bits are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeromesh.comm.collectives import NARROW, Group, Pending


class RowExchange:
    """Messages of the experts of one name among the ranks that share them; they take ``TAGS`` tags from ``tag`` on.

    Ranks call the methods in one order, and those of an exchange of the same name at the same time.
    """

    TAGS = 3

    def __init__(self, group: Group, tag: int, name: str = "") -> None:
        self.group, self.tag, self.name = group, tag, name
        self._contents: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}  # a copy to a GPU waits for its stream
        purposes = (f"{what} experts {name!r}" for what in ("numbers of rows for", "rows for", "results of"))
        group.purposes.update(zip(range(tag, tag + self.TAGS), purposes, strict=True))

    def counts(self, counts: Tensor, contents: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Return what this rank sends to each rank, and what each sends to it, on the host. Collective.

        Args:
            counts: integers of this rank for each rank, shape ``(size, m)``, on any device.
            contents: numbers that all ranks must give alike, such as the width of a row.

        Returns:
            Two int64 matrices of shape ``(size, m)``.

        Raises:
            ValueError: the ranks are at different experts, or give different ``contents``.
        """
        key = counts.device, (self.tag, *contents)
        equal = self._contents.get(key)
        if equal is None:
            equal = self._contents[key] = torch.tensor(key[1], device=counts.device)
        rows = self.group.exchange(torch.cat([counts.reshape(-1).to(equal.dtype), equal]), self.tag)
        numbers, equals = rows[:, : counts.numel()].unflatten(1, counts.shape), rows[:, counts.numel() :]
        if bool((equals != equals[0]).any()):
            lines = (f"rank {rank} is at {self._said(*line)}" for rank, line in enumerate(equals.tolist()))
            raise ValueError(
                f"ranks that share experts must call the same ones in the same order, with rows of one width and "
                f"dtype; along the axis {self.group.axis}: {'; '.join(lines)}. A model whose code takes another way "
                "on some ranks cannot share its experts"
            )
        return numbers[self.group.rank], numbers[:, self.group.rank]

    def _said(self, tag: int, *contents: int) -> str:
        return f"{self.group.purposes.get(tag, f'tag {tag}')} {contents}"

    def send(
        self,
        tensors: Sequence[Tensor],
        sent: Sequence[int],
        received: Sequence[int],
        back: bool = False,
        late: Late | None = None,
    ) -> tuple[Tensor, ...]:
        """Send rows, sorted by the ranks that get them; return those of all ranks, sorted by sender. Collective.

        It can be differentiated any number of times; gradients travel the other way.

        Args:
            tensors: each of shape ``(sum(sent), ...)``, of any dtype; they travel together.
            sent: number of rows for each rank.
            received: number of rows from each rank, shape of the results: ``(sum(received), ...)``.
            back: True if they are results, which return to where the rows came from.
            late: a weight that the rows are multiplied by; the last result stands for it.
        """
        tensors = [*tensors] if late is None else [*tensors, late.weight]
        results: tuple[Tensor, ...] = _Send.apply(self, sent, received, back, late, *tensors)  # type: ignore[no-untyped-call]
        return results


class Late:
    """A weight that rows are multiplied by, whose gradient is computed while gradients of rows travel."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._gradient: Callable[[], Tensor] | None = None

    def postpone(self, gradient: Callable[[], Tensor]) -> None:
        """Take what computes the gradient, in the backward of the product, which returns a placeholder for it."""
        self._gradient = gradient

    def take_gradient(self) -> Callable[[], Tensor] | None:
        """Return what computes the gradient, once; None if the backward of the product has computed it."""
        gradient, self._gradient = self._gradient, None
        return gradient


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: RowExchange,
        sent: Sequence[int],
        received: Sequence[int],
        back: bool,
        late: Late | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.settings, ctx.late = (exchange, received, sent, back), late
        rows = tensors if late is None else tensors[:-1]
        results, sending = _start(exchange, rows, sent, received, back)
        sending.wait()
        # torch's checkpoint ends a recomputation with the last tensor that is saved, which must come behind the
        # messages on all ranks, also on one that has no rows to compute with.
        ctx.save_for_backward(*(() if back else [results[0].new_empty(0)]))
        ctx.differentiable = [x.is_floating_point() for x in rows]
        ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
        return results if late is None else (*results, late.weight.view_as(late.weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        floating = [x for x, is_floating in zip(gradients, ctx.differentiable, strict=False) if is_floating]
        of_weight: tuple[Tensor, ...] = gradients[len(ctx.differentiable) :]
        postponed = None if ctx.late is None else ctx.late.take_gradient()
        if postponed is None:
            returned = _Send.apply(*ctx.settings, None, *floating)  # type: ignore[no-untyped-call]
        else:
            exchange, sent, received, back = ctx.settings
            returned, sending = _start(exchange, floating, sent, received, back)
            of_weight = (postponed(),)
            sending.wait()
        rows = iter(returned)
        of_rows = (next(rows) if is_floating else None for is_floating in ctx.differentiable)
        return (*[None] * 5, *of_rows, *of_weight)


def _start(
    exchange: RowExchange, tensors: Sequence[Tensor], sent: Sequence[int], received: Sequence[int], back: bool
) -> tuple[tuple[Tensor, ...], Pending]:
    """Start to send rows; return where those of all ranks go, which are there after the pending work."""
    group = exchange.group
    results = tuple(x.new_empty(sum(received), *x.shape[1:]) for x in tensors)
    parts = [*zip(*(x.contiguous().split([*sent]) for x in tensors), strict=True)]
    landings = [*zip(*(result.split([*received]) for result in results), strict=True)]
    others = [(group.rank + distance) % group.size for distance in range(1, group.size)]
    sending = group.send_and_receive(
        {peer: parts[peer] for peer in others if sent[peer]},
        {peer: landings[peer] for peer in reversed(others) if received[peer]},
        exchange.tag + 1 + back,
        "all_to_all",
    )
    for part, landing in zip(parts[group.rank], landings[group.rank], strict=True):
        landing.copy_(part)
    return results, sending


@dataclass(frozen=True)
class Choice:
    """Rows of a tensor, some of them several times; adding them up again is the transpose of taking them."""

    rows: Tensor  # int64, shape (m,): which row of n each is
    order: Tensor  # int64, shape (m,): places in rows, those of row 0 first, each row's in ascending order
    starts: Tensor  # int64, shape (n,): where the places of each row begin in order

    @classmethod
    def of(cls, rows: Tensor, times: Tensor) -> Choice:
        """Return the choice of ``rows``; ``times`` says how often each row is among them, shape ``(n,)``."""
        return cls(rows, rows.argsort(stable=True), times.cumsum(0) - times)

    def take(self, x: Tensor) -> Tensor:
        """Return the rows of ``x``, of shape ``(n, ...)``: shape ``(m, ...)``."""
        return _take(x, self, False)

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sums of what belongs to each row, shape ``(n, ...)``, of ``x``: shape ``(m, ...)``.

        Terms are added in their order in ``x``; 16-bit values in fp32, and rounded once.
        """
        return _take(x, self, True)


def _take(x: Tensor, choice: Choice, transposed: bool) -> Tensor:
    taken: Tensor = _Take.apply(x, choice, transposed)  # type: ignore[no-untyped-call]
    return taken


class _Take(torch.autograd.Function):
    # torch's own index_select adds its gradients up in the order in which a GPU's threads come.
    @staticmethod
    def forward(ctx: Any, x: Tensor, choice: Choice, transposed: bool) -> Tensor:
        ctx.settings = (choice, not transposed)
        if not transposed:
            return x.index_select(0, choice.rows)
        if not len(x):
            return x.new_zeros(len(choice.starts), *x.shape[1:])
        # On the CPU its sums of 16-bit values are rounded half up, which would add up.
        wide = x.float() if x.dtype in NARROW and x.device.type == "cpu" else x
        return F.embedding_bag(choice.order, wide, choice.starts, mode="sum").to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _take(gradient, *ctx.settings), None, None
