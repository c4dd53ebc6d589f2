"""The loss of a run, in training as in evaluation: every label counts the same, whichever rank has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from zeromesh.batches import WithLoss
from zeromesh.context.applied import SpreadSequences
from zeromesh.context.order import keep
from zeromesh.engine import Engine
from zeromesh.train.data.loader import Batch
from zeromesh.train.data.samples import NO_LABEL
from zeromesh.train.model import LanguageModel


@dataclass(frozen=True)
class Weighted(WithLoss):
    """A micro-batch whose loss is what its labels cost together, in nats, times a factor.

    Attributes:
        batch: the micro-batch.
        language: how the model is called.
        spread: how its sequences are spread over ranks, if they are.
        factor: the same on all ranks.
    """

    batch: Batch
    language: LanguageModel
    spread: SpreadSequences | None
    factor: float

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        """A scalar, in at least fp32.

        Ranks that share the micro-batch's sequences get the same, of which each has the gradient of its own tokens.
        """
        logits, labels = self.language.logits(model, self.batch), self.batch.labels
        # A sum over the vocabulary in 16 bits would lose most of its digits.
        wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        if self.spread is None:
            return F.cross_entropy(wide, labels.flatten(), ignore_index=NO_LABEL, reduction="sum") * self.factor
        count = int((labels != NO_LABEL).sum())
        if not count:
            return wide.sum() * 0
        own = keep(labels, self.spread.group.rank, self.spread.group.size, 1)
        mean = self.spread.mean_loss(F.cross_entropy(wide, own.flatten(), ignore_index=NO_LABEL), own)
        return mean * count * self.factor


def weighted(engine: Engine, language: LanguageModel, given: Sequence[Batch]) -> tuple[list[Weighted], int]:
    """This rank's micro-batches, for the engine, whose mean loss is then nats per label. All ranks call it.

    Args:
        engine: takes the mean over data ranks and micro-batches.
        language: how the model is called.
        given: as many on all ranks.

    Returns:
        The same micro-batches, and the labels of all ranks together.
    """
    world = engine.mesh.group("world")
    counts = torch.tensor([sum(int((batch.labels != NO_LABEL).sum()) for batch in given)])
    # Ranks that share a batch count the same labels.
    labels = int(world.exchange(counts).sum()) * engine.data_size // world.size
    factor = engine.data_size * len(given) / max(1, labels)
    return [Weighted(batch, language, engine.context_parallel, factor) for batch in given], labels
