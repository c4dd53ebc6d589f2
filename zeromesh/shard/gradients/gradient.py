"""Gradients of flat buffers, which ``backward.py`` takes from autograd and ``reducer.py`` sums over the ranks.

arrives -> full gradient: EMPTY -> FILLING -> EMPTY           (copied or added into a slot, parameter by parameter)
                                      |
                          reduced -> shard: EMPTY -> REDUCING -> READY              (on the device)
                                                              -> LANDING -> READY   (copied to the host)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from threading import Lock
from weakref import WeakMethod

import torch

from zeromesh.base.kernels.sums import add
from zeromesh.base.placement import Placement, PlacementRow, Tier
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.layout import Layout
from zeromesh.shard.parameters.slots import Slot
from zeromesh.shard.store.link import Copy
from zeromesh.shard.store.memory import empty_on

ALONE = 2  # references to the memory of a tensor that one variable holds, while it is asked for


class Arrival:
    """A sum on its way to its shard on the host, into which it is copied or added when it is there."""

    def __init__(
        self, copy: Copy, landing: torch.Tensor, shard: torch.Tensor, adds: bool, before: Arrival | None = None
    ) -> None:
        self._copy = copy
        self._way: tuple[torch.Tensor, torch.Tensor] | None = (landing, shard)  # one tensor where it is copied straight
        self._adds = adds
        self._before = before
        self._lock = Lock()  # early updates wait in a thread of their own

    def wait(self) -> None:
        """Block until the shard holds the sum. Any thread may call it, and again."""
        with self._lock:
            if self._way is None:
                return
            # In order, and each sum whole: states on the host are to equal those on the device bit for bit, whose sums
            # over ranks are made before they are added to what earlier micro-batches left.
            if self._before is not None:
                self._before.wait()
            self._copy.wait()
            landing, shard = self._way
            if self._adds:
                add(shard, landing)
            elif landing is not shard:
                shard.copy_(landing)
            self._way = self._before = None


@dataclass(frozen=True)
class GradientPolicy:
    """Placement and dtypes of gradients, and the number that is in the works at once."""

    sharded: bool  # reduce after every micro-batch into a shard; else at the accumulation boundary
    owned: bool  # whether each rank ends up with its shard of the sum only (optimizer sharded), or with all of it
    wire: torch.dtype | None = None  # dtype on the wire; None is the parameters'
    accumulate: torch.dtype | None = None  # dtype of the sum; None is fp32 for 16-bit parameters, else the parameters'
    slots: int | None = None  # how many full gradients exist at once; None is what `sharded` implies: two, or all
    # Gradients are divided by it as they arrive, before they are summed over the ranks; None divides by the number of
    # ranks where that is exact, so that the mean costs no pass over memory of its own.
    predivide: float | None = None
    summed: bool = False  # over the data-parallel ranks, instead of averaged
    # Whether slots and shards keep their memory between updates. Where parameters are sharded it is given back, as
    # activations are at their most when there are no gradients; but not on the host, where there are none.
    kept: bool = True
    pinned: bool = True  # whether shards on the host are page-locked

    @classmethod
    def of(cls, row: PlacementRow, **options: object) -> GradientPolicy:
        """The policy of a row of the placement table."""
        replicated = row.parameter is Placement.REPLICATED
        sharded, owned = row.gradient is Placement.SHARDED, row.optimizer is Placement.SHARDED
        return cls(sharded, owned, kept=replicated, pinned=row.pinned, **options)  # type: ignore[arg-type]

    def wire_dtype(self, layout: Layout) -> torch.dtype:
        """Dtype of this layout's gradients on the wire."""
        return self.wire if self.wire and layout.dtype.is_floating_point else layout.dtype

    def shard_dtype(self, layout: Layout) -> torch.dtype:
        """Dtype in which this layout's gradients are summed and kept."""
        if self.accumulate and layout.dtype.is_floating_point:
            return self.accumulate
        return torch.float32 if layout.dtype in (torch.float16, torch.bfloat16) else layout.dtype


