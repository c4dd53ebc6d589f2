"""The named schedules beside the formulas of their papers, and the search beside the named schedules."""

import random
import re
from contextlib import suppress
from fractions import Fraction
from itertools import product

import pytest

from zeromesh.parallel.pipeline.schedule.actions import Action, Kind, Schedule, ScheduleError, loop
from zeromesh.parallel.pipeline.schedule.execution import most_held_by_rank, most_held_by_stage
from zeromesh.parallel.pipeline.schedule.generators import NAMES, ROWS, SEARCH, generate, shape_of
from zeromesh.parallel.pipeline.schedule.listing import ListRule, ListScheduler
from zeromesh.parallel.pipeline.schedule.simulate import Costs, simulate
from zeromesh.parallel.pipeline.schedule.validate import validate

RANKS = (1, 2, 3, 4, 6, 8)


def bubble(schedule: Schedule) -> Fraction:
    return Fraction(simulate(schedule).bubble).limit_denominator(100_000)


def random_costs(draw: random.Random, stages: int) -> Costs:
    """Equal for all stages, or each its own; some have messages, and some whole backwards that are not the sum."""

    def some() -> float | list[float]:
        values = [draw.choice((0.5, 1.0, 2.0, draw.uniform(0.1, 3))) for _ in range(stages)]
        return draw.choice((values, values[0]))

    return Costs(
        some(), some(), some(),
        backward=draw.choice((None, some())),
        latency=draw.choice((0.0, 0.3, 2.0)),
        activation=draw.choice((1.0, [draw.choice((0.5, 1.0, 2.0)) for _ in range(stages)])),
    )  # fmt: skip


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("times", [1, 2, 4])
def test_bubbles_are_those_of_the_formulas(ranks: int, times: int) -> None:
    for microbatches in {times * ranks, times * ranks + (times > 1) * (ranks - 1)}:
        assert bubble(generate("gpipe", ranks, microbatches)) == Fraction(ranks - 1, microbatches)
        assert bubble(generate("1f1b", ranks, microbatches)) == Fraction(ranks - 1, microbatches)
        assert bubble(generate("zb-h1", ranks, microbatches)) == Fraction(ranks - 1, 3 * microbatches)
        for chunks in (2, 3):
            expected = Fraction(ranks - 1, chunks * microbatches)
            assert bubble(generate("breadth-first", ranks, microbatches, chunks)) == expected
            if microbatches % ranks == 0:
                assert bubble(generate("interleaved-1f1b", ranks, microbatches, chunks)) == expected


@pytest.mark.parametrize("ranks", RANKS)
def test_few_micro_batches_idle_longer_only_where_that_cannot_be_helped(ranks: int) -> None:
    """GPipe and 1F1B keep to their formula; the others are idle for longer than with a full pipeline."""
    for microbatches in range(1, 2 * ranks - 1):
        assert bubble(generate("gpipe", ranks, microbatches)) == Fraction(ranks - 1, microbatches)
        assert bubble(generate("1f1b", ranks, microbatches)) == Fraction(ranks - 1, microbatches)
        missing = max(ranks - microbatches, 0)
        assert bubble(generate("zb-h1", ranks, microbatches)) * 3 * microbatches == ranks - 1 + missing
        if missing == 0:
            assert bubble(generate("zb-v", ranks, microbatches)) * 6 * microbatches == 2 * ranks - 1 - microbatches


@pytest.mark.parametrize("ranks", RANKS)
def test_zb_v_is_never_idle_with_enough_micro_batches(ranks: int) -> None:
    for microbatches in (2 * ranks - 1, 2 * ranks, 3 * ranks + 1):
        timeline = simulate(generate("zb-v", ranks, microbatches))
        assert timeline.bubbles == [0.0] * ranks
        assert timeline.makespan == 6 * microbatches + ranks - 1


@pytest.mark.parametrize("ranks", RANKS)
def test_held_micro_batches_are_those_of_the_formulas(ranks: int) -> None:
    for microbatches in (1, ranks, 2 * ranks, 3 * ranks):
        assert most_held_by_stage(generate("gpipe", ranks, microbatches)) == [microbatches] * ranks
        held = most_held_by_stage(generate("1f1b", ranks, microbatches))
        assert held == [min(microbatches, ranks - rank) for rank in range(ranks)]
        assert most_held_by_rank(generate("zb-h1", ranks, microbatches)) == [min(microbatches, ranks)] * ranks
        assert most_held_by_rank(generate("zb-v", ranks, microbatches)) == [2 * min(microbatches, ranks)] * ranks
        for chunks in (2, 3):
            assert (
                most_held_by_rank(generate("breadth-first", ranks, microbatches, chunks))
                == [chunks * microbatches] * ranks
            )
            if microbatches % ranks == 0:
                assert most_held_by_rank(generate("interleaved-1f1b", ranks, microbatches, chunks)) == [
                    min(chunks * microbatches, 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1)
                    for rank in range(ranks)
                ]
    # In whole ranks' micro-batches the first rank of interleaved 1f1b holds p (1 + (p-1)/(p v)).
    most = most_held_by_rank(generate("interleaved-1f1b", ranks, 4 * ranks, 3))[0]
    assert Fraction(int(most), 3) == ranks * (1 + Fraction(ranks - 1, 3 * ranks))


