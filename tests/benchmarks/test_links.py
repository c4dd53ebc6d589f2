"""The benchmark of links: its rows learn the same, send what is said, and become a page."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import links
import links_page
from harness import run_command
from hosts import session_hosts
from links_rows import ROWS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

CHOSEN = ["HSDP", "ZeroMesh 3, hybrid", "ZeroMesh 3, hierarchical, 8 bits"]
"""One of torch's, one that is exact, and one that is rounded."""


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    (found,) = links.compare(session_hosts(), CHOSEN, ["1000mbit"], 1)
    return found


@pytest.mark.full
def test_rows_learn_the_same_and_send_what_the_formulas_say(result: dict[str, Any]) -> None:
    for name, row in result["rows"].items():
        if row["error"] == links.UNSEEN:
            assert (result["kind"], ROWS[name].family) == ("throttle", "torch")
            continue
        assert row["error"] is None
        (figures,) = row["rates"]["1000mbit"]
        assert figures["losses"][-1] < figures["losses"][0]
        assert not links_page.differing(result, name)
        elements = sum(figures["sent"]) / 2 / 4 / result["parameters"]
        if row["link"] is not None:  # row 3 gathers what is still there no second time
            assert 0.88 * row["link"] < elements < 1.06 * row["link"], name


@pytest.mark.full
def test_a_page_shows_the_figures(result: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "2000-01-01-links.json"
    path.write_text(json.dumps(result))
    (tmp_path / "README.md").write_text(f"# Pages\n\n{links_page.LIST}")
    text = links_page.write(path).read_text()
    for name in CHOSEN:
        assert f"| {name} | " in text
    assert "| 1000 Mbit/s |" in text
    assert "differ" not in text
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "](2000-01-01-links.md): two hosts" in (tmp_path / "README.md").read_text()


@pytest.mark.full
def test_losses_that_differ_are_said(result: dict[str, Any]) -> None:
    other = copy.deepcopy(result)
    other["rows"]["ZeroMesh 3, hybrid"]["rates"]["1000mbit"][0]["losses"][-1] *= 1.01
    assert links_page.differing(other, "ZeroMesh 3, hybrid")
    assert "**The losses of ZeroMesh 3, hybrid differ" in links_page.page({**other, "name": "x"}, False)


def test_rates_are_in_order_and_fewer_steps_are_taken_where_they_are_slow() -> None:
    rows = {"rows": {"DDP": {"rates": {rate: [] for rate in ("unlimited", "1gbit", "300mbit", "500kbit")}}}}
    assert links_page.rates_of(rows) == ["500kbit", "300mbit", "1gbit", "unlimited"]
    assert [links.steps_at(rate) for rate in ("10mbit", "100mbit", "1gbit", "unlimited")] == [2, 5, 10, 10]


@pytest.mark.full
def test_one_command_measures_and_writes(tmp_path: Path) -> None:
    options = ["--rates", "300mbit", "--rounds", "1"]
    done = run_command([sys.executable, BENCHMARKS / "links.py", *options, "--out", tmp_path], timeout=280)
    assert done.returncode == 0, done.stdout
    (path,) = tmp_path.glob("*.json")
    for row in json.loads(path.read_text())["rows"].values():
        assert len(row["rates"]["300mbit"]) == 1
    assert path.with_suffix(".md").exists()


@pytest.mark.full
def test_a_rate_that_is_none_is_refused() -> None:
    done = run_command([sys.executable, BENCHMARKS / "links.py", "--rates", "fast"])
    assert done.returncode == 2
    assert (
        "the rate is 'fast', but must be a number with kbit, mbit or gbit, such as '100mbit'; or unlimited"
        in " ".join(done.stdout.split())
    )
