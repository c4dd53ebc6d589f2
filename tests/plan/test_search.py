"""The search finds what trying everything finds; its bounds are bounds; wrong questions are refused."""

from dataclasses import replace
from itertools import combinations

import pytest

from planning import GB, Plain, machine, memory, time
from zeromesh.apps.plan.choose.fit import lacking
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.choose.search import ALIKE, PlanResult, search
from zeromesh.apps.plan.choose.space import LayoutSpace, ModelLimits, PlanRequest
from zeromesh.apps.plan.cost.cost import CostSource
from zeromesh.apps.plan.cost.models import limits_of, shape_named
from zeromesh.apps.plan.cost.shape import TransformerCost
from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.plan.predict.lower_bounds import TimeBound
from zeromesh.apps.plan.predict.rank_memory import memory_of
from zeromesh.apps.plan.predict.time import time_of
from zeromesh.base.placement import Tier


def asked(source: CostSource, on: Machine, batch: int = 64, goal: str = "time") -> PlanRequest:
    return PlanRequest(source, on, batch, 2048, ModelLimits(16, 8, 4096), goal, memory=memory, time=time)


def all_layouts(request: PlanRequest) -> list[ParallelLayout]:
    space = LayoutSpace(request, request.machine)
    found = []
    for mesh in space.meshes():
        plain = space.plain(*mesh)
        for base in space.bases(plain):
            for run in space.runs(plain):
                groups = {"data": base.data, "replicate": base.replicate}
                found.append(replace(run, **groups, row=base.row, parameter_slots=base.parameter_slots))
    return found


def found(request: PlanRequest) -> PlanResult:
    return search(request)


@pytest.mark.some(3)
@pytest.mark.parametrize("goal", ["time", "memory"])
@pytest.mark.parametrize(
    "on",
    [
        machine(1, 4, memory=80 * GB),
        pytest.param(machine(1, 4, memory=12 * GB), marks=pytest.mark.full),
        machine(1, 4, memory=6 * GB),
        # The mesh with the least computation waits for its links.
        machine(2, 2, memory=12 * GB, between=1 * GB),
    ],
)
def test_the_search_finds_the_best_of_all(goal: str, on: Machine) -> None:
    request = asked(Plain(4, 2e8), on, 4, goal)
    result = found(request)
    scores = []
    for layout in all_layouts(request):
        ranks = memory(request.source, 2048, layout, request.machine)
        if max(lacking(ranks, layout, request.machine).values()) <= 0:
            peak = max(rank.device for rank in ranks)
            scores.append(peak if goal == "memory" else time(request.source, 2048, layout, request.machine).seconds)
    assert result.best is not None
    # Of layouts that are alike, the simplest is taken.
    assert min(scores) <= result.best.score(goal) * (1 + 1e-12)
    assert result.best.score(goal) <= min(scores) * (1 + ALIKE)


def test_nothing_fits_where_nothing_does() -> None:
    result = found(asked(Plain(8), machine(1, 4, memory=0.1 * GB, host=0.1 * GB)))
    assert result.best is None
    assert result.nearest


def test_the_same_question_has_the_same_answer() -> None:
    request = asked(Plain(8), machine(2, 4, memory=10 * GB))
    first, second = found(request), found(request)
    assert [one.layout for one in first.shown] == [one.layout for one in second.shown]


@pytest.mark.parametrize("goal", ["time", "memory"])
def test_what_is_shown_differs_in_kind_and_in_time_or_memory(goal: str) -> None:
    shown = found(asked(Plain(8), machine(2, 4, memory=10 * GB), goal=goal)).shown
    assert 2 < len(shown) <= 8
    assert len({one.kind for one in shown}) == len(shown)
    assert not [one for one, other in combinations(shown, 2) if one.like(other)]
    # Context ranks whose messages are hidden compute what data ranks with smaller micro-batches do.
    assert any(one.context > 1 for one in all_layouts(asked(Plain(8), machine(2, 4))))
    assert {one.layout.context for one in shown[:2]} == {1}


