"""A machine from measured times: efficiency of products and kernels by their sizes, and links from collectives."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from zeromesh.apps.plan.machine.cluster import Device, LinkSpeed, Machine, Node
from zeromesh.apps.plan.machine.presets import find_link
from zeromesh.base.devices import find_accelerator
from zeromesh.base.words import counted
from zeromesh.comm.link_speeds import SPEED

PADDINGS = (0.0, *(2.0 ** (power / 2) for power in range(15)))  # 1 to 128
FILLS = (0.0, *(2.0 ** (power / 2) for power in range(8, 22)))  # 16 to 1,448
CACHES = tuple(2.0 ** (power / 2) for power in range(38, 58))  # bytes, 512 KiB to 256 MiB
UNMEASURED = "ethernet-10"  # link between nodes where there is one node


class ProductTime(NamedTuple):
    """Measured time of a product."""

    dtype: str
    rows: int
    columns: int
    sums: int
    seconds: float


class ProductFit(NamedTuple):
    """Speed of products by dtype, padding and fill of all, and how far from the times they are."""

    flops: dict[str, float]
    padding: float
    fill: float
    error: float  # mean of |computed / measured - 1|


class MemoryFit(NamedTuple):
    """Speed of kernels from memory and from a cache."""

    bandwidth: float
    cache: float
    cache_bandwidth: float
    error: float


@dataclass(frozen=True)
class NodeFacts:
    """Measurements of one node: its host, and the times of each of its ranks, as ``measure_speeds`` returns them."""

    host: str
    memory: float  # bytes
    bandwidth: float  # bytes per second that all cores read and write in copies
    cores: int
    disk: tuple[float, float, float]  # bytes per second read and written, and bytes; 0: none
    ranks: Sequence[Mapping[str, Any]]
    load: float = 0.0  # processes that wanted to compute just before

    @property
    def busy(self) -> bool:
        """True where others computed at the same time, so that speeds are too low."""
        return self.load >= 1 + self.cores / 4

    @property
    def kind(self) -> tuple[str, int, int, int]:
        """Figures in which nodes of one kind agree: device, ranks, cores, and memory to the nearest 4 GB."""
        return str(self.ranks[0]["name"]), len(self.ranks), self.cores, round(self.memory / 4e9)


def fit_products(times: Sequence[ProductTime], smallest: float = 0.0) -> ProductFit:
    """Return speeds, padding and fill with which ``Device.product_seconds`` is nearest to the times.

    ``smallest`` are the seconds of a product of nearly nothing, which all times contain.
    """
    if not times:
        raise ValueError("there are no times of products; measure at least one")
    best = ProductFit({}, 0.0, 0.0, math.inf)
    counts = Counter(time.dtype for time in times)
    # A dtype that is so slow that few shapes were measured tells little of them.
    full = [dtype for dtype, count in counts.items() if 2 * count > max(counts.values())]
    for padding, fill in product(PADDINGS, FILLS):
        rates: dict[str, list[float]] = defaultdict(list)
        for dtype, rows, columns, sums, seconds in times:
            operations = 2.0 * ((rows + padding) * (columns + padding) + fill**2) * (sums + padding)
            rates[dtype].append(math.log(operations / max(seconds - smallest, seconds / 2)))
        # Medians, as a long product may not have run undisturbed in any of its tries.
        middle = {dtype: statistics.median(values) for dtype, values in rates.items()}
        error = statistics.fmean(abs(math.expm1(value - middle[dtype])) for dtype in full for value in rates[dtype])
        if error < best.error:
            best = ProductFit({dtype: math.exp(rate) for dtype, rate in middle.items()}, padding, fill, error)
    return best


def fit_memory(times: Sequence[tuple[float, float]]) -> MemoryFit:
    """Return bandwidths and the size of a cache with which ``Device.memory_seconds`` is nearest to (bytes, seconds).

    The smallest kernel's time is taken to be in all others.
    """
    (_, smallest), *larger = sorted(times)
    spent = [(size, max(seconds - smallest, seconds / 2)) for size, seconds in larger]
    largest, longest = spent[-1]
    fastest = max(size / seconds for size, seconds in spent)
    best = MemoryFit(largest / longest, 0.0, 0.0, math.inf)
    for cache in (0.0, *CACHES):
        beyond = longest - cache / fastest
        # The largest kernel is three times as large as any cache.
        if 3 * cache > largest or beyond <= 0:
            continue
        slow = (largest - cache) / beyond
        device = Device("", 1, {"fp32": 1}, slow, memory_efficiency=1, launch=0, cache=cache, cache_bandwidth=fastest)
        error = statistics.fmean(abs(device.memory_seconds(size) / seconds - 1) for size, seconds in spent)
        if error < best.error:
            best = MemoryFit(slow, cache, fastest if cache else 0.0, error)
    return best


def measured_machine(nodes: Sequence[NodeFacts], links: Mapping[str, Any] | None) -> Machine:
    """Return the machine of all nodes that were measured; ``links`` are those of ``zeromesh.comm.link_speeds.measure``.

    Nodes of one kind get the median of their figures.
    """
    notes = [f"measured on {', '.join(node.host for node in nodes)}"]
    notes += [
        f"{node.host} was busy: {node.load:.1f} processes on {node.cores} cores; its bandwidths are too low, so measure"
        " again when it is idle"
        for node in nodes
        if node.busy
    ]
    kinds: dict[tuple[str, int, int, int], list[NodeFacts]] = defaultdict(list)
    for node in nodes:
        kinds[node.kind].append(node)
    local = max(len(node.ranks) for node in nodes)
    inside = _link(links, "within nodes", 1)
    between = _link(links, "across nodes", local)
    if between is None:
        between = find_link(f"1 x {UNMEASURED}", local)
        notes.append(f"between nodes: {_why_unknown(links, 'across nodes', 'one node')}; taken as {UNMEASURED}")
    built = []
    for alike in kinds.values():
        typical_node, said = _node(alike, inside, _why_unknown(links, "within nodes", "one rank"))
        built.append((typical_node, len(alike)))
        notes += said
    name = ", ".join(f"{count} x {node.devices} x {node.device.name}" for node, count in built)
    return Machine(tuple(built), between, name, tuple(notes))


def _node(alike: Sequence[NodeFacts], inside: LinkSpeed | None, unknown: str) -> tuple[Node, list[str]]:
    first = alike[0]
    count = len(first.ranks)
    device, notes = _device(alike)
    memory = statistics.median(node.memory for node in alike)
    bandwidth = statistics.median(node.bandwidth for node in alike)
    copies = [rank["host"] for node in alike for rank in node.ranks if rank["host"]]
    if copies:
        latency, up, down = (statistics.median(values) for values in zip(*copies, strict=True))
        host = LinkSpeed(min(up, down), latency, efficiency=1.0)
    else:
        # A copy reads and writes, and all ranks share the memory.
        host = LinkSpeed(bandwidth / 2, device.launch, efficiency=1.0, shared=count)
        notes.append(
            f"a device is one of {counted(count, 'rank')} with {counted(first.ranks[0]['threads'], 'thread')}: "
            "an equal part of the host's memory, which is the host tier's too; its "
            "bandwidth was measured with all ranks at once"
        )
    waits = [rank["busy_latency"] for node in alike for rank in node.ranks if rank["busy_latency"] is not None]
    if inside is not None and waits:
        inside = replace(inside, latency=max(inside.latency, statistics.median(waits)))
        notes.append(f"a message between ranks of a node takes {inside.latency * 1e3:.2g} ms while all cores compute")
    if inside is None:
        inside = host
        notes.append(f"inside a node: {unknown}; taken as the link to the host")
    read, write, size = (statistics.median(values) for values in zip(*(node.disk for node in alike), strict=True))
    return (Node(device, count, inside, host, memory, bandwidth, first.cores, read, write, size, first.host), notes)


def _device(alike: Sequence[NodeFacts]) -> tuple[Device, list[str]]:
    ranks = [rank for node in alike for rank in node.ranks]
    name = str(ranks[0]["name"])
    fits = [fit_products(_products(ranks, part), _typical(ranks, "smallest")) for part in (0, 1, None)]
    odd, even, products = fits
    early, late, kernels = (fit_memory(_kernels(alike, part)) for part in (0, 1, None))
    fast = [dtype for dtype, speed in products.flops.items() if 10 * speed > max(products.flops.values())]
    spread = max(abs(odd.flops[dtype] / even.flops[dtype] - 1) for dtype in fast)
    notes = [
        f"{name}: products within {products.error:.0%} of the formula on average, kernels within {kernels.error:.0%};"
        f" two halves of the measurement differ by {spread:.0%} in products and"
        f" {abs(early.bandwidth / late.bandwidth - 1):.0%} in the memory's bandwidth"
    ]
    # Ranks that are more than the cores take turns, which the best times do not show.
    threads = len(alike[0].ranks) * (ranks[0]["threads"] or 0)
    turn = min(1.0, alike[0].cores / threads) if threads else 1.0
    device = Device(
        name,
        ranks[0]["memory"] or alike[0].memory / len(alike[0].ranks),
        {dtype: speed * turn for dtype, speed in products.flops.items()},
        kernels.bandwidth * turn,
        product_efficiency=1.0,
        memory_efficiency=1.0,
        launch=_typical(ranks, "launch") / turn,
        reserved=statistics.median(rank["reserved"] for rank in ranks),
        source="measured; the peaks are what large products reach",
        product_padding=products.padding,
        product_fill=products.fill,
        cache=kernels.cache,
        cache_bandwidth=kernels.cache_bandwidth * turn,
        **_fused(ranks, products, turn),
        processor=not ranks[0]["memory"],
    )
    accelerator = find_accelerator(name)
    if accelerator is None:
        return device, notes
    # The peaks of the data sheet, for the MFU, with the shares of them that were reached.
    half = device.half
    reached = min(1.0, products.flops[half] / accelerator.flops[half])
    flops = accelerator.flops | {dtype: speed / reached for dtype, speed in products.flops.items() if dtype != half}
    return replace(
        device,
        flops=flops,
        bandwidth=accelerator.bandwidth * 1e9,
        product_efficiency=reached,
        memory_efficiency=min(1.0, kernels.bandwidth / (accelerator.bandwidth * 1e9)),
        source=f"measured; peak in {half} and bandwidth: {accelerator.source}",
    ), notes


def _fused(ranks: Sequence[Mapping[str, Any]], products: ProductFit, turn: float) -> dict[str, float]:
    """Return the speed of fused attention and of the loss."""
    speed = products.flops.get("bf16") or products.flops.get("fp16") or products.flops["fp32"]
    rows = [
        (*rows[0][:2], statistics.median(min(times) for *_, times in rows))
        for rows in zip(*(rank["attention"] for rank in ranks), strict=True)
    ]
    figures: dict[str, float] = {}
    for way, after, more in (("forward", "", 1.0), ("backward", "_back", 5 / 4)):
        short, long = rows[way == "backward" :: 2]
        # seconds = operations x a + bytes x b, of which neither is negative.
        a = (long[2] - short[2] * long[1] / short[1]) / (long[0] - short[0] * long[1] / short[1])
        a = min(max(a, 1e-3 / speed), long[2] / long[0])
        b = max(0.0, short[2] - a * short[0]) / short[1]
        figures |= {
            f"attention_{way}": min(1.0, more / (a * speed)),
            f"attention_bandwidth{after}": turn / b if b else 0.0,
        }
    moved = ranks[0]["loss"][1]
    figures["loss_bandwidth"] = turn * moved / statistics.median(min(rank["loss"][2]) for rank in ranks)
    return figures


def _products(ranks: Sequence[Mapping[str, Any]], part: int | None) -> list[ProductTime]:
    """Return the median over the ranks of the best time of each product, of one half of the rounds or of all."""
    # Ranks of one kind have measured the same products, but for dtypes that are slow on some.
    best_times: dict[tuple[str, int, int, int], list[float]] = defaultdict(list)
    for rank in ranks:
        for dtype, rows, columns, sums, times in rank["products"]:
            best_times[dtype, rows, columns, sums].append(min(times if part is None else times[part::2]))
    return [ProductTime(*case, seconds=statistics.median(times)) for case, times in best_times.items()]


def _kernels(alike: Sequence[NodeFacts], part: int | None = None) -> list[tuple[float, float]]:
    """Return bytes and seconds of kernels, of the round in which a node's slowest rank was fastest."""
    best_times: dict[float, list[float]] = defaultdict(list)
    for node in alike:
        for rows in zip(*(rank["kernels"] for rank in node.ranks), strict=True):
            slowest = [max(times) for times in zip(*(times for _, times in rows), strict=True)]
            best_times[rows[0][0]].append(min(slowest if part is None else slowest[part::2]))
    return [(size, statistics.median(times)) for size, times in best_times.items()]


