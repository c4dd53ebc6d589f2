"""Activations of which each rank of the tensor axis holds a part, and which stand for the whole in a user's code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from threading import get_ident
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from zeromesh.base.containers import map_tensors, plain_numbers, tensors_of
from zeromesh.base.dry.model_copy import OURS, TORCH
from zeromesh.base.in_place import version, writes
from zeromesh.comm.collectives import Group
from zeromesh.parallel.tensor.operators import move
from zeromesh.parallel.tensor.random_streams import RandomStreams

# A layer that is split by columns gives a part of its output. Code of a class that nobody knows may do anything with
# it. So the part knows the dim that is split: functions for which there is a rule (``split_rules.py``) compute on the
# part, and all others get the whole, gathered for them. Whatever the code does, the result is that of one process.


@dataclass(frozen=True)
class SplitDim:
    """Split of one dim of an activation."""

    dim: int
    # Lengths, in the whole, of parts of the dim that are each cut evenly, such as queries, keys and values of a fused
    # layer; a rank holds its part of each, one after the other.
    sections: tuple[int, ...]
    sources: frozenset[str] = frozenset()  # names of the layers whose outputs it was made of

    @property
    def size(self) -> int:
        """Length of the dim in the whole."""
        return sum(self.sections)


class Axis:
    """Messages between the ranks that hold the parts."""

    size: int
    gradient_scale = 1  # gradients of parts, over those of one process
    sums_sparse = False  # true if sparse gradients of what all ranks have whole are summed

    def gather(self, part: Tensor, split_dim: SplitDim) -> Tensor:
        """Return the whole, whose gradient is the same on all ranks."""
        raise NotImplementedError

    def take(self, tensor: Tensor, split_dim: SplitDim) -> Tensor:
        """Return this rank's part of what all ranks have whole; the gradient is gathered."""
        raise NotImplementedError

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the same; the gradient is summed over the ranks, each of which has a share."""
        raise NotImplementedError

    def sum(self, share: Tensor) -> Tensor:
        """Return the sum over the ranks; the gradient is that of each share."""
        raise NotImplementedError

    def apart(self) -> AbstractContextManager[None]:
        """Let each rank draw its own random numbers in this context."""
        return nullcontext()

    def again(self, result: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Return the result of a function that needed these activations whole; this rank's part of it, if it may be."""
        return result

    def wish(self, split_dim: SplitDim, lengths: list[int]) -> None:
        """Note that the dim would not have to be gathered here if its sections had these lengths."""


