"""Bytes of a rank's model states by state and tier, from the elements of its units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import NamedTuple

from zeromesh.comm.sums import SumPlace
from zeromesh.model.placement import Placement, PlacementRow, Tier, offloaded_units
from zeromesh.plan.conventions import Convention
from zeromesh.plan.layout import ParallelLayout, Widths
from zeromesh.shard.gradient_pools import FullGradient, PoolRules, bytes_of, gradient_pools, largest
from zeromesh.shard.layout import ALIGNMENT
from zeromesh.shard.swap import WINDOW
from zeromesh.tiers import swap_file

STATE_BUFFERS, PARAMETER_BUFFERS = 4, 5  # windows and units in host memory at a time of those that rest in files


Resting = dict[tuple[str, str], float]  # bytes by state and tier


class UnitElements(NamedTuple):
    """Elements of a unit with gradients, and the number of such units."""

    size: float
    number: int
    single: bool = False  # they are one parameter's, without padding
    frozen: float = 0.0  # bytes of parameters without gradients
    whole: float = 0.0  # bytes beside those, on every rank


class GradientBuffers(NamedTuple):
    """The engine's memory on the device for whole gradients, which is had as it is used."""

    adopts: bool  # the gradient of a unit of one parameter stays where autograd left it
    slots: tuple[float, ...]  # bytes of the slots for those of other units, the largest first
    sums: float  # bytes for sums and what is sent, from the first reduction on
    sharded: bool  # reduced after each micro-batch, a few at a time
    returned: bool  # all of it has no memory from an update to the next backward


@dataclass(frozen=True)
class RankStates:
    """States of one rank: what rests, and the buffers that come and go on its device."""

    resting: Resting
    gathered: float = 0.0  # slots of gathered units, the whole step
    spare: float = 0.0  # of those, what the last unit before an update does not need
    working: float = 0.0  # buffers for whole gradients, their sums and what is sent; at the most
    buffers: GradientBuffers | None = None  # None: ``working`` is there all the time
    widened: float = 0.0  # gradients as wide as their masters, in the update; 0: their sums are


def _add(resting: Resting, state: str, tier: Tier, size: float) -> None:
    if size:
        resting[state, tier.value] = resting.get((state, tier.value), 0.0) + size


def shards_of(layout: ParallelLayout, convention: Convention) -> int:
    """Return the number of ranks that states are sharded over."""
    return layout.data * (layout.context if convention.context_shards else 1)


def states_of(
    units: Sequence[UnitElements], layout: ParallelLayout, convention: Convention, sums: SumPlace = SumPlace.COLLECTIVE
) -> RankStates:  # fmt: skip
    """Return a rank's states.

    Args:
        units: elements; what stays gathered is the first one.
        layout: placement and widths.
        convention: what is kept.
        sums: where gradients are summed.
    """
    if convention.engine:
        return _engine_states(units, layout, sums)
    row, widths, ranks = layout.row, convention.widths, shards_of(layout, convention)
    resting: Resting = {}
    total = sum(unit.size * unit.number for unit in units)
    share = {Placement.SHARDED: 1 / ranks, Placement.REPLICATED: 1.0}
    sharded = row.parameter is Placement.SHARDED
    if not (sharded and convention.in_master):
        _add(resting, "parameter", row.parameter_tier, total * widths.parameter * share[row.parameter])
    _place_frozen(resting, units, row, ranks)
    _add(resting, "gradient", row.gradient_tier, total * widths.gradient * share[row.gradient])
    _add(resting, "optimizer", row.optimizer_tier, total * (widths.master + widths.states) * share[row.optimizer])
    gathered, working = 0.0, convention.bucket * widths.wire
    apart = bytes_of(largest(((unit.size, unit.number) for unit in units[1:]), convention.gathered))
    if sharded and convention.whole_in_pipeline and layout.pipeline > 1:
        gathered = total
        _add(resting, "gradient", Tier.DEVICE, total * widths.gradient)
    elif sharded and convention.gathered:
        gathered = max(apart + units[0].size, min(total, convention.live))
    if sharded and convention.gathers_apart:
        working += max(units[0].size, apart) * widths.parameter
    return RankStates(resting, gathered * widths.parameter, working=working)


def _rows(units: Sequence[UnitElements], layout: ParallelLayout) -> list[tuple[UnitElements, PlacementRow]]:
    """Return units with their rows; those that are alike and partly off the device are there twice."""
    row, rows = layout.row, []
    away = iter(offloaded_units([u.size for u in units for _ in range(u.number)], row, layout.accumulation > 1))
    for unit in units:
        gone = sum(islice(away, unit.number))
        if unit.size and gone < unit.number:
            rows.append((unit._replace(number=unit.number - gone), row.on_device))
        if unit.size and gone:
            rows.append((unit._replace(number=gone), row))
    return rows


