"""Runs of a model's forward on tensors without memory, in a copy, so that nothing of them is left in the model."""

from __future__ import annotations

import copy
import ctypes
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import _lru_cache_wrapper
from types import MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves

from zeromesh.base.containers import map_tensors
from zeromesh.base.substitution import KINDS, user_hooks
from zeromesh.base.worker import Worker

META = torch.device("meta")
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


class WithoutMemory(TorchDispatchMode):
    """Context in which operators compute shapes and dtypes only, on the meta device; heirs note what they see.

    Attributes:
        guessed: True once a value was asked for, which such tensors lack.
        operators: number of operators called; one above ``limit`` raises RuntimeError.
    """

    def __init__(self, guess: bool, limit: float = float("inf")) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guess, self._limit = guess, limit
        self.guessed, self.operators = False, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operator; torch calls it for every one."""
        self.operators += 1
        if self.operators > self._limit:
            raise RuntimeError(f"it takes more than {self._limit} operators")
        return self.run_operator(func, args, kwargs or {})

    def run_operator(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Note an operator, and compute it."""
        for x in arg_tree_leaves(*args, **kwargs):
            if isinstance(x, Tensor):
                self.reads(x)
        return self.compute(func, args, kwargs)

    def reads(self, x: Tensor) -> None:
        """Note that an operator reads a tensor."""

    def compute(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator; a value that it reads is the guess."""
        operator = func._overloadpacket
        read = [x for x in arg_tree_leaves(*args, **kwargs) if isinstance(x, Tensor)]
        # All is on the meta device, but for numbers, whose values may be asked for.
        if not all(x.is_meta or x.ndim == 0 for x in read):
            args, kwargs = map_tensors((args, dict(kwargs)), lambda x: x if x.ndim == 0 else x.to(META))
        if "device" in kwargs or (not read and any(argument.name == "device" for argument in func._schema.arguments)):
            kwargs = {**kwargs, "device": META}
        if operator in _OF_VALUES and args[0].is_meta:
            self.guessed = True
            return _OF_VALUES[operator](args[0], self._guess)
        if operator in _BY_INDEX and any(index is not None and index.dtype is torch.bool for index in args[1]):
            args = args[0], _few(args[1]), *args[2:]
        if operator is torch.ops.aten._grouped_mm:  # of which torch knows the shape for some dtypes only
            return _grouped_product(*args, **kwargs)
        return func(*args, **kwargs)


def _grouped_product(a: Tensor, b: Tensor, offsets: Tensor | None = None, *rest: Any, **more: Any) -> Tensor:
    if a.ndim == b.ndim == 2:
        assert offsets is not None
        return a.new_empty((len(offsets), a.shape[0], b.shape[1]))
    return a.new_empty((*a.shape[int(b.ndim == 2 and a.ndim == 3) : -1], b.shape[-1]))


_BY_INDEX = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}


def _few(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return indices in which masks pick one entry: how many they do is not known."""
    new_indices: list[Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype is torch.bool
        new_indices += [index.new_empty(1, dtype=torch.long)] * index.ndim if is_mask and index is not None else [index]
    return new_indices


def _number(tensor: Tensor, guess: bool) -> bool | int | float:
    return guess if tensor.dtype is torch.bool else float(guess) if tensor.is_floating_point() else int(guess)


# Operators that need values, which tensors without memory lack -> a stand-in for their result.
_OF_VALUES: dict[Any, Callable[[Tensor, bool], Any]] = {
    torch.ops.aten._local_scalar_dense: _number,
    torch.ops.aten.nonzero: lambda tensor, guess: tensor.new_empty((1, tensor.ndim), dtype=torch.long),
    torch.ops.aten.equal: lambda tensor, guess: guess,
}


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's first parameter with fractions."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def on_meta(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor without memory, in another dtype if there is one and it has fractions."""
    dtype = dtype if tensor.is_floating_point() else None
    return torch.empty_like(tensor, device=META, dtype=dtype, requires_grad=tensor.requires_grad)


@contextmanager
def dry(model: nn.Module) -> Iterator[None]:
    """Run copies of a model without memory in this context, of which nothing is left afterwards."""
    with undisturbed(), warnings.catch_warnings(), left_as_they_are(model):
        warnings.simplefilter("ignore")
        yield


def imitated(model: nn.Module) -> tuple[nn.Module, dict[int, Any]]:
    """Return a copy whose tensors have no memory, and its tensors by the ``id`` of the model's own."""
    copies: dict[int, Any] = {}

    def imitate(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            meta_tensor = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(meta_tensor, tensor.requires_grad) if is_parameter else meta_tensor
        return tensor

    for module in model.modules():
        for name, value in vars(module).items():
            if name in HOOKS:
                # Hooks may do anything outside of the model; only those of torch that make weights of parameters stay.
                copies[id(value)] = type(value)(
                    (key, hook)
                    for key, hook in value.items()
                    if name in ("_forward_hooks", "_forward_pre_hooks") and type(hook).__module__.startswith("torch.")
                )
            elif name != "_modules":
                map_tensors(value, imitate)
    return copy.deepcopy(model, copies), copies


HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "_hooks" in name and value is not None)


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
