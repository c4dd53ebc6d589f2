"""Files that somebody else may have put there: names stay in a folder, only regular ones are read, records have a form.

Names come from users, from files of other programs and from models; a folder may be one that others write to.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Mapping
from math import isfinite
from pathlib import Path, PurePath
from typing import Annotated, Any, BinaryIO, TextIO

from pydantic import AfterValidator, Field, TypeAdapter
from typing_extensions import TypedDict

from zeromesh.base.words import nearest

# Bytes of the largest text that is read: of a file for people, and of one that grows with the run.
LARGEST_TEXT, LARGEST_RECORD = 64 * 1024**2, 1024**3

DRAFT = ".draft"  # end of the name that a file has while it is written

MOST = 1e100  # largest value of a run whose differences and sums can be computed


def _drawn(value: float) -> float:
    if abs(value) > MOST and isfinite(value):
        raise ValueError(f"{value} is not a value of a run")
    return value


Count = Annotated[int, Field(ge=0, lt=2**53)]
Number = Annotated[float, AfterValidator(_drawn)]

Form = TypeAdapter[Any]
"""Form of what is read from JSON."""


# What makes types of types that are values, which a type checker does not take.
ListOf: Any = list
DictOf: Any = dict
_MakeTypedDict: Any = TypedDict


def record_type(fields: Mapping[str, Any]) -> Any:
    """Return the type of a JSON object with fields of some types; it may have others."""
    return _MakeTypedDict("record", dict(fields))


class UnreadableFile(ValueError, OSError):
    """File that is not read: it may have no end, or is too large; handled wherever one that cannot be opened is."""

    what = ""  # such as "is a FIFO"


def inside(folder: Path, name: object, what: str) -> Path:
    """Return the path that a name, which is ``what`` in errors, has in a folder or below; it need not exist.

    Raises:
        ValueError: the name leads out of the folder, or is none.
    """
    path = PurePath(name) if isinstance(name, str) else PurePath()
    # In one spelling: two names of one file would overwrite each other.
    if str(path) != name or not path.parts or path.anchor or ".." in path.parts or "\0" in name:
        raise ValueError(
            f"{what} is called {name!r}, which names nothing in {str(folder)!r}: a name begins with no slash and has "
            "no part that is empty, '.' or '..'; rename it, and use no file whose writer you do not trust"
        )
    return folder / path


def is_inside(folder: Path, name: object) -> bool:
    """Return whether ``inside`` takes a name."""
    try:
        return bool(inside(folder, name, ""))
    except ValueError:
        return False


def require_regular(path: Path, most: int | None = None) -> None:
    """Raise UnreadableFile for what another library must not read: no regular file, or one of more bytes."""
    state = os.stat(path)
    _require_regular(path, state)
    if most is not None and state.st_size > most:
        raise _unreadable(path, f"has more than {most:,} bytes")


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading; raise UnreadableFile for a FIFO, a device or a folder."""
    # Opening a FIFO would wait for a writer, and a link may be changed between a look and the opening.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        _require_regular(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _require_regular(path: Path, state: os.stat_result) -> None:
    if not stat.S_ISREG(state.st_mode):
        kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(state.st_mode), "a device")
        raise _unreadable(path, f"is {kind}")


def read_text(path: Path, encoding: str = "utf-8", errors: str = "strict", most: int = LARGEST_TEXT) -> str:
    """Return the text of a regular file of at most so many bytes, whose lines end as Python reads them.

    Raises:
        UnreadableFile: it is not a regular file, or larger.
        OSError: it cannot be opened.
        UnicodeDecodeError: it is not in the encoding.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(most + 1) if size <= most else b""
    if max(size, len(data)) > most:
        raise _unreadable(path, f"has more than {most:,} bytes")
    return data.decode(encoding, errors).replace("\r\n", "\n").replace("\r", "\n")


def _unreadable(path: Path, what: str) -> UnreadableFile:
    error = UnreadableFile(f"{str(path)!r} {what}, and is not read; name another file")
    error.what = what
    return error


def new_file(path: Path) -> BinaryIO:
    """Open a new file for writing in the place of what is there; a link is replaced, and its target stays."""
    path.unlink(missing_ok=True)
    return path.open("xb")  # which follows no link that has appeared since


def added_to(path: Path) -> TextIO:
    """Open a regular file for adding text at its end, made if it is missing; raise OSError for a link or a FIFO."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return open(os.open(path, flags, 0o666), "a", encoding="utf-8")


def write_text(path: Path, text: str, flush: bool = True) -> None:
    """Write a file, and flush it to the disk; it appears whole or not at all, in the place of a link too."""
    draft = path.with_name(path.name + DRAFT)
    with new_file(draft) as file:
        file.write(text.encode())
        file.flush()
        if flush:
            os.fsync(file.fileno())
    draft.replace(path)


def free_path(path: Path) -> Path:
    """Return the path, or one like it that does not exist yet."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_stem(f"{path.stem}_{number}")
    return candidate


def meant_file(path: Path, rule: str) -> str:
    """Return "did you mean NAME?" for a missing file that has a neighbour of a similar name, else the rule."""
    try:
        neighbour = nearest(path.name, sorted(entry.name for entry in path.parent.iterdir() if entry.is_file()))
    except OSError:
        return rule
    return f"did you mean {path.with_name(neighbour)}?" if neighbour is not None else rule
