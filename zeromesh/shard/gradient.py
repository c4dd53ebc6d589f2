"""Gradients of flat buffers: where each is between autograd and the update, and the policy that all follow.

A gradient that arrives is copied (the first time) or added into the slot of its flat buffer, and freed. If the flat
buffer has one parameter, as an embedding's does, the gradient stays where autograd left it, without a slot.
``zeromesh.shard.reducer`` turns the full gradient into this rank's part of the sum over the ranks, its *shard*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zeromesh.model.placement import Placement, PlacementRow, Tier
from zeromesh.shard.layout import Layout
from zeromesh.shard.slots import Slot

ALONE = 2
"""References to the memory of a tensor that one variable holds, while it is asked for."""


class Landing(Protocol):
    """A sum on its way to the host."""

    def wait(self) -> None:
        """Block until the shard holds the sum. Any thread may call it, and again."""


@dataclass(frozen=True)
class GradientPolicy:
    """Placement and dtypes of gradients, and the number that is in the works at once.

    Attributes:
        sharded: reduce after every micro-batch into a shard; else at the accumulation boundary.
        owned: whether each rank ends up with its shard of the sum only (optimizer sharded), or with all of it.
        wire: dtype on the wire; None is the parameters'.
        accumulate: dtype of the sum; None is fp32 for 16-bit parameters, else the parameters'.
        slots: how many full gradients exist at once; None is what ``sharded`` implies: two, or all.
        predivide: gradients are divided by it as they arrive, before they are summed over the ranks; None divides by
            the number of ranks where that is exact, so that the mean costs no pass over memory of its own.
        kept: whether slots and shards keep their memory between updates. Where parameters are sharded it is given back,
            as activations are at their most when there are no gradients; but not on the host, where there are none.
        pinned: whether shards on the host are page-locked.
    """

    sharded: bool
    owned: bool
    wire: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    slots: int | None = None
    predivide: float | None = None
    kept: bool = True
    pinned: bool = True

    @classmethod
    def of(cls, row: PlacementRow, **options: object) -> GradientPolicy:
        """The policy of a row of the placement table."""
        kept = row.parameter is Placement.REPLICATED
        sharded, owned = row.gradient is Placement.SHARDED, row.optimizer is Placement.SHARDED
        return cls(sharded, owned, kept=kept, pinned=row.pinned, **options)  # type: ignore[arg-type]

    def wire_dtype(self, layout: Layout) -> torch.dtype:
        """Dtype of this layout's gradients on the wire."""
        return self.wire if self.wire and layout.dtype.is_floating_point else layout.dtype

    def shard_dtype(self, layout: Layout) -> torch.dtype:
        """Dtype in which this layout's gradients are summed and kept."""
        if self.accumulate and layout.dtype.is_floating_point:
            return self.accumulate
        return torch.float32 if layout.dtype in (torch.float16, torch.bfloat16) else layout.dtype


