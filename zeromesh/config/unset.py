"""Keys whose value is "auto", and what they become: other programs fill them in, this one takes the defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromesh.config.document import UNSET, whole_document
from zeromesh.config.errors import show
from zeromesh.config.explain import look_up
from zeromesh.config.printing import jsonable
from zeromesh.config.tables import WITHOUT_EFFECT

if TYPE_CHECKING:
    from zeromesh.config.settings import Settings

_log = logging.getLogger("zeromesh")

DOCUMENTED = ("model.vocab_size", "data.vocabulary_size", "run.resume")
"""Keys of ours for which "auto" has a meaning of its own."""


def tell_unset(
    source: str | Path | Mapping[str, Any] | Settings, settings: Settings, used: Mapping[str, Any],
    overrides: Sequence[str] = (),
) -> None:  # fmt: skip
    """Warn of each key that is "auto" and has an effect, with the value that it has now.

    Args:
        source: the configuration, as it was given; settings have no such keys any more.
        settings: made from it.
        used: values by dotted path that are not in the settings, such as ``optimizer.params.lr``.
        overrides: as given with the configuration.
    """
    from zeromesh.config.settings import Settings as Made

    if isinstance(source, Made):
        return
    values = jsonable(settings.model_dump())
    lines = [
        f"\n  {path} = {_value(path, values, used)}"
        for path in unset_paths(whole_document(source, overrides))
        if not _is_idle(path)
    ]
    if lines:
        _log.warning(
            'these keys of the configuration are "auto", which nothing fills in here; they have their defaults, or '
            "follow from other keys:%s\nwrite the values that you want",
            "".join(lines),
        )


def unset_paths(document: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted paths of the keys whose value is "auto", at any depth."""
    found = []
    for key, value in document.items():
        if isinstance(value, Mapping):
            found += unset_paths(value, f"{prefix}{key}.")
        elif isinstance(value, str) and value == UNSET:
            found.append(f"{prefix}{key}")
    return found


def _is_idle(path: str) -> bool:
    parts = path.split(".")
    above = {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    return path in DOCUMENTED or not above.isdisjoint(WITHOUT_EFFECT)


def _value(path: str, values: Mapping[str, Any], used: Mapping[str, Any]) -> str:
    if path in used:
        return show(used[path])
    if path.startswith(("optimizer.params.", "scheduler.params.")):
        return f"the default of {look_up(values, path.split('.')[0] + '.type')[1]}"
    return show(look_up(values, path)[1])
