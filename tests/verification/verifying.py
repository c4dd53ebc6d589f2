"""Comparisons that tests run on the ranks at hand."""

from typing import Any

import torch
from torch import nn
from transformers import RobertaConfig, RobertaForCausalLM

import zeromesh
from huggingface_models import MODELS
from zeromesh.apps.verify.verification_report import Report


def of_model(name: str, config: dict[str, Any], steps: int = 3, **options: Any) -> Report:
    """Verify a model of transformers, on every rank."""
    torch.manual_seed(0)
    row = MODELS[name]
    return zeromesh.verify(row.build(), config, row.batch(torch.Generator().manual_seed(1)), steps=steps, **options)


class Net(nn.Module):
    """A small convolutional network with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy."""
        features = self.second(self.first(images)).mean((2, 3))
        return nn.functional.cross_entropy(self.head(features).float(), labels)


def net_and_batch() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a model with its batch, as a user's function returns them."""
    torch.manual_seed(0)
    return Net(), {"images": torch.randn(4, 3, 8, 8), "labels": torch.randint(5, (4,))}


def of_net(_: str, config: dict[str, Any], **options: Any) -> Report:
    """Verify the small network, on every rank."""
    model, batch = net_and_batch()
    return zeromesh.verify(model, config, batch, **options)


class Routed(nn.Module):
    """Experts whose router is to compute in fp32, as in models of transformers."""

    _keep_in_fp32_modules_strict = ("router.",)

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.router = nn.Embedding(32, 16), nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the experts' outputs, weighted by the router."""
        x = self.tokens(tokens)
        weights = self.router(x.to(self.router.weight.dtype)).softmax(-1).to(x.dtype)
        y = sum(weights[..., number, None] * expert(x) for number, expert in enumerate(self.experts))
        return (y.sum(-1) - labels).float().square().mean()


class Recommender(nn.Module):
    """Two tables with sparse gradients, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, 8, sparse=True), nn.EmbeddingBag(60, 8, mode="sum", sparse=True)
        self.top = nn.Linear(16, 1)
        self.unused_part = nn.Parameter(torch.zeros(0))  # without elements, as of a part that is switched off

    def forward(self, user: torch.Tensor, items: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Return the mean square error."""
        features = torch.cat([self.users(user), self.items(items)], 1)
        return (self.top(features).squeeze(1) - label).float().square().mean() + 0 * self.unused_part.sum()


def of_routed(_: str, config: dict[str, Any], **options: Any) -> Report:
    """Verify the experts, on every rank."""
    torch.manual_seed(0)
    batch = {"tokens": torch.randint(32, (4, 8)), "labels": torch.randn(4, 8)}
    return zeromesh.verify(Routed(), config, batch, **options)


def of_tables(_: str, config: dict[str, Any], **options: Any) -> Report:
    """Verify the recommender, on every rank."""
    torch.manual_seed(0)
    batch = {"user": torch.randint(50, (8,)), "items": torch.randint(60, (8, 3)), "label": torch.randn(8)}
    return zeromesh.verify(Recommender(), config, batch, **options)


def of_decoder(_: str, config: dict[str, Any], **options: Any) -> Report:
    """Verify a decoder that counts its positions itself, on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    shape = RobertaConfig(vocab_size=96, max_position_embeddings=40, is_decoder=True, pad_token_id=1, **sizes)
    ids = torch.randint(3, 96, (4, 16))
    return zeromesh.verify(RobertaForCausalLM(shape), config, {"input_ids": ids, "labels": ids}, **options)


OWN = {"decoder": of_decoder, "net": of_net, "routed": of_routed, "tables": of_tables}
"""Comparisons of models that are none of transformers', by name."""
