"""Context parallelism of any model: its code is given activations that stand for whole sequences."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from functools import partial, update_wrapper
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.modules._functions import BackwardHookFunction

from zeromesh.base.containers import map_tensors, tensors_of
from zeromesh.base.in_place import version
from zeromesh.base.substitution import of_library
from zeromesh.parallel.context import spread_batch as batch
from zeromesh.parallel.context.applied import (
    SpreadSequences,
    Unsupported,
    arguments_of_sequences,
    is_token_mean,
    parameters_of,
    refuse,
)
from zeromesh.parallel.context.sequence_order import require_length
from zeromesh.parallel.follow.activation_parts import guard_functions, replace_forward
from zeromesh.parallel.follow.split_activation import (
    NeedsWhole,
    Sealed,
    SplitActivation,
    SplitDim,
    TensorAxis,
    part_of,
    sealed_axis,
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
        super().__init__(applied.group, applied.tag)
        self.applied, self.gradient_scale = applied, applied.group.size
        self._alike = TensorAxis(applied.group, applied.tag)

    def _move(self, x: Tensor, name: str, dim: int = 0) -> Tensor:
        return super()._move(x, _MOVES[name], dim)

    def take(self, tensor: Tensor, split_dim: SplitDim) -> Tensor:
        """Keep this rank's part of each section; others have the gradients of theirs."""
        lengths = [section // self.size for section in split_dim.sections for _ in range(self.size)]
        return torch.cat(tensor.split(lengths, split_dim.dim)[self.group.rank :: self.size], split_dim.dim)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the same."""
        return tensor

    def again(self, result: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Return this rank's part of a result that has the sequence in the dim where one of the activations has it."""
        split_dim = _split_of(result, parts)
        return result if split_dim is None else as_split(self.take(result, split_dim), split_dim, self)

    def call_alike(self, kind: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply a function that has a backward of its own: given wholes, and gradients as one process has them.

        Raise Unsupported if it writes to an activation, or computes something else than on other ranks of parts.
        """
        parts = [x for x in tensors_of((args, kwargs)) if isinstance(x, SplitActivation)]

        def scaled(x: Tensor, factor: float) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * factor)
            return x

        def gathered(x: Tensor) -> Tensor:
            if not isinstance(x, SplitActivation):
                return x
            return scaled(self._alike.gather(part_of(x), x.split_dim), self.size)

        def returned(x: Tensor) -> Tensor:
            if not x.is_floating_point() or any(x is other for other in others):
                return x
            split_dim = _split_of(x, parts)
            if split_dim is None:
                return scaled(self._alike.copy(x), 1 / self.size) if x.requires_grad else x
            return as_split(scaled(self._alike.take(x, split_dim).clone(), 1 / self.size), split_dim, self)

        whole_args, whole_kwargs = map_tensors((args, kwargs), gathered)
        others = tensors_of((whole_args, whole_kwargs))
        versions, states = [version(x) for x in others], _random_states(others)
        result = _APPLY(kind, *whole_args, **whole_kwargs)
        # Modules around it that were given wholes instead would give it a share of the gradients.
        if versions != [version(x) for x in others]:
            raise refuse(kind.__name__, "it has a backward of its own, and writes to an activation")
        if (not parts or states != _random_states(others)) and not self._has_alike([*others, *tensors_of(result)]):
            if not parts:  # ranks have drawn different numbers before, and differentiate what they have computed
                return result
            raise refuse(kind.__name__, "it has a backward of its own, and draws numbers that differ between ranks")
        return map_tensors(result, returned)

    def _has_alike(self, values: Sequence[Tensor]) -> bool:
        """Return whether all ranks have the same values."""
        checksum = 0
        for x in values:
            checksum = crc32(x.detach().flatten().cpu().view(torch.uint8).numpy().data, checksum)
        return bool((self.group.exchange(torch.tensor([checksum]), self.tag) == checksum).all())

    def split(self, x: Any) -> Any:
        """Return this rank's part of (samples, sequence, ...); what cannot be cut is left whole."""
        if not isinstance(x, Tensor) or isinstance(x, SplitActivation) or x.ndim < 2 or x.shape[1] % self.size:
            return x
        split_dim = SplitDim(1, (x.shape[1],))
        return as_split(self.take(x, split_dim), split_dim, self)


_NONE = frozenset[str]()


def _split_of(result: Tensor, parts: Sequence[Tensor]) -> SplitDim | None:
    splits = [part.split_dim for part in parts if isinstance(part, SplitActivation)]
    fits = (split for split in splits if split.dim < result.ndim and result.shape[split.dim] == split.size)
    return next(fits, None)


def _random_states(values: Sequence[Tensor]) -> list[bytes]:
    """Return what the next random numbers on the devices of these tensors follow from."""
    devices = {x.device for x in values if x.is_cuda}
    return [x.numpy().tobytes() for x in (torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices))]


_APPLY = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]


