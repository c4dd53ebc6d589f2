"""Tiles over tokens: what computes each token by itself computes few at a time, forward and backward.

Of the activations inside, such as those between the two products of an MLP, those of one tile live at a time; inputs
and outputs stay whole. Source: Bekman et al., "Arctic Long Sequence Training", 2025 (TiledMLP).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zeromesh.base.dry.meta_values import META
from zeromesh.parallel.activation.checkpoint import checkpoint
from zeromesh.parallel.activation.choices import chooses
from zeromesh.parallel.follow.split_activation import SplitActivation
from zeromesh.parallel.follow.token_check import TokenCheck
from zeromesh.parallel.follow.tokens import MixesTokens

SMALLEST = 1024
"""Least number of tokens of a tile with "width": smaller products take longer for each token."""

_PARTS = 2
_LENGTHS = (24, 40, 56, 88, 104)  # of the checked sequence; one that is no size of a parameter


@dataclass(frozen=True)
class Tiled:
    """Arguments of a module that is computed in tiles: ``count`` tensors, the tokens of which are so wide."""

    count: int
    width: int


class TokenApartness(TokenCheck):
    """Proof that a module's result has, for each token of its arguments, what is of this token alone.

    Attributes:
        reason: why there is none; "" if the module computes each token by itself.
        width: of a token's entries.
        count: number of its arguments, tensors of shape (batch, tokens, width).
    """

    def __init__(self, module: nn.Module) -> None:
        self.reason, self.width, self.count = "", 0, _required_arguments(module)
        super().__init__(module, _PARTS, attends=False)
        if not self.reason and not self.count:
            self.reason = "its forward takes other arguments than one or two tensors"
        if not self.reason:
            self._try(module)

    def _tell(self, error: Exception) -> None:
        self.reason = f"its code cannot be followed ({type(error).__name__}: {str(error).partition(chr(10))[0]})"

    def _try(self, module: nn.Module) -> None:
        """Look for a width of tokens with which the code runs, and check it there."""
        sizes = {size for parameter in module.parameters() for size in parameter.shape}
        length = next((n for n in _LENGTHS if not sizes & {n, n // _PARTS}), _LENGTHS[0])
        for width in _widths(module):
            self.reason = ""
            results: list[str] = []

            def call(
                model: nn.Module, run: Any, width: int = width, count: int = self.count, results: list[str] = results
            ) -> None:
                sequence = torch.empty(1, length, width, dtype=self._dtype, device=META)
                output = model(*(run.spread(sequence, 1, length, length // _PARTS) for _ in range(count)))
                if not run.is_plain:
                    results.append(_wrong(output, width))

            try:
                with torch.enable_grad():
                    self.begin({"width": str(width)}, call)
                    self.end(completed=False)
            except MixesTokens as error:
                self.reason = str(error)
                return
            if not self.reason:
                self.width = width
                self.reason = next(filter(None, results), "" if results else "its code cannot be followed")
                return


def _wrong(output: Any, width: int) -> str:
    if not isinstance(output, SplitActivation) or output.ndim != 3 or output.split_dim.dim != 1:
        return "its result is not one tensor with an entry for each token"
    return "" if output.shape[2] == width else f"its result has {output.shape[2]} entries a token, its argument {width}"


def _required_arguments(module: nn.Module) -> int:
    """Return the number of arguments that a forward must be given if it is 1 or 2, or 0."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    count = sum(p.default is p.empty and p.kind in kinds for p in parameters)
    return count if 1 <= count <= 2 else 0


def _widths(module: nn.Module) -> list[int]:
    """Return what tokens may be wide: sizes of the module's weights, those of the first layers first."""
    shapes = [parameter.shape for parameter in module.parameters() if parameter.ndim]
    return list(dict.fromkeys(size for shape in shapes[:6] for size in reversed(shape)))[:6]


def _is_expanding(module: nn.Module) -> bool:
    """Return whether a module has two products or more, so that there is something between them."""
    weights = [parameter for parameter in module.parameters() if parameter.ndim == 2]
    return len(weights) > 1 and type(module).forward is not nn.Module.forward and not isinstance(module, nn.Embedding)


