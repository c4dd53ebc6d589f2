"""Data sets on disk: written from what was encoded, or taken as they are, and divided into training and held-out."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromesh.train.data.corpus import MASK
from zeromesh.train.data.encode import Encoded
from zeromesh.train.data.indexed import Indexed, IndexedWriter, file_of, open_indexed
from zeromesh.train.data.order import hashed
from zeromesh.train.data.prepared import TokenSet
from zeromesh.train.data.tokenizer import TextTokenizer

SCANNED_AT_ONCE = 2**24


@dataclass(frozen=True)
class Documents:
    """Facts of a data set's documents; arrays have one entry for each.

    Attributes:
        shares: in [0, 1): those below the fraction that is held out, are.
        tokens: int64.
        labels: tokens that are learned from, int64.
        sizes: bytes of text that these stand for, int64; 0 if that is not known.
        packed: whether they are learned from as wholes.
        highest: the largest id of all.
    """

    shares: NDArray[np.float64]
    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    sizes: NDArray[np.int64]
    packed: bool
    highest: int

    @property
    def learned(self) -> NDArray[np.bool_]:
        """Used documents, bool: records of which nothing is learned would be rows without a loss."""
        return self.labels > 0 if self.packed else np.ones(len(self.tokens), dtype=bool)


def write_documents(prefix: Path, encoded: Iterable[Encoded], dtype: np.dtype[Any], packed: bool) -> Documents:
    """Write what was encoded as a data set, with a second one of the masks where documents are packed."""
    columns: list[tuple[NDArray[Any], ...]] = []
    highest = -1
    with ExitStack() as stack:
        writer = stack.enter_context(IndexedWriter(prefix, dtype))
        masks = stack.enter_context(IndexedWriter(file_of(prefix, MASK), np.dtype("u1"))) if packed else None
        for part in encoded:
            writer.add(part.ids, part.lengths, part.last)
            highest = max(highest, int(part.ids.max(initial=0)))
            labels = part.lengths.astype(np.int64)
            if masks is not None:
                assert part.mask is not None
                masks.add(part.mask, part.lengths, part.last)
                labels = _labels(part.mask, part.lengths)
            columns.append((part.lengths, labels, part.sizes, part.shares, part.last))
    if not columns:
        columns.append(tuple(np.empty(0, dtype=kind) for kind in ("i8", "i8", "i8", "f8", "?")))
    lengths, labels, sizes, shares, last = (np.concatenate(column) for column in zip(*columns, strict=True))
    ends = np.flatnonzero(last)
    starts = np.concatenate([np.zeros(min(1, len(ends)), dtype=np.int64), ends[:-1] + 1])
    each = lengths, labels, sizes
    tokens, labels, sizes = (
        np.add.reduceat(column, starts, dtype=np.int64) if len(ends) else column for column in each
    )
    return Documents(shares[ends], tokens, labels, sizes, packed, highest)


def scan_documents(prefix: Path) -> Documents:
    """Look at every id of a data set that somebody else wrote.

    Raises:
        ValueError: if its files are damaged, or have numbers that are no ids.
    """
    data = open_indexed(prefix)
    if data.tokens.dtype.kind not in "ui":
        raise ValueError(f"{str(prefix)!r} has numbers of type {data.tokens.dtype.name}, and ids must be whole numbers")
    highest = -1
    for start in range(0, len(data.tokens), SCANNED_AT_ONCE):
        block = data.tokens[start : start + SCANNED_AT_ONCE]
        highest = max(highest, int(block.max()))
        if int(block.min()) < 0:
            place = int(np.flatnonzero(block < 0)[0])
            raise ValueError(
                f"{str(file_of(prefix, '.bin'))!r} has the id {block[place]} at token {start + place}, and ids are not "
                "negative; make it anew"
            )
    tokens = np.diff(data.bounds)
    labels, packed = tokens, file_of(prefix, f"{MASK}.idx").is_file()
    if packed:
        mask = open_indexed(file_of(prefix, MASK))
        if not np.array_equal(mask.bounds, data.bounds):
            raise ValueError(
                f"{str(mask.prefix)!r} and {str(prefix)!r} have documents of different lengths, and one is the loss "
                "mask of the other; make both anew"
            )
        labels = _labels(mask.tokens, tokens)
    shares = (hashed(np.arange(data.documents), 0) >> np.uint64(11)) / 2.0**53
    return Documents(shares, tokens, labels, np.zeros_like(tokens), packed, highest)


def divide(
    name: str, prefix: Path, documents: Documents, fraction: float, tokenizer: TextTokenizer | None, folder: Path
) -> tuple[TokenSet, TokenSet]:
    """Training and held-out documents.

    Args:
        name: of the part of the blend; the data sets of two parts may have one name.
        prefix: of the data set.
        documents: what is known of it.
        fraction: of the documents to hold out; 0 for none and 1 for all. At least one is, where some are to be and
            there are two.
        tokenizer: counts the bytes of what is held out where they are not known.
        folder: where the numbers of the documents are written.
    """
    learned = documents.learned
    held = learned & (documents.shares < fraction)
    if 0 < fraction < 1 and held.sum() in (0, learned.sum()):
        shares = np.where(learned, documents.shares, 2.0)
        held = (np.arange(len(held)) == shares.argmin()) & (learned.sum() > 1 and float(shares.min()) < 1)
    sides = []
    for kind, side in (("train", learned & ~held), ("validation", held)):
        chosen = None
        if not side.all():
            chosen = folder / f"{name}.{kind}.npy"
            np.save(chosen, np.flatnonzero(side))
        sides.append(
            TokenSet(
                prefix=prefix,
                chosen=chosen,
                documents=int(side.sum()),
                tokens=int(documents.tokens[side].sum()),
                labels=int(documents.labels[side].sum()),
                bytes=int(documents.sizes[side].sum()),
                packed=documents.packed,
                highest=documents.highest,
            )
        )
    if not sides[1].bytes and tokenizer is not None:
        sides[1] = replace(sides[1], bytes=sum(len(text) for text in label_texts(sides[1], tokenizer)))
    return sides[0], sides[1]


def gzip_size(sets: Iterable[TokenSet], tokenizer: TextTokenizer | None) -> int:
    """Bytes that ``gzip -9`` makes of the text of all labels."""
    compressor = zlib.compressobj(9, wbits=16 + zlib.MAX_WBITS)
    written = 0
    for held in sets:
        if tokenizer is not None:
            written += sum(len(compressor.compress(text)) for text in label_texts(held, tokenizer))
    return written + len(compressor.flush())


def label_texts(held: TokenSet, tokenizer: TextTokenizer) -> Iterator[bytes]:
    """The text that the labels of a set stand for, sequence by sequence, as the tokenizer writes it."""
    data, mask = held.indexed, held.mask
    for number in held.numbers:
        start = data.bounds[number]
        for length in data.lengths[data.boundaries[number] : data.boundaries[number + 1]]:
            ids = data.tokens[start : start + length]
            if mask is not None:
                ids = ids[mask[start : start + length] != 0]
            yield tokenizer.decode(ids.tolist()).encode()
            start += length


def first_beyond(data: Indexed, vocabulary: int) -> tuple[int, int]:
    """The place of the first id that a vocabulary does not have, and the id."""
    for start in range(0, len(data.tokens), SCANNED_AT_ONCE):
        found = np.flatnonzero(data.tokens[start : start + SCANNED_AT_ONCE] >= vocabulary)
        if len(found):
            return start + int(found[0]), int(data.tokens[start + found[0]])
    raise AssertionError("the largest id was said to be beyond")


def _labels(mask: NDArray[np.uint8], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Labels of each document; its first token is none."""
    before = np.concatenate([[0], np.cumsum(mask != 0, dtype=np.int64)])
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    found: NDArray[np.int64] = before[ends] - before[np.minimum(starts + 1, ends)]
    return found
