"""Writing of one rank's boxes to its file, which is in the safetensors format."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from zeromesh.checkpoint.boxes import Box
from zeromesh.checkpoint.manifest import CODES, dtype_name
from zeromesh.checkpoint.rank_manifests import shard_file


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

    def add(self, box: Box, place: tuple[int, int], digests: list[str]) -> None:
        """Describe a box that was written, with the SHA-256 of each part of its data; none of a copy in memory."""
        entry: dict[str, Any] = {
            "key": box.key,
            "name": box.name,
            "shape": list(box.shape),
            "dtype": dtype_name(box.dtype),
        }
        if box.offsets is not None and box.sizes is not None:
            entry |= {"offsets": list(box.offsets), "sizes": list(box.sizes)}
        entry |= {"start": box.start, "stop": box.stop, "bytes": [*place]}
        if digests:
            entry["sha256"] = digests if len(digests) > 1 else digests[0]
        self._listed.append(entry)

    def entry(self, name: str, hashed: bool = True) -> dict[str, Any]:
        """Return the entry of the file ``name`` for the manifest; all boxes have been written."""
        assert not self._places, f"{next(iter(self._places))} was not given again"
        boxes = sorted(self._listed, key=lambda entry: entry["bytes"])  # as they are read and hashed
        digest = {"header": hashlib.sha256(self.header).hexdigest()} if hashed else {}
        return {"file": name, **digest, "boxes": boxes}


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
        digests = []
        # In parts, which bounds what of a tensor on a GPU is on the host, and which threads hash when it is loaded.
        for part in box.parts():
            data = part.cpu().numpy().data
            self._file.write(data)
            digests.append(hashlib.sha256(data).hexdigest())
        self._layout.add(box, place, digests)

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
