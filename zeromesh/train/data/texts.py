"""Plain text: reading it, cutting it into parts, and holding some of it out."""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zeromesh.train.data.corpus import Document

CUT_WINDOW = 2**16
"""A place for a cut is looked for in so many bytes."""

CUTS = (rb"\S\n(?=\S)", rb"\n(?=[\s\S])", rb"\S(?= \S)", rb"[\s\S](?=[^\x80-\xbf])")
"""What may stand before a cut, the best first: the end of a line beside no other space, where a byte-level tokenizer
divides the text anyway; the end of any line; of a word; of a character."""


@dataclass(frozen=True)
class TextSplit:
    """The documents that are trained on and those that are held out, each in the order of their names."""

    train: tuple[Document, ...]
    validation: tuple[Document, ...]


def split_documents(documents: Sequence[Document], fraction: float) -> TextSplit:
    """Hold out about ``fraction`` of the documents, chosen by the hash of the name alone.

    A document stays on its side when others come or go. Where there are so few documents that none would be held out,
    or more than half of the text that is to be trained on, the end of the largest document is held out instead.
    """
    validation = {document for document in documents if _share(document.name) < fraction}
    if fraction > 0 and documents:
        size = sum(document.size for document in documents)
        rest = size - sum(document.size for document in validation)
        if not validation or rest <= (1 - fraction) * size / 2:
            return _split_largest(documents, round(fraction * size))
    return TextSplit(
        train=tuple(document for document in documents if document not in validation),
        validation=tuple(document for document in documents if document in validation),
    )


def is_text(document: Document) -> bool:
    """Return whether a document can be read, is UTF-8, and has more than bytes of zero. It is read piece by piece."""
    decoder, has_text = codecs.getincrementaldecoder("utf-8")(), False
    try:
        with document.path.open("rb") as file:
            while block := file.read(2**20):
                decoder.decode(block)
                has_text = has_text or bool(block.strip(b"\0"))
        decoder.decode(b"", final=True)
    except (OSError, UnicodeDecodeError):
        return False
    return has_text


def read_document(document: Document) -> str:
    """The text of a document, byte for byte."""
    return _bytes(document.path, document.start, document.start + document.size).decode("utf-8")


def parts(document: Document, size: int) -> Iterator[Document]:
    """A document cut into parts of at most ``size`` bytes, at line ends where there are any."""
    stop = document.start + document.size
    start = document.start
    while stop - start > size:
        end = _cut(document.path, start, start + size)
        yield replace(document, start=start, stop=end)
        start = end
    if start < stop:
        yield replace(document, start=start, stop=stop)


def _split_largest(documents: Sequence[Document], size: int) -> TextSplit:
    """Hold out the last ``size`` bytes of the largest document, or a little more, up to the start of a line."""
    largest = max(documents, key=lambda document: document.size)
    start, stop = largest.start, largest.start + largest.size
    if stop - start < 2:
        return TextSplit(train=tuple(documents), validation=())
    wanted = min(max(stop - size, start + 1), stop - 1)
    cut = _cut(largest.path, max(start, wanted - size), wanted)  # at most twice as much, whatever the lines are like
    if cut == stop:
        return TextSplit(train=tuple(documents), validation=())
    kept = replace(largest, stop=cut)
    return TextSplit(
        train=tuple(kept if document == largest else document for document in documents),
        validation=(replace(largest, start=cut),),
    )


def _cut(path: Path, low: int, high: int) -> int:
    """The best place for a cut after the byte ``low`` and, where characters allow, at or before the byte ``high``."""
    begin = max(low, high - CUT_WINDOW)
    window = _bytes(path, begin, high + 1)
    for pattern in CUTS:
        if found := re.match(rb"[\s\S]*" + pattern, window):
            return begin + found.end()
    following = _bytes(path, high, high + 4) + b"\0"
    return high + next(count for count, byte in enumerate(following) if byte & 0xC0 != 0x80)


def _bytes(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


def _share(name: str) -> float:
    """A number in [0, 1) that only depends on the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2.0**64
