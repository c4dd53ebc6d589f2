"""The benchmark of large worlds: its cells run, count what one rank does, and become a page."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import scale
import scale_page
from harness import run_command

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_manifest_of_many_ranks_is_written_and_opened_beside_dcps() -> None:
    chosen = argparse.Namespace(memory_gib=1 << 20, steps=1, limit=60.0)
    for library in scale.CHECKPOINTS:
        row = scale.run_cell(scale.Cell("manifest", library, 16, None, 2), chosen)
        assert row["error"] is None
        assert row["file_mb"] > 0


def test_a_cell_that_fails_or_hangs_has_a_row_that_says_so() -> None:
    chosen = argparse.Namespace(memory_gib=1 << 20, steps=1, limit=60.0)
    row = scale.run_cell(scale.Cell("manifest", "none", 16), chosen)
    assert row["error"] == "KeyError: 'none'"
    with pytest.raises(RuntimeError, match="not over after 0 s"):
        scale.in_process(lambda: scale.time.sleep(60), 0.01)


def row(library: str, world: int, seconds: float, **more: Any) -> dict[str, Any]:
    cell = scale.Cell("step", library, world, 3 if library == "ZeroMesh" else None, 4, 300)
    figures = {"step_seconds": [seconds, 2 * seconds, 3 * seconds], "bytes": 100 * world} | dict.fromkeys(
        ("fake_seconds", "initialize_seconds", "memory_mb", "collectives", "python_calls", "groups"), 1
    )
    return {"round": 0, **scale.asdict(cell), "error": None, **figures} | more


def test_a_page_has_medians_and_what_failed() -> None:
    rows = [row("plain torch", 1, 0.001), row("ZeroMesh", 8, 0.002), row("ZeroMesh", 64, 0.003)]
    rows += [row("FSDP2", 8, 0.004), row("FSDP2", 64, 0.004, error="not over after 3 s")]
    result = {"date": "2000-01-01", "machine": "m", "commit": "c", "torch": "2", "rounds": 1, "steps": 3, "rows": rows}
    text = scale_page.page(result, None)
    assert "| CPU ms of a step | 8 ranks | 64 ranks |" in text
    assert "| ZeroMesh, stage 3 | 4.00 (2.00 - 6.00) | 6.00 (3.00 - 9.00) |" in text
    assert "| FSDP2 | 8.00 (4.00 - 12.00) | failed |" in text
    assert "- step, FSDP2, 64 ranks, 4 blocks, 300 parameters: not over after 3 s" in text


@pytest.mark.full
def test_one_command_measures_a_tiny_model_and_writes(tmp_path: Path) -> None:
    options = [
        "--worlds",
        "64",
        "--stages",
        "0",
        "3",
        "--blocks",
        "2",
        "--parameters",
        "8",
        "--rounds",
        "1",
        "--real",
        "2",
    ]
    done = run_command([sys.executable, BENCHMARKS / "scale.py", *options, "--out", tmp_path], timeout=240)
    assert done.returncode == 0, done.stdout
    rows = json.loads((tmp_path / "scale.json").read_text())["rows"]
    assert [row["error"] for row in rows] == [None] * len(rows)
    counts = {scale_page.name_of(row): row for row in rows if row["measure"] == "step"}
    assert counts["plain torch"]["collectives"] == 0
    assert counts["ZeroMesh, stage 3"]["bytes"] > 0
    assert counts["DDP"]["collectives"] >= 1
    [watchdog] = [row for row in rows if row["measure"] == "watchdog"]
    assert min(watchdog["store_calls"]) > 0
    assert "## A step: 2 blocks, 8 parameters" in (tmp_path / "scale.md").read_text()