class FullState(Enum):
    """State of the full gradient."""

    EMPTY = "empty"  # no gradient has arrived since the last reduction began
    FILLING = "filling"  # gradients of some parameters have arrived


class ShardState(Enum):
    """State of this rank's part of the sum over ranks and micro-batches."""

    EMPTY = "empty"  # nothing was summed since the last update
    REDUCING = "reducing"  # a sum over the ranks is under way, to be added to the shard if there is one
    LANDING = "landing"  # the last sum is on its way from the device to the shard on the host
    READY = "ready"  # the shard holds all sums so far


class Gradient:
    """The gradient of one flat buffer, between two updates."""

    # The states of the full gradient and of the shard are independent: the next full gradient fills while the sum of
    # the one before is under way.

    def __init__(
        self,
        layout: Layout,
        own_range: slice,
        shard_range: slice,
        tag: int,
        unit: str = "",
        tied_stages: Sequence[int] = (),
        is_first: bool = True,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        self.layout = layout
        self.tier = tier
        self.tied_stages, self.is_first = tuple(tied_stages), is_first  # see `Flat`
        self.own = own_range
        self.shard_range = shard_range
        self.tag = tag
        self.unit = unit
        self.full_state, self.shard_state = FullState.EMPTY, ShardState.EMPTY
        self.buffer: torch.Tensor | None = None
        # This rank's part of the sum so far, in the shard dtype; None before the first reduction.
        self.shard: torch.Tensor | None = None
        # To be waited for before `shard` is used; None unless a sum is on its way to the host.
        self.landed: Arrival | None = None
        # The full gradient while it is filled, else None; in `slot`, or where autograd left it.
        self.full: torch.Tensor | None = None
        self.slot: Slot | None = None
        self.held: Slot | None = None
        self.arrived = [False] * len(layout.segments)
        self.used = [False] * len(layout.segments)  # per parameter, whether a gradient arrived since the last update
        self.slot_dtype = layout.dtype
        self.shard_in_full = True  # whether `shard` lies in the full gradient, in `held` then; otherwise in `buffer`
        # Ranges of `shard` that no other rank counts, in norms for example.
        self.counted = tuple(self._counted()) if is_first else ()
        self.shared = _shared_ranges(layout, own_range)

    def _counted(self) -> Iterator[tuple[int, int]]:
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

    def values(self) -> torch.Tensor | None:
        """Return the shard; None before the first reduction."""
        return self.shard

    def counted_values(self, mesh: Mesh, index: int | None = None) -> Iterator[torch.Tensor]:
        """Yield the values of the shard that this rank alone counts, 1-D; of one parameter if ``index`` is one."""
        if not mesh.is_first_copy:
            return
        assert self.shard is not None
        part = slice(0, self.shard.numel()) if index is None else self.part(index)
        for low, high in self.counted:
            start, stop = max(low, part.start), min(high, part.stop)
            if start < stop:
                yield self.shard[start:stop]

    def not_finite(self) -> str | None:
        """Name a parameter with a value in the shard that is not finite; None if there is none."""
        if self.shard is None or bool(self.shard.isfinite().all()):
            return None
        parts = ((segment.name, self.shard[self.part(n)]) for n, segment in enumerate(self.layout.segments))
        return next((name for name, part in parts if not bool(part.isfinite().all())), None)

    def scale(self, factor: float, index: int | None = None) -> None:
        """Multiply the shard by ``factor``; of one parameter if ``index`` is one."""
        if self.shard is not None:
            (self.shard if index is None else self.shard[self.part(index)]).mul_(factor)

    def count_once(self, mesh: Mesh) -> None:
        """Keep the sum on the first of the ranks that hold copies of it and zero the others, before more is added."""
        if self.shard is None:
            return
        if not mesh.is_first_copy or not self.is_first:
            self.shard.zero_()
        for ranges in self.shared.values():
            for start, stop, first in ranges:
                if not first:
                    self.shard[start:stop] = 0

    # The full gradient.

    @property
    def in_place(self) -> bool:
        """True if autograd leaves the gradient as it is to be: the one parameter's, in the dtype of the slot."""
        return self.layout.whole and self.slot_dtype == self.layout.dtype

    def choose(self, slot_dtype: torch.dtype, shard_in_full: bool) -> None:
        """Set the dtype of the next full gradient, and whether the shard lies in it."""
        self.slot_dtype, self.shard_in_full = slot_dtype, shard_in_full

    def adopt(self, value: torch.Tensor, factor: float) -> bool:
        """Make ``value`` itself the full gradient, times ``factor``; False if it is not alone in memory like that."""
        assert self.full_state is FullState.EMPTY, self.full_state
        memory = value.untyped_storage()
        if not (self.in_place and value.dtype == self.slot_dtype and value.is_contiguous()):
            return False
        # Somebody who has another view of it, as a hook that kept the gradient, would see the sum over the ranks in it.
        if memory.nbytes() != value.nbytes or torch._C._storage_Use_Count(memory._cdata) > ALONE:
            return False
        if not memory.resizable():
            return False  # it is of another library's, which may still use it
        if value.is_conj() or value.is_neg():
            return False  # in memory are other numbers, and what arrives from other ranks goes into memory
        self.full = value.view(-1) if factor == 1.0 else value.view(-1).mul_(factor)
        self.full_state = FullState.FILLING
        self.arrived[0] = self.used[0] = True
        return True

    def open(self, full: torch.Tensor, slot: Slot) -> None:
        """Fill ``full``, which lies in ``slot``, from here on."""
        assert self.full_state is FullState.EMPTY, self.full_state
        self.full, self.slot, self.full_state = full, slot, FullState.FILLING

    def widen(self, full: torch.Tensor, slot: Slot) -> Slot | None:
        """Go on filling ``full``, of a wider dtype, with what has arrived so far; return the slot of before."""
        assert self.full_state is FullState.FILLING, self.full_state
        assert self.full is not None
        before, self.full, self.slot = self.slot, full.copy_(self.full), slot
        return before

    def fill(self, index: int, value: torch.Tensor, factor: float) -> None:
        """Copy or add ``factor`` times parameter ``index``'s gradient into ``full``."""
        assert self.full_state is FullState.FILLING, self.full_state
        assert self.full is not None
        segment = self.layout.segments[index]
        target = self.full[segment.start : segment.stop].view(segment.shape)
        if self.arrived[index] and factor == 1.0:
            add(target, value)
        elif self.arrived[index]:
            target.add_(value, alpha=factor)
        elif factor == 1.0:
            target.copy_(value)
        elif value.dtype is target.dtype:
            torch.mul(value, factor, out=target)
        elif (wide := torch.promote_types(value.dtype, target.dtype)) is target.dtype:
            target.copy_(value).mul_(factor)
        else:
            torch.mul(value.to(wide), factor, out=target)  # rounded once
        self.arrived[index] = self.used[index] = True

    def zero_missing(self) -> None:
        """Zero what no gradient arrived for, and the padding: the slot still has what another unit left there."""
        assert self.full_state is FullState.FILLING, self.full_state
        assert self.full is not None
        missing = [(s.start, s.stop) for s, here in zip(self.layout.segments, self.arrived, strict=True) if not here]
        for start, stop in (*self.layout.gaps, *missing):
            self.full[start:stop] = 0

    # The shard.

    def begin_sum(self) -> tuple[torch.Tensor, Slot | None]:
        """Give up the full gradient and its slot to a reduction that begins; what arrives next fills another one."""
        assert self.full_state is FullState.FILLING, self.full_state
        assert self.shard_state is not ShardState.REDUCING, "two sums of one gradient would overwrite each other"
        assert self.full is not None
        full, slot = self.full, self.slot
        self.full = self.slot = None
        self.full_state, self.shard_state = FullState.EMPTY, ShardState.REDUCING
        self.arrived = [False] * len(self.arrived)
        return full, slot

    def keep(self, full: torch.Tensor, slot: Slot | None) -> Slot | None:
        """Take the sum that was made in a full gradient as the shard, or add it; return the slot if it is free."""
        assert self.shard_state is ShardState.REDUCING, self.shard_state
        self.shard_state = ShardState.READY
        if self.shard is None:
            self.shard, self.held = full[self.own], slot
            return None
        self.shard.add_(full[self.own])  # more gradients came after a reduction
        return slot

    def expect(self, shard: torch.Tensor, landed: Arrival | None = None) -> None:
        """Let the shard be this memory, with what is on its way to it."""
        assert self.shard_state in (ShardState.REDUCING, ShardState.EMPTY), self.shard_state
        self.shard, self.landed = shard, landed
        self.shard_state = ShardState.READY if landed is None else ShardState.LANDING

    def land(self) -> None:
        """Wait until the shard holds all that is on its way to it from the device."""
        if self.landed is not None:
            self.landed.wait()
            self.landed = None
        if self.shard_state is ShardState.LANDING:  # not where the next sum is reduced already
            self.shard_state = ShardState.READY

    def own_memory(self, dtype: torch.dtype, device: torch.device, pinned: bool) -> torch.Tensor:
        """Return memory of the shard's own, which is made the first time; see ``empty_on``."""
        if self.buffer is None:
            self.buffer = empty_on(self.tier, self.own.stop - self.own.start, dtype, device, pinned)
        return self.buffer

    def renew_memory(self) -> None:
        """Make other memory for the shard next time; a sum in the present one stays there until the update."""
        self.buffer = None

    def mark_used(self, used: Sequence[bool]) -> None:
        """Set which parameters count as used since the last update."""
        self.used = list(used)

    def drop(self, index: int) -> bool:
        """Forget what has come for a parameter since the last update; True if nothing is left of any parameter."""
        assert self.shard_state in (ShardState.EMPTY, ShardState.READY), self.shard_state
        self.arrived[index] = self.used[index] = False
        if self.shard is not None:
            self.shard[self.part(index)] = 0
        return not any(self.used) and not (self.shard is not None and bool(self.shard.any()))

    def forget(self) -> list[Slot]:
        """Forget the full gradient and the sum; return the slots that they lay in."""
        # In any state: a reduction that an exception has ended leaves its gradient where it was.
        slots = [slot for slot in (self.slot, self.held) if slot is not None]
        self.full = self.slot = self.shard = self.held = None
        self.full_state, self.shard_state = FullState.EMPTY, ShardState.EMPTY
        return slots

    def reset(self, keeps_memory: bool) -> None:
        """Begin a new update: nothing has arrived, and the shard's own memory on the device is given up or kept."""
        if not keeps_memory and self.tier is Tier.DEVICE:
            self.buffer = None
        self.arrived = [False] * len(self.arrived)
        self.used = [False] * len(self.used)


def _shared_ranges(layout: Layout, owned: slice) -> dict[int, list[tuple[int, int, bool]]]:
    """Return ranges of ``shard`` by how many tensor ranks share them: start, stop, whether this is the first."""
    ranges: dict[int, list[tuple[int, int, bool]]] = {}
    for segment, box in layout.within(owned.start, owned.stop):
        if box.sharers > 1:
            first = segment.start - owned.start
            ranges.setdefault(box.sharers, []).extend((first + a, first + b, box.owned) for a, b in box.runs)
    return ranges


class GradientArrival:
    """The engine's hook on a parameter, which takes each gradient."""

    def __init__(self, arrived: Callable[[Gradient, int, torch.Tensor], None], gradient: Gradient, index: int) -> None:
        # Weakly: the garbage collector does not see what a parameter's hook refers to, so that all would stay for ever.
        self._arrived = WeakMethod(arrived)
        self._gradient, self._index = gradient, index

    def __call__(self, parameter: torch.Tensor) -> None:
        """Signature of torch's hooks."""
        if self._gradient.used[self._index] and len(parameter._post_accumulate_grad_hooks) > 1:
            name = self._gradient.layout.segments[self._index].name
            raise RuntimeError(
                f"a hook on the accumulated gradient of {name} would see the gradient of one micro-batch, and not the "
                "sum of those since the last update; use one micro-batch per update, or parameter.register_hook, which "
                "sees the gradient of each"
            )
        if (arrived := self._arrived()) is not None:
            arrived(self._gradient, self._index, parameter)
