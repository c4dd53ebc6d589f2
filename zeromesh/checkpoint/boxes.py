"""Boxes of tensors: each rank writes those that it owns to one file, and reads any part of a tensor from all files.

A *box* is a range ``[start, stop)`` of a flattened tensor, or of a flattened N-dimensional part of one. The files are
in the safetensors format; the manifest has a SHA-256 of each box.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeromesh.base.files import require_regular
from zeromesh.base.words import some
from zeromesh.checkpoint.checkpoint_folder import another_offered
from zeromesh.checkpoint.manifest import (
    ANOTHER,
    CODES,
    as_written,
    dtype_name,
    hash_of,
    read_manifest,
    require_files,
    require_sound,
)

PART = 16 * 1024**2  # bytes that are written, hashed and brought to the host at a time

BUFFER = 1024**2  # bytes that are read at a time; few enough for a processor's cache.


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

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the pieces of elements ``[start, stop)`` here: (start in the tensor, start in the data, elements)."""
        for place, within, length in _runs(self.shape, *self.area):
            low = max(start, place + max(0, self.start - within))
            high = min(stop, place + min(length, self.stop - within))
            if low < high:
                yield low, low - place + within - self.start, high - low


class ShardLayout:
    """Places of one rank's boxes in its file, which is in the safetensors format.

    Raises:
        TypeError: a box is of a dtype that the format does not know.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        ordered = sorted(boxes, key=lambda box: -box.dtype.itemsize)  # each lies at a multiple of its item's size then
        ends = list(itertools.accumulate((box.nbytes for box in ordered), initial=0))
        entries: dict[str, Any] = {}
        for box, begin, end in zip(ordered, ends, ends[1:], strict=False):
            if box.dtype not in CODES:
                raise TypeError(f"{box.name} is of {box.dtype}, which a checkpoint cannot hold; convert it")
            assert box.key not in entries, f"{box.key} is written twice"
            offsets = [begin, end]
            entries[box.key] = {"dtype": CODES[box.dtype], "shape": [box.stop - box.start], "data_offsets": offsets}
        # The format: the length of the JSON in 8 bytes, then the JSON, padded to a multiple of 8 bytes, then the data.
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self.header) + ends[-1]
        self._places = {
            key: [len(self.header) + offset for offset in entry["data_offsets"]] for key, entry in entries.items()
        }
        self._listed: list[dict[str, Any]] = []

    def place(self, box: Box) -> tuple[int, int]:
        """Return the first byte of a box in the file, and the byte after its last; each box is asked for once."""
        begin, end = self._places.pop(box.key)
        return begin, end

    def add(self, box: Box, place: tuple[int, int], digest: str | None) -> None:
        """Describe a box that was written, with the SHA-256 of its data."""
        entry: dict[str, Any] = {
            "key": box.key,
            "name": box.name,
            "shape": list(box.shape),
            "dtype": dtype_name(box.dtype),
        }
        if box.offsets is not None and box.sizes is not None:
            entry |= {"offsets": list(box.offsets), "sizes": list(box.sizes)}
        entry |= {"start": box.start, "stop": box.stop, "bytes": [*place]}
        self._listed.append(entry if digest is None else entry | {"sha256": digest})

    def entry(self, name: str, hashed: bool = True) -> dict[str, Any]:
        """Return the entry of the file ``name`` for the manifest; all boxes have been written."""
        assert not self._places, f"{next(iter(self._places))} was not given again"
        boxes = sorted(self._listed, key=lambda entry: entry["bytes"])  # as they are read and hashed
        digest = {"header": hashlib.sha256(self.header).hexdigest()} if hashed else {}
        return {"file": name, **digest, "boxes": boxes}


def shard_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank:05d}.safetensors"


class ShardWriter:
    """Writer of one rank's boxes to its file, in any order; each has its place from the start. Close it when done.

    Raises:
        OSError: the file cannot be written.
    """

    # Safetensors' own functions need all data on the host at once, in memory that no two tensors share.

    def __init__(self, folder: Path, rank: int, boxes: Sequence[Box]) -> None:
        self._layout = ShardLayout(boxes)
        self.path = folder / shard_file(rank)
        self._file = self.path.open("wb")
        self._file.write(self._layout.header)

    def write(self, box: Box) -> None:
        """Write a box at its place; its data are not needed afterwards."""
        place = self._layout.place(box)
        self._file.seek(place[0])
        digest = hashlib.sha256()
        # In parts, which bounds what of a tensor on a GPU is on the host.
        for part in box.data().contiguous().view(torch.uint8).split(PART) if box.nbytes else ():
            data = part.cpu().numpy()
            self._file.write(data)
            digest.update(data)
        self._layout.add(box, place, digest.hexdigest())

    def finish(self) -> dict[str, Any]:
        """Flush the file to the disk, close it, and return its entry for the manifest; all boxes have been written."""
        entry = self._layout.entry(self.path.name)
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        return entry

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_shard(
    folder: Path, rank: int, boxes: Sequence[Box], advance: Callable[[int], object] = lambda nbytes: None
) -> dict[str, Any]:
    """Write this rank's boxes, flush them to the disk, and return its entry for the manifest.

    The data of one box are read at a time; ``advance`` is told its bytes when they are written.
    """
    with closing(ShardWriter(folder, rank, boxes)) as writer:
        for box in boxes:
            writer.write(box)
            advance(box.nbytes)
        return writer.finish()


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


def _runs(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield the contiguous runs of a box: (start in the tensor, start in the box, elements)."""
    # Behind the last dimension that is cut, the box is contiguous in the tensor.
    cut = max((axis for axis in range(len(shape)) if sizes[axis] != shape[axis]), default=0)
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    length = prod(sizes[cut:])
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for number, index in enumerate(itertools.product(*map(range, sizes[:cut]))):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), number * length, length


