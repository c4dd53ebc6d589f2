"""Uses of parameters in a model's forward, found by running it on tensors without memory."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves, tree_leaves

from zeromesh.model.containers import map_tensors, tensors_of
from zeromesh.model.lengths import positions
from zeromesh.observe.operations import FORMULAS
from zeromesh.pipeline.runtime.samples import LENGTH, LONGEST, ModelInput, samples_of, undisturbed
from zeromesh.pipeline.runtime.stage import _Gate

MORE = 4  # limit of operators of a long text's trace, in multiples of those of a short one

_log = logging.getLogger(__name__)

META = torch.device("meta")


@dataclass(frozen=True)
class ModelTrace:
    """Trace of a forward, in sections: before the first call of a block, and from each call of a block to the next."""

    calls: tuple[int, ...]  # numbers of the blocks in the order of their calls
    uses: Mapping[str, frozenset[int]]  # parameter, under the first of its names -> the sections in which it was used
    operations: tuple[float, ...]  # floating-point operations of each section
    # Pairs of a section in which a value was computed and a later one that read it past the blocks' arguments; between
    # the two, the forward cannot be left and entered again.
    crossings: frozenset[tuple[int, int]]
    operators: int  # number of operators called


def trace(model: nn.Module, blocks: Sequence[str], own: ModelInput | None = None) -> ModelTrace | None:
    """Trace a model's forward, without changing the model; None if it cannot be traced. The log has the reason.

    ``own`` is the input of the run, which is tried before guessed ones.
    """
    reasons: list[str] = []
    if own is not None and (found := _attempt(model, blocks, own, reasons)):
        return found
    for place, sample in enumerate(samples_of(model)):
        if found := _attempt(model, blocks, sample, reasons):
            # Of a text that the model takes, in tokens, as far as known.
            length = min(positions(getattr(model, "config", None)) or 0, LONGEST)
            if length <= LENGTH:
                return found
            # Operations are to be counted for long texts, unless these take more operators than a short one does: some
            # models go through texts in a loop of Python.
            longer = list(samples_of(model, length))[place]
            return _attempt(model, blocks, longer, reasons, MORE * found.operators) or found
    _log.debug("%s is not traced, so what is outside of its blocks counts as used in the order of registration: %s",
               type(model).__name__, reasons[-1] if reasons else "it is not known what inputs it takes")  # fmt: skip
    return None


def _attempt(
    model: nn.Module, blocks: Sequence[str], sample: ModelInput, reasons: list[str], limit: float = float("inf")
) -> ModelTrace | None:
    # A condition on values, which tensors without memory lack, is tried both ways.
    for guess in (False, True):
        try:
            with undisturbed(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _trace(model, blocks, sample, guess, limit)
        except Exception as error:
            _log.debug("%s cannot be traced", type(model).__name__, exc_info=True)
            reasons.append(f"{type(error).__name__}: {error}")
            if not getattr(error, "guessed", True):
                break
    return None


def _trace(model: nn.Module, blocks: Sequence[str], sample: ModelInput, guess: bool, limit: float) -> ModelTrace:
    copied, copies = _copy_of(model)
    names = {id(one): name for name, p in model.named_parameters() for one in (p, copies[id(p)])}
    run = _Tracing(names, len(blocks), guess, limit)
    for index, name in enumerate(blocks):
        parent, _, child = name.rpartition(".")
        block = copied.get_submodule(name)
        copied.get_submodule(parent)._modules[child] = _Gate(block, index, run)  # type: ignore[arg-type]
        for buffer_name, buffer in block.named_buffers():
            owner, _, key = buffer_name.rpartition(".")
            # Buffers that are state go with the block; others every stage has, as it has masks.
            if key not in block.get_submodule(owner)._non_persistent_buffers_set:
                run.states.add(id(buffer))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    has_ended = False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_ended
        output = copied(*args, **kwargs)
        has_ended = True
        return output

    on_meta = sample.map(lambda x: x.to(META, dtype if x.is_floating_point() else x.dtype))
    try:
        with torch.no_grad(), run:
            on_meta.call(on_meta.batch, forward)
    except Exception as error:
        # A loss function that cannot run on meta tensors hides nothing: the forward is known by then.
        if not has_ended:
            vars(error)["guessed"] = run.guessed
            raise
        _log.debug("the loss of %s cannot be traced", type(model).__name__, exc_info=True)
    uses = {name: frozenset(sections) for name, sections in run.uses.items()}
    return ModelTrace(tuple(run.calls), uses, tuple(run.operations), frozenset(run.crossings), run.operators)


class _Tracing(TorchDispatchMode):
    """Record of what each operator reads and makes. Gates of blocks call it as they call a ``_Run``."""

    def __init__(self, names: Mapping[int, str], blocks: int, guess: bool, limit: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._guess, self._limit = names, guess, limit
        self.operators = 0
        self.states: set[int] = set()
        self.calls: list[int] = []
        self.uses: dict[str, set[int]] = defaultdict(set)
        self.operations = [0.0]
        self.crossings: set[tuple[int, int]] = set()
        self.guessed = False
        self._inside = False
        self._arguments: frozenset[int] = frozenset()
        self._handed: set[int] = set()
        # The sections in which tensors were made that depend on parameters. The tensors are kept with their views, as
        # an id may be given again once its tensor is gone.
        self._made: dict[int, int] = {}
        self._views: dict[int, list[Tensor]] = defaultdict(list)

    @property
    def _section(self) -> int:
        return len(self.calls)

    def called(self, block: nn.Module, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the model's call of a block."""
        if self._inside:  # an outer block calls it, of which it is a part
            return block(*args, **kwargs)
        arguments = tensors_of((args, kwargs))
        for tensor in arguments:  # an argument is handed on from stage to stage: only the first block uses it
            if id(tensor) in self._names and id(tensor) not in self._handed:
                self.uses[self._names[id(tensor)]].add(self._section)
                self._handed.add(id(tensor))
        self.calls.append(index)
        self.operations.append(0.0)
        self._inside, self._arguments = True, frozenset(map(id, arguments))
        try:
            output = block(*args, **kwargs)
            # What a block returns is another value than what it was given, even where it is the same tensor.
            return map_tensors(output, lambda x: x.view_as(x) if id(x) in self._arguments else x)
        finally:
            self._inside, self._arguments = False, frozenset()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note an operator; torch calls it for every operator."""
        kwargs = kwargs or {}
        operator = func._overloadpacket
        self.operators += 1
        if self.operators > self._limit:
            raise RuntimeError(f"it takes more than {self._limit} operators")
        read = [x for x in arg_tree_leaves(*args, **kwargs) if isinstance(x, Tensor)]
        depends = [self._read(x) for x in read] if operator not in _OF_SHAPES else []
        # All is on the meta device, but for numbers, whose values may be asked for.
        if not all(x.is_meta or x.ndim == 0 for x in read):
            args, kwargs = map_tensors((args, dict(kwargs)), lambda x: x if x.ndim == 0 else x.to(META))
        if "device" in kwargs or (not read and any(one.name == "device" for one in func._schema.arguments)):
            kwargs = {**kwargs, "device": META}
        if operator in _OF_VALUES and args[0].is_meta:
            self.guessed, result = True, _OF_VALUES[operator](args[0], self._guess)
        elif operator is torch.ops.aten._grouped_mm:  # of which torch knows the shape for some dtypes only
            result = _grouped_product(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if formula := FORMULAS.get(operator):
            self.operations[self._section] += int(formula(*args, **kwargs, out_val=result))
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        for tensor in made:
            self._views[_storage(tensor)].append(tensor)
        if self._inside or any(depends):
            if func._schema.is_mutable:
                # A write also reaches the views that were taken of the tensor before.
                named = zip(func._schema.arguments, args, strict=False)
                written = [x for declared, x in named if declared.is_write and isinstance(x, Tensor)]
                made += [view for x in written for view in (x, *self._views[_storage(x)])]
            for tensor in made:
                self._made[id(tensor)] = self._section
        return result

    def _read(self, tensor: Tensor) -> bool:
        """Note that a tensor is read; return whether it depends on parameters."""
        if id(tensor) in self._names:
            if id(tensor) not in self._arguments:
                self.uses[self._names[id(tensor)]].add(self._section)
            return True
        made = self._made.get(id(tensor))
        if made is not None and made < self._section and id(tensor) not in self._arguments:
            self.crossings.add((made, self._section))
        return made is not None or id(tensor) in self.states


# Operators that read no values.
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_OF_SHAPES = {getattr(torch.ops.aten, name) for name in (*_NEW, *_LIKE)}


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _grouped_product(a: Tensor, b: Tensor, offsets: Tensor | None = None, *rest: Any, **more: Any) -> Tensor:
    if a.ndim == b.ndim == 2:
        assert offsets is not None
        return a.new_empty((len(offsets), a.shape[0], b.shape[1]))
    return a.new_empty((*a.shape[int(b.ndim == 2 and a.ndim == 3) : -1], b.shape[-1]))


def _number(tensor: Tensor, guess: bool) -> bool | int | float:
    return guess if tensor.dtype is torch.bool else float(guess) if tensor.is_floating_point() else int(guess)


# Operators that need values, which tensors without memory lack -> a stand-in for their result.
_OF_VALUES: dict[Any, Callable[[Tensor, bool], Any]] = {
    torch.ops.aten._local_scalar_dense: _number,
    torch.ops.aten.nonzero: lambda tensor, guess: tensor.new_empty((1, tensor.ndim), dtype=torch.long),
    torch.ops.aten.equal: lambda tensor, guess: guess,
}


def _copy_of(model: nn.Module) -> tuple[nn.Module, dict[int, Any]]:
    """Return a copy whose tensors have no memory, and its tensors by the ``id`` of the model's own."""
    copies: dict[int, Any] = {}

    def imitate(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
        return tensor

    for module in model.modules():
        for name, value in vars(module).items():
            if name in _HOOKS:
                # Hooks may do anything outside of the model; only those of torch that make weights of parameters stay.
                copies[id(value)] = type(value)(
                    (key, hook)
                    for key, hook in value.items()
                    if name in ("_forward_hooks", "_forward_pre_hooks") and type(hook).__module__.startswith("torch.")
                )
            elif name != "_modules":
                map_tensors(value, imitate)
    return copy.deepcopy(model, copies), copies


_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "_hooks" in name and value is not None)
