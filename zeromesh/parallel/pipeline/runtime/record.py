"""Record of a schedule's run, beside the simulator's prediction."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import torch

from zeromesh.base.files import free_path
from zeromesh.base.spans import clock_of
from zeromesh.comm.collectives import Group
from zeromesh.parallel.pipeline.schedule.actions import BACKWARDS, COMPUTE, MESSAGES, Kind, Schedule
from zeromesh.parallel.pipeline.schedule.execution import most_held_by_rank, received_by
from zeromesh.parallel.pipeline.schedule.picture import Panel, svg, trace
from zeromesh.parallel.pipeline.schedule.schedule_files import with_costs
from zeromesh.parallel.pipeline.schedule.simulate import Costs, TimedAction, Timeline, simulate

RENDEZVOUS = 5  # moments at which clocks of nodes are compared; the median leaves out ranks that came late


class Recorder:
    """Times of one rank's actions; ``held`` is the most micro-batches whose activations it had at once."""

    def __init__(self, device: torch.device) -> None:
        # On an accelerator, times are those of its stream: nothing waits for the device while the update runs.
        self._clock = clock_of(device)
        self._origin = self._clock.mark()
        self._clock.settle(self._origin)
        self._moment = time.perf_counter()
        self._arrived = self._origin
        self._marks: list[tuple[object, object, object]] = []
        self.held = 0

    @contextmanager
    def doing(self) -> Iterator[None]:
        """Note the times of the rank's next action, which is done in this context."""
        begin = self._arrived = self._clock.mark()
        yield
        self._marks.append((begin, self._arrived, self._clock.mark()))

    def arrived(self) -> None:
        """Note that the action no longer waits."""
        self._arrived = self._clock.mark()

    def holds(self, count: int) -> None:
        """Note how many micro-batches' activations the stages of the rank hold together."""
        self.held = max(self.held, count)

    def times(self) -> list[list[float]]:
        """Return when each action's turn came, when it stopped waiting, and when it ended, by the host's clock."""
        if self._marks:
            self._clock.settle(self._marks[-1][-1])
        return [[self._moment + self._clock.seconds(self._origin, mark) for mark in marks] for marks in self._marks]


