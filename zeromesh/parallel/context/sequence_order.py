"""Part of a sequence that each rank holds."""

from __future__ import annotations

import torch
from torch import Tensor


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Return the two chunks of a rank, in their order."""
    # The sequence is cut into twice as many chunks as there are ranks (zigzag). Under a causal mask a chunk sees those
    # before it, so a rank with one early and one late chunk has as much to compute as any other. (Brandon et al.,
    # "Striped Attention", 2023, balance the ring by another order; this one keeps blocks whole.)
    return rank, 2 * ranks - 1 - rank


def require_length(length: int, ranks: int) -> None:
    """Raise ValueError if a sequence of this many tokens cannot be cut."""
    count = 2 * ranks
    chunk_length, rest = divmod(length, count)
    if rest or not chunk_length:
        works = [n for n in (chunk_length * count, (chunk_length + 1) * count) if n]
        raise ValueError(
            f"a sequence has {length} tokens, which cannot be cut into 2 x {ranks} context-parallel ranks = {count} "
            f"equal chunks ({length} = {chunk_length} x {count} + {rest}); the nearest lengths that work are "
            f"{' and '.join(map(str, works))}: pad it, or change its length or the number of ranks that share it"
        )


def keep(x: Tensor, rank: int, ranks: int, dim: int) -> Tensor:
    """Return a rank's part of a dim that is the sequence."""
    if ranks == 1:
        return x
    require_length(x.shape[dim], ranks)
    parts = x.chunk(2 * ranks, dim)
    return torch.cat([parts[chunk] for chunk in chunks_of(rank, ranks)], dim)


def reordered(x: Tensor, order: Tensor) -> Tensor:
    """Return (samples, sequence, ...) with the tokens that ``order``, (samples, sequence), names."""
    return x.take_along_dim(order.view(*order.shape, *[1] * (x.ndim - 2)), 1)


def gathered_order(ranks: int) -> list[int]:
    """Return the chunks of all ranks, rank by rank: entry p is the number in the sequence of the chunk at p."""
    return [chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks)]
