"""Masters and optimizer states that rest on NVMe or in halves, and are in memory only while they are used.

Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from zeromesh.comm.mesh import Mesh
from zeromesh.kernels import halves
from zeromesh.kernels.update import Halves
from zeromesh.model.placement import Tier
from zeromesh.observe.spans import span
from zeromesh.shard.flat import Flat
from zeromesh.shard.layout import round_up
from zeromesh.shard.slots import largest
from zeromesh.shard.stored import Stored
from zeromesh.tiers.memory import empty_on, is_unloaded, unloaded
from zeromesh.tiers.nvme import Disk, FileStore
from zeromesh.tiers.places import File, Memory, Place
from zeromesh.tiers.swap_file import aligned

RUN = 1 << 20  # elements that are joined or split at a time, which bounds the temporaries
ALIGN = 64  # bytes at a multiple of which a row begins
# Function from a parameter of the optimizer to the names of its states that rest with the master, in order.
Names = Callable[[nn.Parameter], Sequence[str]]


@dataclass(frozen=True)
class StateForm:
    """Contents of a block."""

    states: int = 0  # number of optimizer states of the parameter's shape, beside the master
    # The row of an fp32 master has only its lower halves: the upper ones are the bf16 parameters at rest, as in
    # `kernels/halves.py`. The kernel updates the halves in place; everybody else sees the master joined, in fp32.
    split: bool = False

    def of(self, flat: Flat, dtype: torch.dtype) -> StateForm:
        """Return the form of a flat buffer with a master of ``dtype``: only fp32 masters of bf16 parameters split."""
        return StateForm(self.states, self.split and dtype is torch.float32 and flat.layout.dtype is torch.bfloat16)


def _runs(elements: int) -> Iterator[slice]:
    for first in range(0, elements, RUN):
        yield slice(first, min(first + RUN, elements))


class Rows:
    """Places of the rows of one flat buffer in its block."""

    def __init__(self, flat: Flat, dtype: torch.dtype, form: StateForm) -> None:
        self.form = form = form.of(flat, dtype)
        self._flat = flat
        self._elements = elements = flat.own.stop - flat.own.start
        self._places: list[tuple[torch.dtype, int, int]] = []
        self.nbytes = 0
        for kind in (torch.int16 if form.split else dtype, *[dtype] * form.states):
            self._places.append((kind, self.nbytes, self.nbytes + elements * kind.itemsize))
            self.nbytes += round_up(elements * kind.itemsize, ALIGN)
        self.unpacked_bytes = elements * dtype.itemsize if form.split else 0

    def raw(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows, 1-D, in their own dtypes: the master or its lower halves, then the states."""
        return [memory[start:stop].view(dtype) for dtype, start, stop in self._places]

    def unpack(self, memory: torch.Tensor, known: bool) -> list[torch.Tensor]:
        """Return the master and the states, 1-D, in the master's dtype."""
        first, *states = self.raw(memory)
        if not self.form.split:
            return [first, *states]
        master = torch.zeros(self._elements)
        # In runs, so that the temporaries of a conversion stay in the cache.
        for part in _runs(self._elements) if known else ():
            master[part] = halves.join(self._flat.shard[part], first[part])
        return [master, *states]

    def pack(self, memory: torch.Tensor, master: torch.Tensor) -> None:
        """Split a master that ``unpack`` joined; its upper halves become the parameters at rest."""
        lower = self.raw(memory)[0]
        for part in _runs(self._elements) if self.form.split else ():
            self._flat.shard[part], lower[part] = halves.split(master[part])


