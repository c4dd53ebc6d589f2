"""States that rest in blocks, as on NVMe or in halves, and are in host memory only while they are used.

Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from itertools import islice, repeat

import numpy
import torch
from torch import nn
from torch.optim import Optimizer

from zeromesh.base.kernels import halves
from zeromesh.base.kernels.update_rules import state_dtype
from zeromesh.base.spans import span
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.layout import round_up
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.parameters.unit import Unit
from zeromesh.shard.sizes import WINDOW
from zeromesh.shard.store.memory import is_unloaded, unloaded
from zeromesh.shard.store.stores import StorePlace
from zeromesh.shard.store.window import StateWindow, whole_window

RUN = 1 << 20  # elements that are joined or split at a time, which bounds the temporaries
ALIGN = 64  # bytes at a multiple of which a row begins
# Function from a parameter of the optimizer to the names of its states that rest with the master, in order.
Names = Callable[[nn.Parameter], Sequence[str]]


@dataclass(frozen=True)
class StateForm:
    """Contents of a block."""

    names: tuple[str, ...] = ()  # of optimizer states of the parameter's shape, beside the master
    # The row of an fp32 master has only its lower halves: the upper ones are the bf16 parameters at rest, as in
    # `base/kernels/halves.py`. The kernel updates the halves in place; everybody else sees the master joined, in fp32.
    split: bool = False
    narrow: frozenset[str] = frozenset()  # names of the states that are bf16 beside an fp32 master

    def kinds(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the states beside a master of ``dtype``."""
        return tuple(state_dtype(name in self.narrow, dtype) for name in self.names)

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the states of one element beside a master of ``dtype``."""
        return sum(kind.itemsize for kind in self.kinds(dtype))

    def of(self, flat: Flat, dtype: torch.dtype) -> StateForm:
        """Return the form of a flat buffer with a master of ``dtype``: only fp32 masters of bf16 parameters split."""
        split = self.split and dtype is torch.float32 and flat.layout.dtype is torch.bfloat16
        return replace(self, split=split)


def _runs(elements: int) -> Iterator[slice]:
    for first in range(0, elements, RUN):
        yield slice(first, min(first + RUN, elements))


class Rows:
    """Places of the rows of one flat buffer in its blocks, one block for each window."""

    def __init__(self, flat: Flat, dtype: torch.dtype, form: StateForm) -> None:
        self.form = form = form.of(flat, dtype)
        self._flat = flat
        self._elements = elements = flat.own.stop - flat.own.start
        self._kinds = (torch.int16 if form.split else dtype, *form.kinds(dtype))
        size = WINDOW if flat.optimizer_tier.in_blocks else max(1, elements)
        self.windows = [slice(first, min(first + size, elements)) for first in range(0, elements, size)]
        self.nbytes = self.block_bytes(slice(0, elements))
        # Host memory beside the buffers of blocks: for the master as a whole, and for one in halves that is joined.
        joined = self._kinds[0].itemsize * (len(self.windows) > 1) + dtype.itemsize * form.split
        self.loaded_bytes = elements * joined

    def block_bytes(self, window: slice) -> int:
        """Return the bytes of the block of some elements."""
        return sum(round_up((window.stop - window.start) * kind.itemsize, ALIGN) for kind in self._kinds)

    def raw(self, memory: torch.Tensor, window: slice | None = None) -> list[torch.Tensor]:
        """Return the rows of a block, 1-D, in their own dtypes: the master or its lower halves, then the states."""
        elements, begin, rows = self._elements if window is None else window.stop - window.start, 0, []
        for kind in self._kinds:
            rows.append(memory[begin : begin + elements * kind.itemsize].view(kind))
            begin += round_up(elements * kind.itemsize, ALIGN)
        return rows

    def unpack(self, memory: torch.Tensor, filled: bool, window: slice | None = None) -> list[torch.Tensor]:
        """Return the master and the states of a block, 1-D, in their dtypes; a master in halves is joined."""
        first, *states = self.raw(memory, window)
        if not self.form.split:
            return [first, *states]
        master, upper = torch.empty(len(first)), self._flat.shard[window or slice(None)]
        # In runs, so that the temporaries of a conversion stay in the cache.
        for part in _runs(len(first)) if filled else ():
            master[part] = halves.join(upper[part], first[part])
        return [master, *states]

    def pack(self, memory: torch.Tensor, master: torch.Tensor, window: slice | None = None) -> None:
        """Split a master that ``unpack`` joined; its upper halves become the parameters at rest."""
        lower, upper = self.raw(memory, window)[0], self._flat.shard[window or slice(None)]
        for part in _runs(len(master)) if self.form.split else ():
            upper[part], lower[part] = halves.split(master[part])


class Stored:
    """Loads the shards of flat buffers from their blocks into memory, one at a time, and back."""

    def __init__(self, flats: Sequence[Flat], place: StorePlace, mesh: Mesh) -> None:
        self.blocks = place.open({flat: flat.layout.shard_bytes for flat in flats}, mesh)
        self.tier = place.tier
        self._flats = frozenset(flats)
        self._here: Flat | None = None  # whose `shard` is a view of its block
        self._dirty = self._known = False
        self._failure: OSError | None = None

    def __contains__(self, flat: Flat) -> bool:
        return flat in self._flats

    def load(self, flat: Flat, write: bool = False, read: bool = True) -> None:
        """Keep one flat buffer's shard in memory until another one's is asked for, or others are read ahead.

        Raises:
            OSError: the disk failed, now or earlier.
        """
        # After a failure nothing is loaded any more: some parameters would be those from before the update.
        if self._failure is not None:
            raise self._failure
        if self._here is not flat or (read and not self._known):
            try:
                self._put_away()
                memory = self.blocks.take(flat, read)
            except OSError as error:
                self._failure = error
                raise
            self._here, self._known = flat, read
            if not read and (write or not self.blocks.in_memory):  # what rests in memory stays until it is written
                memory.zero_()
            _bind(flat, memory[: flat.layout.shard_bytes].view(flat.layout.dtype))
        self._known, self._dirty = self._known or write, self._dirty or write

    def read_ahead(self, units: Iterable[Unit]) -> None:
        """Begin to read what units will need, in their order, as far as there is room; forget all else."""
        try:
            self._put_away()
            self.blocks.read_ahead(flat for unit in units for flat in unit.flats if flat in self._flats)
        except OSError as error:
            self._failure = self._failure or error  # whoever loads next says so: nobody expects it from a plan

    def _put_away(self) -> None:
        """Begin to write what ``load`` has loaded, if it may be others now, and let it be unloaded."""
        if self._here is None:
            return
        flat, self._here = self._here, None
        dirty, self._dirty = self._dirty, False
        # `flat.shard` has the host wait for the last copy between the buffer and the device: only then may the disk
        # read from the buffer, or write to it.
        _bind(flat, unloaded(flat.shard))
        # What is frozen comes back after each use, as somebody might have changed it; nearly always it is the same.
        self.blocks.give(flat, dirty and (flat.layout.trainable or self.blocks.changed(flat)), behind=True)


def _bind(flat: Flat, shard: torch.Tensor) -> None:
    """Bind the shard to memory or to none, and the master, too, where the parameters are frozen."""
    flat.bind_shard(shard)
    if not flat.layout.trainable:
        flat.bind_master(shard)


class Swap:
    """Loads masters and optimizer states of flat buffers, in turn or one at a time, and takes them back."""

    def __init__(
        self,
        dtypes: Mapping[Flat, torch.dtype],
        form: StateForm,
        place: StorePlace,
        mesh: Mesh,
        early: Collection[Flat] = (),
        stored: Stored | None = None,
    ) -> None:
        self._rows = {flat: Rows(flat, dtype, form) for flat, dtype in dtypes.items()}
        sizes: dict[Hashable, int] = {
            (flat, window.start): rows.block_bytes(window)
            for flat, rows in self._rows.items()
            for window in rows.windows
        }
        self.blocks = place.open(sizes, mesh, self._keys(early))
        self.tier = place.tier
        self.host_bytes = self.blocks.host_bytes + loaded_bytes(self._rows.values())
        self._here: tuple[Flat, torch.Tensor, list[torch.Tensor]] | None = None
        self._dirty = self._known = False
        self._optimizer: Optimizer | None = None
        self._names: Names = lambda parameter: ()
        self._stored = stored  # a master in halves is joined with its parameter, which may rest in a file, too

    def __contains__(self, flat: Flat) -> bool:
        return flat in self._rows

    def serve(self, optimizer: Optimizer, names: Names) -> None:
        """Keep the states of an optimizer, too, from here on, those that it has already among them."""
        self._optimizer, self._names = optimizer, names
        self._take_in(self._rows)

    def _take_in(self, flats: Iterable[Flat]) -> None:
        """Let states that were made or set while nothing was loaded rest here, too."""
        for flat in flats:
            count = len(self._rows[flat].form.names)
            states = (pair for _, _, piece in flat.pieces for pair in islice(self._states(piece.parameter), count))
            if not all(is_unloaded(state[name]) for state, name in states if name in state):
                self.load(flat, write=True)
        self.flush()

    def load(self, flat: Flat, write: bool = False, read: bool = True) -> None:
        """Keep one flat buffer's states in memory until another one's are asked for; see ``Tiers.load_states``."""
        if self._here is None or self._here[0] is not flat or (read and not self._known):
            self.flush()
            memory = self._take(flat, read)
            # A master in halves is joined with the parameter, which is one of them.
            if self._rows[flat].form.split and read:
                try:
                    self._load_shard(flat)
                except BaseException:
                    self._give(flat, memory, False)
                    raise
            # Rows that nobody writes, as of states that do not exist yet, are read some time; several blocks are zeros.
            if write and not read and len(self._rows[flat].windows) == 1:
                memory.zero_()
            self._here = flat, memory, self._bind(flat, memory, read)
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
            self._give(flat, memory, packed)

    def _keys(self, flats: Iterable[Flat]) -> list[Hashable]:
        """Return the keys of the blocks of flat buffers, in order."""
        return [(flat, window.start) for flat in flats for window in self._rows[flat].windows]

    def _take(self, flat: Flat, read: bool) -> torch.Tensor:
        """Return one block with all of a flat buffer's elements."""
        keys, rows = self._keys([flat]), self._rows[flat]
        if len(keys) == 1:
            return self.blocks.take(keys[0], read)
        memory = torch.from_numpy(numpy.zeros(rows.nbytes, numpy.uint8))  # rows that stay zeros take no pages
        with closing(self.blocks.stream(keys, write=False)) if read else nullcontext(()) as blocks:
            for window, block in zip(rows.windows, blocks, strict=read):
                for row, part in zip(rows.raw(memory), rows.raw(block, window), strict=True):
                    row[window].copy_(part)
        return memory

    def _give(self, flat: Flat, memory: torch.Tensor, write: bool) -> None:
        """Give up what ``_take`` has returned; with ``write`` it holds something else now."""
        keys, rows = self._keys([flat]), self._rows[flat]
        if len(keys) == 1:
            self.blocks.give(keys[0], write)
            return
        for key, window in zip(keys, rows.windows, strict=True) if write else ():
            block = self.blocks.take(key, read=False)
            for row, part in zip(rows.raw(memory), rows.raw(block, window), strict=True):
                part.copy_(row[window])
            self.blocks.give(key, write)

    def windows(self, flat: Flat, write: bool = False, read: bool = True) -> Generator[StateWindow]:
        """Yield the windows of a flat buffer with the master in its own dtype, to be read or, with ``write``, changed.

        Without ``read`` the values are any.
        """
        assert read or not write
        self._take_in([flat])
        rows = self._rows[flat]
        if rows.form.split:
            self._load_shard(flat, write, read)
        most = max(map(rows.block_bytes, rows.windows), default=0)
        any_values = repeat(torch.empty(0 if read else most, dtype=torch.uint8))
        stream = self.blocks.stream(self._keys([flat]), write)
        with closing(stream):
            for window, memory in zip(rows.windows, stream if read else any_values, strict=False):
                values = rows.unpack(memory, read, window)
                yield StateWindow(flat, window, values)
                if write:
                    rows.pack(memory, values[0], window)
            next(stream, None) if read else None  # which waits for the last writes

    def names(self, flat: Flat, parameter: nn.Parameter) -> Sequence[str]:
        """Return the names of a parameter's states that rest here, in the order of rows."""
        return self._names(parameter)[: len(self._rows[flat].form.names)]

    def stream(self, flats: Sequence[Flat], provisional: bool = False) -> Generator[StateWindow]:
        """Yield the windows of flat buffers, in order, to be updated; what does not rest here is one window.

        With ``provisional`` all rests here, and the changes count from ``commit`` on. A master in halves stays so.
        """
        mine = [flat for flat in flats if flat in self._rows]
        if not provisional:
            self._take_in(mine)
        keys = self._keys(mine)
        with closing(self.blocks.stream(keys, write=True, provisional=provisional)) as blocks:
            for flat in flats:
                if flat not in self._rows:
                    yield whole_window(flat)
                    continue
                for window in self._rows[flat].windows:
                    with span("wait_disk"):
                        memory = next(blocks)
                    yield StateWindow(flat, window, self._rows[flat].raw(memory, window))
            with span("wait_disk"):
                next(blocks, None)  # which waits for the last writes

    def splits(self, flat: Flat) -> bool:
        """Return whether the master rests in halves, one of which is the parameter."""
        return flat in self._rows and self._rows[flat].form.split

    def release(self, flat: Flat) -> None:
        """Split a joined master again, before its parameter is used."""
        if self._here is not None and self._here[0] is flat and self.splits(flat):
            self.flush()

    def _load_shard(self, flat: Flat, write: bool = False, read: bool = True) -> None:
        if self._stored is not None and flat in self._stored:
            self._stored.load(flat, write, read)

    def _bind(self, flat: Flat, memory: torch.Tensor, filled: bool) -> list[torch.Tensor]:
        """Let the master, the pieces and their states lie in a block, or in what is joined; return these rows."""
        values = self._rows[flat].unpack(memory, filled)
        flat.bind_master(values[0])
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


def loaded_bytes(rows: Collection[Rows]) -> int:
    """Return the bytes of host memory for the largest master, whole as it is at the start, beside those of blocks."""
    return max((of.loaded_bytes for of in rows), default=0)