class Reader:
    """Reader of tensors, or ranges of them, in a checkpoint's folder; raises for a file that was changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with another_offered(folder):
            self.manifest = read_manifest(folder)
            # Before any number of it is used as a place in a file or in memory.
            require_sound(folder, self.manifest)
        self._stored: dict[str, list[_Stored]] = {}
        for shard in self.manifest["shards"]:
            for entry in shard["boxes"]:
                self._stored.setdefault(entry["name"], []).append(_Stored.of(shard["file"], entry))
        self.names = frozenset(self._stored)

    def rename(self, names: Mapping[str, str | None]) -> None:
        """Give tensors other names; None takes one out."""
        for old, new in names.items():
            stored = self._stored.pop(old, [])
            if new is not None and stored:
                self._stored[new] = stored
        self.names = frozenset(self._stored)
        for shard in self.manifest["shards"]:
            for box in shard["boxes"]:
                box["name"] = names.get(box["name"]) or box["name"]

    @property
    def digest(self) -> str:
        """Hash of the manifest."""
        return hash_of(self.manifest)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a tensor."""
        return self._stored[name][0].box.shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor was written."""
        return self._stored[name][0].box.dtype

    def files(self, name: str) -> list[str]:
        """Return the files that hold a tensor."""
        return sorted({stored.file for stored in self._stored[name]})

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor, on the host, in the dtype in which it was written."""
        shape = self.shape(name)
        out = torch.empty(prod(shape), dtype=self.dtype(name))
        self.read(name, 0, out.numel(), out)
        return out.view(shape)

    def read(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """Copy elements ``[start, stop)`` of a flattened tensor into ``out``, shape ``(stop - start,)``, any dtype."""
        missing = stop - start
        for stored in self._stored.get(name, []):
            pieces = [*stored.box.overlaps(start, stop)]
            missing -= sum(length for _, _, length in pieces)
            if pieces:
                require_regular(self.folder / stored.file)
                with (self.folder / stored.file).open("rb", buffering=0) as file:
                    for place, within, length in pieces:
                        file.seek(stored.begin + within * stored.box.dtype.itemsize)
                        _read(file, stored.box.dtype, out[place - start :][:length])
        if missing:
            raise ValueError(f"{self.folder} lacks {missing} of the {stop - start} elements of {name} that are needed")

    def verify(self, first: int = 0, step: int = 1, names: Collection[str] | None = None) -> None:
        """Compare every ``step``-th part, from ``first`` on, with its hash; all files must be there, and whole.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: one is cut off, or has another content. Each message names the files and what they held.
        """
        self.require_files()
        with another_offered(self.folder):
            damaged: dict[str, list[str]] = {}
            # Several processes may share the work; ``names`` are the tensors that matter to this run.
            parts = [(shard, *part) for shard in self.manifest["shards"] for part in _parts(shard, names)]
            for shard, begin, end, digest, keys in parts[first::step]:
                with (self.folder / shard["file"]).open("rb", buffering=0) as file:
                    if _hash(file, begin, end) != digest:
                        damaged.setdefault(shard["file"], []).extend(keys)
            if damaged:
                files = [f"{self.folder / file}, of which {some(keys)}" for file, keys in damaged.items()]
                raise ValueError(f"not what was written (SHA-256 differs): {'; '.join(files)}, cannot be used")

    def require_files(self) -> None:
        """Raise what ``verify`` raises if a file is missing or cut off; nothing is read."""
        with another_offered(self.folder):
            require_files(self.folder, self.manifest)


def _parts(shard: dict[str, Any], names: Collection[str] | None) -> Iterator[tuple[int, int | None, str, list[str]]]:
    """Yield the hashed ranges of a file: (first byte, last byte + 1, hash, the keys that lie there)."""
    boxes = shard["boxes"]
    keys = [box["key"] for box in boxes]
    if "sha256" in shard:  # format 1, whose files have one hash each
        yield 0, None, shard["sha256"], keys
        return
    if boxes and "header" in shard:  # copies in memory are not hashed
        yield 0, boxes[0]["bytes"][0], shard["header"], keys
    for box in boxes:
        if "sha256" in box and (names is None or box["name"] in names):
            yield *box["bytes"], box["sha256"], [box["key"]]


def _hash(file: FileIO, begin: int, end: int | None) -> str:
    """Return the hash of the bytes ``[begin, end)``; None is the end of the file."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(BUFFER))
    file.seek(begin)
    left = end - begin if end is not None else sys.maxsize
    while count := file.readinto(buffer[:left]):
        digest.update(buffer[:count])
        left -= count
    return digest.hexdigest()


def _read(file: FileIO, dtype: torch.dtype, out: torch.Tensor) -> None:
    """Fill ``out``, which may be on another device and of another dtype, with the next elements of a file."""
    buffer = torch.empty(min(BUFFER // dtype.itemsize, out.numel()), dtype=dtype)
    for part in out.split(buffer.numel()):
        source = buffer[: part.numel()]
        view = source.view(torch.uint8).numpy().data
        while view:
            # A read may give less than it was asked for; 0 is the end.
            count = file.readinto(view)
            if not count:
                raise ValueError(f"{file.name} is cut off after {file.tell():,} bytes; choose another checkpoint")
            view = view[count:]
        part.copy_(source)
