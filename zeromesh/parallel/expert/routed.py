"""Experts that are called with tokens, the experts of each token, and their weights.

Shapes: ``T`` tokens of width ``H``, each with ``K`` of the ``n`` experts; ``R`` ranks with ``n / R`` experts each.
A token travels once to each rank that has some of its experts. There the module's own forward computes what arrived,
one row for each pair of a token and an expert, sorted by expert; the results are weighted and summed to one row for
each that came, and travel back. Messages carry ``rows x (H + K)`` values and ``rows x K`` indices there, and
``rows x H`` values back, where ``rows`` counts pairs of a token and another rank; backward, the same without indices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from zeromesh.comm.collectives import Group
from zeromesh.parallel.activation.choices import same_choice
from zeromesh.parallel.expert.adapted import inner_forward
from zeromesh.parallel.expert.dispatch import Choice, RowExchange
from zeromesh.parallel.expert.grouped import GroupedExperts
from zeromesh.parallel.tensor.operators import move

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class RoutedExperts:
    """Forward of a module whose experts are shared by ranks.

    Args:
        module: the experts; its parameters hold this rank's share, experts ``rank * count / size`` and the next ones.
        exchange: messages among the ranks that share the experts.
        count: number of experts of all ranks.
        beyond: number of experts without parameters that come after them; each rank computes these itself.
        lines: ranks that are given the same tokens, of which each sends its part; None if no others are.
        tag: first of ``TAGS`` tags on ``lines``.
        choices: smallest ``K`` that the module's own forward can be called with.
    """

    TAGS = 3

    def __init__(
        self,
        module: nn.Module,
        exchange: RowExchange,
        count: int,
        beyond: int = 0,
        lines: Group | None = None,
        tag: int = 0,
        choices: int = 1,
    ) -> None:
        self._module, self._exchange, self._beyond = module, exchange, beyond
        self._local = count // exchange.group.size
        self._count = count
        self._lines, self._tag, self._choices = lines, tag, choices
        self._forward = module.forward
        self._signature = inspect.signature(inner_forward(module))
        if lines is not None:
            purposes = (f"{what} of experts {exchange.name!r}" for what in ("choices", "inputs", "weights"))
            lines.purposes.update(zip(range(tag, tag + self.TAGS), purposes, strict=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the sums of the experts' results, weighted, of the shape of the first argument.

        Takes a tensor of shape ``(..., H)``, indices of shape ``(..., K)`` and weights of that shape, in the order and
        by the names of the module's own forward.

        Raises:
            ValueError: other arguments, or ranks that are given the same tokens choose different experts for them.
        """
        hidden, index, weights = self._arguments(*args, **kwargs)
        hidden = same_choice(hidden, index, self._exchange.name)
        shape, width = hidden.shape, index.shape[-1]
        hidden, index, weights = (
            hidden.reshape(-1, shape[-1]),
            index.reshape(-1, width).long(),
            weights.reshape(-1, width),
        )
        if self._lines is None:
            return self._shared(hidden, index, weights).view(shape)
        return self._in_parts(self._lines, hidden, index, weights).view(shape)

    def _arguments(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        values = tuple(self._signature.bind(*args, **kwargs).arguments.values())
        tensors = len(values) == 3 and all(isinstance(value, Tensor) for value in values)
        if not tensors or values[1].is_floating_point() or values[1].shape != values[2].shape:
            shapes = ", ".join(
                str(tuple(value.shape)) if isinstance(value, Tensor) else repr(value) for value in values
            )
            raise ValueError(
                f"experts {self._exchange.name!r} were given ({shapes}), but ranks share experts that are called with "
                "tokens (T, H), indices (T, K) and weights (T, K)"
            )
        return values

    def _in_parts(self, lines: Group, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the results of all tokens, of which each rank of a line sends its part."""
        different, count = _different(lines, index, self._tag), len(index)
        if padding := -count % lines.size:
            hidden, weights = (F.pad(x, (0, 0, 0, padding)) for x in (hidden, weights))
            index = F.pad(index, (0, 0, 0, padding), value=self._count + self._beyond)
        hidden, weights = move(hidden, "split", lines, self._tag + 1), move(weights, "split", lines, self._tag + 2)
        mine = self._shared(hidden, index.chunk(lines.size)[lines.rank], weights, different)
        return move(mine, "join", lines, self._tag + 1)[:count]

    def _shared(self, hidden: Tensor, index: Tensor, weights: Tensor, different: int = 0) -> Tensor:
        """Return the results of this rank's tokens, unless a rank of some line was ``different``."""
        group, local = self._exchange.group, self._local
        # Experts without parameters are computed here; what is beyond all experts is nobody's.
        owner = (index // local).masked_fill(index >= self._count, group.rank)
        owner = owner.masked_fill(index >= self._count + self._beyond, group.size)
        pairs = owner.new_zeros(group.size + 1).scatter_add_(0, owner.flatten(), torch.ones_like(owner).flatten())
        needs = torch.zeros(len(index), group.size + 1, dtype=torch.bool, device=index.device)
        needs = needs.scatter_(1, owner, True)[:, : group.size]
        counts = torch.stack([needs.sum(0), pairs[: group.size], torch.full_like(pairs[: group.size], different)], 1)
        contents = (hidden.shape[1], index.shape[1], DTYPES.index(hidden.dtype), DTYPES.index(weights.dtype))
        (sent, _, _), (received, arriving, differing) = (x.T.tolist() for x in self._exchange.counts(counts, contents))
        if rank := max(differing):
            raise ValueError(
                f"experts {self._exchange.name!r}: rank {rank} of the axis tensor has chosen other experts than rank 0 "
                "for the same tokens. The router must compute the same bits on these ranks: keep it whole (the style "
                "replicate), and give noise and dropout before it one random state"
            )
        places = torch.nonzero_static(needs.T, size=sum(sent))
        tokens = places[:, 1]
        # Experts as the receiver numbers them; -1 for those that it has not.
        numbers = torch.where(index < self._count, index % local, index - self._count + local).to(torch.int32)
        numbers = numbers[tokens].masked_fill(owner[tokens] != places[:, :1], -1)
        travels = Choice.of(tokens, needs.sum(1))
        out = travels.take(hidden), travels.take(weights), numbers
        # Also without rows: the weight makes the exchange differentiable, which all ranks have to differentiate then.
        grouped = GroupedExperts.of(self._module, self._forward)
        late = None if grouped is None else grouped.late(hidden.dtype)
        rows, factors, numbers, *first = self._exchange.send(out, sent, received, late=late)
        compute = (
            self._by_forward if grouped is None else partial(grouped.compute, late=late, first=next(iter(first), None))
        )
        here = self._compute(rows, factors, numbers, sum(arriving), compute)
        (back,) = self._exchange.send([here], received, sent, back=True)
        return travels.add_up(back)

    def _compute(
        self,
        rows: Tensor,
        weights: Tensor,
        index: Tensor,
        pairs: int,
        compute: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return the sums for rows that arrived, over those of their experts that are here."""
        if not pairs:
            return _nothing(rows, self._module)
        absent = index < 0
        experts, order = index.masked_fill(absent, self._local + self._beyond).flatten().sort(stable=True)
        experts, order = experts[:pairs].long(), order[:pairs]
        choice = Choice.of(order // index.shape[1], (~absent).sum(1))
        results = compute(choice.take(rows), experts)
        factors = weights.flatten().index_select(0, order)
        return choice.add_up(results * factors[:, None]).to(rows.dtype)

    def _by_forward(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Return the results of rows by the module's own forward."""
        ones = rows.new_zeros(len(rows), self._choices)
        ones[:, 0] = 1
        results: Tensor = self._forward(rows, experts[:, None].expand_as(ones), ones)
        return results.reshape(len(rows), -1)


def _nothing(rows: Tensor, module: nn.Module) -> Tensor:
    """Return no rows, by which the parameters of a module get gradients of zero."""
    names = [(inner, name) for inner in module.modules() for name in (*inner._parameters, *_parametrized(inner))]
    tensors = [getattr(inner, name) for inner, name in names]
    touched: Tensor = _Nothing.apply(rows, *(x for x in tensors if x is not None))  # type: ignore[no-untyped-call]
    return touched


def _parametrized(module: nn.Module) -> Iterator[str]:
    return iter(cast(nn.ModuleDict, module.parametrizations)) if is_parametrized(module) else iter(())


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        same: Tensor = rows.view_as(rows)
        return same

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return gradient, *(torch.zeros_like(x) if needs else None for x, needs in needed)


def _different(lines: Group, index: Tensor, tag: int) -> int:
    """Return the first rank that has other choices than rank 0, or 0. Collective among ranks of the same tokens."""
    flat = index.flatten().to(torch.int64)
    # Sums of integers wrap around, the same on every device.
    places = torch.arange(1, len(flat) + 1, device=flat.device) * 0x9E3779B97F4A7C1
    sums = lines.exchange(torch.stack([flat.new_full((), len(flat)), ((flat + 1) * places).sum()]), tag)
    return next((rank for rank, line in enumerate(sums) if not torch.equal(line, sums[0])), 0)
