"""Sums of tensors in a fixed order, and where a reduce-scatter computes them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

# Elements that are converted at once where dtypes differ, so that no buffer is needed in the wider dtype. torch adds
# 16-bit numbers to fp32 ones four times slower on a CPU than it converts them, while what was converted is still in the
# processor's cache.
CHUNK = 1 << 17


class SumPlace(Enum):
    """Place in which a reduce-scatter adds up the parts of other ranks."""

    COLLECTIVE = "collective"  # in nccl, which delivers the sum
    MESSAGES = "messages"  # here, from a buffer with the part of each other rank
    MEMORY = "memory"  # here, as they are read out of the other ranks' memory

    def buffers(self, ranks: int) -> int:
        """Return the number of shards in the buffer of a sum over so many ranks."""
        if ranks == 1:
            return 0
        return {SumPlace.COLLECTIVE: 1, SumPlace.MESSAGES: ranks - 1, SumPlace.MEMORY: 0}[self]


def accumulate(parts: Sequence[torch.Tensor], out: torch.Tensor, add: bool) -> None:
    """Write the sum of ``parts``, in order, into ``out``, or add it. One part may be ``out``; the others change."""
    on_cpu = out.device.type == "cpu"
    # The whole sum is added, not part by part: so the result is the same whether it is added here or later, elsewhere.
    if (on_cpu and parts[0].itemsize < out.itemsize) or (add and len(parts) > 1):
        _add_in_chunks(parts, out, add, CHUNK if on_cpu else max(1, out.numel()))
        return
    rest = list(parts)
    if any(part.data_ptr() == out.data_ptr() for part in parts):
        assert not add, "a buffer that is summed in place has nothing to be added to"
        # Summed up in the first part, as ``out`` may be a later one.
        total = rest[0]
        for part in rest[1:-1]:
            total.add_(part)
        if len(rest) > 1:
            torch.add(total, rest[-1], out=out)
        return
    if not add and len(rest) > 1 and rest[0].dtype == out.dtype:
        torch.add(rest.pop(0), rest.pop(0), out=out)
    elif not add:
        out.copy_(rest.pop(0))
    for part in rest:
        out.add_(part)


def _add_in_chunks(parts: Sequence[torch.Tensor], out: torch.Tensor, add: bool, size: int) -> None:
    """Accumulate chunk by chunk, so that a sum and a converted part fit into scratch memory."""
    scratch = torch.empty(2, min(size, out.numel()), dtype=out.dtype, device=out.device)
    for target, first, *rest in zip(out.split(size), *(part.split(size) for part in parts), strict=True):
        scratch_sum, converted = scratch[:, : target.numel()]
        total = scratch_sum if add else target
        total.copy_(first)
        for part in rest:
            total.add_(converted.copy_(part) if part.itemsize < total.itemsize else part)
        if add:
            target.add_(total)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor, unless it is the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
