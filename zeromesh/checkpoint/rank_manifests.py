"""Manifests of ranks, and the index of them all: who has a part of a tensor is known without the list of all boxes.

A rank writes ``rank_00000.jsonl`` beside its tensors, in lines of JSON: the head, from which the index is made; what it
knows by parameter; and a line for each box. The head has the hash of the lines after it, and the index those of the
heads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from zeromesh.base.files import LARGEST_RECORD, open_regular, read_text, write_text
from zeromesh.checkpoint.manifest import (
    BY_PARAMETER,
    FORMAT,
    MANIFEST,
    OF_STAGES,
    PART_FORM,
    area_of,
    as_written,
    require_all_elements,
    require_files,
    require_form,
    require_groups,
    require_sound,
    signed,
)

PLACE = ("offsets", "sizes")  # of an area that is not the whole tensor


def shard_file(rank: int) -> str:
    """Return the name of a rank's file of tensors."""
    return f"rank_{rank:05d}.safetensors"


def part_file(rank: int) -> str:
    """Return the name of a rank's manifest."""
    return f"rank_{rank:05d}.jsonl"


def write_part(folder: Path, rank: int, shard: Mapping[str, Any], facts: Mapping[str, Any], flush: bool = True) -> None:
    """Write and flush the manifest of a rank; it appears whole or not at all.

    Args:
        folder: of the checkpoint.
        rank: of the file.
        shard: the entry of its file, with its boxes.
        facts: values by the names of the model; ``share`` and ``strides`` where tensors are cut, see ``holders``, and
            others ``elsewhere`` for some ``parameters``.
        flush: let it reach the disk before this returns.
    """
    boxes = shard["boxes"]
    by_parameter = {key: facts[key] for key in BY_PARAMETER if key in facts}
    rest = "".join(f"{json.dumps(line)}\n" for line in (by_parameter, *boxes))
    head = {key: value for key, value in shard.items() if key not in ("file", "boxes")} | {
        "bytes": max((box["bytes"][1] for box in boxes), default=0),
        "share": facts.get("share", rank),
        "strides": facts.get("strides", []),
        "tensors": _ends(boxes, facts.get("elsewhere")),
        **{key: facts[key] for key in OF_STAGES if key in facts},
        "rest": _hash(rest),
    }
    write_text(folder / part_file(rank), f"{json.dumps(head)}\n{rest}", flush)


