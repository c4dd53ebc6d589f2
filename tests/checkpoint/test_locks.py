"""Two runs never write to one folder: the second is told which process has it, and where."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from run import sgd, start_engine, train_step
from test_train_cli import call, config
from zeromesh.apps.train.run_folder import RunFolder
from zeromesh.base.lock import LOCK, FolderInUse, locked
from zeromesh.comm.environment import shutdown

HOLD = """
import sys, time
from pathlib import Path
from zeromesh.base.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_folder_is_held_by_one_process_and_free_when_that_is_killed(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as other:
        words = f"process {other.pid} on {socket.gethostname()}, since "
        with pytest.raises(FolderInUse, match=words), locked(tmp_path):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
        with locked(tmp_path):
            assert (tmp_path / LOCK).exists()
    assert not any(tmp_path.iterdir())


def take(folder: str, counter: str) -> None:
    for _ in range(50):
        while True:
            try:
                with locked(Path(folder)):
                    value = int(Path(counter).read_text())
                    Path(counter).write_text(str(value + 1))
                break
            except FolderInUse:
                continue


def test_the_lock_holds_while_processes_come_and_go(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=take, args=(str(tmp_path / "folder"), str(counter))) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert counter.read_text() == "200"


def test_a_second_run_in_a_folder_is_refused_with_process_and_host(corpus: Path, tmp_path: Path) -> None:
    path = config(corpus, tmp_path)
    with held_elsewhere(tmp_path / "run") as other:
        result = call("train", path)
    words = " ".join(result.output.split())
    assert result.exit_code == 2, words
    assert f"is in use: process {other.pid} on {socket.gethostname()}" in words
    assert not RunFolder(tmp_path / "run").text.exists()


def test_a_save_beside_another_process_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    engine = start_engine(model, micro=2, optimizer=sgd(0.1))
    try:
        train_step(engine, engine(torch.ones(2, 4)).sum())
        draft = tmp_path / "global_step1.draft"
        with held_elsewhere(tmp_path) as other:
            draft.mkdir()  # of the other process
            with pytest.raises(
                FolderInUse, match=f"process {other.pid} on .* let each run save to a folder of its own"
            ):
                engine.save_checkpoint(tmp_path)
            assert draft.is_dir()
        engine.save_checkpoint(tmp_path)
        assert sorted(os.listdir(tmp_path)) == ["global_step1", "latest"]
    finally:
        engine.destroy()
        shutdown()
