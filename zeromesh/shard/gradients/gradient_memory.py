"""Memory for gradients: pools on the device for full ones and their sums, and the way of sums to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from zeromesh.base.axes import AXES
from zeromesh.base.placement import Tier
from zeromesh.base.spans import span
from zeromesh.comm.collectives import Group
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.gradients.gradient import Arrival, Gradient, GradientPolicy
from zeromesh.shard.parameters.slots import Pool, Slot, largest
from zeromesh.shard.sizes import FullGradient, GradientPools, PoolRules, bytes_of, full_gradient, gradient_pools
from zeromesh.shard.store.link import DONE, Copy, Link
from zeromesh.shard.store.memory import Buffer, Buffers, empty_on

ARRIVALS = 2  # buffers for sums that are added to their shards: one is added while another comes


class _Leaving(NamedTuple):
    copy: Copy  # of a sum, to the host
    pool: Pool
    slot: Slot | None  # that the sum lies in; None where autograd left it


class GradientMemory:
    """Lends the buffers that full gradients and their sums lie in."""

    def __init__(
        self,
        gradients: Sequence[Gradient],
        policy: GradientPolicy,
        mesh: Mesh,
        accumulates: bool,
        settle: Callable[[], bool],
    ) -> None:
        self._gradients, self._policy, self._mesh = gradients, policy, mesh
        self._rules = PoolRules(policy.sharded, policy.owned, accumulates, policy.slots)
        # Finishes the oldest reduction under way, which frees its buffers; returns False if there is none.
        self._settle = settle
        self._leaving: list[_Leaving] = []
        for gradient in gradients:
            self._choose_dtype(gradient)
        self.limit = self._rules.limit(len(gradients))  # number of reductions under way at a time
        sizes = self._sizes()
        # Full gradients, those in the dtype that is sent where it is another one, the parts of other ranks, and sums
        # that go on to the host.
        self.slots, self.wires, self.receives, self.landings = (
            Pool((int(size) for size, number in pool for _ in range(number)), mesh.device)
            for pool in (sizes.slots, sizes.wires, sizes.receives, sizes.landings)
        )

    def _choose_dtype(self, gradient: Gradient) -> None:
        """Sum micro-batches in the dtype of the shard; keep what is reduced at once as narrow as the wire."""
        shard_dtype = self._policy.shard_dtype(gradient.layout)
        slot_dtype = self._policy.wire_dtype(gradient.layout) if self._rules.narrow else shard_dtype
        stays = gradient.tier is Tier.DEVICE and slot_dtype == shard_dtype
        gradient.choose(slot_dtype, shard_in_full=stays and not self._policy.sharded)

    def _sizes(self) -> GradientPools:
        return gradient_pools(map(self._bytes, self._gradients), self._rules)

    def _bytes(self, gradient: Gradient) -> FullGradient:
        layout, policy, group = gradient.layout, self._policy, self._group(gradient)
        dtypes = gradient.slot_dtype, policy.wire_dtype(layout), policy.shard_dtype(layout)
        width, wire, shard_width = (dtype.itemsize for dtype in dtypes)
        return full_gradient(
            (layout.size, layout.shard_size, group.receive_elements(layout.shard_size)),
            (width, wire, shard_width),
            converts=self.converts(gradient),
            lands=gradient.tier is not Tier.DEVICE and group.size > 1,
            adopted=gradient.in_place,
            experts=AXES[layout.axis].folded,
        )

    def _group(self, gradient: Gradient) -> Group:
        """Return the ranks over which a gradient is summed."""
        return self._mesh.shards_of(gradient.layout.axis)

    def converts(self, gradient: Gradient) -> bool:
        """Return whether a gradient is sent in another dtype than that of its slot."""
        return self._group(gradient).size > 1 and gradient.slot_dtype != self._policy.wire_dtype(gradient.layout)

    def _buffer_dtype(self, gradient: Gradient) -> torch.dtype:
        """Return the dtype of the shard's own memory; as narrow as the sum on the host, if nothing is added to it."""
        alone = self._mesh.gradients == 1 and not (self._rules.accumulates or gradient.shared or gradient.tied_stages)
        shard_dtype = self._policy.shard_dtype(gradient.layout)
        exact = torch.promote_types(gradient.slot_dtype, shard_dtype) is shard_dtype  # a shard that is no wider rounds
        return gradient.slot_dtype if gradient.tier is not Tier.DEVICE and alone and exact else shard_dtype

    # Accounting.

    @property
    def shard_bytes(self) -> dict[Tier, int]:
        """Bytes of shards that do not lie in full gradients, by tier."""
        sizes = dict.fromkeys(Tier, 0)
        for gradient in self._gradients:
            if not gradient.shard_in_full:
                elements = gradient.own.stop - gradient.own.start
                sizes[gradient.tier] += elements * self._buffer_dtype(gradient).itemsize
        return sizes

    @property
    def full_bytes(self) -> int:
        """Bytes of full gradients, in slots and where autograd left them (as many as may be under way)."""
        return self.slots.nbytes + int(bytes_of(self._sizes().adopted))

    @property
    def pools(self) -> tuple[Pool, ...]:
        """All pools; that of the slots is the first."""
        return self.slots, self.wires, self.receives, self.landings

    # Loans.

    def _lend(self, pool: Pool, elements: int, dtype: torch.dtype) -> tuple[torch.Tensor, Slot]:
        """Return a tensor in a slot; sums that leave or are under way are finished for it."""
        nbytes = elements * dtype.itemsize
        slot = pool.take(nbytes)
        # Sums that leave come first, as the host does not wait for them.
        while slot is None and (self.release(pool) or self._settle()):
            slot = pool.take(nbytes)
        slot = slot or pool.grow(nbytes)
        return slot.tensor(elements, dtype), slot

    def _lend_full(self, gradient: Gradient) -> tuple[torch.Tensor, Slot]:
        return self._lend(self.slots, gradient.layout.size, gradient.slot_dtype)

    def open(self, gradient: Gradient) -> None:
        """Let a gradient fill a slot from here on."""
        gradient.open(*self._lend_full(gradient))

    def wire(self, gradient: Gradient) -> tuple[torch.Tensor, Slot]:
        """Return memory for the full gradient in the dtype that is sent."""
        return self._lend(self.wires, gradient.layout.size, self._policy.wire_dtype(gradient.layout))

    def receive(self, gradient: Gradient, dtype: torch.dtype) -> tuple[torch.Tensor, Slot | None]:
        """Return memory for the other ranks' parts; without a slot where none is needed."""
        elements = self._group(gradient).receive_elements(gradient.layout.shard_size)
        if not elements:  # nor does this sum have to wait for others to end
            return torch.empty(0, dtype=dtype, device=self._mesh.device), None
        return self._lend(self.receives, elements, dtype)

    def landing(self, gradient: Gradient) -> tuple[torch.Tensor, Slot]:
        """Return memory on the device for a sum that goes on to the host."""
        return self._lend(self.landings, gradient.layout.shard_size, self._policy.shard_dtype(gradient.layout))

    def shard(self, gradient: Gradient) -> torch.Tensor:
        """Return the shard's own memory, on its tier."""
        return gradient.own_memory(self._buffer_dtype(gradient), self._mesh.device, self._policy.pinned)

    # Changes.

    def expect_sums(self, gradient: Gradient) -> torch.Tensor | None:
        """Return a shard to which a sum is added, as wide as sums are; None where nothing has been summed yet."""
        shard, dtype = gradient.shard, self._policy.shard_dtype(gradient.layout)
        if shard is None or shard.itemsize >= dtype.itemsize:
            return shard
        self._rules = replace(self._rules, accumulates=True)  # more is added than was expected
        gradient.land()
        gradient.renew_memory()
        return self.shard(gradient).copy_(shard)

    def widen(self, finish: Callable[[], None]) -> None:
        """Sum micro-batches, which were not expected, in the dtype that sums are kept in from here on."""
        if self._rules.accumulates or self._policy.sharded:
            return
        self._rules = replace(self._rules, accumulates=True)
        if all(gradient.slot_dtype == self._policy.shard_dtype(gradient.layout) for gradient in self._gradients):
            return
        finish()
        for gradient in self._gradients:
            before = gradient.slot_dtype
            self._choose_dtype(gradient)
            if before == gradient.slot_dtype:
                continue
            gradient.renew_memory()
            if gradient.full is not None:
                self.give(self.slots, gradient.widen(*self._lend_full(gradient)))

    # Returns.

    @staticmethod
    def give(pool: Pool, slot: Slot | None) -> None:
        """Return a slot; None where autograd left the gradient, or nothing was converted or received."""
        if slot is not None:
            pool.give(slot)

    def leave(self, copy: Copy, pool: Pool, slot: Slot | None, most: int) -> None:
        """Return a slot once the sum in it has left for the host; at most so many sums leave at a time."""
        self._leaving.append(_Leaving(copy, pool, slot))
        while len(self._leaving) > most:
            self.release()

    def release(self, pool: Pool | None = None) -> bool:
        """Return the slot of the oldest sum, or the oldest in a pool, that leaves the device; False: none does."""
        leaving = next((candidate for candidate in self._leaving if pool is None or candidate.pool is pool), None)
        if leaving is None:
            return False
        self._leaving.remove(leaving)
        # Whatever gets the memory next is launched behind the current stream, which waits for the copy here.
        leaving.copy.order()
        self.give(leaving.pool, leaving.slot)
        return True

    def trim(self) -> None:
        """Give back the memory of all buffers that are not lent."""
        for pool in self.pools:
            pool.trim()


