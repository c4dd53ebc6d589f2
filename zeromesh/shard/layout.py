"""Layout of a unit's parameters in its flat buffers: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from zeromesh.base.split import Held, HeldBox

ALIGNMENT = 64  # bytes. The widest vector registers and a cache line; CUDA's matrix kernels need 16.


def round_up(value: float, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return int(-(-value // multiple)) * multiple


def padded(elements: float, itemsize: int, shards: int) -> int:
    """Return the elements of a flat buffer, so that each shard begins at a multiple of ``ALIGNMENT``."""
    return round_up(elements, max(1, ALIGNMENT // itemsize) * shards)


@dataclass(frozen=True)
class Segment:
    """One parameter's place in a flat buffer: elements ``[start, stop)``; ``shape`` is that of what is here of it."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    held: Held


@dataclass(frozen=True)
class Layout:
    """One flat buffer of a unit, with all its parameters of one dtype and one ``requires_grad``."""

    dtype: torch.dtype  # as computed with
    trainable: bool
    segments: tuple[Segment, ...]
    shards: int  # ranks that it is sharded over
    # Elements, padded so that every rank owns an equal range: collectives work on the buffer as it is, and nothing is
    # copied to be communicated.
    size: int

    @classmethod
    def build(
        cls,
        named_shapes: Sequence[tuple[str, torch.Size]],
        dtype: torch.dtype,
        trainable: bool,
        shards: int,
        split: Mapping[str, Held] | None = None,
    ) -> Layout:
        """Lay the parameters out one after the other; of those in ``split``, what this rank holds."""
        align = max(1, ALIGNMENT // dtype.itemsize)
        segments, position = [], 0
        for name, full_shape in named_shapes:
            held_part = (split or {}).get(name) or Held(tuple(full_shape))
            shape = torch.Size(held_part.shape)
            segments.append(Segment(name, shape, position, position + shape.numel(), held_part))
            position = round_up(position + shape.numel(), align)
        return cls(dtype, trainable, tuple(segments), shards, padded(max(position, 1), dtype.itemsize, shards))

    @property
    def axis(self) -> str:
        """Axis along which ranks hold other parts of these parameters."""
        return self.segments[0].held.axis

    @property
    def shard_size(self) -> int:
        """Elements that each rank owns."""
        return self.size // self.shards

    @property
    def shard_bytes(self) -> int:
        """Bytes that each rank owns."""
        return self.shard_size * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the full buffer."""
        return self.size * self.dtype.itemsize

    @property
    def elements(self) -> int:
        """Elements of the parameters, without padding."""
        return sum(segment.stop - segment.start for segment in self.segments)

    @property
    def whole(self) -> bool:
        """True if it is one parameter and nothing else."""
        return len(self.segments) == 1 and self.elements == self.size

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ranges of the buffer that belong to no parameter."""
        starts = [segment.start for segment in self.segments] + [self.size]
        stops = [0] + [segment.stop for segment in self.segments]
        return tuple((stop, start) for stop, start in zip(stops, starts, strict=True) if start > stop)

    def within(self, low: int, high: int) -> Iterator[tuple[Segment, HeldBox]]:
        """Yield the boxes of whole parameters in ``[low, high)`` of the buffer; runs count from the segment's start."""
        for index, start, stop in self.owned(low, high):
            segment = self.segments[index]
            for box in segment.held.boxes(start - segment.start, stop - segment.start):
                yield segment, box

    def owned(self, low: int, high: int) -> list[tuple[int, int, int]]:
        """The segments that overlap ``[low, high)`` of the buffer: (index, start, stop), the overlap in the buffer."""
        overlaps = [(i, max(s.start, low), min(s.stop, high)) for i, s in enumerate(self.segments)]
        return [(i, start, stop) for i, start, stop in overlaps if start < stop]
