"""What passes add to schedules: all that is needed, nothing needless, and so that nothing waits for ever."""

import random
from itertools import combinations

import pytest

from test_schedule_generators import random_costs
from zeromesh.parallel.pipeline.schedule.actions import COMPUTE, Action, Kind, Schedule, parse
from zeromesh.parallel.pipeline.schedule.generators import ROWS, generate
from zeromesh.parallel.pipeline.schedule.lowering import add_messages, add_recompute, forward_only, split_backwards
from zeromesh.parallel.pipeline.schedule.simulate import Costs, simulate
from zeromesh.parallel.pipeline.schedule.validate import validate

SENDS, RECEIVES = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT), (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)


RANDOM = pytest.mark.parametrize(
    ("seeds", "largest"),
    [(range(100), 3), pytest.param(range(100, 1500), 6, marks=pytest.mark.full)],
    ids=["few", "many"],
)
"""Random schedules of few ranks, and in the full matrices more of them of more ranks."""


def words(schedule: Schedule, rank: int = 0) -> str:
    return " ".join(map(str, schedule.ranks[rank]))


def without(schedule: Schedule, kinds: tuple[Kind, ...]) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(action for action in actions if action.kind not in kinds) for actions in schedule.ranks)


def some_schedule(draw: random.Random, largest: int) -> tuple[Schedule, Costs]:
    name = draw.choice(list(ROWS))
    ranks, microbatches = draw.randint(1, largest), draw.randint(1, 2 * largest)
    chunks = {"interleaved-1f1b": 3, "breadth-first": 3}.get(name)
    if name == "interleaved-1f1b":
        microbatches = ranks * draw.randint(1, 2)
    stages = ranks * (chunks or ROWS[name].chunks[0])
    costs = random_costs(draw, stages)
    return generate(name, ranks, microbatches, chunks, costs=costs), costs


def messages_between(schedule: Schedule, one: int, other: int) -> list[list[tuple[str, int, int | None]]]:
    """As each of two ranks has them: what (activation or gradient), the stage that sends it, the micro-batch."""
    found = []
    for rank, peer in ((one, other), (other, one)):
        rows = []
        for kind, stage, microbatch in schedule.ranks[rank]:
            activation = kind in (Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION)
            if kind in SENDS and schedule.placement[stage + (1 if activation else -1)] == peer:
                rows.append((str(kind)[1], stage, microbatch))
            elif kind in RECEIVES and schedule.placement[stage - (1 if activation else -1)] == peer:
                rows.append((str(kind)[1], stage - (1 if activation else -1), microbatch))
        found.append(rows)
    return found


