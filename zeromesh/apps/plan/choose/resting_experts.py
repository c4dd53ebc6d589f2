"""Sentences of a plan about experts that rest: bytes at rest, what an update moves, and whether the disk is slow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zeromesh.apps.plan.choose.certainty import seconds_text
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import CostSource
from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.apps.plan.machine.rates import Habits
from zeromesh.apps.plan.predict.durations import Durations
from zeromesh.apps.plan.predict.table_bytes import ExpertTraffic, expert_traffic, table_states
from zeromesh.apps.plan.predict.time import StepTime
from zeromesh.base.words import bytes_text, scaled_text


class RestingUpdate(NamedTuple):
    """Bytes that the experts of one rank take, and what they move in an update with all its micro-batches."""

    at_rest: float
    moved: ExpertTraffic


def resting_update(source: CostSource, sequence: int, layout: ParallelLayout) -> RestingUpdate:
    """Return what the experts of one rank of a layout take and move."""
    units = source.at(layout.micro_batch, sequence, layout.context).units
    tables = [table for unit in units for table in unit.tables if table.experts]
    fetches, moved = layout.accumulation * (2 if layout.recompute.repeats else 1), ExpertTraffic()
    for table in tables:
        fetch, update = expert_traffic(table, layout)
        moved = moved.plus(update).plus(fetch, fetches)
    states = table_states(tables, layout).items()
    return RestingUpdate(sum(size for (state, _), size in states if state in ("parameter", "optimizer")), moved)


def resting_text(
    source: CostSource, sequence: int, layout: ParallelLayout, machine: Machine, time: StepTime
) -> Iterator[str]:
    """Yield sentences about experts that rest; none where they do not."""
    if layout.resting is None:
        return
    (at_rest, moved), node = resting_update(source, sequence, layout), machine.nodes[0][0]
    sharing, factor = min(node.devices, layout.ranks), time.calibration.factor
    *busy, disk = (factor * seconds for seconds in moved.seconds(node, sharing))
    host = max(busy)
    units = Durations(layout, machine, Habits()).units(source.at(layout.micro_batch, sequence, layout.context))
    waited = factor * layout.accumulation * sum(unit.rows + unit.rows_again for unit in units)
    beside, tokens = time.seconds - waited, layout.samples * sequence
    said = f"{bytes_text(moved.host)} in host memory and {bytes_text(moved.link)} over the link, {seconds_text(host)}"
    if disk:
        said += f", and {bytes_text(moved.reads)} from the disk and {bytes_text(moved.writes)} to it, "
        said += seconds_text(disk)
    where = "files" if layout.resting.tier.in_blocks else "host memory"
    yield (
        f"Experts of a rank take {bytes_text(at_rest)} of {where}. An update moves {said}; the step waits for "
        f"{seconds_text(waited)} of that, and all else takes {seconds_text(max(0.0, beside))}."
    )
    if 0 < beside < host + disk:
        most = scaled_text((host + disk) / beside * tokens)
        yield f"With about {most} tokens an update, in one micro-batch, both take as long."
    if 0 < beside < disk:
        times = f"{disk / beside:.1f} times"
        yield (
            f"The disk is slow for this plan: {seconds_text(disk)} are {times} all else, at "
            f"{bytes_text(node.disk_read)}/s read and {bytes_text(node.disk_write or node.disk_read)}/s written. One "
            f"that is {times} as fast is enough, or {bytes_text(at_rest * sharing)} of host memory on each node with "
            'experts.rest = "cpu".'
        )
