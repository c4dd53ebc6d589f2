"""The loss on text that the model was not trained on, also in bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

import torch

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
        length: tokens of a window.
        rows: windows of a micro-batch.
    """

    prepared: Prepared
    length: int
    rows: int

    def score(self, engine: Engine, batches: int | None = None) -> Score | None:
        """Evaluate the model on the first ``batches`` micro-batches of every rank; None for all. All ranks call it.

        Returns:
            The score, the same on every rank; None if there is no held-out text.
        """
        engine.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        share = evaluation_batches(self.prepared, self.length, self.rows, engine.data_rank, engine.data_size)
        with torch.no_grad():
            for batch in islice(share, batches):
                sums += _sums(engine, batch)
        engine.train()
        nats, count = engine.mesh.group("world").exchange(sums).sum(0).tolist()
        if not count:
            return None
        size = self.prepared.held_out_bytes
        bits = nats / count / math.log(2) * self.prepared.held_out_labels / size if size else None
        return Score(loss=nats / count, bits_per_byte=bits)


def _sums(engine: Engine, batch: Batch) -> torch.Tensor:
    """Nats and labels of a micro-batch, fp64."""
    loss = engine(**arguments(batch.to(engine.device)))
    count = int((batch.labels != NO_LABEL).sum())
    return torch.tensor([float(loss) * count if count else 0.0, count], dtype=torch.float64)


def arguments(batch: Batch) -> dict[str, torch.Tensor]:
    """A batch as the decoder takes it."""
    return {name: tensor for name, tensor in vars(batch).items() if tensor is not None}
