"""Part of a sequence that each rank holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
    # The sequence is cut into twice as many chunks as there are ranks (zigzag). Under a causal mask a chunk sees those
    # before it, so a rank with one early and one late chunk has as much to compute as any other. (Brandon et al.,
    # "Striped Attention", 2023, balance the ring by another order; this one keeps blocks whole.)
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim)


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return the whole of which ``keep`` gives these parts, by rank."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim)


def reordered(x: Tensor, order: Tensor) -> Tensor:
    """Return (samples, sequence, ...) with the tokens that ``order``, (samples, sequence), names."""
    return x.take_along_dim(order.view(*order.shape, *[1] * (x.ndim - 2)), 1)
