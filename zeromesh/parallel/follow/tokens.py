"""Check, in a run without memory, that a model's code leaves the tokens of a sequence apart from each other.

Where ranks hold parts of sequences, a function that computes over tokens would be given this rank's alone, and nothing
would tell. So a copy of the model runs once with activations that know that their sequence is split
(``split_activation.py``): a function for which there is no rule would have to gather the tokens, and is refused.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from numbers import Number
from traceback import walk_tb
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeromesh.base.containers import map_tensors, tensors_of
from zeromesh.base.dry.dry_run import DryRun, OperatorListener
from zeromesh.base.dry.meta_values import META
from zeromesh.base.dry.model_copy import OURS, TORCH
from zeromesh.base.in_place import version, writes, written
from zeromesh.parallel.follow.backwards import Backwards, Hooks, OfSum
from zeromesh.parallel.follow.split_activation import Axis, NeedsWhole, SplitActivation, SplitDim, frames
from zeromesh.parallel.follow.split_rules import ENTRY_BY_ENTRY, as_split, entry_by_entry
from zeromesh.parallel.follow.ways import Way, answer, collect, looks_at_ids, way_of

MOST_OPERATORS = 300_000  # of a run

# Random numbers for each entry are drawn for each token, as in dropout.
DRAWS = {"rand_like", "randn_like", "bernoulli", "bernoulli_", "normal_", "uniform_", "exponential_"}
# Tensors whose entries are all alike, or drawn: a rank makes as many as it has tokens. True: they are given a value.
CONSTANTS = {
    **dict.fromkeys(("zeros", "ones", "empty", "rand", "randn", "new_zeros", "new_ones", "new_empty"), False),
    "full": True,
    "new_full": True,
}
# Tests for broken values, over all entries -> what each entry is in a sound run.
FLAWS = {"isnan": torch.tensor(False), "isinf": torch.tensor(False), "isfinite": torch.tensor(True)}
# Functions whose result depends on the whole numbers that they are given, where others take lengths and dims.
NUMBERED = {*ENTRY_BY_ENTRY, "full_like"}


class MixesTokens(ValueError):
    """Code computes over tokens, of which a rank has a part, at ``place``, file and line, if that is known."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place


class DependsOnLength(MixesTokens):
    """Code computes with what depends on the length of the sequence."""


class WayNotChecked(MixesTokens):
    """Code runs that a check could not follow."""


class OfLabels(Tensor):
    """Tensor made of labels, with which the loss begins: a mean over tokens, which is completed over the ranks."""


class OfLength(Tensor):
    """Tensor that was made for the length of the sequence, which is another one for a part."""


class Constant(Tensor):
    """Tensor with as many entries as wanted, which are all alike or drawn at random until it is written to."""

    alike_version: int  # its version when it was last known to be so

    def settle(self) -> Constant:
        """Take the entries for alike as they are now, and return the tensor."""
        with torch._C.DisableTorchFunction():
            self.alike_version = version(self)
        return self

    @property
    def is_alike(self) -> bool:
        """True if nothing else was written to it."""
        with torch._C.DisableTorchFunction():
            return version(self) == self.alike_version


