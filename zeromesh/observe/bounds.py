"""Resource that bounds a run, and its distance from the limit.

Every second of an update is put down to one resource: waits and copies by the kind of their span, the rest of forward,
backward and step to the device that computes. What was moved or computed meanwhile, and what the machine was measured
to do at best, tell how far from its limit a resource ran. The one with most seconds bounds the run: only more of it, or
less use of it, makes the run much faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zeromesh.observe.breakdown import DATA, OTHER, Breakdown

COMPUTE, HOST, LINK, DISK, NETWORK = "compute", "host memory", "link to the host", "disk", "network"
INPUT, PROGRAM = "input", "the program"

WAITS: dict[str, str] = {
    "update_on_host": HOST,
    "offload": LINK,
    "wait_copy": LINK,
    "wait_disk": DISK,
    "wait_fetch": NETWORK,
    "wait_reduce": NETWORK,
    "sum_replicas": NETWORK,
    "sum_shares": NETWORK,
    "agree": NETWORK,
}
"""Resource that each kind of span waits for or works with; the network includes the other ranks."""

PHASES: dict[str, str] = {DATA: INPUT, OTHER: PROGRAM, "checkpoint": PROGRAM, "observe": PROGRAM}
"""Resource of time outside of spans; every other phase's own time is the device's."""

ADVICE: dict[str, str] = {
    COMPUTE: "the tiers cost little; a faster or a further device, fewer recomputed activations, or 16 bits help",
    HOST: "update_during_backward hides the update behind the backward, ratio < 1 leaves a share of it on the device, "
    "more ranks or nodes share it, and more micro-batches per update make it rarer",
    LINK: "more micro-batches or a larger one per update, a larger share on the device (ratio), or pin_memory",
    DISK: "larger micro-batches or more of them per update, more buffers (buffer_count), fewer bytes ("
    "split_master), a faster disk; or states on the host (device = cpu)",
    NETWORK: "fewer, larger micro-batches, a lower stage, hybrid sharding within nodes, 8 bits between nodes; or one "
    "rank waits for a slower one: look at a trace",
    INPUT: "prepare batches in other processes (dataloader workers), or ahead",
    PROGRAM: "this is time outside of forward, backward and step: checkpoints, logging, .item() in the training loop",
}


@dataclass(frozen=True)
class Amount:
    """Work of a resource in an update.

    Attributes:
        amount: bytes, or operations.
        limit: of them per second at best, as measured; None: unknown.
        busy: seconds in which it was at work, where that is known apart from what was waited for it.
    """

    amount: float
    limit: float | None = None
    busy: float | None = None


@dataclass(frozen=True)
class Use:
    """Use of a resource per update.

    Attributes:
        resource: which.
        seconds: that the update spent on it.
        share: of the update.
        amount: bytes, or operations where it is compute; None: unknown.
        rate: of them per second in which it was at work.
        limit: at best; None: unknown.
        of_limit: ``rate`` as a share of ``limit``.
    """

    resource: str
    seconds: float
    share: float
    amount: float | None = None
    rate: float | None = None
    limit: float | None = None
    of_limit: float | None = None


@dataclass(frozen=True)
class Bounds:
    """All resources of a run, the one that bounds it first.

    Attributes:
        updates: that were looked at.
        seconds: of one.
        uses: of each resource that time was spent on.
    """

    updates: int
    seconds: float
    uses: tuple[Use, ...]

    def as_dict(self) -> dict[str, Any]:
        """For programs: ``updates``, ``seconds``, ``bound`` (a resource), ``advice``, and per resource its ``Use``."""
        uses = {use.resource: {k: v for k, v in asdict(use).items() if k != "resource"} for use in self.uses}
        first = self.uses[0].resource
        return {
            "updates": self.updates, "seconds": self.seconds, "bound": first, "advice": ADVICE[first], "uses": uses
        }  # fmt: skip


def bounds(breakdown: Breakdown, amounts: Mapping[str, Amount]) -> Bounds:
    """Put the time of updates down to resources.

    Args:
        breakdown: of the updates.
        amounts: by resource, what is known of them, per update.
    """
    seconds: dict[str, float] = {}
    for phase, whole in breakdown.phases.items():
        left = whole
        for kind, part in breakdown.inside.get(phase, {}).items():
            if kind in WAITS:
                seconds[WAITS[kind]] = seconds.get(WAITS[kind], 0.0) + part
                left -= part
        resource = PHASES.get(phase, COMPUTE)
        seconds[resource] = seconds.get(resource, 0.0) + max(0.0, left)
    uses = [_use(name, spent, breakdown.total, amounts.get(name)) for name, spent in seconds.items()]
    # What takes no time is worth a row if it moved something.
    uses += [
        _use(name, 0.0, breakdown.total, one) for name, one in amounts.items() if name not in seconds and one.amount
    ]
    return Bounds(breakdown.updates, breakdown.total, tuple(sorted(uses, key=lambda use: -use.seconds)))


def together(parts: Sequence[Breakdown]) -> Breakdown:
    """One breakdown of the updates of several that follow each other."""
    updates = sum(part.updates for part in parts)

    def mean(values: Sequence[float]) -> float:
        return sum(value * part.updates for value, part in zip(values, parts, strict=True)) / updates

    phases = dict.fromkeys(phase for part in parts for phase in part.phases)
    kinds = {phase: dict.fromkeys(k for part in parts for k in part.inside.get(phase, {})) for phase in phases}
    return Breakdown(
        updates,
        mean([part.total for part in parts]),
        {phase: mean([part.phases.get(phase, 0.0) for part in parts]) for phase in phases},
        {
            phase: {kind: mean([part.inside.get(phase, {}).get(kind, 0.0) for part in parts]) for kind in named}
            for phase, named in kinds.items()
        },
    )


def _use(resource: str, seconds: float, total: float, known: Amount | None) -> Use:
    share = seconds / total if total > 0 else 0.0
    if known is None:
        return Use(resource, seconds, share)
    busy = seconds if known.busy is None else known.busy
    rate = known.amount / busy if busy > 0 else None
    of_limit = rate / known.limit if rate is not None and known.limit else None
    return Use(resource, seconds, share, known.amount, rate, known.limit, of_limit)
