"""Reactions to backwards: gradients of outputs and of parameters arrive, units are reduced and evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from itertools import chain
from weakref import WeakSet, ref

import torch

from zeromesh.shard.gradients.accumulation import Accumulation
from zeromesh.shard.gradients.gradient import Gradient
from zeromesh.shard.gradients.grads import PLAIN_GRAD
from zeromesh.shard.gradients.reducer import Reducer
from zeromesh.shard.parameters.hooks import CALL, Call, check_version, computing_backward, passes_of
from zeromesh.shard.parameters.residency import Residency
from zeromesh.shard.parameters.unit import State, Unit
from zeromesh.shard.parameters.use_order import Order, Pass, Walk
from zeromesh.shard.tables.table import RowArrival, Table

MOST_LATE = 8  # units that are kept for late backwards; all might be the model


class Phase(Enum):
    """Origin of the backward whose gradients are taken now."""

    NONE = "none"  # there is none, or it accumulates no gradients, as `torch.autograd.grad` does not
    ENGINE = "engine"  # the engine started it, and sees its end and its exceptions
    # The user called `loss.backward()`: its end is a callback of autograd's, which does not come if it raises.
    USER = "user"


class Backward:
    """Has parameters fetched and gradients reduced as backwards go on."""

    def __init__(
        self,
        units: Sequence[Unit],
        order: Order,
        residency: Residency,
        reducer: Reducer,
        accumulation: Accumulation,
        unwinding: Callable[[], AbstractContextManager[None]],
        end_interrupted: Callable[[], None],
    ) -> None:
        # By unit, its forwards whose backward has not begun.
        self.calls: dict[Unit, WeakSet[Call]] = {unit: WeakSet() for unit in units}
        self.latest = order.current  # the pass of the last call whose backward began
        self._units, self._root = units, units[0]
        self._order = order
        self._residency = residency
        self._reducer = reducer
        self._accumulation = accumulation
        self._unwinding, self._end_interrupted = unwinding, end_interrupted  # see `Events`
        self._walks: dict[Pass, Walk] = {}
        self._reached: list[Pass] = []
        self._begun: dict[Unit, None] = {}  # in order
        self._open: dict[Unit, None] = {}  # those of them that are not reduced yet
        self._late: set[Unit] = set()  # the backward of some calls comes after that on other ranks
        self._reduced: set[Unit] = set()
        self._phase = Phase.NONE
        self._last = False
        self._reduces = True
        self._users_task = -1  # of autograd: the last backward that the engine did not start

    # The backward as a whole.

    @contextmanager
    def running(self, roots: Sequence[torch.Tensor], last: bool, reduces: bool = True) -> Iterator[None]:
        """Around the backward of some tensors; ``last`` if an update follows."""
        self.drop_failed()
        # Units are reduced as they are done with, unless weight gradients come later, in ``weights``.
        self._begin(Phase.ENGINE, roots, last, reduces)
        try:
            with self._reducer.resetting():
                with self._unwinding():
                    yield
                self._end()
        finally:
            self._leave()

    @contextmanager
    def weights(self, last: bool) -> Iterator[None]:
        """Around a backward of nothing but weight gradients, for which no parameters are needed."""
        self._phase, self._last, self._reduces = Phase.ENGINE, last, True
        self._reduced, self._open = set(), dict(self._begun)
        self._reducer.begin(last)
        try:
            with self._reducer.resetting():
                yield
                self._reduce_rest()
                self._reducer.finish()
        finally:
            self._phase, self._last = Phase.NONE, False

    def _begin(
        self, phase: Phase, roots: Sequence[torch.Tensor], last: bool, reduces: bool = True, factor: float = 1.0
    ) -> None:
        self._end_interrupted()
        self._phase, self._last, self._reduces = phase, last, reduces
        self._accumulation.begin()
        self._begin_walks(roots)
        self._begun, self._open = {}, {}
        self._reduced = set()
        self._reducer.begin(last, factor)

    def _end(self) -> None:
        if not self._reached:
            self._walk(self.latest)
        self._finish_walks()
        self._residency.take_back(self._late)
        self._late = set()
        self._reduce_rest()
        if self._last and self._root.sharded:
            # All of them, as ranks may differ in what they used outside: the next fetches must be the same on all.
            self._residency.leave_backward()
            for unit in filter(self._ends, self._units[1:]):
                self._residency.release(unit)
        self._reducer.finish()

    def _leave(self) -> None:
        self._phase, self._last = Phase.NONE, False
        self._accumulation.end()
        self._order.end_backward()
        self._residency.take_back(self._late)
        self._late = set()
        for calls in self.calls.values():
            for call in [call for call in calls if call.forward in self._reached]:
                calls.discard(call)
        self._residency.leave_backward()

    def _begin_users(self) -> None:
        # One that accumulates gradients, as `loss.backward()` does, is a micro-batch like any other. For
        # `torch.autograd.grad` parameters are fetched, and nothing is reduced.
        task = torch._C._current_graph_task_id()
        if task == self._users_task:
            return
        self.drop_failed()
        accumulates = _accumulates(self._units, self._reducer.tables)
        factor = self._accumulation.missing_factor() if accumulates else 1.0
        self._users_task = task
        if accumulates:
            # Passes are added as they are reached. Which graphs are alive may differ over the ranks.
            self._begin(Phase.USER, [], self._accumulation.reduces, factor=factor)
        else:
            self._begin_walks()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_users)

    def _end_users(self) -> None:
        if self._phase is not Phase.USER:
            self._finish_walks()
            self._residency.take_back(self._late)
            self._late = set()
            self._residency.leave_backward()
            return
        try:
            with self._reducer.resetting():
                self._end()
        except BaseException:
            self._accumulation.restart()
            raise
        finally:
            self._leave()
        self._accumulation.note()

    def drop_failed(self) -> None:
        """Drop the gradients of a backward that the user called and that raised: autograd does not say so."""
        if self._phase is Phase.USER and not computing_backward():
            self._leave()
            self._reducer.reset()
            self._accumulation.restart()

    # Hooks.

    def listen(self, call: Call, outputs: Iterable[torch.Tensor]) -> None:
        """Notice the backward of a call by the first gradient that arrives at one of its outputs."""
        self.calls[call.unit].add(call)
        weak = ref(self)  # the graph holds the hook, and must not hold the engine

        def arrived(gradient: torch.Tensor) -> None:
            alive = weak()
            if alive is not None and call.is_reached():
                alive.calls[call.unit].discard(call)
                alive.backward_begins(call)

        def note(output: torch.Tensor) -> None:
            # Tensor hooks only: identity nodes and full backward hooks would break under in-place operations. That a
            # gradient reaches an output of a unit means that every node created after it has run.
            output.register_hook(arrived)
            if output.grad_fn is not None:
                output.grad_fn.metadata[CALL] = call  # type: ignore[index]

        for output in outputs:
            when_computed = getattr(output, "when_computed", None)
            if when_computed is None:
                note(output)
            else:  # it is computed later, if at all, and is an output when it is there
                when_computed(note)

    def gradient_arrived(self, gradient: Gradient | RowArrival, index: int, parameter: torch.Tensor) -> None:
        """Hook: autograd has accumulated a parameter's gradient."""
        grad = PLAIN_GRAD.__get__(parameter)
        if grad is None:
            return  # another hook has taken it
        value = grad.detach()
        del grad  # the memory of the gradient becomes the flat buffer's if nobody else refers to it
        PLAIN_GRAD.__set__(parameter, None)
        if self._phase is Phase.NONE:
            self._begin_users()
        self._reducer.arrive(gradient, index, value)

    def backward_begins(self, call: Call) -> None:
        """Hook: the backward of one call of a unit begins."""
        check_version(call.unit, call.version)
        if self._phase is Phase.NONE:
            self._begin_users()
        self._reach(call.unit, call.forward)

    def unpack(self, unit: Unit) -> None:
        """Hook: autograd wants a saved view of the unit's parameters. One node may want views of several units."""
        if self._phase is Phase.NONE and computing_backward():
            self._begin_users()
        if self._phase is not Phase.NONE and unit not in self._begun and unit.index not in self.latest.outside:
            self._reach(unit, self.latest)  # of what is inside of it a gradient arrived, and none of its outputs
        node = torch._C._current_autograd_node()
        self._residency.hold(unit, -1 if node is None else node._sequence_nr())

    def recomputes(self, unit: Unit) -> None:
        """Take the steps before a unit that a checkpoint computes again; with reentrant autograd it does so first."""
        if self._phase is not Phase.NONE:
            for index in self._walk(self.latest).approach(unit.index):
                self._backward_event(self._units[index])

    # The order of units.

    def _begin_walks(self, roots: Sequence[torch.Tensor] | None = None) -> None:
        alive = {call.forward for calls in self.calls.values() for call in calls}
        if roots is not None and (len(alive) > 1 or self._order.part is not None):
            # When units are reduced must not depend on graphs that happen to be alive, on one rank perhaps.
            alive = passes_of(roots, alive)
        self._walks = {forward: self._order.backward(forward) for forward in alive}
        self._reached = []
        # Forwards of other micro-batches may have come since.
        self.latest = max(alive, key=lambda forward: forward.number, default=self._order.current)

    def _reach(self, unit: Unit, forward: Pass) -> None:
        """Begin the backward of a call of the unit: take part in what others may have done for units before it."""
        self.latest = forward
        if unit in self._late and not self._walk(forward).pending(unit.index):
            return  # all ranks are past it: its gradients are late, and its parameters are lent
        for step in chain(map(self._units.__getitem__, self._walk(forward).reach(unit.index)), (unit,)):
            self._backward_event(step)
            if not step.flats or step is self._root or self._walk(forward).pending(step.index):
                continue
            # All ranks have taken the last step of it. Backwards that come later on this rank use it without a message.
            comes = any(call.forward is forward and not call.again for call in self.calls[step])
            if comes and len(self._late) < MOST_LATE:
                self._late.add(step)
                if step.state is not State.AT_REST:
                    self._residency.lend(step)

    def _walk(self, forward: Pass) -> Walk:
        if forward not in self._reached:
            self._finish_walks()
            self._reached.append(forward)
            self._walks.setdefault(forward, self._order.backward(forward))
            self._residency.plan(self._order.fetched(self._walks[forward].steps))
        return self._walks[forward]

    def _finish_walks(self) -> None:
        """End the backward of the passes that were reached: autograd goes from the latest to the earliest."""
        for forward in self._reached:
            for index in self._walks[forward].rest():
                self._backward_event(self._units[index])

    def _backward_event(self, unit: Unit) -> None:
        if self._phase is not Phase.NONE:
            self._reduce_finished(unit)
            self._begun[unit] = self._open[unit] = None
            self._reduced.discard(unit)
        if unit.flats:
            # An embedding's backward needs indices only, and is not worth a fetch; the root is in memory anyway.
            needed = unit is self._root or unit.index in self._order.fetched([unit.index])
            self._residency.enter_backward(unit, needed, self._is_done_with if self._last else None)

    def _is_done_with(self, unit: Unit) -> bool:
        """Return whether this backward will probably not look at the unit's parameters again."""
        outside = any(unit.index in forward.outside for forward in self._walks)
        return unit in self._begun and self._ends(unit) and not outside and not self._pending(unit)

    def _ends(self, unit: Unit) -> bool:
        """Return whether this backward is the unit's last one before the update."""
        return self._last and self._order.is_present(unit.index) and unit.index not in self._order.again

    def _pending(self, unit: Unit) -> bool:
        """Return whether the backward of a call of the unit is still to come, in any pass whose graph is alive."""
        return any(walk.pending(unit.index) for walk in self._walks.values())

    # Reductions.

    def _reduce_finished(self, current: Unit) -> None:
        """Reduce the units whose backward is over: each call's has begun, and that of a unit outside it begins now."""
        # This depends on the structure of the program alone. To count the gradients that arrived would be wrong, as a
        # parameter may get none on one rank, and a reduction is a collective.
        for unit in list(self._open):
            if unit is self._root or self._pending(unit):
                continue
            # A parent's parameters may be used after its child, and a child's gradients may still arrive.
            if unit is not current and unit not in current.ancestors and current not in unit.ancestors:
                self._reduce(unit)

    def _reduce_rest(self) -> None:
        # In the reverse order of registration, which is the same on all ranks whatever they used.
        for unit in reversed(self._units):
            if unit not in self._reduced and self._order.is_present(unit.index):
                self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        self._reduced.add(unit)
        self._open.pop(unit, None)
        if self._reduces:
            self._reducer.reduce([flat.gradient for flat in unit.flats if flat.gradient], self._ends(unit))


def _accumulates(units: Sequence[Unit], tables: Iterable[Table]) -> bool:
    """Return whether the current backward leaves a gradient in some parameter, or in rows of a table."""
    flats = (flat for unit in units for flat in unit.flats if flat.gradient is not None)
    parameters = (parameter for flat in flats for parameter in flat.parameters)
    for parameter in chain(parameters, (leaf for table in tables for leaf in table.leaves())):
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
