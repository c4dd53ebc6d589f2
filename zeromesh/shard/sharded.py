"""A model whose states are placed by a row of the placement table: what the engine drives."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeromesh.comm.mesh import Mesh
from zeromesh.kernels.update import Given
from zeromesh.model.piece import Piece
from zeromesh.model.placement import Placement, PlacementRow, Tier
from zeromesh.model.precision import Precision
from zeromesh.model.split import Held
from zeromesh.observe.spans import span
from zeromesh.shard.accumulation import Accumulation
from zeromesh.shard.budget import MemoryBudget, Prepare
from zeromesh.shard.buffers import ModelBuffers
from zeromesh.shard.early import EarlyUpdates, HostUpdate, can_begin_early
from zeromesh.shard.events import Events
from zeromesh.shard.exchange import join
from zeromesh.shard.flat import Flat, Materialise
from zeromesh.shard.gradient import GradientPolicy
from zeromesh.shard.grads import GradientArrival, Grads
from zeromesh.shard.guard import Guard, Presence, gathered_class, unloaded_class
from zeromesh.shard.hooks import listen
from zeromesh.shard.norm import squared_norm
from zeromesh.shard.order import Order
from zeromesh.shard.place import lay_out, make_units, place_units
from zeromesh.shard.reducer import Reducer
from zeromesh.shard.residency import Residency
from zeromesh.shard.slots import Pool, largest
from zeromesh.shard.store import Tiers
from zeromesh.shard.unit import State, Unit
from zeromesh.tiers.link import Link
from zeromesh.tiers.memory import Staging
from zeromesh.tiers.traffic import DiskTraffic

Pick = Callable[[Flat, slice, Piece], torch.Tensor | None]
"""Function of a flat buffer, a range of this rank's part and the piece there; returns a tensor of the piece's size."""


@dataclass(frozen=True)
class Slots:
    """Number of units whose full parameters and full gradients exist at once; None: the row's default."""

    parameter: int | None = None
    gradient: int | None = None


@dataclass(frozen=True)
class Agreement:
    """Knowledge that all ranks share after an accumulation boundary.

    Attributes:
        norm: global norm of the gradients, as summed (before any division).
        notes: one row per rank, as given to ``complete``; float64.
    """

    norm: float
    notes: torch.Tensor


