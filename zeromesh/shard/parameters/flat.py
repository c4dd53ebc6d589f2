"""Flat buffers: the parameters of a unit that share one layout, where they rest and where they are computed with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from zeromesh.base.dtypes import SIXTEEN_BIT
from zeromesh.base.kernels import halves
from zeromesh.base.piece import Piece
from zeromesh.base.placement import Placement, PlacementRow, Tier
from zeromesh.comm.collectives import Pending
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.gradients.gradient import Gradient
from zeromesh.shard.layout import Layout, Segment
from zeromesh.shard.parameters.deferred import Source
from zeromesh.shard.parameters.narrow import NarrowGather
from zeromesh.shard.sizes import is_apart, rests_in_master
from zeromesh.shard.store.link import DONE, Copy, Link
from zeromesh.shard.store.memory import is_unloaded, zeros_on

VALUES_TAG = 11  # tag on the pipeline axis of the values of parameters that several stages have

# Function of a parameter's name and the parameter: gives it its value if it has none, or returns its source.
Materialise = Callable[[str, nn.Parameter], Source | None]


def rebind(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Let a parameter lie in other memory; the object stays the same."""
    parameter.data = value


def _bind_first(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Take a parameter over from the user: a gradient that it has is of no update here."""
    rebind(parameter, value)
    parameter.grad = None


class Store(Protocol):
    """Storage of flat buffers; see ``zeromesh.shard.store.tiers``."""

    def load_states(self, flat: Flat, write: bool = False, read: bool = True) -> None:
        """Load the master and the optimizer states into memory."""

    def windows(self, flat: Flat, write: bool = False, read: bool = True) -> Iterator[Any]:
        """Yield the ``StateWindow``s of the master and the optimizer states."""

    def load_shard(self, flat: Flat, write: bool = False, read: bool = True) -> None:
        """Load this rank's parameters into memory."""

    def form(self, flat: Flat) -> tuple[bool, bool]:
        """Return whether states are in memory only while they are loaded, and whether the master is in halves."""


class Flat:
    """The parameters of a unit that share one layout, with their shard, master and gradient."""

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        number: int,
        row: PlacementRow,
        mesh: Mesh,
        tied_stages: Sequence[int] = (),
        wide_states: bool = False,
    ) -> None:
        self.layout = layout
        self.wide_states = wide_states  # they are as wide as the master, whatever those of others are
        self.sharded = row.parameter is Placement.SHARDED
        # Pipeline stages that have these parameters, where several do. The first of them counts what all have: in
        # norms, in numbers of elements, and in what is saved.
        self.tied_stages = tuple(tied_stages)
        self.is_first = not tied_stages or tied_stages[0] == mesh.group("pipeline").rank
        self.parameters = tuple(parameters)  # in the order of the layout's segments
        self.tag = 16 + 4 * number  # the same on every rank, and 4 messages of a flat buffer may be under way at once
        self.group = mesh.shards_of(layout.axis)  # the ranks over which its states are sharded
        start = self.group.rank * layout.shard_size
        self.shard_range = slice(start, start + layout.shard_size)
        self.own = self.shard_range if row.optimizer is Placement.SHARDED else slice(0, layout.size)
        self.parameter_tier = row.parameter_tier
        self.optimizer_tier = row.optimizer_tier if layout.trainable else row.parameter_tier
        self.store: Store | None = None  # from ``fill`` on
        self.keeps_states = False  # the master and the optimizer states are in memory only while they are loaded
        self.splits = False  # one half of the master is the parameter
        self.gradient: Gradient | None = None
        self.narrow: NarrowGather | None = None  # of weights that are gathered in float8
        # All parameters as computed with: a view of the unit's own storage, to which `parameter.data` is bound.
        # Fetching puts memory into that storage and evicting takes it out, so that the unit's views see it again when
        # it is back.
        self.full = torch.empty(0)
        self.views: tuple[torch.Tensor, ...] = ()
        self.versions: list[int] = []
        # This rank's part of the parameters where they rest: memory of its own, or its segment of `full`.
        self._shard = torch.empty(0)
        self._copy = DONE  # the last to or from the shard's memory
        # What the optimizer updates, in fp32 for 16-bit parameters. Where parameters are sharded they rest in it and
        # are converted as they are fetched; elsewhere it is a copy beside them. Of others it is the shard itself,
        # unless the optimizer's tier is not the parameters', or parameters rest on NVMe.
        self.master = torch.empty(0)
        self.pieces: tuple[tuple[int, slice, Piece], ...] = ()  # index of the parameter, place in `master`, piece
        self.exposed: set[int] = set()  # parameters whose ``data`` somebody has asked for, and may have written to
        self.unbound: set[int] = set()  # parameters that are another tensor than their view for a while

    def load_states(self, write: bool = False, read: bool = True) -> None:
        """Keep the master and the optimizer states in memory until those of another flat buffer are loaded."""
        if self.store is not None:
            self.store.load_states(self, write, read)

    def load_shard(self, write: bool = False, read: bool = True) -> None:
        """Keep ``shard`` in memory until that of another flat buffer is loaded; see ``load_states``."""
        if self.store is not None:
            self.store.load_shard(self, write, read)

    @property
    def shard(self) -> torch.Tensor:
        """This rank's parameters at rest, after any copy to or from them; see ``settle``."""
        self.settle()
        return self._shard

    def bind_shard(self, shard: torch.Tensor) -> None:
        """Let this rank's parameters rest in this memory."""
        self._shard = shard

    def bind_master(self, master: torch.Tensor) -> None:
        """Let the master, and the pieces that the optimizer has, lie in this memory."""
        self.master = master
        for _, local, piece in self.pieces:
            rebind(piece.parameter, master[local].view(piece.parameter.shape))

    def write_shard(self) -> None:
        """Write the master, which has changed, to the shard, if that is another tensor."""
        if self.master is not self.shard and not self.splits:
            if not self.keeps_states:
                self.load_shard(write=True, read=False)
                self.shard.copy_(self.master)
                return
            assert self.store is not None
            for window in self.store.windows(self):
                # Not before a window is there, and with what it holds: if the disk fails, that stays.
                self.load_shard(write=True)
                self.shard[window.elements].copy_(window.master)

    def unbind(self, index: int, value: torch.Tensor) -> None:
        """Let a parameter be another tensor, such as one that is whole, until ``rebind``."""
        rebind(self.parameters[index], value)
        self.unbound.add(index)

    def rebind(self, index: int) -> None:
        """Let a parameter be the part that this rank computes with again."""
        rebind(self.parameters[index], self.views[index])
        self.unbound.discard(index)

    def settle(self) -> None:
        """Wait for the last copy to or from the shard."""
        copy, self._copy = self._copy, DONE
        if self.parameter_tier is Tier.DEVICE:
            copy.order()  # the current stream waits: the shard is read and written by kernels and collectives behind it
        else:
            copy.wait()  # the host waits: the shard is host memory, which the update, or the disk, uses next

    def expect(self, copy: Copy) -> None:
        """Whoever uses the shard next waits for a copy of new parameters to it."""
        self._copy = copy

    def send_shard(self, values: torch.Tensor, link: Link) -> Copy:
        """Begin to copy new parameters, on the host, of its shape, to the shard; they may be changed after the copy."""
        if self.parameter_tier is Tier.DEVICE:
            copy = link.to_device(self.shard, values)  # behind the current stream, which may still read the shard
            self.expect(copy)
            return copy
        self.load_shard(write=True, read=False)
        self.shard.copy_(values)
        return DONE

    def begin_fetch(self, mesh: Mesh, link: Link) -> list[Pending]:
        """Start to gather the parameters; from the host this rank's part is copied first, beside what is computed."""
        form = mesh.links.gather if self.rounds else None
        self.load_shard()
        if self.narrow is not None:
            return [self.narrow.gather(self.full, self.shard, self.group, self.tag)]
        if self.parameter_tier is Tier.DEVICE:
            # The collective's stream waits for the current one, and so for the last kernels of the unit that had the
            # slot.
            return [self.group.all_gather(self.full, self.shard, self.tag, form)]
        part = self.full[self.shard_range]
        # The stream of copies to the device waits for the current stream, and so for the last kernels of the unit that
        # had the slot; and for the last copy to the shard, which may be on the stream of copies to the host.
        self._copy = copy = link.to_device(part, self._shard, self._copy)
        # The gather is begun on the copies' stream: it waits for the copy, and what is computed waits for neither.
        with link.behind():
            return [Pending(then=copy.order), self.group.all_gather(self.full, part, self.tag, form)]

    def write_back(self, link: Link) -> None:
        """Take what the parameters are now, in memory, into their shard; the memory may be given up then."""
        self.load_shard(write=True, read=False)
        if self.parameter_tier is Tier.DEVICE:
            self.shard.copy_(self.full[self.own])
        else:
            self._copy = link.to_host(self._shard, self.full[self.own], self._copy)
            # The current stream waits for the copy, which reads `full`: whoever gets the slot next is launched behind
            # it.
            self._copy.order()

    @property
    def gathers(self) -> bool:
        """True if an update changes parts of ``full`` on other ranks."""
        return self.layout.trainable and self.own.stop - self.own.start < self.layout.size

    @property
    def rounds(self) -> bool:
        """True if what is gathered may be rounded: it is not read back, as its true value lies in the master."""
        return self.layout.trainable and not _shares(self.master, self.full)

    def unset_gradients(self) -> None:
        """Take back the gradients that the optimizer's pieces have."""
        for _, _, piece in self.pieces:
            piece.set_gradient(None)

    @property
    def apart(self) -> bool:
        """True if the master is another tensor than ``shard`` because of where they rest."""
        return self.layout.trainable and is_apart(self.parameter_tier, self.optimizer_tier)

    def fill(self, row: PlacementRow, mesh: Mesh, mixed: bool, materialise: Materialise | None, store: Store) -> None:
        """Take the parameters' values, those of the first rank, into ``shard`` (or ``full``) and ``master``."""
        self.store = store
        self.keeps_states, self.splits = store.form(self)
        layout, sharded = self.layout, row.parameter is Placement.SHARDED
        dtype, elements = self.master_dtype(mixed), self.own.stop - self.own.start
        if not sharded:
            self._shard = self.full[self.own]
        elif self.parameter_tier.in_blocks:
            self.load_shard(write=True, read=False)
        else:
            rest = dtype if rests_in_master(self.parameter_tier, self.optimizer_tier) else layout.dtype
            self._shard = zeros_on(self.parameter_tier, layout.shard_size, rest, mesh.device, row.pinned)
        self.master = self.shard
        if self.keeps_states:
            self.load_states(write=True, read=False)
            self.master.zero_()
        elif self.apart or self.shard.dtype != dtype:
            self.master = zeros_on(self.optimizer_tier, elements, dtype, mesh.device, row.pinned)
        for start, stop in () if sharded else layout.gaps:
            self.full[start:stop] = 0
        # One after the other, as only one may be whole where they are sharded; of one that is read from a source, no
        # more than this rank keeps. The master is made of the value before it is rounded to 16 bits.
        for parameter, segment, view in zip(self.parameters, layout.segments, self.views, strict=True):
            unmade = parameter.is_meta
            source = materialise(segment.name, parameter) if materialise is not None else None
            value = _first_ranks_value(parameter, mesh, unmade, self.tied_stages) if source is None else None
            _bind_first(parameter, view)
            if value is not None:
                self.put(segment, segment.held.cut(value.view(segment.held.whole)).reshape(-1))
            elif source is not None:
                _read(self, segment, source, self.shard_range if sharded else slice(0, layout.size))
        self.watch()
        if layout.trainable:
            self.pieces = tuple(_cut_pieces(layout, self.own, self.master))

    def hold_rows(self, master: torch.Tensor, here: int, store: Store) -> None:
        """Let this rank's rows of a table rest in ``master``, 1-D, which begins with ``here`` elements of them.

        The parameter keeps its shape, and has the memory of one number.
        """
        (parameter,), (segment,) = self.parameters, self.layout.segments
        self.store, self.master, self._shard = store, master, master
        self.full = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(self.layout.size)
        self.views = (self.full[: segment.stop].view(segment.shape),)
        _bind_first(parameter, self.views[0])
        self.watch()
        if here:
            start, local = self.shard_range.start, slice(0, here)
            value = nn.Parameter(master[local], requires_grad=self.layout.trainable)
            piece = Piece(segment.name, segment.held, start, start + here, value, by_row=True)
            self.pieces = ((0, local, piece),)

    def master_dtype(self, mixed: bool) -> torch.dtype:
        """Return the dtype of the master; ``mixed`` as for ``fill``."""
        return (
            torch.float32 if mixed and self.layout.trainable and self.layout.dtype in SIXTEEN_BIT else self.layout.dtype
        )

    def bind(self, storage: torch.UntypedStorage, offset: int) -> None:
        """Lay ``full`` and the views of it into a storage, which has memory, from this byte on."""
        layout = self.layout
        empty = torch.empty(0, dtype=layout.dtype, device=storage.device)
        self.full = empty.set_(storage, offset // layout.dtype.itemsize, (layout.size,), (1,))
        self.views = tuple(self.full[s.start : s.stop].view(s.shape) for s in layout.segments)

    def watch(self) -> None:
        """Notice what others do to the parameters from here on."""
        with torch._C.DisableTorchFunctionSubclass():
            self.versions = [parameter._version for parameter in self.parameters]

    def put(self, segment: Segment, value: torch.Tensor, first: int = 0) -> None:
        """Take a parameter's value, 1-D from element ``first`` on, into master and shard, or ``full`` if that is it."""
        start = segment.start + first
        if not self.splits:
            sharded = not _shares(self.shard, self.full)
            self.load_shard(write=True)
            _put(value, start, self.shard if sharded else self.full, self.shard_range.start if sharded else 0)
        if self.master is not self.shard:
            self.load_states(write=True)
            _put(value, start, self.master, self.own.start, self.splits)

    def take_changes(self, lent: Sequence[torch.Tensor] = ()) -> None:
        """Take what others wrote to the parameters, in place or by ``parameter.data = ...``, into shard and master.

        Args:
            lent: the views that parameters are of other memory than ``full``, which is then brought up to date, too.
        """
        changed = False
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            _take_pieces(self)
            members = zip(self.parameters, lent or self.views, self.versions, self.layout.segments, strict=True)
            for index, (parameter, view, version, segment) in enumerate(members):
                if index in self.unbound and not lent:
                    continue
                bound = parameter.is_set_to(view)  # else somebody wrote `parameter.data = ...`
                # Torch does not count changes through `parameter.data`: where it was asked for, the value is taken.
                if bound and parameter._version == version and index not in self.exposed:
                    continue
                # A view that somebody kept shares the version count, and may be written to while there is nothing here.
                there = view.untyped_storage().nbytes() > 0
                if bound and not there:
                    continue
                if (parameter.shape, parameter.dtype, parameter.device) != (view.shape, view.dtype, view.device):
                    raise RuntimeError(
                        f"parameter {segment.name} has become {parameter.dtype} of shape {tuple(parameter.shape)} on "
                        f"{parameter.device}, but was placed as {view.dtype} of shape {tuple(view.shape)} on "
                        f"{view.device}; change the model before initialize"
                    )
                if self.narrow is not None and self.narrow.is_rounded:
                    value = parameter.detach().reshape(-1)
                    self.narrow.require_kept(
                        index, value if bound and parameter._version == version else value[:0], self.shard
                    )
                    continue
                changed = True
                self.put(segment, parameter.detach().reshape(-1))
                if lent and self.views[index].untyped_storage().nbytes() > 0:
                    self.views[index].copy_(parameter)
                if not bound:
                    if there:
                        view.copy_(parameter)
                    rebind(parameter, view)
        self.exposed.clear()
        if changed:
            self.watch()


def write_parameter(flats: Iterable[Flat], parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Give a parameter a value, whole and the same on all ranks; who fetches it from now on gets the new one."""
    for flat in flats:
        for member, segment in zip(flat.parameters, flat.layout.segments, strict=True):
            if member is parameter:
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    flat.put(segment, segment.held.cut(value).reshape(-1))
                flat.watch()


def _take_pieces(flat: Flat) -> None:
    """Take what others gave to the optimizer's pieces by ``piece.data = ...`` into the master."""
    is_unloaded(flat.master)  # raises if somebody has written to it
    for _, local, piece in flat.pieces:
        value = piece.parameter  # itself: within torch.func, what is made of it has no address
        if value.data_ptr() == flat.master.data_ptr() + local.start * flat.master.stride(0) * value.itemsize:
            continue
        if value.numel() != local.stop - local.start:
            raise RuntimeError(
                f"this rank's piece of {piece.name} in the optimizer has {local.stop - local.start} elements, and was "
                f"given data of shape {tuple(value.shape)}; write to it in place"
            )
        flat.load_states(write=True)
        flat.master[local].copy_(value.detach().reshape(-1))
        rebind(piece.parameter, flat.master[local].view(piece.parameter.shape))


def _read(flat: Flat, segment: Segment, source: Source, own_range: slice) -> None:
    start, stop = max(segment.start, own_range.start), min(segment.stop, own_range.stop)
    if start < stop:
        first = start - segment.start
        value = segment.held.read(source.read, first, stop - segment.start)
        if value.numel() != stop - start:
            raise ValueError(f"{source} gives {value.numel()} of the {stop - start} elements of {segment.name}")
        # Never narrower than what it goes to, where it would be compared with what is there.
        wide = torch.promote_types(value.dtype, flat.master.dtype)
        flat.put(segment, value.to(dtype=wide), first)


def _cut_pieces(layout: Layout, own_range: slice, master: torch.Tensor) -> Iterator[tuple[int, slice, Piece]]:
    """Yield the index of each parameter in this rank's part, its place there, and the piece that is updated."""
    for index, start, stop in layout.owned(own_range.start, own_range.stop):
        segment = layout.segments[index]
        local = slice(start - own_range.start, stop - own_range.start)
        parameter = nn.Parameter(master[local])
        yield index, local, Piece(segment.name, segment.held, start - segment.start, stop - segment.start, parameter)


def _first_ranks_value(parameter: nn.Parameter, mesh: Mesh, unmade: bool, tied_stages: Sequence[int]) -> torch.Tensor:
    """Return the value, 1-D, on the mesh's device; what was ``unmade`` is of nobody else's memory."""
    value = parameter.detach().to(mesh.device).reshape(-1)
    stages = mesh.group("pipeline")
    first = mesh.group("stage").rank == 0
    if not (first and stages.rank == (tied_stages or [stages.rank])[0]) and not unmade:
        value = torch.empty_like(value)  # the memory of a user's own is not written to
    if tied_stages and first:
        others = dict.fromkeys(tied_stages[1:], value) if stages.rank == tied_stages[0] else {}
        source = {} if others else {tied_stages[0]: value}
        stages.send_and_receive(others, source, VALUES_TAG, "tied parameters").wait()
    mesh.group("stage").broadcast(value)
    return value


def _shares(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _put(value: torch.Tensor, at: int, buffer: torch.Tensor, first: int, split: bool = False) -> None:
    """Copy what lies in ``buffer`` of a value; they begin with the layout's elements ``at`` and ``first``."""
    # ``split``: the buffer is the master of a parameter that is one half of it, and rounded so.
    start, stop = max(at, first), min(at + value.numel(), first + buffer.numel())
    if start < stop:
        target, part = buffer[start - first : stop - first], value[start - at : stop - at].to(buffer.device)
        if part.itemsize >= target.itemsize:
            target.copy_(part)
        else:  # what was not changed keeps the bits that the narrower dtype lacks
            narrow = halves.split(target)[0] if split and part.dtype is torch.bfloat16 else target.to(part.dtype)
            target.copy_(torch.where(narrow == part, target, part.to(target.dtype)))
