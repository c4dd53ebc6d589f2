"""A small model, machine, memory and time for tests of the search, each with numbers that can be worked out by hand."""

from collections.abc import Mapping
from dataclasses import dataclass

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import CostSource, Divided, KernelWork, ModelCost, Recompute, UnitCost, WorkKind
from zeromesh.apps.plan.machine.cluster import Device, LinkSpeed, Machine, Node
from zeromesh.apps.plan.predict.lower_bounds import TimeBound, held
from zeromesh.apps.plan.predict.rank_memory import Moment, RankMemory
from zeromesh.apps.plan.predict.time import Interval, StepTime
from zeromesh.base.placement import Placement, Tier

GB = 1e9


@dataclass(frozen=True)
class Plain:
    """Model of equal blocks, of which each has ``elements`` parameters and two operations per parameter and token."""

    layers: int = 8
    elements: float = 1e8
    saved: float = 1e4  # bytes a token and block
    name: str = "plain"

    def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
        tokens = micro_batch * sequence / context
        product = (KernelWork(WorkKind.PRODUCT, Divided(2 * self.elements * tokens), Divided()),)
        block = UnitCost(
            "block", True, Divided(self.elements),
            saved={
                # Nothing but products is computed, so that there is nothing else to recompute.
                Recompute.NONE: Divided(self.saved * tokens),
                Recompute.PRODUCTS: Divided(self.saved * tokens),
                Recompute.BLOCKS: Divided(tokens=self.saved / 10 * tokens),
            },
            output=Divided(tokens=self.saved / 10 * tokens), forward=product, input=product, weight=product,
            joins=self.saved / 5 * tokens,
        )  # fmt: skip
        return ModelCost(self.name, micro_batch, sequence, context, (block,) * self.layers)


def machine(
    nodes: int = 1, devices: int = 8, memory: float = 80 * GB, inside: float = 300 * GB, between: float = 50 * GB,
    host: float = 1000 * GB, disk: float = 0.0, price: float = 0.0,
) -> Machine:  # fmt: skip
    device = Device("fake", memory, {"bf16": 1e15}, 3e12, product_efficiency=1.0, memory_efficiency=1.0, reserved=0.0)
    node = Node(
        device, devices, LinkSpeed(inside, 1e-6), LinkSpeed(25 * GB, 1e-6), host, 200 * GB, 64,
        disk_read=10 * GB if disk else 0.0, disk_write=10 * GB if disk else 0.0, disk=disk, price=price,
    )  # fmt: skip
    return Machine(((node, nodes),), LinkSpeed(between, 5e-6, shared=devices), name="fakes")


def memory(
    source: CostSource, sequence: int, layout: ParallelLayout, machine: Machine | None = None
) -> list[RankMemory]:
    """States by the row's formulas, and activations of all micro-batches that are held."""
    cost = source.at(layout.micro_batch, sequence, layout.context)
    own = sum(unit.parameters.on(layout.tensor) for unit in cost.units) / layout.pipeline
    row, widths, group = layout.row, layout.widths, layout.data * layout.context
    share = {place: own / (group if place is Placement.SHARDED else 1) for place in Placement}
    optimizer = share[row.optimizer] * (widths.master + widths.states)
    on_host = row.offloaded if row.optimizer_tier is not Tier.DEVICE else 0.0
    states: dict[tuple[str, str], float] = {
        ("parameter", row.parameter_tier.value): share[row.parameter] * widths.parameter,
        ("optimizer", "device"): optimizer * (1 - on_host),
        ("gradient", "device"): share[row.gradient] * widths.gradient * (1 - on_host),
    }
    if row.parameter is Placement.SHARDED:
        blocks = [unit.parameters.on(layout.tensor) for unit in cost.units]
        gathered = min(layout.parameter_slots, max(1, len(blocks) // layout.pipeline))
        states["slot", "device"] = gathered * max(blocks) * widths.parameter
    if on_host:
        states["optimizer", row.optimizer_tier.value] = optimizer * on_host
        states["gradient", "host"] = share[row.optimizer] * widths.gradient * on_host
    device: Mapping[str, float] = {state: size for (state, tier), size in states.items() if tier == "device"}
    saved = (
        sum(unit.saved[layout.recompute].on(layout.tensor, layout.sequence) for unit in cost.units) / layout.pipeline
    )
    kept = 0.0 if layout.activations_on_host else saved * held(layout) / layout.chunks
    timeline = (
        Moment("beginning", dict(device)),
        Moment("backward of block 1", {**device, "activation": kept}),
    )
    return [RankMemory(rank, states, timeline, 0.0) for rank in range(layout.pipeline)]


def time(source: CostSource, sequence: int, layout: ParallelLayout, machine: Machine) -> StepTime:
    """Sum of the bounds: nothing is hidden."""
    bound = TimeBound(source, sequence, machine)
    waits = {
        "compute": bound.compute(layout), "data links": bound.traffic(layout), "host": bound.offload(layout),
    }  # fmt: skip
    seconds = sum(waits.values())
    intervals = tuple(Interval(rank, "compute", "forward", 0.0, waits["compute"]) for rank in range(layout.pipeline))
    flops = source.at(1, sequence, 1).flops * layout.samples
    return StepTime(seconds, waits, intervals, flops)
