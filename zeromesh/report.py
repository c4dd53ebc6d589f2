"""What the engine holds and moves, counted from its own buffers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from zeromesh.dist.collectives import Traffic
from zeromesh.observe.process import live_bytes, peak_bytes
from zeromesh.shard.sharded import Sharded

STATES = ("parameter", "gradient", "optimizer", "slot", "buffer")


def memory(sharded: Sharded, optimizer: Optimizer | None) -> dict[str, Any]:
    """Bytes by state and tier on this rank, at the most: slots and gradients may be there during a step only.

    Returns:
        For each of ``STATES`` a dict of tier to bytes; ``total``, their sum; ``measured``, what the process uses now
        (``live``) and has used at most (``peak``), and ``remainder``: the peak less the total, which is activations,
        temporaries, fragmentation, and on a CPU Python and torch themselves.
    """
    tiers: dict[str, dict[str, int]] = {state: defaultdict(int) for state in STATES}
    for state, tier, size in [*sharded.memory(), *_optimizer_state(sharded, optimizer)]:
        tiers[state][tier] += size
    total = sum(sum(sizes.values()) for sizes in tiers.values())
    live = live_bytes(sharded.mesh.device)
    # The kernel notes peaks now and then only.
    peak = max(live, peak_bytes(sharded.mesh.device))
    measured = {"live": live, "peak": peak, "remainder": peak - total}
    return {**{state: dict(sizes) for state, sizes in tiers.items()}, "total": total, "measured": measured}


def _optimizer_state(sharded: Sharded, optimizer: Optimizer | None) -> Iterator[tuple[str, str, int]]:
    tiers = {id(piece.parameter): flat.optimizer_tier for flat in sharded.flats for _, _, piece in flat.pieces}
    for parameter, state in optimizer.state.items() if optimizer else ():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield "optimizer", tiers[id(parameter)].value, value.nbytes


def traffic(counted: Traffic, reset: bool) -> dict[str, dict[str, float]]:
    """What was sent, by ``collective/axis``; with ``reset`` the count starts anew.

    Returns:
        For each: ``bytes`` that this rank sent, ``calls``, ``across_nodes`` (bytes of them that went to other nodes),
        and ``relative_error`` where numbers were rounded for links between nodes: the root of the mean square of the
        errors, relative to that of the numbers.
    """
    found: dict[str, dict[str, float]] = {}
    for kind, axis in sorted(counted.bytes):
        found[f"{kind}/{axis}"] = {
            "bytes": counted.bytes[kind, axis],
            "calls": counted.calls[kind, axis],
            "across_nodes": counted.across[kind, axis],
        }
        error = counted.relative_error(kind, axis)
        if error is not None:
            found[f"{kind}/{axis}"]["relative_error"] = error
    if reset:
        counted.reset()
    return found
