"""The simulator beside times worked out by hand."""

import pytest

from zeromesh.parallel.pipeline.schedule.actions import ScheduleError, parse
from zeromesh.parallel.pipeline.schedule.generators import generate
from zeromesh.parallel.pipeline.schedule.lowering import add_messages
from zeromesh.parallel.pipeline.schedule.simulate import Costs, simulate

TWO = """\
microbatches: 2
placement: 0 1
rank 0: F0.0 F0.1 I0.0 W0.0 B0.1
rank 1: F1.0 I1.0 F1.1 B1.1 W1.0
"""


def times(text: str, costs: Costs) -> list[dict[str, tuple[float, float]]]:
    return [{str(s.action): (s.start, s.end) for s in steps} for steps in simulate(parse(text), costs).ranks]


def test_each_action_begins_when_its_rank_is_free_and_its_needs_are_there() -> None:
    found = times(TWO, Costs(forward=[1, 2], input=3, weight=[1, 5], latency=1))
    # A whole backward of stage 1 takes 3 + 5, one of stage 0 takes 3 + 1.
    assert found == [
        {"F0.0": (0, 1), "F0.1": (1, 2), "I0.0": (8, 11), "W0.0": (11, 12), "B0.1": (18, 22)},
        {"F1.0": (2, 4), "I1.0": (4, 7), "F1.1": (7, 9), "B1.1": (9, 17), "W1.0": (17, 22)},
    ]


def test_bubbles_and_makespan() -> None:
    timeline = simulate(parse(TWO), Costs(forward=[1, 2], input=3, weight=[1, 5], latency=1))
    assert timeline.makespan == 22
    assert timeline.bubbles == [12 / 10, 0]
    assert timeline.bubble == 12 / 10


def test_a_backward_of_its_own_cost_and_messages_both_ways() -> None:
    costs = Costs(backward=[5, 1.5], latency=3)
    assert times("microbatches: 1\nplacement: 0 1\nrank 0: F0.0 B0.0\nrank 1: F1.0 B1.0", costs) == [
        {"F0.0": (0, 1), "B0.0": (9.5, 14.5)},
        {"F1.0": (4, 5), "B1.0": (5, 6.5)},
    ]


def test_stages_of_one_rank_have_no_messages() -> None:
    slow = Costs(latency=100)
    assert simulate(parse("microbatches: 1\nplacement: 0 0\nrank 0: F0.0 F1.0 B1.0 B0.0"), slow).makespan == 6


def test_written_out_messages_take_the_time_of_those_understood() -> None:
    costs = Costs(forward=[1, 2, 3], input=2, weight=1, latency=0.7)
    for name in ("gpipe", "1f1b", "zb-h1"):
        plain = generate(name, 3, 5, costs=costs)
        assert simulate(add_messages(plain), costs).makespan == simulate(plain, costs).makespan


def test_a_recomputation_takes_as_long_as_the_forward() -> None:
    found = times("microbatches: 1\nplacement: 0\nrank 0: F0.0 RECOMPUTE0.0 B0.0", Costs(forward=1.5))[0]
    assert found == {"F0.0": (0, 1.5), "RECOMPUTE0.0": (1.5, 3), "B0.0": (3, 5)}


def test_the_bubble_counts_from_a_rank_s_first_to_its_last_computation() -> None:
    """Waiting for the first message, and for the others at the end, is no bubble; receives are begun in that time."""
    schedule = add_messages(generate("gpipe", 4, 3))
    timeline = simulate(schedule)
    assert timeline.bubbles == [3 * (3 - rank) / 9 for rank in range(4)]
    assert str(timeline.ranks[3][0].action) == "RA3.0"
    assert timeline.ranks[3][0].start == 0
    assert timeline.ranks[3][2].start == 3


def test_a_schedule_that_gets_stuck_has_no_times() -> None:
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(parse("microbatches: 1\nplacement: 0 1 0\nrank 0: F2.0 F0.0\nrank 1: F1.0"))
