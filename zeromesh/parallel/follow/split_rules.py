"""Rules by which functions of torch compute on parts of activations: how each one moves the dim that is split.

A rule returns ``NotImplemented`` where a function needs the whole, which is then gathered: a function that is not in
the table, or is called in a way that its rule does not know, is slower, and never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from zeromesh.base.in_place import version
from zeromesh.parallel.follow.split_activation import (
    RULES,
    Axis,
    Rule,
    Sealed,
    SplitActivation,
    SplitDim,
    part_of,
    whole,
    whole_shape,
)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


_OWNERS: tuple[Any, ...] = (torch, Tensor, functional, torch._C._nn, torch.special, torch.linalg)


def rule(*names: str, anywhere: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for the functions of these names, wherever torch has them.

    A property is written ``.name``, and ``=name`` where it is set. The part is the first argument, unless it may be
    ``anywhere``.
    """

    def register(function: Rule) -> Rule:
        def of_first(func: Any, args: Args, kwargs: Kwargs) -> Any:
            return function(func, args, kwargs) if args and is_split(args[0]) else NotImplemented

        handler = function if anywhere else of_first
        for name in names:
            if name.startswith("."):
                if hasattr(Tensor, name[1:]):
                    RULES[getattr(Tensor, name[1:]).__get__] = handler
            elif name.startswith("="):
                RULES[getattr(Tensor, name[1:]).__set__] = handler
            else:
                members = [getattr(owner, name, None) for owner in _OWNERS]
                RULES.update(
                    {member: handler for member in members if callable(member) and not isinstance(member, type)}
                )
        return function

    return register


def as_split(part: Tensor, split_dim: SplitDim, axis: Axis) -> Tensor:
    """Make a new tensor, which nobody else has, answer as the whole of which it is a part."""
    # Another class, and no other tensor: of views, autograd records more, and forbids some to be written to.
    activation: Any = part
    activation.__class__ = SplitActivation
    activation.stand_for(split_dim, axis)
    return part


def is_split(value: Any) -> bool:
    """Return whether it is a part of an activation."""
    return isinstance(value, SplitActivation)


def needs_gradient(x: Tensor) -> bool:
    """Return whether a gradient of an operand will be asked for."""
    return x.requires_grad and torch.is_grad_enabled()


def as_parts(result: Any, split_dim: SplitDim, axis: Axis) -> Any:
    """Return results as parts; one that was written in place is a part already."""
    if isinstance(result, SplitActivation):
        return result
    if isinstance(result, Tensor):
        return as_split(result, split_dim, axis)
    if type(result) is list:
        return [as_parts(element, split_dim, axis) for element in result]
    if isinstance(result, tuple):
        parts = [as_parts(element, split_dim, axis) for element in result]
        return type(result)(parts) if hasattr(result, "n_fields") else tuple(parts)
    return result


def same_dim(parts: Sequence[SplitActivation]) -> tuple[int, SplitDim] | None:
    """Return the place of the split dim, counted from the last one; None unless it is the same in all."""
    first = parts[0]
    place = first.split_dim.dim - first.ndim
    for other in parts[1:]:
        if other.split_dim.dim - other.ndim != place or other.split_dim.sections != first.split_dim.sections:
            return None
    sources = frozenset().union(*(part.split_dim.sources for part in parts))
    return place, replace(first.split_dim, sources=sources)


def beside(x: Tensor, place: int, split_dim: SplitDim, axis: Axis, most: float = float("inf")) -> Tensor | None:
    """Return this rank's part of an operand that all ranks have whole, or the operand where all of it is used.

    None for another length, or for more than ``most`` elements whose gradient would have to be gathered.
    """
    if x.ndim < -place or x.shape[place] == 1:
        # Each rank uses it for its own part, and so has a share of its gradient.
        return axis.copy(x) if needs_gradient(x) else x
    if x.shape[place] != split_dim.size or (needs_gradient(x) and x.numel() > most):
        return None
    return axis.take(x, replace(split_dim, dim=place % x.ndim))