class TokenRun(OperatorListener, Axis):
    """One forward, as the axis over which sequences are split, and on which nothing is ever gathered."""

    sums_sparse = True  # the engine sums those of its tables

    def __init__(
        self,
        parts: int,
        attends: bool,
        guess: bool,
        device: torch.device,
        other: TokenRun | None = None,
        attempt: int = 0,
    ) -> None:
        self.dry = DryRun(self, guess, MOST_OPERATORS)  # the mode in which the forward runs
        self.device, self._attempt = device, attempt
        self.is_plain = False  # parts are plain tensors, and calls are noted only
        self.ways: set[Way] = set()  # calls of the code
        self.way: Way | None = None  # the last one
        self._names: Mapping[int, str] = {}  # of modules, by ``id``
        self._hooked: dict[str, tuple[nn.Module, Hooks]] = {}
        self.backwards = Backwards(self, torch.is_grad_enabled())
        self.has_whole = False  # a module runs that is given whole sequences
        self.refused: MixesTokens | None = None  # the first error, which code may have caught
        # Parts of a sequence; ``size`` is a divisor of them where code is told that the sequence is as long as a part.
        self.parts = self.size = parts
        # By function and place in the code, numbers and shapes of its calls with a part of a sequence, and of others.
        self.seen: dict[tuple[str, str], set[Any]] = defaultdict(set)
        self.plain: dict[tuple[str, str], set[Any]] = defaultdict(set)
        # The run of the whole length; the code is told that of a part then.
        self.other = other
        # Tokens of the first sequence that is spread, of a rank's part of it, and of that which code is told of.
        self._whole = self._part = self._told = 0
        self._joined_dims: dict[tuple[int, int, int], SplitDim] = {}
        self._watch = _Watch(self, attends)

    def prepare(self, model: nn.Module, hooks: Mapping[str, Hooks]) -> None:
        """Name modules of a model in errors, and run these hooks of them."""
        modules = dict(model.named_modules())
        self._names = {id(module): name for name, module in modules.items()}
        for name in hooks.keys() & modules.keys() - {""}:  # the model itself is called with whole sequences
            self._hooked[name] = modules[name], hooks[name]
            setattr(modules[name], "forward", self.with_hooks(name, modules[name].forward))  # noqa: B010

    def with_hooks(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward of a module with the hooks of it around."""
        return partial(self.backwards.hooked, *self._hooked[name], forward) if name in self._hooked else forward

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow activations in this context; raise MixesTokens where one is needed whole."""
        with self.dry, self._watch, self.backwards.followed():
            try:
                yield
            except NeedsWhole as error:
                frames = [frame for frame, _ in walk_tb(error.__traceback__)]
                raise self.mixed(
                    "works on memory, or on code, that cannot be followed", place_of(frames[::-1])
                ) from None
            except Exception:
                if self.refused is not None:
                    raise self.refused from None
                raise
        if self.refused is not None:
            raise self.refused

    def spread(self, x: Tensor, dim: int, length: int, part: int) -> Tensor:
        """Return this rank's part of a tensor with a dim of tokens: ``part`` of the ``length`` of a sequence."""
        if not self._whole:
            self._whole, self._part, self._told = length, part, length
            if self.other is not None:
                # The part is cut as well, or rules would take it for what all ranks have.
                divisors = [n for n in range(2, part + 1) if part % n == 0] or [1]
                self.is_plain = self._attempt >= len(divisors)
                self.size = 1 if self.is_plain else divisors[self._attempt]
                self._told = part
        told = length * self._told // self._whole
        split_dim = self._joined_dims.get((x.ndim, dim, length), SplitDim(dim, (told,)))
        with torch._C.DisableTorchFunction():
            tensor = torch.empty([*x.shape[:dim], told // self.size, *x.shape[dim + 1 :]], dtype=x.dtype, device=META)
            return tensor if self.is_plain else as_split(tensor, split_dim, self)

    def is_spread(self, x: Tensor) -> bool:
        """Return whether it has a rank's part of the sequence."""
        if self.is_plain:
            return x.ndim > 1 and x.is_floating_point() and x.shape[x.ndim > 2] == self._part
        return isinstance(x, SplitActivation)

    def join(self, value: Any) -> Any:
        """Return a value with all sequences whole."""
        return map_tensors(value, self._joined)

    def _joined(self, x: Tensor) -> Tensor:
        if not self.is_spread(x):
            return x
        if not isinstance(x, SplitActivation):
            return x.repeat_interleave(self._whole // self._part, int(x.ndim > 2))
        dim, length = x.split_dim.dim, x.split_dim.size * self._whole // self._told
        # Tokens of all samples in one dim are cut sample by sample, also where they are cut again.
        self._joined_dims[x.ndim, dim, length] = x.split_dim
        return self.unsplit(x, length)

    def unsplit(self, x: Tensor, length: int = 0) -> Tensor:
        """Return a plain tensor with as many tokens as the code is told of, or of another length."""
        if not isinstance(x, SplitActivation):
            return x
        dim = x.split_dim.dim
        with torch._C.DisableTorchFunction():
            token: Tensor = x.as_subclass(Tensor).narrow(dim, 0, 1)
            return token.expand([*x.shape[:dim], length or x.split_dim.size, *x.shape[dim + 1 :]]).clone()

    def note(self, function: Any, args: Any, kwargs: Any, frame: FrameType | None) -> None:
        """Note a call of the code, by which a forward is followed."""
        if not self.has_whole and (way := way_of(function, args, kwargs, frame)):
            self.ways.add(way)
            self.way = way

    def with_whole(self) -> AbstractContextManager[Any]:
        """Return a context of code that is given whole sequences."""
        return patch.object(self, "has_whole", True)

    def split_again(self, x: Tensor, inputs: Sequence[SplitActivation]) -> Tensor:
        """Return this rank's part of a result of whole sequences, which are those of some inputs."""
        for activation in inputs:
            dim, length = activation.split_dim.dim, activation.split_dim.size * self._whole // self._told
            if type(x) is Tensor and dim < x.ndim and x.shape[dim] == length:
                return self.spread(x, dim, length, length * self._part // self._whole)
        return x

    def on_read(self, func: Any, tensors: Sequence[Tensor]) -> None:
        """Refuse parts that are read without a rule."""
        if torch._C._is_torch_function_enabled() and any(isinstance(x, SplitActivation) for x in tensors):
            raise self.mixed("is code outside of Python, which cannot be followed")

    def mixed(
        self, why: str, place: str = "", function: str = "", kind: type[MixesTokens] = MixesTokens
    ) -> MixesTokens:
        """Return the error for a function, or that which is called at present, and keep the first one."""
        where = place or place_of(frames())
        inside = next((name for frame in frames() if (name := self._names.get(id(frame.f_locals.get("self"))))), "")
        around = f", in {where}{inside and f' ({inside})'}," if where else ""
        error = kind(f"{function or self._watch.function}{around} {why}", where)
        self.refused = self.refused or error
        return error

    def forgive(self, before: MixesTokens | None) -> None:
        """Forget an error that was kept after another one, or none."""
        self.refused = before

    def gather(self, part: Tensor, split_dim: SplitDim) -> Tensor:
        """Refuse to gather."""
        raise self.mixed("needs the tokens of all ranks, or is not known to leave tokens apart")

    def take(self, tensor: Tensor, split_dim: SplitDim) -> Tensor:
        """Refuse what was not made for this rank's tokens, unless all entries are alike."""
        if isinstance(tensor, Constant) and tensor.is_alike:
            return tensor.as_subclass(Tensor).narrow(split_dim.dim, 0, split_dim.size // self.size)
        raise self.mixed(
            f"is given a tensor with an entry for each of the {split_dim.size} tokens of a sequence, of which a rank "
            "has a part"
        )

    def copy(self, tensor: Tensor) -> Tensor:
        """Return what is used for every token alike."""
        return tensor

    def sum(self, share: Tensor) -> Tensor:
        """Refuse a sum over the tokens, unless it is the gradient of what is used for all of them."""
        if self.backwards.runs and self._watch.function not in ("layer_norm", "rms_norm"):
            return share.as_subclass(OfSum)
        raise self.mixed("sums over the tokens")


class _Watch(TorchFunctionMode):
    """Context in which every call of a function of torch is seen, also of those that are given no part."""

    def __init__(self, run: TokenRun, attends: bool) -> None:
        super().__init__()
        self.function = "the code"
        self._run, self._attends = run, attends
        self._written: dict[int, Tensor] = {}  # what was made for the length in place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute a function of torch by the rules, but for what is of this rank's tokens without one."""
        kwargs = dict(kwargs or {})
        if looks_at_ids(sys._getframe(1).f_code.co_filename):
            return self._on_plain(func, args, kwargs, Tensor)
        self._run.note(func, args, kwargs, sys._getframe(1))
        name = self.function = getattr(func, "__name__", str(func))
        tensors = tensors_of((args, kwargs))
        kinds = {OfLength if id(x) in self._written else type(x) for x in tensors}
        attends = func is F.scaled_dot_product_attention
        if OfLabels in kinds:
            if attends:
                raise self._run.mixed("is given what was made of labels, as which only the loss is known")
            return self._on_plain(func, args, kwargs, OfLabels)
        known_answer = answer(func, args, self._run.backwards.differentiates, self._run.device)
        if known_answer is not None:
            if name == "register_hook" and isinstance(args[0], SplitActivation):
                with self:
                    self._run.backwards.of_tensor(args[0], args[1] if len(args) > 1 else kwargs["hook"])
            return known_answer
        if OfSum in kinds:
            if SplitActivation in kinds:
                raise self._run.mixed("is given a sum over the tokens")
            return self._on_plain(func, args, kwargs, OfSum)
        if SplitActivation not in kinds:
            return self._without_parts(func, args, kwargs, kinds)
        if func == _GRAPH and self._run.backwards.differentiates:
            raise self._run.mixed("gives autograd's graph, whose hooks cannot be followed", function="grad_fn")
        if torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(False):
            with self:
                self._run.backwards.of_saved(next(x for x in tensors if isinstance(x, SplitActivation)))
            self.function = name
        if OfLength in kinds:
            why = "is given a tensor that was made for the length of the sequence"
            raise self._run.mixed(why, kind=DependsOnLength)
        for alias, usual in (("axis", "dim"), ("keepdims", "keepdim")):
            if alias in kwargs and usual not in kwargs:
                kwargs[usual] = kwargs.pop(alias)
        if attends and self._attends:
            result = self._attend(*args, **kwargs)
        elif name in ("any", "all") and len(args) == 1 and not kwargs and _is_sound(args[0]):
            return args[0].expected[0]
        elif name in DRAWS:
            with torch._C.DisableTorchFunctionSubclass():
                result = entry_by_entry(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if name in FLAWS and isinstance(result, SplitActivation):
            result.expected = FLAWS[name], version(result)  # type: ignore[attr-defined]
        self._note(name, (args, kwargs), result)
        return map_tensors(result, _constant) if name in CONSTANTS else result

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Tensor:
        """Return the result of attention; every call in a model is replaced, so it must be over its tokens."""
        parts = [x for x in (query, key, value) if isinstance(x, SplitActivation)]
        dims = {(x.split_dim.dim - x.ndim, x.split_dim.sections) for x in parts}
        if len(parts) < 3 or len(dims) > 1 or dims.pop()[0] != -2:
            raise self._run.mixed("is not of the queries, keys and values of all tokens, (batch, heads, tokens, width)")
        with torch._C.DisableTorchFunction():
            result = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=META)
            return as_split(result, parts[0].split_dim, self._run)

    def _without_parts(self, func: Any, args: Any, kwargs: Any, kinds: set[type]) -> Any:
        """Compute a function of what no rank has a part of; note what depends on the length."""
        if OfLength in kinds:
            return self._of_length(func, args, kwargs, self._on_plain(func, args, kwargs, Tensor))
        name, run = self.function, self._run
        inputs: list[Any] = tensors_of((args, kwargs))
        alike = kinds == {Constant} and name in SHAPING and all(x.is_alike for x in inputs)
        result = self._on_plain(func, args, kwargs, Tensor)
        if alike:
            result = map_tensors((inputs, result), _constant)[1]  # what was written in place is still alike
        counted: Any = (args, kwargs)
        if name in CONSTANTS:
            counted = (args[1:], kwargs.get("fill_value")) if CONSTANTS[name] else ()
        if not run.has_whole and (numbers := _numbers(counted)):
            key = name, place_of(frames())
            run.plain[key].add(numbers)
            if run.other is not None and key in run.other.plain and numbers not in run.other.plain[key]:
                return self._of_length(func, args, kwargs, result)
        return map_tensors(result, _constant) if name in CONSTANTS else result

    def _of_length(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Return a result as one that was made for the length, and mark what was written in place."""
        if writes(func, kwargs) and isinstance(target := written(args, kwargs), Tensor):
            self._written[id(target)] = target
        return map_tensors(result, lambda x: x.as_subclass(OfLength))

    def _on_plain(self, func: Any, args: Any, kwargs: Any, kind: type[Tensor]) -> Any:
        """Compute on whole tensors, and return them as some kind, but for what was written in place."""
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = map_tensors((args, kwargs), lambda x: self._run.unsplit(x).as_subclass(Tensor))
            result = func(*args, **kwargs)
            return result if kind is Tensor else map_tensors(result, lambda x: x.as_subclass(kind))

    def _note(self, name: str, arguments: Any, result: Any) -> None:
        """Note numbers and shapes that must not depend on the length of the sequence."""
        numbers = tuple(n for n in _numbers(arguments) if name in NUMBERED or not isinstance(n, int))
        with torch._C.DisableTorchFunctionSubclass():
            shapes = tuple(
                tuple(size for dim, size in enumerate(x.shape) if dim != x.split_dim.dim)
                for x in tensors_of(result)
                if isinstance(x, SplitActivation)
            )
        self._run.seen[name, place_of(frames())].add((numbers, shapes))


_GRAPH: Any = vars(torch._C.TensorBase)["grad_fn"].__get__
SHAPING = {*ENTRY_BY_ENTRY, "expand", "unsqueeze", "__getitem__", "view", "reshape", "expand_as", "to", "type_as"}
"""Functions of tensors that are all alike whose results are so, too."""


def _constant(x: Tensor) -> Tensor:
    """Return a tensor, or itself, as one whose entries are all alike now."""
    return (x if isinstance(x, Constant) else x.as_subclass(Constant)).settle()


def _is_sound(x: Any) -> bool:
    return hasattr(x, "expected") and version(x) == x.expected[1]


def _numbers(values: Any) -> tuple[Any, ...]:
    """Return the numbers in nested arguments."""
    settings: list[Any] = []
    collect(values, settings, fractions=True)
    return tuple(value for value in settings if isinstance(value, Number | numpy.number))


def place_of(frames: Iterable[FrameType]) -> str:
    """Return file and line of the first frame of code that is neither torch's nor of this package, or ''."""
    for frame in frames:
        file = frame.f_code.co_filename
        if os.path.isabs(file) and not file.startswith((TORCH, OURS)):
            return f"{os.path.relpath(file)}:{frame.f_lineno}"
    return ""