def test_every_layout_uses_all_devices_and_the_whole_batch() -> None:
    request = asked(Plain(8), machine(2, 4), 48)
    layouts = all_layouts(request)
    assert {layout.ranks for layout in layouts} == {8}
    assert {layout.samples for layout in layouts} == {48}
    # Tensor ranks are on one node; eight key heads and four devices allow 1, 2 and 4.
    assert {layout.tensor for layout in layouts} == {1, 2, 4}
    assert max(layout.pipeline * layout.chunks for layout in layouts) <= 8


def test_more_memory_and_faster_links_are_never_worse() -> None:
    source = Plain(8)
    base = found(asked(source, machine(2, 4, memory=10 * GB, between=10 * GB))).best
    roomy = found(asked(source, machine(2, 4, memory=20 * GB, between=10 * GB))).best
    fast = found(asked(source, machine(2, 4, memory=10 * GB, between=100 * GB))).best
    assert base is not None
    assert roomy is not None
    assert fast is not None
    assert roomy.time.seconds <= base.time.seconds * (1 + ALIKE)
    assert fast.time.seconds <= base.time.seconds * (1 + ALIKE)


def test_the_cost_goal_takes_fewer_nodes_where_they_do_not_help() -> None:
    # Links so slow that a second node computes for nobody.
    result = found(asked(Plain(4), machine(4, 2, between=0.01 * GB, price=10.0), 16, "cost"))
    assert result.best is not None
    assert result.best.machine.devices < 8
    # Two devices at 10 an hour: the price of a million tokens by hand.
    best = result.best
    nodes = best.machine.devices // 2
    tokens = best.layout.samples * 2048
    assert best.price == pytest.approx(best.time.seconds / 3600 * 10 * nodes / tokens * 1e6)


@pytest.mark.parametrize(
    ("batch", "said"), [(7, "the nearest batches that work: 4 or 8$"), (1, "the nearest batches that work: 4$")]
)
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest(batch: int, said: str) -> None:
    # One block has one stage, and two context ranks have the least tokens: four of eight devices need own samples.
    request = PlanRequest(Plain(1), machine(1, 8), batch, 2048)
    with pytest.raises(ValueError, match=said):
        found(request)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"goal": "speed"}, "one of time, memory, cost"),
        ({"sequence": -1}, "sequence is -1"),
    ],
)
def test_impossible_questions_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(asked(Plain(), machine()), **change)  # type: ignore[arg-type]


def test_bounds_are_below_the_simulated_times() -> None:
    shape = shape_named("gpt2")
    assert shape is not None
    on = cluster("a100-80gb", 4)
    request = PlanRequest(TransformerCost(shape), on, 32, 1024, limits_of(shape))
    bound = TimeBound(request.source, 1024, on)
    layouts = all_layouts(request)[::151]
    assert len(layouts) > 20
    for layout in layouts:
        assert bound.seconds(layout) <= time_of(request.source, 1024, layout, on).seconds * 1.001, layout
        peak = max(rank.device for rank in memory_of(request.source, 1024, layout, on))
        if layout.pipeline == 1:  # stages hold unlike parts of the model, and the bound is of the mean
            assert bound.states(layout) + bound.activations(layout) <= peak * 1.001, layout


def test_offloaded_states_fit_the_host_of_all_ranks() -> None:
    source, tight = Plain(8, 1e9), machine(1, 4, memory=8 * GB, host=1000 * GB)
    result = found(asked(source, tight, 16))
    assert result.best is not None
    assert result.best.layout.row.optimizer_tier is Tier.HOST
    # Eight billion parameters with 12 bytes each are 96 GB on the host.
    assert found(asked(source, machine(1, 4, memory=8 * GB, host=90 * GB), 16)).best is None
