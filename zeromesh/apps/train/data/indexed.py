"""Megatron's indexed token files: ``NAME.bin`` with the ids, ``NAME.idx`` with the ends of sequences and documents.

The layout of ``.idx``, little-endian: the magic bytes, u64 version, u8 dtype, u64 sequences S, u64 document boundaries
D, then i32[S] lengths in tokens, i64[S] byte offsets into ``.bin``, i64[D] boundaries as counts of sequences, the first
of them 0, and, in some files, i8[S] modes. ``.bin`` has the ids one after the other and nothing else.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zeromesh.base.files import new_file

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

# Dtypes by their codes in the header.
CODES: dict[int, str] = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}

SMALL_VOCABULARY = 65_500  # Megatron's limit; ids below are stored in 16 bits
ENDINGS = (".bin", ".idx")
MASK = ".mask"  # end of the prefix of a second data set, which says for each token of the first whether it is a label


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """Return the dtype in which ids of a vocabulary of this size are stored."""
    # Megatron's own choice, which its readers expect.
    return np.dtype("<u2" if vocabulary < SMALL_VOCABULARY else "<i4")


def file_of(prefix: Path, ending: str) -> Path:
    """Return a file of a data set. The prefix may contain dots."""
    return prefix.with_name(prefix.name + ending)


def prefix_of(path: Path) -> Path | None:
    """Return the prefix of the data set with this prefix or file; None if there is none."""
    if path.name.endswith(ENDINGS):
        path = path.with_name(path.name[: -len(ENDINGS[0])])
    return path if path.name and any(file_of(path, ending).is_file() for ending in ENDINGS) else None


@dataclass(frozen=True)
class Indexed:
    """An open data set. The arrays are mapped into memory."""

    prefix: Path  # without an ending
    tokens: NDArray[Any]  # all ids, in the dtype of the file
    lengths: NDArray[np.int32]  # tokens of each sequence
    boundaries: NDArray[np.int64]  # sequences before each document, and after the last: (documents + 1,)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.boundaries) - 1

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """Tokens before each document, and all tokens, int64, shape ``(documents + 1,)``, in memory."""
        # int64, because the sum of int32 lengths may have more bits.
        before = np.zeros(len(self.lengths) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=before[1:])
        return before[self.boundaries]

    def document(self, number: int) -> NDArray[Any]:
        """Return the ids of a document, shape ``(tokens,)``."""
        ids: NDArray[Any] = self.tokens[self.bounds[number] : self.bounds[number + 1]]
        return ids


def open_indexed(prefix: Path) -> Indexed:
    """Map a data set into memory; raise ValueError if its files are missing, damaged, or do not fit together."""
    index, data = (file_of(prefix, ending) for ending in (".idx", ".bin"))
    for file, other in ((index, data), (data, index)):
        if not file.is_file():
            raise ValueError(f"{str(file)!r} does not exist, and belongs to {str(other)!r}; bring both files")
    dtype, sequences, boundary_count = _read_header(index)
    parts = [("<i4", sequences), ("<i8", sequences), ("<i8", boundary_count)]
    needed = HEADER.size + sum(np.dtype(kind).itemsize * count for kind, count in parts)
    size = index.stat().st_size
    if size not in (needed, needed + sequences):
        problem = "is cut off" if size < needed else "has more than it should"
        raise ValueError(
            f"{str(index)!r} {problem}: {sequences} sequences and {boundary_count} document boundaries take {needed} "
            f"bytes, or {needed + sequences} with modes, and it has {size}; copy it again, or make it anew"
        )
    # Modes, which only multimodal data sets have, are not read.
    arrays, start = [], HEADER.size
    for kind, count in parts:
        arrays.append(_mapped(index, kind, count, start))
        start += np.dtype(kind).itemsize * count
    lengths, offsets, boundaries = arrays
    _check_parts(index, data, dtype, lengths, offsets, boundaries)
    tokens = _mapped(data, dtype, data.stat().st_size // dtype.itemsize, 0)
    return Indexed(prefix, tokens, lengths, boundaries)


def _read_header(index: Path) -> tuple[np.dtype[Any], int, int]:
    """Return the dtype, and the numbers of sequences and document boundaries."""
    with index.open("rb") as file:
        header = file.read(HEADER.size)
    magic = header[: len(MAGIC)]
    if magic != MAGIC:
        raise ValueError(
            f"{str(index)!r} begins with {magic!r}, and an index of Megatron's format with {MAGIC!r}; name a data set "
            "that its preprocessing wrote"
        )
    if len(header) < HEADER.size:
        raise ValueError(f"{str(index)!r} is cut off in its header, after {len(header)} bytes; copy it again")
    _, version, code, sequences, boundaries = HEADER.unpack(header)
    if version != VERSION:
        raise ValueError(f"{str(index)!r} has version {version}, and only version {VERSION} is known; make it anew")
    if code not in CODES:
        codes = ", ".join(f"{value} ({np.dtype(kind).name})" for value, kind in CODES.items())
        raise ValueError(f"{str(index)!r} has the dtype code {code}, which must be one of {codes}; make it anew")
    return np.dtype(CODES[code]), sequences, boundaries


def _check_parts(
    index: Path,
    data: Path,
    dtype: np.dtype[Any],
    lengths: NDArray[np.int32],
    offsets: NDArray[np.int64],
    boundaries: NDArray[np.int64],
) -> None:
    if len(lengths) and int(lengths.min()) < 0:
        raise ValueError(f"{str(index)!r} has a sequence of {lengths.min()} tokens; it is damaged, make it anew")
    size, total = data.stat().st_size, int(lengths.sum(dtype=np.int64)) * dtype.itemsize
    if size != total:
        raise ValueError(
            f"{str(data)!r} has {size} bytes, and by {index.name!r} it must have {total}; the two files do not belong "
            "together, or one is cut off: copy both again"
        )
    expected = (np.cumsum(lengths, dtype=np.int64) - lengths) * dtype.itemsize
    # Readers here do not use the offsets, but a file whose sequences overlap or have gaps would be read wrongly.
    wrong = np.flatnonzero(offsets != expected)
    if len(wrong):
        place = int(wrong[0])
        outside = "outside of" if not 0 <= offsets[place] <= size else "not where the one before it ends in"
        raise ValueError(
            f"{str(index)!r}: sequence {place} begins at byte {offsets[place]}, {outside} {data.name!r} of {size} "
            f"bytes; it must be at {expected[place]}, so make the data set anew"
        )
    if not len(boundaries) or boundaries[0] != 0 or boundaries[-1] != len(lengths) or (np.diff(boundaries) < 0).any():
        raise ValueError(
            f"{str(index)!r}: the boundaries of documents must rise from 0 to the {len(lengths)} sequences, and are "
            f"{_short(boundaries)}; make it anew"
        )


def _short(values: NDArray[np.int64]) -> str:
    return np.array2string(values, threshold=6, edgeitems=2, separator=", ")


def _mapped(path: Path, kind: Any, count: int, start: int) -> NDArray[Any]:
    if count == 0:  # an empty part of a file cannot be mapped
        return np.empty(0, dtype=kind)
    # A plain view: indexing a memmap would make a memmap of each result, which is slow.
    return np.memmap(path, dtype=kind, mode="r", offset=start, shape=(count,)).view(np.ndarray)


class IndexedWriter:
    """Writer of a data set, a context. The files get their names when they are complete."""

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self.prefix, self.dtype = prefix, dtype
        self._code = next(code for code, kind in CODES.items() if np.dtype(kind) == dtype)
        self._file = new_file(self._part(".bin"))
        self._lengths: list[NDArray[np.int32]] = []
        self._boundaries: list[NDArray[np.int64]] = [np.zeros(1, dtype=np.int64)]
        self._sequences = 0

    def add(self, ids: NDArray[Any], lengths: NDArray[np.int32], last: NDArray[np.bool_]) -> None:
        """Append sequences of ``lengths``, whose ids follow each other; ``last`` where a document ends with one."""
        assert int(lengths.sum()) == len(ids)
        ids.astype(self.dtype, copy=False).tofile(self._file)
        self._lengths.append(lengths.astype("<i4", copy=False))
        self._boundaries.append(self._sequences + 1 + np.flatnonzero(last))
        self._sequences += len(lengths)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is not None:
            self._file.close()
            self._part(".bin").unlink()
            return
        # On disk before the names say that they are complete: a crash of the machine must not leave half a file.
        _sync_and_close(self._file)
        lengths, boundaries = np.concatenate([np.empty(0, "<i4"), *self._lengths]), np.concatenate(self._boundaries)
        assert boundaries[-1] == self._sequences, "the last document is not complete"
        offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        with new_file(self._part(".idx")) as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(boundaries)))
            for array, stored in ((lengths, "<i4"), (offsets, "<i8"), (boundaries, "<i8")):
                array.astype(stored, copy=False).tofile(file)
            _sync_and_close(file)
        for ending in ENDINGS:
            self._part(ending).replace(file_of(self.prefix, ending))

    def _part(self, ending: str) -> Path:
        return file_of(self.prefix, f"{ending}.part")


def _sync_and_close(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
