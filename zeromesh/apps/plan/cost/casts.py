"""Casts of ``torch.autocast`` on meta tensors, for which torch has none.

The lists, in ``casts.json``, are those of torch's documentation of automatic mixed precision, for GPUs and for CPUs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

_LISTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_NARROW, _LOSSES, _PROMOTED = (frozenset(_LISTS[name]) for name in ("narrow", "wide", "promoted"))
_WIDE = {"cpu": _LOSSES, "cuda": _LOSSES.union(_LISTS["wide on gpus"])}
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@contextmanager
def autocast_of(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Cast as ``torch.autocast`` of a device does; ``dtype`` None casts nothing."""
    with ExitStack() as stack:
        # Code that asks what is cast on the device of its tensors.
        for name, answer in (("is_autocast_enabled", dtype is not None), ("get_autocast_dtype", dtype)):
            stack.enter_context(patch.object(torch, name, partial(_on_meta, getattr(torch, name), answer)))
        if dtype is None:
            yield
            return
        # Functions of torch that are written in Python stand aside, so that what they call is seen.
        for check in _CHECKS:
            stack.enter_context(patch.object(F, check, lambda *_: False))
        mode = _Casts(dtype, _WIDE[device])
        attention = F.scaled_dot_product_attention

        def narrowed(*args: Any, **kwargs: Any) -> Any:
            return attention(*mode.cast(args, dtype), **mode.cast(kwargs, dtype))

        stack.enter_context(patch.object(F, "scaled_dot_product_attention", narrowed))
        stack.enter_context(mode)
        yield


def _on_meta(plain: Callable[..., Any], answer: Any, *device: str) -> Any:
    return answer if device == ("meta",) else plain(*device)


class _Casts(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype, wide: frozenset[str]) -> None:
        super().__init__()
        self._dtype, self._wide = dtype, wide
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}  # parameters and their casts, made once a forward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch on casts of its arguments; torch calls this for every one."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        wanted = None
        if name in _NARROW:
            wanted = self._dtype
        elif name in self._wide:
            wanted = torch.float32
        elif name in _PROMOTED:
            dtypes = {x.dtype for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            wanted = torch.float32 if {torch.float32, self._dtype} <= dtypes else None
        if wanted is not None:
            args, kwargs = self.cast(args, wanted), self.cast(kwargs, wanted)
        return func(*args, **kwargs)

    def cast(self, values: Any, dtype: torch.dtype) -> Any:
        """Return arguments with floating-point tensors on the meta device in a dtype."""

        def one(tensor: Tensor) -> Tensor:
            fits = tensor.is_meta and tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
            if not fits or tensor.dtype == dtype:
                return tensor
            if not (tensor.is_leaf and tensor.requires_grad):
                return tensor.to(dtype)
            if id(tensor) not in self._weights:
                self._weights[id(tensor)] = (tensor, tensor.to(dtype))
            return self._weights[id(tensor)][1]

        return tree_map_only(Tensor, one, values)
