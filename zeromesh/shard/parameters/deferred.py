"""Building a model without holding it: its construction is recorded, and replayed parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_map

from zeromesh.base.quantized_layers import parts

LARGE = 1 << 13  # elements from which a tensor is deferred. Smaller ones are real, which is faster than to record them.

_MARK = "_zeromesh_tape"
_NUMBERS: Iterator[int] = count()


class Source(Protocol):
    """Source of a tensor's values. As text it names the place."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)`` of the flattened tensor, 1-D, in the dtype in which they rest."""


@dataclass(frozen=True)
class _View:
    """A deferred tensor: a view of a storage that will exist."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _View:
        offset = int(tensor.storage_offset())
        return cls(tensor.untyped_storage()._cdata, tensor.dtype, tuple(tensor.size()), tensor.stride(), offset)

    def on(self, storages: Mapping[int, torch.UntypedStorage]) -> torch.Tensor:
        storage = storages[self.storage]
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Operation:
    function: Any
    args: Any
    kwargs: dict[str, Any]
    outputs: tuple[_View, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    random: torch.Tensor | None  # state of the generator before
    source: Source | None = None  # of all values that are written, as a file
    number: int = field(default_factory=_NUMBERS.__next__)


class Tape:
    """The operations of a construction, in order."""

    def __init__(self) -> None:
        self.operations: list[_Operation] = []
        self._alive: list[torch.UntypedStorage] = []

    def record(self, operation: _Operation, tensors: Sequence[torch.Tensor]) -> None:
        """Add an operation; the storages of the deferred ``tensors`` keep their identity, and lead back to the tape."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            other = getattr(storage, _MARK, None)
            if other is None:
                setattr(storage, _MARK, self)
                self._alive.append(storage)
            elif other is not self:
                self._join(other)
        self.operations.append(operation)

    def _join(self, other: Tape) -> None:
        """Take the operations of an earlier construction, whose tensors are used in this one."""
        self.operations = sorted(self.operations + other.operations, key=lambda operation: operation.number)
        self._alive += other._alive
        for storage in other._alive:
            setattr(storage, _MARK, self)

    def source(self, tensor: torch.Tensor) -> Source | None:
        """Return the source of a deferred tensor's values, if nothing changes them afterwards."""
        view = _View.of(tensor)
        last = next((operation for operation in reversed(self.operations) if view.storage in operation.writes), None)
        return last.source if last is not None and last.outputs == (view,) else None

    def replay(self, tensor: torch.Tensor) -> torch.Tensor:
        """The real tensor in place of a deferred one; nothing else of the tape outlives the call."""
        view = _View.of(tensor)
        wanted = {view.storage}
        needed: list[_Operation] = []
        for operation in reversed(self.operations):
            if operation.writes & wanted:
                needed.append(operation)
                # What was done to a tensor before its values came from a source does not matter.
                wanted = wanted - operation.writes if operation.source is not None else wanted | operation.reads
        storages: dict[int, torch.UntypedStorage] = {}
        before = torch.get_rng_state()
        with torch.no_grad():
            for operation in reversed(needed):
                self._run(operation, storages)
        torch.set_rng_state(before)
        return view.on(storages)

    @staticmethod
    def _run(operation: _Operation, storages: dict[int, torch.UntypedStorage]) -> None:
        def real(value: Any) -> Any:
            if isinstance(value, torch.Generator):
                return value.clone_state()
            return value.on(storages) if isinstance(value, _View) else value

        if operation.random is not None:
            torch.set_rng_state(operation.random)
        result = operation.function(*tree_map(real, operation.args), **tree_map(real, operation.kwargs))
        for view, value in zip(operation.outputs, _tensors(result), strict=True):
            storages.setdefault(view.storage, value.untyped_storage())


class Recording(TorchDispatchMode):
    """While it is entered, large tensors are deferred."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = Tape()
        self._disguise = _Disguise()

    def __enter__(self) -> Recording:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._disguise.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._disguise.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if isinstance(error[1], Exception):
            error[1].add_note(
                "The model was being built under zeromesh.zero.Init, where large tensors are on the meta device; if it "
                "can be built without, its constructor does something that cannot be deferred"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = _tensors((args, kwargs))
        deferred = [tensor for tensor in tensors if is_deferred(tensor)]
        if not deferred:
            makes = not tensors and "device" in kwargs and _is_to_defer(func, args, kwargs)
            return self._record(func, args, kwargs, deferred) if makes else func(*args, **kwargs)
        # A construction that looks at a value is given it: the tape so far is replayed for that tensor alone.
        writes_real = any(not is_deferred(tensor) for tensor in _written(func, args, kwargs))
        if writes_real or not any("Tensor" in str(output.type) for output in func._schema.returns):
            return func(*tree_map(replayed, args), **tree_map(replayed, kwargs))
        return self._record(func, args, kwargs, deferred)

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], deferred: Sequence[torch.Tensor]) -> Any:
        stored_args, stored_kwargs, random = tree_map(_stored, args), tree_map(_stored, kwargs), None
        written = _written(func, args, kwargs)
        try:
            result = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs) | _meta_device(kwargs))
        except NotImplementedError:
            if written:
                raise RuntimeError(f"{func} cannot be deferred: torch does not have it for meta tensors") from None
            return func(*tree_map(replayed, args), **tree_map(replayed, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            # Run once more now, for its effect on the generator: the weights are to be those of an ordinary
            # construction, bit for bit, under every layout.
            random = torch.get_rng_state()
            _draw(func, args, kwargs, written)
        outputs = _tensors(result)
        views = tuple(_View.of(output) for output in outputs)
        reads = frozenset(_View.of(tensor).storage for tensor in deferred)
        writes = frozenset(view.storage for view in views) | {_View.of(tensor).storage for tensor in written}
        operation = _Operation(func, stored_args, stored_kwargs, views, reads, writes, random)
        self._tape.record(operation, [*outputs, *deferred])
        return result


def recording() -> AbstractContextManager[object]:
    """``Recording``, unless one is entered: two would record everything twice, and draw random numbers twice."""
    is_entered = any(isinstance(mode, Recording) for mode in _get_current_dispatch_mode_stack())
    return nullcontext() if is_entered else Recording()


class _Disguise(TorchFunctionMode):
    """Deferred tensors look like what they will be: on the CPU, with values for whoever reads them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is not None and func in _LOOKS and any(is_deferred(part) for _, part in parts(first)):
            return _LOOKS[func]
        if first is None or not is_deferred(first):
            return func(*args, **kwargs)
        if func in _READS:
            return _read_only(func(replayed(first), *args[1:], **kwargs))
        if func is torch.Tensor.cpu:
            return first
        if func is torch.Tensor.to:
            device, dtype, _, _ = torch._C._nn._parse_to(*args[1:], **kwargs)
            if device is not None and device.type == "cpu":  # ordinarily no copy, so none here
                options = {key: kwargs[key] for key in ("copy", "memory_format") if key in kwargs}
                return func(first, dtype or first.dtype, **options)
        if func is torch.Tensor.new_tensor:
            kwargs.setdefault("device", "cpu")
        return func(*args, **kwargs)


