"""Manifests: the description of a checkpoint, and the check that its files are there and not cut off."""

from __future__ import annotations

import hashlib
import json
from math import prod
from pathlib import Path
from typing import Any

import torch

from zeromesh.config.errors import some

# Format of manifests that are written; format 1 is read, too. It rises when a version of this code that reads the
# present one would read a new manifest wrongly. A new key that may be missing does not raise it.
FORMAT = 2

MANIFEST = "manifest.json"

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
"""Names of dtypes in safetensors files."""


def signed(content: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a manifest, with its format and a hash of itself."""
    content = {"format": FORMAT, **content}
    return {**content, "sha256": _digest(content)}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint in the newest format; raise if there is none, or it was changed."""
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no complete checkpoint: {MANIFEST} is missing")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder} is an incomplete save: {MANIFEST} is no whole JSON file ({error})") from None
    ours = isinstance(manifest, dict) and isinstance(manifest.get("shards"), list)
    if not ours or manifest.get("format") not in (1, FORMAT):
        found = f"of format {manifest['format']!r}" if ours and "format" in manifest else "not of ZeroMesh"
        raise ValueError(f"{path} is {found}; this version reads the formats 1 and {FORMAT}")
    if manifest["format"] == 1:
        _find_bytes(manifest, folder)
    elif manifest.pop("sha256", None) != _digest(manifest):
        raise ValueError(f"{path} is not the file that was written (SHA-256 differs)")
    return dict(manifest)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def require_sound(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise ValueError if a file lies elsewhere, a box is there twice, or its numbers contradict each other."""
    # The hash says that the manifest is as it was written, and not who wrote it.
    files, places = set[str](), set[tuple[str, str]]()
    for shard in manifest["shards"]:
        try:
            file, boxes = shard["file"], [(box, _place(box)) for box in shard["boxes"]]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{folder / MANIFEST} describes a box that cannot be: {error}") from None
        if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file or "\0" in file:
            raise ValueError(
                f"{folder / MANIFEST} names the file {file!r}, which is not in the checkpoint's own folder"
            )
        if file in files:
            raise ValueError(f"{folder / MANIFEST} names the file {file!r} twice")
        files.add(file)
        for box, place in boxes:
            # Twice the same elements would hide that others are missing: a reader counts what it finds.
            if place in places:
                raise ValueError(f"{folder / MANIFEST} has {box['name']}, {place[1]}, twice")
            places.add(place)


def _place(box: dict[str, Any]) -> tuple[str, str]:
    """Return which part of which tensor a box is. Raises what shows that there can be no such box."""
    shape, dtype = box["shape"], getattr(torch, box["dtype"])
    offsets, sizes = box.get("offsets", [0] * len(shape)), box.get("sizes", shape)
    begin, end = box["bytes"]
    numbers = [*shape, *offsets, *sizes, box["start"], box["stop"], begin, end]
    inside = all(offset + size <= whole for offset, size, whole in zip(offsets, sizes, shape, strict=True))
    # Python takes True for 1, and JSON has fractions.
    if not all(type(number) is int and number >= 0 for number in numbers) or not inside:
        raise ValueError(f"{box['name']} lies outside of its tensor")
    if not box["start"] <= box["stop"] <= prod(sizes):
        raise ValueError(f"{box['name']} has elements {box['start']} to {box['stop']} of {prod(sizes)}")
    if not isinstance(dtype, torch.dtype) or end - begin != (box["stop"] - box["start"]) * dtype.itemsize:
        raise ValueError(f"{box['name']} has {end - begin} bytes for its elements of {box['dtype']}")
    return str(box["name"]), f"elements {box['start']} to {box['stop']} of the box {sizes} at {offsets}"


def require_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise FileNotFoundError if a file is missing, ValueError if one is cut off; nothing of them is read."""
    for shard in manifest["shards"]:
        path, boxes = folder / shard["file"], shard["boxes"]
        _require_file(path, shard)
        size, wanted = path.stat().st_size, max((box["bytes"][1] for box in boxes), default=0)
        if size < wanted:
            lost = some([box["key"] for box in boxes if box["bytes"][1] > size])
            raise ValueError(f"{path} is cut off after {size:,} of {wanted:,} bytes, and lacks {lost}")


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in torch, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _require_file(path: Path, shard: dict[str, Any]) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, which held {some([box['key'] for box in shard['boxes']])}")


def _find_bytes(manifest: dict[str, Any], folder: Path) -> None:
    """Complete a manifest of format 1 from the headers of its files."""
    dtypes = {code: dtype_name(dtype) for dtype, code in CODES.items()}
    for shard in manifest["shards"]:
        path = folder / shard["file"]
        _require_file(path, shard)
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            for box in shard["boxes"]:
                entry = header[box["key"]]
                begin, end = entry["data_offsets"]
                box.update(dtype=dtypes[entry["dtype"]], bytes=[8 + size + begin, 8 + size + end])
        except (ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
            raise ValueError(f"{path} is not the file that was written") from error
