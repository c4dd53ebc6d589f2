"""Attention of a sequence that is spread over ranks, in the order of ``sequence_order.py``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeromesh.comm.collectives import Group
from zeromesh.parallel.context import attention_block as blocks
from zeromesh.parallel.context.attention_block import AttentionBlock
from zeromesh.parallel.context.sequence_order import gathered_order

# Bytes that each rank sends, for c ranks and sizes of its parts of q, k, v and the result in their dtype:
# ulysses: (q + k + v + result) (c-1)/c, and the same in the backward; repeated key heads count as often as they are.
# ring: (k + v) (c-1), and in the backward the same, with (c-1) times their gradients in at least fp32.
STRATEGIES = ("ring", "ulysses")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
AUTO = "auto"  # ring for plain causal attention, ulysses for all other


def attend(
    strategy: str, q: Tensor, k: Tensor, v: Tensor, group: Group, tag: int, scale: float | None = None
) -> Tensor:
    """Compute attention by the strategy of a name, ``ring`` or ``ulysses``."""
    return (ulysses if strategy == "ulysses" else ring)(q, k, v, group, tag, scale)


def ulysses(q: Tensor, k: Tensor, v: Tensor, group: Group, tag: int, scale: float | None = None) -> Tensor:
    """Compute causal attention with the heads spread over the ranks; arguments are those of ``by_heads``.

    ``scale`` is the scale of the scores; None: the root of the width, inverted.
    """

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=k.shape[1] != q.shape[1])

    return by_heads(causal, q, k, v, group, tag)


def by_heads(run: Attention, q: Tensor, k: Tensor, v: Tensor, group: Group, tag: int) -> Tensor:
    """Compute attention with the heads spread over the ranks (Jacobs et al., "DeepSpeed Ulysses", 2023).

    Args:
        run: attention of some heads to all tokens, of (batch, heads, sequence, width) in the order of the sequence.
        q: this rank's part of the queries, (batch, heads, sequence, width).
        k: the same of the keys, whose heads may be fewer; each serves several of the queries' in their order.
        v: values, with as many heads as the keys.
        group: the ranks along the context axis, which divide the heads.
        tag: distinguishes operators that are under way at the same time.
    """
    q, k, v = _in_one_dtype(q, k, v)
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
            "mesh.context to one of them, or use the strategy ring, which takes any"
        )


def _to_heads(parts: list[Tensor], group: Group, tag: int) -> list[Tensor]:
    """Exchange all heads of this rank's part of the sequence for some heads of the whole, in one all-to-all."""
    ranks = group.size
    rows = [x.unflatten(1, (ranks, -1)).movedim(1, 0) for x in parts]
    swapped = _swap(torch.cat([x.flatten(1) for x in rows], 1), group, tag)
    outputs = []
    for x, y in zip(rows, swapped.split([math.prod(x.shape[1:]) for x in rows], 1), strict=True):
        # (ranks, batch, heads, their two chunks, tokens, width) to the chunks in the order of the sequence
        y = y.view(x.shape).unflatten(3, (2, -1)).permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
        outputs.append(y.index_select(2, torch.tensor(gathered_order(ranks), device=y.device).argsort()).flatten(2, 3))
    return outputs


def _to_sequence(x: Tensor, group: Group, tag: int) -> Tensor:
    """Exchange some heads of the whole sequence for all heads of this rank's part."""
    ranks = group.size
    chunks = x.unflatten(2, (2 * ranks, -1))
    order = torch.tensor(gathered_order(ranks), device=x.device)
    rows = chunks.index_select(2, order).unflatten(2, (ranks, 2)).movedim(2, 0)
    swapped = _swap(rows.flatten(1), group, tag).view(rows.shape)
    # (ranks, batch, heads, chunks, tokens, width) to (batch, all heads, sequence, width)
    part: Tensor = swapped.movedim(0, 1).flatten(1, 2).flatten(2, 3)
    return part


def _swap(rows: Tensor, group: Group, tag: int) -> Tensor:
    """Exchange the rows of a matrix: row r goes to rank r, and comes from there. It is its own transpose."""
    swapped: Tensor = _Swap.apply(rows, group, tag)  # type: ignore[no-untyped-call]
    return swapped


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, tag: int) -> Tensor:
        ctx.settings = (group, tag)
        rows = rows.contiguous()
        received = torch.empty_like(rows)
        others = [(group.rank + distance) % group.size for distance in range(1, group.size)]
        sends, receives = {peer: rows[peer] for peer in others}, {peer: received[peer] for peer in reversed(others)}
        swapping = group.send_and_receive(sends, receives, tag, "all_to_all")
        received[group.rank].copy_(rows[group.rank])
        swapping.wait()
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _swap(gradient, *ctx.settings), None, None


