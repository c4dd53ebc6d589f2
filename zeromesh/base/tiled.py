"""Linear layers in tiles, each of which is fetched by itself: one that is larger than the device's memory trains.

Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", 2021, section
5.1.3, memory-centric tiling.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.base.substitution import has_hooks, own_computation

_TILE = re.compile(r"(.*?)tiles\.(\d+)\.(\d+)\.(weight|bias)$")


class Tile(nn.Linear):
    """A part of the inputs and outputs of a ``TiledLinear``; a unit of its own."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        fan_in: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # Before torch's own constructor, which draws the initial values.
        self._fan_in = fan_in
        super().__init__(inputs, outputs, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Draw the values as torch draws the whole layer's."""
        # The whole layer's inputs scale the initial values, or a tile would begin with larger ones.
        bound = 1 / math.sqrt(self._fan_in)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)


class TiledLinear(nn.Module):
    """Linear layer whose weight is in ``out_splits`` x ``in_splits`` tiles, never in memory all at once.

    Shapes are those of ``nn.Linear``: ``(..., in_features)`` to ``(..., out_features)``. Outputs of the tiles of a row
    are added from left to right.

    Args:
        in_features: width of the input, as in ``nn.Linear``.
        out_features: width of the output.
        bias: True adds a bias.
        in_splits: number of parts of the input; their sizes differ by one at the most.
        out_splits: number of parts of the output, as ``in_splits``.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Attributes:
        tiles: by part of the outputs, then of the inputs. The first of each row has the bias.

    Raises:
        ValueError: there would be empty tiles.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, splits, size in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= size:
                raise ValueError(
                    f"{name}_splits is {splits}; {name}_features = {size} can be cut into 1 to {size} parts"
                )
        self.in_features, self.out_features = in_features, out_features
        self.in_sizes, self.out_sizes = _sizes(in_features, in_splits), _sizes(out_features, out_splits)
        self.tiles: Any = nn.ModuleList(
            nn.ModuleList(
                Tile(inputs, outputs, bias and column == 0, in_features, device, dtype)
                for column, inputs in enumerate(self.in_sizes)
            )
            for outputs in self.out_sizes
        )

    @classmethod
    def of(cls, linear: nn.Linear, in_splits: int, out_splits: int) -> TiledLinear:
        """Return a layer that computes what ``linear`` does; the weights are copied, a tile at a time."""
        weight, bias = linear.weight, linear.bias
        sizes = linear.in_features, linear.out_features
        tiled = cls(*sizes, bias is not None, in_splits, out_splits, device="meta", dtype=weight.dtype)
        tiled.train(linear.training)
        for row, weights in zip(tiled.tiles, weight.detach().split(tiled.out_sizes), strict=True):
            for tile, part in zip(row, weights.split(tiled.in_sizes, 1), strict=True):
                tile.register_parameter("weight", nn.Parameter(part.clone(), weight.requires_grad))
        if bias is not None:
            for row, part in zip(tiled.tiles, bias.detach().split(tiled.out_sizes), strict=True):
                row[0].register_parameter("bias", nn.Parameter(part.clone(), bias.requires_grad))
        return tiled

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        parts = x.split(self.in_sizes, -1)
        rows = []
        for row in self.tiles:
            # From left to right: a fixed order makes sums equal on all runs.
            total = row[0](parts[0])  # the first tile of a row has the bias
            for tile, part in zip(row[1:], parts[1:], strict=True):
                total = total + tile(part)
            rows.append(total)
        return rows[0] if len(rows) == 1 else torch.cat(rows, -1)

    def extra_repr(self) -> str:
        """Return the sizes, as torch prints them."""
        return f"{self.in_features}, {self.out_features}, tiles={len(self.out_sizes)} x {len(self.in_sizes)}"


def tile_linears(model: nn.Module, most_elements: int) -> list[str]:
    """Put tiles in the place of every ``nn.Linear`` of a model whose weight has more elements; before ``initialize``.

    Outputs are cut first, and inputs where one output's row is too large. Layers of other classes, and those whose
    weights other modules share, stay as they are.

    Args:
        model: changed in place.
        most_elements: of the weight of a tile.

    Returns:
        The names of the layers that are in tiles now.

    Raises:
        ValueError: ``most_elements`` is not positive, or such a layer has no values yet: ``TiledLinear`` in the model's
            own code makes tiles one by one.
    """
    if most_elements < 1:
        raise ValueError(f"most_elements is {most_elements}; a tile has at least one element")
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    tiled_names = []
    for name, module in list(model.named_modules()):
        # A subclass may compute something else, hooks are the module's own, and a shared weight is read by others.
        if not isinstance(module, nn.Linear) or own_computation(module, nn.Linear) or has_hooks(module):
            continue
        if module.weight.numel() <= most_elements or users[id(module.weight)] > 1:
            continue
        if module.weight.is_meta:
            raise ValueError(
                f"{name or 'the model'} has no values yet, which tiles are cut from; use TiledLinear in it"
            )
        if not name:
            raise ValueError("the model itself is a linear layer, which cannot be replaced in place; use TiledLinear")
        inputs, outputs = module.in_features, module.out_features
        # Outputs are cut first, and inputs where one output's row is too large: sums over tiles cost more.
        in_splits = -(-inputs // most_elements)
        width = -(-inputs // in_splits)
        tiled = TiledLinear.of(module, in_splits, min(outputs, -(-outputs // max(1, most_elements // width))))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, tiled)
        tiled_names.append(name)
    return tiled_names


def join_tiles(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's state with whole weights, under the names that they had before they were in tiles."""
    joined: dict[str, Tensor] = {}
    parts: dict[str, dict[tuple[int, int], Tensor]] = {}
    for name, value in state.items():
        match = _TILE.fullmatch(name)
        if match is None:
            joined[name] = value
            continue
        layer, row, column, kind = match.groups()
        whole_name = layer + kind
        joined.setdefault(whole_name, value)  # which keeps the place in the order
        parts.setdefault(whole_name, {})[int(row), int(column)] = value
    for whole_name, tiles in parts.items():
        rows = sorted({row for row, _ in tiles})
        joined[whole_name] = torch.cat([_row(tiles, row) for row in rows])
    return joined


def _row(tiles: Mapping[tuple[int, int], Tensor], row: int) -> Tensor:
    row_tiles = [tiles[key] for key in sorted(tiles) if key[0] == row]
    return row_tiles[0] if len(row_tiles) == 1 else torch.cat(row_tiles, 1)


def _sizes(size: int, parts: int) -> Sequence[int]:
    return [size // parts + (number < size % parts) for number in range(parts)]
