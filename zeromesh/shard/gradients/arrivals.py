"""Copies of gradients' sums from the device to their shards on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from zeromesh.base.placement import Tier
from zeromesh.base.spans import span
from zeromesh.shard.gradients.gradient import Arrival, Gradient, GradientPolicy
from zeromesh.shard.parameters.slots import largest
from zeromesh.shard.store.link import DONE, Copy, Link
from zeromesh.shard.store.memory import Buffer, Buffers, empty_on

ARRIVALS = 2  # buffers for sums that are added to their shards: one is added while another comes


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
