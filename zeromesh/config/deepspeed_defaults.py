"""Defaults of DeepSpeed 0.19 that differ from those here, and those of keys that nothing here reads.

The drop-in and ``zeromesh config --fix`` write the first into a configuration, ``initialize`` tells of them, and
``engine_answers`` answers with the second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zeromesh.config.special_keys import OURS, look_up


class Difference(NamedTuple):
    """A key that a configuration leaves out, and what that means in both programs."""

    path: str
    theirs: Any
    ours: str
    note: str  # how the other is chosen, or why the result is the same
    optimizers: tuple[str, ...] = ()  # types in lower case that the row is about; (): all, and none
    unless: str = ""  # another key that says it, too
    changes: bool = True  # the result is another one


_TABLES = json.loads(Path(__file__).with_name("deepspeed_answers.json").read_text(encoding="utf-8"))

DIFFERENCES = tuple(
    Difference(**{**row, "optimizers": tuple(row.get("optimizers", "").split())}) for row in _TABLES["differences"]
)
"""Keys whose default differs, each with its value in DeepSpeed 0.19 and what happens here.

Two of them change no result: the mean of gradients is rounded at other places, and there a layer refuses inputs that
are not cast.
"""


def differences(document: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the keys that a configuration leaves out and whose default gives another result here.

    A configuration with a key that only ZeroMesh has was written for it, and means its defaults.
    """
    values = dict(document)
    if any(look_up(values, path)[0] for path in OURS):
        return
    kind = str(look_up(values, "optimizer.type")[1]).lower()
    # With it, DeepSpeed takes torch's class and its defaults.
    torchs = look_up(values, "optimizer.params.torch_adam")[1] is True
    for row in DIFFERENCES:
        about = not row.optimizers or (kind in row.optimizers and not torchs)
        said = any(look_up(values, path)[0] for path in (row.path, row.unless) if path)
        if row.changes and about and not said:
            yield row


_SECTIONS: dict[str, dict[str, Any]] = _TABLES["sections"]
_ANSWERS: dict[str, tuple[str, Any]] = _TABLES["answers"]

ANSWERED: dict[str, str] = {
    f"{section.removesuffix('_optimization')}_{key.removeprefix('stage3_')}": f"{section}.{key}"
    for section, keys in _SECTIONS.items()
    for key in keys
} | {name: path for name, (path, _) in _ANSWERS.items()}
"""Methods of DeepSpeed's engine that answer with the value of a key as it was written."""

RESOLVED: dict[str, str] = _TABLES["resolved"]
"""Methods that answer with an attribute of the settings, by its path."""

DEFAULTS: dict[str, Any] = {
    f"{section}.{key}": value for section, keys in _SECTIONS.items() for key, value in keys.items()
} | dict(_ANSWERS.values())
"""DeepSpeed's defaults of these keys."""