@functools.wraps(_APPLY)
def _apply(kind: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """Apply a function in followed code: its backward knows neither parts nor shares of gradients."""
    part = next((x for x in (*args, *kwargs.values()) if isinstance(x, SplitActivation)), None)
    axis = sealed_axis() if part is None else part.axis
    # Backwards of libraries are derivatives: what they give for shares of the ranks adds up.
    known = part is None and (not torch.is_grad_enabled() or (of_library(kind) and kind is not BackwardHookFunction))
    if known or not isinstance(axis, TokenAxis) or not torch._C._is_torch_function_enabled():
        return _APPLY(kind, *args, **kwargs)
    if kind is BackwardHookFunction:
        raise refuse("a module", "its full backward hook would be given gradients of this rank's tokens")
    return axis.call_alike(kind, args, kwargs)


def install(model: Any, applied: SpreadSequences) -> None:
    """Change a model so that, where ``applied.consecutive``, its code is given parts that stand for the whole."""
    axis = TokenAxis(applied)
    for module in model.modules():
        for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
            if (rate := getattr(getattr(module, "config", None), name, 0)) and rate > 0:
                what = f"{name} is {rate:g}, and ranks that draw differently would wait for each other's messages"
                raise refuse(type(module).__name__, what, f"set {name} to 0")
    torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment, method-assign]
    for module in model.modules():
        replace_forward(module, partial(_Followed(axis, module).run, module.forward))
        if "labels" in parameters_of(type(module)) and callable(loss := getattr(module, "loss_function", None)):
            setattr(module, "loss_function", update_wrapper(partial(_loss, axis, loss), loss))  # noqa: B010
    guard_functions({type(module) for module in model.modules() if not of_library(module)})
    replace_forward(model, partial(_run, axis, type(model), model.forward))


