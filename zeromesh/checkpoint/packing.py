"""Values of Python as JSON, and back: what of a checkpoint is neither a tensor nor plain JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

MARKS = {"__items__", "__tuple__", "__tensor__"}
"""Keys of what stands for something that JSON does not have."""


def pack(value: Any) -> Any:
    """What JSON holds of ``value``.

    Tuples, dicts with keys that are not strings or are marks, and tensors of one element are marked as such.
    """
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in MARKS for key in value):
            return {key: pack(item) for key, item in value.items()}
        return {"__items__": [[pack(key), pack(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"__tuple__": [pack(item) for item in value]}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {"__tensor__": [value.tolist(), str(value.dtype).removeprefix("torch.")]}
    return [pack(item) for item in value] if isinstance(value, list) else value


def unpack(value: Any) -> Any:
    """What ``pack`` was given."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__items__" in value:
        return {unpack(key): unpack(item) for key, item in value["__items__"]}
    if "__tuple__" in value:
        return tuple(unpack(item) for item in value["__tuple__"])
    if "__tensor__" in value:
        number, dtype = value["__tensor__"]
        return torch.tensor(number, dtype=getattr(torch, dtype))
    return {key: unpack(item) for key, item in value.items()}


def require_json(what: str, value: Mapping[str, Any]) -> None:
    """Raise TypeError naming the key of ``value`` that JSON cannot hold."""
    for key, item in value.items():
        try:
            json.dumps(pack(item))
        except TypeError as error:
            raise TypeError(
                f"{what}[{key!r}] is a {type(item).__name__}, which a checkpoint's JSON cannot hold; "
                "convert it to numbers, strings, lists and dicts"
            ) from error
