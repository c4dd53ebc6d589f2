import json
import logging
import math
import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from commands import call, write_config
from harness import run_command, run_ranks
from zeromesh.apps.cli.main import app
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.check import check, require_unchanged
from zeromesh.apps.train.data.prepare_text import prepare
from zeromesh.apps.train.metrics import read_metrics
from zeromesh.apps.train.run_folder import RunFolder
from zeromesh.apps.train.screen import shown_log
from zeromesh.apps.train.train_run import train
from zeromesh.apps.train.train_settings import TrainSettings

STEPS = 6


def config(corpus: Path, folder: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}},
        "zero_optimization": {"stage": 3},
        "model": {
            "architecture": "llama",
            "hidden_size": 16,
            "layers": 2,
            "heads": 2,
            "sequence_length": 32,
            "dropout": 0.1,
        },
        "data": {"train": str(corpus), "suffixes": [".py"], "validation_fraction": 0.3, "vocabulary_size": 270},
        "run": {
            "steps": STEPS,
            "output": str(folder / "run"),
            "evaluate_every": 4,
            "evaluate_batches": 2,
            "save_every": 3,
            "log_every": 1,
            "sample": {"prompts": ["def f", "class"], "length": 12, "temperature": 0.5},
        },
    }
    for section, change in changes.items():
        if change is None:
            del settings[section]
        elif isinstance(change, dict):
            settings[section] = settings.get(section, {}) | change
        else:
            settings[section] = change
    return write_config(folder, settings)


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    result = call("train", config(corpus, folder))
    assert result.exit_code == 0, result.output
    return folder / "run"


def numbers(run: Path) -> list[dict[str, Any]]:
    kept = ("kind", "step", "samples", "tokens", "loss", "learning_rate", "gradient_norm", "bits_per_byte")
    return [{key: record[key] for key in kept if key in record} for record in read_metrics(run / "metrics.jsonl")]


def test_a_run_leaves_its_config_metrics_weights_picture_and_report(finished: Path) -> None:
    records = read_metrics(finished / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, STEPS + 1))
    assert [r["step"] for r in records if r["kind"] == "validation"] == [4, STEPS]
    report = json.loads((finished / "report.json").read_text())
    assert report["tokens"] == STEPS * 4 * 32
    assert report["training_loss"] == next(r["loss"] for r in records[::-1] if r["kind"] == "train")
    assert report["memory"]["total"] > 0
    assert report["attempts"] == 1
    assert 0 < report["goodput"] < 1
    assert sum(report["time"].values()) <= report["seconds"] + 0.1  # samples, picture and report come later
    assert 0 < report["time"]["steps"] + report["time"]["data"] <= report["training_seconds"] + 0.01
    assert min(report["time"][kind] for kind in ("start", "checkpoints", "evaluation")) > 0
    assert report["time"]["redone"] == report["time"]["down"] == report["time"]["compilation"] == 0
    assert [text[:5] for text in report["samples"]] == ["def f", "class"]
    settings = TrainSettings.load(finished / "config.json")
    assert (settings.model.vocab_size, settings.gradient_accumulation_steps) == (270, 4)
    pytest.importorskip("matplotlib")
    assert (finished / "report.html").is_file()


def test_the_learning_rate_in_the_log_is_that_of_the_step(finished: Path) -> None:
    rates = [record["learning_rate"] for record in numbers(finished) if record["kind"] == "train"]
    # DeepSpeed's timing: the schedule is at position -1 in the first step.
    assert rates == [0.0, 0.0, pytest.approx(1e-2 * math.log(2) / math.log(3)), *[1e-2] * (STEPS - 3)]


def test_bits_per_byte_are_those_of_all_held_out_bytes(finished: Path) -> None:
    settings = TrainSettings.load(finished / "config.json")
    assert settings.model is not None
    assert settings.data is not None
    model = Decoder(settings.model)
    state = load_file(finished / "model" / "model.safetensors")
    model.load_state_dict(state)
    model.eval()
    prepared = prepare(settings.data, finished / "text", may_write=False, length=32)
    (held,) = prepared.validation
    tokens = torch.from_numpy(np.concatenate([held.indexed.document(n) for n in held.numbers]).astype("int64"))
    assert len(tokens) == held.labels
    bits = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 32):
            window = tokens[start : start + 33][None]
            bits += float(model(window[:, :-1], window[:, 1:])) * (window.shape[1] - 1) / math.log(2)
    report = json.loads((finished / "report.json").read_text())
    # The first token is not predicted; it counts as one that costs as much as the others do.
    assert report["bits_per_byte"] == pytest.approx(bits / (len(tokens) - 1) * len(tokens) / held.bytes, rel=1e-5)


