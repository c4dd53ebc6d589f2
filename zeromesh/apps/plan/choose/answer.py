"""Reasons for a plan: what limits it, what would change it, what else fits, and what to do if nothing fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from zeromesh.apps.plan.choose.certainty import interval_text, tight_text
from zeromesh.apps.plan.choose.fit import lacking
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.choose.resting_experts import resting_text
from zeromesh.apps.plan.choose.search import ALIKE, PlanCandidate, PlanResult, SearchEffort, search
from zeromesh.apps.plan.choose.space import LayoutSpace, PlanRequest
from zeromesh.apps.plan.cost.cost import CostSource, ModelCost, Recompute
from zeromesh.apps.plan.machine.cluster import Machine, Node
from zeromesh.apps.plan.machine.collective_times import fabric, wire
from zeromesh.apps.plan.predict.lower_bounds import devices_of_a_node, least_memory, slowest
from zeromesh.apps.plan.predict.rank_memory import RankMemory
from zeromesh.base.placement import Tier
from zeromesh.base.words import bytes_text, counted, scaled_text
from zeromesh.comm.message_formats import BLOCK, FORMATS
from zeromesh.config.written import ADVICE, row_name

LEAST_GAIN = 0.02  # share of a step that is worth saying
SHORTEST = 128  # tokens of a sequence that is still proposed
ROUNDED = 64  # bytes that a device reads and writes to round and restore an element, in sixteen passes over fp32
ADDED_DISK = (30e12, 12e9, 6e9)  # bytes, and bytes per second read and written, of four usual NVMe disks


# Units of a model at its ends, and their names for people.
PLACES = (
    (r"(?:\S*\.)?(?:lm_head|head|embed_out)|after \S+", "the output layer"),
    (r"(?:\S*\.)?(?:embed_tokens|wte|embedding)|before \S+", "the embedding"),
)


class Gain(NamedTuple):
    """A change of the machine or the run, and the share of the step's time that it saves."""

    change: str
    share: float


class Remedy(NamedTuple):
    """A change after which something fits."""

    kind: str  # key of ``ADVICE``
    text: str
    effort: float  # what it costs, in parts of the machine's price: a coarse order


class Largest(NamedTuple):
    """Largest sizes that one layout holds."""

    micro_batch: int
    sequence: int
    blocks: int
    parameters: int


@dataclass(frozen=True)
class DeeperModel:
    """A model with another number of blocks, all else being equal."""

    source: CostSource
    blocks: int

    @property
    def name(self) -> str:
        """Name of the model it is made from."""
        return self.source.name

    def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
        """Return the cost of a micro-batch."""
        cost = self.source.at(micro_batch, sequence, context)
        model_blocks = [unit for unit in cost.units if unit.block]
        first = next(place for place, unit in enumerate(cost.units) if unit.block)
        others = [unit for unit in cost.units[first:] if not unit.block]
        blocks = [model_blocks[place % len(model_blocks)] for place in range(self.blocks)]
        return replace(cost, units=(*cost.units[:first], *blocks, *others))


@dataclass(frozen=True)
class PlanAnswer:
    """All that is said of a search's result."""

    result: PlanResult
    gains: tuple[Gain, ...] = ()
    largest: Largest | None = None
    remedies: tuple[Remedy, ...] = ()
    lacks: tuple[ParallelLayout, tuple[RankMemory, ...], dict[str, float]] | None = None


def answer(result: PlanResult) -> PlanAnswer:
    """Return the reasons of a result, each computed by a search or by the same memory and time."""
    request = result.request
    if result.best is None:
        layout, ranks = result.nearest[0]
        lacks = layout, ranks, lacking(ranks, layout, request.machine)
        return PlanAnswer(result, remedies=tuple(_remedies(request)), lacks=lacks)
    best = result.best
    return PlanAnswer(result, tuple(_gains(request, best)), largest_of(request, best.layout, best.machine))


# What the best layout is bound by.


