"""A run that goes back after a spike, and steps of runs that are taken again."""

import json
import random
import re
import shutil
import string
from math import inf, nextafter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from zeromesh.cli.main import app
from zeromesh.observe.metrics import read_metrics
from zeromesh.train.folder import RunFolder
from zeromesh.train.loop import Loop
from zeromesh.train.replay import Replayed, judge
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


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


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


def test_a_spike_and_a_step_after_it_are_replayed_bit_for_bit(rolled: Path) -> None:
    before = contents(rolled)
    assert any("csv" in str(path) for path in before)
    spike = next(one for one in read_metrics(rolled / "metrics.jsonl") if one["kind"] == "spike")
    code, output = run("replay", str(rolled), "--step", str(spike["step"]), "--samples")
    assert code == 0, output
    assert f"has the samples {spike['samples'] - BATCH} to {spike['samples'] - 1}" in output
    assert "persistent: " in output
    assert "give what the run recorded, bit for bit" in output
    assert output.count("sample ") == BATCH
    assert "were others" not in output
    code, output = run("replay", str(rolled), "--step", str(STEPS - 1))
    assert (code, "persistent: " in output) == (0, True), output
    assert contents(rolled) == before


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


def test_a_record_that_is_not_reproduced_is_told(rolled: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(rolled, moved)
    lines = (moved / "metrics.jsonl").read_text().splitlines()
    place, record = next((i, one) for i, one in enumerate(map(json.loads, lines)) if one["step"] == 8)
    lines[place] = json.dumps(record | {"loss": nextafter(record["loss"], inf)})
    (moved / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    code, output = run("replay", str(moved), "--step", "9")
    assert code == 1
    assert f"transient: step 8 had a loss of {nextafter(record['loss'], inf)!r}, and has {record['loss']!r}" in output


def test_steps_that_differ_from_time_to_time_are_transient() -> None:
    one, other = Replayed(3, 1.0, 2.0), Replayed(3, 1.0, nextafter(2.0, inf))
    assert judge([[one], [other]], [], False)[0].startswith("transient: step 3 gave other bits the second time")
    odd = Replayed(3, float("nan"), 2.0)
    assert judge([[odd], [odd]], [], False) == (
        "both times gave the same bits; the run has recorded none of these steps (run.log_every)", True
    )  # fmt: skip


def test_a_step_without_a_checkpoint_before_it_is_refused(rolled: Path, tmp_path: Path) -> None:
    code, output = run("replay", str(rolled), "--step", "3")
    assert code == 2
    assert "leads to step 3: it has global_step5, " in output
    code, output = run("replay", str(tmp_path), "--step", "3")
    assert (code, "holds no run" in output) == (2, True)


def test_a_step_that_no_run_has_taken_is_refused(rolled: Path) -> None:
    code, output = run("replay", str(rolled), "--step", str(STEPS + 1))
    assert code == 2
    assert f"has taken {STEPS} steps so far, and not step {STEPS + 1}" in output


def test_settings_that_were_others_are_named(rolled: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(rolled, moved)
    settings = json.loads((moved / "config.json").read_text())
    settings["spikes"]["action"], settings["run"]["roll_back"] = "warn", None
    (moved / "config.json").write_text(json.dumps(settings))
    output = run("replay", str(moved), "--step", "7")[1]
    assert "settings of the run that were others at global_step5: spikes" in output


def test_an_error_that_comes_each_time_is_persistent() -> None:
    one = [Replayed(3, 1.0, 2.0), Replayed(4, float("nan"), float("nan"), "the loss is not finite")]
    assert judge([one, one], [], False) == ("persistent: step 4 ends so both times: the loss is not finite", True)
    assert judge([one, one[:1]], [], False)[0].startswith("transient: step 4 gave other bits the second time")


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


@pytest.mark.full
def test_a_run_on_two_ranks_is_replayed_as_it_was_and_on_one(text: Path, tmp_path: Path) -> None:
    mesh = {"zero_optimization": {"stage": 3}, "mesh": {"tensor": 2}}
    code, output = run("train", str(config(text, tmp_path, 2, **mesh)))
    assert code == 0, output
    for words, told in (([], "bit for bit"), (["--one-process"], "within 1%, on one process")):
        code, output = run("replay", str(tmp_path / "run"), "--step", "19", *words)
        assert (code, told in output) == (0, True), output
        assert "were others" not in output