class ShardedModel:
    """Places a model's states over the mesh and moves them as the model computes.

    Args:
        model: changed in place: its parameters become views of flat buffers; the modules stay as they are.
        mesh: the ranks.
        row: placements of parameters, gradients and optimizer state.
        precision: dtypes.
        slots: budgets.
        targets: what becomes a unit, see ``find_units``.
        accumulation: of the micro-batches of an update; one by default.
        predivide: gradients are divided by it before they are summed over the ranks; see ``GradientPolicy``.
        materialise: called with each parameter's name and the parameter, before its value is used.
        split: by name, what this rank holds of parameters that are split, or used in different ways, along the tensor
            axis; all others are whole on each of its ranks.
        tied: by name, the places along the pipeline that have a parameter, where several have it.
        idle: names of buffers that are here, and that another stage computes with.
        prepare: see ``Prepare``; None where nothing rests on NVMe.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, row: PlacementRow, precision: Precision | None = None,
        slots: Slots | None = None, targets: Sequence[str] = (), accumulation: Accumulation | None = None,
        predivide: float | None = None, materialise: Materialise | None = None,
        split: Mapping[str, Held] | None = None, tied: Mapping[str, Sequence[int]] | None = None,
        idle: Collection[str] = (), prepare: Prepare | None = None,
    ) -> None:  # fmt: skip
        precision, slots = precision or Precision(), slots or Slots()
        self.model = model
        self.mesh = mesh
        self.row = row
        self.idle = idle
        self.sharded = row.parameter is Placement.SHARDED
        self.units = make_units(model, targets)
        laid_out, mixed = lay_out(self.units, mesh, row, precision, split, tied), precision.compute is not None
        self.root, rest = self.units[0], self.units[1:]
        self.flats = [flat for _, flats, _ in laid_out for flat in flats]
        self.names = {id(p): s.name for f in self.flats for p, s in zip(f.parameters, f.layout.segments, strict=True)}
        policy = GradientPolicy.of(
            row, wire=precision.communicate, accumulate=precision.accumulate, slots=slots.gradient, predivide=predivide
        )
        self.link = Link(mesh.device)
        gradients = [flat.gradient for flat in self.flats if flat.gradient]
        self.accumulation = accumulation or Accumulation(1)
        self.reducer = Reducer(gradients, policy, mesh, self.accumulation.steps > 1, self.link)
        early_flats = [flat for flat in self.flats if can_begin_early(flat, mesh)]
        budget = MemoryBudget.of(self.flats, row, mixed, self.reducer.shard_bytes[Tier.HOST], early_flats)
        self.store = Tiers() if prepare is None else prepare(budget)
        self.swap, self.stored = self.store.swap, self.store.stored
        self.updated_bytes, self.updated_seconds = 0, 0.0
        assert self.swap is not None or not (budget.files or budget.packed), "states without a place for them"
        assert self.stored is not None or not budget.stored, "a tier of files without a place for them"
        place_units(laid_out, mesh, mixed, materialise, self.link, self.store)
        self.early = EarlyUpdates(self.store, mesh, self.link, row.pinned)
        self.reducer.on_shard = self.early.is_whole if self.store.early else None
        sizes = [unit.nbytes for unit in rest] if self.sharded else []
        self.pool = Pool(largest(sizes, slots.parameter or 2), mesh.device, lent=True)
        self.root_pool = Pool([self.root.nbytes] if self.sharded else [], mesh.device, lent=True)
        self._order = Order([unit for unit in rest if unit.flats])
        self._guards: dict[Unit, Guard] = {}
        read_ahead = None if self.stored is None else self.stored.read_ahead
        self.residency = Residency(self.root, rest, self.pool, self.root_pool, mesh, self._switch, read_ahead)
        self.events = Events(self.units, self._order, self.residency, self.reducer, mesh, self.accumulation)
        settle = self.events.give_up_other
        self.grads = Grads(self.flats, self.names, self.reducer, self.accumulation, mesh, settle, self.early)
        self.grads.install()
        base = self.grads.class_of(nn.Parameter)
        gathered = gathered_class(base, self.events.saved.saving)
        unloaded = {unit: unloaded_class(base, unit, self.names, self.events.touch) for unit in self.units}
        self._guards = {unit: Guard(unit, unloaded[unit], gathered) for unit in self.units}
        self._name_tags()
        self._handles = self._listen()
        self.buffers = ModelBuffers(model, mesh)
        self._staging = Staging(self.link, row.pinned)
        self._most_flags = len(self._flags())
        if mesh.sizes["pipeline"] > 1:  # stages have parts of the model of different sizes
            lengths = mesh.group("world").exchange(torch.tensor([self._most_flags]))
            self._most_flags = int(lengths.max())
        self._counts = self._count()
        if self.sharded:
            for unit in self.units:
                self._switch(unit, False)

    def _name_tags(self) -> None:
        """Let messages about collectives say what they carry."""
        for unit in self.units:
            for flat in unit.flats:
                for offset, purpose in enumerate(("parameters", "gradients", "summed gradients", "a whole tensor")):
                    self.mesh.shard.purposes[flat.tag + offset] = f"{purpose} of {unit}"

    def _switch(self, unit: Unit, here: bool) -> None:
        gathered = unit.sharded and self.events.gathering
        self._guards[unit].switch(Presence.UNLOADED if not here else Presence.GATHERED if gathered else Presence.LOADED)

    def _listen(self) -> list[Any]:
        handles = []
        for unit in self.units:
            handles += listen(unit, self.events, self.events.calls[unit])
            for flat in unit.flats:
                if flat.gradient is None:
                    continue
                for index, parameter in enumerate(flat.parameters):
                    hook = GradientArrival(self.events.gradient_arrived, flat.gradient, index)
                    handles.append(parameter.register_post_accumulate_grad_hook(hook))
        return handles

    # The update.

    def take_changes(self) -> None:
        """Take what others wrote to the parameters since the last time; see ``Flat.take_changes``.

        Raises:
            RuntimeError: a parameter was replaced or added, or became something that it was not placed as.
        """
        self._finish_fetches()  # what is on its way would land upon what was written
        for unit in self.units:
            unit.take_changes()
        present = {id(parameter): parameter for parameter in self.model.parameters()}
        gone = [name for index, name in self.names.items() if index not in present]
        new = {index for index, p in present.items() if index not in self.names and p.requires_grad}
        if gone:
            raise RuntimeError(
                f"parameter {gone[0]} is no longer in the model: something put another in its place, which would not "
                "be trained; change the model before initialize"
            )
        if new:
            name = next(name for name, parameter in self.model.named_parameters() if id(parameter) in new)
            raise RuntimeError(
                f"parameter {name} came into the model after initialize, and would not be trained; change the model "
                "before initialize, or freeze the parameter"
            )

    def count(self, trained: bool = False) -> int:
        """Elements of all parameters, or of those that are trained, that all ranks together hold."""
        return self._counts[trained]

    def _count(self) -> list[int]:
        layouts = [flat.layout for flat in self.flats if self.is_first(flat)]
        sizes = [(prod(segment.held.whole), layout.trainable) for layout in layouts for segment in layout.segments]
        own = torch.tensor([sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)])
        found: list[int] = self.mesh.group("pipeline").exchange(own).sum(0).tolist()
        return found

    def is_first(self, flat: Flat) -> bool:
        """Return whether it is the first rank along the pipeline that has these; of tied ones, there are several."""
        return not flat.tied_stages or flat.tied_stages[0] == self.mesh.group("pipeline").rank

    @property
    def is_split(self) -> bool:
        """True if ranks along the tensor axis hold parts of some parameter."""
        return any(segment.held.split is not None for flat in self.flats for segment in flat.layout.segments)

    @property
    def updates_on_host(self) -> bool:
        """True if some optimizer state rests off the device."""
        return any(flat.gradient and flat.optimizer_tier is not Tier.DEVICE for flat in self.flats)

    @property
    def pieces(self) -> dict[int, Piece | None]:
        """Return this rank's piece of each trainable parameter, by its ``id``; None if the rank holds nothing of it."""
        found: dict[int, Piece | None] = {}
        for flat in self.flats:
            if flat.gradient is not None:
                found |= {id(parameter): None for parameter in flat.parameters}
                found |= {id(flat.parameters[index]): piece for index, _, piece in flat.pieces}
        return found

    def complete(self, notes: Sequence[float]) -> Agreement:
        """At the accumulation boundary: finish the reductions and let all ranks know what each has to say.

        Args:
            notes: this rank's, the same number on every rank.
        """
        self.reducer.complete()
        flags = self._flags()
        vector = torch.tensor([*notes, *flags, *[0.0] * (self._most_flags - len(flags))], dtype=torch.float64)
        with span("norm"):
            squared = squared_norm(self.reducer.gradients, self.mesh).cpu()
        with span("agree"):
            rows = self.mesh.group("world").exchange(torch.cat([squared, vector]))
        squares, all_notes, all_flags = rows.split([1, len(notes), self._most_flags], dim=1)
        agreed = iter(all_flags[self.mesh.stage_ranks].amax(0).tolist())
        for gradient in self.reducer.gradients:
            gradient.used = [bool(next(agreed)) for _ in gradient.used]
        self.buffers.share([bool(next(agreed)) for _ in self.buffers.changed()])
        self._order.agree([next(agreed) for _ in self._order.report()])
        return Agreement(float(squares.sum().sqrt()), all_notes)

    def _flags(self) -> list[float]:
        """Exchange notes between ranks that hold the same part of the model; the largest value counts."""
        used = [float(flag) for gradient in self.reducer.gradients for flag in gradient.used]
        changed = [float(flag) for flag in self.buffers.changed()]
        return [*used, *changed, *self._order.report()]

    def first_not_finite(self) -> str:
        """Name a parameter with a gradient that is not finite on this rank, as the end of a sentence; may be empty."""
        for flat in self.flats:
            gradient = flat.gradient
            if gradient is None or gradient.shard is None or bool(gradient.shard.isfinite().all()):
                continue
            for _, local, piece in flat.pieces:
                if not bool(gradient.shard[local].isfinite().all()):
                    return f"; the first parameter concerned on rank {self.mesh.rank} is {piece.name}"
        return ""

    def set_gradients(self, factor: float, later: HostUpdate | None = None) -> None:
        """Multiply the gradients by ``factor`` and hand them to the pieces; None where no rank had one.

        But for those on the host that are ``later`` updated from their shards: they have none here.
        """
        for flat in self.flats:
            gradient = flat.gradient
            if gradient is None or gradient.shard is None:
                continue
            late = {index for index, *_ in self._late(flat, later)}
            if len(late) == len(flat.pieces):
                continue
            shard = gradient.shard.to(flat.master.dtype)  # first: 16 bits are too few for what a loss scale leaves
            if factor != 1.0:
                shard = shard.mul(factor) if late else shard.mul_(factor)
            for index, local, piece in flat.pieces:
                here = gradient.used[index] and index not in late
                piece.parameter.grad = shard[local].view_as(piece.parameter) if here else None

    def _late(self, flat: Flat, steps: HostUpdate | None) -> Iterator[tuple[int, slice, Piece]]:
        """Yield the pieces on the host that are updated from the shard of their gradient."""
        shard = None if flat.gradient is None else flat.gradient.shard
        if steps is not None and shard is not None and flat.optimizer_tier is not Tier.DEVICE:
            yield from (entry for entry in flat.pieces if steps.takes(entry[2].parameter, shard))

    def updated(self, steps: HostUpdate | None = None) -> None:
        """After an update: update the rest from the shards of gradients, publish the masters, forget the gradients.

        Args:
            steps: updates what ``set_gradients`` left for later.
        """
        try:
            counted = self.early.counted(steps)
            if steps is None:
                self.publish()
            else:
                self.publish(partial(self._step, steps), counted, partial(self.early.adopt, steps))
        finally:
            self.forget_gradients()

    def _step(self, steps: HostUpdate, flat: Flat) -> None:
        """Update what rests on the host, and write the parameters in the same pass."""
        late, gradient = list(self._late(flat, steps)), flat.gradient
        if not late:
            self._write_shard(flat)
            return
        assert gradient is not None
        assert gradient.shard is not None
        apart = flat.master is not flat.shard and not flat.splits
        if apart or flat.splits:
            flat.load_shard(write=flat.splits, read=flat.splits)
        out = self._staging.take(flat.shard, flat.parameter_tier) if apart else None
        self._change(steps, flat, gradient.shard, gradient.used, out)
        if out is not None:
            flat.load_shard(write=True, read=False)  # not before: an update that fails leaves what there was
            flat.expect(self._staging.send(out, flat.shard))

    def _change(
        self, steps: HostUpdate, flat: Flat, shard: torch.Tensor, used: Sequence[bool], out: torch.Tensor | None
    ) -> None:  # fmt: skip
        """Update what rests on the host, whose gradient is in ``shard``; the new parameters go to ``out``, too."""
        outs = {index: None if out is None else out[local] for index, local, _ in flat.pieces}
        given = {
            index: Given(piece.parameter, shard[local], outs[index], self.store.halves(flat, index))
            for index, local, piece in flat.pieces
            if used[index] and steps.takes(piece.parameter, shard)
        }
        began = time.perf_counter()
        with span("update_on_host", flat.gradient.unit if flat.gradient else ""):
            steps.step(list(given.values()))
        self.updated_seconds += time.perf_counter() - began
        self.updated_bytes += sum(map(self._moved, given.values()))
        if out is None:
            return
        for index, local, piece in flat.pieces:
            if index not in given:
                out[local].copy_(piece.parameter.detach().view(-1))

    def _moved(self, given: Given) -> int:
        """Bytes that an update reads and writes: gradient, master and states twice, and the new parameter."""
        parameter, gradient, out, _ = given  # both halves of a master are as large as the whole
        rest = (1 + self.store.states) * parameter.nbytes
        return gradient.nbytes + 2 * rest + (0 if out is None else out.nbytes)

    def _write_shard(self, flat: Flat) -> None:
        if flat.master is not flat.shard and not flat.splits:
            flat.load_shard(write=True, read=False)
            flat.shard.copy_(flat.master)

    def publish(
        self, update: Callable[[Flat], None] | None = None, counted: Collection[Flat] = (),
        adopt: Callable[[Flat], None] | None = None,
    ) -> None:  # fmt: skip
        """The masters have changed: write them to the shards and send the new parameters on their way, in the order of use.

        Args:
            update: changes the masters of a flat buffer and writes its shard.
            counted: those that were updated during the backward.
            adopt: writes their shards.
        """
        self.rest()
        for unit in self.units:
            unit.version += 1
        units = self._in_order
        idle = {flat for flat in self.flats if update is not None and self._rests_unchanged(flat)}
        flats = [flat for unit in units for flat in unit.flats if flat not in idle and flat not in counted]
        with closing(self.store.stream(flats, write=update is not None)) as present:
            for unit in units:
                for flat in unit.flats:
                    if flat in counted:
                        assert adopt is not None
                        adopt(flat)
                    elif flat not in idle:
                        (update or self._write_shard)(next(present))
                if not self.sharded and any(flat.gathers for flat in unit.flats):
                    self._renew(unit)
            next(present, None)
        if self.stored is not None:
            self.stored.read_ahead(units)  # the next forward begins with these
        self._settle()  # the next forward waits for the last copies, the host does not

    @property
    def _in_order(self) -> list[Unit]:
        """The units in the order of use."""
        return [self.units[index] for index in (self.root.index, *self._order.canonical)]

    def _rests_unchanged(self, flat: Flat) -> bool:
        """Return whether it is on the disk, and no gradient says that it should be brought from there."""
        return self.swap is not None and flat in self.swap and not (flat.gradient and any(flat.gradient.used))

    def rest(self) -> None:
        """Evict every unit: what rests there is about to change."""
        self._finish_fetches()
        if self.sharded:
            self.residency.evict_all()

    def _renew(self, unit: Unit) -> None:
        """Start to gather what changed; the unit's forward waits for it."""
        assert unit.state is State.FETCHED, (unit, unit.state)
        unit.state = State.AT_REST
        self._switch(unit, False)
        unit.begin_fetch(self.mesh, None)

    def forget_gradients(self) -> None:
        """Drop the gradients of the micro-batches so far, as ``zero_grad``."""
        self.early.begin()
        self.reducer.reset()
        for flat in self.flats:
            for _, _, piece in flat.pieces:
                piece.parameter.grad = None

    # Whole tensors, for those who look at or change single parameters.

    def assemble(self, flat: Flat, index: int, pick: Pick) -> torch.Tensor | None:
        """A whole tensor of parameter ``index``'s shape from what ``pick`` gives of each rank's piece.

        None if ``pick`` gives None for every piece. All ranks call this.
        """
        flat.load_states()
        segment = flat.layout.segments[index]
        mine = [(piece, pick(flat, local, piece)) for position, local, piece in flat.pieces if position == index]
        known = torch.tensor([float(any(value is not None for _, value in mine))], dtype=torch.float64)
        if not bool(self.mesh.shard.exchange(known).any()):
            return None
        whole = torch.zeros(segment.shape.numel(), dtype=flat.master.dtype, device=self.mesh.device)
        for piece, value in mine:
            if value is not None:
                whole[piece.start : piece.stop] = value.flatten()
        if flat.own.stop - flat.own.start < flat.layout.size:
            self.mesh.shard.all_reduce(whole, flat.tag + 3)
        return join(segment.held, whole.view(segment.shape), self.mesh)

    @contextmanager
    def gathered(self, units: Sequence[Unit]) -> Iterator[None]:
        """In this context the units' parameters are whole on every rank. All ranks enter it in the same order."""
        with self.events.gathered(units):
            joined = [
                (flat, index, segment)
                for unit in units
                for flat in unit.flats
                for index, segment in enumerate(flat.layout.segments)
                if segment.held.split is not None and index not in flat.unbound
            ]
            try:
                for flat, index, segment in joined:
                    flat.parameters[index].data = join(segment.held, flat.views[index], self.mesh)
                    flat.unbound.add(index)
                yield
            finally:
                for flat, index, _ in joined:
                    flat.parameters[index].data = flat.views[index]
                    flat.unbound.discard(index)

    def take_value(self, flat: Flat, index: int, rank: int) -> None:
        """Give every rank, and the masters, the value that rank ``rank`` has of a gathered parameter."""
        flat.take_changes()
        with torch.no_grad():
            value, segment = flat.parameters[index].data, flat.layout.segments[index]
            self.mesh.group("stage").broadcast(value, rank)
            part = segment.held.cut(value)
            if part is not value:
                flat.views[index].copy_(part)
            flat.put(segment, part.reshape(-1))

    # Accounting.

    def memory(self) -> Iterator[tuple[str, str, int]]:
        """Yield the largest allocations of this rank: (state, tier, bytes)."""
        for flat in self.flats:
            rest, tier = (flat.shard, flat.parameter_tier) if self.sharded else (flat.full, Tier.DEVICE)
            if tier is not Tier.NVME:
                yield "optimizer" if rest.dtype != flat.layout.dtype else "parameter", tier.value, rest.nbytes
            if flat.master is not flat.shard and not flat.keeps_states:
                yield "optimizer", flat.optimizer_tier.value, flat.master.nbytes
        if self.swap is not None:
            yield "optimizer", self.swap.tier.value, self.swap.nbytes
            yield "slot", "host", self.swap.host_bytes
        yield "slot", "host", self.early.nbytes
        if self.stored is not None:
            yield "parameter", "nvme", self.stored.nbytes
            yield "slot", "host", self.stored.host_bytes
        for tier, size in self.reducer.shard_bytes.items():
            yield "gradient", tier.value, size
        yield "slot" if self.reducer.policy.sharded else "gradient", "device", self.reducer.full_bytes
        reducer = self.reducer
        if reducer.arrival_bytes:
            yield "slot", "host", reducer.arrival_bytes
        for pool in (reducer.wires, reducer.receives, reducer.landings, self.pool, self.root_pool):
            yield "slot", "device", pool.nbytes
        for buffer in self.model.buffers():
            yield "buffer", "device", buffer.nbytes

    @property
    def folder(self) -> Path | None:
        """Folder of the files; None where there are none."""
        found = (files.folder for files in (self.swap, self.stored) if files is not None)
        return next((folder for folder in found if folder is not None), None)

    def disk_traffic(self) -> DiskTraffic | None:
        """Return the traffic of files so far; None where there are none."""
        all_traffic = (files.traffic() for files in (self.swap, self.stored) if files is not None)
        found = [traffic for traffic in all_traffic if traffic is not None]
        return None if not found else DiskTraffic(*map(sum, zip(*map(astuple, found), strict=True)))

    def close(self) -> None:
        """Drain what is under way and take the hooks off."""
        self.early.drop()
        self.reducer.finish()
        self._finish_fetches()
        self.link.synchronize()
        for handle in self._handles:
            handle.remove()
        self.grads.remove()
        self.store.close()

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