def shares_of(candidate: PlanCandidate) -> list[tuple[str, float]]:
    """Return the resources that the slowest rank waits for, by their shares of the step, the largest first."""
    total = sum(candidate.time.waits.values()) or 1.0
    return sorted(((name, value / total) for name, value in candidate.time.waits.items()), key=lambda pair: -pair[1])


def reason_of(candidate: PlanCandidate) -> str:
    """Return the limits of a layout in a few words, for a table."""
    shares = shares_of(candidate)
    said = [f"{name} {share:.0%}" for name, share in shares[:2] if share >= 0.05 or name == shares[0][0]]
    limit = least_memory(candidate.machine)
    full = candidate.fullest.device / limit
    return ", ".join([*said, f"memory {full:.0%}"] if full >= 0.85 else said)


def shares_text(candidate: PlanCandidate) -> str:
    """Return the resources with most of the step's time, for people."""
    return ", ".join(f"{name} {share:.0%}" for name, share in shares_of(candidate)[:4] if share >= 0.005)


def fullest_text(candidate: PlanCandidate) -> str:
    """Return the ranks whose devices need most, for people."""
    return f"pipeline rank {candidate.fullest.pipeline_rank}" if candidate.layout.pipeline > 1 else "each rank"


def moment_text(label: str) -> str:
    """Return a moment of a step for people, such as ``backward of the output layer, one micro-batch in flight``."""
    words, _, count = label.partition(", ")
    match = re.fullmatch(r"(\d+) held", count)
    for pattern, name in PLACES:
        words = re.sub(rf"(\w+ of )(?:{pattern})$", rf"\1{name}", words)
    words = re.sub(r"of the first \S+", "of the first block", words)
    words = re.sub(r"of (\d+) before the last \S+", r"of the block \1 before the last", words)
    if not match:
        return ", ".join(filter(None, (words, count)))
    flight = "one micro-batch" if match[1] == "1" else f"{match[1]} micro-batches"
    return f"{words}, {flight} in flight"


def missing_text(over: Mapping[str, float], device: str) -> str:
    """Return the bytes that tiers lack, for people; ``device`` is the article of the device."""
    tiers = {
        "device": f"of {device} device's memory",
        "host": "of host memory on each node",
        "nvme": "of NVMe on each node",
    }
    return " and ".join(f"{bytes_text(size)} {tiers[tier]}" for tier, size in over.items() if size > 0)


def layout_text(layout: ParallelLayout) -> str:
    """Return a layout in one line, for people."""
    axes = ("replicate", "data", "tensor", "context", "pipeline")
    sizes = [f"{axis} {getattr(layout, axis)}" for axis in axes if getattr(layout, axis) > 1]
    parts = [" x ".join(sizes) or "one device", row_name(layout.row)]
    if layout.expert > 1:
        parts.insert(1, f"expert {layout.expert}")
    if layout.pipeline > 1:
        parts.append(layout.schedule + (f" with {layout.chunks} stages a rank" if layout.chunks > 1 else ""))
    if layout.recompute is not Recompute.NONE:
        parts.append(f"{layout.recompute} recomputed" + (", inputs on host" if layout.activations_on_host else ""))
    return ", ".join(parts)


def sentences(told: PlanAnswer) -> list[str]:
    """Return the answer in plain sentences, each a paragraph."""
    return [*(_nothing_fits(told) if told.result.best is None else _best(told))]


