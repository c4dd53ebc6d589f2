"""Which blocks a model consists of, which stage needs which parameter, and taking away the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class Cut:
    """A model cut into stages.

    Attributes:
        blocks: their names, in the order in which they are called.
        starts: the first block of each stage.
        stages: by parameter, under the first of its names, the stages that need it, ascending. Several where it is
            tied.
    """

    blocks: tuple[str, ...]
    starts: tuple[int, ...]
    stages: Mapping[str, tuple[int, ...]]

    def stage_of(self, block: int) -> int:
        """The stage of a block, by its number."""
        return max(stage for stage, start in enumerate(self.starts) if start <= block)


def find_blocks(model: nn.Module, patterns: Sequence[str] = ()) -> list[str]:
    """The blocks of a model: the children of its outermost lists of modules, in order of registration.

    Args:
        model: its parameters may be on any device, meta included.
        patterns: of names, in the order in which the blocks are called, in place of these; ``*`` is anything without a
            dot.

    Raises:
        ValueError: a pattern matches nothing, or there are no blocks.
    """
    names = [name for name, _ in model.named_modules() if name]
    if patterns:
        found: list[str] = []
        for pattern in patterns:
            depth = pattern.count(".")
            matching = [n for n in names if n.count(".") == depth and fnmatchcase(n, pattern) and n not in found]
            if not matching:
                raise ValueError(
                    f"pipeline.blocks: {pattern!r} matches no module; its names are like {', '.join(names[:5])}"
                )
            found += matching
        return found
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, LISTS) and _has_parameters(m)]
    outer = [(name, m) for name, m in lists if not any(_is_in(name, other) for other, _ in lists if other != name)]
    blocks = [f"{name}.{child}".lstrip(".") for name, m in outer for child, _ in m.named_children()]
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks (nn.ModuleList or nn.Sequential) to be cut into stages: "
            "name them in pipeline.blocks, in the order in which they are called, or set mesh.pipeline to 1"
        )
    return blocks


def place_parameters(model: nn.Module, blocks: Sequence[str], starts: Sequence[int]) -> Cut:
    """Which stages need each parameter.

    What is outside of the blocks is taken to be used in the order of registration: before the first block, or right
    after the block that is registered before it. A stage also computes what comes between its last block and the next.
    """
    cut = Cut(tuple(blocks), tuple(starts), {})
    position: dict[str, int] = {}
    latest = 0
    for name, _ in model.named_modules():
        block = next((number for number, block in enumerate(blocks) if _is_in(name, block)), None)
        latest = max(latest, block) if block is not None else latest
        position[name] = latest if block is None else block
    # A module around blocks holds parameters that are used before them.
    stages: dict[int, set[int]] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
        stages.setdefault(id(parameter), set()).add(cut.stage_of(position[name.rpartition(".")[0]]))
    return Cut(cut.blocks, cut.starts, {first[key]: tuple(sorted(found)) for key, found in stages.items()})


def take_away(model: nn.Module, cut: Cut, stages: Sequence[int], dtype: torch.dtype | None = None) -> None:
    """Leave the model the parameters, and buffers that are state, of some stages only.

    In the places of the others there are zeros that take no memory, with which what comes before a stage's blocks can
    be computed, in ``dtype`` if there is one to compute in; blocks of other stages are not called.
    """
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {name for name, needing in cut.stages.items() if any(stage in needing for stage in stages)}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and by_id[id(parameter)] not in kept:
                del module._parameters[name]
                narrow = dtype is not None and parameter.is_floating_point()
                zero = torch.zeros((), dtype=dtype if narrow else parameter.dtype)
                vars(module)[name] = zero.expand(parameter.shape)
        block = next((number for number, block in enumerate(cut.blocks) if _is_in(path, block)), None)
        if block is not None and cut.stage_of(block) not in stages:
            for name in [n for n in module._buffers if n not in module._non_persistent_buffers_set]:
                vars(module)[name] = module._buffers.pop(name)


def _is_in(name: str, around: str) -> bool:
    return name == around or not around or name.startswith(f"{around}.")


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def costs_of(model: nn.Module, blocks: Sequence[str]) -> list[float]:
    """What each block costs: its parameters, and those of what is computed around it."""
    cut = place_parameters(model, blocks, range(len(blocks)))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    costs = [0.0] * len(blocks)
    for name, needing in cut.stages.items():
        for block in needing:
            costs[block] += sizes[name]
    return costs
