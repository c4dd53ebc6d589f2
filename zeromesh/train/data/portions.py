"""The formats that text comes in: how a file is cut into portions that can be read alone, and how each is read."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from zeromesh.train.data.corpus import Document, is_dataset
from zeromesh.train.data.indexed import prefix_of
from zeromesh.train.data.texts import parts, read_document

PIECE_BYTES = 2**18
"""Longer texts are read and encoded in pieces of at most this size."""

PORTION_BYTES = 2**21
"""About so much of a file of records is one portion."""


@dataclass(frozen=True)
class Portion:
    """A part of a file.

    Attributes:
        document: the file; of a text, the part of it.
        start: first byte, row or group of rows, as the format counts.
        stop: the one after the last.
        size: bytes of the file that it stands for.
        lines: lines of a compressed file, which cannot be read from the middle; None for other formats.
        last: whether a text ends with it.
    """

    document: Document
    start: int
    stop: int
    size: int
    lines: bytes | None = None
    last: bool = True


OF_AN_ARRAY = ", and `jq -c '.[]' FILE` writes the records of an array so"


class RecordError(ValueError):
    """A record that is wrong; ``number`` counts from the beginning of its portion."""

    def __init__(self, number: int, problem: str) -> None:
        self.number = number
        super().__init__(problem)


@dataclass(frozen=True)
class DataFormat:
    """A row of ``FORMATS``.

    Attributes:
        cut: a file to its portions.
        read: a portion to its records and their numbers in it. Of plain text, the one record is the text itself.
        place: where a record is, for messages.
    """

    cut: Callable[[Document], Iterator[Portion]]
    read: Callable[[Portion], Iterator[tuple[int, Any]]]
    place: Callable[[Portion, int], str]


def format_of(document: Document) -> str:
    """The key in ``FORMATS``, or "indexed" for what is tokens already."""
    path = document.path
    if is_dataset(path):
        return "dataset"
    if not path.is_file() and prefix_of(path) is not None:
        return "indexed"
    return next((ending for ending in FORMATS if ending and path.name.lower().endswith(ending)), "")


def _cut_text(document: Document) -> Iterator[Portion]:
    stop = document.start + document.size
    for part in parts(document, PIECE_BYTES):
        yield Portion(document, part.start, part.start + part.size, part.size, last=part.start + part.size == stop)


def _read_text(portion: Portion) -> Iterator[tuple[int, str]]:
    document = portion.document
    yield 0, read_document(Document(document.name, document.path, portion.start, portion.stop))


def _cut_lines(document: Document) -> Iterator[Portion]:
    start, end = 0, document.size
    with document.path.open("rb") as file:
        while start < end:
            file.seek(min(start + PORTION_BYTES, end))
            file.readline()
            stop = min(file.tell(), end)
            yield Portion(document, start, stop, stop - start)
            start = stop


def _read_lines(portion: Portion) -> Iterator[tuple[int, Any]]:
    with portion.document.path.open("rb") as file:
        file.seek(portion.start)
        yield from _parse(file.read(portion.stop - portion.start))


def _place_line(portion: Portion, number: int) -> str:
    before, left = 0, portion.start
    with portion.document.path.open("rb") as file:
        while left and (block := file.read(min(left, 2**20))):
            before, left = before + block.count(b"\n"), left - len(block)
    return f"{portion.document.path}, line {before + number + 1}"


def _cut_compressed(document: Document) -> Iterator[Portion]:
    """Portions with their lines; ``start`` counts the lines before."""
    count = read = 0
    with document.path.open("rb") as raw, gzip.open(raw) as file:
        try:
            while block := file.read(PORTION_BYTES) + file.readline():
                lines = block.count(b"\n")
                yield Portion(document, count, count + lines, raw.tell() - read, block)
                count, read = count + lines, raw.tell()
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{document.path} cannot be read as a gzip file: {error}; make it anew") from None


def _read_compressed(portion: Portion) -> Iterator[tuple[int, Any]]:
    assert portion.lines is not None
    yield from _parse(portion.lines)


def _parse(lines: bytes) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines.split(b"\n")):
        if line.strip():
            try:
                yield number, _DECODER.decode(line.decode(json.detect_encoding(line), "surrogatepass"))
            except (ValueError, RecursionError) as error:
                raise RecordError(number, _wrong_line(line, error)) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice, and JSON does not say which counts")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _wrong_line(line: bytes, error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 (byte {error.object[error.start]:#04x} at {error.start + 1}); convert the file"
    what = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
    return f"is not JSON ({what}); each line is one object{OF_AN_ARRAY if line.lstrip().startswith(b'[') else ''}"


def _cut_parquet(document: Document) -> Iterator[Portion]:
    groups = _parquet(document.path).metadata
    for group in range(groups.num_row_groups):
        yield Portion(document, group, group + 1, document.size // groups.num_row_groups)


def _read_parquet(portion: Portion) -> Iterator[tuple[int, Any]]:
    path = portion.document.path
    with _readable(path, "a parquet file"):
        rows = _parquet(path).read_row_group(portion.start).to_pylist()
    yield from enumerate(map(_row, rows))


def _place_parquet(portion: Portion, number: int) -> str:
    groups = _parquet(portion.document.path).metadata
    before = sum(groups.row_group(group).num_rows for group in range(portion.start))
    return f"{portion.document.path}, row {before + number + 1}"


def _parquet(path: Path) -> Any:
    return _open_parquet(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _open_parquet(path: Path, changed: int) -> Any:
    """Kept open, unless the file was changed at another time."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise _missing(path, "pyarrow") from None
    with _readable(path, "a parquet file"):
        return parquet.ParquetFile(path)


