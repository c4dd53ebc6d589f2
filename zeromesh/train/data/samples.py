"""Samples from stored documents: a stream that is cut into windows, or rows of whole records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zeromesh.train.data.order import Permutation, pack, seed_of
from zeromesh.train.data.prepared import LENGTH, TokenSet

Array = NDArray[np.int64]

NO_LABEL = -100
"""The label of what is not learned."""


@dataclass(frozen=True)
class Sample:
    """One row of a batch; all arrays are int64 of shape ``(length,)``.

    Attributes:
        tokens: token ids.
        labels: the id that follows each token, or ``NO_LABEL``.
        positions: of each token in its document, as far as that is in the row.
        documents: number of each token's document in the row; what is filled up is a document of its own.
    """

    tokens: Array
    labels: Array
    positions: Array
    documents: Array


class Samples(Protocol):
    """Source of samples.

    Attributes:
        count: samples of an epoch.
        rows: samples that have every document once, in the stored order.
    """

    count: int
    rows: int

    def sample(self, index: int) -> Sample:
        """Sample ``index`` of an endless order: every epoch has each sample once, in an order of its own."""

    def row(self, number: int) -> Sample:
        """A sample in the stored order, to be scored; the last one may be filled up."""


def open_samples(part: TokenSet, length: int, seed: int, packing: str, pad: int) -> Samples:
    """The samples of a set.

    Raises:
        ValueError: if it has a record that is longer than a sample.
    """
    return Packed(part, length, seed, packing, pad) if part.packed else Stream(part, length, seed, pad)


@dataclass
class Line:
    """Documents one after the other. 16 bytes of memory per document.

    Attributes:
        begins: where each begins in the file, in tokens.
        ends: where each ends in the line.
    """

    begins: Array
    ends: Array

    @classmethod
    def of(cls, part: TokenSet, numbers: Array) -> Line:
        """The documents of these numbers, in this order."""
        bounds = part.indexed.bounds
        begins = bounds[numbers]
        return cls(begins, np.cumsum(bounds[numbers + 1] - begins))

    def find(self, start: int, stop: int) -> tuple[Array, Array, Array]:
        """For the places from ``start`` to ``stop``: where they are in the file, and their documents and positions.

        Documents are counted from the first, and positions in the document from ``start`` on.
        """
        first, last = np.searchsorted(self.ends, (start, stop - 1), side="right")
        before = self.ends[first - 1] if first else 0
        ends = np.minimum(self.ends[first : last + 1], stop)
        starts = np.concatenate([[before], ends[:-1]])
        counts = ends - np.maximum(starts, start)
        places = np.arange(start, stop)
        found = places + np.repeat(self.begins[first : last + 1] - starts, counts)
        return found, np.repeat(np.arange(len(ends)), counts), places - np.repeat(np.maximum(starts, start), counts)


class Stream:
    """All documents of an epoch in an order of its own, one after the other, cut every ``length`` tokens.

    The last token of a sample, a label only, is the first of the next. What is left at the end of an epoch, less than
    a sample, is not used. One line is held at a time.
    """

    def __init__(self, part: TokenSet, length: int, seed: int, pad: int) -> None:
        self.part, self.length, self.seed, self.pad = part, length, seed, pad
        labels = max(part.tokens - 1, 0)
        self.count, self.rows = labels // length, -(-labels // length)
        self._line: tuple[int | None, Line] | None = None

    def sample(self, index: int) -> Sample:
        """A whole window."""
        epoch, position = divmod(index, self.count)
        window = int(Permutation(self.count, seed_of(self.seed, epoch, 1))[np.array([position])][0])
        return self._window(self._open(epoch), window)

    def row(self, number: int) -> Sample:
        """A window of the documents in the stored order."""
        return self._window(self._open(None), number)

    def _open(self, epoch: int | None) -> Line:
        if self._line is None or self._line[0] != epoch:
            numbers = self.part.numbers
            if epoch is not None:
                order = Permutation(len(numbers), seed_of(self.seed, epoch, 0))[np.arange(len(numbers))]
                numbers = numbers[order]
            self._line = epoch, Line.of(self.part, numbers)
        return self._line[1]

    def _window(self, line: Line, number: int) -> Sample:
        start = number * self.length
        found, documents, positions = line.find(start, min(start + self.length + 1, self.part.tokens))
        ids = self.part.indexed.tokens[found].astype(np.int64)
        return _filled(self.length, self.pad, [(ids[:-1], ids[1:], positions[:-1], documents[:-1])])


class Packed:
    """Whole records in rows: as many as fit, or one in each. Which ones share a row stays; the order of rows changes.

    16 bytes of memory per record. A record of n tokens takes n - 1 places, since its last token is only a label.

    Raises:
        ValueError: if a record is longer than a sample.
    """

    def __init__(self, part: TokenSet, length: int, seed: int, packing: str, pad: int) -> None:
        self.part, self.length, self.seed, self.pad = part, length, seed, pad
        bounds, numbers = part.indexed.bounds, part.numbers
        places = np.maximum(bounds[numbers + 1] - bounds[numbers] - 1, 1)
        if places.max(initial=0) > length:
            raise ValueError(
                f"{str(part.prefix)!r}: document {numbers[places.argmax()]} has {places.max() + 1} tokens, and a "
                f"sample of {LENGTH} = {length} holds {length + 1} with its last label; make it longer"
            )
        rows = pack(places, length) if packing == "pack" else np.arange(len(places))
        self._members = np.argsort(rows, kind="stable")
        self._ends = np.cumsum(np.bincount(rows))
        self.count = self.rows = len(self._ends)

    def sample(self, index: int) -> Sample:
        """A row."""
        epoch, position = divmod(index, self.count)
        return self.row(int(Permutation(self.count, seed_of(self.seed, epoch, 1))[np.array([position])][0]))

    def row(self, number: int) -> Sample:
        """A row, by its number."""
        bounds, mask = self.part.indexed.bounds, self.part.mask
        assert mask is not None
        records = []
        members = self._members[self._ends[number - 1] if number else 0 : self._ends[number]]
        for place, document in enumerate(self.part.numbers[members]):
            span = slice(bounds[document], bounds[document + 1])
            ids = self.part.indexed.tokens[span].astype(np.int64)
            labels = np.where(mask[span][1:] != 0, ids[1:], NO_LABEL)
            size = len(labels)
            records.append((ids[:-1], labels, np.arange(size), np.full(size, place, dtype=np.int64)))
        return _filled(self.length, self.pad, records)


def _filled(length: int, pad: int, records: list[tuple[Array, Array, Array, Array]]) -> Sample:
    """Records one after the other in a row, and what is left over filled up as a document of its own."""
    left = length - sum(len(record[0]) for record in records)
    document = 1 + max((int(record[3][-1]) for record in records if len(record[3])), default=-1)
    filling = (np.full(left, pad), np.full(left, NO_LABEL), np.arange(left), np.full(left, document))
    columns = zip(*records, filling, strict=True)
    return Sample(*(np.concatenate(column) for column in columns))
