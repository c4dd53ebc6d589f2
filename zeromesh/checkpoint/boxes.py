"""Files that hold ranges of named tensors, and a manifest that says which.

A *box* is a range ``[start, stop)`` of a flattened tensor. Every rank writes the boxes it owns to one safetensors file;
the manifest joins them. Reading asks for any range of a tensor and takes it from whichever files hold it. There is no
pickle anywhere. A checkpoint is there when its folder has its name: it is written under another one, flushed to the
disk, and renamed last. Where it takes the place of an earlier one, that has the name with ``.old`` for a moment.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LATEST = "latest"
DRAFT = ".draft"
OLD = ".old"

OPEN_FILES = 64
"""So many files of a checkpoint are kept open while it is read; processes may not have very many."""


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
    _write_text(path, json.dumps(value, indent=1))


def write_latest(folder: Path, tag: str) -> None:
    """Let ``folder/latest`` name a checkpoint."""
    _write_text(folder / LATEST, tag)
    _flush(folder)


def _write_text(path: Path, text: str) -> None:
    draft = path.with_name(path.name + DRAFT)
    draft.write_text(text)
    _flush(draft)
    draft.rename(path)


def commit(draft: Path, final: Path) -> None:
    """Give a written folder its name; one that had the name before goes away."""
    old = final.with_name(final.name + OLD)
    _flush(draft)
    if final.exists():
        remove(old)  # of a process that died between the two renames, or before it could remove it
        final.rename(old)
    draft.rename(final)
    _flush(final.parent)
    remove(old)


def require_tag(tag: str) -> None:
    """Raise ValueError for a name that is needed for other things in a folder of checkpoints."""
    if tag == LATEST or tag.endswith((DRAFT, OLD)):
        raise ValueError(
            f"a checkpoint cannot have the tag {tag!r}: {LATEST!r} and names that end in {DRAFT!r} or {OLD!r} are for "
            "files of the folder itself; choose another tag"
        )


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
        self._open = lru_cache(maxsize=OPEN_FILES)(partial(_open, folder))
        self.names = frozenset(self._boxes)
        """All tensors in the checkpoint."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a tensor."""
        return tuple(self._boxes[name][0][1]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor was written."""
        file, box = self._boxes[name][0]
        dtype: torch.dtype = self._open(file).get_slice(box["key"])[:0].dtype
        return dtype

    def read(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """Copy elements ``[start, stop)`` of a flattened tensor into ``out``, shape ``(stop - start,)``."""
        missing = stop - start
        for file, box in self._boxes.get(name, []):
            low, high = max(start, box["start"]), min(stop, box["stop"])
            if low >= high:
                continue
            part = self._open(file).get_slice(box["key"])[low - box["start"] : high - box["start"]]
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


def _open(folder: Path, file: str) -> Any:
    from safetensors import safe_open

    return safe_open(str(folder / file), framework="pt")


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not the file that was written: {error}; choose another tag") from error
    return manifest


def locate(folder: Path, tag: str) -> Path:
    """The folder of a checkpoint. It has another name if a process died as it put a new one in its place."""
    path = folder / tag
    old = path.with_name(path.name + OLD)
    return old if not path.exists() and _is_complete(old) else path


def _is_complete(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def latest(folder: Path) -> str | None:
    """The tag that ``folder/latest`` names; None if there is no such file.

    If that is empty, or names what is not there, the newest complete checkpoint is taken, with a warning.
    """
    path = folder / LATEST
    if not path.is_file():
        return None
    tag = path.read_text().strip()
    if tag and _is_complete(locate(folder, tag)):
        return tag
    newest = _newest(folder)
    if newest is None:
        return tag or None
    problem = f"names {tag!r}, which is no complete checkpoint" if tag else "is empty"
    _log.warning("%s %s; the newest complete checkpoint is taken instead: %r", path, problem, newest)
    return newest


def _newest(folder: Path) -> str | None:
    """The tag of the complete checkpoint that was written last."""
    found: dict[str, int] = {}
    for manifest in folder.glob(f"*/{MANIFEST}"):
        tag = manifest.parent.name.removesuffix(OLD)
        if not tag.endswith(DRAFT) and locate(folder, tag) == manifest.parent:
            found[tag] = manifest.stat().st_mtime_ns
    return max(found, key=lambda tag: (found[tag], tag)) if found else None


def pack(value: Any) -> Any:
    """What JSON holds of ``value``.

    Tuples, dicts with keys that are not strings, and tensors of one element are marked as such.
    """
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: pack(item) for key, item in value.items()}
        return {"__items__": [[pack(key), pack(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"__tuple__": [pack(item) for item in value]}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {"__tensor__": [value.tolist(), str(value.dtype).removeprefix("torch.")]}
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
    if "__tensor__" in value:
        number, dtype = value["__tensor__"]
        return torch.tensor(number, dtype=getattr(torch, dtype))
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
