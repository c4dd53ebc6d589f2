"""Masters and optimizer states that rest on NVMe: in host memory only while they are used.

Of each flat buffer the file has one region, with rows of as many elements as this rank updates: the master, then the
optimizer's states in the order in which the update's rule names them. While a region is in memory, the master, the
pieces and the states are views of the buffer that it was read into. At other times they are *absent*: of the same shape
and dtype, without memory of their own, and all NaN to whoever looks at them.

Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from zeromesh.dist.mesh import Mesh
from zeromesh.model.placement import Tier
from zeromesh.observe.spans import span
from zeromesh.shard.layout import round_up
from zeromesh.shard.unit import Flat
from zeromesh.tiers.buffers import Buffer, Buffers
from zeromesh.tiers.memory import empty_on
from zeromesh.tiers.nvme import Store
from zeromesh.tiers.stream import stream
from zeromesh.tiers.swap_file import aligned
from zeromesh.tiers.traffic import Traffic

Names = Callable[[nn.Parameter], Sequence[str]]
"""Of a parameter of the optimizer: which of its states rest with the master, in order."""


@dataclass(frozen=True)
class Disk:
    """Where a tier of files is, and how it is used.

    Attributes:
        folder: on the device.
        states: of the optimizer, like the parameter, that rest there beside the master.
        buffers: of how many flat buffers the states are in host memory at the most: while one is used, the next are
            read and the last are written.
        block_size, queue_depth: see ``Store``.
        pinned: whether the buffers are page-locked where there is a GPU.
    """

    folder: Path
    states: int = 0
    buffers: int = 4
    block_size: int = 1 << 20
    queue_depth: int = 8
    pinned: bool = True


class Swap:
    """Brings what rests on NVMe of flat buffers into memory, in turn or one at a time, and back.

    Args:
        dtypes: of the masters, by flat buffer.
        disk: where.
        mesh: the file's name has the rank.
        ahead: of which there is a spare place, for ``provisional``.

    Raises:
        OSError: the folder cannot be used, or has too little space.
    """

    def __init__(
        self, dtypes: Mapping[Flat, torch.dtype], disk: Disk, mesh: Mesh, ahead: Collection[Flat] = ()
    ) -> None:
        self._dtypes = dict(dtypes)
        self._rows = 1 + disk.states
        self._store = Store(disk.folder, mesh.rank, disk.block_size, disk.queue_depth)
        self._regions = {flat: self._store.allocate(_region_bytes(flat, dtypes[flat], disk)) for flat in dtypes}
        for flat in ahead:
            self._store.allocate_spare(self._regions[flat].nbytes)
        try:
            self._store.reserve()
            self._pool = Buffers(
                buffer_bytes(dtypes, disk),
                lambda nbytes: empty_on(Tier.HOST, nbytes, torch.uint8, mesh.device, disk.pinned),
            )
        except BaseException:
            self._store.close()
            raise
        self._here: tuple[Flat, Buffer] | None = None
        self._dirty, self._known = False, False
        self._optimizer: Optimizer | None = None
        self._names: Names = lambda parameter: ()
        for flat in self._regions:
            flat.bring = partial(self.bring, flat)

    def __contains__(self, flat: Flat) -> bool:
        return flat in self._regions

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return self._store.nbytes

    @property
    def host_bytes(self) -> int:
        """Of the buffers."""
        return self._pool.nbytes

    @property
    def folder(self) -> Path:
        """Where the file is."""
        return self._store.path.parent

    def traffic(self) -> Traffic:
        """What went to and from the disk so far."""
        return self._store.traffic()

    def serve(self, optimizer: Optimizer, names: Names) -> None:
        """From here on keep the states of an optimizer, too, those that it has already among them."""
        self._optimizer, self._names = optimizer, names
        for flat in self._regions:
            if any(optimizer.state.get(piece.parameter) for _, _, piece in flat.pieces):
                self.bring(flat, write=True)
        self.flush()

    def bring(self, flat: Flat, write: bool = False, read: bool = True) -> None:
        """Have one flat buffer's states in memory until another one's are asked for.

        Args:
            flat: whose.
            write: what is in memory then goes back to the disk.
            read: False: what is on the disk does not matter.
        """
        if self._here is None or self._here[0] is not flat or (read and not self._known):
            self.flush()
            region = self._regions[flat]
            buffer = self._pool.take(region.padded)
            assert buffer is not None, "a flat buffer is asked for while others stream"
            try:
                if read:
                    self._store.read(region, buffer).wait()
            except BaseException:
                self._pool.give(buffer)
                raise
            self._here = flat, buffer
            self._bind(flat, buffer)
            self._known = read or write
        self._dirty = self._dirty or write

    def flush(self) -> None:
        """Write what ``bring`` brought, if it may be others now, and give its memory up."""
        if self._here is None:
            return
        (flat, buffer), self._here = self._here, None
        dirty, self._dirty = self._dirty, False
        self._unbind(flat, buffer)
        try:
            if dirty:
                self._store.write(self._regions[flat], buffer).wait()
        finally:
            self._pool.give(buffer)

    def stream(self, flats: Sequence[Flat], write: bool) -> Generator[Flat]:
        """Each of some flat buffers, in order; those that rest here are in memory until the next one is asked for.

        The next ones are read, and with ``write`` the last ones are written, meanwhile.

        Raises:
            OSError: the disk failed.
        """
        self.flush()
        mine = [flat for flat in flats if flat in self._regions]
        buffers = stream(self._store, [self._regions[flat] for flat in mine], self._pool, write)
        try:
            for flat in flats:
                if flat not in self._regions:
                    yield flat
                    continue
                with span("wait_disk"):
                    buffer = next(buffers)
                self._bind(flat, buffer)
                try:
                    yield flat
                finally:
                    self._unbind(flat, buffer)
            with span("wait_disk"):
                next(buffers, None)  # which waits for the last writes
        finally:
            buffers.close()

    def provisional(self, flats: Sequence[Flat]) -> Generator[tuple[Flat, list[torch.Tensor]]]:
        """As ``stream``, each with its rows: the master and the states, to be changed in place, which nobody sees.

        What is written counts from ``commit`` on.
        """
        regions = [self._regions[flat] for flat in flats]
        with closing(stream(self._store, regions, self._pool, provisional=True)) as buffers:
            for flat, buffer in zip(flats, buffers, strict=True):
                yield flat, [self._row(flat, buffer, number) for number in range(self._rows)]

    def commit(self) -> None:
        """Let what was written provisionally count. Raises OSError as ``Store.commit``."""
        self._store.commit()

    def drop(self) -> None:
        """Forget what was written provisionally."""
        self._store.drop()

    def close(self) -> None:
        """Delete the file."""
        self._store.close()

    def _row(self, flat: Flat, buffer: Buffer, number: int) -> torch.Tensor:
        dtype = self._dtypes[flat]
        return buffer.tensor(flat.own.stop - flat.own.start, dtype, number * _row_bytes(flat, dtype))

    def _bind(self, flat: Flat, buffer: Buffer) -> None:
        """Let the master, the pieces and their states lie in a buffer."""
        rows = [self._row(flat, buffer, number) for number in range(self._rows)]
        flat.master = rows[0]
        for _, local, piece in flat.pieces:
            shape = piece.parameter.shape
            piece.parameter.data = rows[0][local].view(shape)
            for (state, name), row in zip(self._states(piece.parameter), rows[1:], strict=False):
                if name in state:
                    value = row[local].view(shape)
                    if not hasattr(state[name], _ABSENT):
                        value.copy_(state[name])
                    state[name] = value

    def _unbind(self, flat: Flat, buffer: Buffer) -> None:
        """Take what may lie elsewhere into the buffer, and let everything be absent."""
        rows = [self._row(flat, buffer, number) for number in range(self._rows)]
        flat.master = absent(rows[0])
        for _, local, piece in flat.pieces:
            for (state, name), row in zip(self._states(piece.parameter), rows[1:], strict=False):
                if name in state:
                    value, place = state[name], row[local]
                    if value.data_ptr() != place.data_ptr():  # the optimizer has just made it, or a checkpoint gave it
                        place.copy_(value.reshape(-1))
                    state[name] = absent(value)
            piece.parameter.data = absent(piece.parameter.data)

    def _states(self, parameter: nn.Parameter) -> Iterator[tuple[dict[str, torch.Tensor], str]]:
        """The states of a parameter that have rows, which the optimizer may not have made yet."""
        state = {} if self._optimizer is None else self._optimizer.state.get(parameter, {})
        return ((state, name) for name in self._names(parameter))


def buffer_bytes(dtypes: Mapping[Flat, torch.dtype], disk: Disk) -> list[int]:
    """Of each buffer in host memory."""
    largest = max((aligned(_region_bytes(flat, dtype, disk)) for flat, dtype in dtypes.items()), default=0)
    return [largest] * min(disk.buffers, len(dtypes))


def _region_bytes(flat: Flat, dtype: torch.dtype, disk: Disk) -> int:
    return (1 + disk.states) * _row_bytes(flat, dtype)


def _row_bytes(flat: Flat, dtype: torch.dtype) -> int:
    return round_up((flat.own.stop - flat.own.start) * dtype.itemsize, 64)


def absent(like: torch.Tensor) -> torch.Tensor:
    """NaN (of whole numbers: 0) of the same shape and dtype, in the memory of one number; nobody can write to it."""
    value = torch.nan if like.is_floating_point() or like.is_complex() else 0
    found = torch.full((), value, dtype=like.dtype).expand(like.shape)
    setattr(found, _ABSENT, True)
    return found


_ABSENT = "_rests_on_disk"
