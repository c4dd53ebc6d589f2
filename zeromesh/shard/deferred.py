"""Building a model without holding it: its construction is recorded, and replayed unit by unit.

Inside ``Recording`` large tensors are made on the meta device, and what is done to them is written on a tape. Later the
parts of the tape that a unit's parameters depend on are run for real. Random numbers are the very ones that an
ordinary construction would have drawn, since each random operation is also run once for its effect on the generator,
on a temporary of its own: so the weights are those of the ordinary construction, bit for bit, under every layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

LARGE = 1 << 13
"""Elements from which a tensor is deferred. Smaller ones are real, so that code that looks at their values works."""

_MARK = "_zeromesh_tape"


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
    random: torch.Tensor | None


class Tape:
    """The operations of a construction, in order."""

    def __init__(self) -> None:
        self.operations: list[_Operation] = []
        self._alive: list[Any] = []

    def own(self, tensor: torch.Tensor) -> None:
        """Keep the storage's identity, and let it lead back to the tape."""
        storage = tensor.untyped_storage()
        if getattr(storage, _MARK, None) is None:
            setattr(storage, _MARK, self)

    def replay(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Real tensors for deferred ones; nothing else of the tape outlives the call."""
        views = [_View.of(tensor) for tensor in tensors]
        wanted = {view.storage for view in views}
        needed: list[_Operation] = []
        for operation in reversed(self.operations):
            if operation.writes & wanted:
                needed.append(operation)
                wanted |= operation.reads
        storages: dict[int, torch.UntypedStorage] = {}
        before = torch.get_rng_state()
        with torch.no_grad():
            for operation in reversed(needed):
                self._run(operation, storages)
        torch.set_rng_state(before)
        return [view.on(storages) for view in views]

    @staticmethod
    def _run(operation: _Operation, storages: dict[int, torch.UntypedStorage]) -> None:
        def real(value: Any) -> Any:
            return value.on(storages) if isinstance(value, _View) else value

        if operation.random is not None:
            torch.set_rng_state(operation.random)
        result = operation.function(*tree_map(real, operation.args), **tree_map(real, operation.kwargs))
        made = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
        for view, value in zip(operation.outputs, made, strict=True):
            storages.setdefault(view.storage, value.untyped_storage())


class Recording(TorchDispatchMode):
    """While it is entered, large tensors are deferred."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        deferred = [tensor for tensor in tensors if is_deferred(tensor)]
        if not deferred and (tensors or "device" not in kwargs or not _on_cpu(kwargs["device"])):
            return func(*args, **kwargs)
        if not deferred and not _is_large(func, args, kwargs):
            return func(*args, **kwargs)
        return self._record(func, args, kwargs, deferred)

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], deferred: Sequence[torch.Tensor]) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError(
                "the construction of the model looks at a value of a large tensor, which is not there yet under "
                "zeromesh.zero.Init; build this model without it"
            )
        written = _written(func, args, kwargs)
        real = [tensor for tensor in written if not is_deferred(tensor)]
        if real:
            raise RuntimeError(
                f"{func} writes values of a large tensor, which is not there yet under zeromesh.zero.Init, into a "
                "small one; build this model without it"
            )
        random = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            random = torch.get_rng_state()
            _advance(func, args, kwargs)
        kept_args, kept_kwargs = tree_map(_stored, args), tree_map(_stored, kwargs)
        result = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs) | _meta_device(kwargs))
        outputs = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
        for output in outputs:
            self.tape.own(output)
        views = tuple(_View.of(output) for output in outputs)
        reads = frozenset(_View.of(tensor).storage for tensor in deferred)
        writes = frozenset(view.storage for view in views) | {_View.of(tensor).storage for tensor in written}
        self.tape.operations.append(_Operation(func, kept_args, kept_kwargs, views, reads, writes, random))
        self.tape._alive.append([tensor.untyped_storage() for tensor in (*outputs, *deferred)])
        return result


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether the tensor was made under ``Recording`` and has no values yet."""
    return tensor.device.type == "meta" and getattr(tensor.untyped_storage(), _MARK, None) is not None


def _on_cpu(device: Any) -> bool:
    return device is None or torch.device(device).type == "cpu"


def _is_large(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
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
    """What the tape keeps of an argument: small real tensors by value, as they may change before the replay."""
    if not isinstance(value, torch.Tensor):
        return value
    return _View.of(value) if is_deferred(value) else value.detach().clone()


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that the operation changes in place."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [item for item in tree_flatten(value)[0] if isinstance(item, torch.Tensor)]
    return found


def _advance(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Run a random operation on temporaries, so that the generator moves on as it would."""

    def temporary(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.device.type == "meta"):
            return value
        real = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
        return real.fill_(0.5 if value.is_floating_point() else 0)  # a probability, where one is asked for

    func(*tree_map(temporary, args), **tree_map(temporary, kwargs))


def materialiser(model: nn.Module, seed: int = 0) -> Callable[[Sequence[tuple[str, nn.Parameter]]], None]:
    """A function that makes a unit's parameters real, in place: the objects stay the same.

    Parameters made under ``Recording`` are replayed. Others on the meta device are initialised by their modules'
    ``reset_parameters`` (or a Hugging Face model's ``_init_weights``), each module seeded by its name.

    Raises:
        ValueError: a module has neither.
    """
    with torch.no_grad():
        _materialise_buffers(model)

    def materialise(named: Sequence[tuple[str, nn.Parameter]]) -> None:
        recorded = [p for _, p in named if is_deferred(p)]
        tapes = {id(tape): tape for p in recorded if (tape := getattr(p.untyped_storage(), _MARK))}
        for tape in tapes.values():
            members = [p for p in recorded if getattr(p.untyped_storage(), _MARK) is tape]
            for parameter, value in zip(members, tape.replay(members), strict=True):
                _replace(parameter, value)
        for name, parameter in named:
            if parameter.device.type == "meta":
                _reset(model, name.rpartition(".")[0], seed)

    return materialise


def _replace(parameter: nn.Parameter, value: torch.Tensor) -> None:
    fresh = nn.Parameter(value.detach(), requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, fresh)


def _materialise_buffers(model: nn.Module) -> None:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.device.type != "meta":
                continue
            if not is_deferred(buffer):
                raise ValueError(
                    f"buffer {prefix}.{name} is on the meta device and its values are not known; build the model under "
                    "zeromesh.zero.Init() instead of torch.device('meta')"
                )
            module._buffers[name] = getattr(buffer.untyped_storage(), _MARK).replay([buffer])[0]


def _reset(model: nn.Module, path: str, seed: int) -> None:
    module = model.get_submodule(path)
    for parameter in module.parameters(recurse=False):
        if parameter.device.type == "meta":
            _replace(parameter, torch.empty_like(parameter, device="cpu"))
    owner = next((m for m in model.modules() if hasattr(m, "_init_weights")), None)
    state = torch.get_rng_state()
    torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{path}".encode()).digest()[:7], "big"))
    if callable(getattr(module, "reset_parameters", None)):
        module.reset_parameters()  # type: ignore[operator]
    elif owner is not None:
        owner._init_weights(module)  # type: ignore[operator]
    else:
        raise ValueError(
            f"{type(module).__name__} at {path!r} is on the meta device and has no reset_parameters to give it values; "
            "build the model under zeromesh.zero.Init() instead of torch.device('meta')"
        )
    torch.set_rng_state(state)
