"""From the sources in the settings to a folder with a tokenizer and token files, once."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from zeromesh.config.train import TextData
from zeromesh.data.corpus import Document, Split, find_documents, read_document, split_documents
from zeromesh.data.tokens import TokenFile, load_tokenizer, train_tokenizer, write_tokens

SAMPLE_BYTES = 64 * 2**20
"""A tokenizer is trained on about this much text, of documents evenly spread over the training text."""

TOKENIZER_FILE = "tokenizer.json"
SUMMARY_FILE = "data.json"


@dataclass(frozen=True)
class Prepared:
    """Text as token files.

    Attributes:
        key: changes when the sources or the settings of the text do.
        train: what is trained on.
        validation: what is held out.
        vocabulary: entries of the tokenizer.
        skipped: documents that are empty, cannot be read, or are not UTF-8.
        gzip_bytes: what ``gzip -9`` makes of the held-out documents, one after the other.
        python: whether all documents end in ``.py``.
    """

    key: str
    train: TokenFile
    validation: TokenFile
    vocabulary: int
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
        folder: where the tokenizer and the token files are, or will be.
        may_write: make what is not there or out of date, instead of refusing.

    Raises:
        ValueError: if a source has no text, the vocabulary does not suit it, or, as ``Changed``, if the files in the
            folder were made from something else and may not be written.
    """
    split = _split(data)
    key = _key(data, split)
    summary = folder / SUMMARY_FILE
    if summary.is_file():
        prepared = _load(summary)
        if prepared.key == key:
            return prepared
    if not may_write:
        raise Changed(
            f"the text in data.train has changed since its tokens were written to {str(folder)!r}; bring back the "
            "files and settings of that time, or start a new run"
        )
    folder.mkdir(parents=True, exist_ok=True)
    summary.unlink(missing_ok=True)
    prepared = _make(data, split, key, folder)
    part = summary.with_name(summary.name + ".part")
    part.write_text(json.dumps(asdict(prepared), indent=2, default=str))
    part.replace(summary)
    return prepared


def _split(data: TextData) -> Split:
    documents = find_documents(data.train, data.suffixes)
    if data.validation is None:
        return split_documents(documents, data.validation_fraction)
    held = find_documents(data.validation, data.suffixes)
    held_paths = {document.path.resolve() for document in held}
    train = tuple(document for document in documents if document.path.resolve() not in held_paths)
    if not train:
        raise ValueError("every file of data.train is also in data.validation; nothing is left to train on")
    return Split(train=train, validation=tuple(held))


def _key(data: TextData, split: Split) -> str:
    """A hash over the settings and over every file's name, size and time of change."""
    digest = hashlib.sha256(data.model_dump_json().encode())
    for document in split.train + split.validation:
        state = document.path.stat()
        digest.update(f"\0{document.name}\0{document.path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}".encode())
    return digest.hexdigest()


def _make(data: TextData, split: Split, key: str, folder: Path) -> Prepared:
    tokenizer = _tokenizer(data, split.train)
    tokenizer.save(str(folder / TOKENIZER_FILE))
    yardstick = _Gzip()
    train = write_tokens(folder / "train.tokens", tokenizer, _texts(split.train))
    held = write_tokens(folder / "validation.tokens", tokenizer, yardstick.pass_through(_texts(split.validation)))
    if train.documents == 0:
        raise ValueError(f"no file of data.train = {list(data.train)} is readable UTF-8 text that is not empty")
    documents = split.train + split.validation
    return Prepared(
        key=key,
        train=train,
        validation=held,
        vocabulary=tokenizer.get_vocab_size(),
        skipped=len(documents) - train.documents - held.documents,
        gzip_bytes=yardstick.size(),
        python=all(document.path.suffix == ".py" for document in documents),
    )


def _load(summary: Path) -> Prepared:
    values = json.loads(summary.read_text())
    for name in ("train", "validation"):
        values[name]["path"] = summary.parent / Path(values[name]["path"]).name
        values[name] = TokenFile(**values[name])
    return Prepared(**values)


def _tokenizer(data: TextData, documents: Sequence[Document]) -> Tokenizer:
    if data.tokenizer is not None:
        return load_tokenizer(Path(data.tokenizer).expanduser())
    size = sum(document.path.stat().st_size for document in documents)
    every = max(1, round(size / SAMPLE_BYTES))
    return train_tokenizer(_texts(documents[::every]), data.vocabulary_size)


def _texts(documents: Sequence[Document]) -> Iterator[str]:
    for document in documents:
        text = read_document(document)
        if text is not None:
            yield text


class _Gzip:
    """Counts what ``gzip -9`` would write."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(9, wbits=16 + zlib.MAX_WBITS)
        self._written = 0

    def pass_through(self, texts: Iterator[str]) -> Iterator[str]:
        for text in texts:
            self._written += len(self._compressor.compress(text.encode()))
            yield text

    def size(self) -> int:
        return self._written + len(self._compressor.flush())
