"""The loss on text that the model was not trained on, also in bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from zeromesh.architectures.decoder import IGNORE_LABEL
from zeromesh.data.loader import evaluation_batches
from zeromesh.engine import Engine


@dataclass(frozen=True)
class Score:
    """How well held-out text is predicted.

    Attributes:
        loss: nats per token.
        bits_per_byte: bits that all tokens cost, ends of text included, per byte of text that they stand for.
    """

    loss: float
    bits_per_byte: float


@dataclass(frozen=True)
class HeldOut:
    """The held-out text and how to read it.

    Attributes:
        tokens: the stream of token ids.
        byte_lengths: bytes that each id stands for.
        length: tokens of a window.
        rows: windows of a micro-batch.
    """

    tokens: NDArray[np.unsignedinteger]
    byte_lengths: NDArray[np.int64]
    length: int
    rows: int

    def score(self, engine: Engine, batches: int | None = None) -> Score | None:
        """Evaluate the model on the first ``batches`` micro-batches of every rank; None for all. All ranks call it.

        Returns:
            The score, the same on every rank; None if there is no held-out text.
        """
        if len(self.tokens) < 2:
            return None
        engine.eval()
        sums = torch.zeros(3, dtype=torch.float64)
        share = evaluation_batches(
            self.tokens, self.length, self.rows, engine.data_rank, engine.data_size, IGNORE_LABEL
        )
        with torch.no_grad():
            for tokens, labels in islice(share, batches):
                sums += self._sums(engine, tokens, labels)
        engine.train()
        nats, count, size = engine.mesh.group("world").exchange(sums).sum(0).tolist()
        return Score(loss=nats / count, bits_per_byte=nats / math.log(2) / size)

    def _sums(self, engine: Engine, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Nats, tokens and bytes of a micro-batch, fp64."""
        loss = engine(tokens.to(engine.device), labels.to(engine.device))
        counted = labels[labels != IGNORE_LABEL].numpy()
        if len(counted) == 0:
            return torch.zeros(3, dtype=torch.float64)
        size = int(self.byte_lengths[counted].sum())
        return torch.tensor([float(loss) * len(counted), len(counted), size], dtype=torch.float64)
