"""Memory of each pipeline rank of a layout: states by tier, and the device's over the moments of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from zeromesh.plan.cost import CostSource
from zeromesh.plan.layout import ParallelLayout
from zeromesh.plan.machine import Machine


class Moment(NamedTuple):
    """Device memory at one moment of a step, by what it is for; the sum is what is allocated."""

    label: str  # such as "backward of block 3, micro-batch 2"
    bytes: Mapping[str, float]  # by state: parameter, gradient, optimizer, slot, activation, temporary

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class RankMemory:
    """Memory of one pipeline rank; the ranks of the other axes have the same."""

    pipeline_rank: int
    states: Mapping[tuple[str, str], float]  # bytes by state and tier ("device", "host", "nvme")
    timeline: tuple[Moment, ...]  # of one step, on the device
    fixed: float  # bytes of the device's context, libraries and communicators
    reserved: float = 0.0  # bytes that the caching allocator of the device takes for the timeline's peak

    @property
    def peak(self) -> Moment:
        """The moment with most bytes."""
        return max(self.timeline, key=lambda moment: moment.total)

    @property
    def device(self) -> float:
        """Bytes that the device must have."""
        return self.peak.total + self.fixed

    def on(self, tier: str) -> float:
        """Bytes of states on the host or on NVMe."""
        return sum(size for (_, where), size in self.states.items() if where == tier)


def memory_of(
    source: CostSource, sequence: int, layout: ParallelLayout, machine: Machine | None = None
) -> list[RankMemory]:
    """Return the memory of every pipeline rank."""
    raise NotImplementedError
