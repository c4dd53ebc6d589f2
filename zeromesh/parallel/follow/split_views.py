"""Rules for functions that view, cut and join parts of activations: what becomes of the dim that is split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from zeromesh.base.containers import map_tensors
from zeromesh.parallel.follow import split_products as split_products  # which registers rules
from zeromesh.parallel.follow.split_activation import Axis, SplitActivation, SplitDim, part_of, whole_shape
from zeromesh.parallel.follow.split_rules import Args, Kwargs, as_parts, beside, is_split, rule, same_dim

MOST_SECTIONS = 4096  # of one dim
_STRIDE = 1009


def _of_whole(func: Any, args: Args, kwargs: Kwargs) -> Tensor | None:
    """Return what a function gives of wholes, without memory; None where that is for the whole to say."""

    def plain(x: Tensor) -> Tensor:
        return torch.empty(whole_shape(x) if isinstance(x, SplitActivation) else x.shape, dtype=x.dtype, device="meta")

    try:
        shown: Tensor = func(*map_tensors(args, plain), **map_tensors(kwargs, plain))
    except (RuntimeError, TypeError):
        return None
    return shown if shown.dtype == args[0].dtype else None


@rule("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten")
def _view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, shown = args[0], _of_whole(func, args, kwargs)
    if shown is None or min(shown.shape, default=0) < 1:
        return NotImplemented
    moved = _reshaped(whole_shape(x), x.split_dim, shown.shape, x.axis)
    if moved is None:
        return NotImplemented
    sizes = [*shown.shape]
    sizes[moved.dim] //= x.axis.size
    views = func.__name__ in ("view", "view_as", "unflatten")
    try:
        part = (Tensor.view if views else Tensor.reshape)(x, sizes)
    except RuntimeError:  # strides of a part may not allow what those of the whole do
        part = x.reshape(sizes)
    if not views and part.data_ptr() == x.data_ptr() and copies(x, lambda tensor: tensor.reshape(shown.shape)):
        part = part.clone()
    return as_parts(part, moved, x.axis)


@rule("contiguous")
def _contiguous(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    part = func(*args, **kwargs)
    if part is x and copies(x, lambda tensor: func(tensor, *args[1:], **kwargs)):
        part = x.clone(memory_format=torch.contiguous_format)
    return as_parts(part, x.split_dim, x.axis)


def copies(x: SplitActivation, function: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a function of the whole gives new memory where that of the part may not."""
    # Only where the part has one entry is its stride not seen; the dims outside of it have larger ones in the whole.
    dim, ranks = x.split_dim.dim, x.axis.size
    if x.shape[dim] > 1:
        return False
    strides = [step * ranks if n != dim and step >= x.stride(dim) else step for n, step in enumerate(x.stride())]
    imitation = torch.empty_strided(whole_shape(x), strides, device="meta")
    return function(imitation)._base is None and function(imitation) is not imitation


def _reshaped(old: Sequence[int], split_dim: SplitDim, new: Sequence[int], axis: Axis) -> SplitDim | None:
    """Return the split_dim after a view; None where what ranks hold would not be parts of one dim."""
    before, sections = prod(old[: split_dim.dim]), split_dim.sections
    # The dim at this place covers the split one. ``outer``: how many entries of the dims before are merged into it.
    place = next(place for place in range(len(new)) if prod(new[: place + 1]) > before)
    outer, rest = divmod(before, prod(new[:place]))
    if rest or new[place] % outer:
        return None
    length = new[place] // outer
    new_sections = _scaled(sections, length, split_dim.size, axis.size)
    if new_sections is not None:
        merged = replace(split_dim, dim=place, sections=new_sections * outer)
        return merged if len(merged.sections) <= MOST_SECTIONS else None
    if outer == 1 and length > 1 and split_dim.size % length == 0:
        # Queries, keys and values get a dim of their own; each of them is split.
        each = split_dim.size // length
        if set(sections) == {each}:
            return _reshaped([*new[: place + 1], each, 1], SplitDim(place + 1, (each,), split_dim.sources), new, axis)
        axis.wish(split_dim, [each] * length)
    return None


