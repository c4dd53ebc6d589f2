"""Kinds of files that are no training text, known by first bytes and by name, and what to do with each."""

from __future__ import annotations

import codecs
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zeromesh.base.words import counted, some

HEAD = 512  # bytes by which a file is known; a tar archive names itself at byte 257
TAR = (257, b"ustar")
PARQUET = b"PAR1"
ZIP = (b"PK\x03\x04", b"PK\x05\x06")
GZIP = b"\x1f\x8b"

READ = (
    "ZeroMesh reads plain text, .jsonl, .ndjson (also with .gz), .json, .csv, .tsv, .parquet, folders written by "
    "datasets, and Megatron's .bin with .idx"
)
AS_WRITTEN = "to learn it as it is written: --set data.format=raw"


class FileKind(NamedTuple):
    """A row of ``KINDS``."""

    name: str  # with its article
    endings: tuple[str, ...]
    remedy: str
    begins: tuple[bytes, ...] = ()  # in lower case for markup
    member: str = ""  # of a ZIP archive: part of a name in it
    is_markup: bool = False  # text that can be learned as it is written

    @property
    def noun(self) -> str:
        """The name without its article."""
        return self.name.partition(" ")[2]


_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
KINDS = tuple(
    FileKind(
        **row
        | {"endings": tuple(row["endings"]), "remedy": _TABLES["remedies"].get(row["remedy"], row["remedy"])}
        | {"begins": tuple(text.encode("latin-1") for text in row.get("begins", ()))}
    )
    for row in _TABLES["kinds"]
)
"""Kinds, of which the first counts whose bytes a file begins with, else the first whose ending it has."""

ENDINGS = tuple(ending for kind in KINDS for ending in kind.endings)
READ_ENDINGS = (
    *(".txt", ".md", ".rst", ".tex", ".py", ".log"),
    *(".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".bin", ".idx"),
)


# Bytes of texts: none of the control characters but those of layout and of terminals.
_PRINTED = bytes([*range(7, 14), 27, *range(32, 256)])


def head_of(path: Path) -> bytes:
    """Return the first bytes of a file; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(HEAD)
    except OSError:
        return b""


def is_plain(head: bytes) -> bool:
    """Return whether the beginning of a file is UTF-8 text."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # its end may be half a character
    except UnicodeDecodeError:
        return False
    return bool(head) and not head.translate(None, delete=_PRINTED)


def kind_of_file(path: Path) -> FileKind | None:
    """Return what a file is, if it is no text, table or records that can be read; None for all else."""
    head = head_of(path)
    if head.startswith(ZIP):
        return _kind_of_archive(path)
    plain = is_plain(head)
    markup = head.removeprefix(codecs.BOM_UTF8).lstrip().lower()
    for kind in KINDS:
        if kind.is_markup:
            matches = plain and markup.startswith(kind.begins or (b"\0",))
        else:
            # Letters alone prove nothing about a text: it may begin with ORC.
            matches = head.startswith(kind.begins or (b"\0never",)) and (
                not plain or head.startswith((b"%PDF-", b"{\\rtf"))
            )
        if matches:
            return kind
    if head[TAR[0] :].startswith(TAR[1]):
        return next(kind for kind in KINDS if kind.name == "a tar archive")
    return _kind_by_name(path) if head else None


def _kind_by_name(path: Path) -> FileKind | None:
    name = path.name.lower()
    return next((kind for kind in KINDS if name.endswith(kind.endings or ("\0",))), None)


def _kind_of_archive(path: Path) -> FileKind:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile):
        names = []
    fits = (kind for kind in KINDS if kind.member and any(kind.member in name for name in names))
    named = _kind_by_name(path)
    rest = named if named is not None and named.member else next(kind for kind in KINDS if kind.begins == ZIP)
    return next(fits, rest)


def refusal(path: Path, kind: FileKind) -> str:
    """Return the error for a file of a kind that is not read."""
    if not kind.is_markup and is_plain(head_of(path)) and not head_of(path).startswith(kind.begins or (b"\0",)):
        return (
            f"{path} is text, and its name ends like that of {kind.name}; let the name end in .txt, or in "
            f".csv or .jsonl if it has records; {AS_WRITTEN}"
        )
    as_written = f"; {AS_WRITTEN}" if kind.is_markup else ""
    return f"{path} is {kind.name}, which is not read: {kind.remedy}{as_written}; {READ}"


def summary(paths: Sequence[Path]) -> str:
    """Return what files are, with the remedy of the most frequent kind, as ``3 PNG images (a)``; "" if unknown."""
    groups: dict[FileKind, list[str]] = {}
    for path in paths:
        if (kind := kind_of_file(path)) is not None:
            groups.setdefault(kind, []).append(path.name)
    if not groups:
        return ""
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    words = [f"{counted(len(names), kind.noun)} ({some(names, most=3)})" for kind, names in ordered]
    rest = len(paths) - sum(map(len, groups.values()))
    words += [f"{counted(rest, 'file')} that cannot be read as UTF-8"] if rest else []
    return f"{', '.join(words)}: {ordered[0][0].remedy}; {READ}"
