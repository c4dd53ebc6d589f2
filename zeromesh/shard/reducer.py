"""Reduction of gradients: from full gradients in slots to this rank's part of their sum over the ranks.

- gradient sharded: after each micro-batch, into a shard of its own, where micro-batches are summed;
- gradient replicated: at the accumulation boundary; micro-batches are summed in the full gradient, and the shard lies in
  it where the dtypes allow.

A shard on the host is filled from the device when the sum is there, and micro-batches are summed on the host
(``zeromesh.shard.arrivals``). The copy runs beside the backward: its memory on the device is given back when the
current stream waits for it. The host waits for it when the shard is used, or when memory for such sums has run out.

Homes hold sums over ranks and micro-batches. A part of the division that makes a mean may have been done as gradients
arrived (``predivide``); the update does the rest, once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from zeromesh.comm.collectives import Pending
from zeromesh.comm.mesh import Mesh
from zeromesh.model.placement import Tier
from zeromesh.observe.spans import span
from zeromesh.shard.arrivals import HostSums
from zeromesh.shard.gradient import Gradient, GradientPolicy
from zeromesh.shard.slots import Pool, Slot, largest
from zeromesh.shard.sums import count_once, sum_copies
from zeromesh.tiers.link import Copy, Link
from zeromesh.tiers.memory import empty_on


class Reducer:
    """Fills slots with gradients and reduces them into their shards.

    Attributes:
        begun: whether a backward has begun since the last update.
        predivide: gradients are divided by it as they arrive.
        on_shard: called when the last sum before an update is on its way to a shard on the host, whose ``landed`` tells
            when it is there; again if gradients of weights that are used outside of their unit come later. Sums over
            replicas, shares and ties are made in ``complete``, after it.
    """

    def __init__(
        self, gradients: Sequence[Gradient], policy: GradientPolicy, mesh: Mesh, accumulates: bool, link: Link
    ) -> None:
        self.gradients = tuple(gradients)
        self.policy = policy
        self.on_shard: Callable[[Gradient], None] | None = None
        self._link = link
        self._leaving: list[_Leaving] = []
        self._on_host = HostSums(self.gradients, policy, mesh.device, link)
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

    # What follows from the policy.

    def _predivide(self) -> float:
        """Dividing by a power of two is exact, but not among fp16's smallest numbers."""
        dtypes = {dtype for g in self.gradients for dtype in (g.slot_dtype, self.policy.wire_dtype(g.layout))}
        ranks = self._mesh.gradients
        return float(ranks) if ranks & (ranks - 1) == 0 and torch.float16 not in dtypes else 1.0

    def _choose_dtype(self, gradient: Gradient) -> None:
        """Micro-batches are summed where they are kept; what is reduced at once may stay as narrow as the wire."""
        at_once = self.policy.owned and (self.policy.sharded or not self._accumulates)
        shard = self.policy.shard_dtype(gradient.layout)
        gradient.slot_dtype = self.policy.wire_dtype(gradient.layout) if at_once else shard
        kept = gradient.tier is Tier.DEVICE and gradient.slot_dtype == shard
        gradient.shard_in_full = kept and not self.policy.sharded

    def _converts(self, gradient: Gradient) -> bool:
        return self._group.size > 1 and gradient.slot_dtype != self.policy.wire_dtype(gradient.layout)

    @property
    def shard_bytes(self) -> dict[Tier, int]:
        """Bytes of shards that do not lie in full gradients, by tier."""
        found = dict.fromkeys(Tier, 0)
        for gradient in self.gradients:
            if not gradient.shard_in_full:
                dtype = self._buffer_dtype(gradient)
                found[gradient.tier] += (gradient.own.stop - gradient.own.start) * dtype.itemsize
        return found

    @property
    def arrival_bytes(self) -> int:
        """On the host, for sums that are added to their shards; where the device is the host there are none."""
        return self._on_host.nbytes

    @property
    def full_bytes(self) -> int:
        """Bytes of full gradients, in slots and where autograd left them (as many as may be under way)."""
        left = [g.layout.nbytes for g in self.gradients if g.in_place]
        return self.slots.nbytes + sum(largest(left, self._limit if self.policy.sharded else len(left)))

    def _receive_bytes(self, gradient: Gradient) -> int:
        elements = self._group.receive_elements(gradient.layout.shard_size)
        return elements * self.policy.wire_dtype(gradient.layout).itemsize

    def _landing_bytes(self, gradient: Gradient) -> int:
        """On the device, for a sum that goes to the host."""
        if gradient.tier is Tier.DEVICE or self._group.size == 1:
            return 0
        return gradient.layout.shard_size * self.policy.shard_dtype(gradient.layout).itemsize

    def _buffer_dtype(self, gradient: Gradient) -> torch.dtype:
        """Return the dtype of the shard's own memory; as narrow as the sum on the host, if nothing is added to it."""
        alone = self._mesh.gradients == 1 and not (self._accumulates or gradient.shared or gradient.tied_stages)
        shard = self.policy.shard_dtype(gradient.layout)
        exact = torch.promote_types(gradient.slot_dtype, shard) is shard  # a shard that is no wider rounds
        return gradient.slot_dtype if gradient.tier is not Tier.DEVICE and alone and exact else shard

    @property
    def factor(self) -> float:
        """The factor that makes the mean over the ranks of what is kept, but for the loss scale."""
        return self.predivide / (self._mesh.gradients * self._averaged)

    @property
    def waits(self) -> bool:
        """True if some gradient is not summed over the ranks, though its backward has ended."""
        return self._waiting or any(gradient.full is not None for gradient in self.gradients)

    # The way of a gradient.

    def begin(self, last: bool, factor: float = 1.0) -> None:
        """A backward begins; ``last`` if an update follows it; its gradients are multiplied by ``factor``."""
        self.begun = True
        self._incoming = factor / self.predivide
        self.average(1.0 / self._averaged)
        self._waiting = self._waiting and not last  # at its end all are reduced
        if self._completed:
            count_once(self.gradients, self._mesh)
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
        if all(gradient.slot_dtype == self.policy.shard_dtype(gradient.layout) for gradient in self.gradients):
            return
        self.finish()
        for gradient in self.gradients:
            before, narrow, slot = gradient.slot_dtype, gradient.full, gradient.slot
            self._choose_dtype(gradient)
            if before == gradient.slot_dtype:
                continue
            gradient.buffer = None  # a sum that is in it already stays there as the shard until the update
            if narrow is not None:
                self._open(gradient)
                assert gradient.full is not None
                gradient.full.copy_(narrow)
                _give(self.slots, slot)

    def _open(self, gradient: Gradient) -> None:
        slot = self._take(self.slots, gradient.layout.size * gradient.slot_dtype.itemsize)
        gradient.open(slot.tensor(gradient.layout.size, gradient.slot_dtype), slot)

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
            if self._group.size == 1 and gradient.shard is not None:
                return
            self._open(gradient)
        assert gradient.full is not None
        gradient.zero_missing()
        while len(self._in_flight) >= self._limit:
            self._finish()
        full = wire = gradient.full
        wire_slot = None
        if self._converts(gradient):
            dtype = self.policy.wire_dtype(gradient.layout)
            wire_slot = self._take(self.wires, gradient.layout.size * dtype.itemsize)
            wire = wire_slot.tensor(gradient.layout.size, dtype).copy_(full)
        receive_slot = self._take(self.receives, self._receive_bytes(gradient))
        elements = self._group.receive_elements(gradient.layout.shard_size)
        received = receive_slot.tensor(elements, wire.dtype)
        out, add, landing = full[gradient.shard_range], False, None
        if gradient.tier is not Tier.DEVICE:
            if self._group.size > 1:
                landing = self._take(self.landings, self._landing_bytes(gradient))
                out = landing.tensor(gradient.layout.shard_size, self.policy.shard_dtype(gradient.layout))
        elif not gradient.shard_in_full:
            out, add = self._buffer(gradient), gradient.shard is not None
        form = self._mesh.links.reduce
        pending = self._group.reduce_scatter(wire, received, out, add, gradient.tag + 1, form)
        full, slot = gradient.close()
        done = _Reduction(gradient, full, slot, wire, wire_slot, pending, receive_slot, out, landing, last)
        self._in_flight.append(done)

    def _buffer(self, gradient: Gradient) -> torch.Tensor:
        if gradient.buffer is None:
            elements, dtype = gradient.own.stop - gradient.own.start, self._buffer_dtype(gradient)
            gradient.buffer = empty_on(gradient.tier, elements, dtype, self._mesh.device, self.policy.pinned)
        return gradient.buffer

    def _send_shard(self, done: _Reduction) -> Copy:
        """Begin to copy a sum to the host, where it is copied or added to its shard."""
        gradient, shard = done.gradient, done.gradient.shard
        with span("offload", gradient.unit):
            dtype = self.policy.shard_dtype(gradient.layout)
            if shard is not None and shard.itemsize < dtype.itemsize:
                self._accumulates = True  # more is added than was said
                gradient.land()
                wide = empty_on(gradient.tier, shard.numel(), dtype, self._mesh.device, self.policy.pinned)
                shard = gradient.buffer = wide.copy_(shard)
            target = self._buffer(gradient) if shard is None else shard
            return self._on_host.send(gradient, done.out, target, adds=shard is not None)

    def _finish(self) -> None:
        """Wait for the oldest reduction and put its result where it belongs."""
        done = self._in_flight.popleft()
        gradient = done.gradient
        with span("wait_reduce", gradient.unit):
            done.pending.wait()
        _give(self.receives, done.receive_slot)
        if gradient.tier is not Tier.DEVICE:
            self._leave(done, self._send_shard(done))
        elif not gradient.shard_in_full:
            gradient.expect(self._buffer(gradient))
            _give(self.slots, done.slot)
            _give(self.wires, done.wire_slot)
        elif self.policy.owned:
            self._keep(done)
        else:
            if done.wire is not done.full:
                done.wire[gradient.shard_range].copy_(done.full[gradient.shard_range])
            own, form = done.wire[gradient.shard_range], self._mesh.links.reduce
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
        if done.last and self.on_shard is not None:
            self.on_shard(done.gradient)

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
        if gradient.shard is None:
            gradient.keep(done.full, done.slot)
        else:
            gradient.shard.add_(done.full[gradient.own])
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
        self._on_host.land()
        for gradient in self.gradients:
            if gradient.shard is None:
                self._make_shard(gradient)
        sum_copies(self.gradients, self._mesh, self.policy, self._limit)

    # Changes by the user.

    def average(self, factor: float) -> None:
        """Multiply all sums by ``factor``, which makes means of them; undone when the next backward begins."""
        if factor != 1.0:
            for gradient in self.gradients:
                if gradient.shard is not None:
                    gradient.shard.mul_(factor)
            self._averaged *= factor

    def put(self, gradient: Gradient, index: int, value: torch.Tensor, factor: float) -> None:
        """Let ``value`` be the mean gradient of a parameter, from which ``factor`` has made the mean; no messages."""
        self._settle_shard(gradient)
        if gradient.shard is None:
            self._make_shard(gradient)
        assert gradient.shard is not None
        segment, part = gradient.layout.segments[index], gradient.part(index)
        first = max(0, gradient.own.start - segment.start)
        gradient.shard[part] = segment.held.cut(value).reshape(-1)[first : first + part.stop - part.start] / factor
        gradient.used[index] = self.begun = True

    def drop(self, gradient: Gradient, index: int) -> None:
        """Forget what has come for a parameter since the last update; no messages."""
        self._settle_shard(gradient)
        gradient.arrived[index] = gradient.used[index] = False
        if gradient.shard is not None:
            gradient.shard[gradient.part(index)] = 0
        if not any(gradient.used) and not (gradient.shard is not None and bool(gradient.shard.any())):
            for slot in gradient.forget():
                self.slots.give(slot)

    def _settle_shard(self, gradient: Gradient) -> None:
        self.finish()
        gradient.land()

    def _make_shard(self, gradient: Gradient) -> None:
        """Give a gradient of which nothing is left, on this rank at least, a shard of zeros."""
        if gradient.shard_in_full:
            self._open(gradient)
            assert gradient.full is not None
            gradient.full[gradient.own] = 0
            gradient.keep(*gradient.close())
        else:
            gradient.expect(self._buffer(gradient).zero_())

    def reset(self) -> None:
        """Forget all gradients: after an update, or after a backward that failed."""
        self.finish()
        self._on_host.land()
        for gradient in self.gradients:
            for slot in gradient.forget():
                self.slots.give(slot)
            gradient.reset(keeps_memory=self.policy.kept or gradient.tier is not Tier.DEVICE)
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


def _give(pool: Pool, slot: Slot | None) -> None:
    if slot is not None:
        pool.give(slot)
