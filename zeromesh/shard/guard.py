"""Nothing is ever computed with parameters that are not there.

While a unit's parameters are away, or might be sent away, their class is one whose ``__torch_function__`` is asked
before any operation: it has the unit fetched if the model is computing, and raises with the parameter's name otherwise.
Asking costs nothing in the unit's own forward, because there they have their own class again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import nn

from zeromesh.shard.unit import Unit

_ATTRIBUTES = (
    "shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "grad_fn", "layout", "ndim", "names", "itemsize",
    "nbytes", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_xpu",
    "output_nr", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "_base", "retains_grad", "is_sparse_csr", "grad_dtype",
)  # fmt: skip
_METHODS = (
    "size", "dim", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "element_size", "ndimension",
    "is_floating_point", "is_complex", "is_signed", "requires_grad_", "register_hook", "get_device", "__len__",
    "register_post_accumulate_grad_hook", "is_same_size", "__hash__", "is_inference", "_is_view", "dim_order",
)  # fmt: skip


def _harmless() -> frozenset[Any]:
    """The functions that look at a tensor's description only."""
    found: list[Any] = [getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)]
    found += [torch.numel, torch.is_floating_point, torch.is_complex]
    for name in _ATTRIBUTES:
        attribute = getattr(torch.Tensor, name, None)
        found += [getattr(attribute, a) for a in ("__get__", "__set__", "__delete__") if hasattr(attribute, a)]
    data = torch.Tensor.data
    return frozenset([*found, data.__set__])  # type: ignore[attr-defined]


HARMLESS = _harmless()


def away_class(
    base: type[nn.Parameter], unit: Unit, names: Mapping[int, str], touch: Callable[[Unit, str], None]
) -> type[nn.Parameter]:
    """The class that the unit's parameters have while they are away.

    Args:
        base: answers for their ``grad``.
        unit: whose parameters they are.
        names: fully qualified names by the parameters' ``id``.
        touch: a method, called with the unit and the name before an operation; brings the unit back or raises.
    """
    # Weakly, as a graph refers to its leaves, and they to their class; see ``hooks``.
    label, there, told = str(unit), ref(unit), WeakMethod(touch)

    class Away(base):  # type: ignore[valid-type,misc]
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func in HARMLESS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            first = next((names[id(a)] for a in args if id(a) in names), f"a parameter of {label}")
            if func is torch.Tensor.__repr__:
                with torch._C.DisableTorchFunctionSubclass():
                    return f"Parameter {first} of shape {tuple(args[0].shape)}, not in memory now"
            bring, its = told(), there()
            if bring is None or its is None:
                raise RuntimeError(f"parameter {first} is not in memory, and the engine that had it is gone")
            bring(its, first)
            return func(*args, **(kwargs or {}))

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            if id(self) not in memo:
                self.data  # noqa: B018  brings it back, and with it its own class, which is the copy's
                assert type(self) is not Away
                return type(self).__deepcopy__(self, memo)
            return memo[id(self)]

    return Away


class Guard:
    """Switches the class of a unit's parameters as they come and go; at first they are here."""

    def __init__(
        self, base: type[nn.Parameter], unit: Unit, names: Mapping[int, str], touch: Callable[[Unit, str], None]
    ) -> None:
        self._parameters = [parameter for flat in unit.flats for parameter in flat.parameters]
        self._own = [type(parameter) for parameter in self._parameters]
        self._away = away_class(base, unit, names, touch)
        self._here = True

    def switch(self, here: bool) -> None:
        """``here``: whether the parameters may be used from now on: they are in memory, and stay."""
        if here == self._here:
            return
        self._here = here
        for parameter, own in zip(self._parameters, self._own, strict=True):
            parameter.__class__ = own if here else self._away