class _Followed:
    """Forward of a module that may be given parts of sequences.

    Attributes:
        needs_whole: True if the module is given whole sequences, on each rank: it reads tokens one after the other, or
            does what can only be done with the whole.
    """

    def __init__(self, axis: TokenAxis, module: nn.Module) -> None:
        self._axis, self._reads_ids = axis, isinstance(module, nn.Embedding)
        self._module, self._was_called = module, False
        # Of each argument that was given, by its place and the shape that a rank had of it; None: of a whole.
        self._splits: dict[tuple[int | str, torch.Size], set[SplitDim | None]] = {}
        self.needs_whole = any(
            isinstance(child, nn.RNNBase) or (isinstance(child, nn.Conv1d) and max(child.kernel_size) > 1)
            for child in (module, *module.children())
        )

    def run(self, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Compute the module."""
        applied = self._axis.applied
        if not (applied.active and applied.consecutive) or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        if sealed_axis() is not None:
            return self._compute(forward, args, kwargs)
        if torch._C._current_graph_task_id() == -1:
            return forward(*args, **kwargs)  # of another model: transformers' share some functions
        # A recomputation in the backward, which is given plain tensors where it was given parts.
        with Sealed(self._axis):
            args = tuple(self._as_part(place, x) for place, x in enumerate(args))
            return self._compute(forward, args, {name: self._as_part(name, x) for name, x in kwargs.items()})

    def _compute(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._reads_ids:  # those that a model makes itself, such as a decoder's, are whole
            args = tuple(map(self._axis.split, args))
        arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for place, x in arguments:
            if isinstance(x, Tensor):
                split_dim, local = (x.split_dim, part_of(x)) if isinstance(x, SplitActivation) else (None, x)
                self._splits.setdefault((place, local.shape), set()).add(split_dim)
        parts = [x for x in tensors_of((args, kwargs)) if isinstance(x, SplitActivation) and x.axis is self._axis]
        if not parts:
            return forward(*args, **kwargs)
        if not self.needs_whole:
            before = None if self._was_called else self._state(parts)
            try:
                result = forward(*args, **kwargs)
                self._was_called = True
                return result
            except NeedsWhole:
                # What it has changed already, it would change twice.
                if before is None or not _same(before, self._state(parts)):
                    raise
                self.needs_whole = True
        args, kwargs = whole((args, kwargs))
        wholes = tensors_of((args, kwargs))
        versions = [version(x) for x in wholes]
        result = forward(*args, **kwargs)
        if versions != [version(x) for x in wholes]:
            raise NeedsWhole(f"{type(self._module).__name__} writes to an activation that it needs whole", _NONE)
        return map_tensors(result, lambda x: self._axis.again(x, parts))

    def _state(self, parts: Sequence[Tensor]) -> list[Any]:
        """Return what the module may have changed when it is called."""
        state: list[Any] = []
        values = [
            value for module in self._module.modules() for value in (*vars(module).values(), *module._buffers.values())
        ]
        for value in (*values, *parts):
            count = version(value) if isinstance(value, Tensor) else len(value) if isinstance(value, _SIZED) else 0
            state += value, count
        return state

    def _as_part(self, place: int | str, x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, SplitActivation):
            return x
        first, *more = self._splits.get((place, x.shape), {None})
        if more:
            what = f"{type(self._module).__name__} was given parts and wholes of one shape, and is to be computed again"
            raise NeedsWhole(what, _NONE)
        return x if first is None else as_split(x.view_as(x), first, self._axis)


_SIZED = (list, dict, set)


def _same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(
        x is y or (type(x) is type(y) is int and x == y) for x, y in zip(before, after, strict=True)
    )


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
    named = arguments_of_sequences(kind, args, kwargs)
    # Others than these may be anything, and are given whole.
    first = next((name for name, x in named.items() if isinstance(x, Tensor) and x.ndim > 1), "")
    for name in {*batch.TOKENS} & named.keys() or {first} & named.keys():
        if named[name] is not None:
            require_length(named[name].shape[1], axis.size)
            named[name] = axis.split(named[name])
    axis.applied.whole_outputs.clear()
    try:
        with Sealed(axis):
            return map_tensors(forward(**named), partial(_leave, axis))
    except NeedsWhole as error:
        raise refuse(kind.__name__, str(error).partition("; in tensor_parallel")[0]) from error


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
    shifts = "shift_labels" in inspect.signature(loss).parameters
    is_part = isinstance(logits, SplitActivation) and logits.split_dim.dim == 1 and applied.active
    others = {name: x for name, x in kwargs.items() if name != "shift_labels"}
    if not is_part or not is_token_mean(loss, logits, shifts, args, others):
        return loss(logits, labels, *args, **kwargs)
    if shifts:
        shifted_labels = kwargs.pop("shift_labels", None)
        padded = nn.functional.pad(labels[:, 1:], (0, 1), value=batch.IGNORE_LABEL)
        labels = padded if shifted_labels is None else shifted_labels
    local = axis.take(labels, SplitDim(1, (labels.shape[1],)))
    shifted = {"shift_labels": local} if shifts else {}
    return applied.mean_loss(loss(part_of(logits), local, *args, **shifted, **kwargs), local)
