"""Plans of saved tensors are the best under their budget, and need the bytes that they say."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import ModelCost
from zeromesh.apps.plan.cost.cost_trace import TracedCost
from zeromesh.apps.plan.cost.passes import TraceOptions
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.plan.saved import choose, pack, places_of
from zeromesh.apps.plan.saved_costs import Candidate, SavedCosts, saved_costs
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.train_settings import ModelShape
from zeromesh.base.saved_tensors import BlockPlan, Saved

LAYERS, TOKENS = 4, 64


def decoder() -> Decoder:
    shape = ModelShape(hidden_size=64, layers=LAYERS, heads=4, vocab_size=31, sequence_length=TOKENS)
    return Decoder(shape)


def inputs() -> dict[str, Tensor]:
    return {"tokens": torch.zeros(4, TOKENS, dtype=torch.long)}


@pytest.fixture(scope="module")
def cost() -> ModelCost:
    return TracedCost(decoder(), inputs(), TraceOptions(kernels="cpu")).at(4, TOKENS)


@pytest.fixture(scope="module")
def costs(cost: ModelCost) -> SavedCosts:
    return saved_costs(cost, cluster("h100", 1))[0]


@pytest.mark.parametrize("room", [0, 3, 7, 12, 40])
@pytest.mark.parametrize("beside", [0, 5, 9])
def test_choice_is_the_best_of_all(room: int, beside: int) -> None:
    sizes, seconds = (3, 5, 2, 7, 4, 6), (4.0, 6.0, 1.5, 9.0, 4.5, 2.0)
    items = [Candidate(("op", n), size, each) for n, (size, each) in enumerate(zip(sizes, seconds, strict=True))]
    best = 0.0
    for choice in product(Saved, repeat=len(items)):
        used = {kind: sum(x.size for x, c in zip(items, choice, strict=True) if c is kind) for kind in Saved}
        if used[Saved.KEEP] <= room and used[Saved.MOVE] <= beside:
            chosen = zip(items, choice, strict=True)
            best = max(best, sum(x.seconds for x, c in chosen if c is not Saved.RECOMPUTE))
    packed = pack(items, room, beside)
    assert packed.saved == pytest.approx(best)
    assert packed.bound == pytest.approx(best)
    greedy = pack(items, room, beside, branches=len(items) + 1)
    assert greedy.saved <= best <= greedy.bound + 1e-12


def test_budgets_are_kept_and_more_bytes_never_take_longer(costs: SavedCosts) -> None:
    full, none = ((plan,) * LAYERS for plan in (BlockPlan(), BlockPlan(keeps_all=True)))
    low, high = costs.peak(full), costs.peak(none)
    costs, seconds = replace(costs, link=0.0), []  # a fast link takes all that a small model saves
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        budget = low + share * (high - low)
        ((_, plans),) = choose([costs], [budget])
        assert costs.peak(plans) <= budget
        seconds.append(costs.seconds(plans))
    assert seconds[0] > seconds[2] > seconds[-1] == 0.0
    assert seconds == sorted(seconds, reverse=True)
    assert any("addmm 4" in line and "s/GB" in line for line in choose([costs], [low])[0].lines())


def test_budget_below_every_plan_names_the_smallest(costs: SavedCosts) -> None:
    with pytest.raises(ValueError, match="no plan needs less than") as caught:
        choose([costs], [1000.0])
    least = float(str(caught.value).partition("budget_gb to ")[2].partition(" ")[0]) * 1e9
    assert choose([costs], [least])[0].peak <= least


def test_the_smallest_budget_is_that_of_all_ranks(cost: ModelCost) -> None:
    layout = ParallelLayout(pipeline=2, schedule="gpipe", accumulation=4)
    costs = saved_costs(cost, cluster("h100", 2), layout)
    with pytest.raises(ValueError, match="no plan needs less than") as caught:
        choose(costs, [1000.0, 1000.0])
    least = float(str(caught.value).partition("budget_gb to ")[2].partition(" ")[0]) * 1e9
    assert all(rank.peak <= least for rank in choose(costs, [least, least]))


@pytest.mark.parametrize("plan", [BlockPlan(), BlockPlan(keeps_all=True)])
def test_a_stage_keeps_each_micro_batch_that_it_holds(cost: ModelCost, plan: BlockPlan) -> None:
    def first_rank(schedule: str, microbatches: int) -> SavedCosts:
        layout = ParallelLayout(pipeline=2, schedule=schedule, accumulation=microbatches)
        return saved_costs(cost, cluster("h100", 2), layout)[0]

    plans = (plan,) * (LAYERS // 2)
    two, five = (first_rank("gpipe", number) for number in (2, 5))
    assert five.peak(plans) - two.peak(plans) == pytest.approx(3 * two.stages[0].held(plans))
    assert first_rank("1f1b", 5).peak(plans) == two.peak(plans)  # it waits for the other rank, and holds two


def test_stage_inside_of_a_block_is_refused(cost: ModelCost) -> None:
    with pytest.raises(ValueError, match=r"a stage begins at blocks\.1\.norm.*leave pipeline.blocks out"):
        places_of(cost, ["blocks.0", "blocks.1.norm"])
