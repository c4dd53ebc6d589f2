"""Bytes of a rank's model states by state and tier, from the elements of its units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from zeromesh.model.placement import Placement, PlacementRow, Tier
from zeromesh.plan.conventions import Convention
from zeromesh.plan.layout import ParallelLayout, Widths

ALIGNMENT = 64  # bytes at which parameters and shards of the engine begin
FILE_ALIGNMENT = 4096  # bytes of a block of a file
STATE_BUFFERS, PARAMETER_BUFFERS = 4, 5  # units in host memory at a time of those that rest in files


@dataclass
class RankStates:
    """States of one rank: what rests, and the buffers that come and go on its device."""

    resting: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))  # by state and tier
    gathered: float = 0.0  # slots of gathered units, the whole step
    # Buffers for whole gradients, their sums and what is sent; from the first backward on.
    working: float = 0.0
    shards: tuple[float, ...] = ()  # gradient on the device of each unit, where it grows during the first backward

    def add(self, state: str, tier: Tier, size: float) -> None:
        """Count bytes that rest."""
        if size:
            self.resting[state, tier.value] += size


def shards_of(layout: ParallelLayout, convention: Convention) -> int:
    """Return the number of ranks that states are sharded over."""
    return layout.data * (layout.context if convention.context_shards else 1)


def states_of(units: Sequence[float], layout: ParallelLayout, convention: Convention) -> RankStates:
    """Return the states of a rank whose units have so many elements each, the one outside of blocks first."""
    if convention.engine:
        return _engine_states(units, layout)
    row, widths, ranks = layout.row, convention.widths, shards_of(layout, convention)
    found, total = RankStates(), sum(units)
    share = {Placement.SHARDED: 1 / ranks, Placement.REPLICATED: 1.0}
    sharded = row.parameter is Placement.SHARDED
    if not (sharded and convention.in_master):
        found.add("parameter", row.parameter_tier, total * widths.parameter * share[row.parameter])
    gradients = total * widths.gradient * share[row.gradient]
    found.add("gradient", row.gradient_tier, gradients)
    tier = row.optimizer_tier
    found.add("optimizer", tier, total * (widths.master + widths.states) * share[row.optimizer])
    if sharded:
        found.gathered = (sum(_largest(units[1:], convention.gathered)) + units[0]) * widths.parameter
        if not convention.gathered:
            found.gathered = 0.0
    return found


def _largest(sizes: Sequence[float], count: int) -> list[float]:
    return sorted(sizes, reverse=True)[:count]


def _rows(units: Sequence[float], row: PlacementRow) -> list[PlacementRow]:
    """Return the row of each unit; the first ones stay on the device where a share is offloaded."""
    rows, stays = [], (1 - row.offloaded) * sum(units)
    for size in units:
        rows.append(row.on_device if size <= stays else row)
        stays -= size if size <= stays else 0
    return rows


def _pad(elements: float, width: int, ranks: int) -> float:
    multiple = max(1, ALIGNMENT // width) * ranks
    return ceil(elements / multiple) * multiple


def _engine_states(units: Sequence[float], layout: ParallelLayout) -> RankStates:
    """Return the states as the engine keeps them; the same arithmetic as in ``zeromesh.shard``."""
    row, widths, ranks = layout.row, layout.widths, layout.data * layout.context
    sizes = [_pad(size, widths.parameter, ranks) if size else 0.0 for size in units]
    found = RankStates()
    sharded = row.parameter is Placement.SHARDED
    stored: list[float] = []  # bytes of units in files: states, and parameters
    files: list[float] = []
    for size, whole, own_row in zip(sizes, units, _rows(units, row), strict=True):
        if size:
            _place(found, size, whole / ranks if row.optimizer is Placement.SHARDED else whole, own_row, widths, ranks,
                   (files, stored))  # fmt: skip
    _place_gradients(found, [size for size in sizes if size], _rows(units, row), layout, ranks)
    for blocks, buffers in ((files, STATE_BUFFERS), (stored, PARAMETER_BUFFERS)):
        found.add("slot", Tier.HOST, sum(_largest(blocks, buffers)))
    if sharded:
        found.gathered = sum(_largest(sizes[1:], layout.parameter_slots)) * widths.parameter
        found.gathered += sizes[0] * widths.parameter
    return found


def _place(
    found: RankStates, size: float, elements: float, row: PlacementRow, widths: Widths, ranks: int,
    files: tuple[list[float], list[float]],
) -> None:  # fmt: skip
    """Count parameters, master and states of one unit; ``elements`` are its own without padding."""
    sharded = row.parameter is Placement.SHARDED
    own = size / ranks if row.optimizer is Placement.SHARDED else size
    master = widths.master or widths.parameter
    apart = row.parameter_tier is Tier.NVME or row.optimizer_tier is not row.parameter_tier
    rest = widths.parameter
    if sharded:
        # On the device parameters rest in their masters, and are converted as they are gathered.
        if not apart and row.parameter_tier is Tier.DEVICE:
            rest = master
        state = "parameter" if rest == widths.parameter else "optimizer"
        bytes_at_rest = size / ranks * rest
        if row.parameter_tier is Tier.NVME:
            bytes_at_rest = ceil(bytes_at_rest / FILE_ALIGNMENT) * FILE_ALIGNMENT
            files[1].append(bytes_at_rest)
        found.add(state, row.parameter_tier, bytes_at_rest)
    else:
        found.add("parameter", Tier.DEVICE, size * rest)
    split = row.split and row.optimizer_tier is not Tier.DEVICE and widths.master == 2 * widths.parameter
    kept = widths.parameter if split else master
    if row.optimizer_tier is Tier.NVME:
        block = own * (kept + widths.states)
        files[0].append(ceil(block / FILE_ALIGNMENT) * FILE_ALIGNMENT)
        found.add("optimizer", Tier.NVME, files[0][-1])
        return
    if apart or rest != master:
        found.add("optimizer", row.optimizer_tier, own * kept)
    # States have no padding, unless they lie in a block with their masters.
    found.add("optimizer", row.optimizer_tier, (own if split else elements) * widths.states)


def _place_gradients(
    found: RankStates, sizes: Sequence[float], rows: Sequence[PlacementRow], layout: ParallelLayout, ranks: int
) -> None:
    row, widths, accumulates = layout.row, layout.widths, layout.accumulation > 1
    sharded, owned = row.gradient is Placement.SHARDED, row.optimizer is Placement.SHARDED
    # What is reduced at once is as narrow as what is sent; sums of micro-batches are as wide as those in the shards.
    width = widths.wire if owned and (sharded or not accumulates) else widths.gradient
    alone = ranks * layout.replicate == 1 and not accumulates
    shards = []
    for size, own_row in zip(sizes, rows, strict=False):
        tier, own = own_row.gradient_tier, size / ranks if owned else size
        in_full = tier is Tier.DEVICE and width == widths.gradient and not sharded
        kept = width if tier is not Tier.DEVICE and alone and width <= widths.gradient else widths.gradient
        if not in_full:
            found.add("gradient", tier, own * kept)
        shards.append(own * kept if not in_full and tier is Tier.DEVICE else 0.0)
    count = layout.gradient_slots if sharded else len(sizes)
    limit = max(1, min(2, count - 1))  # reductions under way at a time
    full = sum(_largest(sizes, count)) * width
    if not sharded:
        found.add("gradient", Tier.DEVICE, full)
    others = 0.0
    if ranks > 1:
        sends = limit if owned else limit + 1
        others += sum(_largest(sizes, sends)) * widths.wire if width != widths.wire else 0.0
        others += sum(_largest(sizes, limit)) / ranks * widths.wire
        landing = [size / ranks * widths.gradient for size, one in zip(sizes, rows, strict=False)
                   if one.gradient_tier is not Tier.DEVICE]  # fmt: skip
        others += sum(_largest(landing, limit))
    found.working = (full if sharded else 0.0) + others
    # Where parameters are sharded, gradients give their memory back after each update.
    if row.parameter is Placement.SHARDED:
        found.shards = tuple(shards)
