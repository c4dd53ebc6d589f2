"""Check of a model's code, in a copy without memory: see ``tokens.py``."""

from __future__ import annotations

import copy
import logging
import os
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from itertools import count
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from zeromesh.base.containers import map_tensors, tensors_of
from zeromesh.base.dry.meta_values import on_meta
from zeromesh.base.dry.model_copy import dry, dtype_of, imitated, limited, seed_all
from zeromesh.base.substitution import of_library
from zeromesh.parallel.follow.backwards import Hooks, hooks_of
from zeromesh.parallel.follow.split_activation import SplitActivation
from zeromesh.parallel.follow.tokens import DependsOnLength, MixesTokens, TokenRun, WayNotChecked
from zeromesh.parallel.follow.ways import HARMLESS, Beginning, Way, applied, way_of

SECONDS = 60  # of a run
MOST_KEPT = 256  # results, the ways of which take some 30 KB each

_log = logging.getLogger(__name__)

Call = Callable[[nn.Module, TokenRun], Any]


def alone(run: TokenRun, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module whose code is not to be checked: it is said to compute each token by itself."""
    if run.has_whole:
        return forward(*args, **kwargs)
    parts = [x for x in tensors_of((args, kwargs)) if isinstance(x, SplitActivation)]
    with run.with_whole():
        output = forward(*run.join(args), **run.join(kwargs))
    return map_tensors(output, lambda x: run.split_again(x, parts))


class TokenCheck:
    """Check of one model's code, in a copy without memory that is made before the model is changed.

    Where code of the package ``trusted`` would be refused, it is only told that what follows was not checked.
    """

    def __init__(self, model: nn.Module, parts: int, attends: bool, trusted: str | None = None) -> None:
        self._parts, self._attends = parts, attends
        self._trusted = None if trusted is None else os.path.dirname(str(sys.modules[trusted].__file__)) + os.sep
        self._name = type(model).__name__
        self._model: nn.Module | None = None
        self._dtype = dtype_of(model)
        self._done: OrderedDict[Any, _Checked] = OrderedDict()
        self._original = weakref.ref(model)
        self._current: TokenRun | None = None
        self._forward: _Forward | None = None
        self._whole: list[str] = []  # names of modules whose code may compute over tokens
        # By name of a module that is given whole sequences, the places of other arguments that are parts of one.
        self.also_spread: dict[str, set[int | str]] = defaultdict(set)
        self._outside = 0  # how many of these run at present
        self._graphs = _compiled_graphs()
        self._applied = ExitStack()
        odd = next((name for name, module in model.named_modules() if "forward" in vars(module)), None)
        try:
            if odd is not None:
                raise ValueError(f"{odd or 'it'} has another forward than its class")
            self._model = imitated(model)[0].requires_grad_(False)
        except Exception as error:  # a model may have what cannot be copied
            self._tell(error)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenCheck:
        """Return the same object: a copy of a model has the same code."""
        return self

    def replace(self, name: str, run: Callable[..., Any], gives_whole: bool = False) -> None:
        """Let a module of the copy compute by ``run(token_run, forward, *args, **kwargs)``.

        If it ``gives_whole`` sequences to the module's code, or that is not to be checked, its ways do not count.
        """
        if self._model is not None:
            module = self._model.get_submodule(name)
            setattr(module, "forward", partial(self._replaced, name, run, module.forward))  # noqa: B010
            self._whole += [name] * gives_whole

    def _replaced(self, name: str, run: Callable[..., Any], forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        assert self._current is not None
        # Hooks see what is around a replacement, or what is inside of it if they were registered before.
        return run(self._current, self._current.with_hooks(name, forward), *args, **kwargs)

    def install(self, model: nn.Module) -> None:
        """Mark the code of modules that gets whole sequences, or is not to be checked."""
        for name in self._whole:
            module = model.get_submodule(name)
            setattr(module, "forward", wraps(module.forward)(partial(self._run_outside, module.forward)))  # noqa: B010

    def _run_outside(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        self._outside += 1
        try:
            return forward(*args, **kwargs)
        finally:
            self._outside -= 1

    def _tell(self, error: Exception) -> None:
        _log.warning(
            "could not check whether the code of %s treats tokens separately (%s: %s): compare its first losses with "
            "those of one process, as zeromesh verify does",
            self._name,
            type(error).__name__,
            str(error).partition("\n")[0],
        )

    def without_memory(self, value: Any) -> Any:
        """Return arguments of the model without memory, in the dtype that its parameters had."""
        return map_tensors(value, lambda x: on_meta(x.detach(), self._dtype))

    @contextmanager
    def followed(self, arguments: Mapping[Any, Any], call: Call, refuse: Callable[[str], Exception]) -> Iterator[None]:
        """Check what ``call`` runs, as ``begin`` does, and follow a forward of the model in this context.

        Raise what ``refuse`` returns for the reason if tokens are not apart, before the forward or after it.
        """
        try:
            torch.compiler.disable(self.begin)(arguments, call)
            completed = False
            try:
                yield
                completed = True
            finally:
                torch.compiler.disable(self.end)(completed)
        except MixesTokens as error:
            raise refuse(str(error)) from None

    def begin(self, arguments: Mapping[Any, Any], call: Call) -> None:
        """Check what ``call`` runs, unless that was done for arguments alike; raise MixesTokens, also later.

        A forward of the model begins, whose calls of torch's functions go to ``follow`` until it ends with ``end``.
        """
        model, original = self._model, self._original()
        if model is None or original is None:
            return
        modules = dict(original.named_modules())
        hooks = {name: kinds for name, module in modules.items() if (kinds := hooks_of(module))}
        # Flags, names and shapes choose what code does; numbers, such as that of a step, may differ in each call.
        shapes = frozenset((name, _kind(value)) for name, value in arguments.items())
        hooked = tuple(
            (name, kind, id(hook)) for name in hooks for kind in hooks[name] for hook, _ in hooks[name][kind]
        )
        modes = tuple(module.training for module in modules.values())
        key = shapes, modes, torch.is_grad_enabled(), hooked
        users = {name: module for name, module in modules.items() if not of_library(module)}
        device = next((x.device for x in tensors_of(arguments)), torch.device("cpu"))
        # Hooks are told by their ids, so what is done keeps them.
        self._forward = forward = _Forward(key, call, hooks, Beginning.of(users), self._done.get(key), device)
        if forward.checked is None:
            forward.checked = self._done[key] = self._checked(model, original, forward)
        self._done.move_to_end(key)
        if len(self._done) > MOST_KEPT:
            self._done.popitem(last=False)
        if forward.checked.error is not None:
            self._forward = None
            raise forward.checked.error
        if torch.is_grad_enabled():
            self._applied.enter_context(applied(lambda kind, args, frame: self.follow(kind, args, None, frame)))

    def follow(self, function: Any, args: Any, kwargs: Any, frame: FrameType | None) -> None:
        """Note a call of a function of torch, by code in a frame, that the check of this forward has not seen."""
        forward = self._forward
        if forward is None or self._outside or forward.checked is None or forward.checked.ways is None:
            return
        way = way_of(function, args, kwargs, frame)
        if way is not None and way not in forward.checked.ways:
            forward.strange.add(way)

    def end(self, completed: bool = True) -> None:
        """End a forward: check the code again if it took another way; raise MixesTokens."""
        forward, self._forward, self._outside = self._forward, None, 0
        self._applied.close()
        # Compiled code is not followed, but compiled anew where it takes another way.
        before, self._graphs = self._graphs, _compiled_graphs()
        model, original = self._model, self._original()
        if forward is None or not completed or model is None or original is None:
            return
        assert forward.checked is not None
        ways = forward.checked.ways
        if not forward.strange and self._graphs == before:
            return
        again = self._checked(model, original, forward)
        if ways is not None:
            again.ways = ways | (again.ways or set())
        self._done[forward.key] = again
        if again.error is None and again.ways is not None:
            for function, file, line, *_ in forward.strange - again.ways:
                name = getattr(function, "__name__", str(function))
                if name not in HARMLESS:
                    again.error = WayNotChecked(
                        f"{name}, in {os.path.relpath(file)}:{line}, ran in this forward, and not when the code was "
                        "checked, which was run with the same attributes of modules and the same random numbers"
                    )
                    break
        if again.error is not None:
            raise again.error

    def _checked(self, model: nn.Module, original: nn.Module, forward: _Forward) -> _Checked:
        modules = dict(original.named_modules())
        for name, module in model.named_modules():  # children after what is around them
            module.train(modules.get(name, original).training)
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        engines = hooks is not None and of_library(hooks[0])
        unchanged = saved_tensors_hooks(_same, _same) if engines else nullcontext()
        with dry(model), unchanged:
            return replace(self._result(model, original, forward), hooks=forward.hooks)

    def _result(self, model: nn.Module, original: nn.Module, forward: _Forward) -> _Checked:
        checked = _Checked(None, set())
        for guess in (False, True):  # a condition on values is tried both ways
            whole_run = TokenRun(self._parts, self._attends, guess, forward.device)
            try:
                self._call(model, original, forward, whole_run)
            except MixesTokens as error:
                return self._refused(error)
            except Exception as error:
                _log.debug("the model cannot be checked", exc_info=True)
                if guess:  # code need not run with other values
                    return checked
                self._tell(error)
                return _Checked(None, None)
            # Ways are those of the run that checks them: state that others share may be another one in the next.
            for attempt in count():
                part_run = TokenRun(self._parts, self._attends, guess, forward.device, whole_run, attempt)
                try:
                    self._call(model, original, forward, part_run)
                    if not part_run.is_plain:
                        self._compare(whole_run, part_run)
                except MixesTokens as error:
                    # A piece of a part may be shorter than what code takes together, as the whole run has seen.
                    if isinstance(error, DependsOnLength) or part_run.way not in whole_run.ways:
                        return self._refused(error)
                    if not part_run.is_plain:
                        continue
                except Exception:
                    _log.debug("another run of the check has failed", exc_info=True)
                assert checked.ways is not None
                checked.ways |= part_run.ways
                break
            if not (whole_run.dry.values.guessed or part_run.dry.values.guessed):
                break
        return checked

    def _refused(self, error: MixesTokens) -> _Checked:
        if self._trusted is None or not os.path.abspath(error.place).startswith(self._trusted):
            return _Checked(error, None)
        self._tell(error)
        return _Checked(None, None)

    def _compare(self, whole_run: TokenRun, part_run: TokenRun) -> None:
        for place in {**whole_run.seen, **part_run.seen}:
            if (of_whole := whole_run.seen.get(place)) != (of_part := part_run.seen.get(place)):
                name, where = place
                raise DependsOnLength(
                    f"{name}, in {where}, computes with numbers, or gives shapes, that depend on the length of the "
                    f"sequence: {_told(of_whole)} for all of it, {_told(of_part)} for the part of a rank",
                    where,
                )

    def _call(self, model: nn.Module, original: nn.Module, forward: _Forward, run: TokenRun) -> None:
        copied = copy.deepcopy(model)  # for what code keeps in the model
        seed_all()
        forward.state.restore(copied, original)
        run.prepare(copied, forward.hooks)
        self._current = run
        with limited(SECONDS), run.watched():
            forward.call(copied, run)


def _compiled_graphs() -> int:
    """Return how many graphs torch has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


class Following(TorchFunctionMode):
    """Context in which calls of torch's functions are told to a check, between its ``begin`` and ``end``."""

    def __init__(self, check: TokenCheck) -> None:
        super().__init__()
        self.check = check

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_compiling():
            self.check.follow(func, args, kwargs, sys._getframe(1))
        return func(*args, **(kwargs or {}))


@dataclass
class _Checked:
    """Result of a check: its error, and the ways of the code, as far as they are known."""

    error: MixesTokens | None
    ways: set[Way] | None
    hooks: Mapping[str, Hooks] = field(default_factory=dict)


@dataclass
class _Forward:
    """Forward of the model that is under way."""

    key: Any
    call: Call
    hooks: Mapping[str, Hooks]  # by the names of modules
    state: Beginning
    checked: _Checked | None
    device: torch.device
    strange: set[Way] = field(default_factory=set)  # calls that the check has not seen


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _kind(value: Any) -> Any:
    """Return what an argument is, as far as it says what code does with it."""
    if isinstance(value, bool | str) or value is None:
        return value
    return tuple((tuple(x.shape), x.dtype) for x in tensors_of(value))


def _told(seen: set[Any] | None) -> str:
    if not seen:
        return "it is not called"
    return ", ".join(sorted(str(numbers or shapes) for numbers, shapes in seen))
