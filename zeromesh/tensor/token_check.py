"""Check of a model's code, in a copy without memory: see ``tokens.py``."""

from __future__ import annotations

import copy
import logging
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from zeromesh.model.containers import map_tensors, tensors_of
from zeromesh.model.imitation import META, imitated, is_odd, left_as_they_are, limited, seed_all, undisturbed
from zeromesh.tensor.split_activation import SplitActivation
from zeromesh.tensor.tokens import DependsOnLength, MixesTokens, TokenRun

SECONDS = 60  # of a run

_log = logging.getLogger(__name__)

Call = Callable[[nn.Module, TokenRun], Any]


def alone(run: TokenRun, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module whose code is not to be checked: it is said to compute each token by itself."""
    if run.has_whole:
        return forward(*args, **kwargs)
    given = [x for x in tensors_of((args, kwargs)) if isinstance(x, SplitActivation)]
    with run.with_whole():
        output = forward(*run.join(args), **run.join(kwargs))
    return map_tensors(output, lambda x: run.split_again(x, given))


class TokenCheck:
    """Check of one model's code, in a copy without memory that is made before the model is changed."""

    def __init__(self, model: nn.Module, parts: int, attends: bool) -> None:
        self._parts, self._attends = parts, attends
        self._name = type(model).__name__
        self._model: nn.Module | None = None
        self._dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self._done: dict[Any, MixesTokens | None] = {}
        self._original = weakref.ref(model)
        self._current: TokenRun | None = None
        odd = next((name for name, module in model.named_modules() if is_odd(module)), None)
        try:
            if odd is not None:
                raise ValueError(f"{odd or 'it'} has another forward than its class, or hooks of its backward")
            self._model = imitated(model)[0].requires_grad_(False)
            hooked = next((name for name, module in model.named_modules() if _has_hooks(module)), None)
            if hooked is not None:
                raise ValueError(f"{hooked or 'it'} has hooks of its forward, which are not run")
        except Exception as error:  # a model may have what cannot be copied
            self._tell(error)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenCheck:
        """Return the same object: a copy of a model has the same code."""
        return self

    def replace(self, name: str, run: Callable[..., Any]) -> None:
        """Have a module of the copy compute by ``run(token_run, forward, *args, **kwargs)``."""
        if self._model is not None:
            module = self._model.get_submodule(name)
            setattr(module, "forward", partial(self._replaced, run, module.forward))  # noqa: B010

    def _replaced(self, run: Callable[..., Any], forward: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._current is not None
        return run(self._current, forward, *args, **kwargs)

    def _tell(self, error: Exception) -> None:
        _log.warning(
            "it could not be checked that the code of %s leaves the tokens of a sequence apart (%s: %s): compare its "
            "first losses with those of one process, as zeromesh verify does", self._name, type(error).__name__,
            str(error).partition("\n")[0],
        )  # fmt: skip

    def without_memory(self, value: Any) -> Any:
        """Return arguments of the model without memory, in the dtype that its parameters had."""
        return map_tensors(value, lambda x: x.detach().to(META, self._dtype if x.is_floating_point() else x.dtype))

    def once(self, given: Mapping[Any, Any], call: Call) -> None:
        """Check what ``call`` runs, unless that was done for arguments alike; raise MixesTokens, also later."""
        # Flags and names choose what code does; numbers, such as that of a step, may differ in each call.
        key: Any = frozenset((name, x if isinstance(x, bool | str) else x is None) for name, x in given.items())
        model, original = self._model, self._original()
        if model is None or original is None:
            return
        key = key, original.training
        if key not in self._done:
            modules = dict(original.named_modules())
            for name, own in model.named_modules():  # children after what is around them
                own.train(modules.get(name, original).training)
            self._done[key] = self._found(model, call)
        if (error := self._done[key]) is not None:
            raise error

    def _found(self, model: nn.Module, call: Call) -> MixesTokens | None:
        with undisturbed(), warnings.catch_warnings(), left_as_they_are(model):
            warnings.simplefilter("ignore")
            try:
                with limited(SECONDS):
                    whole = self._run(model, call, False)
            except MixesTokens as error:
                return error
            except Exception as error:
                _log.debug("the model cannot be checked", exc_info=True)
                self._tell(error)
                return None
            # Code need not run with other values, nor with another length, and was found to leave tokens apart.
            for guess, other in ((True, None), (False, whole)):
                try:
                    with limited(SECONDS):
                        if other is None and whole.guessed:
                            self._run(model, call, guess)
                        elif other is not None:
                            self._compare(whole, self._run(model, call, guess, other))
                except MixesTokens as error:
                    if other is None or isinstance(error, DependsOnLength):
                        return error
                except Exception:
                    _log.debug("another run of the check has failed", exc_info=True)
        return None

    def _compare(self, whole: TokenRun, part: TokenRun) -> None:
        for place in {**whole.seen, **part.seen}:
            if (one := whole.seen.get(place)) != (two := part.seen.get(place)):
                name, where = place
                raise DependsOnLength(
                    f"{name}, in {where}, computes with numbers, or gives shapes, that depend on the length of the "
                    f"sequence: {_told(one)} for all of it, {_told(two)} for the part of a rank"
                )

    def _run(self, model: nn.Module, call: Call, guess: bool, other: TokenRun | None = None) -> TokenRun:
        copied = copy.deepcopy(model)  # for what code keeps in the model
        names = {id(module): name for name, module in copied.named_modules()}
        self._current = run = TokenRun(self._parts, self._attends, guess, names, other)
        seed_all()
        with run.watched():
            call(copied, run)
        return run


def _told(seen: set[Any] | None) -> str:
    if not seen:
        return "it is not called"
    return ", ".join(sorted(str(numbers or shapes) for numbers, shapes in seen))


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks of its forward that are not torch's own."""
    every = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not type(hook).__module__.startswith("torch.") for hook in every)
