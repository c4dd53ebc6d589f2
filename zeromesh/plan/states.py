"""Bytes of a rank's model states by state and tier, as a framework keeps them."""

from __future__ import annotations

from collections.abc import Sequence

from zeromesh.comm.sums import SumPlace
from zeromesh.model.placement import Placement, Tier
from zeromesh.plan.conventions import Convention
from zeromesh.plan.layout import ParallelLayout
from zeromesh.shard.gradient_pools import bytes_of, largest
from zeromesh.shard.sizes import RankStates, Resting, UnitElements, add_size, place_frozen, state_sizes


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
        return state_sizes(units, layout, layout.sharing(sums))
    row, widths, ranks = layout.row, convention.widths, shards_of(layout, convention)
    resting: Resting = {}
    total = sum(unit.size * unit.number for unit in units)
    share = {Placement.SHARDED: 1 / ranks, Placement.REPLICATED: 1.0}
    sharded = row.parameter is Placement.SHARDED
    if not (sharded and convention.in_master):
        add_size(resting, "parameter", row.parameter_tier, total * widths.parameter * share[row.parameter])
    place_frozen(resting, units, row, ranks)
    add_size(resting, "gradient", row.gradient_tier, total * widths.gradient * share[row.gradient])
    add_size(resting, "optimizer", row.optimizer_tier, total * (widths.master + widths.states) * share[row.optimizer])
    gathered, working = 0.0, convention.bucket * widths.wire
    apart = bytes_of(largest(((unit.size, unit.number) for unit in units[1:]), convention.gathered))
    if sharded and convention.whole_in_pipeline and layout.pipeline > 1:
        gathered = total
        add_size(resting, "gradient", Tier.DEVICE, total * widths.gradient)
    elif sharded and convention.gathered:
        gathered = max(apart + units[0].size, min(total, convention.live))
    if sharded and convention.gathers_apart:
        working += max(units[0].size, apart) * widths.parameter
    return RankStates(resting, gathered * widths.parameter, working=working)
