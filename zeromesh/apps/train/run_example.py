"""Arguments of a forward of a run's model, without values, and the loss of its output, for the planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from zeromesh.apps.train.train_settings import TrainSettings


def run_example(settings: TrainSettings, rows: int) -> tuple[dict[str, Any], Callable[[Any], torch.Tensor]]:
    """Return arguments of a forward of so many samples, and the loss of its output; ValueError without a model."""
    if settings.huggingface is not None:
        inputs = {"input_ids": tokens_without_values(rows, settings.huggingface.sequence_length), "use_cache": False}
        return inputs, lambda output: _mean_loss(output.logits)
    if settings.model is not None:
        return {"tokens": tokens_without_values(rows, settings.model.sequence_length)}, _mean_loss
    raise ValueError("the settings have neither a section 'model' nor 'huggingface'")


def tokens_without_values(rows: int, length: int) -> torch.Tensor:
    """Return token ids of shape ``(rows, length)`` on the meta device."""
    return torch.empty(rows, length, dtype=torch.int64, device="meta")


def _mean_loss(logits: torch.Tensor) -> torch.Tensor:
    """Return the loss of logits for labels without values, as the run computes it."""
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, torch.empty(len(wide), dtype=torch.int64, device=wide.device))
