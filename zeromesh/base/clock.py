"""Discrete-event simulation of actions that use resources, each of which does one thing at a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class ResourceUse(NamedTuple):
    """Action of a simulation; its seconds are given beside it, so that one list of actions serves several costs."""

    resource: Hashable  # occupied while it goes on, in the order of the actions; None: it occupies none
    after: tuple[int, ...] = ()  # positions of earlier actions, which must have ended
    label: str = ""
    purpose: str = ""  # what the resource's time is spent on, if that is not the resource itself


def simulate(actions: Sequence[ResourceUse], seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the times at which the actions begin and end; ``seconds`` has how long each takes."""
    free: dict[Hashable, float] = {}
    starts: list[float] = []
    ends: list[float] = []
    for (resource, after, _, _), duration in zip(actions, seconds, strict=True):
        start = 0.0 if resource is None else free.get(resource, 0.0)
        for other in after:
            if ends[other] > start:
                start = ends[other]
        starts.append(start)
        ends.append(start + duration)
        if resource is not None:
            free[resource] = start + duration
    return starts, ends
