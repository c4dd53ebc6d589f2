"""Outlines of what blocks return: values are described in JSON, and imitated on stages that do not compute them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from zeromesh.base.containers import tensors_of


def outline(value: Any) -> Any:
    """Return a JSON description of a value: of a tensor its shape and dtype, of an object its fields."""
    kind = type(value)
    if isinstance(value, Tensor):
        return {"tensor": [*value.shape, str(value.dtype).removeprefix("torch.")]}
    if kind in (list, tuple):
        return {kind.__name__: [outline(item) for item in value]}
    if kind is dict:
        return {"dict": [[key if isinstance(key, int) else str(key), outline(item)] for key, item in value.items()]}
    if isinstance(value, Mapping):
        fields = {str(key): item for key, item in value.items()}
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = dict(zip(value._fields, value, strict=True))
    elif is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclass_fields(value)}
    else:
        return value if isinstance(value, bool | int | float | str) else None
    if "<locals>" in kind.__qualname__:
        raise TypeError(
            f"a block returned a {kind.__qualname__}, of which other stages cannot make one; define the class at the "
            "top of a module, or return a tuple or a dict"
        )
    return {f"{kind.__module__}:{kind.__qualname__}": {key: outline(item) for key, item in fields.items()}}


def _object(kind: str, fields: dict[str, Any]) -> Any:
    """Return an object of a class that ``outline`` has named."""
    module, _, name = kind.partition(":")
    object_type: Any = attrgetter(name)(import_module(module))
    has_fields, is_mapping = is_dataclass(object_type), issubclass(object_type, Mapping)
    if has_fields and not is_mapping:
        # Its constructor ran, and checked the values, on the stage that made the original.
        instance = object.__new__(object_type)
        for key, value in fields.items():
            object.__setattr__(instance, key, value)
        return instance
    return object_type(fields) if is_mapping and not has_fields else object_type(**fields)


def imitate(form: Any, args: tuple[Any, ...], kwargs: dict[str, Any], may_write: bool = False) -> Any:
    """Return a value of that outline with meaningless tensors: the arguments, or zeros without memory.

    With ``may_write``, they have memory of their own, as code of the user's may write to them.
    """
    return _imitated(form, tensors_of((args, kwargs)), may_write)


# No closure, which would be a cycle with itself, and hold the arguments until garbage is collected.
def _imitated(form: Any, arguments: Sequence[Tensor], may_write: bool) -> Any:
    if not isinstance(form, dict):
        return form
    kind, inside = next(iter(form.items()))
    if isinstance(inside, dict):
        return _object(kind, {key: _imitated(item, arguments, may_write) for key, item in inside.items()})
    if kind == "dict":
        return {key: _imitated(item, arguments, may_write) for key, item in inside}
    if kind != "tensor":
        items = [_imitated(item, arguments, may_write) for item in inside]
        return items if kind == "list" else tuple(items)
    *shape, name = inside
    dtype, device = getattr(torch, name), arguments[0].device if arguments else None
    if may_write:
        return torch.zeros(shape, dtype=dtype, device=device)
    same = (tensor for tensor in arguments if tensor.shape == torch.Size(shape) and tensor.dtype == dtype)
    stand_in = next(same, torch.zeros((), dtype=dtype, device=device).expand(shape))
    # Another object than what was given: by its identity it is known what was received for it.
    return stand_in.view_as(stand_in)
