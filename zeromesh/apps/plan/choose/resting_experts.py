"""Sentences of a plan about experts that rest: bytes at rest, what an update moves, and whether the disk is slow."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

from zeromesh.apps.plan.choose.certainty import seconds_text
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import CostSource
from zeromesh.apps.plan.cost.resting import FETCHED_AGAIN
from zeromesh.apps.plan.machine.cluster import Machine, Node
from zeromesh.apps.plan.predict.table_bytes import ExpertTraffic, expert_traffic, table_states
from zeromesh.apps.plan.predict.time import StepTime
from zeromesh.base.words import bytes_text, scaled_text


class RestingUpdate(NamedTuple):
    """Bytes that the experts of one rank take, and move in an update with all its micro-batches."""

    at_rest: float
    moved: ExpertTraffic  # of one fetch, and of the update
    fetches: int  # forwards and recomputations

    @property
    def host(self) -> float:
        """Bytes that are read and written in host memory."""
        return self.moved.host + self.fetches * self.moved.fetched

    @property
    def link(self) -> float:
        """Bytes between host and device."""
        return self.moved.landed + self.fetches * self.moved.link

    @property
    def reads(self) -> float:
        """Bytes that are read from files."""
        return self.moved.reads + self.fetches * self.moved.fetch_reads

    def host_seconds(self, node: Node, sharing: int) -> float:
        """Return the seconds of host memory and of the link."""
        return self.host * sharing / node.host_bandwidth + self.link / node.host.bandwidth

    def disk_seconds(self, node: Node, sharing: int) -> float:
        """Return the seconds of the disk; 0 where nothing is read."""
        if not self.reads:
            return 0.0
        return sharing * (self.reads / node.disk_read + self.moved.writes / (node.disk_write or node.disk_read))


def resting_update(source: CostSource, sequence: int, layout: ParallelLayout) -> RestingUpdate:
    """Return what the experts of one rank of a layout take and move."""
    units = source.at(layout.micro_batch, sequence, layout.context).units
    tables = [table for unit in units for table in unit.tables if table.experts]
    moved = reduce(ExpertTraffic.plus, (expert_traffic(table, layout) for table in tables), ExpertTraffic())
    fetches = layout.accumulation * (2 if layout.recompute in FETCHED_AGAIN else 1)
    at_rest = sum(
        size for (state, _), size in table_states(tables, layout).items() if state not in ("slot", "gradient")
    )
    return RestingUpdate(at_rest, moved, fetches)


def resting_text(
    source: CostSource, sequence: int, layout: ParallelLayout, machine: Machine, time: StepTime
) -> Iterator[str]:
    """Yield sentences about experts that rest; none where they do not."""
    if layout.resting is None:
        return
    update, node = resting_update(source, sequence, layout), machine.nodes[0][0]
    sharing = min(node.devices, layout.ranks)
    if not update.at_rest:
        return
    host, disk = update.host_seconds(node, sharing), update.disk_seconds(node, sharing)
    beside, tokens = max(0.0, time.seconds - host - disk), layout.samples * sequence
    where = "files" if layout.resting.tier.in_blocks else "host memory"
    said = f"{bytes_text(update.host)} in host memory and {bytes_text(update.link)} over the link, {seconds_text(host)}"
    if disk:
        said += f", and {bytes_text(update.reads)} from the disk and {bytes_text(update.moved.writes)} to it, "
        said += seconds_text(disk)
    yield (
        f"Experts of a rank take {bytes_text(update.at_rest)} of {where}. An update moves {said}; all else takes "
        f"{seconds_text(beside)}."
    )
    if beside and (needed := (host + disk) / beside) > 1:
        yield f"With about {scaled_text(needed * tokens)} tokens an update, in one micro-batch, both take as long."
    if beside and disk > beside:
        times = f"{disk / beside:.1f} times"
        yield (
            f"The disk is slow for this plan: {seconds_text(disk)} are {times} all else, at "
            f"{bytes_text(node.disk_read)}/s read and {bytes_text(node.disk_write or node.disk_read)}/s written. One "
            f"that is {times} as fast is enough, or {bytes_text(update.at_rest * sharing)} of host memory on each node "
            'with experts.rest = "cpu".'
        )
