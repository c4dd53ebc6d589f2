"""Time of collectives over a machine's links, by the alpha-beta model.

A message takes a latency (alpha) and its bytes divided by the bandwidth (beta). Formulas of the ring and the tree:
Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005. In all formulas
below, ``size`` is the number of bytes of the whole tensor, of which each of n ranks has 1/n before an all-gather and
after a reduce-scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.machine.cluster import LinkSpeed, Machine
from zeromesh.base.axes import GRID


class Wire(NamedTuple):
    """One rank's link to its neighbours: seconds of the smallest message, and bytes per second."""

    latency: float
    bandwidth: float


def wire(link: LinkSpeed, active: int | None = None) -> Wire:
    """Return what one of ``active`` devices that share a link has of it; None: all of them send at once."""
    sharing = link.shared if active is None else min(active, link.shared)
    return Wire(link.latency, link.bandwidth * link.efficiency / max(1, sharing))


@dataclass(frozen=True)
class Fabric:
    """Ranks that communicate: ``size`` of them, ``local`` on each node.

    Each of the other ranks of a node takes part in another group of the same form, so a group has its own ranks' share
    of a node's links.
    """

    size: int
    local: int
    inside: Wire
    between: Wire
    rails: int = 0  # links of a node that the group uses; 0: those of all its ranks

    @property
    def nodes(self) -> int:
        """Number of nodes that the group is on."""
        return math.ceil(self.size / self.local)

    @property
    def crosses(self) -> bool:
        """True if the group has ranks on several nodes."""
        return self.nodes > 1

    def on_rails(self, rails: int) -> Fabric:
        """Return the group where it uses at most ``rails`` of a node's links to other nodes; 0: one for each rank."""
        if not rails or rails >= self.local or not self.crosses:
            return self
        return replace(self, rails=rails)

    def all_gather(self, size: float) -> float:
        """Return the seconds after which all ranks have all parts."""
        if self.size <= 1 or size <= 0:
            return 0.0
        seconds = [self._ring(size)]
        if self.crosses and self.local > 1 and not self.rails:
            # Each rank of a node gathers another part of the other nodes' shares, then the node's ranks exchange.
            seconds.append(self._across().all_gather(size / self.local) + _ring(self.inside, self.local, size))
        return min(seconds)

    def reduce_scatter(self, size: float) -> float:
        """Return the seconds after which each rank has its part of the sum."""
        return self.all_gather(size)  # the same messages in the other direction

    def all_reduce(self, size: float) -> float:
        """Return the seconds after which all ranks have the whole sum."""
        if self.size <= 1 or size <= 0:
            return 0.0
        seconds = [2 * self._ring(size), self._tree(size)]
        if self.crosses and self.local > 1 and not self.rails:
            seconds.append(2 * _ring(self.inside, self.local, size) + self._across().all_reduce(size / self.local))
        return min(seconds)

    def all_to_all(self, size: float, across: float | None = None) -> float:
        """Return the seconds in which each rank sends ``size`` bytes, shared out evenly to all ranks and itself.

        ``across`` are the bytes to each node together, where a node's ranks hand on what they get; None: all of those
        to its ranks.
        """
        if self.size <= 1 or size <= 0:
            return 0.0
        away = size * (self.size - self.local) / self.size if across is None else across * (self.nodes - 1) / self.nodes
        inside = size * (self.local - 1) / self.size if across is None else size * (self.local - 1) / self.local
        latency = (self.local - 1) * self.inside.latency + (self.size - self.local) * self.between.latency
        # Messages inside a node and to other nodes use other links.
        return latency + max(inside / self.inside.bandwidth, away / self.between.bandwidth)

    def send(self, size: float) -> float:
        """Return the seconds of a message to the next rank; on another node where the group has one rank on each."""
        if self.size <= 1 or size <= 0:
            return 0.0
        # A group of several ranks of each node waits for the slowest of its neighbours.
        link = self.between if self.crosses else self.inside
        return link.latency + size / link.bandwidth

    def _across(self) -> Fabric:
        return Fabric(self.nodes, 1, self.inside, self.between)

    @property
    def _bandwidth(self) -> float:
        # As many rings as a node has members, so that each member's link to other nodes is used.
        outer = (self.rails or self.local) * self.between.bandwidth
        return min(outer, self.inside.bandwidth) if self.local > 1 else outer

    def _ring(self, size: float) -> float:
        """Return the time of half an all-reduce by a ring: (n-1) alpha + V (n-1) / (n beta)."""
        if not self.crosses:
            return _ring(self.inside, self.size, size)
        hops = self.nodes * self.between.latency + (self.size - self.nodes) * self.inside.latency
        return hops * (self.size - 1) / self.size + size * (self.size - 1) / self.size / self._bandwidth

    def _tree(self, size: float) -> float:
        """Return the time of an all-reduce by a tree: 2 log2(n) alpha + 2 V / beta."""
        if not self.crosses:
            return 2 * math.log2(self.size) * self.inside.latency + 2 * size / self.inside.bandwidth
        depth = math.log2(self.nodes) * self.between.latency + math.log2(max(1, self.local)) * self.inside.latency
        return 2 * depth + 2 * size / self._bandwidth


def _ring(link: Wire, ranks: int, size: float) -> float:
    return (ranks - 1) * link.latency + size * (ranks - 1) / ranks / link.bandwidth if ranks > 1 else 0.0


def fabric(layout: ParallelLayout, machine: Machine, *axes: str, order: Sequence[str] = GRID) -> Fabric:
    """Return the group of one rank along some axes together.

    Ranks are numbered with the last axis of ``order`` as the fastest, and fill one node after the other. Where nodes
    differ, the group is as slow as on the slowest of them.
    """
    sizes = layout.sizes
    devices = min(node.devices for node, _ in machine.nodes)
    slow = min((node.inside for node, _ in machine.nodes), key=lambda link: wire(link).bandwidth)
    size, local, stride = 1, 1, 1
    folded = layout.expert_shares  # ranks of a stage, the innermost first, that share experts
    for axis in reversed(order):
        length, step = sizes[axis], 1
        if {"expert", "expert_data"} & {*axes} and axis not in ("pipeline", "replicate"):
            shared = math.gcd(length, folded)
            folded //= shared
            length, step = (shared, 1) if "expert" in axes else (length // shared, shared)
        elif axis not in axes:
            length = 1
        size *= length
        # Ranks of this axis that are on the node of the first one; a stride that divides no node leaves one.
        local *= min(length, max(1, devices // (stride * step)))
        stride *= sizes[axis]
    local = min(local, size)
    return Fabric(size, local, wire(slow), wire(machine.between))
