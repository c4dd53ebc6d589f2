"""Runs with "activation_checkpointing": "auto" need the bytes that their plan says, and compute what others compute."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

import zeromesh
from live_storages import LiveStorages
from zeromesh.apps.plan import saved
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.plan.saved import PlannedCost
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.train_settings import ModelShape
from zeromesh.base.machine import MACHINE
from zeromesh.base.saved_tensors import BlockPlan, Saved

LAYERS, TOKENS, ROWS, WORDS = 4, 64, 32, 64
AIM = 0.02  # error of predicted peaks
GRADIENTS = 2 * 4 * 12 * 64 * 64
"""Bytes of the gradients of two blocks' parameters, which are no activations, and are measured beside them."""
LEAST = {"vit": 0.96}
"""Measured parts of predicted peaks: of a ViT's blocks, the last one's backward is for one token, and needs less."""


class Lines(Dataset[Any]):
    """Samples of a model, by their names."""

    def __init__(self, **sizes: tuple[int, ...]) -> None:
        draw = torch.Generator().manual_seed(1)
        whole = {"input_ids", "labels", "tokens"}
        self.samples = {
            name: torch.randint(2 if name == "label" else WORDS, (ROWS, *size), generator=draw)
            if name in whole
            else torch.randn(ROWS, *size, generator=draw)
            for name, size in sizes.items()
        }

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.samples.items()}


class Decoding(nn.Module):
    """A decoder that returns its loss."""

    def __init__(self, architecture: str) -> None:
        super().__init__()
        shape = ModelShape(
            architecture=architecture, hidden_size=64, layers=LAYERS, heads=4, vocab_size=WORDS, sequence_length=TOKENS
        )
        self.decoder = Decoder(shape)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.decoder(tokens).flatten(0, 1).float(), tokens.flatten())


class Residual(nn.Module):
    """A block of convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norms[1](self.second(torch.nn.functional.gelu(self.norms[0](self.first(x)))))


class Convolutions(nn.Module):
    """A net of convolutions that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(16) for _ in range(LAYERS))
        self.head = nn.Linear(16, 2)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3))).square().mean()


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=TOKENS,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=256, image_size=32,
        patch_size=4, hidden_dropout_prob=0.1, num_labels=WORDS,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, tuple[Any, Dataset[Any]]] = {
    "gpt": (lambda: Decoding("gpt"), Lines(tokens=(TOKENS,))),
    "llama": (lambda: Decoding("llama"), Lines(tokens=(TOKENS,))),
    "bert": (bert, Lines(input_ids=(TOKENS,), labels=(TOKENS,))),
    "vit": (vit, Lines(pixel_values=(3, 32, 32), labels=())),
    "convolutions": (Convolutions, Lines(images=(3, 32, 32))),
}


class Trained(NamedTuple):
    """One update, and its activations."""

    loss: float
    weights: dict[str, Tensor]
    peak: int  # bytes of activations
    planned: PlannedCost | None


def is_on_host(tensor: Tensor) -> bool:
    """Return whether it is a buffer of moves, which would be on the host beside a device, or a random state."""
    return tensor.dtype is torch.uint8 and tensor.ndim == 1


def trained(name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Return the second update of a model."""
    make, data = MODELS[name]
    plans: list[PlannedCost] = []
    plan = saved.planned_cost
    monkeypatch.setattr(saved, "planned_cost", lambda *args: plans.append(plan(*args)) or plans[-1])
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": ROWS, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **changes,
    }  # fmt: skip
    engine, _, loader, _ = zeromesh.initialize(model=make(), config=config, training_data=data)
    assert loader is not None
    batch = next(iter(loader))
    for number in range(2):
        torch.manual_seed(number)  # of dropout
        with LiveStorages(is_on_host) as live:
            output = engine(**batch)
            loss = output if isinstance(output, Tensor) else output.loss
            del output
            engine.backward(loss)
        engine.step()
    result = Trained(float(loss.detach()), engine.gathered_state_dict(), live.peak, plans[0] if plans else None)
    engine.destroy()
    return result


def auto(share: float, planned: PlannedCost) -> dict[str, Any]:
    """Return the section with a budget between the least and the most that a plan needs."""
    costs = planned.ranks[0].costs
    least, most = (costs.peak((plan,) * LAYERS) for plan in (BlockPlan(), BlockPlan(keeps_all=True)))
    budget = least + share * (most - least)
    return {"activation_checkpointing": {"enabled": True, "granularity": "auto", "budget_gb": budget * 1.00001 / 1e9}}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set a machine by whether it has a link to its host."""

    def use(link: bool) -> None:
        usual = cluster("h100", 1)
        node = replace(usual.nodes[0][0], device=replace(usual.nodes[0][0].device, processor=not link))
        replace(usual, nodes=((node, 1),)).save(path := tmp_path / "machine.json")
        monkeypatch.setenv(MACHINE, str(path))

    return use


SETTINGS = [
    ("gpt", {}, 0.3, False),
    ("llama", {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, 0.2, True),
    pytest.param("vit", {}, 0.6, False, marks=pytest.mark.full),
    *(
        pytest.param(name, changes, share, link, marks=pytest.mark.full)
        for name in MODELS
        for changes, share, link in (
            ({}, 0.0, False),
            ({"zero_optimization": {"stage": 3}}, 0.5, False),
            ({"bf16": {"enabled": True}}, 0.25, True),
            ({"train_micro_batch_size_per_gpu": ROWS // 2}, 1.0, False),
        )
    ),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("name", "changes", "share", "link"), SETTINGS)
def test_planned_peaks_are_measured_and_bits_stay(
    name: str, changes: dict[str, Any], share: float, link: bool, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(link)
    whole = trained(name, changes | {"activation_checkpointing": "auto"}, monkeypatch)
    assert whole.planned is not None
    assert all(plan.keeps_all for plan in whole.planned.ranks[0].plans)
    got = trained(name, changes | auto(share, whole.planned), monkeypatch)
    assert got.planned is not None
    if link:
        assert any(Saved.MOVE in (plan.inputs, *plan.results.values()) for plan in got.planned.ranks[0].plans)
    for run in whole, got:
        peak, predicted = run.peak, run.planned.ranks[0].peak
        assert LEAST.get(name, 1 - AIM) * predicted <= peak <= (1 + AIM) * predicted + GRADIENTS
    assert got.loss == whole.loss
    assert all(torch.equal(value, whole.weights[key]) for key, value in got.weights.items())
