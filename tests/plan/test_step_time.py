"""Times of whole steps: hand-made examples, and what must never be the other way round."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import Divided, KernelWork, ModelCost, Recompute, UnitCost, WorkKind
from zeromesh.apps.plan.cost.shape import TransformerCost, TransformerShape
from zeromesh.apps.plan.machine.cluster import Device, LinkSpeed, Machine, Node
from zeromesh.apps.plan.machine.rates import Habits, KernelSpeed
from zeromesh.apps.plan.predict.time import time_of
from zeromesh.base.placement import ROWS, Tier
from zeromesh.shard.sizes import Widths

LENGTH = 512
MODEL = TransformerCost(TransformerShape(16, 1024, 16, 8192, gated=True, tied=False))


def machine(nodes: int = 4, devices: int = 8, inside: float = 200e9, between: float = 10e9, **node) -> Machine:
    device = Device("device", 80e9, {"bf16": 300e12, "fp32": 20e12}, 2e12)
    link = LinkSpeed(inside, 3e-6)
    made = Node(device, devices, link, LinkSpeed(20e9, 1e-5), 1e12, 200e9, 64, **node)
    return Machine(((made, nodes),), LinkSpeed(between, 1e-5))


def seconds(layout: ParallelLayout, where: Machine | None = None, **options) -> float:
    return time_of(MODEL, LENGTH, layout, where or machine(), **options).seconds


LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(data=8, row=ROWS[0], accumulation=3),
    ParallelLayout(data=32, row=ROWS[1], accumulation=2),
    ParallelLayout(data=32, row=ROWS[2], accumulation=6),
    ParallelLayout(data=32, row=ROWS[3], accumulation=6),
    ParallelLayout(data=8, replicate=4, row=ROWS[3], accumulation=2),
    ParallelLayout(data=4, tensor=8, row=ROWS[2], sequence=True, recompute=Recompute.SELECTIVE),
    ParallelLayout(data=2, context=4, tensor=4, row=ROWS[3], recompute=Recompute.BLOCKS, activations_on_host=True),
    ParallelLayout(data=2, tensor=4, pipeline=4, row=ROWS[1], accumulation=16),
    ParallelLayout(data=4, pipeline=4, row=ROWS[3], accumulation=8, schedule="zb-h1"),
    ParallelLayout(data=4, pipeline=4, accumulation=8, schedule="interleaved-1f1b", chunks=2),
    ParallelLayout(data=4, pipeline=4, accumulation=8, schedule="zb-v", chunks=2),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_waits_are_the_step(layout):
    found = time_of(MODEL, LENGTH, layout, machine())
    assert sum(found.waits.values()) == pytest.approx(found.seconds)
    assert min(found.waits.values()) > 0.0
    assert found.bound in found.waits
    # A step of one rank's work cannot be faster than its operations at the peak.
    assert found.flops / layout.ranks / 300e12 < found.seconds


@pytest.mark.parametrize("layout", LAYOUTS)
def test_faster_machine_is_never_slower(layout):
    before = seconds(layout)
    assert seconds(layout, machine(between=40e9)) <= before * (1 + 1e-9)
    assert seconds(layout, machine(inside=800e9)) <= before * (1 + 1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_slots_are_never_slower(layout):
    times = [seconds(replace(layout, parameter_slots=count)) for count in (1, 2, 4, 16)]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(times))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_intervals_do_not_change_the_step(layout):
    found = time_of(MODEL, LENGTH, layout, machine(), intervals=True)
    assert found.seconds == pytest.approx(seconds(layout))
    assert found.intervals
    assert max(interval.end for interval in found.intervals) <= found.seconds * (1 + 1e-9)


def test_zero_bubble_is_no_slower_than_1f1b():
    one = ParallelLayout(pipeline=8, accumulation=16)
    assert seconds(replace(one, schedule="zb-h1")) <= seconds(one)
    assert seconds(replace(one, schedule="zb-v", chunks=2)) <= seconds(one)


def test_sharding_over_slow_links_costs_time():
    slow = machine(between=1e9)
    times = [seconds(ParallelLayout(data=32, row=ROWS[row], accumulation=4), slow) for row in (1, 2, 3)]
    assert times == sorted(times)
    # Shards inside a node, and one sum of a share across nodes.
    assert seconds(ParallelLayout(data=8, replicate=4, row=ROWS[3], accumulation=4), slow) < times[2]


@dataclass
class Units:
    """Model of two equal blocks of one product each, whose time is known."""

    name: str = "two units"

    def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
        product = KernelWork(WorkKind.PRODUCT, Divided(split=1e12), Divided(), (10**6, 1000, 500), "columns")
        block = UnitCost("a", True, Divided(split=1e9), forward=(product,), input=(product,), weight=(product,))
        return ModelCost(self.name, micro_batch, sequence, context, (block, replace(block, name="b")))


# Without launches, edges or losses: 1e12 operations take 0.1 s.
PLAIN = Device("plain", 1e12, {"bf16": 1e13}, 1e15, 1.0, 1.0, 0.0, product_padding=0.0)


def plain_machine(nodes: int, **node) -> Machine:
    made = Node(PLAIN, 1, LinkSpeed(1e9, 0.0, 1.0), LinkSpeed(1e10, 0.0, 1.0), 1e12, 1e11, 8, **node)
    return Machine(((made, nodes),), LinkSpeed(4e10, 0.0, 1.0))


def test_gathers_of_two_units_with_prefetch():
    # A unit has 2e9 bytes of parameters; two ranks gather half of them over 4e10 bytes a second: 0.025 s. All is hidden
    # but the first gather and the last reduction, of as many bytes.
    found = time_of(Units(), 1, ParallelLayout(data=2, row=ROWS[3]), plain_machine(2))
    assert found.seconds == pytest.approx(2 * 0.3 + 0.025 + 0.025, rel=1e-3)
    assert found.waits["compute"] == pytest.approx(0.6, rel=1e-3)
    assert found.flops == pytest.approx(2 * 2 * 3e12)


def test_context_ranks_send_what_they_swap_and_pass_on():
    class Sent(Units):
        def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
            cost = super().at(micro_batch, sequence, context)
            sent = {"output": Divided(split=4e8), "exchanged": Divided(split=2e8)}
            return replace(cost, units=tuple(replace(unit, **sent) for unit in cost.units))

    waits = []
    # Of two blocks, at 4e10 bytes a second: of queries, keys, values and results, 1e9 bytes, a rank swaps all but its
    # own part forward, and backward; keys and values pass to each further group, and backward twice that. A forward
    # that is computed again sends again.
    for ulysses, swapped, passed in ((1, 0.0, 3 * 2e8), (2, 1e9 / 2, 2e8), (4, 1e9 * 3 / 4, 0.0)):
        for recompute, sent in (
            (Recompute.NONE, 2 * swapped + 3 * passed),
            (Recompute.BLOCKS, 3 * swapped + 4 * passed),
        ):
            layout = ParallelLayout(context=4, ulysses=ulysses, row=ROWS[0], recompute=recompute)
            waits.append(time_of(Sent(), 1, layout, plain_machine(4)).waits["context links"])
            assert waits[-1] == pytest.approx(2 * sent / 4e10)
    assert len({*waits}) == 6


def test_recomputation_adds_a_forward():
    plain = time_of(Units(), 1, ParallelLayout(), plain_machine(1))
    again = time_of(Units(), 1, ParallelLayout(recompute=Recompute.BLOCKS), plain_machine(1))
    assert again.seconds - plain.seconds == pytest.approx(2 * 0.1)
    assert again.flops == plain.flops


def test_the_norm_and_the_update_on_the_host_move_30_bytes_a_parameter():
    row = replace(ROWS[1], gradient_tier=Tier.HOST, optimizer_tier=Tier.HOST)
    found = time_of(Units(), 1, ParallelLayout(row=row), plain_machine(1))
    assert found.waits["host"] == pytest.approx(2 * 1e9 * (2 + 28) / 1e11)
    # The last gradient's copy of 2e9 bytes over 1e10 bytes a second is waited for.
    assert found.waits["to host"] == pytest.approx(0.2, rel=1e-3)


def test_hosts_are_shared_by_the_ranks_of_a_node():
    row = replace(ROWS[1], gradient_tier=Tier.HOST, optimizer_tier=Tier.HOST)
    alone = time_of(MODEL, LENGTH, ParallelLayout(row=row), machine(1)).waits["host"]
    # Eight ranks update an eighth each, at the same memory.
    together = time_of(MODEL, LENGTH, ParallelLayout(data=8, row=row), machine(1)).waits["host"]
    assert together == pytest.approx(alone)


def test_states_on_a_disk_wait_for_it():
    row = replace(ROWS[3], parameter_tier=Tier.NVME, gradient_tier=Tier.HOST, optimizer_tier=Tier.NVME)
    layout = ParallelLayout(data=8, row=row)
    slow, fast = (seconds(layout, machine(1, disk_read=speed, disk_write=speed)) for speed in (1e9, 8e9))
    assert slow > fast
    with pytest.raises(ValueError, match="has no disk"):
        seconds(layout, machine(1))


def test_spread_of_ranks_delays_all():
    layout = ParallelLayout(data=8)
    assert seconds(layout, habits=Habits(spread=0.02)) > seconds(layout)


def test_time_beside_kernels_is_in_the_step():
    for layout in (ParallelLayout(accumulation=3), ParallelLayout(pipeline=4, accumulation=3)):
        more = seconds(layout, habits=Habits(between=0.5, overhead=0.25)) - seconds(layout)
        assert more == pytest.approx(0.5 + 3 * 0.25)


def test_fp32_parameters_are_multiplied_in_fp32():
    device = replace(PLAIN, flops={"bf16": 1e13, "fp32": 1e12})
    where = Machine(((replace(plain_machine(1).nodes[0][0], device=device), 1),), LinkSpeed(1e9, 0.0))
    wide = ParallelLayout(widths=Widths(parameter=4, wire=4, master=0))
    assert time_of(Units(), 1, wide, where).seconds == pytest.approx(6 * 1.0, rel=1e-3)
    assert time_of(Units(), 1, ParallelLayout(), where).seconds == pytest.approx(6 * 0.1, rel=1e-3)


def test_float8_speeds_up_products_and_halves_gathers():
    device = replace(PLAIN, flops={"bf16": 1e13, "fp8": 2e13})
    where = Machine(((replace(plain_machine(1).nodes[0][0], device=device), 2),), LinkSpeed(4e10, 0.0, 1.0))
    layout = ParallelLayout(data=2, row=ROWS[3], products="fp8")
    assert time_of(Units(), 1, layout, where).seconds == pytest.approx(0.3 + 0.025 + 0.025, rel=2e-2)
    narrow = replace(layout, widths=Widths(gathered=1))
    saved = time_of(Units(), 1, layout, where).seconds - time_of(Units(), 1, narrow, where).seconds
    assert saved == pytest.approx(0.0125, rel=1e-3)  # of the first gather, which nothing hides
    # A device without such products computes in 16 bits.
    assert time_of(Units(), 1, layout, plain_machine(2)) == time_of(
        Units(), 1, replace(layout, products=""), plain_machine(2)
    )


def test_only_matrices_are_multiplied_in_float8() -> None:
    device = replace(PLAIN, flops={"bf16": 1e13, "fp32": 1e12, "fp8": 2e13})
    work = KernelWork(WorkKind.CONVOLUTION, Divided(1e13), Divided(0.0))
    half = ParallelLayout(products="fp8")
    wide = replace(half, widths=Widths(parameter=4, wire=4, master=0))
    assert KernelSpeed(device, half, Habits()).seconds(work) == pytest.approx(1.0, rel=1e-3)
    assert KernelSpeed(device, wide, Habits()).seconds(work) == pytest.approx(10.0, rel=1e-3)
    # Without such products, a run computes as it would without float8.
    without = replace(device, flops={"bf16": 1e13, "fp32": 1e12})
    assert KernelSpeed(without, wide, Habits()).dtype == "fp32"
    assert KernelSpeed(without, half, Habits()).dtype == "bf16"


def test_impossible_layouts_are_refused():
    with pytest.raises(ValueError, match="64 ranks"):
        seconds(ParallelLayout(data=64))
    with pytest.raises(ValueError, match="cannot be cut into 32 stages"):
        seconds(ParallelLayout(pipeline=32, accumulation=32))
    with pytest.raises(ValueError, match="no operations per second"):
        time_of(MODEL, LENGTH, ParallelLayout(), Machine(((replace(machine().nodes[0][0], device=replace(
            PLAIN, flops={"int8": 1e12})), 1),), LinkSpeed(1e9, 0.0)))  # fmt: skip
