"""A model that is a chain of layers, each called with what the one before returned. It says so: no trace is needed.

A layer may be a plain function, or compute with a module that other layers have, too. Each is a child of the model
under its number, and has its parameters there, but for shared ones.
"""

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
    """A layer that computes with a module that other layers have, too, and which is not its child.

    Args:
        modules: by key; where the module has its name.
        key: of this one.
        function: from the module and the inputs to the outputs; None calls the module.
    """

    def __init__(self, modules: nn.ModuleDict, key: str, function: Callable[[Any, Any], Any] | None) -> None:
        super().__init__()
        vars(self)["_all"] = modules
        self.key, self.function = key, function

    @property
    def module(self) -> nn.Module:
        """The shared layer."""
        module: nn.Module = vars(self)["_all"][self.key]
        return module

    def forward(self, inputs: Any) -> Any:
        """Return the result of the function, or of the module."""
        return self.module(inputs) if self.function is None else self.function(self.module, inputs)


class Chain(nn.Module):
    """Layers that are called one after the other.

    Attributes:
        tied_modules: those that several layers share, by key.
        layers: names of the layers, in order.
        kinds: of each, the name of its class or function.
        starts: the first layer of each stage, where it is cut into stages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self.layers: list[str] = []
        self.kinds: list[str] = []
        self.starts: Sequence[int] = (0,)

    def cut(self, starts: Sequence[int]) -> None:
        """Let stages begin at these layers; layers that are recomputed together never span two."""
        self.starts = starts

    def add_layer(self, layer: nn.Module, kind: str) -> None:
        """Add one to the end."""
        self.layers.append(str(len(self.layers)))
        self.kinds.append(kind)
        self.add_module(self.layers[-1], layer)

    def computes_with(self, number: int) -> nn.Module:
        """The module with the parameters of a layer."""
        layer = self.get_submodule(self.layers[number])
        return layer.module if isinstance(layer, Shared) else layer

    def users(self) -> Mapping[int, frozenset[int]]:
        """Return the numbers of the layers that compute with each module inside, by its ``id``."""
        found: dict[int, set[int]] = defaultdict(set)
        for number, name in enumerate(self.layers):
            for module in (self.get_submodule(name), *self.computes_with(number).modules()):
                found[id(module)].add(number)
        return {key: frozenset(numbers) for key, numbers in found.items()}

    def groups(self, size: int) -> Iterator[tuple[int, int]]:
        """The first layer, and the one after the last, of groups of so many layers that do not span stages."""
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
