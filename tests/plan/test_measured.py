import json
from typing import Any

import pytest
import torch

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import Divided, KernelWork, WorkKind
from zeromesh.apps.plan.machine import speed
from zeromesh.apps.plan.machine.cluster import Device, Machine
from zeromesh.apps.plan.machine.measured import (
    UNMEASURED,
    NodeFacts,
    ProductTime,
    fit_memory,
    fit_products,
    measured_machine,
)
from zeromesh.apps.plan.machine.presets import find_link
from zeromesh.apps.plan.machine.rates import Habits, KernelSpeed

SHAPES = [(128, 128, 128), (512, 512, 512), (32, 512, 512), (512, 32, 512), (512, 512, 32), (256, 1024, 256)]
# Products of 100 and 50 10^9/s with 32 elements of padding and a fill of 64, and a cache of 16 MiB.
TRUE = Device(
    "chip", 8e9, {"fp32": 50e9, "bf16": 100e9}, 5e9, 1.0, 1.0, 2e-6, product_padding=32.0, product_fill=64.0,
    cache=float(1 << 24), cache_bandwidth=80e9,
)  # fmt: skip
SIZES = (192, 3 << 19, 3 << 21, 3 << 23, 3 << 24, 3 << 25)


def speeds(device: Device, scale: int = 1) -> dict[str, Any]:
    """Return the times that a rank with this device would measure; the last rounds were disturbed."""
    shapes = [(scale * rows, scale * columns, scale * sums) for rows, columns, sums in SHAPES]
    times = {(dtype, *shape): device.product_seconds(*shape, dtype) for dtype in device.flops for shape in shapes}
    speed = device.flops[device.half]
    # A forward at half of the speed of products, a backward at a quarter, whose operations count for four fifths; and
    # traffic at 1 and at 2 GB/s.
    fused = [
        (ops, moved, ops / (share * speed) + moved / rate)
        for length in (128, 512)
        for ops, moved, share, rate in (
            (1e3 * length**2, 1e3 * length, 0.5, 1e9), (2e3 * length**2, 2e3 * length, 0.25 * 4 / 5, 2e9),
        )
    ]  # fmt: skip
    return {
        "name": device.name, "memory": None, "reserved": 3e8, "threads": 1,
        "products": [[*product, [seconds, seconds, 0.1, 0.1]] for product, seconds in times.items()],
        "kernels": [[size, [device.memory_seconds(size), device.memory_seconds(size), 0.2]] for size in SIZES],
        "attention": [[*sizes, [seconds, 0.1]] for *sizes, seconds in fused],
        "loss": [0.0, 8e6, [8e6 / 2e9, 0.1]],
        "busy_latency": None, "launch": [5e-6, 9e-6], "smallest": [2e-6, 3e-6], "host": None,
    }  # fmt: skip


def test_the_formula_is_found_again_from_its_times() -> None:
    times = [
        ProductTime(dtype, *shape, TRUE.product_seconds(*shape, dtype)) for dtype in TRUE.flops for shape in SHAPES
    ]
    fit = fit_products(times, smallest=2e-6)
    assert (fit.padding, fit.fill) == (32.0, 64.0)
    assert fit.flops == pytest.approx(TRUE.flops)
    assert fit.error < 1e-9
    memory = fit_memory([(size, TRUE.memory_seconds(size)) for size in SIZES])
    assert (memory.cache, memory.cache_bandwidth) == (TRUE.cache, pytest.approx(80e9, rel=1e-3))
    assert memory.bandwidth == pytest.approx(5e9, rel=1e-3)


def test_a_long_product_that_was_disturbed_in_all_tries_does_not_change_the_rate() -> None:
    times = [ProductTime("fp32", *shape, TRUE.product_seconds(*shape, "fp32")) for shape in SHAPES]
    times[1] = times[1]._replace(seconds=5 * times[1].seconds)
    assert fit_products(times, smallest=2e-6).flops["fp32"] == pytest.approx(50e9, rel=0.02)


def test_without_times_there_is_no_fit() -> None:
    with pytest.raises(ValueError, match="no times of products"):
        fit_products([])


