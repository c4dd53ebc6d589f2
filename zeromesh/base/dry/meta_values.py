"""Values of small meta tensors: ids, positions and masks, on which a model's forward may branch.

Beside such a tensor lies a real one, and what is done to the first is done to the second. Activations have no values.
Where a model chooses experts by them, the choice is made up: each expert gets as many tokens as the others. Where code
asks for another value, a run may have a guess, which stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

META = torch.device("meta")

MOST = 1 << 20  # elements of an integer tensor that has values
MOST_FLOATS = 1 << 14  # of one of floating-point numbers, such as angles of positions
FIRST_ID, IDS = 3, 5  # ids of inputs that have no values: small, and none of the usual special tokens

LISTED = 16  # elements of an index that may be written as a list

_NAME = "_zeromesh_value"
_aten = torch.ops.aten
# Choices by activations, and the position of the indices among the results.
_CHOICES = {_aten.topk: 1, _aten.argmax: 0, _aten.sort: 1, _aten.argsort: 0, _aten.max: 1, _aten.multinomial: 0}
_RANDOM = ("rand", "bernoulli", "multinomial", "normal", "dropout", "uniform", "exponential", "empty")
# Their results, or the shapes of these, depend on values.
_OF_VALUES = (
    _aten._local_scalar_dense,
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.bincount,
)
_INDEXED = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index)


def value_of(tensor: Any) -> Tensor | None:
    """Return the values of a tensor; None where they are not known."""
    if not isinstance(tensor, Tensor):
        return None
    values: Tensor | None = tensor.__dict__.get(_NAME) if tensor.is_meta else tensor.detach()
    return values


def on_meta(tensor: Tensor, dtype: torch.dtype | None = None, valued: bool = False) -> Tensor:
    """Return a tensor without memory, in another dtype if it has fractions; ``valued``: with values."""
    dtype = dtype if tensor.is_floating_point() else None
    meta_tensor = torch.empty_like(tensor, device=META, dtype=dtype, requires_grad=tensor.requires_grad)
    return give(meta_tensor, copied_value(tensor)) if valued else meta_tensor


_valued = partial(on_meta, valued=True)


def copied_value(tensor: Tensor) -> Tensor | None:
    """Return a copy of a tensor's values, as code may write to it; None if it has none, or too many."""
    value = value_of(tensor) if _is_small(tensor) else None
    return None if value is None else value.to("cpu", copy=True)


def give(tensor: Tensor, value: Tensor | None) -> Tensor:
    """Give a meta tensor values, unless there are too many; return it."""
    if value is not None and tensor.is_meta and _is_small(value):
        tensor.__dict__[_NAME] = value
    else:
        tensor.__dict__.pop(_NAME, None)
    return tensor


