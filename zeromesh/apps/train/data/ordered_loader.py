"""Batches in an order that is a pure function of the seed and the number of samples consumed.

So a run is resumed by its count of samples alone: nothing is replayed, and the number of ranks may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zeromesh.apps.train.data.sample_order import Blend, Permutation, pack, seed_of
from zeromesh.apps.train.data.token_store import PreparedData, TokenSet
from zeromesh.base.words import counted

Array = NDArray[np.int64]

NO_LABEL = -100  # of a token that is not learned; the ignore_index of torch and transformers


@dataclass(frozen=True)
class Sample:
    """One row of a batch; all arrays are int64 of shape ``(length,)``, or ``(2, length)`` for two answers."""

    tokens: Array
    labels: Array  # the id that follows each token, or NO_LABEL
    positions: Array  # place of each token in the part of its document that is in the row
    documents: Array  # number of each token's document in the row; padding is a document of its own
    reference: NDArray[np.float32] | None = None  # log-likelihoods of the two answers, shape (2,)


def open_samples(part: TokenSet, length: int, seed: int, packing: str, pad: int) -> Stream | Packed:
    """Return the samples of a set; raise ValueError if a record is longer than a sample."""
    if part.pairs:
        return Pairs(part, length, seed, pad)
    return Packed(part, length, seed, packing, pad) if part.packed else Stream(part, length, seed, pad)


class Line:
    """Documents of a set one after the other, in the order of ``numbers``, in 16 bytes of memory per document."""

    def __init__(self, part: TokenSet, numbers: Array) -> None:
        bounds = part.indexed.bounds
        self.begins = bounds[numbers]  # token of the file at which each document begins
        self.ends = np.cumsum(bounds[numbers + 1] - self.begins)  # token of the line at which each document ends

    def find(self, start: int, stop: int) -> tuple[Array, Array, Array]:
        """Return the places in the file, the documents and the positions of the line's tokens ``start`` to ``stop``."""
        # Documents are counted from the first of them, positions from the start of the document or from start.
        first, last = np.searchsorted(self.ends, (start, stop - 1), side="right")
        before = self.ends[first - 1] if first else 0
        ends = np.minimum(self.ends[first : last + 1], stop)
        starts = np.concatenate([[before], ends[:-1]])
        counts = ends - np.maximum(starts, start)
        places = np.arange(start, stop)
        offsets = places + np.repeat(self.begins[first : last + 1] - starts, counts)
        return offsets, np.repeat(np.arange(len(ends)), counts), places - np.repeat(np.maximum(starts, start), counts)


class Stream:
    """Samples of a stream: the documents of an epoch in a shuffled order, cut every ``length`` tokens."""

    def __init__(self, part: TokenSet, length: int, seed: int, pad: int) -> None:
        self.part, self.length, self.seed, self.pad = part, length, seed, pad
        # The last token of a sample is only a label, and is the first token of the next sample.
        labels = max(part.tokens - 1, 0)
        # Samples of an epoch, without the rest at its end; and those that hold every document once, for evaluation.
        self.count, self.rows = labels // length, -(-labels // length)
        self._line: tuple[int | None, Line] | None = None

    def sample(self, index: int) -> Sample:
        """Return sample ``index`` of an endless order. Each epoch has every sample once, in another order."""
        epoch, position = divmod(index, self.count)
        window = int(Permutation(self.count, seed_of(self.seed, epoch, 1))[np.array([position])][0])
        return self._window(self._open(epoch), window)

    def row(self, number: int) -> Sample:
        """Return a sample in the stored order, for evaluation. The last one may have padding."""
        return self._window(self._open(None), number)

    def _open(self, epoch: int | None) -> Line:
        # One line is in memory at a time: that of the epoch, or of the evaluation.
        if self._line is None or self._line[0] != epoch:
            numbers = self.part.numbers
            # Evaluation, which has no epoch, reads in the stored order: this needs no random access to the file.
            if epoch is not None:
                order = Permutation(len(numbers), seed_of(self.seed, epoch, 0))[np.arange(len(numbers))]
                numbers = numbers[order]
            self._line = epoch, Line(self.part, numbers)
        return self._line[1]

    def _window(self, line: Line, number: int) -> Sample:
        start = number * self.length
        offsets, documents, positions = line.find(start, min(start + self.length + 1, self.part.tokens))
        ids = self.part.indexed.tokens[offsets].astype(np.int64)
        return _filled(self.length, self.pad, [(ids[:-1], ids[1:], positions[:-1], documents[:-1])])