def test_the_table_says_what_is_so() -> None:
    for (name, row), ranks, microbatches in product(ROWS.items(), (1, 2, 4), (4, 8, 12)):
        shape = shape_of(name, ranks, microbatches)
        schedule = generate(name, ranks, microbatches)
        if microbatches >= row.full(shape):
            assert bubble(schedule) == row.bubble(shape)
        assert most_held_by_rank(schedule) == [row.held(shape, rank) for rank in range(ranks)]


def test_groups_of_any_size_make_an_order_between_interleaved_and_breadth_first() -> None:
    for group in (3, 4, 6, 12):
        schedule = generate("interleaved-1f1b", 3, 12, 2, group)
        assert bubble(schedule) == Fraction(2, 2 * 12)
        assert most_held_by_rank(schedule)[0] == min(24, 2 * 2 + group + 1)
    assert bubble(generate("interleaved-1f1b", 2, 5, 2, 3)) == Fraction(1, 2 * 5)


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        (("zb-h2", 4, 8), ["there is no schedule 'zb-h2'", "1f1b"]),
        (("1f1b", 0, 8), ["ranks is 0", "at least 1"]),
        (("1f1b", 4, 0), ["microbatches is 0", "at least 1"]),
        (("1f1b", 4, 8, 2), ["1f1b with 2 stages per rank", "exactly 1"]),
        (("zb-v", 4, 8, 3), ["zb-v with 3 stages per rank", "exactly 2"]),
        (("breadth-first", 4, 8, 1), ["breadth-first with 1 stages per rank", "at least 2"]),
        (("interleaved-1f1b", 4, 6), ["6 micro-batches", "groups of 4", "take 4 or 8 micro-batches"]),
        (("interleaved-1f1b", 4, 3), ["3 micro-batches", "take 4 micro-batches"]),
        (("interleaved-1f1b", 4, 8, 2, 3), ["group is 3", "at least the number of ranks, 4"]),
        (("zb-v", 4, 8, 2, 4), ["group is 4", "zb-v has no groups"]),
    ],
)
def test_sizes_that_a_schedule_is_not_for_are_refused_with_those_it_is_for(asked, parts) -> None:
    with pytest.raises(ValueError, match=".*".join(map(re.escape, parts))):
        generate(*asked)


def check_random(seed: int, largest: int) -> None:
    draw = random.Random(seed)
    name = draw.choice(list(ROWS))
    ranks, microbatches = draw.randint(1, largest), draw.randint(1, 2 * largest)
    chunks = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "zb-v": 2}.get(name, draw.randint(2, 3))
    group = None
    if name == "interleaved-1f1b":
        group = draw.randint(ranks, ranks + 3)
        microbatches = group * draw.randint(1, 2) + draw.choice((0, ranks))
    costs = random_costs(draw, ranks * chunks)
    schedule = generate(name, ranks, microbatches, chunks, group, costs)
    most = max(most_held_by_rank(schedule, costs.activations(ranks * chunks)))
    validate(schedule, most, costs)
    assert simulate(schedule, costs).makespan > 0


@pytest.mark.parametrize(
    ("seeds", "largest"),
    [(range(300), 4), pytest.param(range(300, 4000), 9, marks=pytest.mark.full)],
    ids=["few", "many"],
)
def test_every_row_makes_valid_schedules_of_any_shape_and_costs(seeds: range, largest: int) -> None:
    for seed in seeds:
        check_random(seed, largest)


def check_search(seed: int, largest: int) -> None:
    """Require that the search keeps within the memory, and that no named schedule that does is faster."""
    draw = random.Random(seed)
    ranks, microbatches, chunks = draw.randint(1, largest), draw.randint(1, 2 * largest), draw.choice((1, 1, 2, 3))
    costs = random_costs(draw, ranks * chunks)
    sizes = costs.activations(ranks * chunks)
    memory = draw.choice((None, draw.uniform(1, 4) * 2 * chunks))
    least = max(sum(sizes[rank::ranks]) for rank in range(ranks))
    if memory is not None and memory < least:
        memory = least
    found = generate(SEARCH, ranks, microbatches, chunks, costs=costs, memory=memory)
    validate(found, memory, costs)
    time = simulate(found, costs).makespan
    for name in ROWS:
        try:
            named = generate(name, ranks, microbatches, chunks, costs=costs)
        except ValueError:  # not for this shape
            continue
        if memory is None or max(most_held_by_rank(named, sizes)) <= memory:
            assert time <= simulate(named, costs).makespan, (seed, name)


