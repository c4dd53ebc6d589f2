"""A model whose states are placed by a row of the placement table: what the engine drives."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from math import inf, prod
from typing import Any

import torch
from torch import nn

from zeromesh.base.dtypes import dtypes
from zeromesh.base.piece import Piece
from zeromesh.base.placement import Placement, Tier
from zeromesh.base.quantized_layers import stored
from zeromesh.base.spans import span
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.gradients.accumulation import Accumulation
from zeromesh.shard.gradients.gradient import GradientArrival, GradientPolicy
from zeromesh.shard.gradients.gradient_sums import squared_norm
from zeromesh.shard.gradients.grads import Grads
from zeromesh.shard.gradients.reducer import Reducer, late_of
from zeromesh.shard.layout import Layout
from zeromesh.shard.optim.host import HostSteps
from zeromesh.shard.parameters.absent_guard import Guard, Presence, gathered_class, unloaded_class
from zeromesh.shard.parameters.events import Events
from zeromesh.shard.parameters.flat import Flat, Materialise
from zeromesh.shard.parameters.flat_exchange import join
from zeromesh.shard.parameters.model_buffers import ModelBuffers
from zeromesh.shard.parameters.narrow import share_scales
from zeromesh.shard.parameters.residency import Residency
from zeromesh.shard.parameters.slots import Pool
from zeromesh.shard.parameters.unit import State, Unit
from zeromesh.shard.parameters.use_order import Order
from zeromesh.shard.place_units import ModelPart, Sharding, lay_out, make_units
from zeromesh.shard.sizes import slots_of
from zeromesh.shard.store.budget import MemoryBudget, Prepare
from zeromesh.shard.store.early import EarlyUpdates, can_begin_early
from zeromesh.shard.store.host_update import HostUpdates, pieces_on_host
from zeromesh.shard.store.link import Link
from zeromesh.shard.store.tiers import Tiers
from zeromesh.shard.store.window import StateWindow
from zeromesh.shard.tables.table import Table
from zeromesh.shard.tables.tables import Tables

# Function of a flat buffer, a range of this rank's part and the piece there; returns a tensor of the piece's size.
Pick = Callable[[Flat, slice, Piece], torch.Tensor | None]


@dataclass(frozen=True)
class Agreement:
    """Knowledge that all ranks share after an accumulation boundary."""

    norm: float  # global norm of the gradients, as summed, before any division
    largest: Sequence[float]  # elementwise, of all ranks
    sums: torch.Tensor  # of the ranks of each slot; float64, shape (slots, sums)


class ShardedModel:
    """Places a model's states over the mesh and moves them as the model computes.

    The model is changed in place: its parameters become views of flat buffers; the modules stay as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        sharding: Sharding,
        part: ModelPart | None = None,
        accumulation: Accumulation | None = None,
        materialise: Materialise | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        row, precision, slots, part = sharding.row, sharding.precision, sharding.slots, part or ModelPart()
        self.model, self.mesh, self.row, self.idle = model, mesh, row, part.idle
        self.sharded = row.parameter is Placement.SHARDED
        # Everything is laid out before anything gets memory, so that what does not fit is refused first.
        self.units = make_units(model, sharding.targets, sharding.tables.paths, part.experts)
        mixed = precision.compute is not None and not precision.narrow_masters
        self.accumulation = accumulation or Accumulation(1)
        laid_out = lay_out(
            self.units, mesh, sharding, part, self.accumulation.steps > 1 or not self.accumulation.managed
        )
        self.root, rest = self.units[0], self.units[1:]
        of_units = [flat for _, flats, _ in laid_out for flat in flats]
        self.tables = Tables(
            sharding.tables, mesh, max(len(of_units), len(self.units)), dtypes(model, precision), precision.communicate
        )
        self.flats = [*of_units, *self.tables.flats]
        self.names = {id(p): s.name for f in self.flats for p, s in zip(f.parameters, f.layout.segments, strict=True)}
        policy = GradientPolicy.of(
            row,
            wire=precision.communicate,
            accumulate=precision.accumulate,
            slots=slots.gradient,
            predivide=sharding.predivide,
            summed=sharding.summed,
        )
        self.link = Link(mesh.device)
        gradients = [flat.gradient for flat in self.flats if flat.gradient]
        self.reducer = Reducer(gradients, policy, mesh, self.accumulation.steps > 1, self.link, self.tables)
        early = [flat for flat in of_units if can_begin_early(flat, mesh)]
        in_memory = [flat for flat in self.tables.flats if not flat.parameter_tier.in_blocks]
        budget = MemoryBudget.of(of_units, in_memory, row, mixed, self.reducer.memory.shard_bytes[Tier.HOST], early)
        self.store = Tiers() if prepare is None else prepare(budget)
        self.swap, self.stored = self.store.swap, self.store.stored
        assert self.swap is not None or not budget.blocks, "states without a place for them"
        assert self.stored is not None or not budget.stored, "parameters without a place for them"
        for unit, flats, its_row in laid_out:
            unit.place(flats, its_row, mesh, mixed, materialise, self.link, self.store)
        self.early = EarlyUpdates(self.store, mesh, self.link, row.pinned)
        self.host_updates = HostUpdates(self.store, self.link, row.pinned)
        if self.store.early:
            self.reducer.listen(self.early.is_whole)
        places = rest if self.sharded else []
        parts = [[(float(unit.nbytes), 1) for unit in places if unit.has_experts is part] for part in (False, True)]
        sizes = slots_of(parts, slots.parameter or 2)
        self.pool = Pool([int(size) for size, number in sizes for _ in range(number)], mesh.device, lent=True)
        self.root_pool = Pool([self.root.nbytes] if self.sharded else [], mesh.device, lent=True)
        self._order = Order([unit for unit in rest if unit.flats])
        # Filled below: guards call events, which call residency, which calls guards.
        self._guards: dict[Unit, Guard] = {}
        read_ahead = None if self.stored is None else self.stored.read_ahead
        self.residency = Residency(self.root, rest, self.pool, self.root_pool, mesh, self._switch, read_ahead)
        self.events = Events(
            self.units, self._order, self.residency, self.reducer, mesh, self.accumulation, self.tables.lookups.finish
        )
        self.tables.place(materialise, mixed, self.events.backward.gradient_arrived, self.store)
        settle = self.events.backward.drop_failed
        self.grads = Grads(of_units, self.names, self.reducer, self.accumulation, mesh, settle, self.early)
        self.grads.install()
        base = self.grads.class_of(nn.Parameter)
        self.tables.guard(base, self.names)
        gathered = gathered_class(base, self.events.saved.saving)
        unloaded = {unit: unloaded_class(base, unit, self.names, self.events.touch) for unit in self.units}
        self._guards = {unit: Guard(unit, unloaded[unit], gathered) for unit in self.units}
        self._handles = self._listen()
        self.buffers = ModelBuffers(model, mesh)
        self._counts = _count_elements([flat.layout for flat in self.flats if flat.is_first], mesh)
        if self.sharded:
            for unit in self.units:
                self._switch(unit, False)

    def _switch(self, unit: Unit, here: bool) -> None:
        gathered = unit.sharded and self.events.gathering
        self._guards[unit].switch(Presence.UNLOADED if not here else Presence.GATHERED if gathered else Presence.LOADED)

    def _listen(self) -> list[Any]:
        handles = []
        for unit in self.units:
            handles += self.events.listen(unit)
            for flat in unit.flats:
                if flat.gradient is None:
                    continue
                for index, parameter in enumerate(flat.parameters):
                    hook = GradientArrival(self.events.backward.gradient_arrived, flat.gradient, index)
                    handles.append(parameter.register_post_accumulate_grad_hook(hook))
        return handles

    # The update.

    def take_changes(self) -> None:
        """Take what others wrote to the parameters since the last time; see ``Flat.take_changes``."""
        self._finish_fetches()  # what is on its way would land upon what was written
        for part in self.parts:
            part.take_changes()
        for flat in self.flats:
            for parameter, segment in zip(flat.parameters, flat.layout.segments, strict=True):
                if not flat.layout.trainable and parameter.requires_grad:
                    raise RuntimeError(
                        f"parameter {segment.name} was frozen when initialize was called, and is trainable now; set "
                        "requires_grad before initialize, or freeze later what shall not be trained yet"
                    )
        present = {id(parameter): parameter for _, parameter in stored(self.model)}
        gone = [name for index, name in self.names.items() if index not in present]
        new = {index for index, p in present.items() if index not in self.names and p.requires_grad}
        if gone:
            raise RuntimeError(
                f"parameter {gone[0]} is no longer in the model: something put another in its place, which would not "
                "be trained; change the model before initialize"
            )
        if new:
            name = next(name for name, parameter in stored(self.model) if id(parameter) in new)
            raise RuntimeError(
                f"parameter {name} came into the model after initialize, and would not be trained; change the model "
                "before initialize, or freeze the parameter"
            )

    def count(self, trained: bool = False) -> int:
        """Elements of all parameters, or of those that are trained, that all ranks together hold."""
        return self._counts[trained]

    def is_first(self, flat: Flat) -> bool:
        """Return whether this is the first rank along the pipeline that has these parameters."""
        return flat.is_first

    @property
    def is_split(self) -> bool:
        """True if ranks along the tensor or expert axis hold parts of some parameter."""
        return any(segment.held.split is not None for flat in self.flats for segment in flat.layout.segments)

    @property
    def updates_by_rules(self) -> bool:
        """True if the kernels' rules update some state: one off the device, or one in fewer bytes than its master."""
        narrow = bool(self.store.states.narrow)
        return any(flat.gradient and (narrow or flat.optimizer_tier is not Tier.DEVICE) for flat in self.flats)

    @property
    def pieces(self) -> dict[int, Piece | None]:
        """Return this rank's piece of each trainable parameter, by its ``id``; None if the rank holds nothing of it."""
        pieces: dict[int, Piece | None] = {}
        for flat in self.flats:
            if flat.layout.trainable:
                pieces |= {id(parameter): None for parameter in flat.parameters}
                pieces |= {id(flat.parameters[index]): piece for index, _, piece in flat.pieces}
        return pieces

    def complete(self, largest: Sequence[float], sums: Sequence[float]) -> Agreement:
        """Finish the reductions at the accumulation boundary, and reduce notes over all ranks. Collective.

        Args:
            largest: numbers of which the largest of any rank counts, none NaN.
            sums: numbers that are added up, those of as many neighbouring ranks as share a slot.
        """
        self.reducer.complete()
        world, stages = self.mesh.group("world"), self.mesh.group("pipeline")
        # One message carries the norm, the notes, and digests of all that ranks of a stage have to agree on: gradients
        # that arrived, also those that were late, buffers that changed, the order of use. Its length depends on the
        # number of stages, and not on that of parameters or ranks.
        while True:
            late = late_of(self.reducer)
            used, report = [gradient.used for gradient in self.reducer.sums], self._order.report()
            changed = self.buffers.changed()
            flags = b"".join(map(bytes, (late, *used, changed)))
            digests = _digest(flags), _digest(array("d", report).tobytes())
            maxima = [float(any(late)), *largest, *[-inf] * (4 * stages.size)]
            stage = slice(first := 1 + len(largest) + 4 * stages.rank, first + 4)
            maxima[stage] = [*digests, *(-digest for digest in digests)]
            slots = torch.zeros(world.slots, 1 + len(sums), dtype=torch.float64)
            slots[world.slot, 1:] = torch.tensor(sums, dtype=torch.float64)
            with span("norm"):
                slots[world.slot, :1] = squared_norm(self.reducer.sums, self.mesh)
            with span("agree"):
                reduced, totals = world.reduce(torch.tensor(maxima, dtype=torch.float64), slots.view(-1))
                maxima, slots = reduced.tolist(), totals.view_as(slots)
                differ = [high != -low for high, low in zip(maxima[stage][:2], maxima[stage][2:], strict=True)]
                if differ[0]:
                    flags = self._reduce_flags(flags)
                if differ[1]:
                    report = self.mesh.group("stage").reduce(torch.tensor(report, dtype=torch.float64))[0].tolist()
            if not maxima[0]:
                break
            self.reducer.add_late([bool(flag) for flag in flags[: len(late)]])
        if differ[0]:
            agreed = iter(flags[len(late) :])
            for gradient, flags_here in zip(self.reducer.sums, used, strict=True):
                gradient.mark_used([bool(next(agreed)) for _ in flags_here])
            changed = [bool(next(agreed)) for _ in changed]
        if any(changed):
            self.buffers.share(changed)
        self._order.agree(report)
        return Agreement(float(slots[:, :1].sum().sqrt()), maxima[1 : 1 + len(largest)], slots[:, 1:])

    def _reduce_flags(self, flags: bytes) -> bytes:
        """Return the flags that some rank of this stage has set. Collective."""
        if not flags:
            return flags
        tensor = torch.frombuffer(bytearray(flags), dtype=torch.uint8)
        return bytes(self.mesh.group("stage").reduce(tensor)[0].tolist())

    def first_not_finite(self) -> str:
        """Name a parameter with a gradient that is not finite on this rank, as the end of a sentence; may be empty."""
        name = next(filter(None, (gradient.not_finite() for gradient in self.reducer.sums)), None)
        return "" if name is None else f"; the first parameter concerned on rank {self.mesh.rank} is {name}"

    def set_gradients(self, factor: float, later: HostSteps | None, flats: Sequence[Flat]) -> None:
        """Multiply gradients by ``factor`` and hand them to the pieces; None where no rank had one."""
        for flat in flats:
            gradient = flat.gradient
            if gradient is None or gradient.shard is None:
                continue
            # These are updated from their shards on the host, in `updated`: the optimizer itself is to skip them.
            late = {index for index, *_ in pieces_on_host(flat, later)}
            if len(late) == len(flat.pieces):
                continue
            shard = gradient.shard.to(flat.master.dtype)  # first: 16 bits are too few for what a loss scale leaves
            if factor != 1.0:
                shard = shard.mul(factor) if late else shard.mul_(factor)
            for index, local, piece in flat.pieces:
                here = gradient.used[index] and index not in late
                piece.set_gradient(shard[local].view_as(piece.parameter) if here else None)

    def updated(self, steps: HostSteps | None = None) -> None:
        """After an update: update the rest from the shards of gradients, publish the masters, forget the gradients."""
        try:
            counted = self.early.counted(steps)
            if steps is None:
                self.publish()
            else:
                self.publish(partial(self.host_updates.update, steps), counted, partial(self.early.adopt, steps))
        finally:
            self.forget_gradients()

    def publish(
        self,
        update: Callable[[Flat, Iterator[StateWindow]], None] | None = None,
        counted: Collection[Flat] = (),
        adopt: Callable[[Flat], None] | None = None,
    ) -> None:
        """Write the masters, which have changed, to the shards, and send the new parameters, in the order of use."""
        # Slots hold parameters from before the update, and would be sent from, or land in, memory that changes.
        self.rest()
        for unit in self.units:
            unit.count_update()
        units = [self.units[index] for index in (self.root.index, *self._order.canonical)]
        # What rests on the disk, and has no gradient, is not brought from there.
        idle = {
            flat
            for flat in self.flats
            if update is not None and flat.keeps_states and not (flat.gradient and any(flat.gradient.used))
        }
        flats = [flat for unit in units for flat in unit.flats if flat not in idle and flat not in counted]
        with closing(self.store.stream(flats if update else [])) as windows:
            for unit in units:
                for flat in unit.flats:
                    if flat in counted:
                        assert adopt is not None
                        adopt(flat)
                    elif update is None:
                        flat.write_shard()
                    elif flat not in idle:
                        update(flat, windows)
                # At once, in the order of use, while the next unit is updated; each forward waits for its own. Posting
                # in the forward would overlap no better, and a weight that one rank reads between steps would hang.
                if not self.sharded and any(flat.gathers for flat in unit.flats):
                    unit.expire()
                    self._switch(unit, False)
                    unit.begin_fetch(self.mesh, None)
            next(windows, None)
        # One message now, so that no fetch of the next forward has to wait for one.
        narrow = [flat for flat in self.flats if flat.narrow is not None]
        for axis in sorted({flat.layout.axis for flat in narrow}):
            share_scales(
                [(f.narrow, f.shard) for f in narrow if f.narrow and f.layout.axis == axis], self.mesh.shards_of(axis)
            )
        if self.stored is not None:
            self.stored.read_ahead(units)  # the next forward begins with these
        self._settle()  # the next forward waits for the last copies, the host does not

    def rest(self) -> None:
        """Evict every unit: what rests there is about to change."""
        self._finish_fetches()
        if self.sharded:
            self.residency.evict_all()

    def forget_gradients(self) -> None:
        """Drop the gradients of the micro-batches so far, as ``zero_grad``."""
        self.early.begin()
        self.reducer.reset()
        for flat in self.flats:
            flat.unset_gradients()

    # Whole tensors, for those who look at or change single parameters.

    def assemble(self, flat: Flat, index: int, pick: Pick) -> torch.Tensor | None:
        """A whole tensor of parameter ``index``'s shape from what ``pick`` gives of each rank's piece; collective."""
        flat.load_states()
        segment = flat.layout.segments[index]
        with torch._C.DisableTorchFunctionSubclass():  # of the optimizer's tensors, which are only read here
            picked = [(piece, pick(flat, local, piece)) for position, local, piece in flat.pieces if position == index]
            mine = [(piece, None if value is None else value.flatten()) for piece, value in picked]
        # A rank may hold no piece, or none with a state yet: all of them together say whether there is anything.
        present = torch.tensor([float(any(value is not None for _, value in mine))], dtype=torch.float64)
        if not bool(self.mesh.group("stage" if segment.held.axis == "expert" else "shard").exchange(present).any()):
            return None
        full = torch.zeros(segment.shape.numel(), dtype=flat.master.dtype, device=self.mesh.device)
        for piece, value in mine:
            if value is not None:
                full[piece.start : piece.stop] = value
        if flat.own.stop - flat.own.start < flat.layout.size:
            flat.group.all_reduce(full, flat.tag + 3)
        return join(segment.held, full.view(segment.shape), self.mesh)

    @property
    def parts(self) -> list[Unit | Table]:
        """Everything that has parameters: the units, then the tables."""
        return [*self.units, *self.tables]

    @contextmanager
    def gathered(self, parts: Sequence[Unit | Table]) -> Iterator[None]:
        """Gather the parameters of units and tables on every rank in this context. All ranks enter it in one order."""
        units = [part for part in parts if isinstance(part, Unit)]
        tables = [part for part in parts if isinstance(part, Table)]
        with self.tables.gathered(tables, self._whole), self.events.gathered(units):
            split = [
                (flat, index, segment)
                for unit in units
                for flat in unit.flats
                for index, segment in enumerate(flat.layout.segments)
                if segment.held.split is not None and index not in flat.unbound
            ]
            try:
                # Whoever gathers a parameter expects all of it, and not a tensor rank's part.
                for flat, index, segment in split:
                    flat.unbind(index, join(segment.held, flat.views[index], self.mesh))
                yield
            finally:
                for flat, index, _ in split:
                    flat.rebind(index)

    def _whole(self, flat: Flat) -> torch.Tensor:
        tensor = self.assemble(flat, 0, lambda _, __, piece: piece.parameter.detach())
        assert tensor is not None
        return tensor.to(flat.layout.dtype)

    def take_value(self, flat: Flat, index: int, rank: int) -> None:
        """Give every rank, and the masters, the value that rank ``rank`` has of a gathered parameter."""
        if flat not in self.tables.flats:
            flat.take_changes()
        with torch.no_grad():
            value, segment = flat.parameters[index].data, flat.layout.segments[index]
            self.mesh.group("stage").broadcast(value, rank)
            part = segment.held.cut(value)
            if part is not value:  # of a split parameter
                flat.views[index].copy_(part)
            flat.put(segment, part.reshape(-1))

    def close(self) -> None:
        """Drain what is under way and take the hooks off."""
        self.early.spoil()
        self.reducer.finish()
        self._finish_fetches()
        self.link.synchronize()
        for handle in self._handles:
            handle.remove()
        self.grads.remove()
        self.store.close()
        self.tables.close()

    def _finish_fetches(self) -> None:
        """Nothing is to be sent from, or to land in, memory that changes."""
        self.residency.plan([])
        for unit in self.units:
            if unit.state is State.FETCHING:
                self.residency.need(unit)
        self._settle()

    def _settle(self) -> None:
        """Wait for all copies to and from the shards of parameters."""
        for flat in self.flats:
            flat.settle()


def _digest(content: bytes) -> float:
    """Return a whole number of 48 bits, which float64 holds exactly; ranks with the same content have the same."""
    return float(int.from_bytes(blake2b(content, digest_size=6).digest(), "big"))


def _count_elements(layouts: Sequence[Layout], mesh: Mesh) -> list[int]:
    """Return the elements of all parameters, and of those that are trained, over all pipeline stages."""
    sizes = [(prod(segment.held.whole), layout.trainable) for layout in layouts for segment in layout.segments]
    counts = torch.tensor([sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)])
    totals: list[int] = mesh.group("pipeline").exchange(counts).sum(0).tolist()
    return totals
