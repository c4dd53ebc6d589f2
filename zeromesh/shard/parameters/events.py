"""Reactions to forwards: a unit's parameters are fetched before its forward, and may be evicted after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from zeromesh.base.containers import map_tensors, tensors_of
from zeromesh.comm.course import PeerLost
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.gradients.accumulation import Accumulation
from zeromesh.shard.gradients.backward import Backward
from zeromesh.shard.gradients.reducer import Reducer
from zeromesh.shard.parameters.absent_guard import AbsentError
from zeromesh.shard.parameters.hooks import Call, Hook, SavedTensors, computing_backward
from zeromesh.shard.parameters.residency import Residency
from zeromesh.shard.parameters.unit import State, Unit
from zeromesh.shard.parameters.use_order import Order

MOST_LENT = 8  # units that are left in memory as one that comes after them is used; all might be the model


class Events:
    """Listens to the units' forwards and has their parameters fetched."""

    def __init__(
        self,
        units: Sequence[Unit],
        order: Order,
        residency: Residency,
        reducer: Reducer,
        mesh: Mesh,
        accumulation: Accumulation,
        finish: Callable[[], None],
    ) -> None:
        self.order = order
        # Ends waiting lookups: every rank reaches a unit, but not every rank uses an output.
        self._finish = finish
        self.backward = Backward(units, order, residency, reducer, accumulation, self.unwinding, self.end_interrupted)
        self.saved = SavedTensors(residency.unit_of, self.backward.unpack, self._stays)
        self._units, self._root = units, units[0]
        self._inside: dict[Unit, set[int]] = {unit: set() for unit in units}
        for unit in units:
            for ancestor in unit.ancestors:
                self._inside[ancestor].add(unit.index)
        self._residency = residency
        self._mesh = mesh
        self._entered: list[Unit] = []
        self._depth = 0
        self._gathering = 0

    def listen(self, unit: Unit) -> list[Any]:
        """Register the hooks of a unit's forward; return their handles."""
        members = {id(parameter) for parameter in unit.members}

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.forward_begins(unit)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if output is not None:  # after an exception the other ranks may not come here
                self._finish()
            call, outputs, replaced = None, tensors_of(output), None
            if torch.is_grad_enabled():
                if unit.sharded and any(id(tensor) in members for tensor in outputs):
                    # A view keeps the memory of the parameter, which leaves with the unit.
                    replaced = map_tensors(output, lambda t: t.view_as(t) if id(t) in members else t)
                    outputs = tensors_of(replaced)
                inputs = {id(tensor) for tensor in tensors_of((args, kwargs))}
                # A hook on a leaf would stay for ever, and below a leaf there is nothing of the unit's backward.
                new = [t for t in outputs if t.requires_grad and not t.is_leaf and id(t) not in inputs]
                if new:
                    call = Call(unit, self.backward.latest if computing_backward() else self.order.current)
                    self.backward.listen(call, new)
            try:
                self.forward_ends(unit, call is not None)
            except PeerLost:
                if output is not None:  # else one like it is being raised, and torch would warn of this one
                    raise
            return replaced

        return [
            # First, so that hooks of the user's see parameters; and always, so that an exception leaves no unit pinned.
            unit.module.register_forward_pre_hook(Hook(before), with_kwargs=True, prepend=True),
            unit.module.register_forward_hook(Hook(after), with_kwargs=True, always_call=True),
        ]

    def forward_begins(self, unit: Unit) -> None:
        """Hook: have the unit's parameters in memory, and take part in the fetches of units that were skipped."""
        self._finish()
        self._entered.append(unit)
        if unit is self._root:
            self.begin()
        elif computing_backward():
            self.backward.recomputes(unit)
        else:
            if unit.flats and unit not in self._residency.lending:
                self._join(self.order.use(unit.index))
            self.order.begin_inside(self._inside[unit])
        self._residency.enter(unit)

    def forward_ends(self, unit: Unit, has_graph: bool) -> None:
        """Hook: the unit's parameters may go."""
        if unit not in self._entered:
            return  # another hook raised before its forward began
        while self._entered.pop() is not unit:
            pass
        if unit is self._root:
            self.end()
        elif not computing_backward():
            self._join(self.order.end_inside(self._inside[unit]))
            if unit.flats and unit not in self._residency.lending:
                self.order.done(unit.index, has_graph if torch.is_grad_enabled() else None)
        # Last: a unit that was skipped inside of this one is fetched while this one is pinned, as on the other ranks.
        self._residency.leave(unit)

    @contextmanager
    def unwinding(self) -> Iterator[None]:
        """Around what computes: end the forwards inside that an exception ended without a word, as Ctrl-C does."""
        outside = len(self._entered)
        try:
            yield
        finally:
            while len(self._entered) > outside:
                self.forward_ends(self._entered[-1], False)

    def end_interrupted(self) -> None:
        """End all forwards that were called on the model itself and interrupted."""
        while self._entered:
            self.forward_ends(self._entered[-1], False)

    def begin(self) -> None:
        """The model begins to compute, through its forward or any other method."""
        self._depth += 1
        if self._depth > 1:
            return
        if computing_backward():
            return  # a checkpoint computes again
        self.backward.drop_failed()
        has_graphs = torch.is_grad_enabled()
        recorded = has_graphs and not self.order.evaluates
        # Between several forwards before one backward the plan of the first goes on.
        if not (recorded and self.order.forward):
            self._residency.plan(self.order.expected(backward=recorded))
        self.order.begin_pass(recorded)
        if has_graphs and self._root.sharded and not self._gathering:  # torch.func takes no graphs with hooks
            self.saved.enter()

    def end(self, forward: bool = True) -> None:
        """The model has computed, or raised; ``forward`` unless it did so through another method."""
        self._depth -= 1
        if self._depth > 0:
            return
        if self.saved.entered:
            self.saved.leave()
        if not computing_backward():
            self._residency.take_back()
            self._join(self.order.end_pass(forward))

    def _join(self, skipped: Sequence[int], lent: Sequence[int] = ()) -> None:
        """Take part in the fetches of units that this rank skipped and others may use; it may use those ``lent``."""
        open_units: list[Unit] = []
        for unit in (self._units[index] for index in skipped):
            while open_units and open_units[-1] not in unit.ancestors:
                self.order.done(open_units.pop().index)
            open_units.append(unit)
            self._residency.enter(unit)
            if unit.index in lent:
                self._residency.lending.add(unit)
            self._residency.leave(unit)
        for unit in reversed(open_units):
            self.order.done(unit.index)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute in this context: the model's methods other than ``forward`` may use its parameters."""
        self.begin()
        self._residency.open(self._root)
        try:
            with self.unwinding():
                yield
        finally:
            self.end(forward=False)
            self._residency.leave(self._root)

    def using(self) -> AbstractContextManager[None]:
        """A context for what may need parameters after the forward, as the loss of logits that are not made in it."""
        there = self.inside or computing_backward() or not any(unit.sharded for unit in self._units)
        return nullcontext() if there else self.computing()

    @property
    def inside(self) -> bool:
        """True if the model, or a context that gathers its parameters, is active."""
        return self._depth > 0 or self._gathering > 0

    @contextmanager
    def gathered(self, units: Sequence[Unit]) -> Iterator[None]:
        """Gather the units' parameters on every rank in this context. All ranks enter it in the same order."""
        self._gathering += 1
        self._residency.plan([])
        for unit in units:
            self._residency.enter(unit)
            narrow = any(flat.narrow is not None for flat in unit.flats)
            if narrow or self._mesh.links.gather is not None:  # they are rounded on their way
                unit.make_exact(self._mesh)
        try:
            yield
        finally:
            self._gathering -= 1
            for unit in reversed(units):
                # Here, as all ranks come here: one that noticed a change by itself would exchange scales alone.
                for flat in unit.flats:
                    if flat.narrow is not None:
                        flat.narrow.forget()
                self._residency.leave(unit)
                if not self.inside:
                    self._residency.release(unit)  # so that a later write, which would be lost, is noticed
            if not self.inside:
                self._residency.shrink()

    @property
    def gathering(self) -> bool:
        """True if a context that gathers parameters is active."""
        return self._gathering > 0

    def touch(self, unit: Unit, name: str) -> None:
        """A parameter of the unit is used outside of the unit's forward, or before an update has reached it."""
        if not unit.sharded:
            self._residency.need(unit)
            return
        if not (self.inside or self._residency.active or computing_backward()):
            raise AbsentError(
                f"parameter {name} is sharded over {self._mesh.shard.size} ranks and not in memory outside the model's "
                "forward and backward; read or change it inside `with zeromesh.zero.GatheredParameters([...])` on all "
                "ranks, a loss of weights too, and call the model, or its methods, through the engine: engine(...), "
                "engine.generate(...)"
            )
        if self._depth and unit is not self._root and not computing_backward():
            if self.order.has_seen(unit.index) and unit.state is not State.AT_REST:
                # No message, and no step of the order: other ranks may not do it, and its gradient may be late.
                self._residency.lend(unit)
                return
            # It is a use like a forward, at the same place of the order as another rank's forward. What comes before it
            # there may come after it here, without a message then.
            skipped = self.order.use(unit.index, outside=True)
            self._join(skipped, lent=skipped[-MOST_LENT:])
            self._residency.enter(unit)
            self._residency.lending.add(unit)
            self._residency.leave(unit)
            self.order.done(unit.index)
        else:
            self._residency.touch(unit)

    def _stays(self, unit: Unit) -> bool:
        """Return whether autograd keeps what it saves of a unit: no rank could fetch it by itself in the backward."""
        return unit in self._residency.lending and unit not in self._entered
