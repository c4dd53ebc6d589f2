"""Gradients: from where autograd leaves them, through a slot, to their home.

A gradient that arrives is copied (the first time) or added into the slot of its flat buffer, and freed. ``reduce``
turns the full gradient in the slot into this rank's part of the sum over the ranks, its *home*:

- gradient sharded: after each micro-batch, into a home of its own, where micro-batches are summed;
- gradient replicated: at the accumulation boundary; micro-batches are summed in the slot, and the home lies in it
  where the dtypes allow.

What is kept is the sum over ranks and micro-batches, of which a part of the division that makes it a mean may have been
done as gradients arrived (``predivide``); the update does the rest, once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeromesh.dist.collectives import Pending
from zeromesh.dist.mesh import Mesh
from zeromesh.model.placement import Placement, Row
from zeromesh.observe.spans import span
from zeromesh.shard.layout import Layout
from zeromesh.shard.slots import Pool, Slot, largest


@dataclass(frozen=True)
class GradientPolicy:
    """Where gradients are kept, in which dtypes, and how many are in the works at once.

    Attributes:
        sharded: reduce after every micro-batch into a sharded home; else at the accumulation boundary.
        owned: whether each rank ends up with its shard of the sum only (optimizer sharded), or with all of it.
        wire: dtype on the wire; None is the parameters'.
        accumulate: dtype of the sum; None is fp32 for 16-bit parameters, else the parameters'.
        slots: how many full gradients exist at once; None is what ``sharded`` implies: two, or all.
        predivide: gradients are divided by it as they arrive, before they are summed over the ranks; None divides by
            the number of ranks where that is exact, so that the mean costs no pass over memory of its own.
    """

    sharded: bool
    owned: bool
    wire: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    slots: int | None = None
    predivide: float | None = None

    @classmethod
    def of(cls, row: Row, **options: object) -> GradientPolicy:
        """The policy of a row of the placement table."""
        return cls(row.gradient is Placement.SHARDED, row.optimizer is Placement.SHARDED, **options)  # type: ignore[arg-type]

    def wire_dtype(self, layout: Layout) -> torch.dtype:
        """Dtype of this layout's gradients on the wire."""
        return self.wire if self.wire and layout.dtype.is_floating_point else layout.dtype

    def home_dtype(self, layout: Layout) -> torch.dtype:
        """Dtype in which this layout's gradients are summed and kept."""
        if self.accumulate and layout.dtype.is_floating_point:
            return self.accumulate
        return torch.float32 if layout.dtype in (torch.float16, torch.bfloat16) else layout.dtype


class Gradient:
    """The gradient of one flat buffer, between two updates.

    Attributes:
        unit: name of the unit that it is of.
        home: this rank's part of the sum so far, in the home dtype; None before the first reduction.
        full: the full gradient that is being filled, or None.
        used: per parameter, whether a gradient arrived since the last update.
        slot_dtype: of ``full``.
        home_in_slot: whether ``home`` lies in the slot; otherwise in ``buffer``.
    """

    def __init__(self, layout: Layout, own: slice, shard: slice, tag: int, unit: str = "") -> None:
        self.layout = layout
        self.own = own
        self.shard = shard
        self.tag = tag
        self.unit = unit
        self.buffer: torch.Tensor | None = None
        self.home: torch.Tensor | None = None
        self.full: torch.Tensor | None = None
        self.slot: Slot | None = None
        self.held: Slot | None = None
        self.arrived = [False] * len(layout.segments)
        self.used = [False] * len(layout.segments)
        self.slot_dtype = layout.dtype
        self.home_in_slot = True

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

    def zero_missing(self) -> None:
        """Zero what no gradient arrived for, so that the whole buffer can be summed."""
        assert self.full is not None
        missing = [(s.start, s.stop) for s, here in zip(self.layout.segments, self.arrived, strict=True) if not here]
        for start, stop in (*self.layout.gaps, *missing):
            self.full[start:stop] = 0