@pytest.mark.parametrize(
    ("seeds", "largest"), [(range(10), 3), pytest.param(range(10, 400), 6, marks=pytest.mark.full)], ids=["few", "many"]
)
def test_the_search_is_never_worse_than_a_named_schedule_that_fits(seeds: range, largest: int) -> None:
    for seed in seeds:
        check_search(seed, largest)


def test_the_search_says_how_much_memory_it_takes() -> None:
    with pytest.raises(
        ValueError, match="memory is 1.5; one micro-batch takes 2 on a rank, so it must be at least that"
    ):
        generate(SEARCH, 2, 4, 2, memory=1.5)
    validate(generate(SEARCH, 2, 4, 2, memory=2), memory=2)


def test_the_search_finds_the_best_of_all_orders_where_these_can_be_counted() -> None:
    """On two ranks with two micro-batches each rank has 5 orders of forwards, input and weight gradients."""
    F, I, W = Kind.FORWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741
    texts = ("FIWFIW", "FIFWIW", "FIFIWW", "FFIWIW", "FFIIWW")

    def order(stage: int, text: str) -> tuple[Action, ...]:
        return tuple(Action(Kind(kind), stage, text[:at].count(kind)) for at, kind in enumerate(text))

    for seed in range(40):
        draw = random.Random(seed)
        times = [[draw.uniform(0.3, 2) for _ in range(2)] for _ in (F, I, W)]
        costs, memory = Costs(*times, latency=draw.choice((0, 0.3))), draw.choice((1, 2))
        found = []
        for pair in product(texts, texts):
            schedule = Schedule(2, (0, 1), tuple(order(stage, text) for stage, text in enumerate(pair)))
            with suppress(ScheduleError):  # some pairs wait for each other
                validate(schedule, memory)
                found.append(simulate(schedule, costs).makespan)
        assert simulate(generate(SEARCH, 2, 2, costs=costs, memory=memory), costs).makespan <= min(found) + 1e-9


def test_the_search_finds_less_idle_time_where_stages_are_uneven() -> None:
    costs = Costs(forward=[1, 1, 1, 2], input=[1, 1, 1, 2], weight=[1, 1, 1, 2], latency=0.5)
    times = {name: simulate(generate(name, 4, 8, 1, costs=costs), costs).makespan for name in (SEARCH, "1f1b", "zb-h1")}
    assert times[SEARCH] < times["1f1b"]
    assert times[SEARCH] <= times["zb-h1"]


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_list_schedule_never_gets_stuck_while_a_micro_batch_has_room(chunks: int) -> None:
    """Forwards that would take the room in which older micro-batches are finished wait."""
    for limit, deep in product((chunks, chunks + 1, 3 * chunks), (True, False)):
        schedule = ListScheduler(6, loop(3, chunks), ListRule(deep_forward=deep), limit).run()
        validate(schedule, memory=limit)


def test_priorities_decide_what_an_idle_rank_takes() -> None:
    F, I, W = Kind.FORWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741
    orders = {
        priority: [str(a) for a in ListScheduler(2, (0,), ListRule(priority), 2).run().ranks[0]]
        for priority in ((I, F, W), (F, I, W), (I, W, F), (Kind.BACKWARD, F))
    }
    assert orders == {
        (I, F, W): ["F0.0", "I0.0", "F0.1", "I0.1", "W0.0", "W0.1"],
        (F, I, W): ["F0.0", "F0.1", "I0.0", "I0.1", "W0.0", "W0.1"],
        (I, W, F): ["F0.0", "I0.0", "W0.0", "F0.1", "I0.1", "W0.1"],
        (Kind.BACKWARD, F): ["F0.0", "B0.0", "F0.1", "B0.1"],
    }


def test_a_patient_rank_waits_for_what_comes_first_if_that_comes_soon() -> None:
    """Rank 0 has done the first input gradient at 4.5, and can begin the second at 4.9, or a weight gradient of 2."""
    costs = Costs(forward=[2, 0.4], input=[0.5, 0.5], weight=[2, 0.5])
    orders = {}
    for patience in (0.0, 0.1, 0.3):
        schedule = ListScheduler(2, (0, 1), ListRule(patience=patience), 2, costs).run()
        validate(schedule)
        orders[patience] = [str(action) for action in schedule.ranks[0]]
    assert orders[0.0] == orders[0.1] == ["F0.0", "F0.1", "I0.0", "W0.0", "I0.1", "W0.1"]
    assert orders[0.3] == ["F0.0", "F0.1", "I0.0", "I0.1", "W0.0", "W0.1"]


def test_a_list_schedule_that_ends_too_late_is_given_up() -> None:
    time = simulate(ListScheduler(6, loop(3, 1), ListRule(), 3).run()).makespan
    assert simulate(ListScheduler(6, loop(3, 1), ListRule(), 3).run(time)).makespan == time
    with pytest.raises(ScheduleError) as error:
        ListScheduler(6, loop(3, 1), ListRule(), 3).run(time - 0.5)
    assert error.value.fault == "time"


def test_names_are_in_the_order_of_the_table_and_end_with_the_search() -> None:
    assert list(NAMES) == [*ROWS, SEARCH]
