"""Gathers of weights in float8: half of the bytes of bf16, and no other result.

A layer that computes in float8 rounds its weight to float8 before each product. Rounded by the shards' owners instead,
with the same scale, the gathered weight is rounded to itself there. The idea is that of torchao's float8 all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from zeromesh.base.float8_products import E4M3, magnitude, quantize, scale_of
from zeromesh.comm.collectives import Group, Pending
from zeromesh.shard.layout import Layout

SCALES_TAG = 14  # tag, on the axis of shards, of the largest magnitudes


class NarrowGather:
    """Scales of a flat buffer's parameters, one each, and its gather."""

    def __init__(self, layout: Layout, own_range: slice) -> None:
        self._layout, self._start = layout, own_range.start
        owned = layout.owned(own_range.start, own_range.stop)
        self._owned = [(index, slice(start - own_range.start, stop - own_range.start)) for index, start, stop in owned]
        self._scales: Tensor | None = None  # shape (segments,), on the device; None: parameters may have changed
        self._filled: Tensor | None = None  # scales of what the parameters are now; None: they are not rounded

    def largest(self, shard: Tensor) -> Tensor:
        """Return the largest magnitude of each parameter in this rank's shard, shape (segments,), in fp32."""
        magnitudes = torch.zeros(len(self._layout.segments), dtype=torch.float32, device=shard.device)
        for index, local in self._owned:
            magnitudes[index] = magnitude(self._part(shard, local))[0]
        return magnitudes

    def _part(self, shard: Tensor, local: slice) -> Tensor:
        # In the dtype that is computed with, which a layer would round: from fp32, some numbers would go another way.
        return shard[local].to(self._layout.dtype)[None]

    def know(self, largest: Tensor) -> None:
        """Take the largest magnitudes over all shards."""
        self._scales = scale_of(largest, E4M3)

    def forget(self) -> None:
        """Settle the scales anew before the next gather, which sends a message: call this on all ranks, or on none."""
        self._scales = None

    def note_exact(self) -> None:
        """Note that the parameters are not rounded any more."""
        self._filled = None

    @property
    def is_rounded(self) -> bool:
        """True if the parameters are what the last gather brought, and not exact."""
        return self._filled is not None

    def require_kept(self, index: int, value: Tensor, shard: Tensor) -> None:
        """Check that a parameter still is what was gathered, as far as this rank's shard can tell.

        Neither is taken into the master: it would lose all that the rounding has taken from the parameter.

        Args:
            index: of the parameter in the layout.
            value: the parameter, 1-D; empty: it is known that it was written to.
            shard: this rank's part of the flat buffer.

        Raises:
            RuntimeError: it was written to.
        """
        if not (len(value) and self._is_kept(index, value, shard)):
            raise RuntimeError(
                f"parameter {self._layout.segments[index].name} was changed in a forward or backward, where it is "
                "rounded to float8 because float8.gather is true; change it between steps, inside "
                "GatheredParameters, or leave float8.gather out"
            )

    def _is_kept(self, index: int, value: Tensor, shard: Tensor) -> bool:
        assert self._filled is not None
        scale = self._filled[index]
        segment = self._layout.segments[index]
        for at, local in self._owned:
            if at == index:
                first = local.start + self._start - segment.start
                now = value[first : first + local.stop - local.start]
                sent = _wide(quantize(self._part(shard, local), E4M3, scale).values[0], scale, value.dtype)
                return bool(((now == sent) | (now.isnan() & sent.isnan())).all())
        return True

    def gather(self, full: Tensor, shard: Tensor, group: Group, tag: int) -> Pending:
        """Start to fill ``full`` from the shards of all ranks; ``tag`` as in ``Group.all_gather``."""
        if self._scales is None:
            share_scales([(self, shard)], group)
        scales = self._filled = self._scales
        assert scales is not None
        message = torch.zeros(self._layout.shard_size, dtype=torch.uint8, device=full.device)
        for index, local in self._owned:
            message[local] = quantize(self._part(shard, local), E4M3, scales[index]).values.view(torch.uint8)[0]
        # In the last bytes of the buffer itself: no memory beside it is needed.
        landing = full.view(torch.uint8)[-self._layout.size :]
        return Pending(works=[group.all_gather(landing, message, tag)], then=partial(self._fill, full, landing, scales))

    def _fill(self, full: Tensor, landing: Tensor, scales: Tensor) -> None:
        # Ascending: the numbers of a parameter end before the codes of those behind it begin, and its own codes are
        # copied by the conversion.
        for segment, scale in zip(self._layout.segments, scales, strict=True):
            codes = landing[segment.start : segment.stop].view(E4M3)
            full[segment.start : segment.stop] = _wide(codes, scale, full.dtype)
        for start, stop in self._layout.gaps:
            full[start:stop] = 0


def _wide(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.to(dtype) * scale.to(dtype)


def share_scales(gathers: Sequence[tuple[NarrowGather, Tensor]], group: Group) -> None:
    """Settle the scales of some buffers, each with this rank's shard, in one message. Collective."""
    if not gathers:
        return
    vectors = [gather.largest(shard) for gather, shard in gathers]
    rows = torch.empty(group.size, sum(map(len, vectors)), dtype=torch.float32, device=vectors[0].device)
    group.all_gather(rows.view(-1), torch.cat(vectors), SCALES_TAG).wait()
    for (gather, _), largest in zip(gathers, rows.amax(0).split([*map(len, vectors)]), strict=True):
        gather.know(largest)
