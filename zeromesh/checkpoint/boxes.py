"""Files that hold ranges of named tensors, and a manifest that says which.

A *box* is a range ``[start, stop)`` of a flattened tensor. Every rank writes the boxes it owns to one safetensors file;
the manifest joins them. Reading asks for any range of a tensor and takes it from whichever files hold it. There is no
pickle anywhere. A checkpoint is there when its folder has its name: it is written under another one, flushed to the
disk, and renamed last.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MANIFEST = "manifest.json"
LATEST = "latest"


@dataclass(frozen=True)
class Box:
    """Elements ``[start, stop)`` of the flattened tensor ``name`` of global ``shape``."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    data: torch.Tensor


def write_shard(folder: Path, rank: int, boxes: list[Box]) -> dict[str, Any]:
    """Write this rank's boxes; returns its entry for the manifest."""
    from safetensors.torch import save_file

    path = folder / f"rank_{rank:05d}.safetensors"
    keys = [f"{box.name}[{box.start}:{box.stop}]" for box in boxes]
    # Copies, since safetensors refuses tensors that share memory, and shards are views of flat buffers.
    save_file({key: box.data.detach().cpu().clone() for key, box in zip(keys, boxes, strict=True)}, path)
    _flush(path)
    listed = [
        {"key": key, "name": b.name, "shape": list(b.shape), "start": b.start, "stop": b.stop}
        for key, b in zip(keys, boxes, strict=True)
    ]
    return {"file": path.name, "sha256": _digest(path), "boxes": listed}


def write_json(path: Path, value: Any) -> None:
    """Write and flush a JSON file; it appears whole or not at all."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(json.dumps(value, indent=1))
    _flush(draft)
    draft.rename(path)


def commit(draft: Path, final: Path) -> None:
    """Give a written folder its name; one that had the name before goes away."""
    if final.exists():
        old = final.with_name(final.name + ".old")
        final.rename(old)
        draft.rename(final)
        remove(old)
    else:
        draft.rename(final)
    _flush(final.parent)


def remove(folder: Path) -> None:
    """Delete a checkpoint's folder; nothing if there is none."""
    import shutil

    if folder.exists():
        shutil.rmtree(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Reader:
    """Reads ranges of tensors from a checkpoint's folder.

    Raises:
        FileNotFoundError: the folder, its manifest or a file is missing.
        ValueError: a file is not what was written.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / MANIFEST).is_file():
            raise FileNotFoundError(f"{folder} is no complete checkpoint: {MANIFEST} is missing; choose another tag")
        self.folder = folder
        self.manifest = _read_manifest(folder / MANIFEST)
        self._boxes: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        for shard in self.manifest["shards"]:
            for box in shard["boxes"]:
                self._boxes.setdefault(box["name"], []).append((shard["file"], box))
        self._digests = {shard["file"]: shard["sha256"] for shard in self.manifest["shards"]}

    def names(self) -> set[str]:
        """All tensors in the checkpoint."""
        return set(self._boxes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a tensor."""
        return tuple(self._boxes[name][0][1]["shape"])

    def read(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """Copy elements ``[start, stop)`` of a flattened tensor into ``out``, shape ``(stop - start,)``."""
        from safetensors import safe_open

        missing = stop - start
        for file, box in self._boxes.get(name, []):
            low, high = max(start, box["start"]), min(stop, box["stop"])
            if low >= high:
                continue
            with safe_open(str(self.folder / file), framework="pt") as tensors:
                part = tensors.get_slice(box["key"])[low - box["start"] : high - box["start"]]
            out[low - start : high - start].copy_(part)
            missing -= high - low
        if missing:
            raise ValueError(f"{self.folder} lacks {missing} of the {stop - start} elements of {name} that are needed")

    def verify(self, first: int = 0, step: int = 1) -> None:
        """Compare every ``step``-th file, from ``first`` on, with what was written.

        Raises:
            FileNotFoundError: one is missing.
            ValueError: one has another content.
        """
        for file, digest in list(self._digests.items())[first::step]:
            path = self.folder / file
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing from the checkpoint; choose another tag")
            if _digest(path) != digest:
                raise ValueError(f"{path} is not the file that was written (SHA-256 differs); choose another tag")


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not the file that was written: {error}; choose another tag") from error
    return manifest


def latest(folder: Path) -> str | None:
    """The tag that ``folder/latest`` names; None if there is none."""
    path = folder / LATEST
    return path.read_text().strip() or None if path.is_file() else None


def pack(value: Any) -> Any:
    """What JSON holds of ``value``: tuples, and dicts with keys that are not strings, are marked as such."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: pack(item) for key, item in value.items()}
        return {"__items__": [[pack(key), pack(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"__tuple__": [pack(item) for item in value]}
    return [pack(item) for item in value] if isinstance(value, list) else value


def unpack(value: Any) -> Any:
    """What ``pack`` was given."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__items__" in value:
        return {unpack(key): unpack(item) for key, item in value["__items__"]}
    if "__tuple__" in value:
        return tuple(unpack(item) for item in value["__tuple__"])
    return {key: unpack(item) for key, item in value.items()}


def require_json(what: str, value: Mapping[str, Any]) -> None:
    """Raise TypeError naming the key of ``value`` that JSON cannot hold."""
    for key, item in value.items():
        try:
            json.dumps(pack(item))
        except TypeError as error:
            raise TypeError(
                f"{what}[{key!r}] is a {type(item).__name__}, which a checkpoint's JSON cannot hold; "
                "convert it to numbers, strings, lists and dicts"
            ) from error
