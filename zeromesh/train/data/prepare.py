"""From the sources in the settings to a folder with a tokenizer and token files, once."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from zeromesh.config.train import TextData
from zeromesh.train.data.corpus import Document, find_documents
from zeromesh.train.data.making import make, size_is_set
from zeromesh.train.data.prepared import PreparedData, load_summary, save_summary
from zeromesh.train.data.sources import Part
from zeromesh.train.data.tokenizer import content_key

SUMMARY_FILE = "data.json"

FREE = {"train", "vocabulary_size", "workers", "packing", "document_attention"}
"""Settings that the token files do not depend on, and the sources, which are looked at one by one."""

VERSION = 2
"""Version of the encoding: token files of another version are made anew."""


class Changed(ValueError):
    """The sources or settings of a text are not what its token files were made from."""


def prepare(
    data: TextData,
    folder: Path,
    may_write: bool = True,
    length: int | None = None,
    console: Console | None = None,
) -> PreparedData:
    """Bring the text into a folder as token files, unless they are there already.

    Args:
        data: the sources and how to read them.
        folder: where the tokenizer and the token files are, or will be. Nothing beside it, in the folder of the run,
            is text. Until all is written, what it holds stays.
        may_write: make what is not there or out of date, instead of refusing.
        length: tokens of a sample, which records must fit into; None for any.
        console: where progress is shown.

    Raises:
        ValueError: if a source has no text, a record is wrong, the vocabulary does not suit the text, the folder holds
            something else, or, as ``Changed``, if the files in the folder were made from something else and may not
            be written.
    """
    parts = _find(data, folder.parent)
    key = _key(data, parts, length)
    prepared = load_summary(folder / SUMMARY_FILE)
    if prepared is not None and prepared.key == key and _has_size(data, prepared):
        return prepared.sampled(data)
    if not may_write:
        raise Changed(
            f"the text in data.train has changed since its tokens were written to {str(folder)!r}; bring back the "
            "files and settings of that time, or start a new run"
        )
    _require_ours(folder)
    new = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        save_summary(make(data, parts, key, new, length, console), new / SUMMARY_FILE)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    made = load_summary(folder / SUMMARY_FILE)
    assert made is not None
    return made.sampled(data)


def _require_ours(folder: Path) -> None:
    """Raise ValueError for a folder that was not written here, and must not be replaced."""
    if folder.exists() and not (folder / SUMMARY_FILE).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"{str(folder)!r} is where the tokens would be written, and is something else, without {SUMMARY_FILE}; "
            "move it away, or choose another folder, with run.output in zeromesh train"
        )


def _find(data: TextData, output: Path) -> list[Part]:
    """The data sets: one for each part of the blend, and one for each source that is held out as a whole."""
    held = [
        Part(f"validation{number}", f"data.validation = {source!r}", (_documents(data, source, output),), 1.0)
        for number, source in enumerate(data.validation or ())
    ]
    seen = {document.path.resolve() for part in held for document in part.documents}
    fraction = data.validation_fraction if data.validation is None else 0.0
    parts = []
    for number, (names, _) in enumerate(data.blend):
        sources = []
        for name in names:
            found = _documents(data, name, output)
            sources.append(tuple(document for document in found if document.path.resolve() not in seen))
            seen |= {document.path.resolve() for document in found}
        if not any(sources):
            raise ValueError(
                f"every file of data.train = {list(names)} is also in data.validation, or in a part of the blend "
                "before it; nothing is left to train on"
            )
        parts.append(Part(f"train{number}", f"data.train = {list(names)}", tuple(sources), fraction))
    return parts + held


def _documents(data: TextData, source: str, output: Path) -> tuple[Document, ...]:
    return tuple(find_documents([source], data.suffixes, output))


def _key(data: TextData, parts: Sequence[Part], length: int | None) -> str:
    """A hash over the settings, the tokenizer, and every file's name, size and time of change."""
    settings = [VERSION, data.model_dump(mode="json", exclude=FREE), length]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    if data.tokenizer is not None and Path(data.tokenizer).expanduser().exists():
        digest.update(content_key(Path(data.tokenizer).expanduser()).encode())
    for part in parts:
        digest.update(f"\0{part.name}".encode())
        for document in part.documents:
            for file in document.files:
                state = file.stat()
                text = f"\0{document.name}\0{file.resolve()}\0{state.st_size}\0{state.st_mtime_ns}"
                digest.update(text.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _has_size(data: TextData, prepared: PreparedData) -> bool:
    """Return whether text was prepared with a vocabulary of the size in the settings."""
    if data.tokenizer is not None or prepared.tokenizer is None or prepared.vocabulary == data.vocabulary_size:
        return True
    return prepared.capped and not size_is_set(data)