@dataclass(frozen=True)
class Recorded:
    """One run of a schedule."""

    measured: Timeline  # times of actions, in seconds from the first computation, without the waits before them
    waits: tuple[tuple[TimedAction, ...], ...]  # computations of each rank that waited, and when
    held: tuple[int, ...]  # the most micro-batches whose activations each rank had at once

    @cached_property
    def costs(self) -> Costs:
        """Return the median time of each stage's actions of each kind, and of a message that was waited for."""
        durations: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for steps in self.measured.ranks:
            for step in steps:
                durations[step.action.kind, step.action.stage].append(step.end - step.start)
        stages = range(self.measured.schedule.stages)
        forward, inputs, weight, both = (
            [median(durations.get((kind, stage), [0.0])) for stage in stages]
            for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT, Kind.BACKWARD)
        )
        if not any(kind is Kind.BACKWARD for kind, _ in durations):
            return Costs(forward, inputs, weight, latency=self._message())
        for stage in stages:
            # Where both gradients are computed at once, each is taken for half of that: nothing tells them apart.
            if (Kind.INPUT, stage) in durations:
                both[stage] = inputs[stage] + weight[stage]
            else:
                inputs[stage] = weight[stage] = both[stage] / 2
        return Costs(forward, inputs, weight, both, latency=self._message())

    def _message(self) -> float:
        """Return the median time from the begin of a send until a waiting rank went on; 0 if none ever waited."""
        waits = {step.action: step for steps in self.waits for step in steps}
        delays = []
        for send in (step for steps in self.measured.ranks for step in steps if step.action.kind in MESSAGES):
            receive = received_by(send.action)
            for kind in (Kind.FORWARD,) if receive.kind is Kind.RECEIVE_ACTIVATION else BACKWARDS:
                wait = waits.get(receive._replace(kind=kind))
                # A message that was sent before its receiver waited has arrived at an unknown time.
                if wait is not None and wait.start <= send.start:
                    delays.append(wait.end - send.start)
        return median(delays) if delays else 0.0

    @cached_property
    def predicted(self) -> Timeline:
        """Simulate the same schedule with the measured ``costs``."""
        return simulate(self.measured.schedule, self.costs)

    def panels(self) -> list[Panel]:
        """Return the predicted and the measured timeline for a picture."""
        most = tuple(int(count) for count in most_held_by_rank(self.measured.schedule))
        return [
            Panel(
                timeline,
                f"{name}: {1e3 * timeline.makespan:.1f} ms, bubble {timeline.bubble:.1%}",
                [f"{bubble:.1%}, {count} held" for bubble, count in zip(timeline.bubbles, counts, strict=True)],
            )
            for name, timeline, counts in (("predicted", self.predicted, most), ("measured", self.measured, self.held))
        ]

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write a picture, and a trace for Perfetto with the costs in it; older files stay. Return the files."""
        folder.mkdir(parents=True, exist_ok=True)
        picture, spans = (free_path(folder / f"{name}{ending}") for ending in (".svg", ".json"))
        title = name.replace("_", " ")
        picture.write_text(svg(self.panels(), title, is_seconds=True), encoding="utf-8")
        timelines = {"predicted": self.predicted, "measured": self.measured}
        processes = {name: [step for row in each.ranks for step in row] for name, each in timelines.items()}
        waits = {"measured": [step for row in self.waits for step in row]}
        spans.write_text(json.dumps(with_costs(trace(processes, waits), self.costs)), encoding="utf-8")
        return [picture, spans]


def gather(recorder: Recorder, group: Group, nodes: Sequence[int], schedule: Schedule) -> Recorded:
    """Gather the records of all ranks of a pipeline, whose nodes are ``nodes``. Collective."""
    # Ranks of one node have one clock. Those of other nodes are put beside them by moments at which all have met.
    moments = []
    for _ in range(RENDEZVOUS):
        group.exchange(torch.zeros(1, dtype=torch.float64))
        moments.append(time.perf_counter())
    times = recorder.times()
    longest = max(map(len, schedule.ranks))
    local_record = torch.zeros(RENDEZVOUS + 1 + 3 * longest, dtype=torch.float64)
    flat = [value for row in times for value in row]
    local_record[: RENDEZVOUS + 1 + len(flat)] = torch.tensor([*moments, recorder.held, *flat], dtype=torch.float64)
    rows = group.exchange(local_record).tolist()
    first: dict[int, list[float]] = {}
    rank_rows = []
    for rank, row in enumerate(rows):
        met = first.setdefault(nodes[rank], row[:RENDEZVOUS])  # by the first rank of the node
        behind = median(moment - other for moment, other in zip(met, rows[0][:RENDEZVOUS], strict=True))
        values = [value - behind for value in row[RENDEZVOUS + 1 :]]
        rank_rows.append([(action, values[3 * at : 3 * at + 3]) for at, action in enumerate(schedule.ranks[rank])])
    # The first computation begins the time; what its rank waited before that is no wait.
    zero = min(row[1] for pairs in rank_rows for action, row in pairs if action.kind in COMPUTE)
    steps, waits = [], []
    for rank, pairs in enumerate(rank_rows):
        moved = [(action, *(max(value - zero, 0.0) for value in row)) for action, row in pairs]
        steps.append(tuple(TimedAction(rank, action, start, end) for action, _, start, end in moved))
        waits.append(tuple(TimedAction(rank, action, turn, start) for action, turn, start, _ in moved if start > turn))
    counts = tuple(int(row[RENDEZVOUS]) for row in rows)
    return Recorded(Timeline(schedule, tuple(steps)), tuple(waits), counts)
