"""``zeromesh inspect``: what it says of checkpoints is what they hold."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from harness import run_ranks
from runs import config, seed_everything, start, train
from zeromesh.apps.cli.main import app
from zeromesh.checkpoint.boxes import Reader
from zeromesh.checkpoint.manifest import MANIFEST

OLD = Path(__file__).parents[1] / "checkpoint" / "data" / "format_1"


def save_two(folder: str) -> None:
    engine = start(1, config(3))
    seed_everything(engine.mesh.rank)
    for _ in range(2):
        train(engine, 1)
        engine.save_checkpoint(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    run_ranks(save_two, 2, str(run / "checkpoints"))
    return run


def call(path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["inspect", str(path), *options])


def as_json(path: Path, *options: str) -> Any:
    return json.loads(call(path, "--json", *options).stdout)


def test_a_run_a_folder_of_checkpoints_and_a_checkpoint_are_understood(saved: Path) -> None:
    of_run, of_folder = as_json(saved), as_json(saved / "checkpoints")
    assert of_run == of_folder
    assert [row["tag"] for row in of_run["checkpoints"]] == ["global_step1", "global_step2"]
    assert [row["latest"] for row in of_run["checkpoints"]] == [False, True]
    one = as_json(saved / "checkpoints" / "global_step1")
    assert one["checkpoints"] == of_run["checkpoints"][:1]
    row = of_run["checkpoints"][1]
    assert (row["step"], row["world_size"], row["row"], row["format"], row["problem"]) == (2, 2, 3, 3, None)
    assert row["bytes"] == sum(file.stat().st_size for file in Path(row["path"]).iterdir())


def test_every_tensor_is_listed_as_it_is_stored(saved: Path) -> None:
    reader = Reader(saved / "checkpoints" / "global_step2")
    shown = as_json(saved)["shown"]
    assert {tensor["name"] for tensor in shown["tensors"]} == reader.names
    for tensor in shown["tensors"]:
        whole = reader.tensor(tensor["name"])
        assert tensor["shape"] == list(whole.shape)
        assert tensor["dtype"] == str(whole.dtype).removeprefix("torch.")
        assert tensor["bytes"] == whole.nbytes
        assert tensor["files"] == reader.files(tensor["name"])
    states = [tensor["bytes"] for tensor in shown["tensors"] if tensor["name"].startswith("optimizer/")]
    assert shown["bytes_by_kind"]["optimizer"] == sum(states) > 0
    assert shown["tied"] == {"head.weight": "embed.weight"}
    assert shown["parameters"]["embed.weight"] == {"dtype": "float64", "trainable": True}


def test_the_tables_have_a_line_per_checkpoint_and_per_tensor_of_the_model(saved: Path) -> None:
    lines = [line.split() for line in call(saved).stdout.splitlines()]
    second = next(line for line in lines if line[:1] == ["global_step2"])
    assert second[1:4] == ["2", "2", "3"]
    assert second[-1] == "latest"
    weight = next(line for line in lines if line[:1] == ["parameter/embed.weight"])
    assert weight[1:7] == ["13", "x", "10", "float64", "exp_avg,", "exp_avg_sq"]
    assert ["optimizer:", "AdamW"] in lines


def test_a_checkpoint_of_format_1_is_shown() -> None:
    found = as_json(OLD, "--verify")
    assert found["checkpoints"][0]["format"] == 1
    assert {tensor["dtype"] for tensor in found["shown"]["tensors"]} == {"float64", "int64", "uint8"}
    assert call(OLD, "--verify").exit_code == 0


def test_verify_finds_damage_which_the_exit_code_tells(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved / "checkpoints", folder)
    assert call(folder, "--verify").exit_code == 0
    assert "verified 2 of 2 checkpoints" in call(folder, "--verify").stdout
    file = folder / "global_step2" / "rank_00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert call(folder).exit_code == 0, "without --verify the files are not read"
    result = call(folder, "--verify")
    assert result.exit_code == 1
    assert "verified 1 of 2 checkpoints" in result.stdout
    assert "global_step2: not what was written (SHA-256 differs)" in result.stdout
    assert "rank_00001.safetensors, of which" in result.stdout
    assert as_json(folder, "--verify")["shown"]["path"].endswith("global_step1"), "what can be used is shown"


def test_a_save_that_was_cut_off_is_listed_as_incomplete(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved / "checkpoints", folder)
    (folder / "global_step1" / MANIFEST).unlink()
    result = call(folder)
    assert result.exit_code == 1
    (folder / "global_step1").rename(folder / "global_step1.draft")
    assert call(folder).exit_code == 0, "it may be under way"
    assert "global_step1.draft: " in call(folder).stdout
    assert "global_step1: " in result.stdout
    assert "not a complete checkpoint: manifest.json is missing" in result.stdout


def test_files_that_are_cut_off_or_missing_are_told_without_reading_them(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved / "checkpoints", folder)
    file = folder / "global_step2" / "rank_00001.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    result = call(folder)
    assert result.exit_code == 1
    assert "rank_00001.safetensors is cut off after" in result.stdout
    assert "load it with tag='global_step1'" in result.stdout
    assert as_json(folder)["shown"]["path"].endswith("global_step1")
    file.unlink()
    assert "rank_00001.safetensors is missing" in call(folder).stdout
    old = tmp_path / "old"
    shutil.copytree(OLD, old)
    file = next(old.rglob("rank_00001.safetensors"))
    os.truncate(file, file.stat().st_size - 1)
    assert "is cut off after" in call(old).stdout


def test_folders_that_a_save_left_are_no_checkpoints(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved / "checkpoints", folder)
    (folder / "latest").unlink()
    for name in ("global_step1.old", "global_step9.draft"):
        shutil.copytree(folder / "global_step1", folder / name)
        os.utime(folder / name)
    found = as_json(folder)
    assert {row["tag"] for row in found["checkpoints"] if row["left"]} == {"global_step1.old", "global_step9.draft"}
    assert found["shown"]["path"].endswith("global_step2")
    assert call(folder).exit_code == 0
    assert call(folder).stdout.count("left over") == 2


def test_without_a_checkpoint_the_remedy_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        result = call(path)
        assert result.exit_code == 2
        assert "holds no checkpoint; name the folder of a run" in result.stderr
