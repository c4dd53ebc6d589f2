"""The page of a run, which is written from its files at any time."""

import json
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import call
from mutations import mutated
from zeromesh.apps.train import run_picture
from zeromesh.apps.train.goodput import read_times
from zeromesh.apps.train.metrics import MetricsLog
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.base.chart_page import charts_html, thinned, ticks
from zeromesh.base.drawing import Chart, Curves
from zeromesh.base.lock import locked


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
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Charts of each page that is written, by the first words of their titles."""
    pages: list[dict[str, Any]] = []
    draw = run_picture.charts_html

    def keep(charts: Iterator[Chart]) -> str:
        shown = [*charts]
        pages.append({chart.title.partition(",")[0]: chart for chart in shown})
        return draw(shown)

    monkeypatch.setattr(run_picture, "charts_html", keep)
    return pages


class Page(HTMLParser):
    """Elements of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def settings_of(folder: Path, **run: object) -> None:
    """Write the settings of a run beside its logs, as the trainer does."""
    shape = {"hidden_size": 32, "layers": 2, "heads": 2, "sequence_length": 32}
    document = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "model": shape,
        "data": {"train": "text.txt"},
        "run": {"steps": 40, **run},
    }
    settings = TrainSettings.load(document)
    (folder / "config.json").write_text(settings.resolve(1, settings.resolve_mesh(1)).to_json())


def test_a_command_writes_the_page_of_a_run_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    settings_of(run_of(tmp_path))
    done = call("report", tmp_path)
    assert done.exit_code == 0, done.output
    page = Page(html := (tmp_path / "report.html").read_text())
    tags = [tag for tag, _ in page.elements]
    assert not {"link", "img", "iframe"} & {*tags}
    assert all("src" not in attributes and "href" not in attributes for _, attributes in page.elements)
    assert "://" not in html
    assert "prefers-color-scheme: dark" in html
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.elements
    assert min(map(float, re.findall(r"font(?:-size)?: (\d+)px", html))) >= 9
    assert "gpt, 2 blocks of width 32, ZeRO-0, step 20 of 40: not finished" in page.text
    assert "optimizer.params.lr = 0.01" in page.text
    assert "location.reload" not in html
    curves = [json.loads(found) for _, each in page.elements if (found := each.get("data-curves"))]
    assert curves[0]["curves"][0] == ["training", [[step, f"{5 - step / 10:g}"] for step in range(1, 21)]]
    tips = [tip for _, each in page.elements if (tip := each.get("data-tip"))]
    assert "starting: 4 s, from 0 s" in tips
    assert "rank 1, memory, step 20: 3.00 times as long" in tips


def interrupt(_: float) -> None:
    raise KeyboardInterrupt


def test_a_watch_that_is_stopped_before_the_first_page_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_picture, "time", SimpleNamespace(sleep=interrupt))
    with locked(tmp_path), pytest.raises(KeyboardInterrupt):
        next(run_picture.watch(tmp_path))


def test_a_curve_of_one_step_has_one_label_below() -> None:
    html = charts_html([Curves("loss", {"": [(1.0, 2.0)]})])
    assert '<div class="x"><span>step 1</span><span></span></div>' in html


def test_a_live_page_reloads_itself_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(tmp_path)
    monkeypatch.setattr(run_picture, "RELOAD", 0.01)
    with locked(tmp_path):
        pages = run_picture.watch(tmp_path)
        assert "location.reload" in next(pages).read_text()
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "train", "step": 21, "loss": 1.0}) + "\n")
        os.utime(tmp_path / "metrics.jsonl", (time.time() + 5,) * 2)
        assert "step 21" in Page(next(pages).read_text()).text
        monkeypatch.setattr(run_picture, "time", SimpleNamespace(sleep=interrupt))
        with pytest.raises(KeyboardInterrupt):
            next(pages)
        assert "location.reload" not in (tmp_path / "report.html").read_text()
    pages = run_picture.watch(tmp_path)
    last = next(pages).read_text()
    assert "location.reload" not in last
    assert next(pages, None) is None
    done = call("report", tmp_path, "--watch")
    assert done.exit_code == 0
    assert "the run has ended; the page is complete" in " ".join(done.output.split())


def test_the_page_shows_attempts_curves_ranks_and_hardware(tmp_path: Path, drawn: list[Any]) -> None:
    run_picture.write_run_page(run_of(tmp_path))
    (charts,) = drawn
    assert [*charts["attempts"].bars] == ["steps that count", "starting", "down"]
    assert [*charts["loss"].curves] == ["training", "held out"]
    assert charts["loss"].marks == [7]
    assert not charts["loss"].from_zero
    assert charts["speed"].from_zero
    work, hardware = ([cell.tone for cell in chart.cells.values()] for chart in [*charts.values()][-2:])
    assert work == [0.0, pytest.approx(0.1 / 0.3 - 1), 0.0, pytest.approx(0.5)]
    assert hardware[6:8] == [pytest.approx(-0.4), pytest.approx(2.0)]  # rank 1's memory


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no run: name the folder that run\.output"):
        run_picture.write_run_page(tmp_path)


@pytest.mark.parametrize("works", [[[0.1, 0.1], [0.1, 0.1, 0.1, 0.1]], [[0.1, 0.1, 0.1, 0.5], [0.1]]])
def test_the_number_of_ranks_may_change(works: list[list[float]], tmp_path: Path, drawn: list[Any]) -> None:
    rows = [{"began": 0.0, "step": 0}]
    rows += [{"seen": 1.0, "step": at, "work": work, "usual": [0.1] * len(work)} for at, work in enumerate(works, 1)]
    (tmp_path / "time.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_picture.write_run_page(tmp_path)
    cells = [*drawn[0].values()][-1].cells
    for rank in range(4):
        for at, work in enumerate(works):
            assert ((rank, at) in cells) == (rank < len(work))
            assert rank >= len(work) or cells[rank, at].tone == pytest.approx(work[rank] / 0.1 - 1)


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
    run_picture.write_run_page(tmp_path)
    assert [value for _, value in drawn[0]["gradient norm"].curves[""] if isfinite(value)] == [1.0] * 20


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (3.0, 3.0), (0.0, 1e-9), (-5.0, 7.3), (1e12, 1.1e12)])
def test_the_axis_has_few_round_numbers_around_all_values(low: float, high: float) -> None:
    numbers = ticks(low, high)
    assert 2 <= len(numbers) <= 8
    assert numbers[0] <= low
    assert numbers[-1] >= high * (1 - 1e-9)


def test_a_long_curve_keeps_its_ends_and_its_extremes() -> None:
    points = [(float(step), float(step % 7)) for step in range(10_000)]
    points[5_003] = (5_003.0, 99.0)
    shown = thinned(points)
    assert len(shown) <= 1_600
    assert (5_003.0, 99.0) in shown
    assert (shown[0], shown[-1]) == (points[0], points[-1])


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
            run_picture.write_run_page(tmp_path)
        else:
            with pytest.raises(ValueError, match="has no run"):
                run_picture.write_run_page(tmp_path)
        MetricsLog(tmp_path / "metrics.jsonl", 10).close()
    assert len(drawn) > len(seeds) / 2
    for name, text in logs.items():
        (tmp_path / name).write_text(text + '[1]\nnull\n{"kind": "train", "step": "x", "began": "y"}\n')
    told = call("report", tmp_path)
    assert told.exit_code == 0
    assert "left out 6 lines of its logs that are not records of a run" in told.output
