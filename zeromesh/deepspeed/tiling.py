"""``TiledLinear`` with DeepSpeed's arguments and attributes, over the tiles of ``zeromesh.zero.TiledLinear``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from zeromesh.base.tiled import Tile
from zeromesh.deepspeed.parameters import GatheredParameters


def _bounds(size: int, parts: int, name: str) -> list[int]:
    """Return where parts begin and end; raise RuntimeError if one would be empty."""
    if not 0 < parts <= size:
        raise RuntimeError(f"TiledLinear: {name} is {parts}; {size} features can be cut into 1 to {size} parts")
    return [0, *accumulate(size // parts + (part < size % parts) for part in range(parts))]


class TiledLayer(nn.Module):
    """Linear layer in ``out_splits`` x ``in_splits`` tiles; the last one of each row has the bias.

    Args:
        in_features, out_features, bias: as in ``nn.Linear``.
        in_splits, out_splits: parts of inputs and outputs.
        input_is_already_split: ``forward`` takes the parts of the input as a list.
        combine_out_splits: ``forward`` returns one tensor; False: the parts as a list.
        linear_cls: class of the tiles, made as ``nn.Linear`` is.
        init_linear: layer whose values are copied.
        kwargs: more arguments of ``linear_cls``.

    Attributes:
        linears: tiles by part of the outputs, then of the inputs.
        in_parts, out_parts: where parts begin, and the end of the last.

    Raises:
        RuntimeError: there would be empty tiles.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., Any] = nn.Linear,
        init_linear: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = _bounds(in_features, in_splits, "in_splits")
        self.out_parts = _bounds(out_features, out_splits, "out_splits")

        def make(inputs: int, outputs: int, last: bool) -> Any:
            if linear_cls is nn.Linear:  # each is a unit of its own, whose initial values are those of the whole layer
                return Tile(inputs, outputs, bias and last, in_features, **kwargs)
            return linear_cls(inputs, outputs, bias=bias and last, **kwargs)

        columns = list(pairwise(self.in_parts))
        self.linears: Any = nn.ModuleList(
            nn.ModuleList(make(right - left, bottom - top, right == in_features) for left, right in columns)
            for top, bottom in pairwise(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """Return the outputs."""
        if not self.input_is_already_split:
            input_ = input_.split([right - left for left, right in pairwise(self.in_parts)], -1)
        rows = [self._sum([tile(part) for tile, part in zip(row, input_, strict=True)]) for row in self.linears]
        return self._join(rows)

    def _sum(self, outputs: list[Any]) -> Any:
        """Return the sum of what the tiles of a row return."""
        total, *others = outputs
        for output in others:
            total = total + output
        return total

    def _join(self, rows: list[Any]) -> Any:
        return torch.cat(rows, -1) if self.combine_out_splits else rows

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """Take the values of a whole layer. Collective if its parameters, or these, are in parts.

        Raises:
            AssertionError: its sizes are others, or one of the two has no bias.
        """
        theirs = (other.in_features, other.out_features, other.bias is not None)
        if theirs != (self.in_features, self.out_features, self.use_bias):
            ours = (self.in_features, self.out_features, self.use_bias)
            raise AssertionError(f"copy_params_from: the layer has inputs, outputs and bias {theirs}, this one {ours}")
        with GatheredParameters(list(other.parameters())):
            for row, (top, bottom) in zip(self.linears, pairwise(self.out_parts), strict=True):
                for tile, (left, right) in zip(row, pairwise(self.in_parts), strict=True):
                    with GatheredParameters(list(tile.parameters()), modifier_rank=0):
                        tile.weight.copy_(other.weight[top:bottom, left:right])
                        if tile.bias is not None:
                            tile.bias.copy_(other.bias[top:bottom])


class TiledLayerReturningBias(TiledLayer):
    """The same for tiles that return the output and the bias, which is not added; it returns both, too."""

    def _sum(self, outputs: list[Any]) -> Any:
        return super()._sum([output for output, _ in outputs]), outputs[-1][1]

    def _join(self, rows: list[Any]) -> Any:
        outputs, biases = zip(*rows, strict=True)
        joined = super()._join(list(outputs))
        return joined, super()._join(list(biases)) if self.use_bias else None
