"""From the sources in the settings to a folder with a tokenizer and token files, once."""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tokenizers import Tokenizer

from zeromesh.config.train import TextData
from zeromesh.data.corpus import Document, Split, find_documents, is_text, parts, read_document, split_documents
from zeromesh.data.tokens import Piece, TokenFile, load_tokenizer, train_tokenizer, write_tokens

_log = logging.getLogger(__name__)

PIECE_BYTES = 2**18
"""Longer documents are read and encoded in pieces of at most this size."""

SAMPLE_BYTES = 64 * 2**20
"""A tokenizer is trained on about this much text, in pieces that are evenly spread over the training text."""

NAMED_FILES = 5
"""So many of the files that were left out are named."""

TOKENIZER_FILE = "tokenizer.json"
SUMMARY_FILE = "data.json"


@dataclass(frozen=True)
class Prepared:
    """Text as token files.

    Attributes:
        key: changes when the sources or the settings of the text do, but for the size of the vocabulary.
        train: what is trained on.
        validation: what is held out.
        vocabulary: entries of the tokenizer.
        capped: whether these are fewer than the default because the text has no more.
        skipped: documents that are empty, cannot be read, or are not UTF-8.
        gzip_bytes: what ``gzip -9`` makes of the held-out documents, one after the other.
        python: whether all documents end in ``.py``.
    """

    key: str
    train: TokenFile
    validation: TokenFile
    vocabulary: int
    capped: bool
    skipped: int
    gzip_bytes: int
    python: bool

    @property
    def gzip_bits_per_byte(self) -> float:
        """The yardstick for the model's bits per byte; not a number where nothing is held out."""
        return 8 * self.gzip_bytes / self.validation.bytes if self.validation.bytes else float("nan")


class Changed(ValueError):
    """The sources or settings of a text are not what its token files were made from."""


def prepare(data: TextData, folder: Path, may_write: bool = True) -> Prepared:
    """Bring the text into a folder as token files, unless they are there already.

    Args:
        data: the sources and how to read them.
        folder: where the tokenizer and the token files are, or will be. Nothing beside it, in the folder of the run,
            is text.
        may_write: make what is not there or out of date, instead of refusing.

    Raises:
        ValueError: if a source has no text, the vocabulary does not suit it, or, as ``Changed``, if the files in the
            folder were made from something else and may not be written.
    """
    documents = _find(data, folder.parent)
    key = _key(data, documents)
    summary = folder / SUMMARY_FILE
    if summary.is_file():
        prepared = _load(summary)
        if prepared is not None and prepared.key == key and _has_size(data, prepared):
            return prepared
    if not may_write:
        raise Changed(
            f"the text in data.train has changed since its tokens were written to {str(folder)!r}; bring back the "
            "files and settings of that time, or start a new run"
        )
    split, skipped = _split(data, documents)
    folder.mkdir(parents=True, exist_ok=True)
    summary.unlink(missing_ok=True)
    prepared = _make(data, split, folder, key, skipped)
    part = summary.with_name(summary.name + ".part")
    part.write_text(json.dumps(asdict(prepared), indent=2, default=str))
    part.replace(summary)
    return prepared


def _find(data: TextData, output: Path) -> Split:
    """The files of the sources; where no source is named for validation, all of them are to be trained on so far."""
    documents = find_documents(data.train, data.suffixes, output)
    if data.validation is None:
        return Split(train=tuple(documents), validation=())
    held = find_documents(data.validation, data.suffixes, output)
    held_paths = {document.path.resolve() for document in held}
    train = tuple(document for document in documents if document.path.resolve() not in held_paths)
    if not train:
        raise ValueError("every file of data.train is also in data.validation; nothing is left to train on")
    return Split(train=train, validation=tuple(held))


def _key(data: TextData, documents: Split) -> str:
    """A hash over the settings and over every file's name, size and time of change."""
    digest = hashlib.sha256(data.model_dump_json(exclude={"vocabulary_size"}).encode())
    for document in documents.train + documents.validation:
        state = document.path.stat()
        digest.update(f"\0{document.name}\0{document.path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}".encode())
    return digest.hexdigest()


