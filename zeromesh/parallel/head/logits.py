"""Logits that are computed when their values are needed, which a loss on them does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zeromesh.base.in_place import version, writes
from zeromesh.base.linear_arithmetic import Columns, keeping, multiply
from zeromesh.parallel.head.linear_cross_entropy import REDUCTIONS, Vocabulary, linear_cross_entropy
from zeromesh.parallel.tensor.operators import move

# A head returns Logits(hidden, weight, ...) in place of F.linear(hidden, weight, bias). To the model, whose code stays
# as it is, this is a tensor of the whole vocabulary. What models do to logits on their way to the loss is remembered
# (RULES), and F.cross_entropy becomes linear_cross_entropy. Any other function gets the values: they are computed once,
# what was remembered is done to them, and from then on they are an ordinary tensor. So the result is that of plain
# torch. With a split vocabulary, ranks exchange values then: what is done on one rank must be done on all.

Using = Callable[[], AbstractContextManager[Any]]
Computed = tuple[Tensor, Sequence[Tensor | None]]  # values, and the tensors that they were made of

_HEADS: WeakSet[_Head] = WeakSet()


def expire() -> None:
    """Refuse to compute logits that were made before an update."""
    for head in list(_HEADS):
        head.expire()


@dataclass(eq=False)
class _Head:
    """One call of the head, of which there may be many logits: slices, casts."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    vocabulary: Vocabulary
    tag: int
    autocast: torch.dtype | None
    using: Using
    versions: tuple[int, ...] = ()
    listeners: list[Callable[[Tensor], None]] = field(default_factory=list)
    family: WeakValueDictionary[int, Logits] = field(default_factory=WeakValueDictionary)
    expired: bool = False

    def __post_init__(self) -> None:
        self.versions = self._versions()
        _HEADS.add(self)

    def expire(self) -> None:
        self.expired = True  # an update writes to memory below the parameter, which does not count in its version

    def _versions(self) -> tuple[int, ...]:
        return tuple(-1 if tensor is None else version(tensor) for tensor in (self.hidden, self.weight, self.bias))

    @contextmanager
    def opened(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield this rank's weight and bias, under the autocast of the call."""
        # The parameter itself is read, by functions that ask its class: an engine that has parameters elsewhere sees
        # that they are needed after the head's forward. Values of a parameter that was changed since would be other
        # ones.
        if self.expired or self._versions() != self.versions:
            raise RuntimeError(
                "the head's input, weight or bias was changed after its logits were made, as by step(); they are "
                "computed when they are needed, and would be other ones now: compute what you need before the change, "
                "or call materialise() on them"
            )
        cast = torch.autocast(self.hidden.device.type, dtype=self.autocast, enabled=self.autocast is not None)
        with self.using(), cast:
            bias, rows, start = self.bias, self.weight.shape[0], self.vocabulary.start
            if bias is not None and bias.shape[0] != rows:
                if self.vocabulary.group is not None:
                    bias = move(bias, "copy", self.vocabulary.group, self.tag + 2)
                part = bias[start : start + rows]
                bias = F.pad(part, (0, rows - part.shape[0]))
            yield self.weight, bias

    def values(self) -> Computed:
        """Compute the logits of the whole vocabulary, on every rank."""
        with self.opened() as (weight, bias):
            values = multiply(self.hidden, Columns(weight, bias))
        if self.vocabulary.group is not None:
            values = move(values, "join", self.vocabulary.group, self.tag + 1, -1)
        return values[..., : self.vocabulary.size].contiguous(), (self.hidden, self.weight, self.bias)

    def tell(self, output: Tensor) -> Tensor:
        if output.requires_grad:
            for listener in self.listeners:
                listener(output)
        return output


@dataclass(frozen=True)
class _Recipe:
    """Recipe of a loss on some logits."""

    head: _Head
    hidden: Tensor  # shape (..., width); the leading dims are those of the logits, without that of the classes
    classes: int  # the logits' dim that is the vocabulary
    like: Tensor  # has the logits' shape, strides and dtype, on the meta device
    scale: float = 1.0
    cap: float | None = None  # factor after tanh


class Logits(Tensor):
    """Logits of the whole vocabulary, computed when their values are needed; the loss of 16-bit logits is in fp32.

    Args:
        hidden: shape ``(..., width)``, the same on all ranks; its gradient is summed over them.
        weight: shape ``(rows, width)``, this rank's rows of the head, as many on every rank.
        bias: shape ``(rows,)``, or that of the whole vocabulary, the same on all ranks.
        vocabulary: entries of ``weight``; None: all.
        tag: first of three tags of the messages.
        using: returns a context in which the weight and the bias are in memory.

    Raises:
        ValueError: shapes that do not fit.
    """

    _recipe: _Recipe
    _parent: Logits | None
    _compute: Callable[[], Computed]
    _modes: tuple[bool, bool, Any]
    _value: Tensor | None

    def __new__(  # noqa: D102
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, vocabulary: Vocabulary | None = None,
        tag: int = 0, using: Using = nullcontext,
    ) -> Logits:  # fmt: skip
        vocabulary = vocabulary or Vocabulary(0, weight.shape[0])
        biases = {weight.shape[0], vocabulary.size}
        if weight.shape[-1] != hidden.shape[-1] or (bias is not None and bias.shape[0] not in biases):
            raise ValueError(
                f"hidden has shape {tuple(hidden.shape)}, so weight must have shape (rows, {hidden.shape[-1]}), not "
                f"{tuple(weight.shape)}, and bias {' or '.join(str((size,)) for size in sorted(biases))}, not "
                f"{None if bias is None else tuple(bias.shape)}"
            )
        if vocabulary.group is not None:
            hidden = move(hidden, "copy", vocabulary.group, tag)
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
        dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        like = torch.empty(*hidden.shape[:-1], vocabulary.size, dtype=dtype, device="meta")
        head = _Head(hidden, weight, bias, vocabulary, tag, dtype if autocast else None, using)
        return _make(_Recipe(head, hidden, hidden.ndim - 1, like), head.values, (hidden, weight, bias))

    def _begin(self, recipe: _Recipe, compute: Callable[[], Computed], parent: Logits | None) -> Logits:
        self._recipe, self._compute, self._parent, self._value = recipe, compute, parent, None
        # The values are computed later, but in the modes of now.
        self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), _saving()
        recipe.head.family[id(self)] = self
        return self

    def materialise(self) -> Tensor:
        """Return the values, an ordinary tensor; the first call computes them as the head would have."""
        if self._value is None:
            inference, graded, saving = self._modes
            node = _node(self)
            # A checkpoint that was entered since would pack what is saved here, and not compute it again.
            plain = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
            saved = nullcontext() if saving == _saving() else plain
            with torch.inference_mode(inference), torch.set_grad_enabled(graded or node is not None), saved:
                # Where another Function has returned these logits, the gradient must go to it.
                if _ours(node):
                    self._value = self._compute()[0]
                else:
                    self._value = _Values.apply(self)  # type: ignore[no-untyped-call]
            if self._parent is None:
                self._recipe.head.tell(self._value)
        return self._value

    def when_computed(self, listener: Callable[[Tensor], None]) -> None:
        """Call a function with each loss of these logits that is computed from now on, and with their values."""
        # These are the outputs of the head that a backward reaches; the logits themselves may never be differentiated.
        self._recipe.head.listeners.append(listener)
        if self._value is not None and self._value.requires_grad:
            listener(self._value)

    @property
    def lazy(self) -> bool:
        """True if the values were not needed yet."""
        return self._value is None and _ours(_node(self)) and (self._parent is None or self._parent.lazy)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first, kwargs = args[0] if args else None, kwargs or {}
        if isinstance(first, Logits):
            if func in DESCRIPTION and first._value is None:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in RULES and first.lazy and (result := RULES[func](first, func, *args[1:], **kwargs)) is not None:
                return result
        if writes(func, kwargs) and isinstance(first, Logits):
            for logits in list(first._recipe.head.family.values()):
                logits.materialise()  # before the change, that views may see it, and copies not
        args, kwargs = tree_map_only(Logits, Logits.materialise, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Handle operators that no Python function of torch calls; autograd has recorded them already."""
        if func._schema.is_mutable:
            raise RuntimeError(f"{func} would change logits that have no memory; call materialise() on them first")

        def values(logits: Logits) -> Tensor:
            return (logits._compute()[0] if logits._value is None else logits._value).detach()

        with torch.no_grad():
            args, kwargs = tree_map_only(Logits, values, (tuple(args), dict(kwargs or {})))
            return func(*args, **kwargs)


def _make(
    recipe: _Recipe, compute: Callable[[], Computed], inputs: Sequence[Tensor | None], parent: Logits | None = None
) -> Logits:
    like = recipe.like
    wrapper = partial(
        Tensor._make_wrapper_subclass, Logits, like.shape, strides=like.stride(), dtype=like.dtype,
        storage_offset=like.storage_offset(), device=recipe.hidden.device,
    )  # fmt: skip
    logits: Logits = _Lazy.apply(wrapper, compute, *inputs)  # type: ignore[no-untyped-call]
    return logits._begin(recipe, compute, parent)


class _Lazy(torch.autograd.Function):
    """Node of logits in the graph, for functions that take them without asking for values, as other Functions do."""

    @staticmethod
    def forward(ctx: Any, wrapper: Callable[[], Logits], compute: Any, *inputs: Tensor | None) -> Logits:
        ctx.compute = compute
        return wrapper()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        # This very backward asks for the weight's gradient, so none is left for later.
        with torch.enable_grad(), keeping(None):
            values, operands = ctx.compute()
        wanted = [operand for operand, need in zip(operands, needs, strict=True) if need]
        gradients = iter(torch.autograd.grad(values, wanted, gradient, create_graph=torch.is_grad_enabled()))
        return None, None, *(next(gradients) if need else None for need in needs)


class _Values(torch.autograd.Function):
    """Values of logits that another Function returned: their gradient goes to that Function."""

    @staticmethod
    def forward(ctx: Any, logits: Logits) -> Tensor:
        return logits._compute()[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _saving() -> Any:
    """Return the hooks of saved tensors that are in force."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _node(logits: Logits) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return logits.grad_fn


def _ours(node: Any) -> bool:
    return node is None or isinstance(node, _Lazy._backward_cls)


def _then(logits: Logits, function: Callable[[Tensor], Tensor], **changes: Any) -> Logits:
    """Return the logits that a function makes of these."""
    recipe = replace(logits._recipe, **changes)
    return _make(recipe, lambda: (function(values := logits.materialise()), (values,)), (logits,), logits)


# Rules: what is remembered. A rule returns None where it does not apply, and the values are computed.


def _cast(logits: Logits, func: Any, *args: Any, **kwargs: Any) -> Logits | None:
    """Remember a cast to a dtype that holds all of the logits' own."""
    if "memory_format" in kwargs:
        return None
    # A cast to fewer bits would change the loss, which is computed from the product in fp32.
    probe = torch.empty(0, dtype=logits.dtype, device=logits.device)
    args, kwargs = tree_map_only(Tensor, lambda x: torch.empty(0, dtype=x.dtype, device=x.device), (args, kwargs))
    cast_probe = func(probe, *args, **kwargs)
    if cast_probe is probe:
        return logits
    if cast_probe.device != probe.device or torch.promote_types(cast_probe.dtype, probe.dtype) != cast_probe.dtype:
        return None
    like = torch.empty_like(logits._recipe.like, dtype=cast_probe.dtype)
    return _then(logits, partial(Tensor.to, dtype=cast_probe.dtype, copy=True), like=like)


def _regroup(logits: Logits, func: Any, *args: Any, **kwargs: Any) -> Logits | None:
    """Remember a change of shape that keeps the order of elements and the vocabulary together."""
    recipe = logits._recipe
    args, kwargs = tree_map_only(Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), (args, kwargs))
    like = func(recipe.like, *args, **kwargs)
    if like is recipe.like:
        return logits
    if like.dtype != recipe.like.dtype:
        return None
    changes: dict[str, Any] = {}
    if like.shape != logits.shape:
        if recipe.classes != logits.ndim - 1 or not like.ndim or like.shape[-1] != logits.shape[-1]:
            return None
        hidden = recipe.hidden.reshape(*like.shape[:-1], recipe.hidden.shape[-1])
        changes = {"hidden": hidden, "classes": like.ndim - 1}
    return _then(logits, lambda x: func(x, *args, **kwargs), like=like, **changes)