class Swap:
    """Loads masters and states of flat buffers, in turn or one at a time, and takes them back."""

    def __init__(
        self, dtypes: Mapping[Flat, torch.dtype], form: StateForm, disk: Disk | None, mesh: Mesh,
        early: Collection[Flat] = (), pinned: bool = True, stored: Stored | None = None,
    ) -> None:  # fmt: skip
        self._rows = {flat: Rows(flat, dtype, form) for flat, dtype in dtypes.items()}
        sizes: dict[Hashable, int] = {flat: rows.nbytes for flat, rows in self._rows.items()}

        def allocate(nbytes: int) -> torch.Tensor:
            return empty_on(Tier.HOST, nbytes, torch.uint8, mesh.device, pinned)

        self._place: Place
        if disk is None:
            self._place = Memory(sizes, allocate)
        else:
            store = FileStore(disk.folder, mesh.rank, disk.block_size, disk.queue_depth)
            self._place = File(sizes, store, buffer_bytes(list(self._rows.values()), disk), allocate, early)
        self.tier = Tier.HOST if disk is None else Tier.NVME
        self.nbytes, self.folder = self._place.nbytes, self._place.folder
        self.commit, self.drop, self.traffic, self.close = (
            self._place.commit, self._place.drop, self._place.traffic, self._place.close,
        )  # fmt: skip
        self.host_bytes = self._place.host_bytes + unpacked_bytes(self._rows.values())
        self._here: tuple[Flat, torch.Tensor, list[torch.Tensor]] | None = None
        self._dirty = self._known = False
        self._optimizer: Optimizer | None = None
        self._names: Names = lambda parameter: ()
        self._stored = stored  # a master in halves is joined with its parameter, which may rest in a file, too
        self._streamed: tuple[Flat, torch.Tensor] | None = None  # a block whose master stays in halves

    def __contains__(self, flat: Flat) -> bool:
        return flat in self._rows

    def serve(self, optimizer: Optimizer, names: Names) -> None:
        """Keep the states of an optimizer, too, from here on, those that it has already among them."""
        self._optimizer, self._names = optimizer, names
        for flat in self._rows:
            if any(optimizer.state.get(piece.parameter) for _, _, piece in flat.pieces):
                self.load(flat, write=True)
        self.flush()

    def load(self, flat: Flat, write: bool = False, read: bool = True) -> None:
        """Have one flat buffer's states in memory until another one's are asked for; see ``Tiers.load_states``."""
        if self._here is None or self._here[0] is not flat or (read and not self._known):
            self.flush()
            memory = self._place.take(flat, read)
            # A master in halves is joined with the parameter, which is one of them.
            if self._rows[flat].form.split and read:
                try:
                    self._load_shard(flat)
                except BaseException:
                    self._place.give(flat, False)
                    raise
            if write and not read:  # rows that nobody writes, as of states that do not exist yet, are read some time
                memory.zero_()
            self._here = flat, memory, self._bind(flat, memory, read, joined=True)
            self._known = read or write
        self._dirty = self._dirty or write

    def flush(self) -> None:
        """Take back what ``load`` has loaded, if it may be others now, and give its memory up."""
        if self._here is None:
            return
        (flat, memory, values), self._here = self._here, None
        dirty, self._dirty = self._dirty, False
        # First: views of the memory would else outlive it. Unloaded tensors are NaN rather than empty, so that code
        # which looks at shapes goes on, and nobody computes with them unnoticed.
        self._unbind(flat, values)
        packed = False
        try:
            if dirty and self._rows[flat].form.split:
                self._load_shard(flat, write=True, read=False)
            if dirty:
                self._rows[flat].pack(memory, values[0])
            packed = dirty
        finally:
            self._place.give(flat, packed)

    def stream(self, flats: Sequence[Flat], write: bool) -> Generator[Flat]:
        """Yield flat buffers in order; those that rest here are loaded until the next one is asked for."""
        self.flush()
        mine = [flat for flat in flats if flat in self._rows]
        with closing(self._place.stream(mine, write)) as blocks:
            for flat in flats:
                if flat not in self._rows:
                    yield flat
                    continue
                with span("wait_disk"):
                    memory = next(blocks)
                values = self._bind(flat, memory, known=True, joined=False)
                try:
                    yield flat
                finally:
                    self._unbind(flat, values)
            with span("wait_disk"):
                next(blocks, None)  # which waits for the last writes

    def provisional(self, flats: Sequence[Flat]) -> Generator[tuple[Flat, list[torch.Tensor]]]:
        """Yield each flat buffer with its rows (master and states); changes count from ``commit`` on."""
        with closing(self._place.stream(flats, write=True, provisional=True)) as blocks:
            for flat, memory in zip(flats, blocks, strict=True):
                assert not self._rows[flat].form.split
                yield flat, self._rows[flat].raw(memory)

    def splits(self, flat: Flat) -> bool:
        """Return whether the master rests in halves, one of which is the parameter."""
        return flat in self._rows and self._rows[flat].form.split

    def release(self, flat: Flat) -> None:
        """Split a joined master again, before its parameter is used."""
        if self._here is not None and self._here[0] is flat and self.splits(flat):
            self.flush()

    def halves(self, flat: Flat, local: slice) -> Halves | None:
        """Return the halves of a piece's master while ``stream`` yields ``flat``; None if it is whole."""
        if self._streamed is None or self._streamed[0] is not flat:
            return None
        return Halves(flat.shard[local], self._rows[flat].raw(self._streamed[1])[0][local])

    def _load_shard(self, flat: Flat, write: bool = False, read: bool = True) -> None:
        if self._stored is not None and flat in self._stored:
            self._stored.load(flat, write, read)

    def _bind(self, flat: Flat, memory: torch.Tensor, known: bool, joined: bool) -> list[torch.Tensor]:
        """Let the master, the pieces and their states lie in a block, or in what is joined; return these rows."""
        rows = self._rows[flat]
        if joined or not rows.form.split:
            values = rows.unpack(memory, known)
            flat.bind_master(values[0])
        else:  # the kernel updates the halves where they are, which saves the memory of the joined master
            values, self._streamed = rows.raw(memory), (flat, memory)
        for _, local, piece in flat.pieces:
            for (state, name), row in zip(self._states(piece.parameter), values[1:], strict=False):
                if name in state:
                    value = row[local].view(piece.parameter.shape)
                    if not is_unloaded(state[name]):  # it was made while nothing was loaded
                        value.copy_(state[name])
                    state[name] = value
        return values

    def _unbind(self, flat: Flat, values: Sequence[torch.Tensor]) -> None:
        """Take what may lie elsewhere into the rows, and let everything be unloaded."""
        self._streamed = None
        for _, local, piece in flat.pieces:
            for (state, name), row in zip(self._states(piece.parameter), values[1:], strict=False):
                if name in state:
                    value, place = state[name], row[local]
                    if value.data_ptr() != place.data_ptr():  # the optimizer has just made it, or a checkpoint gave it
                        place.copy_(value.reshape(-1))
                    state[name] = unloaded(value)
        flat.bind_master(unloaded(flat.master))

    def _states(self, parameter: nn.Parameter) -> Iterator[tuple[dict[str, torch.Tensor], str]]:
        """The states of a parameter that have rows, which the optimizer may not have made yet."""
        state = {} if self._optimizer is None else self._optimizer.state.get(parameter, {})
        return ((state, name) for name in self._names(parameter))


def buffer_bytes(rows: Sequence[Rows], disk: Disk) -> list[int]:
    """Return the size of each buffer in host memory, so that the largest blocks fit at once."""
    return largest((aligned(of.nbytes) for of in rows), disk.buffers)


def unpacked_bytes(rows: Collection[Rows]) -> int:
    """Return the bytes of the largest joined master."""
    return max((of.unpacked_bytes for of in rows), default=0)
