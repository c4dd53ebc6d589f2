"""The picture of a run, which is drawn from its files at any time."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import call
from mutations import mutated
from zeromesh.apps.train import run_picture
from zeromesh.apps.train.goodput import read_times
from zeromesh.apps.train.metrics import MetricsLog
from zeromesh.base.drawing import ChartPanel


def check(memory: float, slow: bool) -> dict[str, object]:
    one = {"name": "rank 1's memory", "since": 20, "value": memory, "usual": 10e9, "unit": "B/s"}
    return {
        "products": [1e11, 1e11],
        "memory": [10e9, memory],
        "links": [[1, 0, 1e9], [0, 1, 1e9]],
        "slow": [one] * slow,
    }


def run_of(folder: Path) -> Path:
    """Write the files of a run with one failure, a slow rank, and a spike."""
    times = [
        {"began": 100.0, "step": 0},
        {"seen": 105.0, "step": 10, "work": [0.1, 0.1], "usual": [0.1, 0.1]},
        {"seen": 105.0, "step": 10, "health": check(10e9, False)},
        {"at": 110.0, "step": 10, "seconds": {"starting": 4.0, "steps that count": 6.0}, "ends": False},
        {"began": 120.0, "step": 10},
        {"seen": 125.0, "step": 20, "work": [0.1, 0.3], "usual": [0.3, 0.2]},
        {"seen": 125.0, "step": 20, "health": check(2e9, True)},
        {"at": 130.0, "step": 20, "seconds": {"starting": 2.0, "steps that count": 8.0}, "ends": True},
    ]
    records = [
        {"kind": "train", "step": step, "loss": 5 - step / 10, "gradient_norm": 1.0, "tokens_per_second": 1e3 * step}
        for step in range(1, 21)
    ]
    spike = {"name": "loss", "value": 9.0, "usual": 3.0, "skipped": True}
    records += [{"kind": "validation", "step": 10, "loss": 4.0}, {"kind": "spike", "step": 7, **spike}]
    for name, lines in (("time.jsonl", times), ("metrics.jsonl", records)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Titles of pictures, and the axes of each by the title of their panel; no file is written."""
    figure_of = pytest.importorskip("matplotlib.figure").Figure
    pictures: list[tuple[str, dict[str, Any]]] = []

    def draw(path: Path, title: str, panels: list[ChartPanel]) -> None:
        axes = {panel.title: figure_of().subplots() for panel in panels}
        for panel in panels:
            panel.draw(axes[panel.title])
        pictures.append((title, axes))

    monkeypatch.setattr(run_picture, "draw_panels", draw)
    return pictures


def test_a_command_draws_a_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = call("report", run_of(tmp_path))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = call("report", run_of(tmp_path))
    assert done.exit_code == 2
    assert "pip install matplotlib" in done.output


def test_the_picture_shows_attempts_curves_ranks_and_hardware(tmp_path: Path, drawn: list[Any]) -> None:
    run_picture.write_picture(run_of(tmp_path))
    ((title, axes),) = drawn
    assert title.endswith("step 20, 2 attempts in 0:30, of which 47% went to steps that count")
    attempts, loss, _, _, work, hardware = axes.values()
    assert [text.get_text() for text in attempts.get_legend().get_texts()] == ["starting", "steps that count", "down"]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["training", "held out", "spike"]
    assert work.images[0].get_array().tolist() == [[1.0, pytest.approx(0.1 / 0.3)], [1.0, pytest.approx(1.5)]]
    assert hardware.images[0].get_array().tolist()[3] == [pytest.approx(0.6), pytest.approx(3.0)]  # rank 1's memory


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no attempt at a run: name the output folder of a run"):
        run_picture.write_picture(tmp_path)


@pytest.mark.parametrize("works", [[[0.1, 0.1], [0.1, 0.1, 0.1, 0.1]], [[0.1, 0.1, 0.1, 0.5], [0.1]]])
def test_the_number_of_ranks_may_change(works: list[list[float]], tmp_path: Path, drawn: list[Any]) -> None:
    rows = [{"began": 0.0, "step": 0}]
    rows += [{"seen": 1.0, "step": at, "work": work, "usual": [0.1] * len(work)} for at, work in enumerate(works, 1)]
    (tmp_path / "time.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_picture.write_picture(tmp_path)
    ratios = [*drawn[0][1].values()][-1].images[0].get_array()
    for rank in range(4):
        for at, work in enumerate(works):
            missing = rank >= len(work)
            assert bool(ratios.mask[rank, at]) == missing
            assert missing or ratios[rank, at] == pytest.approx(work[rank] / 0.1)


def test_values_that_are_missing_or_not_finite_and_other_versions_are_left_out(
    tmp_path: Path, drawn: list[Any]
) -> None:
    run_of(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for step, norm in enumerate((float("inf"), float("nan"), None), 21):
            file.write(json.dumps({"kind": "train", "step": step, "loss": 1.0, "gradient_norm": norm}) + "\n")
    with (tmp_path / "time.jsonl").open("ab") as file:
        row = {"at": 131.0, "step": 20, "seconds": {"steps that count": 8.0, "something new": 1.0}, "ends": True}
        file.write(b"\xff\xfe broken\n" + json.dumps(row).encode())
    run_picture.write_picture(tmp_path)
    assert drawn[0][1]["gradient norm"].get_ylim()[1] < 2


def altered(text: str, generator: random.Random) -> str:
    """Lines of a log of which some have other values, other bytes, or an end too early, or stand elsewhere."""
    lines = []
    for line in text.splitlines():
        chance = generator.random()
        if chance < 0.15:
            line = "".join(map(json.dumps, mutated([json.loads(line)], generator)[0]))
        elif chance < 0.2:
            data = bytearray(line.encode())
            data[generator.randrange(len(data))] = generator.randrange(256)
            line = data.decode("latin-1")
        elif chance < 0.23:
            line = line[: generator.randrange(len(line))]
        elif chance < 0.27:
            line = line.replace("1", "1" * generator.choice((10, 400, 5000)), 1)
        lines.append(line)
    if generator.random() < 0.2:
        generator.shuffle(lines)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 300), marks=pytest.mark.full)], ids=str)
def test_lines_of_logs_that_are_no_records_are_left_out_and_counted(
    seeds: range, tmp_path: Path, drawn: list[Any]
) -> None:
    run_of(tmp_path)
    logs = {name: (tmp_path / name).read_text() for name in ("time.jsonl", "metrics.jsonl")}
    for seed in seeds:
        for name, text in logs.items():
            (tmp_path / name).write_text(altered(text, random.Random(seed)))
        begun = any("began" in record for record in read_times(tmp_path / "time.jsonl")[0])
        if begun:
            run_picture.write_picture(tmp_path)
        else:
            with pytest.raises(ValueError, match="has no attempt at a run"):
                run_picture.write_picture(tmp_path)
        MetricsLog(tmp_path / "metrics.jsonl", 10).close()
    assert len(drawn) > len(seeds) / 2
    for name, text in logs.items():
        (tmp_path / name).write_text(text + '[1]\nnull\n{"kind": "train", "step": "x", "began": "y"}\n')
    told = call("report", tmp_path)
    assert told.exit_code == 0
    assert "6 lines of its logs are not records of a run, and are left out" in told.output