def links(**rows: Any) -> dict[str, Any]:
    axes = [
        {
            "axis": "data", "ranks": 4, "where": where, "latency_seconds": 3e-4, "bandwidth_bytes_per_second": together,
            "all_gather": [{"bytes": 1 << 20, "seconds": 3 * (1 << 20) / together}],
        }
        for where, (together, _) in rows.items()
    ]  # fmt: skip
    pairs = [
        {"where": where, "latency_seconds": 1e-4, "bandwidth_bytes_per_second": alone}
        for where, (_, alone) in rows.items()
    ]
    return {"axes": axes, "pairs": pairs}


def test_nodes_of_two_kinds_become_a_machine_that_its_file_can_hold() -> None:
    old = Device("old", 1, {"fp32": 10e9}, 1e9, 1.0, 1.0, 2e-6, product_padding=0.0)
    nodes = [
        NodeFacts("a", 16e9, 10e9, 4, (1e9, 5e8, 1e12), [speeds(TRUE)] * 4),
        NodeFacts("b", 16.1e9, 12e9, 4, (1e9, 5e8, 1e12), [speeds(TRUE)] * 4),
        NodeFacts("c", 8e9, 2e9, 1, (0.0, 0.0, 0.0), [speeds(old)]),
    ]
    found = links(**{"within nodes": (6e8, 1e9), "across nodes": (3e7, 1.2e8)})
    machine = measured_machine(nodes, found)
    assert Machine.from_dict(json.loads(json.dumps(machine.as_dict()))) == machine
    (first, two), (second, one) = machine.nodes
    assert (two, first.devices, first.device.name, first.host_bandwidth) == (2, 4, "chip", 11e9)
    assert (one, second.devices, second.device.name, second.disk) == (1, 1, "old", 0.0)
    # Four ranks share a node's memory, and a copy reads and writes.
    assert (first.device.memory, first.host.bandwidth, first.host.shared) == (4e9, 5.5e9, 4)
    assert first.device.flops == pytest.approx(TRUE.flops)
    # An all-gather of four ranks in a ring has three steps.
    assert (first.inside.bandwidth, first.inside.efficiency) == (1e9, pytest.approx(0.6))
    assert first.inside.latency == pytest.approx(1e-4)
    # Alone, a rank has four times what each has when all four of its node send.
    assert (machine.between.shared, machine.between.bandwidth) == (4, 1.2e8)


def test_links_whose_bandwidth_is_unknown_are_left_out_and_noted() -> None:
    facts = [NodeFacts("a", 16e9, 10e9, 4, (0.0, 0.0, 0.0), [speeds(TRUE)] * 4)]
    found = links(**{"within nodes": (5e8, 1e9), "across nodes": (3e7, 1.2e8)})
    unknown = {"bandwidth_bytes_per_second": None, "unknown": "the time was up"}
    found["pairs"].append(found["pairs"][0] | unknown)
    assert measured_machine(facts, found).nodes[0][0].inside.bandwidth == 1e9
    for row in (*found["axes"], *found["pairs"]):
        row |= unknown
    machine = measured_machine(facts, found)
    assert machine.between == find_link(f"1 x {UNMEASURED}", 4)
    assert any(note.startswith("between nodes: unknown: the time was up; taken as") for note in machine.notes)
    assert "inside a node: unknown: the time was up; taken as the link to the host" in machine.notes


def test_a_busy_machine_is_noted() -> None:
    for load, said in ((0.4, False), (7.5, True)):
        facts = NodeFacts("a", 16e9, 10e9, 4, (0.0, 0.0, 0.0), [speeds(TRUE)], load)
        notes = "\n".join(measured_machine([facts], None).notes)
        assert ("a was busy: 7.5 processes on 4 cores" in notes) == said


