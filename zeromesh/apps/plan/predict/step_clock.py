"""Discrete-event simulation of a step of one rank without a pipeline: computation, links, host and disk side by side.

Each resource does one thing at a time, in the order in which the engine begins them. A step begins with the update that
the gradients of the step before have made possible, so that what follows an update, such as the gathers of new
parameters beside the forward, counts where it happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zeromesh.apps.plan.predict.durations import UnitTime
from zeromesh.shard.gradients.gradient_memory import ARRIVALS

COMPUTE, DATA, OUT, IN, HOST, READ, WRITE = (
    "compute", "data links", "to host", "from host", "host", "disk reads", "disk writes",
)  # fmt: skip
REPLICAS, OVERHEAD = "replica links", "overhead"

SIMULATED = 4  # micro-batches: the first, two of a steady state, and the last


@dataclass
class StepClock:
    """Times at which resources are free, and what computation has waited for."""

    keep: bool = False  # the intervals
    serial: float = 0.0  # share of what is sent and copied that takes the processor from the computation
    free: dict[str, float] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    kept: list[tuple[str, str, float, float]] = field(default_factory=list)  # resource, label, start, end

    def use(self, resource: str, seconds: float, ready: float = 0.0, label: str = "") -> float:
        """Occupy a resource for some seconds, from ``ready`` at the earliest; return the end."""
        if seconds <= 0.0:
            return ready
        serial = 0.0 if resource in (READ, WRITE) else self.serial if resource in (DATA, REPLICAS) else self.serial > 0
        start = max(self.free.get(resource, 0.0), ready, self.now if serial else 0.0)
        end = self.free[resource] = start + seconds
        if serial:
            self.compute(((resource, serial * seconds),), label)
        if self.keep:
            self.kept.append((resource, label, start, end))
        return end

    def wait(self, until: float, cause: str) -> None:
        """Let computation wait for a resource."""
        now = self.free.get(COMPUTE, 0.0)
        if until > now:
            self.waits[cause] = self.waits.get(cause, 0.0) + until - now
            self.free[COMPUTE] = until

    def compute(self, parts: Sequence[tuple[str, float]], label: str = "") -> float:
        """Compute, with parts in which other resources are waited for; return the end."""
        now = self.free.get(COMPUTE, 0.0)
        for resource, seconds in parts:
            if seconds > 0.0:
                self.waits[resource] = self.waits.get(resource, 0.0) + seconds
                if self.keep:
                    self.kept.append((resource, label, now, now + seconds))
                now += seconds
        self.free[COMPUTE] = now
        return now

    @property
    def now(self) -> float:
        """Time at which computation is free."""
        return self.free.get(COMPUTE, 0.0)


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
    serial: float = 0.0  # see ``StepClock``


def run(units: Sequence[UnitTime], rules: StreamRules, keep: bool = False) -> tuple[float, StepClock]:
    """Return the seconds of a step and the clock with what they were spent on."""
    stream = _Stream(units, rules, StepClock(keep, rules.serial))
    stream.update()
    stretch, waits = 0.0, {}
    # A picture shows all of them.
    count = rules.accumulation if keep else min(rules.accumulation, SIMULATED)
    many = rules.accumulation > count
    for number in range(count):
        before, waited = stream.clock.now, dict(stream.clock.waits)
        stream.micro_batch(number == 0, number == count - 1)
        if many and number == SIMULATED - 2:
            # All micro-batches between the first and the last are like this one.
            stretch = stream.clock.now - before
            waits = {name: value - waited.get(name, 0.0) for name, value in stream.clock.waits.items()}
    stream.finish()
    clock = stream.clock
    if many:
        for name, value in waits.items():
            clock.waits[name] += value * (rules.accumulation - SIMULATED)
    return clock.now + stretch * (rules.accumulation - SIMULATED if many else 0), clock


class _Stream:
    def __init__(self, units: Sequence[UnitTime], rules: StreamRules, clock: StepClock) -> None:
        self.units, self.rules, self.clock = units, rules, clock
        self.blocks = [unit for unit in units if unit.block]
        self.slots = max(1, min(rules.parameter_slots, len(self.blocks))) if self.blocks else 1
        self.gathered: dict[int, tuple[float, str]] = {}  # by the unit's place: end of its gather, and its cause
        self.reduced: list[float] = []  # ends of reductions, the newest last
        self.added: list[float] = []  # ends of additions on the host, the newest last
        self.saved: dict[int, float] = {}
        self.first = True

    # The update, and the gathers of what it has changed.

    def update(self) -> None:
        """Update all units in the order of the forward, the root first, and begin to gather what is not sharded."""
        clock, rules = self.clock, self.rules
        for place in self._root_first():
            unit = self.units[place]
            if unit.update:
                done = clock.compute(((COMPUTE, unit.update),), f"update {unit.name}")
            else:
                ready = clock.use(READ, unit.states_read, 0.0, f"read states of {unit.name}")
                done = clock.use(HOST, unit.host_update, ready, f"update {unit.name}")
                clock.use(WRITE, unit.states_written, done, f"write states of {unit.name}")
                done = clock.use(IN, unit.parameter_in, done, f"copy {unit.name}")
            if rules.split and not rules.sharded:
                end = clock.use(DATA, unit.gather, done, f"publish {unit.name}")
                self.gathered[place] = (end, DATA if unit.gather >= unit.parameter_in else IN)
            elif not unit.update:
                self.gathered[place] = (done, IN)
        # The host updates unit after unit before the forward begins; only copies and gathers go on beside it.
        clock.wait(clock.free.get(HOST, 0.0), HOST if clock.free.get(READ, 0.0) < clock.free.get(HOST, 0.0) else READ)
        clock.wait(clock.free.get(WRITE, 0.0), WRITE)
        if rules.sharded:
            self.gathered.clear()
        elif not rules.publishes_early:
            clock.wait(clock.free.get(DATA, 0.0), DATA)

    def _root_first(self) -> list[int]:
        places = range(len(self.units))
        return [p for p in places if not self.units[p].block] + [p for p in places if self.units[p].block]

    # One micro-batch.

    def micro_batch(self, first: bool, last: bool) -> None:
        """Compute the forward and the backward of a micro-batch."""
        clock, rules, units = self.clock, self.rules, self.units
        self.first = first
        blocks = [place for place, unit in enumerate(units) if unit.block]
        count = len(blocks)
        # Uses of blocks in the order of the forward and the backward. Units that were used last stay in their slots.
        uses = [*blocks, *reversed(blocks)]
        residents = [0 if first else self.slots, self.slots]
        needs = [not (i % count < residents[i // count]) for i in range(2 * count)] if rules.sharded else []
        if rules.sharded and first:
            for place in self._root_first()[: len(units) - count]:
                self._gather(place)
        position = 0
        if rules.sharded:
            for ahead in range(min(self.slots - 1, len(uses))):
                self._prefetch(uses, needs, ahead)
        for place, unit in enumerate(units):
            if unit.block:
                self._prefetch(uses, needs, position + self.slots - 1)
                position += 1
            self._arrived(place)
            end = clock.compute(unit.compute_forward, f"forward {unit.name}")
            if unit.saved_out:
                self.saved[place] = clock.use(OUT, unit.saved_out, end, f"save {unit.name}")
        back = [*range(len(units) - 1, -1, -1)]
        for number, place in enumerate(back):
            unit = units[place]
            if unit.block:
                self._prefetch(uses, needs, position + self.slots - 1)
                position += 1
            self._arrived(place)
            if unit.saved_out:
                after = clock.use(IN, unit.saved_out, max(self.saved[place], self._begun(back, number)), unit.name)
                clock.wait(after, IN)
            self._gradient_slot()
            clock.compute(unit.compute_backward, f"backward {unit.name}")
            if unit.block and (rules.reduces_each or last):
                self._reduce(unit, last)
        for unit in units:  # the root's gradients are complete when the backward is
            if not unit.block and (rules.reduces_each or last):
                self._reduce(unit, last)
        clock.compute(((OVERHEAD, rules.overhead),), "overhead")

    def _begun(self, back: Sequence[int], number: int) -> float:
        # Activations of a unit are fetched while the unit before computes its backward.
        if not number:
            return self.clock.now
        return self.clock.now - sum(seconds for _, seconds in self.units[back[number - 1]].compute_backward)

    def _prefetch(self, uses: Sequence[int], needs: Sequence[bool], index: int) -> None:
        if index < len(needs) and needs[index]:
            self._gather(uses[index])

    def _gather(self, place: int) -> None:
        clock, unit = self.clock, self.units[place]
        # A slot is free when computation has come to this point; the shard is read and copied before.
        ready = clock.now
        read = clock.use(READ, unit.read, 0.0, f"read {unit.name}")
        ready = clock.use(IN, unit.fetch, max(ready, read), f"fetch {unit.name}")
        end = clock.use(DATA, unit.gather, ready, f"gather {unit.name}")
        parts = ((unit.gather, DATA), (unit.fetch, IN), (unit.read, READ))
        self.gathered[place] = (end, max(parts)[1])

    def _arrived(self, place: int) -> None:
        arrival = self.gathered.pop(place, None)
        if arrival is not None:
            self.clock.wait(*arrival)

    def _gradient_slot(self) -> None:
        rules = self.rules
        if rules.reduces_each and len(self.reduced) >= max(1, rules.gradient_slots):
            self.clock.wait(self.reduced[-max(1, rules.gradient_slots)], DATA)

    def _reduce(self, unit: UnitTime, last: bool) -> None:
        clock = self.clock
        end = clock.use(DATA, unit.reduce, clock.now, f"reduce {unit.name}")
        if unit.gradient_out:
            end = clock.use(OUT, unit.gradient_out, end, f"gradient {unit.name}")
        if unit.host_add and not self.first:  # the sums of the first micro-batch are copied to where they stay
            # The host adds a sum when it has no more memory for others.
            if len(self.added) >= ARRIVALS:
                clock.wait(self.added[-ARRIVALS], HOST)
            self.added.append(clock.use(HOST, unit.host_add, end, f"add {unit.name}"))
        if not self.rules.reduces_early:
            clock.wait(end, DATA)
        self.reduced.append(end)

    def finish(self) -> None:
        """Wait for all reductions and sum over the replicas."""
        clock = self.clock
        clock.wait(clock.free.get(DATA, 0.0), DATA)
        replicas = sum(unit.replicas for unit in self.units)
        if replicas:
            clock.wait(clock.use(REPLICAS, replicas, clock.now, "sum over replicas"), REPLICAS)
        clock.wait(clock.free.get(OUT, 0.0), OUT)
        clock.wait(max(self.added, default=0.0), HOST)
