"""What monitors write is what happened: read back from their files, once, in order, also over a resume."""

import csv
import logging
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks
from run import configuration, sgd, train_step
from zeromesh.engine.observe.monitors import MONITORS, CsvFiles, Monitor, TensorBoardFiles

RANKS, MICRO, ACCUMULATION = 2, 3, 2
BATCH = RANKS * MICRO * ACCUMULATION
RATE = 0.01


def config(**more: Any) -> dict[str, Any]:
    return configuration(micro=MICRO, accumulation=ACCUMULATION, optimizer=sgd(RATE)) | more


def monitors(folder: Path) -> dict[str, Any]:
    return {
        "tensorboard": {"enabled": True, "output_path": str(folder / "board"), "job_name": "job"},
        "csv_monitor": {"enabled": True, "output_path": str(folder / "csv")},
    }


def make_engine(**more: Any) -> zeromesh.Engine:
    torch.manual_seed(0)
    return zeromesh.initialize(model=nn.Linear(4, 2), config=config(**more))[0]


def train(engine: Any, updates: int) -> list[list[float]]:
    found = []
    for _ in range(updates):
        losses = []
        for micro in range(ACCUMULATION):
            generator = torch.Generator().manual_seed(1000 * engine.global_steps + 10 * micro + engine.mesh.rank)
            losses.append(train_step(engine, engine(torch.randn(MICRO, 4, generator=generator)).square().mean()))
        found.append(losses)
    return found


def read_csv(folder: Path, name: str) -> list[tuple[int, float]]:
    with (folder / f"Train_Samples_{name}.csv").open() as file:
        head, *rows = csv.reader(file)
    assert head == ["step", name]
    return [(int(step), float(value)) for step, value in rows]


def read_board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def two_ranks_write(folder: str) -> Any:
    engine = make_engine(**monitors(Path(folder)))
    losses = train(engine, 3)
    engine.monitor.write({"mine/accuracy": torch.tensor([0.5])})
    engine.monitor.write({"mine/accuracy": 0.75}, step=99)
    norm = engine.get_global_grad_norm()
    enabled = engine.monitor.enabled
    engine.destroy()
    return losses, norm, enabled, engine.global_samples


def test_two_ranks_write_once_the_mean_over_micro_batches_and_ranks(tmp_path: Path) -> None:
    told = run_ranks(two_ranks_write, RANKS, str(tmp_path))
    losses = torch.tensor([rank[0] for rank in told])
    assert [rank[2:] for rank in told] == [(True, 3 * BATCH), (False, 3 * BATCH)]
    steps = [BATCH, 2 * BATCH, 3 * BATCH]
    job = tmp_path / "csv" / "DeepSpeedJobName"
    written, board = read_csv(job, "train_loss"), read_board(tmp_path / "board" / "job")
    assert [step for step, _ in written] == steps
    assert [value for _, value in written] == pytest.approx(losses.mean((0, 2)).tolist(), rel=1e-6)
    assert [value for _, value in board["Train/Samples/train_loss"]] == pytest.approx([v for _, v in written], rel=1e-6)
    assert read_csv(job, "lr") == [(step, RATE) for step in steps]
    assert read_csv(job, "grad_norm")[-1] == (3 * BATCH, pytest.approx(told[0][1]))
    seconds, speed = read_csv(job, "seconds_per_step"), read_csv(job, "samples_per_second")
    assert [step for step, _ in seconds] == steps[1:]  # nobody knows when the first began
    assert [value for _, value in speed] == pytest.approx([BATCH / value for _, value in seconds])
    assert board["mine/accuracy"] == [(3 * BATCH, 0.5)]
    assert read_board(tmp_path / "board" / "job" / "own_steps") == {"mine/accuracy": [(99, 0.75)]}
    assert (job / "mine_accuracy.csv").read_text() == f"step,accuracy\n{3 * BATCH},0.5\n99,0.75\n"
    names = {"train_loss", "lr", "grad_norm", "seconds_per_step", "samples_per_second"}
    assert set(board) == {"mine/accuracy", *(f"Train/Samples/{name}" for name in names)}


def resume(folder: str) -> Any:
    path = Path(folder)
    engine = make_engine(**monitors(path))
    losses = train(engine, 2)
    engine.save_checkpoint(path / "saved")
    train(engine, 2)
    engine.destroy()
    again = make_engine(**monitors(path))
    again.load_checkpoint(path / "saved")
    losses += train(again, 3)
    again.destroy()
    return losses, again.global_samples


