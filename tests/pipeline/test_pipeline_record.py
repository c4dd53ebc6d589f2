"""A run of a pipeline says what its ranks did when, beside what was predicted."""

import json
import logging
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import zeromesh
from harness import run_ranks
from run import configuration
from test_pipeline import ADAMW, SAMPLES, batches, build, cross_entropy
from zeromesh import Settings
from zeromesh.base.spans import Clock
from zeromesh.config.errors import ConfigError
from zeromesh.parallel.pipeline.runtime.record import Recorded, Recorder, gather
from zeromesh.parallel.pipeline.schedule.actions import COMPUTE, Action, Kind, parse
from zeromesh.parallel.pipeline.schedule.execution import dependencies, most_held_by_rank
from zeromesh.parallel.pipeline.schedule.generators import generate
from zeromesh.parallel.pipeline.schedule.picture import Panel, svg, trace
from zeromesh.parallel.pipeline.schedule.schedule_files import read_costs
from zeromesh.parallel.pipeline.schedule.simulate import Costs, TimedAction, Timeline, simulate

SPACE = "{http://www.w3.org/2000/svg}"
MICROBATCHES = 8


def record(folder: Path | None, schedule: str, chunks: int | None = None, data: int = 1, steps: int = 3) -> Any:
    lines: list[str] = []

    class Note(logging.Handler):
        def emit(self, entry: logging.LogRecord) -> None:
            lines.append(entry.getMessage())

    log, note = logging.getLogger("zeromesh"), Note()
    log.addHandler(note)
    level, log.level = log.level, logging.INFO
    try:
        settings: dict[str, Any] = configuration(
            batch=SAMPLES * MICROBATCHES,
            micro=SAMPLES // data,
            optimizer=ADAMW,
            mesh={"pipeline": 2},
            pipeline={"schedule": schedule, "chunks": chunks},
        )
        if folder is not None:
            settings["pipeline"]["record"] = {"folder": str(folder), "step": 2}
        engine = zeromesh.initialize(model=build("plain"), config=settings)[0]
        losses, seen = [], []
        for step in range(steps):
            given = batches("plain", 0, MICROBATCHES, engine.data_rank, engine.data_size)
            losses.append(float(engine.train_batch(given)))
            seen.append(engine.pipelined.recorded is not None)
            if folder is None and step == 0:
                engine.pipelined.record()
        return engine.pipelined.recorded, [line for line in lines if "bubble" in line], losses, seen
    finally:
        log.removeHandler(note)
        log.level = level


def check(recorded: Recorded, name: str) -> None:
    """Every action of the schedule was done once, on its rank, after what it needs, and not while another was."""
    schedule = recorded.measured.schedule
    ends = {step.action: step.end for steps in recorded.measured.ranks for step in steps}
    for actions, steps, waits in zip(schedule.ranks, recorded.measured.ranks, recorded.waits, strict=True):
        assert tuple(step.action for step in steps) == actions
        last = 0.0
        for step in steps:
            assert last <= step.start <= step.end, (name, step)
            last = step.end
            needs = [need for need in dependencies(schedule, step.action) if need.kind in COMPUTE]
            assert all(ends[need] <= step.start for need in needs), (name, step)
        begins = {step.action: step.start for step in steps}
        assert all(wait.end == begins[wait.action] and wait.action.kind in COMPUTE for wait in waits)
    assert [round(held) for held in most_held_by_rank(schedule)] == list(recorded.held), name


@pytest.mark.some(1)
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", None), ("breadth-first", 2), ("zb-h1", None), ("zb-v", 2)])
def test_an_update_is_recorded_and_drawn(tmp_path: Path, schedule: str, chunks: int | None) -> None:
    first, second = run_ranks(record, 2, tmp_path, schedule, chunks)
    plain = run_ranks(record, 2, None, schedule, chunks)
    assert first[2] == plain[0][2], "the same losses as another run's, of which another update is recorded"
    recorded, lines, _, seen = first
    assert seen == [False, True, True]
    check(recorded, schedule)
    assert second[0] == recorded, "all ranks know of all"
    assert recorded.predicted.schedule == recorded.measured.schedule
    assert second[1] == [], "it is said and written once"
    (line,) = lines
    files = [tmp_path / f"update_2{ending}" for ending in (".svg", ".json")]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    bubbles = f"bubble {recorded.measured.bubble:.1%}, predicted {recorded.predicted.bubble:.1%}"
    assert line == f"update 2: {bubbles}; {', '.join(map(str, files))}"
    events = json.loads(files[1].read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"predicted", "measured"}
    for one in fields(Costs):
        read, measured = getattr(read_costs(files[1]), one.name), getattr(recorded.costs, one.name)
        assert read == (tuple(measured) if isinstance(measured, list) else measured)
    waits = [event for event in events if event.get("cat") == "wait"]
    assert len(waits) == sum(map(len, recorded.waits)) > 0
    assert ElementTree.parse(files[0]).getroot().tag == f"{SPACE}svg"


