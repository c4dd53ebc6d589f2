"""Runs that are told to end, or that cannot save, lose nothing."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

from run import sgd, start_engine, train_step
from test_train_cli import call, config
from zeromesh import Engine
from zeromesh.apps.train.goodput import read_times
from zeromesh.apps.train.run_folder import RunFolder
from zeromesh.apps.train.signals import Ended, forward_signals
from zeromesh.checkpoint import checkpoint_folder
from zeromesh.comm.environment import shutdown

TRAIN = [sys.executable, "-m", "zeromesh.apps.cli.main"]


def steps_so_far(run: RunFolder) -> int:
    return run.metrics.read_text().count('"train"') if run.metrics.exists() else 0


def wait_for_steps(run: RunFolder, process: subprocess.Popen[str], count: int) -> None:
    limit = time.monotonic() + 200
    while steps_so_far(run) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("prefix", "asynchronous"),
    [
        (["train"], False),
        pytest.param(
            ["launch", "--nproc", "2", "-m", "zeromesh.apps.cli.main", "train"], False, marks=pytest.mark.full
        ),
        pytest.param(["train"], True, marks=pytest.mark.full),
    ],
)
def test_sigusr1_saves_and_sigterm_saves_and_ends(
    prefix: list[str], asynchronous: bool, corpus: Path, tmp_path: Path
) -> None:
    run = {"steps": 100_000, "save_every": 0, "evaluate_every": 0, "ranks": 2}
    path = config(corpus, tmp_path, run=run, checkpoint={"asynchronous": asynchronous})
    run = RunFolder(tmp_path / "run")
    process = subprocess.Popen(
        [*TRAIN, *prefix, str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        wait_for_steps(run, process, 2)
        process.send_signal(signal.SIGUSR2)
        limit = time.monotonic() + 60
        while not any("health" in one for one in read_times(run.times)[0]):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < limit
            time.sleep(0.05)
        assert run.last_checkpoint is None
        process.send_signal(signal.SIGUSR2)
        process.send_signal(signal.SIGUSR1)
        limit = time.monotonic() + 60
        while run.last_checkpoint is None:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < limit
            time.sleep(0.05)
        saved = run.last_checkpoint
        while sum("health" in one for one in read_times(run.times)[0]) < 2:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < limit
            time.sleep(0.05)
        wait_for_steps(run, process, steps_so_far(run) + 2)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 75, output
    assert "ended by a signal" in output
    assert run.last_checkpoint not in (None, saved)


def test_requests_during_an_agreement_count_at_the_next_update() -> None:
    engine = start_engine(nn.Linear(2, 1), optimizer=sgd(0.1))

    def update() -> int:
        train_step(engine, engine(torch.ones(1, 2)).sum())
        return engine.asked

    complete = engine.sharded.complete

    def signalled(*notes: Any) -> Any:
        engine.ask(2)
        return complete(*notes)

    try:
        with patch.object(engine.sharded, "complete", signalled):
            assert update() == 0
        assert update() == 2
        assert update() == 0
    finally:
        engine.destroy()
        shutdown()


@pytest.mark.some(1)
@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_a_save_that_fails_is_tried_again_at_the_next(policy, corpus, tmp_path, caplog) -> None:
    path = config(corpus, tmp_path, checkpoint={"on_failure": policy}, run={"save_every": 2, "ranks": 1})
    save, calls = Engine.save_checkpoint, []

    def full_once(engine: Engine, *args: Any, **kwargs: Any) -> Path:
        calls.append(engine.global_steps)
        if engine.global_steps == 2:
            raise OSError(errno.ENOSPC, "a checkpoint needs 1,000 bytes, where 10 are free")
        return save(engine, *args, **kwargs)

    with patch.object(Engine, "save_checkpoint", full_once):
        result = call("train", path)
    if policy == "stop":
        assert result.exit_code != 0
        assert calls == [2]
    else:
        assert result.exit_code == 0, result.output
        assert calls == [2, 4, 6]
        assert (
            "Training continues, and the next save tries again; there is no checkpoint yet"
            in caplog.text + result.output
        )
        assert RunFolder(tmp_path / "run").last_checkpoint == "global_step6"


@pytest.mark.parametrize(
    ("policy", "full_at", "ends"),
    [
        ("continue", 2, False),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("continue", 6, True), ("stop", 2, True))),
    ],
)
def test_an_asynchronous_save_that_fails_is_tried_again_at_the_next(policy, full_at, ends, corpus, tmp_path) -> None:
    settings = {"asynchronous": True, "on_failure": policy}
    path = config(corpus, tmp_path, checkpoint=settings, run={"save_every": 2, "ranks": 1})
    commit, calls = checkpoint_folder.commit, []

    def full_once(draft: Path, final: Path) -> None:
        calls.append(final.name)
        if final.name == f"global_step{full_at}":
            raise OSError(errno.ENOSPC, "No space left on device")
        commit(draft, final)

    with patch.object(checkpoint_folder, "commit", full_once):
        result = call("train", path)
    assert (result.exit_code != 0) == ends, result.output
    saved = {f"global_step{step}" for step in (2, 4, 6) if step != full_at and (policy == "continue" or step < full_at)}
    folder = tmp_path / "run" / "checkpoints"
    assert {one.name for one in folder.iterdir() if one.is_dir()} == saved
    assert calls == [f"global_step{step}" for step in ((2, 4, 6) if policy == "continue" else (2,))]


def test_a_folder_of_checkpoints_that_cannot_be_written_to_is_refused_at_the_start(corpus, tmp_path) -> None:
    path = config(corpus, tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file in the way")
    result = call("train", path)
    assert result.exit_code == 2, result.output
    assert "cannot be written to" in " ".join(result.output.split())


def test_a_launcher_that_ends_a_saved_run_does_not_change_its_status() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(Ended), forward_signals(Mock()):
            raise Ended
        os.kill(os.getpid(), signal.SIGTERM)  # as srun does to the others when the first rank has ended
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