def ring(q: Tensor, k: Tensor, v: Tensor, group: Group, tag: int, scale: float | None = None) -> Tensor:
    """Compute causal attention with keys and values going around the ranks (Liu et al., "Ring Attention", 2023).

    Arguments and result are those of ``ulysses``; the tag after ``tag`` is used, too. It can be differentiated once.
    """
    q, k, v = _in_one_dtype(q, k, v)
    if group.size == 1:
        return ulysses(q, k, v, group, tag, scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _Ring.apply(q, k, v, group, tag, scale)  # type: ignore[no-untyped-call]
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group, tag: int, scale: float) -> Tensor:
        # Results of many blocks are added up: in 16 bits their errors would, too.
        wide = torch.promote_types(q.dtype, torch.float32)
        packed = torch.cat([k.reshape(-1), v.reshape(-1)])
        out, lse = q.new_empty(0), q.new_empty(0)
        for source, present in _around(packed, group, tag):
            rows, columns, causal = needed(group.rank, source, q.shape[2])
            keys, values = (x[:, :, columns] for x in _unpack(present, k.shape, v.shape))
            part, its = blocks.attend(AttentionBlock(q[:, :, rows], keys, values, causal, scale))
            if source == group.rank:  # the first, and the only one that all queries need
                out, lse = part.to(wide), its
            else:
                # The results of different keys are weighted by their log-sum-exp: a sigmoid of the difference, as
                # exponentials of either would overflow.
                mine, before = out[:, :, rows], lse[:, :, rows]
                mine.lerp_(part.to(wide), torch.sigmoid(its - before).unsqueeze(-1))
                before.copy_(torch.logaddexp(before, its))
        result = out.to(q.dtype)
        ctx.save_for_backward(q, packed, result, lse)
        ctx.settings = (k.shape, v.shape, group, tag, scale)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "ring attention can be differentiated once only, but a graph of its gradients is to be made "
                "(create_graph=True): use the strategy ulysses, which can be differentiated more often"
            )
        q, packed, out, lse = ctx.saved_tensors
        key_shape, value_shape, group, tag, scale = ctx.settings
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = torch.zeros_like(q, dtype=wide)
        own_gradients, travelling = (torch.zeros_like(packed, dtype=wide) for _ in range(2))
        ahead, behind = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        # The gradients of keys and values travel with them, one step behind: what the ranks before this one found for
        # the present keys arrives while this one's share is computed.
        arriving, landing = None, travelling
        for source, present in _around(packed, group, tag):
            rows, columns, causal = needed(group.rank, source, q.shape[2])
            keys, values = (x[:, :, columns] for x in _unpack(present, key_shape, value_shape))
            block = AttentionBlock(q[:, :, rows], keys, values, causal, scale)
            gradients = blocks.gradients(block, gradient[:, :, rows], out[:, :, rows], lse[:, :, rows])
            dq[:, :, rows] += gradients[0]
            if arriving is not None:
                arriving.wait()
            total = own_gradients if source == group.rank else landing
            for x, more in zip(_unpack(total, key_shape, value_shape), gradients[1:], strict=True):
                x[:, :, columns] += more
            if source != group.rank:
                landing = torch.empty_like(total)
                arriving = group.send_and_receive({ahead: total}, {behind: landing}, tag + 1, "ring gradients")
        assert arriving is not None
        arriving.wait()
        own_gradients += landing  # what all others found for this rank's keys
        dk, dv = _unpack(own_gradients.to(q.dtype), key_shape, value_shape)
        return dq.to(q.dtype), dk, dv, None, None, None


def needed(rank: int, source: int, length: int) -> tuple[slice, slice, bool]:
    """Return the ranges of a rank's queries and of rank ``source``'s keys that see each other, and their mask."""
    half = length // 2  # of an early and a late chunk; in each case below it is half of all pairs
    if source == rank:
        return slice(None), slice(None), True
    if source < rank:  # its early chunk comes before both of this rank's, its late one after both
        return slice(None), slice(half), False
    return slice(half, None), slice(None), False


def _around(packed: Tensor, group: Group, tag: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank and its buffer, this rank's first; the next one travels while one is used."""
    ahead, behind = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    present = packed
    for step in range(group.size - 1):
        coming = torch.empty_like(packed)
        travel = group.send_and_receive({ahead: present}, {behind: coming}, tag, "ring")
        yield (group.rank - step) % group.size, present
        travel.wait()
        present = coming
    yield (group.rank + 1) % group.size, present


def _unpack(buffer: Tensor, key_shape: torch.Size, value_shape: torch.Size) -> tuple[Tensor, Tensor]:
    keys, values = buffer.split([key_shape.numel(), value_shape.numel()])
    return keys.view(key_shape), values.view(value_shape)


def _in_one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast inputs as torch's attention does under autocast."""
    device = q.device.type
    if not torch.is_autocast_enabled(device) or q.dtype == torch.float64:
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)
