"""Guards against computing with parameters that are not in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol, Self, TypeVar
from weakref import WeakMethod, ref

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from zeromesh.shard.parameters.flat import Flat

# Attributes and methods that need a tensor's description only, and no memory.
_ATTRIBUTES = (
    "shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "grad_fn", "layout", "ndim", "names", "itemsize",
    "nbytes", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_xpu",
    "output_nr", "_version", "_backward_hooks", "_base", "retains_grad", "is_sparse_csr", "grad_dtype",
    "_post_accumulate_grad_hooks",
)  # fmt: skip
_METHODS = (
    "size", "dim", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "element_size", "ndimension",
    "is_floating_point", "is_complex", "is_signed", "requires_grad_", "register_hook", "get_device", "__len__",
    "register_post_accumulate_grad_hook", "is_same_size", "__hash__", "is_inference", "_is_view", "dim_order",
    "is_shared", "is_pinned", "__dir__",
)  # fmt: skip


OWN_CLASS = "_own_class"  # attribute of a class that replaces a parameter's own: that class
UNLOADED = "_is_unloaded"  # attribute of a class whose parameters are not in memory
GATHERED = "_is_gathered"  # attribute of a class whose parameters a context of the user's has gathered

Owned = TypeVar("Owned", bound="Owner")

Saving = Callable[[], AbstractContextManager[None]]


def change_class(parameter: torch.Tensor, chosen: type) -> None:
    """Let a parameter be of another class; the object stays the same."""
    parameter.__class__ = chosen


def change_classes(tensors: Iterable[torch.Tensor], chosen: Mapping[type, type]) -> None:
    """Let each tensor whose class is a key be of the class that is its value."""
    for tensor in tensors:
        change_class(tensor, chosen.get(type(tensor), type(tensor)))


def is_unloaded(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is not in memory, or perhaps not for long."""
    return hasattr(type(parameter), UNLOADED)


class Owner(Protocol):
    """A unit, or a table."""

    @property
    def flats(self) -> tuple[Flat, ...]:
        """Its flat buffers."""


class Presence(Enum):
    """State of a unit's parameters for code that uses them, which has a class of its own for each."""

    UNLOADED = "unloaded"  # they are not in memory, or perhaps not for long
    LOADED = "loaded"  # they are in memory, as long as what computes with them now
    GATHERED = "gathered"  # they are in memory as long as a context of the user's is active


def _harmless() -> frozenset[Any]:
    """The functions that look at a tensor's description only."""
    functions: list[Any] = [getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)]
    functions += [torch.numel, torch.is_floating_point, torch.is_complex, torch._has_compatible_shallow_copy_type]
    functions.append(torch.result_type)
    for name in _ATTRIBUTES:
        attribute = getattr(torch.Tensor, name, None)
        functions += [getattr(attribute, a) for a in ("__get__", "__set__", "__delete__") if hasattr(attribute, a)]
    return frozenset([*functions, _SET_DATA])


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
HARMLESS = _harmless()


def _functions(*names: str) -> frozenset[Any]:
    """Return methods of tensors, and the functions of torch of the same names."""
    return frozenset(getattr(place, name) for name in names for place in (torch.Tensor, torch) if hasattr(place, name))


# Functions of a tensor that need no values of it, and return new ones; and those that may return a copy of a view.
_LIKE = _functions(
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros",
    "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided",
)  # fmt: skip
_RELAID = _functions("contiguous", "reshape", "reshape_as", "flatten", "ravel")
_CONVERSIONS = _functions("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "type_as")
_SHOWN = (torch.Tensor.__repr__, torch.Tensor.__format__)
_UNKNOWN = object()  # not None, which functions return


class AbsentError(RuntimeError):
    """Values of a parameter are asked for that are not in memory."""


class Absent(torch.Tensor):
    """Stands for a tensor that is not in memory: it has a shape and a dtype. Values raise RuntimeError."""

    reason: str

    @classmethod
    def of(cls, described: torch.Tensor, device: torch.device, reason: str) -> Self:
        """Return a stand-in of a tensor's shape and dtype."""
        size, stride = described.shape, described.stride()
        absent = torch.Tensor._make_wrapper_subclass(cls, size, strides=stride, dtype=described.dtype, device=device)
        absent.reason = reason
        return absent

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        answer = described(func, args, kwargs or {})
        if answer is not _UNKNOWN:
            return answer
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Absent))
        if func in _SHOWN:
            return f"<tensor of shape {tuple(first.shape)}: {first.reason}>"
        if args and args[0] is first and (view := viewed(func, args, kwargs or {}, first.reason)) is not None:
            return view
        raise AbsentError(first.reason)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AbsentError(next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Absent)).reason)


