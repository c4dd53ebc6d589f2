"""The benchmarks run, and their variants learn the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness import run_command

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SMALL = ["--case", "tiny", "--dtype", "fp32", "--rounds", "1", "--warmup", "1", "--steps", "2"]


def run(script: str, *arguments: str | Path) -> str:
    return run_command([sys.executable, str(BENCHMARKS / script), *map(str, arguments)], timeout=240).stdout


def test_variants_of_the_step_time_benchmark_end_at_the_same_loss(tmp_path: Path) -> None:
    out, image = tmp_path / "tiny.json", tmp_path / "tiny.png"
    names = ["DDP", "FSDP2, reshard (ZeRO-3)", "ZeroMesh 3"]
    printed = run("step_time.py", *SMALL, "--out", out, "--variants", "floor", *names)
    results = json.loads(out.read_text())["results"]
    losses = [results[name][0]["loss"] for name in names]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert losses[0] < results["floor"][0]["loss"], "only the floor does not learn"
    assert all(f"| {name} |" in printed for name in names)
    assert run("show.py", out, "--picture", image).strip() in printed
    assert image.read_bytes().startswith(b"\x89PNG")


def test_the_memory_of_a_variant_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "tiny.json"
    printed = run("step_time.py", *SMALL, "--memory", "--out", out, "--variants", "ZeroMesh 0", "ZeroMesh 3")
    peaks = {name: runs[0]["peak"] for name, runs in json.loads(out.read_text())["results"].items()}
    assert "peak MB" in printed
    assert peaks["ZeroMesh 3"] > 0
    assert peaks["ZeroMesh 0"] > 0


@pytest.mark.full
def test_the_checkpoint_benchmark_measures_saving_and_loading(tmp_path: Path) -> None:
    printed = run("checkpoint_speed.py", "--size", "tiny", "--rounds", "1", "--folder", tmp_path / "speed")
    assert {"zeros:", "save:", "load:"} <= {line.split()[0] for line in printed.splitlines() if line}
    assert not (tmp_path / "speed").exists()
