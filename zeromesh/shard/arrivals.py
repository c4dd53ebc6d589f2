"""Gradients whose sums rest on the host: their way from the device, and the memory that they arrive in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from threading import Lock

import torch

from zeromesh.model.placement import Tier
from zeromesh.observe.spans import span
from zeromesh.shard.gradient import Gradient, GradientPolicy, Landing
from zeromesh.shard.slots import largest
from zeromesh.tiers.buffers import Buffer, Buffers
from zeromesh.tiers.link import DONE, Copy, Link
from zeromesh.tiers.memory import empty_on

ARRIVALS = 2
"""Buffers for sums that are added to their shards: one is added while another comes."""


class Arrival:
    """A sum on its way to its shard on the host, into which it is copied or added when it is there.

    Args:
        copy: from the device.
        landing: where it comes to on the host, 1-D; the shard itself, or memory that is not used otherwise meanwhile.
        shard: where it goes.
        adds: whether it is added to what is there.
        before: the one whose sum comes to the shard before this one's.
    """

    def __init__(
        self, copy: Copy, landing: torch.Tensor, shard: torch.Tensor, adds: bool, before: Landing | None = None
    ) -> None:
        self._copy = copy
        self._way: tuple[torch.Tensor, torch.Tensor] | None = (landing, shard)
        self._adds = adds
        self._before = before
        self._lock = Lock()

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
                shard.add_(landing)
            elif landing is not shard:
                shard.copy_(landing)
            self._way = self._before = None


class HostSums:
    """Copies sums from the device to their shards on the host, beside the backward.

    Args:
        gradients: all gradients; those on the device are left alone.
        policy: dtypes, and whether host memory is page-locked.
        device: that computes.
        link: to the host.
    """

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
        """Begin to copy a sum to the host, where it is copied or added to its shard.

        Args:
            gradient: whose sum it is.
            out: the sum on the device, 1-D.
            target: the shard.
            adds: whether the shard already holds a sum.

        Returns:
            The copy, which reads ``out`` until it has ended.
        """
        buffer = None
        if not self._link.apart:  # the device is the host: the sum is added from where it lies
            landing, copy = out, DONE
            self._link.count(out.nbytes)
        else:
            # The shard's own memory cannot be written to by a copy while it holds a sum, or in another dtype.
            if adds or out.dtype != target.dtype:
                buffer = self._take(out.nbytes)
            landing = target if buffer is None else buffer.tensor(out.numel(), out.dtype)
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
            sizes = [g.layout.shard_size * max(d.itemsize for d in found) for g, found in dtypes.items()]
            self._buffers = Buffers(
                largest(sizes, ARRIVALS),
                lambda size: empty_on(Tier.HOST, size, torch.uint8, self._device, self._policy.pinned),
            )
        buffer = self._buffers.take(nbytes)
        while buffer is None:
            with span("wait_copy"):
                arrival, free = self._arriving.popleft()
                arrival.wait()
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
