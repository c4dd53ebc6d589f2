"""Functions of torch that write to a given tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAME = re.compile(r".*[^_]_|__(set|setitem|i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift))__")


def writes(function: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function writes to its arguments, judged by its name and by ``inplace`` and ``out``."""
    named = _NAME.fullmatch(getattr(function, "__name__", ""))
    return bool(named or kwargs.get("inplace") or kwargs.get("out") is not None)


def written(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument that a function which ``writes`` changes: ``out``, or the first one."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    return args[0] if args else next(iter(kwargs.values()), None)


def version(tensor: Any) -> int:
    """Return how often a tensor was written to; -1 where torch does not count."""
    # Under ``inference_mode`` torch does not count, and raises for the attribute.
    return -1 if tensor.is_inference() else int(tensor._version)