def is_padded(elements: float, layout: ParallelLayout) -> bool:
    """Return whether a unit of the engine has more elements than its parameters."""
    return _pad(elements, layout.widths.parameter, layout.data * layout.context) > elements


def _pad(elements: float, width: int, ranks: int) -> float:
    multiple = max(1, ALIGNMENT // width) * ranks
    return ceil(elements / multiple) * multiple


def _engine_states(units: Sequence[UnitElements], layout: ParallelLayout, sums: SumPlace) -> RankStates:
    """Return the states as the engine keeps them; the same arithmetic as in ``zeromesh.shard``."""
    row, widths, ranks = layout.row, layout.widths, layout.data * layout.context
    resting: Resting = {}
    files: list[tuple[float, int]] = []  # bytes in files: windows of units' states, and units' parameters
    stored: list[tuple[float, int]] = []
    loaded = 0.0  # bytes of the largest master of several windows, which is in memory as a whole at the start
    sizes = []
    for unit, own_row in _rows(units, layout):
        count, size = unit.number, _pad(unit.size, widths.parameter, ranks)
        sizes.append((unit._replace(size=size), own_row))
        shard_size = unit.size / ranks if row.optimizer is Placement.SHARDED else unit.size
        for (state, tier), nbytes in _place(size, shard_size, own_row, widths, ranks).items():
            _add(resting, state, Tier(tier), nbytes * count)
            if tier == Tier.NVME.value and state == "parameter":
                stored.append((nbytes, count))
            elif tier == Tier.NVME.value:
                elements = size / (ranks if row.optimizer is Placement.SHARDED else 1)
                files += [(block, number * count) for block, number in _windows(elements, nbytes)]
                _add(resting, state, Tier.NVME, layout.early * nbytes * count)  # a spare place for the next ones
                width = widths.parameter if _splits(own_row, widths) else widths.master or widths.parameter
                loaded = max(loaded, elements * width if elements > WINDOW else 0.0)
        if own_row.optimizer_tier is not Tier.DEVICE:
            in_files = own_row.optimizer_tier is Tier.NVME  # which have a spare place for the next ones
            copied = 0 if in_files else (widths.master or widths.parameter) + widths.states
            copied += widths.parameter if widths.master or _is_apart(own_row) else 0
            _add(resting, "slot", Tier.HOST, layout.early * (size / ranks if in_files else shard_size) * copied * count)
    stored += _place_frozen(resting, units, row, ranks)
    if any(_splits(own_row, widths) for _, own_row in sizes):
        # One split master at a time is joined in memory of its own, during the update.
        _add(resting, "slot", Tier.HOST, max(unit.size for unit, _ in sizes) / ranks * widths.master)
    for blocks, buffers in ((files, STATE_BUFFERS), (stored, PARAMETER_BUFFERS)):
        _add(resting, "slot", Tier.HOST, bytes_of(largest(blocks, buffers)))
    _add(resting, "slot", Tier.HOST, loaded)
    gathered = spare = 0.0
    sharded = row.parameter is Placement.SHARDED
    if sharded:
        full = [(_pad(u.size, widths.parameter, ranks) * widths.parameter + u.frozen, u.number) for u in units]
        outside, blocks = full[0][0], full[1:]
        gathered = bytes_of(largest(blocks, layout.parameter_slots)) + outside
        spare = gathered - bytes_of(largest(blocks, 1)) - outside
    working, lent = _place_gradients(resting, sizes, layout, ranks, sums)
    here = [(unit.size, unit.number) for unit, own_row in sizes if own_row.optimizer_tier is Tier.DEVICE]
    update_size = max((size for size, _ in here), default=0.0) if layout.in_parts else sum(size * n for size, n in here)
    update_size /= ranks if row.optimizer is Placement.SHARDED else 1
    master = widths.master or widths.parameter
    return RankStates(
        resting, gathered, spare, working, lent, update_size * master if widths.gradient < master else 0.0
    )


def _place_frozen(
    resting: Resting, units: Sequence[UnitElements], row: PlacementRow, ranks: int
) -> list[tuple[float, int]]:
    """Count parameters without gradients; return bytes and numbers of units that have some in files."""
    tier = row.parameter_tier
    _add(resting, "buffer", Tier.DEVICE, sum(unit.whole * unit.number for unit in units))
    stored: list[tuple[float, int]] = []
    for unit in units:
        size = unit.frozen / (ranks if row.parameter is Placement.SHARDED else 1)
        if size and tier is Tier.NVME:
            size = ceil(size / swap_file.ALIGNMENT) * swap_file.ALIGNMENT
            stored.append((size, unit.number))
        _add(resting, "parameter", tier, size * unit.number)
    return stored


def _place(size: float, elements: float, row: PlacementRow, widths: Widths, ranks: int) -> Resting:
    """Return parameters, master and states of one unit; ``elements`` are its own without padding."""
    resting: Resting = {}
    sharded = row.parameter is Placement.SHARDED
    shard_size = size / ranks if row.optimizer is Placement.SHARDED else size
    master = widths.master or widths.parameter
    apart, rest = _is_apart(row), widths.parameter
    if sharded:
        # On the device parameters rest in their masters, and are converted as they are gathered.
        if not apart and row.parameter_tier is Tier.DEVICE:
            rest = master
        state = "parameter" if rest == widths.parameter else "optimizer"
        bytes_at_rest = size / ranks * rest
        if row.parameter_tier is Tier.NVME:
            bytes_at_rest = ceil(bytes_at_rest / swap_file.ALIGNMENT) * swap_file.ALIGNMENT
        _add(resting, state, row.parameter_tier, bytes_at_rest)
    else:
        _add(resting, "parameter", Tier.DEVICE, size * rest)
    split = _splits(row, widths)
    width = widths.parameter if split else master
    if row.optimizer_tier is Tier.NVME:
        block = shard_size * (width + widths.states)
        _add(resting, "optimizer", Tier.NVME, ceil(block / swap_file.ALIGNMENT) * swap_file.ALIGNMENT)
        return resting
    if apart or rest != master:
        _add(resting, "optimizer", row.optimizer_tier, shard_size * width)
    # States have no padding, unless they lie in a block with their masters.
    _add(resting, "optimizer", row.optimizer_tier, (shard_size if split else elements) * widths.states)
    return resting


def _is_apart(row: PlacementRow) -> bool:
    """Return whether masters are other memory than the parameters because of where they rest."""
    return row.parameter_tier is Tier.NVME or row.optimizer_tier is not row.parameter_tier


def _windows(elements: float, nbytes: float) -> list[tuple[float, int]]:
    """Return the bytes and the numbers of the windows that the states of one unit are in memory in."""
    count, window = int(elements // WINDOW), nbytes // elements * WINDOW  # the last one is filled up to a page
    return [(window, count), (nbytes - count * window, 1)]


def _splits(row: PlacementRow, widths: Widths) -> bool:
    return row.split and row.optimizer_tier is not Tier.DEVICE and widths.master == 2 * widths.parameter


def _place_gradients(
    resting: Resting,
    units: Sequence[tuple[UnitElements, PlacementRow]],
    layout: ParallelLayout,
    ranks: int,
    sums: SumPlace,
) -> tuple[float, GradientBuffers]:
    """Count gradients that rest; return the bytes for whole ones, their sums and what is sent, and what they are."""
    row, widths, accumulates = layout.row, layout.widths, layout.accumulation > 1
    sharded, owned = row.gradient is Placement.SHARDED, row.optimizer is Placement.SHARDED
    rules = PoolRules(sharded, owned, accumulates, layout.gradient_slots if sharded else None)
    width = widths.wire if rules.narrow else widths.gradient
    alone = ranks * layout.replicate == 1 and not accumulates
    for unit, own_row in units:
        size, count = unit.size, unit.number
        tier, shard_size = own_row.gradient_tier, size / ranks if owned else size
        in_full = tier is Tier.DEVICE and width == widths.gradient and not sharded
        resting_width = width if tier is not Tier.DEVICE and alone and width <= widths.gradient else widths.gradient
        _add(resting, "gradient", tier, 0.0 if in_full else shard_size * resting_width * count)
    adopts = width == widths.parameter
    gradients = [
        FullGradient(
            full=unit.size * width,
            adopted=adopts and unit.single,
            wire=unit.size * widths.wire if ranks > 1 and width != widths.wire else 0.0,
            receive=unit.size / ranks * sums.buffers(ranks) * widths.wire,
            landing=unit.size / ranks * widths.gradient
            if ranks > 1 and own_row.gradient_tier is not Tier.DEVICE
            else 0.0,
            number=unit.number,
        )
        for unit, own_row in units
    ]
    pools = gradient_pools(gradients, rules)
    full = bytes_of(pools.slots) + bytes_of(pools.adopted)
    summing = bytes_of(pools.wires) + bytes_of(pools.receives) + bytes_of(pools.landings)
    if not sharded:
        _add(resting, "gradient", Tier.DEVICE, full)
    lent = tuple(size for size, number in pools.slots for _ in range(number)) if sharded else ()
    # Where parameters are sharded, gradients give their memory back after each update.
    returned = row.parameter is Placement.SHARDED
    return (full if sharded else 0.0) + summing, GradientBuffers(adopts, lent, summing, sharded, returned)
