"""Folders of checkpoints: crashes, damage, what is found in them and what goes away."""

from __future__ import annotations

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

from harness import run_ranks, spawn_ranks
from runs import assert_same, config, everything, seed_everything, start, train
from zeromesh.checkpoint import boxes
from zeromesh.checkpoint import folder as folders
from zeromesh.saving import save

# Runs that were cut off.


def continue_after_a_crash(folder: str) -> None:
    root = Path(folder)
    engine = start(1, config(0, mesh="1"))
    seed_everything(0)
    train(engine, 1)
    engine.save_checkpoint(root, tag="tag")
    shutil.copytree(root / "tag", root / "tag.old")
    (root / "tag.old" / "more").mkdir()
    engine.save_checkpoint(root, tag="tag")
    assert sorted(path.name for path in root.iterdir()) == ["latest", "tag"]
    (root / "tag").rename(root / "tag.old")
    shutil.copytree(root / "tag.old", root / "tag.draft")
    again = start(2, config(0, mesh="1"))
    assert again.load_checkpoint(root)[0] == f"{folder}/tag.old"
    assert_same(again.gathered_state_dict(), engine.gathered_state_dict())
    again.save_checkpoint(root, tag="tag")
    assert sorted(path.name for path in root.iterdir()) == ["latest", "tag"]
    assert again.load_checkpoint(root)[0] == f"{folder}/tag"


def test_a_process_that_dies_as_it_replaces_a_checkpoint_leaves_one_that_can_be_loaded_and_replaced(
    tmp_path: Path,
) -> None:
    run_ranks(continue_after_a_crash, 1, str(tmp_path))


def write_manifest(folder: Path, when: int) -> None:
    folder.mkdir(parents=True)
    folders.write_manifest(folder, {"shards": []})
    os.utime(folder / folders.MANIFEST, (when, when))


@pytest.mark.parametrize(("text", "problem"), [("", "is empty"), ("gone", "names 'gone', which is no complete")])
def test_where_the_latest_is_not_there_the_newest_complete_one_is_taken(
    text: str, problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest").write_text(text)
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "manifest.json").write_text('{"format": 2, "shards": [')
    assert folders.latest(tmp_path) == (text or None), "there is none to take instead"
    for when, tag in enumerate(["first", "third.old", "second", "second.old", "fourth.draft"]):
        write_manifest(tmp_path / tag, 1000 + when)
    os.utime(tmp_path / "third.old" / "manifest.json", (2000, 2000))
    assert not caplog.messages
    assert folders.latest(tmp_path) == "third"
    assert folders.locate(tmp_path, "third") == tmp_path / "third.old"
    assert folders.locate(tmp_path, "second") == tmp_path / "second"
    assert problem in caplog.messages[0]
    assert "'third'" in caplog.messages[0]
    (tmp_path / "latest").write_text("third")
    caplog.clear()
    assert folders.latest(tmp_path) == "third"
    assert not caplog.messages
    (tmp_path / "latest").unlink()
    assert folders.latest(tmp_path) is None


def refuse_tags(folder: str) -> None:
    engine = start(1, config(1))
    for tag in ("latest", "mine.old", "mine.draft"):
        with pytest.raises(ValueError, match=f"cannot have the tag '{tag}'"):
            engine.save_checkpoint(folder, tag=tag)
    assert not list(Path(folder).iterdir())


def test_names_of_the_folders_own_files_are_no_tags(tmp_path: Path) -> None:
    run_ranks(refuse_tags, 2, str(tmp_path))


# What goes away.


def save_series(folder: str) -> None:
    root = Path(folder)
    engine = start(1, config(1) | {"checkpoint": {"keep_last": 2}})
    seed_everything(engine.mesh.rank)
    world = engine.mesh.group("world")

    def save(tag: str | None, latest: bool = True) -> set[str]:
        engine.save_checkpoint(root, tag=tag, save_latest=latest)
        world.exchange(torch.zeros(1))
        found = {path.name for path in root.iterdir() if path.is_dir()}
        world.exchange(torch.zeros(1))
        return found

    assert save("best") == {"best"}
    assert save("global_step") == {"best", "global_step"}
    kept = {"best", "global_step"}
    if engine.mesh.rank == 0:  # not ours, or not whole
        (root / "global_step0").mkdir()
        (root / "global_step9").mkdir()
        (root / "global_step9" / "manifest.json").write_text('{"name": "an app"}')
    kept |= {"global_step0", "global_step9"}
    train(engine, 1)
    assert save(None) == kept | {"global_step1"}
    train(engine, 1)
    assert save(None) == kept | {"global_step1", "global_step2"}
    train(engine, 1)
    assert save(None, latest=False) == kept | {"global_step1", "global_step2", "global_step3"}, (
        "latest names the second"
    )
    train(engine, 1)
    assert save(None) == kept | {"global_step3", "global_step4"}
    assert save("epoch1") == kept | {"global_step3", "global_step4", "epoch1"}
    # Back to an earlier step: what counts is when it was written.
    engine.load_checkpoint(root, tag="global_step3")
    engine.global_steps = 2
    assert save(None) == kept | {"global_step4", "global_step2", "epoch1"}
    assert start(2, config(3)).load_checkpoint(root)[0] == str(root / "global_step2")


def test_of_each_series_the_last_are_kept_and_nothing_else_is_deleted(tmp_path: Path) -> None:
    run_ranks(save_series, 2, str(tmp_path))


