"""Bounds of an engine's run: its own counts beside the best rates of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from pathlib import Path

import torch

from zeromesh.comm.agreement import catch
from zeromesh.comm.mesh import Mesh
from zeromesh.model.placement import Tier
from zeromesh.observe.bounds import COMPUTE, DISK, HOST, LINK, NETWORK, Amount, Bounds, bounds
from zeromesh.observe.machine import peak_flops
from zeromesh.observe.observer import Observer
from zeromesh.shard.sharded import ShardedModel
from zeromesh.tiers.bandwidth import measure_bandwidth
from zeromesh.tiers.link import Link
from zeromesh.tiers.memory import empty_on

PROBE = 64 << 20
"""Bytes that memory, link and disk are measured with; the network with a quarter."""

TIMES = 3


def find_bounds(
    observer: Observer, sharded: ShardedModel, dtype: torch.dtype, operations: float | None = None
) -> Bounds | None:
    """Find the resource that bounded the updates so far. Measures the machine for up to two seconds. Collective.

    Args:
        observer: that looked.
        sharded: what it looked at.
        dtype: that is computed in.
        operations: of this rank's device in an update, floating-point; None: not known.

    Returns:
        For this rank; None where no breakdown was switched on, or no update was seen.
    """
    found = observer.breakdown()
    if found is None:
        return None
    mesh, updates = sharded.mesh, observer.updates
    amounts: dict[str, Amount] = {}
    if operations is not None:
        amounts[COMPUTE] = Amount(operations, peak_flops(mesh.device, dtype))
    if sharded.updated_bytes:
        busy = sharded.updated_seconds / updates
        amounts[HOST] = Amount(sharded.updated_bytes / updates, memory_bandwidth(), busy)
    if sharded.link.moved:
        amounts[LINK] = Amount(sharded.link.moved / updates, link_bandwidth(mesh.device, sharded.row.pinned))
    disk = sharded.disk_traffic()
    if disk is not None:
        read, written = disk.bytes_read / updates, disk.bytes_written / updates
        limit = None if (folder := sharded.folder) is None else disk_bandwidth(folder, read, written)
        amounts[DISK] = Amount(read + written, limit, disk.busy_seconds / updates)
    sent = sum(mesh.traffic.bytes.values())
    if mesh.world_size > 1:  # all ranks measure, whatever each has sent
        amounts[NETWORK] = Amount(sent / updates, network_bandwidth(mesh))
    return bounds(found, amounts)


def memory_bandwidth() -> float:
    """Bytes per second that are read and written in place in host memory, by as many threads as torch uses."""
    memory = torch.ones(PROBE // 4)
    return 2 * memory.nbytes / _best(lambda: memory.mul_(1.0))


def link_bandwidth(device: torch.device, pinned: bool) -> float:
    """Bytes per second from the device to the host."""
    link, source = Link(device), torch.ones(PROBE, dtype=torch.uint8, device=device)
    target = empty_on(Tier.HOST, PROBE, torch.uint8, device, pinned)
    return PROBE / _best(lambda: link.to_host(target, source).wait())


def disk_bandwidth(folder: Path, read: float, written: float) -> float | None:
    """Bytes per second of a mixture of bytes that are read and written; None where there is no room to measure it."""
    found, _ = catch(lambda: measure_bandwidth(folder, PROBE))
    if found is None or not read + written:
        return None
    return (read + written) / (read / found.read + written / found.write)


def network_bandwidth(mesh: Mesh) -> float:
    """Bytes per second that this rank sends when all ranks sum a large tensor. All call it."""
    group, tensor, traffic = mesh.group("world"), torch.ones(PROBE // 16, device=mesh.device), mesh.traffic
    kept = {name: copy(getattr(traffic, name)) for name in ("calls", "bytes", "across")}
    listener, traffic.listener = traffic.listener, None
    traffic.bytes.clear()

    def add_up() -> None:
        group.all_reduce(tensor, 0)
        float(tensor[0])  # when it is there

    try:
        seconds = _best(add_up)
        return sum(traffic.bytes.values()) / (TIMES + 1) / seconds
    finally:
        traffic.listener = listener
        for name, value in kept.items():
            setattr(traffic, name, value)


def _best(do: Callable[[], object]) -> float:
    """Seconds of the best of some times, after one that is not counted."""
    do()
    found = float("inf")
    for _ in range(TIMES):
        start = time.perf_counter()
        do()
        found = min(found, time.perf_counter() - start)
    return found