class TensorAxis(Axis):
    """Messages over the tensor axis, with one tag: those of forwards and backwards follow one another."""

    def __init__(self, group: Group, tag: int, streams: RandomStreams | None = None) -> None:
        self.size, self.group, self.tag = group.size, group, tag
        self._streams = streams

    def _move(self, x: Tensor, name: str, dim: int = 0) -> Tensor:
        if x.ndim == 0:
            return move(x.reshape(1), name, self.group, self.tag).reshape(())
        return move(x, name, self.group, self.tag, dim)

    def gather(self, part: Tensor, split_dim: SplitDim) -> Tensor:
        """Gather the parts, and put the sections in order."""
        joined = self._move(part, "join", split_dim.dim)
        if len(split_dim.sections) == 1:
            return joined
        pieces = joined.split([section // self.size for section in split_dim.sections] * self.size, split_dim.dim)
        count = len(split_dim.sections)
        return torch.cat([piece for number in range(count) for piece in pieces[number::count]], split_dim.dim)

    def take(self, tensor: Tensor, split_dim: SplitDim) -> Tensor:
        """Keep this rank's part of each section."""
        lengths = [section // self.size for section in split_dim.sections for _ in range(self.size)]
        pieces = tensor.split(lengths, split_dim.dim)
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            rank_pieces = pieces[self.group.rank :: self.size]
            return rank_pieces[0] if len(rank_pieces) == 1 else torch.cat(rank_pieces, split_dim.dim)
        if len(split_dim.sections) > 1:
            ordered = [piece for rank in range(self.size) for piece in pieces[rank :: self.size]]
            tensor = torch.cat(ordered, split_dim.dim)
        return self._move(tensor, "split", split_dim.dim)

    def copy(self, tensor: Tensor) -> Tensor:
        """Sum the gradient."""
        return self._move(tensor, "copy")

    def sum(self, share: Tensor) -> Tensor:
        """Sum the shares."""
        return self._move(share, "sum")

    def apart(self) -> AbstractContextManager[None]:
        """Switch to this rank's stream of random numbers, if there are streams."""
        return nullcontext() if self._streams is None else self._streams.apart()


Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[Any, Rule] = {}
"""Function of torch -> what it does with parts; ``NotImplemented`` where it needs the whole."""


class Sealed(TorchDispatchMode):
    """Context in which no operator computes on parts unless a function of torch was asked before.

    Code outside of Python, and functions that torch lets nobody replace (``torch.tensor``, ``vmap``), would take a part
    for the whole. ``axis`` is that of the parts, where there is one.
    """

    def __init__(self, axis: Axis | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused: NeedsWhole | None = None
        self.axis = axis

    def __enter__(self) -> Sealed:
        """Begin, unless it is in force already."""
        if not any(isinstance(mode, Sealed) for mode in _get_current_dispatch_mode_stack()):
            super().__enter__()  # type: ignore[no-untyped-call]
            _sealed[get_ident()] = self
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End where it began, and raise what was refused."""
        if not any(mode is self for mode in _get_current_dispatch_mode_stack()):
            return
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        del _sealed[get_ident()]
        if self.refused is not None and error is not self.refused:
            raise self.refused from error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operator."""
        # Where functions of torch ask nobody, it is a rule that computes, or other code that has switched them off.
        if torch._C._is_torch_function_enabled() or not _is_by_rule(sys._getframe(1)):
            for x in args:
                leaks = [x] if isinstance(x, SplitActivation) else x if isinstance(x, list) else ()
                if leaks and any(isinstance(leak, SplitActivation) for leak in leaks):
                    _refuse(f"code outside of Python, which calls {func},", leaks, tells=True)
        return func(*args, **(kwargs or {}))


_sealed: dict[int, Sealed] = {}
"""Thread -> the context that is in force there."""


def sealed_axis() -> Axis | None:
    """Return the axis of the context of ``Sealed`` that is in force in this thread, or None."""
    return _sealed[get_ident()].axis if get_ident() in _sealed else None


def frames() -> Iterator[FrameType]:
    """Yield the frames of code that runs, from the caller's on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_by_rule(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    return frame is None or frame.f_code.co_filename.startswith(OURS)


def unseen() -> AbstractContextManager[Any]:
    """Return a context for operators that are known not to be given parts by mistake, of which Python need not hear."""
    # Only where nothing else wants to hear of them, such as a recomputation that keeps some results.
    modes = _get_current_dispatch_mode_stack()
    is_alone = len(modes) == 1 and isinstance(modes[0], Sealed)
    return torch._C._DisableTorchDispatch() if is_alone else nullcontext()


class SplitActivation(Tensor):
    """Part of an activation, which answers as the whole: ``shape`` is that of the whole, and so are all results."""

    split_dim: SplitDim
    axis: Axis
    thread: int

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Apply a function of torch to parts if there is a rule, and else to the whole."""
        more = dict(kwargs or {})
        # In this context functions compute on the parts as on any tensor.
        with torch._C.DisableTorchFunctionSubclass():
            _require_one_thread(func, args)
            if not torch.is_grad_enabled():
                _require_plain_code(tensors_of((args, more)))
            if GatheredView in types:
                _require_fresh(func, (args, more))
            if func == _DEVICE and isinstance(args[0], SplitActivation):
                _require_no_checkpoint(args[0])
            if not args and (first := next((name for name in _FIRST if name in more), None)):
                args = (more.pop(first),)
            args, more = plain_numbers(args), {key: plain_numbers(value) for key, value in more.items()}
            rule = None if _ALIASES & more.keys() else RULES.get(func)
            if rule is not None and args:
                with unseen() if types == _PARTS else nullcontext():
                    result = rule(func, args, more)
                if result is not NotImplemented:
                    return result
            return _on_whole(func, args, more)

    def stand_for(self, split_dim: SplitDim, axis: Axis) -> None:
        """Answer as the whole of which this is a part, in this thread."""
        self.split_dim, self.axis, self.thread = split_dim, axis, get_ident()

    def gathered(self) -> Tensor:
        """Return the whole."""
        if torch._C._are_functorch_transforms_active():
            _refuse("a transform of torch.func", [self])
        # Each time anew: whether somebody still holds an earlier one may differ between ranks.
        with torch._C.DisableTorchFunctionSubclass():
            return self.axis.gather(part_of(self), self.split_dim)

    def as_subclass(self, cls: type[Any]) -> Any:
        """Return the whole as a tensor of another class: torch asks nobody here. For rules, it is the part."""
        return Tensor.as_subclass(self.gathered() if torch._C._is_torch_function_enabled() else self, cls)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe it without its values, which would take messages to print."""
        with torch._C.DisableTorchFunctionSubclass():
            shape, split_dim = whole_shape(self), self.split_dim
            return f"SplitActivation(shape={tuple(shape)}, dtype={self.dtype}, dim {split_dim.dim} is split)"


def part_of(x: Tensor) -> Tensor:
    """Return what this rank holds, as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def whole_shape(x: SplitActivation) -> torch.Size:
    """Return the shape of the whole; to be called where functions compute on parts."""
    sizes = list(x.shape)
    sizes[x.split_dim.dim] = x.split_dim.size
    return torch.Size(sizes)


def whole(value: Any) -> Any:
    """Return a value with every activation in it whole; containers of other kinds stay as they are."""
    return map_tensors(value, _whole)


def _whole(x: Tensor) -> Tensor:
    if isinstance(x, GatheredView):
        with torch._C.DisableTorchFunctionSubclass():
            _require_fresh(Tensor.as_subclass, x)
            return x.as_subclass(Tensor)
    return x.gathered() if isinstance(x, SplitActivation) else x


_FIRST = ("input", "query", "tensors", "self")  # names of first arguments
_ALIASES = {"axis", "axes", "keepdims"}  # names of NumPy's arguments, which torch takes, and rules do not read


def _on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parts = tensors_of((args, kwargs))
    outputs = [output for output in tensors_of(kwargs.get("out")) if isinstance(output, SplitActivation)]
    if outputs:
        what = f"{func.__name__} writes to {outputs[0]!r} by out=, of which each rank has a part; leave out= away"
        raise NeedsWhole(what, outputs[0].split_dim.sources)
    if func in _REFUSED or str(getattr(func, "__module__", "")).startswith("torch.distributed"):
        _refuse(func, parts)
    whole_args, whole_kwargs = whole((args, kwargs))
    wholes = tensors_of((whole_args, whole_kwargs))
    before = [version(gathered) for gathered in wholes]
    result = func(*whole_args, **whole_kwargs)
    sources, written = {}, {}
    for place, (x, gathered, old_version) in enumerate(zip(parts, wholes, before, strict=True)):
        if not isinstance(x, SplitActivation):
            continue
        sources[_memory(gathered)] = x
        if version(gathered) != old_version or (place == 0 and writes(func, kwargs)):
            if gathered.shape != whole_shape(x):
                _refuse(func, [x])
            x.copy_(x.axis.take(gathered, x.split_dim))
            written[id(gathered)] = x
    splits, memories = list(sources.values()), {_memory(x) for x in wholes if x.layout is torch.strided}

    def returned(x: Tensor) -> Tensor:
        if splits and id(x) not in written and _memory(x) not in memories:
            return splits[0].axis.again(x, splits)
        return written[id(x)] if id(x) in written else _read_only(x, sources)

    return map_tensors(result, returned)


_PARTS = (SplitActivation,)
_SETTERS: list[Any] = [Tensor.data, Tensor.grad]
_REFUSED = {torch.autograd.grad, torch.autograd.backward, Tensor.backward, Tensor.retain_grad, Tensor.as_strided,
    torch.as_strided, torch.as_tensor, torch.asarray, *(attribute.__set__ for attribute in _SETTERS)}  # fmt: skip


def _refuse(func: Any, values: Sequence[Tensor], where: str = "", *, tells: bool = False) -> None:
    """Raise an error for a function that can neither compute on parts nor be given the whole; ``tells`` the block."""
    parts = [x for x in values if isinstance(x, SplitActivation)]
    sources = frozenset[str]().union(*(x.split_dim.sources for x in parts))
    name = getattr(func, "__name__", func)
    error = NeedsWhole(f"{name} was given{where} an activation of which each rank has a part", sources)
    for thread in {x.thread for x in parts} & _sealed.keys() if tells else ():
        _sealed[thread].refused = _sealed[thread].refused or error  # code may catch it, or put it in other words
    raise error


def _require_one_thread(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse parts in a thread that the block's code has started: its messages would come in any order."""
    parts = [x for x in args if isinstance(x, SplitActivation)]
    # Autograd has threads of its own, whose order is that of the backward.
    if any(x.thread != get_ident() for x in parts) and torch._C._current_graph_task_id() == -1:
        _refuse(func, parts, ", in another thread,", tells=True)


def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that takes a part for the whole, and asks nobody, as one that refuses parts."""

    @wraps(function)
    def refuse_parts(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, SplitActivation) for x in (*args, *kwargs.values())):
            _refuse(function, [*args, *kwargs.values()])
        return function(*args, **kwargs)

    return refuse_parts


def _require_fresh(func: Any, values: Any, writes: bool = False) -> None:
    """Refuse views of gathered wholes that are written to, or whose parts were."""
    views = [x for x in tensors_of(values) if isinstance(x, GatheredView)]
    if not writes and all(version(x.part) == x.part_version for x in views):
        return
    raise NeedsWhole(
        f"{getattr(func, '__name__', func)} was given a view that was gathered of an activation of which each rank has "
        "a part, and one of both is written to, which would not change the other",
        frozenset[str]().union(*(x.part.split_dim.sources for x in views)),
    )


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _read_only(x: Tensor, sources: Mapping[int, SplitActivation]) -> Tensor:
    """Return a result that shares memory with a gathered whole as one that cannot be written to."""
    if isinstance(x, SplitActivation) or _memory(x) not in sources:
        return x
    view = x.as_subclass(GatheredView)
    part = view.part = sources[_memory(x)]
    view.part_version = version(part)
    return view


class GatheredView(Tensor):
    """View of a gathered activation: what is written to it, or to the parts, would not reach the other."""

    part: SplitActivation
    part_version: int  # when it was gathered

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Apply a function of torch, unless it writes to the view."""
        more = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            views = [x for x in tensors_of((args, more)) if isinstance(x, GatheredView)]
            written = tensors_of((more.get("out"), args[0] if args and writes(func, more) else None))
            _require_fresh(func, (args, more), any(isinstance(x, GatheredView) for x in written))
            if SplitActivation in types:
                return NotImplemented  # it takes the view as a whole
            before = [version(x) for x in views]
            result = func(*args, **more)
            if before != [version(x) for x in views]:
                _refuse(func, [x.part for x in views])
            parts = {_memory(x): x.part for x in views}
            return map_tensors(result, lambda x: _read_only(x, parts))


def _require_plain_code(values: list[Tensor]) -> None:
    """Refuse functions with a backward of their own, which would be given parts of gradients there."""
    part = next((x for x in values if isinstance(x, SplitActivation)), None)
    for frame in frames() if part is not None else ():
        if frame.f_code is _APPLY and any(x.requires_grad for x in tensors_of(frame.f_locals.get("args"))):
            kind = frame.f_locals.get("cls", torch.autograd.Function)
            raise NeedsWhole(
                f"{kind.__name__}.apply was given an activation of which each rank has a part, and its backward would "
                "be given a part of the gradient",
                cast(SplitActivation, part).split_dim.sources,
            )


def _require_no_checkpoint(x: SplitActivation) -> None:
    """Refuse a part as an argument of torch's checkpoint, which asks for its device first."""
    # What autograd keeps for a recomputation may come back as a plain tensor, which would stand for the whole.
    # A part of a sequence, whose tokens are checked, has no sources, and nothing is computed again.
    asking = (frame.f_code.co_name == "_infer_device_type" for frame in islice(frames(), 10))
    if x.split_dim.sources and any(asking):
        raise NeedsWhole(
            "torch.utils.checkpoint was given an activation of which each rank has a part, and would compute again "
            "with the part alone",
            x.split_dim.sources,
        )


_DEVICE = Tensor.device.__get__
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


class NeedsWhole(ValueError):
    """Code does with an activation what can only be done with the whole."""

    def __init__(self, what: str, sources: frozenset[str]) -> None:
        layers = " and ".join(sorted(sources)) or "the layer it comes from"
        super().__init__(f"{what}; in tensor_parallel.plan give {layers} the style colwise_gather_output")
        self.sources = sources
