"""Copies of models on tensors without memory, and runs of them of which nothing is left in the models."""

from __future__ import annotations

import copy
import ctypes
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import _lru_cache_wrapper, partial
from types import MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import get_ignored_functions, get_overridable_functions, get_testing_overrides
from torch.utils._device import _device_constructors

from zeromesh.base.containers import map_tensors
from zeromesh.base.dry.meta_values import META, copied_value, give
from zeromesh.base.substitution import KINDS, of_library, user_hooks
from zeromesh.base.worker import Worker

TORCH, OURS = (os.path.dirname(str(sys.modules[name].__file__)) + os.sep for name in ("torch", "zeromesh"))  # folders


@contextmanager
def undisturbed(device: torch.device | None = None) -> Iterator[None]:
    """Restore the states of the random generators, of the CPU and of a device, after this context."""
    state = random.getstate(), numpy.random.get_state()
    devices = [] if device is None or device.type in ("cpu", "meta") else [device]
    try:
        with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
            yield
    finally:
        random.setstate(state[0])
        numpy.random.set_state(state[1])


def seed_all() -> None:
    """Give the random generators of the CPU the same states in all processes."""
    random.seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed changes those of devices, too


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's first parameter with fractions."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


@contextmanager
def dry(model: nn.Module) -> Iterator[None]:
    """Run copies of a model without memory in this context, of which nothing is left afterwards."""
    _fill_caches()
    with undisturbed(), warnings.catch_warnings(), left_as_they_are(model):
        warnings.simplefilter("ignore")
        yield


def _fill_caches() -> None:
    """Let torch note its functions as they are: it would keep those that a context has put in their place."""
    for listing in (_device_constructors, get_ignored_functions, get_testing_overrides, get_overridable_functions):
        listing()