def _has_size(data: TextData, prepared: Prepared) -> bool:
    """Whether text was prepared with a vocabulary of the size in the settings."""
    if data.tokenizer is not None or prepared.vocabulary == data.vocabulary_size:
        return True
    return prepared.capped and not _size_is_set(data)


def _size_is_set(data: TextData) -> bool:
    return "vocabulary_size" in data.model_fields_set


def _split(data: TextData, documents: Split) -> tuple[Split, int]:
    """What is trained on and what is held out, of the documents that are text, and how many are not."""
    text = Split(*(tuple(filter(is_text, side)) for side in (documents.train, documents.validation)))
    for name, found, readable in (
        ("train", documents.train, text.train),
        ("validation", documents.validation, text.validation),
    ):
        if found and not readable:
            raise ValueError(
                f"there is no readable text in data.{name} = {list(getattr(data, name))}: {_names(found)} "
                f"{'is' if len(found) == 1 else 'are'} empty or not UTF-8; add text, or convert it to UTF-8"
            )
    everything = documents.train + documents.validation
    kept = set(text.train + text.validation)
    skipped = [document for document in everything if document not in kept]
    if skipped:
        _log.info("left out, being empty, unreadable or not UTF-8: %s", _names(skipped))
    if data.validation is None:
        text = split_documents(text.train, data.validation_fraction)
        if data.validation_fraction > 0 and not text.validation:
            _log.warning("data.train is too short to hold anything out; there will be no validation")
    return text, len(skipped)


def _names(documents: Sequence[Document]) -> str:
    names = ", ".join(document.name for document in documents[:NAMED_FILES])
    more = len(documents) - NAMED_FILES
    return f"{names} and {more} more" if more > 0 else names


def _make(data: TextData, split: Split, folder: Path, key: str, skipped: int) -> Prepared:
    tokenizer = _tokenizer(data, split.train)
    tokenizer.save(str(folder / TOKENIZER_FILE))
    yardstick = _Gzip()
    train = write_tokens(folder / "train.tokens", tokenizer, _pieces(split.train))
    held = write_tokens(folder / "validation.tokens", tokenizer, yardstick.pass_through(_pieces(split.validation)))
    vocabulary = tokenizer.get_vocab_size()
    return Prepared(
        key=key,
        train=train,
        validation=held,
        vocabulary=vocabulary,
        capped=data.tokenizer is None and vocabulary < data.vocabulary_size,
        skipped=skipped,
        gzip_bytes=yardstick.size(),
        python=all(document.path.suffix == ".py" for document in split.train + split.validation),
    )


def _load(summary: Path) -> Prepared | None:
    """What was prepared; None if another version did it, which knew other things."""
    values = json.loads(summary.read_text())
    if values.keys() != {field.name for field in fields(Prepared)}:
        return None
    for name in ("train", "validation"):
        values[name]["path"] = summary.parent / Path(values[name]["path"]).name
        values[name] = TokenFile(**values[name])
    return Prepared(**values)


def _tokenizer(data: TextData, documents: Sequence[Document]) -> Tokenizer:
    if data.tokenizer is not None:
        return load_tokenizer(Path(data.tokenizer).expanduser())
    return train_tokenizer(_sample(documents), data.vocabulary_size, fill=_size_is_set(data))


def _sample(documents: Sequence[Document]) -> Iterator[str]:
    """About ``SAMPLE_BYTES`` of the documents: a piece is taken whenever too little of what has passed was taken."""
    share = SAMPLE_BYTES / max(SAMPLE_BYTES, sum(document.size for document in documents))
    passed = taken = 0
    for document in documents:
        for part in parts(document, PIECE_BYTES):
            passed += part.size
            if taken + part.size / 2 < passed * share or share == 1:
                taken += part.size
                yield read_document(part)


def _pieces(documents: Sequence[Document]) -> Iterator[Piece]:
    for document in documents:
        stop = document.start + document.size
        for part in parts(document, PIECE_BYTES):
            yield Piece(read_document(part), last=part.stop == stop)


class _Gzip:
    """Counts what ``gzip -9`` would write."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(9, wbits=16 + zlib.MAX_WBITS)
        self._written = 0

    def pass_through(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self._written += len(self._compressor.compress(piece.text.encode()))
            yield piece

    def size(self) -> int:
        return self._written + len(self._compressor.flush())