def interrupted(finished: Path, copy: Path) -> None:
    """Copy a run as after a crash between the steps 5 and 6, the last checkpoint being that of step 3."""
    shutil.copytree(finished, copy)
    shutil.rmtree(copy / "checkpoints" / f"global_step{STEPS}")
    (copy / "checkpoints" / "latest").write_text("global_step3")
    (copy / "model" / "model.safetensors").unlink()


def test_a_resumed_run_is_bit_identical_to_an_undisturbed_one(finished: Path, corpus: Path, tmp_path: Path) -> None:
    interrupted(finished, tmp_path / "run")
    result = call("train", config(corpus, tmp_path), "--auto-resume")
    assert result.exit_code == 0, result.output
    assert numbers(tmp_path / "run") == numbers(finished)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["attempts"] == 2
    assert report["time"]["redone"] > 0
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == (
        finished / "model" / "model.safetensors"
    ).read_bytes()


def test_ranks_of_a_launcher_join_and_resume_exactly(corpus: Path, tmp_path: Path) -> None:
    path = config(corpus, tmp_path / "whole")
    run_ranks(train, 2, path, [], resume=False)
    interrupted(tmp_path / "whole" / "run", tmp_path / "resumed" / "run")
    run_ranks(train, 2, config(corpus, tmp_path / "resumed"), [], resume=True)
    assert numbers(tmp_path / "resumed" / "run") == numbers(tmp_path / "whole" / "run")
    weights = [(tmp_path / name / "run" / "model" / "model.safetensors").read_bytes() for name in ("whole", "resumed")]
    assert weights[0] == weights[1]


@pytest.mark.full
def test_two_ranks_see_what_one_sees(corpus: Path, tmp_path: Path) -> None:
    """Without dropout, whose masks belong to the ranks."""
    model = {"dropout": 0.0}
    assert call("train", config(corpus, tmp_path / "one", model=model)).exit_code == 0
    path = config(corpus, tmp_path / "two", model=model)
    command = [sys.executable, "-m", "zeromesh.apps.cli.main", "train", str(path), "--set", "run.ranks=2"]
    finished = run_command(command, timeout=120)
    assert finished.returncode == 0, finished.stdout
    one, two = numbers(tmp_path / "one" / "run"), numbers(tmp_path / "two" / "run")
    for mine, theirs in zip(one, two, strict=True):
        assert mine.pop("kind") == theirs.pop("kind")
        if "samples" in mine or mine["step"] == STEPS:  # validations on the way look at as much per rank
            assert mine == pytest.approx(theirs, rel=1e-4)
    report = json.loads((tmp_path / "two" / "run" / "report.json").read_text())
    assert len(report["peak_memory"]) == report["ranks"] == 2
    assert report["traffic"]["all_gather/data"]["bytes"] > 0
    bounds = report["bounds"]
    assert bounds["uses"][bounds["bound"]]["share"] == max(use["share"] for use in bounds["uses"].values())
    assert sum(use["share"] for use in bounds["uses"].values()) == pytest.approx(1.0, rel=0.01)
    assert bounds["uses"]["compute"]["amount"] > 0
    assert f"| limited by | {bounds['bound']}, in a step of " in (tmp_path / "two" / "run" / "report.md").read_text()


def test_a_finished_run_continues_a_text(finished: Path) -> None:
    first = call("sample", finished, "def f", "--tokens", "9", "--seed", "3", "--count", "2")
    assert first.exit_code == 0, first.output
    assert first.output.startswith("def f")
    assert first.output == call("sample", finished, "def f", "--tokens", "9", "--seed", "3", "--count", "2").output
    assert first.output != call("sample", finished, "def f", "--tokens", "9", "--seed", "4", "--count", "2").output
    report = json.loads((finished / "report.json").read_text())
    greedy = call("sample", finished, "def f", "--tokens", "40", "--temperature", "0")
    assert greedy.exit_code == 0
    assert (
        call("sample", finished, "def f", "--tokens", "12", "--temperature", "0.5").output
        == report["samples"][0] + "\n"
    )


