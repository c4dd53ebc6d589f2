"""``zeromesh train`` on records, blends and Megatron's files: what it checks before ranks start, and that it trains."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test_data_indexed import published
from test_data_records import CHAT, MARKED, chat_tokenizer, lines
from test_readme import ROOT, blocks_of
from test_train_cli import call, config, numbers, refused
from zeromesh.apps.train.train_settings import TrainSettings


def change(source: Any, **more: Any) -> dict[str, Any]:
    return {"train": source, "suffixes": [], "vocabulary_size": "auto", "validation_fraction": 0.2} | more


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("parts")
    chats = [{"messages": [CHAT[1], {**CHAT[2], "content": "x" * n}]} for n in range(16)]
    ids = np.random.default_rng(0).integers(0, 250, (30, 40)).tolist()
    published(folder / "indexed", [[document] for document in ids])
    (folder / "text.txt").write_text("some plain text\n" * 100)
    return {
        "tokenizer": chat_tokenizer(folder / "tokenizer", MARKED),
        "indexed": folder / "indexed",
        "text": folder / "text.txt",
        "chat": lines(folder / "chat.jsonl", chats),
        "response": lines(folder / "pairs.jsonl", [{"prompt": "p" * n, "response": f"r{n}"} for n in range(20)]),
    }


@pytest.mark.full
def test_a_blend_of_all_kinds_is_trained_on_and_resumed(parts: dict[str, Path], tmp_path: Path) -> None:
    names = ("text", "chat", "response", "indexed")
    blend = [{"source": str(parts[name]), "weight": weight} for name, weight in zip(names, (4, 3, 2, 1), strict=True)]
    data = change(blend, tokenizer=str(parts["tokenizer"]))
    path = config(tmp_path, tmp_path, data=data)
    result = call("train", path)
    assert result.exit_code == 0, result.output
    assert "bits per byte" in result.output
    settings = TrainSettings.load(tmp_path / "run" / "config.json")
    assert [weight for _, weight in settings.data.blend] == [0.4, 0.3, 0.2, 0.1]
    whole = numbers(tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "latest").write_text("global_step3")
    result = call("train", path, "--resume")
    assert result.exit_code == 0, result.output
    assert numbers(tmp_path / "run") == whole
    result = call("sample", tmp_path / "run", "some", "--tokens", "3")
    assert result.exit_code == 0, result.output
    refused(call("train", path, "--resume", "--set", "data.packing=pad"), 'data.packing: "pack" in the run, "pad" now')


def test_tokens_without_a_tokenizer_are_trained_on(parts: dict[str, Path], tmp_path: Path) -> None:
    path = config(tmp_path, tmp_path, data=change(str(parts["indexed"])), run={"sample": {}, "steps": 2})
    result = call("train", path)
    assert result.exit_code == 0, result.output
    assert "bits per byte" not in result.output
    assert json.loads((tmp_path / "run" / "report.json").read_text())["validation_loss"] > 0
    refused(call("sample", tmp_path / "run", "x"), "no tokenizer", "data.tokenizer")


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"model": {"vocab_size": 240}}, ("indexed.bin' has the id 2", "at token", "raise model.vocab_size")),
        ({"run": {"sample": {"prompts": ["x"]}}}, ("run.sample.prompts need a tokenizer", "data.tokenizer")),
        ({"train_batch_size": 64}, ("gives 32 samples", "fewer than the 64", "train_batch_size")),
    ],
)
def test_tokens_that_do_not_suit_the_run_are_refused(parts, tmp_path, changes, messages) -> None:
    settings = {"run": {"sample": {}}, "data": change(str(parts["indexed"]))} | changes
    refused(call("train", config(tmp_path, tmp_path, **settings)), *messages)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(parts: dict[str, Path], tmp_path: Path) -> None:
    data = change(str(parts["chat"]), tokenizer=str(parts["tokenizer"]))
    path = config(tmp_path, tmp_path, data=data, model={"vocab_size": 256})
    refused(call("train", path), "vocabulary has 256 entries, and the tokenizer 260")
    long = lines(tmp_path / "long.jsonl", [{"prompt": "p" * 40, "response": "r"}])
    path = config(tmp_path, tmp_path, data=data | {"train": str(long)})
    refused(call("train", path), "long.jsonl, line 1: has 42 tokens", "data.too_long")


def test_records_that_were_left_out_are_counted(parts: dict[str, Path], tmp_path: Path) -> None:
    records = [{"prompt": "p" * n, "response": "r"} for n in range(45)]
    data = change(str(lines(tmp_path / "a.jsonl", records)), tokenizer=str(parts["tokenizer"]), too_long="drop")
    result = call("train", config(tmp_path, tmp_path, data=data, run={"steps": 1, "sample": {}}))
    assert result.exit_code == 0, result.output
    assert "13 longer than a sample" in result.stdout.replace("\n", " ")


@pytest.mark.full
def test_the_example_of_a_blend_takes_a_step_with_the_tokenizer_of_the_page(tmp_path, monkeypatch) -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    (tokenizer, *_) = [block.text for block in blocks_of(page) if block.language == "python"]
    exec(compile(tokenizer, "data.md", "exec"), {})
    example = json.loads((ROOT / "examples" / "blend.json").read_text())
    assert [json.loads(block.text) for block in blocks_of(page) if block.language == "json"] == [
        {key: example["data"][key] for key in ("train", "tokenizer")}
    ]
    (tmp_path / "some.py").write_text((Path(json.__file__)).read_text())
    sources = json.dumps([{"source": "some.py", "weight": 0.7}, example["data"]["train"][1]])
    less = ["run.steps=1", "run.ranks=1", "train_batch_size=2", "model.layers=1", f"data.train={sources}"]
    result = call("train", "examples/blend.json", *(word for change in less for word in ("--set", change)))
    assert result.exit_code == 0, result.output
