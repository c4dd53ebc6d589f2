"""Batches in an order that is a pure function of the seed and the number of samples consumed.

A run is resumed by its count of samples alone: nothing is replayed, and the number of ranks may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zeromesh.train.data.order import Blend, seed_of
from zeromesh.train.data.prepared import LENGTH, PreparedData
from zeromesh.train.data.samples import NO_LABEL, Sample, Samples, open_samples


@dataclass(frozen=True)
class Batch:
    """A micro-batch; all tensors are int64 of shape ``(rows, length)``.

    Attributes:
        tokens: token ids.
        labels: the id that follows each token, or -100 where that is not learned.
        positions: of each token in its document; None where tokens see all before them in their row.
        documents: number of each token's document in its row, what is filled up being one too; None as before.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The same on a device."""
        given = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        return Batch(**{name: tensor.to(device, non_blocking=True) for name, tensor in given.items()})


@dataclass(frozen=True)
class Share:
    """The part of every global batch that one data rank feeds.

    The global batch of ``micro_batches * size * rows`` consecutive samples is cut into micro-batches, and each of
    them into ``rows`` consecutive samples per data rank.
    """

    rank: int
    size: int
    rows: int
    micro_batches: int

    @property
    def global_batch(self) -> int:
        """Samples that all ranks consume in one step."""
        return self.micro_batches * self.size * self.rows

    def micro_batch(self, number: int) -> range:
        """Places of this rank's samples in the global batch, for the micro-batch of that number."""
        start = (number * self.size + self.rank) * self.rows
        return range(start, start + self.rows)


def training_samples(prepared: PreparedData, length: int, seed: int) -> list[Samples]:
    """Sources of each part of the blend.

    Raises:
        ValueError: if a part has no sample of ``length`` tokens.
    """
    parts = []
    for number, part in enumerate(prepared.train):
        parts.append(open_samples(part, length, seed_of(seed, number), prepared.packing, prepared.pad))
        if not parts[-1].count:
            raise ValueError(
                f"{LENGTH} = {length} needs {length + 1} tokens of training text, and there are "
                f"{part.tokens} in {str(part.prefix)!r}; shorten the sequence, or add text"
            )
    return parts


def training_batches(prepared: PreparedData, length: int, share: Share, seed: int, consumed: int) -> Iterator[Batch]:
    """Micro-batches of this rank without end.

    Args:
        prepared: the text.
        length: tokens of a sample.
        share: this rank's part of a global batch.
        seed: seed of the order; the same on all ranks.
        consumed: samples that all ranks together have consumed so far.

    Raises:
        ValueError: if a part of the blend has no sample.
    """
    parts = training_samples(prepared, length, seed)
    blend = Blend(prepared.weights, consumed)
    while True:
        chosen = blend.take(share.global_batch)
        for number in range(share.micro_batches):
            own = [chosen[place] for place in share.micro_batch(number)]
            yield _batch([parts[part].sample(index) for part, index in own], prepared.document_attention)


def evaluation_batches(prepared: PreparedData, length: int, rows: int, rank: int, size: int) -> Iterator[Batch]:
    """This rank's share of batches that together have every held-out label once, but the first of each stream.

    Where several sets are held out their rows alternate in proportion, so that the first batches are of all of them.

    Args:
        prepared: the text.
        length: tokens of a row. Every row is a window of its own.
        rows: rows of a batch.
        rank: this rank, which gets every ``size``-th batch.
        size: number of ranks. All get equally many batches; those that are left over have no labels.
    """
    parts = [open_samples(part, length, 0, prepared.packing, prepared.pad) for part in prepared.validation]
    places = [(np.arange(part.rows) + 0.5) / max(part.rows, 1) for part in parts]
    owners = np.repeat(np.arange(len(parts)), [part.rows for part in parts])
    numbers = np.concatenate([np.empty(0, dtype=np.int64), *(np.arange(part.rows) for part in parts)])
    order = np.argsort(np.concatenate([np.empty(0), *places]), kind="stable")
    empty = _empty(length, prepared.pad)
    for start in range(rank * rows, -(-len(order) // (rows * size)) * rows * size, rows * size):
        chosen = order[start : start + rows]
        samples = [parts[owners[place]].row(int(numbers[place])) for place in chosen]
        yield _batch([*samples, *[empty] * (rows - len(samples))], prepared.document_attention)


def _empty(length: int, pad: int) -> Sample:
    nothing = np.zeros(length, dtype=np.int64)
    return Sample(nothing + pad, nothing + NO_LABEL, np.arange(length), nothing)


def _batch(samples: Sequence[Sample], document_attention: bool) -> Batch:
    names = ("tokens", "labels", *(("positions", "documents") if document_attention else ()))
    stacked = (np.stack([getattr(sample, name) for sample in samples]) for name in names)
    return Batch(*(torch.from_numpy(column) for column in stacked))
