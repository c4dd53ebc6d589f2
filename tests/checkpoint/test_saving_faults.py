"""Saves that fail or are killed leave what was there; checkpoints that are damaged are not loaded."""

import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare import assert_same
from harness import run_ranks, spawn_ranks
from runs import config, everything, seed_everything, start, train
from zeromesh.checkpoint import boxes
from zeromesh.checkpoint import checkpoint_folder as folders

# Saves that fail.


def fail_to_save(folder: str) -> dict[str, str]:
    root = Path(folder)
    engine = start(1, config(3))
    rank, world = engine.mesh.rank, engine.mesh.group("world")
    seed_everything(rank)
    train(engine, 1)
    engine.save_checkpoint(root)
    before = engine.gathered_state_dict()
    train(engine, 1)
    found = {}

    def fails(name: str, path: Path = root) -> None:
        with pytest.raises((OSError, RuntimeError)) as caught:
            engine.save_checkpoint(path)
        found[name] = f"{type(caught.value).__name__}: {caught.value}"
        world.exchange(torch.zeros(1))
        assert sorted(one.name for one in root.iterdir()) == ["global_step1", "latest"], "no draft is left"
        again = start(2, config(1))
        assert again.load_checkpoint(root)[0] == str(root / "global_step1")
        assert_same(again.gathered_state_dict(), before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        fails("full")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # also less than signs of life take
    try:
        fails("midway")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    blocked = root.parent / "file"
    blocked.write_text("in the way")
    fails("in the way", blocked)
    train(engine, 1)
    engine.save_checkpoint(root)
    assert folders.latest(root) == "global_step3", "training and saving go on"
    return found


def test_a_save_that_fails_leaves_the_one_before_as_it_was_and_the_run_goes_on(tmp_path: Path) -> None:
    first, second = run_ranks(fail_to_save, 2, str(tmp_path / "saved"))
    needs = r"OSError: \[Errno 28\] a checkpoint needs [\d,]+ bytes in .*saved, where 1,000 are free; make room"
    assert re.match(needs, first["full"])
    assert second["full"].startswith("RuntimeError: rank 0 could not save the checkpoint")
    assert first["midway"].startswith("RuntimeError: rank 1 could not save the checkpoint")
    assert second["midway"].startswith("OSError: [Errno 27]")
    assert "cannot write a checkpoint to" in first["in the way"]
    assert "save to a folder that can be written to" in first["in the way"]


def save_apart(folder: str) -> list[str]:
    engine = start(1, config(3))
    own = Path(folder) / str(engine.mesh.rank)
    found = []
    for stale in (False, True):
        if stale:
            (own / "global_step0.draft").mkdir(parents=True, exist_ok=True)
        with pytest.raises((OSError, RuntimeError)) as caught:
            engine.save_checkpoint(own)
        found.append(str(caught.value))
        assert not (own / "global_step0").exists()
    return found


def test_ranks_that_save_to_different_folders_are_told(tmp_path: Path) -> None:
    first, second = run_ranks(save_apart, 2, str(tmp_path))
    assert "rank 1 does not see" in second[0]
    assert "save to a folder that all ranks see" in second[0]
    assert "sees the files of 1 of 2 ranks" in first[1]


def die(folder: str, where: str) -> None:
    engine = start(1, config(3))
    seed_everything(engine.mesh.rank)
    train(engine, 1)
    engine.save_checkpoint(folder)
    train(engine, 1)

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if (where == "shard") == (engine.mesh.rank == 1):
        setattr(*((boxes, "dtype_name") if where == "shard" else (folders, "commit")), kill)
    engine.save_checkpoint(folder)


def look(folder: str) -> None:
    engine = start(1, config(3))
    seed_everything(engine.mesh.rank)
    train(engine, 1)
    expected = engine.gathered_state_dict()
    again = start(2, config(3))
    assert again.load_checkpoint(folder)[0] == f"{folder}/global_step1"
    assert_same(again.gathered_state_dict(), expected)
    train(again, 1)
    again.save_checkpoint(folder)
    engine.mesh.group("world").exchange(torch.zeros(1))
    assert sorted(path.name for path in Path(folder).iterdir()) == ["global_step1", "global_step2", "latest"]


@pytest.mark.full
@pytest.mark.parametrize("where", ["shard", "commit"])
def test_after_a_kill_while_it_saves_a_run_goes_on_from_the_checkpoint_before(where: str, tmp_path: Path) -> None:
    outcomes = spawn_ranks(die, 2, str(tmp_path), where)
    assert sum("SIGKILL" in outcome.text for outcome in outcomes) == 1
    assert (tmp_path / "latest").read_text() == "global_step1"
    left = (tmp_path / "global_step2.draft").is_dir()
    assert left == (where == "commit"), "the first rank cleans up, unless it is the one that died"
    run_ranks(look, 2, str(tmp_path))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)


