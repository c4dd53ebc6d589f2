"""Rules for products of parts of activations: linear layers, matrices, attention, sums over letters."""

from __future__ import annotations

from dataclasses import replace
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from zeromesh.parallel.follow.split_activation import SplitActivation, SplitDim, part_of, whole
from zeromesh.parallel.follow.split_rules import (
    Args,
    Kwargs,
    as_parts,
    beside,
    is_split,
    needs_gradient,
    rule,
    with_copies,
)


@rule("linear")
def _linear(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if x.split_dim.dim == x.ndim - 1:
        return NotImplemented
    return with_copies(func, args, kwargs, x)


@rule("matmul", "bmm", "mm", "__matmul__", anywhere=True)
def _matmul(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if kwargs or len(args) != 2:
        return NotImplemented
    if args[1].ndim == 1 and is_split(args[0]) and args[0].split_dim.dim < args[0].ndim - 1:
        return with_copies(func, args, kwargs, args[0])  # of rows with a vector
    if min(one.ndim for one in args) < 2:
        return NotImplemented
    parts = [one for one in args if isinstance(one, SplitActivation)]
    axis, split_dim = parts[0].axis, parts[0].split_dim
    places = [one.split_dim.dim - one.ndim for one in parts]
    if len(parts) == 2:
        same = parts[0].split_dim.sections == parts[1].split_dim.sections
        if places == [-1, -2] and same:
            return axis.sum(func(*map(part_of, args)))
        if not same or places[0] != places[1] or places[0] > -3:
            # The one over whose split dim the product sums, else the smaller one.
            sums = places[1] == -2 or (places[0] != -1 and args[0].numel() > args[1].numel())
            return _matmul(func, tuple(whole(one) if n == sums else one for n, one in enumerate(args)), kwargs)
    place = places[0]
    if len(parts) == 1 and place == (-1 if is_split(args[0]) else -2):
        return NotImplemented  # the sum would be over the split dim

    def own(one: Tensor) -> Tensor | None:
        if is_split(one):
            return one
        if place > -3:
            return axis.copy(one) if needs_gradient(one) else one
        return beside(one, place, split_dim, axis)

    given = [own(one) for one in args]
    if any(one is None for one in given):
        return NotImplemented
    sources = frozenset().union(*(one.split_dim.sources for one in parts))
    ndim = max(one.ndim for one in args)
    return as_parts(func(*given), SplitDim(place % ndim, split_dim.sections, sources), axis)


@rule("scaled_dot_product_attention", anywhere=True)
def _attention(func: Any, args: Args, kwargs: Kwargs) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    query: Any = given.get("query")
    key, value, mask = (given.get(name) for name in names[1:4])
    if not is_split(query) or any(getattr(one, "ndim", 0) != query.ndim for one in (key, value)):
        return NotImplemented
    place, split_dim, axis = query.split_dim.dim - query.ndim, query.split_dim, query.axis
    if place > -3:
        return NotImplemented
    made: dict[str, Tensor] = {"query": query}
    sources = split_dim.sources
    for name, one in (("key", key), ("value", value), ("attn_mask", mask)):
        if isinstance(one, SplitActivation):
            # With fewer heads of keys than of queries, a rank has those of its queries if each dim is cut in one piece.
            pieces = max(len(one.split_dim.sections), len(split_dim.sections))
            fits = one.split_dim.sections == split_dim.sections or (pieces == 1 and given.get("enable_gqa"))
            if one.split_dim.dim - one.ndim != place or not fits:
                return NotImplemented
            made[name], sources = one, sources | one.split_dim.sources
        elif isinstance(one, Tensor):
            own = beside(one, place, split_dim, axis)
            if own is None:
                return NotImplemented
            made[name] = own
    now = {**given, **{name: part_of(one) for name, one in made.items()}}
    if given.get("dropout_p"):
        with axis.apart():
            result = func(**now)
    else:
        result = func(**now)
    return as_parts(result, replace(split_dim, sources=sources), axis)


@rule("einsum", anywhere=True)
def _einsum(func: Any, args: Args, kwargs: Kwargs) -> Any:
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str) or "->" not in equation:
        return NotImplemented
    terms, _, output = equation.replace(" ", "").partition("->")
    inputs = terms.split(",")
    if "..." in equation:
        # Dims that the dots stand for get letters of their own, the same in all terms, from the last one on.
        free = [letter for letter in ascii_letters if letter not in equation]
        hidden = [one.ndim - len(term) + 3 if "..." in term else 0 for term, one in zip(inputs, operands, strict=True)]
        names = ["".join(free[:count])[::-1] for count in (*hidden, max(hidden))]
        *inputs, output = (term.replace("...", name) for term, name in zip((*inputs, output), names, strict=True))
        equation = f"{','.join(inputs)}->{output}"
    parts = [(term, one) for term, one in zip(inputs, operands, strict=True) if isinstance(one, SplitActivation)]
    letters = {(term[one.split_dim.dim], one.split_dim.sections) for term, one in parts}
    if len(letters) != 1 or not all(isinstance(one, Tensor) for one in operands):
        return NotImplemented
    letter, sections = letters.pop()
    axis = parts[0][1].axis
    sources = frozenset().union(*(one.split_dim.sources for _, one in parts))
    own: list[Tensor] = []
    for term, one in zip(inputs, operands, strict=True):
        if isinstance(one, SplitActivation):
            if term.count(letter) > 1:
                return NotImplemented
            own.append(one)
        elif letter not in term:
            own.append(axis.copy(one) if needs_gradient(one) else one)
        elif one.shape[term.index(letter)] == 1:
            return NotImplemented  # it is broadcast, which only dots allow
        elif term.count(letter) == 1 and one.shape[term.index(letter)] == sum(sections):
            own.append(axis.take(one, SplitDim(term.index(letter), sections)))
        else:
            return NotImplemented
    result = func(equation, *own)
    if letter not in output:
        return axis.sum(part_of(result))
    return as_parts(result, SplitDim(output.index(letter), sections, sources), axis)


@rule("outer", "ger", anywhere=True)
def _outer(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return NotImplemented if kwargs or len(args) != 2 else _einsum(torch.einsum, ("i,j->ij", *args), {})


@rule("addmm", anywhere=True)
def _addmm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    # Of a bias and rows of activations, as in the linear layers of GPT-2; where it has more, the whole is gathered.
    if kwargs or len(args) != 3 or not is_split(args[1]) or args[1].split_dim.dim or args[0].ndim != 1:
        return NotImplemented
    return with_copies(func, args, kwargs, args[1])


@rule("conv1d", "conv2d", "conv3d")
def _convolution(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, given = args[0], dict(zip(("weight", "bias", "stride", "padding"), args[1:], strict=False)) | kwargs
    strides, pads = (given.get(name, default) for name, default in (("stride", 1), ("padding", 0)))
    alone = {*given["weight"].shape[2:]} == {1} and _all(strides, 1) and _all(pads, 0)
    if x.split_dim.dim == x.ndim - given["weight"].ndim + 1 or not (alone or x.split_dim.dim == 0):
        return NotImplemented
    return with_copies(func, args, kwargs, x)


def _all(value: Any, wanted: int) -> bool:
    return all(one == wanted for one in (value if isinstance(value, list | tuple) else (value,)))
