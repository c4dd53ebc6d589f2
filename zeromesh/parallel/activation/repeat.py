"""Functions that are called again in the backward and compute the same there, buffers and modes included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zeromesh.base.buffer_memory import BufferMemory
from zeromesh.base.modes import modes_of, set_modes


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """Return the modules that a function computes with, as far as it shows them.

    Args:
        function: a module, a method of one, or ``functools.partial`` of these; other functions show none.
    """
    if isinstance(function, partial):
        return [module for part in (function.func, *function.args) if callable(part) for module in modules_of(part)]
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return list(owner.modules()) if isinstance(owner, nn.Module) else []


class Repeatable:
    """A function whose later calls see the buffers and modes of its modules as the first did, and leave them alone."""

    def __init__(self, function: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        self._function, self._modules = function, modules
        self._memory: BufferMemory | None = None  # of the first call
        self._modes: dict[nn.Module, bool] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        # The compiler cannot trace a swap of buffers, and leaves writes to them out of what it recomputes by itself.
        if torch.compiler.is_compiling():
            return self._function(*args, **kwargs)
        if self._memory is not None:
            # model.eval() may stand between a forward and its backward.
            now = modes_of(self._modules)
            set_modes(self._modes)
            try:
                with self._memory.restored():
                    return self._function(*args, **kwargs)
            finally:
                set_modes(now)
        self._memory, self._modes = BufferMemory(self._modules), modes_of(self._modules)
        try:
            return self._function(*args, **kwargs)
        finally:
            self._memory.note()