def test_the_version_is_shown() -> None:
    assert call("--version").output == f"zeromesh {version('zeromesh')}\n"


def refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert len(result.output.splitlines()) <= 24
    for part in parts:
        assert part in result.output.replace("\n", " "), result.output


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model": {"architecture": "mamba"}}, ("architecture", "mamba", "gpt", "llama")),
        ({"model": {"heads": 3}}, ("hidden_size", "16", "heads", "3")),
        ({"model": {"hidden_size": 6}}, ("even", "heads")),
        ({"model": {"sequence_length": 100_000}}, ("sequence_length = 100000", "shorten")),
        ({"model": {"vocab_size": 100}}, ("vocab_size = 100", "270")),
        ({"data": {"vocabulary_size": 60_000}}, ("data.vocabulary_size = 60000", "too large")),
        ({"data": {"vocabulary_size": 100}}, ("vocabulary_size", "100", "257")),
        ({"data": {"train": "nowhere/at/all"}}, ("nowhere/at/all", "does not exist")),
        ({"data": {"suffixes": [".md"]}}, (".md", "data.suffixes")),
        ({"data": None}, ("section 'data'",)),
        ({"optimizer": None}, ("optimizer", "AdamW")),
        ({"train_batch_size": 5, "run": {"ranks": 2}}, ("train_batch_size", "5")),
        ({"run": {"resume": True}}, ("holds no checkpoint", "without --resume")),
        ({"optimizer": {"params": {"learning_rate": 1}}}, ("optimizer.params.learning_rate", 'did you mean "lr"')),
        ({"optimizer": {"params": {"lr": "3e-4"}}}, ("optimizer.params.lr", "must be a number", "quotes")),
        ({"optimizer": {"type": "lamb", "params": {"betas": 1}}}, ("optimizer.params.betas", "2 numbers")),
        ({"optimizer": {"type": "lbfgs"}}, ("LBFGS", "cannot be used")),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 0}}},
            ("scheduler.params.total_num_steps", "0"),
        ),
        ({"scheduler": {"params": {"warmup_num_steps": -3}}}, ("scheduler.params.warmup_num_steps", "-3")),
        ({"units": ["Blok"]}, ("units", "Blok", "Block")),
    ],
)
def test_bad_input_is_refused_before_training(corpus, tmp_path, changes, parts) -> None:
    result = call("train", config(corpus, tmp_path, **changes))
    refused(result, *parts)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    if {"optimizer", "scheduler", "units"} & changes.keys():
        assert "reading the text" not in result.output


@pytest.mark.parametrize("name", ["AdamW", "lamb", "Muon", "adagrad", "SGD"])
def test_the_trial_of_the_optimizer_takes_what_the_run_takes(corpus: Path, tmp_path: Path, name: str) -> None:
    optimizer = {"type": name, "params": {"lr": 1e-2} | ({"fused": True} if name == "AdamW" else {})}
    check(TrainSettings.load(config(corpus, tmp_path, optimizer=optimizer)))


def test_an_empty_data_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(call("train", config(tmp_path / "empty", tmp_path)), "empty", ".py", "data.suffixes")


def test_an_output_folder_that_cannot_be_written_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    output = str(tmp_path / "file" / "run")
    refused(call("train", config(corpus, tmp_path), "--set", f"run.output={output}"), output, "cannot be written")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_output_folder_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o555)
    refused(call("train", config(corpus, tmp_path)), "cannot be written")


