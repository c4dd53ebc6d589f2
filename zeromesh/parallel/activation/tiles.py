"""Tiles over tokens: what computes each token by itself computes few at a time, forward and backward.

Of the activations inside, such as those between the two products of an MLP, those of one tile live at a time; inputs
and outputs stay whole. Source: Bekman et al., "Arctic Long Sequence Training", 2025 (TiledMLP).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zeromesh.base.dry.meta_values import META
from zeromesh.base.dry.model_copy import code_of
from zeromesh.base.in_place import version
from zeromesh.base.modes import modes_of, set_modes
from zeromesh.parallel.activation.checkpoint import checkpoint_parts
from zeromesh.parallel.activation.choices import chooses
from zeromesh.parallel.follow.split_activation import SplitActivation
from zeromesh.parallel.follow.token_check import TokenCheck
from zeromesh.parallel.follow.tokens import MixesTokens

_log = logging.getLogger("zeromesh")

SMALLEST = 1024
"""Least number of tokens of a tile with "width": smaller products take longer for each token."""

_PARTS = 1 << 14  # of the checked sequence, so that code that asks for its length is given a short and a long one
_LENGTHS = (24, 40, 56, 88, 104)  # of a part; one that is no size of a parameter
_BATCHES = ((1,), (3,), (), (1, 2))  # sizes of the dims before the tokens; code must compute with the first two


@dataclass(frozen=True)
class Tiled:
    """Arguments of a module that is computed in tiles: ``count`` tensors, the tokens of which are so wide.

    Attributes:
        dims: numbers of dims with which the module is known to compute each token by itself.
    """

    count: int
    width: int
    dims: frozenset[int]


class TokenApartness(TokenCheck):
    """Proof that a module's result has, for each token of its arguments, what is of this token alone.

    Attributes:
        reason: why there is none; "" if the module computes each token by itself.
        width: of a token's entries.
        count: number of its arguments, tensors of shape (batch, tokens, width).
        dims: numbers of dims of its arguments with which this holds; the tokens are before the width.
    """

    def __init__(self, module: nn.Module) -> None:
        self.reason, self.width, self.count = "", 0, _required_arguments(module)
        self.dims: frozenset[int] = frozenset()
        super().__init__(module, _PARTS, attends=False)
        if not self.reason and not self.count:
            self.reason = "its forward takes other arguments than one or two tensors"
        if not self.reason:
            self._try(module)

    def _tell(self, error: Exception) -> None:
        self.reason = f"its code cannot be followed ({type(error).__name__}: {str(error).partition(chr(10))[0]})"

    def _try(self, module: nn.Module) -> None:
        """Look for a width of tokens with which the code runs, and check it there, in training and out of it."""
        for width in _widths(module):
            self.reason, followed = self._reason(module, width, _BATCHES[0])
            if not self.reason:
                self.reason, followed = self._reason(module, width, _BATCHES[1])
            if self.reason and followed:
                return
            if not self.reason:
                more = {len(batch) + 2 for batch in _BATCHES[2:] if not self._reason(module, width, batch)[0]}
                self.reason, self.width, self.dims = "", width, frozenset({3, *more})
                return

    def _reason(self, module: nn.Module, width: int, batch: tuple[int, ...]) -> tuple[str, bool]:
        """Return why tokens so wide are not known to be apart, or "", and whether the code was followed until then."""
        modes = modes_of(module.modules())
        try:
            for mode in (None, True, False):
                if {*modes.values()} == {mode}:
                    continue
                set_modes(modes if mode is None else dict.fromkeys(modes, mode))
                self.reason = ""
                try:
                    reason = self._run(module, width, batch)
                except MixesTokens as error:
                    return str(error), True
                if reason:
                    return reason, not self.reason
        finally:
            set_modes(modes)
        return "", True

    def _run(self, module: nn.Module, width: int, batch: tuple[int, ...]) -> str:
        sizes = {size for parameter in module.parameters() for size in parameter.shape}
        part = next((n for n in _LENGTHS if not sizes & {n, n // 2}), _LENGTHS[0])
        length, dim = part * _PARTS, len(batch)
        reasons: list[str] = []

        def call(model: nn.Module, run: Any) -> None:
            sequence = torch.empty(*batch, length, width, dtype=self._dtype, device=META)
            inputs = [run.spread(sequence, dim, length, part) for _ in range(self.count)]
            before = _state(model, inputs)
            output = model(*inputs)
            after = _state(model, inputs)
            changed = [name for name in before if after[name] != before[name]]
            if changed:
                reasons.append(f"it changes {changed[0]}, which it would in each tile and in the recomputation of it")
            elif not run.is_plain:
                reasons.append(_wrong(output, dim, width))

        with torch.enable_grad():
            self.begin({"sequence": str((width, batch))}, call)
            self.end(completed=False)
        return self.reason or next(filter(None, reasons), "" if reasons else "its code cannot be followed")


def _state(module: nn.Module, inputs: list[Tensor]) -> dict[str, Any]:
    """Return what a forward may change, by what it is."""
    with torch._C.DisableTorchFunction():
        versions: dict[str, Any] = {f"its buffer {name}": (id(x), version(x)) for name, x in module.named_buffers()}
        return versions | {"its argument": [*map(version, inputs)], "an attribute": code_of(module, values=False)}


def _wrong(output: Any, dim: int, width: int) -> str:
    if not isinstance(output, SplitActivation) or output.ndim != dim + 2 or output.split_dim.dim != dim:
        return "its result is not one tensor with an entry for each token"
    return (
        "" if output.shape[-1] == width else f"its result has {output.shape[-1]} entries a token, its argument {width}"
    )


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
        code = code_of(module)
        if code not in proofs:
            proofs[code] = TokenApartness(module)
        proof = proofs[code]
        reason = "it chooses experts for its tokens, which its balance compares" if routes else proof.reason
        if not reason:
            tiled_modules[name] = Tiled(proof.count, proof.width, proof.dims)
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
        module.forward = _InTiles(module, name, tiled, size)


class _InTiles:
    """Forward of a module that computes a tile of tokens at a time, as long as its code is that which was checked."""

    def __init__(self, module: nn.Module, name: str, tiled: Tiled, tokens: int) -> None:
        self._forward, self._module, self._name, self._tiled, self._tokens = module.forward, module, name, tiled, tokens
        self._code = code_of(module, values=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result."""
        keys, tensors = tuple(kwargs), (*args, *kwargs.values())
        tiled, kind = self._tiled, type(self._module).__name__
        shapes = {x.shape if isinstance(x, Tensor) else None for x in tensors}
        first: Any = next(iter(tensors), None)
        if len(tensors) != tiled.count or len(shapes) != 1 or first is None or first.ndim not in tiled.dims:
            raise ValueError(
                f"{self._name} ({kind}) is called with other arguments than those that were checked, {tiled.count} "
                f"tensor(s) of shape (batch, tokens, width), with {' or '.join(map(str, sorted(tiled.dims)))} dims: "
                "leave it out of tiling.modules, or set tiling.mlp to null"
            )
        dim = first.ndim - 2
        size = max(1, self._tokens // prod(first.shape[:dim]))
        if first.shape[dim] <= size:
            return self._forward(*args, **kwargs)
        now = code_of(self._module, values=False)
        if now != self._code and (parts := _deciding(now)) != (checked := _deciding(self._code)):
            _tell_changed(self._name, kind, next((part[0] for part in parts if part not in checked), ""))
            return self._forward(*args, **kwargs)
        call, modules = partial(self._of_tile, keys), list(self._module.modules())
        return torch.cat(checkpoint_parts(call, modules, tensors, lambda x: x.split(size, dim)), dim)

    def _of_tile(self, keys: tuple[str, ...], *tensors: Tensor) -> Any:
        begin = len(tensors) - len(keys)
        tensors = tuple(x.contiguous() for x in tensors)  # code may want views of what were whole sequences
        return self._forward(*tensors[:begin], **dict(zip(keys, tensors[begin:], strict=True)))


def _deciding(code: tuple[tuple[Any, ...], ...]) -> list[tuple[Any, ...]]:
    """Leave out what has no say in whether tokens are apart: own hooks, which are given all of them, and switches."""
    adapters = {kind for _, kind, *_ in code if kind.__module__.startswith("peft.")}
    switches = {"p": {nn.Dropout}, "_disable_adapters": adapters}
    return [
        (name, kind, [(key, value) for key, value in attributes if kind not in switches.get(key, ())], name and hooks)
        for name, kind, attributes, hooks in code
    ]


@cache
def _tell_changed(name: str, kind: str, part: str) -> None:
    _log.warning(
        f"hooks or attributes of {'.'.join(filter(None, (name, part)))} have changed since {name} ({kind}) was checked "
        "for tiles of tokens, so that it computes all tokens at once; change it before zeromesh.initialize"
    )
