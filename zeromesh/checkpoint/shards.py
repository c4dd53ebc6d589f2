"""The file of a rank: the boxes of tensors that it owns, written as they are hashed.

A *box* is a range ``[start, stop)`` of a flattened tensor, or of a flattened N-dimensional part of one. The file is in
the safetensors format, which anybody's reader opens.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

PART = 16 * 1024**2
"""Bytes that are written, hashed and brought to the host at a time."""

CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of dtypes in safetensors files."""


@dataclass(frozen=True)
class Box:
    """Elements ``[start, stop)`` of a flattened box of the tensor ``name``.

    Attributes:
        name: of the tensor.
        shape: global shape of the tensor.
        start, stop: the range of the flattened box.
        data: shape ``(stop - start,)``.
        offsets, sizes: where the box begins in the tensor and how large it is, by dimension; None is the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    data: torch.Tensor
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None

    @property
    def key(self) -> str:
        """Its name in the file."""
        within = "" if self.offsets is None else f"@{','.join(map(str, self.offsets))}"
        return f"{self.name}{within}[{self.start}:{self.stop}]"


def write_shard(folder: Path, rank: int, boxes: Sequence[Box], filled: Iterable[Box] | None = None) -> dict[str, Any]:
    """Write this rank's boxes and flush them to the disk; returns its entry for the manifest.

    Where not all data can be in memory at once, ``filled`` gives the same boxes once more with theirs, each until the
    next is asked for; the data of ``boxes`` are not looked at then.

    The file is written as the data are hashed, and at most ``PART`` bytes are copied at a time: safetensors' own
    functions want all data on the host at once, in memory that no two tensors share, as shards of a flat buffer do.

    Raises:
        TypeError: a tensor has a dtype that safetensors files cannot hold.
    """
    ordered = sorted(boxes, key=lambda box: -box.data.itemsize)  # so that each lies at a multiple of its item's size
    ends = list(itertools.accumulate((box.data.nbytes for box in ordered), initial=0))
    header = _header(ordered, ends)
    places = {
        box.key: (len(header) + begin, len(header) + end)
        for box, begin, end in zip(ordered, ends, ends[1:], strict=False)
    }
    path = folder / f"rank_{rank:05d}.safetensors"
    listed = []
    with path.open("wb") as file:
        file.write(header)
        for box in boxes if filled is None else filled:
            begin, end = places.pop(box.key)
            entry: dict[str, Any] = {
                "key": box.key,
                "name": box.name,
                "shape": list(box.shape),
                "dtype": dtype_name(box.data.dtype),
            }
            if box.offsets is not None and box.sizes is not None:
                entry |= {"offsets": list(box.offsets), "sizes": list(box.sizes)}
            file.seek(begin)
            entry |= {"start": box.start, "stop": box.stop, "bytes": [begin, end], "sha256": _write(file, box)}
            listed.append(entry)
        assert not places, f"{next(iter(places))} was not given again"
        file.flush()
        os.fsync(file.fileno())
    listed.sort(key=lambda entry: entry["bytes"])  # as they lie in the file, which is how they are read and hashed
    return {"file": path.name, "header": hashlib.sha256(header).hexdigest(), "boxes": listed}


def _header(boxes: list[Box], ends: list[int]) -> bytes:
    """The beginning of a safetensors file: its length in 8 bytes, then JSON, padded to a multiple of 8 bytes."""
    entries: dict[str, Any] = {}
    for box, begin, end in zip(boxes, ends, ends[1:], strict=False):
        if box.data.dtype not in CODES:
            raise TypeError(f"{box.name} is of {box.data.dtype}, which a checkpoint cannot hold; convert it")
        assert box.key not in entries, f"{box.key} is written twice"
        entries[box.key] = {"dtype": CODES[box.data.dtype], "shape": [box.data.numel()], "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name in torch, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _write(file: BinaryIO, box: Box) -> str:
    """Write the data of a box; returns their hash."""
    digest = hashlib.sha256()
    for part in box.data.detach().contiguous().view(torch.uint8).split(PART) if box.data.numel() else ():
        data = part.cpu().numpy()
        file.write(data)
        digest.update(data)
    return digest.hexdigest()
