"""Times of pipelines beside closed forms of their schedules."""

import pytest

from zeromesh.apps.plan.predict.pipeline_step import StageCost, pipelined, placement_of
from zeromesh.parallel.pipeline.schedule.generators import generate
from zeromesh.parallel.pipeline.schedule.simulate import Costs, simulate

EVEN = StageCost(1.0, 1.0, 1.0)  # a backward takes twice a forward


@pytest.mark.parametrize("microbatches", [1, 4, 8, 37, 64])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_bubble_of_one_stage_a_rank(name, microbatches):
    # (m + p - 1) (F + B): the bubble is (p - 1) / m of the ideal time.
    found = pipelined(name, 4, microbatches, 1, [EVEN] * 4)
    assert found.makespan == pytest.approx((microbatches + 3) * 3.0)
    assert found.busy == pytest.approx([microbatches * 3.0] * 4)


@pytest.mark.parametrize("chunks", [2, 3])
def test_bubble_of_interleaved_stages(chunks):
    # A rank's stages together take as long as before, so that the bubble is (p - 1) / (v m).
    stage = StageCost(1 / chunks, 1 / chunks, 1 / chunks)
    found = pipelined("interleaved-1f1b", 4, 64, chunks, [stage] * 4 * chunks)
    assert found.makespan == pytest.approx(64 * 3.0 * (1 + 3 / chunks / 64))


def test_bubble_of_zero_bubble_schedules():
    # ZB-H1: (p - 1) / (3 m) of the ideal time, where a forward and either gradient take the same time.
    assert pipelined("zb-h1", 4, 64, 1, [EVEN] * 4).makespan == pytest.approx(64 * 3.0 * (1 + 3 / 3 / 64))


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1)])
def test_few_micro_batches_stand_for_many(name, chunks):
    uneven = [StageCost(1.0 + 0.1 * s, 1.2, 0.9 + 0.05 * s, 0.3 * s, 0.05) for s in range(4 * chunks)]
    whole = pipelined(name, 4, 96, chunks, uneven, keep=True)
    short = pipelined(name, 4, 96, chunks, uneven)
    assert short.makespan == pytest.approx(whole.makespan, rel=1e-6)
    assert short.busy == pytest.approx(whole.busy)
    assert whole.actions
    assert not short.actions


def test_message_and_release_delay_the_first_micro_batch():
    # Two messages lie between the forward on rank 0 and its backward, and the first forward waits for its release.
    found = pipelined("1f1b", 2, 1, 1, [StageCost(1.0, 1.0, 1.0, release=0.5, message=0.25)] * 2)
    assert found.makespan == pytest.approx(0.5 + 1.0 + 0.25 + 1.0 + 2.0 + 0.25 + 2.0)


def test_search_orders_actions_by_measured_costs():
    costs = Costs((1.0, 1.0, 2.0), (2.0, 2.0, 2.0), (1.0, 2.0, 1.0), latency=0.5)
    stages = [StageCost(*one, message=0.5) for one in zip(costs.forward, costs.input, costs.weight, strict=True)]
    measured, equal = (pipelined("search", 3, 4, 1, stages, costs=each) for each in (costs, None))
    assert measured.makespan == pytest.approx(simulate(generate("search", 3, 4, costs=costs), costs).makespan)
    assert measured.makespan < equal.makespan


@pytest.mark.parametrize(
    ("name", "microbatches", "keep"), [("search", 8, False), ("search", 8, True), ("zb-v", 96, False)]
)
def test_placement_is_that_of_the_simulated_schedule(name, microbatches, keep):
    found = pipelined(name, 4, microbatches, 2, [EVEN] * 8, keep)
    assert placement_of(name, 4, microbatches, 2, keep) == found.placement
    assert found.placement == (0, 1, 2, 3, 3, 2, 1, 0)


def test_slowest_stage_sets_the_pace():
    slow = [EVEN, StageCost(2.0, 2.0, 2.0), EVEN]
    step = pipelined("1f1b", 3, 65, 1, slow).makespan - pipelined("1f1b", 3, 64, 1, slow).makespan
    assert step == pytest.approx(6.0)


def test_schedule_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="micro-batches"):
        pipelined("interleaved-1f1b", 4, 6, 2, [EVEN] * 8)
    with pytest.raises(ValueError, match="there is no schedule"):
        pipelined("nonsense", 4, 8, 1, [EVEN] * 4)
