"""Attention of a sequence that is spread over ranks, in the order of ``sequence_order.py``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from zeromesh.base.linear_arithmetic import autocast
from zeromesh.comm.collectives import Group, Pending
from zeromesh.parallel.context import attention_block as blocks
from zeromesh.parallel.context.attention_block import AttentionBlock
from zeromesh.parallel.context.pair_rules import CausalPairs, PairBlock
from zeromesh.parallel.tensor.operators import move

# Bytes that each rank sends, for r groups of u ranks that share heads, and sizes of its parts of q, k, v and the result
# in their dtype:
# heads: (q + k + v + result) (u-1)/u, and the same in the backward; repeated key heads count as often as they are.
# ring: (k + v) (r-1), and in the backward the same, with (r-1) times their gradients in at least fp32. Of other masks
# than causal, the number of groups at those distances from which some group sees keys stands for r-1.
STRATEGIES = ("ring", "ulysses")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
AUTO = "auto"  # ring for plain causal attention; for all other as many ranks share heads as can


class Subgroup:
    """Some ranks of a group, which send to each other by their places among these."""

    def __init__(self, group: Group, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, ranks
        self.size, self.rank = len(ranks), ranks.index(group.rank)  # number of them, and place of this one

    def send_and_receive(self, sends: dict[int, Tensor], receives: dict[int, Tensor], tag: int, what: str) -> Pending:
        """See ``Group.send_and_receive``."""
        sends, receives = ({self._ranks[place]: x for place, x in messages.items()} for messages in (sends, receives))
        return self._group.send_and_receive(sends, receives, tag, what)


Ranks = Group | Subgroup


def degree_of(strategy: str, ranks: int, heads: int | None, degree: int = 0) -> int:
    """Return how many of the ranks share heads, neighbours each; 0: as many as the strategy takes.

    ``heads`` are those of each layer of the model, None if they are not known. Raise ValueError for a degree that does
    not divide the ranks and the heads, or of another strategy.
    """
    if degree and (ranks % degree or (strategy == "ulysses" and degree != ranks)):
        works = [n for n in range(1, ranks + 1) if ranks % n == 0 and (n == ranks or strategy != "ulysses")]
        raise ValueError(
            f"context_parallel.ulysses_degree is {degree}, but of {ranks} context-parallel ranks under the strategy "
            f"{strategy}, {' or '.join(map(str, works))} can share heads: set it to one of these, or leave it out"
        )
    chosen = degree or {"ring": 1, "ulysses": ranks, AUTO: math.gcd(ranks, heads or ranks)}[strategy]
    if heads is not None:
        require_heads(heads, chosen)
    return chosen


def attend(
    degree: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    tag: int,
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute attention where ``degree`` neighbours share heads, and keys and values go around these groups of ranks.

    Arguments are those of ``by_heads`` and, as ``options``, of ``ring``; ``sinks`` are those of all heads.
    """
    # The tokens of such neighbours together are the part that one rank has where there are as many ranks as groups.
    first, place = group.rank - group.rank % degree, group.rank % degree
    sharing = Subgroup(group, range(first, first + degree))
    if sinks is not None:
        options["sinks"] = sinks.flatten().chunk(degree)[place]
    passing = Subgroup(group, range(place, group.size, degree))
    return by_heads(partial(ring, group=passing, tag=tag, **options), q, k, v, sharing, tag)


def by_heads(run: Attention, q: Tensor, k: Tensor, v: Tensor, group: Ranks, tag: int) -> Tensor:
    """Compute attention with the heads spread over the ranks (Jacobs et al., "DeepSpeed Ulysses", 2023).

    Args:
        run: attention of some heads to all tokens, of (batch, heads, sequence, width) in the order of the sequence.
        q: this rank's part of the queries, (batch, heads, sequence, width).
        k: the same of the keys, whose heads may be fewer; each serves several of the queries' in their order.
        v: values, with as many heads as the keys.
        group: the ranks that share heads, whose number divides these.
        tag: distinguishes operators that are under way at the same time.
    """
    q, k, v = (autocast(x) for x in (q, k, v))
    ranks, heads = group.size, q.shape[1]
    if ranks > 1:
        require_heads(heads, ranks)
        # Each rank gets the whole sequence for some of the heads. As many key heads as ranks at least, and a multiple
        # of them, so that each rank has those of its queries.
        times = math.lcm(k.shape[1], ranks) // k.shape[1]
        if times > 1:
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        q, k, v = _to_heads([q, k, v], group, tag)
    out = run(q, k, v)
    return out if ranks == 1 else _to_sequence(out, group, tag)


