"""Schedules of pipelines as they run, beside their formulas and the simulator:

    python benchmarks/pipeline_bubble.py --ranks 2 4 --microbatches 4 8 16

Stages are processes that sleep for set times in forwards, input gradients and weight gradients, and send each other
real messages. So few cores are enough for many stages, and what the times should be is known. Compared are the bubble
with the formulas of docs/pipeline.md, the most micro-batches whose graphs a rank has at once with the numbers there,
and the time of a step with what the simulator makes of the measured costs, of equal stages and of unequal ones.
The figures go to a JSON file, a page and a picture. The exit status is 1 where an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from bench import ROOT, commit, free_name, machine, positive
from page import lines_of, link
from zeromesh.apps.launch.launch import launch
from zeromesh.comm.environment import init_distributed, shutdown
from zeromesh.comm.mesh import Mesh
from zeromesh.parallel.pipeline.runtime.interpreter import Interpreter, Messages
from zeromesh.parallel.pipeline.runtime.record import Recorded, Recorder, gather
from zeromesh.parallel.pipeline.runtime.stage import Stages
from zeromesh.parallel.pipeline.runtime.weight_gradients import Kept
from zeromesh.parallel.pipeline.schedule.actions import Schedule
from zeromesh.parallel.pipeline.schedule.execution import most_held_by_rank
from zeromesh.parallel.pipeline.schedule.generators import ROWS, SEARCH, Shape, generate
from zeromesh.parallel.pipeline.schedule.lowering import add_messages
from zeromesh.parallel.pipeline.schedule.picture import Panel, svg
from zeromesh.parallel.pipeline.schedule.simulate import simulate

BUBBLE, STEP = 0.03, 0.05
"""Aims: so much may a bubble differ from its formula, and the time of a step, in parts of it, from the simulator's."""

UNEQUAL = (1.0, 1.5, 0.6, 1.2)
"""Times of the stages, in turn, in parts of the usual one."""

SHOWN = ("1f1b", "zb-h1", "zb-v")
"""These are in the picture, with the most ranks and the micro-batches next to 8."""


@dataclass(frozen=True)
class Run:
    """What is measured: a schedule, and whether the stages' times differ."""

    name: str
    ranks: int
    microbatches: int
    equal: bool = True

    @property
    def shape(self) -> Shape:
        """What the schedule is for; with the fewest stages per rank."""
        chunks = 1 if self.name == SEARCH else ROWS[self.name].chunks[0]
        return Shape(self.ranks, self.microbatches, chunks, self.ranks)

    def schedule(self) -> Schedule:
        """With messages."""
        return add_messages(generate(self.name, self.ranks, self.microbatches, self.shape.chunks))

    def formula(self) -> float | None:
        """The bubble that docs/pipeline.md names for equal stages."""
        shape = self.shape
        if not self.equal or self.name == SEARCH:
            return None
        if self.name == "zb-v" and self.microbatches < 2 * self.ranks - 1:
            return (2 * self.ranks - 1 - self.microbatches) / (3 * shape.chunks * self.microbatches)
        return float(ROWS[self.name].bubble(shape))

    def held(self) -> list[int]:
        """The most micro-batches of each rank, as docs/pipeline.md says."""
        if self.name == SEARCH:
            return [int(most) for most in most_held_by_rank(self.schedule())]
        return [ROWS[self.name].held(self.shape, rank) for rank in range(self.ranks)]


class Graph:
    """Is there as long as autograd has a computation's graph."""

    alive = most = 0

    def __init__(self) -> None:
        Graph.alive += 1
        Graph.most = max(Graph.most, Graph.alive)

    def __del__(self) -> None:
        Graph.alive -= 1


class Sleep(torch.autograd.Function):
    """Its input, after a while, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, graph: Graph | None, seconds: float) -> Tensor:
        """Sleep once."""
        ctx.graph, ctx.seconds = graph, seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        """The gradient of the input; those of weights are slept for elsewhere."""
        time.sleep(ctx.seconds)
        return gradient, None, None, None


class Block(nn.Module):
    """A stage."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seconds = 0.0
        self.graph: Graph | None = None

    def forward(self, x: Tensor) -> Tensor:
        graph, self.graph = self.graph, None
        found: Tensor = Sleep.apply(x, self.weight, graph, self.seconds)  # type: ignore[no-untyped-call]
        return found


