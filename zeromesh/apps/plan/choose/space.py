"""The space of layouts: all that the engine accepts for a model, a machine and a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil, gcd, prod

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import CostSource, Recompute
from zeromesh.apps.plan.machine.cluster import Machine, Node
from zeromesh.apps.plan.predict.lower_bounds import TimeBound, devices_of_a_node
from zeromesh.apps.plan.predict.rank_memory import RankMemory, memory_of
from zeromesh.apps.plan.predict.time import StepTime, time_of
from zeromesh.base.placement import ROWS, PlacementRow, Tier
from zeromesh.base.words import counted
from zeromesh.config.batch_sizes import divisors_of
from zeromesh.parallel.pipeline.schedule.generators import shape_of
from zeromesh.shard.sizes import TableLayout, Widths

GOALS = ("time", "memory", "cost")
LARGEST_MICRO_BATCH = 64
LEAST_TOKENS = 1024  # of a sequence's part on one context rank: smaller parts do not hide the ring's messages


MeshSizes = tuple[int, int, int, int]
"""Sizes of the tensor, context, pipeline and expert axes."""

Memory = Callable[[CostSource, int, ParallelLayout, Machine], list[RankMemory]]
Timing = Callable[[CostSource, int, ParallelLayout, Machine], StepTime]


@dataclass(frozen=True)
class ModelLimits:
    """Numbers that the sizes of a mesh must divide."""

    heads: int = 0  # 0: unknown, and layers are then not split over tensor ranks
    kv_heads: int = 0
    width: int = 0  # of the MLP
    causal: bool = True  # decoder whose sequences context ranks can share
    positions: int = 0  # longest sequence; 0: no limit


@dataclass(frozen=True)
class PlanRequest:
    """Question: a model, a machine, and a global batch."""

    source: CostSource
    machine: Machine
    batch: int  # samples of an update
    sequence: int  # tokens of a sample
    limits: ModelLimits = ModelLimits()
    goal: str = "time"
    widths: Widths = field(default_factory=Widths)
    accepts: Callable[[ParallelLayout], bool] | None = None  # false for layouts that are not to be considered
    memory: Memory = memory_of
    time: Timing = time_of
    tables: TableLayout = field(default_factory=TableLayout)
    resting: TableLayout | None = None  # place of experts that rest; the source's are rows then

    def __post_init__(self) -> None:
        for name in ("batch", "sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a whole number of at least 1")
        if self.goal not in GOALS:
            raise ValueError(f"goal is {self.goal!r}; it must be one of {', '.join(GOALS)}")
        if self.limits.positions and self.sequence > self.limits.positions:
            raise ValueError(
                f"a sequence of {self.sequence} tokens is longer than the {self.limits.positions} that "
                f"{self.source.name} has positions for; take a shorter one"
            )

    def memory_on(self, machine: Machine, layout: ParallelLayout) -> tuple[RankMemory, ...]:
        """Return the memory of a layout's pipeline ranks."""
        return tuple(self.memory(self.source, self.sequence, layout, machine))

    def time_on(self, machine: Machine, layout: ParallelLayout) -> StepTime:
        """Return the time of a layout's step."""
        return self.time(self.source, self.sequence, layout, machine)


def rows_for(node: Node, group: int, widths: Widths) -> list[PlacementRow]:
    """Return placement rows for a group of ranks that shard states, the simplest first."""
    host, disk = Tier.HOST, Tier.NVME
    # A group of one rank has nothing to shard, but only sharded states can be off the device.
    rows = [ROWS[0]] if group == 1 else list(ROWS.values())
    partly = [replace(ROWS[n], gradient_tier=host, optimizer_tier=host) for n in ((1, 2, 3) if group > 1 else (2,))]
    rows += [replace(row, offloaded=share) for row in partly for share in (0.5, 1.0)]
    all_on_host = replace(ROWS[3], gradient_tier=host, optimizer_tier=host, parameter_tier=host)
    rows.append(all_on_host)
    if widths.parameter == 2 and widths.master:
        rows.append(replace(all_on_host, split=True))
    if node.disk:
        on_disk = replace(ROWS[3], gradient_tier=host, optimizer_tier=disk)
        rows += [replace(on_disk, parameter_tier=tier) for tier in (Tier.DEVICE, host, disk)]
    return rows


