"""A model whose states are placed by a row of the placement table: what the engine drives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from zeromesh.dist.mesh import Mesh
from zeromesh.model.piece import Piece
from zeromesh.model.placement import Placement, Row
from zeromesh.model.precision import Precision
from zeromesh.shard.find import assign, find_units
from zeromesh.shard.gradient import Gradient, GradientPolicy, Reducer
from zeromesh.shard.guard import Guard
from zeromesh.shard.hooks import Call, SavedTensors, check_version, listen
from zeromesh.shard.layout import Layout
from zeromesh.shard.residency import Order, Residency
from zeromesh.shard.slots import Pool, largest
from zeromesh.shard.unit import Flat, State, Unit

Pick = Callable[[Flat, slice, Piece], torch.Tensor | None]
"""Of a flat buffer, where in this rank's part of it a piece lies, and the piece: a tensor of the piece's size."""


NORM_ROW = 1024
"""Elements whose squares are summed in the gradient's own precision; their sums are added up in float64."""


@dataclass(frozen=True)
class Slots:
    """How many units' full parameters and full gradients exist at once; None is what the row implies."""

    parameter: int | None = None
    gradient: int | None = None


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after a boundary.

    Attributes:
        norm: global norm of the gradients, as summed (before any division).
        notes: one row per rank, as given to ``complete``; float64.
    """

    norm: float
    notes: torch.Tensor


class Sharded:
    """Places a model's states over the mesh and moves them as the model computes.

    Args:
        model: changed in place: its parameters become views of flat buffers; the modules stay as they are.
        mesh: the ranks.
        row: placements of parameters, gradients and optimizer state.
        precision: dtypes.
        slots: budgets.
        targets: what becomes a unit, see ``find_units``.
        accumulates: whether several micro-batches will be summed before an update.
        predivide: gradients are divided by it before they are summed over the ranks.
        materialise: called with each unit's module before its parameters are used, when they are on the meta device.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, row: Row, precision: Precision | None = None, slots: Slots | None = None,
        targets: Sequence[str] = (), accumulates: bool = False, predivide: float = 1.0,
        materialise: Callable[[Sequence[tuple[str, nn.Parameter]]], None] | None = None,
    ) -> None:  # fmt: skip
        precision, slots = precision or Precision(), slots or Slots()
        self.model = model
        self.mesh = mesh
        self.row = row
        self.sharded = row.parameter is Placement.SHARDED
        self.units = self._make_units(find_units(model, targets))
        self.root = self.units[0]
        self._parameters = assign(model, [unit.name for unit in self.units[1:]])
        self.names = {id(p): name for owned in self._parameters.values() for name, p in owned}
        self._place(precision, materialise)
        policy = GradientPolicy.of(
            row, wire=precision.communicate, accumulate=precision.accumulate, slots=slots.gradient, predivide=predivide
        )
        self.reducer = Reducer([f.gradient for f in self.flats if f.gradient], policy, mesh, accumulates)
        self.predivide = predivide
        rest = [unit.nbytes for unit in self.units[1:]] if self.sharded else []
        self.pool = Pool(largest(rest, slots.parameter or 2), mesh.device, lent=True)
        self.root_pool = Pool([self.root.nbytes] if self.sharded else [], mesh.device, lent=True)
        self._order = Order([unit for unit in self.units[1:] if unit.flats])
        self.residency = Residency(self.root, self.units[1:], self.pool, self.root_pool, mesh)
        self._guards = {unit: Guard(unit, self.names, self._touch) for unit in self.units}
        self.residency.on_change = lambda unit, here: self._guards[unit].switch(here)
        self._saved = SavedTensors({unit.storage._cdata: unit for unit in self.units}, self._unpack)
        self._calls: dict[Unit, WeakSet[Call]] = {unit: WeakSet() for unit in self.units}
        self._depth = 0
        self._backward_order: list[int] | None = None
        self._begun: list[Unit] = []
        self._reduced: set[Unit] = set()
        self._in_backward = False
        self._raw_task = -1
        self._expects = {unit.index: True for unit in self.units}
        self._handles = self._listen()
        self._share_buffers([True] * len(self.state_buffers()))
        if self.sharded:
            for guard in self._guards.values():
                guard.switch(False)

    # Construction.

    def _make_units(self, found: Sequence[tuple[str, nn.Module]]) -> list[Unit]:
        units = [Unit(0, "", self.model, None)]
        for index, (name, module) in enumerate(found, start=1):
            enclosing = [u for u in units if u.name == "" or name.startswith(u.name + ".")]
            units.append(Unit(index, name, module, max(enclosing, key=lambda u: len(u.name))))
        return units

    def _place(self, precision: Precision, materialise: Callable[..., None] | None) -> None:
        self.flats: list[Flat] = []
        for unit in self.units:
            named = self._parameters[unit.name]
            if materialise is not None:
                materialise(named)
            keeps = _full_precision_parameters(unit.module)
            kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
            for name, parameter in named:
                dtype = parameter.dtype
                if precision.compute is not None and dtype.is_floating_point and id(parameter) not in keeps:
                    dtype = precision.compute
                kinds.setdefault((dtype, parameter.requires_grad), []).append((name, parameter))
            flats = []
            for (dtype, trainable), members in kinds.items():
                shapes = [(name, parameter.shape) for name, parameter in members]
                layout = Layout.build(shapes, dtype, trainable, self.mesh.shard.size)
                flat = Flat(layout, [p for _, p in members], len(self.flats), self.row, self.mesh)
                if trainable:
                    flat.gradient = Gradient(layout, flat.own, flat.shard, flat.tag)
                flats.append(flat)
                self.flats.append(flat)
            unit.place(flats, self.row, self.mesh, precision.compute is not None)
            if self.sharded:
                unit.go_home()

    def _listen(self) -> list[Any]:
        handles = []
        for unit in self.units:
            handles += listen(unit, self, self._calls[unit])
            for flat in unit.flats:
                if flat.gradient is None:
                    continue
                for index, parameter in enumerate(flat.parameters):
                    hook = partial(self._gradient_arrived, flat.gradient, index)
                    handles.append(parameter.register_post_accumulate_grad_hook(hook))
        return handles

    # Forward.

    def forward_begins(self, unit: Unit) -> None:
        """Hook: have the unit's parameters in memory, and take part in the fetches of units that were skipped."""
        if unit is self.root:
            self.begin()
        elif self._recording() and unit.flats:
            self._join(self._order.use(unit.index))
        self.residency.enter(unit)

    def forward_ends(self, unit: Unit, call: Call | None) -> None:
        """Hook: the unit's parameters may go."""
        if unit is self.root:
            self.end()
        elif self._recording() and unit.flats:
            self._expects[unit.index] = call is not None
            self._order.done(unit.index)
        self.residency.leave(unit)

    def begin(self) -> None:
        """The model begins to compute, through its forward or any other method."""
        self._depth += 1
        if self._depth > 1:
            return
        if self._recording():
            if not self._order.forward:
                before = self._order.last_forward or self._order.canonical
                self.residency.plan([*before, *reversed(before)])
            self._order.begin_pass()
        elif not self._computing_backward():
            self.residency.plan(self._order.last_forward or self._order.canonical)
        if self.sharded and self._recording():
            self._saved.enter()

    def end(self) -> None:
        """The model has computed, or raised."""
        self._depth -= 1
        if self._depth > 0:
            return
        if self._saved.entered:
            self._saved.leave()
        if self._recording():
            self._join(self._order.end_pass())

    def _join(self, skipped: Sequence[int]) -> None:
        """Take part in the fetches of units that this rank skipped and others may use."""
        for index in skipped:
            self.residency.need(self.units[index])
        for index in sorted(skipped, key=lambda i: -len(self.units[i].ancestors)):
            self._order.done(index)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """In this context the model's methods other than ``forward`` may use its parameters."""
        self.begin()
        self.residency.enter(self.root)
        try:
            yield
        finally:
            self.end()
            self.residency.leave(self.root)

    @contextmanager
    def gathered(self, units: Sequence[Unit]) -> Iterator[None]:
        """In this context the units' parameters are whole on every rank. All ranks enter it in the same order."""
        self._depth += 1
        self.residency.plan([])
        for unit in units:
            self.residency.enter(unit)
        try:
            yield
        finally:
            self._depth -= 1
            for unit in reversed(units):
                self.residency.leave(unit)
                if self._depth == 0 and unit.slot is not None:
                    self.residency.evict(unit)  # so that a later write, which would be lost, is noticed

    def _recording(self) -> bool:
        """Whether forwards count for the order: not in evaluation, nor when a checkpoint recomputes."""
        return torch.is_grad_enabled() and not self._computing_backward()

    @staticmethod
    def _computing_backward() -> bool:
        return torch._C._current_graph_task_id() != -1

    def _touch(self, unit: Unit, name: str) -> None:
        """A parameter that is away is used."""
        if unit.state is State.FETCHING:
            self.residency.need(unit)
            return
        if not (self._depth or self.residency.active or self._computing_backward()):
            raise RuntimeError(
                f"parameter {name} is sharded over {self.mesh.shard.size} ranks and not in memory outside the model's "
                "forward and backward; read or change it inside `with zeromesh.zero.GatheredParameters([...])` on all "
                "ranks, and call the model's methods through the engine"
            )
        self.residency.touch(unit)

    def _unpack(self, unit: Unit) -> None:
        """Autograd wants a saved view of the unit's parameters."""
        if unit.state is not State.FETCHED:
            self.residency.enter_backward(unit)

    # Backward.

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around one backward; ``last`` if an update follows. Gradients are reduced as units are done with."""
        self._in_backward = True
        self._backward_order = None
        self._begun = []
        self._reduced = set()
        self.reducer.begin(last)
        try:
            yield
            self._end_backward()
        except BaseException:
            self.reducer.reset()
            raise
        finally:
            self._in_backward = False
            self._order.end_backward()
            for calls in self._calls.values():
                calls.clear()
            self.residency.leave_backward()

    def backward_begins(self, call: Call) -> None:
        """Hook: the backward of one call of a unit begins."""
        check_version(call.unit, call.version)
        if torch.is_grad_enabled():
            self._hold()
        if not self._in_backward:
            self._outside_backward(call.unit)
            return
        unit, order = call.unit, self._plan_backward()
        if unit.index in order:
            self._fill_backward(order[: order.index(unit.index)])
        self._backward_event(unit)

    def _plan_backward(self) -> list[int]:
        """The order in which the units' backwards will begin."""
        if self._backward_order is None:
            self._backward_order = [index for index in self._order.backward() if self._expects[index]]
            self.residency.plan(self._backward_order)
        return self._backward_order

    def _fill_backward(self, expected: Sequence[int]) -> None:
        """Take part in what other ranks may do for units whose gradients this rank has none of."""
        for unit in (self.units[index] for index in expected):
            if unit not in self._begun:
                self._calls[unit].clear()
                self._backward_event(unit)

    def _backward_event(self, unit: Unit) -> None:
        self._reduce_finished(unit)
        if unit not in self._begun:
            self._begun.append(unit)
        self._reduced.discard(unit)
        if unit.flats:
            self.residency.enter_backward(unit)

    def _reduce_finished(self, current: Unit) -> None:
        """Reduce the units whose backward is over: each call's has begun, and that of a unit outside it begins now."""
        for unit in self._begun:
            related = unit is current or unit in current.ancestors or current in unit.ancestors
            if unit is not self.root and unit not in self._reduced and not related and not self._calls[unit]:
                self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        self._reduced.add(unit)
        self.reducer.reduce([flat.gradient for flat in unit.flats if flat.gradient])

    def _end_backward(self) -> None:
        self._fill_backward(self._plan_backward())
        for unit in reversed(self.units):
            if unit not in self._reduced:
                self._reduce(unit)
        self.reducer.finish()

    def _outside_backward(self, unit: Unit) -> None:
        """A backward that is not the engine's, such as ``torch.autograd.grad``: no reduction, only fetching."""
        task = torch._C._current_graph_task_id()
        if task != self._raw_task:
            self._raw_task = task
            self.residency.plan([i for i in self._order.backward() if self._expects[i]])
            torch.autograd.Variable._execution_engine.queue_callback(self.residency.leave_backward)  # type: ignore[attr-defined]
        self.residency.enter_backward(unit)

    def _hold(self) -> None:
        """With ``create_graph`` the graph of the backward holds views of parameters: nothing is evicted before the
        update, after which that graph is of no use.
        """
        for unit in self.units:
            self.residency.keep(unit)

    def _gradient_arrived(self, gradient: Gradient, index: int, parameter: torch.Tensor) -> None:
        """Hook: autograd has accumulated a parameter's gradient."""
        if not self._in_backward:
            parameter.grad = None
            raise RuntimeError(
                f"the gradient of {self.names[id(parameter)]} arrived outside of the engine's backward; "
                "call engine.backward(loss) instead of loss.backward()"
            )
        value = parameter.grad
        assert value is not None
        self.reducer.arrive(gradient, index, value.detach())
        parameter.grad = None

    # The update.

    @property
    def pieces(self) -> dict[int, Piece | None]:
        """By ``id`` of each trainable parameter: the piece of it that this rank updates, None if it holds nothing."""
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
        gradients = self.reducer.gradients
        used = [float(flag) for gradient in gradients for flag in gradient.used]
        versions = [(id(buffer), buffer._version) for buffer in self.state_buffers()]
        changed = [float(now != then) for now, then in zip(versions, self._buffer_versions, strict=True)]
        positions = self._order.positions()
        vector = torch.tensor([*notes, *used, *changed, *positions], dtype=torch.float64)
        rows = self.mesh.group("world").exchange(torch.cat([self._squared_norm().cpu(), vector]))
        sizes = [1, len(notes), len(used), len(changed), len(positions)]
        squares, all_notes, all_used, all_changed, all_positions = rows.split(sizes, dim=1)
        flags = iter(all_used.amax(0).bool().tolist())
        for gradient in gradients:
            gradient.used = [next(flags) for _ in gradient.used]
        self._share_buffers(all_changed.amax(0).bool().tolist())
        if positions:
            self._order.agree(all_positions.amin(0).tolist())
        return Agreement(float(squares.sum().sqrt()), all_notes)

    def _squared_norm(self) -> torch.Tensor:
        """Sum of squares of this rank's share of the gradient, float64, shape (1,); every element counts on one rank."""
        total = torch.zeros(1, dtype=torch.float64, device=self.mesh.device)
        if self.mesh.replicate.rank == 0:
            for gradient in self.reducer.gradients:
                total += _sum_of_squares(self._share(gradient))
        return total

    @staticmethod
    def _share(gradient: Gradient) -> torch.Tensor:
        assert gradient.home is not None
        start = gradient.shard.start - gradient.own.start
        return gradient.home[start : start + gradient.layout.shard_size]

    def first_not_finite(self) -> str:
        """Which parameter has a gradient that is not finite on this rank, as the end of a sentence; may be empty."""
        for flat in self.flats:
            gradient = flat.gradient
            if gradient is None or gradient.home is None or bool(gradient.home.isfinite().all()):
                continue
            for index, local, piece in flat.pieces:
                if not bool(gradient.home[local].isfinite().all()):
                    return f"; the first parameter concerned on rank {self.mesh.rank} is {piece.name}"
        return ""

    def set_gradients(self, factor: float) -> None:
        """Multiply the gradients by ``factor`` and hand them to the pieces; None where no rank had one."""
        for flat in self.flats:
            gradient = flat.gradient
            if gradient is None or gradient.home is None:
                continue
            if factor != 1.0:
                gradient.home.mul_(factor)
            home = gradient.home.to(flat.master.dtype)
            for index, local, piece in flat.pieces:
                piece.parameter.grad = home[local].view_as(piece.parameter) if gradient.used[index] else None

    def updated(self) -> None:
        """After an update: forget the gradients and publish the masters."""
        self.forget_gradients()
        self.publish()

    def publish(self) -> None:
        """The masters have changed: write them home and send the new parameters on their way."""
        self._finish_fetches()
        if self.sharded:
            self.residency.evict_all()
        for flat in self.flats:
            if flat.gradient is not None and flat.master is not flat.home:
                flat.home.copy_(flat.master)
        for unit in self.units:
            unit.version += 1
        if not self.sharded:
            self._renew()

    def _renew(self) -> None:
        """Start to gather what changed, in the order of use; each unit's forward waits for its own part."""
        for index in [self.root.index, *self._order.canonical]:
            unit = self.units[index]
            if unit.state is State.FETCHED and any(flat.gradient for flat in unit.flats):
                unit.state = State.HOME
                self._guards[unit].switch(False)
                unit.begin_fetch(self.mesh, None)

    def forget_gradients(self) -> None:
        """As ``zero_grad``: drop the gradients of the micro-batches so far."""
        self.reducer.reset()
        for flat in self.flats:
            for _, _, piece in flat.pieces:
                piece.parameter.grad = None

    # Whole tensors, for those who look at or change single parameters.

    def assemble(self, flat: Flat, index: int, pick: Pick) -> torch.Tensor | None:
        """A whole tensor of parameter ``index``'s shape from what ``pick`` gives of each rank's piece.

        None if ``pick`` gives None for every piece. All ranks call this.
        """
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
        return whole.view(segment.shape)

    def take_value(self, flat: Flat, index: int, rank: int) -> None:
        """Give every rank, and the masters, the value that rank ``rank`` has of a gathered parameter."""
        segment, parameter = flat.layout.segments[index], flat.parameters[index]
        with torch.no_grad():
            self.mesh.group("world").broadcast(parameter.data, rank)
        value = parameter.detach().flatten()
        for position, _, piece in flat.pieces:
            if position == index:
                piece.parameter.data.copy_(value[piece.start : piece.stop])
        if self.sharded:
            low = flat.shard.start
            for position, start, stop in flat.layout.owned(low, flat.shard.stop):
                if position == index:
                    flat.home[start - low : stop - low].copy_(value[start - segment.start : stop - segment.start])

    # Accounting.

    def memory(self) -> Iterator[tuple[str, str, int]]:
        """What is allocated on this rank: (state, tier, bytes), from the buffers themselves."""
        for flat in self.flats:
            rest = flat.home if self.sharded else flat.full
            yield "parameter", "device", rest.nbytes
            if flat.master is not flat.home:
                yield "optimizer", "device", flat.master.nbytes
            if flat.gradient is not None and flat.gradient.buffer is not None:
                yield "gradient", "device", flat.gradient.buffer.nbytes
        full_gradients = "slot" if self.reducer.policy.sharded else "gradient"
        yield full_gradients, "device", self.reducer.slots.nbytes
        for pool in (self.reducer.wires, self.reducer.receives, self.pool, self.root_pool):
            yield "slot", "device", pool.nbytes
        for buffer in self.model.buffers():
            yield "buffer", "device", buffer.nbytes

    # Buffers.

    def state_buffers(self) -> list[torch.Tensor]:
        """The buffers that are part of the model's state, in order of registration."""
        return [
            buffer
            for module in self.model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]

    def _share_buffers(self, changed: Sequence[bool]) -> None:
        """Give every rank the first rank's values of the buffers that changed on any rank."""
        buffers = self.state_buffers()
        for buffer, flag in zip(buffers, changed, strict=True):
            if flag:
                self.mesh.group("world").broadcast(buffer)
        self._buffer_versions = [(id(buffer), buffer._version) for buffer in buffers]

    def close(self) -> None:
        """Drain what is under way and take the hooks off."""
        self.reducer.finish()
        self._finish_fetches()
        for handle in self._handles:
            handle.remove()

    def _finish_fetches(self) -> None:
        """Nothing is to be sent from, or to land in, memory that changes."""
        self.residency.plan([])
        for unit in self.units:
            if unit.state is State.FETCHING:
                self.residency.need(unit)


def _sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Float64, 0-dim. Row by row, because an fp32 sum over ten million elements is wrong in the fourth digit on a CPU,
    and in at least fp32, because a norm may be beyond the range of 16 bits when no element is.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    whole = values.numel() // NORM_ROW * NORM_ROW
    norms = torch.linalg.vector_norm(values[:whole].view(-1, NORM_ROW), dim=1, dtype=wide)
    rest = torch.linalg.vector_norm(values[whole:], dtype=wide)
    return norms.double().square().sum() + rest.double().square()


def _full_precision_parameters(module: nn.Module) -> set[int]:
    """Parameters of normalisations with running statistics: torch's kernels take 16-bit inputs with these in fp32."""
    kinds = (nn.modules.batchnorm._BatchNorm,)
    return {id(p) for m in module.modules() if isinstance(m, kinds) for p in m.parameters(recurse=False)}