def invented(tensor: Tensor, name: str) -> Tensor | None:
    """Return values of an input that has none: masks are open, and ids small."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() > MOST:
        return None
    if tensor.dtype == torch.bool or "mask" in name:
        return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
    ids = torch.arange(tensor.numel(), device="cpu") % IDS + FIRST_ID
    return ids.to(tensor.dtype).reshape(tensor.shape)


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (MOST_FLOATS if tensor.is_floating_point() or tensor.is_complex() else MOST)


@contextmanager
def literals() -> Iterator[None]:
    """Let ``torch.tensor`` remember the numbers that it is called with, and ``tolist`` return them."""
    plain, plain_list = torch.tensor, Tensor.tolist

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        result = plain(data, *args, **kwargs)
        return give(result, plain(data, **{**kwargs, "device": "cpu"})) if result.is_meta else result

    def tolist(tensor: Tensor) -> Any:
        value = value_of(tensor)
        return plain_list(tensor if value is None else value)

    with patch.object(torch, "tensor", tensor), patch.object(Tensor, "tolist", tolist):
        yield


class KnownValues:
    """Values of the tensors of one run; ``guess`` stands for those that are not known, unless it is None."""

    def __init__(self, guess: bool | None = None) -> None:
        self._guess = guess
        self.balanced = self.guessed = False  # whether a choice was made up, and whether the guess was taken

    def before(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any, tuple[Any, ...]]:
        """Return whether an operator is done, its result, and the arguments for torch if it is not."""
        packet = func._overloadpacket
        to_cpu = packet is _aten._to_copy and torch.device(kwargs.get("device") or META).type == "cpu"
        if to_cpu and (value := value_of(args[0])) is not None:
            return True, func(value, **kwargs), args
        if packet in _OF_VALUES and (values := _all(args)) is not None:
            return True, tree_map_only(Tensor, _valued, func(*values, **_on_cpu(kwargs))), args
        if packet in _GUESSES and self._guess is not None and args[0].is_meta:
            self.guessed = True
            return True, _GUESSES[packet](args[0], self._guess), args
        if packet in _INDEXED:
            return False, None, (args[0], self._positions(args[1]), *args[2:])
        return False, None, args

    def after(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Do to the values what an operator did to tensors."""
        packet = func._overloadpacket
        results = result if isinstance(result, tuple | list) else (result,)
        written = args[0] if func._schema.is_mutable and args else None
        if any(isinstance(x, Tensor) and not x.is_meta for x in (written if isinstance(written, list) else (written,))):
            return  # a tensor outside of the model, which the operator has written to
        if packet in _CHOICES and value_of(args[0]) is None:
            indices = next(iter(results[_CHOICES[packet] :]), None)
            if isinstance(indices, Tensor) and indices.numel() <= MOST and args[0].ndim:
                self.balanced = True
                order = torch.arange(indices.numel(), device="cpu") % max(args[0].shape[-1], 1)
                give(indices, order.reshape(indices.shape).to(indices.dtype))
            return
        small = all(not isinstance(x, Tensor) or not x.is_meta or _is_small(x) for x in results)
        # Operators of others than torch may do more than compute, as those that send messages.
        computes = func.namespace == "aten" and not any(word in packet.__name__ for word in _RANDOM)
        values = _all(args) if small and computes else None
        named = None if values is None else _all(tuple(kwargs.values()))
        if values is None or named is None:
            if func._schema.is_mutable and args and isinstance(args[0], Tensor) and args[0].is_meta:
                args[0].__dict__.pop(_NAME, None)
            return
        try:
            real = func(*values, **_on_cpu(dict(zip(kwargs, named, strict=True))))
        except (RuntimeError, NotImplementedError, IndexError):
            return
        for tensor, value in zip(results, real if isinstance(real, tuple | list) else (real,), strict=True):
            if isinstance(tensor, Tensor) and isinstance(value, Tensor):
                give(tensor, value)

    def _positions(self, indices: Any) -> list[Any]:
        """Return indices with masks as positions, which have a shape; the guess for an unknown mask is one."""
        positions: list[Any] = []
        for index in indices:
            value = value_of(index)
            is_mask = isinstance(index, Tensor) and index.dtype is torch.bool
            if value is None and index is not None and index.numel() <= LISTED and not is_mask:
                # A list of numbers, which no operator has made. Any others choose as many entries.
                give(index, torch.zeros(index.shape, dtype=index.dtype, device="cpu"))
            if value is not None and value.dtype is torch.bool:
                positions += [_valued(position) for position in value.nonzero(as_tuple=True)]
            elif is_mask and self._guess is not None:
                positions += [index.new_empty(1, dtype=torch.long)] * index.ndim
            else:
                positions.append(index)
        return positions


def _all(values: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return arguments with values in place of tensors; None if one has none."""
    arguments: list[Any] = []
    for value in values:
        if isinstance(value, torch.device):
            argument: Any = torch.device("cpu")
        elif isinstance(value, tuple | list) and any(isinstance(item, Tensor) for item in value):
            argument = None if (inner := _all(tuple(value))) is None else list(inner)
        else:
            argument = value_of(value) if isinstance(value, Tensor) else value
        if argument is None and value is not None:
            return None
        arguments.append(argument)
    return tuple(arguments)


def _on_cpu(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}


def _number(tensor: Tensor, guess: bool) -> bool | int | float:
    return guess if tensor.dtype is torch.bool else float(guess) if tensor.is_floating_point() else int(guess)


# What a guess makes of the results of operators that lack values.
_GUESSES: dict[Any, Callable[[Tensor, bool], Any]] = {
    _aten._local_scalar_dense: _number,
    _aten.nonzero: lambda tensor, guess: tensor.new_empty((1, tensor.ndim), dtype=torch.long),
    _aten.equal: lambda tensor, guess: guess,
}
