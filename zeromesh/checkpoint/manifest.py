"""Manifests: what a checkpoint says of itself, and whether its files are there and as long as it says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from zeromesh.checkpoint.shards import CODES, dtype_name

FORMAT = 2
"""Of the manifests that are written; those of format 1 are read, too."""

MANIFEST = "manifest.json"

MOST_SHOWN = 6
"""So many tensors of a damaged file are named."""


def signed(content: dict[str, Any]) -> dict[str, Any]:
    """What is written of a manifest: its format and a hash of itself, too."""
    content = {"format": FORMAT, **content}
    return {**content, "sha256": _digest(content)}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, as of the newest format.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not what was written, or of a format that is not known here.
    """
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


def require_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Look at whether all files are there, and not cut off; nothing of them is read.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: one is cut off.
    """
    for shard in manifest["shards"]:
        path, boxes = folder / shard["file"], shard["boxes"]
        _require_file(path, shard)
        size, wanted = path.stat().st_size, max((box["bytes"][1] for box in boxes), default=0)
        if size < wanted:
            lost = listed([box["key"] for box in boxes if box["bytes"][1] > size])
            raise ValueError(f"{path} is cut off after {size:,} of {wanted:,} bytes, and lacks {lost}")


def listed(keys: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(keys) - MOST_SHOWN} more" if len(keys) > MOST_SHOWN else ""
    return ", ".join(keys[:MOST_SHOWN]) + more


def _require_file(path: Path, shard: dict[str, Any]) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, which held {listed([box['key'] for box in shard['boxes']])}")


def _find_bytes(manifest: dict[str, Any], folder: Path) -> None:
    """Complete a manifest of format 1 by what the headers of its files say."""
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
