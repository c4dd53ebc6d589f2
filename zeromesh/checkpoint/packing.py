"""Python values as JSON, and back, without pickle: the values of a checkpoint that are not tensors of a model."""

from __future__ import annotations

import base64
import io
import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch

from zeromesh.checkpoint.manifest import dtype_name
from zeromesh.comm.collectives import Group


class _Kind(NamedTuple):
    """Conversion of values of one type to and from JSON; ``to`` gives the argument of ``pack``."""

    mark: str
    type: type | tuple[type, ...]
    to: Callable[[Any], Any]
    back: Callable[[Any], Any]


PART = 1 << 28  # bytes of one message: some backends count those in 32 bits

Move = Callable[[torch.Tensor], object]

KINDS = (
    _Kind(
        "__numpy_time__",
        (numpy.datetime64, numpy.timedelta64),
        lambda value: [value.dtype.str, int(value.astype("i8"))],
        lambda parts: numpy.array(parts[1], "i8").view(parts[0])[()],
    ),
    _Kind(
        "__numpy__",
        (numpy.number, numpy.bool_, numpy.character),
        lambda value: [value.dtype.str, value.item()],
        lambda parts: numpy.dtype(parts[0]).type(parts[1]),
    ),
    _Kind("__tuple__", tuple, list, tuple),
    _Kind("__set__", set, list, set),
    _Kind("__frozenset__", frozenset, list, frozenset),
    _Kind("__bytes__", bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    _Kind("__bytearray__", bytearray, bytes, bytearray),
    _Kind("__bytesio__", io.BytesIO, io.BytesIO.getvalue, io.BytesIO),
    _Kind("__complex__", complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    _Kind("__datetime__", datetime, datetime.isoformat, datetime.fromisoformat),
    _Kind("__date__", date, date.isoformat, date.fromisoformat),
    _Kind("__time__", time, time.isoformat, time.fromisoformat),
    _Kind(
        "__timedelta__",
        timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: timedelta(*parts),
    ),
    _Kind("__namespace__", Namespace, vars, lambda fields: Namespace(**fields)),
    _Kind("__simplenamespace__", SimpleNamespace, vars, lambda fields: SimpleNamespace(**fields)),
    _Kind("__path__", Path, str, Path),
)
"""Conversions, of which the first that fits counts."""

# Keys of what stands for something that JSON does not have.
MARKS = frozenset({"__items__", "__tensor__", "__stored__", *(kind.mark for kind in KINDS)})


class StoredTensors(dict[str, torch.Tensor]):
    """Tensors that are kept apart, under names of a ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind


def pack(value: Any, path: str = "the value", apart: dict[str, torch.Tensor] | None = None) -> Any:
    """Return what JSON holds of ``value``, which is called ``path`` in errors.

    ``apart`` takes tensors of more than one element, by the names under which ``unpack`` asks for them.

    Raises:
        TypeError: a value cannot be kept; the message says where it is and what it is.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        # A dict of the user's with a mark as its key must not be taken for what the mark stands for.
        if all(type(key) is str and key not in MARKS for key in value):
            return {key: pack(item, f"{path}[{key!r}]", apart) for key, item in value.items()}
        items = [(pack(key, f"{path}, the key {key!r}", apart), key, item) for key, item in value.items()]
        return {"__items__": [[packed, pack(item, f"{path}[{key!r}]", apart)] for packed, key, item in items]}
    if isinstance(value, list):
        return [pack(item, f"{path}[{number}]", apart) for number, item in enumerate(value)]
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return _pack_tensor(value, path, apart)
    # Subclasses count as their base: named tuples come back as tuples.
    kind = next((kind for kind in KINDS if isinstance(value, kind.type)), None)
    if kind is not None and not isinstance(value, numpy.longdouble | numpy.clongdouble):  # JSON's numbers are narrower
        return {kind.mark: pack(kind.to(value), path, apart)}
    if isinstance(value, bool | int | float | str):  # an enumeration, or another subclass
        return value
    raise TypeError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold; convert it to numbers, strings, tensors, "
        "and lists, tuples, sets and dicts of them"
    )


def _pack_tensor(
    value: torch.Tensor | numpy.ndarray[Any, Any], path: str, apart: dict[str, torch.Tensor] | None
) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return {"__tensor__": [value.tolist(), dtype_name(value.dtype)]}
    library = "torch" if isinstance(value, torch.Tensor) else "numpy"
    try:
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.from_numpy(numpy.ascontiguousarray(value))
    except (TypeError, ValueError):
        tensor = None
    if tensor is None or apart is None or tensor.layout is not torch.strided or tensor.dtype is torch.complex128:
        raise TypeError(
            f"{path} is a {type(value).__name__} of {value.dtype}, which a checkpoint cannot hold there; convert it to "
            "numbers"
        )
    kind = apart.kind if isinstance(apart, StoredTensors) else "client_state"
    name = f"{kind}/{len(apart)}"  # a tensor of the checkpoint, which may be large, and is not JSON
    apart[name] = tensor.contiguous()
    return {"__stored__": [name, library, list(value.shape), dtype_name(tensor.dtype)]}


def is_like(present: Any, saved: Any) -> bool:
    """Return whether a saved value can take the place of one in a state of torch: a number of a number, and so on."""
    if present is None or saved is None:
        return True
    if saved != saved and present == present and isinstance(saved, float):  # NaN
        return False
    if isinstance(present, bool):
        return isinstance(saved, int | float) and saved in (0, 1)
    if isinstance(present, int) and isinstance(saved, float):  # as a rate that was given as 1
        return isfinite(saved)
    if isinstance(present, int | float | torch.Tensor):
        return isinstance(saved, int | float | torch.Tensor)
    if isinstance(present, list | tuple):
        alike = isinstance(saved, list | tuple)
        numbers = any(isinstance(item, int | float | torch.Tensor) for item in present)
        return alike and (not numbers or all(isinstance(item, int | float | torch.Tensor) for item in saved))
    return isinstance(saved, dict if isinstance(present, dict) else type(present))


def unpack(value: Any, apart: Callable[[str], torch.Tensor] | None = None) -> Any:
    """Return what ``pack`` was given; ``apart`` returns a tensor by its name."""
    if isinstance(value, list):
        return [unpack(item, apart) for item in value]
    if not isinstance(value, dict):
        return value
    if "__items__" in value:
        return {unpack(key, apart): unpack(item, apart) for key, item in value["__items__"]}
    if "__tensor__" in value:
        number, dtype = value["__tensor__"]
        return torch.tensor(number, dtype=getattr(torch, dtype))
    if "__stored__" in value and apart is not None:
        name, library, shape, dtype = value["__stored__"]
        stored = apart(name).view(shape) if 0 not in shape else torch.empty(shape, dtype=getattr(torch, dtype))
        return stored if library == "torch" else stored.numpy()
    for kind in KINDS:
        if kind.mark in value:
            return kind.back(unpack(value[kind.mark], apart))
    return {key: unpack(item, apart) for key, item in value.items()}


def broadcast_value(value: Any, source: int, group: Group) -> Any:
    """Return the value that group rank ``source`` has, its tensors on this rank's device. Collective."""
    return share_value(
        value, "the value", group.rank == source, lambda data: group.broadcast(data, source), group.device
    )


def share_value(
    value: Any, name: str, is_source: bool, broadcast: Callable[[torch.Tensor], object], device: torch.device
) -> Any:
    """Return the value of the source, whose bytes ``broadcast`` gives to all ranks, in place. Collective.

    Raises:
        ValueError: on every rank, if a checkpoint could not hold it.
    """
    apart: dict[str, torch.Tensor] = {}
    text = None
    if is_source:
        try:
            text = json.dumps(pack(value, name, apart))
        except TypeError as error:
            text = f"!{error}"
    text = move_text(broadcast, device, text)
    if text.startswith("!"):
        raise ValueError(f"{name} cannot be sent: {text[1:]}")
    # Copies, so that no rank has memory of the value that was given.
    sent = {key: part.clone() for key, part in apart.items()} if is_source else None
    return unpack(json.loads(text), dict(move_tensors(broadcast, device, sent)).__getitem__)


def move_text(move: Move, device: torch.device, text: str | None) -> str:
    """Send a text, or receive one for None, and return it; ``move`` sends or receives tensors of one size in place."""
    # The receiver knows nothing of what comes: first the length.
    data = torch.empty(0) if text is None else torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    move(length := torch.tensor([data.numel()], device=device))
    move(data := torch.empty(int(length), dtype=torch.uint8, device=device) if text is None else data)
    return data.cpu().numpy().tobytes().decode()


def move_tensors(
    move: Move, device: torch.device, tensors: Mapping[str, torch.Tensor] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Send tensors, or receive some for None, and yield them by name, on the device, one at a time."""
    forms = {name: [dtype_name(value.dtype), *value.shape] for name, value in (tensors or {}).items()}
    text = move_text(move, device, None if tensors is None else json.dumps(forms))
    for name, (dtype, *shape) in json.loads(text).items():
        if tensors is None:
            value = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        else:
            value = tensors[name].detach().contiguous().to(device)
        # Bytes, as the backends do not know every dtype.
        for part in value.view(-1).view(torch.uint8).split(PART) if value.numel() else ():
            move(part)
        yield name, value