def test_a_folder_that_holds_a_run_is_not_overwritten(finished: Path, corpus: Path, tmp_path: Path) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    refused(
        call("train", config(corpus, tmp_path), "--set", f"run.output={finished}"), "already holds a run", "--resume"
    )
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_run_is_not_resumed_on_other_text(finished: Path, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    path = corpus / "3.py"
    before = path.stat()
    try:
        os.utime(path, ns=(1, 1))
        result = call("train", config(corpus, tmp_path), "--resume")
    finally:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    refused(result, "data.train has changed", "start a new run")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optimizer.params.lr=0.1", ("optimizer.params.lr: 0.01 in the run, 0.1 now", "--set run.output=FOLDER")),
        ("optimizer.type=SGD", ('optimizer.type: "AdamW" in the run, "SGD" now',)),
        ("scheduler.params.warmup_num_steps=4", ("scheduler.params.warmup_num_steps: 3 in the run, 4 now",)),
        ("scheduler=null", ('scheduler.type: "WarmupLR" in the run, not set now',)),
        ("seed=9", ("seed: 1234 in the run, 9 now",)),
        ("train_batch_size=8", ("train_batch_size: 4 in the run, 8 now", "gradient_accumulation_steps: 4")),
        ("train_micro_batch_size_per_gpu=2", ("train_micro_batch_size_per_gpu: 1 in the run, 2 now",)),
        ("model.heads=1", ("model.heads: 2 in the run, 1 now",)),
        ("data.validation_fraction=0.2", ("data.validation_fraction: 0.3 in the run, 0.2 now",)),
        ("data.vocabulary_size=265", ("data.vocabulary_size: 270 in the run, 265 now",)),
        ("bf16.enabled=true", ("bf16.enabled: false in the run, true now",)),
        ("gradient_clipping=1.0", ("gradient_clipping: 0.0 in the run, 1.0 now",)),
    ],
)
def test_a_run_is_not_resumed_with_settings_that_change_what_comes_out(
    finished: Path, corpus: Path, tmp_path: Path, override: str, parts: tuple[str, ...]
) -> None:
    path = config(corpus, tmp_path, run={"output": str(finished)})
    before = (finished / "config.json").read_bytes()
    refused(call("train", path, "--resume", "--set", override), "was started with other settings", *parts)
    assert (finished / "config.json").read_bytes() == before


def test_a_run_may_be_resumed_on_other_ranks_and_with_settings_that_change_nothing_of_it(
    finished: Path, corpus: Path, tmp_path: Path
) -> None:
    free = ["run.steps=99", "run.log_every=5", "zero_optimization.stage=1", "steps_per_print=3", "tensorboard={}"]
    settings = TrainSettings.load(config(corpus, tmp_path), free)
    require_unchanged(RunFolder(finished), settings.resolve(1, {"data": 1}))
    require_unchanged(RunFolder(finished), settings.resolve(2, {"data": 2}))
    require_unchanged(RunFolder(finished), TrainSettings.load(finished / "config.json").resolve(1, {"data": 1}))
    require_unchanged(RunFolder(tmp_path / "nothing"), settings.resolve(1))


def begun(finished: Path, copy: Path) -> None:
    shutil.copytree(finished, copy, ignore=shutil.ignore_patterns("global_step*", "latest", "model"))


