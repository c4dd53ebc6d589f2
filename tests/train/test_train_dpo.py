"""DPO from one file: the same losses and weights as two models in plain torch, in all layouts."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from commands import call, logged_losses, write_config
from zeromesh.apps.train.check import check, prepare_text
from zeromesh.apps.train.data.ordered_loader import NO_LABEL, Batch, Share, training_batches
from zeromesh.apps.train.metrics import read_metrics
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.config.errors import ConfigError

STEPS, PAIRS, LENGTH = 5, 24, 48
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def records() -> list[dict[str, Any]]:
    """Return prompts whose better answer counts up from them, as strings and as chats."""
    rows: list[dict[str, Any]] = []
    for number in range(PAIRS):
        start = number % 7
        prompt, good, bad = WORDS[start], " ".join(WORDS[start + 1 : start + 4]), " ".join(WORDS[start::-1])
        if number % 3:
            rows.append({"prompt": prompt, "chosen": good, "rejected": bad})
        else:
            sides = ([{"role": "assistant", "content": text}] for text in (good, bad))
            question = {"role": "user", "content": prompt}
            rows.append({"prompt": [question]} | dict(zip(("chosen", "rejected"), sides, strict=True)))
    return rows


def config(folder: Path, model: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records()))
    values: dict[str, Any] = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
        "huggingface": {"path": str(model), "sequence_length": LENGTH},
        "dpo": {"beta": 0.3},
        "data": {"train": str(folder / "pairs.jsonl"), "validation_fraction": 0.2},
        "run": {"steps": STEPS, "output": str(folder / "run"), "log_every": 1, "evaluate_every": 2},
    }
    return write_config(folder, values | changes)


def likelihoods(model: Any, batch: Batch) -> torch.Tensor:
    """Return the log-likelihoods of both answers, written out, shape ``(rows, 2)``."""
    tokens, labels = batch.tokens.flatten(0, 1), batch.labels.flatten(0, 1)
    logs = model(input_ids=tokens).logits.float().log_softmax(-1)
    each = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels == NO_LABEL, 0.0, each).sum(1).view(-1, 2)


def plain_losses(path: Path, model: Any, reference: Callable[[Batch], torch.Tensor]) -> list[float]:
    """Train with a frozen reference beside the model, as the paper does, and return the losses."""
    job = check(TrainSettings.load(path, [f"run.output={path.parent / 'plain'}"]))
    batches = training_batches(prepare_text(job, may_write=True), LENGTH, Share(0, 1, 4, 1), job.settings.seed, 0)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3, weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        batch = next(batches)
        assert batch.reference is None
        with torch.no_grad():
            usual = reference(batch)
        chosen, rejected = (likelihoods(model, batch) - usual).unbind(1)
        loss = -F.logsigmoid(0.3 * (chosen - rejected)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def plain(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    frozen = copy.deepcopy(model)
    path = config(tmp_path_factory.mktemp("plain"), tiny)
    return plain_losses(path, model, lambda batch: likelihoods(frozen, batch)), dict(model.state_dict())


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "micro-batches": {"train_micro_batch_size_per_gpu": 2},
    "stage 3": {"zero_optimization": {"stage": 3}, "ranks": 2},
    "tensor": {"mesh": {"tensor": 2}, "ranks": 2},
    "pipeline": {"mesh": {"pipeline": 2}, "gradient_accumulation_steps": 2, "ranks": 2},
}


@pytest.mark.parametrize(
    "layout", ["one rank", *(pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS if name != "one rank")]
)
def test_losses_and_weights_are_those_of_two_models_in_plain_torch(
    tiny: Path, tmp_path: Path, plain: tuple[list[float], dict[str, torch.Tensor]], layout: str
) -> None:
    changes = dict(LAYOUTS[layout])
    ranks = changes.pop("ranks", 1)
    path = config(tmp_path, tiny, **changes)
    result = call("train", path, "--set", f"run.ranks={ranks}")
    assert result.exit_code == 0, result.output
    assert "samples at a time" not in result.output
    losses, weights = plain
    assert losses[0] == pytest.approx(0.693147, abs=1e-6)
    assert losses[-1] < 0.6
    assert logged_losses(tmp_path / "run") == pytest.approx(losses, rel=2e-5)
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    for name, value in trained.items():
        torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=2e-5)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["loss_unit"] == "nats per pair"
    assert 0 <= report["accuracy"] <= 1
    assert report["tokens"] == STEPS * 4 * 2 * LENGTH


@pytest.mark.full
def test_adapters_learn_against_the_model_without_them(tiny: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    lora = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
    path = config(tmp_path, tiny, lora=lora, zero_optimization={"stage": 3})
    assert call("train", path, "--set", "run.save_every=2").exit_code == 0
    # A step at the rate 0 leaves the adapters as they are drawn.
    unmoved = ("run.steps=1", "optimizer.params.lr=0.0", f"run.output={tmp_path / 'start'}")
    assert call("train", path, *(word for each in unmoved for word in ("--set", each))).exit_code == 0
    base = transformers.LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    start, trained = (load_file(tmp_path / name / "model" / "adapter_model.safetensors") for name in ("start", "run"))
    assert all(not value.any() for name, value in start.items() if "lora_B" in name)
    peft.set_peft_model_state_dict(model, start)

    def reference(batch: Batch) -> torch.Tensor:
        with model.disable_adapter():
            return likelihoods(model, batch)

    losses = plain_losses(path, model, reference)
    assert logged_losses(tmp_path / "run") == pytest.approx(losses, rel=2e-5)
    assert losses[-1] < losses[0] == pytest.approx(0.693147, abs=1e-6)
    for name, value in peft.get_peft_model_state_dict(model).items():
        torch.testing.assert_close(trained[name], value, rtol=1e-3, atol=2e-5)


@pytest.mark.full
def test_a_resumed_run_has_the_bits_of_a_whole_one_and_its_first_reference(tiny: Path, tmp_path: Path) -> None:
    assert call("train", config(tmp_path / "whole", tiny)).exit_code == 0
    path = config(tmp_path / "parts", tiny)
    assert call("train", path, "--set", "run.steps=2").exit_code == 0
    (reference,) = (tmp_path / "parts" / "run" / "text").glob("*.reference.npy")
    before = reference.read_bytes()
    assert call("train", path, "--resume").exit_code == 0
    assert reference.read_bytes() == before
    whole, parts = (load_file(tmp_path / name / "run" / "model" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    scores = [record for record in read_metrics(tmp_path / "whole" / "run" / "metrics.jsonl") if "accuracy" in record]
    assert [record["step"] for record in scores] == [2, 4, 5]
    reference.unlink()
    result = call("train", path, "--resume", "--set", "run.steps=6")
    assert result.exit_code != 0
    assert "the model at the start is lost" in result.output


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"mesh": {"context": 2}}, "dpo compares whole answers, which mesh.context = 2 divides"),
        ({"data": {"train": "a", "format": "chat"}}, "data.format = chat; leave one out"),
        ({"dpo": {"beta": 0}}, "dpo.beta = 0"),
        ({"dpo": {"label_smoothing": 0.5}}, "dpo.label_smoothing = 0.5"),
    ],
)
def test_what_dpo_cannot_do_is_refused(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainSettings.load({"dpo": {}, **change})
    assert expected in str(caught.value)


def test_records_of_the_other_kind_are_told(tiny: Path, tmp_path: Path) -> None:
    path = config(tmp_path, tiny)
    values = json.loads(path.read_text())
    del values["dpo"]
    result = call("train", write_config(tmp_path, values))
    assert result.exit_code == 2
    assert "add a section dpo, as with --set dpo.beta=0.1" in result.output
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    result = call("train", path, "--set", "dpo.beta=0.1")
    assert result.exit_code == 2
    assert "must have 'prompt' and 'chosen' and 'rejected'" in result.output