def imitated(
    model: nn.Module, dtype: torch.dtype | None = None, hooked: bool = False
) -> tuple[nn.Module, dict[int, Any]]:
    """Return a copy whose tensors have no memory, and its tensors by the ``id`` of the model's own.

    Args:
        model: any module.
        dtype: of parameters with fractions; None leaves theirs.
        hooked: keep all hooks. They may do anything outside of the model, so that usually only those of torch stay
            that make weights of parameters.
    """
    copies: dict[int, Any] = {}

    def imitate(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            is_parameter = isinstance(tensor, nn.Parameter)
            kind = dtype if dtype is not None and is_parameter and tensor.is_floating_point() else tensor.dtype
            copied = torch.empty_strided(tensor.size(), tensor.stride(), dtype=kind, device=META)
            value = None if is_parameter else copied_value(tensor)
            copies[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if is_parameter else give(copied, value)
        return tensor

    for module in model.modules():
        for name, value in vars(module).items():
            if name in HOOKS:
                copies[id(value)] = type(value)(
                    (key, hook)
                    for key, hook in value.items()
                    if hooked
                    or (name in ("_forward_hooks", "_forward_pre_hooks") and type(hook).__module__.startswith("torch."))
                )
            elif name != "_modules":
                map_tensors(value, imitate)
    return copy.deepcopy(model, copies), copies


HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "_hooks" in name and value is not None)


def code_of(module: nn.Module, values: bool = True) -> tuple[tuple[Any, ...], ...]:
    """Return what decides how a module computes, but for its weights: a proof of one holds for all that are alike.

    Numbers and shapes are alike if they are equal, functions and other objects if they are the same.

    Args:
        module: any.
        values: also its mode, and shapes and small values of its parameters and buffers; False: only what stays the
            same while an engine trains it.

    Returns:
        For each part its name, its class, its attributes, and users' hooks of it.
    """
    return tuple(
        (
            name,
            type(part),
            tuple((key, _alike(value, values)) for key, value in vars(part).items() if _decides(key, value, values)),
            tuple((kind, Same(hook)) for kind in KINDS for hook, _ in user_hooks(part, kind)),
        )
        for name, part in module.named_modules(remove_duplicate=False)
    )


def _decides(key: str, value: Any, values: bool) -> bool:
    if key in _VALUES:
        return values
    return key not in _OF_TORCH and not (key == "forward" and not values and of_library(value))


def _alike(value: Any, values: bool) -> Any:
    if isinstance(value, dict):
        return dict, tuple((key, _alike(item, values)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(_alike(item, values) for item in value)
    if isinstance(value, partial):
        return partial, _alike((value.func, value.args, value.keywords), values)
    if isinstance(value, Tensor):
        small = copied_value(value) if values and not isinstance(value, nn.Parameter) else None
        shown = None if small is None else str(small.tolist())
        return type(value), value.shape, value.dtype, value.requires_grad, shown
    return (type(value), value) if isinstance(value, _NUMBERS) else Same(value)


class Same:
    """Equal to what holds the same object; held, so that no other gets its address, and copied with it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


_VALUES = frozenset({"training", "_parameters", "_buffers"})
_OF_TORCH = (vars(nn.Module()).keys() | {"_compiled_call_impl"}) - _VALUES


def is_odd(module: nn.Module) -> bool:
    """Return whether a copy of a module would run the module itself, or hooks see gradients between layers."""
    forward = vars(module).get("forward")
    is_bound = isinstance(forward, MethodType) and forward.__self__ is module  # which a copy binds to itself
    return (forward is not None and not is_bound) or any(user_hooks(module, kind) for kind in KINDS[2:])


@contextmanager
def left_as_they_are(model: nn.Module) -> Iterator[None]:
    """Restore what the classes of the model, and the files that they are in, hold; clear caches of their functions."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    kinds = {kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "builtins")}
    files = files_of(kinds)
    # Functions of other files that these use may keep tensors, too.
    used = {getattr(value, "__module__", None) for file in files for value in vars(file).values()}
    files |= {sys.modules[name] for name in used if name in sys.modules and name.partition(".")[0] != "torch"}
    files |= _imported_by(files)
    restore = remembered(kinds, files)
    try:
        with _uncompiled():
            yield
    finally:
        restore()
        for value in (value for owner in (*kinds, *files) for value in vars(owner).values()):
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if isinstance(function, _lru_cache_wrapper):
                function.cache_clear()


def remembered(kinds: Collection[type], files: Collection[ModuleType]) -> Callable[[], None]:
    """Return a function that restores what classes hold, and the numbers and containers of files."""
    attributes = {kind: dict(vars(kind)) for kind in kinds}
    numbers = {file: {name: value for name, value in vars(file).items() if type(value) in _NUMBERS} for file in files}
    values = [value for owner in (*kinds, *files) for name, value in vars(owner).items() if not name.startswith("__")]
    containers = [(value, copy.copy(value)) for value in values if type(value) in (dict, list, set)]

    def restore() -> None:
        for kind, earlier in attributes.items():
            for name, value in dict(vars(kind)).items():
                if name not in earlier:
                    delattr(kind, name)
                elif value is not earlier[name] and not name.startswith("__"):
                    setattr(kind, name, earlier[name])
        for file, counted in numbers.items():
            vars(file).update(counted)
        for value, before in containers:
            if _identities(value) != _identities(before):
                value.clear()
                value.extend(before) if isinstance(value, list) else value.update(before)

    return restore


_NUMBERS = (bool, int, float, str, type(None))


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Let compiled functions run as they are written: torch's compiler would remember to skip what it sees here."""
    is_loaded = "torch._dynamo" in sys.modules
    try:
        with torch.compiler.set_stance("force_eager") if is_loaded else nullcontext():
            yield
    finally:
        if not is_loaded and "torch._dynamo" in sys.modules:  # loaded by the code that ran, as torch.cond does
            torch.compiler.reset()


def files_of(kinds: Collection[type]) -> set[ModuleType]:
    """Return the modules in which classes are written, and a user's modules that these have imported."""
    files = {sys.modules[name] for name in {kind.__module__ for kind in kinds} if name in sys.modules}
    return files | _imported_by(files)


def _imported_by(files: set[ModuleType]) -> set[ModuleType]:
    """Return a user's modules that these have imported."""
    imported = {value for file in files for value in vars(file).values() if isinstance(value, ModuleType)}
    paths = {module: str(getattr(module, "__file__", None) or sys.base_prefix) for module in imported}
    return {m for m, path in paths.items() if "site-packages" not in path and not path.startswith(sys.base_prefix)}


def _identities(value: Any) -> Any:
    return [(key, id(item)) for key, item in value.items()] if isinstance(value, dict) else [id(item) for item in value]


class _TooLong(BaseException):
    """The runs take too long; no exception of the kind that users' code may catch."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if code takes longer: with guessed values, a loop may never end."""
    ended, here = threading.Event(), threading.get_ident()

    def wait() -> None:
        if not ended.wait(seconds):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(here), ctypes.py_object(_TooLong))

    thread = Worker(wait)
    thread.start()
    try:
        yield
    except _TooLong:
        raise TimeoutError(f"its forward took more than {seconds} s on tensors without memory") from None
    finally:
        ended.set()
        thread.join()
