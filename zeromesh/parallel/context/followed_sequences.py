"""Context parallelism of any model: its code is given activations that stand for whole sequences."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.base.containers import map_tensors, tensors_of
from zeromesh.base.substitution import of_library
from zeromesh.parallel.context import spread_batch as batch
from zeromesh.parallel.context.applied import (
    SpreadSequences,
    Unsupported,
    named_arguments,
    parameters_of,
    refuse,
    replace_forward,
)
from zeromesh.parallel.context.sequence_order import require_length
from zeromesh.parallel.follow.activation_parts import guard_functions
from zeromesh.parallel.follow.split_activation import (
    NeedsWhole,
    Sealed,
    SplitActivation,
    SplitDim,
    TensorAxis,
    is_sealed,
    part_of,
    whole,
)
from zeromesh.parallel.follow.split_rules import as_split

# Each rank holds consecutive tokens, and differentiates its own share of the loss: a parameter's gradient is the mean
# over the ranks of what they find, as in data parallelism. So what is gathered has the sum of all ranks' gradients, and
# what a rank takes of a whole, or uses alike, its own.
_MOVES = {"join": "gather", "sum": "total"}


class TokenAxis(TensorAxis):
    """Messages over the context axis."""

    def __init__(self, applied: SpreadSequences) -> None:
        self.applied = applied
        self.size, self.group, self.tag = applied.group.size, applied.group, applied.tag

    def _move(self, x: Tensor, name: str, dim: int = 0) -> Tensor:
        return super()._move(x, _MOVES[name], dim)

    def take(self, tensor: Tensor, split_dim: SplitDim) -> Tensor:
        """Keep this rank's part of each section; others have the gradients of theirs."""
        lengths = [section // self.size for section in split_dim.sections for _ in range(self.size)]
        return torch.cat(tensor.split(lengths, split_dim.dim)[self.group.rank :: self.size], split_dim.dim)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the same."""
        return tensor

    def apart(self) -> AbstractContextManager[None]:
        """Draw random numbers as this rank does anyway."""
        return nullcontext()

    def again(self, result: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Return this rank's part of a result that has the sequence in the dim where one of the activations has it."""
        splits = [part.split_dim for part in parts if isinstance(part, SplitActivation)]
        for split_dim in splits:
            if split_dim.dim < result.ndim and result.shape[split_dim.dim] == split_dim.size:
                return as_split(self.take(result, split_dim), split_dim, self)
        return result

    def split(self, x: Any) -> Any:
        """Return this rank's part of (samples, sequence, ...); what cannot be cut is left whole."""
        if not isinstance(x, Tensor) or isinstance(x, SplitActivation) or x.ndim < 2 or x.shape[1] % self.size:
            return x
        split_dim = SplitDim(1, (x.shape[1],))
        return as_split(self.take(x, split_dim), split_dim, self)


def install(model: Any, applied: SpreadSequences) -> None:
    """Change a model so that, where ``applied.consecutive``, its code is given parts that stand for the whole."""
    axis = TokenAxis(applied)
    for module in model.modules():
        replace_forward(module, _Followed(axis, module).run)
    if "labels" in parameters_of(type(model)) and hasattr(model, "loss_function"):
        loss = model.loss_function
        setattr(model, "loss_function", update_wrapper(partial(_loss, axis, loss), loss))  # noqa: B010
    guard_functions({type(module) for module in model.modules() if not of_library(module)})
    replace_forward(model, partial(_run, axis, type(model)))


class _Followed:
    """Forward of a module that may be given parts of sequences.

    Attributes:
        needs_whole: True if the module is given whole sequences, on each rank: it reads tokens one after the other, or
            has a backward of its own, which does not know parts.
    """

    def __init__(self, axis: TokenAxis, module: nn.Module) -> None:
        self._axis, self._reads_ids = axis, isinstance(module, nn.Embedding)
        self._splits: dict[int | str, SplitDim] = {}
        self.needs_whole = any(
            isinstance(child, nn.RNNBase) or (isinstance(child, nn.Conv1d) and max(child.kernel_size) > 1)
            for child in (module, *module.children())
        )

    def run(self, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Compute the module."""
        applied = self._axis.applied
        if not (applied.active and applied.consecutive) or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        if is_sealed():
            return self._compute(forward, args, kwargs)
        if torch._C._current_graph_task_id() == -1:
            return forward(*args, **kwargs)  # of another model: transformers' share some functions
        # A recomputation in the backward, which is given plain tensors where it was given parts.
        with Sealed():
            args = tuple(self._given(place, x) for place, x in enumerate(args))
            return self._compute(forward, args, {name: self._given(name, x) for name, x in kwargs.items()})

    def _compute(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._reads_ids:  # those that a model makes itself, such as a decoder's, are whole
            args = tuple(map(self._axis.split, args))
        parts = [x for x in tensors_of((args, kwargs)) if isinstance(x, SplitActivation) and x.axis is self._axis]
        if not parts:
            return forward(*args, **kwargs)
        arguments: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
        self._splits = {place: x.split_dim for place, x in arguments if isinstance(x, SplitActivation)}
        if not self.needs_whole:
            try:
                return forward(*args, **kwargs)
            except NeedsWhole:
                self.needs_whole = True
        return map_tensors(forward(*whole(args), **whole(kwargs)), lambda x: self._axis.again(x, parts))

    def _given(self, place: int | str, x: Any) -> Any:
        split_dim = self._splits.get(place)
        if split_dim is None or not isinstance(x, Tensor) or isinstance(x, SplitActivation):
            return x
        return as_split(x.view_as(x), split_dim, self._axis)


def _run(axis: TokenAxis, kind: type[nn.Module], forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call the model, and follow its code where all else is refused."""
    applied = axis.applied
    if not applied.consecutive or not applied.active:
        try:
            output = forward(*args, **kwargs)
        except (Unsupported, batch.NotCut) as error:
            if applied.forwards:  # those before it have another order of tokens, and may have to be computed again
                raise
            applied.follow_code(error)
        else:
            applied.count_forward()
            return output
    return torch.compiler.disable(_follow)(axis, kind, forward, args, kwargs)


def _follow(axis: TokenAxis, kind: type[nn.Module], forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = named_arguments(kind, args, kwargs)
    if named.get("past_key_values") is not None:
        raise refuse(kind.__name__, "it is called with a cache, as in generation", "generate within paused()")
    if named.get("num_items_in_batch") is not None:
        reason = "num_items_in_batch counts labels, and the ranks count theirs themselves"
        raise refuse(kind.__name__, reason, "leave it out")
    if "use_cache" in parameters_of(kind):
        named["use_cache"] = False
    # Others than these may be anything, and are given whole.
    first = next((name for name, x in named.items() if isinstance(x, Tensor) and x.ndim > 1), "")
    for name in {*batch.TOKENS} & named.keys() or {first} & named.keys():
        if named[name] is not None:
            require_length(named[name].shape[1], axis.size)
            named[name] = axis.split(named[name])
    axis.applied.whole_outputs.clear()
    with Sealed():
        return map_tensors(forward(**named), partial(_leave, axis))


def _leave(axis: TokenAxis, x: Tensor) -> Tensor:
    """Return a result of this rank's tokens, as a plain tensor."""
    if isinstance(x, SplitActivation) and x.split_dim.dim == 1 and len(x.split_dim.sections) == 1:
        return part_of(x)
    whole_output: Tensor = whole(x)
    axis.applied.whole_outputs.add(whole_output.shape)
    return whole_output


def _loss(axis: TokenAxis, loss: Any, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute a model's loss of this rank's tokens, and the mean over all ranks."""
    applied = axis.applied
    if not applied.active or not isinstance(logits, SplitActivation) or logits.split_dim.dim != 1:
        return loss(logits, labels, *args, **kwargs)
    if shifts := "shift_labels" in inspect.signature(loss).parameters:
        shifted_labels = kwargs.pop("shift_labels", None)
        padded = nn.functional.pad(labels[:, 1:], (0, 1), value=batch.IGNORE_LABEL)
        labels = padded if shifted_labels is None else shifted_labels
    local = axis.take(labels, SplitDim(1, (labels.shape[1],)))
    shifted = {"shift_labels": local} if shifts else {}
    return applied.mean_loss(loss(part_of(logits), local, *args, **shifted, **kwargs), local)
