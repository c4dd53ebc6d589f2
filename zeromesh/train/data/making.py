"""Making of token files: the tokenizer, and one data set after the other."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path

from rich.console import Console

from zeromesh.config.train import TextData
from zeromesh.launcher.launch import available_cores
from zeromesh.observe.progress import ReadingBar
from zeromesh.train.data.corpus import Document
from zeromesh.train.data.encode import SMALL, Encoded, Encoder, EncodeSettings, encode_all, grouped
from zeromesh.train.data.portions import Portion, placed, read_portion
from zeromesh.train.data.prepared import PreparedData, TokenSet
from zeromesh.train.data.records import KINDS, read_record, share_of
from zeromesh.train.data.sources import INDEXED, Known, Part, look, names_of
from zeromesh.train.data.store import divide, gzip_size, scan_documents, write_documents
from zeromesh.train.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer

_log = logging.getLogger(__name__)

SAMPLE_BYTES = 64 * 2**20
"""A tokenizer is trained on about this much text, in portions that are evenly spread over the training text."""

TOKENIZER_FOLDER = "tokenizer"


def make(
    data: TextData, parts: Sequence[Part], key: str, folder: Path, length: int | None, console: Console | None
) -> PreparedData:
    """Write the tokenizer and all data sets into an empty folder; arguments as in ``prepare``."""
    skipped: list[Document] = []
    known = [look(data, part, skipped) for part in parts]
    if skipped:
        _log.info("left out, being empty, unreadable or not UTF-8: %s", names_of(skipped))
    trained_on = [files for part, files in zip(parts, known, strict=True) if part.fraction < 1]
    tokenizer = _tokenizer(data, list(chain(*trained_on)))
    if tokenizer is not None:
        (folder / TOKENIZER_FOLDER).mkdir()
        tokenizer.save(folder / TOKENIZER_FOLDER)
    encoder = None if tokenizer is None else Encoder(EncodeSettings(folder / TOKENIZER_FOLDER, data, length), tokenizer)
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
    return PreparedData(
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
    """Return whether the settings say how many entries the vocabulary has."""
    return "vocabulary_size" in data.model_fields_set


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
    """Training and held-out parts of a data set, and the number of dropped records."""
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
        packed = files[0].kind is not None and KINDS[files[0].kind].packed
        prefix = folder / part.name
        tasks = grouped(chain.from_iterable(file.sides() for file in files))
        # Closed at once where writing fails, or the processes would live as long as the error is looked at.
        with closing(encode_all(tasks, encoder, workers)) as encoded:
            documents = write_documents(prefix, counted.watch(encoded), encoder.dtype, packed)
        dropped = counted.dropped
    learned, unlearned = int(documents.learned.sum()), int((~documents.learned).sum())
    if not learned:
        raise ValueError(
            f"{part.wanted} has no documents to learn from, {dropped} records having been left out as too long and "
            f"{unlearned} as having no token to learn; add some"
        )
    if unlearned:
        _log.warning("left out %d records of %s that have no token to learn", unlearned, part.wanted)
    return *divide(part.name, prefix, documents, part.fraction, tokenizer, folder), dropped


class _Counted:
    """Counts what goes by."""

    def __init__(self, bar: ReadingBar) -> None:
        self.bar, self.dropped = bar, 0

    def watch(self, parts: Iterable[Encoded]) -> Iterator[Encoded]:
        for part in parts:
            self.bar.advance(part.read)
            self.dropped += part.dropped
            yield part
