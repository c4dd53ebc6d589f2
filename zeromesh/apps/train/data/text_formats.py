"""Formats of text: how a file is cut into portions that can be read alone, and how a portion becomes records."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from zeromesh.apps.train.data.csv_tables import next_row, not_utf8, row_ends, table_of
from zeromesh.apps.train.data.file_kinds import AS_WRITTEN, PARQUET, head_of
from zeromesh.apps.train.data.indexed import ENDINGS, MASK, file_of, prefix_of
from zeromesh.base.requirements import imported

TABLES = (".csv", ".tsv")  # formats whose columns are all text
INDEXED = "indexed"  # format, and kind, of files that hold tokens
DATASET_FILES = ("state.json", "dataset_info.json")  # mark a folder of datasets
PIECE_BYTES = 2**18  # longest portion of plain text
PORTION_BYTES = 2**21  # of records, roughly
CUT_WINDOW = 2**16  # bytes before the limit in which a good place for a cut is looked for

# Patterns that end at a cut, best first: between two lines without other blanks, where a byte-level tokenizer divides
# the text anyway; between any lines, words, and characters.
CUTS = (rb"\S\n(?=\S)", rb"\n(?=[\s\S])", rb"\S(?= \S)", rb"[\s\S](?=[^\x80-\xbf])")

OF_AN_ARRAY = "; let the name of a file that is one array end in .json"


@dataclass(frozen=True)
class Document:
    """A file, the part of it between two bytes, or a data set of several files."""

    name: str  # path relative to its source, with forward slashes
    path: Path  # the file; the folder of a data set of datasets; the prefix of one in Megatron's format
    start: int = 0  # first byte in the file
    stop: int | None = None  # byte after the last; None for the end of the file
    kind: str | None = None  # of its records; INDEXED; None for plain text
    # Number in [0, 1) of all its text, which is held out if it is below data.validation_fraction; None if each record
    # has a number of its own.
    share: float | None = None
    named: bool = False  # the settings name the file itself, and not a folder or a pattern
    raw: bool = False  # read as plain text, whatever it is
    columns: tuple[str, ...] = ()  # names of the columns of a table without a header

    @property
    def size(self) -> int:
        """Bytes; 0 if there is no such file."""
        if self.stop is not None:
            return self.stop - self.start
        try:
            return sum(file.stat().st_size for file in self.files) - self.start
        except OSError:
            return 0

    @property
    def files(self) -> list[Path]:
        """Files of the document."""
        if self.path.is_dir():
            return sorted(file for file in self.path.iterdir() if file.is_file())
        if self.path.is_file():
            return [self.path]
        prefixes = [self.path, file_of(self.path, MASK)]
        return [file for prefix in prefixes for end in ENDINGS if (file := file_of(prefix, end)).is_file()] or [
            self.path
        ]


@dataclass(frozen=True)
class Portion:
    """Part of a file that can be read alone."""

    document: Document
    start: int  # byte of text and JSON lines, line of a gzip file, row of a data set, group of rows of a parquet file
    stop: int  # the one after the last
    size: int  # bytes of the file that the portion stands for
    before: int | None = None  # records of the file before the portion; None if they are not counted
    lines: bytes | None = None  # of a gzip file, which cannot be read from the middle
    last: bool = True  # the document ends with the portion


class DataFormat(NamedTuple):
    """A row of ``FORMATS``."""

    cut: Callable[[Document], Iterator[Portion]]
    read: Callable[[Portion], Iterator[tuple[int, Any]]]  # records with their numbers in the portion; text is one
    unit: str  # word for a record in error messages


def is_dataset(folder: Path) -> bool:
    """Return whether ``datasets`` wrote the folder."""
    return all((folder / name).is_file() for name in DATASET_FILES)


def is_special(path: Path) -> bool:
    """Return whether the path is a FIFO, a socket or a device, which may block when it is opened."""
    return path.exists() and not (path.is_file() or path.is_dir())


def format_of(document: Document) -> str:
    """Return the key in ``FORMATS``, or ``INDEXED``."""
    path = document.path
    if is_dataset(path):
        return "dataset"
    # A file may have the name of another one's prefix.
    if not path.is_file() and prefix_of(path) is not None:
        return INDEXED
    if document.raw or not path.is_file():
        return ""
    if head_of(path).startswith(PARQUET):
        return ".parquet"
    return next((ending for ending in FORMATS if ending and path.name.lower().endswith(ending)), "")


def portions(document: Document) -> Iterator[Portion]:
    """Yield the portions of a document in order."""
    return FORMATS[format_of(document)].cut(document)


def read_portion(portion: Portion) -> Iterator[tuple[int, Any]]:
    """Yield the records of a portion with their numbers in it; raise ValueError with the place of a damaged one."""
    return FORMATS[format_of(portion.document)].read(portion)


@contextmanager
def placed(portion: Portion, number: int) -> Iterator[None]:
    """Add the place of a record to errors."""
    try:
        yield
    except ValueError as error:
        path, unit, before = portion.document.path, FORMATS[format_of(portion.document)].unit, portion.before
        # Lines are counted only for a message: counting them all would take a pass over the file.
        if before is None:
            before = _lines_before(path, portion.start)
        raise ValueError(f"{path}, {unit} {before + number + 1}: {error}") from None


def cut_before(path: Path, low: int, high: int) -> int:
    """Return the best place for a cut after the byte ``low`` and, if characters allow, at or before ``high``."""
    begin = max(low, high - CUT_WINDOW)
    window = _bytes(path, begin, high + 1)
    for pattern in CUTS:
        if match := re.match(rb"[\s\S]*" + pattern, window):
            return begin + match.end()
    # Only the middle of a character is left: go on to its end.
    following = _bytes(path, high, high + 4) + b"\0"
    return high + next(count for count, byte in enumerate(following) if byte & 0xC0 != 0x80)


def _bytes(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:  # opened anew: portions outlive the iterators that made them
        file.seek(start)
        return file.read(stop - start)


def _cut_text(document: Document) -> Iterator[Portion]:
    start, end = document.start, document.start + document.size
    while start < end:
        # The places of cuts depend on the text only, so that any number of processes makes the same tokens.
        stop = cut_before(document.path, start, start + PIECE_BYTES) if end - start > PIECE_BYTES else end
        yield Portion(document, start, stop, stop - start, last=stop == end)
        start = stop


def _cut_lines(document: Document) -> Iterator[Portion]:
    start, end = 0, document.size
    with document.path.open("rb") as file:
        while start < end:
            file.seek(min(start + PORTION_BYTES, end))
            file.readline()  # up to the end of the line, so that no record is cut
            stop = min(file.tell(), end)
            yield Portion(document, start, stop, stop - start)
            start = stop


def _cut_compressed(document: Document) -> Iterator[Portion]:
    count = read = 0
    with document.path.open("rb") as raw, gzip.open(raw) as file:
        try:
            while block := file.read(PORTION_BYTES) + file.readline():
                lines = block.count(b"\n")
                yield Portion(document, count, count + lines, raw.tell() - read, before=count, lines=block)
                count, read = count + lines, raw.tell()
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{document.path} cannot be read as a gzip file: {error}; make it anew") from None


def _read_lines(portion: Portion) -> Iterator[tuple[int, Any]]:
    lines = portion.lines
    if lines is None:
        lines = _bytes(portion.document.path, portion.start, portion.stop)
    for number, line in enumerate(lines.split(b"\n")):
        if line.strip():
            with placed(portion, number):
                record = _parse(line)
            yield number, record  # outside, or errors of the caller would get the place twice


def _lines_before(path: Path, start: int) -> int:
    count, left = 0, start
    with path.open("rb") as file:
        while left and (block := file.read(min(left, 2**20))):
            count, left = count + block.count(b"\n"), left - len(block)
    return count


# By the standard library and not by datasets, which copies each file into its cache, keeps the last of two equal keys,
# gives all records the same keys, and names no line in its errors.
def _parse(line: bytes) -> Any:
    try:
        return _DECODER.decode(line.decode(json.detect_encoding(line), "surrogatepass"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not UTF-8 (byte {error.object[error.start]:#04x} at {error.start + 1}); convert the file"
        ) from None
    except (ValueError, RecursionError) as error:
        what = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        hint = OF_AN_ARRAY if line.lstrip().startswith(b"[") else ""
        raise ValueError(f"is not JSON ({what}); each line is one object{hint}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice, and JSON does not say which counts")
    return entries


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _cut_parquet(document: Document) -> Iterator[Portion]:
    groups = _table(document).metadata  # a group of rows is what can be read without what is before it
    before = 0
    for group in range(groups.num_row_groups):
        yield Portion(document, group, group + 1, document.size // groups.num_row_groups, before)
        before += groups.row_group(group).num_rows


def _read_parquet(portion: Portion) -> Iterator[tuple[int, Any]]:
    table = _table(portion.document)
    with _readable(portion.document.path):
        rows = table.read_row_group(portion.start).to_pylist()
    yield from enumerate(map(_record, rows))


def _cut_dataset(document: Document) -> Iterator[Portion]:
    rows = len(_table(document))
    step = max(1, rows * PORTION_BYTES // max(1, document.size))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield Portion(document, start, stop, document.size * (stop - start) // rows, before=start)


def _read_dataset(portion: Portion) -> Iterator[tuple[int, Any]]:
    table = _table(portion.document)
    with _readable(portion.document.path):
        columns = table[portion.start : portion.stop]
    rows = zip(*columns.values(), strict=True)
    yield from enumerate(_record(dict(zip(columns, row, strict=True))) for row in rows)


def _record(row: dict[str, Any]) -> dict[str, Any]:
    # Tables give all objects in a column the same keys, and null to those that a record did not have.
    return {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _table(document: Document) -> Any:
    return _open_table(document.path, max(file.stat().st_mtime_ns for file in document.files))


@lru_cache(maxsize=4)  # portions of a few files follow each other
def _open_table(path: Path, changed: int) -> Any:
    """Open a parquet file or a data set; ``changed`` is its time of change, so that the cache forgets an old file."""
    package = "datasets" if path.is_dir() else "pyarrow"
    library = imported(package, f"reading {str(path)!r} needs the package {package}")
    with _readable(path):
        if path.is_dir():
            return library.load_from_disk(str(path)).with_format(None)
        return import_module("pyarrow.parquet").ParquetFile(path)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # pyarrow and datasets raise many types for damaged files
        what = "a data set of Hugging Face" if path.is_dir() else "a parquet file"
        raise ValueError(f"{path} cannot be read as {what}: {error}; make it anew") from error


def _json_values(path: Path) -> list[Any]:
    """Return the records of a JSON file: the values of its array, or all values that follow each other in it."""
    values: list[Any] = []
    try:
        text = path.read_bytes().decode("utf-8-sig")
        position = _after_blanks(text, 0)
        while position < len(text):
            value, stop = _DECODER.raw_decode(text, position)
            values.append(value)
            position = _after_blanks(text, stop)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}); convert the file") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {error.lineno}: is not JSON ({error.msg}, column {error.colno}); write one array of "
            f"records, or one record per line; {AS_WRITTEN}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); write one record per line") from None
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


def _after_blanks(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _cut_json(document: Document) -> Iterator[Portion]:
    lines: list[bytes] = []
    start = size = 0
    for value in _json_values(document.path):
        # As JSON lines, which are read in one way.
        lines.append(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        size += len(lines[-1])
        if size >= PORTION_BYTES:
            stop = start + len(lines)
            yield Portion(document, start, stop, size, before=start, lines=b"\n".join(lines))
            start, size, lines = stop, 0, []
    if lines:
        yield Portion(document, start, start + len(lines), size, before=start, lines=b"\n".join(lines))


def _cut_csv(document: Document) -> Iterator[Portion]:
    table = table_of(document.path, document.columns)
    start = stop = table.start
    for stop in row_ends(document.path, table):
        if stop - start >= PORTION_BYTES:
            yield Portion(document, start, stop, stop - start)
            start = stop
    if stop > start:
        yield Portion(document, start, stop, stop - start)


def _read_csv(portion: Portion) -> Iterator[tuple[int, Any]]:
    table = table_of(portion.document.path, portion.document.columns)
    data = _bytes(portion.document.path, portion.start, portion.stop)
    try:
        text = data.decode("utf-8-sig" if portion.start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        with placed(portion, data[: error.start].count(b"\n")):
            raise ValueError(not_utf8(error)) from None
    reader = csv.reader(io.StringIO(text, newline=""), **table.options)
    number = 0
    while True:
        with placed(portion, number):
            row = next_row(reader, table)
        if row is None:
            return
        if row:
            yield number, row
        number = reader.line_num


_LINES = DataFormat(_cut_lines, _read_lines, "line")
_COMPRESSED = DataFormat(_cut_compressed, _read_lines, "line")

# By the end of a file's name; the last row is plain text.
FORMATS: dict[str, DataFormat] = {
    ".jsonl": _LINES,
    ".ndjson": _LINES,
    ".jsonl.gz": _COMPRESSED,
    ".ndjson.gz": _COMPRESSED,
    ".json": DataFormat(_cut_json, _read_lines, "record"),
    ".csv": DataFormat(_cut_csv, _read_csv, "line"),
    ".tsv": DataFormat(_cut_csv, _read_csv, "line"),
    ".parquet": DataFormat(_cut_parquet, _read_parquet, "row"),
    "dataset": DataFormat(_cut_dataset, _read_dataset, "row"),
    "": DataFormat(_cut_text, lambda p: iter([(0, _bytes(p.document.path, p.start, p.stop).decode("utf-8"))]), "line"),
}