def require_heads(heads: int, ranks: int) -> None:
    """Raise ValueError if these ranks cannot share the heads."""
    if heads % ranks:
        works = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"ulysses gives each context-parallel rank the same number of heads, but {ranks} ranks do not divide "
            f"{heads} heads ({heads} / {ranks} = {heads / ranks:g}); numbers of ranks that work are {works}: set "
            "mesh.context or context_parallel.ulysses_degree to one of them, or use the strategy ring, which takes any"
        )


def _to_heads(parts: list[Tensor], group: Ranks, tag: int) -> list[Tensor]:
    """Exchange all heads of this rank's part of the sequence for some heads of the whole, in one all-to-all."""
    # By rank, batch, head, chunk, token and width: the first chunk of each rank comes before all second ones, whose
    # order is that of the ranks from the last on.
    rows = [x.unflatten(1, (group.size, -1)).unflatten(3, (2, -1)).movedim(1, 0) for x in parts]
    swapped = _swap(torch.cat([x.flatten(1) for x in rows], 1), group, tag)
    outputs = []
    for x, y in zip(rows, swapped.split([x[0].numel() for x in rows], 1), strict=True):
        early, late = y.view(x.shape).unbind(3)
        outputs.append(torch.cat([early, late.flip(0)]).movedim(0, 2).flatten(2, 3))
    return outputs


def _to_sequence(x: Tensor, group: Ranks, tag: int) -> Tensor:
    """Exchange some heads of the whole sequence for all heads of this rank's part."""
    early, late = x.unflatten(2, (2, group.size, -1)).unbind(2)
    swapped = _swap(torch.stack([early, late.flip(2)], 3).movedim(2, 0), group, tag)
    # (ranks, batch, heads, chunks, tokens, width) to (batch, all heads, sequence, width)
    part: Tensor = swapped.movedim(0, 1).flatten(1, 2).flatten(2, 3)
    return part


def _swap(parts: Tensor, group: Ranks, tag: int) -> Tensor:
    """Give rank r part r of the first dim, and take its in return."""
    return move(parts, "swap", cast("Group", group), tag)  # which takes nothing of a group but its messages


def ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Ranks,
    tag: int,
    scale: float | None = None,
    pairs: CausalPairs | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Compute attention with keys and values going around the ranks (Liu et al., "Ring Attention", 2023).

    Arguments and result are those of ``by_heads``; the tag after ``tag`` is used, too. ``scale`` is the scale of the
    scores (None: the root of the width, inverted), ``pairs`` are those that see each other (None: causal attention),
    ``sinks`` has a score for each head that takes its share of the weights, and ``cap`` is that of ``AttentionBlock``.
    It can be differentiated once, causal attention on one rank more often. Of a query that sees no key, the result is
    zero.
    """
    if group.size == 1 and (pairs, sinks, cap) == (None, None, None):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=k.shape[1] != q.shape[1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    travel = _Travel(group, tag, scale, CausalPairs(group.size) if pairs is None else pairs, cap, k.shape, v.shape)
    out: Tensor = _Ring.apply(q, k, v, sinks, travel)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class _Travel:
    """Way of a rank's keys and values, in one buffer, around the ranks."""

    group: Ranks
    tag: int
    scale: float
    pairs: CausalPairs
    cap: float | None
    key_shape: torch.Size
    value_shape: torch.Size

    def around(self, packed: Tensor) -> Iterator[tuple[int, Tensor, int]]:
        """Yield each rank whose keys some rank sees, its buffer, and how far that travels next.

        This rank's own comes first. The next one travels while one is used.
        """
        rank, size, present, at = self.group.rank, self.group.size, packed, 0
        for distance in self.pairs.steps:
            hop, coming = distance - at, torch.empty_like(packed)
            sends, receives = {(rank + hop) % size: present}, {(rank - hop) % size: coming}
            arriving = self.group.send_and_receive(sends, receives, self.tag, "ring")
            yield (rank - at) % size, present, hop
            arriving.wait()
            present, at = coming, distance
        yield (rank - at) % size, present, size - at

    def unpack(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = buffer.split([self.key_shape.numel(), self.value_shape.numel()])
        return keys.view(self.key_shape), values.view(self.value_shape)

    def pieces(self, source: int, q: Tensor) -> list[PairBlock]:
        return self.pairs.pieces(self.group.rank, source, q.shape[2])

    def block(self, q: Tensor, present: Tensor, piece: PairBlock, source: int) -> AttentionBlock:
        keys, values = (x[piece.samples, :, piece.columns] for x in self.unpack(present))
        mask = self.pairs.mask(piece, self.group.rank, source)
        return AttentionBlock(q[piece.samples, :, piece.rows], keys, values, piece.causal, self.scale, mask, self.cap)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, travel: _Travel) -> Tensor:
        # Results of many blocks are added up: in 16 bits their errors would, too.
        wide = torch.promote_types(q.dtype, torch.float32)
        packed = torch.cat([k.reshape(-1), v.reshape(-1)])
        ctx.travel = travel
        out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=wide)
        lse = out.new_full(q.shape[:3], -torch.inf)
        for source, present, _ in travel.around(packed):
            for piece in travel.pieces(source, q):
                part, part_lse = blocks.attend(travel.block(q, present, piece, source))
                # The results of different keys are weighted by their log-sum-exp: a sigmoid of the difference, as
                # exponentials of either would overflow. That of no keys at all is -inf.
                sums, sums_lse = (x[piece.samples, :, piece.rows] for x in (out, lse))
                share = torch.where(part_lse == -torch.inf, 0.0, torch.sigmoid(part_lse - sums_lse))
                sums.lerp_(part.to(wide), share.unsqueeze(-1))
                sums_lse.copy_(torch.logaddexp(sums_lse, part_lse))
        if sinks is not None:
            scores = sinks.to(lse).view(-1, 1)
            out, lse = out * torch.sigmoid(lse - scores).unsqueeze(-1), torch.logaddexp(lse, scores)
        result = out.to(q.dtype)
        # Weights are exp(score - lse): none of a query that sees no key.
        ctx.save_for_backward(q, packed, sinks, result, lse.masked_fill(lse == -torch.inf, torch.inf))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "ring attention can be differentiated once only, but a graph of its gradients is to be made "
                "(create_graph=True): use the strategy ulysses, which can be differentiated more often"
            )
        q, packed, sinks, out, lse = ctx.saved_tensors
        travel, group = ctx.travel, ctx.travel.group
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = torch.zeros_like(q, dtype=wide)
        own_gradients, travelling = (torch.zeros_like(packed, dtype=wide) for _ in range(2))
        # The gradients of keys and values travel with them, one step behind: what the ranks before this one found for
        # the present keys arrives while this one's share is computed.
        arriving, landing = None, travelling
        for source, present, hop in travel.around(packed):
            total = own_gradients if source == group.rank else landing
            for piece in travel.pieces(source, q):
                block = travel.block(q, present, piece, source)
                rows = piece.samples, slice(None), piece.rows
                of_queries, *of_keys = blocks.gradients(block, gradient[rows], out[rows], lse[rows])
                dq[rows] += of_queries
                if arriving is not None:
                    arriving.wait()
                for x, more in zip(travel.unpack(total), of_keys, strict=True):
                    x[piece.samples, :, piece.columns] += more
            if arriving is not None:
                arriving.wait()
            if source != group.rank:
                landing = torch.empty_like(total)
                ahead, behind = (group.rank + hop) % group.size, (group.rank - hop) % group.size
                arriving = group.send_and_receive({ahead: total}, {behind: landing}, travel.tag + 1, "ring gradients")
        if arriving is not None:
            arriving.wait()
            own_gradients += landing  # what all others found for this rank's keys
        dk, dv = travel.unpack(own_gradients.to(q.dtype))
        of_sinks = None
        if sinks is not None:
            weights = torch.exp(sinks.to(lse).view(-1, 1) - lse)
            of_sinks = -(weights * (gradient.to(wide) * out).sum(-1)).sum((0, 2)).view(sinks.shape).to(sinks.dtype)
        return dq.to(q.dtype), dk, dv, of_sinks, None
