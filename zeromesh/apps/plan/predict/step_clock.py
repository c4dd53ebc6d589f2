"""A step of one rank without a pipeline, as actions of computation, links, host and disk that go on side by side.

A step begins with the update that the gradients of the step before have made possible, so that what follows an update,
such as the gathers of new parameters beside the forward, counts where it happens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from zeromesh.apps.plan.predict.durations import UnitTime
from zeromesh.base.clock import ResourceUse, simulate
from zeromesh.shard.gradients.gradient_memory import ARRIVALS
from zeromesh.shard.parameters.fetch_order import fetches

COMPUTE, DATA, OUT, IN, HOST = "compute", "data links", "to host", "from host", "host"
READ, WRITE, REPLICAS, OVERHEAD = "disk reads", "disk writes", "replica links", "overhead"

SIMULATED = 4  # micro-batches: the first, two of a steady state, and the last

Actions = tuple[int, ...]  # positions of those that something waits for


@dataclass(frozen=True)
class StreamRules:
    """Facts of a layout that decide what is sent when."""

    sharded: bool  # parameters are gathered before use
    split: bool  # optimizer states are divided, so updated parameters are gathered
    reduces_each: bool  # gradients are reduced after each micro-batch
    parameter_slots: int
    gradient_slots: int
    accumulation: int
    reduces_early: bool = True
    publishes_early: bool = True
    overhead: float = 0.0
    serial: float = 0.0  # share of what is sent and copied that takes the processor from the computation


def run(
    units: Sequence[UnitTime], rules: StreamRules, keep: bool = False
) -> tuple[float, dict[str, float], list[tuple[str, str, float, float]]]:
    """Return the seconds of a step, what computation spends them on, and, if kept, what each resource does when.

    Of each use of a resource: its name, a label, the start and the end.
    """
    step = StepActions(units, rules)
    step.update()
    # A picture shows all micro-batches.
    count = rules.accumulation if keep else min(rules.accumulation, SIMULATED)
    skipped = rules.accumulation - count
    edges = []  # numbers of actions after each micro-batch
    for number in range(count):
        step.micro_batch(number == 0, number == count - 1)
        edges.append(len(step.actions))
    step.finish()
    starts, ends = simulate(step.actions, step.seconds)
    now, waits, at_edges = 0.0, dict[str, float](), {}
    for position, (action, start, duration) in enumerate(zip(step.actions, starts, step.seconds, strict=True), 1):
        if action.resource == COMPUTE:
            spent = waits.get(action.purpose, 0.0)
            if duration or start > now:  # it computes, or waits
                waits[action.purpose] = spent + duration if duration else spent + start - now
            now = ends[position - 1]
        if skipped and position in edges:
            at_edges[position] = now, dict(waits)
    if skipped:
        # All micro-batches between the first and the last are like the third.
        (before, waited), (after, more) = at_edges[edges[-3]], at_edges[edges[-2]]
        now += (after - before) * skipped
        for name, value in more.items():
            waits[name] += (value - waited.get(name, 0.0)) * skipped
    timed = zip(step.actions, starts, ends, step.seconds, strict=True) if keep else ()
    intervals = [(a.purpose, a.label, start, end) for a, start, end, duration in timed if duration > 0.0]
    return now, waits, intervals


class StepActions:
    """Emits the actions of a step in the order in which the engine begins them; no time decides what is emitted."""

    def __init__(self, units: Sequence[UnitTime], rules: StreamRules) -> None:
        self.actions: list[ResourceUse] = []
        self.seconds: list[float] = []
        self._units, self._rules = units, rules
        self._blocks = [place for place, unit in enumerate(units) if unit.block]
        self._root = [place for place, unit in enumerate(units) if not unit.block]
        self._latest: defaultdict[Hashable, Actions] = defaultdict(tuple)  # action of each resource
        self._gathered: dict[int, tuple[Actions, str]] = {}  # by the unit's place: end of its gather, and its cause
        self._reduced: list[Actions] = []  # reductions, the newest last
        self._added: list[Actions] = []  # additions on the host, the newest last
        self._saved: dict[int, Actions] = {}

    # Actions.

    def _use(self, resource: str, seconds: float, after: Actions = (), label: str = "") -> Actions:
        """Occupy a resource after some actions; return what ends when it does."""
        if seconds <= 0.0:
            return after
        # Messages and copies of a processor take a share of its computation.
        sends = resource in (DATA, REPLICAS)
        serial = 0.0 if resource in (READ, WRITE) else self._rules.serial if sends else float(self._rules.serial > 0)
        if serial:
            after = (*after, *self._now)
            self._compute(((resource, serial * seconds),), label)
        return self._add(ResourceUse(resource, after, label, resource), seconds)

    def _compute(self, parts: Iterable[tuple[str, float]], label: str = "") -> Actions:
        """Compute, with parts in which other resources are waited for; return the last part."""
        for purpose, seconds in parts:
            if seconds > 0.0:
                self._add(ResourceUse(COMPUTE, (), label, purpose), seconds)
        return self._now

    def _wait(self, after: Actions, purpose: str) -> None:
        """Let computation wait for actions of a resource."""
        if after:
            self._add(ResourceUse(COMPUTE, after, "", purpose), 0.0)

    def _add(self, action: ResourceUse, seconds: float) -> Actions:
        position = (len(self.actions),)
        self.actions.append(action)
        self.seconds.append(seconds)
        self._latest[action.resource] = position
        return position

    @property
    def _now(self) -> Actions:
        """The latest computation."""
        return self._latest[COMPUTE]

    # The update, and the gathers of what it has changed.

    def update(self) -> None:
        """Update all units in the order of the forward, the root first, and begin to gather what is not sharded."""
        rules = self._rules
        for place in (*self._root, *self._blocks):
            unit = self._units[place]
            if unit.update:
                done = self._compute(((COMPUTE, unit.update),), f"update {unit.name}")
            else:
                ready = self._use(READ, unit.states_read, (), f"read states of {unit.name}")
                done = self._use(HOST, unit.host_update, ready, f"update {unit.name}")
                self._use(WRITE, unit.states_written, done, f"write states of {unit.name}")
                done = self._use(IN, unit.parameter_in, done, f"copy {unit.name}")
            if rules.split and not rules.sharded:
                end = self._use(DATA, unit.gather, done, f"publish {unit.name}")
                self._gathered[place] = (end, DATA if unit.gather >= unit.parameter_in else IN)
            elif not unit.update:
                self._gathered[place] = (done, IN)
        # The host updates unit after unit before the forward begins; only copies and gathers go on beside it.
        self._wait(self._latest[HOST], HOST)
        self._wait(self._latest[WRITE], WRITE)
        if rules.sharded:
            self._gathered.clear()
        elif not rules.publishes_early:
            self._wait(self._latest[DATA], DATA)

    # One micro-batch.

    def micro_batch(self, first: bool, last: bool) -> None:
        """Compute the forward and the backward of a micro-batch."""
        rules, units = self._rules, self._units
        reduces = rules.reduces_each or last
        begun = iter(self._fetches(first))
        self._fetch(next(begun))
        for place, unit in enumerate(units):
            if unit.block:
                self._fetch(next(begun))
            self._wait(*self._gathered.pop(place, ((), "")))
            end = self._compute(unit.compute_forward, f"forward {unit.name}")
            if unit.saved_out:
                self._saved[place] = self._use(OUT, unit.saved_out, end, f"save {unit.name}")
        passed = 0.0  # seconds of the backward before
        for place in range(len(units) - 1, -1, -1):
            unit = units[place]
            if unit.block:
                self._fetch(next(begun))
            self._wait(*self._gathered.pop(place, ((), "")))
            if unit.saved_out:
                # Activations of a unit are fetched while the unit before computes its backward.
                ready = self._add(ResourceUse(None, self._now), -passed) if passed else self._now
                self._wait(self._use(IN, unit.saved_out, (*self._saved[place], *ready), unit.name), IN)
            slots = max(1, rules.gradient_slots)
            if rules.reduces_each and len(self._reduced) >= slots:
                self._wait(self._reduced[-slots], DATA)
            self._compute(unit.compute_backward, f"backward {unit.name}")
            passed = sum(seconds for _, seconds in unit.compute_backward)
            if unit.block and reduces:
                self._reduce(unit, first)
        for place in self._root if reduces else ():  # the root's gradients are complete when the backward is
            self._reduce(units[place], first)
        self._compute(((OVERHEAD, rules.overhead),), "overhead")

    def _fetches(self, first: bool) -> list[Sequence[int]]:
        """Return the places of the units whose fetches begin before the micro-batch, and with each use of a block."""
        uses = (*self._blocks, *reversed(self._blocks))
        if not self._rules.sharded:
            return [()] * (len(uses) + 1)
        slots = max(1, min(self._rules.parameter_slots, len(self._blocks)))
        # Units that were used last stay in their slots.
        before, *with_uses = fetches(uses, slots, frozenset() if first else frozenset(self._blocks[:slots]))
        return [(*self._root, *before) if first else before, *with_uses]

    def _fetch(self, places: Iterable[int]) -> None:
        for place in places:
            unit = self._units[place]
            # A slot is free when computation has come to this point; the shard is read and copied before.
            read = self._use(READ, unit.read, (), f"read {unit.name}")
            copied = self._use(IN, unit.fetch, (*self._now, *read), f"fetch {unit.name}")
            end = self._use(DATA, unit.gather, copied, f"gather {unit.name}")
            self._gathered[place] = (end, max((unit.gather, DATA), (unit.fetch, IN), (unit.read, READ))[1])

    def _reduce(self, unit: UnitTime, first: bool) -> None:
        end = self._use(DATA, unit.reduce, self._now, f"reduce {unit.name}")
        if unit.gradient_out:
            end = self._use(OUT, unit.gradient_out, end, f"gradient {unit.name}")
        if unit.host_add and not first:  # the sums of the first micro-batch are copied to where they stay
            # The host adds a sum when it has no more memory for others.
            if len(self._added) >= ARRIVALS:
                self._wait(self._added[-ARRIVALS], HOST)
            self._added.append(self._use(HOST, unit.host_add, end, f"add {unit.name}"))
        if not self._rules.reduces_early:
            self._wait(end, DATA)
        self._reduced.append(end)

    def finish(self) -> None:
        """Wait for all reductions and sum over the replicas."""
        self._wait(self._latest[DATA], DATA)
        if replicas := sum(unit.replicas for unit in self._units):
            self._wait(self._use(REPLICAS, replicas, self._now, "sum over replicas"), REPLICAS)
        self._wait(self._latest[OUT], OUT)
        self._wait(self._added[-1] if self._added else (), HOST)
