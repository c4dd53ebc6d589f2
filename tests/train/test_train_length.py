"""The length of a run: epochs, early stopping, and the checkpoint of the lowest loss."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import call, write_config
from zeromesh.apps.train.data.ordered_loader import training_samples
from zeromesh.apps.train.data.prepare_text import prepare
from zeromesh.apps.train.loop import BEST, BestLoss
from zeromesh.apps.train.metrics import read_metrics
from zeromesh.apps.train.run_folder import RunFolder
from zeromesh.apps.train.train_settings import WITH_TOTAL, EarlyStop, TrainSettings
from zeromesh.checkpoint.boxes import Reader
from zeromesh.config.errors import ConfigError
from zeromesh.shard.optim.schedules import SCHEDULES


def config(corpus: Path, folder: Path, name: str = "run", **run: Any) -> Path:
    return write_config(
        folder,
        {
            "train_batch_size": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},  # so high that the loss goes up and down
            "gradient_clipping": 1.0,
            "checkpoint": {"keep_last": 1},
            "model": {"hidden_size": 16, "layers": 1, "heads": 2, "sequence_length": 32},
            "data": {"train": str(corpus), "suffixes": [".py"], "validation_fraction": 0.3, "vocabulary_size": 270},
            "run": {"output": str(folder / name), "evaluate_every": 2, "evaluate_batches": 2, "log_every": 1, **run},
        },
    )


def scores(run: Path) -> list[tuple[int, float]]:
    records = read_metrics(run / "metrics.jsonl")
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "validation"]


def parameters(run: Path, tag: str) -> dict[str, torch.Tensor]:
    reader = Reader(run / "checkpoints" / tag)
    return {name: reader.tensor(name) for name in reader.names if name.startswith(("parameter/", "optimizer/"))}


@pytest.mark.full
def test_an_epoch_takes_each_sample_once_and_the_schedule_ends_with_it(corpus: Path, tmp_path: Path) -> None:
    path = config(corpus, tmp_path, epochs=0.5)
    change = ["--set", 'scheduler={"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2}}']
    result = call("train", path, *change, "--set", "optimizer.params.lr=0.1")
    assert result.exit_code == 0, result.output
    written = TrainSettings.load(tmp_path / "run" / "config.json")
    assert written.run is not None
    assert written.data is not None
    assert written.scheduler is not None
    prepared = prepare(written.data, tmp_path / "run" / "text", may_write=False, length=32)
    (samples,) = training_samples(prepared, 32, written.seed)
    steps = math.ceil(0.5 * samples.count / 4)
    assert (written.run.steps, written.run.epochs) == (steps, None)
    assert written.scheduler.params["total_num_steps"] == steps
    assert f"run.epochs = 0.5 takes {steps} steps" in result.output
    assert json.loads((tmp_path / "run" / "report.json").read_text())["steps"] == steps
    result = call("train", path, *change, "--set", "optimizer.params.lr=0.1", "--resume", "--set", "run.epochs=1")
    assert result.exit_code == 2
    assert f"scheduler.params.total_num_steps: {steps} in the run" in result.output


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({}, "run: needs steps or epochs"),
        ({"steps": 3, "epochs": 2.0}, "steps = 3 and epochs = 2.0 both give its length; leave out one of them"),
        ({"epochs": 0}, "run.epochs = 0"),
        ({"steps": 3, "early_stop": {"patience": 0}}, "run.early_stop.patience = 0"),
        ({"steps": 3, "keep_best": True, "evaluate_every": 0}, "set it to a number of steps"),
    ],
)
def test_a_length_that_is_none_is_refused(run: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainSettings.load({"run": run})
    assert expected in str(caught.value)


def test_all_schedules_with_a_number_of_steps_are_known() -> None:
    makers = {name.lower(): inspect.signature(make).parameters for name, make in SCHEDULES.items()}
    assert sorted(WITH_TOTAL) == sorted(name for name, names in makers.items() if "total_num_steps" in names)


def test_patience_counts_evaluations_without_a_lower_loss() -> None:
    stop, best = EarlyStop(patience=2, min_delta=0.5), BestLoss()
    kept = [best.add(step, loss, stop) for step, loss in enumerate([3.0, 2.9, 2.4, 2.3, math.nan], 1)]
    assert kept == [True, True, True, True, False]
    assert (best.loss, best.step, best.level, best.waited) == (2.3, 4, 2.4, 2)
    assert best.ends(stop)
    assert not best.ends(EarlyStop(patience=3, min_delta=0.5))
    assert not best.ends(None)
    assert BestLoss.of(best.state) == best


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_resumed_stops_early_at_the_same_step_with_the_same_best(
    corpus: Path, tmp_path: Path, ranks: int
) -> None:
    shared: dict[str, Any] = {
        "early_stop": {"patience": 3, "min_delta": 0.01},
        "keep_best": True,
        "save_every": 2,
        "ranks": ranks,
    }
    result = call("train", config(corpus, tmp_path, "whole", steps=60, **shared))
    assert result.exit_code == 0, result.output
    end = json.loads((tmp_path / "whole" / "report.json").read_text())
    assert end["steps"] < 60
    assert "stopped early" in result.output
    best = end["best"]
    evaluated = scores(tmp_path / "whole")[:-1]  # without the last, of all held-out text
    step, loss = min(evaluated, key=lambda score: score[1])
    assert (best["step"], best["loss"]) == (step, loss)
    assert sorted(path.name for path in (tmp_path / "whole" / "checkpoints").iterdir()) == [
        BEST,
        f"global_step{end['steps']}",
        "latest",
    ]
    first = call("train", config(corpus, tmp_path, "parts", steps=end["steps"] - 2, **shared))
    assert first.exit_code == 0, first.output
    again = call("train", config(corpus, tmp_path, "parts", steps=60, **shared), "--resume")
    assert again.exit_code == 0, again.output
    for tag in (BEST, f"global_step{end['steps']}"):
        whole, parts = parameters(tmp_path / "whole", tag), parameters(tmp_path / "parts", tag)
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert json.loads((tmp_path / "parts" / "report.json").read_text())["best"] == best
    # A run that has stopped stops again, and goes on with more patience.
    assert call("train", config(corpus, tmp_path, "parts", steps=60, **shared), "--resume").exit_code == 0
    assert RunFolder(tmp_path / "parts").last_checkpoint == f"global_step{end['steps']}"
    shared["early_stop"]["patience"] = 4
    assert call("train", config(corpus, tmp_path, "parts", steps=60, **shared), "--resume").exit_code == 0
    assert RunFolder(tmp_path / "parts").last_checkpoint != f"global_step{end['steps']}"


@pytest.mark.full
def test_the_best_checkpoint_is_exported_by_its_tag(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert call("train", config(corpus, tmp_path, steps=4, keep_best=True)).exit_code == 0
    result = call("export", tmp_path / "run", tmp_path / "model", "--tag", BEST)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_a_schedule_that_is_longer_than_the_epochs_is_refused_before_a_rank_starts(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeromesh.apps.train.train_run.launch", lambda *arguments: pytest.fail("started"))
    wsd = 'scheduler={"type": "WSD", "params": {"warmup_num_steps": 4000, "decay_num_steps": 4000}}'
    result = call("train", config(corpus, tmp_path, epochs=0.1), "--set", wsd)
    assert result.exit_code == 2
    assert "WSD's warmup_num_steps 4000 and decay_num_steps 4000" in result.output