class HostSums:
    """Copies sums from the device to their shards on the host, beside the backward."""

    def __init__(self, gradients: Sequence[Gradient], policy: GradientPolicy, device: torch.device, link: Link) -> None:
        self._gradients = [gradient for gradient in gradients if gradient.tier is not Tier.DEVICE]
        self._policy, self._device, self._link = policy, device, link
        self._arriving: deque[tuple[Arrival, Buffer]] = deque()
        self._buffers = Buffers([])

    @property
    def nbytes(self) -> int:
        """Size of the buffers, which are made when the first sum is added to another."""
        return self._buffers.nbytes

    def send(self, gradient: Gradient, out: torch.Tensor, target: torch.Tensor, adds: bool) -> Copy:
        """Begin to copy a sum to the host, where it is copied or added to its shard."""
        buffer = None
        # A micro-batch is added on the host: the device has no memory for the sum of those before it.
        if not self._link.apart:  # the device is the host: the sum is added from where it lies
            landing, copy = out, DONE
            self._link.count(out.nbytes)
        else:
            # The shard's own memory cannot be written to by a copy while it holds a sum, or in another dtype.
            if adds or out.dtype != target.dtype:
                buffer = self._take(out.nbytes)
            landing = target if buffer is None else buffer.tensor(out.numel(), out.dtype)
            # On its own stream, behind the current one, which has made the sum. The returned copy says when `out`, on
            # the device, is free; the host waits for it only where the shard is used, or where buffers have run out.
            copy = self._link.to_host(landing, out)
        arrival = Arrival(copy, landing, target, adds, gradient.landed)
        gradient.expect(target, arrival)
        if buffer is not None:
            self._arriving.append((arrival, buffer))
        elif not self._link.apart:
            gradient.land()
        return copy

    def _take(self, nbytes: int) -> Buffer:
        """Return memory for a sum that is not copied straight to its shard; wait for an older sum if need be."""
        if self._buffers.nbytes == 0:
            dtypes = {g: (g.slot_dtype, self._policy.shard_dtype(g.layout)) for g in self._gradients}
            sizes = [g.layout.shard_size * max(d.itemsize for d in pair) for g, pair in dtypes.items()]
            self._buffers = Buffers(
                largest(sizes, ARRIVALS),
                lambda size: empty_on(Tier.HOST, size, torch.uint8, self._device, self._policy.pinned),
            )
        buffer = self._buffers.take(nbytes)
        while buffer is None:
            with span("wait_copy"):
                arrival, free = self._arriving.popleft()
                arrival.wait()  # the host waits for the stream of copies, and adds the sum: the buffer was read then
            self._buffers.give(free)
            buffer = self._buffers.take(nbytes)
        return buffer

    def land(self) -> None:
        """Wait until all shards on the host hold their sums."""
        with span("wait_copy") if self._gradients else nullcontext():
            for gradient in self._gradients:
                gradient.land()
        for _, buffer in self._arriving:
            self._buffers.give(buffer)
        self._arriving.clear()
