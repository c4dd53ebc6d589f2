"""Spikes of a run: updates that are left out."""

import json
import random
import shutil
import string
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commands import write_config
from zeromesh.apps.cli.main import app
from zeromesh.apps.train.metrics import read_metrics

STEPS, BATCH, LENGTH = 30, 4, 32


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that is soon learned, with one document that is not like the others."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    odd = "".join(draw.choices(string.ascii_letters + string.digits, k=3 * LENGTH))
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(odd if number == 30 else "abcabcabd " * 16)
    return folder


def config(text: Path, folder: Path, ranks: int = 1, **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-2}},
        "model": {"architecture": "llama", "hidden_size": 32, "layers": 2, "heads": 2, "sequence_length": LENGTH},
        "data": {"train": str(text), "vocabulary_size": 257, "validation_fraction": 0.1},
        "spikes": {"action": "skip", "loss": 2.0, "window": 5},
        "run": {
            "steps": STEPS, "output": str(folder / "run"), "ranks": ranks, "log_every": 1, "save_every": 5,
            "evaluate_every": 0,
        },
        **changes,
    }  # fmt: skip
    return write_config(folder, settings)


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(scope="module")
def skipped(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skipped")
    code, output = run("train", str(config(text, folder)))
    assert code == 0, output
    return folder / "run"


def test_spikes_are_left_out_and_recorded(skipped: Path) -> None:
    records = read_metrics(skipped / "metrics.jsonl")
    spikes = [record for record in records if record["kind"] == "spike"]
    steps = {record["step"]: record["samples"] for record in records if record["kind"] == "train"}
    assert steps == {step: step * BATCH for step in range(1, STEPS + 1)}
    assert spikes
    assert all(spike["value"] > 2 * spike["usual"] and spike["skipped"] for spike in spikes)
    report = json.loads((skipped / "report.json").read_text())
    assert report["spikes"] == [
        {key: spike[key] for key in ("step", "name", "value", "usual", "skipped")} for spike in spikes
    ]
    assert "| left out |" in (skipped / "report.md").read_text()


def test_a_copy_that_is_resumed_before_a_spike_meets_it_again(skipped: Path, text: Path, tmp_path: Path) -> None:
    expected = read_metrics(skipped / "metrics.jsonl")
    spike = next(record for record in expected if record["kind"] == "spike")
    shutil.copytree(skipped, tmp_path / "run")
    before = (spike["step"] - 1) // 5 * 5
    (tmp_path / "run" / "checkpoints" / "latest").write_text(f"global_step{before}")
    code, output = run("train", str(config(text, tmp_path)), "--resume")
    assert code == 0, output
    compared = ("kind", "step", "loss", "gradient_norm", "samples", "name", "value")
    again, first = (
        [{key: record[key] for key in compared if key in record} for record in records]
        for records in (read_metrics(tmp_path / "run" / "metrics.jsonl"), expected)
    )
    assert again == first


def test_skipping_needs_something_to_watch(text: Path, tmp_path: Path) -> None:
    code, output = run("train", str(config(text, tmp_path, spikes={"action": "skip"})))
    assert code == 2
    assert "no update is a spike without loss or norm; set one of them" in output


def test_going_back_to_a_checkpoint_is_refused_with_what_to_do(text: Path, tmp_path: Path) -> None:
    code, output = run("train", str(config(text, tmp_path)), "--set", "run.roll_back=2")
    assert code == 2
    assert 'run.roll_back is not available; set spikes.action to "skip", or resume a copy of the run' in output


def test_spikes_without_end_end_the_run(text: Path, tmp_path: Path) -> None:
    # Below what any loss can be, every update is a spike.
    path = config(text, tmp_path, spikes={"action": "skip", "loss": 1.0001, "norm": 1.0001, "window": 5})
    code, output = run("train", str(path))
    assert code == 1
    assert "10 updates in a row were left out" in output
