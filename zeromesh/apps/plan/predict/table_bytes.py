"""Embedding tables whose rows are spread over the ranks: bytes in memory, and on the wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import TableCost
from zeromesh.shard.sizes import TableShape, table_sizes

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
    shapes = [TableShape(table.rows, table.width, used(table, layout.accumulation)) for table in tables]
    return table_sizes(shapes, layout.tables, ranks_of(layout), _number(layout), processor)


def used(table: TableCost, times: float = 1.0) -> float:
    """Return the most rows that ``times`` micro-batches of one rank use."""
    return min(table.rows, table.lookups * times)


def lookup_bytes(table: TableCost, layout: ParallelLayout) -> TableBytes:
    """Return what a rank sends for the lookups of one micro-batch."""
    away = used(table) * (1 - 1 / ranks_of(layout))
    return TableBytes(INDEX * away, rows=away * table.width * layout.widths.parameter)


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
    ranks, placed = ranks_of(layout), layout.tables
    rows = min(table.rows, used(table, layout.accumulation) * ranks * layout.replicate) / ranks
    states = placed.states * table.width + placed.states_of_row
    return rows * (3 * table.width + 2 * states) * _number(layout)
