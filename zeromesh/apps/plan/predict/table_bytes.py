"""Embedding tables and resting experts, whose rows are spread over the ranks: bytes in memory, and on the wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import TableCost
from zeromesh.apps.plan.machine.cluster import Node
from zeromesh.base.placement import Tier
from zeromesh.shard.sizes import TableLayout, TableShape, add_size, table_sizes

INDEX = 8  # bytes of a row number in a message


class TableBytes(NamedTuple):
    """Bytes that a rank sends in an update, where indices are drawn evenly from all rows."""

    indices: float = 0.0  # row numbers, of lookups and of gradients
    rows: float = 0.0
    gradients: float = 0.0
    copies: float = 0.0  # row numbers and gradients that go to replicas


def ranks_of(layout: ParallelLayout) -> int:
    """Return the number of ranks over which rows are spread."""
    return layout.data * layout.context


def _number(layout: ParallelLayout) -> int:
    """Return the bytes of a number of a row at rest."""
    return layout.widths.master or layout.widths.parameter


def table_states(
    tables: Iterable[TableCost], layout: ParallelLayout, processor: bool = False
) -> dict[tuple[str, str], float]:
    """Return the bytes of a rank's rows, states and cache; see ``table_sizes``."""
    resting: dict[tuple[str, str], float] = {}
    for table in tables:
        shape = TableShape(table.rows, table.width, used(table, layout.accumulation), table.frozen)
        placed = placed_of(table, layout)
        for key, size in table_sizes([shape], placed, ranks_of(layout), _number(layout), processor).items():
            resting[key] = resting.get(key, 0.0) + size
        if table.experts:  # sums of micro-batches and of ranks are in fp32
            rows = max(used(table, layout.accumulation), updated(table, layout))
            add_size(resting, "gradient", Tier.HOST, rows * table.width * max(4, layout.widths.wire))
    return resting


def placed_of(table: TableCost, layout: ParallelLayout) -> TableLayout:
    """Return where a table rests."""
    return layout.resting if table.experts and layout.resting is not None else layout.tables


def row_gradients(table: TableCost, layout: ParallelLayout) -> float:
    """Return the bytes of the gradients of rows that a rank keeps on the device until the update."""
    return 0.0 if table.experts else used(table) * table.width * layout.accumulation * layout.widths.wire


def fetched_ahead(tables: Iterable[TableCost], layout: ParallelLayout) -> float:
    """Return the bytes of a layer's experts that are on the device before the layer is called."""
    return sum(used(table) * fetched_width(table, layout) for table in tables if table.experts)


def fetched_width(table: TableCost, layout: ParallelLayout) -> float:
    """Return the bytes of a row as it is computed with."""
    return table.width * layout.widths.parameter + table.frozen


def used(table: TableCost, times: float = 1.0) -> float:
    """Return the most rows that ``times`` micro-batches of one rank use."""
    return min(table.rows, table.lookups * times)


def lookup_bytes(table: TableCost, layout: ParallelLayout) -> TableBytes:
    """Return what a rank sends for the lookups of one micro-batch."""
    away = used(table) * (1 - 1 / ranks_of(layout))
    return TableBytes(INDEX * away, rows=away * fetched_width(table, layout))


def gradient_messages(table: TableCost, layout: ParallelLayout) -> TableBytes:
    """Return what a rank sends of the gradients of an update."""
    ranks, width = ranks_of(layout), table.width
    rows = used(table, layout.accumulation)
    away = rows * (1 - 1 / ranks)
    summed = min(table.rows, rows * ranks) / ranks
    size = max(layout.widths.wire, 4)  # sums are in fp32 at least
    copies = (layout.replicate - 1) * summed * (INDEX + width * size)
    return TableBytes(INDEX * away, 0.0, away * width * layout.widths.wire, copies)


def moved_by_update(table: TableCost, layout: ParallelLayout) -> float:
    """Return the bytes that a rank's update of a table reads and writes."""
    placed = placed_of(table, layout)
    states = placed.states * table.width + placed.states_of_row
    gradients = 2 if table.experts else 1  # those of experts are written to the host before they are read
    return updated(table, layout) * ((2 + gradients) * table.width + 2 * states) * _number(layout)


def updated(table: TableCost, layout: ParallelLayout) -> float:
    """Return the rows here that an update changes."""
    ranks = ranks_of(layout)
    return min(table.rows, used(table, layout.accumulation) * ranks * layout.replicate) / ranks


class ExpertTraffic(NamedTuple):
    """Bytes that one rank moves for experts that rest."""

    link: float = 0.0  # between host and device
    host: float = 0.0  # read and written in host memory
    reads: float = 0.0  # of files
    writes: float = 0.0

    def plus(self, other: ExpertTraffic, times: float = 1.0) -> ExpertTraffic:
        """Return the sum with a multiple of the other."""
        return ExpertTraffic(*(a + times * b for a, b in zip(self, other, strict=True)))

    def seconds(self, node: Node, sharing: int) -> tuple[float, float, float]:
        """Return the seconds of the host, the link, and the disk; ``sharing`` ranks share host and disk."""
        disk = disk_seconds(node.disk_read, self.reads, node.name)
        disk += disk_seconds(node.disk_write or node.disk_read, self.writes, node.name)
        return self.host * sharing / node.host_bandwidth, self.link / node.host.bandwidth, sharing * disk


def disk_seconds(speed: float, size: float, node: str) -> float:
    """Return the seconds in which a disk reads or writes so many bytes; raise ValueError if there is none."""
    if size and speed <= 0:
        raise ValueError(f"a state rests on NVMe, but node {node or 'of the machine'!r} has no disk; set its disk_read")
    return size / speed if size else 0.0


def expert_traffic(table: TableCost, layout: ParallelLayout) -> tuple[ExpertTraffic, ExpertTraffic]:
    """Return what a rank moves in each fetch of a layer's experts, and in an update of them."""
    placed, number = placed_of(table, layout), _number(layout)
    rows, changed = used(table), updated(table, layout)
    sent, at_rest = fetched_width(table, layout), table.width * number + table.frozen
    # Share of rows that are not in slots.
    away = max(0.0, 1 - (placed.cached or 0) * ranks_of(layout) / table.rows) if placed.tier is Tier.NVME else 0.0
    states, landed = (1 + placed.states) * table.width * number, rows * table.width * layout.widths.parameter
    return (
        ExpertTraffic(rows * sent, rows * (at_rest + sent), away * rows * at_rest),
        ExpertTraffic(layout.accumulation * landed, moved_by_update(table, layout), *[away * changed * states] * 2),
    )
