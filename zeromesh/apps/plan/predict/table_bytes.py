"""Embedding tables and resting experts, whose rows are spread over the ranks: bytes in memory, and on the wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import TableCost
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


def used(table: TableCost, times: float = 1.0) -> float:
    """Return the most rows that ``times`` micro-batches of one rank use."""
    return min(table.rows, table.lookups * times)


def lookup_bytes(table: TableCost, layout: ParallelLayout) -> TableBytes:
    """Return what a rank sends for the lookups of one micro-batch."""
    away = used(table) * (1 - 1 / ranks_of(layout))
    return TableBytes(INDEX * away, rows=away * (table.width * layout.widths.parameter + table.frozen))


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

    link: float = 0.0  # to the device in a forward, or again in a backward
    fetched: float = 0.0  # read and written in host memory for it
    landed: float = 0.0  # gradients of an update on their way to the host
    host: float = 0.0  # read and written in host memory by an update
    fetch_reads: float = 0.0  # of files, in a forward
    reads: float = 0.0  # of files, in an update
    writes: float = 0.0

    def plus(self, other: ExpertTraffic) -> ExpertTraffic:
        """Return the sum."""
        return ExpertTraffic(*(a + b for a, b in zip(self, other, strict=True)))


def expert_traffic(table: TableCost, layout: ParallelLayout) -> ExpertTraffic:
    """Return what a rank moves for the experts of one layer."""
    placed, number, ranks = placed_of(table, layout), _number(layout), ranks_of(layout)
    rows, changed = used(table), updated(table, layout)
    row_sent, row_at_rest = (table.width * width + table.frozen for width in (layout.widths.parameter, number))
    away = 0.0  # share of rows that are not in slots
    if placed.tier is Tier.NVME:
        away = max(0.0, 1 - (placed.cached or 0) * ranks / table.rows)
    states = (1 + placed.states) * table.width * number
    return ExpertTraffic(
        link=rows * row_sent,
        fetched=rows * (row_at_rest + row_sent),
        landed=changed * table.width * max(4, layout.widths.wire),
        host=moved_by_update(table, layout),
        fetch_reads=away * rows * row_at_rest,
        reads=away * changed * states,
        writes=away * changed * states,
    )