def _typical(ranks: Sequence[Mapping[str, Any]], name: str) -> float:
    best: list[float] = [min(rank[name]) for rank in ranks]
    return statistics.median(best)


def _link(links: Mapping[str, Any] | None, where: str, most: int) -> LinkSpeed | None:
    """Return the link of a kind: of a pair alone, and the share of it that an all-gather of all ranks reaches.

    At most ``most`` devices of a node share it. None if no bandwidth of the kind is known.
    """
    axes = [axis for axis in (links or {}).get("axes", ()) if axis["where"] == where and axis[SPEED] is not None]
    pairs = [pair for pair in (links or {}).get("pairs", ()) if pair["where"] == where and pair[SPEED] is not None]
    if not axes and not pairs:
        return None
    together = min((axis[SPEED] for axis in axes), default=0.0)
    alone = statistics.median(pair[SPEED] for pair in pairs) if pairs else together
    together = together or alone
    # With n ranks a ring has n - 1 steps.
    latencies = [axis["latency_seconds"] / (axis["ranks"] - 1) for axis in axes]
    latency = min(latencies) if latencies else statistics.median(pair["latency_seconds"] for pair in pairs)
    shared = min(most, max(1, round(alone / together)))
    bandwidth = max(alone, together * shared)
    return LinkSpeed(bandwidth, latency, together * shared / bandwidth, shared)


def _why_unknown(links: Mapping[str, Any] | None, where: str, otherwise: str) -> str:
    """Return why no bandwidth of a kind of link is known: what the measurement says, or that there was nothing."""
    rows = [row for kind in ("axes", "pairs") for row in (links or {}).get(kind, ()) if row["where"] == where]
    reasons = [row["unknown"] for row in rows if row[SPEED] is None]
    return f"unknown: {reasons[0]}" if reasons else f"not measured, as there was {otherwise}"
