"""Layouts that ``zeromesh train`` leaves to the planner, and the planner's prediction in its report."""

import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import call, logged_losses, write_config
from harness import run_command, run_ranks
from zeromesh.apps.plan.machine.cluster import Device, LinkSpeed, Machine, Node
from zeromesh.apps.train.train_run import train
from zeromesh.base.machine import MACHINE

AUTO = {
    "mesh": "auto",
    "zero_optimization": {"stage": "auto"},
    "offload": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
CHOSEN = ("mesh", "zero_optimization", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def config(corpus: Path, folder: Path, **changes: Any) -> Path:
    """Return a configuration of the shape of those in ``examples/``."""
    settings: dict[str, Any] = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "model": {"architecture": "llama", "hidden_size": 64, "layers": 3, "heads": 2, "sequence_length": 16},
        "data": {"train": str(corpus), "suffixes": [".py"], "vocabulary_size": 270},
        "run": {"steps": 3, "output": str(folder / "run"), "log_every": 1},
        **changes,
    }
    return write_config(folder, settings)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a machine whose two devices hold half of the states, so that what is chosen is no default."""
    elements = 3 * (4 * 64 * 64 + 3 * 64 * 192) + 2 * 270 * 64
    device = Device("small", 8 * elements, {"fp32": 1e11}, 1e11, reserved=0.0)
    link = LinkSpeed(1e10, 1e-5)
    path = tmp_path_factory.mktemp("machine") / "machine.json"
    Machine(((Node(device, 2, link, link, 1e11, 1e10, 2), 1),), link, "small").save(path)
    return str(path)


def chosen(run: Path) -> dict[str, Any]:
    """Return what the planner has chosen, in the words of a configuration."""
    written = json.loads((run / "config.json").read_text())
    return {key: written[key] for key in CHOSEN}


def train_on(machine: str, path: Path, overrides: list[str], resume: bool = False) -> str:
    # In the rank: its process serves several tests, with the variables of its start, and where it writes its log to.
    log = io.StringIO()
    handler, logger = logging.StreamHandler(log), logging.getLogger("zeromesh")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # as the command does where nobody has set up logging
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MACHINE, machine)
        arguments = [argument for override in overrides for argument in ("--set", override)]
        result = call("train", path, *arguments, *(["--resume"] if resume else []))
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    assert result.exit_code == 0, result.output
    return result.output + log.getvalue()


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_whose_layout_is_planned_is_that_with_the_layout_written_out(
    corpus: Path, tmp_path: Path, machine: str, ranks: int
) -> None:
    path = config(corpus, tmp_path / "auto", **AUTO)
    said = run_ranks(train_on, ranks, machine, path, [])[0]
    assert 'the planner set the "auto" keys' in said
    assert "nothing fills in here" not in said
    found = chosen(tmp_path / "auto" / "run")
    assert found["mesh"]["data"] * found["mesh"]["tensor"] == ranks
    # The states do not fit one device, and two hold them only in parts.
    zero = found["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["device"]) != (0, "none")
    run_ranks(train, ranks, config(corpus, tmp_path / "written", **found), [], resume=False)
    written = tmp_path / "written" / "run"
    assert logged_losses(tmp_path / "auto" / "run") == logged_losses(written)
    # Without a file the machine would have to be measured, for longer than the run took.
    assert json.loads((written / "report.json").read_text())["prediction"] is None
    assert "predict" not in (written / "report.md").read_text()


@pytest.mark.full
def test_ranks_that_train_starts_itself_take_the_plan_of_the_command(
    corpus: Path, tmp_path: Path, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MACHINE, machine)
    path = config(corpus, tmp_path, **AUTO)
    command = [sys.executable, "-m", "zeromesh.apps.cli.main", "train", str(path), "--set", "run.ranks=2"]
    finished = run_command(command, timeout=120)
    assert finished.returncode == 0, finished.stdout
    mesh = chosen(tmp_path / "run")["mesh"]
    assert mesh["data"] * mesh["tensor"] == 2


def test_a_resumed_run_keeps_its_layout_whatever_the_machine_is_now(corpus: Path, tmp_path: Path, machine: str) -> None:
    path = config(corpus, tmp_path, **AUTO)
    train_on(machine, path, [])
    before = chosen(tmp_path / "run")
    said = train_on(str(tmp_path / "gone.json"), path, ["run.steps=4"], resume=True)
    assert '"auto" keys keep the values of the resumed run' in said
    assert chosen(tmp_path / "run") == before
    assert len(logged_losses(tmp_path / "run")) == 4


@pytest.mark.full
def test_the_report_shows_what_was_foreseen_beside_what_was_measured(
    corpus: Path, tmp_path: Path, machine: str
) -> None:
    path = config(corpus, tmp_path, mesh={}, train_micro_batch_size_per_gpu=4)
    train_on(machine, path, [])
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    found = report["prediction"]
    assert (found["machine"], found["layout"]) == ("small", "one device, ZeRO-0")
    assert found["host"] is None  # the memory of a processor is the host's
    assert found["device"]["predicted"] > report["memory"]["total"]  # activations are in it
    for one in (found["device"], found["step"]):
        assert one["predicted"] > 0
        if one["measured"] is not None:
            assert one["difference"] == one["predicted"] / one["measured"] - 1
    assert found["step"]["measured"] > 0
    page = (tmp_path / "run" / "report.md").read_text()
    assert f"| predicted time of a step | {1e3 * found['step']['predicted']:.1f} ms, measured " in page


def test_a_report_says_in_a_line_why_nothing_was_foreseen(corpus: Path, tmp_path: Path) -> None:
    train_on(str(tmp_path / "gone.json"), config(corpus, tmp_path), ["run.steps=1"])
    found = json.loads((tmp_path / "run" / "report.json").read_text())["prediction"]
    assert found["device"]["predicted"] is None
    first, *_, last = found["notes"]
    assert first.startswith("nothing could be predicted: ")
    assert "there is no such file" in first
    assert last == "the time of a step is measured from the second update on"
    assert first in (tmp_path / "run" / "report.md").read_text()