def test_a_resumed_run_has_every_update_once(tmp_path: Path) -> None:
    told = run_ranks(resume, RANKS, str(tmp_path))
    means = torch.tensor([losses for losses, _ in told]).mean((0, 2)).tolist()
    assert told[0][1] == 5 * BATCH
    expected = [(BATCH * (index + 1), pytest.approx(value, rel=1e-6)) for index, value in enumerate(means)]
    assert read_csv(tmp_path / "csv" / "DeepSpeedJobName", "train_loss") == expected
    assert read_board(tmp_path / "board" / "job")["Train/Samples/train_loss"] == expected


def test_a_resumed_board_keeps_values_with_steps_of_their_own_and_hides_others(tmp_path: Path) -> None:
    def begin() -> Monitor:
        return Monitor({"tensorboard": TensorBoardFiles(tmp_path)})

    monitor = begin()
    for update in (1, 2, 3):
        monitor.samples = 10 * update
        monitor.write({"mine/accuracy": update})
        monitor.write({"mine/tokens": update}, step=1000 * update)
    monitor.close()
    again = begin()
    again.rewind(20)
    again.samples = 30
    again.write({"mine/accuracy": 4})
    again.write({"mine/tokens": 4}, step=torch.tensor(4000))
    again.close()
    assert read_board(tmp_path) == {"mine/accuracy": [(10, 1.0), (20, 2.0), (30, 4.0)]}
    tokens = [(1000 * value, float(value)) for value in (1, 2, 3, 4)]
    assert read_board(tmp_path / "own_steps") == {"mine/tokens": tokens}


def test_without_monitors_there_are_neither_files_nor_threads(tmp_path, monkeypatch, one_rank) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(threading.enumerate())
    engine = make_engine(gradient_accumulation_steps=2, train_batch_size=2 * MICRO)
    train(engine, 2)
    engine.monitor.write({"mine": 1.0})
    assert not engine.monitor.enabled
    assert not files(tmp_path)
    assert set(threading.enumerate()) == before
    engine.destroy()


def test_folders_are_relative_to_the_start_and_have_deepspeeds_default_name(tmp_path, monkeypatch, one_rank) -> None:
    monkeypatch.chdir(tmp_path)
    engine = make_engine(csv_monitor={"enabled": True})
    monkeypatch.chdir("/")
    train(engine, 1)
    assert "DeepSpeedJobName/Train_Samples_train_loss.csv" in files(tmp_path)
    engine.destroy()


def test_the_loss_scale_is_written_in_fp16_and_after_an_overflow_too(tmp_path: Path, one_rank: None) -> None:
    scale = {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}
    engine = make_engine(fp16=scale, csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "job"})
    train(engine, 2)
    assert engine.skipped_steps == 2
    batch = MICRO * ACCUMULATION
    assert read_csv(tmp_path / "job", "loss_scale") == [(batch, 2.0**30), (2 * batch, 2.0**29)]
    engine.destroy()


def test_a_loss_that_its_owner_divides_is_written_as_it_was(tmp_path: Path, one_rank: None) -> None:
    engine = make_engine(csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "job"})
    for _ in range(ACCUMULATION):
        engine.backward(engine(torch.ones(MICRO, 4)).square().mean() / ACCUMULATION, scale_wrt_gas=False)
        engine.step()
    torch.manual_seed(0)
    expected = nn.Linear(4, 2)(torch.ones(MICRO, 4)).square().mean().item()
    assert read_csv(tmp_path / "job", "train_loss")[0][1] == pytest.approx(expected)
    engine.destroy()


def test_a_cut_off_line_and_lines_after_the_checkpoint_go_and_other_files_stay(tmp_path: Path) -> None:
    writer = CsvFiles(tmp_path)
    others = {"other.csv": "x,y\n5,6\n", "Train_Samples_own.csv": "step,loss,accuracy\n7,8,9\n"}
    for step in (1, 2, 3):
        writer.write({"Train/Samples/b c": step / 2, "mine": 1.0}, 1000 * step if step == 3 else step)
    (tmp_path / "Train_Samples_b_c.csv").write_text("step,b c\n1,0.5\n2,1.0\n3,1.5\n")
    with (tmp_path / "Train_Samples_b_c.csv").open("a") as file:
        file.write("4")
    for name, text in others.items():
        (tmp_path / name).write_text(text)
    again = CsvFiles(tmp_path)
    again.rewind(2)
    again.write({"Train/Samples/b c": 8.0}, 2)  # as the last validation of a run that had ended
    again.write({"Train/Samples/b c": 9.0, "mine": 2.0}, 3)
    assert (tmp_path / "Train_Samples_b_c.csv").read_text() == "step,b c\n1,0.5\n2,1.0\n3,9.0\n"
    assert (tmp_path / "mine.csv").read_text() == "step,mine\n1,1.0\n2,1.0\n3000,1.0\n3,2.0\n"
    assert {name: (tmp_path / name).read_text() for name in others} == others


