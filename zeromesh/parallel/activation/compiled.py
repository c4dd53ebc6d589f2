"""Compiled forwards of blocks, and how long their compilation takes."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import nn

from zeromesh.parallel.activation.checkpoint import compile_forward

_log = logging.getLogger("zeromesh")

COMPILERS = {"win32": "cl", "darwin": "clang++"}
"""Program, by platform, that inductor needs unless CXX names another; elsewhere it is g++."""

INDUCTOR = "inductor"

_begun: list[float] = []
_seconds: list[float] = []


def _begin(*_: Any) -> None:
    _begun.append(perf_counter())


def _end(*_: Any) -> None:
    if _begun:
        _seconds.append(perf_counter() - _begun.pop())


def require_backend(name: str) -> None:
    """Raise ValueError if torch.compile has no such backend, or it lacks a compiler on this machine."""
    backends = torch.compiler.list_backends(exclude_tags=())
    if name not in backends:
        raise ValueError(f"compile.backend is {name!r}; it must be one of {', '.join(backends)}")
    searched = os.environ.get("CXX") or COMPILERS.get(sys.platform, "g++")
    # Otherwise the first step would end in an error of torch's that names no key.
    if name == INDUCTOR and shutil.which(searched) is None:
        raise ValueError(
            f"compile.backend is {INDUCTOR!r}, which needs a C++ compiler, and there is none in PATH ("
            f"{searched}); install one, as by apt-get install g++, or set compile.backend to "
            "aot_eager or eager, which compute without one and no faster"
        )


def compile_blocks(modules: Sequence[nn.Module], options: dict[str, Any], tells: bool) -> None:
    """Compile the forward of each module at its first call; ``tells`` logs how long that took."""
    from torch._dynamo.callback import callback_handler

    # torch._dynamo.reset() forgets them.
    if _begin not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_begin)
        callback_handler.register_end_callback(_end)
    for module in modules:
        compile_forward(module, **options)
    if tells and modules:
        hooks = modules[0]._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, CompileTimes)]:
            del hooks[key]  # of an earlier call, which would log the same once more
        modules[0].register_forward_pre_hook(CompileTimes(len({type(module) for module in modules})))


def compile_seconds() -> float:
    """Return the seconds that this process has spent on compilation since ``compile_blocks`` was first called."""
    return sum(_seconds)


class CompileTimes:
    """Hook of the first block that logs, when it is called again, how long its compilation and others' took."""

    def __init__(self, kinds: int) -> None:
        self._kinds, self._logged, self._is_first = kinds, sum(_seconds), True

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Signature of torch's hooks."""
        spent = sum(_seconds) - self._logged
        if spent <= 0.0 or torch.compiler.is_compiling():
            return
        self._logged += spent
        again = "" if self._is_first else " again, for inputs of another kind,"
        self._is_first = False
        _log.info("compiling %d kind%s of blocks%s took %.1f s", self._kinds, "s"[: self._kinds > 1], again, spent)