class LayoutSpace:
    """All layouts of one machine that the engine accepts."""

    def __init__(self, request: PlanRequest, machine: Machine) -> None:
        self.request = request
        self.machine = machine
        self.bound = TimeBound(request.source, request.sequence, machine)
        self.blocks = self.bound.blocks
        self._node = machine.nodes[0][0]

    def meshes(self) -> list[MeshSizes]:
        """Return sizes of the axes, for which data-parallel ranks divide the batch and expert ranks the experts."""
        total, batch, experts = self.machine.devices, self.request.batch, self.bound.experts
        return [
            (*shape, expert)
            for shape in self.shapes()
            if batch % (total // prod(shape)) == 0
            for expert in divisors_of(gcd(experts, total // shape[2]) if experts else 1)
        ]

    def shapes(self) -> list[tuple[int, int, int]]:
        """Return sizes of the tensor, context and pipeline axes that the model and the nodes allow."""
        limits, total = self.request.limits, self.machine.devices
        if self.request.resting is not None:  # experts that rest are spread over data ranks
            return [(1, 1, 1)]
        node = devices_of_a_node(self.machine)
        tensors = [t for t in divisors_of(node) if total % t == 0 and self._splits(t)]
        contexts = [c for c in divisors_of(total) if c == 1 or (limits.causal and self._shares(c))]
        pipelines = [p for p in divisors_of(total) if p <= max(1, self.blocks)]
        return [
            (t, c, p)
            for t in tensors
            for c in contexts
            for p in pipelines
            if total % (t * c * p) == 0 and t * c <= total
        ]

    def plain(self, tensor: int, context: int, pipeline: int, expert: int = 1) -> ParallelLayout:
        """Return the layout of a mesh in which nothing is sharded, and all data-parallel ranks are one group."""
        ways = self.machine.devices // (tensor * context * pipeline)
        # Tensor ranks that divide the sequence between their layers save memory, and send no more.
        split = tensor > 1 and self.request.sequence % (tensor * context) == 0
        request = self.request
        sizes = ways, 1, tensor, context, pipeline, expert
        placed = {"tables": request.tables, "resting": request.resting}
        return ParallelLayout(*sizes, widths=request.widths, sequence=split, **placed)  # type: ignore[arg-type]

    def bases(self, mesh: ParallelLayout) -> Iterator[ParallelLayout]:
        """Yield a mesh with each row and its slots; all data-parallel ranks of ``mesh`` are one group."""
        below, ways = mesh.tensor * mesh.context * mesh.pipeline, mesh.data
        for row in rows_for(self._node, ways * mesh.context, mesh.widths):
            for data in self._groups(ways, below) if row is not ROWS[0] else [ways]:
                if data * mesh.context * mesh.tensor % mesh.expert:
                    continue  # expert ranks are of one replica
                # In a group of one rank nothing is sharded, which is the first row.
                if data * mesh.context > 1 or ways == 1:
                    yield from self._slots(replace(mesh, data=data, replicate=ways // data, row=row))

    def runs(self, base: ParallelLayout) -> Iterator[ParallelLayout]:
        """Yield a layout with micro-batches, schedules and recomputation, the simplest first."""
        share = self.request.batch // (base.data * base.replicate)
        for micro in (size for size in divisors_of(share) if size <= LARGEST_MICRO_BATCH):
            count = share // micro
            if base.pipeline > 1 and count < base.pipeline and micro > 1:
                continue  # a pipeline that is not filled is idle most of the time
            for schedule, chunks in self._schedules(base.pipeline, count):
                for recompute, on_host in (
                    (Recompute.NONE, False),
                    (Recompute.PRODUCTS, False),
                    (Recompute.BLOCKS, False),
                    (Recompute.BLOCKS, True),
                ):
                    yield replace(
                        base,
                        micro_batch=micro,
                        accumulation=count,
                        schedule=schedule,
                        chunks=chunks,
                        recompute=recompute,
                        activations_on_host=on_host,
                    )

    def _splits(self, ranks: int) -> bool:
        """Return whether layers can be split over so many ranks."""
        limits = self.request.limits
        if ranks == 1:
            return True
        heads = limits.kv_heads or limits.heads
        # Neighbours share a key head where there are fewer than ranks.
        shared = heads > 0 and (heads % ranks == 0 or ranks % heads == 0)
        return limits.heads % ranks == 0 and shared and limits.width % ranks == 0

    def _shares(self, ranks: int) -> bool:
        """Return whether so many ranks can share a sequence: each has two chunks of equal length."""
        sequence = self.request.sequence
        return sequence % (2 * ranks) == 0 and sequence // ranks >= LEAST_TOKENS

    def _groups(self, ways: int, below: int) -> list[int]:
        """Return sizes of shard groups: all ranks, and those of one node, two, four, ..."""
        # The mesh has replicate outermost, so a group of consecutive ranks is within its nodes.
        sizes, size = [ways], max(1, devices_of_a_node(self.machine) // below)
        while size < ways:
            if ways % size == 0:
                sizes.append(size)
            size *= 2
        return sizes

    def _slots(self, base: ParallelLayout) -> Iterator[ParallelLayout]:
        """Yield the layout with two gathered units, with half of them, and with all."""
        units = ceil(self.blocks / base.pipeline)
        sharded = base.stage == len(ROWS) - 1 and base.row.parameter_tier is Tier.DEVICE
        for slots in sorted({2, max(2, units // 2), max(2, units)} if sharded else {2}, reverse=True):
            yield replace(base, parameter_slots=slots)

    def _schedules(self, ranks: int, microbatches: int) -> Iterator[tuple[str, int]]:
        if ranks == 1:
            yield "1f1b", 1
            return
        fewest = self.blocks // ranks
        choices = [("1f1b", 1), ("zb-h1", 1)] + [("zb-v", 2)] * (fewest >= 2)
        for chunks in (2, 4):
            if chunks <= fewest:
                choices.append(("interleaved-1f1b", chunks))
        if fewest >= 2 and microbatches <= 2 * ranks:
            choices.append(("breadth-first", 2))
        for name, chunks in choices:
            try:
                shape_of(name, ranks, microbatches, chunks)
            except ValueError:
                continue
            yield name, chunks


def refuse_batch(request: PlanRequest, space: LayoutSpace) -> list[LayoutSpace]:
    """Raise ValueError with the nearest batches that can be shared out."""
    total = space.machine.devices
    ways = min(total // (t * c * p) for t, c, p in space.shapes())
    below, above = request.batch // ways * ways, (request.batch // ways + 1) * ways
    nearest = f"{below} or {above}" if below else str(above)
    fewer = _fewer(request)
    raise ValueError(
        f"a batch of {counted(request.batch, 'sample')} cannot be shared out evenly to "
        f"{counted(total, 'device')}: the model divides over "
        f"{total // ways} of them at most, which leaves a multiple of {ways} data-parallel ranks; the nearest batches "
        f"that work: {nearest}" + (f"; or use {fewer} devices" if fewer else "")
    )


def _fewer(request: PlanRequest) -> int:
    """Return the most devices, in whole nodes, to which the batch can be shared out; 0 if there are none."""
    machine = request.machine
    if len(machine.nodes) > 1:
        return 0  # it would have to be said which kind of node is left out
    node, count = machine.nodes[0]
    parts = (replace(machine, nodes=((node, fewer),)) for fewer in range(count - 1, 0, -1))
    return next((part.devices for part in parts if LayoutSpace(request, part).meshes()), 0)
