"""Reactions to events: a forward begins or ends, a gradient of an output or of a parameter arrives.

Note on when a unit is reduced. A unit's gradient is complete when the backward of each of its calls has begun and then
the backward of a unit outside of it begins. This depends on the structure of the program alone. Counting the gradients
that arrived would be wrong, as a parameter may get none on one rank. What is left is reduced at the end, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from weakref import WeakSet

import torch

from zeromesh.comm.mesh import Mesh
from zeromesh.shard.accumulation import Accumulation
from zeromesh.shard.gradient import Gradient
from zeromesh.shard.grads import PLAIN_GRAD
from zeromesh.shard.hooks import Call, SavedTensors, check_version, passes_of
from zeromesh.shard.order import Order, Pass, Walk
from zeromesh.shard.reducer import Reducer
from zeromesh.shard.residency import Residency
from zeromesh.shard.unit import Unit


class Events:
    """Listens to the units' hooks and has parameters fetched and gradients reduced.

    Attributes:
        calls: by unit, its forwards whose backward has not begun.
        order: in which units are used.
        saved: how graphs keep views of parameters.
    """

    def __init__(
        self, units: Sequence[Unit], order: Order, residency: Residency, reducer: Reducer, mesh: Mesh,
        accumulation: Accumulation,
    ) -> None:  # fmt: skip
        self.calls: dict[Unit, WeakSet[Call]] = {unit: WeakSet() for unit in units}
        self.order = order
        self._units = units
        self._inside = {unit: frozenset(u.index for u in units if unit in u.ancestors) for unit in units}
        self._root = units[0]
        self._residency = residency
        self._reducer = reducer
        self._mesh = mesh
        self._accumulation = accumulation
        self.saved = SavedTensors(residency.unit_of, self._unpack)
        self._entered: list[Unit] = []
        self._depth = 0
        self._gathering = 0
        self._walks: dict[Pass, Walk] = {}
        self._reached: list[Pass] = []
        self._latest = order.current
        self._begun: list[Unit] = []
        self._reduced: set[Unit] = set()
        self._in_backward = False
        self._last = False
        self._reduces = True
        self._other_task = -1
        self._gathers_other = False

    # Forward.

    def forward_begins(self, unit: Unit) -> None:
        """Hook: have the unit's parameters in memory, and take part in the fetches of units that were skipped."""
        self._entered.append(unit)
        if unit is self._root:
            self.begin()
        elif self._computing_backward():
            self._recomputing(unit)
        else:
            if unit.flats:
                self._join(self.order.use(unit.index))
            self.order.begin_inside(self._inside[unit])
        self._residency.enter(unit)

    def forward_ends(self, unit: Unit, call: Call | None) -> None:
        """Hook: the unit's parameters may go."""
        if unit not in self._entered:
            return  # another hook raised before its forward began
        while self._entered.pop() is not unit:
            pass
        if unit is self._root:
            self.end()
        elif not self._computing_backward():
            self._join(self.order.end_inside(self._inside[unit]))
            if unit.flats:
                self.order.done(unit.index, call is not None if torch.is_grad_enabled() else None)
        if call is not None:
            call.forward = self._latest if self._computing_backward() else self.order.current
        self._residency.leave(unit)

    @contextmanager
    def unwinding(self) -> Iterator[None]:
        """Around what computes: end the forwards inside that an exception ended without a word, as Ctrl-C does."""
        outside = len(self._entered)
        try:
            yield
        finally:
            while len(self._entered) > outside:
                self.forward_ends(self._entered[-1], None)

    def _recomputing(self, unit: Unit) -> None:
        """A checkpoint computes the unit again, with reentrant autograd before the unit's backward begins."""
        if self._in_backward:
            for index in self._walk(self._latest).approach(unit.index):
                self._backward_event(self._units[index])

    def begin(self) -> None:
        """The model begins to compute, through its forward or any other method."""
        self._depth += 1
        if self._depth > 1:
            return
        if self._computing_backward():
            return  # a checkpoint computes again
        self.give_up_other()
        has_graphs = torch.is_grad_enabled()
        recorded = has_graphs and not self.order.evaluates
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
        if not self._computing_backward():
            self._join(self.order.end_pass(forward))

    def _join(self, skipped: Sequence[int]) -> None:
        """Take part in the fetches of units that this rank skipped and others may use."""
        open_units: list[Unit] = []
        for unit in (self._units[index] for index in skipped):
            while open_units and open_units[-1] not in unit.ancestors:
                self.order.done(open_units.pop().index)
            open_units.append(unit)
            self._residency.enter(unit)
            self._residency.leave(unit)
        for unit in reversed(open_units):
            self.order.done(unit.index)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """In this context the model's methods other than ``forward`` may use its parameters."""
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
        there = self.inside or self._computing_backward() or not any(unit.sharded for unit in self._units)
        return nullcontext() if there else self.computing()

    @property
    def inside(self) -> bool:
        """True if the model, or a context that gathers its parameters, is active."""
        return self._depth > 0 or self._gathering > 0

    @contextmanager
    def gathered(self, units: Sequence[Unit]) -> Iterator[None]:
        """In this context the units' parameters are whole on every rank. All ranks enter it in the same order."""
        self._gathering += 1
        self._residency.plan([])
        for unit in units:
            self._residency.enter(unit)
            self._residency.make_exact(unit)
        try:
            yield
        finally:
            self._gathering -= 1
            for unit in reversed(units):
                self._residency.leave(unit)
                if not self.inside:
                    self._residency.release(unit)  # so that a later write, which would be lost, is noticed
            if not self.inside:
                self._residency.shrink()

    @property
    def gathering(self) -> bool:
        """True if a context that gathers parameters is active."""
        return self._gathering > 0

    @staticmethod
    def _computing_backward() -> bool:
        return torch._C._current_graph_task_id() != -1

    def touch(self, unit: Unit, name: str) -> None:
        """A parameter of the unit is used outside of the unit's forward, or before an update has reached it."""
        if not unit.sharded:
            self._residency.need(unit)
            return
        if not (self.inside or self._residency.active or self._computing_backward()):
            raise RuntimeError(
                f"parameter {name} is sharded over {self._mesh.shard.size} ranks and not in memory outside the model's "
                "forward and backward; read or change it inside `with zeromesh.zero.GatheredParameters([...])` on all "
                "ranks, a loss of weights too, and call the model, or its methods, through the engine: engine(...), "
                "engine.generate(...)"
            )
        if self._depth and unit is not self._root and not self._computing_backward():
            self._join(self.order.use(unit.index, outside=True))
        self._residency.touch(unit)

    def _unpack(self, unit: Unit) -> None:
        """Autograd wants a saved view of the unit's parameters. One node may want views of several units at once."""
        if not self._in_backward and self._computing_backward():
            self._listen_to_other()
        if self._in_backward and unit not in self._begun and unit.index not in self._latest.outside:
            self._reach(unit, self._latest)  # of what is inside of it a gradient arrived, and none of its outputs
        node = torch._C._current_autograd_node()
        self._residency.hold(unit, -1 if node is None else node._sequence_nr())

    # Backward.

    @contextmanager
    def backward(self, roots: Sequence[torch.Tensor], last: bool, reduces: bool = True) -> Iterator[None]:
        """Around the backward of some tensors; ``last`` if an update follows.

        Units are reduced as they are done with, unless weight gradients come later, in ``weights``.
        """
        self.give_up_other()
        self._begin_backward(roots, last, reduces)
        try:
            with self.unwinding():
                yield
            self._end_backward()
        except BaseException:
            self._reducer.reset()
            raise
        finally:
            self._leave_backward()

    def _begin_backward(
        self, roots: Sequence[torch.Tensor], last: bool, reduces: bool = True, factor: float = 1.0
    ) -> None:
        while self._entered:  # of a forward that was called on the model itself and interrupted
            self.forward_ends(self._entered[-1], None)
        self._in_backward, self._last, self._reduces = True, last, reduces
        self._accumulation.begin()
        self._begin_walks(roots)
        self._begun = []
        self._reduced = set()
        self._reducer.begin(last, factor)

    def _leave_backward(self) -> None:
        self._in_backward = self._last = False
        self._accumulation.end()
        self.order.end_backward()
        for calls in self.calls.values():
            for call in [call for call in calls if call.forward in self._reached]:
                calls.discard(call)
        self._residency.leave_backward()

    @contextmanager
    def weights(self, last: bool) -> Iterator[None]:
        """Around a backward of nothing but weight gradients, for which no parameters are needed."""
        self._in_backward, self._last, self._reduces = True, last, True
        self._reduced = set()
        self._reducer.begin(last)
        try:
            yield
            self._reduce_rest()
            self._reducer.finish()
        except BaseException:
            self._reducer.reset()
            raise
        finally:
            self._in_backward = self._last = False

    def backward_begins(self, call: Call) -> None:
        """Hook: the backward of one call of a unit begins."""
        check_version(call.unit, call.version)
        if not self._in_backward:
            self._listen_to_other()
        self._reach(call.unit, call.forward)

    def _begin_walks(self, roots: Sequence[torch.Tensor] | None = None) -> None:
        alive = {call.forward for calls in self.calls.values() for call in calls}
        if roots is not None and (len(alive) > 1 or self.order.part is not None):
            # When units are reduced must not depend on graphs that happen to be alive, on one rank perhaps.
            alive = passes_of(roots, alive)
        self._walks = {forward: self.order.backward(forward) for forward in alive}
        self._reached = []
        # Forwards of other micro-batches may have come since.
        self._latest = max(alive, key=lambda forward: forward.number, default=self.order.current)

    def _reach(self, unit: Unit, forward: Pass) -> None:
        """The backward of one call of the unit begins: take part in what others may have done for units before it."""
        self._latest = forward
        for index in self._walk(forward).reach(unit.index):
            self._backward_event(self._units[index])
        self._backward_event(unit)

    def _walk(self, forward: Pass) -> Walk:
        if forward not in self._reached:
            self._finish_walks()
            self._reached.append(forward)
            self._walks.setdefault(forward, self.order.backward(forward))
            self._residency.plan(self.order.fetched(self._walks[forward].steps))
        return self._walks[forward]

    def _finish_walks(self) -> None:
        """The backward of the passes that were reached is over: autograd goes from the latest to the earliest."""
        for forward in self._reached:
            for index in self._walks[forward].rest():
                self._backward_event(self._units[index])

    def _backward_event(self, unit: Unit) -> None:
        if self._in_backward:
            self._reduce_finished(unit)
            if unit not in self._begun:
                self._begun.append(unit)
            self._reduced.discard(unit)
        if unit.flats:
            needed = unit is self._root or unit.index in self.order.fetched([unit.index])
            self._residency.enter_backward(unit, needed, self._done_with())

    def _done_with(self) -> list[Unit]:
        """The units whose parameters this backward has looked at for the last time, as far as can be foreseen."""
        outside = {index for forward in self._walks for index in forward.outside}
        ending = [unit for unit in self._begun if self._ends(unit)]
        return [unit for unit in ending if unit.index not in outside and not self._pending(unit)]

    def _ends(self, unit: Unit) -> bool:
        """Return whether this backward is the unit's last one before the update."""
        return self._last and self.order.is_present(unit.index) and unit.index not in self.order.again

    def _reduce_finished(self, current: Unit) -> None:
        """Reduce the units whose backward is over: each call's has begun, and that of a unit outside it begins now."""
        for unit in self._begun:
            if unit is self._root or unit in self._reduced or self._pending(unit):
                continue
            if unit is not current and unit not in current.ancestors and current not in unit.ancestors:
                self._reduce(unit)

    def _pending(self, unit: Unit) -> bool:
        """Return whether the backward of a call of the unit is still to come, in any pass whose graph is alive."""
        return any(walk.pending(unit.index) for walk in self._walks.values())

    def _reduce(self, unit: Unit) -> None:
        self._reduced.add(unit)
        if not self._reduces:
            return
        self._reducer.reduce([flat.gradient for flat in unit.flats if flat.gradient], self._ends(unit))

    def _end_backward(self) -> None:
        if not self._reached:
            self._walk(self._latest)
        self._finish_walks()
        self._reduce_rest()
        if self._last and self._root.sharded:
            # All of them, as ranks may differ in what they used outside: the next fetches must be the same on all.
            self._residency.leave_backward()
            for unit in filter(self._ends, self._units[1:]):
                self._residency.release(unit)
        self._reducer.finish()

    def _reduce_rest(self) -> None:
        for unit in reversed(self._units):
            if unit not in self._reduced and self.order.is_present(unit.index):
                self._reduce(unit)

    def _listen_to_other(self) -> None:
        """A backward begins that the engine did not start.

        One that accumulates gradients, as ``loss.backward()`` does, is a micro-batch like any other. For
        ``torch.autograd.grad`` parameters are fetched, and nothing is reduced.
        """
        task = torch._C._current_graph_task_id()
        if task == self._other_task:
            return
        self.give_up_other()
        accumulates = self._accumulates()
        factor = self._accumulation.missing_factor() if accumulates else 1.0
        self._other_task = task
        if accumulates:
            self._gathers_other = True
            # Passes are added as they are reached. Which graphs are alive may differ over the ranks.
            self._begin_backward([], self._accumulation.reduces, factor=factor)
        else:
            self._begin_walks()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_other)

    def _accumulates(self) -> bool:
        """Return whether the current backward leaves a gradient in some parameter."""
        for flat in (flat for unit in self._units for flat in unit.flats if flat.gradient is not None):
            for parameter in flat.parameters:
                with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
                    if not parameter.requires_grad:
                        continue
                    view = parameter.view_as(parameter)
                if view.grad_fn is None:
                    return False  # inside torch.func, which returns gradients
                node = view.grad_fn.next_functions[0][0]
                try:
                    if node is not None and torch._C._will_engine_execute_node(node):
                        return True
                except RuntimeError:  # torch refuses to say so of a leaf whose gradient autograd.grad returns
                    return False
        return False

    def _end_other(self) -> None:
        if not self._gathers_other:
            self._finish_walks()
            self._residency.leave_backward()
            return
        try:
            self._end_backward()
        except BaseException:
            self._reducer.reset()
            self._accumulation.restart()
            raise
        finally:
            self._gathers_other = False
            self._leave_backward()
        self._accumulation.note()

    def give_up_other(self) -> None:
        """Drop the gradients of a backward that the engine did not start, if it raised: autograd does not say so."""
        if self._gathers_other and not self._computing_backward():
            self._gathers_other = False
            self._leave_backward()
            self._reducer.reset()
            self._accumulation.restart()

    def gradient_arrived(self, gradient: Gradient, index: int, parameter: torch.Tensor) -> None:
        """Hook: autograd has accumulated a parameter's gradient."""
        found = PLAIN_GRAD.__get__(parameter)
        if found is None:
            return  # another hook has taken it
        value = found.detach()
        del found  # the memory of the gradient becomes the flat buffer's if nobody else refers to it
        PLAIN_GRAD.__set__(parameter, None)
        if not self._in_backward:
            self._listen_to_other()
        self._reducer.arrive(gradient, index, value)
