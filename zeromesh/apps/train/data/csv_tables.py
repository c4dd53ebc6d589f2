"""Tables in CSV and TSV: the header, the delimiter, where rows end, and rows as records."""

from __future__ import annotations

import csv
import sys
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from zeromesh.base.words import counted, some

DELIMITERS = ",;\t|"
WITHOUT_HEADER = '; if the first row is no header, name the columns: --set data.columns=\'["prompt", "completion"]\''


class CsvTable(NamedTuple):
    """The form of a file."""

    columns: tuple[str, ...]
    options: dict[str, Any]  # of the reader
    start: int  # first byte after the header


def table_of(path: Path, columns: tuple[str, ...]) -> CsvTable:
    """Return the form of a file, whose first row is its header unless ``columns`` names its columns.

    The delimiter is the one that gives the first row most fields; a comma, or the tab of a ``.tsv``, if several do.

    Raises:
        ValueError: the first row is not UTF-8, cannot be read, or has a name twice.
    """
    return _read_header(path, columns, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)  # portions of a few files follow each other; the time of change, so that an old file is forgotten
def _read_header(path: Path, columns: tuple[str, ...], changed: int) -> CsvTable:
    csv.field_size_limit(sys.maxsize)  # of the process, whose default is less than a long text
    preferred = "\t" if path.name.lower().endswith(".tsv") else ","
    rows: dict[str, list[str]] = {}
    starts: dict[str, int] = {}
    problem: csv.Error | None = None
    for delimiter in (preferred, *DELIMITERS.replace(preferred, "")):
        with path.open("rb") as file:
            read = list[bytes]()
            try:
                reader = csv.reader(_decoded(file, read), delimiter=delimiter, strict=True)
                rows[delimiter] = next((row for row in reader if row), [])  # after blank lines
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line 1: {not_utf8(error)}") from None
            except csv.Error as error:  # of quotes in the middle of a field with this delimiter
                problem = error
                continue
            starts[delimiter] = sum(map(len, read))
    if not rows:
        raise ValueError(f"{path}, line 1: {_no_row(problem)}")
    delimiter = max(rows, key=lambda each: len(rows[each]))
    first = rows[delimiter]
    spaced = any(name.startswith(" ") for name in first)
    options = {"delimiter": delimiter, "strict": True, "skipinitialspace": spaced}
    if columns:
        return CsvTable(columns, options, 0)
    names = tuple(name.strip() for name in first)
    # Columns without a name are of spreadsheets, and are not read.
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"{path}, line 1: two columns are named {twice!r}; give each a name of its own{WITHOUT_HEADER}"
        )
    return CsvTable(names, options, starts[delimiter])


def header_of(head: bytes) -> tuple[str, ...]:
    """Return the names in the first line of a file's first bytes, divided by the delimiter that gives most."""
    line = head.removeprefix(BOM_UTF8).lstrip().partition(b"\n")[0].decode("utf-8", "replace")
    split = max((line.split(delimiter) for delimiter in DELIMITERS), key=len)
    return tuple(name.strip().strip('"') for name in split)


def _decoded(file: Iterable[bytes], read: list[bytes]) -> Iterator[str]:
    """Yield lines as text, and add them to ``read``."""
    for line in file:
        read.append(line)
        yield line.removeprefix(BOM_UTF8).decode() if len(read) == 1 else line.decode()


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return what to do about a file in another encoding."""
    return (
        f"is not UTF-8 (byte {error.object[error.start]:#04x}); convert it, as with iconv -f WINDOWS-1252 -t UTF-8 "
        'FILE > NEW, or save it in Excel as "CSV UTF-8"'
    )


def row_ends(path: Path, table: CsvTable) -> Iterator[int]:
    """Yield the byte after each row; the end of the file after a row that cannot be read, which ``next_row`` names."""
    stop = table.start
    with path.open("rb") as file:
        file.seek(stop)

        def lines() -> Iterator[str]:
            nonlocal stop
            for line in file:
                stop += len(line)
                yield line.decode("utf-8", "surrogateescape")

        # Read, because a quoted text may have line breaks.
        try:
            for _ in csv.reader(lines(), **table.options):
                yield stop
        except csv.Error:
            yield path.stat().st_size


def _no_row(error: csv.Error | None) -> str:
    """Return what to do about a row that cannot be read."""
    if "new-line character" in str(error):
        return "has line ends of old Macs (CR alone); convert it: tr '\\r' '\\n' < FILE > NEW"
    return f"is no row of a table ({error}); close quotes, and double those in a text"


def next_row(reader: Iterator[list[str]], table: CsvTable) -> dict[str, str] | None:
    """Return the next row, without entries for a blank line; None at the end. Raise ValueError for a wrong one."""
    try:
        row = next(reader, None)
    except csv.Error as error:
        raise ValueError(_no_row(error)) from None
    if row and len(row) != len(table.columns):
        raise ValueError(
            f"has {counted(len(row), 'field')}, and the table has {counted(len(table.columns), 'column')} "
            f"({some(table.columns)}); put a field in double quotes that holds {table.options['delimiter']!r}"
        )
    return None if row is None else dict(zip(table.columns, row, strict=False))
