"""Largest allocations of a rank, by state and tier."""

from __future__ import annotations

from collections.abc import Iterator

from zeromesh.base.placement import Tier
from zeromesh.base.quantized_layers import layers, states
from zeromesh.shard.sharded import ShardedModel


def allocations(sharded: ShardedModel) -> Iterator[tuple[str, str, int]]:
    """Yield (state, tier, bytes) of what the model's states take at the most."""
    for flat in sharded.flats:
        rest, tier = (flat.shard, flat.parameter_tier) if flat.sharded else (flat.full, Tier.DEVICE)
        if not tier.in_blocks or flat in sharded.tables.flats:
            yield "optimizer" if rest.dtype != flat.layout.dtype else "parameter", tier.value, rest.nbytes
        if flat.master is not flat.shard and not flat.keeps_states:
            yield "optimizer", flat.optimizer_tier.value, flat.master.nbytes
    for table in sharded.tables:
        table.wait()
        yield "slot", table.rows.cache_tier.value, table.rows.nbytes
    if (swap := sharded.store.swap) is not None:
        yield "optimizer", swap.tier.value, swap.blocks.nbytes
        yield "slot", "host", swap.host_bytes
    yield "slot", "host", sharded.early.nbytes
    if (stored := sharded.store.stored) is not None:
        yield "parameter", stored.tier.value, stored.blocks.nbytes
        yield "slot", "host", stored.blocks.host_bytes
    reducer = sharded.reducer
    for tier, size in reducer.memory.shard_bytes.items():
        yield "gradient", tier.value, size
    yield "slot" if reducer.policy.sharded else "gradient", "device", reducer.memory.full_bytes
    if reducer.host_bytes:
        yield "slot", "host", reducer.host_bytes
    for pool in (*reducer.memory.pools[1:], sharded.pool, sharded.root_pool):
        yield "slot", "device", pool.nbytes
    for buffer in sharded.model.buffers():
        yield "buffer", "device", buffer.nbytes
    # By address, because layers share tables of a library.
    scales = {scale.data_ptr(): scale.nbytes for _, layer in layers(sharded.model) for scale in states(layer)}
    yield "buffer", "device", sum(scales.values())
