"""Collectives over one mesh axis that move as little as the formulas say, on every backend.

gloo's own reduce-scatter moves twice what is needed and its all-gather runs far below the speed of the link, so on
gloo both are made of point-to-point messages: each rank sends every other exactly the segment that it is owed. They
are posted at once and progress on gloo's own thread, which is what overlaps them with compute. Messages carry
a tag per purpose, so that ranks that disagree on the order never add up each other's wrong buffers.

With n ranks, a buffer of V bytes costs each rank V (n-1)/n on the wire for an all-gather or a reduce-scatter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.dist.environment import backends
from zeromesh.dist.watchdog import Watchdog

CHUNK = 1 << 17
"""Elements that are converted at once where dtypes differ. torch adds 16-bit numbers to fp32 ones four times slower on a
CPU than it converts them, while what was converted is still in the processor's cache."""


@dataclass
class Traffic:
    """Bytes that this rank sent, and calls, by (collective, axis), since the last reset; ``listener`` hears of each."""

    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    listener: Callable[[str, str, int], None] | None = None

    def add(self, collective: str, axis: str, sent: int) -> None:
        """Count one call that sends ``sent`` bytes from this rank."""
        self.calls[collective, axis] += 1
        self.bytes[collective, axis] += sent
        if self.listener is not None:
            self.listener(collective, axis, sent)

    def reset(self) -> None:
        """Start counting anew."""
        self.calls.clear()
        self.bytes.clear()


class PeerLost(RuntimeError):
    """A collective could not be finished, because another rank ended or did not answer in time."""