class Packed:
    """Samples of whole records: as many as fit into a row, or one. Epochs differ in the order of the rows only."""

    def __init__(self, part: TokenSet, length: int, seed: int, packing: str, pad: int) -> None:
        self.part, self.length, self.seed, self.pad = part, length, seed, pad
        bounds, numbers = part.indexed.bounds, part.numbers
        # A record of n tokens takes n - 1 places, since its last token is only a label.
        places = np.maximum(bounds[numbers + 1] - bounds[numbers] - 1, 1)
        if places.max(initial=0) > length:
            raise ValueError(
                f"{str(part.prefix)!r}: document {numbers[places.argmax()]} has {counted(places.max() + 1, 'token')}, "
                f"and a sample of model.sequence_length or huggingface.sequence_length = {length} holds "
                f"{length + 1} with its last label; make it longer"
            )
        rows = pack(places, length) if packing == "pack" else np.arange(len(places))
        self._members = np.argsort(rows, kind="stable")
        self._ends = np.cumsum(np.bincount(rows))
        self.count = self.rows = len(self._ends)

    def sample(self, index: int) -> Sample:
        """Return sample ``index`` of an endless order."""
        epoch, position = divmod(index, self.count)
        return self.row(int(Permutation(self.count, seed_of(self.seed, epoch, 1))[np.array([position])][0]))

    def row(self, number: int) -> Sample:
        """Return the row with this number."""
        bounds = self.part.indexed.bounds
        members = self._members[self._ends[number - 1] if number else 0 : self._ends[number]]
        records = [
            _record(self.part, bounds[document], bounds[document + 1], place)
            for place, document in enumerate(self.part.numbers[members])
        ]
        return _filled(self.length, self.pad, records)


class Pairs(Packed):
    """Samples of two answers to a prompt: a row for the chosen one, and a row for the rejected one."""

    def __init__(self, part: TokenSet, length: int, seed: int, pad: int) -> None:
        self.part, self.length, self.seed, self.pad = part, length, seed, pad
        self.count = self.rows = len(part.numbers)
        # It is not there before the first step, when it is computed.
        self._reference = np.load(part.reference, mmap_mode="r") if part.reference.is_file() else None

    def row(self, number: int) -> Sample:
        """Return the sample with this number."""
        document, data = self.part.numbers[number], self.part.indexed
        start = data.bounds[document]
        middle = start + data.lengths[data.boundaries[document]]
        spans = ((start, middle), (middle, data.bounds[document + 1]))
        sides = [_filled(self.length, self.pad, [_record(self.part, *span, 0)]) for span in spans]
        columns = {name: np.stack([getattr(side, name) for side in sides]) for name in COLUMNS}
        return Sample(**columns, reference=None if self._reference is None else np.array(self._reference[document]))


COLUMNS = ("tokens", "labels", "positions", "documents")


def _record(part: TokenSet, start: int, stop: int, place: int) -> tuple[Array, Array, Array, Array]:
    """Return tokens, labels, positions and document of the record between two tokens of the files."""
    assert part.mask is not None
    ids = part.indexed.tokens[start:stop].astype(np.int64)
    labels = np.where(part.mask[start:stop][1:] != 0, ids[1:], NO_LABEL)
    size = len(labels)
    return ids[:-1], labels, np.arange(size), np.full(size, place, dtype=np.int64)


def _filled(length: int, pad: int, records: list[tuple[Array, Array, Array, Array]]) -> Sample:
    """Return a row with the records one after the other and padding as a document of its own."""
    left = length - sum(len(record[0]) for record in records)
    document = 1 + max((int(record[3][-1]) for record in records if len(record[3])), default=-1)
    # Padding sees only itself, so that it changes nothing for the records.
    filling = (np.full(left, pad), np.full(left, NO_LABEL), np.arange(left), np.full(left, document))
    columns = zip(*records, filling, strict=True)
    return Sample(*(np.concatenate(column) for column in columns))


