"""Time of one step of a layout on a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from zeromesh.plan.cost import CostSource
from zeromesh.plan.layout import ParallelLayout
from zeromesh.plan.machine import Machine


class Interval(NamedTuple):
    """Use of one resource of one pipeline rank, for a picture of the step."""

    rank: int
    resource: str  # "compute", "tensor links", "data links", "host link", "host", "disk", ...
    label: str
    start: float  # seconds
    end: float


@dataclass(frozen=True)
class StepTime:
    """Time of a step."""

    seconds: float
    waits: Mapping[str, float]  # seconds by resource that the slowest rank computes with or waits for; their sum
    intervals: tuple[Interval, ...] = ()
    flops: float = 0.0  # model's operations of all ranks

    @property
    def bound(self) -> str:
        """The resource with most seconds."""
        return max(self.waits, key=lambda name: self.waits[name])


def time_of(source: CostSource, sequence: int, layout: ParallelLayout, machine: Machine) -> StepTime:
    """Return the time of one step: of all micro-batches, of communication that is not hidden, and of the update."""
    raise NotImplementedError
