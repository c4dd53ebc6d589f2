"""Search and replacement of the tensors, and of the numbers, in nested containers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping, MutableMapping
from contextlib import suppress
from enum import IntEnum
from functools import cache
from typing import Any

import numpy
import torch
from torch.nn.utils.rnn import PackedSequence


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers, in the order in which ``map_tensors`` comes to them."""
    tensors: list[torch.Tensor] = []
    _collect(value, tensors, frozenset())
    return tensors


def _collect(value: Any, tensors: list[torch.Tensor], around: frozenset[int]) -> None:
    # Without the dictionaries of ``map_tensors``: every forward of every unit comes by here.
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return
    items: Collection[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, PackedSequence):
        items = _parts_of(value)
    elif isinstance(value, list) or _is_known_tuple(value):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = _fields_of(value).values()
    if items and id(value) not in around:  # a container may hold itself
        inside = around | {id(value)}
        for item in items:
            _collect(item, tensors, inside)


def _parts_of(sequence: PackedSequence) -> tuple[torch.Tensor | None, ...]:
    # The sizes stay as they are, because torch wants them on the CPU.
    return sequence.data, sequence.sorted_indices, sequence.unsorted_indices


def _is_known_tuple(value: Any) -> bool:
    # Nothing is known of how to make another kind of tuple; results of torch, such as that of max, have ``n_fields``.
    return type(value) is tuple or (
        isinstance(value, tuple) and (hasattr(value, "_fields") or hasattr(value, "n_fields"))
    )


def _fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass's instance as they are stored: its class may refuse to read some."""
    stored: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        with suppress(AttributeError):
            stored[field.name] = object.__getattribute__(value, field.name)
    return stored


def map_tensors(
    value: Any, function: Callable[[torch.Tensor], torch.Tensor], around: frozenset[int] = frozenset()
) -> Any:
    """Replace the tensors in nested mappings, lists, tuples and dataclasses by ``function`` of them."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        data, order, back = (map_tensors(part, function) for part in _parts_of(value))
        return PackedSequence(data, value.batch_sizes, order, back)
    items: dict[Any, Any] = {}
    if isinstance(value, Mapping):
        items = dict(value.items())
    elif isinstance(value, list) or _is_known_tuple(value):
        items = dict(enumerate(value))
    # The class itself is a dataclass, too, and has no fields to read.
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = _fields_of(value)
    # A container may hold itself.
    if not items or id(value) in around:
        return value
    mapped = {key: map_tensors(item, function, around | {id(value)}) for key, item in items.items()}
    changed = {key: item for key, item in mapped.items() if item is not items[key]}
    # The same object, so that a forward may fill it.
    if not changed:
        return value
    if isinstance(value, tuple):
        return type(value)(*mapped.values()) if hasattr(value, "_fields") else type(value)(tuple(mapped.values()))
    # It cannot be changed, and nothing is known of how to construct its kind.
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return mapped
    # A shallow copy keeps the kind, as BatchEncoding, whose attributes models read.
    copied = copy.copy(value)
    for key, item in changed.items():
        if isinstance(value, MutableMapping | list):
            copied[key] = item
        else:
            object.__setattr__(copied, key, item)  # it may be frozen
    return copied


def moved(value: Any, device: torch.device) -> Any:
    """Return nested containers with their tensors on a device; another object moves by a ``to`` of its own."""
    if not tensors_of(value) and not isinstance(value, type) and callable(to := getattr(value, "to", None)):
        return to(device)
    return map_tensors(value, lambda tensor: _moved_tensor(tensor, device))


def _moved_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Where the source is not page-locked, the copy has read it when this returns.
    if device.type == "cpu" or tensor.layout is not torch.strided or not tensor.is_pinned():
        return tensor.to(device, non_blocking=device.type != "cpu")
    # The host waits for the copy, since whoever has the tensor may change it; not for what the device computes.
    stream = _copy_stream(device)
    with stream:
        result = tensor.to(device, non_blocking=True)
    stream.synchronize()
    result.record_stream(torch.accelerator.current_stream(device))
    return result


@cache
def _copy_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def plain_numbers(value: Any) -> Any:
    """Return nested arguments with NumPy's whole numbers, and those with names, as Python's: rules know no others."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(map(plain_numbers, value))
    if kind is slice:
        return slice(*map(plain_numbers, (value.start, value.stop, value.step)))
    return int(value) if isinstance(value, numpy.integer | IntEnum) else value