def _getter(attribute: str) -> Any:
    return getattr(torch.Tensor, attribute).__get__


_LOOKS = {_getter("device"): torch.device("cpu"), _getter("is_meta"): False, _getter("is_cpu"): True}
_READS = frozenset({torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist, torch.Tensor.__repr__})


def is_deferred(tensor: torch.Tensor) -> bool:
    """Return whether the tensor was made under ``Recording`` and has no values yet."""
    with torch._C.DisableTorchFunction():
        return tensor.device.type == "meta" and getattr(tensor.untyped_storage(), _MARK, None) is not None


def replayed(value: Any) -> Any:
    """The real tensor in place of a deferred one; anything else as it is."""
    if not (isinstance(value, torch.Tensor) and is_deferred(value)):
        return value
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        tape: Tape = getattr(value.untyped_storage(), _MARK)
        return tape.replay(value)


def read_from(tensor: torch.Tensor, source: Source) -> None:
    """Let a tensor on the meta device have the values of a source, whatever it was to have before."""
    view = _View.of(tensor)
    size = math.prod(view.size)
    assert tensor.is_contiguous()
    assert tensor.untyped_storage().nbytes() == size * view.dtype.itemsize

    def read() -> torch.Tensor:
        return torch.empty(view.size, dtype=view.dtype).copy_(source.read(0, size).view(view.size))

    tape = getattr(tensor.untyped_storage(), _MARK, None) or Tape()
    tape.record(_Operation(read, (), {}, (view,), frozenset(), frozenset({view.storage}), None, source), [tensor])


def compute_later(like: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return a deferred tensor, of a shape and dtype, whose values a function returns, contiguous, each time."""
    with _disable_current_modes():
        tensor = torch.empty(like.shape, dtype=like.dtype, device="meta")
        view = _View.of(tensor)
        Tape().record(_Operation(compute, (), {}, (view,), frozenset(), frozenset({view.storage}), None), [tensor])
    return tensor


def source_of(tensor: torch.Tensor) -> Source | None:
    """Return the source of a tensor's values; None if they have to be computed, or are there."""
    if not is_deferred(tensor):
        return None
    tape: Tape = getattr(tensor.untyped_storage(), _MARK)
    return tape.source(tensor)


def _read_only(value: Any) -> Any:
    """Let numpy refuse writes into an array of a replayed tensor, which would be lost."""
    if hasattr(value, "setflags"):
        value.setflags(write=False)
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    return [item for item in tree_flatten(value)[0] if isinstance(item, torch.Tensor)]


def _is_to_defer(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a new tensor is large, or made for use with a deferred one (a meta tensor to torch)."""
    kind = "cpu" if kwargs["device"] is None else torch.device(kwargs["device"]).type
    if kind != "cpu":
        return kind == "meta"
    shape = func(*args, **kwargs | _meta_device(kwargs))
    return isinstance(shape, torch.Tensor) and shape.numel() >= LARGE


def _meta_device(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    if "device" in kwargs:
        changed["device"] = torch.device("meta")
    if kwargs.get("pin_memory"):
        changed["pin_memory"] = False
    return changed


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) and value.device.type != "meta" else value


def _stored(value: Any) -> Any:
    """Return an argument for the tape; a copy where it may change before the replay."""
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "meta" else value
    if not isinstance(value, torch.Tensor):
        return value
    return _View.of(value) if is_deferred(value) else value.detach().clone()


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    tensors = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            tensors += _tensors(value)
    return tensors


def _draw(func: Any, args: Any, kwargs: dict[str, Any], written: Sequence[torch.Tensor]) -> None:
    """Run a random operation on temporaries, so that the generator moves on as it would."""

    def temporary(value: Any) -> Any:
        if any(value is target for target in written):
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)  # it is overwritten
        return replayed(value)

    kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
    func(*tree_map(temporary, args), **tree_map(temporary, kwargs))
