"""Schedules and costs in files: read alike in all formats, refused with the reason; runs train as in one process."""

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zeromesh
from harness import run_ranks
from test_pipeline import ADAMW, SAMPLES, batches, build, train
from zeromesh import Settings
from zeromesh.config.errors import ConfigError
from zeromesh.config.feature_sections import ScheduleFile
from zeromesh.parallel.pipeline.schedule.actions import COMPUTE, ScheduleError, parse
from zeromesh.parallel.pipeline.schedule.chosen import ChosenSchedule
from zeromesh.parallel.pipeline.schedule.generators import generate
from zeromesh.parallel.pipeline.schedule.schedule_files import parse_table, read_costs, read_schedule, with_costs
from zeromesh.parallel.pipeline.schedule.simulate import Costs, simulate
from zeromesh.parallel.pipeline.schedule.validate import validate

TEXT = """\
microbatches: 2
placement: 0 1
rank 0: F0.0 F0.1 B0.0 I0.1 W0.1
rank 1: F1.0 B1.0 F1.1 B1.1
"""

# Stages go forth and back; some backwards are whole, others in two parts, whose second ones come in any order.
BENT = """\
microbatches: 4
placement: 0 1 1 0
rank 0: F0.0 F0.1 F0.2 F0.3 F3.0 I3.0 F3.1 B3.1 F3.2 I3.2 W3.2 F3.3 B3.3 B0.0 W3.0 I0.1 B0.2 W0.1 B0.3
rank 1: F1.0 F2.0 F1.1 F2.1 F1.2 F2.2 F1.3 F2.3 B2.0 I1.0 B2.1 W1.0 B1.1 I2.2 I1.2 B2.3 W2.2 B1.3 W1.2
"""

# Rank 0 sends the output of its second stage before one of its first that was computed earlier.
CROSSED = """\
microbatches: 2
placement: 0 1 0 1
rank 0: F0.0 SA0.0 F0.1 RA2.0 F2.0 SA2.0 SA0.1 RA2.1 F2.1 SA2.1 RG2.0 B2.0 SG2.0 RG0.0 B0.0 RG2.1 B2.1 SG2.1 RG0.1 B0.1
rank 1: RA1.0 F1.0 SA1.0 RA3.0 RA1.1 F1.1 SA1.1 RA3.1 F3.0 B3.0 SG3.0 RG1.0 B1.0 SG1.0 F3.1 B3.1 SG3.1 RG1.1 B1.1 SG1.1
"""


def written(folder: Path, text: str, name: str = "schedule.txt") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


# Reading.

AS_JSON = json.dumps({
    "microbatches": 2,
    "placement": [0, 1],
    "ranks": [["F0.0", "F0.1", "B0.0", "I0.1", "W0.1"], ["F1.0", "B1.0", "F1.1", "B1.1"]],
})  # fmt: skip
AS_TABLE = "0F0,0F1,,0B0,0I1,0W1\r\n,1F0,1B0,1F1,1B1\r\n"


@pytest.mark.parametrize(("name", "text"), [("a.txt", TEXT), ("a.json", AS_JSON), ("a.csv", AS_TABLE), ("a", AS_JSON)])
def test_all_formats_say_the_same(name: str, text: str, tmp_path: Path) -> None:
    assert read_schedule(Path(written(tmp_path, text, name))) == parse(TEXT)


def test_tables_of_torch_are_read() -> None:
    """As ``torch.distributed.pipelining`` writes them, with sends and receives."""
    from torch.distributed.pipelining.schedules import _Action

    order = {"F": "F", "SA": "SEND_F", "RA": "RECV_F", "SG": "SEND_B", "RG": "RECV_B", "B": "B"}
    rows = [
        [
            _Action.from_str(f"{action.stage}{order[action.kind]}{action.microbatch}")
            for action in parse(CROSSED).ranks[rank]
        ]
        for rank in range(2)
    ]
    assert parse_table("\n".join(",".join(map(str, row)) for row in rows)) == parse(CROSSED)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.txt", TEXT.replace("I0.1", "X0.1"), "line 3, 'X0.1': an action is one of F, I, W, B,"),
        ("a.json", AS_JSON.replace("I0.1", "X0.1"), "rank 0, 'X0.1': an action is one of F, I, W, B,"),
        ("a.json", AS_JSON.replace("placement", "places"), "'places': its keys are microbatches, placement, ranks"),
        ("a.json", AS_JSON.replace("[0, 1]", "[]"), "'[]': it must be a list with the rank of each stage"),
        ("a.json", AS_JSON.replace("2", "true", 1), "'True': it must be a whole number"),
        ("a.json", "{", "it is not JSON: Expecting"),
        ("a.csv", AS_TABLE.replace("0I1", "0UNSHARD"), "rank 0, '0UNSHARD': an action is one of F, I, W, B, SEND_F"),
        ("a.csv", AS_TABLE.replace("0I1", "(0F1;1B0)OVERLAP_F_B"), 'format="compute_only"'),
        ("a.csv", AS_TABLE.replace("0I1", "1I1"), "'F1.0': stage 1 is on rank 0 already"),
        ("a.csv", AS_TABLE.replace("1F", "2F").replace("1B", "2B"), "'stage 1': no rank has an action of it"),
        ("a.csv", "", "'stage 0': no rank has an action of it"),
    ],
)
def test_what_cannot_be_read_is_named(name: str, text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError) as error:
        read_schedule(Path(written(tmp_path, text, name)))
    assert reason in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"unreadable file: .*none\.txt.*; give the path of a text file"):
        read_schedule(tmp_path / "none.txt")


