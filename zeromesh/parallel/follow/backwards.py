"""Backwards and hooks of a user's own, in a run of a check: those of autograd's functions, of modules and of tensors.

A run computes no gradients, so they are called with gradients that know that their sequence is split, as activations
do. What is no gradient of tokens, such as that of a weight, may be a sum over them: the ranks' shares are added.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from os.path import relpath
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import function as functions

from zeromesh.base.containers import map_tensors, tensors_of
from zeromesh.base.dry.meta_values import META
from zeromesh.base.in_place import version
from zeromesh.base.substitution import KINDS, of_library, user_hooks
from zeromesh.parallel.follow.split_activation import NeedsWhole, SplitActivation
from zeromesh.parallel.follow.split_rules import as_split
from zeromesh.parallel.follow.ways import applied

Hooks = dict[str, list[tuple[Any, bool]]]  # see ``user_hooks``


class OfSum(Tensor):
    """Sum over the tokens in a backward, of which a rank has a share."""


class _Context(functions.FunctionCtx):
    needs_input_grad: tuple[bool, ...] = ()

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return getattr(self, "to_save", ())


def hooks_of(module: nn.Module) -> Hooks:
    """Return a user's hooks of a module by their kind; nothing if there are none."""
    return {kind: hooks for kind in KINDS if (hooks := user_hooks(module, kind))}


class Backwards:
    """Backwards and hooks that a run of a check comes to."""

    def __init__(self, run: Any, differentiates: bool) -> None:
        self._run, self.differentiates = run, differentiates  # whether the real forward computes gradients
        self.runs = False  # a backward runs
        self._seen: set[Any] = set()  # hooks of saved tensors

    def followed(self) -> AbstractContextManager[None]:
        """Return a context in which the backwards of autograd's functions that are applied are followed."""
        return applied(self._apply) if self.differentiates else nullcontext()

    def _apply(self, kind: Any, args: tuple[Any, ...], frame: FrameType | None) -> None:
        self._run.note(kind, args, None, frame)
        if self._run.has_whole or not any(isinstance(x, SplitActivation) for x in args):
            return
        sets_up = kind.setup_context is not functions.Function.setup_context
        context = _Context()
        context.needs_input_grad = tuple(isinstance(x, Tensor) and x.is_floating_point() for x in args)
        with torch.no_grad():
            outputs = kind.forward(*args) if sets_up else kind.forward(context, *args)
            if sets_up:
                kind.setup_context(context, args, outputs)
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        backward = kind.backward if kind.backward is not functions.Function.backward else kind.vjp
        self._follow(f"{kind.__name__}.backward", backward, partial(backward, context), several, args)

    def hooked(self, module: nn.Module, hooks: Hooks, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return what a module's forward does with these hooks around it."""
        for hook, takes_kwargs in hooks.get("forward_pre", ()):
            result = self._of_forward(partial(hook, module), args, *[kwargs] * takes_kwargs)
            if takes_kwargs and result is not None:
                args, kwargs = result
            elif result is not None:
                args = result if isinstance(result, tuple) else (result,)
        output = forward(*args, **kwargs)
        outputs, inputs = tuple(tensors_of(output)), tuple(x for x in args if isinstance(x, Tensor))
        count = len(inputs)
        for hook, _ in hooks.get("backward_pre", ()):
            self._of_hook(hook, lambda *gradients, hook=hook: hook(module, gradients), outputs, outputs)
        for hook, _ in hooks.get("backward", ()):
            call = lambda *gradients, hook=hook: hook(module, gradients[:count], gradients[count:])  # noqa: E731
            self._of_hook(hook, call, inputs + outputs, inputs)
        for hook, takes_kwargs in hooks.get("forward", ()):
            result = self._of_forward(partial(hook, module), args, *[kwargs] * takes_kwargs, output)
            output = output if result is None else result
        return output

    def _of_forward(self, hook: Callable[..., Any], *values: Any) -> Any:
        """Return the result of a hook; it may compute over tokens if it changes nothing, as one that logs norms."""
        before, error = self._run.refused, None
        try:
            result = hook(*values)
        except ValueError as refused:
            error = refused
        if error is None and self._run.refused is before:
            return result
        if self._changes(hook, values):
            raise error or self._run.refused
        self._run.forgive(before)
        return None

    def _changes(self, hook: Callable[..., Any], values: Any) -> bool:
        """Return whether a hook that is given plain tensors writes to them, or returns something."""
        plain = map_tensors(values, self._run.unsplit)
        before = [version(x) for x in tensors_of(plain)]
        return hook(*plain) is not None or before != [version(x) for x in tensors_of(plain)]

    def of_tensor(self, x: SplitActivation, hook: Any) -> None:
        """Follow a hook of a tensor's gradient."""
        self._of_hook(hook, hook, (x,), (x,))

    def of_saved(self, x: SplitActivation) -> None:
        """Follow what hooks in force make of tensors that are saved for the backward."""
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if of_library(pack) or pack in self._seen or self._run.has_whole:
            return
        self._seen.add(pack)
        self._follow("a hook of saved tensors", pack, lambda gradient: unpack(pack(gradient)), (x,), (x,))

    def _of_hook(self, hook: Any, call: Callable[..., Any], like: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
        """Follow a hook, unless it gives no other gradient, as one that logs norms."""
        if self._run.has_whole or not self.differentiates or not any(isinstance(x, SplitActivation) for x in like):
            return
        try:
            with self._run.with_whole(), torch.no_grad():
                if not self._changes(call, tuple(map(self._gradient, like))):
                    return
        except Exception:
            pass  # it needs what only the run has, or shows it there again
        self._follow(f"the hook {getattr(hook, '__name__', hook)}", hook, call, like, wanted)

    def _follow(
        self, name: str, code: Any, call: Callable[..., Any], like: tuple[Any, ...], wanted: tuple[Any, ...]
    ) -> None:
        """Call code with the gradients of some tensors; it must return parts of gradients of those that are parts."""
        code = inspect.unwrap(code)
        code = getattr(code, "__code__", getattr(type(code).__call__, "__code__", None))
        place = "" if code is None else f"{relpath(code.co_filename)}:{code.co_firstlineno}"
        before, self.runs = self.runs, True
        try:
            with torch.no_grad():
                result = call(*map(self._gradient, like))
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, NeedsWhole) as error:
            reason = f"cannot be followed ({type(error).__name__}: {error})"
            refused: Exception = self._run.mixed(reason, place, name)
            raise refused from None
        finally:
            self.runs = before
        results = result if isinstance(result, tuple) else (result,)
        for x, gradient in zip(wanted, results, strict=False):
            if isinstance(x, SplitActivation) and not self._is_part(gradient, x):
                raise self._run.mixed("gives a gradient that is not known to be of each token by itself", place, name)

    def _is_part(self, gradient: Any, x: SplitActivation) -> bool:
        if isinstance(gradient, SplitActivation):
            return (gradient.split_dim.dim, gradient.split_dim.sections) == (x.split_dim.dim, x.split_dim.sections)
        return gradient is None or getattr(gradient, "is_alike", False) or not x.is_floating_point()

    def _gradient(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return None
        with torch._C.DisableTorchFunction():
            gradient = torch.empty(x.shape, dtype=x.dtype, device=META)
            return as_split(gradient, x.split_dim, self._run) if isinstance(x, SplitActivation) else gradient
