"""What happens at each event: a forward begins or ends, a gradient of an output or of a parameter arrives.

Note on when a unit is reduced. A unit's gradient is complete when the backward of each of its calls has begun and then
the backward of a unit outside of it begins. This depends on the structure of the program alone. Counting the gradients
that arrived would be wrong, as a parameter may get none on one rank. What is left is reduced at the end, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet

import torch

from zeromesh.shard.gradient import Gradient, Reducer
from zeromesh.shard.hooks import Call, SavedTensors, check_version
from zeromesh.shard.order import Order
from zeromesh.shard.residency import Residency
from zeromesh.shard.unit import State, Unit


class Events:
    """Listens to the units' hooks and has parameters fetched and gradients reduced.

    Attributes:
        calls: by unit, its forwards whose backward has not begun.
        order: in which units are used.
    """

    def __init__(
        self, units: Sequence[Unit], order: Order, residency: Residency, reducer: Reducer, shards: int
    ) -> None:
        self.calls: dict[Unit, WeakSet[Call]] = {unit: WeakSet() for unit in units}
        self.order = order
        self._units = units
        self._root = units[0]
        self._residency = residency
        self._reducer = reducer
        self._shards = shards
        self._saved = SavedTensors({unit.storage._cdata: unit for unit in units}, self._unpack)
        self._inside = {unit: [other.index for other in units if unit in other.ancestors] for unit in units}
        self._depth = 0
        self._expected: list[int] | None = None
        self._begun: list[Unit] = []
        self._reduced: set[Unit] = set()
        self._in_backward = False
        self._other_task = -1

    # Forward.

    def forward_begins(self, unit: Unit) -> None:
        """Hook: have the unit's parameters in memory, and take part in the fetches of units that were skipped."""
        if unit is self._root:
            self.begin()
        elif self._recording() and unit.flats:
            self._join(self.order.use(unit.index))
            self.order.begin_inside(self._inside[unit])
        self._residency.enter(unit)

    def forward_ends(self, unit: Unit, call: Call | None) -> None:
        """Hook: the unit's parameters may go."""
        if unit is self._root:
            self.end()
        elif self._recording() and unit.flats:
            self._join(self.order.end_inside(self._inside[unit]))
            self.order.done(unit.index, graph=call is not None)
        self._residency.leave(unit)

    def begin(self) -> None:
        """The model begins to compute, through its forward or any other method."""
        self._depth += 1
        if self._depth > 1:
            return
        if self._recording():
            if not self.order.forward:
                self._residency.plan(self.order.expected())
            self.order.begin_pass()
        elif not self._computing_backward():
            self._residency.plan(self.order.last_forward or self.order.canonical)
        if self._root.sharded and self._recording():
            self._saved.enter()

    def end(self) -> None:
        """The model has computed, or raised."""
        self._depth -= 1
        if self._depth > 0:
            return
        if self._saved.entered:
            self._saved.leave()
        if self._recording():
            self._join(self.order.end_pass())

    def _join(self, skipped: Sequence[int]) -> None:
        """Take part in the fetches of units that this rank skipped and others may use."""
        for index in skipped:
            self._residency.need(self._units[index])
        for index in sorted(skipped, key=lambda i: -len(self._units[i].ancestors)):
            self.order.done(index)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """In this context the model's methods other than ``forward`` may use its parameters."""
        self.begin()
        self._residency.enter(self._root)
        try:
            yield
        finally:
            self.end()
            self._residency.leave(self._root)

    @property
    def inside(self) -> bool:
        """Whether the model, or a context that gathers its parameters, is active."""
        return self._depth > 0

    @contextmanager
    def gathered(self, units: Sequence[Unit]) -> Iterator[None]:
        """In this context the units' parameters are whole on every rank. All ranks enter it in the same order."""
        self._depth += 1
        self._residency.plan([])
        for unit in units:
            self._residency.enter(unit)
        try:
            yield
        finally:
            self._depth -= 1
            for unit in reversed(units):
                self._residency.leave(unit)
                if self._depth == 0 and unit.slot is not None:
                    self._residency.evict(unit)  # so that a later write, which would be lost, is noticed

    def _recording(self) -> bool:
        """Whether forwards count for the order: not in evaluation, nor when a checkpoint recomputes."""
        return torch.is_grad_enabled() and not self._computing_backward()

    @staticmethod
    def _computing_backward() -> bool:
        return torch._C._current_graph_task_id() != -1

    def touch(self, unit: Unit, name: str) -> None:
        """A parameter that is away is used."""
        if unit.state is State.FETCHING:
            self._residency.need(unit)
            return
        if not (self._depth or self._residency.active or self._computing_backward()):
            raise RuntimeError(
                f"parameter {name} is sharded over {self._shards} ranks and not in memory outside the model's "
                "forward and backward; read or change it inside `with zeromesh.zero.GatheredParameters([...])` on all "
                "ranks, and call the model's methods through the engine"
            )
        self._residency.touch(unit)

    def _unpack(self, unit: Unit) -> None:
        """Autograd wants a saved view of the unit's parameters. One node may want views of several units at once."""
        self._residency.hold(unit)

    # Backward.

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around one backward; ``last`` if an update follows. Gradients are reduced as units are done with."""
        self._in_backward = True
        self._expected = None
        self._begun = []
        self._reduced = set()
        self._reducer.begin(last)
        try:
            yield
            self._end_backward()
        except BaseException:
            self._reducer.reset()
            raise
        finally:
            self._in_backward = False
            self.order.end_backward()
            for calls in self.calls.values():
                calls.clear()
            self._residency.leave_backward()

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
        if self._expected is None:
            self._expected = self.order.backward()
            self._residency.plan(self.order.fetched(self._expected))
        return self._expected

    def _fill_backward(self, expected: Sequence[int]) -> None:
        """Take part in what other ranks may do for units whose gradients this rank has none of."""
        for unit in (self._units[index] for index in expected):
            if unit not in self._begun:
                self.calls[unit].clear()
                self._backward_event(unit)

    def _backward_event(self, unit: Unit) -> None:
        self._reduce_finished(unit)
        if unit not in self._begun:
            self._begun.append(unit)
        self._reduced.discard(unit)
        if unit.flats:
            self._residency.enter_backward(unit, unit is self._root or unit.index in self.order.fetched([unit.index]))

    def _reduce_finished(self, current: Unit) -> None:
        """Reduce the units whose backward is over: each call's has begun, and that of a unit outside it begins now."""
        for unit in self._begun:
            related = unit is current or unit in current.ancestors or current in unit.ancestors
            if unit is not self._root and unit not in self._reduced and not related and not self.calls[unit]:
                self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        self._reduced.add(unit)
        self._reducer.reduce([flat.gradient for flat in unit.flats if flat.gradient])

    def _end_backward(self) -> None:
        self._fill_backward(self._plan_backward())
        for unit in reversed(self._units):
            if unit not in self._reduced:
                self._reduce(unit)
        self._reducer.finish()

    def _outside_backward(self, unit: Unit) -> None:
        """A backward that is not the engine's, such as ``torch.autograd.grad``: no reduction, only fetching."""
        task = torch._C._current_graph_task_id()
        if task != self._other_task:
            self._other_task = task
            self._residency.plan(self.order.fetched(self.order.backward()))
            torch.autograd.Variable._execution_engine.queue_callback(self._residency.leave_backward)
        self._residency.enter_backward(unit)

    def _hold(self) -> None:
        """Evict nothing before the update: with ``create_graph`` the backward's own graph holds views of parameters."""
        for unit in self._units:
            self._residency.keep(unit)

    def gradient_arrived(self, gradient: Gradient, index: int, name: str, parameter: torch.Tensor) -> None:
        """Hook: autograd has accumulated a parameter's gradient."""
        if not self._in_backward:
            parameter.grad = None
            raise RuntimeError(
                f"the gradient of {name} arrived outside of the engine's backward; "
                "call engine.backward(loss) instead of loss.backward()"
            )
        value = parameter.grad
        assert value is not None
        self._reducer.arrive(gradient, index, value.detach())
        parameter.grad = None
