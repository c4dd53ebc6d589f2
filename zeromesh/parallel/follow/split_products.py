"""Rules for products of parts of activations: linear layers, matrices, attention, sums over letters."""

from __future__ import annotations

from contextlib import nullcontext
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
    if min(operand.ndim for operand in args) < 2:
        return NotImplemented
    parts = [operand for operand in args if isinstance(operand, SplitActivation)]
    axis, split_dim = parts[0].axis, parts[0].split_dim
    places = [part.split_dim.dim - part.ndim for part in parts]
    if len(parts) == 2:
        same = parts[0].split_dim.sections == parts[1].split_dim.sections
        if places == [-1, -2] and same:
            return axis.sum(func(*map(part_of, args)))
        if not same or places[0] != places[1] or places[0] > -3:
            # The one over whose split dim the product sums, else the smaller one.
            sums = places[1] == -2 or (places[0] != -1 and args[0].numel() >= args[1].numel())
            return _matmul(
                func, tuple(whole(operand) if n == sums else operand for n, operand in enumerate(args)), kwargs
            )
    place = places[0]
    if len(parts) == 1 and place == (-1 if is_split(args[0]) else -2):
        return NotImplemented  # the sum would be over the split dim

    def local_operand(operand: Tensor) -> Tensor | None:
        if is_split(operand):
            return operand
        if place > -3:
            return axis.copy(operand) if needs_gradient(operand) else operand
        return beside(operand, place, split_dim, axis)

    local_operands = [local_operand(operand) for operand in args]
    if any(operand is None for operand in local_operands):
        return NotImplemented
    sources = frozenset().union(*(part.split_dim.sources for part in parts))
    ndim = max(operand.ndim for operand in args)
    return as_parts(func(*local_operands), SplitDim(place % ndim, split_dim.sections, sources), axis)


@rule("scaled_dot_product_attention", anywhere=True)
def _attention(func: Any, args: Args, kwargs: Kwargs) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    query: Any = arguments.get("query")
    key, value, mask = (arguments.get(name) for name in names[1:4])
    if not is_split(query) or any(getattr(operand, "ndim", 0) != query.ndim for operand in (key, value)):
        return NotImplemented
    place, split_dim, axis = query.split_dim.dim - query.ndim, query.split_dim, query.axis
    if place == -2:
        return _attention_of_rows(func, arguments)
    if place > -3:
        return NotImplemented
    operands: dict[str, Tensor] = {"query": query}
    sources = split_dim.sources
    for name, operand in (("key", key), ("value", value), ("attn_mask", mask)):
        if isinstance(operand, SplitActivation):
            # With fewer heads of keys than of queries, a rank has those of its queries if each dim is cut in one piece.
            pieces = max(len(operand.split_dim.sections), len(split_dim.sections))
            fits = operand.split_dim.sections == split_dim.sections or (pieces == 1 and arguments.get("enable_gqa"))
            if operand.split_dim.dim - operand.ndim != place or not fits:
                return NotImplemented
            operands[name], sources = operand, sources | operand.split_dim.sources
        elif isinstance(operand, Tensor):
            # Whole keys may have fewer heads, too; of these a rank takes the ones that its queries read.
            heads = operand.shape[place] if arguments.get("enable_gqa") and name != "attn_mask" else 0
            is_grouped = place == -3 and heads % axis.size == 0 < heads and len(split_dim.sections) == 1
            dim_of_heads = replace(split_dim, sections=(heads,)) if is_grouped else split_dim
            part = beside(operand, place, dim_of_heads, axis)
            if part is None:
                return NotImplemented
            operands[name] = part
    arguments |= {name: part_of(operand) for name, operand in operands.items()}
    with axis.apart() if arguments.get("dropout_p") else nullcontext():
        result = func(**arguments)
    return as_parts(result, replace(split_dim, sources=sources), axis)


def _attention_of_rows(func: Any, arguments: Kwargs) -> Any:
    """Compute attention of this rank's queries to all keys."""
    query: Any = arguments["query"]
    split_dim, axis, mask = query.split_dim, query.axis, whole(arguments.get("attn_mask"))
    arguments |= {name: whole(arguments[name]) for name in ("key", "value")}
    if arguments.pop("is_causal", False):
        mask = query.new_ones(split_dim.size, arguments["key"].shape[-2], dtype=torch.bool).tril()
    if mask is not None and (mask := beside(mask, -2, split_dim, axis)) is None:
        return NotImplemented
    with axis.apart() if arguments.get("dropout_p") else nullcontext():
        result = func(**arguments | {"query": part_of(query), "attn_mask": mask})
    return as_parts(result, split_dim, axis)


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
        hidden = [
            operand.ndim - len(term) + 3 if "..." in term else 0 for term, operand in zip(inputs, operands, strict=True)
        ]
        names = ["".join(free[:count])[::-1] for count in (*hidden, max(hidden))]
        *inputs, output = (term.replace("...", name) for term, name in zip((*inputs, output), names, strict=True))
        equation = f"{','.join(inputs)}->{output}"
    parts = [
        (term, operand) for term, operand in zip(inputs, operands, strict=True) if isinstance(operand, SplitActivation)
    ]
    letters = {(term[operand.split_dim.dim], operand.split_dim.sections) for term, operand in parts}
    if len(letters) != 1 or not all(isinstance(operand, Tensor) for operand in operands):
        return NotImplemented
    letter, sections = letters.pop()
    axis = parts[0][1].axis
    sources = frozenset().union(*(operand.split_dim.sources for _, operand in parts))
    local_operands: list[Tensor] = []
    for term, operand in zip(inputs, operands, strict=True):
        if isinstance(operand, SplitActivation):
            if term.count(letter) > 1:
                return NotImplemented
            local_operands.append(operand)
        elif letter not in term:
            local_operands.append(axis.copy(operand) if needs_gradient(operand) else operand)
        elif operand.shape[term.index(letter)] == 1:
            return NotImplemented  # it is broadcast, which only dots allow
        elif term.count(letter) == 1 and operand.shape[term.index(letter)] == sum(sections):
            local_operands.append(axis.take(operand, SplitDim(term.index(letter), sections)))
        else:
            return NotImplemented
    result = func(equation, *local_operands)
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
    x, arguments = args[0], dict(zip(("weight", "bias", "stride", "padding"), args[1:], strict=False)) | kwargs
    strides, pads = (arguments.get(name, default) for name, default in (("stride", 1), ("padding", 0)))
    alone = {*arguments["weight"].shape[2:]} == {1} and _all(strides, 1) and _all(pads, 0)
    if x.split_dim.dim == x.ndim - arguments["weight"].ndim + 1 or not (alone or x.split_dim.dim == 0):
        return NotImplemented
    return with_copies(func, args, kwargs, x)


def _all(value: Any, wanted: int) -> bool:
    return all(number == wanted for number in (value if isinstance(value, list | tuple) else (value,)))
