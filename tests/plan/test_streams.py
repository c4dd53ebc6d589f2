"""Steps of one rank, followed by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest

from zeromesh.apps.plan.predict import step_clock as streams
from zeromesh.apps.plan.predict.durations import UnitTime
from zeromesh.apps.plan.predict.step_clock import StreamRules, run

UNIT = UnitTime("unit", True, forward=1.0, input=1.0, weight=1.0, gather=0.5, reduce=0.5)
TWO = [UNIT._replace(name="a"), UNIT._replace(name="b")]
GATHERED = StreamRules(sharded=True, split=True, reduces_each=True, parameter_slots=2, gradient_slots=2, accumulation=1)
KEPT = replace(GATHERED, sharded=False, reduces_each=False)


def test_gathers_of_two_units_with_prefetch():
    # Gather a 0-0.5 and b 0.5-1; forward a 0.5-1.5, b 1.5-2.5. Both stay in their slots: backward b 2.5-4.5, a 4.5-6.5.
    # The sum of b's gradients goes on beside the backward of a; that of a ends at 7.
    seconds, waits, _ = run(TWO, GATHERED)
    assert seconds == pytest.approx(7.0)
    assert waits == pytest.approx({"compute": 6.0, "data links": 1.0})


def test_gathers_of_two_units_with_one_slot():
    # Forward a 0.5-1.5, gather b 1.5-2, forward b 2-3, backward b 3-5, reduce b 5-5.5, gather a 5.5-6, backward a 6-8.
    seconds, waits, _ = run(TWO, replace(GATHERED, parameter_slots=1))
    assert seconds == pytest.approx(8.5)
    assert waits["data links"] == pytest.approx(2.5)


def test_units_in_slots_stay_over_micro_batches():
    # The second micro-batch gathers nothing: 2 forwards and 2 backwards more, 6 seconds.
    assert run(TWO, replace(GATHERED, accumulation=2))[0] == pytest.approx(7.0 + 6.0)


def test_gradients_are_reduced_for_each_micro_batch_or_once():
    slow = [unit._replace(gather=0.0, reduce=4.0) for unit in TWO]
    # Once: forwards 2, backwards 4, then b's sum, which began with a's backward: 4 - 2 later, and a's.
    assert run(slow, replace(KEPT, accumulation=3))[0] == pytest.approx(3 * 6.0 + 2.0 + 4.0)
    # For each: two sums of 4 seconds in 6 seconds of computation.
    each = run(slow, replace(KEPT, accumulation=3, reduces_each=True))[0]
    assert each == pytest.approx(4.0 + 3 * 8.0)


def test_updated_parameters_are_gathered_beside_the_forward():
    # Updates 0-0.1 and 0.1-0.2; gathers 0.1-0.6 and 0.6-1.1. Forward a waits for its own until 0.6 and hides b's.
    units = [unit._replace(update=0.1, reduce=0.0) for unit in TWO]
    assert run(units, KEPT)[0] == pytest.approx(0.6 + 6.0)
    assert run(units, replace(KEPT, publishes_early=False))[0] == pytest.approx(1.1 + 6.0)


def test_update_on_the_host():
    # Gradients: b reduced 4-4.5 and copied 4.5-4.7, a reduced 6-6.5 and copied 6.5-6.7. The host updates a 0-1 and b
    # 1-2 before the forward; their copies go to the device 1-1.3 and 2-2.3, and are gathered 1.3-1.8 and 2.3-2.8.
    units = [unit._replace(host_update=1.0, gradient_out=0.2, parameter_in=0.3) for unit in TWO]
    seconds, waits, _ = run(units, KEPT)
    assert seconds == pytest.approx(2.0 + 6.0 + 0.5 + 0.2)
    assert waits["host"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("add", "accumulation", "end", "waits"),
    [
        # The sums of the first micro-batch, which ends at 6, are not added to others.
        (3.0, 1, 6.0, 0.0),
        # Backward b 8-10 and a 10-12; additions 10-13 and 13-16.
        (3.0, 2, 16.0, 4.0),
        # Additions 10-15 and 15-20, then 20-25 and 25-30: at the end of backward a, at 18, two sums are under way, and
        # it waits for the first of them, until 20.
        (5.0, 3, 30.0, 12.0),
    ],
)
def test_sums_of_micro_batches_are_added_on_the_host(add: float, accumulation: int, end: float, waits: float) -> None:
    units = [unit._replace(host_add=add, gather=0.0, reduce=0.0) for unit in TWO]
    seconds, spent, _ = run(units, replace(KEPT, split=False, reduces_each=True, accumulation=accumulation))
    assert (seconds, spent.get("host", 0.0)) == pytest.approx((end, waits))


def test_states_on_a_disk_are_read_ahead():
    units = [
        unit._replace(host_update=1.0, states_read=2.0, states_written=0.5, gather=0.0, reduce=0.0) for unit in TWO
    ]
    # Reads 0-2 and 2-4; updates 2-3 and 4-5; the last write ends at 5.5, and computation follows.
    assert run(units, replace(KEPT, split=False))[0] == pytest.approx(5.5 + 6.0)


def test_activations_on_the_host_come_back_in_time():
    # Copies out 1-1.5 and 2-2.5, back at once for b, and for a beside b's backward.
    units = [unit._replace(saved_out=0.5, gather=0.0, reduce=0.0) for unit in TWO]
    assert run(units, replace(KEPT, split=False))[0] == pytest.approx(2.0 + 0.5 + 0.5 + 4.0)


def test_few_micro_batches_stand_for_many(monkeypatch):
    units = [UNIT._replace(name=str(i), gather=0.8 + 0.1 * i, reduce=0.9) for i in range(6)]
    rules = replace(GATHERED, accumulation=11)
    short, waits, _ = run(units, rules)
    monkeypatch.setattr(streams, "SIMULATED", 11)
    whole, all_of_them, _ = run(units, rules)
    assert short == pytest.approx(whole)
    assert sum(waits.values()) == pytest.approx(short)
    assert waits == pytest.approx(all_of_them)


@pytest.mark.parametrize("gather", [0.2, 1.0, 3.0])
def test_more_slots_are_never_slower(gather):
    units = [UNIT._replace(name=str(i), gather=gather, reduce=0.7) for i in range(8)]
    times = [run(units, replace(GATHERED, parameter_slots=slots, accumulation=3))[0] for slots in range(1, 10)]
    assert times == sorted(times, reverse=True)
    times = [run(units, replace(GATHERED, gradient_slots=slots, accumulation=3))[0] for slots in range(1, 10)]
    assert times == sorted(times, reverse=True)


def test_uses_of_one_resource_do_not_overlap():
    units = [UNIT._replace(name=str(i), gather=1.1, reduce=0.7, saved_out=0.2) for i in range(5)]
    _, _, intervals = run(units, replace(GATHERED, accumulation=2), keep=True)
    for resource in {one[0] for one in intervals}:
        spans = sorted((start, end) for name, _, start, end in intervals if name == resource)
        assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(spans))


def test_messages_of_a_processor_take_its_time():
    # Two gathers and two reductions of half a second each lie beside 6 seconds of computation, and hide behind none.
    seconds, waits, _ = run(TWO, replace(GATHERED, serial=1.0))
    assert seconds == pytest.approx(6.0 + 4 * 0.5)
    assert waits == pytest.approx({"compute": 6.0, "data links": 2.0})


def test_a_slow_links_messages_take_the_processor_for_a_share():
    # A fifth of each sum's 5 seconds is the processor's: forwards 0-2, backward b 2-4, its sum 4-9, of which the
    # processor spends 4-5; backward a 5-7, its sum behind b's 9-14.
    slow = [unit._replace(gather=0.0, reduce=5.0) for unit in TWO]
    assert run(slow, replace(KEPT, serial=0.2))[0] == pytest.approx(14.0)
