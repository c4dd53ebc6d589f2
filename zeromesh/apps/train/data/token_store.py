"""Data sets on disk: token files, their division into training and held-out documents, and their summary."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromesh.apps.train.data.encode import Encoded
from zeromesh.apps.train.data.indexed import MASK, Indexed, IndexedWriter, file_of, open_indexed
from zeromesh.apps.train.data.sample_order import hashed
from zeromesh.apps.train.data.tokenizer import TextTokenizer
from zeromesh.apps.train.train_settings import TextData
from zeromesh.base.files import new_file, read_text, write_text

SCANNED_AT_ONCE = 2**24  # ids that are looked at in one step


@dataclass(frozen=True)
class TokenSet:
    """Documents in Megatron's format, for training or held out."""

    prefix: Path  # of the files, without their endings
    chosen: Path | None  # file with the numbers of the documents, int64, rising; None for all
    documents: int
    tokens: int
    labels: int  # tokens that are learned or scored
    bytes: int  # of text that the labels stand for; 0 if unknown
    packed: bool  # documents stay whole in samples, with a file of masks; otherwise they form a stream
    highest: int  # largest id in the files
    pairs: bool = False  # each document has two sequences: the chosen and the rejected answer, with their prompt

    @property
    def reference(self) -> Path:
        """File of the reference's log-likelihoods of both answers, f32, shape ``(documents of the files, 2)``."""
        return self.prefix.with_name(f"{self.prefix.name}.reference.npy")

    @cached_property
    def indexed(self) -> Indexed:
        """The open files."""
        return open_indexed(self.prefix)

    @cached_property
    def mask(self) -> NDArray[np.uint8] | None:
        """1 for each token of the files that may be a label, u8; None if all may."""
        return open_indexed(file_of(self.prefix, MASK)).tokens if self.packed else None

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """Numbers of the documents in the files, int64, shape ``(documents,)``; mapped into memory if in a file."""
        if self.chosen is None:
            return np.arange(self.indexed.documents)
        numbers: NDArray[np.int64] = np.load(self.chosen, mmap_mode="r" if self.documents else None)
        return numbers


@dataclass(frozen=True)
class PreparedData:
    """Text as token files."""

    key: str  # hash of the sources, the tokenizer and the settings, without the size of the vocabulary
    train: tuple[TokenSet, ...]  # one set per part of the blend
    validation: tuple[TokenSet, ...]  # no set is empty
    vocabulary: int  # entries of the tokenizer; without one, the largest id plus one
    pad: int  # id that fills samples up
    capped: bool  # the text gives fewer entries than the default size of the vocabulary
    skipped: int  # documents that are empty, cannot be read, or are not UTF-8
    dropped: int  # records that were longer than a sample
    tokenizer: Path | None  # folder; None for sources of tokens without a tokenizer in the settings
    weights: tuple[float, ...] = (1.0,)  # share of each part of the blend; their sum is 1
    packing: str = "pack"
    document_attention: bool = False  # tokens see their own document only

    @property
    def held_out_bytes(self) -> int:
        """Bytes of text that the held-out labels stand for; 0 if unknown for some of them."""
        sizes = [token_set.bytes for token_set in self.validation]
        return sum(sizes) if all(sizes) else 0

    def sampled(self, data: TextData) -> PreparedData:
        """Return the same data with the settings of samples, on which the files do not depend."""
        # Records in one row are unrelated, so they see each other only if the user says so.
        packs = any(part.packed and not part.pairs for part in self.train) and data.packing == "pack"
        return replace(
            self,
            weights=tuple(weight for _, weight in data.blend),
            packing=data.packing,
            document_attention=packs if data.document_attention is None else data.document_attention,
        )


def save_summary(prepared: PreparedData, path: Path) -> None:
    """Write the summary. Paths inside its folder are relative to it, so that the folder can be moved."""

    def plain(value: Any) -> str:
        return os.path.relpath(value, path.parent) if value.is_relative_to(path.parent) else str(value.resolve())

    write_text(path, json.dumps(asdict(prepared), indent=2, default=plain))  # never half a summary


def load_summary(path: Path) -> PreparedData | None:
    """Return the prepared data; None if there is none, or it is incomplete or of another version."""
    try:
        values = json.loads(read_text(path))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    # Of another version, which lacks fields: the files are made again.
    names = {field.name for field in fields(PreparedData)}
    if not isinstance(values, dict) or not names <= values.keys():
        return None
    values = {name: values[name] for name in names}

    def here(name: str | None) -> Path | None:
        return None if name is None else path.parent / name

    for side in ("train", "validation"):
        values[side] = tuple(
            TokenSet(**{**part, "prefix": path.parent / part["prefix"], "chosen": here(part["chosen"])})
            for part in values[side]
        )
    return PreparedData(**{**values, "tokenizer": here(values["tokenizer"]), "weights": tuple(values["weights"])})


