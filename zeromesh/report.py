"""Reports of an engine's memory and traffic, counted from its own buffers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from zeromesh.comm.traffic import Traffic
from zeromesh.model.placement import Tier
from zeromesh.observe.process import live_bytes, peak_bytes
from zeromesh.shard.sharded import ShardedModel

if TYPE_CHECKING:
    from zeromesh.activation.store import ActivationStore

STATES = ("parameter", "gradient", "optimizer", "slot", "buffer", "activation")


def memory(
    sharded: ShardedModel, optimizer: Optimizer | None, activations: ActivationStore | None = None
) -> dict[str, Any]:
    """Bytes by state and tier on this rank, at the most: slots and gradients may be there during a step only.

    Returns:
        For each of ``STATES`` a dict of tier (``device``, ``host`` or ``nvme``) to bytes; ``total``, their sum;
        ``measured``, what the process uses now (``live``) and has used at most (``peak``), and ``remainder``: the peak
        less what is counted on the measured device, which is other activations, temporaries, fragmentation, and on a
        CPU Python and torch themselves. ``activation`` is what activation checkpointing has had in host memory at the
        most so far.
    """
    tiers: dict[str, dict[str, int]] = {state: defaultdict(int) for state in STATES}
    for state, tier, size in [*sharded.memory(), *_optimizer_state(sharded, optimizer)]:
        tiers[state][tier] += size
    if activations is not None and activations.pool is not None:
        tiers["activation"]["host"] = activations.pool.peak
    total = sum(sum(sizes.values()) for sizes in tiers.values())
    live = live_bytes(sharded.mesh.device)
    # The kernel notes peaks now and then only.
    peak = max(live, peak_bytes(sharded.mesh.device))
    cpu = sharded.mesh.device.type == "cpu"
    here = sum(sizes.get("device", 0) + (sizes.get("host", 0) if cpu else 0) for sizes in tiers.values())
    measured = {"live": live, "peak": peak, "remainder": peak - here}
    return {**{state: dict(sizes) for state, sizes in tiers.items()}, "total": total, "measured": measured}


def _optimizer_state(sharded: ShardedModel, optimizer: Optimizer | None) -> Iterator[tuple[str, str, int]]:
    flats = {id(piece.parameter): flat for flat in sharded.flats for _, _, piece in flat.pieces}
    for parameter, state in optimizer.state.items() if optimizer else ():
        flat = flats[id(parameter)]
        for value in state.values():
            if isinstance(value, torch.Tensor) and not (
                flat.keeps_states and value.ndim
            ):  # those are counted with the masters
                on_disk = flat.optimizer_tier is Tier.NVME
                yield "optimizer", "host" if on_disk else flat.optimizer_tier.value, value.nbytes


def traffic(counted: Traffic, reset: bool) -> dict[str, dict[str, float]]:
    """Return the traffic by ``collective/axis``; ``reset`` starts the count anew.

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
