"""Schedules as text: what is written is read back, what cannot be read is named, and known schedules stay as they are.

``python tests/pipeline/test_schedule_text.py`` writes the files in ``schedules`` beside it anew.
"""

from functools import cache
from pathlib import Path

import pytest

from zeromesh.parallel.pipeline.schedule.actions import Action, Kind, Schedule, ScheduleError, loop, parse, vee
from zeromesh.parallel.pipeline.schedule.generators import NAMES, generate
from zeromesh.parallel.pipeline.schedule.lowering import add_messages, add_recompute, forward_only
from zeromesh.parallel.pipeline.schedule.validate import validate

FOLDER = Path(__file__).parent / "schedules"

SMALL = """\
microbatches: 2
placement: 0 1
rank 0: F0.0 F0.1 B0.0 B0.1
rank 1: F1.0 B1.0 F1.1 B1.1
"""


@cache
def known() -> dict[str, Schedule]:
    found = {
        f"{name}-{ranks}x{microbatches}": generate(name, ranks, microbatches)
        for name in NAMES
        for ranks, microbatches in ((2, 4), (3, 6), (4, 8))
    }
    found["interleaved-1f1b-2x5-group-3"] = generate("interleaved-1f1b", 2, 5, 3, group=3)
    found["1f1b-3x4-recompute"] = add_messages(add_recompute(generate("1f1b", 3, 4), [0, 2]))
    found["zb-v-2x4-messages"] = add_messages(generate("zb-v", 2, 4))
    found["loop-2x3-forward-only"] = add_messages(forward_only((0, 1, 0, 1), 3))
    return found


@pytest.mark.parametrize("name", known())
def test_known_schedules_are_what_they_were(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text()
    assert str(known()[name]) == text
    assert parse(text) == known()[name]
    validate(parse(text), rendezvous=True, training=not name.endswith("forward-only"))


def test_there_is_no_file_that_no_schedule_is_compared_with() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(known())


def test_text_and_schedule_are_the_same() -> None:
    F, B = Kind.FORWARD, Kind.BACKWARD
    schedule = Schedule(
        2,
        (0, 1),
        (
            (Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 0), Action(B, 0, 1)),
            (Action(F, 1, 0), Action(B, 1, 0), Action(F, 1, 1), Action(B, 1, 1)),
        ),
    )
    assert str(schedule) == SMALL
    assert parse(SMALL) == schedule


def test_every_kind_of_action_has_a_text_of_its_own() -> None:
    actions = [Action(kind, 3, 12) for kind in Kind]
    schedule = Schedule(13, (0, 0, 0, 0), (tuple(actions),))
    assert len({str(action) for action in actions}) == len(Kind)
    assert parse(str(schedule)) == schedule


def test_comments_and_empty_lines_do_not_count() -> None:
    assert parse("# a remark\n\n" + SMALL.replace("F0.1 B0.0 B0.1", "F0.1 B0.0 B0.1 # as usual") + " # end\n") == parse(
        SMALL
    )


@pytest.mark.parametrize(
    ("change", "line", "word", "rule"),
    [
        (("F0.1", "X0.1"), 3, "X0.1", "an action is one of F, I, W, B,"),
        (("F0.1", "F0-1"), 3, "F0-1", "an action is one of"),
        (("F0.1", "F0"), 3, "F0", "with a stage and a micro-batch, as in F0.1"),
        (("F0.1", "FETCH0"), 3, "FETCH0", "an action is one of"),
        (("rank 1", "rank 2"), 4, "rank 2", "this is the line of rank 1"),
        (("rank 1", "order 1"), 4, "order", "a line begins with"),
        (("placement: 0 1", "placement: 0 one"), 2, "one", "whole number"),
        (("placement: 0 1\n", ""), 1, "placement", "a rank per stage"),
        (("microbatches: 2", "microbatches: 2 3"), 1, "microbatches", "one number"),
        (("placement: 0 1\n", "placement: 0 1\nplacement: 0 1\n"), 3, "placement", "leave one of them out"),
    ],
)
def test_unreadable_words_are_named_with_their_line(change: tuple[str, str], line: int, word: str, rule: str) -> None:
    with pytest.raises(ScheduleError) as error:
        parse(SMALL.replace(*change))
    assert error.value.fault == "unreadable text"
    assert f"line {line}, {word!r}: " in str(error.value)
    assert rule in str(error.value)


def test_placements() -> None:
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert vee(3, 2) == (0, 1, 2, 2, 1, 0)


if __name__ == "__main__":
    for name, schedule in known().items():
        (FOLDER / f"{name}.txt").write_text(str(schedule))