# Functions that answer for a part as they would for the whole, or make tensors that have nothing to do with it.
_ANSWERS = ("dim", "ndimension", "is_floating_point", "is_complex", "is_contiguous", "element_size", "get_device",
    "__hash__", "requires_grad_", "new_zeros", "new_ones", "new_full", "new_empty", "is_signed", "is_inference",
    "=requires_grad", ".ndim", ".dtype", ".device", ".requires_grad", ".grad_fn", ".is_leaf", ".is_cuda", ".is_meta",
    ".is_cpu", ".layout", ".is_sparse", ".is_quantized", ".is_nested", ".is_mkldnn", ".itemsize", "._version", ".names",
    ".is_xpu", ".is_mps", ".is_sparse_csr", ".output_nr", "._backward_hooks")  # fmt: skip


@rule(*_ANSWERS)
def _answer(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return func(*args, **kwargs)


@rule(".shape")
def _shape(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return whole_shape(args[0])


@rule("size", "numel", "nelement", "__len__", ".nbytes")
def _size(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return func(torch.empty(whole_shape(args[0]), dtype=args[0].dtype, device="meta"), *args[1:], **kwargs)


@rule("__repr__", "__str__", "__format__")
def _describe(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return SplitActivation.__repr__(args[0])


@rule(".grad")
def _grad(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, gradient = args[0], func(*args, **kwargs)
    return None if gradient is None else as_split(gradient.view_as(gradient), x.split_dim, x.axis)


@rule("register_hook")
def _hook(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, hook, *rest = args
    split_dim, axis = x.split_dim, x.axis

    def on_gradient(gradient: Tensor) -> Tensor | None:
        with Sealed(axis):
            scale = axis.gradient_scale
            own_gradient = as_split(gradient.view_as(gradient) if scale == 1 else gradient / scale, split_dim, axis)
            before = version(own_gradient)
            replacement = hook(own_gradient)
            if replacement is None and scale != 1 and version(own_gradient) != before:
                replacement = own_gradient
        if replacement is None:
            return None
        replacement = replacement if scale == 1 else replacement * scale
        same = isinstance(replacement, SplitActivation) and replacement.split_dim.sections == split_dim.sections
        with torch._C.DisableTorchFunctionSubclass():
            return (
                part_of(replacement)
                if same and replacement.split_dim.dim == split_dim.dim
                else axis.take(replacement, split_dim)
            )

    return func(x, on_gradient, *rest, **kwargs)


_WITH_SELF = ("add", "sub", "mul", "div", "true_divide", "divide", "floor_divide", "multiply", "subtract", "pow",
    "remainder", "fmod", "atan2", "clamp", "clamp_min", "clamp_max", "clip", "lerp", "addcmul", "addcdiv",
    "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor",
    "abs", "neg", "negative", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "square", "sin",
    "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "sigmoid", "logit", "erf", "erfc", "reciprocal",
    "sign", "round", "floor", "ceil", "trunc", "frac", "relu", "nan_to_num", "xlogy", "hypot", "copysign", "heaviside",
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "digamma", "lgamma", "sinc", "absolute", "zero", "fill",
    "hardtanh", "elu", "selu", "celu", "leaky_relu", "threshold")  # fmt: skip
ENTRY_BY_ENTRY = (*_WITH_SELF, *(f"{name}_" for name in _WITH_SELF), "rsub", "where", "maximum", "minimum", "fmax",
    "fmin", "isnan", "isinf", "isfinite", "isclose", "gelu", "silu", "mish", "softplus", "softsign", "logsigmoid",
    "tanhshrink", "hardshrink", "softshrink", "hardsigmoid", "hardswish", "relu6", "float", "half", "double",
    "bfloat16", "int", "long", "bool", "type", "clone", "detach", "alias", "zeros_like", "ones_like",
    "full_like", "empty_like", "polar", "complex", "conj", "angle", "positive", "cpu", "cuda", "logaddexp", "erfinv",
    "__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rtruediv__", "__rpow__", "__pow__", "__ipow__", "__rfloordiv__",
    "__floordiv__", "__mod__", "__rmod__", "__and__", "__or__", "__xor__", "__rand__", "__ror__", "__rxor__",
    "__invert__", "__lt__", "__gt__", "__le__", "__ge__", "__eq__", "__ne__", ".data", ".real", ".imag",
    "expit", "ndtr", "i0", "entr", "copy_")  # fmt: skip


@rule(*ENTRY_BY_ENTRY, anywhere=True)
def entry_by_entry(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Compute each entry from those at the same place, with broadcasting."""
    values = [*args, *kwargs.values()]
    tensors = [value for value in values if isinstance(value, Tensor)]
    parts = [tensor for tensor in tensors if isinstance(tensor, SplitActivation)]
    name = getattr(func, "__name__", "")
    into = name.endswith("_") and (not name.endswith("__") or name == "__ipow__")
    odd = "out" in kwargs or any(isinstance(value, list | tuple) for value in values)
    if odd or (into and not is_split(args[0])) or (name == "where" and len(values) == 1):
        return NotImplemented
    joint = same_dim(parts)
    if joint is None:
        return NotImplemented
    (place, split_dim), axis = joint, parts[0].axis
    # A whole activation as large as the part's own whole, as of a residual, is joined by the whole: its gradient
    # would be gathered as well, and the norm that follows needs the whole. A parameter or a mask gives its part.
    most = max(prod(whole_shape(part)) for part in parts) / 2
    operands = {
        id(tensor): tensor if is_split(tensor) else beside(tensor, place, split_dim, axis, most) for tensor in tensors
    }
    if any(operand is None for operand in operands.values()):
        return NotImplemented
    result = func(
        *(operands.get(id(value), value) for value in args),
        **{key: operands.get(id(value), value) for key, value in kwargs.items()},
    )
    ndim = max(tensor.ndim for tensor in tensors)
    return as_parts(result, replace(split_dim, dim=place % ndim), axis)


@rule("to", "type_as", anywhere=True)
def _to(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    result = func(*args, **kwargs)  # of another tensor only the dtype counts
    return as_parts(result, x.split_dim, x.axis) if isinstance(x, SplitActivation) else result


@rule("dropout", "dropout_")
def _dropout(func: Any, args: Args, kwargs: Kwargs) -> Any:
    arguments = dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
    drops = arguments.get("p", 0.5) and arguments.get("training", arguments.get("train", True))
    with args[0].axis.apart() if drops else nullcontext():
        return entry_by_entry(func, args, kwargs)


@rule("prelu")
def _prelu(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, weight = (*args, *kwargs.values())
    if is_split(weight) or weight.numel() != 1:
        return NotImplemented
    return as_parts(func(x, x.axis.copy(weight) if needs_gradient(weight) else weight), x.split_dim, x.axis)


# Functions that compute along dims: name -> position of the argument that says which, and its default.
_ALONG = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logsumexp", "argmax", "argmin",
        "amax", "amin", "max", "min", "sum", "mean", "std", "var", "prod", "any", "all", "flip", "median", "cummax",
        "cummin", "logcumsumexp", "count_nonzero", "std_mean", "var_mean", "aminmax", "nansum"), (1, None)),
    "sort": (1, -1), "argsort": (1, -1), "normalize": (2, 1), "topk": (2, -1), "norm": (2, None), "roll": (2, None),
    "vector_norm": (2, None),
    "diff": (2, -1), "tril": (9, (-1, -2)), "triu": (9, (-1, -2)), "unbind": (1, 0), "view_as_complex": (9, -1),
    "view_as_real": (9, ()),
}  # fmt: skip
_OTHER_NAMES = {"roll": "dims", "flip": "dims"}


@rule(*_ALONG)
def along_dims(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Compute along dims other than the one that is split; a sum over it is completed over the ranks."""
    name = func.__name__.removeprefix("special_").removeprefix("linalg_")
    place, default = _ALONG[name]
    x, rest = args[0], [*args[1:], *kwargs.values()]
    if not isinstance(x, SplitActivation) or any(isinstance(value, Tensor) for value in rest):
        return NotImplemented
    key = _OTHER_NAMES.get(name, "dim")
    dims: Any = kwargs.get(key, args[place] if len(args) > place else default)
    if name == "flip" and len(args) > 2:
        dims = args[1:]
    if isinstance(dims, int):
        dims = (dims,)
    # std and var take flags at the place of the dims.
    no_dims = not isinstance(dims, list | tuple | torch.Size) or (not dims and name != "view_as_real")
    if no_dims or not all(type(dim) is int for dim in dims):
        return NotImplemented
    reduced, split_dim = {dim % x.ndim for dim in dims}, x.split_dim
    if split_dim.dim in reduced:
        # The sum over the ranks is as exact as that of one process only in floating point.
        if name == "unbind":
            x.axis.wish(split_dim, [1] * split_dim.size)
        if name not in ("sum", "mean") or not x.is_floating_point():
            return NotImplemented
        share = func(part_of(x), *args[1:], **kwargs)
        return x.axis.sum(share if name == "sum" else share / x.axis.size)
    result = func(x, *args[1:], **kwargs)
    first = result[0] if isinstance(result, tuple) else result
    gone = first.ndim < x.ndim and name != "view_as_complex"
    before = sum(dim < split_dim.dim for dim in reduced) if gone else 0
    return as_parts(result, replace(split_dim, dim=split_dim.dim - before), x.axis)


@rule("layer_norm", "rms_norm")
def _norm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    names = ("normalized_shape", "weight", "bias", "eps") if func.__name__ == "layer_norm" else _OF_RMS
    x, arguments = args[0], dict(zip(names, args[1:], strict=False)) | kwargs
    shape: Any = arguments["normalized_shape"]
    count = 1 if isinstance(shape, int) else len(shape)
    if x.split_dim.dim < x.ndim - count:
        return with_copies(func, args, kwargs, x)
    if count > 1 or whole_shape(x)[-1:] != torch.Size([shape] if isinstance(shape, int) else shape):
        return NotImplemented
    return _norm_of_all(x, func.__name__ == "layer_norm", arguments)


_OF_RMS = ("normalized_shape", "weight", "eps")


def _norm_of_all(x: SplitActivation, centers: bool, arguments: Kwargs) -> Any:
    """Normalize over the dim that is split; ranks exchange a sum of each token, or two."""
    axis, split_dim = x.axis, x.split_dim
    eps = arguments.get("eps", 1e-5 if centers else None)
    eps = torch.finfo(x.dtype).eps if eps is None else eps

    def mean(share: Tensor) -> Tensor:
        total = axis.sum(share.sum(-1, keepdim=True)) / split_dim.size
        return axis.copy(total) if needs_gradient(total) else total

    wide = part_of(x).to(torch.promote_types(x.dtype, torch.float32))
    wide = wide - mean(wide) if centers else wide
    y = wide * torch.rsqrt(mean(wide.square()) + eps)
    for name, joined in (("weight", torch.mul), ("bias", torch.add)):
        if arguments.get(name) is not None:
            y = joined(y, axis.take(whole(arguments[name]), replace(split_dim, dim=0)))
    return as_parts(y.to(x.dtype), split_dim, axis)


def with_copies(func: Any, args: Args, kwargs: Kwargs, x: SplitActivation) -> Any:
    """Apply a function in which every other operand is used for all of the part."""

    def copied(value: Any) -> Any:
        return x.axis.copy(value) if isinstance(value, Tensor) and value is not x and needs_gradient(value) else value

    if sum(is_split(value) for value in (*args, *kwargs.values())) > 1:
        return NotImplemented
    result = func(*map(copied, args), **{key: copied(value) for key, value in kwargs.items()})
    return as_parts(result, x.split_dim, x.axis)
