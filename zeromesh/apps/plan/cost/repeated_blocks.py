"""Models with a stack of like blocks: a few of them are traced, and their costs stand for the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from zeromesh.apps.plan.cost.cost import CostSource, ModelCost, UnitCost
from zeromesh.shard.find_units import find_units

Signature = tuple[Any, ...]


@dataclass(frozen=True)
class RepeatedStack:
    """A stack of ``depth`` blocks whose kinds have a period, of which ``traced`` are enough."""

    path: str  # of the list of blocks
    depth: int
    begin: int  # first block of the first period
    period: int
    periods: int = 3  # in the short model; the first and the last may differ from those between them

    @property
    def traced(self) -> int:
        """Blocks of the short model."""
        return self.begin + self.periods * self.period + (self.depth - self.begin) % self.period

    @property
    def order(self) -> Iterator[int]:
        """Blocks of the short model that stand for those of the whole one, in their order."""
        middle = range(self.begin + self.period, self.begin + 2 * self.period)
        yield from range(middle.stop)
        for _ in range((self.depth - self.begin) // self.period - self.periods):
            yield from middle
        yield from range(middle.stop, self.traced)


@dataclass(frozen=True)
class RepeatedCost:
    """Cost of a model by that of a short one with the same kinds of blocks."""

    source: CostSource  # of the short model
    complete: CostSource  # where the short model runs otherwise
    stack: RepeatedStack

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.source.name

    def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
        """Return the cost of a micro-batch; ``context`` ranks share each sequence."""
        cost = self.source.at(micro_batch, sequence, context)
        pattern = re.compile(rf"(^|.*\.)({re.escape(self.stack.path)})\.(\d+)($|\..*)")
        matches = [pattern.fullmatch(unit.name) for unit in cost.units]
        places = [place for place, match in enumerate(matches) if match]
        blocks: dict[int, list[UnitCost]] = {}
        for unit, match in zip(cost.units, matches, strict=True):
            if match:
                blocks.setdefault(int(match[3]), []).append(unit)
        in_order = [*blocks] == [*range(self.stack.traced)] and places == [*range(places[0], places[-1] + 1)]
        if not (cost.exact and in_order):
            return self.complete.at(micro_batch, sequence, context)

        def renamed(unit: UnitCost, old: int, new: int) -> UnitCost:
            return replace(unit, name=unit.name.replace(f"{self.stack.path}.{old}", f"{self.stack.path}.{new}"))

        middle = [renamed(unit, old, new) for new, old in enumerate(self.stack.order) for unit in blocks[old]]
        # Such as what is named after the last block.
        rest = [renamed(unit, self.stack.traced - 1, self.stack.depth - 1) for unit in cost.units[places[-1] + 1 :]]
        return replace(cost, units=(*cost.units[: places[0]], *middle, *rest))


def shortened(config: Any, make: Callable[[Any], nn.Module]) -> tuple[Any, RepeatedStack] | None:
    """Return a configuration of transformers with fewer blocks of the same kinds, and what they stand for.

    None stands for a model that has no single stack of like blocks, or a short one. ``make`` builds a model on the meta
    device.
    """
    depth = getattr(config, "num_hidden_layers", None)
    if not isinstance(depth, int) or depth < 5:
        return None
    model = make(config)
    stacks = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if len(stacks) != 1:
        return None
    kinds = [*map(_signature, model.get_submodule(stacks[0]).children())]
    # The first adapter may stand behind products of the first block, so that tensors that blocks share, as the sines of
    # positions, are first saved by the second.
    first = int(not all(parameter.requires_grad for parameter in model.parameters()))
    begins = {period: max(first, _begin(kinds, period)) for period in range(1, depth // 3 + 1)}
    choices = [RepeatedStack(stacks[0], depth, begin, period) for period, begin in begins.items()]
    stack = min(choices, key=lambda choice: choice.traced)
    units = [name for name, _ in find_units(model)]
    while stack.traced < depth:
        short = deepcopy(config)
        for key, value in config.to_dict().items():
            if isinstance(value, list) and len(value) == depth:  # a kind for each block
                setattr(short, key, value[: stack.traced])
        short.num_hidden_layers = stack.traced
        few = make(short)
        modules = dict(few.named_modules())
        same = [*map(_signature, few.get_submodule(stack.path).children())] == kinds[: stack.traced]
        # A module is a unit of the engine by its share of the model.
        if [name for name, _ in find_units(few)] == [name for name in units if name in modules]:
            return (short, stack) if same and _around(few, stack.path) == _around(model, stack.path) else None
        stack = replace(stack, periods=2 * stack.periods)
    return None


def _begin(kinds: list[Signature], period: int) -> int:
    """Return the first block from which on each is like the one a period later."""
    unlike = [place for place in range(len(kinds) - period) if kinds[place] != kinds[place + period]]
    return unlike[-1] + 1 if unlike else 0


def _signature(block: nn.Module) -> Signature:
    """Return all by which a block's computation can differ from that of another one."""
    parts: list[Any] = []
    for name, module in block.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, str | int | float | bool)}
        plain.pop("layer_idx", None)
        parts.append((name, type(module), tuple(sorted(plain.items()))))
    return (*parts, *((name, tuple(p.shape)) for name, p in block.named_parameters()))


def _around(model: nn.Module, path: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of the parameters outside of the stack."""
    return [(name, tuple(p.shape)) for name, p in model.named_parameters() if not name.startswith(f"{path}.")]
