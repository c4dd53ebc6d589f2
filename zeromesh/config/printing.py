"""Settings as JSON: what is printed, saved with a run, and compared between ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from zeromesh.config.tables import WITHOUT_EFFECT


def jsonable(value: Any) -> Any:
    """``value`` in the types of JSON; what has no such form becomes its name."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    named = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{named}" if named else str(value)


def without_idle(section: dict[str, Any], given: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``section`` without the keys that have no effect and were not given."""
    kept = {}
    for key, value in section.items():
        if prefix + key in WITHOUT_EFFECT:
            if key in given:
                kept[key] = given[key]
        elif isinstance(value, dict):
            inner = given.get(key)
            kept[key] = without_idle(value, inner if isinstance(inner, dict) else {}, f"{prefix}{key}.")
        else:
            kept[key] = value
    return kept


def lines_of(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A line for each key, with its whole path: ``optimizer.params.lr = 0.01``."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from lines_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key} = {json.dumps(value)}"
