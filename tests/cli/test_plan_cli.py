"""``zeromesh plan``: screens, files, and errors with exit code 2."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from zeromesh import Settings
from zeromesh.apps.cli.main import app
from zeromesh.apps.plan.choose.search import ALIKE
from zeromesh.apps.plan.machine.presets import cluster

SMALL = ("gpt2", "--gpu", "a100-80gb", "--gpus", "2", "--batch", "16", "--sequence", "1024")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_a_plan_is_printed_and_written(tmp_path: Path) -> None:
    found = call(*SMALL, "--picture", "plan.png", "--out", "plan")
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    command = next(line for line in lines if line.startswith("  zeromesh launch"))
    assert command.split()[-1] == "plan/config.json"
    # Commands are for copying, and are not broken.
    assert max(len(line) for line in lines if line is not command) <= 80
    settings = Settings.load(tmp_path / "plan" / "config.json")
    assert settings.resolve(2).train_batch_size == 16
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_written_unasked(tmp_path: Path) -> None:
    found = call("llama:layers=2,hidden=64,heads=2", "--gpu", "h100", "--gpus", "2", "--batch", "8", "--sequence", "64")
    assert found.exit_code == 0, found.output
    assert "--out FOLDER writes" in found.stdout
    assert not list(tmp_path.iterdir())


def test_json_has_the_same_layouts() -> None:
    found = json.loads(call(*SMALL, "--json").stdout)
    assert found["layouts"][0]["seconds"] > 0
    assert found["configuration"]["train_batch_size"] == 16
    assert len(found["layouts"]) <= 8


@pytest.mark.full
def test_the_goal_decides_which_layout_comes_first() -> None:
    cheap = ("--nodes", "2", "--between", "1 Gbit", "--price", "10")
    found = {
        goal: json.loads(call(*SMALL, *cheap, "--goal", goal, "--json").stdout)["layouts"]
        for goal in ("time", "memory", "cost")
    }
    peaks = {goal: [max(one["device_bytes"]) for one in layouts] for goal, layouts in found.items()}
    # Of layouts that are alike, the simplest is taken.
    assert peaks["memory"][0] <= (1 + ALIKE) * min(peak for some in peaks.values() for peak in some)
    assert peaks["memory"][0] < peaks["time"][0]
    assert found["time"][0]["seconds"] < found["memory"][0]["seconds"]
    # One node of two devices costs 10 an hour; the other one would wait for the link.
    first = found["cost"][0]
    assert first["price_per_million_tokens"] == pytest.approx(first["seconds"] / 3600 * 10 / (16 * 1024) * 1e6)
    assert first["price_per_million_tokens"] < min(one["price_per_million_tokens"] for one in found["time"])


@pytest.mark.full
def test_a_machine_of_a_file_is_planned_for(tmp_path: Path) -> None:
    cluster("a100-80gb", 2, nodes=2).save(tmp_path / "machine.json")
    model, *rest = SMALL
    lengths = rest[rest.index("--batch") :]
    named = json.loads(call(*SMALL, "--nodes", "2", "--json").stdout)
    filed = json.loads(call(model, "--machine", "machine.json", *lengths, "--json").stdout)
    assert filed == named
    # As many nodes of its kind as are asked for.
    more = json.loads(call(model, "--machine", "machine.json", "--nodes", "4", *lengths, "--json").stdout)
    assert more["machine"]["nodes"][0]["count"] == 4
    assert more["layouts"][0]["seconds"] < filed["layouts"][0]["seconds"]
    refused = call(model, "--machine", "machine.json", "--gpu", "h100", *lengths)
    assert refused.exit_code == 2
    assert "leave out the options that name them" in refused.output


def test_a_layout_that_the_user_has_is_judged(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"train_batch_size": 16, "zero_optimization": {"stage": 3}}))
    model, *others = SMALL
    arguments = [one for one in others if one not in ("--batch", "16")]
    found = call(model, *arguments, "--explain", "mine.json")
    assert found.exit_code == 0, found.output
    assert "It fits: each rank uses " in found.stdout
    assert "A step takes " in found.stdout
    assert not (tmp_path / "plan").exists()


def test_a_model_too_large_says_what_helps() -> None:
    found = call("70b", "--gpu", "rtx-4090", "--gpus", "1", "--batch", "4", "--sequence", "1024")
    assert found.exit_code == 2
    assert "Nothing fits: of " in found.stdout
    assert "1. " in found.stdout


def test_a_model_of_transformers_is_traced(tiny: Path) -> None:
    found = call(str(tiny), "--gpu", "l4", "--gpus", "1", "--batch", "4", "--sequence", "64", "--out", "plan")
    assert found.exit_code == 0, found.output
    assert "Memory is from a formula" not in found.stdout
    assert json.loads(Path("plan/config.json").read_text())["huggingface"]["path"] == str(tiny)


def test_a_plan_of_saved_tensors_is_listed(tiny: Path, tmp_path: Path) -> None:
    section = {"enabled": True, "granularity": "auto", "budget_gb": 1.0}
    document = {"train_batch_size": 4, "activation_checkpointing": section}
    arguments = "--gpu", "l4", "--gpus", "1", "--sequence", "64", "--explain", "mine.json"
    (tmp_path / "mine.json").write_text(json.dumps(document))
    found = call(str(tiny), *arguments, "--json")
    assert found.exit_code == 0, found.output
    first, *blocks = json.loads(found.stdout)["saved"]
    assert "computed again: 0 ms" in first
    assert any("keeps all" in line for line in blocks)
    section["budget_gb"] = 1e-6
    (tmp_path / "mine.json").write_text(json.dumps(document))
    refused = call(str(tiny), *arguments)
    assert refused.exit_code == 2
    assert "set activation_checkpointing.budget_gb to" in refused.output.replace("\n", " ")
    # Of sizes alone, no operators are known.
    assert "cannot be planned" in call("7b", *arguments).output.replace("\n", " ")


def test_a_loss_in_chunks_is_counted(tiny: Path, tmp_path: Path) -> None:
    def explained(model: str, **sections: Any) -> Any:
        (tmp_path / "mine.json").write_text(json.dumps({"train_batch_size": 64, **sections}))
        arguments = ("--gpu", "l4", "--gpus", "1", "--sequence", "256", "--explain", "mine.json", "--json")
        return call(model, *arguments)

    whole, chunked = (json.loads(explained(str(tiny), chunked_loss=on).stdout) for on in (False, True))
    assert chunked["states"]["device"]["temporary"] < whole["states"]["device"]["temporary"]
    narrow = json.loads(explained(str(tiny), chunked_loss=True, bf16={"enabled": True}).stdout)
    assert narrow["states"]["device"]["activation"] < 0.8 * chunked["states"]["device"]["activation"]  # fp32 has twice
    refused = explained("7b", chunked_loss=True)
    assert refused.exit_code == 2
    assert "chunked_loss of 7b cannot be planned" in refused.output


@pytest.mark.parametrize("name", ["", "config.json"])
def test_code_that_lies_in_the_folder_of_a_model_is_neither_run_nor_asked_about(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    described = {"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Mine"}}
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    options = ("--gpu", "h100", "--batch", "8", "--sequence", "64")
    found = CliRunner().invoke(app, ["plan", str(folder / name), *options], input="y\ny\n")
    assert found.exit_code == 2
    assert "contains custom code" in found.output
    assert "[y/N]" not in found.output
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gpt2", "--gpu", "h1000", "--batch", "8", "--sequence", "64"), "did you mean h100?"),
        (("gtp2", "--gpu", "h100", "--batch", "8", "--sequence", "64"), "did you mean gpt2"),
        (("gpt2", "--gpu", "h100", "--batch", "8", "--sequence", "4096"), "longer than the 1024"),
        (("gpt2", "--machine", "none.json", "--batch", "8", "--sequence", "64"), "none.json"),
        (("gpt2", "--gpu", "h100", "--batch", "0", "--sequence", "64"), "Error"),
        (("gpt2", "--gpu", "h100", "--gpus", "99", "--batch", "8", "--sequence", "64"), "99"),
        (("gpt2", "--gpu", "h100", "--batch", "8", "--sequence", "64", "--goal", "speed"), "time, memory, cost"),
    ],
)
def test_bad_input_ends_with_2_and_no_traceback(arguments: tuple[str, ...], said: str) -> None:
    found = call(*arguments)
    assert found.exit_code == 2
    assert said in found.output
    assert "Traceback" not in found.output
