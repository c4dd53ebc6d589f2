"""Bytes of a rank's states by state and tier: one arithmetic, by which the engine allocates and the planner counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from typing import NamedTuple

from zeromesh.base.placement import ROWS, Placement, PlacementRow, Tier, offloaded_units
from zeromesh.comm.ordered_sums import SumPlace
from zeromesh.shard.layout import padded, round_up
from zeromesh.shard.store import swap_file

# Elements of a flat buffer whose master and states are read from a file, updated and written at a time; see the log,
# "updates on NVMe in windows".
WINDOW = 1 << 22


@dataclass(frozen=True)
class Widths:
    """Bytes of one element of each state; ``states`` are those of the optimizer beside the master."""

    parameter: int = 2
    gradient: int = 4  # of sums over micro-batches and ranks
    wire: int = 2  # of gradients that are sent
    master: int = 4  # 0 where the parameter is its own master
    states: int = 8  # of Adam: two of 4 bytes
    gathered: int = 0  # of sharded parameters that are sent; 0: as wide as they are computed with


@dataclass(frozen=True)
class TableLayout:
    """Place of the rows of embedding tables, and the states of their update."""

    tier: Tier = Tier.DEVICE
    states: float = 2  # numbers of an element; of Adam
    states_of_row: int = 0  # numbers of a row
    cached: int | None = None  # rows of each table in a cache; None: there is none
    cache_tier: Tier = Tier.DEVICE


STATE_BUFFERS, PARAMETER_BUFFERS = 4, 5  # windows and units in host memory at a time of those that rest in files


class TableShape(NamedTuple):
    """An embedding table, and the rows of it that a rank uses in an update."""

    rows: int
    width: int
    used: float = 0.0
    frozen: float = 0.0  # bytes of a row without a gradient, beside its elements


Resting = dict[tuple[str, str], float]  # bytes by state and tier


class UnitElements(NamedTuple):
    """Elements of a unit with gradients, and the number of such units."""

    size: float
    number: int
    single: bool = False  # they are one parameter's, without padding
    frozen: float = 0.0  # bytes of parameters without gradients
    whole: float = 0.0  # bytes beside those, on every rank
    ranks: int = 0  # of experts, inside a block: over which their states are sharded; 0: it is no unit of experts


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


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """Placement and widths of states, and buffers of those that are gathered."""

    row: PlacementRow = field(default_factory=lambda: ROWS[0])
    widths: Widths = field(default_factory=Widths)
    parameter_slots: int = 2  # gathered units at a time
    gradient_slots: int = 2
    early: float = 0.0  # share of states off the device whose update begins in the backward, into second copies
    in_parts: bool = True  # the optimizer can take its step unit by unit


class Sharing(NamedTuple):
    """Ranks that share states, and how they sum gradients."""

    ranks: int  # of a shard group
    replicate: int = 1  # shard groups that replicate each other
    accumulates: bool = False  # an update has several micro-batches
    sums: SumPlace = SumPlace.COLLECTIVE


def is_apart(parameter: Tier, optimizer: Tier) -> bool:
    """Return whether masters are other memory than parameters because of the tiers where both rest."""
    return parameter.in_blocks or optimizer is not parameter


def rests_in_master(parameter: Tier, optimizer: Tier) -> bool:
    """Return whether sharded parameters of these tiers rest in their masters, and are converted as they are gathered.

    On the host, what is fetched is not to be converted each time.
    """
    return parameter is Tier.DEVICE and not is_apart(parameter, optimizer)


def add_size(resting: Resting, state: str, tier: Tier, size: float) -> None:
    """Add the bytes of a state on a tier, if there are any."""
    if size:
        resting[state, tier.value] = resting.get((state, tier.value), 0.0) + size


def _rows(
    units: Sequence[UnitElements], row: PlacementRow, accumulates: bool
) -> list[tuple[UnitElements, PlacementRow]]:
    """Return units with their rows; those that are alike and partly off the device are there twice."""
    rows = []
    away = iter(offloaded_units([u.size for u in units for _ in range(u.number)], row, accumulates))
    for unit in units:
        gone = sum(islice(away, unit.number))
        if unit.size and gone < unit.number:
            rows.append((unit._replace(number=unit.number - gone), row.on_device))
        if unit.size and gone:
            rows.append((unit._replace(number=gone), row))
    return rows


def state_sizes(units: Sequence[UnitElements], layout: StateLayout, sharing: Sharing) -> RankStates:
    """Return the bytes of a rank's states; what stays gathered is the first unit."""
    row, widths = layout.row, layout.widths
    resting: Resting = {}
    files: list[tuple[float, int]] = []  # bytes in files: windows of units' states, and units' parameters
    stored: list[tuple[float, int]] = []
    loaded = 0.0  # bytes of the largest master of several windows, which is in memory as a whole at the start
    sizes = []
    for unit, own_row in _rows(units, row, sharing.accumulates):
        ranks = unit.ranks or sharing.ranks
        count, size = unit.number, padded(unit.size, widths.parameter, ranks)
        sizes.append((unit._replace(size=size), own_row))
        shard_size = unit.size / ranks if row.optimizer is Placement.SHARDED else unit.size
        parameters = size / ranks if row.parameter is Placement.SHARDED else size
        masters = size / ranks if row.optimizer is Placement.SHARDED else size
        for (state, tier), nbytes in unit_sizes(parameters, masters, shard_size, own_row, widths).items():
            add_size(resting, state, Tier(tier), nbytes * count)
            if tier == Tier.NVME.value and state == "parameter":
                stored.append((nbytes, count))
            elif tier == Tier.NVME.value:
                files += [(block, number * count) for block, number in _windows(masters, nbytes)]
                add_size(resting, state, Tier.NVME, layout.early * nbytes * count)  # a spare place for the next ones
                width = widths.parameter if _splits(own_row, widths) else widths.master or widths.parameter
                loaded = max(loaded, masters * width if masters > WINDOW else 0.0)
        if own_row.optimizer_tier is not Tier.DEVICE:
            in_files = own_row.optimizer_tier is Tier.NVME  # which have a spare place for the next ones
            copied = 0 if in_files else (widths.master or widths.parameter) + widths.states
            apart = is_apart(own_row.parameter_tier, own_row.optimizer_tier)
            copied += widths.parameter if widths.master or apart else 0
            elements = size / ranks if in_files else shard_size
            add_size(resting, "slot", Tier.HOST, layout.early * elements * copied * count)
    stored += place_frozen(resting, units, row, sharing.ranks)
    if any(_splits(own_row, widths) for _, own_row in sizes):
        # One split master at a time is joined in memory of its own, during the update.
        add_size(
            resting,
            "slot",
            Tier.HOST,
            max(unit.size / (unit.ranks or sharing.ranks) for unit, _ in sizes) * widths.master,
        )
    for blocks, buffers in ((files, STATE_BUFFERS), (stored, PARAMETER_BUFFERS)):
        add_size(resting, "slot", Tier.HOST, bytes_of(largest(blocks, buffers)))
    add_size(resting, "slot", Tier.HOST, loaded)
    gathered = spare = 0.0
    sharded = row.parameter is Placement.SHARDED
    if sharded:
        full = [
            (padded(u.size, widths.parameter, u.ranks or sharing.ranks) * widths.parameter + u.frozen, u.number)
            for u in units
        ]
        outside, pairs = full[0][0], [*zip(full[1:], units[1:], strict=True)]
        parts = [[size for size, unit in pairs if (unit.ranks > 0) is experts] for experts in (False, True)]
        gathered = bytes_of(slots_of(parts, layout.parameter_slots)) + outside
        spare = gathered - bytes_of(slots_of(parts, 1)) - outside
    working, lent = _place_gradients(resting, sizes, layout, sharing)
    here = [
        (unit.size / ((unit.ranks or sharing.ranks) if row.optimizer is Placement.SHARDED else 1), unit.number)
        for unit, own_row in sizes
        if own_row.optimizer_tier is Tier.DEVICE
    ]
    update_size = max((size for size, _ in here), default=0.0) if layout.in_parts else sum(size * n for size, n in here)
    master = widths.master or widths.parameter
    return RankStates(
        resting, gathered, spare, working, lent, update_size * master if widths.gradient < master else 0.0
    )


