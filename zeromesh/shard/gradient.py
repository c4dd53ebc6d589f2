"""Gradients: from where autograd leaves them, through a slot, to their home.

A gradient that arrives is copied (the first time) or added into the slot of its flat buffer, and freed; unless it is
all that the flat buffer has, as an embedding's is: then it stays where autograd left it, without a slot. ``reduce``
turns the full gradient into this rank's part of the sum over the ranks, its *home*:

- gradient sharded: after each micro-batch, into a home of its own, where micro-batches are summed;
- gradient replicated: at the accumulation boundary; micro-batches are summed in the full gradient, and the home lies in
  it where the dtypes allow.

A home on the host is filled from the device when the sum is there, and micro-batches are summed on the host. The copy
runs beside the backward: what it reads on the device is given back when the current stream waits for it, and the host
waits for it, and adds it, when the home is used or memory for such sums has run out.

What is kept is the sum over ranks and micro-batches, of which a part of the division that makes it a mean may have been
done as gradients arrived (``predivide``); the update does the rest, once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from threading import Lock

import torch

from zeromesh.comm.collectives import Group, Pending
from zeromesh.comm.mesh import Mesh
from zeromesh.model.placement import Placement, Row, Tier
from zeromesh.observe.spans import span
from zeromesh.shard.layout import Layout
from zeromesh.shard.slots import Pool, Slot, largest
from zeromesh.tiers.buffers import Buffer, Buffers
from zeromesh.tiers.link import DONE, Copy, Link
from zeromesh.tiers.memory import empty_on

SHARES = 1 << 22
"""Elements that are summed over the tensor axis in one message, or one parameter's."""

SHARES_TAG = 13
"""Of these messages."""

ALONE = 2
"""References to the memory of a tensor that one variable holds, while it is asked for."""

ARRIVALS = 2
"""Sums that come to the host to be added to their homes, of which one is added while another comes."""

TIES_TAG = 64
"""Of the pipeline axis: the first of those for gradients of parameters that several stages have."""


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
        kept: whether slots and homes keep their memory between updates. Where parameters are sharded it is given back,
            as activations are at their most when there are no gradients; but not on the host, where there are none.
        pinned: whether homes on the host are page-locked.
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
    def of(cls, row: Row, **options: object) -> GradientPolicy:
        """The policy of a row of the placement table."""
        kept = row.parameter is Placement.REPLICATED
        sharded, owned = row.gradient is Placement.SHARDED, row.optimizer is Placement.SHARDED
        return cls(sharded, owned, kept=kept, pinned=row.pinned, **options)  # type: ignore[arg-type]

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
        full: the full gradient that is being filled, or None; in ``slot``, or where autograd left it.
        used: per parameter, whether a gradient arrived since the last update.
        slot_dtype: of ``full``.
        holders: places along the pipeline whose stages have these parameters, where they are tied over several stages;
            the first of them counts what all have.
        home_in_full: whether ``home`` lies in the full gradient, in ``held`` then; otherwise in ``buffer``.
        tier: where ``home`` rests.
        landed: to be waited for before ``home`` is used, on the host; None: there is nothing on its way to it.
    """

    def __init__(
        self, layout: Layout, own: slice, shard: slice, tag: int, unit: str = "", holders: Sequence[int] = (),
        tier: Tier = Tier.DEVICE,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.tier = tier
        self.holders = tuple(holders)
        self.own = own
        self.shard = shard
        self.tag = tag
        self.unit = unit
        self.buffer: torch.Tensor | None = None
        self.home: torch.Tensor | None = None
        self.landed: Arrival | None = None
        self.full: torch.Tensor | None = None
        self.slot: Slot | None = None
        self.held: Slot | None = None
        self.arrived = [False] * len(layout.segments)
        self.used = [False] * len(layout.segments)
        self.slot_dtype = layout.dtype
        self.home_in_full = True
        self.counted = tuple(self._counted())
        self.shared = self._shared()

    def _counted(self) -> Iterator[tuple[int, int]]:
        """Ranges of ``home`` that are counted on this rank, together all that it has that no other rank counts."""
        boxes = list(self.layout.within(self.shard.start, self.shard.stop))
        if all(box.owned for _, box in boxes):  # what lies between is zero
            start = self.shard.start - self.own.start
            yield start, start + self.layout.shard_size
            return
        for segment, box in boxes:
            first = segment.start - self.own.start
            yield from ((first + low, first + high) for low, high in box.runs if box.owned)

    def part(self, index: int) -> slice:
        """Return the range of ``home`` that parameter ``index`` has; empty where other ranks have all of it."""
        segment = self.layout.segments[index]
        start, stop = (min(max(at, self.own.start), self.own.stop) for at in (segment.start, segment.stop))
        return slice(start - self.own.start, stop - self.own.start)

    def _shared(self) -> dict[int, list[tuple[int, int, bool]]]:
        """By the number of ranks along the tensor axis that have shares of them, ranges of ``home``.

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
        """Whether autograd leaves the gradient as it is to be: the one parameter's, in the dtype of the slot."""
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

    def zero_missing(self) -> None:
        """Zero what no gradient arrived for, so that the whole buffer can be summed."""
        assert self.full is not None
        missing = [(s.start, s.stop) for s, here in zip(self.layout.segments, self.arrived, strict=True) if not here]
        for start, stop in (*self.layout.gaps, *missing):
            self.full[start:stop] = 0


