"""Resource that bounds a run, and its distance from its limit.

Every second of an update is put down to one resource. The one with most seconds bounds the run: only more of it, or
less use of it, makes the run much faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeromesh.engine.observe.breakdown import DATA, OTHER, Breakdown

COMPUTE, HOST, LINK, DISK, NETWORK = "compute", "host memory", "link to the host", "disk", "network"
INPUT, PROGRAM = "input", "the program"

# Resource that each kind of span waits for or works with; the network includes the other ranks.
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

# Resource of time outside of spans; every other phase's own time is the device's.
PHASES: dict[str, str] = {DATA: INPUT, OTHER: PROGRAM, "checkpoint": PROGRAM, "observe": PROGRAM}

ADVICE: dict[str, str] = {
    COMPUTE: "To go faster: bf16, less recomputation, a faster or a second GPU.",
    HOST: "To go faster: offload_optimizer.update_during_backward, offload_optimizer.ratio < 1, more ranks, or more "
    "micro-batches per update.",
    LINK: "To go faster: larger or more micro-batches per update, a smaller offload_optimizer.ratio, or pin_memory.",
    DISK: "To go faster: larger or more micro-batches per update, more buffers (buffer_count), "
    "offload_optimizer.split_master, a faster disk, or states on the host (offload_optimizer.device = cpu).",
    NETWORK: "To go faster: fewer, larger micro-batches, a lower stage, hybrid sharding within nodes, or 8 bits "
    "between nodes. A slow rank also looks like this: look at a trace.",
    INPUT: "To go faster: prepare batches ahead, or in other processes (workers of the data loader).",
    PROGRAM: "This is time outside of forward, backward and step: checkpoints, logging, .item() in the training loop.",
}


@dataclass(frozen=True)
class Amount:
    """Work of a resource in an update: bytes, or operations."""

    amount: float
    limit: float | None = None  # most per second, as measured
    busy: float | None = None  # seconds at work, where known apart from the time that was waited for it


def bounds(breakdown: Breakdown, amounts: Mapping[str, Amount]) -> dict[str, Any]:
    """Put the time of updates down to resources; see ``Reports.bound_report`` for what is returned.

    ``amounts`` are per update, by resource, where they are known.
    """
    seconds: dict[str, float] = {}
    for phase, total in breakdown.phases.items():
        left = total
        for kind, part in breakdown.inside.get(phase, {}).items():
            if kind in WAITS:
                seconds[WAITS[kind]] = seconds.get(WAITS[kind], 0.0) + part
                left -= part
        # The rest of forward, backward and step is the device's, which computes.
        resource = PHASES.get(phase, COMPUTE)
        seconds[resource] = seconds.get(resource, 0.0) + max(0.0, left)
    # What takes no time is worth a row if it moved something.
    seconds |= {name: 0.0 for name, amount in amounts.items() if name not in seconds and amount.amount}
    # Sorted, so that the first one bounds the run.
    ranked = sorted(seconds, key=lambda name: -seconds[name])
    uses = {name: _use(seconds[name], breakdown.total, amounts.get(name)) for name in ranked}
    updates, total, first = breakdown.updates, breakdown.total, ranked[0]
    return {"updates": updates, "seconds": total, "bound": first, "advice": ADVICE[first], "uses": uses}


def _use(seconds: float, total: float, work: Amount | None) -> dict[str, float | None]:
    """Return the use of a resource in an update of ``total`` seconds; what is unknown is None."""
    amount = limit = rate = None
    if work is not None:
        amount, limit, busy = work.amount, work.limit, seconds if work.busy is None else work.busy
        rate = amount / busy if busy > 0 else None
    of_limit = rate / limit if rate is not None and limit else None
    share = seconds / total if total > 0 else 0.0
    return {"seconds": seconds, "share": share, "amount": amount, "rate": rate, "limit": limit, "of_limit": of_limit}
