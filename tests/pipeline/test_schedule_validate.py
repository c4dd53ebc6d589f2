"""Schedules broken by hand: each fault is called by its name, at its place."""

import random
from collections import Counter

import pytest

from zeromesh.parallel.pipeline.schedule.actions import Action, Kind, Schedule, ScheduleError, parse
from zeromesh.parallel.pipeline.schedule.generators import ROWS, generate
from zeromesh.parallel.pipeline.schedule.lowering import add_messages
from zeromesh.parallel.pipeline.schedule.simulate import Costs
from zeromesh.parallel.pipeline.schedule.validate import validate

GOOD = """\
microbatches: 2
placement: 0 1
rank 0: F0.0 SA0.0 F0.1 SA0.1 RG0.0 B0.0 RG0.1 B0.1
rank 1: RA1.0 F1.0 RA1.1 F1.1 I1.0 SG1.0 W1.0 B1.1 SG1.1
"""

PLAIN = """\
microbatches: 2
placement: 0 1
rank 0: F0.0 F0.1 B0.0 B0.1
rank 1: F1.0 B1.0 F1.1 B1.1
"""

LESS = GOOD.replace(" SA0.1", "").replace(" RA1.1", "")


def broken(text: str, old: str, new: str, **options: object) -> ScheduleError:
    assert old in text
    with pytest.raises(ScheduleError) as error:
        validate(parse(text.replace(old, new)), **options)  # type: ignore[arg-type]
    return error.value


def test_both_are_valid() -> None:
    validate(parse(GOOD), memory=2, rendezvous=True)
    validate(parse(PLAIN), memory=2)


@pytest.mark.parametrize(
    ("text", "old", "new", "fault", "place", "reason"),
    [
        (PLAIN, " F0.1", "", "missing action", (0, -1, None), "there is no F0.1"),
        (PLAIN, " B1.1", "", "missing action", (1, -1, None), "there is no B1.1, or I1.1 and W1.1"),
        (GOOD, " W1.0", "", "missing action", (1, -1, None), "there is no W1.0"),
        (GOOD, " I1.0", "", "missing action", (1, -1, None), "there is no I1.0"),
        (PLAIN, "F0.1", "F0.1 F0.1", "done twice", (0, 2, "F0.1"), "leave one of them out"),
        (PLAIN, "B1.1", "B1.1 W1.1", "done twice", (1, -1, None), "B1.1 does what W1.1 does"),
        (PLAIN, "F1.1", "F0.1", "wrong rank", (1, 2, "F0.1"), "stage 0 is on rank 0"),
        (PLAIN, "F1.1", "F2.1", "unknown stage", (1, 2, "F2.1"), "stages 0 to 1"),
        (PLAIN, "F1.1", "F1.2", "unknown micro-batch", (1, 2, "F1.2"), "micro-batches 0 to 1"),
        (PLAIN, "placement: 0 1", "placement: 0 2", "wrong placement", (-1, -1, None), "an order for each"),
        (PLAIN, "microbatches: 2", "microbatches: 0", "wrong placement", (-1, -1, None), "there must be a micro-batch"),
        (PLAIN, "F1.0 B1.0", "B1.0 F1.0", "wrong order", (1, 0, "B1.0"), "F1.0 of the same rank must come before it"),
        (GOOD, "I1.0 SG1.0 W1.0", "W1.0 I1.0 SG1.0", "wrong order", (1, 4, "W1.0"), "I1.0 of the same rank"),
        (GOOD, "I1.0 SG1.0", "SG1.0 I1.0", "wrong order", (1, 4, "SG1.0"), "I1.0 of the same rank"),
        (GOOD, "F0.0 SA0.0", "SA0.0 F0.0", "wrong order", (0, 0, "SA0.0"), "F0.0 of the same rank"),
        (GOOD, "RA1.0 F1.0", "F1.0 RA1.0", "wrong order", (1, 0, "F1.0"), "RA1.0 of the same rank"),
        (GOOD, " RA1.1", "", "unmatched message", (0, 3, "SA0.1"), "there is no RA1.1"),
        (GOOD, " SG1.1", "", "unmatched message", (0, 6, "RG0.1"), "there is no SG1.1"),
        (GOOD, "F0.0 SA0.0", "RA0.0 F0.0 SA0.0", "unmatched message", (0, 0, "RA0.0"), "there is no SA-1.0"),
        (LESS, "F1.1", "F1.1", "missing action", (1, 2, "F1.1"), "it needs RA1.1, which no rank does"),
        (GOOD, "SG1.0 W1.0 B1.1 SG1.1", "W1.0 B1.1 SG1.1 SG1.0", "message order", (0, 4, "RG0.0"), "what RG0.1"),
        (GOOD, "RA1.0 F1.0 RA1.1", "RA1.1 RA1.0 F1.0", "message order", (1, 0, "RA1.1"), "what RA1.0 receives before"),
        (GOOD, "SA0.0 F0.1 SA0.1 RG0.0", "RG0.0 SA0.0 F0.1 SA0.1", "deadlock", (0, 1, "RG0.0"), "rank 1 at RA1.0"),
        (PLAIN, "B0.0 B0.1", "B0.0 B0.1 RECOMPUTE0.1", "wrong order", (0, 3, "B0.1"), "RECOMPUTE0.1"),
        (PLAIN, "F0.0", "RECOMPUTE0.0 F0.0", "wrong order", (0, 0, "RECOMPUTE0.0"), "F0.0"),
    ],
)  # fmt: skip
def test_a_fault_is_called_by_its_name_at_its_place(text, old, new, fault, place, reason) -> None:
    error = broken(text, old, new)
    rank, position, action = place
    assert error.fault == fault, error
    assert (error.rank, error.position, error.action and str(error.action)) == (rank, position, action)
    assert str(error).startswith(fault)
    assert reason in str(error)
    if action:
        assert f" on rank {rank} at position {position}, {action}: " in str(error)
        assert f">{action}<" in str(error)


