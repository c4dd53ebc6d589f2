"""Speed of the ranks' links: along each axis of a mesh, and between pairs of ranks.

Messages of ever more bytes are timed, and ``seconds = latency + bytes / bandwidth`` is fitted to them. Where the times
do not show a bandwidth, it is unknown, and the result says why.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from operator import mul
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zeromesh.base.kernels.measure import seconds_of, synchronize
from zeromesh.base.words import bytes_text
from zeromesh.comm.agreement import texts
from zeromesh.comm.collectives import Group
from zeromesh.comm.environment import Environment
from zeromesh.comm.mesh import Mesh

# Bytes per rank of the all-gathers that are timed, ascending; a slow link does not get to the last.
SIZES = tuple(1 << power for power in (10, 14, 17, 20, 22, 24, 26))
MOST_BYTES = 256 << 20  # of a gathered buffer, which every rank of a machine holds

PAIR_SIZES = tuple(1 << power for power in (10, 14, 17, 20, 23))
MOST_PAIRS = 28  # all pairs of 8 ranks; they are timed one after the other
SECONDS = 20.0  # at most; fast links take a few
PAIR_SECONDS = 2.0  # of one pair at least, while there is time: a link of 12.5 MB/s and 10 ms is known after 1.2
SPEED = "bandwidth_bytes_per_second"

REPEATS, MOST_REPEATS = 3, 24  # of messages of one size
STEADY = 0.05  # a size is repeated until its two fastest messages differ by no more of the faster
APART = 128  # times the smallest message that the largest has at least
VISIBLE = 3.0  # times the smallest message's seconds that the largest takes at least; less is latency and noise
PLAIN = 8.0  # so many times show the bandwidth well; larger messages are timed if they take no longer than QUICK
QUICK = 0.1  # seconds
UNSTEADY, UNLIKE = 0.5, 2.0  # the largest spread, and the largest factor of a time to the fit, of what is known


class Timing(NamedTuple):
    """Messages of one size."""

    nbytes: int
    seconds: float  # of the fastest
    spread: float  # how much longer the second fastest took, in parts of the fastest


class LinkFit(NamedTuple):
    """Latency and bandwidth of a link: ``seconds = latency + bytes / bandwidth``."""

    latency: float | None  # seconds; None if nothing was timed
    bandwidth: float | None  # bytes per second; None if it is unknown
    unknown: str  # why the bandwidth is unknown; "" if it is not

    def entry(self) -> dict[str, Any]:
        """Return the link's entries in a report."""
        return {"latency_seconds": self.latency, SPEED: self.bandwidth, "unknown": self.unknown or None}


def fit_link(timings: Sequence[Timing]) -> LinkFit:
    """Return the latency and the bandwidth with the least relative errors, or why the bandwidth is unknown."""
    if not timings:
        return LinkFit(None, None, "the time was up before its turn")
    first, last = timings[0], timings[-1]
    if last.nbytes < APART * first.nbytes:
        why = f"the time was up after messages of {bytes_text(last.nbytes)}, which show the latency alone"
        return LinkFit(first.seconds, None, why)
    # Least squares of (latency + bytes x slope) / seconds = 1.
    inverse = [1 / row.seconds for row in timings]
    rate = [row.nbytes / row.seconds for row in timings]
    aa, ab, bb = (sum(map(mul, *factors)) for factors in ((inverse, inverse), (inverse, rate), (rate, rate)))
    slope = (aa * sum(rate) - ab * sum(inverse)) / (aa * bb - ab * ab)
    if slope <= 0 or last.seconds < VISIBLE * first.seconds:
        why = f"messages of {bytes_text(last.nbytes)} take hardly longer than those of {bytes_text(first.nbytes)}"
        return LinkFit(first.seconds, None, why)
    latency = max(first.seconds - first.nbytes * slope, 0.0) or first.seconds
    spread = max(first.spread, last.spread)
    if spread > UNSTEADY:
        return LinkFit(latency, None, f"times of messages of one size differ by {spread:.0%}: other work disturbs them")
    ratios = [(latency + row.nbytes * slope) / row.seconds for row in timings]
    if max(*ratios, *(1 / ratio for ratio in ratios)) > UNLIKE:
        why = f"times of messages are more than {UNLIKE:g} times longer or shorter than latency + bytes / bandwidth"
        return LinkFit(latency, None, f"{why}: other work disturbs them")
    return LinkFit(latency, 1 / slope, "")


