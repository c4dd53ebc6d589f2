"""Asynchronous saves write what blocking saves of the same step write, whatever training does meanwhile."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Timer
from typing import Any
from unittest.mock import patch

import pytest
import torch

import zeromesh
from compare import assert_same
from harness import on_ranks, run_command, run_ranks
from numerics import OFFLOADED
from run import adamw, start_engine
from runs import MIXTURE, config, seed_everything, start, train
from test_pipeline_saving import BUILD, WORDS
from test_saving_kills import killed_at_every_operation
from zeromesh.checkpoint import checkpoint_folder as folders
from zeromesh.checkpoint import save
from zeromesh.checkpoint.copies import background

BESIDE: dict[str, Any] = {"checkpoint": {"asynchronous": True}}


@contextmanager
def held_back() -> Iterator[Event]:
    """Let threads that write checkpoints wait for an event, which is set in the end."""
    gate, run = Event(), background._SaveThread.run

    def run_later(thread: background._SaveThread) -> None:
        gate.wait()
        run(thread)

    with patch.object(background._SaveThread, "run", run_later):
        try:
            yield gate
        finally:
            gate.set()


def described(folder: Path) -> dict[str, Any]:
    """Return the manifest without the time, and without the hash of it all."""
    manifest = json.loads((folder / "manifest.json").read_text())
    return {key: value for key, value in manifest.items() if key not in ("written", "sha256")}


def save_both(engine: zeromesh.Engine, root: Path, go_on: Callable[[], object]) -> None:
    best = torch.arange(4.0)
    save.save(engine, root / "blocking", None, {"best": best})
    with held_back() as gate:
        folder = engine.save_checkpoint(root / "beside", client_state={"best": best})
        assert folders.latest(root / "beside") is None
        best.add_(1)
        go_on()
        assert not folder.exists()
        gate.set()
        assert engine.wait_for_checkpoint() == folder
    save.save(engine, root / "after", None, {"best": best})
    assert folders.latest(root / "beside") == folder.name
    blocking, after = root / "blocking" / folder.name, root / "after" / f"global_step{engine.global_steps}"
    names = sorted(path.name for path in blocking.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == names
    assert described(folder) == described(blocking)
    for name in names:
        if name != "manifest.json":
            assert (folder / name).read_bytes() == (blocking / name).read_bytes(), name
            assert (folder / name).read_bytes() != (after / name).read_bytes(), "training went on"


def off_the_device(policy: str) -> dict[str, Any]:
    return {**config(3, "bf16"), "zero_optimization": {"stage": 3, **OFFLOADED[policy]}}


CASES: dict[str, dict[str, Any]] = {
    "stage 0": config(0, "bf16"),
    "stage 2": config(2, "bf16"),
    "all on host": off_the_device("row 3, all on host, split"),
    "all in files": off_the_device("row 3, all in files"),
}
MORE_CASES: dict[str, dict[str, Any]] = {
    "stage 1": config(1, "bf16"),
    "stage 3": config(3, "bf16"),
    "stage 3, fp64": config(3),
    "host": off_the_device("row 3, all on host"),
    "files and host": off_the_device("row 3, nvme and host"),
    "files, split": off_the_device("row 3, all in files, split"),
    "experts": config(3, mesh=MIXTURE),
    "experts, bf16": config(2, "bf16", mesh=MIXTURE),
}


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.full)], ids=["some", "more"])
@on_ranks(2)
def test_files_are_those_of_a_blocking_save_while_training_goes_on(
    cases: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    for name, settings in cases.items():
        engine = start(1, {**settings, **BESIDE})
        seed_everything(engine.mesh.rank)
        train(engine, 2)
        save_both(engine, tmp_path / name, lambda engine=engine: train(engine, 1))
        engine.destroy()


def save_split(folder: str, kind: str, mesh: dict[str, int]) -> bool:
    engine = start_engine(BUILD[kind](), BESIDE, batch=8, accumulation=4, optimizer=adamw(1e-2), stage=1, mesh=mesh)

    def go_on() -> None:
        ids = torch.randint(0, WORDS, (2, 6), generator=torch.Generator().manual_seed(engine.global_steps))
        name = "ids" if kind == "decoder" else "input_ids"
        engine.train_batch(iter([{name: ids, "labels": ids}] * 4))

    go_on()
    save_both(engine, Path(folder), go_on)
    return True


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("decoder", {"pipeline": 2}),
        pytest.param("llama", {"tensor": 2}, marks=pytest.mark.full),
        pytest.param("llama", {"pipeline": 2, "tensor": 2}, marks=pytest.mark.full),
    ],
)
def test_files_of_stages_and_of_split_layers_are_those_of_a_blocking_save(
    kind: str, mesh: dict[str, int], tmp_path: Path
) -> None:
    ranks = mesh.get("pipeline", 1) * mesh.get("tensor", 1)
    assert all(run_ranks(save_split, ranks, str(tmp_path), kind, mesh))


# One save after the other.


@on_ranks(2)
def test_a_save_waits_for_the_one_before_and_so_does_loading(tmp_path: Path) -> None:
    root = tmp_path
    engine = start(1, {**config(3), "checkpoint": {"asynchronous": True, "keep_last": 2}})
    assert engine.wait_for_checkpoint() is None
    world = engine.mesh.group("world")
    for _ in range(4):
        with held_back() as gate:
            train(engine, 1)
            engine.save_checkpoint(root)
            Timer(0.1, gate.set).start()
            train(engine, 1)
            engine.save_checkpoint(root)  # waits until the timer lets the one before be written
    again = start(2, config(3))
    expected = engine.gathered_state_dict()
    # It waits for the save that is under way.
    assert engine.load_checkpoint(root)[0] == str(root / "global_step8")
    assert_same(engine.gathered_state_dict(), expected)
    world.exchange(torch.zeros(1))
    assert sorted(path.name for path in root.iterdir()) == ["global_step7", "global_step8", "latest"]
    assert again.load_checkpoint(root)[0] == str(root / "global_step8")
    assert_same(again.gathered_state_dict(), expected)
    # The memory of the last copy serves the next one.
    memory = engine._state.background._memory.data_ptr()
    train(engine, 1, late=False)
    engine.save_checkpoint(root)
    assert engine._state.background._memory.data_ptr() == memory
    engine.destroy()
    again.mesh.group("world").exchange(torch.zeros(1))
    assert folders.latest(root) == "global_step9", "destroy() waits"


def save_to_one_folder(folder: str) -> str:
    first, second = start(1, {**config(0, mesh="1"), **BESIDE}), start(2, {**config(0, mesh="1"), **BESIDE})
    with held_back():
        first.save_checkpoint(folder, tag="first")
        with pytest.raises(OSError, match="let each run save to a folder of its own") as caught:
            second.save_checkpoint(folder, tag="second")
    assert first.wait_for_checkpoint() == Path(folder) / "first"
    second.save_checkpoint(folder, tag="second")
    assert second.wait_for_checkpoint() == Path(folder) / "second"
    return str(caught.value)


def test_the_folder_is_locked_until_the_save_is_complete(tmp_path: Path) -> None:
    assert "writes to" in run_ranks(save_to_one_folder, 1, str(tmp_path))[0]


PROGRAM = """
import sys, time, torch, zeromesh
from zeromesh.checkpoint.copies import background
run = background._SaveThread.run
background._SaveThread.run = lambda thread: (time.sleep(0.5), run(thread))
engine, *_ = zeromesh.initialize(
    model=torch.nn.Linear(2, 2), config={"optimizer": {"type": "AdamW"}, "checkpoint": {"asynchronous": True}}
)
engine.save_checkpoint(sys.argv[1])
if len(sys.argv) > 2:
    raise SystemExit("an error after the save")
"""


@pytest.mark.full
@pytest.mark.parametrize("more", [(), ("fail",)])
def test_the_end_of_a_program_waits_for_its_save(more: tuple[str, ...], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = run_command([sys.executable, program, tmp_path / "saved", *more])
    assert result.returncode == len(more), result.stdout
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["global_step0", "latest"]


# Kills.


@pytest.mark.full
def test_every_kill_leaves_a_checkpoint_and_a_folder_that_saves_on(tmp_path: Path) -> None:
    assert run_ranks(killed_at_every_operation, 1, str(tmp_path), "step2", asynchronous=True)[0] > 15