def check_messages(seed: int, largest: int) -> None:
    draw = random.Random(seed)
    schedule, costs = some_schedule(draw, largest)
    full = add_messages(schedule, draw.choice((None, costs)))
    validate(full, rendezvous=True)
    assert without(full, SENDS + RECEIVES) == schedule.ranks
    for one, other in combinations(range(len(schedule.ranks)), 2):
        here, there = messages_between(full, one, other)
        assert here == there
    boundaries = sum(a != b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
    sent = [action for action in full.present if action.kind in SENDS]
    assert len(sent) == 2 * boundaries * schedule.microbatches
    plain, whole = simulate(schedule, costs), simulate(full, costs)
    assert [[s for s in steps if s.action.kind in COMPUTE] for steps in whole.ranks] == list(map(list, plain.ranks))
    assert parse(str(full)) == full


@RANDOM
def test_messages_are_complete_in_one_order_and_delay_nothing(seeds: range, largest: int) -> None:
    for seed in seeds:
        check_messages(seed, largest)


def check_passes(seed: int, largest: int) -> None:
    draw = random.Random(seed)
    schedule, costs = some_schedule(draw, largest)
    stages = [stage for stage in range(schedule.stages) if draw.random() < 0.7]
    if draw.random() < 0.5:
        schedule = split_backwards(schedule)
    passes = {(Kind.RECOMPUTE,): lambda s: add_recompute(s, stages), SENDS + RECEIVES: lambda s: add_messages(s, costs)}
    chosen = draw.sample(list(passes), draw.randint(1, len(passes)))
    before = schedule
    for kinds in chosen:
        after = passes[kinds](before)
        assert without(after, kinds) == before.ranks
        validate(after, rendezvous=True)
        before = after
    assert parse(str(before)) == before
    simulate(before, costs)


@RANDOM
def test_passes_in_any_order_keep_schedules_valid(seeds: range, largest: int) -> None:
    for seed in seeds:
        check_passes(seed, largest)


def test_receives_come_before_computations_that_they_can_arrive_in() -> None:
    full = add_messages(generate("1f1b", 2, 3))
    assert words(full, 0) == "F0.0 SA0.0 F0.1 SA0.1 RG0.0 B0.0 RG0.1 F0.2 SA0.2 B0.1 RG0.2 B0.2"
    assert words(full, 1) == "RA1.0 RA1.1 F1.0 B1.0 SG1.0 F1.1 B1.1 SG1.1 RA1.2 F1.2 B1.2 SG1.2"


def test_nothing_is_sent_where_both_stages_are_on_one_rank() -> None:
    full = add_messages(generate("zb-v", 3, 4))
    assert full.placement == (0, 1, 2, 2, 1, 0)
    assert not {(action.kind, action.stage) for action in full.present} & {
        (Kind.SEND_ACTIVATION, 2), (Kind.RECEIVE_ACTIVATION, 3), (Kind.SEND_GRADIENT, 3), (Kind.RECEIVE_GRADIENT, 2),
    }  # fmt: skip


def test_messages_are_added_once() -> None:
    with pytest.raises(ValueError, match="has its messages already"):
        add_messages(add_messages(generate("1f1b", 2, 2)))


def test_recomputation_stands_before_each_backward_of_its_stages_and_fills_waiting_time() -> None:
    schedule = add_recompute(generate("zb-h1", 2, 2), [0])
    assert words(schedule, 0) == "F0.0 F0.1 RECOMPUTE0.0 I0.0 W0.0 RECOMPUTE0.1 I0.1 W0.1"
    assert words(schedule, 1) == words(generate("zb-h1", 2, 2), 1)
    # Rank 0 would wait from 2 to 3 for the first gradient: recomputing then makes the whole no longer.
    assert simulate(schedule).ranks[0][2].start == 2


def test_forwards_alone_are_valid_for_evaluation_only() -> None:
    for name in ROWS:
        for microbatches in (1, 3, 4):
            schedule = add_messages(forward_only(generate(name, 2, 4).placement, microbatches))
            validate(schedule, rendezvous=True, training=False)
            with pytest.raises(ValueError, match="missing action"):
                validate(schedule)


@pytest.mark.parametrize("placement", [(0,), (0, 1, 2), (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)])
def test_forwards_alone_are_done_as_soon_as_the_ranks_can(placement: tuple[int, ...]) -> None:
    """The first micro-batch goes through all stages; each further one takes the time in which a rank does its part."""
    for microbatches in range(1, 12):
        made = forward_only(placement, microbatches)
        assert simulate(made).makespan <= len(placement) + placement.count(0) * (microbatches - 1)


def test_gradients_that_another_rank_waits_for_are_sent_before_those_of_weights() -> None:
    before = generate("1f1b", 3, 4)
    after = split_backwards(before)
    assert after.ranks[0] == before.ranks[0], "nobody waits for the first stage's"
    assert words(add_messages(after), 2).startswith("RA2.0 F2.0 I2.0 SG2.0 W2.0") or "I2.0 SG2.0" in words(
        add_messages(after), 2
    )
    # Two thirds of a backward are waited for in place of all of it, once for each of the other ranks.
    assert simulate(before).makespan - simulate(after).makespan == len(before.ranks) - 1
    assert split_backwards(generate("zb-h1", 3, 4)) == generate("zb-h1", 3, 4)