class Work(nn.Module):
    """Stages that sleep, and what the interpreter asks of them.

    Args:
        times: seconds of each stage's forward, input gradient and weight gradient.
    """

    def __init__(self, times: Sequence[float]) -> None:
        super().__init__()
        self.times = list(times)
        self.stages = tuple(Block() for _ in times)  # in the list gates stand in their places while a stage runs
        self.blocks = nn.ModuleList(self.stages)

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        for block in self.blocks:
            x = block(x)
        return x.sum()

    def stage_loss(self, stage: int, batch: Tensor, kept: Kept | None, trains: bool) -> Tensor:
        """See ``zeromesh.parallel.pipeline.runtime.interpreter.Work``."""
        block = self.stages[stage]
        block.seconds, block.graph = self.times[stage], Graph()
        if kept is not None:
            kept.append(block.graph)  # type: ignore[arg-type]  # what a weight gradient needs lives until that is computed
        loss: Tensor = self(batch)
        return loss

    def stage_backward(
        self, stage: int, roots: Sequence[Tensor], gradients: Sequence[Tensor] | None, last: bool, kept: Kept | None
    ) -> None:
        """Sleeps for the weight gradient, too, unless that comes later."""
        torch.autograd.backward(roots, gradients)
        if kept is None:
            time.sleep(self.times[stage])

    def stage_weights(self, stage: int, kept: Kept, last: bool) -> None:
        """The weight gradient."""
        time.sleep(self.times[stage])


def measure(runs: Sequence[Run], seconds: float, rounds: int) -> list[tuple[list[Recorded], int]]:
    """On one rank: of each run what was recorded in each round, and the most graphs that this rank had at once."""
    torch.set_num_threads(1)
    size = init_distributed("gloo").world_size
    mesh = Mesh({"pipeline": size}, torch.device("cpu"))
    group, found = mesh.group("pipeline"), []
    for run in runs:
        schedule = run.schedule()
        work = Work([0.0] * schedule.stages)
        names = [f"blocks.{stage}" for stage in range(schedule.stages)]
        messages = Messages(group, schedule.placement, mesh.device)
        interpreter = Interpreter(Stages(work, names, range(schedule.stages)), messages, work)
        batches = [torch.ones(4, 4)] * run.microbatches
        signatures = [0] * run.microbatches

        interpreter.run(schedule, group.rank, batches, signatures)  # after it shapes are known
        assert Graph.alive == 0
        Graph.most = 0
        factors = [1.0 if run.equal else UNEQUAL[stage % len(UNEQUAL)] for stage in range(schedule.stages)]
        work.times = [seconds * factor for factor in factors]
        recorded = []
        for _ in range(rounds):
            group.exchange(torch.zeros(1))  # all begin together
            recorder = Recorder(mesh.device)
            interpreter.run(schedule, group.rank, batches, signatures, recorder)
            recorded.append(gather(recorder, group, mesh.node_of, schedule))
        found.append((recorded, Graph.most))
    shutdown()
    return found


