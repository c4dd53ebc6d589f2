"""Making of token files: what kind each file is, the tokenizer, and one data set after the other."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rich.console import Console

from zeromesh.config.train import TextData
from zeromesh.data.corpus import Document, is_text, split_documents
from zeromesh.data.encode import SMALL, Encoded, Encoder, Settings, Side, encode_all, grouped
from zeromesh.data.indexed import token_dtype
from zeromesh.data.portions import FORMATS, Portion, format_of, placed, read_portion
from zeromesh.data.prepared import Prepared, TokenSet
from zeromesh.data.records import KINDS, kind_of, read_record, share_of
from zeromesh.data.store import divide, gzip_size, scan_documents, write_documents
from zeromesh.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from zeromesh.dist.launch import available_cores
from zeromesh.observe.reading import ReadingBar

_log = logging.getLogger(__name__)

SAMPLE_BYTES = 64 * 2**20
"""A tokenizer is trained on about this much text, in portions that are evenly spread over the training text."""

NAMED_FILES = 5
"""So many of the files that were left out are named."""

TOKENIZER_FOLDER = "tokenizer"
INDEXED = "indexed"
"""The kind of a file that is tokens already."""


@dataclass(frozen=True)
class Part:
    """The files of one data set.

    Attributes:
        name: of its token files.
        wanted: its sources as in the settings, for messages.
        sources: the documents of each source.
        fraction: what is held out: a share, 0 for nothing, 1 for all.
    """

    name: str
    wanted: str
    sources: tuple[tuple[Document, ...], ...]
    fraction: float

    @property
    def documents(self) -> list[Document]:
        """Those of all sources."""
        return [document for source in self.sources for document in source]


@dataclass(frozen=True)
class Known:
    """A file of which is known what it holds.

    Attributes:
        document: the file, or the part of it on one side of the split.
        kind: of its records, ``INDEXED``, or None for plain text.
        share: as in ``Side``.
    """

    document: Document
    kind: str | None
    share: float | None

    def sides(self) -> Iterator[Side]:
        """Its portions."""
        for portion in FORMATS[format_of(self.document)].cut(self.document):
            yield Side(portion, self.kind, self.share)


def make(
    data: TextData, parts: Sequence[Part], key: str, folder: Path, length: int | None, console: Console | None
) -> Prepared:
    """Write the tokenizer and all data sets into an empty folder; arguments as in ``prepare``."""
    skipped: list[Document] = []
    known = [_look(data, part, skipped) for part in parts]
    if skipped:
        _log.info("left out, being empty, unreadable or not UTF-8: %s", _names(skipped))
    trained_on = [files for part, files in zip(parts, known, strict=True) if part.fraction < 1]
    tokenizer = _tokenizer(data, list(chain(*trained_on)))
    if tokenizer is not None:
        (folder / TOKENIZER_FOLDER).mkdir()
        tokenizer.save(folder / TOKENIZER_FOLDER)
    encoder = None if tokenizer is None else Encoder(Settings(folder / TOKENIZER_FOLDER, data, length), tokenizer)
    train: list[TokenSet] = []
    validation: list[TokenSet] = []
    dropped = 0
    files = list(chain(*known))
    with ReadingBar(console, "text to tokens", sum(file.document.size for file in files)) as bar:
        for part, own in zip(parts, known, strict=True):
            kept, held, lost = _make_part(data, part, own, encoder, folder, bar)
            train += [kept] if part.fraction < 1 else []
            validation += [held] if held.documents else []
            dropped += lost
    if dropped:
        _log.info("left out %d records with more tokens than a sample has, as data.too_long says", dropped)
    if not validation and data.validation_fraction > 0:
        _log.warning("data.train is too short to hold anything out; there will be no validation")
    return Prepared(
        key=key,
        train=tuple(train),
        validation=tuple(validation),
        vocabulary=tokenizer.size if tokenizer else 1 + max(part.highest for part in (*train, *validation)),
        pad=tokenizer.pad if tokenizer else 0,
        capped=tokenizer is not None and data.tokenizer is None and tokenizer.size < data.vocabulary_size,
        skipped=len(skipped),
        dropped=dropped,
        gzip_bytes=gzip_size(validation, tokenizer),
        python=all(file.document.path.suffix == ".py" for file in files),
        tokenizer=folder / TOKENIZER_FOLDER if tokenizer else None,
    )


def size_is_set(data: TextData) -> bool:
    """Whether the settings say how many entries the vocabulary has."""
    return "vocabulary_size" in data.model_fields_set


def _look(data: TextData, part: Part, skipped: list[Document]) -> list[Known]:
    """What the files of a data set hold, in the order of their names; those that cannot be read are added to a list."""
    texts, found = [], []
    for source in part.sources:
        kind: str | None = None
        for document in source:
            form = format_of(document)
            if form == INDEXED:
                found.append(Known(document, INDEXED, None))
            elif form:
                kind = kind or _kind(data, document)
                (found.append(Known(document, kind, None)) if kind else skipped.append(document))
            elif is_text(document):
                texts.append(document)
            else:
                skipped.append(document)
    if not texts and not found:
        raise ValueError(
            f"there is no readable text in {part.wanted}: {_names(part.documents)} "
            f"{'is' if len(part.documents) == 1 else 'are'} empty or not UTF-8; add text, or convert it to UTF-8"
        )
    if texts and data.format not in (None, "text"):
        raise ValueError(
            f"{part.wanted} has plain text, {texts[0].path}, and data.format = {data.format!r} needs records: JSON "
            "lines (.jsonl, .jsonl.gz), parquet, or a data set of Hugging Face; choose files with data.suffixes"
        )
    _require_one_kind(part, texts, found)
    if part.fraction in (0.0, 1.0):
        found += [Known(document, None, 1.0 - part.fraction) for document in texts]
    else:
        split = split_documents(texts, part.fraction)
        for share, side in ((1.0, split.train), (0.0, split.validation)):
            found += [Known(document, None, share) for document in side]
    return sorted(found, key=lambda file: (file.document.name, str(file.document.path), file.document.start))


def _require_one_kind(part: Part, texts: Sequence[Document], found: Sequence[Known]) -> None:
    """A stream, packed records, and files of tokens are learned from in different ways."""
    groups = {"text": [*texts]}
    for file in found:
        packed = file.kind is not None and file.kind != INDEXED and KINDS[file.kind].packed
        name = INDEXED if file.kind == INDEXED else "records" if packed else "text"
        groups.setdefault(name, []).append(file.document)
    if sum(map(bool, groups.values())) > 1 or len(groups.get(INDEXED, ())) > 1:
        names = "; ".join(f"{name}: {_names(documents)}" for name, documents in groups.items() if documents)
        raise ValueError(
            f"{part.wanted} has more than one data set ({names}); name them one by one, in data.train as "
            '{"source": ..., "weight": ...}'
        )


def _kind(data: TextData, document: Document) -> str | None:
    """The kind of the first record of a file; None if it has none."""
    for portion in FORMATS[format_of(document)].cut(document):
        for number, record in read_portion(portion):
            with placed(portion, number):
                return kind_of(data, record)
    return None


def _names(documents: Sequence[Document]) -> str:
    names = ", ".join(document.name for document in documents[:NAMED_FILES])
    more = len(documents) - NAMED_FILES
    return f"{names} and {more} more" if more > 0 else names


def _tokenizer(data: TextData, files: Sequence[Known]) -> TextTokenizer | None:
    """The one in the settings, or one that is trained; None where all is tokens already and none is named."""
    if data.tokenizer is not None:
        return load_tokenizer(Path(data.tokenizer).expanduser())
    readable = [file for file in files if file.kind != INDEXED]
    if not readable:
        return None
    for file in readable:
        if file.kind == "chat":
            raise ValueError(
                f"{file.document.path} has chats, which need a tokenizer with a chat template; set data.tokenizer to "
                "the folder of a model's tokenizer"
            )
    return train_tokenizer(sample_texts(data, readable), data.vocabulary_size, fill=size_is_set(data))


def sample_texts(data: TextData, files: Sequence[Known]) -> Iterator[str]:
    """About ``SAMPLE_BYTES`` of what is trained on: a portion is taken whenever too little of what passed was taken."""
    held = data.validation_fraction if data.validation is None else 0.0
    read = [file for file in files if file.share is None or file.share >= held]
    share = SAMPLE_BYTES / max(SAMPLE_BYTES, sum(file.document.size for file in read))
    passed = taken = 0
    for side in chain.from_iterable(file.sides() for file in read):
        passed += side.portion.size
        if taken + side.portion.size / 2 < passed * share or share == 1:
            taken += side.portion.size
            yield from _texts(data, side.portion, side.kind, held)


def _texts(data: TextData, portion: Portion, kind: str | None, held: float) -> Iterator[str]:
    for number, record in read_portion(portion):
        if kind is None:
            yield record
        elif share_of(record) >= held:
            with placed(portion, number):
                yield from KINDS[kind].texts(read_record(data, kind, record))


def _make_part(
    data: TextData, part: Part, files: Sequence[Known], encoder: Encoder | None, folder: Path, bar: ReadingBar
) -> tuple[TokenSet, TokenSet, int]:
    """What of a data set is trained on and held out, and how many records were dropped."""
    tokenizer = encoder.tokenizer if encoder else None
    if files[0].kind == INDEXED:
        prefix = files[0].document.path.resolve()
        documents, dropped = scan_documents(prefix), 0
        bar.advance(files[0].document.size)
    else:
        assert encoder is not None
        size = sum(file.document.size for file in files)
        workers = 1 if size < SMALL else data.workers or available_cores()
        counted = _Counted(bar)
        encoded = counted.watch(encode_all(grouped(chain.from_iterable(f.sides() for f in files)), encoder, workers))
        packed = files[0].kind is not None and KINDS[files[0].kind].packed
        prefix = folder / part.name
        documents = write_documents(prefix, encoded, token_dtype(encoder.tokenizer.size), packed)
        dropped = counted.dropped
    if not len(documents.tokens):
        raise ValueError(
            f"{part.wanted} has no documents to learn from, {dropped} records having been left out as too long; add "
            "some"
        )
    return *divide(prefix, documents, part.fraction, tokenizer, folder), dropped


class _Counted:
    """Counts what goes by."""

    def __init__(self, bar: ReadingBar) -> None:
        self.bar, self.dropped = bar, 0

    def watch(self, parts: Iterable[Encoded]) -> Iterator[Encoded]:
        for part in parts:
            self.bar.advance(part.read)
            self.dropped += part.dropped
            yield part
