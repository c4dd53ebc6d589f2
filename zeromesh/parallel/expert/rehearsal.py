"""A forward that runs without a trace, and will run again."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from zeromesh.base.randomness import drawing_from, random_state
from zeromesh.base.substitution import of_library

_OF_TORCH = frozenset(vars(nn.Module()))  # attributes that each module has
_depth = 0


def rehearsing() -> bool:
    """Return whether a forward runs that will run again: nothing that it does counts."""
    return _depth > 0


@contextmanager
def rehearsal(modules: Iterable[nn.Module], arguments: Any, device: torch.device) -> Iterator[None]:
    """Restore the modules, lists in the arguments, and random numbers after this context, in which no hooks look on.

    Buffers are replaced by copies, attributes and what is in their lists, sets and dicts are put back. Hooks that are
    part of the computation run: those of this library, and of torch and PEFT.
    """
    global _depth
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.enter_context(drawing_from(random_state(device), device))
        for module in modules:
            attributes = vars(module)
            _keep(stack, attributes, _OF_TORCH)
            for key in ("_forward_hooks", "_forward_pre_hooks"):
                hooks = attributes[key]
                if away := [number for number, hook in hooks.items() if _looks_on(hook)]:
                    stack.callback(_put_back, hooks, hooks.copy(), frozenset())
                    for number in away:
                        del hooks[number]
            if module._buffers:
                stack.callback(_put_back, module._buffers, module._buffers.copy(), frozenset())
                copies = {name: b.detach().clone() for name, b in module._buffers.items() if b is not None}
                module._buffers.update(copies)
        for container in _containers(arguments):
            _keep(stack, {"": container}, frozenset())
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1


def _keep(stack: ExitStack, attributes: dict[str, Any], others: frozenset[str]) -> None:
    """Put back what attributes are now, and what is in those that are containers."""
    for key, value in attributes.items():
        if key not in others and type(value) in (dict, set):
            stack.callback(_put_back, value, value.copy(), frozenset())
        elif key not in others and type(value) is list:
            stack.callback(value.__setitem__, slice(None), value.copy())
    stack.callback(_put_back, attributes, {k: v for k, v in attributes.items() if k not in others}, others)


def _put_back(target: Any, values: Any, others: frozenset[str]) -> None:
    for key in set(target) - set(values) - others:
        target.pop(key) if isinstance(target, dict) else target.discard(key)
    target.update(values)


def _looks_on(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    home = str(getattr(hook, "__module__", ""))
    return not of_library(hook) or home.startswith(("transformers.", "zeromesh.parallel.expert."))


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple):
        if not isinstance(value, tuple):
            yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)
