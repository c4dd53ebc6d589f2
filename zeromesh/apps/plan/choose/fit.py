"""Comparison of a layout's memory with what the tiers of a machine have."""

from __future__ import annotations

from collections.abc import Iterable

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.machine.calibration import reserved_margin
from zeromesh.apps.plan.machine.cluster import Machine, Node
from zeromesh.apps.plan.predict.lower_bounds import least_memory
from zeromesh.apps.plan.predict.rank_memory import RankMemory

# Error of predictions, from docs/plan-report-card.md; a test computes it from that page.
# Peaks of memory (memory_gib) are wrong by 0.5 and by 3.3 % on average, by source: this is the larger one.
MEMORY_MARGIN = 0.03


def is_tight(memory: Iterable[RankMemory], machine: Machine) -> bool:
    """Return whether the bytes that an allocator may reserve beyond the predicted ones do not fit on a device."""
    return max(rank.device for rank in memory) * (1 + reserved_margin()) > least_memory(machine)


def host_bytes(memory: Iterable[RankMemory], layout: ParallelLayout, node: Node, tier: str) -> float:
    """Return bytes on a tier of one node that all of its ranks share."""
    sizes = [rank.on(tier) for rank in memory]
    below = layout.tensor * layout.context * layout.pipeline
    # A node with whole pipelines has ranks of all stages alike.
    mean = sum(sizes) / len(sizes) if below <= node.devices else max(sizes)
    return mean * min(node.devices, layout.ranks)


def lacking(
    memory: Iterable[RankMemory],
    layout: ParallelLayout,
    machine: Machine,
    share: float = 1 - MEMORY_MARGIN,
) -> dict[str, float]:
    """Return bytes that each tier lacks; negative where some are left. ``share`` of a device may be taken."""
    ranks = list(memory)
    peak = max(rank.device for rank in ranks)
    missing = {"device": peak - least_memory(machine) * share}
    for tier, has in (("host", "host_memory"), ("nvme", "disk")):
        missing[tier] = max(host_bytes(ranks, layout, node, tier) - getattr(node, has) for node, _ in machine.nodes)
    if any(node.device.processor for node, _ in machine.nodes):
        # Both tiers are the same memory.
        missing["device"] = missing["host"] = max(
            host_bytes(ranks, layout, node, "host") + peak * min(node.devices, layout.ranks) - node.host_memory
            for node, _ in machine.nodes
        )
    return missing
