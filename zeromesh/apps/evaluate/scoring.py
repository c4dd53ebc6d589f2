"""Log-likelihoods of tokens under an engine, in any layout: data ranks share the rows, and all get all results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from zeromesh import Engine
from zeromesh.apps.train.data.ordered_loader import NO_LABEL, Batch
from zeromesh.apps.train.data.tokenizer import Ids
from zeromesh.apps.train.model import LanguageModel
from zeromesh.engine.batches import WithLoss

T = TypeVar("T")

Measure = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function from logits ``(rows, length, vocabulary)`` and labels ``(rows, length)`` to values, shape ``(rows, n)``."""

SORTED_AT_ONCE = 64  # batches whose rows are sorted by length, so that few are padded by much


class Row(NamedTuple):
    """A sequence to score; both arrays are int64 of shape ``(length,)``."""

    tokens: Ids
    labels: Ids  # the id that follows each token, or NO_LABEL where it is context only


def continuation_row(context: Sequence[int], continuation: Sequence[int], longest: int) -> Row:
    """Return the row that scores a continuation; of a context that is too long, the last tokens are kept."""
    ids = np.array([*context, *continuation][-(longest + 1) :], dtype=np.int64)
    labels = ids[1:].copy()
    labels[: max(0, len(labels) - len(continuation))] = NO_LABEL
    return Row(ids[:-1], labels)


def likelihoods(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-likelihood of each row's labels in nats, and how many of them are the likeliest id."""
    # Row by row: in fp32 the logits of a whole batch would take twice the memory of those in 16 bits.
    sums, hits = [], []
    for row in range(len(labels)):
        wide = logits[row : row + 1].flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(wide, labels[row], ignore_index=NO_LABEL, reduction="none")
        sums.append(-losses.double().sum())
        hits.append(((wide.argmax(-1) == labels[row]) & (labels[row] != NO_LABEL)).sum().double())
    return torch.stack([torch.stack(sums), torch.stack(hits)], dim=1)


@dataclass(frozen=True)
class _Probe(WithLoss):
    """A micro-batch whose logits are measured; its loss means nothing."""

    batch: Batch
    language: LanguageModel
    measure: Measure
    note: Callable[[torch.Tensor], None]

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        logits = self.language.logits(model, self.batch)
        self.note(self.measure(logits, self.batch.labels).detach().double().cpu())
        return torch.zeros((), device=logits.device)


@dataclass(frozen=True)
class Scorer:
    """A model on all ranks. Every rank calls the methods with the same arguments, and gets the same results."""

    engine: Engine
    language: LanguageModel
    batch: int  # rows of a rank in one forward
    longest: int  # tokens of the longest row that the model takes

    def score(self, rows: Iterable[Row], measure: Measure = likelihoods) -> Iterator[list[float]]:
        """Yield the values of each row, in order. Collective."""
        together = self.batch * self.engine.data_size
        for some in _groups(rows, together * SORTED_AT_ONCE):
            order = sorted(range(len(some)), key=lambda place: -len(some[place].tokens))
            values: dict[int, list[float]] = {}
            for places in _groups(order, together):
                results = self._forward([some[place] for place in places], measure)
                values |= dict(zip(places, results, strict=True))
            yield from (values[place] for place in range(len(some)))

    def _forward(self, rows: Sequence[Row], measure: Measure) -> list[list[float]]:
        """Return the values of the rows of all ranks in one forward."""
        engine, width = self.engine, max(len(row.tokens) for row in rows)
        # A rank of the context axis has whole rows here, and a row need not be divisible by their number.
        empty = Row(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        filled = [*rows, *[empty] * (self.batch * engine.data_size - len(rows))]
        local = filled[engine.data_rank * self.batch : (engine.data_rank + 1) * self.batch]
        # Padded behind, where no token of a causal model looks.
        tokens = np.stack([np.pad(row.tokens, (0, width - len(row.tokens))) for row in local])
        labels = np.stack([np.pad(row.labels, (0, width - len(row.labels)), constant_values=NO_LABEL) for row in local])
        notes: list[torch.Tensor] = []
        batch = Batch(torch.from_numpy(tokens), torch.from_numpy(labels))
        spread = engine.context_parallel
        with nullcontext() if spread is None else spread.paused():
            engine.eval_batch(iter([_Probe(batch, self.language, measure, notes.append)]), num_micro_batches=1)
        return self._shared(notes, len(rows))

    def _shared(self, notes: Sequence[torch.Tensor], rows: int) -> list[list[float]]:
        """Return the values of all data ranks, of which only the last stages of a pipeline have measured any."""
        world = self.engine.mesh.group("world")
        columns = int(world.exchange(torch.tensor([notes[0].shape[1] if notes else 0])).max())
        local = notes[0] if notes else torch.zeros(self.batch, columns, dtype=torch.float64)
        head = torch.tensor([self.engine.data_rank, len(notes)], dtype=torch.float64)
        by_rank: dict[int, torch.Tensor] = {}
        for vector in world.exchange(torch.cat([head, local.flatten()])):
            if vector[1]:  # ranks that share rows have the same values
                by_rank.setdefault(int(vector[0]), vector[2:].view(self.batch, columns))
        every: list[list[float]] = torch.cat([by_rank[rank] for rank in sorted(by_rank)]).tolist()
        return every[:rows]


def _groups(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while some := list(islice(iterator, size)):
        yield some