def test_recording_can_be_asked_for_in_python() -> None:
    for recorded, lines, _, seen in run_ranks(record, 2, None, "1f1b"):
        assert seen == [False, True, True]
        assert lines == []
        check(recorded, "1f1b")


@pytest.mark.full
def test_the_first_of_several_pipelines_is_written(tmp_path: Path) -> None:
    results = run_ranks(record, 4, tmp_path, "1f1b", data=2)
    assert [len(lines) for _, lines, _, _ in results] == [1, 0, 0, 0]
    assert len(list(tmp_path.iterdir())) == 2
    for recorded, *_ in results:
        check(recorded, "1f1b")


def test_a_folder_that_cannot_be_made_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for rank, (recorded, lines, losses, _) in enumerate(run_ranks(record, 2, tmp_path / "file", "1f1b")):
        assert len(losses) == 3
        assert recorded is not None
        assert all("no files, as they could not be written" in line for line in lines)
        assert len(lines) == (rank == 0)


@pytest.mark.full
def test_older_files_stay(tmp_path: Path) -> None:
    recorded = an_example()
    first = recorded.write(tmp_path, "update_1")
    before = [file.read_bytes() for file in first]
    second = recorded.write(tmp_path, "update_1")
    assert not set(first) & set(second)
    assert [file.read_bytes() for file in first] == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"step": 0}, "pipeline.record.step"),
        ({"folder": ""}, "pipeline.record.folder"),
        ({"steps": 1}, "pipeline.record.steps"),
        (True, "pipeline.record"),
    ],
)
def test_recordings_that_cannot_be_made_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings.load({"train_batch_size": 1, "pipeline": {"record": given}})


MANY = 12


def sent_and_kept() -> tuple[int, int]:
    settings = configuration(batch=SAMPLES * MANY, micro=SAMPLES, optimizer=ADAMW, mesh={"pipeline": 2})
    engine = zeromesh.initialize(model=build("mapping"), config=settings, loss_fn=cross_entropy)[0]
    kept: list[Any] = []
    calls = []

    def update() -> None:
        engine.train_batch((ids[:, :4], labels[:, :4]) for ids, labels in batches("mapping", 0, MANY, 0, 1))

    update()  # after which shapes are known
    messages = engine.pipelined._interpreter._messages
    finish, send = messages.finish, messages.send

    def look() -> None:
        kept.extend(one for sent in messages._sending for one in sent if not one.done)
        finish()

    def counted(*args: Any) -> Any:
        calls.append(args)
        return send(*args)

    messages.finish, messages.send = look, counted
    update()
    return len(calls), len(kept)


def test_messages_that_were_received_are_not_kept_until_the_end_of_the_update() -> None:
    first, last = run_ranks(sent_and_kept, 2)
    assert first == (MANY, 0), "activations are done with when their gradients come"
    assert last[0] == MANY
    assert last[1] <= 6, "of gradients, which have one tensor each, the latest"


TEXT = """
microbatches: 2
placement: 0 1
rank 0: F0.0 SA0.0 F0.1 SA0.1 RG0.0 B0.0 RG0.1 B0.1
rank 1: RA1.0 F1.0 B1.0 SG1.0 RA1.1 F1.1 B1.1 SG1.1
"""


def an_example() -> Recorded:  # forwards take 1 s, backwards 2 s, messages 0.5 s
    timeline = simulate(parse(TEXT), Costs(1.0, latency=0.5))
    waits: list[tuple[TimedAction, ...]] = []
    for steps in timeline.ranks:
        computed = [step for step in steps if step.action.kind in COMPUTE]
        ends = [0.0, *(step.end for step in computed)]
        waits.append(
            tuple(
                TimedAction(step.rank, step.action, end, step.start)
                for end, step in zip(ends, computed, strict=False)
                if end < step.start
            )
        )
    return Recorded(timeline, tuple(waits), (2, 1))


def test_measured_times_are_predicted_again() -> None:
    recorded = an_example()
    assert recorded.costs.forward == [1.0, 1.0]
    assert recorded.costs.backward == [2.0, 2.0]
    assert recorded.costs.input == recorded.costs.weight == [1.0, 1.0]
    assert recorded.costs.latency == 0.5
    assert recorded.predicted == recorded.measured


def test_other_schedules_can_be_timed_with_what_was_measured() -> None:
    costs = Costs([1.0, 1.2], [0.8, 1.0], [0.6, 0.7])
    recorded = Recorded(simulate(generate("zb-h1", 2, 4), costs), ((), ()), (2, 2))
    expected, found = (simulate(generate("1f1b", 2, 4), each) for each in (costs, recorded.costs))
    assert found.makespan == pytest.approx(expected.makespan)
    assert found.bubbles == pytest.approx(expected.bubbles)


