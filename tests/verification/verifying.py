"""Comparisons that tests run on the ranks at hand."""

from __future__ import annotations

from typing import Any

import torch

import zeromesh
from huggingface_models import MODELS
from zeromesh.verification.report import Report


def of_model(name: str, config: dict[str, Any], steps: int = 3, **options: Any) -> Report:
    """Verify a model of transformers, on every rank."""
    torch.manual_seed(0)
    row = MODELS[name]
    return zeromesh.verify(row.build(), config, row.batch(torch.Generator().manual_seed(1)), steps=steps, **options)
