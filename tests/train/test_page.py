"""The page of a run, which is written from its files at any time."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from zeromesh.cli.main import app
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
        {"seen": 105.0, "step": 10, "work": [0.1, 0.1]},
        {"seen": 105.0, "step": 10, "health": check(10e9, False)},
        {"at": 110.0, "step": 10, "seconds": {"starting": 4.0, "steps that count": 6.0}, "ends": False},
        {"began": 120.0, "step": 10},
        {"seen": 125.0, "step": 20, "work": [0.1, 0.3]},
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
    assert "left out; back to &lt;global_step5&gt;" in text
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
    with pytest.raises(ValueError, match="name the output folder of a run"):
        write_page(tmp_path)


def test_long_runs_keep_their_spikes_and_their_slow_moments() -> None:
    chart = line_chart({"": [(step, 9.0 if step == 777 else 1.0) for step in range(10_000)]})
    points = re.findall(r"[\d.]+,([\d.]+)", chart.partition('points="')[2].partition('"')[0])
    assert len(points) <= 600
    assert min(map(float, points)) == 10.0
    drawn = heat_map(["rank 0"], [(step, [(3.0 if step == 777 else 1.0, "")]) for step in range(10_000)])
    assert drawn.count("<rect") <= 240
    assert "3.00 of the usual time" in drawn


def test_curves_of_one_step_or_of_none_are_not_drawn() -> None:
    assert "too few" in line_chart({"": []})
    assert "too few" in line_chart({"": [(1, 2.0)]})
