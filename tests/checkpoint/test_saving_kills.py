"""A save that is killed at any of its file operations leaves a checkpoint that loads, and a folder that saves on."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zeromesh
from compare import assert_same
from harness import run_command, run_ranks
from runs import config, seed_everything, start, train
from zeromesh.checkpoint import checkpoint_folder as folders
from zeromesh.checkpoint.copies.memory_files import MEMORY

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
"""Audit events of what changes a folder, or reads it."""


class Killed(BaseException):
    """Ends a save as SIGKILL would; no handler of exceptions sees it."""


class Killer:
    """Raises before operation number ``at`` below a folder and all later ones, in all threads, as SIGKILL would.

    Audit hooks stay for ever, so there is one a process.
    """

    def __init__(self) -> None:
        self.root, self.at, self.seen = "", 0, 0
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.root and event in OPERATIONS and any(str(one).startswith(self.root) for one in arguments[:2]):
            self.seen += 1
            if self.seen >= self.at:
                raise Killed

    def kills(self, root: Path, at: int, engine: Any, tag: str) -> bool:
        self.root, self.at, self.seen = str(root), at, 0
        try:
            engine.save_checkpoint(root, tag=tag)
        except Killed:
            return True
        finally:
            self.root = ""
        return False


class SimplySaved:
    """An engine whose save is over when the call returns, killed or not."""

    def __init__(self, engine: zeromesh.Engine) -> None:
        self.engine = engine

    def save_checkpoint(self, root: Path, tag: str) -> None:
        try:
            self.engine.save_checkpoint(root, tag=tag)
        finally:  # also if the kill met this thread: the one that writes must not delete what is loaded next
            try:
                self.engine.wait_for_checkpoint()
            except RuntimeError as error:
                if "Killed" not in str(error):
                    raise
                raise Killed from error


def killed_at_every_operation(folder: str, tag: str, asynchronous: bool = False) -> int:
    killer, at = Killer(), 0
    engine = start(1, {**config(0, mesh="1"), "checkpoint": {"asynchronous": asynchronous, "keep_last": 1}})
    again = start(2, {**config(0, mesh="1"), "checkpoint": {"keep_last": 1}})
    seed_everything(0)
    train(engine, 1)
    killed = True
    while killed:
        at += 1
        root = Path(folder) / str(at)
        engine.save_checkpoint(root, tag="step1")
        engine.wait_for_checkpoint()
        before = engine.gathered_state_dict()
        train(engine, 1)
        after = engine.gathered_state_dict()
        killed = killer.kills(root, at, SimplySaved(engine), tag)
        assert again.load_checkpoint(root)[0] is not None, at
        found = again.gathered_state_dict()
        assert_same(found, before if torch.equal(found["scale"], before["scale"]) else after)
        engine.save_checkpoint(root, tag=tag)
        engine.wait_for_checkpoint()
        assert sorted(one.name for one in root.iterdir()) == ["latest", tag], at
        assert folders.latest(root) == tag
        again.load_checkpoint(root)
        assert_same(again.gathered_state_dict(), after)
    return at


@pytest.mark.some(1)
@pytest.mark.parametrize("tag", ["step1", "step2"])
def test_every_kill_leaves_a_checkpoint_and_a_folder_that_saves_on(tag: str, tmp_path: Path) -> None:
    assert run_ranks(killed_at_every_operation, 1, str(tmp_path), tag)[0] > 15


@pytest.mark.full
@pytest.mark.parametrize("mode", ["asynchronous", "copies"])
@pytest.mark.parametrize("seed", range(10))
def test_of_a_thousand_kills_none_loses_or_changes_a_step(
    seed: int, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEMORY, str(tmp_path))
    command = [sys.executable, Path(__file__).with_name("kill_soak.py"), tmp_path, "50", str(seed), mode]
    finished = run_command(command, timeout=300)
    assert finished.returncode == 0, finished.stdout
    assert "50 kills" in finished.stdout