def time_sizes(sizes: Sequence[int], run: Callable[[int, int], list[float]], seconds: float) -> list[Timing]:
    """Time messages of ascending sizes until they show the bandwidth, or ``seconds`` are over.

    ``run(size, repeats)`` returns the seconds of each message. The first of a size is a warm-up: with nccl it connects
    the ranks, and TCP sends more at a time after it.
    """
    timings: list[Timing] = []
    spent = 0.0
    for size in sizes:
        if timings:
            first, last = timings[0], timings[-1]
            expected = last.seconds * size / last.nbytes  # at most
            plain = last.seconds >= PLAIN * first.seconds and expected > QUICK and not fit_link(timings).unknown
            if plain or spent + (1 + REPEATS) * expected > seconds:
                break
        elif not seconds > 0:
            break
        spent += sum(times := run(size, 1 + REPEATS))
        end = min(seconds, spent + seconds / len(sizes))
        best = sorted(times[1:])
        while best[1] > (1 + STEADY) * best[0] and len(best) < MOST_REPEATS and spent + REPEATS * best[0] < end:
            spent += sum(times := run(size, REPEATS))
            best = sorted(best + times)
        timings.append(Timing(size, best[0], best[1] / best[0] - 1))
    return timings


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
    """Measure bandwidth and latency of the links, in at most about ``seconds``. Collective.

    The mesh is one of ``mesh_of_nodes``, and ``node_of`` the node of each rank. Return ``{axes, pairs, slowest_pair}``,
    on every rank the same: of each axis the latency of an all-gather, and the bytes that a rank receives per second; of
    each pair latency and bandwidth one way. A bandwidth that is unknown is None, and ``unknown`` says why.
    """
    begin = time.perf_counter()
    axes = [axis for axis, size in mesh.sizes.items() if size > 1]
    axis_speeds = [_axis(mesh, mesh.group(axis), node_of, seconds / 2 / len(axes)) for axis in axes]
    pairs = _pairs(mesh, node_of, begin + seconds)
    slowest = min((pair for pair in pairs if pair[SPEED] is not None), key=lambda pair: pair[SPEED], default=None)
    return {"axes": axis_speeds, "pairs": pairs, "slowest_pair": slowest}


def _axis(mesh: Mesh, group: Group, node_of: list[int], seconds: float) -> dict[str, Any]:
    def gathers(size: int, repeats: int) -> list[float]:
        shard = torch.ones(size, dtype=torch.uint8, device=mesh.device)
        full = torch.empty(size * group.size, dtype=torch.uint8, device=mesh.device)
        times = [seconds_of(lambda: group.all_gather(full, shard, 0).wait(), mesh.device) for _ in range(repeats)]
        # Those of the slowest rank: all ranks have the same numbers, and so decide alike.
        slowest: list[float] = mesh.group("world").exchange(torch.tensor(times, dtype=torch.float64)).amax(0).tolist()
        return slowest

    sizes = [size for size in SIZES if size == SIZES[0] or size * group.size <= MOST_BYTES]
    timings = time_sizes(sizes, gathers, seconds)
    one_node = len(set(node_of)) == 1
    inside = one_node or (group.axis == "data" and len(set(node_of)) == mesh.sizes["replicate"])
    received = [timing._replace(nbytes=timing.nbytes * (group.size - 1)) for timing in timings]
    return {
        "axis": group.axis,
        "ranks": group.size,
        "where": "within nodes" if inside else "across nodes",
        "all_gather": [{"bytes": timing.nbytes, "seconds": timing.seconds} for timing in timings],
        **fit_link(received).entry(),
    }


def _pairs(mesh: Mesh, node_of: list[int], end: float) -> list[dict[str, Any]]:
    pairs = list(combinations(range(mesh.world_size), 2))
    if len(pairs) > MOST_PAIRS:  # some neighbours only
        step = -(-mesh.world_size // MOST_PAIRS)
        pairs = [(rank, (rank + step) % mesh.world_size) for rank in range(0, mesh.world_size, step)]
    fits: dict[int, LinkFit] = {}
    for number, pair in enumerate(pairs):
        if mesh.rank == pair[0]:
            left = end - time.perf_counter()
            seconds = max(PAIR_SECONDS, left / (len(pairs) - number)) if left > 0 else 0.0
            fits[number] = _lead(mesh, pair[1], min(seconds, end - time.perf_counter()))
        elif mesh.rank == pair[1]:
            _follow(mesh, pair[0])
        mesh.group("world").exchange(torch.zeros(1))  # one pair at a time
    rows = [json.loads(text) for text in texts(mesh.group("world"), json.dumps(fits))]
    return [
        {
            "ranks": [first, second],
            "where": "within nodes" if node_of[first] == node_of[second] else "across nodes",
            **LinkFit(*rows[first][str(number)]).entry(),
        }
        for number, (first, second) in enumerate(pairs)
    ]


def _lead(mesh: Mesh, other: int, seconds: float) -> LinkFit:
    """Return latency and bandwidth one way to another rank, which sends back what it gets."""

    def back_and_forth(size: int, repeats: int) -> list[float]:
        dist.send(torch.tensor([float(size), float(repeats)], device=mesh.device), other)
        data = torch.ones(size, dtype=torch.uint8, device=mesh.device)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            dist.send(data, other)
            dist.recv(data, other)
            synchronize(mesh.device)
            times.append((time.perf_counter() - start) / 2)
        return times

    timings = time_sizes(PAIR_SIZES, back_and_forth, seconds / 2)
    dist.send(torch.zeros(2, device=mesh.device), other)
    return fit_link(timings)


def _follow(mesh: Mesh, leader: int) -> None:
    word = torch.empty(2, device=mesh.device)
    while True:
        dist.recv(word, leader)
        size, repeats = map(int, word.tolist())
        if not repeats:
            return
        data = torch.empty(size, dtype=torch.uint8, device=mesh.device)
        for _ in range(repeats):
            dist.recv(data, leader)
            dist.send(data, leader)
        synchronize(mesh.device)
