"""What programs that tests start run first: they do without torch._dynamo, which takes two seconds, until they compile.

Torch imports it with the first optimizer, to keep it from compiling some functions: it does not before it is there.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


def chosen(function: Function, beside_dynamo: Function) -> Function:
    """Return a function that is the one or, where torch._dynamo has been imported, the other."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (beside_dynamo if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return call


def not_compiled(exclude: Function, function: Function | None = None, recursive: bool = True) -> Any:
    """Decorate a function that is not to be compiled."""
    if function is None:
        return functools.partial(not_compiled, exclude, recursive=recursive)
    return chosen(function, exclude(function, recursive))


def with_grad_if_differentiable(decorate: Function, step: Function) -> Function:
    """Decorate a step of an optimizer."""
    import torch

    @functools.wraps(step)
    def call(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return step(optimizer, *args, **kwargs)

    return chosen(call, decorate(step))


CHANGES = {
    "torch._compile": ("_disable_dynamo", not_compiled),
    "torch.optim.optimizer": ("_use_grad_for_differentiable", with_grad_if_differentiable),
}
"""Module -> its decorator, and what is called with it in its place."""


class Finder(importlib.abc.MetaPathFinder):
    """Changes these modules when they are imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in CHANGES else None
        if spec is None or spec.loader is None:
            return None
        execute, (decorator, other) = spec.loader.exec_module, CHANGES[name]

        def change(module: ModuleType) -> None:
            execute(module)
            if hasattr(module, decorator):  # else torch is another, and imports it
                setattr(module, decorator, functools.partial(other, getattr(module, decorator)))

        spec.loader.exec_module = change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