def _best(told: PlanAnswer) -> Iterator[str]:
    result, best = told.result, told.result.best
    assert best is not None
    layout, peak = best.layout, best.fullest.peak
    batches = counted(layout.accumulation, "micro-batch")
    yield (
        f"Best: {layout_text(layout)}; {batches} of {counted(layout.micro_batch, 'sample')} on each rank. A "
        f"step takes {interval_text(best.time)}."
    )
    freed = next((gain for gain in told.gains if "memory" in gain.change), None)
    binding = "memory" if freed is not None and freed.share >= LEAST_GAIN else best.time.bound
    yield f"The limit is {binding}. The step's time goes to {shares_text(best)}."
    largest = sorted(peak.bytes.items(), key=lambda pair: -pair[1])[:3]
    parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in largest)
    yield (
        f"Peak of {fullest_text(best)}: {bytes_text(best.fullest.device)} of {bytes_text(least_memory(best.machine))}, "
        f"in the {moment_text(peak.label)}: {parts}."
    )
    yield from resting_text(result.request.source, result.request.sequence, layout, best.machine, best.time)
    if best.tight:
        yield f"{tight_text(best)}. No layout that was computed leaves more room."
    rival = next(iter(result.shown[1:]), None)
    if rival is not None:
        beside = _beside(result.request.goal, best, rival)
        yield f"Runner-up: {layout_text(rival.layout)}, {beside}{', but tight' if rival.tight > best.tight else ''}."
    if (room := told.largest) is not None and not room.blocks:
        yield f"With this layout there is room for micro-batches of {counted(room.micro_batch, 'sample')}."
    elif room is not None:
        yield (
            f"With this layout there is room for micro-batches of {counted(room.micro_batch, 'sample')}, or sequences "
            f"of {room.sequence} tokens one at a time, or a model of {room.blocks} blocks "
            f"({scaled_text(room.parameters)} parameters)."
        )
    if large := [gain for gain in told.gains if gain.share >= LEAST_GAIN]:
        yield f"{'; '.join(f'{change} would save {share:.0%} of the time' for change, share in large)}.".capitalize()
    if idle := [gain.change for gain in told.gains if gain.share < LEAST_GAIN]:
        yield f"{', '.join(idle)} would save less than {LEAST_GAIN:.0%}.".capitalize()
    yield from _unknown(told)


def _beside(goal: str, best: PlanCandidate, rival: PlanCandidate) -> str:
    """Return how much worse the runner-up is."""
    worse = rival.score(goal) / best.score(goal) - 1
    words = {
        "time": ("slower", "faster"),
        "memory": ("more memory", "less memory"),
        "cost": ("more expensive", "cheaper"),
    }
    said = f"{abs(worse):.1%} {words[goal][worse < 0]}"
    if abs(worse) > ALIKE:  # a tight one may be faster
        return said
    # The best is then the simplest of several.
    same = {"time": "equally fast", "memory": "as much memory", "cost": "equally expensive"}[goal]
    return f"{same} within the error, with {bytes_text(rival.fullest.device)} of each device in use"


def _unknown(told: PlanAnswer) -> Iterator[str]:
    result = told.result
    cost = result.request.source.at(1, result.request.sequence, 1)
    if not cost.exact:
        why = f" ({cost.note})" if cost.note and not cost.note.startswith("by formula") else ""
        yield f"Memory is from a formula{why}; give a folder with config.json for an exact trace."
    if not result.proven:
        yield (f"{result.computed} of {result.considered} layouts were computed; another one may be a little better.")


def _nothing_fits(told: PlanAnswer) -> Iterator[str]:
    assert told.lacks is not None
    layout, ranks, over = told.lacks
    fullest = max(ranks, key=lambda rank: rank.device)
    used = f"{bytes_text(fullest.device)} of {bytes_text(least_memory(told.result.request.machine))}"
    result = told.result
    none = f"of {result.considered} layouts none does"
    if not result.proven:
        none = f"none of {result.weighed} layouts does whose memory was computed, of {result.considered}"
    yield (
        f"Nothing fits: {none}. The nearest, {layout_text(layout)}, lacks {missing_text(over, 'each')}: it needs "
        f"{used} on the device, in the {moment_text(fullest.peak.label)}."
    )
    for number, remedy in enumerate(told.remedies[:3], 1):
        yield f"{number}. {ADVICE[remedy.kind].capitalize()}: {remedy.text}."
    if not told.remedies:
        yield "No single change that was tried helps: a smaller model, or several of the changes together."


# What would change it.


