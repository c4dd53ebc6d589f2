"""The blocks of a model, and the choice of those before which it is cut into stages."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf


@dataclass(frozen=True)
class Cut:
    """A model cut into stages."""

    blocks: tuple[str, ...]  # their names, in the order in which they are called
    starts: tuple[int, ...]  # the first block of each stage
    # Parameter, under the first of its names -> the stages that need it, ascending.
    stages: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, int]  # buffer, under each of its names -> the stage whose values count

    def stage_of(self, block: int) -> int:
        """Return the stage of a block, by its number."""
        return max(stage for stage, start in enumerate(self.starts) if start <= block)


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model, any of which may be the first of a stage."""

    names: tuple[str, ...]  # in the order in which they are called
    types: tuple[str, ...]  # the names of their classes
    # Parameter, under the first of its names -> the numbers of the blocks that need it, ascending.
    uses: Mapping[str, tuple[int, ...]]
    parameters: tuple[float, ...]  # elements that each needs
    operations: tuple[float, ...] | None  # floating-point operations of each; None: they could not be counted
    # Buffer, under each of its names -> the number of the first block that has it.
    buffers: Mapping[str, int] = field(default_factory=dict)
    finer: tuple[str, ...] = ()  # patterns of smaller blocks inside of them

    @property
    def outer(self) -> list[int]:
        """Numbers of the blocks that are not inside of another one."""
        inside = inner(self.names)
        return [number for number in range(len(self.names)) if number not in inside]

    def cut(self, starts: Sequence[int]) -> Cut:
        """Cut the model before these blocks. Modules inside of blocks at which no stage begins are left out."""
        cut = Cut(self.names, tuple(starts), {}, {})
        stages = {name: tuple(sorted({cut.stage_of(b) for b in blocks})) for name, blocks in self.uses.items()}
        numbers = sorted({*self.outer, *starts})
        names, positions = (
            tuple(self.names[number] for number in numbers),
            tuple(numbers.index(start) for start in starts),
        )
        return Cut(names, positions, stages, {name: cut.stage_of(block) for name, block in self.buffers.items()})


def inner(names: Sequence[str]) -> dict[int, int]:
    """Return, by the numbers of blocks that are modules inside of other ones, the numbers of those."""
    numbers = {name: number for number, name in enumerate(names)}
    around = {number: numbers.get(name.rpartition(".")[0]) for number, name in enumerate(names)}
    return {number: outer for number, outer in around.items() if outer is not None}


def partition(costs: Sequence[float], stages: int) -> list[int]:
    """Return the first block of each stage, for the cut whose dearest stage is as cheap as possible; none is empty."""
    blocks = len(costs)
    assert blocks >= stages
    sums = [0.0, *accumulate(costs)]
    # best[n]: the least cost of the dearest stage for the first n blocks; first[n]: where the last stage then starts.
    best, tables = sums, [[0] * (blocks + 1)]
    for stage in range(1, stages):
        row, first, cross = [inf] * (blocks + 1), [0] * (blocks + 1), stage
        for n in range(stage + 1, blocks + 1):
            # With the start the earlier stages' cost rises and the last one's falls; the best start is where they meet,
            # or the one before, and moves up with n.
            while cross < n - 1 and best[cross] < sums[n] - sums[cross]:
                cross += 1
            cost, low = max(best[cross], sums[n] - sums[cross]), cross
            if cross > stage and sums[n] - sums[cross - 1] < cost:
                cost, low = sums[n] - sums[cross - 1], cross - 1
            # Of equal cuts, the one with the most blocks in earlier stages is taken, since the last stage has the loss,
            # too.
            row[n], first[n] = cost, bisect_right(best, cost, low, n) - 1
        tables.append(first)
        best = row
    starts, end = [], blocks
    for table in reversed(tables):
        end = table[end]
        starts.append(end)
    return starts[::-1]


def uniform(blocks: int, stages: int) -> list[int]:
    """Return stages of as many blocks each."""
    each, rest = divmod(blocks, stages)
    # The middle stages take what is left over, as the first and the last one have the modules outside of blocks, too.
    middle = sorted(range(stages), key=lambda stage: abs(stage - (stages - 1) / 2))
    sizes = [each + (stage in middle[:rest]) for stage in range(stages)]
    return [0, *accumulate(sizes[:-1])]


WAYS: dict[str, Callable[[Blocks, int], list[int]]] = {
    # Without a trace there are no counts, and parameters are the next best guess of the work.
    "best": lambda blocks, stages: partition(blocks.operations or blocks.parameters, stages),
    "parameters": lambda blocks, stages: partition(blocks.parameters, stages),
    "uniform": lambda blocks, stages: [blocks.outer[number] for number in uniform(len(blocks.outer), stages)],
}
"""Values of ``pipeline.partition``; there are ``type:REGEX`` and a list of first blocks, too."""


def starts_of(how: str | Sequence[int], blocks: Blocks, stages: int) -> list[int]:
    """Return the first block of each stage, as ``pipeline.partition`` says. Raise ValueError if it does not fit."""
    outer = blocks.outer
    count = len(outer)
    if count < stages:
        finer = f", as {json.dumps(blocks.finer)}" if blocks.finer else ""
        raise ValueError(
            f"{count} blocks cannot be cut into {stages} stages, as each needs one; set mesh.pipeline (times the "
            f"chunks per rank) to {count} at the most, or name smaller blocks in pipeline.blocks{finer}"
        )
    if not isinstance(how, str):
        if len(how) != stages or how[0] != 0 or sorted(set(how)) != list(how) or how[-1] >= count:
            raise ValueError(
                f"pipeline.partition is {how}; as a list it has the number of the first block of each of the {stages} "
                f"stages, ascending from 0, and there are {count} blocks"
            )
        return [outer[number] for number in how]
    if how.lower().startswith("type:"):
        return [outer[number] for number in _by_type(how[len("type:") :], [blocks.types[n] for n in outer], stages)]
    if how not in WAYS:
        raise ValueError(
            f"pipeline.partition is {how!r}; use one of {', '.join(WAYS)}, type:REGEX, where blocks whose class's name "
            "matches count, or a list of the number of the first block of each stage"
        )
    return WAYS[how](blocks, stages)


def _by_type(pattern: str, types: Sequence[str], stages: int) -> list[int]:
    try:
        counts = [float(bool(re.search(pattern, name, re.IGNORECASE))) for name in types]
    except re.error as error:
        raise ValueError(f"pipeline.partition: {pattern!r} is not a regular expression: {error}") from None
    if not any(counts):
        classes = ", ".join(sorted({*types}))
        raise ValueError(f"pipeline.partition: type:{pattern} matches none of the blocks, whose classes are {classes}")
    return partition(counts, stages)
