"""Speed of the ranks' links: along each axis of a mesh, and between pairs of ranks."""

from __future__ import annotations

import time
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.base.kernels.measure import seconds_of, synchronize
from zeromesh.comm.collectives import Group
from zeromesh.comm.environment import Environment
from zeromesh.comm.mesh import Mesh

# Bytes per rank of the all-gathers that are timed, ascending; a slow link does not get to the last.
SIZES = tuple(1 << power for power in (10, 14, 18, 20, 22, 24, 26))
MOST_BYTES = 256 << 20  # of a gathered buffer, which every rank of a machine holds

PAIR_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
MOST_PAIRS = 28  # all pairs of 8 ranks; they are timed one after the other
SECONDS = 4.0
SPEED = "bandwidth_bytes_per_second"
REPEATS = 5


def mesh_of_nodes(environment: Environment, device: torch.device) -> Mesh:
    """Return a mesh with ``data`` within nodes and ``replicate`` across them; one axis if nodes differ. Collective."""
    place = torch.tensor([environment.node_rank, environment.local_rank, environment.local_world_size], device=device)
    rows = [torch.empty_like(place) for _ in range(environment.world_size)]
    dist.all_gather(rows, place)
    local = environment.local_world_size
    even = all(row.tolist() == [rank // local, rank % local, local] for rank, row in enumerate(rows))
    nodes = environment.world_size // local if even else 1
    return Mesh({"replicate": nodes, "data": environment.world_size // nodes}, device)


def measure(mesh: Mesh, node_of: list[int], seconds: float = SECONDS) -> dict[str, Any]:
    """Measure bandwidth and latency of the links in about ``seconds``. Collective.

    The mesh is one of ``mesh_of_nodes``, and ``node_of`` the node of each rank. Return ``{axes, pairs, slowest_pair}``,
    on every rank the same: of each axis the time of the fastest all-gather, and the most bytes that a rank receives per
    second in any; of each pair latency and bandwidth one way.
    """
    axes = [axis for axis, size in mesh.sizes.items() if size > 1]
    axis_speeds = [_axis(mesh, mesh.group(axis), node_of, seconds / 2 / len(axes)) for axis in axes]
    pairs = _pairs(mesh, node_of, seconds / 2)
    return {"axes": axis_speeds, "pairs": pairs, "slowest_pair": min(pairs, key=lambda pair: pair[SPEED], default=None)}


def _axis(mesh: Mesh, group: Group, node_of: list[int], seconds: float) -> dict[str, Any]:
    times: list[dict[str, float]] = []
    spent = 0.0
    sizes = [size for size in SIZES if size == SIZES[0] or size * group.size <= MOST_BYTES]
    for size, following in zip(sizes, [*sizes[1:], 0], strict=True):
        shard = torch.ones(size, dtype=torch.uint8, device=mesh.device)
        full = torch.empty(size * group.size, dtype=torch.uint8, device=mesh.device)

        def gather(full: torch.Tensor = full, shard: torch.Tensor = shard) -> None:
            group.all_gather(full, shard, 0).wait()

        gather()  # the first one takes longer: with nccl it connects the ranks
        start = time.perf_counter()
        best = min(seconds_of(gather, mesh.device) for _ in range(REPEATS))
        times_here = torch.tensor([best, time.perf_counter() - start], dtype=torch.float64)
        best, took = mesh.group("world").exchange(times_here).amax(0).tolist()
        times.append({"bytes": size, "seconds": best})
        spent += took
        # All ranks have the same numbers, those of the slowest, and so decide alike.
        if spent + took * following / size > seconds:
            break
    one_node = len(set(node_of)) == 1
    inside = one_node or (group.axis == "data" and len(set(node_of)) == mesh.sizes["replicate"])
    return {
        "axis": group.axis,
        "ranks": group.size,
        "where": "within nodes" if inside else "across nodes",
        "all_gather": times,
        "latency_seconds": min(row["seconds"] for row in times),
        SPEED: max(row["bytes"] * (group.size - 1) / row["seconds"] for row in times),
    }


def _pairs(mesh: Mesh, node_of: list[int], seconds: float) -> list[dict[str, Any]]:
    pairs = list(combinations(range(mesh.world_size), 2))
    if len(pairs) > MOST_PAIRS:  # some neighbours only
        step = -(-mesh.world_size // MOST_PAIRS)
        pairs = [(rank, (rank + step) % mesh.world_size) for rank in range(0, mesh.world_size, step)]
    speeds_here = torch.zeros(len(pairs) * 2, dtype=torch.float64)
    for number, pair in enumerate(pairs):
        if mesh.rank in pair:
            latency, bandwidth = _pair(mesh, *pair, seconds / len(pairs))
            if mesh.rank == pair[0]:
                speeds_here[2 * number : 2 * number + 2] = torch.tensor([latency, bandwidth], dtype=torch.float64)
        mesh.group("world").exchange(torch.zeros(1))  # one pair at a time
    values = mesh.group("world").exchange(speeds_here).sum(0).tolist()  # each number is 0 on all ranks but one
    return [
        {
            "ranks": [first, second],
            "where": "within nodes" if node_of[first] == node_of[second] else "across nodes",
            "latency_seconds": values[2 * number],
            SPEED: values[2 * number + 1],
        }
        for number, (first, second) in enumerate(pairs)
    ]


def _pair(mesh: Mesh, first: int, second: int, seconds: float) -> tuple[float, float]:
    """Return latency and bandwidth one way: the first of two ranks sends, and gets back, ever more bytes."""
    leads, other = mesh.rank == first, second if mesh.rank == first else first
    latency, bandwidth, begin = 0.0, 0.0, time.perf_counter()
    for size in PAIR_SIZES:
        data = torch.ones(size, dtype=torch.uint8, device=mesh.device)
        # The first knows the time, and tells the second whether larger messages follow.
        expected = 2 * (1 + REPEATS) * size / bandwidth if bandwidth else 0.0
        word = torch.tensor([time.perf_counter() - begin + expected < seconds], device=mesh.device).float()
        dist.send(word, other) if leads else dist.recv(word, other)
        if not bool(word):
            return latency, bandwidth
        best = float("inf")
        for repeat in range(1 + REPEATS):
            start = time.perf_counter()
            dist.send(data, other) if leads else dist.recv(data, other)
            dist.recv(data, other) if leads else dist.send(data, other)
            synchronize(mesh.device)
            if repeat:
                best = min(best, (time.perf_counter() - start) / 2)
        latency, bandwidth = latency or best, size / best
    return latency, bandwidth