def test_costs_are_medians_of_each_stage() -> None:
    steps = [
        TimedAction(0, Action(Kind.FORWARD, 0, number), 10.0 * number, 10.0 * number + took)
        for number, took in enumerate((1.0, 2.0, 9.0))
    ]
    text = "microbatches: 3\nplacement: 0\nrank 0: F0.0 F0.1 F0.2\n"
    recorded = Recorded(Timeline(parse(text), (tuple(steps),)), ((),), (3,))
    assert recorded.costs.forward == [2.0]
    assert recorded.costs.latency == 0.0


class Clocks:
    """Ranks of a pipeline whose clocks differ, of which this is the first; what they would exchange is made up."""

    def __init__(self, behind: Sequence[float]) -> None:
        self.behind = behind

    def exchange(self, vector: torch.Tensor) -> torch.Tensor:
        if vector.numel() == 1:
            return vector.repeat(len(self.behind), 1)
        # The others' actions take place at the same moments, by their own clocks.
        rows = torch.stack([vector + late for late in self.behind])
        rows[:, 5] = vector[5]
        return rows


@pytest.mark.parametrize(("nodes", "apart"), [([0, 0], 100.0), ([0, 1], 0.0)])
def test_clocks_of_other_nodes_are_put_beside_the_first_ones(nodes: list[int], apart: float) -> None:
    recorder = Recorder(torch.device("cpu"))
    schedule = parse("microbatches: 2\nplacement: 0 1\nrank 0: F0.0 F0.1\nrank 1: F1.0 F1.1\n")
    for _ in range(2):
        with recorder.doing():
            pass
    found = gather(recorder, Clocks([0.0, 100.0]), nodes, schedule)  # type: ignore[arg-type]
    for one, other in zip(*found.measured.ranks, strict=True):
        assert other.start - one.start == pytest.approx(apart, abs=1e-6)
        assert other.end - one.end == pytest.approx(apart, abs=1e-6)


def test_waiting_is_told_apart_from_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1.0, 3.0, 7.0, 8.0, 9.0])
    clock = Clock(lambda: next(moments), lambda begin, end: end - begin, lambda mark: None)
    monkeypatch.setattr("zeromesh.parallel.pipeline.runtime.record.clock_of", lambda device: clock)
    recorder = Recorder(torch.device("cpu"))
    with recorder.doing():
        recorder.arrived()
    with recorder.doing():
        pass
    times = [[value - recorder._moment for value in row] for row in recorder.times()]
    assert times == [pytest.approx([1.0, 3.0, 7.0]), pytest.approx([8.0, 8.0, 9.0])]


def test_a_picture_has_timelines_one_above_the_other_on_one_axis() -> None:
    long, short = simulate(parse(TEXT), Costs(0.2, 0.2, 0.2)), simulate(parse(TEXT), Costs(0.1, 0.1, 0.1))
    drawn = [Panel(long, "one & one", ["a", "b"]), Panel(short, "other", ["c", "<d>"])]
    root = ElementTree.fromstring(svg(drawn, "both", is_seconds=True))
    texts = [text.text for text in root.iter(f"{SPACE}text")]
    assert {"both", "one & one", "other", "a", "b", "c", "<d>"} <= set(texts)
    boxes = [group.find(f"{SPACE}rect") for group in root.iter(f"{SPACE}g")]
    names = [group.find(f"{SPACE}title").text for group in root.iter(f"{SPACE}g")]
    steps = [step for panel in drawn for row in panel.timeline.ranks for step in row if step.end > step.start]
    assert len(boxes) == len(steps)
    scale = 1000 / long.makespan
    for step, box, name in zip(steps, boxes, names, strict=True):
        assert name == f"{step.action}: {1e3 * step.start:.6g} to {1e3 * step.end:.6g} ms"
        assert float(box.get("x")) == pytest.approx(58 + step.start * scale, abs=0.01)
        assert float(box.get("width")) == pytest.approx((step.end - step.start) * scale, abs=0.01)
    rows = sorted({float(box.get("y")) for box in boxes})
    assert len(rows) == 4
    assert "200" in texts, "milliseconds of the axis"


def test_panels_say_what_was_idle_and_held() -> None:
    predicted, measured = an_example().panels()
    assert (predicted.title, measured.title) == tuple(
        f"{name}: 10000.0 ms, bubble 66.7%" for name in ("predicted", "measured")
    )
    assert predicted.notes[0] == measured.notes[0]
    assert measured.notes[0].endswith("2 held")


def test_waits_are_in_the_trace_of_what_they_belong_to() -> None:
    recorded = an_example()
    steps = [step for row in recorded.measured.ranks for step in row]
    events = trace({"predicted": steps, "measured": steps}, {"measured": recorded.waits[1]})["traceEvents"]
    found = [event for event in events if event.get("cat") == "wait"]
    assert [(event["pid"], event["tid"], event["name"]) for event in found] == [
        (1, 1, f"wait for {wait.action}") for wait in recorded.waits[1]
    ]
    assert found[0]["dur"] == pytest.approx(1.5e6)