class Arrival:
    """A sum on its way to its home on the host, into which it is copied or added when it is there.

    Args:
        copy: from the device.
        landing: where it comes to on the host, 1-D; the home itself, or memory that is not used otherwise meanwhile.
        home: where it goes.
        adds: whether it is added to what is there.
        before: the one whose sum comes to the home before this one's.
    """

    def __init__(
        self, copy: Copy, landing: torch.Tensor, home: torch.Tensor, adds: bool, before: Arrival | None = None
    ) -> None:
        self._copy = copy
        self._way: tuple[torch.Tensor, torch.Tensor] | None = (landing, home)
        self._adds = adds
        self._before = before
        self._lock = Lock()

    def wait(self) -> None:
        """Block until the home holds the sum. Any thread may call it, and again."""
        with self._lock:
            if self._way is None:
                return
            if self._before is not None:
                self._before.wait()
            self._copy.wait()
            landing, home = self._way
            if self._adds:
                home.add_(landing)
            elif landing is not home:
                home.copy_(landing)
            self._way = self._before = None


class Reducer:
    """Fills slots with gradients and reduces them into their homes.

    Attributes:
        begun: whether a backward has begun since the last update.
        predivide: gradients are divided by it as they arrive.
        on_home: called when the last sum before an update is on its way to a home on the host, whose ``landed`` tells
            when it is there; again if gradients of weights that are used outside of their unit come later. Sums over
            replicas, shares and ties are made in ``complete``, after it.
    """

    def __init__(
        self, gradients: Sequence[Gradient], policy: GradientPolicy, mesh: Mesh, accumulates: bool, link: Link
    ) -> None:
        self.gradients = tuple(gradients)
        self.policy = policy
        self.on_home: Callable[[Gradient], None] | None = None
        self._link = link
        self._leaving: list[_Leaving] = []
        self._arriving: deque[tuple[Arrival, Buffer]] = deque()
        self._mesh = mesh
        self._group = mesh.shard
        self._in_flight: deque[_Reduction] = deque()
        self._gathering: deque[_Reduction] = deque()
        self._accumulates = accumulates
        for gradient in self.gradients:
            self._choose_dtype(gradient)
        self.predivide = self._predivide() if policy.predivide is None else policy.predivide
        self.begun = False
        self._completed = False
        self._waiting = False
        self._incoming = 1.0 / self.predivide  # factor of gradients that arrive
        self._averaged = 1.0  # factor that sums were multiplied by to be means
        count = policy.slots or (2 if policy.sharded else len(self.gradients))
        self._limit = max(1, min(2, count - 1))
        sizes = [g.layout.size * g.slot_dtype.itemsize for g in self.gradients if not g.in_place]
        self.slots = Pool(largest(sizes, count), mesh.device)
        wires = [g.layout.size * policy.wire_dtype(g.layout).itemsize for g in self.gradients if self._converts(g)]
        # A sum that is sent to all ranks stays in its buffer while the next ones are made.
        self.wires = Pool(largest(wires, self._limit if policy.owned else self._limit + 1), mesh.device)
        receives = [self._receive_bytes(g) for g in self.gradients]
        self.receives = Pool(largest(receives, self._limit), mesh.device)
        landings = [self._landing_bytes(g) for g in self.gradients]
        self.landings = Pool(largest(landings, self._limit), mesh.device)
        self._arrivals = Buffers([])

    # What follows from the policy.

    def _predivide(self) -> float:
        """Dividing by a power of two is exact, but not among fp16's smallest numbers."""
        dtypes = {dtype for g in self.gradients for dtype in (g.slot_dtype, self.policy.wire_dtype(g.layout))}
        ranks = self._mesh.gradients
        return float(ranks) if ranks & (ranks - 1) == 0 and torch.float16 not in dtypes else 1.0

    def _choose_dtype(self, gradient: Gradient) -> None:
        """Micro-batches are summed where they are kept; what is reduced at once may stay as narrow as the wire."""
        at_once = self.policy.owned and (self.policy.sharded or not self._accumulates)
        home = self.policy.home_dtype(gradient.layout)
        gradient.slot_dtype = self.policy.wire_dtype(gradient.layout) if at_once else home
        at_home = gradient.tier is Tier.DEVICE and gradient.slot_dtype == home
        gradient.home_in_full = at_home and not self.policy.sharded

    def _converts(self, gradient: Gradient) -> bool:
        return self._group.size > 1 and gradient.slot_dtype != self.policy.wire_dtype(gradient.layout)

    @property
    def home_bytes(self) -> dict[Tier, int]:
        """What homes take that do not lie in full gradients."""
        found = dict.fromkeys(Tier, 0)
        for gradient in self.gradients:
            if not gradient.home_in_full:
                dtype = self._buffer_dtype(gradient)
                found[gradient.tier] += (gradient.own.stop - gradient.own.start) * dtype.itemsize
        return found

    @property
    def arrival_bytes(self) -> int:
        """On the host, for sums that are added to their homes; where the device is the host there are none."""
        return self._arrivals.nbytes

    @property
    def full_bytes(self) -> int:
        """What full gradients take, in slots and where autograd left them; the latter as many as may be under way."""
        left = [g.layout.nbytes for g in self.gradients if g.in_place]
        return self.slots.nbytes + sum(largest(left, self._limit if self.policy.sharded else len(left)))

    def _receive_bytes(self, gradient: Gradient) -> int:
        elements = self._group.receive_elements(gradient.layout.shard_size)
        return elements * self.policy.wire_dtype(gradient.layout).itemsize

    def _landing_bytes(self, gradient: Gradient) -> int:
        """On the device, for a sum that goes to the host."""
        if gradient.tier is Tier.DEVICE or self._group.size == 1:
            return 0
        return gradient.layout.shard_size * self.policy.home_dtype(gradient.layout).itemsize

    def _buffer_dtype(self, gradient: Gradient) -> torch.dtype:
        """Of the home's own memory: on the host as narrow as what comes, where nothing is ever added to it."""
        alone = self._mesh.gradients == 1 and not (self._accumulates or gradient.shared or gradient.holders)
        home = self.policy.home_dtype(gradient.layout)
        exact = torch.promote_types(gradient.slot_dtype, home) is home  # a home that is no wider rounds
        return gradient.slot_dtype if gradient.tier is not Tier.DEVICE and alone and exact else home

    @property
    def factor(self) -> float:
        """The factor that makes the mean over the ranks of what is kept, but for the loss scale."""
        return self.predivide / (self._mesh.gradients * self._averaged)

    @property
    def waits(self) -> bool:
        """Whether some gradient is not summed over the ranks, though its backward has ended."""
        return self._waiting or any(gradient.full is not None for gradient in self.gradients)

    # The way of a gradient.

    def begin(self, last: bool, factor: float = 1.0) -> None:
        """A backward begins; ``last`` if an update follows it; its gradients are multiplied by ``factor``."""
        self.begun = True
        self._incoming = factor / self.predivide
        self.average(1.0 / self._averaged)
        self._waiting = self._waiting and not last  # at its end all are reduced
        if self._completed:
            self._count_sums_once()
        self._completed = False

    def arrive(self, gradient: Gradient, index: int, value: torch.Tensor) -> None:
        """Take the gradient of parameter ``index``; the caller gives up ``value``."""
        if value.is_sparse:
            value = value.to_dense()
        with span("accumulate", gradient.unit):
            if gradient.full is None:
                if gradient.adopt(value, self._incoming):
                    return
                self._open(gradient)
            elif self._accumulates is False and gradient.arrived[index] and not self.policy.sharded:
                self._widen()
            gradient.fill(index, value, self._incoming)

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
            if narrow is not None:
                self._open(gradient)
                assert gradient.full is not None
                gradient.full.copy_(narrow)
                _give(self.slots, slot)

    def _open(self, gradient: Gradient) -> None:
        gradient.slot = self._take(self.slots, gradient.layout.size * gradient.slot_dtype.itemsize)
        gradient.full = gradient.slot.tensor(gradient.layout.size, gradient.slot_dtype)

    def _take(self, pool: Pool, nbytes: int) -> Slot:
        slot = pool.take(nbytes)
        while slot is None and (self._release(pool) or self._settle()):
            slot = pool.take(nbytes)
        return slot or pool.grow(nbytes)

    def _release(self, pool: Pool | None = None) -> bool:
        """Give back the memory of the oldest sum, or the oldest in a pool, that leaves the device; False: none does.

        The host goes on: what gets the memory next is behind the current stream, which waits for the copy.
        """
        leaving = next((one for one in self._leaving if pool is None or one.pool is pool), None)
        if leaving is None:
            return False
        self._leaving.remove(leaving)
        leaving.copy.order()
        _give(leaving.pool, leaving.slot)
        return True

    def _settle(self) -> bool:
        """Finish the oldest of what is under way; False if there is nothing."""
        if self._gathering:
            self._finish_gathering()
        elif self._in_flight:
            self._finish()
        else:
            return False
        return True

    def reduce(self, gradients: Sequence[Gradient], last: bool) -> None:
        """Start to sum these over the ranks, if it is time; ``last``: no more is added before the update.

        All ranks call this in the same order.
        """
        if not (self.policy.sharded or last):
            self._waiting = True
            return
        for gradient in gradients:
            with span("reduce", gradient.unit):
                self._reduce(gradient, last)
            while self._in_flight and self._group.size == 1 and gradient.tier is not Tier.DEVICE:
                self._finish()  # there is nothing to wait for: it leaves now

    def _reduce(self, gradient: Gradient, last: bool) -> None:
        if gradient.full is None:
            if self._group.size == 1 and gradient.home is not None:
                return
            self._open(gradient)
        assert gradient.full is not None
        gradient.zero_missing()
        while len(self._in_flight) >= self._limit:
            self._finish()
        full, wire_slot = gradient.full, None
        wire = full
        if self._converts(gradient):
            dtype = self.policy.wire_dtype(gradient.layout)
            wire_slot = self._take(self.wires, gradient.layout.size * dtype.itemsize)
            wire = wire_slot.tensor(gradient.layout.size, dtype).copy_(full)
        receive_slot = self._take(self.receives, self._receive_bytes(gradient))
        elements = self._group.receive_elements(gradient.layout.shard_size)
        received = receive_slot.tensor(elements, wire.dtype)
        out, add, landing = full[gradient.shard], False, None
        if gradient.tier is not Tier.DEVICE:
            if self._group.size > 1:
                landing = self._take(self.landings, self._landing_bytes(gradient))
                out = landing.tensor(gradient.layout.shard_size, self.policy.home_dtype(gradient.layout))
        elif not gradient.home_in_full:
            out, add = self._buffer(gradient), gradient.home is not None
        form = self._mesh.links.reduce
        pending = self._group.reduce_scatter(wire, received, out, add, gradient.tag + 1, form)
        done = _Reduction(gradient, full, gradient.slot, wire, wire_slot, pending, receive_slot, out, landing, last)
        self._in_flight.append(done)
        gradient.full, gradient.slot = None, None
        gradient.arrived = [False] * len(gradient.arrived)

    def _buffer(self, gradient: Gradient) -> torch.Tensor:
        if gradient.buffer is None:
            elements, dtype = gradient.own.stop - gradient.own.start, self._buffer_dtype(gradient)
            gradient.buffer = empty_on(gradient.tier, elements, dtype, self._mesh.device, self.policy.pinned)
        return gradient.buffer

    def _bring_home(self, done: _Reduction) -> Copy:
        """Begin to copy a sum to the host, where it is copied or added to its home."""
        gradient, out, home = done.gradient, done.out, done.gradient.home
        with span("offload", gradient.unit):
            dtype = self.policy.home_dtype(gradient.layout)
            if home is not None and home.itemsize < dtype.itemsize:
                self._accumulates = True  # more is added than was said
                self._land(gradient)
                wide = empty_on(gradient.tier, home.numel(), dtype, self._mesh.device, self.policy.pinned)
                home = gradient.buffer = wide.copy_(home)
            target, adds, buffer = self._buffer(gradient) if home is None else home, home is not None, None
            if not self._link.apart:
                landing, copy = out, DONE
                self._link.moved += out.nbytes
            else:
                if adds or out.dtype != target.dtype:
                    buffer = self._take_arrival(out.nbytes)
                landing = target if buffer is None else buffer.tensor(out.numel(), out.dtype)
                copy = self._link.to_host(landing, out)
            gradient.home = target
            gradient.landed = arrival = Arrival(copy, landing, target, adds, gradient.landed)
            if buffer is not None:
                self._arriving.append((arrival, buffer))
            elif not self._link.apart:
                self._land(gradient)
        return copy

    def _take_arrival(self, nbytes: int) -> Buffer:
        """Memory on the host for a sum that is not copied to its home as it is; waits for an older one if need be."""
        if self._arrivals.nbytes == 0:
            dtypes = {g: (g.slot_dtype, self.policy.home_dtype(g.layout)) for g in self._on_host}
            sizes = [g.layout.shard_size * max(d.itemsize for d in found) for g, found in dtypes.items()]
            self._arrivals = Buffers(
                largest(sizes, ARRIVALS),
                lambda size: empty_on(Tier.HOST, size, torch.uint8, self._mesh.device, self.policy.pinned),
            )
        buffer = self._arrivals.take(nbytes)
        while buffer is None:
            with span("wait_copy"):
                arrival, free = self._arriving.popleft()
                arrival.wait()
            self._arrivals.give(free)
            buffer = self._arrivals.take(nbytes)
        return buffer

    @property
    def _on_host(self) -> list[Gradient]:
        return [gradient for gradient in self.gradients if gradient.tier is not Tier.DEVICE]

    @staticmethod
    def _land(gradient: Gradient) -> None:
        """Wait until the home holds all that is on its way to it."""
        if gradient.landed is not None:
            gradient.landed.wait()
            gradient.landed = None

    def _land_all(self) -> None:
        on_host = self._on_host
        with span("wait_copy") if on_host else nullcontext():
            for gradient in on_host:
                self._land(gradient)
        for _, buffer in self._arriving:
            self._arrivals.give(buffer)
        self._arriving.clear()

    def _finish(self) -> None:
        """Wait for the oldest reduction and put its result where it belongs."""
        done = self._in_flight.popleft()
        gradient = done.gradient
        with span("wait_reduce", gradient.unit):
            done.pending.wait()
        _give(self.receives, done.receive_slot)
        if gradient.tier is not Tier.DEVICE:
            self._leave(done, self._bring_home(done))
        elif not gradient.home_in_full:
            gradient.home = gradient.buffer
            _give(self.slots, done.slot)
            _give(self.wires, done.wire_slot)
        elif self.policy.owned:
            self._keep(done)
        else:
            if done.wire is not done.full:
                done.wire[gradient.shard].copy_(done.full[gradient.shard])
            own, form = done.wire[gradient.shard], self._mesh.links.reduce
            gathering = self._group.all_gather(done.wire, own, gradient.tag + 2, form)
            self._gathering.append(replace(done, pending=gathering))

    def _leave(self, done: _Reduction, copy: Copy) -> None:
        """Give back what a sum that is copied to the host does not lie in, and the rest when it is there."""
        _give(self.wires, done.wire_slot)
        if done.landing is None:
            self._leaving.append(_Leaving(copy, self.slots, done.slot))
        else:
            _give(self.slots, done.slot)
            self._leaving.append(_Leaving(copy, self.landings, done.landing))
        while len(self._leaving) > (self._limit if self._link.apart else 0):
            self._release()
        if done.last and self.on_home is not None:
            self.on_home(done.gradient)

    def _finish_gathering(self) -> None:
        """Wait for the oldest sum that is sent to all ranks."""
        done = self._gathering.popleft()
        with span("wait_reduce", done.gradient.unit):
            done.pending.wait()
        if done.wire is not done.full:
            done.full.copy_(done.wire)
        self._keep(done)

    def _keep(self, done: _Reduction) -> None:
        """The sum stays where it is, or joins the one kept before, if more gradients came after a reduction."""
        gradient = done.gradient
        if gradient.home is None:
            gradient.home, gradient.held = done.full[gradient.own], done.slot
        else:
            gradient.home.add_(done.full[gradient.own])
            _give(self.slots, done.slot)
        _give(self.wires, done.wire_slot)

    def finish(self) -> None:
        """Wait for every reduction that was started. The host does not wait for what leaves the device."""
        while self._in_flight:
            self._finish()
        while self._gathering:
            self._finish_gathering()
        while self._release():
            pass
        if not self.policy.kept:
            for pool in (self.slots, self.wires, self.receives, self.landings):
                pool.trim()

    def complete(self) -> None:
        """Reduce what has not been, sum over the replicas, and wait. Without effect until the next backward."""
        if self._completed:
            return
        self._completed = True
        self.finish()
        # After backwards without a reduction all of them, as ranks may differ in which gradients arrived. Else those of
        # weights that were used outside of their unit's forward, after the unit was reduced.
        rest = [gradient for gradient in self.gradients if self._waiting or gradient.full is not None]
        self.reduce(rest, last=True)
        self._waiting = False
        self.finish()
        self._land_all()
        for gradient in self.gradients:
            if gradient.home is None:
                self._make_home(gradient)
        if self._mesh.replicate.size > 1:
            self._sum_replicas()
        self._sum_shares()
        self._sum_ties()

    def _count_sums_once(self) -> None:
        """Sums over ranks that hold the same are kept by the first of them, where more is to be added to them."""
        for gradient in self.gradients:
            if gradient.home is None:
                continue
            if self._mesh.replicate.rank > 0 or not self.counts(gradient):
                gradient.home.zero_()
            for ranges in gradient.shared.values():
                for start, stop, first in ranges:
                    if not first:
                        gradient.home[start:stop] = 0

    def _sum_shares(self) -> None:
        """Sum what several ranks along the tensor axis have shares of, many small ranges at a time."""
        for sharers in sorted({sharers for gradient in self.gradients for sharers in gradient.shared}):
            group = self._mesh.neighbours("tensor", sharers)
            waiting: list[torch.Tensor] = []
            elements = 0
            for gradient in self.gradients:
                assert gradient.home is not None
                for start, stop, _ in gradient.shared.get(sharers, ()):
                    part = gradient.home[start:stop]
                    if waiting and (part.dtype != waiting[0].dtype or elements + part.numel() > SHARES):
                        _sum_together(waiting, group)
                        waiting, elements = [], 0
                    waiting.append(part)
                    elements += part.numel()
            if waiting:
                _sum_together(waiting, group)

    def counts(self, gradient: Gradient) -> bool:
        """Whether this rank's stage is the one that counts what several stages have."""
        return not gradient.holders or gradient.holders[0] == self._mesh.group("pipeline").rank

    def _sum_ties(self) -> None:
        """Sum the gradients of parameters that several stages have, in the order of stages; what one used, all did."""
        group = self._mesh.group("pipeline")
        for number, gradient in enumerate(tied for tied in self.gradients if tied.holders):
            assert gradient.home is not None
            used = torch.tensor(gradient.used, dtype=gradient.home.dtype, device=group.device)
            own = torch.cat([gradient.home.to(group.device), used])
            rows = {place: own if place == group.rank else torch.empty_like(own) for place in gradient.holders}
            others = [place for place in gradient.holders if place != group.rank]
            sends, receives = dict.fromkeys(others, own), {place: rows[place] for place in others}
            group.send_and_receive(sends, receives, TIES_TAG + number, "tied gradients").wait()
            total = rows[gradient.holders[0]].clone()
            for place in gradient.holders[1:]:
                total += rows[place]
            gradient.home.copy_(total[: gradient.home.numel()])
            gradient.used = total[gradient.home.numel() :].bool().tolist()

    def _sum_replicas(self) -> None:
        """Sum the homes over the replicas; while one sum is sent the next ones are made."""
        sums: deque[tuple[Gradient, torch.Tensor, Callable[[], Pending]]] = deque()
        for gradient in self.gradients:
            assert gradient.home is not None
            wire = gradient.home.to(self._mesh.device, self.policy.wire_dtype(gradient.layout))
            begun = self._mesh.replicate.begin_all_reduce(wire, gradient.tag + 3, self._mesh.links.reduce)
            sums.append((gradient, wire, begun))
            if len(sums) > self._limit:
                self._end_sum(*sums.popleft())
        while sums:
            self._end_sum(*sums.popleft())

    @staticmethod
    def _end_sum(gradient: Gradient, wire: torch.Tensor, send: Callable[[], Pending]) -> None:
        assert gradient.home is not None
        with span("sum_replicas", gradient.unit):
            send().wait()
            if wire is not gradient.home:
                gradient.home.copy_(wire)

    # Changes by the user.

    def average(self, factor: float) -> None:
        """Multiply all sums by ``factor``, which makes means of them; undone when the next backward begins."""
        if factor != 1.0:
            for gradient in self.gradients:
                if gradient.home is not None:
                    gradient.home.mul_(factor)
            self._averaged *= factor

    def put(self, gradient: Gradient, index: int, value: torch.Tensor, factor: float) -> None:
        """Let ``value`` be the mean gradient of a parameter, from which ``factor`` has made the mean; no messages."""
        self._settle_home(gradient)
        if gradient.home is None:
            self._make_home(gradient)
        assert gradient.home is not None
        segment, part = gradient.layout.segments[index], gradient.part(index)
        first = max(0, gradient.own.start - segment.start)
        gradient.home[part] = segment.held.cut(value).reshape(-1)[first : first + part.stop - part.start] / factor
        gradient.used[index] = self.begun = True

    def drop(self, gradient: Gradient, index: int) -> None:
        """Forget what has come for a parameter since the last update; no messages."""
        self._settle_home(gradient)
        gradient.arrived[index] = gradient.used[index] = False
        if gradient.home is not None:
            gradient.home[gradient.part(index)] = 0
        if not any(gradient.used) and not (gradient.home is not None and bool(gradient.home.any())):
            _give(self.slots, gradient.slot)
            _give(self.slots, gradient.held)
            gradient.full = gradient.slot = gradient.home = gradient.held = None

    def _settle_home(self, gradient: Gradient) -> None:
        self.finish()
        self._land(gradient)

    def _make_home(self, gradient: Gradient) -> None:
        """Give a gradient of which nothing is left, on this rank at least, a home of zeros."""
        if gradient.home_in_full:
            self._open(gradient)
            assert gradient.full is not None
            gradient.home, gradient.held = gradient.full[gradient.own].zero_(), gradient.slot
            gradient.full = gradient.slot = None
        else:
            gradient.home = self._buffer(gradient).zero_()

    def reset(self) -> None:
        """Forget all gradients: after an update, or after a backward that failed."""
        self.finish()
        self._land_all()
        for gradient in self.gradients:
            _give(self.slots, gradient.slot)
            _give(self.slots, gradient.held)
            if not self.policy.kept and gradient.tier is Tier.DEVICE:
                gradient.buffer = None
            gradient.full = gradient.slot = gradient.home = gradient.held = None
            gradient.arrived = [False] * len(gradient.arrived)
            gradient.used = [False] * len(gradient.used)
        self.begun = self._completed = self._waiting = False
        self._averaged = 1.0


