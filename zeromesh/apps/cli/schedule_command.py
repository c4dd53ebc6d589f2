"""``zeromesh schedule``: draw, time and check a pipeline's schedule without running it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from zeromesh.apps.train.screen import write
from zeromesh.base.words import counted
from zeromesh.parallel.pipeline.schedule import picture
from zeromesh.parallel.pipeline.schedule.actions import LAST, Schedule, ScheduleError
from zeromesh.parallel.pipeline.schedule.execution import execute, most_held_by_rank, most_held_by_stage
from zeromesh.parallel.pipeline.schedule.generators import ROWS, SEARCH, Shape, generate, shape_of
from zeromesh.parallel.pipeline.schedule.lowering import add_messages
from zeromesh.parallel.pipeline.schedule.schedule_files import read_costs, read_schedule
from zeromesh.parallel.pipeline.schedule.simulate import Costs, Timeline, simulate
from zeromesh.parallel.pipeline.schedule.validate import validate


class ScheduleFiles(NamedTuple):
    """Files to write; None: it is not written."""

    svg: Path | None = None
    trace: Path | None = None
    text: Path | None = None


def show_names() -> None:
    """Print a line for each schedule."""
    lines = [f"{name:<18}{row.text}; bubble {row.formula}" for name, row in ROWS.items()]
    write("\n".join([*lines, f"{SEARCH:<18}the shortest that is found for given costs and memory"]) + "\n")


def costs_of(text: str | None) -> Costs:
    """Return the costs in ``F,I,W`` or ``F,I,W,MESSAGE``, or those that were measured, in a file."""
    if text is None:
        return Costs()
    if text.endswith(".json"):
        return read_costs(Path(text))
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (3, 4) or not all(0 <= value < float("inf") for value in values):
        rule = "it must be F,I,W or F,I,W,MESSAGE, as in 1,1.2,0.8, or a JSON file that pipeline.record wrote"
        raise ValueError(f"--costs is {text!r}; {rule}")
    return Costs(values[0], values[1], values[2], latency=values[3] if len(values) == 4 else 0.0)


def show(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int | None,
    group: int | None,
    costs: Costs,
    memory: float | None,
    files: ScheduleFiles,
    as_json: bool = False,
) -> None:
    """Make a schedule, check it, and print its grid, its bubble and the micro-batches that ranks hold."""
    chunks = ROWS[name].chunks[0] if chunks is None and name in ROWS else chunks or 1
    ranks, rest = divmod(stages, chunks)
    if rest:
        raise ValueError(f"{stages} stages cannot be {chunks} on each rank, as for {name}; take a multiple of {chunks}")
    shape = shape_of(name, ranks, microbatches, chunks, group)
    schedule = generate(name, ranks, microbatches, chunks, group, costs, memory)
    validate(schedule, memory, costs)
    timeline = simulate(schedule, costs)
    if as_json:
        counts = {"stages": stages, "ranks": ranks, "microbatches": microbatches}
        times = {"time": timeline.makespan, "bubble": timeline.bubble}
        answer = {"name": name, **counts, **times, "most_held": most_held_by_rank(schedule)}
        write(json.dumps(answer, indent=1) + "\n")
    else:
        write(picture.grid(timeline, shutil.get_terminal_size().columns) + "\n")
        write(f"time    {timeline.makespan:g}\nbubble  {timeline.bubble:.2%}{_formula(name, shape)}\n")
        write(_held(schedule))
    sizes = (counted(stages, "stage"), counted(ranks, "rank"), counted(microbatches, "micro-batch"))
    _write(files, timeline, f"{name}: {', '.join(sizes)}")


def check(file: Path) -> None:
    """Check the schedule in a file, for training, or for evaluation if it has forwards only."""
    schedule = read_schedule(file)
    training = any(kind in LAST for kind, _, _ in schedule.present)
    validate(schedule, training=training)
    stages, ranks = counted(schedule.stages, "stage"), counted(len(schedule.ranks), "rank")
    write(f"valid: {stages} on {ranks}, {counted(schedule.microbatches, 'micro-batch')}\n")
    # A backend may let a send wait for its receive, and a schedule that passes otherwise may then stand still.
    try:
        execute(schedule, rendezvous=True)
    except ScheduleError as error:
        write(f"it needs sends that do not wait for their receives; if they wait:\n{error}\n")
    if training:
        write(_held(schedule))


def _formula(name: str, shape: Shape) -> str:
    if name == SEARCH:
        return ""
    row = ROWS[name]
    least = row.full(shape)
    limits = f", for {least} micro-batches or more" if shape.microbatches < least else ""
    return f"; {row.formula} = {float(row.bubble(shape)):.2%} with equal costs and no messages{limits}"


def _held(schedule: Schedule) -> str:
    stages, ranks = most_held_by_stage(schedule), most_held_by_rank(schedule)
    lines = ["largest number of micro-batches held"]
    for rank, most in enumerate(ranks):
        by_stage = ", ".join(f"stage {stage}: {stages[stage]}" for stage in schedule.of_rank(rank))
        lines.append(f"  rank {rank}: {most:g}  ({by_stage})")
    return "\n".join(lines) + "\n"


def _write(files: ScheduleFiles, timeline: Timeline, title: str) -> None:
    if files.text:
        files.text.write_text(f"# {title}\n{add_messages(timeline.schedule)}", encoding="utf-8")
    if files.svg:
        files.svg.write_text(picture.svg([picture.Panel(timeline)], title), encoding="utf-8")
    if files.trace:
        steps = [step for row in timeline.ranks for step in row]
        files.trace.write_text(json.dumps(picture.trace({"predicted": steps})), encoding="utf-8")