def place_frozen(
    resting: Resting, units: Sequence[UnitElements], row: PlacementRow, ranks: int
) -> list[tuple[float, int]]:
    """Count parameters without gradients; return bytes and numbers of units that have some in files."""
    tier = row.parameter_tier
    add_size(resting, "buffer", Tier.DEVICE, sum(unit.whole * unit.number for unit in units))
    stored: list[tuple[float, int]] = []
    for unit in units:
        size = unit.frozen / ((unit.ranks or ranks) if row.parameter is Placement.SHARDED else 1)
        if size and tier is Tier.NVME:
            size = round_up(size, swap_file.ALIGNMENT)
            stored.append((size, unit.number))
        add_size(resting, "parameter", tier, size * unit.number)
    return stored


def unit_sizes(parameters: float, masters: float, states: float, row: PlacementRow, widths: Widths) -> Resting:
    """Return the bytes of a unit at rest, by the padded elements of a rank and, of states, by those of parameters."""
    resting: Resting = {}
    master = widths.master or widths.parameter
    apart, rest = is_apart(row.parameter_tier, row.optimizer_tier), widths.parameter
    if row.parameter is Placement.SHARDED:
        if rests_in_master(row.parameter_tier, row.optimizer_tier):
            rest = master
        state = "parameter" if rest == widths.parameter else "optimizer"
        bytes_at_rest = parameters * rest
        if row.parameter_tier is Tier.NVME:
            bytes_at_rest = round_up(bytes_at_rest, swap_file.ALIGNMENT)
        add_size(resting, state, row.parameter_tier, bytes_at_rest)
    else:
        add_size(resting, "parameter", Tier.DEVICE, parameters * rest)
    split = _splits(row, widths)
    width = widths.parameter if split else master
    if row.optimizer_tier is Tier.NVME:
        block = masters * (width + widths.states)
        add_size(resting, "optimizer", Tier.NVME, round_up(block, swap_file.ALIGNMENT))
        return resting
    if apart or rest != master:
        add_size(resting, "optimizer", row.optimizer_tier, masters * width)
    # States have no padding, unless they lie in a block with their masters.
    add_size(resting, "optimizer", row.optimizer_tier, (masters if split else states) * widths.states)
    return resting