def changed(machine: Machine, what: str, factor: float) -> Machine:
    """Return a machine with a multiple of one of: memory, host memory, inside, between, host links, nodes."""
    if what == "between":
        return replace(machine, between=replace(machine.between, bandwidth=machine.between.bandwidth * factor))
    if what == "nodes":
        return replace(machine, nodes=tuple((node, round(count * factor)) for node, count in machine.nodes))

    def of(node: Node) -> Node:
        if what == "memory":
            return replace(node, device=replace(node.device, memory=node.device.memory * factor))
        if what == "host memory":
            return replace(node, host_memory=node.host_memory * factor)
        link = getattr(node, what)
        return replace(node, **{what: replace(link, bandwidth=link.bandwidth * factor)})

    return replace(machine, nodes=tuple((of(node), count) for node, count in machine.nodes))


# Resources whose double may save time, as ``changed`` names them, and for people.
DOUBLED = {
    "memory": "twice the memory of devices",
    "inside": "twice as fast links inside a node",
    "between": "twice as fast links between nodes",
    "host": "twice as fast links to host memory",
}


def _gains(request: PlanRequest, best: PlanCandidate) -> Iterator[Gain]:
    """Yield what twice of each resource saves."""
    row, several = best.layout.row, sum(count for _, count in best.machine.nodes) > 1
    offloads = {row.optimizer_tier, row.parameter_tier} != {Tier.DEVICE} or best.layout.activations_on_host
    used = {"memory": True, "inside": devices_of_a_node(best.machine) > 1, "between": several, "host": offloads}
    for what in filter(used.__getitem__, DOUBLED):
        machine = changed(best.machine, what, 2.0)
        candidate = search(replace(request, machine=machine, goal="time"), SearchEffort(40, 16, 400, 1)).best
        seconds = request.time_on(machine, best.layout).seconds
        if candidate is not None:
            seconds = min(seconds, candidate.time.seconds)
        yield Gain(DOUBLED[what], max(0.0, 1 - seconds / best.time.seconds))
    factor = rounding_factor(best.layout, best.machine)
    if factor > 1:
        seconds = request.time_on(changed(best.machine, "between", factor), best.layout).seconds
        if (share := 1 - seconds / best.time.seconds) >= LEAST_GAIN:
            names = "communication.across_nodes_reduce"
            if best.layout.stage > 0:
                names = f"communication.across_nodes_gather, {names}"
            yield Gain(f"8 bits between nodes ({names}), which change results slightly,", share)


def rounding_factor(layout: ParallelLayout, machine: Machine) -> float:
    """Return how much faster links between nodes seem if parameters and gradients cross them in 8 bits; 1: no faster.

    It is 1, too, where other messages cross nodes, since they would not be faster.
    """
    if any(fabric(layout, machine, axis).crosses for axis in ("tensor", "context", "pipeline", "expert")):
        return 1.0
    if not fabric(layout, machine, "replicate", "data").crosses:
        return 1.0
    # Rounding takes as long as some more bytes on the way: on fast links it takes longer than it saves.
    device = slowest(machine)
    passes = (device.memory_seconds(ROUNDED) - device.memory_seconds(0.0)) * wire(machine.between).bandwidth
    return max(1.0, layout.widths.wire / (FORMATS["8bit"].bytes_for(BLOCK) / BLOCK + passes))


# What else fits.


