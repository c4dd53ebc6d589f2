"""Uses of parameters in a model's forward, found by running it on tensors without memory."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeromesh.base.containers import map_tensors, tensors_of
from zeromesh.base.dry.dry_run import DryRun, OperatorListener, tensors_in
from zeromesh.base.dry.model_copy import dry, dtype_of, imitated
from zeromesh.base.dry.model_inputs import LENGTH, LONGEST, ModelInput, samples_of
from zeromesh.base.lengths import positions
from zeromesh.base.operation_counts import FORMULAS
from zeromesh.parallel.pipeline.runtime.stage import _Gate

MORE = 4  # limit of operators of a long text's trace, in multiples of those of a short one

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelTrace:
    """Trace of a forward, in sections: before the first call of a block, and from each call to the next.

    Modules inside of blocks, if they are among the blocks that the trace was given, have calls and sections, too.
    """

    calls: tuple[int, ...]  # numbers of the blocks in the order of their calls
    uses: Mapping[str, frozenset[int]]  # parameter, under the first of its names -> the sections in which it was used
    operations: tuple[float, ...]  # floating-point operations of each section
    # Pairs of a section in which a value was computed and a later one that read it past the blocks' arguments; between
    # the two, the forward cannot be left and entered again.
    crossings: frozenset[tuple[int, int]]
    closed: frozenset[int]  # calls of modules inside of blocks at which a forward cannot be left, for the same reason
    operators: int  # number of operators called


def trace(model: nn.Module, blocks: Sequence[str], run_input: ModelInput | None = None) -> ModelTrace | None:
    """Trace a model's forward, without changing the model; None if it cannot be traced. The log has the reason.

    ``run_input`` is the input of the run, which is tried before guessed ones.
    """
    reasons: list[str] = []
    if run_input is not None and (traced := _attempt(model, blocks, run_input, reasons)):
        return traced
    for place, sample in enumerate(samples_of(model)):
        if traced := _attempt(model, blocks, sample, reasons):
            # Of a text that the model takes, in tokens, as far as known.
            length = min(positions(getattr(model, "config", None)) or 0, LONGEST)
            if length <= LENGTH:
                return traced
            # Operations are to be counted for long texts, unless these take more operators than a short one does: some
            # models go through texts in a loop of Python.
            longer = list(samples_of(model, length))[place]
            return _attempt(model, blocks, longer, reasons, MORE * traced.operators) or traced
    _log.debug(
        "%s is not traced, so what is outside of its blocks counts as used in the order of registration: %s",
        type(model).__name__,
        reasons[-1] if reasons else "it is not known what inputs it takes",
    )
    return None


def _attempt(
    model: nn.Module, blocks: Sequence[str], sample: ModelInput, reasons: list[str], limit: float = float("inf")
) -> ModelTrace | None:
    # A condition on values, which tensors without memory lack, is tried both ways.
    for guess in (False, True):
        run: DryRun | None = None
        try:
            with dry(model):
                copied, copies = imitated(model)
                names = {
                    id(parameter): name for name, p in model.named_parameters() for parameter in (p, copies[id(p)])
                }
                uses = _Uses(names, blocks)
                run = DryRun(uses, guess, limit)
                _put_gates(copied, blocks, uses)
                with torch.no_grad(), _GradientModes(uses):
                    sample.run_dry(copied, dtype_of(model), run)
                return uses.traced(run.operators)
        except Exception as error:
            _log.debug("%s cannot be traced", type(model).__name__, exc_info=True)
            reasons.append(f"{type(error).__name__}: {error}")
            if run is not None and not run.values.guessed:
                break
    return None


def _put_gates(model: nn.Module, blocks: Sequence[str], uses: _Uses) -> None:
    for index, name in enumerate(blocks):
        parent, _, child = name.rpartition(".")
        block = model.get_submodule(name)
        model.get_submodule(parent)._modules[child] = _Gate(block, index, uses)  # type: ignore[arg-type]
        for buffer_name, buffer in block.named_buffers():
            owner, _, key = buffer_name.rpartition(".")
            # Buffers that are state go with the block; others every stage has, as it has masks.
            if key not in block.get_submodule(owner)._non_persistent_buffers_set:
                uses.states.add(id(buffer))


class _GradientModes(TorchFunctionMode):
    """Count of the calls that switch gradients on or off, of which a context makes two."""

    def __init__(self, uses: _Uses) -> None:
        super().__init__()
        self._uses = uses

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call the function."""
        if func is torch._C._set_grad_enabled:
            self._uses.on_switch()
        return func(*args, **(kwargs or {}))


