"""The loss on text that the model was not trained on, also in bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F

from zeromesh.cli.model import LanguageModel
from zeromesh.context.order import keep
from zeromesh.data.loader import Batch, evaluation_batches
from zeromesh.data.prepared import Prepared
from zeromesh.data.samples import NO_LABEL
from zeromesh.engine import Engine


@dataclass(frozen=True)
class Score:
    """How well held-out text is predicted.

    Attributes:
        loss: nats per label.
        bits_per_byte: bits that the labels cost, ends of text included, per byte of text that they stand for. A label
            is taken to stand for as many bytes as all held-out labels do on average, of which an evaluation may see a
            part only. None where the bytes are not known, as for tokens without their tokenizer.
    """

    loss: float
    bits_per_byte: float | None


@dataclass(frozen=True)
class HeldOut:
    """The held-out text and how to read it.

    Attributes:
        prepared: the text.
        language: how the model is called.
        rows: windows of a micro-batch.
    """

    prepared: Prepared
    language: LanguageModel
    rows: int

    def score(self, engine: Engine, batches: int | None = None) -> Score | None:
        """Evaluate the model on the first ``batches`` micro-batches of every rank; None for all. All ranks call it.

        Returns:
            The score, the same on every rank; None if there is no held-out text.
        """
        engine.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        length = self.language.sequence_length
        share = evaluation_batches(self.prepared, length, self.rows, engine.data_rank, engine.data_size)
        with torch.no_grad():
            for batch in islice(share, batches):
                count = int((batch.labels != NO_LABEL).sum())
                sums += torch.tensor([float(nats(self.language, engine, batch)), count], dtype=torch.float64)
        engine.train()
        total, count = engine.mesh.group("world").exchange(sums).sum(0).tolist()
        if not count:
            return None
        size = self.prepared.held_out_bytes
        bits = total / count / math.log(2) * self.prepared.held_out_labels / size if size else None
        return Score(loss=total / count, bits_per_byte=bits)


def nats(language: LanguageModel, engine: Engine, batch: Batch) -> torch.Tensor:
    """What the labels of a micro-batch cost together: a scalar, in at least fp32.

    Ranks that share the micro-batch's sequences get the same, of which each has the gradient of its own tokens.
    """
    batch = batch.to(engine.device)
    logits = language.logits(engine, batch)
    # A sum over the vocabulary in 16 bits would lose most of its digits.
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    spread = engine.context_parallel
    if spread is None:
        return F.cross_entropy(wide, batch.labels.flatten(), ignore_index=NO_LABEL, reduction="sum")
    count = int((batch.labels != NO_LABEL).sum())
    if not count:
        return wide.sum() * 0
    own = keep(batch.labels, spread.group.rank, spread.group.size, 1)
    return spread.mean_loss(F.cross_entropy(wide, own.flatten(), ignore_index=NO_LABEL), own) * count
