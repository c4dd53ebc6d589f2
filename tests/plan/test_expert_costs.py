"""Costs of mixtures: parameters, memory, dispatch and the search over numbers of expert ranks."""

from dataclasses import replace
from math import comb

import pytest

from zeromesh.apps.cli.plan_model import Adapters, asked_model
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.choose.space import LayoutSpace, PlanRequest
from zeromesh.apps.plan.cost.cost import ExpertCost
from zeromesh.apps.plan.cost.models import limits_of, shape_named
from zeromesh.apps.plan.cost.shape import LatentAttention, TransformerCost, TransformerShape
from zeromesh.apps.plan.machine.collective_times import fabric
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.plan.machine.rates import Habits
from zeromesh.apps.plan.predict.durations import Durations
from zeromesh.apps.plan.predict.rank_memory import memory_of
from zeromesh.apps.plan.predict.time import time_of
from zeromesh.base.placement import ROWS

PLAIN = {"gated": True, "biases": False, "tied": False}
MIXTRAL = TransformerShape(
    32, 4096, 32, 32000, kv_heads=8, **PLAIN, experts=8, chosen=2, expert_width=14336, name="mixtral"
)
DEEPSEEK = TransformerShape(
    61, 7168, 128, 129280, width=18432, **PLAIN, experts=256, chosen=8, expert_width=2048, shared_width=2048,
    dense_layers=3, latent=LatentAttention(1536, 512, 128, 64, 128), name="deepseek",
)  # fmt: skip


@pytest.mark.parametrize(("shape", "billions"), [(MIXTRAL, 46.70), (DEEPSEEK, 671.0)])
def test_parameters_by_formula_are_those_that_makers_publish(shape: TransformerShape, billions: float) -> None:
    assert TransformerCost(shape).at(1, 1024).parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_token_travels_once_to_each_rank_with_one_of_its_experts() -> None:
    experts = ExpertCost(0.0, 128, 8, 1.0, 1.0)
    missed = comb(128 - 16, 8) / comb(128, 8)
    assert experts.ranks_of_token(8) == pytest.approx(8 * (1 - missed))
    assert experts.ranks_of_token(1) == 1.0
    assert ExpertCost(0.0, 4, 4, 1.0, 1.0).ranks_of_token(2) == 2.0


def test_expert_ranks_are_neighbours_of_a_stage_and_replica() -> None:
    machine = cluster("h100", 8, 4)
    layout = ParallelLayout(data=4, replicate=2, tensor=4, expert=8)
    shared, alike = (fabric(layout, machine, axis) for axis in ("expert", "expert_data"))
    assert (shared.size, shared.local) == (8, 8)  # four tensor ranks and two data ranks, on one node
    assert (alike.size, alike.local) == (2, 1)
    staged = replace(layout, replicate=1, pipeline=2)
    assert fabric(staged, machine, "expert").local == 4  # the other ranks of the node are another stage's
    outer = fabric(staged, machine, "expert", order=("pipeline", "replicate", "data", "context", "tensor"))
    assert outer.local == 8


def test_dispatch_costs_what_leaves_a_rank_on_the_slower_link() -> None:
    source, machine = TransformerCost(MIXTRAL), cluster("h100", 8, 2)
    cost = source.at(1, 4096)
    even = Habits(uneven=1.0)

    def seconds(expert: int, habits: Habits = even) -> float:
        layout = ParallelLayout(data=16, expert=expert, row=ROWS[1])
        return Durations(layout, machine, habits).units(cost)[1].dispatch

    assert seconds(1) == 0.0
    inside = fabric(ParallelLayout(data=16, expert=8), machine, "expert")
    rows = 4096 * 2 * 4096 * cost.units[1].experts.ranks_of_token(8)
    assert seconds(8) == pytest.approx(2 * (7 * inside.inside.latency + rows * 7 / 8 / inside.inside.bandwidth))
    # With one expert on each of eight ranks, two chosen ones are on two ranks; with two on each of four, they may not.
    assert seconds(8, replace(even, copies="expert")) == seconds(8)
    assert seconds(4, replace(even, copies="expert")) > seconds(4)
    assert seconds(8, Habits()) == pytest.approx(seconds(8) * Habits().uneven, rel=0.02)