class Gradient:
    """The gradient of one flat buffer, between two updates.

    Attributes:
        unit: name of the unit that it is of.
        shard: this rank's part of the sum so far, in the shard dtype; None before the first reduction.
        full: the full gradient that is being filled, or None; in ``slot``, or where autograd left it.
        used: per parameter, whether a gradient arrived since the last update.
        slot_dtype: of ``full``.
        tied_stages: places along the pipeline whose stages have these parameters, where they are tied over several stages;
            the first of them counts what all have.
        shard_in_full: whether ``shard`` lies in the full gradient, in ``held`` then; otherwise in ``buffer``.
        tier: where ``shard`` rests.
        landed: to be waited for before ``shard`` is used, on the host; None: there is nothing on its way to it.
    """

    def __init__(
        self, layout: Layout, own: slice, shard_range: slice, tag: int, unit: str = "", tied_stages: Sequence[int] = (),
        tier: Tier = Tier.DEVICE,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.tier = tier
        self.tied_stages = tuple(tied_stages)
        self.own = own
        self.shard_range = shard_range
        self.tag = tag
        self.unit = unit
        self.buffer: torch.Tensor | None = None
        self.shard: torch.Tensor | None = None
        self.landed: Landing | None = None
        self.full: torch.Tensor | None = None
        self.slot: Slot | None = None
        self.held: Slot | None = None
        self.arrived = [False] * len(layout.segments)
        self.used = [False] * len(layout.segments)
        self.slot_dtype = layout.dtype
        self.shard_in_full = True
        self.counted = tuple(self._counted())
        self.shared = self._shared()

    def _counted(self) -> Iterator[tuple[int, int]]:
        """Ranges of ``shard`` that are counted on this rank, together all that it has that no other rank counts."""
        boxes = list(self.layout.within(self.shard_range.start, self.shard_range.stop))
        if all(box.owned for _, box in boxes):  # what lies between is zero
            start = self.shard_range.start - self.own.start
            yield start, start + self.layout.shard_size
            return
        for segment, box in boxes:
            first = segment.start - self.own.start
            yield from ((first + low, first + high) for low, high in box.runs if box.owned)

    def part(self, index: int) -> slice:
        """Return the range of ``shard`` that parameter ``index`` has; empty where other ranks have all of it."""
        segment = self.layout.segments[index]
        start, stop = (min(max(at, self.own.start), self.own.stop) for at in (segment.start, segment.stop))
        return slice(start - self.own.start, stop - self.own.start)

    def _shared(self) -> dict[int, list[tuple[int, int, bool]]]:
        """Return ranges of ``shard`` that ranks along the tensor axis share, by the number of these ranks.

        Each is (start, stop, whether this rank is the first of those ranks).
        """
        found: dict[int, list[tuple[int, int, bool]]] = {}
        for segment, box in self.layout.within(self.own.start, self.own.stop):
            if box.sharers > 1:
                first = segment.start - self.own.start
                found.setdefault(box.sharers, []).extend((first + a, first + b, box.owned) for a, b in box.runs)
        return found

    def adopt(self, value: torch.Tensor, factor: float) -> bool:
        """Make ``value`` itself the full gradient, times ``factor``; False if it is not alone in memory like that."""
        memory = value.untyped_storage()
        if not (self.in_place and value.dtype == self.slot_dtype and value.is_contiguous()):
            return False
        if memory.nbytes() != value.nbytes or torch._C._storage_Use_Count(memory._cdata) > ALONE:
            return False
        if not memory.resizable():
            return False  # it is of another library's, which may still use it
        if value.is_conj() or value.is_neg():
            return False  # in memory are other numbers, and what arrives from other ranks goes into memory
        self.full = value.view(-1) if factor == 1.0 else value.view(-1).mul_(factor)
        self.arrived[0] = self.used[0] = True
        return True

    @property
    def in_place(self) -> bool:
        """True if autograd leaves the gradient as it is to be: the one parameter's, in the dtype of the slot."""
        return self.layout.whole and self.slot_dtype == self.layout.dtype

    def fill(self, index: int, value: torch.Tensor, factor: float) -> None:
        """Copy or add ``factor`` times parameter ``index``'s gradient into ``full``."""
        assert self.full is not None
        segment = self.layout.segments[index]
        target = self.full[segment.start : segment.stop].view(segment.shape)
        if self.arrived[index]:
            target.add_(value, alpha=factor)
        elif factor == 1.0:
            target.copy_(value)
        elif (wide := torch.promote_types(value.dtype, target.dtype)) is target.dtype is not value.dtype:
            target.copy_(value).mul_(factor)
        else:
            torch.mul(value.to(wide), factor, out=target)  # rounded once
        self.arrived[index] = self.used[index] = True

    def open(self, full: torch.Tensor, slot: Slot) -> None:
        """Fill ``full``, which lies in ``slot``, from here on."""
        self.full, self.slot = full, slot

    def close(self) -> tuple[torch.Tensor, Slot | None]:
        """Give up the full gradient and its slot, as its reduction has begun; what arrives next is another one's."""
        assert self.full is not None
        full, slot = self.full, self.slot
        self.full = self.slot = None
        self.arrived = [False] * len(self.arrived)
        return full, slot

    def keep(self, full: torch.Tensor, slot: Slot | None) -> None:
        """Let the shard lie in a full gradient that was reduced in place."""
        self.shard, self.held = full[self.own], slot

    def expect(self, shard: torch.Tensor, landed: Landing | None = None) -> None:
        """Let the shard be this memory, with what is on its way to it."""
        self.shard, self.landed = shard, landed

    def land(self) -> None:
        """Wait until the shard holds all that is on its way to it."""
        if self.landed is not None:
            self.landed.wait()
            self.landed = None

    def use(self, used: Sequence[bool]) -> None:
        """Set which parameters count as used since the last update."""
        self.used = list(used)

    def forget(self) -> list[Slot]:
        """Forget the full gradient and the sum; return the slots that they lay in."""
        slots = [slot for slot in (self.slot, self.held) if slot is not None]
        self.full = self.slot = self.shard = self.held = None
        return slots

    def reset(self, keeps_memory: bool) -> None:
        """Begin a new update: nothing has arrived, and the shard's own memory is given up unless it is kept."""
        if not keeps_memory:
            self.buffer = None
        self.arrived = [False] * len(self.arrived)
        self.used = [False] * len(self.used)

    def zero_missing(self) -> None:
        """Zero what no gradient arrived for, so that the whole buffer can be summed."""
        assert self.full is not None
        missing = [(s.start, s.stop) for s, here in zip(self.layout.segments, self.arrived, strict=True) if not here]
        for start, stop in (*self.layout.gaps, *missing):
            self.full[start:stop] = 0
