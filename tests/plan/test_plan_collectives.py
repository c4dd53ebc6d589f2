"""Times of collectives beside the closed forms of the alpha-beta model."""

import math

import pytest

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.machine.cluster import Device, LinkSpeed, Machine, Node
from zeromesh.apps.plan.machine.collective_times import Fabric, Wire, fabric, wire

ALPHA, BETA = 2e-6, 100e9
NEAR, FAR = Wire(ALPHA, BETA), Wire(1e-5, 10e9)
LARGE, SMALL = 1e9, 64.0


def machine(nodes: int = 2, devices: int = 4, shared: int = 1) -> Machine:
    device = Device("device", 1e10, {"fp32": 1e12}, 1e11)
    node = Node(device, devices, LinkSpeed(100e9, ALPHA, 1.0), LinkSpeed(10e9, 1e-5, 1.0), 1e11, 1e11, 8)
    return Machine(((node, nodes),), LinkSpeed(10e9, 1e-5, 1.0, shared))


def test_ring_inside_a_node():
    group = Fabric(8, 8, NEAR, FAR)
    assert group.all_gather(LARGE) == pytest.approx(7 * ALPHA + LARGE * 7 / 8 / BETA)
    assert group.reduce_scatter(LARGE) == group.all_gather(LARGE)
    assert group.all_reduce(LARGE) == pytest.approx(2 * 7 * ALPHA + 2 * LARGE * 7 / 8 / BETA)


def test_tree_where_latency_counts():
    # Three levels of a tree of eight ranks, up and down; a ring would take 14 messages one after the other.
    assert Fabric(8, 8, NEAR, FAR).all_reduce(SMALL) == pytest.approx(2 * math.log2(8) * ALPHA + 2 * SMALL / BETA)


def test_hierarchy_across_nodes():
    # Two nodes of four ranks. Each rank gathers a quarter over its own link: half of it comes from the other node.
    across = 1e-5 + LARGE / 4 / 2 / 10e9
    inside = 3 * ALPHA + LARGE * 3 / 4 / BETA
    # A ring over all eight ranks uses the four links of a node at once.
    ring = (2 * 1e-5 + 6 * ALPHA) * 7 / 8 + LARGE * 7 / 8 / 40e9
    assert Fabric(8, 4, NEAR, FAR).all_gather(LARGE) == pytest.approx(min(across + inside, ring))
    # With one link, only the ring over it is left.
    assert Fabric(8, 4, NEAR, FAR).on_rails(1).all_gather(LARGE) == pytest.approx(
        (2 * 1e-5 + 6 * ALPHA) * 7 / 8 + LARGE * 7 / 8 / 10e9
    )


def test_one_rank_and_no_bytes_take_no_time():
    for name in ("all_gather", "reduce_scatter", "all_reduce", "send"):
        assert getattr(Fabric(1, 1, NEAR, FAR), name)(LARGE) == 0.0
        assert getattr(Fabric(8, 4, NEAR, FAR), name)(0.0) == 0.0


@pytest.mark.parametrize(
    ("axes", "size", "local"),
    [
        (("tensor",), 2, 2),  # neighbours
        (("pipeline",), 2, 2),  # two apart: both on a node of four
        (("data",), 4, 1),  # four apart: each on a node of its own
        (("data", "tensor"), 8, 2),
        (("data", "pipeline", "tensor"), 16, 4),
    ],
)
def test_places_of_axes(axes, size, local):
    group = fabric(ParallelLayout(data=4, pipeline=2, tensor=2), machine(nodes=4), *axes)
    assert (group.size, group.local) == (size, local)


def test_shared_link_is_divided_by_those_that_send():
    assert wire(LinkSpeed(10e9, 0.0, 0.5, shared=4)).bandwidth == pytest.approx(10e9 * 0.5 / 4)
    assert wire(LinkSpeed(10e9, 0.0, 0.5, shared=4), active=2).bandwidth == pytest.approx(10e9 * 0.5 / 2)
    assert wire(LinkSpeed(10e9, 0.0, 0.5), active=8).bandwidth == pytest.approx(10e9 * 0.5)


def test_faster_link_is_never_slower():
    for size in (64.0, 1e6, 1e9):
        for local in (1, 2, 8):
            slow, fast = (Fabric(16, local, NEAR, Wire(1e-5, rate)) for rate in (5e9, 20e9))
            for name in ("all_gather", "all_reduce", "send"):
                assert getattr(fast, name)(size) <= getattr(slow, name)(size)