@dataclass(frozen=True)
class _Reduction:
    """The sum of a full gradient, under way.

    Attributes:
        slot: that ``full`` lies in; None where autograd left it.
        wire: what is sent: ``full`` itself, or in ``wire_slot`` where the dtype is another.
        receive_slot: where the other ranks' parts come in.
        out: where the sum is put, or added to.
        landing: that ``out`` lies in, where it goes on to the host.
        last: whether no more is added before the update.
    """

    gradient: Gradient
    full: torch.Tensor
    slot: Slot | None
    wire: torch.Tensor
    wire_slot: Slot | None
    pending: Pending
    receive_slot: Slot
    out: torch.Tensor
    landing: Slot | None
    last: bool


@dataclass(frozen=True, eq=False)
class _Leaving:
    """A sum that is copied to the host, in a slot of a pool; or, without one, where autograd left it."""

    copy: Copy
    pool: Pool
    slot: Slot | None


def _sum_together(parts: Sequence[torch.Tensor], group: Group) -> None:
    """Sum 1-D tensors of one dtype over the ranks, in place, in one message."""
    with span("sum_shares"):
        together = (parts[0] if len(parts) == 1 else torch.cat(list(parts))).to(group.device)
        group.all_reduce(together, SHARES_TAG)
        if together is not parts[0]:
            for part, total in zip(parts, together.split([part.numel() for part in parts]), strict=True):
                part.copy_(total)


def _give(pool: Pool, slot: Slot | None) -> None:
    if slot is not None:
        pool.give(slot)