def _permute(logits: Logits, func: Any, *args: Any, **kwargs: Any) -> Logits:
    recipe = logits._recipe
    numbered = torch.empty(tuple(range(1, logits.ndim + 1)), device="meta")
    order = [size - 1 for size in func(numbered, *args, **kwargs).shape]
    leading = [dim - (dim > recipe.classes) for dim in order if dim != recipe.classes]
    hidden, like = recipe.hidden.permute(*leading, -1), func(recipe.like, *args, **kwargs)
    classes = order.index(recipe.classes)
    return _then(logits, lambda x: func(x, *args, **kwargs), hidden=hidden, classes=classes, like=like)


def _index(logits: Logits, func: Any, index: Any) -> Logits | None:
    """Remember an index of the leading dims that takes the vocabulary as a whole."""
    recipe, size = logits._recipe, logits.shape[-1]
    items = list(index) if isinstance(index, tuple) else [index]
    if recipe.classes != logits.ndim - 1 or not all(type(item) in INDEXES for item in items):
        return None
    items = [torch.as_tensor(item) if isinstance(item, list) else item for item in items]
    gap = logits.ndim - sum(map(_dims, items))
    holes = [place for place, item in enumerate(items) if item is Ellipsis] or [len(items)]
    if gap < 0 or len(holes) > 1:
        return None
    items[holes[0] : holes[0] + 1] = [slice(None)] * gap
    if not isinstance(items[-1], slice) or items[-1].indices(size) != (0, size, 1):
        return None
    # The index is used again when the values are needed, and the caller may change it until then.
    items = tree_map_only(Tensor, Tensor.clone, items)
    hidden = recipe.hidden[(*items[:-1], slice(None))]
    copies = any(isinstance(item, Tensor) for item in items)  # the meta device has no values of masks
    like = recipe.like.new_empty(*hidden.shape[:-1], size) if copies else recipe.like[tuple(items)]
    return _then(logits, lambda x: x[tuple(items)], hidden=hidden, classes=hidden.ndim - 1, like=like)


