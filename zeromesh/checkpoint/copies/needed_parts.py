"""Parts of a copy in memory that a rank loads when it goes on from the copy, and who sends them to whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zeromesh.checkpoint.boxes import Box
from zeromesh.checkpoint.contents import RunState, plain_names
from zeromesh.checkpoint.manifest import area_of


class Delivery(NamedTuple):
    """A part that a rank sends to a rank of another node."""

    part: int
    source: int
    target: int


def needed_parts(engine: RunState, parts: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the numbers of the parts that have values which this rank loads; ``parts`` are their descriptions.

    They are all of them where a parameter of this rank is not in the copy.
    """
    ranges = _loaded_ranges(engine)
    here, needed, saved_names = engine.mesh.rank, set(), set()
    for number, part in enumerate(parts):
        for box in part["shard"]["boxes"]:
            kind, _, name = box["name"].rpartition("/")
            if kind == "random":
                # Ranks that are more than the parts begin with the first one's random numbers.
                reads = name == str(here if here < len(parts) else 0)
            elif kind == "parameter" or kind.startswith("optimizer/"):
                saved_names.add(name)
                reads = name in ranges and _reads(box, *ranges[name])
            else:
                reads = True  # buffers, extra states of modules and the user's values
            if reads:
                needed.add(number)
    return needed if ranges.keys() <= saved_names else set(range(len(parts)))


Ranges = tuple[tuple[int, ...], list[tuple[int, int]]]  # shape of a whole parameter, and ranges of it, flattened


def _loaded_ranges(engine: RunState) -> dict[str, Ranges]:
    """Return what this rank reads of each parameter, by the name under which it is saved."""
    plain = plain_names(engine.sharded.model)
    ranges: dict[str, Ranges] = {}
    for flat in engine.sharded.flats:
        frozen_whole = not flat.layout.trainable and not flat.sharded
        loaded = slice(0, flat.layout.size) if frozen_whole else flat.own if flat.layout.trainable else flat.shard_range
        for index, start, stop in flat.layout.owned(loaded.start, loaded.stop):
            segment = flat.layout.segments[index]
            _, reads = ranges.setdefault(plain(segment.name), (tuple(segment.held.whole), []))

            def read(first: int, last: int, reads: list[tuple[int, int]] = reads) -> torch.Tensor:
                reads.append((first, last))
                return torch.empty(last - first, device="meta")

            segment.held.read(read, start - segment.start, stop - segment.start)
    return ranges


def _reads(saved: dict[str, Any], shape: tuple[int, ...], reads: list[tuple[int, int]]) -> bool:
    if tuple(saved["shape"]) != shape:
        return True  # states of another shape, such as one number a row, are read whole
    box = Box(saved["name"], shape, torch.uint8, saved["start"], saved["stop"], None, *area_of(saved))
    return any(next(box.overlaps(*both), None) is not None for both in reads)


def deliveries(
    nodes: Sequence[Sequence[int]], has: Sequence[Collection[int]], missing: Sequence[Collection[int]]
) -> list[Delivery]:
    """Return who sends which part to whom: each once to a node that lacks it, from those that have it in turn.

    Args:
        nodes: the ranks of each node.
        has: the parts on each node; each part is on one at least.
        missing: the parts that each node still needs.
    """
    holders: dict[int, list[int]] = defaultdict(list)
    for node, present in enumerate(has):
        for part in present:
            holders[part].append(node)
    turns: dict[int, int] = defaultdict(int)
    result = []
    for node, lacking in enumerate(missing):
        for part in sorted(lacking):
            source = nodes[holders[part][turns[part] % len(holders[part])]]
            turns[part] += 1
            # Each rank of a node sends and takes some, so that they use all its links.
            result.append(Delivery(part, source[part % len(source)], nodes[node][part % len(nodes[node])]))
    return result
