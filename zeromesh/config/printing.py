"""Settings as JSON: what is printed, saved with a run, and compared between ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zeromesh.config.tables import WITHOUT_EFFECT


def differences(mine: str, theirs: str) -> list[str]:
    """What differs between two fingerprints, as ``key: value here, value there``."""
    first, second = _flat(json.loads(mine), ""), _flat(json.loads(theirs), "")
    paths = dict.fromkeys([*first, *second])
    return [
        f"{path}: {first.get(path, 'not set')} here, {second.get(path, 'not set')} there"
        for path in paths
        if first.get(path) != second.get(path)
    ]


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


def _flat(value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        return {path: json.dumps(value)}
    return {
        leaf: text for key, item in value.items() for leaf, text in _flat(item, f"{path}.{key}".lstrip(".")).items()
    }