def load_damaged(folder: str) -> dict[str, str]:
    root = Path(folder)
    engine = start(1, config(3))
    rank, world = engine.mesh.rank, engine.mesh.group("world")
    seed_everything(rank)
    train(engine, 1)
    engine.save_checkpoint(root / "whole", tag="older")
    engine.save_checkpoint(root / "whole", tag="newer")
    before = everything(engine)
    found = {}
    for name, damage in DAMAGES.items():
        if rank == 0:
            shutil.copytree(root / "whole", root / name)
            damage(root / name / "newer")
        world.exchange(torch.zeros(1))
        with pytest.raises((ValueError, OSError, RuntimeError)) as caught:
            engine.load_checkpoint(root / name, tag="newer")
        found[name] = f"{type(caught.value).__name__}: {caught.value}"
        assert_same(everything(engine) | {"others": before["others"]}, before)
    return found


SHARD, PART = "rank_00001.safetensors", "rank_00001.jsonl"
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped": lambda folder: flip(folder / SHARD, -100),
    "cut off": lambda folder: os.truncate(folder / SHARD, 2000),
    "missing": lambda folder: (folder / SHARD).unlink(),
    "pickle": lambda folder: torch.save({"a": torch.zeros(3000)}, folder / SHARD),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "manifest cut off": lambda folder: os.truncate(folder / "manifest.json", 500),
    "manifest altered": lambda folder: flip(folder / "manifest.json", -90),
    "part altered": lambda folder: flip(folder / PART, -90),
    "part cut off": lambda folder: os.truncate(folder / PART, 300),
    "part missing": lambda folder: (folder / PART).unlink(),
    "part of another": lambda folder: shutil.copy(folder / "rank_00000.jsonl", folder / PART),
}
WORDS = {
    "flipped": ("not what was written (SHA-256 differs): ", f"{SHARD}, of which random/1[0:"),
    "cut off": (f"{SHARD} is cut off after 2,000 of ", "lacks "),
    "missing": (f"{SHARD} is missing, which held ", "parameter/"),
    "pickle": (f"{SHARD} is cut off after", "lacks"),
    "no manifest": ("not a complete checkpoint: manifest.json is missing", ""),
    "manifest cut off": ("incomplete save: manifest.json is not a complete JSON file", ""),
    "manifest altered": ("manifest.json is ", ""),
    "part altered": (f"{PART} is not the file that was written", "SHA-256"),
    "part cut off": (f"{PART} is not the file that was written", "SHA-256"),
    "part missing": (f"{PART} is missing, which describes {SHARD}", ""),
    "part of another": (f"{PART} is not the file that was written", "SHA-256"),
}


def test_damage_is_named_an_older_checkpoint_is_offered_and_nothing_is_loaded(tmp_path: Path) -> None:
    ranks = run_ranks(load_damaged, 2, str(tmp_path))
    for name, words in WORDS.items():
        told = [found[name] for found in ranks if "could not" not in found[name]]
        assert told, "a rank says what it is"
        for text in told:
            assert all(word in text for word in words), text
            assert "the newest other one is 'older': load it with tag='older'" in text
