"""Asynchronous saves that fail tell so at the next step, and kills at any moment leave a checkpoint that loads."""

import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import zeromesh
from compare import assert_same
from harness import on_ranks, run_ranks, spawn_ranks
from runs import MIXTURE, config, seed_everything, start, train
from test_saving_beside import held_back
from zeromesh.checkpoint import checkpoint_folder as folders
from zeromesh.checkpoint.copies import background


def settings(on_failure: str = "continue", mesh: str = "2") -> dict[str, Any]:
    return {**config(3, mesh=mesh), "checkpoint": {"asynchronous": True, "on_failure": on_failure}}


def begin(root: Path, on_failure: str = "continue", mesh: str = "2") -> tuple[zeromesh.Engine, dict[str, torch.Tensor]]:
    """Return an engine that has saved its first update, and that state."""
    engine = start(1, settings(on_failure, mesh))
    seed_everything(engine.mesh.rank)
    train(engine, 1)
    engine.save_checkpoint(root)
    engine.wait_for_checkpoint()
    return engine, engine.gathered_state_dict()


def ended(engine: zeromesh.Engine) -> None:
    """Wait until the writers of all ranks have ended, so that the next step knows what came of them."""
    engine._state.background._thread.join()
    engine.mesh.group("world").exchange(torch.zeros(1))


def message(caught: Any) -> str:
    return f"{type(caught.value).__name__}: {caught.value}"


# Writes that fail.