@dataclass(frozen=True)
class Batch:
    """A micro-batch of samples; all tensors are int64 of shape ``(rows, length)``, or ``(rows, 2, length)``."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None  # these two are None if tokens see all earlier tokens of their row
    documents: Tensor | None = None
    reference: Tensor | None = None  # f32, shape (rows, 2); None unless samples have two answers

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        tensors = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        return Batch(**{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})


@dataclass(frozen=True)
class Share:
    """Share of every global batch that data rank ``rank`` of ``size`` computes."""

    rank: int
    size: int
    rows: int
    micro_batches: int

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one step."""
        return self.micro_batches * self.size * self.rows

    def micro_batch(self, number: int) -> range:
        """Return the places in the global batch of this rank's samples of a micro-batch."""
        # Micro-batches are cut first, so that the samples of one depend on the product of size and rows only.
        start = (number * self.size + self.rank) * self.rows
        return range(start, start + self.rows)


def training_samples(prepared: PreparedData, length: int, seed: int) -> list[Stream | Packed]:
    """Return the samples of each part of the blend; raise ValueError if one has no sample of ``length`` tokens."""
    parts = []
    for number, part in enumerate(prepared.train):
        parts.append(open_samples(part, length, seed_of(seed, number), prepared.packing, prepared.pad))
        if not parts[-1].count:
            raise ValueError(
                f"model.sequence_length or huggingface.sequence_length = {length} needs {length + 1} tokens "
                "of training text, and there are "
                f"{part.tokens} in {str(part.prefix)!r}; shorten the sequence, or add text"
            )
    return parts


def training_batches(prepared: PreparedData, length: int, share: Share, seed: int, consumed: int) -> Iterator[Batch]:
    """Yield micro-batches of this rank without end, from sample ``consumed`` of all ranks together."""
    parts = training_samples(prepared, length, seed)
    blend = Blend(prepared.weights, consumed)
    while True:
        # Chosen for all ranks, so that the order does not depend on their number.
        chosen = blend.take(share.global_batch)
        for number in range(share.micro_batches):
            entries = [chosen[place] for place in share.micro_batch(number)]
            yield _batch([parts[part].sample(index) for part, index in entries], prepared.document_attention)


def evaluation_batches(prepared: PreparedData, length: int, rows: int, rank: int, size: int) -> Iterator[Batch]:
    """Yield this rank's batches of held-out text. All ranks' together have each label once, except each stream's first.

    Args:
        prepared: the text.
        length: tokens of a row. Tokens see their own row only.
        rows: rows of a batch.
        rank: this rank, which gets every ``size``-th batch.
        size: number of ranks.
    """
    parts = [open_samples(part, length, 0, prepared.packing, prepared.pad) for part in prepared.validation]
    places = [(np.arange(part.rows) + 0.5) / max(part.rows, 1) for part in parts]
    owners = np.repeat(np.arange(len(parts)), [part.rows for part in parts])
    numbers = np.concatenate([np.empty(0, dtype=np.int64), *(np.arange(part.rows) for part in parts)])
    # Each row has a place in [0, 1) of its set; sorting by these places mixes the sets in proportion, so that the first
    # batches, which are all that an evaluation between steps takes, have some of all of them.
    order = np.argsort(np.concatenate([np.empty(0), *places]), kind="stable")
    nothing = np.zeros(length, dtype=np.int64)
    empty = Sample(nothing + prepared.pad, nothing + NO_LABEL, np.arange(length), nothing)
    if any(part.part.pairs for part in parts):
        columns = {name: np.stack([getattr(empty, name)] * 2) for name in COLUMNS}
        empty = Sample(**columns, reference=np.zeros(2, dtype=np.float32))
    # All ranks get equally many batches, if need be without labels, since an evaluation is collective.
    for start in range(rank * rows, -(-len(order) // (rows * size)) * rows * size, rows * size):
        chosen = order[start : start + rows]
        samples = [parts[owners[place]].row(int(numbers[place])) for place in chosen]
        yield _batch([*samples, *[empty] * (rows - len(samples))], prepared.document_attention)


def _batch(samples: Sequence[Sample], document_attention: bool) -> Batch:
    names = ("tokens", "labels", *(("positions", "documents") if document_attention else ()))
    names += ("reference",) if samples[0].reference is not None else ()
    columns = {name: np.stack([getattr(sample, name) for sample in samples]) for name in names}
    return Batch(**{name: torch.from_numpy(column) for name, column in columns.items()})
