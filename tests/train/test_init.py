"""``zeromesh init`` and ``zeromesh train MODEL DATA``: answers become a configuration that trains as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from commands import call
from zeromesh.apps.cli.main import app
from zeromesh.apps.train.starting_config import (
    Data,
    Model,
    Size,
    Start,
    TrainDevice,
    commented,
    configuration_of,
    document_of,
)
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.config.document import read_object

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 300,
}
SMALL_GPU = TrainDevice("gpu", 1, 24e9, "bf16", here=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "yes.txt").write_text("one two three four five six\n" * 200)
    return tmp_path


@pytest.mark.parametrize("arguments", [("tiny", "yes.txt"), ("model", "yes.txt", "--device", "gpu")])
def test_the_file_is_what_training_without_a_file_uses(folder: Path, arguments: tuple[str, ...]) -> None:
    result = call("init", *arguments, "--full", "--file", "a.yaml")
    assert result.exit_code == 0, result.output
    assert "zeromesh train a.yaml" in result.output
    lines = (folder / "a.yaml").read_text().splitlines()
    assert len(lines) < 25
    assert sum("#" in line for line in lines) > 8
    assert TrainSettings.load(folder / "a.yaml").data is not None
    if len(arguments) == 2:
        assert configuration_of(*arguments) == read_object(folder / "a.yaml")


def test_a_file_is_not_overwritten_unless_asked(folder: Path) -> None:
    Path("a.yaml").write_text("mine")
    result = call("init", "tiny", "yes.txt", "--file", "a.yaml")
    assert result.exit_code == 2
    assert "exists and is not overwritten" in result.output
    assert Path("a.yaml").read_text() == "mine"
    assert call("init", "tiny", "yes.txt", "--file", "a.yaml", "--force").exit_code == 0
    assert Path("a.yaml").read_text() != "mine"


def test_questions_are_asked_again_after_a_wrong_answer(folder: Path) -> None:
    with patch("zeromesh.apps.cli.init_command.is_terminal", lambda: True):
        answers = ["tinny", "tiny", "no.txt", "yes.txt", "tpu", "cpu", "runs/mine"]
        result = CliRunner().invoke(app, ["init"], input="\n".join(answers) + "\n")
    assert result.exit_code == 0, result.output
    for text in ("did you mean tiny?", "does not exist", "'tpu' is no device; choose one of cpu, gpu"):
        assert text in result.output
    assert read_object(folder / "mine.yaml")["run"]["output"] == "runs/mine"


@pytest.mark.parametrize(
    ("parameters", "device", "lora", "expected"),
    [
        (1e8, TrainDevice("cpu", 1, 16e9, None, here=True), False, {"stage": 0}),
        (5e8, SMALL_GPU, False, {"stage": 0}),
        (7e9, SMALL_GPU, True, {"stage": 3, "offload_optimizer": {"device": "cpu"}}),
        (3e9, SMALL_GPU, True, {"stage": 0}),
        (1e9, TrainDevice("gpu", 8, 80e9, "bf16", here=True), False, {"stage": 2}),
        (1.4e10, TrainDevice("gpu", 8, 80e9, "bf16", here=True), False, {"stage": 3}),
        (7e10, TrainDevice("gpu", 8, 80e9, "bf16", here=True), True, {"stage": 3}),
        (
            7e10,
            TrainDevice("gpu", 8, 80e9, "bf16", here=True),
            False,
            {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        ),
    ],
)
def test_the_stage_follows_from_what_a_device_holds(
    parameters: float, device: TrainDevice, lora: bool, expected: dict[str, Any]
) -> None:
    start = Start(Model("m", None, parameters, 4096, True), Data("a.jsonl", None, "chat"), device, lora, "runs/m")
    document = document_of(start)
    if expected.get("offload_optimizer") and lora:
        expected = {**expected, "offload_param": {"device": "cpu"}}
    assert document["zero_optimization"] == expected
    assert ("activation_checkpointing" in document) == (device.kind == "gpu" and parameters >= 1e9)
    settings = TrainSettings.load(document)
    assert settings.resolve(device.count).gradient_accumulation_steps >= 1


def test_words_that_yaml_reads_otherwise_are_quoted() -> None:
    names = ["no", "true", "1e5", "null", "a b", "a: b", "#x", "010", 'quo"te', "ünïcode", "models/tiny-1.5"]
    for name in names:
        text = commented({"data": {"train": name}, "run": {"output": name}}, "title")
        path = Path("unused.yaml")
        with patch("zeromesh.config.document.read_text", lambda *_, text=text: text):
            assert read_object(path) == {"data": {"train": name}, "run": {"output": name}}


@pytest.mark.full
def test_what_init_writes_trains(folder: Path) -> None:
    with patch("zeromesh.apps.train.starting_config.SIZES", {"tiny": Size(16, 1, 2, 32, 1e-3, 3)}):
        result = call("train", "tiny", "yes.txt")
    assert result.exit_code == 0, result.output
    assert "`zeromesh init tiny yes.txt` writes the configuration" in result.output
    assert (folder / "runs" / "tiny-yes" / "report.json").is_file()
    result = call("train", "model", "yes.txt", "--set", "run.epochs=1", "--set", "run.output=runs/b")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("train", "model"), "name the data, too: zeromesh train model DATA"),
        (("train", "tiny"), "'tiny' is the size of a model; name the data, too"),
        (("train", "yes.txt"), "'yes.txt' is data; name the model first: zeromesh train MODEL yes.txt"),
        (("train", "yes.txt", "model"), "'yes.txt' is data, and the model comes first"),
        (("train", "model/config.json", "yes.txt"), "is a configuration, which names its data itself"),
        (("train", "model", "model"), "the order is MODEL DATA"),
        (("train", "tiny", "yes.txt", "--verify"), "write one with zeromesh init MODEL DATA"),
        (("init",), "name the model and the data: zeromesh init MODEL DATA"),
        (("init", "model", "yes.txt", "--lora"), "'model' has none; train all of them with --full"),
        (("init", "tiny", "yes.txt", "--file", "a.json"), "must end in .yaml, since JSON has no comments"),
        (("init", ".", "yes.txt"), "no config.json of a language model"),
    ],
)
def test_arguments_in_a_wrong_place_are_told(folder: Path, arguments: tuple[str, ...], expected: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert expected in result.output


def test_keys_of_the_command_line_say_how_the_data_is_read_and_how_long_the_run_is(folder: Path) -> None:
    Path("towns.csv").write_text("id,city,country\n" + "1,Paris,France\n" * 40)
    result = call("train", "tiny", "towns.csv")
    assert result.exit_code == 2
    assert "--set data.prompt_key=COLUMN" in result.output
    changes = ["data.prompt_key=city", "data.response_key=country", "run.epochs=2"]
    result = call(
        "init", "tiny", "towns.csv", "--file", "a.yaml", *(word for each in changes for word in ("--set", each))
    )
    assert result.exit_code == 0, result.output
    written = read_object(folder / "a.yaml")
    assert configuration_of("tiny", "towns.csv", changes) == written
    assert written["data"]["prompt_key"] == "city"
    assert written["run"]["epochs"] == 2
    assert "steps" not in written["run"]
    TrainSettings.load(configuration_of("tiny", "towns.csv", changes), changes)


def test_a_size_with_a_typo_and_no_data_is_told(folder: Path) -> None:
    result = call("train", "tny")
    assert result.exit_code == 2
    assert "did you mean the model tiny? Name the data, too: zeromesh train tiny DATA" in result.output