def row_of(run: Run, recorded: Sequence[Recorded], held: Sequence[int]) -> dict[str, Any]:
    """The figures of a run, and which aims they miss."""
    formula = run.formula()
    if formula is None and run.equal:
        formula = simulate(run.schedule()).bubble
    measured = median(one.measured.bubble for one in recorded) if run.equal else None
    taken = median(one.measured.makespan for one in recorded)
    predicted = median(one.predicted.makespan for one in recorded)
    missed = []
    if formula is not None and measured is not None and abs(measured - formula) > BUBBLE:
        missed.append(f"the bubble differs by {abs(measured - formula):.3f}, more than {BUBBLE:g}")
    if abs(predicted / taken - 1) > STEP:
        missed.append(f"the step is predicted wrong by {predicted / taken - 1:.1%}, more than {STEP:.0%}")
    interpreter = [max(one.held[rank] for one in recorded) for rank in range(run.ranks)]
    for whose, counts in (("graphs", held), ("flights", interpreter)):
        if list(counts) != run.held():
            missed.append(f"{whose} held are {list(counts)} instead of {run.held()}")
    return {
        **asdict(run), "chunks": run.shape.chunks, "formula": formula, "bubble": measured, "seconds": taken,
        "predicted": predicted, "message": median(one.costs.latency for one in recorded), "held": list(held),
        "held_by_table": run.held(), "missed": missed,
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line per run."""
    lines = [
        ["schedule", "p", "m", "v", "stages", "bubble", "formula", "step, ms", "predicted, ms", "message, ms", "held"]
    ]
    for row in rows:
        mark = " **(not as it should be)**" if row["missed"] else ""
        shares = ["-" if row[key] is None else f"{row[key]:.1%}" for key in ("bubble", "formula")]
        times = [
            f"{1e3 * row['seconds']:.1f}",
            f"{1e3 * row['predicted']:.1f} ({row['predicted'] / row['seconds']:.3f})",
        ]
        lines.append([
            row["name"] + mark, str(row["ranks"]), str(row["microbatches"]), str(row["chunks"]),
            "equal" if row["equal"] else "unequal", *shares, *times, f"{1e3 * row['message']:.2f}",
            " ".join(map(str, row["held"])),
        ])  # fmt: skip
    return lines_of(lines)


def page(result: dict[str, Any]) -> str:
    """The page of a result."""
    missed = [f"- {row['name']}, p = {row['ranks']}, m = {row['microbatches']}: {why}"
              for row in result["rows"] for why in row["missed"]]  # fmt: skip
    parts = [
        f"# Idle time of pipelines, {result['date']}",
        f"""Commit {result["commit"]}; {result["machine"]}; torch {result["torch"]}, gloo. Made by
`python benchmarks/pipeline_bubble.py`; the figures are in [{result["name"]}.json]({result["name"]}.json).""",
        f"""Here stages do not compute but sleep: {1e3 * result["seconds"]:g} ms for a forward, an input gradient and a
weight gradient each, and twice as long for a whole backward. Ranks are processes that run the schedules with real
messages. Figures are medians of {result["rounds"]} round(s). *unequal* stages sleep
{", ".join(map(str, UNEQUAL))} times as long, in turn.""",
        f"""- *bubble*: the idle time of a rank between its first and its last computation, divided by its computing
  time, for the rank with the longest idle time. Target: within {BUBBLE:g} of the formula in
  [pipeline.md](../pipeline.md). For `search`, the formula is the simulator's bubble with equal costs.
- *predicted*: the step time that the simulator computes from measured costs. Target: within {STEP:.0%}.
- *held*: for each rank, the largest number of micro-batches whose graphs existed at a time, counted for each stage.
  Target: the number in the table of pipeline.md.""",
        "**All targets are met.**" if not missed else "**Missed:**\n\n" + "\n".join(missed),
        f"![Schedules, predicted and measured]({result['name']}.svg)",
        table(result["rows"]),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Measure all runs of as many ranks in the same processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=positive, nargs="+", default=[4, 8, 16])
    parser.add_argument("--schedules", nargs="+", choices=[*ROWS, SEARCH], default=[*ROWS, SEARCH], metavar="NAME")
    parser.add_argument("--milliseconds", type=positive, default=100, help="that each part of a stage takes")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder for page and figures")
    given = parser.parse_args()
    date, seconds = time.strftime("%Y-%m-%d"), given.milliseconds / 1000
    path = free_name(given.out, f"{date}-pipeline-bubble")
    middle = min(given.microbatches, key=lambda count: abs(count - 8))
    rows, drawn = [], []
    for ranks in given.ranks:
        runs = [Run(name, ranks, count) for name, count in product(given.schedules, given.microbatches)]
        runs += [Run(name, ranks, middle, equal=False) for name in given.schedules]
        found = launch(measure, ranks, runs, seconds, given.rounds)
        for number, run in enumerate(runs):
            recorded = found[0][number][0]
            rows.append(row_of(run, recorded, [of_rank[number][1] for of_rank in found]))
            if run == Run(run.name, max(given.ranks), middle) and run.name in SHOWN:
                each = sorted(recorded, key=lambda one: one.measured.makespan)[len(recorded) // 2]
                drawn += [Panel(p.timeline, f"{run.name}, {p.title}", p.notes) for p in each.panels()]
    result: dict[str, Any] = {
        "date": date, "name": path.stem, "commit": commit(), "machine": machine(), "torch": torch.__version__,
        "seconds": seconds, "rounds": given.rounds, "rows": rows,
    }  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".svg").write_text(svg(drawn, "Stages that sleep", is_seconds=True))
    target = path.with_suffix(".md")
    target.write_text(page(result))
    link(target, f"idle time of pipelines, compared with formulas and the simulator; {machine()}.")
    print(page(result))
    sys.exit(1 if any(row["missed"] for row in rows) else 0)


if __name__ == "__main__":
    main()
