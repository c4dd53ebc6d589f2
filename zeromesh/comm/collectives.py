"""Collectives over one mesh axis that move as little as the formulas say, on every backend.

gloo's own reduce-scatter moves twice what is needed and its all-gather runs far below the speed of the link, so on
gloo both are made of point-to-point messages: each rank sends every other exactly the segment that it is owed. They
are posted at once and progress on gloo's own thread, which is what overlaps them with compute. Messages carry
a tag per purpose, so that ranks that disagree on the order never add up each other's wrong buffers.

With n ranks, a buffer of V bytes costs each rank V (n-1)/n on the wire for an all-gather or a reduce-scatter.

Between several nodes, collectives run in two steps, see ``topology.py``: an all-gather exchanges shards over the slow
link and then shares them inside the node; a reduce-scatter sums inside the node and then exchanges the sums over the
slow link. Messages over the slow link may be compressed, see ``formats.py``. All ranks still get equal results, as the
sender also uses the decoded message.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.comm.environment import backends
from zeromesh.comm.formats import Format
from zeromesh.comm.second_step import Later
from zeromesh.comm.topology import Places
from zeromesh.comm.watchdog import Watchdog

CHUNK = 1 << 17
"""Elements that are converted at once where dtypes differ, so that no buffer is needed in the wider dtype. torch adds
16-bit numbers to fp32 ones four times slower on a CPU than it converts them, while what was converted is still in the
processor's cache."""

# torch 2.13 gave these new names, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

NARROW = (torch.float16, torch.bfloat16)
"""Dtypes that are summed in fp32 and rounded once."""


@dataclass
class Traffic:
    """Counters of the data that this rank sent since the last reset, by (collective, axis).

    Attributes:
        calls: number of collectives.
        bytes: bytes sent to all ranks.
        across: bytes sent to other nodes.
        errors: sums of squares of the rounding errors and of the values of compressed messages; fp64, shape ``(2,)``.
        listener: called with (collective, axis, bytes) for each collective.
    """

    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    across: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    errors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    listener: Callable[[str, str, int], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, collective: str, axis: str, sent: int, across: int = 0) -> None:
        """Count one call that sends ``sent`` bytes from this rank, ``across`` of them to other nodes."""
        self.calls[collective, axis] += 1
        self.bytes[collective, axis] += sent
        self.across[collective, axis] += across
        if self.listener is not None:
            self.listener(collective, axis, sent)

    def add_error(self, collective: str, axis: str, true: torch.Tensor, written: torch.Tensor) -> None:
        """Add the rounding error of a compressed message.

        Args:
            collective: name of the collective.
            axis: name of the mesh axis.
            true: the values before compression, shape ``(n,)``.
            written: the decoded values, shape ``(n,)``.
        """
        squares = torch.zeros(2, dtype=torch.float64, device=true.device)
        for one, other in zip(true.split(CHUNK), written.split(CHUNK), strict=True):
            wide = one.double()
            squares += torch.stack([(other.double() - wide).square().sum(), wide.square().sum()])
        total = squares.cpu()
        with self._lock:
            self.errors[collective, axis] = self.errors.get((collective, axis), 0) + total

    def relative_error(self, collective: str, axis: str) -> float | None:
        """Return the RMS of the rounding errors divided by the RMS of the values; None if nothing was compressed."""
        if (collective, axis) not in self.errors:
            return None
        error, size = self.errors[collective, axis].tolist()
        return float((error / size) ** 0.5) if size else 0.0

    def reset(self) -> None:
        """Set all counters to zero."""
        for counts in (self.calls, self.bytes, self.across, self.errors):
            counts.clear()


class PeerLost(RuntimeError):
    """A collective could not be finished, because another rank ended or did not answer in time."""


class Pending:
    """Handle of a collective in progress.

    Args:
        what: name and purpose of the collective, for error messages.
        works: torch's handles of its messages.
        then: final step, called once after all messages have arrived.
        watchdog: watchdog that is notified of the wait.
        nbytes: approximate number of bytes over this rank's link, from which the watchdog derives its limit.
    """

    def __init__(
        self,
        what: str = "",
        works: Sequence[Any] = (),
        then: Callable[[], None] | None = None,
        watchdog: Watchdog | None = None,
        nbytes: int = 0,
    ) -> None:
        self._what = what
        self._nbytes = nbytes
        self._works = works
        self._then = then
        self._watchdog = watchdog
        self._done = False

    def wait(self) -> None:
        """Block until the result is there (on CUDA: make the current stream wait for it). May be called again.

        Raises:
            PeerLost: another rank ended, or did not answer within the process group's timeout.
        """
        if self._done:
            return
        if self._watchdog is not None:
            self._watchdog.begin(self._what, self._nbytes)
        try:
            for work in self._works:
                work.wait()
        except PeerLost:
            raise
        except RuntimeError as error:
            raise PeerLost(
                f"{self._what} could not be finished: another rank ended, or did not answer in time; what the first "
                f"rank to fail says is the cause. ({error})"
            ) from error
        finally:
            if self._watchdog is not None:
                self._watchdog.end()
        self._done = True
        if self._then is not None:
            self._then()
        self._works, self._then = (), None