INDEXES = (int, slice, list, type(None), type(...), Tensor)  # a class of its own may do anything


def _dims(item: Any) -> int:
    """Return the number of dims that an item of an index takes."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def _multiply(logits: Logits, func: Any, factor: Any, **kwargs: Any) -> Logits | None:
    """Remember a product with a number."""
    if kwargs or isinstance(factor, bool) or not isinstance(factor, int | float) or not factor or not isfinite(factor):
        return None
    recipe, inverse = logits._recipe, func in DIVIDE
    # A factor before tanh scales the product; one after it is the cap.
    name, before = ("scale", recipe.scale) if recipe.cap is None else ("cap", recipe.cap)
    changes = {name: before / factor if inverse else before * factor}
    return _then(logits, lambda x: func(x, factor), like=func(recipe.like, factor), **changes)


def _cap(logits: Logits, func: Any, **kwargs: Any) -> Logits | None:
    if kwargs or logits._recipe.cap is not None:
        return None
    return _then(logits, torch.tanh, cap=1.0, like=torch.tanh(logits._recipe.like))


def _cross_entropy(
    logits: Logits, func: Any, labels: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor | None:  # fmt: skip
    recipe = logits._recipe
    usual = weight is None and size_average is None and reduce is None and reduction in REDUCTIONS
    fitting = labels.shape == recipe.hidden.shape[:-1] and recipe.classes == min(1, logits.ndim - 1)
    ids = labels.dtype == torch.int64 and labels.device == logits.device
    if not (usual and fitting and ids and 0 <= label_smoothing <= 1):
        return None
    head, graded = recipe.head, torch.is_grad_enabled() and logits.requires_grad
    scale = recipe.scale * (1.0 if recipe.cap is None else recipe.cap)
    with head.opened() as (rows, bias), torch.set_grad_enabled(graded):
        loss = linear_cross_entropy(
            recipe.hidden, rows, labels, bias, ignore_index=ignore_index, reduction=reduction, scale=scale,
            label_smoothing=label_smoothing, softcap=recipe.cap, vocabulary=head.vocabulary,
        )  # fmt: skip
        return head.tell(loss.to(torch.promote_types(loss.dtype, recipe.like.dtype)))


def _of_tensor(*names: str) -> list[Any]:
    """Return methods of a tensor, and getters of its attributes, by their names."""
    members = [getattr(Tensor, name, None) for name in names]  # versions of torch differ in them
    return [member if callable(member) else member.__get__ for member in members if member is not None]


def _functions(*names: str) -> list[Any]:
    """Return functions that are methods, too."""
    return [*_of_tensor(*names), *(getattr(torch, name) for name in names if hasattr(torch, name))]


DIVIDE = frozenset(_functions("div", "divide", "true_divide"))
_TABLE: dict[Callable[..., Tensor | None], list[Any]] = {
    _cast: _of_tensor("to", "float", "double", "half", "bfloat16", "type_as", "cpu", "cuda"),
    _regroup: _functions(
        "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as", "contiguous",
        "clone",
    ),
    _permute: _functions("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims"),
    _index: _of_tensor("__getitem__"),
    _multiply: [*_functions("mul", "multiply"), *DIVIDE],
    _cap: _functions("tanh"),
    _cross_entropy: [F.cross_entropy],
}  # fmt: skip
RULES = {function: rule for rule, functions in _TABLE.items() for function in functions}

# Functions that need no values.
DESCRIPTION = {
    *_of_tensor(
        "shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "layout", "ndim", "names", "itemsize",
        "nbytes", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_mps",
        "is_xpu", "size", "dim", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "element_size",
        "ndimension", "is_floating_point", "is_complex", "is_signed", "get_device", "__len__", "__hash__",
        "is_same_size", "is_inference",
    ),
    torch.numel, torch.is_floating_point, torch.is_complex,
}  # fmt: skip
