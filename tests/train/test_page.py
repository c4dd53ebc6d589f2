"""The page of a run, which is written from its files at any time."""

import json
import random
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from mutations import mutated
from zeromesh.cli.main import app
from zeromesh.observe.metrics import MetricsLog
from zeromesh.train.goodput import read_times
from zeromesh.train.page import heat_map, line_chart, write_page


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
    spike = {"name": "loss", "value": 9.0, "usual": 3.0, "skipped": True, "back": "<global_step5>"}
    records += [{"kind": "validation", "step": 10, "loss": 4.0}, {"kind": "spike", "step": 7, **spike}]
    for name, lines in (("time.jsonl", times), ("metrics.jsonl", records)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_page_shows_attempts_curves_ranks_and_hardware(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(run_of(tmp_path))])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "report.html").read_text()
    assert "has not reached its end: step 20 of 20, 2 attempts in 0:30, of which 47% went to steps that count" in text
    assert "<td>rank 1&#x27;s memory</td><td>20</td><td>now</td><td>2.00 GB/s</td><td>10.0 GB/s</td>" in text
    assert "left out; the run went back to &lt;global_step5&gt;" in text
    assert "rank 1, step 20: 300.0 ms, 1.50 of the usual time" in text
    assert "down: 10.0 s, up to step 10" in text
    pictures = re.findall("<svg.*?</svg>", text)
    assert len(pictures) == 6
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        _, _, width, height = map(float, root.get("viewBox", "").split())
        for box in root.iter("{http://www.w3.org/2000/svg}rect"):
            assert float(box.get("x", 0)) + float(box.get("width", 0)) <= width
            assert float(box.get("y", 0)) + float(box.get("height", 0)) <= height


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no attempt at a run: name the output folder of a run"):
        write_page(tmp_path)


def test_long_runs_keep_their_spikes_and_their_slow_moments() -> None:
    chart = line_chart({"": [(step, 9.0 if step == 777 else 1.0) for step in range(10_000)]})
    points = re.findall(r"[\d.]+,([\d.]+)", chart.partition('points="')[2].partition('"')[0])
    assert len(points) <= 600
    assert min(map(float, points)) == 10.0
    (drawn,) = heat_map(["rank 0"], [(step, [(3.0 if step == 777 else 1.0, "")]) for step in range(10_000)])
    assert drawn.count("<rect") <= 240
    assert "3.00 of the usual time" in drawn


def test_curves_of_one_step_or_of_none_are_not_drawn() -> None:
    assert "too few" in line_chart({"": []})
    assert "too few" in line_chart({"": [(1, 2.0)]})


def test_large_runs_make_a_page_that_a_browser_opens(tmp_path: Path) -> None:
    ranks, health = 512, {"products": [1e11] * 512, "memory": [1e10] * 512, "links": [], "slow": []}
    with (tmp_path / "time.jsonl").open("w") as file:
        file.write(json.dumps({"began": 0.0, "step": 0}) + "\n")
        for step in range(1, 3001):
            row = {"seen": step, "step": step, "work": [0.1] * ranks, "usual": [0.1] * ranks}
            check = {"seen": step, "step": step, "health": health}
            done = {"at": 2.0 * step, "step": step, "seconds": {"steps that count": 2.0 * step}, "ends": False}
            file.write("\n".join(map(json.dumps, [row, done, *([check] * (step % 100 == 0))])) + "\n")
    assert write_page(tmp_path).stat().st_size < 5e6
    assert "Only the 48 rows of 512 with the darkest cells" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("works", "shown"),
    [
        ([[0.1, 0.1], [0.1, 0.1, 0.1, 0.1]], "rank 0, step 1: 100.0 ms, 1.00 of the usual time"),
        ([[0.1, 0.1, 0.1, 0.5], [0.1]], "rank 3, step 1: 500.0 ms, 5.00 of the usual time"),
    ],
)
def test_the_number_of_ranks_may_change(works: list[list[float]], shown: str, tmp_path: Path) -> None:
    rows = [{"began": 0.0, "step": 0}]
    rows += [{"seen": 1.0, "step": at, "work": work, "usual": [0.1] * len(work)} for at, work in enumerate(works, 1)]
    (tmp_path / "time.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert shown in write_page(tmp_path).read_text()


def test_values_that_are_missing_or_not_finite_and_other_versions_are_left_out(tmp_path: Path) -> None:
    run_of(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for step, norm in enumerate((float("inf"), float("nan"), None), 21):
            file.write(json.dumps({"kind": "train", "step": step, "loss": 1.0, "gradient_norm": norm}) + "\n")
    with (tmp_path / "time.jsonl").open("ab") as file:
        row = {"at": 131.0, "step": 20, "seconds": {"steps that count": 8.0, "something new": 1.0}, "ends": True}
        file.write(b"\xff\xfe broken\n" + json.dumps(row).encode())
    (tmp_path / "config.json").write_text("[]")
    text = write_page(tmp_path).read_text()
    assert "nan" not in text.partition("Gradient norm")[2].partition("Tokens per second")[0]


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


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 640), marks=pytest.mark.full)], ids=str)
def test_lines_of_logs_that_are_no_records_are_left_out_and_counted(seeds: range, tmp_path: Path) -> None:
    run_of(tmp_path)
    logs = {name: (tmp_path / name).read_text() for name in ("time.jsonl", "metrics.jsonl")}
    written = 0
    for seed in seeds:
        for name, text in logs.items():
            (tmp_path / name).write_text(altered(text, random.Random(seed)))
        begun = any("began" in record for record in read_times(tmp_path / "time.jsonl")[0])
        if begun:
            write_page(tmp_path)
            written += 1
        else:
            with pytest.raises(ValueError, match="has no attempt at a run"):
                write_page(tmp_path)
        MetricsLog(tmp_path / "metrics.jsonl", 10).close()
    assert written > len(seeds) / 2
    for name, text in logs.items():
        (tmp_path / name).write_text(text + '[1]\nnull\n{"kind": "train", "step": "x", "began": "y"}\n')
    told = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert told.exit_code == 0
    assert "6 lines of its logs are no records of a run, and are left out" in told.output