def test_the_grid_shows_all_ranks_near_the_fault() -> None:
    schedule = generate("1f1b", 3, 12)
    ranks = [list(actions) for actions in schedule.ranks]
    ranks[1][15], ranks[1][16] = ranks[1][16], ranks[1][15]
    ranks[1].remove(Action(Kind.FORWARD, 1, 8))
    ranks[1].insert(20, Action(Kind.FORWARD, 1, 8))
    with pytest.raises(ScheduleError) as error:
        validate(Schedule(12, schedule.placement, tuple(map(tuple, ranks))))
    lines = str(error.value).splitlines()
    assert [line[:10] for line in lines[-3:]] == ["rank 0: ..", "rank 1: ..", "rank 2: .."]
    assert sum(line.count(">") for line in lines[-3:]) == 1
    assert f">{error.value.action}<" in lines[-2]


def test_a_message_between_stages_of_one_rank_is_needless() -> None:
    text = "microbatches: 1\nplacement: 0 0\nrank 0: F0.0 SA0.0 RA1.0 F1.0 B1.0 B0.0"
    with pytest.raises(ScheduleError, match="needless message on rank 0 at position 1, SA0.0"):
        validate(parse(text))


def test_sends_that_wait_for_their_receives_are_checked_if_asked_for() -> None:
    """Both ranks send first: fine with buffers, and a deadlock without."""
    text = (
        "microbatches: 2\nplacement: 0 1\n"
        "rank 0: F0.0 SA0.0 F0.1 SA0.1 RG0.0 B0.0 RG0.1 B0.1\n"
        "rank 1: RA1.0 F1.0 B1.0 SG1.0 RA1.1 F1.1 B1.1 SG1.1\n"
    )
    validate(parse(text))
    with pytest.raises(
        ScheduleError, match="rank 0 at SA0.1 waits for RA1.1; rank 1 at SG1.0 waits for RG0.0"
    ) as error:
        validate(parse(text), rendezvous=True)
    assert error.value.fault == "deadlock"


def test_memory_is_counted_per_rank_over_its_stages() -> None:
    schedule = generate("gpipe", 2, 3)
    validate(schedule, memory=3)
    with pytest.raises(ScheduleError, match="memory on rank 0 at position 2, F0.2: activations take 3 of 2") as error:
        validate(schedule, memory=2)
    assert error.value.fault == "memory"
    two = generate("zb-v", 2, 4)
    validate(two, memory=4)
    with pytest.raises(ScheduleError, match="memory on rank 0"):
        validate(two, memory=3)
    with pytest.raises(ScheduleError, match="memory on rank 0 at position 3, F1.1: activations take 4 of 3"):
        validate(generate("breadth-first", 1, 2), memory=3)  # each stage holds 2
    with pytest.raises(ScheduleError, match="activations take 4.5 of 4"):
        validate(schedule, memory=4, costs=Costs(activation=[1, 1.5]))


def test_backwards_have_no_place_in_an_evaluation() -> None:
    with pytest.raises(ScheduleError, match="only forwards are wanted; 0.0 has a backward"):
        validate(generate("1f1b", 2, 2), training=False)


def test_any_action_left_out_doubled_or_moved_far_is_found() -> None:
    """One change at a random place in a complete schedule. What stays valid must be a harmless change of order."""
    faults = Counter[str]()
    for seed in range(600):
        draw = random.Random(seed)
        name = draw.choice(list(ROWS))
        good = add_messages(generate(name, draw.choice((2, 4)), 4))
        ranks = [list(actions) for actions in good.ranks]
        actions = draw.choice(ranks)
        at = draw.randrange(len(actions))
        action = actions.pop(at)
        change = draw.choice(("left out", "doubled", "moved"))
        if change == "doubled":
            actions.insert(at, action)
            actions.insert(draw.randint(at, len(actions)), action)
        elif change == "moved":
            actions.insert(draw.choice((0, len(actions))), action)
        changed = Schedule(good.microbatches, good.placement, tuple(map(tuple, ranks)))
        try:
            validate(changed, rendezvous=True)
        except ScheduleError as error:
            faults[error.fault] += 1
        else:
            assert change == "moved", (seed, change, action)
    names = "missing action", "done twice", "unmatched message", "message order", "wrong order", "deadlock"
    assert set(faults) == set(names)
    assert faults.total() > 400
