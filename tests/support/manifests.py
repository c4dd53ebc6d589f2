"""Manifests of checkpoints as one document, which tests alter, and write with hashes as if it had been saved so."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from zeromesh.checkpoint.boxes import Reader
from zeromesh.checkpoint.manifest import MANIFEST, signed
from zeromesh.checkpoint.rank_manifests import part_file, write_manifests


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write the manifests of files whose entries are ``content["shards"]``, and the rest of the content."""
    state = {key: value for key, value in content.items() if key != "shards"}
    write_manifests(folder, state, [{"shard": shard} for shard in content["shards"]])


def content_of(checkpoint: Path) -> dict[str, Any]:
    """Return the index, without its hashes, and under ``ranks`` the head, the entries by parameter and the boxes."""
    content = json.loads((checkpoint / MANIFEST).read_text())
    ranks = []
    for path in sorted(checkpoint.glob("rank_*.jsonl")):
        head, named, *boxes = map(json.loads, path.read_text().splitlines())
        ranks.append({"head": head, "named": named, "boxes": boxes})
    return {key: value for key, value in content.items() if key not in ("format", "sha256")} | {"ranks": ranks}


def sign(checkpoint: Path, content: Any) -> None:
    """Write what ``content_of`` has returned, and somebody has altered, with the hashes that belong to it."""
    content = json.loads(json.dumps(content))  # which is not altered here
    ranks = content.pop("ranks", None)
    # Whatever was put into the place of what was there: it is written.
    for rank, part in enumerate(ranks if isinstance(ranks, list) else ()):
        head, named, boxes = (
            dict(part).get(key) if isinstance(part, dict) else part for key in ("head", "named", "boxes")
        )
        lines = [named, *(boxes if isinstance(boxes, list) else [boxes])]
        rest = "".join(f"{json.dumps(line)}\n" for line in lines)
        head = head | {"rest": hashlib.sha256(rest.encode()).hexdigest()} if isinstance(head, dict) else head
        text = json.dumps(head) + "\n"
        (checkpoint / part_file(rank)).write_text(text + rest)
        with suppress(LookupError, TypeError):
            content["shards"][rank]["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps(signed(content)))


def boxes_in(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the boxes of all ranks."""
    return [box for rank in content["ranks"] for box in rank["boxes"]]


def whole_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return what the manifests of all ranks have of a run, beside their boxes."""
    reader = Reader(checkpoint)
    reader.open_all()
    return reader.manifest
