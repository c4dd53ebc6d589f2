"""Check, in a run without memory, that a model's code leaves the tokens of a sequence apart from each other.

Where ranks hold parts of sequences, a function that computes over tokens would be given this rank's alone, and nothing
would tell. So a copy of the model runs once with activations that know that their sequence is split
(``split_activation.py``): a function for which there is no rule would have to gather the tokens, and is refused.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import arg_tree_leaves

from zeromesh.model.containers import map_tensors, tensors_of
from zeromesh.model.imitation import (
    META,
    WithoutMemory,
    imitated,
    is_odd,
    left_as_they_are,
    limited,
    seed_all,
    undisturbed,
)
from zeromesh.tensor import split_views as split_views  # which registers rules
from zeromesh.tensor.split_activation import NeedsWhole, SplitActivation, SplitDim, part_of
from zeromesh.tensor.split_rules import ENTRY_BY_ENTRY, as_split, entry_by_entry

SECONDS = 60  # of all runs
MOST_OPERATORS = 300_000  # of a run
FOREIGN = tuple(os.path.dirname(str(one.__file__)) for one in (torch, sys.modules["zeromesh"]))

# Random numbers for each entry are drawn for each token, as in dropout.
DRAWS = {"rand_like", "randn_like", "bernoulli", "bernoulli_", "normal_", "uniform_", "exponential_"}
# Tensors whose entries are all alike, or drawn: a rank makes as many as it has tokens.
CONSTANTS = {"zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty"}
# Values that a model may look for in all that it has, to raise an error, and what it expects.
FLAWS = {"isnan": torch.tensor(False), "isinf": torch.tensor(False), "isfinite": torch.tensor(True)}
NUMBERED = {*ENTRY_BY_ENTRY, "full", "new_full", "tensor", "as_tensor", "scalar_tensor", "full_like",
    "scaled_dot_product_attention"}  # fmt: skip
"""Functions whose result depends on the numbers that they are given, where others take lengths and dims."""

_log = logging.getLogger(__name__)


class MixesTokens(ValueError):
    """Code computes over tokens, of which a rank has a part."""


class OfLabels(Tensor):
    """Tensor made of labels, with which begins the loss: a mean over tokens, which is completed over the ranks."""


class LossReached(BaseException):
    """Code has come to the loss, and takes what a run without memory does not have."""


class TokenRun(WithoutMemory):
    """One forward, as the axis over which sequences are split, and on which nothing is ever gathered.

    Attributes:
        parts: number of parts of a sequence.
        has_whole: True while a module runs that is given whole sequences.
        size: the same, but if the code is told that the sequence is as long as this rank's part.
    """

    def __init__(self, parts: int, tells_part: bool, attends: bool, guess: bool) -> None:
        super().__init__(guess)
        self.has_whole = False
        self.parts, self.size, self._tells_part = parts, parts, tells_part
        self.numbers: list[tuple[str, str, tuple[float, ...]]] = []  # function, place in the code, and its numbers
        self._left = MOST_OPERATORS
        # Tokens of the first sequence that is spread, of a rank's part of it, and of that which code is told of.
        self._whole = self._part = self._told = 0
        self._joined_dims: dict[tuple[int, int, int], SplitDim] = {}
        self._watch = _Watch(self, attends)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow activations in this context; raise MixesTokens where one is needed whole."""
        with torch.no_grad(), self, self._watch:  # without gradients, a function's own backward has not to be known
            try:
                yield
            except LossReached:
                pass
            except NeedsWhole:
                raise self._mixed("works on memory, or on code, that cannot be followed") from None

    def spread(self, x: Tensor, dim: int, whole: int, part: int) -> Tensor:
        """Return this rank's part of a tensor with a dim of tokens: ``part`` of a ``whole`` sequence."""
        if not self._whole:
            # The part is cut as well, or rules would take it for what all ranks have.
            divisors = (n for n in range(2, part + 1) if part % n == 0)
            self.size = next(divisors, 1) if self._tells_part else self.parts
            self._told = part if self._tells_part else whole
            self._whole, self._part = whole, part
        told = whole * self._told // self._whole
        split_dim = self._joined_dims.get((x.ndim, dim, whole), SplitDim(dim, (told,)))
        with torch._C.DisableTorchFunction():
            made = torch.empty([*x.shape[:dim], told // self.size, *x.shape[dim + 1 :]], dtype=x.dtype, device=META)
            return as_split(made, split_dim, self)

    def join(self, value: Any) -> Any:
        """Return a value with all sequences whole."""
        return map_tensors(value, self._joined)

    def _joined(self, x: Tensor) -> Tensor:
        if not isinstance(x, SplitActivation):
            return x
        dim, whole = x.split_dim.dim, x.split_dim.size * self._whole // self._told
        # Tokens of all samples in one dim are cut sample by sample, also where they are cut again.
        self._joined_dims[x.ndim, dim, whole] = x.split_dim
        with torch._C.DisableTorchFunction():
            return x.as_subclass(Tensor).narrow(dim, 0, 1).expand([*x.shape[:dim], whole, *x.shape[dim + 1 :]]).clone()

    @contextmanager
    def with_whole(self) -> Iterator[None]:
        """Run code that is given whole sequences in this context."""
        before, self.has_whole = self.has_whole, True
        try:
            yield
        finally:
            self.has_whole = before

    def split_again(self, x: Tensor) -> Tensor:
        """Return this rank's part of a tensor with one dim that is as long as a whole sequence, or the tensor."""
        return self._split(x, self._whole)

    def split_made(self, x: Tensor) -> Tensor:
        """Return this rank's part of a tensor with one dim that is as long as code is told that a sequence is."""
        return self._split(x, self._told)

    def _split(self, x: Tensor, length: int) -> Tensor:
        dims = [dim for dim, size in enumerate(x.shape) if size == length] if type(x) is Tensor else []
        return self.spread(x, dims[0], self._whole, self._part) if len(dims) == 1 else x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute shapes; torch calls it for every operator."""
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("it takes too many operators")
        kwargs = kwargs or {}
        if torch._C._is_torch_function_enabled():
            for x in arg_tree_leaves(*args, **kwargs):
                if isinstance(x, SplitActivation):
                    raise self._mixed("is code outside of Python, which cannot be followed")
        return self.compute(func, args, kwargs)

    def _mixed(self, why: str) -> MixesTokens:
        frame = _users_frame()
        where = "" if frame is None else f", in {os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno},"
        return MixesTokens(f"{self._watch.function}{where} {why}")

    def gather(self, part: Tensor, split_dim: SplitDim) -> Tensor:
        """Refuse to gather."""
        raise self._mixed("needs the tokens of all ranks, or is not known to leave tokens apart")

    def take(self, whole: Tensor, split_dim: SplitDim) -> Tensor:
        """Refuse what was not made for this rank's tokens."""
        raise self._mixed(
            f"is given a tensor with an entry for each of the {split_dim.size} tokens of a sequence, of which a rank "
            "has a part"
        )

    def copy(self, whole: Tensor) -> Tensor:
        """Return what is used for every token alike."""
        return whole

    def sum(self, share: Tensor) -> Tensor:
        """Refuse a sum over the tokens."""
        raise self._mixed("sums over the tokens")

    def apart(self) -> AbstractContextManager[None]:
        """Do nothing: there are no values."""
        return nullcontext()

    def wish(self, split_dim: SplitDim, lengths: list[int]) -> None:
        """Do nothing: sequences are cut where they are."""


class _Watch(TorchFunctionMode):
    """Context in which every call of a function of torch is seen, also of those that are given no part."""

    def __init__(self, run: TokenRun, attends: bool) -> None:
        super().__init__()
        self.function = "the code"
        self._run, self._attends = run, attends

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute a function of torch by the rules, but for what is of this rank's tokens without one."""
        kwargs = kwargs or {}
        name = self.function = getattr(func, "__name__", str(func))
        tensors = tensors_of((args, kwargs))
        if any(isinstance(x, OfLabels) for x in tensors):
            with torch._C.DisableTorchFunctionSubclass():
                args, kwargs = map_tensors((args, kwargs), self._plain)
                try:
                    return map_tensors(func(*args, **kwargs), lambda x: x.as_subclass(OfLabels))
                except NotImplementedError:  # it depends on values how many labels count
                    raise LossReached from None
        if name in NUMBERED:
            self._note(name, (args, kwargs))
        if func is F.scaled_dot_product_attention and self._attends and tensors:
            query, value = tensors[0], tensors[min(2, len(tensors) - 1)]
            if isinstance(query, SplitActivation) and query.split_dim.dim == query.ndim - 2:
                shape = *part_of(query).shape[:-1], value.shape[-1]
                return as_split(torch.empty(shape, dtype=query.dtype, device=META), query.split_dim, self._run)
        if name in ("any", "all") and len(args) == 1 and not kwargs and hasattr(args[0], "expected"):
            return args[0].expected
        if name in DRAWS and any(isinstance(x, SplitActivation) for x in tensors):
            with torch._C.DisableTorchFunctionSubclass():
                return entry_by_entry(func, args, kwargs)
        result = func(*args, **kwargs)
        if name in FLAWS and isinstance(result, SplitActivation):
            result.expected = FLAWS[name]  # type: ignore[attr-defined]
        made = name in CONSTANTS and not self._run.has_whole
        return map_tensors(result, self._run.split_made) if made else result

    def _plain(self, x: Tensor) -> Tensor:
        if isinstance(x, SplitActivation):
            x = self._run.join(x)
        return x.as_subclass(Tensor)

    def _note(self, name: str, given: Any) -> None:
        args, kwargs = given
        numbers = tuple(one for one in (*args, *kwargs.values()) if type(one) in (int, float))
        if numbers:
            frame = _users_frame()
            where = "" if frame is None else f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
            self._run.numbers.append((name, where, numbers))


def _users_frame() -> FrameType | None:
    """Return the innermost frame of code that is neither torch's nor of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if os.path.isabs(file) and not file.startswith(FOREIGN):
            return frame
        frame = frame.f_back
    return None


Call = Callable[[nn.Module, TokenRun], Any]


def alone(run: TokenRun, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module whose code is not to be checked: it is said to compute each token by itself."""
    with run.with_whole():
        output = forward(*run.join(args), **run.join(kwargs))
    return map_tensors(output, run.split_again)


class TokenCheck:
    """Check of one model's code, in a copy without memory that is made before the model is changed."""

    def __init__(self, model: nn.Module, parts: int, attends: bool) -> None:
        self._parts, self._attends = parts, attends
        self._name = type(model).__name__
        self._model: nn.Module | None = None
        self._dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self._done: set[Any] = set()
        self._current: TokenRun | None = None
        odd = next((name for name, module in model.named_modules() if is_odd(module)), None)
        try:
            if odd is not None:
                raise ValueError(f"{odd or 'it'} has another forward than its class, or hooks of its backward")
            self._model = imitated(model)[0].requires_grad_(False)
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

    def once(self, key: Any, call: Call) -> None:
        """Check what ``call`` runs, unless it was done under the same key. Raise MixesTokens."""
        if self._model is None or key in self._done:
            return
        self._done.add(key)
        model = self._model
        with undisturbed(), warnings.catch_warnings(), left_as_they_are(model):
            warnings.simplefilter("ignore")
            try:
                with limited(SECONDS):
                    self._check(model, call)
            except MixesTokens:
                raise
            except Exception as error:
                _log.debug("the model cannot be checked", exc_info=True)
                self._tell(error)

    def _check(self, model: nn.Module, call: Call) -> None:
        whole = self._run(model, call, False, False)
        if whole.guessed:  # a condition on values is tried both ways
            try:
                self._run(model, call, False, True)
            except MixesTokens:
                raise
            except Exception:
                _log.debug("the check has failed with other values", exc_info=True)
        part: TokenRun | None = None
        with suppress(Exception):  # code need not run with this length, and was found to leave tokens apart
            part = self._run(model, call, True, False)
        for (name, where, one), (other, _, two) in zip(whole.numbers, part.numbers if part else [], strict=False):
            if name != other:
                return
            if one != two:
                raise MixesTokens(
                    f"{name}, in {where}, computes with a number that depends on the length of the sequence: {one} for "
                    f"all of it, {two} for the part of a rank"
                )

    def _run(self, model: nn.Module, call: Call, tells_part: bool, guess: bool) -> TokenRun:
        self._current = run = TokenRun(self._parts, tells_part, self._attends, guess)
        seed_all()
        with run.watched():
            call(model, run)
        return run