@dataclass(frozen=True)
class Documents:
    """Facts about the documents of a data set. Arrays have the shape ``(documents,)``."""

    shares: NDArray[np.float64]  # numbers in [0, 1); documents below the held-out fraction are held out
    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]  # tokens that are learned
    sizes: NDArray[np.int64]  # bytes of text that the labels stand for; 0 if unknown
    packed: bool  # documents stay whole in samples
    highest: int  # largest id of all documents
    pairs: bool = False

    @property
    def learned(self) -> NDArray[np.bool_]:
        """True for each document that is used."""
        # A record without a label would be a row without a loss.
        return self.labels > 0 if self.packed else np.ones(len(self.tokens), dtype=bool)


def write_documents(prefix: Path, encoded: Iterable[Encoded], dtype: np.dtype[Any], packed: bool) -> Documents:
    """Write encoded tasks as a data set, and their masks as a second one if documents are packed."""
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
    # Without a task there would be nothing to concatenate; the caller says what is wrong.
    if not columns:
        columns.append(tuple(np.empty(0, dtype=kind) for kind in ("i8", "i8", "i8", "f8", "?")))
    lengths, labels, sizes, shares, last = (np.concatenate(column) for column in zip(*columns, strict=True))
    # Sequences to documents: sums between the ends of documents.
    ends = np.flatnonzero(last)
    starts = np.concatenate([np.zeros(min(1, len(ends)), dtype=np.int64), ends[:-1] + 1])
    each = lengths, labels, sizes
    tokens, labels, sizes = (
        np.add.reduceat(column, starts, dtype=np.int64) if len(ends) else column for column in each
    )
    return Documents(shares[ends], tokens, labels, sizes, packed, highest)


def scan_documents(prefix: Path) -> Documents:
    """Check a data set that another program wrote; raise ValueError if it is damaged or has numbers that are no ids."""
    data = open_indexed(prefix)
    if data.tokens.dtype.kind not in "ui":
        raise ValueError(f"{str(prefix)!r} has numbers of type {data.tokens.dtype.name}, and ids must be whole numbers")
    # Every id is looked at: one outside the vocabulary would end a run on a GPU with an error that names nothing.
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
    # By the number of the document, since the file has no names; 53 bits are what a float holds.
    shares = (hashed(np.arange(data.documents), 0) >> np.uint64(11)) / 2.0**53
    return Documents(shares, tokens, labels, np.zeros_like(tokens), packed, highest)


def divide(
    name: str, prefix: Path, documents: Documents, fraction: float, tokenizer: TextTokenizer | None, folder: Path
) -> tuple[TokenSet, TokenSet]:
    """Return the training and the held-out documents of a data set; files in ``folder`` get their numbers."""
    learned = documents.learned
    held_out = learned & (documents.shares < fraction)
    if 0 < fraction < 1 and held_out.sum() in (0, learned.sum()):
        # One side would be empty: hold out the document with the smallest share.
        shares = np.where(learned, documents.shares, 2.0)
        held_out = (np.arange(len(held_out)) == shares.argmin()) & (learned.sum() > 1 and float(shares.min()) < 1)
    sides = []
    for kind, side in (("train", learned & ~held_out), ("validation", held_out)):
        chosen = None
        # Numbers in a file, and not in the summary: there may be many millions.
        if not side.all():
            chosen = folder / f"{name}.{kind}.npy"  # not by the prefix, which two parts may have in common
            with new_file(chosen) as file:
                np.save(file, np.flatnonzero(side))
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
                pairs=documents.pairs,
            )
        )
    # Tokens of another program: their text is known only by decoding, and only held-out text needs its size.
    if not sides[1].bytes and tokenizer is not None:
        sides[1] = replace(sides[1], bytes=sum(len(text) for text in label_texts(sides[1], tokenizer)))
    return sides[0], sides[1]


def label_texts(token_set: TokenSet, tokenizer: TextTokenizer) -> Iterator[bytes]:
    """Yield the decoded text of the labels of each sequence."""
    data, mask = token_set.indexed, token_set.mask
    for number in token_set.numbers:
        start = data.bounds[number]
        for length in data.lengths[data.boundaries[number] : data.boundaries[number + 1]]:
            ids = data.tokens[start : start + length]
            if mask is not None:
                ids = ids[mask[start : start + length] != 0]
            yield tokenizer.decode(ids.tolist()).encode()
            start += length


def first_beyond(data: Indexed, vocabulary: int) -> tuple[int, int]:
    """Return the place of the first id that is not in the vocabulary, and the id."""
    for start in range(0, len(data.tokens), SCANNED_AT_ONCE):
        places = np.flatnonzero(data.tokens[start : start + SCANNED_AT_ONCE] >= vocabulary)
        if len(places):
            return start + int(places[0]), int(data.tokens[start + places[0]])
    raise AssertionError("the largest id is in the vocabulary")


def _labels(mask: NDArray[np.uint8], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Return the number of labels of each sequence, whose first token is none."""
    # Differences of sums, because a loop over the sequences would be slow.
    before = np.concatenate([[0], np.cumsum(mask != 0, dtype=np.int64)])
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    counts: NDArray[np.int64] = before[ends] - before[np.minimum(starts + 1, ends)]
    return counts
