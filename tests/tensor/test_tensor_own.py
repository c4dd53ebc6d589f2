"""Models of one's own are split by what their code does, and the built-in decoders as models of transformers are."""

from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from compare import assert_close
from harness import run_ranks
from run import whole_state
from test_tensor_rules import LIMIT, STEPS, batch, config


class Mixer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_head = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        parts = self.c_attn(x).split(width, dim=2)
        q, k, v = (y.view(samples, length, self.n_head, width // self.n_head).transpose(1, 2) for y in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(samples, length, width))


class Normed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = nn.functional.gelu(self.fc1(x))
        return self.fc2(nn.functional.layer_norm(wide, wide.shape[-1:]))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(97, 32)
        self.mixers = nn.ModuleList(Mixer(32, 4) for _ in range(2))
        self.mlps = nn.ModuleList(Normed(32) for _ in range(2))
        self.torch = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 97)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for mixer, mlp in zip(self.mixers, self.mlps, strict=True):
            x = x + mixer(x)
            x = x + mlp(x)
        return nn.functional.cross_entropy(self.head(self.torch(x)).flatten(0, 1), labels.flatten())


def trained_on_ids(model: nn.Module, settings: dict[str, Any]) -> Any:
    engine = zeromesh.initialize(model=model.double(), config=settings)[0]
    losses = []
    for number in range(STEPS):
        engine.backward(loss := engine(batch(number, 97), batch(number, 97)))
        engine.step()
        losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        losses.append(engine(batch(9, 97), batch(9, 97)).item())
    parts = {name: tuple(parameter.shape) for name, parameter in engine.module.named_parameters()}
    return losses, whole_state(engine.module), parts


def own(tensor: int, row: int) -> Any:
    torch.manual_seed(0)
    return trained_on_ids(Own(), config(tensor, row))


@pytest.mark.parametrize(("tensor", "row"), [pytest.param(2, 0, marks=pytest.mark.full), (4, 3)])
def test_layers_of_unknown_modules_are_split_by_what_follows_them(tensor: int, row: int) -> None:
    expected = run_ranks(own, 1, 1, 0, timeout=LIMIT)[0]
    for losses, state, parts in run_ranks(own, tensor, tensor, row, timeout=LIMIT):
        assert losses == pytest.approx(expected[0], rel=1e-9)
        assert_close(state, expected[1])
        assert parts["mixers.0.c_attn.weight"] == (96 // tensor, 32)
        assert parts["mixers.0.c_proj.weight"] == (32, 32 // tensor)
        assert parts["mlps.1.fc2.weight"] == (32, 128 // tensor)  # of the norm before it ranks exchange two sums


def built_in(tensor: int, architecture: str, sequence: bool) -> Any:
    from zeromesh.apps.train.architectures.decoder import Decoder
    from zeromesh.apps.train.train_settings import ModelShape

    torch.manual_seed(0)
    shape = ModelShape(
        architecture=architecture, vocab_size=97, hidden_size=32, layers=2, heads=4, kv_heads=2, sequence_length=8
    )
    return trained_on_ids(Decoder(shape), config(tensor, 2, tensor_parallel={"sequence": sequence}))


@pytest.mark.parametrize(
    ("architecture", "sequence"),
    [
        ("gpt", True),
        ("llama", False),
        pytest.param("gpt", False, marks=pytest.mark.full),
        pytest.param("llama", True, marks=pytest.mark.full),
    ],
)
def test_the_built_in_decoders_are_split(architecture: str, sequence: bool) -> None:
    expected = run_ranks(built_in, 1, 1, architecture, False, timeout=LIMIT)[0]
    for losses, state, parts in run_ranks(built_in, 2, 2, architecture, sequence, timeout=LIMIT):
        assert losses == pytest.approx(expected[0], rel=1e-9)
        assert_close(state, expected[1])
        split = [name for name, shape in parts.items() if shape != tuple(expected[1][name].shape)]
        assert {name.split(".")[-2] for name in split} >= {"query", "key", "output", "up", "down", "embedding"}