def test_attention_is_computation_at_a_share_of_products_and_traffic() -> None:
    [(node, _)] = measured_machine([NodeFacts("a", 16e9, 10e9, 4, (0.0, 0.0, 0.0), [speeds(TRUE)])], None).nodes
    device = node.device
    assert (device.attention_forward, device.attention_backward) == pytest.approx((0.5, 0.25))
    assert (device.attention_bandwidth, device.attention_bandwidth_back) == pytest.approx((1e9, 2e9))
    assert device.loss_bandwidth == pytest.approx(2e9)
    attention = KernelWork(WorkKind.ATTENTION, Divided(1e9), Divided(1e6))
    kernels = KernelSpeed(device, ParallelLayout(), Habits())
    speed = device.flops["bf16"]
    assert kernels.seconds(attention) == pytest.approx(device.launch + 1e9 / (0.5 * speed) + 1e6 / 1e9)
    assert kernels.seconds(attention, back=True) == pytest.approx(device.launch + 1e9 / (0.2 * speed) + 1e6 / 2e9)
    loss = KernelWork(WorkKind.LOSS, Divided(), Divided(1e6))
    assert kernels.seconds(loss) == pytest.approx(device.launch + 1e6 / 2e9)


def test_ranks_that_share_cores_take_turns() -> None:
    def device(cores: int) -> Device:
        ranks = [speeds(TRUE), speeds(TRUE)]
        return measured_machine([NodeFacts("a", 16e9, 10e9, cores, (0.0, 0.0, 0.0), ranks)], None).nodes[0][0].device

    assert device(1).flops["bf16"] == pytest.approx(device(2).flops["bf16"] / 2)
    assert device(1).processor


def test_what_was_not_measured_is_said() -> None:
    machine = measured_machine([NodeFacts("a", 16e9, 10e9, 4, (0.0, 0.0, 0.0), [speeds(TRUE)])], None)
    text = "\n".join(machine.notes)
    assert "between nodes: not measured" in text
    assert "inside a node: not measured" in text
    assert machine.nodes[0][0].inside == machine.nodes[0][0].host


def test_a_known_accelerator_has_the_peak_of_its_data_sheet_and_the_share_that_was_reached() -> None:
    reached = Device("NVIDIA A100-SXM4-80GB", 1, {"bf16": 234e12, "fp32": 15e12}, 1.6e12, 1.0, 1.0, 2e-6)
    rank = speeds(reached, scale=16) | {"memory": 85e9, "threads": None, "host": [6e-6, 2.4e10, 2.2e10]}
    [(node, _)] = measured_machine([NodeFacts("a", 1e12, 3e11, 64, (0.0, 0.0, 0.0), [rank])], None).nodes
    device = node.device
    assert (device.flops["bf16"], device.product_efficiency) == (312e12, pytest.approx(0.75, rel=1e-3))
    for dtype in reached.flops:
        assert device.product_seconds(4096, 4096, 4096, dtype) == pytest.approx(
            reached.product_seconds(4096, 4096, 4096, dtype), rel=0.01
        )
    assert (device.bandwidth, device.memory) == (2039e9, 85e9)
    assert device.memory_efficiency == pytest.approx(1.6e12 / 2039e9, rel=0.01)
    assert (node.host.bandwidth, node.host.latency) == (2.2e10, 6e-6)


def test_a_rank_measures_all_kinds_in_as_many_rounds_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SHAPES", ((8, 8, 8), (16, 8, 4)))
    monkeypatch.setattr(speed, "KERNELS", (64, 256, 1024))
    monkeypatch.setattr(speed, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(speed, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(speed, "_kernel_sizes", lambda device: [64, 256, 1024])
    spent = iter([0.1, 0.2, 0.3, 9.0])  # of the slowest rank

    def meet(value: float) -> float:
        return next(spent) if value else 0.0

    found = json.loads(json.dumps(speed.measure_speeds(torch.device("cpu"), meet, seconds=1.0)))
    assert {tuple(row[:4]) for row in found["products"]} >= {("fp32", 8, 8, 8), ("bf16", 16, 8, 4)}
    assert [size for size, _ in found["kernels"]] == [192, 768, 3072]
    lists = [row[-1] for row in found["products"] + found["kernels"]] + [found["launch"], found["smallest"]]
    assert all(len(times) == 4 and min(times) > 0 for times in lists)
    assert (found["memory"], found["threads"], found["host"]) == (None, torch.get_num_threads(), None)
