"""A model that is a chain of layers, each called with what the one before returned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn


class Function(nn.Module):
    """A plain function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Any) -> Any:
        """Return the result of the function."""
        return self.function(inputs)


class Shared(nn.Module):
    """A layer that computes with a module that other layers have, too.

    Args:
        modules: by key; where the module has its name.
        key: of this one.
        function: from the module and the inputs to the outputs; None calls the module.
    """

    def __init__(self, modules: nn.ModuleDict, key: str, function: Callable[[Any, Any], Any] | None) -> None:
        super().__init__()
        vars(self)["_all"] = modules  # not as a child: each parameter has one name
        self.key, self.function = key, function

    @property
    def module(self) -> nn.Module:
        """Shared layer."""
        module: nn.Module = vars(self)["_all"][self.key]
        return module

    def forward(self, inputs: Any) -> Any:
        """Return the result of the function, or of the module."""
        return self.module(inputs) if self.function is None else self.function(self.module, inputs)


class Chain(nn.Module):
    """Layers that are called one after the other. It says so: no trace is needed to cut it into stages."""

    def __init__(self) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()  # those that several layers share, by key
        self.layers: list[str] = []  # names, in order: their numbers, under which they are children
        self.kinds: list[str] = []  # of each, the name of its class or function
        self.starts: Sequence[int] = (0,)  # the first layer of each stage, where it is cut into stages

    def cut(self, starts: Sequence[int]) -> None:
        """Let stages begin at these layers; layers that are recomputed together never span two."""
        self.starts = starts

    def add_layer(self, layer: nn.Module, kind: str) -> None:
        """Add one to the end."""
        # By its number, so that names in checkpoints do not depend on the stages.
        self.layers.append(str(len(self.layers)))
        self.kinds.append(kind)
        self.add_module(self.layers[-1], layer)

    def computes_with(self, number: int) -> nn.Module:
        """Return the module with the parameters of a layer."""
        layer = self.get_submodule(self.layers[number])
        return layer.module if isinstance(layer, Shared) else layer

    def users(self) -> Mapping[int, frozenset[int]]:
        """Return the numbers of the layers that compute with each module inside, by its ``id``."""
        numbers_by_id: dict[int, set[int]] = defaultdict(set)
        for number, name in enumerate(self.layers):
            for module in (self.get_submodule(name), *self.computes_with(number).modules()):
                numbers_by_id[id(module)].add(number)
        return {key: frozenset(numbers) for key, numbers in numbers_by_id.items()}

    def groups(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield the first layer, and the one after the last, of groups of so many layers that do not span stages."""
        for start, stop in zip(self.starts, (*self.starts[1:], len(self.layers)), strict=True):
            for first in range(start, stop, size):
                yield first, min(first + size, stop)

    def forward(self, inputs: Any) -> Any:
        """Return the output of the last layer."""
        return self.run(0, len(self.layers), inputs)

    def run(self, first: int, stop: int, inputs: Any) -> Any:
        """Return the output of some layers."""
        for name in self.layers[first:stop]:
            inputs = self._modules[name](inputs)  # type: ignore[misc]
        return inputs