class _Uses(OperatorListener):
    """Record of what each operator reads and makes. Gates of blocks call it as they call a ``_Run``."""

    def __init__(self, names: Mapping[int, str], blocks: Sequence[str]) -> None:
        self._names, self._blocks = names, blocks
        self.closed: set[int] = set()
        self.states: set[int] = set()
        self.calls: list[int] = []
        self.sections_of: dict[str, set[int]] = defaultdict(set)
        self.operations = [0.0]
        self.crossings: set[tuple[int, int]] = set()
        self._outer = -1  # number of the block that is being called; -1 outside of blocks
        # Calls of modules inside of blocks: how many calls came before, and what the module was called with, by ``id``.
        self._parts: list[tuple[int, frozenset[int]]] = []
        self._switches = 0  # of gradients, on and off
        self._switches_before, self._writes_arguments = 0, False  # of the block that is being called
        self._depends = False  # whether the present operator reads what depends on parameters
        self._arguments: frozenset[int] = frozenset()
        self._memory_of_arguments: frozenset[int] = frozenset()
        self._handed: set[int] = set()
        # The sections in which tensors were made that depend on parameters. The tensors are kept with their views, as
        # an id may be given again once its tensor is gone.
        self._made: dict[int, int] = {}
        self._views: dict[int, list[Tensor]] = defaultdict(list)

    def traced(self, operators: int) -> ModelTrace:
        """Return the trace of a forward that called so many operators."""
        sections_of = {name: frozenset(sections) for name, sections in self.sections_of.items()}
        crossings, closed = frozenset(self.crossings), frozenset(self.closed)
        return ModelTrace(tuple(self.calls), sections_of, tuple(self.operations), crossings, closed, operators)

    @property
    def _section(self) -> int:
        return len(self.calls)

    def called(self, block: nn.Module, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the model's call of a block."""
        arguments = tensors_of((args, kwargs))
        if self._outer >= 0:  # an outer block calls it, of which it is a part
            if self._blocks[index].rpartition(".")[0] == self._blocks[self._outer]:
                self._parts.append((len(self.calls), frozenset(map(id, arguments))))
                # On the stage that begins there the block's arguments are stand-ins, which may be the user's own
                # inputs, and a context that the block has entered would switch gradients off again. A view of an
                # argument is not seen to be read where it reads the received value.
                is_inside_context = (self._switches - self._switches_before) % 2 == 1
                has_parameter = any(id(x) in self._names for x in arguments)  # which cannot take a received value
                if (
                    self._writes_arguments
                    or is_inside_context
                    or has_parameter
                    or any({*map(id, self._views[_storage(x)])} - {id(x)} for x in arguments if id(x) in self._made)
                ):
                    self.closed.add(len(self.calls))
                self.calls.append(index)
                self.operations.append(0.0)
            return block(*args, **kwargs)
        for tensor in arguments:  # an argument is handed on from stage to stage: only the first block uses it
            if id(tensor) in self._names and id(tensor) not in self._handed:
                self.sections_of[self._names[id(tensor)]].add(self._section)
                self._handed.add(id(tensor))
        self.calls.append(index)
        self.operations.append(0.0)
        self._outer, self._arguments = index, frozenset(map(id, arguments))
        self._memory_of_arguments = frozenset(map(_storage, arguments))
        self._switches_before, self._writes_arguments = self._switches, False
        try:
            output = block(*args, **kwargs)
            # What a block returns is another value than what it was given, even where it is the same tensor.
            return map_tensors(output, lambda x: x.view_as(x) if id(x) in self._arguments else x)
        finally:
            self._outer, self._arguments = -1, frozenset()

    def on_switch(self) -> None:
        """Note that gradients are switched on or off."""
        self._switches += 1

    def on_read(self, func: Any, tensors: Sequence[Tensor]) -> None:
        """Note what an operator reads."""
        self._depends = func._overloadpacket not in _OF_SHAPES and any([self._reads(x) for x in tensors])

    def on_operator(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note what an operator makes."""
        if formula := FORMULAS.get(func._overloadpacket):
            self.operations[self._section] += int(formula(*args, **kwargs, out_val=result))
        results = list(tensors_in((result,)))
        for tensor in results:
            self._views[_storage(tensor)].append(tensor)
        if self._outer >= 0 or self._depends:
            if func._schema.is_mutable:
                # A write also reaches the views that were taken of the tensor before.
                named = zip(func._schema.arguments, args, strict=False)
                written = [x for declared, x in named if declared.is_write and isinstance(x, Tensor)]
                self._writes_arguments |= any(_storage(x) in self._memory_of_arguments for x in written)
                results += [view for x in written for view in (x, *self._views[_storage(x)])]
                # A stage that begins there has the value that is written to as a message, which autograd must not lose.
                touched_ids = set(map(id, results))
                self.closed.update(call for call, arguments in self._parts if touched_ids & arguments)
            for tensor in results:
                self._made[id(tensor)] = self._section

    def _reads(self, tensor: Tensor) -> bool:
        """Note that a tensor is read; return whether it depends on parameters."""
        if id(tensor) in self._names:
            if id(tensor) not in self._arguments:
                self.sections_of[self._names[id(tensor)]].add(self._section)
            else:
                self._crosses(tensor, 0)  # as an argument of blocks it comes from the stage of the first one
            return True
        section = self._made.get(id(tensor))
        if section is not None and section < self._section:
            self._crosses(tensor, section)
        return section is not None or id(tensor) in self.states

    def _crosses(self, tensor: Tensor, section: int) -> None:
        """Note between which calls the forward cannot be left, as a tensor that was made before is read now."""
        if id(tensor) not in self._arguments:
            self.crossings.add((section, self._section))
        for call, arguments in reversed(self._parts):
            if call < section:
                break
            if id(tensor) not in arguments:
                self.closed.add(call)


# Operators that read no values.
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_OF_SHAPES = {getattr(torch.ops.aten, name) for name in (*_NEW, *_LIKE)}


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
