"""The loss on text that the model was not trained on, also in bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

from zeromesh.engine import Engine
from zeromesh.train.data.loader import evaluation_batches
from zeromesh.train.data.prepared import PreparedData
from zeromesh.train.loss import weighted
from zeromesh.train.model import LanguageModel

AT_ONCE = 32
"""Micro-batches of a rank that are evaluated together: a pipeline fills and empties once for them, and holds them."""


@dataclass(frozen=True)
class Score:
    """Evaluation on held-out text.

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

    prepared: PreparedData
    language: LanguageModel
    rows: int

    def score(self, engine: Engine, batches: int | None = None) -> Score | None:
        """Evaluate the model on the first ``batches`` micro-batches of every rank; None for all. All ranks call it.

        Returns:
            The score, the same on every rank; None if there is no held-out text.
        """
        total, count = 0.0, 0
        length = self.language.sequence_length
        share = evaluation_batches(self.prepared, length, self.rows, engine.data_rank, engine.data_size)
        share = islice(share, batches)
        while given := list(islice(share, AT_ONCE)):
            micro_batches, labels = weighted(engine, self.language, given)
            total += labels * float(engine.eval_batch(iter(micro_batches), num_micro_batches=len(given)))
            count += labels
        if not count:
            return None
        size = self.prepared.held_out_bytes
        bits = total / count / math.log(2) * self.prepared.held_out_labels / size if size else None
        return Score(loss=total / count, bits_per_byte=bits)