def test_a_writer_that_fails_is_given_up_with_one_warning(tmp_path, one_rank, caplog) -> None:
    engine = make_engine(
        csv_monitor={"enabled": True, "output_path": str(tmp_path)},
        tensorboard={"enabled": True, "output_path": str(tmp_path / "board"), "job_name": "job"},
    )
    (tmp_path / "DeepSpeedJobName").rmdir()
    (tmp_path / "DeepSpeedJobName").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="zeromesh"):
        train(engine, 3)
    assert [record.getMessage().split(" failed")[0] for record in caplog.records] == ["csv_monitor"]
    assert "Not a directory" in caplog.text
    assert len(read_board(tmp_path / "board" / "job")["Train/Samples/train_loss"]) == 3
    engine.destroy()


class FakeRun:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append((step, values))

    def finish(self) -> None:
        self.calls.append("finish")


def test_wandb_gets_deepspeeds_arguments_and_one_call_per_update(monkeypatch, one_rank) -> None:
    calls: list[Any] = []

    def init(**arguments: Any) -> FakeRun:
        calls.append(arguments)
        return FakeRun(calls)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    engine = make_engine(wandb={"enabled": True, "group": "g", "team": "t", "project": "p"})
    assert not calls
    train(engine, 2)
    engine.monitor.write({"mine": 1.0}, step=1)  # below the samples, where Weights & Biases would drop it
    engine.destroy()
    batch = MICRO * ACCUMULATION
    assert calls.pop(3) == (2 * batch, {"mine": 1.0, "own_steps": 1})
    assert calls[0] == {"project": "p", "group": "g", "entity": "t"}
    assert [call[0] for call in calls[1:3]] == [batch, 2 * batch]
    assert calls[1][1].keys() == {"Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/grad_norm"}
    assert calls[3:] == ["finish"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_package_that_is_missing_is_said_before_training(name, tmp_path, monkeypatch, one_rank) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    for loaded in [module for module in sys.modules if module.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(ImportError, match=f"{name} needs the package {name}.*pip install {name}"):
        make_engine(**{name: {"enabled": True}})


def a_folder_that_cannot_be_made(path: str) -> str:
    with pytest.raises((OSError, RuntimeError)) as caught:
        make_engine(csv_monitor={"enabled": True, "output_path": path})
    return str(caught.value)


def test_a_folder_that_cannot_be_made_is_said_on_every_rank_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = run_ranks(a_folder_that_cannot_be_made, RANKS, str(tmp_path / "file"))
    assert "Not a directory" in first
    assert "rank 0 could not prepare its optimizer, schedule and monitors" in second


@pytest.mark.parametrize(
    ("values", "error"),
    [({1: 1.0}, TypeError), ({"a": "x"}, ValueError), ({"a": torch.ones(2)}, ValueError), ({"a": None}, ValueError)],
)
def test_values_that_are_no_numbers_are_refused_on_every_rank(values: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Monitor().write(values)


@pytest.mark.parametrize("step", [2.5, "3", [1]])
def test_a_step_that_is_no_whole_number_is_refused_on_every_rank(step: Any) -> None:
    with pytest.raises(TypeError, match="step = .* it must be a whole number"):
        Monitor().write({"a": 1.0}, step=step)


def test_every_row_of_the_table_can_be_opened_by_its_section(tmp_path: Path) -> None:
    sections = zeromesh.Settings.load({"csv_monitor": {"output_path": str(tmp_path / "a"), "job_name": "b"}})
    assert all(hasattr(sections, name) for name in MONITORS)
    assert isinstance(MONITORS["csv_monitor"](sections.csv_monitor), CsvFiles)
    assert os.listdir(tmp_path / "a" / "b") == []