class Group:
    """Group of the ranks along one mesh axis, with its collectives.

    Attributes:
        purposes: description of each tag, for error messages.
        places: topology of the group.

    Args:
        axis: name of the mesh axis, for accounting.
        process_group: torch's group, or None for an axis of size 1.
        device: where the tensors live.
        traffic: where bytes and calls are counted.
        watchdog: told about waits.
        node_of: the node of each group rank; None if all are on one.
        hierarchical: whether to send over the slow links between nodes what is needed once only, and share it inside
            the nodes; None: where nodes have as many ranks each, and the backend does not know the nodes itself.

    Raises:
        ValueError: the process group has no backend for the device, or the nodes differ in their number of ranks and
            ``hierarchical`` is true.
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
    ) -> None:
        self.axis = axis
        self.process_group = process_group
        self.device = device
        self._traffic = traffic
        self._watchdog = watchdog
        self.purposes: dict[int, str] = {}
        self.size: int = 1 if process_group is None else process_group.size()
        self.rank: int = 0 if process_group is None else process_group.rank()
        self._node_of = list(node_of) if node_of is not None else [0] * self.size
        backend = None if process_group is None else backend_for(device, process_group)
        self._hosted = backend in ("gloo", "mpi")
        # nccl knows the nodes itself, and has collectives that are faster than messages inside them.
        wanted = hierarchical if self._hosted or hierarchical is not None else False
        self.places = Places.of(self._node_of, self.rank, wanted)
        self._point_to_point = self._hosted or bool(self.places.across)
        # Messages go out of host memory only: tensors of an accelerator pass through a host copy.
        self._through_host = self._hosted and device.type != "cpu"
        self._later = Later(torch.device("cpu") if self._hosted else device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """Return this group itself: a copied model communicates over the same ranks."""
        return self

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which values of ``dtype`` are summed over the ranks, so that they are rounded once."""
        # torch rounds the sum of two 16-bit values once, so two ranks need no wider dtype.
        return torch.float32 if dtype in NARROW and self.size > 2 else dtype

    def receive_elements(self, shard_elements: int) -> int:
        """Return the number of elements of ``reduce_scatter``'s receive buffer for shards of ``shard_elements``."""
        if self.size == 1:
            return 0
        return shard_elements * (self.size - 1 if self._point_to_point else 1)

    def all_gather(self, full: torch.Tensor, own: torch.Tensor, tag: int, form: Format | None = None) -> Pending:
        """Fill ``full`` from the shards of all ranks.

        Args:
            full: shape ``(size * n,)``; segment r becomes rank r's shard.
            own: shape ``(n,)``, this rank's shard, converted where its dtype is another; it may be the segment of
                ``full`` itself, and may change at once otherwise.
            tag: distinguishes collectives that are under way at the same time.
            form: how shards are written between nodes; all ranks, this one too, then have what was written. None: as
                they are.
        """
        mine = full.chunk(self.size)[self.rank]
        if mine.data_ptr() != own.data_ptr():
            mine.copy_(own)
        if self.size == 1:
            return Pending()
        what = self._name("all_gather", tag)
        if not self._point_to_point:
            self._count("all_gather", dict.fromkeys(self._others(), mine.nbytes))
            # c10d's stream waits for the current stream here, on which every reader of ``full`` was launched, and
            # the current stream waits for c10d's in ``wait``: the buffer is not written before it is free.
            work = _all_gather(full, mine, group=self.process_group, async_op=True)
            return Pending(what, [work], None, self._watchdog, full.nbytes)
        if not self._through_host:
            works = self._gather(full.chunk(self.size), tag, form)
            return Pending(what, works, None, self._watchdog, full.nbytes)
        host = torch.empty_like(full, device="cpu")
        host.chunk(self.size)[self.rank].copy_(mine)
        works = self._gather(host.chunk(self.size), tag, form)
        return Pending(what, works, lambda: _copy(full, host), self._watchdog, full.nbytes)

    def _gather(self, shards: Sequence[torch.Tensor], tag: int, form: Format | None) -> list[Any]:
        """Fill ``shards`` from the shard of each rank: over the slow link first, then inside the node."""
        self._later.finish(tag)
        places, mine = self.places, shards[self.rank]
        form = form if form is not None and form.shortens(mine.dtype) else None
        message, landings = mine, {peer: shards[peer] for _, peer in places.across}
        if form is not None and places.across:
            message = form.encode(mine)
            true = mine.clone()
            form.decode(message, mine)
            self._traffic.add_error("all_gather", self.axis, true, mine)
            landings = {peer: torch.empty_like(message) for peer in landings}
        far = dict.fromkeys(landings, message.nbytes)
        near = {peer: mine.nbytes * len(places.nodes) for _, peer in places.mates}
        self._count("all_gather", far | near)
        crossing = self._post(landings.items(), [(peer, message) for peer in landings], tag)
        sharing = self._post(
            [(peer, shards[peer]) for _, peer in reversed(places.mates)], [(p, mine) for _, p in places.mates], tag
        )
        if not places.across or (form is None and not places.mates):
            return [*crossing, *sharing]

        def share() -> None:
            for work in crossing:
                work.wait()
            if form is not None:
                for peer, landing in landings.items():
                    form.decode(landing, shards[peer])
            carried = [node for node, _ in places.across]
            receives = [(p, shards[places.nodes[n][place]]) for place, p in places.mates for n in sorted(carried)]
            sends = [(p, shards[places.nodes[n][places.place]]) for _, p in places.mates for n in sorted(carried)]
            for work in [*sharing, *self._post(receives, sends, tag)]:
                work.wait()

        return [self._later.run(share, tag)]

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
            received: buffer of ``receive_elements(n)`` elements, in ``full``'s dtype.
            out: shape ``(n,)``, any dtype; may be this rank's segment of ``full`` if the dtypes are equal.
            add: add the sum, when it is whole, to what ``out`` holds instead of replacing it.
            tag: as in ``all_gather``.
            form: how sums are written between nodes.
        """
        mine = full.chunk(self.size)[self.rank]
        if self.size == 1:
            return Pending(then=lambda: _accumulate([mine], out, add))
        what = self._name("reduce_scatter", tag)
        if not self._point_to_point:
            self._count("reduce_scatter", dict.fromkeys(self._others(), mine.nbytes))
            # As in all_gather: c10d orders its stream after the current one here, and before it in ``wait``.
            work = _reduce_scatter(received, full, group=self.process_group, async_op=True)
            return Pending(what, [work], lambda: _accumulate([received], out, add), self._watchdog, full.nbytes)
        landing = torch.empty_like(received, device="cpu") if self._through_host else received
        shards = list((full.cpu() if self._through_host else full).chunk(self.size))
        works, parts = self._scatter(shards, list(landing.chunk(self.size - 1)), tag, form)

        def add_up() -> None:
            _accumulate([part.to(out.device) for part in parts], out, add)

        return Pending(what, works, add_up, self._watchdog, full.nbytes)

    def _scatter(
        self, shards: list[torch.Tensor], landings: list[torch.Tensor], tag: int, form: Format | None
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """Start a reduce-scatter; return its handles and, in summing order, the parts of this rank's sum."""
        self._later.finish(tag)
        places, mine = self.places, shards[self.rank]
        form = form if form is not None and form.shortens(mine.dtype) else None
        count = len(places.nodes)
        near = {place: [landings.pop() for _ in range(count)] for place, _ in places.mates}
        sharing = self._post(
            [(peer, part) for place, peer in reversed(places.mates) for part in near[place]],
            [(peer, shards[rank]) for place, peer in places.mates for rank in places.shards_of(place)],
            tag,
        )
        bytes_across = form.bytes_for(mine.numel()) if form is not None else mine.nbytes
        self._count(
            "reduce_scatter",
            {peer: mine.nbytes * count for _, peer in places.mates} | {p: bytes_across for _, p in places.across},
        )
        around = {node: self._of_node(shards, near, node) for node in range(count)}
        if not places.across:
            return sharing, around[places.node]
        far = {node: landings.pop() for node, _ in places.across}

        def cross() -> None:
            for work in sharing:
                work.wait()
            self._sum_for(around[places.node], mine, None)
            receives, sends = [], []
            for node, peer in places.across:
                message = self._sum_for(around[node], shards[peer], form)
                sends.append((peer, message))
                receives.append((peer, far[node] if form is None else torch.empty_like(message)))
            for work in self._post(receives, sends, tag):
                work.wait()
            if form is not None:
                for (node, _), (_, message) in zip(places.across, receives, strict=True):
                    form.decode(message, far[node])

        return [self._later.run(cross, tag)], [far.get(node, mine) for node in range(count)]

    def _of_node(self, shards: Sequence[torch.Tensor], near: dict[int, list[torch.Tensor]], node: int) -> list[Any]:
        """Return the parts of this node's ranks for the partner on another node, in their order."""
        places = self.places
        mine = shards[places.nodes[node][places.place]]
        return [near[p][node] if p in near else mine for p in range(len(places.nodes[places.node]))]

    def _sum_for(self, parts: Sequence[torch.Tensor], target: torch.Tensor, form: Format | None) -> torch.Tensor:
        """Sum ``parts`` into ``target``, one of them, and return it; with ``form`` return the encoded sum instead."""
        narrow = target.dtype in NARROW
        total = torch.empty_like(target, dtype=torch.float32) if narrow else target
        _accumulate(parts, total, False)
        if form is not None:
            message = form.encode(total)
            form.decode(message, written := torch.empty_like(total))
            self._traffic.add_error("reduce_scatter", self.axis, total, written)
            return message
        _copy(target, total)
        return target

    def _name(self, collective: str, tag: int) -> str:
        return f"{collective} over the axis {self.axis}, tag {tag}" + (
            f" ({self.purposes[tag]})" if tag in self.purposes else ""
        )

    def _others(self) -> list[int]:
        """Return the other group ranks in the order of their distance after this one."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def _count(self, collective: str, sent: dict[int, int]) -> None:
        """Count one collective in which this rank sends so many bytes to each of the others."""
        here = self._node_of[self.rank]
        across = sum(count for peer, count in sent.items() if self._node_of[peer] != here)
        self._traffic.add(collective, self.axis, sum(sent.values()), across)

    def _post(
        self,
        receives: Iterable[tuple[int, torch.Tensor]],
        sends: Iterable[tuple[int, torch.Tensor]],
        tag: int,
    ) -> list[Any]:
        """Start messages from and to group ranks; between two ranks they arrive in the order in which they are sent."""
        group = self.process_group
        if not self._hosted:  # nccl starts them together
            group._start_coalescing(self.device)
        works = [group.recv([tensor], peer, tag) for peer, tensor in receives]
        works += [group.send([tensor], peer, tag) for peer, tensor in sends]
        return works if self._hosted else [group._end_coalescing(self.device)]

    def _exchange(self, mine: torch.Tensor, rows: Sequence[torch.Tensor], tag: int) -> list[Any]:
        """Send ``mine`` to all others; ``rows[r]`` comes from rank r."""
        others = self._others()
        self._count("exchange", dict.fromkeys(others, mine.nbytes))
        return self._post([(peer, rows[peer]) for peer in reversed(others)], [(peer, mine) for peer in others], tag)

    def exchange(self, vector: torch.Tensor, tag: int = 1) -> torch.Tensor:
        """Every rank's ``vector`` as the rows of one matrix, shape ``(size, n)``, on the host; ``vector`` is 1-D."""
        place = torch.device("cpu") if self._hosted else self.device
        rows = torch.empty(self.size, vector.numel(), dtype=vector.dtype, device=place)
        rows[self.rank] = vector
        if self.size > 1 and self._hosted:
            works = self._exchange(rows[self.rank], list(rows), tag)
            Pending(self._name("exchange", tag), works, None, self._watchdog, rows.nbytes).wait()
        elif self.size > 1:
            self._count("exchange", dict.fromkeys(self._others(), vector.nbytes))
            _all_gather(rows, rows[self.rank].clone(), group=self.process_group)
        return rows.cpu()

    def send_and_receive(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], tag: int, what: str
    ) -> Pending:
        """Start one message each to and from some other ranks.

        All ranks take part; what one sends to another, the other expects, in the same shape and dtype.

        Args:
            sends: by group rank, what it gets: contiguous, and not to be written before the result was waited for.
            receives: by group rank, where what it sends goes: contiguous.
            tag: as in ``all_gather``.
            what: name of the collective that these messages are part of, for accounting and messages.
        """
        self._count(what, {peer: tensor.nbytes for peer, tensor in sends.items()})
        landings, sources = dict(receives), dict(sends)
        if self._through_host:
            landings = {peer: torch.empty_like(tensor, device="cpu") for peer, tensor in receives.items()}
            sources = {peer: tensor.cpu() for peer, tensor in sends.items()}

        def arrived() -> None:
            for peer, landing in landings.items():
                _copy(receives[peer], landing)
            sources.clear()  # until here they must not be freed

        works = self._post(landings.items(), sources.items(), tag)
        nbytes = sum(tensor.nbytes for tensor in receives.values())
        return Pending(self._name(what, tag), works, arrived, self._watchdog, nbytes)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Give every rank the values that group rank ``root`` has. The tensor is contiguous."""
        if self.size == 1 or tensor.numel() == 0:
            return
        if self.rank == root:
            self._count("broadcast", dict.fromkeys(self._others(), tensor.nbytes))
        source = dist.get_global_rank(self.process_group, root)
        work = dist.broadcast(tensor, source, group=self.process_group, async_op=True)
        Pending(f"broadcast over the axis {self.axis}", [work], None, self._watchdog, tensor.nbytes).wait()

    def all_reduce(self, tensor: torch.Tensor, tag: int, form: Format | None = None) -> None:
        """Sum a 1-D tensor over the ranks, in place; 16-bit values are summed in fp32 and rounded once.

        ``form`` says how sums are written between nodes; None: as they are.
        """
        self.begin_all_reduce(tensor, tag, form)().wait()

    def begin_all_reduce(self, tensor: torch.Tensor, tag: int, form: Format | None = None) -> Callable[[], Pending]:
        """Start the reduce-scatter half of an all-reduce; return a function that starts its all-gather half.

        The returned function waits for the first half. Starting several tensors before calling it overlaps their
        reduce-scatters. Both halves use ``tag``.
        """
        if self.size == 1:
            return Pending
        full = tensor
        if tensor.numel() % self.size:
            full = tensor.new_zeros(-(-tensor.numel() // self.size) * self.size)
            full[: tensor.numel()] = tensor
        shard = full.chunk(self.size)[self.rank]
        received = torch.empty(self.receive_elements(shard.numel()), dtype=full.dtype, device=full.device)
        wide = self.sum_dtype(full.dtype)
        total = shard if wide == full.dtype else torch.empty_like(shard, dtype=wide)
        summing = self.reduce_scatter(full, received, total, False, tag, form)

        def send() -> Pending:
            summing.wait()
            _copy(shard, total)
            sending = self.all_gather(full, shard, tag, form)
            return Pending(works=[sending], then=lambda: _copy(tensor, full[: tensor.numel()]))

        return send


def backend_for(device: torch.device, process_group: Any = None) -> str:
    """Name of the backend that carries a device's tensors.

    Raises:
        ValueError: the process group, by default the whole one, has none.
    """
    known = backends(process_group)
    if device.type not in known:
        raise ValueError(
            f"the process group has no backend for tensors on {device.type}, only for {', '.join(known)}; start it "
            "with one, or let zeromesh start it"
        )
    return known[device.type]


def _accumulate(parts: Sequence[torch.Tensor], out: torch.Tensor, add: bool) -> None:
    """``out`` (+)= the sum of ``parts``, first to last. One of the parts may be ``out``, the others are scratch.

    What is added is the whole sum, so that it does not matter whether it is added here or, later, elsewhere.
    """
    on_cpu = out.device.type == "cpu"
    if (on_cpu and parts[0].itemsize < out.itemsize) or (add and len(parts) > 1):
        _add_in_chunks(parts, out, add, CHUNK if on_cpu else max(1, out.numel()))
        return
    rest = list(parts)
    if any(part.data_ptr() == out.data_ptr() for part in parts):
        assert not add, "a buffer that is summed in place has nothing to be added to"
        total = rest[0]
        for part in rest[1:-1]:
            total.add_(part)
        if len(rest) > 1:
            torch.add(total, rest[-1], out=out)
        return
    if not add and len(rest) > 1 and rest[0].dtype == out.dtype:
        torch.add(rest.pop(0), rest.pop(0), out=out)
    elif not add:
        out.copy_(rest.pop(0))
    for part in rest:
        out.add_(part)


def _add_in_chunks(parts: Sequence[torch.Tensor], out: torch.Tensor, add: bool, size: int) -> None:
    """Accumulate chunk by chunk, so that a sum and a converted part fit into scratch memory."""
    scratch = torch.empty(2, min(size, out.numel()), dtype=out.dtype, device=out.device)
    for target, first, *rest in zip(out.split(size), *(part.split(size) for part in parts), strict=True):
        whole, converted = scratch[:, : target.numel()]
        total = whole if add else target
        total.copy_(first)
        for part in rest:
            total.add_(converted.copy_(part) if part.itemsize < total.itemsize else part)
        if add:
            target.add_(total)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