def _scaled(sections: tuple[int, ...], length: int, size: int, ranks: int) -> tuple[int, ...] | None:
    """Return sections where a dim of a length takes in more dims, or is broken into several."""
    if length % size == 0:
        return tuple(section * (length // size) for section in sections)
    each = size // length
    if size % length or any(section % each or section // each % ranks for section in sections):
        return None
    return tuple(section // each for section in sections)


@rule(
    "permute",
    "transpose",
    "swapaxes",
    "swapdims",
    "movedim",
    "moveaxis",
    "t",
    "adjoint",
    ".mT",
    ".T",
    ".mH",
    ".H",
    "unsqueeze",
    "select",
)
def _permute(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    # The strides of this tensor tell its dims: only the one that is split has any.
    strides = [_STRIDE * (dim == x.split_dim.dim) for dim in range(x.ndim)]
    shown = func(torch.empty_strided(whole_shape(x), strides, device="meta"), *args[1:], **kwargs).stride()
    if _STRIDE not in shown:
        return NotImplemented
    return as_parts(func(*args, **kwargs), replace(x.split_dim, dim=shown.index(_STRIDE)), x.axis)


@rule("squeeze")
def _squeeze(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, shape = args[0], whole_shape(args[0])
    asked: Any = kwargs.get("dim", args[1] if len(args) > 1 else tuple(range(x.ndim)))
    dims = tuple(dim % x.ndim for dim in ((asked,) if isinstance(asked, int) else asked))
    dims = tuple(dim for dim in dims if shape[dim] == 1)
    return as_parts(
        func(x, dims), replace(x.split_dim, dim=x.split_dim.dim - sum(d < x.split_dim.dim for d in dims)), x.axis
    )


@rule("expand", "expand_as", "repeat")
def _expand(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, shown = args[0], _of_whole(func, args, kwargs)
    place = 0 if shown is None else x.split_dim.dim + shown.ndim - x.ndim
    if shown is None or shown.shape[place] != x.split_dim.size:
        return NotImplemented
    sizes = [size if dim != place else -1 for dim, size in enumerate(shown.shape)]
    part = func(*args, **kwargs) if func is Tensor.repeat else x.expand(sizes)
    return as_parts(part, replace(x.split_dim, dim=place), x.axis)


@rule("repeat_interleave")
def _repeat_interleave(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    count = kwargs.get("repeats", args[1] if len(args) > 1 else None)
    dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
    if not isinstance(count, int) or not isinstance(dim, int) or count < 1:
        return NotImplemented
    many = count if dim % x.ndim == x.split_dim.dim else 1
    sections = tuple(section * many for section in x.split_dim.sections)
    return as_parts(func(x, count, dim), replace(x.split_dim, sections=sections), x.axis)


@rule("chunk", "split", "split_with_sizes", "tensor_split")
def _split(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    how = args[1] if len(args) > 1 else next((value for key, value in kwargs.items() if key != "dim"), None)
    if isinstance(how, Tensor) or not isinstance(dim, int):
        return NotImplemented
    if dim % x.ndim != x.split_dim.dim:
        return as_parts(func(*args, **kwargs), x.split_dim, x.axis)
    shown = func(torch.empty(x.split_dim.size, device="meta"), how, 0)
    return _pieces(x, [len(piece) for piece in shown])


def _pieces(x: SplitActivation, lengths: Sequence[int]) -> Any:
    """Return consecutive pieces of the split dim, each of which is some sections."""
    split_dim = x.split_dim
    left, pieces, begin = list(split_dim.sections), [], 0
    for length in lengths:
        sections: list[int] = []
        while left and sum(sections) < length:
            sections.append(left.pop(0))
        if sum(sections) != length or not sections:
            x.axis.wish(split_dim, list(lengths))
            return NotImplemented
        count = length // x.axis.size
        pieces.append(
            as_parts(x.narrow(split_dim.dim, begin, count), replace(split_dim, sections=tuple(sections)), x.axis)
        )
        begin += count
    return tuple(pieces)


@rule("glu")
def _glu(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else -1)
    if dim % x.ndim != x.split_dim.dim:
        return as_parts(func(x, dim), x.split_dim, x.axis)
    halves = _pieces(x, [x.split_dim.size // 2] * 2)
    if halves is NotImplemented or halves[0].split_dim != halves[1].split_dim:
        return NotImplemented
    return as_parts(halves[0] * halves[1].sigmoid(), halves[0].split_dim, x.axis)


@rule("narrow")
def _narrow(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if len(args) != 4 or isinstance(args[2], Tensor):
        return NotImplemented
    dim, start, length = args[1] % x.ndim, args[2], args[3]
    if dim != x.split_dim.dim:
        return as_parts(func(*args), x.split_dim, x.axis)
    start += x.split_dim.size if start < 0 else 0
    return _slice(x, start, start + length) if length else NotImplemented


def _slice(x: SplitActivation, start: int, stop: int) -> Any:
    """Return a range of the split dim that is some sections."""
    size = x.split_dim.size
    lengths = [start, stop - start, size - stop]
    pieces = _pieces(x, [length for length in lengths if length > 0])
    return NotImplemented if pieces is NotImplemented else pieces[start > 0]


@rule("index_select", anywhere=True)
def _index_select(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not is_split(x):
        simple = dim == 0 and not kwargs and is_split(args[2])
        return _look_up(func, args, args[2]) if simple else NotImplemented
    if any(map(is_split, args[1:])) or dim is None or dim % x.ndim == x.split_dim.dim:
        return NotImplemented
    return as_parts(func(*args, **kwargs), x.split_dim, x.axis)


@rule("__getitem__", anywhere=True)
def _getitem(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, index = args
    if not is_split(x):
        return _look_up(func, (x, index), index) if is_split(index) and not is_of_flags(index) else NotImplemented
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(item is None or item is ... or type(item) in (int, slice) for item in items):
        return NotImplemented
    used = sum(type(item) in (int, slice) for item in items)
    if ... not in items:
        items.append(...)
    place = items.index(...)
    items[place : place + 1] = [slice(None)] * (x.ndim - used)
    dim, result_dim, slicing = 0, 0, slice(None)
    for number, item in enumerate(items):
        if item is None:
            result_dim += dim <= x.split_dim.dim
            continue
        if dim == x.split_dim.dim:
            if not isinstance(item, slice):
                return NotImplemented
            slicing, items[number] = item, slice(None)
            split_dim = replace(x.split_dim, dim=result_dim)
        elif dim < x.split_dim.dim:
            result_dim += isinstance(item, slice)
        dim += 1
    part = as_parts(func(x, tuple(items)), split_dim, x.axis)
    start, stop, step = slicing.indices(split_dim.size)
    if (start, stop, step) == (0, split_dim.size, 1):
        return part
    return _slice(part, start, stop) if step == 1 and stop > start else NotImplemented


@rule("gather", "scatter", "scatter_add", "scatter_", "scatter_add_", "take_along_dim", anywhere=True)
def _along_index(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Pick, or put, entries along another dim, by an index for each place of the dim that is split."""
    positions = [number for number, argument in enumerate(args) if type(argument) is int]
    dim = kwargs.get("dim", args[positions[0]] if positions else None)
    tensors = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)]
    parts = [tensor for tensor in tensors if isinstance(tensor, SplitActivation)]
    joint = same_dim(parts) if parts else None
    if joint is None or dim is None or len(parts) < len(tensors) or (dim - parts[0].ndim * (dim >= 0)) == joint[0]:
        return NotImplemented
    same = len({part.ndim for part in parts}) == 1
    return as_parts(func(*args, **kwargs), joint[1], parts[0].axis) if same else NotImplemented


@rule("__setitem__")
def _setitem(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, index, value = args
    view = _getitem(Tensor.__getitem__, (x, index), {})
    if not is_split(view):
        return NotImplemented
    if isinstance(value, Tensor):
        operand: Tensor | None = value
        if isinstance(value, SplitActivation):
            operand = None if same_dim([view, value]) is None else value
        else:
            operand = beside(value, view.split_dim.dim - view.ndim, view.split_dim, view.axis)
        if operand is None:
            return NotImplemented
        value = part_of(operand)
    part_of(view)[...] = value
    return None


def is_of_flags(x: Tensor) -> bool:
    """Return whether an index is a mask, which picks as many entries as it has values that are true."""
    return x.dtype in (torch.bool, torch.uint8)


@rule("embedding", "one_hot", anywhere=True)
def _embedding(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, arguments = args[0], dict(zip(("num_classes",), args[1:2], strict=False)) | kwargs
    if func is torch.nn.functional.embedding:
        # These count, or write to, what the indices of all ranks pick, and an axis of ranks sums no sparse gradients.
        sparse = kwargs.get("sparse") and torch.is_grad_enabled() and not x.axis.sums_sparse
        odd = len(args) > 3 or sparse or any(kwargs.get(name) for name in ("max_norm", "scale_grad_by_freq"))
    else:
        odd = arguments.get("num_classes", -1) < 0  # as many as the largest index says
    simple = is_split(x) and not odd and not any(map(is_split, (*args[1:], *kwargs.values())))
    return _look_up(func, args, x, kwargs) if simple else NotImplemented


def _look_up(func: Any, args: Args, x: SplitActivation, kwargs: Kwargs | None = None) -> Any:
    """Return the rows of a table, which all ranks have whole, by indices, of which each has a part."""

    def shared(value: Any) -> Any:
        is_table = isinstance(value, Tensor) and value is not x and value.requires_grad and torch.is_grad_enabled()
        return x.axis.copy(value) if is_table else value

    return as_parts(func(*map(shared, args), **(kwargs or {})), x.split_dim, x.axis)


@rule("cat", "concat", "concatenate", "stack", anywhere=True)
def _cat(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensors = args[0] if args else kwargs.get("tensors")
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not isinstance(tensors, list | tuple) or "out" in kwargs or not isinstance(dim, int):
        return NotImplemented
    parts = [tensor for tensor in tensors if isinstance(tensor, SplitActivation)]
    if not parts or len({tensor.ndim for tensor in tensors}) > 1:
        return NotImplemented
    first, stacks = parts[0], func is torch.stack
    dim %= first.ndim + stacks
    if not stacks and dim == first.split_dim.dim:
        if len(parts) < len(tensors) or any(part.split_dim.dim != dim for part in parts):
            return NotImplemented
        sections = tuple(section for part in parts for section in part.split_dim.sections)
        sources = frozenset().union(*(part.split_dim.sources for part in parts))
        return as_parts(func(tensors, dim), SplitDim(dim, sections, sources), first.axis)
    joint = same_dim(parts)
    if joint is None:
        return NotImplemented
    place, split_dim = joint
    operands = [tensor if is_split(tensor) else beside(tensor, place, split_dim, first.axis) for tensor in tensors]
    if any(operand is None or operand.shape[place] != first.shape[place] for operand in operands):
        return NotImplemented
    return as_parts(
        func(operands, dim), replace(split_dim, dim=split_dim.dim + (stacks and dim <= split_dim.dim)), first.axis
    )


@rule("pad")
def _pad(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    pads: Any = kwargs.get("pad", args[1] if len(args) > 1 else ())
    mode = kwargs.get("mode", args[2] if len(args) > 2 else "constant")
    place = 2 * (x.ndim - 1 - x.split_dim.dim)
    if mode != "constant" or any(pads[place : place + 2]):
        return NotImplemented
    return as_parts(func(*args, **kwargs), x.split_dim, x.axis)