def _ends(boxes: Sequence[dict[str, Any]], elsewhere: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the areas of tensors of which this rank has the first elements or the last: with where its share ends."""
    names = set() if elsewhere is None else {*elsewhere["parameters"]}
    # Of each area only two ranks, so that all ranks together say no more than there are tensors.
    shares: dict[Any, tuple[int, int]] = {}
    of_tensors = {box["name"]: box for box in boxes}
    for box in boxes:
        key = (box["name"], *area_of(box))
        low, high = shares.get(key, (box["start"], box["stop"]))
        shares[key] = min(low, box["start"]), max(high, box["stop"])
    tensors: dict[str, Any] = {}
    for (name, offsets, sizes), (low, high) in shares.items():
        ends = ({"stop": high} if low == 0 else {}) | ({"start": low} if high == prod(sizes) else {})
        if ends:
            box = of_tensors[name]
            place = {} if list(sizes) == box["shape"] else {"offsets": list(offsets), "sizes": list(sizes)}
            if elsewhere is not None and name.rpartition("/")[2] in names:
                ends |= {key: elsewhere[key] for key in ("share", "strides")}
            facts = {"dtype": box["dtype"], "shape": box["shape"], "areas": []}
            tensors.setdefault(name, facts)["areas"].append(place | ends)
    return tensors


def write_index(folder: Path, state: Mapping[str, Any], ranks: int) -> None:
    """Write and flush the manifest of a checkpoint from the heads of its ranks' manifests, which are all there.

    Args:
        folder: of the checkpoint.
        state: what is known of the run.
        ranks: number of files.
    """
    rows, strides = [], []
    tensors: dict[str, Any] = {}
    named: dict[str, dict[str, Any]] = {key: {} for key in OF_STAGES}
    for rank in range(ranks):
        line = _head(folder / part_file(rank))
        head = json.loads(line)
        rows.append({"sha256": _hash(line), "bytes": head["bytes"]})
        for key, values in named.items():
            values |= head.get(key, {}) | values  # the first stage that has a name counts
        for name, facts in head["tensors"].items():
            areas = tensors.setdefault(name, facts | {"areas": []})["areas"]
            for ends in facts["areas"]:
                _add_ends(areas, ends, rank, ends.get("share", head["share"]))
        strides = head["strides"]  # which all ranks have
    content = signed({**state, **named, "strides": strides, "tensors": tensors, "shards": rows})
    write_text(folder / MANIFEST, _by_line(content))


def _by_line(content: Mapping[str, Any]) -> str:
    """Return JSON with a line for each entry, and for each one of large entries, for those who look into it."""
    entries = []
    for key, value in content.items():
        text = json.dumps(value)
        if key == "shards":
            text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        elif key in ("tensors", *OF_STAGES):
            text = "{\n" + ",\n".join(json.dumps({name: entry})[1:-1] for name, entry in value.items()) + "\n}"
        entries.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _add_ends(areas: list[dict[str, Any]], ends: dict[str, Any], rank: int, share: int) -> None:
    place = {key: ends[key] for key in PLACE if key in ends}
    area = next((area for area in areas if all(area.get(key) == place.get(key) for key in PLACE)), None)
    if area is None:
        areas.append(area := place | {key: ends[key] for key in ("strides",) if key in ends})
    if "stop" in ends:
        area |= {"rank": rank, "first": share, "stop": ends["stop"]}
    if "start" in ends:
        area |= {"last": share, "start": ends["start"]}


def write_manifests(folder: Path, state: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> None:
    """Write the manifests of all ranks, which one process knows, to a folder in memory."""
    for rank, part in enumerate(parts):
        write_part(folder, rank, part["shard"], part, flush=False)
    write_index(folder, state, len(parts))


def _head(path: Path) -> str:
    with open_regular(path) as file:
        return file.readline(LARGEST_RECORD).decode()


def read_part(folder: Path, manifest: Mapping[str, Any], rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entry of a rank's file, with its boxes, and what its manifest has by parameter.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: it is not the one that was written, or contradicts the manifest of the checkpoint.
    """
    path = folder / part_file(rank)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, which describes {shard_file(rank)}")
    with as_written(path):
        line, _, rest = read_text(path, most=LARGEST_RECORD).partition("\n")
        is_same = _hash(line + "\n") == manifest["shards"][rank]["sha256"]
        head = json.loads(line) if is_same else {}
        if not is_same or _hash(rest) != head["rest"]:
            raise ValueError(f"{path} is not the file that was written (SHA-256 differs)")
        named, *boxes = json.loads(f"[{rest.rstrip().replace(chr(10), ',')}]")
        by_parameter = {key: values for key, values in named.items() if key in BY_PARAMETER}
        shard = {"file": shard_file(rank), "boxes": boxes}
        shard |= {"header": head["header"]} if "header" in head else {}
        require_form(PART_FORM, {"shard": shard, **by_parameter}, path)
        require_groups(path, by_parameter, manifest)
        require_sound(path, shard, manifest)
    return shard, by_parameter


def require_all_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise FileNotFoundError if a file of a checkpoint is missing, ValueError if one is cut off. Nothing is read."""
    if manifest["format"] != FORMAT:
        require_all_elements(folder, manifest["shards"])
        require_files(folder, manifest["shards"])
        return
    for rank, row in enumerate(manifest["shards"]):
        for path, nbytes in ((folder / shard_file(rank), row["bytes"]), (folder / part_file(rank), 1)):
            if path.stat().st_size < nbytes:
                raise ValueError(f"{path} is cut off, and has fewer than {nbytes:,} bytes")


def holders(
    area: Mapping[str, Any], strides: Sequence[Sequence[int]], low: int, high: int, margin: int = 0
) -> list[int]:
    """Return the ranks that have elements ``[low, high)`` of an area, if shares between its first and last are equal.

    Args:
        area: its ``rank`` has share ``first``, which ends at element ``stop``; share ``last`` begins at ``start``.
        strides: of each axis along which shares are counted, the innermost first: its size, and ranks between two; an
            area may have its own.
        low: first element.
        high: last element + 1.
        margin: further shares on both sides.
    """
    if not {"first", "last"} <= area.keys():
        return []
    first, last, stop, start = (int(area[key]) for key in ("first", "last", "stop", "start"))
    each = max(1, -(-(start - stop) // max(1, last - first - 1)))

    def share(element: int) -> int:
        between = first + 1 + (element - stop) // each
        return first if element < stop else last if element >= start else min(last, between)

    def offset(number: int) -> int:
        ranks = 0
        for size, stride in area.get("strides", strides):
            number, place = divmod(number, size)
            ranks += place * stride
        return ranks + number  # of files without axes, one after the other

    numbers = range(max(first, share(low) - margin), min(last, share(high - 1) + margin) + 1)
    return [area["rank"] - offset(first) + offset(number) for number in numbers]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
