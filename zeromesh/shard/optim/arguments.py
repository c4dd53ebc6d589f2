"""Arguments that a configuration gives to an optimizer or a schedule, checked against the declared ones."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch

from zeromesh.base.words import nearest, show

OTHER_NAMES: dict[str, str] = {
    "learning_rate": "lr",
    "beta1": "betas",
    "beta2": "betas",
    "epsilon": "eps",
    "l2": "weight_decay",
    "wd": "weight_decay",
}
"""Names of parameters in other libraries."""

# Parameters that torch's CyclicLR takes as a list, one value per group, although it declares a number.
PER_GROUP = ("base_momentum", "max_momentum")


def without_auto(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are given; ``"auto"`` means that one is not."""
    return {key: value for key, value in params.items() if not (isinstance(value, str) and value == "auto")}


def unknown_parameter(section: str, key: str, owner: str, names: Iterable[str]) -> ValueError:
    """Return an error about a parameter that does not exist, with the one that was probably meant."""
    choices = sorted(names)
    other = OTHER_NAMES.get(key)
    suggestion = other if other in choices else nearest(key, choices)
    hint = f"did you mean {show(suggestion)}? " if suggestion else ""
    return ValueError(f"{section}.{key} is not a parameter of {owner}; {hint}known are {', '.join(choices)}")


def checked(path: str, value: Any, declared: inspect.Parameter, least: int | None = None) -> Any:
    """Return a value from JSON as its parameter wants it; raise ValueError for another type, or less than ``least``."""
    kind, default = str(getattr(declared.annotation, "__name__", declared.annotation)), declared.default
    # What says nothing about its type takes anything.
    if value is None and (default is None or "None" in kind):
        return value
    # Annotations of torch are texts or types, and the default says more than many of them.
    if kind.removesuffix(" | None") == "int":
        return _whole(path, value, least)
    if isinstance(default, bool) or (default is None and "bool" in kind):
        if not isinstance(value, bool):
            raise ValueError(f"{path} = {show(value)} must be true or false")
    elif isinstance(default, tuple) and all(map(_is_number, default)):
        _require_numbers(path, value, len(default))
    elif ("list" in kind or declared.name in PER_GROUP) and isinstance(value, list | tuple):
        _require_numbers(path, value, len(value))
    elif _is_number(default) or kind.removesuffix(" | None") == "float":
        _require_number(path, value)
    elif isinstance(default, str) and not isinstance(value, str):
        raise ValueError(f"{path} = {show(value)} must be a word such as {show(default)}")
    return value


def _whole(path: str, value: Any, least: int | None) -> int:
    bound = "" if least is None else f" of at least {least}"
    is_whole = _is_number(value) and math.isfinite(value) and int(value) == value
    if not is_whole or (least is not None and value < least):
        raise ValueError(f"{path} = {show(value)} must be a whole number{bound}{_unquote(value)}")
    return int(value)


def _require_number(path: str, value: Any) -> None:
    if not _is_number(value) and not isinstance(value, torch.Tensor):
        raise ValueError(f"{path} = {show(value)} must be a number{_unquote(value)}")


def _require_numbers(path: str, value: Any, count: int) -> None:
    if not isinstance(value, list | tuple) or len(value) != count:
        raise ValueError(f"{path} = {show(value)} must be a list of {count} numbers")
    for number, item in enumerate(value):
        _require_number(f"{path}[{number}]", item)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _unquote(value: Any) -> str:
    try:
        # A number in quotes is the usual mistake in hand-written JSON.
        float(value if isinstance(value, str) else "")
    except ValueError:
        return ""
    return "; write it without the quotes"