@contextmanager
def _readable(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever pyarrow and datasets raise on damaged files
        raise ValueError(f"{path} cannot be read as {what}: {error}; make it anew") from error


def _cut_dataset(document: Document) -> Iterator[Portion]:
    rows = len(_dataset(document.path))
    step = max(1, rows * PORTION_BYTES // max(1, document.size))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield Portion(document, start, stop, document.size * (stop - start) // rows)


def _read_dataset(portion: Portion) -> Iterator[tuple[int, Any]]:
    path = portion.document.path
    with _readable(path, "a data set of Hugging Face"):
        columns = _dataset(path)[portion.start : portion.stop]
    rows = zip(*columns.values(), strict=True)
    yield from enumerate(_row(dict(zip(columns, row, strict=True))) for row in rows)


def _row(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what a table adds: it gives all objects in a column the same keys, and null to those without."""
    return {key: _without_nulls(value) for key, value in record.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _dataset(folder: Path) -> Any:
    return _open_dataset(folder, max(file.stat().st_mtime_ns for file in folder.iterdir()))


@lru_cache(maxsize=4)
def _open_dataset(folder: Path, changed: int) -> Any:
    """See ``_open_parquet``."""
    try:
        from datasets import load_from_disk
    except ImportError:
        raise _missing(folder, "datasets") from None
    with _readable(folder, "a data set of Hugging Face"):
        return load_from_disk(str(folder)).with_format(None)


def _missing(path: Path, package: str) -> ValueError:
    return ValueError(f"reading {str(path)!r} needs the package {package}: pip install 'zeromesh[datasets]'")


_LINES = DataFormat(_cut_lines, _read_lines, _place_line)
_COMPRESSED = DataFormat(
    _cut_compressed, _read_compressed, lambda portion, n: f"{portion.document.path}, line {portion.start + n + 1}"
)

FORMATS: dict[str, DataFormat] = {
    ".jsonl": _LINES,
    ".ndjson": _LINES,
    ".jsonl.gz": _COMPRESSED,
    ".ndjson.gz": _COMPRESSED,
    ".parquet": DataFormat(_cut_parquet, _read_parquet, _place_parquet),
    "dataset": DataFormat(
        _cut_dataset, _read_dataset, lambda portion, n: f"{portion.document.path}, row {portion.start + n + 1}"
    ),
    "": DataFormat(_cut_text, _read_text, lambda portion, n: str(portion.document.path)),
}
"""Format by the end of the file's name; the last row is plain text."""


def read_portion(portion: Portion) -> Iterator[tuple[int, Any]]:
    """The records of a portion with their numbers in it.

    Raises:
        ValueError: with its place, if one cannot be read.
    """
    try:
        yield from FORMATS[format_of(portion.document)].read(portion)
    except RecordError as error:
        with placed(portion, error.number):
            raise


@contextmanager
def placed(portion: Portion, number: int) -> Iterator[None]:
    """Say in errors which record it is that something is wrong with."""
    try:
        yield
    except ValueError as error:
        place = FORMATS[format_of(portion.document)].place(portion, number)
        raise ValueError(f"{place}: {error}") from None
