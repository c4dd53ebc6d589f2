"""Pictures: each computation is where its time says."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zeromesh.parallel.pipeline.schedule.actions import Action, Kind
from zeromesh.parallel.pipeline.schedule.generators import ROWS, generate
from zeromesh.parallel.pipeline.schedule.lowering import add_messages, add_recompute
from zeromesh.parallel.pipeline.schedule.picture import Panel, grid, svg, trace
from zeromesh.parallel.pipeline.schedule.simulate import Costs, TimedAction, simulate

SPACE = "{http://www.w3.org/2000/svg}"


def test_the_grid_of_1f1b() -> None:
    assert grid(simulate(generate("1f1b", 2, 3))) == (
        "rank 0 F0 F1 ·  ·  B0─── F2 B1─── ·  B2───\n"
        "rank 1 ·  F0 B0─── F1 B1─── F2 B2─── ·  ·\n"
    )  # fmt: skip


def test_letters_say_which_stage_of_the_rank_it_is() -> None:
    assert grid(simulate(generate("zb-v", 2, 1))) == (
        "rank 0 F0a ·   ·   F0b I0b W0b ·   I0a W0a\n"
        "rank 1 ·   F0a F0b ·   ·   I0b I0a W0b W0a\n"
    )  # fmt: skip


def test_long_lines_go_on_below_and_lose_nothing() -> None:
    timeline = simulate(generate("interleaved-1f1b", 3, 6))
    whole = grid(timeline).splitlines()
    blocks = [block.splitlines() for block in grid(timeline, 50).strip("\n").split("\n\n")]
    assert len(blocks) > 2
    assert all(len(line) <= 50 for block in blocks for line in block)
    for rank, line in enumerate(whole):
        parts = [block[rank].removeprefix(f"rank {rank} ").ljust(40) for block in blocks]
        assert "".join(parts).rstrip() == line.removeprefix(f"rank {rank} ").rstrip()


def test_times_that_are_no_multiples_of_each_other_keep_their_order_and_take_a_column_at_least() -> None:
    # In the last one an input gradient is from 2.5 to 3.4999... columns.
    for ranks, costs in (
        (2, Costs(1, 1.3, 0.7)),
        (2, Costs([1, 2.5], 1.5, 0.45, latency=0.2)),
        (1, Costs(0.25, 0.1, 0.3)),
    ):
        timeline = simulate(generate("zb-h1", ranks, 4, costs=costs), costs)
        for line, steps in zip(grid(timeline).splitlines(), timeline.ranks, strict=True):
            shown = [word.rstrip("─") for word in line.split()[2:] if word != "·"]
            assert shown == [f"{step.action.kind}{step.action.microbatch}" for step in steps]


def test_the_svg_has_a_box_per_computation_at_its_time() -> None:
    for name in ROWS:
        timeline = simulate(add_messages(add_recompute(generate(name, 2, 4))))
        root = ElementTree.fromstring(svg([Panel(timeline)], "a < b & c"))
        boxes = {group.find(f"{SPACE}title").text: group.find(f"{SPACE}rect") for group in root.iter(f"{SPACE}g")}
        steps = {
            f"{step.action}: {step.start:g} to {step.end:g}": step
            for steps in timeline.ranks
            for step in steps
            if step.end > step.start
        }
        assert set(boxes) == set(steps)
        left = min(float(box.get("x")) for box in boxes.values())
        tops = sorted({float(box.get("y")) for box in boxes.values()})
        for text, step in steps.items():
            found = [float(boxes[text].get(key)) for key in ("x", "width", "y")]
            assert found == [left + 26 * step.start, 26 * (step.end - step.start), tops[step.rank]]
        assert root.find(f"{SPACE}text").text == "a < b & c"


def test_a_trace_has_a_process_of_each_name_and_a_thread_of_each_rank() -> None:
    steps = [step for steps in simulate(generate("1f1b", 2, 2)).ranks for step in steps]
    measured = [TimedAction(1, Action(Kind.FORWARD, 1, 0), 0.25, 0.75)]
    events = json.loads(json.dumps(trace({"predicted": steps, "measured": measured})))["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {
        (0, None): "predicted", (0, 0): "rank 0", (0, 1): "rank 1",
        (1, None): "measured", (1, 1): "rank 1",
    }  # fmt: skip
    spans = [event for event in events if event["ph"] == "X"]
    assert len([event for event in spans if event["pid"] == 0]) == len(steps)
    (own,) = [event for event in spans if event["pid"] == 1]
    assert (own["tid"], own["name"], own["cat"], own["ts"], own["dur"]) == (1, "F1.0", "forward", 250_000, 500_000)
    assert own["args"] == {"stage": 1, "microbatch": 0}


def test_a_schedule_that_computes_nothing_has_an_empty_picture() -> None:
    nothing = simulate(generate("1f1b", 2, 2), Costs(0, 0, 0))
    assert grid(nothing) == ""
    assert ElementTree.fromstring(svg([Panel(nothing)])).tag == f"{SPACE}svg"


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 4), ("interleaved-1f1b", 4), ("zb-h1", 4), ("zb-v", 4)])
def test_the_pictures_in_the_documentation_are_what_is_drawn(name: str, ranks: int) -> None:
    schedule = generate(name, ranks, 8)
    file = Path(__file__).parents[2] / "docs" / "pictures" / f"{name}.svg"
    title = f"{name}: {schedule.stages} stages, {ranks} ranks, 8 micro-batches"
    assert file.read_text() == svg([Panel(simulate(schedule))], title)
