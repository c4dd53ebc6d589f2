"""Collectives over one mesh axis that move as little as the formulas say, on every backend.

With n ranks, an all-gather or a reduce-scatter of V bytes sends V (n-1)/n from each rank. Between several nodes they
run in two steps, see ``topology.py``, and messages over the slow link may be compressed, see ``message_formats.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.comm.course import PeerLost, this_rank
from zeromesh.comm.environment import backends
from zeromesh.comm.local import LocalGroup
from zeromesh.comm.message_formats import Format
from zeromesh.comm.ordered_sums import SumPlace, accumulate, copy
from zeromesh.comm.second_step import SecondSteps
from zeromesh.comm.topology import Topology
from zeromesh.comm.traffic import Traffic
from zeromesh.comm.watchdog import Watchdog

# torch 2.13 gave these new names, and warns of the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SLOTS = 64  # in which sums over more ranks are kept apart, at most
NARROW = (torch.float16, torch.bfloat16)  # dtypes that are summed in fp32 and rounded once

Messages = Mapping[int, torch.Tensor | Sequence[torch.Tensor]]  # by group rank


@dataclass(eq=False)
class Pending:
    """Handle of a collective in progress."""

    what: str = ""  # name and purpose of the collective, for error messages
    works: Sequence[Any] = ()  # torch's handles of its messages
    then: Callable[[], None] | None = None  # final step, called once after all messages have arrived
    watchdog: Watchdog | None = None  # is notified of the wait
    nbytes: int = 0  # over this rank's link, from which the watchdog derives its limit
    device: torch.device | None = None  # that waits for the messages, as with nccl; None: this process waits
    ranks: Sequence[int] = ()  # that take part
    done: bool = False  # True after the wait

    def wait(self) -> None:
        """Block until the result is there (on CUDA: make the current stream wait for it). May be called again."""
        if self.done:
            return
        watchdog = self.watchdog if self.device is None else None
        if watchdog is not None:
            watchdog.begin(self.what, self.nbytes, self.ranks)
        try:
            for work in self.works:
                work.wait()
        except PeerLost:
            raise
        except RuntimeError as error:
            raise this_rank.lost(self.what, sys._getframe(), error) from None
        finally:
            if watchdog is not None:
                watchdog.end()
        if self.watchdog is not None and self.device is not None:
            self.watchdog.queued(self.what, self.device, self.ranks)
        self.done = True
        if self.then is not None:
            self.then()
        # The handle may outlive the step, and works and closures hold the buffers.
        self.works, self.then = (), None


class Group:
    """Ranks along one mesh axis, with their collectives.

    Args:
        axis: name of the mesh axis, for accounting.
        process_group: torch's group, or None for an axis of size 1.
        device: where the tensors live; ValueError if the group has no backend for it.
        traffic: where bytes and calls are counted.
        watchdog: is notified of waits.
        node_of: the node of each group rank; None if all are on one.
        hierarchical: True for two-step collectives between nodes; None chooses them where all nodes have as many ranks
            and the backend does not know the nodes itself.
        carrier: carries messages in place of the backend: through memory, or over MPI.
    """

    def __init__(
        self,
        axis: str,
        process_group: Any,
        device: torch.device,
        traffic: Traffic,
        watchdog: Watchdog | None = None,
        node_of: Sequence[int] | None = None,
        hierarchical: bool | None = None,
        carrier: LocalGroup | None = None,
    ) -> None:
        self.axis = axis
        self.process_group = process_group
        self.device = device
        self._traffic = traffic
        self._watchdog = watchdog
        # By tag, for error messages. Messages carry a tag per purpose, so that ranks that disagree on the order never
        # add up each other's wrong buffers.
        self.purposes: dict[int, str] = {}
        self.size: int = 1 if process_group is None else process_group.size()
        self.rank: int = 0 if process_group is None else process_group.rank()
        self._ranks = [] if process_group is None else dist.get_process_group_ranks(process_group)
        self._node_of = list(node_of) if node_of is not None else [0] * self.size
        backend = None if process_group is None else backend_for(device, process_group)
        self._hosted = backend in ("gloo", "mpi")
        # nccl knows the nodes itself, and has collectives that are faster than messages inside them.
        wanted = hierarchical if self._hosted or hierarchical is not None else False
        self.topology = Topology.of(self._node_of, self.rank, wanted)
        here = self._node_of[self.rank]
        self._far_ranks = self.size - self._node_of.count(here)  # ranks on other nodes
        self._far_mates = 0 if self.topology.across else self._far_ranks  # in one step they are like this node's
        # gloo's own reduce-scatter moves twice what is needed and its all-gather runs far below the speed of the link.
        # Messages to each rank of exactly what it is owed are posted at once and progress on gloo's own thread, which
        # is what overlaps them with compute.
        self._point_to_point = self._hosted or bool(self.topology.across)
        self._carrier = carrier
        # Messages go out of host memory only: tensors of an accelerator pass through a host copy.
        self._through_host = self._hosted and device.type != "cpu"
        # Adds up messages without a buffer for them.
        adds = carrier is not None and carrier.complete and not (self.topology.across or self._through_host)
        self._adder = carrier if adds else None
        self.sums = SumPlace.MEMORY if adds else SumPlace.MESSAGES if self._point_to_point else SumPlace.COLLECTIVE
        self.ranks_per_slot = -(-self.size // SLOTS)
        self.slots = -(-self.size // self.ranks_per_slot)
        self._second_steps = SecondSteps(torch.device("cpu") if self._hosted else device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """Return this group itself: a copied model communicates over the same ranks."""
        return self

    @property
    def slot(self) -> int:
        """Index of this rank's slot in sums that keep ranks apart; up to ``SLOTS`` ranks have one each."""
        return self.rank // self.ranks_per_slot

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which values of ``dtype`` are summed over the ranks, so that they are rounded once."""
        # torch rounds the sum of two 16-bit values once, so two ranks need no wider dtype.
        return torch.float32 if dtype in NARROW and self.size > 2 else dtype

    def receive_elements(self, shard_elements: int) -> int:
        """Return the number of elements of ``reduce_scatter``'s receive buffer for shards of ``shard_elements``."""
        return shard_elements * self.sums.buffers(self.size)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, tag: int, form: Format | None = None) -> Pending:
        """Fill ``full`` from the shards of all ranks.

        Args:
            full: shape ``(size * n,)``; segment r becomes rank r's shard.
            shard: shape ``(n,)``, this rank's shard, converted where its dtype is another; it may be the segment of
                ``full`` itself, and may change at once otherwise.
            tag: distinguishes collectives that are under way at the same time.
            form: compression of shards between nodes; all ranks, this one too, then have the decoded values.
        """
        mine = self._own_segment(full)
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        if self.size == 1:
            return Pending()
        if not self._point_to_point:
            self._count_to_all("all_gather", mine.nbytes)
            # c10d's stream waits for the current stream here, on which every reader of ``full`` was launched, and
            # the current stream waits for c10d's in ``wait``: the buffer is not written before it is free.
            work = all_gather(full, mine, group=self.process_group, async_op=True)
            return self._pending("all_gather", tag, [work], full.nbytes)
        if not self._through_host:
            return self._pending("all_gather", tag, self._gather(full.chunk(self.size), tag, form), full.nbytes)
        host = torch.empty_like(full, device="cpu")
        self._own_segment(host).copy_(mine)
        works = self._gather(host.chunk(self.size), tag, form)
        return self._pending("all_gather", tag, works, full.nbytes, lambda: copy(full, host))

    def _gather(self, shards: Sequence[torch.Tensor], tag: int, form: Format | None) -> list[Any]:
        """Fill ``shards`` from the shard of each rank: over the slow link first, then inside the node."""
        self._second_steps.finish(tag)
        topology, mine = self.topology, shards[self.rank]
        form = form if form is not None and form.shortens(mine.dtype) else None
        message, landings = mine, {peer: shards[peer] for _, peer in topology.across}
        if form is not None and topology.across:
            message = form.encode(mine)
            true = mine.clone()
            # This rank, too, goes on with what the others will read, so that all have equal values.
            form.decode(message, mine)
            self._traffic.add_error("all_gather", self.axis, true, mine)
            landings = {peer: torch.empty_like(message) for peer in landings}
        self._count_steps("all_gather", mine.nbytes * len(topology.nodes), message.nbytes)
        crossing = self._post(landings.items(), [(peer, message) for peer in landings], tag)
        sharing = self._post(
            [(peer, shards[peer]) for _, peer in reversed(topology.mates)], [(p, mine) for _, p in topology.mates], tag
        )
        if not topology.across or (form is None and not topology.mates):
            return [*crossing, *sharing]

        def share() -> None:  # the second step, as soon as this node's shards from the other nodes are here
            for work in crossing:
                work.wait()
            if form is not None:
                for peer, landing in landings.items():
                    form.decode(landing, shards[peer])
            nodes, carried = topology.nodes, [node for node, _ in topology.across]
            receives = [(p, shards[nodes[n][place]]) for place, p in topology.mates for n in sorted(carried)]
            sends = [(p, shards[nodes[n][topology.place]]) for _, p in topology.mates for n in sorted(carried)]
            for work in [*sharing, *self._post(receives, sends, tag)]:
                work.wait()

        return [self._second_steps.run(share, tag)]

    def reduce_scatter(
        self,
        full: torch.Tensor,
        received: torch.Tensor,
        out: torch.Tensor,
        add: bool,
        tag: int,
        form: Format | None = None,
    ) -> Pending:
        """Sum the ranks' buffers; this rank gets its segment of the sum.

        The sum runs in ``out``'s dtype and in the order of ranks, so that its value does not depend on who computes it
        (nccl sums in the dtype of ``full``). In two steps, the sum of each node is made in fp32 or wider, rounded to
        the dtype of ``full``, or as ``form`` says, and added to those of the other nodes in their order.

        Args:
            full: shape ``(size * n,)``. Must not be written before the result has been waited for; what is in the other
                segments is then undefined.
            received: buffer of ``receive_elements(n)`` elements, in ``full``'s dtype; it may hold the parts of others.
            out: shape ``(n,)``, any dtype; may be this rank's segment of ``full`` if the dtypes are equal. It may be
                read and written until the result has been waited for.
            add: add the sum, when it is whole, to what ``out`` holds instead of replacing it.
            tag: as in ``all_gather``.
            form: compression of sums between nodes.
        """
        mine = self._own_segment(full)
        if self.size == 1:
            return Pending(then=lambda: accumulate([mine], out, add))
        if not self._point_to_point:
            self._count_to_all("reduce_scatter", mine.nbytes)
            # As in all_gather: c10d orders its stream after the current one here, and before it in ``wait``.
            work = reduce_scatter(received, full, group=self.process_group, async_op=True)
            add_up = partial(accumulate, [received], out, add)
            return self._pending("reduce_scatter", tag, [work], full.nbytes, add_up)
        if self._adder is not None and (summing := self._adder.add_up(mine, out, add, tag)) is not None:
            self._count_to_all("reduce_scatter", mine.nbytes)
            segments = full.chunk(self.size)
            sends = self._post([], [(peer, segments[peer]) for peer in self._others()], tag)
            # The sum first: where a rank has ended, others read no more of what is sent to them for their sums.
            return self._pending("reduce_scatter", tag, [summing, *sends], full.nbytes)
        if self._adder is not None:  # of a dtype that has no sums there
            received = full.new_empty(mine.numel() * (self.size - 1))
        landing = torch.empty_like(received, device="cpu") if self._through_host else received
        shards = list((full.cpu() if self._through_host else full).chunk(self.size))
        works, parts = self._scatter(shards, list(landing.chunk(self.size - 1)), tag, form)
        return self._pending(
            "reduce_scatter",
            tag,
            works,
            full.nbytes,
            lambda: accumulate([part.to(out.device) for part in parts], out, add),
        )

    def _scatter(
        self, shards: list[torch.Tensor], landings: list[torch.Tensor], tag: int, form: Format | None
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """Start a reduce-scatter; return its handles and, in summing order, the parts of this rank's sum."""
        self._second_steps.finish(tag)
        topology, mine = self.topology, shards[self.rank]
        form = form if form is not None and form.shortens(mine.dtype) else None
        count = len(topology.nodes)
        near = {place: [landings.pop() for _ in range(count)] for place, _ in topology.mates}
        sharing = self._post(
            [(peer, part) for place, peer in reversed(topology.mates) for part in near[place]],
            [(peer, shards[rank]) for place, peer in topology.mates for rank in topology.shards_of(place)],
            tag,
        )
        bytes_across = form.bytes_for(mine.numel()) if form is not None else mine.nbytes
        self._count_steps("reduce_scatter", mine.nbytes * count, bytes_across)
        nodes, place = topology.nodes, topology.place
        by_node = {  # the parts of this node's ranks for the partner on each node, in their order
            node: [near[p][node] if p in near else shards[nodes[node][place]] for p in range(len(nodes[topology.node]))]
            for node in range(count)
        }
        if not topology.across:
            return sharing, by_node[topology.node]
        far = {node: landings.pop() for node, _ in topology.across}

        def cross() -> None:  # the second step, as soon as the parts of this node's ranks are here
            for work in sharing:
                work.wait()
            self._sum_for(by_node[topology.node], mine, None)
            receives, sends = [], []
            for node, peer in topology.across:
                message = self._sum_for(by_node[node], shards[peer], form)
                sends.append((peer, message))
                receives.append((peer, far[node] if form is None else torch.empty_like(message)))
            for work in self._post(receives, sends, tag):
                work.wait()
            if form is not None:
                for (node, _), (_, message) in zip(topology.across, receives, strict=True):
                    form.decode(message, far[node])

        return [self._second_steps.run(cross, tag)], [far.get(node, mine) for node in range(count)]

    def _sum_for(self, parts: Sequence[torch.Tensor], target: torch.Tensor, form: Format | None) -> torch.Tensor:
        """Sum ``parts`` into ``target``, one of them, and return it; with ``form`` return the encoded sum instead."""
        total = torch.empty_like(target, dtype=torch.float32) if target.dtype in NARROW else target
        accumulate(parts, total, False)
        if form is not None:  # encoded from the sum in fp32: a sum that was rounded before would lose twice
            message = form.encode(total)
            form.decode(message, written := torch.empty_like(total))
            self._traffic.add_error("reduce_scatter", self.axis, total, written)
            return message
        copy(target, total)
        return target

    def _pending(
        self, collective: str, tag: int, works: Sequence[Any], nbytes: int, then: Callable[[], None] | None = None
    ) -> Pending:
        purpose = f" ({self.purposes[tag]})" if tag in self.purposes else ""
        what = f"{collective} over the axis {self.axis}, tag {tag}{purpose}"
        device = None if self._hosted else self.device
        return Pending(what, works, then, self._watchdog, nbytes, device, self._ranks)

    def _others(self) -> list[int]:
        # By distance, so that not all ranks send to the same one first.
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def _own_segment(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's segment of a tensor of shape ``(size * n,)``."""
        elements = full.numel() // self.size
        return full.narrow(0, self.rank * elements, elements)

    def _count_to_all(self, collective: str, nbytes: int) -> None:
        """Count one collective in which this rank sends so many bytes to each of the others."""
        self._traffic.add(collective, self.axis, nbytes * (self.size - 1), nbytes * self._far_ranks)

    def _count_steps(self, collective: str, near: int, far: int) -> None:
        """Count one collective that sends ``near`` bytes to each rank of this node, and ``far`` to each partner."""
        across = far * len(self.topology.across)
        self._traffic.add(
            collective, self.axis, near * len(self.topology.mates) + across, near * self._far_mates + across
        )

    def _post(
        self, receives: Iterable[tuple[int, torch.Tensor]], sends: Iterable[tuple[int, torch.Tensor]], tag: int
    ) -> list[Any]:
        """Start messages from and to group ranks; between two ranks they arrive in the order in which they are sent."""
        try:
            return self._start_messages(receives, sends, tag)
        except RuntimeError as error:
            if "gloo" not in str(error):
                raise
            what = self.purposes.get(tag, "messages")  # gloo refuses to start what the connection of a lost rank is for
            raise this_rank.lost(f"{what} over the axis {self.axis}", sys._getframe(), error) from None

    def _start_messages(
        self, receives: Iterable[tuple[int, torch.Tensor]], sends: Iterable[tuple[int, torch.Tensor]], tag: int
    ) -> list[Any]:
        if self._carrier is not None:
            return self._carrier.post(receives, sends, tag)
        group = self.process_group
        if not self._hosted:  # nccl starts them together: one after the other, two ranks would wait for each other
            group._start_coalescing(self.device)
        # Receives first: gloo sends a message only when its receive has been posted.
        works = [group.recv([tensor], peer, tag) for peer, tensor in receives]
        works += [group.send([tensor], peer, tag) for peer, tensor in sends]
        return works if self._hosted else [group._end_coalescing(self.device)]

    def exchange(self, vector: torch.Tensor, tag: int = 1) -> torch.Tensor:
        """Return every rank's ``vector``, 1-D, as the rows of one matrix on the host, shape ``(size, n)``."""
        device = torch.device("cpu") if self._hosted else self.device
        rows = torch.empty(self.size, vector.numel(), dtype=vector.dtype, device=device)
        rows[0 if self._hosted else self.rank] = vector
        if self.size == 1:
            return rows.cpu()
        if not self._hosted:
            self._count_to_all("exchange", vector.nbytes)
            all_gather(rows, rows[self.rank].clone(), group=self.process_group)
            return rows.cpu()
        # In about log2(size) rounds, each of which doubles the rows that a rank has, those of the ranks behind it in
        # their order; see Bruck et al., "Efficient Algorithms for All-to-All Communications", 1997.
        filled, sent, across, here = 1, 0, 0, self._node_of[self.rank]
        while filled < self.size:
            count = min(filled, self.size - filled)
            source, target = (self.rank + filled) % self.size, (self.rank - filled) % self.size
            works = self._post([(source, rows[filled : filled + count])], [(target, rows[:count])], tag)
            self._pending("exchange", tag, works, rows.nbytes).wait()
            sent += count * vector.nbytes
            across += count * vector.nbytes if self._node_of[target] != here else 0
            filled += count
        self._traffic.add("exchange", self.axis, sent, across)
        return rows.roll(self.rank, 0)

    def reduce(
        self, largest: torch.Tensor, sums: torch.Tensor | None = None, tag: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the elementwise largest and the sums of all ranks' vectors, on the host: the same bits on every rank.

        A rank sends its vectors once in each of log2(size) rounds, or as the backend reduces them.

        Args:
            largest: 1-D, without NaN.
            sums: 1-D, of the same dtype; None for none.
            tag: as in ``all_gather``.
        """
        row = largest.clone() if sums is None else torch.cat([largest, sums])
        parts = row[: largest.numel()], row[largest.numel() :]
        if self.size == 1:
            return parts
        if self._hosted:
            self._reduce_in_rounds(row, *parts, tag)
            return parts
        row = row.to(self.device)
        parts = row[: largest.numel()], row[largest.numel() :]
        sent = 2 * row.nbytes * (self.size - 1) // self.size
        self._traffic.add("exchange", self.axis, sent, sent if self._far_ranks else 0)
        operations = dist.ReduceOp.MAX, dist.ReduceOp.SUM
        for part, operation in zip(parts, operations, strict=True):
            if part.numel():
                dist.all_reduce(part, operation, group=self.process_group)
        row = row.cpu()
        return row[: largest.numel()], row[largest.numel() :]

    def _reduce_in_rounds(self, row: torch.Tensor, largest: torch.Tensor, sums: torch.Tensor, tag: int) -> None:
        """Reduce ``row``, which consists of ``largest`` and ``sums``, in place, by recursive doubling."""
        # In each round two ranks exchange what they have so far, so that both have the same bits of a sum afterwards.
        power = 1 << (self.size.bit_length() - 1)  # ranks beyond the largest power of two tell one before it first
        other = torch.empty_like(row)
        other_largest, other_sums = other[: largest.numel()], other[largest.numel() :]
        folded = self.rank + power if self.rank < self.size - power else None
        sent: list[int] = []

        def message(to: int | None, source: int | None) -> None:
            sends, receives = [] if to is None else [(to, row)], [] if source is None else [(source, other)]
            sent.extend(peer for peer, _ in sends)
            self._pending("exchange", tag, self._post(receives, sends, tag), row.nbytes).wait()

        def combine() -> None:
            torch.maximum(largest, other_largest, out=largest).add_(0)  # so that no zero keeps a sign
            sums.add_(other_sums)

        if self.rank >= power:
            message(self.rank - power, None)
            message(None, self.rank - power)
            row.copy_(other)
        else:
            if folded is not None:
                message(None, folded)
                combine()
            for bit in range(power.bit_length() - 1):
                peer = self.rank ^ (1 << bit)
                message(peer, peer)
                combine()
            if folded is not None:
                message(folded, None)
        here = self._node_of[self.rank]
        across = sum(self._node_of[peer] != here for peer in sent)
        self._traffic.add("exchange", self.axis, row.nbytes * len(sent), row.nbytes * across)

    def send_and_receive(self, sends: Messages, receives: Messages, tag: int, what: str) -> Pending:
        """Start messages to and from some other ranks; both sides give the same shapes and dtypes.

        Args:
            sends: by group rank, what it gets, a tensor or several: contiguous, and not to be written before the result
                was waited for.
            receives: by group rank, where what it sends goes: contiguous.
            tag: as in ``all_gather``.
            what: name of the collective that these messages are part of, for accounting and messages.
        """
        sources, targets = _each(sends), _each(receives)
        here = self._node_of[self.rank]
        across = sum(tensor.nbytes for peer, tensor in sources if self._node_of[peer] != here)
        self._traffic.add(what, self.axis, sum(tensor.nbytes for _, tensor in sources), across)
        landings = targets
        if self._through_host:
            landings = [(peer, torch.empty_like(tensor, device="cpu")) for peer, tensor in targets]
            sources = [(peer, tensor.cpu()) for peer, tensor in sources]

        def arrived() -> None:
            for (_, target), (_, landing) in zip(targets, landings, strict=True):
                copy(target, landing)
            sources.clear()  # until here they must not be freed

        works = self._post(landings, sources, tag) if landings or sources else []
        nbytes = sum(tensor.nbytes for _, tensor in targets)
        return self._pending(what, tag, works, nbytes, arrived)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Give every rank the values of group rank ``root``. The tensor is contiguous."""
        if self.size == 1 or tensor.numel() == 0:
            return
        if self.rank == root:
            self._count_to_all("broadcast", tensor.nbytes)
        source = dist.get_global_rank(self.process_group, root)
        work = dist.broadcast(tensor, source, group=self.process_group, async_op=True)
        what = f"broadcast over the axis {self.axis}"
        Pending(what, [work], None, self._watchdog, tensor.nbytes, ranks=self._ranks).wait()

    def all_reduce(self, tensor: torch.Tensor, tag: int, form: Format | None = None) -> None:
        """Sum a 1-D tensor over the ranks, in place; 16-bit values are summed in fp32 and rounded once."""
        self.begin_all_reduce(tensor, tag, form)().wait()

    def begin_all_reduce(self, tensor: torch.Tensor, tag: int, form: Format | None = None) -> Callable[[], Pending]:
        """Start the first half of an all-reduce; return a function that waits for it and starts the second half."""
        if self.size == 1:
            return Pending
        full = tensor
        if tensor.numel() % self.size:
            full = tensor.new_zeros(-(-tensor.numel() // self.size) * self.size)
            full[: tensor.numel()] = tensor
        shard = self._own_segment(full)
        received = torch.empty(self.receive_elements(shard.numel()), dtype=full.dtype, device=full.device)
        wide = self.sum_dtype(full.dtype)
        total = shard if wide == full.dtype else torch.empty_like(shard, dtype=wide)
        summing = self.reduce_scatter(full, received, total, False, tag, form)

        def send() -> Pending:
            summing.wait()
            copy(shard, total)
            sending = self.all_gather(full, shard, tag, form)
            return Pending(works=[sending], then=lambda: copy(tensor, full[: tensor.numel()]))

        return send


def _each(messages: Messages) -> list[tuple[int, torch.Tensor]]:
    """Return the tensors of messages with the rank of each."""
    several = ((peer, [item] if isinstance(item, torch.Tensor) else item) for peer, item in messages.items())
    return [(peer, tensor) for peer, tensors in several for tensor in tensors]


def backend_for(device: torch.device, process_group: Any = None) -> str:
    """Return the backend that carries a device's tensors; raise ValueError if the process group has none."""
    backend_names = backends(process_group)
    if device.type not in backend_names:
        raise ValueError(
            f"the process group has no backend for tensors on {device.type}, only for {', '.join(backend_names)}; "
            "start it with one, or let zeromesh start it"
        )
    return backend_names[device.type]
