"""Bytes of a rank's model states by state and tier, from the elements of its units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from zeromesh.model.placement import Placement, PlacementRow, Tier
from zeromesh.plan.conventions import Convention
from zeromesh.plan.layout import ParallelLayout, Widths

ALIGNMENT = 64  # bytes at which parameters and shards of the engine begin
FILE_ALIGNMENT = 4096  # bytes of a block of a file
STATE_BUFFERS, PARAMETER_BUFFERS = 4, 5  # units in host memory at a time of those that rest in files


Resting = dict[tuple[str, str], float]  # bytes by state and tier


@dataclass(frozen=True)
class RankStates:
    """States of one rank: what rests, and the buffers that come and go on its device."""

    resting: Resting
    gathered: float = 0.0  # slots of gathered units, the whole step
    # Buffers for whole gradients, their sums and what is sent; from the first backward on.
    working: float = 0.0
    returned: bool = False  # gradients and these buffers have no memory from an update to the next backward


def _add(resting: Resting, state: str, tier: Tier, size: float) -> None:
    if size:
        resting[state, tier.value] = resting.get((state, tier.value), 0.0) + size


def shards_of(layout: ParallelLayout, convention: Convention) -> int:
    """Return the number of ranks that states are sharded over."""
    return layout.data * (layout.context if convention.context_shards else 1)


def states_of(units: Sequence[tuple[float, int]], layout: ParallelLayout, convention: Convention) -> RankStates:
    """Return a rank's states.

    Args:
        units: elements of each unit and the number of such units; the one outside of blocks is the first.
        layout: placement and widths.
        convention: what is kept.
    """
    if convention.engine:
        return _engine_states(units, layout)
    row, widths, ranks = layout.row, convention.widths, shards_of(layout, convention)
    resting: Resting = {}
    total = sum(size * count for size, count in units)
    share = {Placement.SHARDED: 1 / ranks, Placement.REPLICATED: 1.0}
    sharded = row.parameter is Placement.SHARDED
    if not (sharded and convention.in_master):
        _add(resting, "parameter", row.parameter_tier, total * widths.parameter * share[row.parameter])
    _add(resting, "gradient", row.gradient_tier, total * widths.gradient * share[row.gradient])
    _add(resting, "optimizer", row.optimizer_tier, total * (widths.master + widths.states) * share[row.optimizer])
    gathered, working = 0.0, convention.bucket * widths.wire
    if sharded and convention.whole_in_pipeline and layout.pipeline > 1:
        gathered = total
        _add(resting, "gradient", Tier.DEVICE, total * widths.gradient)
    elif sharded and convention.gathered:
        gathered = max(_largest(units[1:], convention.gathered) + units[0][0], min(total, convention.live))
    if sharded and convention.gathers_apart:
        working += max(units[0][0], _largest(units[1:], convention.gathered)) * widths.parameter
    return RankStates(resting, gathered * widths.parameter, working)


def _largest(sizes: Sequence[tuple[float, int]], count: int) -> float:
    """Return the sum of the ``count`` largest."""
    total = 0.0
    for size, number in sorted(sizes, reverse=True):
        total += size * min(number, count)
        count -= min(number, count)
    return total


def _rows(
    units: Sequence[tuple[float, int]], row: PlacementRow
) -> list[tuple[float, int, PlacementRow]]:  # fmt: skip
    """Return units with their rows; the first ones stay on the device where a share is offloaded."""
    stays = (1 - row.offloaded) * sum(size * count for size, count in units)
    found = []
    for size, count in units:
        if not size:
            continue
        here = min(count, int(stays // size + 1e-9)) if row.offloaded < 1 else 0
        stays -= here * size
        found += [(size, here, row.on_device)] * (here > 0) + [(size, count - here, row)] * (here < count)
    return found


def _pad(elements: float, width: int, ranks: int) -> float:
    multiple = max(1, ALIGNMENT // width) * ranks
    return ceil(elements / multiple) * multiple


def _engine_states(units: Sequence[tuple[float, int]], layout: ParallelLayout) -> RankStates:
    """Return the states as the engine keeps them; the same arithmetic as in ``zeromesh.shard``."""
    row, widths, ranks = layout.row, layout.widths, layout.data * layout.context
    resting: Resting = {}
    files: list[tuple[float, int]] = []  # bytes of units in files: states, and parameters
    stored: list[tuple[float, int]] = []
    placed = _rows(units, row)
    sizes = [(_pad(size, widths.parameter, ranks), count, own_row) for size, count, own_row in placed]
    for (whole, count, own_row), (size, _, _) in zip(placed, sizes, strict=True):
        own = whole / ranks if row.optimizer is Placement.SHARDED else whole
        for (state, tier), nbytes in _place(size, own, own_row, widths, ranks).items():
            _add(resting, state, Tier(tier), nbytes * count)
            if tier == Tier.NVME.value:
                (files if state == "optimizer" else stored).append((nbytes, count))
    if any(_splits(own_row, widths) for _, _, own_row in sizes):
        # One split master at a time is joined in memory of its own.
        _add(resting, "slot", Tier.HOST, max(size for size, _, _ in sizes) / ranks * widths.master)
    for blocks, buffers in ((files, STATE_BUFFERS), (stored, PARAMETER_BUFFERS)):
        _add(resting, "slot", Tier.HOST, _largest(blocks, buffers))
    gathered, sharded = 0.0, row.parameter is Placement.SHARDED
    if sharded:
        outside = _pad(units[0][0], widths.parameter, ranks) if units[0][0] else 0.0
        blocks = [(_pad(size, widths.parameter, ranks), count) for size, count in units[1:]]
        gathered = (_largest(blocks, layout.parameter_slots) + outside) * widths.parameter
    working = _place_gradients(resting, sizes, layout, ranks)
    # Where parameters are sharded, gradients give their memory back after each update.
    return RankStates(resting, gathered, working, returned=sharded)


def _place(size: float, elements: float, row: PlacementRow, widths: Widths, ranks: int) -> Resting:
    """Return parameters, master and states of one unit; ``elements`` are its own without padding."""
    found: Resting = {}
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
        _add(found, state, row.parameter_tier, bytes_at_rest)
    else:
        _add(found, "parameter", Tier.DEVICE, size * rest)
    split = _splits(row, widths)
    kept = widths.parameter if split else master
    if row.optimizer_tier is Tier.NVME:
        block = own * (kept + widths.states)
        _add(found, "optimizer", Tier.NVME, ceil(block / FILE_ALIGNMENT) * FILE_ALIGNMENT)
        return found
    if apart or rest != master:
        _add(found, "optimizer", row.optimizer_tier, own * kept)
    # States have no padding, unless they lie in a block with their masters.
    _add(found, "optimizer", row.optimizer_tier, (own if split else elements) * widths.states)
    return found


def _splits(row: PlacementRow, widths: Widths) -> bool:
    return row.split and row.optimizer_tier is not Tier.DEVICE and widths.master == 2 * widths.parameter


def _place_gradients(
    found: Resting, sizes: Sequence[tuple[float, int, PlacementRow]], layout: ParallelLayout, ranks: int
) -> float:
    """Count gradients that rest; return the bytes of buffers for whole ones, their sums and what is sent."""
    row, widths, accumulates = layout.row, layout.widths, layout.accumulation > 1
    sharded, owned = row.gradient is Placement.SHARDED, row.optimizer is Placement.SHARDED
    # What is reduced at once is as narrow as what is sent; sums of micro-batches are as wide as those in the shards.
    width = widths.wire if owned and (sharded or not accumulates) else widths.gradient
    alone = ranks * layout.replicate == 1 and not accumulates
    for size, count, own_row in sizes:
        tier, own = own_row.gradient_tier, size / ranks if owned else size
        in_full = tier is Tier.DEVICE and width == widths.gradient and not sharded
        kept = width if tier is not Tier.DEVICE and alone and width <= widths.gradient else widths.gradient
        _add(found, "gradient", tier, 0.0 if in_full else own * kept * count)
    number = sum(count for _, count, _ in sizes)
    plain = [(size, count) for size, count, _ in sizes]
    slots = layout.gradient_slots if sharded else number
    limit = max(1, min(2, slots - 1))  # reductions under way at a time
    full, others = _largest(plain, slots) * width, 0.0
    if not sharded:
        _add(found, "gradient", Tier.DEVICE, full)
    if ranks > 1:
        sends = limit if owned else limit + 1
        others += _largest(plain, sends) * widths.wire if width != widths.wire else 0.0
        others += _largest(plain, limit) / ranks * widths.wire  # sums that other ranks' parts go into
        landing = [(size, count) for size, count, one in sizes if one.gradient_tier is not Tier.DEVICE]
        others += _largest(landing, limit) / ranks * widths.gradient
    return (full if sharded else 0.0) + others