def _most(fits: Callable[[int], bool], step: int, limit: int, parts: int = 32) -> int:
    """Return the largest multiple of ``step`` up to ``limit`` that fits, within one of ``parts``, or 0."""
    if not fits(step):
        return 0
    low, high = 1, 2
    while high * step <= limit and fits(high * step):
        low, high = high, high * 2
    high = min(high, limit // step + 1)
    while high - low > max(1, low // parts):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


def largest_of(request: PlanRequest, layout: ParallelLayout, machine: Machine) -> Largest:
    """Return the largest micro-batch, the longest sequence and the deepest model that a layout holds."""

    def fits(source: CostSource, sequence: int, trial: ParallelLayout) -> bool:
        return max(lacking(request.memory(source, sequence, trial, machine), trial, machine).values()) <= 0

    source, sequence = request.source, request.sequence
    alone = replace(layout, micro_batch=1)
    micro = _most(lambda size: fits(source, sequence, replace(layout, micro_batch=size)), 1, 1 << 16)
    # A traced model is traced again for each length, so that only doublings are tried.
    traced, longest = source.at(1, sequence, 1).exact, request.limits.positions or 1 << 26
    # Samples such as images have no tokens, and their models, or small ones, may have no stack of blocks.
    if sequence == 1 or not any(unit.block for unit in source.at(1, sequence, 1).units):
        return Largest(micro, 1, 0, source.at(1, 1, 1).parameters)
    step = 2 * layout.context * layout.tensor * 64
    tokens = _most(lambda size: fits(source, size, alone), step, max(step, longest), 1 if traced else 32)
    step = layout.pipeline * layout.chunks
    blocks = _most(lambda count: fits(DeeperModel(source, count), sequence, layout), step, 1 << 14)
    deeper = DeeperModel(source, max(1, blocks)).at(1, sequence, 1)
    return Largest(micro, max(tokens, sequence), blocks, deeper.parameters)


# What to do if nothing fits.


def batch_for(request: PlanRequest) -> PlanRequest:
    """Return the request with a batch that grows if the devices cannot share it."""
    if LayoutSpace(request, request.machine).meshes():
        return request
    return replace(request, batch=ceil(request.batch / request.machine.devices) * request.machine.devices)


def fits_any(request: PlanRequest) -> bool:
    """Return whether any layout fits; the batch grows if the devices cannot share it."""
    request = batch_for(request)
    # No schedule holds less than 1F1B, and the orders of others take long to make on many ranks.
    accepts = request.accepts or (lambda _: True)
    request = replace(request, accepts=lambda layout: layout.schedule == "1f1b" and accepts(layout))
    return search(replace(request, goal="memory"), SearchEffort(1, 1, 300, 1)).best is not None


def _least(fits: Callable[[float], bool], most: int) -> float | None:
    """Return the least power of two up to ``most`` with which something fits."""
    factors = [2.0**power for power in range(1, most.bit_length())]
    # If the largest does not do, none that is smaller is looked for.
    return next(filter(fits, factors)) if factors and fits(factors[-1]) else None


def _remedies(request: PlanRequest) -> Iterator[Remedy]:
    """Return changes after which something fits, the cheapest first."""
    machine = request.machine
    node = machine.nodes[0][0]

    def on(other: Machine) -> bool:
        return fits_any(replace(request, machine=other))

    def part(factor: float) -> int:
        return max(1, int(request.sequence / factor))

    remedies: list[Remedy] = []
    shorter = _least(lambda f: fits_any(replace(request, sequence=part(f))), request.sequence // SHORTEST)
    if shorter is not None:
        text = f"{part(shorter)} tokens fit, instead of {request.sequence}"
        remedies.append(Remedy("sequence", text, 0.0))
    if not node.disk:
        size, read, write = ADDED_DISK
        disks = tuple((replace(n, disk=size, disk_read=read, disk_write=write), c) for n, c in machine.nodes)
        if on(replace(machine, nodes=disks)):
            text = f"{bytes_text(size)} on each node are enough, at {bytes_text(read)}/s"
            remedies.append(Remedy("disk", text, 0.05))
    for kind, what, unit, most, price in (
        ("host", "host memory", node.host_memory, 16, 0.1),
        ("memory", "memory", least_memory(machine), 8, 0.8),
        ("nodes", "nodes", machine.devices, 64, 1.0),
    ):
        factor = _least(lambda f, what=what: on(changed(machine, what, f)), most)  # type: ignore[misc]
        if factor is not None:
            amount = f"{unit * factor:.0f} devices" if kind == "nodes" else f"{bytes_text(unit * factor)} each"
            remedies.append(Remedy(kind, f"{amount} are enough, {factor:g} times as much", price * (factor - 1)))
    yield from sorted(remedies, key=lambda remedy: remedy.effort)