class Pending:
    """A collective under way.

    Args:
        what: its name and purpose, for messages.
        works: what torch gave for it.
        then: the rest of the work, done once when the result has arrived.
        watchdog: told about the wait.
        nbytes: about what passes this rank's link, for the watchdog.
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
    """The ranks along one axis, and what they do together.

    Attributes:
        purposes: what the tags stand for, for messages.

    Args:
        axis: name of the mesh axis, for accounting.
        process_group: torch's group, or None for an axis of size 1.
        device: where the tensors live.
        traffic: where bytes and calls are counted.
        watchdog: told about waits.

    Raises:
        ValueError: the process group has no backend for the device.
    """

    def __init__(
        self, axis: str, process_group: Any, device: torch.device, traffic: Traffic, watchdog: Watchdog | None = None
    ) -> None:
        self.axis = axis
        self.process_group = process_group
        self.device = device
        self._traffic = traffic
        self._watchdog = watchdog
        self.purposes: dict[int, str] = {}
        self.size: int = 1 if process_group is None else process_group.size()
        self.rank: int = 0 if process_group is None else process_group.rank()
        self._point_to_point = process_group is not None and backend_for(device, process_group) == "gloo"
        # gloo sends from host memory only: tensors of an accelerator pass through a host copy.
        self._through_host = self._point_to_point and device.type != "cpu"

    def receive_elements(self, shard_elements: int) -> int:
        """Elements of the receive buffer that ``reduce_scatter`` needs for shards of ``shard_elements``."""
        if self.size == 1:
            return 0
        return shard_elements * (self.size - 1 if self._point_to_point else 1)

    def all_gather(self, full: torch.Tensor, own: torch.Tensor, tag: int) -> Pending:
        """Fill ``full`` from the shards of all ranks.

        Args:
            full: shape ``(size * n,)``; segment r becomes rank r's shard.
            own: shape ``(n,)``, this rank's shard, converted where its dtype is another; it may be the segment of
                ``full`` itself, and may change at once otherwise.
            tag: distinguishes collectives that are under way at the same time.
        """
        mine = full.chunk(self.size)[self.rank]
        if mine.data_ptr() != own.data_ptr():
            mine.copy_(own)
        if self.size == 1:
            return Pending()
        what = self._name("all_gather", tag)
        self._traffic.add("all_gather", self.axis, mine.nbytes * (self.size - 1))
        if self._through_host:
            host = torch.empty_like(full, device="cpu")
            host.chunk(self.size)[self.rank].copy_(mine)
            rows = host.chunk(self.size)
            works = self._exchange([rows[self.rank]] * self.size, rows, tag)
            return Pending(what, works, lambda: _copy(full, host), self._watchdog, full.nbytes)
        if self._point_to_point:
            works = self._exchange([mine] * self.size, full.chunk(self.size), tag)
            return Pending(what, works, None, self._watchdog, full.nbytes)
        # c10d's stream waits for the current stream here, on which every reader of ``full`` was launched, and
        # the current stream waits for c10d's in ``wait``: the buffer is not written before it is free.
        work = dist.all_gather_into_tensor(full, mine, group=self.process_group, async_op=True)
        return Pending(what, [work], None, self._watchdog, full.nbytes)

    def reduce_scatter(
        self, full: torch.Tensor, received: torch.Tensor, out: torch.Tensor, add: bool, tag: int
    ) -> Pending:
        """Sum the ranks' buffers; this rank gets its segment of the sum.

        The sum runs in ``out``'s dtype and in the order of ranks on every rank, so that its value does not depend on
        who computes it (on gloo; nccl sums in the dtype of ``full``).

        Args:
            full: shape ``(size * n,)``. Must not be written before the result has been waited for.
            received: buffer of ``receive_elements(n)`` elements, in ``full``'s dtype.
            out: shape ``(n,)``, any dtype; may be this rank's segment of ``full`` if the dtypes are equal.
            add: add the sum to what ``out`` holds instead of replacing it.
            tag: as in ``all_gather``.
        """
        mine = full.chunk(self.size)[self.rank]
        if self.size == 1:
            return Pending(then=lambda: _accumulate([mine], out, add))
        what = self._name("reduce_scatter", tag)
        self._traffic.add("reduce_scatter", self.axis, mine.nbytes * (self.size - 1))
        if not self._point_to_point:
            # As in all_gather: c10d orders its stream after the current one here, and before it in ``wait``.
            work = dist.reduce_scatter_tensor(received, full, group=self.process_group, async_op=True)
            return Pending(what, [work], lambda: _accumulate([received], out, add), self._watchdog, full.nbytes)
        host = full.cpu() if self._through_host else full
        landing = torch.empty_like(received, device="cpu") if self._through_host else received
        others = iter(landing.chunk(self.size - 1))
        parts = [mine if rank == self.rank else next(others) for rank in range(self.size)]
        works = self._exchange(host.chunk(self.size), parts, tag)

        def add_up() -> None:
            _accumulate([part.to(out.device) for part in parts], out, add)

        return Pending(what, works, add_up, self._watchdog, full.nbytes)

    def _name(self, collective: str, tag: int) -> str:
        return f"{collective} over the axis {self.axis}, tag {tag}" + (
            f" ({self.purposes[tag]})" if tag in self.purposes else ""
        )

    def _exchange(self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], tag: int) -> list[Any]:
        """Post: ``send[r]`` to rank r, ``receive[r]`` from rank r, for all others, nearest first."""
        works = []
        for distance in range(1, self.size):
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            works.append(self.process_group.recv([receive[source]], source, tag))
            works.append(self.process_group.send([send[target]], target, tag))
        return works

    def exchange(self, vector: torch.Tensor, tag: int = 1) -> torch.Tensor:
        """Every rank's ``vector`` as the rows of one matrix, shape ``(size, n)``, on the host; ``vector`` is 1-D."""
        place = self.device if not self._point_to_point else torch.device("cpu")
        rows = torch.empty(self.size, vector.numel(), dtype=vector.dtype, device=place)
        rows[self.rank] = vector
        if self.size > 1:
            self._traffic.add("exchange", self.axis, vector.nbytes * (self.size - 1))
            if self._point_to_point:
                works = self._exchange([rows[self.rank]] * self.size, list(rows), tag)
                Pending(self._name("exchange", tag), works, None, self._watchdog, rows.nbytes).wait()
            else:
                dist.all_gather_into_tensor(rows, rows[self.rank].clone(), group=self.process_group)
        return rows.cpu()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Give every rank the values that group rank ``root`` has. The tensor is contiguous."""
        if self.size == 1 or tensor.numel() == 0:
            return
        if self.rank == root:
            self._traffic.add("broadcast", self.axis, tensor.nbytes * (self.size - 1))
        source = dist.get_global_rank(self.process_group, root)
        dist.broadcast(tensor, source, group=self.process_group)

    def all_reduce(self, tensor: torch.Tensor, tag: int) -> None:
        """Sum a 1-D tensor over the ranks, in place; 16-bit values are summed in fp32 and rounded once."""
        if self.size == 1:
            return
        full = tensor
        if tensor.numel() % self.size:
            full = tensor.new_zeros(-(-tensor.numel() // self.size) * self.size)
            full[: tensor.numel()] = tensor
        shard = full.chunk(self.size)[self.rank]
        received = torch.empty(self.receive_elements(shard.numel()), dtype=full.dtype, device=full.device)
        narrow = full.dtype in (torch.float16, torch.bfloat16)
        total = torch.empty_like(shard, dtype=torch.float32) if narrow else shard
        self.reduce_scatter(full, received, total, False, tag).wait()
        _copy(shard, total)
        self.all_gather(full, shard, tag).wait()
        _copy(tensor, full[: tensor.numel()])


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
    """``out`` (+)= the sum of ``parts``, first to last. One of the parts may be ``out``, the others are scratch."""
    if out.device.type == "cpu" and parts[0].itemsize < out.itemsize:
        _convert_and_add(parts, out, add)
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


def _convert_and_add(parts: Sequence[torch.Tensor], out: torch.Tensor, add: bool) -> None:
    """As ``_accumulate``, chunk by chunk."""
    scratch = torch.empty(min(CHUNK, out.numel()), dtype=out.dtype, device=out.device)
    for total, *chunks in zip(out.split(CHUNK), *(part.split(CHUNK) for part in parts), strict=True):
        if not add:
            total.copy_(chunks.pop(0))
        for chunk in chunks:
            total.add_(scratch[: chunk.numel()].copy_(chunk))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