def _kind(module: nn.Module) -> Any:
    """Return what modules with the same code and settings have in common."""
    plain = [
        (name, key, value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, bool | int | float | str)
    ]
    return type(module), repr(module), tuple((n, p.shape) for n, p in module.named_parameters()), tuple(plain)


def find_tiled(model: nn.Module, named: Iterable[tuple[str, nn.Module]] | None = None) -> dict[str, Tiled]:
    """Return the modules to compute in tiles, by name, none inside of another.

    Args:
        model: as it was built: code that was replaced cannot be followed.
        named: modules to take; None: all that treat tokens apart and have two products or more.

    Raises:
        ValueError: a named module is not known to compute each token by itself, with the file and line, or there is no
            module to take.
    """
    tiled_modules: dict[str, Tiled] = {}
    proofs: dict[Any, TokenApartness] = {}
    for name, module in model.named_modules() if named is None else named:
        if any(not outer or name.startswith(f"{outer}.") for outer in tiled_modules):
            continue
        if named is None and not (name and _is_expanding(module)):
            continue
        routes = chooses(module.modules())
        if routes and named is None:
            continue
        kind = _kind(module)
        if kind not in proofs:
            proofs[kind] = TokenApartness(module)
        proof = proofs[kind]
        reason = "it chooses experts for its tokens, which its balance compares" if routes else proof.reason
        if not reason:
            tiled_modules[name] = Tiled(proof.count, proof.width)
        elif named is not None:
            raise ValueError(
                f"tiling.modules has {name} ({type(module).__name__}), which cannot be computed in tiles of tokens: "
                f"{reason}; leave it out of tiling.modules, or write code that computes each token by itself"
            )
    if not tiled_modules:
        raise ValueError(
            f"tiling.mlp is set, but no module of {type(model).__name__} is known to compute each token by itself, "
            "with two products or more, and gives a result as wide as its argument; set tiling.mlp to null"
        )
    return tiled_modules


def tile_modules(model: nn.Module, tiled_modules: Mapping[str, Tiled], tokens: int | Literal["width"]) -> None:
    """Compute modules in tiles of so many tokens, in place; "width": as many as a token is wide, and ``SMALLEST``.

    Gradients of a parameter are summed over the tiles in autograd, and arrive once.
    """
    modules = dict(model.named_modules())
    for name, tiled in tiled_modules.items():
        module = modules.get(name)
        if module is None or next(module.parameters(), None) is None:
            continue  # it is of another stage
        size = max(SMALLEST, tiled.width) if tokens == "width" else tokens
        module.forward = partial(_in_tiles, module.forward, module, name, tiled.count, size)


def _in_tiles(
    forward: Callable[..., Any], module: nn.Module, name: str, count: int, tokens: int, /, *args: Any, **kwargs: Any
) -> Any:
    """Return the module's result, computed tile by tile."""
    keys, tensors = tuple(kwargs), (*args, *kwargs.values())
    shapes = {x.shape if isinstance(x, Tensor) else None for x in tensors}
    if len(tensors) != count or len(shapes) != 1 or tensors[0] is None or tensors[0].ndim < 2:
        raise ValueError(
            f"{name} ({type(module).__name__}) is called with other arguments than those that were checked, {count} "
            "tensor(s) of shape (batch, tokens, width): leave it out of tiling.modules, or set tiling.mlp to null"
        )
    first = tensors[0]
    dim = first.ndim - 2
    size = max(1, tokens // prod(first.shape[:dim]))
    if first.shape[dim] <= size:
        return forward(*args, **kwargs)
    tiles = zip(*(x.split(size, dim) for x in tensors), strict=True)
    # ``module`` shows the buffers, which a recomputation leaves alone.
    call = partial(_call, module, forward, keys)
    return torch.cat([checkpoint(call, *tile) for tile in tiles], dim)


def _call(module: nn.Module, forward: Callable[..., Any], keys: tuple[str, ...], /, *tensors: Tensor) -> Any:
    begin = len(tensors) - len(keys)
    tensors = tuple(x.contiguous() for x in tensors)  # code may want views of what were whole sequences
    return forward(*tensors[:begin], **dict(zip(keys, tensors[begin:], strict=True)))
