"""Comparisons that tests run on the ranks at hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zeromesh
from huggingface_models import MODELS
from zeromesh.verification.report import Report


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
    """A model with its batch, as a user's function returns them."""
    torch.manual_seed(0)
    return Net(), {"images": torch.randn(4, 3, 8, 8), "labels": torch.randint(5, (4,))}


def of_net(_: str, config: dict[str, Any], **options: Any) -> Report:
    """Verify the small network, on every rank."""
    model, batch = net_and_batch()
    return zeromesh.verify(model, config, batch, **options)