class Reducer:
    """Fills slots with gradients and reduces them into their homes.

    Attributes:
        begun: whether a backward has begun since the last update.
        predivide: gradients are divided by it as they arrive.
    """

    def __init__(self, gradients: Sequence[Gradient], policy: GradientPolicy, mesh: Mesh, accumulates: bool) -> None:
        self.gradients = tuple(gradients)
        self.policy = policy
        self._mesh = mesh
        self._group = mesh.shard
        self._in_flight: deque[tuple[Gradient, Slot, Slot | None, Pending, Slot]] = deque()
        self._gathering: deque[tuple[Gradient, Slot, torch.Tensor, Pending, Slot | None]] = deque()
        self._accumulates = accumulates
        for gradient in self.gradients:
            self._choose_dtype(gradient)
        self.predivide = self._predivide() if policy.predivide is None else policy.predivide
        self.begun = False
        self._last = True
        self._completed = False
        self._waiting = False
        count = policy.slots or (2 if policy.sharded else len(self.gradients))
        self._limit = max(1, min(2, count - 1))
        sizes = [g.layout.size * g.slot_dtype.itemsize for g in self.gradients]
        self.slots = Pool(largest(sizes, count), mesh.device)
        wires = [g.layout.size * policy.wire_dtype(g.layout).itemsize for g in self.gradients if self._converts(g)]
        # A sum that is sent to all ranks stays in its buffer while the next ones are made.
        self.wires = Pool(largest(wires, self._limit if policy.owned else self._limit + 1), mesh.device)
        receives = [self._receive_bytes(g) for g in self.gradients]
        self.receives = Pool(largest(receives, self._limit), mesh.device)
        for gradient in self.gradients:
            if not gradient.home_in_slot:
                dtype = policy.home_dtype(gradient.layout)
                gradient.buffer = torch.empty(gradient.own.stop - gradient.own.start, dtype=dtype, device=mesh.device)

    # What follows from the policy.

    def _predivide(self) -> float:
        """Dividing by a power of two is exact, but not among fp16's smallest numbers."""
        dtypes = {dtype for g in self.gradients for dtype in (g.slot_dtype, self.policy.wire_dtype(g.layout))}
        ranks = self._mesh.data_size
        return float(ranks) if ranks & (ranks - 1) == 0 and torch.float16 not in dtypes else 1.0

    def _choose_dtype(self, gradient: Gradient) -> None:
        """Micro-batches are summed where they are kept; what is reduced at once may stay as narrow as the wire."""
        at_once = self.policy.owned and (self.policy.sharded or not self._accumulates)
        home = self.policy.home_dtype(gradient.layout)
        gradient.slot_dtype = self.policy.wire_dtype(gradient.layout) if at_once else home
        gradient.home_in_slot = not self.policy.sharded and gradient.slot_dtype == home

    def _converts(self, gradient: Gradient) -> bool:
        return self._group.size > 1 and gradient.slot_dtype != self.policy.wire_dtype(gradient.layout)

    def _receive_bytes(self, gradient: Gradient) -> int:
        elements = self._group.receive_elements(gradient.layout.shard_size)
        return elements * self.policy.wire_dtype(gradient.layout).itemsize

    # The way of a gradient.

    def begin(self, last: bool) -> None:
        """A backward begins; ``last`` if an update follows it."""
        self.begun, self._last = True, last
        self._waiting = self._waiting and not last  # at its end all are reduced
        if self._completed and self._mesh.replicate.rank > 0:
            for gradient in self.gradients:
                if gradient.home is not None:
                    gradient.home.zero_()  # the replicas' sum counts once, with the first of them
        self._completed = False

    def arrive(self, gradient: Gradient, index: int, value: torch.Tensor) -> None:
        """Take the gradient of parameter ``index``; ``value`` may be freed afterwards."""
        if value.is_sparse:
            value = value.to_dense()
        if gradient.full is None:
            self._open(gradient)
        elif self._accumulates is False and gradient.arrived[index] and not self.policy.sharded:
            self._widen()
        with span("accumulate", gradient.unit):
            gradient.fill(index, value, 1.0 / self.predivide)

    def _widen(self) -> None:
        """Micro-batches turn out to be summed: from here on in the dtype that sums are kept in."""
        self._accumulates = True
        if all(gradient.slot_dtype == self.policy.home_dtype(gradient.layout) for gradient in self.gradients):
            return
        self.finish()
        for gradient in self.gradients:
            before, narrow, slot = gradient.slot_dtype, gradient.full, gradient.slot
            self._choose_dtype(gradient)
            if before == gradient.slot_dtype:
                continue
            gradient.buffer = None  # a sum that is in it already stays there as the home until the update
            if narrow is not None and slot is not None:
                self._open(gradient)
                assert gradient.full is not None
                gradient.full.copy_(narrow)
                self.slots.give(slot)

    def _open(self, gradient: Gradient) -> None:
        gradient.slot = self._take(self.slots, gradient.layout.size * gradient.slot_dtype.itemsize)
        gradient.full = gradient.slot.tensor(gradient.layout.size, gradient.slot_dtype)

    def _take(self, pool: Pool, nbytes: int) -> Slot:
        slot = pool.take(nbytes)
        while slot is None and self._settle():
            slot = pool.take(nbytes)
        return slot or pool.grow(nbytes)

    def _settle(self) -> bool:
        """Finish the oldest of what is under way; False if there is nothing."""
        if self._gathering:
            self._finish_gathering()
        elif self._in_flight:
            self._finish()
        else:
            return False
        return True

    def reduce(self, gradients: Sequence[Gradient]) -> None:
        """Start to sum these over the ranks, if it is time. All ranks call this in the same order."""
        if not (self.policy.sharded or self._last):
            self._waiting = True
            return
        for gradient in gradients:
            with span("reduce", gradient.unit):
                self._reduce(gradient)

    def _reduce(self, gradient: Gradient) -> None:
        if gradient.full is None:
            if self._group.size == 1 and gradient.home is not None:
                return
            self._open(gradient)
        assert gradient.full is not None
        assert gradient.slot is not None
        gradient.zero_missing()
        while len(self._in_flight) >= self._limit:
            self._finish()
        full, slot, wire_slot = gradient.full, gradient.slot, None
        wire = full
        if self._converts(gradient):
            dtype = self.policy.wire_dtype(gradient.layout)
            wire_slot = self._take(self.wires, gradient.layout.size * dtype.itemsize)
            wire = wire_slot.tensor(gradient.layout.size, dtype).copy_(full)
        receive_slot = self._take(self.receives, self._receive_bytes(gradient))
        elements = self._group.receive_elements(gradient.layout.shard_size)
        received = receive_slot.tensor(elements, wire.dtype)
        out, add = full[gradient.shard], False
        if not gradient.home_in_slot:
            assert gradient.buffer is not None
            out, add = gradient.buffer, gradient.home is not None
        pending = self._group.reduce_scatter(wire, received, out, add, gradient.tag + 1)
        self._in_flight.append((gradient, slot, wire_slot, pending, receive_slot))
        gradient.full, gradient.slot = None, None
        gradient.arrived = [False] * len(gradient.arrived)

    def _finish(self) -> None:
        """Wait for the oldest reduction and put its result where it belongs."""
        gradient, slot, wire_slot, pending, receive_slot = self._in_flight.popleft()
        with span("wait_reduce", gradient.unit):
            pending.wait()
        self.receives.give(receive_slot)
        if not gradient.home_in_slot:
            gradient.home = gradient.buffer
            self._release(slot, wire_slot)
            return
        full = slot.tensor(gradient.layout.size, gradient.slot_dtype)
        if self.policy.owned:
            self._keep(gradient, slot, full)
            self._release(None, wire_slot)
            return
        wire = full
        if wire_slot is not None:
            wire = wire_slot.tensor(gradient.layout.size, self.policy.wire_dtype(gradient.layout))
            wire[gradient.shard].copy_(full[gradient.shard])
        gathering = self._group.all_gather(wire, wire[gradient.shard], gradient.tag + 2)
        self._gathering.append((gradient, slot, wire, gathering, wire_slot))

    def _finish_gathering(self) -> None:
        """Wait for the oldest sum that is sent to all ranks."""
        gradient, slot, wire, pending, wire_slot = self._gathering.popleft()
        with span("wait_reduce", gradient.unit):
            pending.wait()
        full = slot.tensor(gradient.layout.size, gradient.slot_dtype)
        if wire_slot is not None:
            full.copy_(wire)
        self._keep(gradient, slot, full)
        self._release(None, wire_slot)

    def _release(self, slot: Slot | None, wire_slot: Slot | None) -> None:
        if slot is not None:
            self.slots.give(slot)
        if wire_slot is not None:
            self.wires.give(wire_slot)

    def _keep(self, gradient: Gradient, slot: Slot, full: torch.Tensor) -> None:
        """The sum stays in its slot, or joins the one kept before, if more gradients came after a reduction."""
        if gradient.home is None:
            gradient.home, gradient.held = full[gradient.own], slot
        else:
            gradient.home.add_(full[gradient.own])
            self.slots.give(slot)

    def finish(self) -> None:
        """Wait for every reduction that was started."""
        while self._in_flight:
            self._finish()
        while self._gathering:
            self._finish_gathering()

    def complete(self) -> None:
        """Reduce what has not been, sum over the replicas, and wait. Without effect until the next backward."""
        if self._completed:
            return
        self._last = self._completed = True
        self.finish()
        # After backwards without a reduction all of them, as ranks may differ in which gradients arrived. Else those of
        # weights that were used outside of their unit's forward, after the unit was reduced.
        self.reduce([gradient for gradient in self.gradients if self._waiting or gradient.full is not None])
        self._waiting = False
        self.finish()
        if self._mesh.replicate.size > 1:
            for gradient in self.gradients:
                with span("sum_replicas", gradient.unit):
                    self._sum_replicas(gradient)

    def _sum_replicas(self, gradient: Gradient) -> None:
        assert gradient.home is not None
        wire = gradient.home.to(self.policy.wire_dtype(gradient.layout))
        self._mesh.replicate.all_reduce(wire, gradient.tag + 3)
        if wire is not gradient.home:
            gradient.home.copy_(wire)

    def reset(self) -> None:
        """Forget all gradients: after an update, or after a backward that failed."""
        self.finish()
        for gradient in self.gradients:
            for slot in (gradient.slot, gradient.held):
                if slot is not None:
                    self.slots.give(slot)
            gradient.full = gradient.slot = gradient.home = gradient.held = None
            gradient.arrived = [False] * len(gradient.arrived)
            gradient.used = [False] * len(gradient.used)
        self.begun = self._completed = self._waiting = False
