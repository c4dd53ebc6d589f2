"""Boxes of tensors: each rank writes those that it owns to one file, and any part of a tensor is read from all files.

A *box* is a range ``[start, stop)`` of a flattened tensor, or of a flattened N-dimensional part of one. The files are
in the safetensors format; the manifests have a SHA-256 of each box, of a large one for each ``PART`` of it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeromesh.base.files import require_regular
from zeromesh.base.words import some
from zeromesh.checkpoint.checkpoint_folder import another_offered
from zeromesh.checkpoint.manifest import (
    ANOTHER,
    BY_PARAMETER,
    FORMAT,
    as_written,
    read_manifest,
    require_all_elements,
    require_files,
)
from zeromesh.checkpoint.rank_manifests import holders, read_part

PART = 16 * 1024**2  # bytes that are written, hashed and brought to the host at a time

BUFFER = 1024**2  # bytes that are read at a time; few enough for a processor's cache.

HASHERS = max(2, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
"""Threads that read and hash."""


@dataclass(frozen=True)
class Box:
    """Elements ``[start, stop)`` of a flattened tensor, or of its box at ``offsets`` of ``sizes``."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    start: int
    stop: int
    read: Callable[[], torch.Tensor] | None = None  # any shape of ``stop - start`` elements
    offsets: tuple[int, ...] | None = None  # where the box begins in the tensor, by dimension; None: it is the tensor
    sizes: tuple[int, ...] | None = None
    from_disk: bool = False  # its data are in host memory only until the next box's are read

    @classmethod
    def of(
        cls,
        name: str,
        shape: tuple[int, ...],
        start: int,
        data: torch.Tensor,
        offsets: tuple[int, ...] | None = None,
        sizes: tuple[int, ...] | None = None,
    ) -> Box:
        """Return the box that begins at ``start`` and has the elements of ``data``."""
        return cls(name, shape, data.dtype, start, start + data.numel(), lambda: data, offsets, sizes)

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Box:
        """Return the box that is all of a tensor."""
        return cls.of(name, tuple(tensor.shape), 0, tensor)

    @property
    def key(self) -> str:
        """Name of the box in the file."""
        within = "" if self.offsets is None else f"@{','.join(map(str, self.offsets))}"
        return f"{self.name}{within}[{self.start}:{self.stop}]"

    @property
    def area(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes, by dimension, of the part of the tensor that the elements are in."""
        sizes = self.sizes or self.shape
        return self.offsets or (0,) * len(sizes), sizes

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return (self.stop - self.start) * self.dtype.itemsize

    def renamed(self, name: str) -> Box:
        """Return the same part of a tensor of another name."""
        return replace(self, name=name)

    def data(self) -> torch.Tensor:
        """Return the elements: 1-D, on any device."""
        assert self.read is not None, f"{self.key} has no data"
        with as_written(Path(self.name)):
            data = self.read().detach().reshape(-1)
        if data.numel() != self.stop - self.start:
            wanted = self.stop - self.start
            raise ValueError(f"{self.name} has {data.numel()} elements where {wanted} are expected; {ANOTHER}")
        return data.to(self.dtype)

    def parts(self) -> Iterator[torch.Tensor]:
        """Yield the bytes of its elements, shape (bytes,), dtype uint8, in the parts that have a hash each."""
        yield from self.data().contiguous().view(torch.uint8).split(PART) if self.nbytes else ()

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the pieces of elements ``[start, stop)`` here: (start in the tensor, start in the data, elements)."""
        for place, within, length in _runs(self.shape, *self.area, start, stop):
            low = max(start, place + max(0, self.start - within))
            high = min(stop, place + min(length, self.stop - within))
            if low < high:
                yield low, low - place + within - self.start, high - low


class _Stored(NamedTuple):
    """A box as the manifest describes it; ``begin`` is its first byte in the file."""

    file: str
    begin: int
    box: Box

    @classmethod
    def of(cls, file: str, entry: dict[str, Any]) -> _Stored:
        offsets, sizes = (tuple(entry[key]) if key in entry else None for key in ("offsets", "sizes"))
        dtype = getattr(torch, entry["dtype"])
        box = Box(entry["name"], tuple(entry["shape"]), dtype, entry["start"], entry["stop"], None, offsets, sizes)
        return cls(file, entry["bytes"][0], box)


_Piece = tuple[int, int, int, _Stored]
"""Start in the tensor, start in the box, elements, the box."""


def _runs(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the contiguous runs of a box that may lie in elements ``[start, stop)`` of the tensor.

    Of each: (start in the tensor, start in the box, elements).
    """
    # Behind the last dimension that is cut, the box is contiguous in the tensor.
    cut = max((axis for axis in range(len(shape)) if sizes[axis] != shape[axis]), default=0)
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    length = prod(sizes[cut:])
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    outer, before = [range(size) for size in sizes[:cut]], 0
    if outer and strides[0]:
        outer[0] = range(max(0, start // strides[0] - offsets[0]), min(sizes[0], -(-stop // strides[0]) - offsets[0]))
        before = outer[0].start * prod(sizes[1:cut])
    for number, index in enumerate(itertools.product(*outer), before):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), number * length, length


class Reader:
    """Reader of tensors, or ranges of them, in a checkpoint's folder; raises for a file that was changed.

    It reads the manifests of those ranks alone that have some of what is asked for. ``opened`` are their numbers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with another_offered(folder):
            self.manifest = read_manifest(folder)
        self.digest: str = self.manifest.pop("sha256")
        self._tensors: dict[str, dict[str, Any]] = self.manifest.pop("tensors")
        self._written = dict(self._tensors)  # by the names that were written
        self._stored: dict[str, list[_Stored]] = {}
        self._shards: dict[int, dict[str, Any]] = {}  # with their boxes, by rank
        self._new_names: list[Mapping[str, str | None]] = []
        self._new_parameter: Callable[[str], str] = str
        self.names = frozenset(self._tensors)
        self._count = len(self.manifest["shards"])
        if self.manifest["format"] == FORMAT:
            self.manifest |= {key: {} for key in BY_PARAMETER}  # of the ranks that are opened
        else:
            for rank, shard in enumerate(self.manifest["shards"]):
                self._add(rank, shard)

    @property
    def opened(self) -> list[int]:
        """Ranks whose manifests were read."""
        return sorted(self._shards)

    def open(self, ranks: Iterable[int]) -> None:
        """Read the manifests of ranks; raise what ``verify`` raises for a manifest that was changed."""
        for rank in ranks:
            if rank in self._shards or not 0 <= rank < self._count:
                continue
            with another_offered(self.folder):
                shard, by_parameter = read_part(self.folder, self.manifest | {"tensors": self._written}, rank)
            for key, values in by_parameter.items():
                named = {self._new_parameter(name): value for name, value in values.items()}
                self.manifest[key] |= named | self.manifest[key]
            self._add(rank, shard)

    def open_all(self) -> None:
        """Read the manifests of all ranks."""
        self.open(range(self._count))

    def _add(self, rank: int, shard: dict[str, Any]) -> None:
        self._shards[rank] = shard
        for entry in shard["boxes"]:
            name: str | None = entry["name"]
            for new_names in self._new_names:
                name = new_names.get(name, name) if name is not None else None
            if name is not None:
                entry["name"] = name
                self._stored.setdefault(name, []).append(_Stored.of(shard["file"], entry))

    def rename(self, names: Mapping[str, str | None], parameter: Callable[[str], str] = str) -> None:
        """Give tensors other names; None takes one out. ``parameter`` returns the new name of a parameter."""
        tables: tuple[dict[str, Any], ...] = (self._tensors, self._stored)
        for table in tables:
            for old, new in names.items():
                entry = table.pop(old, None)
                if new is not None and entry is not None:
                    table[new] = entry
        self.names = frozenset(self._tensors)
        self._new_names.append(dict(names))
        if parameter is not str:
            self._new_parameter = parameter
        for shard in self._shards.values():
            for box in shard["boxes"]:
                box["name"] = names.get(box["name"]) or box["name"]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a tensor."""
        return tuple(self._tensors[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor was written."""
        dtype: torch.dtype = getattr(torch, self._tensors[name]["dtype"])
        return dtype

    def files(self, name: str) -> list[str]:
        """Return the files that hold a tensor."""
        self.require(name, 0, prod(self.shape(name)))
        return sorted({stored.file for stored in self._stored.get(name, [])})

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor, on the host, in the dtype in which it was written."""
        shape = self.shape(name)
        pieces = self._pieces(name, 0, prod(shape))  # before there is memory for what nobody has written
        out = torch.empty(prod(shape), dtype=self.dtype(name))
        self._copy(pieces, 0, out)
        return out.view(shape)

    def require(self, name: str, start: int, stop: int) -> None:
        """Raise ValueError unless the boxes have elements ``[start, stop)`` of a flattened tensor, each once.

        The manifests that are needed to read these elements have been read then.
        """
        self._pieces(name, start, stop)

    def _pieces(self, name: str, start: int, stop: int) -> list[_Piece]:
        """Return where elements lie: (start in the tensor, start in the box, elements, the box), in their order."""
        pieces: list[_Piece] = []
        # The index tells where they should be if ranks share evenly; the boxes tell where they are.
        for margin in (0, 1, self._count):
            self.open(self._holders(name, start, stop, margin))
            pieces = sorted(
                (
                    (*piece, stored)
                    for stored in self._stored.get(name, [])
                    for piece in stored.box.overlaps(start, stop)
                ),
                key=itemgetter(0),
            )
            ends = [start, *(place + length for place, _, length, _ in pieces)]
            if [*(place for place, *_ in pieces), stop] == ends:
                return pieces
        missing = stop - start - sum(length for _, _, length, _ in pieces)
        lacks = f"lacks {missing}" if missing > 0 else "has some twice"
        raise ValueError(f"{self.folder} {lacks} of the {stop - start} elements of {name} that are needed; {ANOTHER}")

    def _holders(self, name: str, start: int, stop: int, margin: int) -> Iterable[int]:
        """Return the ranks that should have some of the elements; with a ``margin`` of all ranks, all."""
        if start >= stop or len(self._shards) == self._count:
            return ()
        if margin == self._count:
            return range(self._count)
        ranks: set[int] = set()
        shape, strides = self.shape(name), self.manifest.get("strides", [])
        for area in self._tensors[name]["areas"]:
            offsets, sizes = (tuple(area[key]) if key in area else None for key in ("offsets", "sizes"))
            if offsets is None:
                ranks.update(holders(area, strides, start, stop, margin))
                continue
            box = Box(name, shape, torch.uint8, 0, prod(sizes or shape), None, offsets, sizes)
            runs = [(within, within + length) for _, within, length in box.overlaps(start, stop)]
            if runs:
                ranks.update(holders(area, strides, runs[0][0], runs[-1][1], margin))
        return sorted(ranks)

    def read(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """Copy elements ``[start, stop)`` of a flattened tensor into ``out``, shape ``(stop - start,)``, any dtype."""
        self._copy(self._pieces(name, start, stop), start, out)

    def _copy(self, pieces: list[_Piece], start: int, out: torch.Tensor) -> None:
        # Each file once, though rows of a tensor that is split along columns take turns in them.
        pieces.sort(key=lambda piece: piece[3].file)
        for file_name, of_file in itertools.groupby(pieces, lambda piece: piece[3].file):
            require_regular(self.folder / file_name)
            with (self.folder / file_name).open("rb", buffering=0) as file:
                for place, within, length, stored in of_file:
                    file.seek(stored.begin + within * stored.box.dtype.itemsize)
                    _read(file, stored.box.dtype, out[place - start :][:length])

    def verify(self, first: int = 0, step: int = 1, names: Collection[str] | None = None) -> None:
        """Compare the ``first`` of ``step`` equal shares of the files with their hashes; the files of it must be whole.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: one is cut off, or has another content. Each message names the files and what they held.
        """
        # Several processes may share the work; ``names`` are the tensors that matter to this run.
        ranks = range(first * self._count // step, -(-(first + 1) * self._count // step))
        self.open(ranks)
        with another_offered(self.folder):
            if len(self._shards) == self._count:
                require_all_elements(self.folder, self._shards.values(), self.names)
            require_files(self.folder, [self._shards[rank] for rank in ranks])
            chunks: list[_Chunk] = []
            for rank in ranks:
                low, high = first * self._count - rank * step, (first + 1) * self._count - rank * step
                size = max((box["bytes"][1] for box in self._shards[rank]["boxes"]), default=0)
                chunks += (
                    chunk
                    for chunk in _chunks(self._shards[rank], names)
                    if low * size <= chunk.begin * step < high * size
                )
            damaged: dict[str, list[str]] = {}
            # Hashing, as reading, leaves Python's lock to others: one thread reads while another one hashes.
            with ThreadPoolExecutor(HASHERS) as pool:
                hashes = pool.map(partial(_hash, self.folder), chunks)
                for chunk, digest in zip(chunks, hashes, strict=True):
                    if digest != chunk.digest:
                        damaged.setdefault(chunk.file, []).extend(chunk.keys)
            if damaged:
                files = [
                    f"{self.folder / file}, of which {some(dict.fromkeys(keys))}" for file, keys in damaged.items()
                ]
                raise ValueError(f"not what was written (SHA-256 differs): {'; '.join(files)}, cannot be used")

    def require_files(self) -> None:
        """Raise what ``verify`` raises if a file is missing or cut off; nothing of it is read."""
        self.open_all()
        with another_offered(self.folder):
            require_all_elements(self.folder, self._shards.values(), self.names)
            require_files(self.folder, self._shards.values())


class _Chunk(NamedTuple):
    """Range of a file that has a hash; an ``end`` of None is that of the file."""

    file: str
    begin: int
    end: int | None
    digest: str
    keys: list[str]


def _chunks(shard: dict[str, Any], names: Collection[str] | None) -> Iterator[_Chunk]:
    """Yield the hashed ranges of a file, in the order in which they lie there."""
    boxes, file = shard["boxes"], shard["file"]
    keys = [box["key"] for box in boxes]
    if "sha256" in shard:  # format 1, whose files have one hash each
        yield _Chunk(file, 0, None, shard["sha256"], keys)
        return
    if boxes and "header" in shard:  # copies in memory are not hashed
        yield _Chunk(file, 0, boxes[0]["bytes"][0], shard["header"], keys)
    for box in boxes:
        if "sha256" not in box or (names is not None and box["name"] not in names):
            continue
        (begin, end), digests = box["bytes"], box["sha256"]
        if isinstance(digests, str):
            yield _Chunk(file, begin, end, digests, [box["key"]])
            continue
        if len(digests) != -(-(end - begin) // PART):
            raise ValueError(f"{box['key']} has {len(digests)} hashes for {end - begin:,} bytes; {ANOTHER}")
        for place, digest in zip(range(begin, end, PART), digests, strict=True):
            yield _Chunk(file, place, min(place + PART, end), digest, [box["key"]])


def _hash(folder: Path, chunk: _Chunk) -> str:
    """Return the hash that a range of a file has."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(BUFFER))
    left = chunk.end - chunk.begin if chunk.end is not None else sys.maxsize
    with (folder / chunk.file).open("rb", buffering=0) as file:
        file.seek(chunk.begin)
        while count := file.readinto(buffer[:left]):
            digest.update(buffer[:count])
            left -= count
    return digest.hexdigest()


def _read(file: FileIO, dtype: torch.dtype, out: torch.Tensor) -> None:
    """Fill ``out``, which may be on another device and of another dtype, with the next elements of a file."""
    direct = out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous()
    buffer = out.detach() if direct else torch.empty(min(BUFFER // dtype.itemsize, out.numel()), dtype=dtype)
    for part in out.split(buffer.numel()):
        source = buffer[: part.numel()]
        view = source.view(torch.uint8).numpy().data
        while view:
            # A read may give less than it was asked for; 0 is the end.
            count = file.readinto(view)
            if not count:
                raise ValueError(f"{file.name} is cut off after {file.tell():,} bytes; choose another checkpoint")
            view = view[count:]
        if not direct:
            part.copy_(source)