def test_an_old_one_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        write_manifest(tmp_path / f"step{number}", 1000 + number)
    folders.write_latest(tmp_path, "step2")

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    folders.keep_last(tmp_path, "step2", 1)
    assert "could not remove old checkpoints" in caplog.messages[0]
    assert not (tmp_path / "step1" / "manifest.json").exists(), "what is half removed is no checkpoint"
    assert (tmp_path / "step2" / "manifest.json").exists()


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
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
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


def die(folder: str, where: str) -> None:
    engine = start(1, config(3))
    seed_everything(engine.mesh.rank)
    train(engine, 1)
    engine.save_checkpoint(folder)
    train(engine, 1)

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if (where == "shard") == (engine.mesh.rank == 1):
        setattr(*((boxes, "_write") if where == "shard" else (save, "commit")), kill)
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


@pytest.mark.parametrize("where", ["shard", "commit"])
def test_after_a_kill_while_it_saves_a_run_goes_on_from_the_checkpoint_before(where: str, tmp_path: Path) -> None:
    outcomes = spawn_ranks(die, 2, str(tmp_path), where)
    assert sum("SIGKILL" in outcome.text for outcome in outcomes) == 1
    assert (tmp_path / "latest").read_text() == "global_step1"
    left = (tmp_path / "global_step2.draft").is_dir()
    assert left == (where == "commit"), "the first rank cleans up, unless it is the one that died"
    run_ranks(look, 2, str(tmp_path))


# Checkpoints that are damaged.


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


SHARD = "rank_00001.safetensors"
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped": lambda folder: flip(folder / SHARD, -100),
    "cut off": lambda folder: os.truncate(folder / SHARD, 2000),
    "missing": lambda folder: (folder / SHARD).unlink(),
    "pickle": lambda folder: torch.save({"a": torch.zeros(3000)}, folder / SHARD),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "manifest cut off": lambda folder: os.truncate(folder / "manifest.json", 500),
    "manifest altered": lambda folder: flip(folder / "manifest.json", -90),
}
WORDS = {
    "flipped": ("not what was written (SHA-256 differs): ", f"{SHARD}, of which random/1[0:"),
    "cut off": (f"{SHARD} is cut off after 2,000 of ", "lacks "),
    "missing": (f"{SHARD} is missing, which held ", "parameter/"),
    "pickle": (f"{SHARD} is cut off after", "lacks"),
    "no manifest": ("no complete checkpoint: manifest.json is missing", ""),
    "manifest cut off": ("incomplete save: manifest.json is no whole JSON file", ""),
    "manifest altered": ("manifest.json is ", ""),
}


def test_damage_is_named_an_older_checkpoint_is_offered_and_nothing_is_loaded(tmp_path: Path) -> None:
    ranks = run_ranks(load_damaged, 2, str(tmp_path))
    for name, words in WORDS.items():
        told = [found[name] for found in ranks if "could not" not in found[name]]
        assert told, "a rank says what it is"
        for text in told:
            assert all(word in text for word in words), text
            assert "the newest other one is 'older': load it with tag='older'" in text


# Folders that are not the same on all ranks.


def load_from_own_folders(folder: str) -> dict[str, str]:
    engine = start(1, config(1, mesh="3"))
    rank, root = engine.mesh.rank, Path(folder)
    for tag in ("first", "second"):
        engine.save_checkpoint(root / "all", tag=tag)
    world = engine.mesh.group("world")
    world.exchange(torch.zeros(1))
    own = root / str(rank)
    shutil.copytree(root / "all", own)
    before = everything(engine)
    found = {}

    def fails(name: str, tag: str | None = None) -> None:
        with pytest.raises((ValueError, OSError, RuntimeError)) as caught:
            engine.load_checkpoint(own, tag)
        found[name] = f"{type(caught.value).__name__}: {caught.value}"

    if rank == 1:
        (own / "latest").write_text("first")
    fails("other")
    if rank == 1:
        (own / "latest").unlink()
    fails("none")
    fails("tags", tag="first" if rank else "second")
    if rank == 1:
        (own / "latest").write_bytes(b"\xff\xfe")
    fails("unreadable")
    if rank == 1:
        (own / "latest").write_text("second")
        (own / "second" / "manifest.json").unlink()
    fails("manifest", tag="second")
    assert_same(everything(engine) | {"others": before["others"]}, before)
    engine.load_checkpoint(own, tag="first")
    return found


def test_ranks_that_see_different_folders_all_fail_and_say_what_they_see(tmp_path: Path) -> None:
    first, second, third = run_ranks(load_from_own_folders, 3, str(tmp_path))
    for found in (first, second, third):
        assert found["other"].startswith("ValueError: the ranks would load different checkpoints")
        assert "by rank, 0, 2: second; 1: first; all ranks need" in found["other"]
        assert "by rank, 0, 2: second; 1: none;" in found["none"]
        assert "by rank, 0: second; 1, 2: first;" in found["tags"]
    for found in (first, third):
        assert found["unreadable"].startswith("RuntimeError: rank 1 could not find the latest checkpoint")
        assert found["manifest"].startswith("RuntimeError: rank 1 could not open the checkpoint")
    assert second["unreadable"].startswith("UnicodeDecodeError")
    assert second["manifest"].startswith("FileNotFoundError")
    assert "is no complete checkpoint" in second["manifest"]