def test_expert_ranks_divide_the_memory_of_experts_alone() -> None:
    source = TransformerCost(MIXTRAL)

    def states(expert: int) -> dict[tuple[str, str], float]:
        layout = ParallelLayout(data=8, expert=expert, row=ROWS[1])
        (rank,) = memory_of(source, 1024, layout)
        return dict(rank.states)

    experts = sum(unit.experts.parameters for unit in source.at(1, 1024).units if unit.experts)
    one, eight = states(1), states(8)
    assert one["parameter", "device"] - eight["parameter", "device"] == pytest.approx(2 * experts * 7 / 8)
    assert one["optimizer", "device"] == pytest.approx(
        eight["optimizer", "device"]
    )  # sharded over all ranks in any case


def test_the_search_tries_numbers_of_ranks_that_divide_experts_and_ranks() -> None:
    shape = replace(MIXTRAL, layers=4, experts=12, expert_width=2048)
    request = PlanRequest(TransformerCost(shape), cluster("h100", 8), 64, 4096, limits_of(shape))
    meshes = LayoutSpace(request, request.machine).meshes()
    assert {mesh[3] for mesh in meshes} == {1, 2, 4}  # of 8 ranks and 12 experts
    assert all(12 % mesh[3] == 0 and (8 // mesh[2]) % mesh[3] == 0 for mesh in meshes)
    dense = replace(request, source=TransformerCost(replace(shape, experts=0)))
    assert {mesh[3] for mesh in LayoutSpace(dense, dense.machine).meshes()} == {1}


def test_sharing_experts_saves_time_where_links_are_slow() -> None:
    machine = cluster("h100", 8, 2)
    slow = replace(machine, between=replace(machine.between, bandwidth=machine.between.bandwidth / 20))
    source = TransformerCost(replace(MIXTRAL, layers=4))
    times = [time_of(source, 4096, ParallelLayout(data=16, expert=n, row=ROWS[3]), slow).seconds for n in (1, 8)]
    assert times[1] < times[0]


@pytest.mark.parametrize(("quantized", "byte"), [(False, 2.0), (True, 0.5 + (1 + 4 / 256) / 64)])
def test_adapters_of_a_mixture_share_and_quantize_its_frozen_experts(quantized: bool, byte: float) -> None:
    pytest.importorskip("peft")
    sizes = "layers=2,hidden=64,heads=4,vocabulary=128,experts=4,chosen=2,expert_width=128"
    source = asked_model(f"llama:{sizes}", "bf16", Adapters(8, quantized)).source
    # PEFT adapts the stacked weights, of which one is of two matrices, so that its adapter has twice the rank.
    experts, adapters = 2 * 4 * 3 * 64 * 128, 2 * 4 * (16 * (64 + 256) + 8 * (128 + 64))
    assert source.at(1, 16).has_experts

    def parameters(expert: int) -> float:
        rank, *_ = memory_of(source, 16, ParallelLayout(data=2, expert=expert, row=ROWS[1]))
        return rank.states["parameter", "device"] + rank.states.get(("buffer", "device"), 0.0)

    assert parameters(1) - parameters(2) == pytest.approx((byte * experts + 2 * adapters) / 2)
    request = PlanRequest(source, cluster("h100", 2), 2, 16)
    assert {mesh[3] for mesh in LayoutSpace(request, request.machine).meshes()} == {1, 2}


def test_sizes_of_a_mixture_are_checked() -> None:
    assert shape_named("llama:layers=2,hidden=64,heads=4,experts=8,chosen=2,expert_width=32") is not None
    with pytest.raises(ValueError, match="experts = 8 needs chosen, from 1 to 8, and expert_width"):
        shape_named("llama:layers=2,hidden=64,heads=4,experts=8,chosen=9,expert_width=32")