@pytest.mark.full
def test_a_run_that_ended_before_its_first_checkpoint_is_started_again(finished, corpus, tmp_path, monkeypatch) -> None:
    begun(finished, tmp_path / "run")
    refused(call("train", config(corpus, tmp_path), "--resume"), "holds no checkpoint", "without --resume")
    # A machine that is said to do one operation per second is found to do more.
    monkeypatch.setattr("zeromesh.apps.train.loop.peak_flops", lambda device, dtype: 1.0)
    result = call("train", config(corpus, tmp_path), "--set", "steps_per_print=3", "--set", "comet.enabled=true")
    assert result.exit_code == 0, result.output
    assert "it is started again" in result.stdout
    assert numbers(tmp_path / "run") == numbers(finished)
    shares = [r["utilization"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert max(shares) == 1
    assert 'optimizer: {"type": "AdamW", "params": {"lr": 0.01}}' in result.stdout
    assert result.stderr.count("comet: ") == 1
    assert [line[:8] for line in result.stderr.splitlines() if line.startswith("update")] == ["update 3", "update 6"]
    assert not logging.getLogger("zeromesh").handlers


def test_monitors_show_the_losses_that_the_metrics_hold(corpus: Path, tmp_path: Path) -> None:
    monitor = json.dumps({"enabled": True, "output_path": str(tmp_path), "job_name": "job"})
    result = call("train", config(corpus, tmp_path), "--set", f"csv_monitor={monitor}")
    assert result.exit_code == 0, result.output
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for kind, name in (("train", "Train_Samples_train_loss"), ("validation", "Validation_Samples_loss")):
        rows = [line.split(",") for line in (tmp_path / "job" / f"{name}.csv").read_text().splitlines()[1:]]
        losses = [record["loss"] for record in records if record["kind"] == kind]
        assert losses
        assert [float(loss) for _, loss in rows] == pytest.approx(losses)


def test_the_log_is_shown_in_short_lines_while_a_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("zeromesh.somewhere")
    with shown_log(), shown_log():
        log.info("first\n%s", "x" * 1000)
        log.warning("mind")
        log.debug("detail")
    log.info("after")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["first", "x" * 197 + "...", "warning: mind"]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_log_is_shown_on_the_first_rank_only(rank, capsys, monkeypatch) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in (place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # where nobody listens, logging itself writes warnings
    with shown_log():
        logging.getLogger("zeromesh.somewhere").info("first")
        logging.getLogger("zeromesh.somewhere").warning("mind")
    assert capsys.readouterr().err.splitlines() == (["first", "warning: mind"] if rank == 0 else [])
    assert not logging.getLogger("zeromesh").handlers


def test_a_folder_with_weights_but_no_checkpoint_is_not_said_to_be_resumable(finished, corpus, tmp_path) -> None:
    shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    for arguments in ([], ["--resume"]):
        result = call("train", config(corpus, tmp_path), *arguments)
        refused(result, "choose another folder")
        assert "continue it with --resume" not in result.output
        assert "start the run without --resume" not in result.output


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (FloatingPointError, 1)])
def test_a_run_that_is_stopped_or_fails_says_what_was_kept_and_how_to_go_on(
    finished: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], code: int
) -> None:
    def stop(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr("zeromesh.apps.train.train_run.launch", stop)
    result = call("train", config(corpus, tmp_path))
    assert result.exit_code == code
    assert "has no checkpoint yet, and the same command starts from the beginning" in result.stderr
    assert "run.save_every = 3" in result.stderr
    shutil.rmtree(tmp_path / "run")
    interrupted(finished, tmp_path / "run")
    result = call("train", config(corpus, tmp_path), "--resume")
    assert result.exit_code == code
    assert "checkpoint global_step3; the same command with --resume continues from it" in result.stderr


@pytest.mark.full
def test_text_may_lie_around_the_folders_of_runs(corpus: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(corpus, project)
    for name in ("first", "second"):
        path = config(
            project, tmp_path, data={"suffixes": []}, run={"steps": 1, "output": str(project / "runs" / name)}
        )
        result = call("train", path)
        assert result.exit_code == 0, result.output
    assert "run.output is the data folder" in call("train", path, "--set", f"run.output={project}").output


def test_a_text_is_written_as_it_is(finished: Path) -> None:
    prompt = "x = a[:end:2]\t:warning: [bold]b[/bold]\r\n"
    result = call("sample", finished, prompt, "--tokens", "1")
    assert result.exit_code == 0, result.output
    assert result.stdout_bytes.decode().startswith(prompt)


@pytest.mark.full
def test_output_that_knows_no_more_than_ascii_ends_no_run(corpus: Path, tmp_path: Path) -> None:
    runner = CliRunner(charset="ascii")
    path = config(corpus, tmp_path, run={"steps": 1, "sample": {"prompts": ["naïve → ```"], "length": 3}})
    result = runner.invoke(app, ["train", str(path)])
    assert result.exit_code == 0, result.output
    assert "naïve → ```" in (tmp_path / "run" / "report.md").read_text("utf-8")
    result = runner.invoke(app, ["sample", str(tmp_path / "run"), "é→\udcc3", "--tokens", "3"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("??")


def test_sampling_from_what_is_no_finished_run_is_refused(finished: Path, tmp_path: Path) -> None:
    refused(call("sample", tmp_path, "x"), "holds no run", "run.output")
    shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("model"))
    refused(call("sample", tmp_path / "run", "x"), "has not finished", "--resume")
