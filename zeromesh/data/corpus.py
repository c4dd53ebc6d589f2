"""Which documents a corpus has, in which order, and which of them are held out."""

from __future__ import annotations

import glob
import hashlib
import itertools
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

STANDARD_LIBRARY = "python-stdlib"
"""A source that is on every machine: the running Python's own library."""

NOT_LIBRARY = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
)
"""Folders of the standard library that are left out: installed packages, tests, applications, generated tables."""


@dataclass(frozen=True)
class Document:
    """One file of the corpus. ``name`` is its path relative to the source it came from, with forward slashes."""

    name: str
    path: Path


@dataclass(frozen=True)
class Split:
    """The documents that are trained on and those that are held out, each in the order of their names."""

    train: tuple[Document, ...]
    validation: tuple[Document, ...]


def find_documents(sources: Sequence[str], suffixes: Sequence[str]) -> list[Document]:
    """The files that the sources name, in the order of their names, each once.

    Args:
        sources: files, folders, glob patterns, or ``python-stdlib``.
        suffixes: which files of a folder count; empty for all. A file that is named itself always counts, and the
            standard library's are those in ``.py``.

    Raises:
        ValueError: if a source does not exist or has no file.
    """
    found: dict[Path, Document] = {}
    for source in sources:
        documents = list(_of_source(source, tuple(suffixes)))
        if not documents:
            raise ValueError(_nothing_found(source, suffixes))
        for document in documents:
            found.setdefault(document.path.resolve(), document)
    return sorted(found.values(), key=lambda document: (document.name, str(document.path)))


def split_documents(documents: Sequence[Document], fraction: float) -> Split:
    """Hold out about ``fraction`` of the documents, chosen by the hash of the name alone.

    A document stays on its side when others come or go. Both sides get at least one where there are two documents.
    """
    ranked = sorted(documents, key=lambda document: _share(document.name))
    held = sum(_share(document.name) < fraction for document in documents)
    if fraction > 0 and len(documents) > 1:
        held = min(max(held, 1), len(documents) - 1)
    validation = {document.path for document in ranked[:held]}
    return Split(
        train=tuple(document for document in documents if document.path not in validation),
        validation=tuple(document for document in documents if document.path in validation),
    )


def read_document(document: Document) -> str | None:
    """The text of a document, byte for byte, or None for one that cannot be read, is not UTF-8, or is empty."""
    try:
        return document.path.read_bytes().decode("utf-8") or None
    except (OSError, UnicodeDecodeError):
        return None


def _share(name: str) -> float:
    """A number in [0, 1) that only depends on the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2.0**64


def _of_source(source: str, suffixes: tuple[str, ...]) -> Iterator[Document]:
    if source == STANDARD_LIBRARY:
        yield from _of_folder(Path(sysconfig.get_path("stdlib")), (".py",), NOT_LIBRARY)
        return
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _of_folder(path, suffixes, frozenset())
    elif path.is_file():
        yield Document(path.name, path)
    else:
        base = _fixed_part(path)
        for match in glob.glob(str(path), recursive=True):
            if Path(match).is_file():
                yield Document(Path(match).relative_to(base).as_posix(), Path(match))


def _of_folder(folder: Path, suffixes: tuple[str, ...], without: frozenset[str]) -> Iterator[Document]:
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if hidden or without.intersection(name.parts) or (suffixes and path.suffix not in suffixes):
            continue
        if path.is_file():
            yield Document(name.as_posix(), path)


def _fixed_part(pattern: Path) -> Path:
    """The folders of a pattern before its first wildcard."""
    return Path(*itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts[:-1]))


def _nothing_found(source: str, suffixes: Sequence[str]) -> str:
    path = Path(source).expanduser()
    if path.is_dir():
        wanted = f"no file that ends in {', '.join(suffixes)}" if suffixes else "no files"
        return f"data folder {source!r} has {wanted}; put text there, or set data.suffixes to what your files end in"
    known = f"name a file, a folder, a glob pattern or {STANDARD_LIBRARY!r}"
    return f"data source {source!r} does not exist and matches no file; {known}"