def described(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a function returns that needs no values of the tensors it is given; ``_UNKNOWN`` for all others."""
    with torch._C.DisableTorchFunctionSubclass():
        if func in HARMLESS:
            return func(*args, **kwargs)
        first: Any = args[0] if args else kwargs.get("input")
        rest = tree_leaves((args[1:], kwargs))
        values = [leaf for leaf in rest if leaf is not first and (isinstance(leaf, Absent) or is_unloaded(leaf))]
        if func in _LIKE and not values:
            dense = torch.empty((), dtype=first.dtype, device=first.device).expand(first.shape)
            return func(dense, *args[1:], **{name: value for name, value in kwargs.items() if name != "input"})
        if func is torch.Tensor.type and not rest:
            return torch.empty(0, dtype=first.dtype, device=first.device).type()
        if func in _CONVERSIONS:
            empty = torch.empty(0, dtype=first.dtype, device=first.device)
            try:
                converted = func(empty, *args[1:], **kwargs)
            except RuntimeError:
                return _UNKNOWN  # a memory format that the stand-in cannot have
            if converted is empty:
                return first
            if converted.is_meta:
                return torch.empty_strided(first.shape, first.stride(), dtype=converted.dtype, device="meta")
    return _UNKNOWN


def viewed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str) -> Any:
    """Return stand-ins of the views that a function makes of its first argument; None if it needs values."""
    with torch._C.DisableTorchFunctionSubclass():

        def on_meta(value: Any) -> Any:
            unloaded = isinstance(value, Absent) or is_unloaded(value)
            size = (value.shape, value.stride()) if unloaded else ()
            return torch.empty_strided(*size, dtype=value.dtype, device="meta") if unloaded else value

        device, (meta, *rest) = args[0].device, [on_meta(value) for value in args]
        try:
            views = func(meta, *rest, **kwargs)
        except Exception:  # of any kind: it is not one that makes views
            return None
        for leaf in tree_leaves(views) or [None]:
            if not isinstance(leaf, torch.Tensor) or leaf is meta or meta._version:
                return None
            shares = leaf.untyped_storage()._cdata == meta.untyped_storage()._cdata
            if not shares and func not in _RELAID:
                return None
    return tree_map_only(torch.Tensor, lambda view: Absent.of(view, device, reason), views)


def with_edges(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of ``torch.autograd.grad`` with edges of the graph in the place of parameters."""
    # The gradient of a parameter does not depend on whether it is in memory.
    with torch._C.DisableTorchFunctionSubclass():
        changed, named = list(args), dict(kwargs or {})
        inputs = changed.pop(1) if len(changed) > 1 else named.pop("inputs")
        inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        edges = [get_gradient_edge(entry) if isinstance(entry, nn.Parameter) else entry for entry in inputs]
    return [*changed[:1], edges, *changed[1:]], named


def unloaded_class(
    base: type[nn.Parameter], unit: Owned, names: Mapping[int, str], touch: Callable[[Owned, str], None]
) -> type[nn.Parameter]:
    """The class that the unit's parameters have while they are unloaded, or may be soon."""
    # Torch calls its `__torch_function__` before any operation: it has the unit fetched if the model is computing, and
    # raises with the parameter's name otherwise. Weakly, as a graph refers to its leaves, and they to their class.
    label, weak_unit, weak_touch = str(unit), ref(unit), WeakMethod(touch)

    class Unloaded(base):  # type: ignore[valid-type,misc]
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            answer = described(func, args, kwargs or {})
            if answer is not _UNKNOWN:
                return answer
            if func is torch.autograd.grad:  # no memory is needed, and nothing is to be fetched on one rank only
                changed, named = with_edges(args, kwargs)
                return func(*changed, **named)
            first = next((names[id(a)] for a in args if id(a) in names), f"a parameter of {label}")
            if func in _SHOWN:
                with torch._C.DisableTorchFunctionSubclass():
                    return f"Parameter {first} of shape {tuple(args[0].shape)}, not in memory now"
            load, its = weak_touch(), weak_unit()
            if load is None or its is None:
                raise RuntimeError(f"parameter {first} is not in memory, and the engine that had it is gone")
            try:
                load(its, first)
            except AbsentError as error:
                if isinstance(args[0], Unloaded) and (view := viewed(func, args, kwargs or {}, str(error))) is not None:
                    return view
                raise
            return func(*args, **(kwargs or {}))

        def as_subclass(self, cls: type[Any]) -> Any:  # of all methods, torch asks the class about this one alone not
            return Unloaded.__torch_function__(torch.Tensor.as_subclass, (Unloaded,), (self, cls))

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            if id(self) not in memo:
                self.data_ptr()  # loads it, and with it its own class, which is the copy's
                assert type(self) is not Unloaded
                return type(self).__deepcopy__(self, memo)
            return memo[id(self)]

    setattr(Unloaded, UNLOADED, True)
    return Unloaded


def gathered_class(base: type[nn.Parameter], saving: Saving) -> type[nn.Parameter]:
    """The class that parameters have while a context has gathered them."""
    # A graph that is made there may be needed when they are unloaded again. Autograd keeps a leaf as it is, so nobody
    # could see that its memory is still needed; with hooks for saved tensors around each operation it is fetched again.
    weak_saving = WeakMethod(saving)

    class Gathered(base):  # type: ignore[valid-type,misc]
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if any(kind not in (nn.Parameter, torch.Tensor) and not hasattr(kind, GATHERED) for kind in types):
                return NotImplemented  # another library's tensors know best
            if func is torch.autograd.grad:
                changed, named = with_edges(args, kwargs)
                return func(*changed, **named)
            saves = weak_saving()
            with torch._C.DisableTorchFunctionSubclass():
                if saves is None or func in HARMLESS or not torch.is_grad_enabled():
                    return func(*args, **(kwargs or {}))
                if any(kind is not Gathered and hasattr(kind, GATHERED) for kind in types):
                    # This engine's hooks for saved tensors know nothing of the other's memory.
                    raise RuntimeError(
                        f"{getattr(func, '__name__', func)} of gathered parameters of two engines cannot be "
                        "differentiated: clone those of one of them (parameter.detach().clone()), or compute under "
                        "torch.no_grad()"
                    )
                with saves():
                    return func(*args, **(kwargs or {}))

    setattr(Gathered, OWN_CLASS, nn.Parameter)
    setattr(Gathered, GATHERED, True)
    return Gathered


def watched_class(base: type[torch.Tensor], used: Callable[[torch.Tensor], None]) -> type[torch.Tensor]:
    """The class of tensors of class ``base`` that has ``used`` called before somebody uses what is in their memory.

    ``used``, a method, gives the tensor its own class back.
    """
    weak_used = WeakMethod(used)

    class Watched(base):  # type: ignore[valid-type,misc]
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func in HARMLESS and func is not _SET_DATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            for argument in tree_leaves((args, kwargs)):
                if isinstance(argument, Watched):
                    tell = weak_used()
                    change_class(argument, base) if tell is None else tell(argument)
            return func(*args, **(kwargs or {}))

    return Watched


class Guard:
    """Switches the class of a unit's parameters as they come and go; at first they are here."""

    def __init__(self, unit: Owner, unloaded: type[nn.Parameter], gathered: type[nn.Parameter]) -> None:
        self._parameters = [parameter for flat in unit.flats for parameter in flat.parameters]
        classes = [type(parameter) for parameter in self._parameters]
        plain = [getattr(cls, OWN_CLASS, cls) is nn.Parameter for cls in classes]
        self._classes = {
            Presence.UNLOADED: [unloaded] * len(classes),
            Presence.LOADED: classes,
            Presence.GATHERED: [gathered if is_plain else cls for is_plain, cls in zip(plain, classes, strict=True)],
        }
        self._now = Presence.LOADED

    def switch(self, to: Presence) -> None:
        """Say where the parameters are from now on."""
        if to is self._now:
            return
        self._now = to
        for parameter, chosen in zip(self._parameters, self._classes[to], strict=True):
            change_class(parameter, chosen)
