"""A run that goes back to a checkpoint after a spike."""

import json
import random
import re
import string
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from zeromesh.cli.main import app
from zeromesh.observe.metrics import read_metrics
from zeromesh.train.folder import RunFolder
from zeromesh.train.loop import Loop
from zeromesh.train.signals import Request

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


def config(text: Path, folder: Path, ranks: int = 1, roll_back: int | None = 2, **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-2}},
        "model": {"architecture": "llama", "hidden_size": 32, "layers": 2, "heads": 2, "sequence_length": LENGTH},
        "data": {"train": str(text), "vocabulary_size": 257, "validation_fraction": 0.1},
        "spikes": {"action": "skip", "loss": 2.0, "window": 5},
        "run": {
            "steps": STEPS, "output": str(folder / "run"), "ranks": ranks, "log_every": 1, "save_every": 5,
            "evaluate_every": 0, "roll_back": roll_back,
        },
        "csv_monitor": {"enabled": True, "output_path": str(folder / "run" / "csv"), "job_name": "run"},
        **changes,
    }  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps(settings))
    return path


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(scope="module")
def rolled(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rolled")
    code, output = run("train", str(config(text, folder)))
    assert code == 0, output
    return folder / "run"


def test_a_run_goes_back_and_leaves_out_the_samples_since(rolled: Path) -> None:
    records = read_metrics(rolled / "metrics.jsonl")
    spikes = [one for one in records if one["kind"] == "spike"]
    steps = {one["step"]: one["samples"] for one in records if one["kind"] == "train"}
    assert [*steps] == [*range(1, STEPS + 1)]
    assert spikes
    for spike in spikes:
        assert spike["value"] > 2 * spike["usual"]
        back = int(spike["back"].removeprefix("global_step"))
        assert spike["step"] - 7 < back <= spike["step"] - 2  # the newest checkpoint that is two steps older
        # The samples of the spike, and those between it and the checkpoint, are left out for good.
        later = [one["samples"] for one in spikes if one["back"] == spike["back"]][-1]
        assert steps[back + 1] == later + BATCH
    report = json.loads((rolled / "report.json").read_text())
    assert (report["steps"], len(report["spikes"])) == (STEPS, len(spikes))
    assert report["training_loss"] < 0.5
    assert 0 < report["time"]["redone"] < report["time"]["steps"]
    assert f"left out; the run went back to {spikes[0]['back']}" in (rolled / "report.md").read_text()


def test_a_signal_at_a_spike_saves_where_the_run_goes_on(
    rolled: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read_metrics(rolled / "metrics.jsonl")
    spike = next(one for one in expected if one["kind"] == "spike")
    step = Loop._step

    def signalled(loop: Loop, batches: Any) -> float:
        if loop.engine.global_steps == spike["step"] - 1 and not tmp_path.joinpath("sent").exists():
            tmp_path.joinpath("sent").touch()
            loop.engine.ask(Request.SAVE | Request.END)
        return step(loop, batches)

    monkeypatch.setattr(Loop, "_step", signalled)
    path = config(text, tmp_path)
    assert run("train", str(path))[0] == 75
    assert RunFolder(tmp_path / "run").last_checkpoint == spike["back"]
    code, output = run("train", str(path), "--resume")
    assert code == 0, output
    kept = ("kind", "step", "loss", "gradient_norm", "samples", "name", "value", "back")
    found, wanted = (
        [{key: one[key] for key in kept if key in one} for one in records]
        for records in (read_metrics(tmp_path / "run" / "metrics.jsonl"), expected)
    )
    assert found == wanted


def test_going_back_needs_checkpoints_and_updates_that_are_left_out(text: Path, tmp_path: Path) -> None:
    code, output = run("train", str(config(text, tmp_path, spikes={"loss": 2.0})))
    assert code == 2
    assert (
        "run.roll_back = 2 goes back to a checkpoint after an update that was left out; set spikes.action to" in output
    )


def test_going_back_needs_checkpoints_that_are_kept(text: Path, tmp_path: Path) -> None:
    code, output = run("train", str(config(text, tmp_path, roll_back=6, checkpoint={"keep_last": 2})))
    assert code == 2
    assert "checkpoint.keep_last = 2: the last checkpoint that is run.roll_back = 6 updates older is deleted" in output
    assert "saved every 5; keep 3" in output


def test_skipping_needs_something_to_watch(text: Path, tmp_path: Path) -> None:
    code, output = run("train", str(config(text, tmp_path, spikes={"action": "skip"})))
    assert code == 2
    assert "no update is a spike without loss or norm; set one of them" in output


def test_the_same_spike_again_and_again_ends_the_run(text: Path, tmp_path: Path) -> None:
    # Below what any loss can be, every update is a spike.
    path = config(text, tmp_path, spikes={"action": "skip", "loss": 1.0001, "norm": 1.0001, "window": 5})
    code, output = run("train", str(path))
    assert code == 1
    assert re.search(r"the run went back to global_step\d+ 3 times before|10 updates in a row were left out", output)