# Choosing.


def chosen(file: str, ranks: int = 2, microbatches: int = 2, **more: Any) -> ChosenSchedule:
    return ChosenSchedule(Path(file), ranks, microbatches, **more)


def test_messages_and_recomputation_are_added(tmp_path: Path) -> None:
    made = chosen(written(tmp_path, TEXT), recompute=True).of(2)
    computed = [action for action in made.ranks[0] if action.kind in COMPUTE]
    assert " ".join(map(str, computed)) == "F0.0 F0.1 RECOMPUTE0.0 B0.0 RECOMPUTE0.1 I0.1 W0.1"
    validate(made, rendezvous=True, messages=True)


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        (
            TEXT,
            {"ranks": 4},
            "it has the orders of 2 ranks, and mesh.pipeline is 4; set that to 2, or write a schedule",
        ),
        (TEXT, {"microbatches": 8}, "is for 2 micro-batches, and a step has 8; set gradient_accumulation_steps to 2"),
        (TEXT, {"chunks": 2}, "it has 2 stages on 2 ranks, and pipeline.chunks is 2; leave pipeline.chunks out"),
        (TEXT.replace(" W0.1", ""), {}, "missing action on rank 0: there is no W0.1"),
        (TEXT.replace(" B1.1", ""), {}, "missing action on rank 1: there is no B1.1, or I1.1 and W1.1"),
        (TEXT.replace("B1.1", "B1.1 B1.1"), {}, "done twice on rank 1 at position 4, B1.1"),
        (TEXT.replace("F0.1 B0.0", "B0.0 F0.1").replace("B1.0 F1.1", "F1.1 B1.0"), {}, "deadlock on rank 0"),
        (TEXT.replace("F1.0 B1.0", "B1.0 F1.0"), {}, "wrong order on rank 1 at position 0, B1.0"),
        (TEXT.replace("0 1\n", "0 2\n"), {}, "wrong placement: 2 micro-batches"),
        (TEXT.replace("B0.0", "RECOMPUTE0.0 B0.0"), {"recompute": True}, "set pipeline.recompute to false"),
        ("microbatches: 1\nplacement: 0\nrank 0: F0.0 B0.0\nrank 1:", {}, "rank 1 has no stage; give it one"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(text: str, options: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pipeline\.schedule[,:] .*schedule\.txt") as error:
        chosen(written(tmp_path, text), **options)
    assert reason in str(error.value)


def test_costs_have_no_place_beside_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pipeline\.costs = a\.json would choose one; leave one of them out"):
        chosen(written(tmp_path, TEXT), costs="a.json")


def test_sends_that_only_buffers_would_let_pass_are_refused(tmp_path: Path) -> None:
    text = (
        "microbatches: 2\nplacement: 0 1\n"
        "rank 0: F0.0 SA0.0 F0.1 SA0.1 RG0.0 B0.0 RG0.1 B0.1\n"
        "rank 1: RA1.0 F1.0 B1.0 SG1.0 RA1.1 F1.1 B1.1 SG1.1\n"
    )
    with pytest.raises(ValueError, match="deadlock.*rank 0 at SA0.1 waits for RA1.1"):
        chosen(written(tmp_path, text))


@pytest.mark.parametrize("value", [5, ["1f1b"], {}, {"file": ""}, {"file": 1}, {"path": "a"}, {"file": "a", "more": 1}])
def test_other_values_of_the_key_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r'must be the name of a schedule, or \{"file": PATH\}'):
        Settings.load({"train_batch_size": 1, "pipeline": {"schedule": value}})


def test_the_key_can_be_set_on_the_command_line() -> None:
    document = {"train_batch_size": 1, "pipeline": {"schedule": "zb-h1"}}
    settings = Settings.load(document, ["pipeline.schedule.file=own.txt"])
    assert settings.pipeline.schedule == ScheduleFile(file="own.txt")
    assert Settings.load(settings.model_dump(exclude_unset=True)).pipeline == settings.pipeline


# Measured costs.

COSTS = Costs((1.0, 2.0), (1.0, 2.5), (0.5, 1.0), latency=0.25)


def test_costs_are_read_from_the_trace_of_a_record(tmp_path: Path) -> None:
    assert read_costs(Path(written(tmp_path, json.dumps(with_costs({"traceEvents": []}, COSTS))))) == COSTS


WITHOUT = [
    None,
    {},
    {"costs": {"forwards": 1}},
    {"costs": {"forward": [1, -1]}},
    {"costs": {"forward": [1, 2], "input": [1]}},
    {"costs": {"latency": [1]}},
    {"costs": {"forward": None}},
]


@pytest.mark.parametrize("found", WITHOUT, ids=str)
def test_files_without_costs_are_refused(found: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no measured costs: forward, input, weight, backward, latency"):
        read_costs(Path(written(tmp_path, json.dumps({"otherData": found}))))


@pytest.mark.parametrize("name", ["search", "zb-h1"])
def test_named_schedules_are_made_for_measured_costs(name: str, tmp_path: Path) -> None:
    uneven = Costs((1.0, 1.0, 2.0), (2.0, 2.0, 2.0), (1.0, 2.0, 1.0), latency=0.5)
    file = written(tmp_path, json.dumps(with_costs({}, uneven)))
    made, equal = (ChosenSchedule(name, 3, 4, costs=each) for each in (file, None))
    assert (made.from_file, equal.from_file) == (True, False)
    assert simulate(made.of(4), uneven).makespan < simulate(equal.of(4), uneven).makespan
    computed = [tuple(action for action in row if action.kind in COMPUTE) for row in made.of(4).ranks]
    assert tuple(computed) == generate(name, 3, 4, costs=uneven).ranks


def test_costs_of_another_number_of_stages_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, json.dumps(with_costs({}, COSTS)))
    with pytest.raises(ValueError, match=r"pipeline\.costs = .*: the costs are those of 2 stages, and zb-v has 4"):
        ChosenSchedule("zb-v", 2, 4, costs=file)
    with pytest.raises(ValueError, match="has no measured costs"):
        ChosenSchedule("zb-v", 2, 4, costs=written(tmp_path, "{}"))
    one = with_costs({}, replace(COSTS, forward=1.0, input=1.0, weight=1.0))
    ChosenSchedule("zb-v", 2, 4, costs=written(tmp_path, json.dumps(one)))


# Training.


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "data", "row"), [("bent", 1, 0), ("bent", 2, 2), ("crossed", 1, 1), ("crossed", 2, 3)]
)
def test_a_schedule_of_the_users_trains_to_the_numbers_of_one_process(
    name: str, data: int, row: int, tmp_path: Path
) -> None:
    text = {"bent": BENT, "crossed": CROSSED}[name]
    further = {"pipeline": {"schedule": {"file": written(tmp_path, text)}}}
    count = parse(text).microbatches
    expected, values, total, _ = run_ranks(train, 1, "tied", microbatches=count)[0]
    runs = run_ranks(train, 2 * data, "tied", pipeline=2, data=data, row=row, microbatches=count, further=further)
    seen = set()
    for found, whole, held, skipped in runs:
        assert found == pytest.approx(expected, rel=1e-9)
        assert skipped == 0
        assert held < total
        seen |= set(whole)
        for parameter, value in whole.items():
            assert float((value - values[parameter]).abs().max()) <= 1e-8, parameter
    assert seen == set(values)


