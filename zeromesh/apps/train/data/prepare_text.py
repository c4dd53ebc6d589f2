"""Text to token files: find the sources, make the tokenizer, write a data set for each part of the blend, once."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from rich.console import Console

from zeromesh.apps.train.data import token_store
from zeromesh.apps.train.data.encode import Encoded, Encoder, grouped
from zeromesh.apps.train.data.file_kinds import summary
from zeromesh.apps.train.data.hub_datasets import is_dataset_id
from zeromesh.apps.train.data.records import KINDS, read_record, share_of
from zeromesh.apps.train.data.sources import Part, find_documents, look, names_of
from zeromesh.apps.train.data.text_formats import INDEXED, Document, is_special, placed, portions, read_portion
from zeromesh.apps.train.data.tokenizer import TextTokenizer, content_key, load_tokenizer, train_tokenizer
from zeromesh.apps.train.train_settings import TextData
from zeromesh.base.progress import ReadingBar
from zeromesh.base.words import counted
from zeromesh.checkpoint.weights.pretrained import MAIN

_log = logging.getLogger(__name__)

SUMMARY_FILE = "data.json"
TOKENIZER_FOLDER = "tokenizer"

# Not part of the key: token files do not depend on them, or they are compared in another way.
FREE = {"train", "vocabulary_size", "packing", "document_attention", "revision", "columns"}

# Of the encoding: token files of another version are made again.
VERSION = 2

# More text changes a vocabulary little, and learning it takes long.
SAMPLE_BYTES = 64 * 2**20


class Changed(ValueError):
    """Error of sources or settings that are not those that the token files were made from."""


def prepare(
    data: TextData, folder: Path, may_write: bool = True, length: int | None = None, console: Console | None = None
) -> token_store.PreparedData:
    """Write text into a folder as token files, unless they are there already.

    Args:
        data: the sources and how to read them.
        folder: folder of the tokenizer and the token files. Its parent, the folder of the run, is never a source.
        may_write: write files that are missing or out of date, instead of raising ``Changed``.
        length: tokens of a sample, which records must fit into; None for any.
        console: shows the progress.

    Raises:
        ValueError: a source or a record is wrong, or the folder holds other files.
    """
    parts = _find(data, folder.parent)
    key = _key(data, parts, length)
    prepared = token_store.load_summary(folder / SUMMARY_FILE)
    if prepared is not None and prepared.key == key and _has_size(data, prepared):
        return prepared.sampled(data)
    if not may_write:
        raise Changed(
            f"the text in data.train has changed since its tokens were written to {str(folder)!r}; bring back the "
            "files and settings of that time, or start a new run"
        )
    if folder.exists() and not (folder / SUMMARY_FILE).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"{str(folder)!r} is where the tokens would be written, and is something else, without {SUMMARY_FILE}; "
            "move it away, or choose another folder, with run.output in zeromesh train"
        )
    # Written beside the folder and renamed: a run that fails keeps the tokens that it has.
    new = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        token_store.save_summary(_make(data, parts, key, new, length, console), new / SUMMARY_FILE)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    # Read back, because the paths in memory are those of the folder before it was renamed.
    summary = token_store.load_summary(folder / SUMMARY_FILE)
    assert summary is not None
    return summary.sampled(data)


def size_is_set(data: TextData) -> bool:
    """Return whether the settings have a size of the vocabulary."""
    return "vocabulary_size" in data.model_fields_set


def _find(data: TextData, output: Path) -> list[Part]:
    """Return a data set for each part of the blend, and for each source that is held out."""

    def find(source: str) -> tuple[Document, ...]:
        return tuple(find_documents([source], data.suffixes, output, data.revision))

    if data.revision != MAIN and not any(map(is_dataset_id, data.names)):
        raise ValueError(f"data.revision = {data.revision!r}, but no source is a data set of the Hub; leave it out")
    held_out = [
        Part(f"validation{number}", f"data.validation = {source!r}", (find(source),), 1.0)
        for number, source in enumerate(data.validation or ())
    ]
    seen = {document.path.resolve() for part in held_out for document in part.documents}
    fraction = data.validation_fraction if data.validation is None else 0.0
    parts = []
    for number, (names, _) in enumerate(data.blend):
        sources = []
        # A file counts once, or text would be trained on that is held out: the held-out set has it, else the first.
        for name in names:
            documents = find(name)
            sources.append(tuple(document for document in documents if document.path.resolve() not in seen))
            seen |= {document.path.resolve() for document in documents}
        if not any(sources):
            raise ValueError(
                f"every file of data.train = {list(names)} is also in data.validation, or in a part of the blend "
                "before it; nothing is left to train on"
            )
        parts.append(Part(f"train{number}", f"data.train = {list(names)}", tuple(sources), fraction))
    return parts + held_out


def _key(data: TextData, parts: Sequence[Part], length: int | None) -> str:
    """Return a hash of the settings, the tokenizer, and the name, size and time of change of every file."""
    settings = [VERSION, data.model_dump(mode="json", exclude=FREE), length]
    settings += [data.columns] if data.columns else []  # so that token files of earlier versions stay
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())  # the length decides what is too long
    if data.tokenizer is not None and Path(data.tokenizer).expanduser().exists():
        digest.update(content_key(Path(data.tokenizer).expanduser()).encode())
    for part in parts:
        digest.update(f"\0{part.name}".encode())
        for document in part.documents:
            for file in document.files:
                # The content is not read: for a large corpus this would take as long as making the tokens.
                state = file.stat()
                text = f"\0{document.name}\0{file.resolve()}\0{state.st_size}\0{state.st_mtime_ns}"
                digest.update(text.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _has_size(data: TextData, prepared: token_store.PreparedData) -> bool:
    """Return whether text was prepared with the size of the vocabulary in the settings."""
    if data.tokenizer is not None or prepared.tokenizer is None or prepared.vocabulary == data.vocabulary_size:
        return True
    # A short text gives fewer entries than the default size, and would give as many again.
    return prepared.capped and not size_is_set(data)


def _make(
    data: TextData, parts: Sequence[Part], key: str, folder: Path, length: int | None, console: Console | None
) -> token_store.PreparedData:
    """Write the tokenizer and all data sets into an empty folder."""
    skipped: list[Document] = []
    files = [look(data, part, skipped) for part in parts]
    if skipped:
        kinds = summary([document.path for document in skipped if not is_special(document.path)]).partition(":")[0]
        why = f" ({kinds})" if kinds else ""
        _log.info("left out, being empty, unreadable or not UTF-8: %s%s", names_of(skipped), why)
    # A tokenizer that had seen held-out text would make its score too good.
    trained_on = [file for part, documents in zip(parts, files, strict=True) if part.fraction < 1 for file in documents]
    tokenizer = _tokenizer(data, trained_on)
    encoder = None
    if tokenizer is not None:
        (folder / TOKENIZER_FOLDER).mkdir()
        tokenizer.save(folder / TOKENIZER_FOLDER)
        encoder = Encoder(tokenizer, data, length)
    train: list[token_store.TokenSet] = []
    validation: list[token_store.TokenSet] = []
    dropped = 0
    with ReadingBar(console, "text to tokens", sum(file.size for documents in files for file in documents)) as bar:
        for part, documents in zip(parts, files, strict=True):
            train_set, held_out, lost = _write_part(data, part, documents, encoder, folder, bar)
            train += [train_set] if part.fraction < 1 else []
            validation += [held_out] if held_out.documents else []
            dropped += lost
    if dropped:
        _log.info(
            "left out %s with more tokens than a sample has, as %s says", counted(dropped, "record"), "data.too_long"
        )
    if not validation and data.validation_fraction > 0:
        _log.warning("%s is too short to hold anything out; there will be no validation", "data.train")
    return token_store.PreparedData(
        key=key,
        train=tuple(train),
        validation=tuple(validation),
        vocabulary=tokenizer.size if tokenizer else 1 + max(part.highest for part in (*train, *validation)),
        pad=tokenizer.pad if tokenizer else 0,
        capped=tokenizer is not None and data.tokenizer is None and tokenizer.size < data.vocabulary_size,
        skipped=len(skipped),
        dropped=dropped,
        tokenizer=folder / TOKENIZER_FOLDER if tokenizer else None,
    )


def _tokenizer(data: TextData, files: Sequence[Document]) -> TextTokenizer | None:
    """Load the tokenizer of the settings, or train one; None if all files are tokens and the settings name none."""
    if data.tokenizer is not None:
        return load_tokenizer(Path(data.tokenizer).expanduser())
    readable = [file for file in files if file.kind != INDEXED]
    if not readable:
        return None
    for file in readable:
        if file.kind == "chat":
            raise ValueError(
                f"{file.path} has chats, which need a tokenizer with a chat template; set data.tokenizer to the folder "
                "of a model's tokenizer"
            )
    return train_tokenizer(sample_texts(data, readable), data.vocabulary_size, fill=size_is_set(data))


def sample_texts(data: TextData, files: Sequence[Document]) -> Iterator[str]:
    """Yield about ``SAMPLE_BYTES`` of the training text: a portion is taken when too little of the text before was."""
    fraction = data.validation_fraction if data.validation is None else 0.0
    read = [file for file in files if file.share is None or file.share >= fraction]
    share = SAMPLE_BYTES / max(SAMPLE_BYTES, sum(file.size for file in read))
    passed = taken = 0
    # A portion is taken when too little of the text before was, so the sample is spread evenly over all files.
    for portion in chain.from_iterable(map(portions, read)):
        passed += portion.size
        if share < 1 and taken + portion.size / 2 >= passed * share:
            continue
        taken += portion.size
        kind = portion.document.kind
        for number, record in read_portion(portion):
            if kind is None:
                yield record
            elif share_of(record) >= fraction:  # held-out records must not shape the vocabulary
                with placed(portion, number):
                    yield from KINDS[kind].texts(read_record(data, kind, record))


def _write_part(
    data: TextData, part: Part, files: Sequence[Document], encoder: Encoder | None, folder: Path, bar: ReadingBar
) -> tuple[token_store.TokenSet, token_store.TokenSet, int]:
    """Return the training and the held-out set of a part, and the number of records that were too long."""
    dropped = 0
    # Tokens of another program stay where they are.
    if files[0].kind == INDEXED:
        prefix = files[0].path.resolve()
        documents = token_store.scan_documents(prefix)
        bar.advance(files[0].size)
    else:
        assert encoder is not None
        prefix = folder / part.name
        packed = files[0].kind is not None and KINDS[files[0].kind].packed

        def encoded() -> Iterator[Encoded]:
            nonlocal dropped
            # Task by task, so that memory does not grow with the text.
            for result in map(encoder.encode, grouped(chain.from_iterable(map(portions, files)))):
                bar.advance(result.read)
                dropped += result.dropped
                yield result

        documents = token_store.write_documents(prefix, encoded(), encoder.dtype, packed)
        documents = replace(documents, pairs=files[0].kind == "preference")
    learned, unlearned = int(documents.learned.sum()), int((~documents.learned).sum())
    if not learned:
        raise ValueError(
            f"{part.wanted} has no documents to learn from, {dropped} records having been left out as too long and "
            f"{unlearned} as having no token to learn; add some"
        )
    if unlearned:
        _log.warning("left out %s of %s without a token to learn", counted(unlearned, "record"), part.wanted)
    tokenizer = encoder.tokenizer if encoder else None
    return *token_store.divide(part.name, prefix, documents, part.fraction, tokenizer, folder), dropped
