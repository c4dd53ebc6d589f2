"""Folders of checkpoints: what is found in them, also after a crash, and what goes away."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import manifests
from commands import call
from compare import assert_same
from harness import on_ranks, run_ranks
from runs import config, everything, seed_everything, start, train
from zeromesh.apps.train.run_folder import RunFolder
from zeromesh.checkpoint import checkpoint_folder as folders
from zeromesh.checkpoint.packing import pack, unpack

# Runs that were cut off.


@on_ranks(1)
def test_a_process_that_dies_as_it_replaces_a_checkpoint_leaves_one_that_can_be_loaded_and_replaced(tmp_path) -> None:
    folder = str(tmp_path)
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


def write_manifest(folder: Path, when: int) -> None:
    folder.mkdir(parents=True)
    manifests.write_manifest(folder, {"shards": []})
    os.utime(folder / folders.MANIFEST, (when, when))


@pytest.mark.parametrize(("text", "problem"), [("", "is empty"), ("gone", "names 'gone', which is not a complete")])
def test_the_newest_complete_checkpoint_is_taken_if_latest_is_gone(text, problem, tmp_path, caplog) -> None:
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
    (tmp_path / "latest").write_bytes(b"\xff\xfe\x00")
    newest = folders.latest(tmp_path)
    assert newest is not None
    (tmp_path / "latest").unlink()
    assert folders.latest(tmp_path) == newest
    assert folders.latest(tmp_path / "nothing") is None


@on_ranks(2)
def test_names_of_the_folders_own_files_are_no_tags(tmp_path: Path) -> None:
    folder = str(tmp_path)
    engine = start(1, config(1))
    for tag in ("latest", "mine.old", "mine.draft", ".", "..", "../beside", "a/b", str(Path(folder).parent / "beside")):
        with pytest.raises(ValueError, match=f"cannot have the tag '{re.escape(tag)}'"):
            engine.save_checkpoint(folder, tag=tag)
    assert not list(Path(folder).iterdir())
    engine.mesh.group("world").exchange(torch.zeros(1))
    users = [Path(folder) / name for name in ("source", "data.old", "work.draft")]
    if engine.mesh.rank == 0:
        for path in users:
            path.mkdir()
            (path / "precious.py").write_text("x = 1")
    engine.mesh.group("world").exchange(torch.zeros(1))
    for tag in ("source", "data", "work"):
        with pytest.raises((FileExistsError, RuntimeError), match="precious.py, and is not overwritten|could not save"):
            engine.save_checkpoint(folder, tag=tag)
    assert all((path / "precious.py").read_text() == "x = 1" for path in users)
    assert {path.name for path in Path(folder).iterdir()} == {path.name for path in users}


@on_ranks(2)
def test_the_last_of_each_series_are_kept_and_nothing_else_is_deleted(tmp_path: Path) -> None:
    folder = str(tmp_path)
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
    # Back to an earlier step: those of later steps are left to the user, and none counts for less.
    engine.load_checkpoint(root, tag="global_step3")
    engine.global_steps = 2
    assert save(None) == kept | {"global_step4", "global_step3", "global_step2", "epoch1"}
    assert start(2, config(3)).load_checkpoint(root)[0] == str(root / "global_step2")


def test_the_newest_checkpoint_is_that_of_the_last_step_whatever_the_clock_says(tmp_path: Path) -> None:
    def write(step: int, clock: int, tag: str = "global_step{}") -> str:
        path = tmp_path / tag.format(step)
        path.mkdir()
        manifests.write_manifest(path, {"shards": [], "global_steps": step})
        for name in (path / folders.MANIFEST, path):
            os.utime(name, (clock, clock))
        return path.name

    def tags() -> set[str]:
        return {path.name for path in tmp_path.iterdir() if path.is_dir()}

    # The clock goes back by a year between steps 2 and 3, and 10 follows 9 in numbers and not in texts.
    for step, clock in enumerate((5000, 5001, 1000, 1001), 1):
        write(step, clock)
    assert folders.latest(tmp_path) == "global_step4"
    folders.write_latest(tmp_path, "global_step4")
    folders.keep_last(tmp_path, "global_step4", 2)
    assert tags() == {"global_step3", "global_step4"}
    write(9, 9000)
    write(10, 900)
    (tmp_path / "latest").unlink()
    assert folders.latest(tmp_path) == "global_step10"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path)
    assert RunFolder(tmp_path / "run").last_checkpoint == "global_step10"
    shutil.rmtree(tmp_path / "run")
    assert [*folders.tags_by_step(tmp_path)] == ["global_step3", "global_step4", "global_step9", "global_step10"]
    # Of one step, the number in the tag, and without any the time.
    for clock, tag in ((70, "epoch2"), (60, "epoch10"), (80, "first"), (50, "last")):
        write(11, clock, tag)
    assert [*folders.tags_by_step(tmp_path)][4:] == ["last", "first", "epoch2", "epoch10"]
    shown = json.loads(call("inspect", tmp_path, "--json").stdout)["checkpoints"]
    assert [row["tag"] for row in shown] == [*folders.tags_by_step(tmp_path)]


def test_an_old_one_that_cannot_be_removed_is_a_warning(tmp_path, caplog, monkeypatch) -> None:
    for number in range(3):
        write_manifest(tmp_path / f"step{number}", 1000 + number)
    folders.write_latest(tmp_path, "step2")

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    folders.keep_last(tmp_path, "step2", 1)
    assert "could not remove old checkpoints" in caplog.messages[0]
    assert not (tmp_path / "step1" / "manifest.json").exists(), "what is half removed is not a checkpoint"
    assert (tmp_path / "step2" / "manifest.json").exists()


def test_incomplete_checkpoints_are_never_taken_and_go_with_the_next_save(tmp_path: Path) -> None:
    for when, tag in enumerate(["step1", "step2", "step2.old", "step3", "step4", "step4.old", "step5.draft"]):
        write_manifest(tmp_path / tag, 1000 + when)
    for tag in ("step3", "step4"):  # half deleted; beside the second, its replacement had just begun
        (tmp_path / tag / folders.MANIFEST).unlink()
        (tmp_path / tag / "rank_00000.safetensors").touch()
    for tag in ("other1.draft", "step"):
        (tmp_path / tag).mkdir()
        (tmp_path / tag / "rank_00000.safetensors").touch()
    (tmp_path / "step9").mkdir()
    (tmp_path / "step9" / "rank_00000.safetensors").touch()
    (tmp_path / "step9" / "notes.txt").touch()
    (tmp_path / "latest").write_text("step3")
    assert folders.latest(tmp_path) == "step4"
    assert folders.locate(tmp_path, "step4") == tmp_path / "step4.old"
    write_manifest(tmp_path / "step6", 2000)
    folders.write_latest(tmp_path, "step6")
    folders.keep_last(tmp_path, "step6", 2)
    left = {"step6", "step4.old", "other1.draft", "step", "step9"}
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == left
    folders.keep_last(tmp_path, "step6", 1)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == left - {"step4.old"}


def test_a_checkpoint_takes_the_place_of_a_half_deleted_one_and_of_no_folder_of_a_users(tmp_path, monkeypatch) -> None:
    for tag in ("tag.old", "tag.draft"):
        write_manifest(tmp_path / tag, 1000)
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / "rank_00000.safetensors").touch()

    def die(*paths: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            folders.commit(tmp_path / "tag.draft", tmp_path / "tag")
    assert folders.latest(tmp_path) == "tag", "the one that was whole is still there"
    folders.commit(tmp_path / "tag.draft", tmp_path / "tag")
    assert [path.name for path in tmp_path.iterdir()] == ["tag"]
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / folders.MANIFEST).write_text('{"name": "an app"}')
    (tmp_path / "app" / "main.js").touch()
    with pytest.raises(FileExistsError, match=r"holds main\.js, and is not overwritten"):
        folders.require_free(tmp_path / "app")


def test_a_link_to_a_checkpoint_is_replaced_alone(tmp_path: Path) -> None:
    write_manifest(tmp_path / "step1", 1000)
    write_manifest(tmp_path / "best.draft", 1000)
    (tmp_path / "best").symlink_to("step1")
    folders.commit(tmp_path / "best.draft", tmp_path / "best")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step1"]
    assert not (tmp_path / "best").is_symlink()
    assert (tmp_path / "step1" / folders.MANIFEST).is_file()


def test_packed_values_come_back() -> None:
    for value in ({"a": (1, [2.5, None])}, {1: "x", (2, 3): {}}, {"__tuple__": 5}, {"x": {"__items__": [1]}}):
        assert unpack(json.loads(json.dumps(pack(value)))) == value


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
        own.rename(own.with_name("away"))
    fails("none")
    if rank == 1:
        own.with_name("away").rename(own)
    fails("tags", tag="first" if rank else "second")
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
        assert found["manifest"].startswith("RuntimeError: rank 1 could not open the checkpoint")
    assert second["manifest"].startswith("FileNotFoundError")
    assert "is not a complete checkpoint" in second["manifest"]


def differ(folder: str) -> dict[str, str]:
    engine = start(1, config(1))
    rank, root, world = engine.mesh.rank, Path(folder), engine.mesh.group("world")
    found = {}

    def fails(name: str, action: Callable[[], Any]) -> None:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            action()
        found[name] = str(caught.value)

    fails("save", lambda: engine.save_checkpoint(root, tag="ab"[rank]))
    assert not list(root.iterdir())
    world.exchange(torch.zeros(1))
    engine.save_checkpoint(root / "0", tag=7)  # as DeepSpeed takes it
    train(engine, 1)
    engine.save_checkpoint(root / "1", tag=7)
    world.exchange(torch.zeros(1))
    before = everything(engine)
    fails("load", lambda: engine.load_checkpoint(root / str(rank), tag=7))
    fails("part", lambda: engine.load_checkpoint(root / "0", load_optimizer_states=rank == 0))
    assert_same(everything(engine) | {"others": before["others"]}, before)
    return found


def test_ranks_that_ask_for_different_things_are_all_told(tmp_path: Path) -> None:
    first, second = run_ranks(differ, 2, str(tmp_path))
    assert first["save"].startswith("the tag of save_checkpoint differs between rank 0 (-) and rank 1 (+)")
    assert first["save"].endswith("-a\n+b")
    assert "the manifest of 7 in" in first["load"]
    assert "-optimizer: True\n+optimizer: False" in first["part"]
    assert {name: first[name] for name in ("save", "part")} == {name: second[name] for name in ("save", "part")}