def interrupted(file: str, folder: str) -> tuple[list[float], list[float]]:
    def start() -> Any:
        settings = {
            "train_batch_size": SAMPLES * 4,
            "train_micro_batch_size_per_gpu": SAMPLES,
            "optimizer": ADAMW,
            "zero_optimization": {"stage": 1},
            "mesh": {"pipeline": 2},
            "pipeline": {"schedule": {"file": file}},
        }
        return zeromesh.initialize(model=build("plain"), config=settings)[0]

    def go_on(engine: Any, steps: range) -> list[float]:
        return [float(engine.train_batch(batches("plain", step, 4, 0, 1))) for step in steps]

    engine = start()
    go_on(engine, range(2))
    engine.save_checkpoint(folder, "middle")
    expected = go_on(engine, range(2, 4))
    engine = start()
    engine.load_checkpoint(folder, "middle")
    return expected, go_on(engine, range(2, 4))


def test_a_checkpoint_goes_on(tmp_path: Path) -> None:
    for expected, found in run_ranks(interrupted, 2, written(tmp_path, BENT), str(tmp_path / "saved")):
        assert found == expected


def differs(folders: list[str]) -> str:
    settings = {
        "train_batch_size": 2 * SAMPLES,
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": ADAMW,
        "mesh": {"pipeline": 2},
        "pipeline": {"schedule": {"file": "schedule.txt"}},
    }
    with contextlib.chdir(folders[int(os.environ["RANK"])]):
        try:
            zeromesh.initialize(model=build("plain"), config=settings)
        except (ValueError, RuntimeError) as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (TEXT.replace("I0.1 W0.1", "B0.1"), "the schedule of the pipeline"),
        ("", "rank 1 could not plan the pipeline: pipeline.schedule, schedule.txt: unreadable text"),
    ],
)
def test_files_that_differ_between_ranks_end_all_of_them(other: str, expected: str, tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder, text in zip(folders, (TEXT, other), strict=True):
        folder.mkdir()
        written(folder, text)
    found = run_ranks(differs, 2, [str(folder) for folder in folders])
    assert expected in found[0]
    assert "rank 1" in found[0] + found[1]
    assert "no error" not in found