def no_space(root: Path, rank: int, engine: zeromesh.Engine) -> None:
    """Save the present update, of which rank 1 can write 2,000 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    tell = background.Failures.tell

    def tell_without_limit(*arguments: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)  # the store of the ranks of a test is a file
        tell(*arguments)

    with held_back() as gate, patch.object(background.Failures, "tell", tell_without_limit):
        engine.save_checkpoint(root)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        try:
            gate.set()
            ended(engine)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def removed(root: Path, rank: int, engine: zeromesh.Engine) -> None:
    """Save the present update to a folder that goes away."""
    with held_back() as gate:
        engine.save_checkpoint(root)
        engine.mesh.group("world").exchange(torch.zeros(1))
        if rank == 0:
            shutil.rmtree(root / "global_step2.draft")
        engine.mesh.group("world").exchange(torch.zeros(1))
        gate.set()
        ended(engine)


def silent(root: Path, rank: int, engine: zeromesh.Engine) -> None:
    """Save the present update, of which rank 1 writes nothing until the others have given it up."""
    world = engine.mesh.group("world")
    with patch.object(background, "QUIET", 0.2):
        if rank == 1:
            with held_back():
                engine.save_checkpoint(root)
                world.exchange(torch.zeros(1))
        else:
            engine.save_checkpoint(root)
            engine._state.background._thread.join()
            world.exchange(torch.zeros(1))
        ended(engine)


FAULTS: dict[str, Callable[[Path, int, zeromesh.Engine], None]] = {
    "no space": no_space,
    "removed": removed,
    "silent": silent,
}


def fail_and_go_on(folder: str) -> dict[str, str]:
    found = {}
    for name, fault in FAULTS.items():
        root = Path(folder) / name
        engine, before = begin(root)
        rank, world = engine.mesh.rank, engine.mesh.group("world")
        train(engine, 1)
        fault(root, rank, engine)
        expected = engine._state.background.failed()
        assert expected or rank == 1, "the first rank knows in any case"
        train(engine, 1)
        assert not engine._state.background.failed(), "the ranks have agreed on it"
        with pytest.raises((OSError, RuntimeError)) as caught:
            engine.wait_for_checkpoint()
        found[name] = message(caught)
        world.exchange(torch.zeros(1))
        assert sorted(one.name for one in root.iterdir()) == ["global_step1", "latest"], "no draft is left"
        again = start(2, config(1))
        assert again.load_checkpoint(root)[0] == str(root / "global_step1")
        assert_same(again.gathered_state_dict(), before)
        # The next save is another try.
        engine.save_checkpoint(root)
        engine.wait_for_checkpoint()
        assert folders.latest(root) == "global_step3"
        engine.destroy()
    return found


def test_a_failed_save_leaves_the_one_before_and_the_next_save_is_another_try(tmp_path: Path) -> None:
    first, second = run_ranks(fail_and_go_on, 2, str(tmp_path))
    step = tmp_path / "no space" / "global_step2"
    reason = f"the checkpoint {step} was not written (File too large); earlier ones are as they were"
    assert first["no space"].startswith("SaveFailed: [Errno 5] rank 1 could not save the checkpoint: [Errno 27] ")
    assert second["no space"].startswith(f"SaveFailed: [Errno 27] {reason}")
    assert "raise the limit" in first["no space"]
    for text in (first["removed"], second["removed"]):
        assert "global_step2 was not written (No such file or directory: " in text
        assert "let nothing delete the folder while a checkpoint is written" in text
    assert "rank 1 has written nothing to it for 0 s" in first["silent"]


ASKS: dict[str, Callable[[zeromesh.Engine, Path], object]] = {
    "step": lambda engine, root: train(engine, 1),
    "save": lambda engine, root: engine.save_checkpoint(root, "other"),
    "load": lambda engine, root: engine.load_checkpoint(root),
}


@on_ranks(2)
def test_a_failed_save_is_raised_by_the_next_step_save_or_load_on_all_ranks(tmp_path: Path) -> None:
    texts = []
    for name, ask in ASKS.items():
        root = tmp_path / name
        engine, _ = begin(root, "stop")
        train(engine, 1)
        no_space(root, engine.mesh.rank, engine)
        with pytest.raises((OSError, RuntimeError)) as caught:
            ask(engine, root)
        texts.append(message(caught))
        train(engine, 1)
        engine.save_checkpoint(root)
        assert engine.wait_for_checkpoint() == root / f"global_step{engine.global_steps}"
        assert engine.global_steps == 3 + (name == "step")
        engine.destroy()
    assert len(texts) == 3
    assert all("raise the limit (`ulimit -f`), or save from more ranks" in text for text in texts)


@on_ranks(1)
def test_the_end_of_an_engine_raises_what_nobody_has_told(tmp_path: Path) -> None:
    folder = str(tmp_path)
    engine, _ = begin(Path(folder), mesh="1")
    train(engine, 1)
    no_space(Path(folder), 1, engine)
    with pytest.raises(OSError, match="was not written"):
        engine.destroy()


@on_ranks(1)
def test_a_copy_that_does_not_fit_into_memory_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path)
    engine = start(1, settings(mesh="1"))
    little = patch.object(background, "memory", lambda: {"available_bytes": 1000})
    with little, pytest.raises(OSError, match=r"of which 1,000 are available; set checkpoint.asynchronous to false"):
        engine.save_checkpoint(folder)
    assert list(Path(folder).iterdir()) == []
    assert engine.save_checkpoint(folder) == engine.wait_for_checkpoint()


# Kills.

STEPS = 30


def train_until_killed(folder: str, seed: int, mesh: str) -> None:
    root = Path(folder)
    engine = start(1, {**config(3, mesh=mesh), "checkpoint": {"asynchronous": True, "keep_last": 1}})
    seed_everything(engine.mesh.rank)
    train(engine, 1)
    engine.save_checkpoint(root)
    engine.wait_for_checkpoint()
    if engine.mesh.rank == seed % 2:
        moment = random.Random(seed).uniform(0.0, 0.5)

        def kill() -> None:
            time.sleep(moment)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
    for _ in range(STEPS):
        train(engine, 1)
        engine.save_checkpoint(root)
    time.sleep(60)


def follow(folder: str, mesh: str) -> int:
    """Load what is there, compare it with the undisturbed run, and go on saving."""
    root = Path(folder)
    again = start(2, settings(mesh=mesh))
    path, _ = again.load_checkpoint(root)
    assert path is not None
    engine = start(1, config(3, mesh=mesh))
    seed_everything(engine.mesh.rank)
    train(engine, again.global_steps)
    assert_same(again.gathered_state_dict(), engine.gathered_state_dict())
    again.save_checkpoint(root, tag=f"global_step{STEPS + 1}")
    again.wait_for_checkpoint()
    return again.global_steps


@pytest.mark.full
@pytest.mark.parametrize(
    ("seed", "mesh"), [*((seed, "2") for seed in range(40)), *((seed, MIXTURE) for seed in range(10))]
)
def test_a_kill_at_a_random_moment_leaves_a_checkpoint_to_go_on_from(seed: int, mesh: str, tmp_path: Path) -> None:
    outcomes = spawn_ranks(train_until_killed, 2, str(tmp_path), seed, mesh, timeout=45)
    assert "SIGKILL" in outcomes[seed % 2].text
    assert run_ranks(follow, 2, str(tmp_path), mesh)[0] >= 1
