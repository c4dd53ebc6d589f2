"""Contents of a data set's sources: files, their kind, and the side of the split of each text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zeromesh.config.train import TextData
from zeromesh.train.data.corpus import Document, is_special
from zeromesh.train.data.encode import Side
from zeromesh.train.data.portions import FORMATS, format_of, placed, read_portion
from zeromesh.train.data.records import KINDS, kind_of
from zeromesh.train.data.texts import is_text, split_documents

NAMED_FILES = 5
"""So many of the files that were left out are named."""

LOOKED_AT = 2**24
"""A first record is looked for in so many bytes of a file."""

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


def look(data: TextData, part: Part, skipped: list[Document]) -> list[Known]:
    """Yield the contents of a data set's files in order; unreadable files are added to a list."""
    texts, found = [], []
    for source in part.sources:
        kind: str | None = None
        for document in source:
            form = format_of(document)
            if is_special(document.path):
                skipped.append(document)
            elif form == INDEXED:
                found.append(Known(document, INDEXED, None))
            elif form and (kind := kind or _kind(data, document)) is not None:
                found.append(Known(document, kind, None))
            elif not form and is_text(document):
                _require_no_records(data, document)
                texts.append(document)
            else:
                skipped.append(document)
    if not texts and not found:
        raise ValueError(
            f"there is no readable text in {part.wanted}: {names_of(part.documents)} "
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
        names = "; ".join(f"{name}: {names_of(documents)}" for name, documents in groups.items() if documents)
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


def _require_no_records(data: TextData, document: Document) -> None:
    """Raise ValueError for a file of JSON with records, of which quotes and brackets would be learned as plain text."""
    if not document.path.name.lower().endswith(".json"):
        return
    with document.path.open("rb") as file:
        text = file.read(LOOKED_AT).decode("utf-8-sig", errors="ignore").strip()
    is_array = text.startswith("[")
    try:
        first, end = json.JSONDecoder().raw_decode(text.removeprefix("[").lstrip())
        kind_of(data, first)
    except (ValueError, RecursionError):
        return
    way = "let its name end in .jsonl"
    if is_array or "\n" in text[:end]:
        lines = f"{document.path} > {document.path.with_suffix('.jsonl')}"
        way = f"write one record per line: jq -c '{'.[]' if is_array else '.'}' {lines}"
    raise ValueError(
        f"{document.path} has {'an array of records' if is_array else 'records'}, and a file that ends in .json is "
        f"plain text; {way}; to learn it as it is written, let its name end in .txt, and to leave it out, choose "
        "files with data.suffixes"
    )


def names_of(documents: Sequence[Document]) -> str:
    """The names of the first few of them, for messages."""
    names = ", ".join(document.name for document in documents[:NAMED_FILES])
    more = len(documents) - NAMED_FILES
    return f"{names} and {more} more" if more > 0 else names