def _windows(elements: float, nbytes: float) -> list[tuple[float, int]]:
    """Return the bytes and the numbers of the windows that the states of one unit are in memory in."""
    count, window = int(elements // WINDOW), nbytes // elements * WINDOW  # the last one is filled up to a page
    return [(window, count), (nbytes - count * window, 1)]


def _splits(row: PlacementRow, widths: Widths) -> bool:
    return row.split and row.optimizer_tier is not Tier.DEVICE and widths.master == 2 * widths.parameter


def _place_gradients(
    resting: Resting,
    units: Sequence[tuple[UnitElements, PlacementRow]],
    layout: StateLayout,
    sharing: Sharing,
) -> tuple[float, GradientBuffers]:
    """Count gradients that rest; return the bytes for whole ones, their sums and what is sent, and what they are."""
    row, widths, (ranks, replicate, accumulates, sums) = layout.row, layout.widths, sharing
    sharded, owned = row.gradient is Placement.SHARDED, row.optimizer is Placement.SHARDED
    rules = PoolRules(sharded, owned, accumulates, layout.gradient_slots if sharded else None)
    width = widths.wire if rules.narrow else widths.gradient
    alone = ranks * replicate == 1 and not accumulates
    for unit, own_row in units:
        size, count, shards = unit.size, unit.number, unit.ranks or ranks
        tier, shard_size = own_row.gradient_tier, size / shards if owned else size
        in_full = tier is Tier.DEVICE and width == widths.gradient and not sharded
        resting_width = width if tier is not Tier.DEVICE and alone and width <= widths.gradient else widths.gradient
        add_size(resting, "gradient", tier, 0.0 if in_full else shard_size * resting_width * count)
    adopts = width == widths.parameter
    gradients = [
        full_gradient(
            (unit.size, unit.size / shards, unit.size / shards * sums.buffers(shards)),
            (width, widths.wire, widths.gradient),
            converts=shards > 1 and width != widths.wire,
            lands=shards > 1 and own_row.gradient_tier is not Tier.DEVICE,
            adopted=adopts and unit.single,
            number=unit.number,
            experts=unit.ranks > 0,
        )
        for unit, own_row in units
        for shards in (unit.ranks or ranks,)
    ]
    pools = gradient_pools(gradients, rules)
    full = bytes_of(pools.slots) + bytes_of(pools.adopted)
    summing = bytes_of(pools.wires) + bytes_of(pools.receives) + bytes_of(pools.landings)
    if not sharded:
        add_size(resting, "gradient", Tier.DEVICE, full)
    lent = tuple(size for size, number in pools.slots for _ in range(number)) if sharded else ()
    # Where parameters are sharded, gradients give their memory back after each update.
    returned = row.parameter is Placement.SHARDED
    return (full if sharded else 0.0) + summing, GradientBuffers(adopts, lent, summing, sharded, returned)


def table_sizes(
    tables: Iterable[TableShape], placed: TableLayout, ranks: int, number: int, processor: bool = False
) -> Resting:
    """Return the bytes of a rank's rows, states and cache, by the bytes of a number at rest."""
    resting: Resting = {}
    for table in tables:
        rows = ceil(table.rows / ranks)
        states = placed.states * table.width + placed.states_of_row
        add_size(resting, "parameter", placed.tier, rows * (table.width * number + table.frozen))
        add_size(resting, "optimizer", placed.tier, rows * states * number)
        if placed.cached is not None and not (processor and placed.tier is Tier.HOST):  # which needs none there
            # On the device it has room for the rows of an update, whatever it was given.
            cached = min(rows, max(placed.cached, table.used if placed.cache_tier is Tier.DEVICE else 0))
            row_bytes = (table.width + states) * number + table.frozen
            add_size(resting, "slot", placed.cache_tier, cached * row_bytes)
    return resting


# Widths and pools of full gradients: the engine allocates by them, and the planner counts.

Sizes = list[tuple[float, int]]
"""Bytes of a buffer, and the number of such buffers."""


class FullGradient(NamedTuple):
    """Bytes of what the reduction of a unit's gradient needs; ``number`` units are alike."""

    full: float  # the gradient of the whole unit, as it is summed
    adopted: bool  # it stays where autograd left it
    wire: float  # a copy in the dtype that is sent; 0 where that is the same
    receive: float  # other ranks' parts
    landing: float  # a sum on its way to the host; 0 where it stays on the device
    number: int = 1
    experts: bool = False  # it arrives while that of the block around them does


def full_gradient(
    elements: tuple[float, float, float],
    widths: tuple[int, int, int],
    converts: bool,
    lands: bool,
    adopted: bool,
    number: int = 1,
    experts: bool = False,
) -> FullGradient:
    """Return the bytes of a gradient, of elements of the unit, of a shard and of parts that are received."""
    (full, shard, received), (width, wire, shard_width) = elements, widths  # the widths: whole, sent, and of sums
    return FullGradient(
        full * width,
        adopted,
        full * wire if converts else 0,
        received * wire,
        shard * shard_width if lands else 0,
        number,
        experts,
    )


@dataclass(frozen=True)
class PoolRules:
    """Placement of gradients, as far as pools depend on it."""

    sharded: bool  # reduced after every micro-batch into a shard; else at the accumulation boundary
    owned: bool  # each rank ends up with its shard of the sum only
    accumulates: bool  # micro-batches are summed
    slots: int | None = None  # full gradients at a time; None: two if they are sharded, else all

    @property
    def narrow(self) -> bool:
        """True if full gradients are as narrow as what is sent, since nothing is added to them."""
        return self.owned and (self.sharded or not self.accumulates)

    def count(self, gradients: int) -> int:
        """Return the number of full gradients that exist at a time, of so many in all."""
        return self.slots or (2 if self.sharded else gradients)

    def limit(self, gradients: int) -> int:
        """Return the number of reductions under way at a time."""
        return max(1, min(2, self.count(gradients) - 1))


class GradientPools(NamedTuple):
    """Buffers of each pool, and of gradients that stay where autograd left them."""

    slots: Sizes
    adopted: Sizes
    wires: Sizes
    receives: Sizes
    landings: Sizes


def gradient_pools(gradients: Iterable[FullGradient], rules: PoolRules) -> GradientPools:
    """Return the buffers that are had at a time; in each pool the largest gradients fit at once."""
    members = [*gradients]
    number = sum(gradient.number for gradient in members)
    count, limit = rules.count(number), rules.limit(number)
    parts = [[(m.full, m.number) for m in members if not m.adopted and m.experts is part] for part in (False, True)]
    return GradientPools(
        slots=slots_of(parts, count),
        adopted=largest(
            ((each.full, each.number) for each in members if each.adopted), limit if rules.sharded else number
        ),
        # A sum that is sent to all ranks stays in its buffer while the next ones are made.
        wires=largest(((each.wire, each.number) for each in members), limit if rules.owned else limit + 1),
        receives=largest(((each.receive, each.number) for each in members), limit),
        landings=largest(((each.landing, each.number) for each in members), limit),
    )


def slots_of(parts: Iterable[Iterable[tuple[float, int]]], count: int) -> Sizes:
    """Return slots for ``count`` units at a time: of blocks, and as many of the experts that are used inside them."""
    return [slot for part in parts for slot in largest(part, count)]


def largest(sizes: Iterable[tuple[float, int]], count: int) -> Sizes:
    """Return the ``count`` largest of the buffers, those without bytes left out."""
    buffers = []
    for size, number in sorted(sizes, reverse=True):
        if count <= 0 or size <= 0:
            break
        buffers.append((size, min(number, count)))
        count -= number
    return buffers


def bytes_of(sizes: Sizes) -> float:
    """Return the bytes of all buffers."""
    return sum(size * number for size, number in sizes)
