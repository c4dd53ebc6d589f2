"""Reduction of gradients: from full gradients to this rank's shard of their sum over the ranks.

- gradient sharded: after each micro-batch, into a shard with memory of its own, where micro-batches are summed;
- gradient replicated: at the accumulation boundary; micro-batches are summed in the full gradient, and the shard lies
  in it where the dtypes allow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zeromesh.base.placement import Tier
from zeromesh.base.spans import span
from zeromesh.comm.collectives import Pending
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.gradients.gradient import FullState, Gradient, GradientPolicy, ShardState
from zeromesh.shard.gradients.gradient_memory import GradientMemory, HostSums
from zeromesh.shard.gradients.gradient_sums import SummedGradient, sum_copies
from zeromesh.shard.parameters.slots import Slot
from zeromesh.shard.store.link import Link
from zeromesh.shard.tables.table import RowArrival
from zeromesh.shard.tables.tables import Tables


@dataclass(eq=False, slots=True)
class _Reduction:
    gradient: Gradient
    full: torch.Tensor
    slot: Slot | None  # of `full`; None where autograd left it
    wire: torch.Tensor  # what is sent: `full` itself, or a copy in another dtype
    wire_slot: Slot | None
    pending: Pending
    receive_slot: Slot | None  # for the other ranks' parts
    out: torch.Tensor  # that the sum is put into, or added to
    landing: Slot | None  # of `out`, where it goes on to the host
    last: bool  # no more is added before the update


class Reducer:
    """Fills slots with gradients and reduces them into their shards."""

    def __init__(
        self,
        gradients: Sequence[Gradient],
        policy: GradientPolicy,
        mesh: Mesh,
        accumulates: bool,
        link: Link,
        tables: Tables,
    ) -> None:
        self.gradients = tuple(gradients)
        self.policy = policy
        self.tables = tables  # their gradients are rows, which are summed at the boundary only
        self.sums: tuple[SummedGradient, ...] = (*(table.gradient for table in tables.trained), *gradients)
        self.memory = GradientMemory(self.gradients, policy, mesh, accumulates, self._settle)
        # Called when the last sum before an update is on its way to a shard on the host; `landed` tells when it is
        # there. It is called again if gradients of weights that are used outside of their unit come later.
        self.on_shard: Callable[[Gradient], None] | None = None
        self._link = link
        self._on_host = HostSums(self.gradients, policy, mesh.device, link)
        self._mesh = mesh
        self._in_flight: deque[_Reduction] = deque()
        self._gathering: deque[_Reduction] = deque()
        # Gradients are divided by it as they arrive, so that the mean needs no pass over memory of its own. The update
        # does the rest of the division, once.
        self.predivide = _exact_divisor(gradients, policy, mesh) if policy.predivide is None else policy.predivide
        self.begun = False  # a backward has begun since the last update
        self._completed = False
        self._waiting = False  # some backward has ended without a reduction
        self._incoming = 1.0 / self.predivide  # factor of gradients that arrive
        self._averaged = 1.0  # factor that sums were multiplied by to be means

    @property
    def host_bytes(self) -> int:
        """Bytes on the host for sums that are added to their shards; 0 where the device is the host."""
        return self._on_host.nbytes

    @property
    def factor(self) -> float:
        """The factor that makes the mean over the ranks, or their sum, of what is kept, but for the loss scale."""
        shares = self._mesh.gradients / (self._mesh.data_size if self.policy.summed else 1)
        return self.predivide / (shares * self._averaged)

    @property
    def waits(self) -> bool:
        """True if some gradient is not summed over the ranks, though its backward has ended."""
        return self._waiting or any(gradient.full_state is FullState.FILLING for gradient in self.gradients)

    # During a backward.

    def listen(self, on_shard: Callable[[Gradient], None]) -> None:
        """Set ``on_shard``."""
        self.on_shard = on_shard

    def begin(self, last: bool, factor: float = 1.0) -> None:
        """Begin a backward; ``last`` if an update follows it; its gradients are multiplied by ``factor``."""
        self.begun = True
        self._incoming = factor / self.predivide
        self.average(1.0 / self._averaged)
        self._waiting = self._waiting and not last  # at its end all are reduced
        if self._completed:
            # The sums over replicas and shares were made: each counts once in those that follow.
            for summed in self.sums:
                summed.count_once(self._mesh)
        self._completed = False

    def arrive(self, gradient: Gradient | RowArrival, index: int, value: torch.Tensor) -> None:
        """Take the gradient of parameter ``index``, or of rows; the caller gives up ``value``."""
        if isinstance(gradient, RowArrival):
            gradient.take(value, self._incoming)
            return
        if value.is_sparse:
            value = value.to_dense()
        with span("accumulate", gradient.unit):
            if gradient.full_state is FullState.EMPTY:
                if gradient.adopt(value, self._incoming):
                    return
                self.memory.open(gradient)
            elif gradient.arrived[index]:
                self.memory.widen(self.finish)
            gradient.fill(index, value, self._incoming)

    def reduce(self, gradients: Sequence[Gradient], last: bool) -> None:
        """Start to sum these over the ranks, if it is time; ``last``: no more is added before the update."""
        # All ranks call this in the same order, as each reduction is a collective.
        if not (self.policy.sharded or last):
            self._waiting = True
            return
        for gradient in gradients:
            with span("reduce", gradient.unit):
                self._reduce(gradient, last)
            while (
                self._in_flight
                and self._mesh.shards_of(gradient.layout.axis).size == 1
                and gradient.tier is not Tier.DEVICE
            ):
                self._finish()  # there is nothing to wait for: it leaves now

    def _reduce(self, gradient: Gradient, last: bool) -> None:
        group = self._mesh.shards_of(gradient.layout.axis)
        # Two sums at once would both overwrite what the shard held before.
        while gradient.shard_state is ShardState.REDUCING and self._settle():
            pass
        if gradient.full_state is FullState.EMPTY:
            if group.size == 1 and gradient.shard is not None:
                return
            self.memory.open(gradient)  # other ranks may have gradients, and wait for this one
        assert gradient.full is not None
        gradient.zero_missing()
        while len(self._in_flight) >= self.memory.limit:
            self._finish()
        full = wire = gradient.full
        wire_slot = landing = None
        if self.memory.converts(gradient):
            wire, wire_slot = self.memory.wire(gradient)
            wire.copy_(full)
        received, receive_slot = self.memory.receive(gradient, wire.dtype)
        out, add = full[gradient.shard_range], False
        if gradient.tier is not Tier.DEVICE:
            if group.size > 1:
                out, landing = self.memory.landing(gradient)
        elif not gradient.shard_in_full:
            out, add = self.memory.shard(gradient), gradient.shard is not None
        form = self._mesh.links.reduce
        # On CUDA the collective's stream waits here for the current one, which has written `wire`, and for the last
        # readers of the slots of `received` and `out`.
        pending = group.reduce_scatter(wire, received, out, add, gradient.tag + 1, form)
        full, slot = gradient.begin_sum()
        done = _Reduction(gradient, full, slot, wire, wire_slot, pending, receive_slot, out, landing, last)
        self._in_flight.append(done)

    # The end of a reduction.

    def _settle(self) -> bool:
        """Finish the oldest of what is under way; False if there is nothing."""
        if self._gathering:
            self._finish_gathering()
        elif self._in_flight:
            self._finish()
        else:
            return False
        return True

    def _finish(self) -> None:
        """Wait for the oldest reduction and put its result where it belongs."""
        done = self._in_flight.popleft()
        gradient, memory = done.gradient, self.memory
        with span("wait_reduce", gradient.unit):
            done.pending.wait()
        # On CUDA the current stream now waits for the collective's stream. Whoever gets one of these slots next writes
        # to it on the current stream, or in a collective that is begun behind it, and so after the collective has read
        # it.
        memory.give(memory.receives, done.receive_slot)
        if gradient.tier is not Tier.DEVICE:
            self._send_to_host(done)
        elif not gradient.shard_in_full:
            gradient.expect(memory.shard(gradient))
            memory.give(memory.slots, done.slot)
            memory.give(memory.wires, done.wire_slot)
        elif self.policy.owned:
            self._keep(done)
        else:
            if done.wire is not done.full:
                done.wire[gradient.shard_range].copy_(done.full[gradient.shard_range])
            shard, form = done.wire[gradient.shard_range], self._mesh.links.reduce
            done.pending = self._mesh.shards_of(gradient.layout.axis).all_gather(
                done.wire, shard, gradient.tag + 2, form
            )
            self._gathering.append(done)

    def _send_to_host(self, done: _Reduction) -> None:
        """Begin to copy a sum to its shard on the host; what it lies in is given back when it is there."""
        gradient, memory = done.gradient, self.memory
        with span("offload", gradient.unit):
            shard = memory.expect_sums(gradient)
            target = memory.shard(gradient) if shard is None else shard
            copy = self._on_host.send(gradient, done.out, target, adds=shard is not None)
        memory.give(memory.wires, done.wire_slot)  # only the collective has read it, and the current stream has waited
        # The stream of copies to the host still reads the sum: its slot waits in `leave` for that stream.
        most = memory.limit if self._link.apart else 0
        if done.landing is None:
            memory.leave(copy, memory.slots, done.slot, most)
        else:
            memory.give(memory.slots, done.slot)
            memory.leave(copy, memory.landings, done.landing, most)
        if done.last and self.on_shard is not None:
            self.on_shard(gradient)

    def _finish_gathering(self) -> None:
        done = self._gathering.popleft()
        with span("wait_reduce", done.gradient.unit):
            done.pending.wait()
        if done.wire is not done.full:
            done.full.copy_(done.wire)  # on the current stream, which the next writer of `wire` is launched behind
        self._keep(done)

    def _keep(self, done: _Reduction) -> None:
        self.memory.give(self.memory.slots, done.gradient.keep(done.full, done.slot))
        self.memory.give(self.memory.wires, done.wire_slot)

    def finish(self) -> None:
        """Wait for every reduction that was started. The host does not wait for what leaves the device."""
        # In the order in which they were started: a sum that is finished may start a gathering, which is a collective.
        while self._in_flight:
            self._finish()
        while self._gathering:
            self._finish_gathering()
        while self.memory.release():
            pass
        if not self.policy.kept:
            self.memory.trim()

    def complete(self) -> None:
        """Reduce what has not been, sum over the replicas, and wait. Without effect until the next backward."""
        if self._completed:
            return
        self._completed = True
        self.finish()
        # After backwards without a reduction all of them, as ranks may differ in which gradients arrived. Those that
        # are late on this rank may be on time on another: see `add_late`.
        alone = self._mesh.world_size == 1
        self._sum([self._waiting or (alone and late) for late in late_of(self)])
        self.tables.complete()

    def add_late(self, late: Sequence[bool]) -> None:
        """Sum gradients that were late on some rank, after ``complete``. All ranks call it with the same."""
        for gradient in self.gradients:
            gradient.count_once(self._mesh)
        self._sum(late)

    def _sum(self, chosen: Sequence[bool]) -> None:
        self.reduce([gradient for gradient, here in zip(self.gradients, chosen, strict=True) if here], last=True)
        self._waiting = False
        self.finish()
        self._on_host.land()
        for gradient in self.gradients:
            if gradient.shard is None:
                self._make_zero(gradient)
        sum_copies(self.gradients, self._mesh, self.policy, self.memory.limit)

    def _make_zero(self, gradient: Gradient) -> torch.Tensor:
        """Give a gradient of which nothing is left, on this rank at least, a shard of zeros, and return it."""
        if gradient.shard_in_full:
            self.memory.open(gradient)
            assert gradient.full is not None
            gradient.full[gradient.own] = 0
            gradient.keep(*gradient.begin_sum())
        else:
            gradient.expect(self.memory.shard(gradient).zero_())
        assert gradient.shard is not None
        return gradient.shard

    def reset(self) -> None:
        """Forget all gradients: after an update, or after a backward that failed."""
        self.finish()
        self._on_host.land()
        for gradient in self.gradients:
            for slot in gradient.forget():
                self.memory.slots.give(slot)
        for summed in self.sums:
            summed.reset(keeps_memory=self.policy.kept)
        self.begun = self._completed = self._waiting = False
        self._averaged = 1.0

    @contextmanager
    def resetting(self) -> Iterator[None]:
        """Forget all gradients if the context raises, as ranks may differ in which of them were summed."""
        try:
            yield
        except BaseException:
            self.reset()
            raise

    # Changes by the user.

    def average(self, factor: float) -> None:
        """Multiply all sums by ``factor``, which makes means of them; undone when the next backward begins."""
        if factor != 1.0:
            for gradient in self.sums:
                gradient.scale(factor)
            self._averaged *= factor

    def put(self, gradient: Gradient, index: int, value: torch.Tensor, factor: float) -> None:
        """Let ``value`` be the mean gradient of a parameter, from which ``factor`` has made the mean; no messages."""
        if self.waits:  # on one rank, between micro-batches: what the other parameters have so far must not be lost
            self.complete()
        self._settle_shard(gradient)
        shard = self._make_zero(gradient) if gradient.shard is None else gradient.shard
        segment, part = gradient.layout.segments[index], gradient.part(index)
        first = max(0, gradient.own.start - segment.start)
        shard[part] = segment.held.cut(value).reshape(-1)[first : first + part.stop - part.start] / factor
        gradient.used[index] = self.begun = True

    def drop(self, gradient: Gradient, index: int) -> None:
        """Forget what has come for a parameter since the last update; no messages."""
        self._settle_shard(gradient)
        if gradient.drop(index):
            for slot in gradient.forget():
                self.memory.slots.give(slot)

    def _settle_shard(self, gradient: Gradient) -> None:
        self.finish()
        gradient.land()


def late_of(reducer: Reducer) -> list[bool]:
    """Return of which gradients some arrived after they were reduced, as of weights used outside of their unit."""
    return [gradient.full_state is FullState.FILLING for gradient in reducer.gradients]


def complete_together(reducer: Reducer, mesh: Mesh) -> None:
    """Complete, with what was late on other ranks of this stage, which all call it."""
    reducer.complete()
    if mesh.world_size > 1:
        late = mesh.group("stage").reduce(torch.tensor(late_of(reducer), dtype=torch.uint8))[0].bool().tolist()
        if any(late):
            reducer.add_late(late)


def _exact_divisor(gradients: Sequence[Gradient], policy: GradientPolicy, mesh: Mesh) -> float:
    """Return the number of ranks if gradients can be divided by it exactly, else 1."""
    # Dividing by a power of two is exact, but not among fp16's smallest numbers.
    dtypes = {dtype for g in gradients for dtype in (g.slot_dtype, policy.wire_dtype(g.layout))}
    ranks = mesh.gradients
    return float(ranks) if ranks & (ranks - 1) == 0 and torch.float16 not in dtypes else 1.0
