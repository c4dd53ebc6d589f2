"""Ways of code: which functions of torch a forward calls, where, and with which whole numbers.

A check follows the code of one forward, and a later one may take another way: by a counter, a flag, or chance. So each
forward is compared with the ways that were checked, call by call.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from numbers import Number
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch import nn
from torch.autograd import function as functions
from torch.utils.hooks import RemovableHandle

from zeromesh.base.containers import tensors_of
from zeromesh.base.dry.model_copy import HOOKS, OURS, TORCH, files_of, remembered
from zeromesh.base.substitution import of_library
from zeromesh.parallel.follow.split_rules import ENTRY_BY_ENTRY

# Files of torch's compiler, whose code was seen when it was compiled, and of its hooks and recomputation.
_FILES = "_dynamo _inductor _functorch fx autograd utils/hooks.py utils/checkpoint.py nn/modules/_functions.py"
_BETWEEN = tuple(TORCH + file for file in _FILES.split())

# transformers' code of masks, which context parallelism replaces, and of warnings: it looks at ids and positions.
_LOOKS_AT_IDS = tuple(os.path.join("transformers", file) for file in ("masking_utils.py", "modeling_utils.py"))


def looks_at_ids(file: str) -> bool:
    """Return whether a file is one of transformers' own that looks at ids and positions only."""
    if not file.endswith(_LOOKS_AT_IDS):
        return False
    library = sys.modules.get("transformers")
    return library is not None and file.startswith(os.path.dirname(str(library.__file__)) + os.sep)


# Functions around a block in a check's copy, where the model itself has hooks: they call nothing of torch themselves.
_AROUND_BLOCKS = {"_replaced", "_entered", "_last", "hooked"}

# Functions that leave tokens apart whatever they are given, or that only tell something.
HARMLESS = {*ENTRY_BY_ENTRY, "__get__", "requires_grad_", "dim", "size", "numel", "is_floating_point", "__len__",
    "register_hook", "backward", "embedding"}  # fmt: skip


@cache
def _owner(file: str) -> str:
    """Return whose code a file has: "user", "torch", or "" where its calls are no part of a user's code."""
    if not os.path.isabs(file) or "torchinductor" in file or looks_at_ids(file):
        return ""
    if file.startswith((OURS, *_BETWEEN)):
        return ""
    return "torch" if file.startswith(TORCH) else "user"


Way = tuple[Any, ...]  # function, file and line of a call, and what it is given but tensors


def way_of(function: Any, args: Any, kwargs: Any, frame: FrameType | None) -> Way | None:
    """Return the way of a call that code in a frame makes; None unless it is part of a user's."""
    while frame is not None:
        code = frame.f_code
        if (owner := _owner(code.co_filename)) == "user":
            settings: list[Any] = []
            if getattr(function, "__name__", "") not in HARMLESS:
                collect(args, settings)
                if kwargs:
                    collect(kwargs.values(), settings)
            return function, code.co_filename, frame.f_lineno, *settings
        if not owner and code.co_name not in _AROUND_BLOCKS:
            return None
        frame = frame.f_back
    return None


def collect(values: Any, into: list[Any], fractions: bool = False) -> None:
    """Collect what says how a function computes; numbers with fractions may be others each time."""
    for value in values:
        kind = type(value)
        if kind in _SAYING:
            into.append(value)
        elif isinstance(value, int | numpy.integer):
            into.append(int(value))
        elif kind is slice:
            collect((value.start, value.stop, value.step), into, fractions)
        elif kind in _NESTED:
            into.append(kind)
            collect(value.values() if kind is dict else value, into, fractions)
        elif fractions and isinstance(value, Number | numpy.number):
            into.append(value)
        elif fractions and kind is numpy.ndarray:
            into += value.ravel().tolist()


_SAYING = {int, str, bool, type(None), type(...)}
_NESTED = {tuple, list, dict, torch.Size}


@contextmanager
def applied(note: Callable[[Any, Any, FrameType | None], None]) -> Iterator[None]:
    """Call ``note(class, arguments, frame)`` where code of this thread applies a user's ``autograd.Function``."""
    thread, usual = threading.get_ident(), functions._is_setup_context_defined

    def asked(setup: Any) -> bool:
        frame = sys._getframe(1)
        kind = frame.f_locals.get("cls")
        if kind is not None and threading.get_ident() == thread and not of_library(kind):
            note(kind, frame.f_locals["args"], frame.f_back)
        return bool(usual(setup))  # type: ignore[no-untyped-call]

    # No mode sees it. Each call of ``apply`` asks by this function, also of one that was looked up before.
    with patch.object(functions, "_is_setup_context_defined", asked):
        yield


def answer(function: Any, args: Any, differentiates: bool, device: torch.device) -> Any:
    """Return what a function would in the real forward, on a device and with gradients; None for others."""
    name = getattr(function, "__name__", "")
    attribute = function.__self__.__name__ if name == "__get__" else ""
    if attribute in ("device", "is_cuda", "is_cpu", "is_meta"):
        return device if attribute == "device" else attribute == f"is_{device.type}"
    if not differentiates:
        return None
    if attribute == "requires_grad" and args[0].is_floating_point():
        return True
    if name in ("requires_grad_", "retain_grad"):
        return args[0]
    return RemovableHandle(OrderedDict()) if name in ("register_hook", "register_post_accumulate_grad_hook") else None


@dataclass
class Beginning:
    """Begin of a forward: what a model, its classes and their files hold, and random numbers."""

    attributes: dict[str, dict[str, Any]]  # by the names of modules
    drawn: tuple[Any, Any]
    restore_shared: Callable[[], None]

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> Beginning:
        """Return the present one."""
        attributes = {
            name: {
                **vars(module),
                "_buffers": {key: x.clone() for key, x in module._buffers.items() if x is not None and not x.ndim},
            }
            for name, module in modules.items()
        }
        kinds = {type(module) for module in modules.values()}
        return cls(attributes, (random.getstate(), numpy.random.get_state()), remembered(kinds, files_of(kinds)))

    def restore(self, copied: nn.Module, original: nn.Module) -> None:
        """Set the attributes of a copy of the model, and the random numbers, to these."""
        random.setstate(self.drawn[0])
        numpy.random.set_state(self.drawn[1])
        self.restore_shared()
        copies = dict(copied.named_modules())
        # What is in the model itself is in the copy already.
        memo: dict[int, Any] = {id(module): copies[name] for name, module in original.named_modules() if name in copies}
        tensors = {**dict(copied.named_parameters()), **dict(copied.named_buffers())}
        for name, tensor in (*original.named_parameters(), *original.named_buffers()):
            memo[id(tensor)] = tensors.get(name)
        for place, attributes in self.attributes.items():
            there: Any = vars(copies.get(place, copied))
            there["_buffers"].update({key: x.to("cpu", copy=True) for key, x in attributes["_buffers"].items()})
            for name, value in attributes.items():
                if name in _OF_MODULES or name in HOOKS or tensors_of(value) or of_library(value):
                    continue
                with suppress(Exception):  # what cannot be copied stays as it was
                    there[name] = copy.deepcopy(value, memo)


_OF_MODULES = {"forward", "training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
