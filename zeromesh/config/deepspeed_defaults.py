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


_PARAMS = "optimizer.params"
_MUON = ("muon",)

DIFFERENCES: tuple[Difference, ...] = (
    Difference("gradient_clipping", 1.0, "does not clip", "0 switches it off"),
    Difference(f"{_PARAMS}.weight_decay", 0.0, "uses torch's 0.01", "torch's AdamW has 0.01", ("adamw",)),
    Difference(
        f"{_PARAMS}.weight_decay",
        0.0,
        "uses torch's 0.1 for matrices and 0.01 for the rest",
        "torch's Muon has 0.1",
        _MUON,
    ),
    Difference(f"{_PARAMS}.muon_lr", 0.02, "uses 0.001", "of matrices; lr sets both", _MUON, unless=f"{_PARAMS}.lr"),
    Difference(f"{_PARAMS}.adam_lr", 3e-4, "uses 0.001", "of the rest; lr sets both", _MUON, unless=f"{_PARAMS}.lr"),
    Difference(f"{_PARAMS}.betas", [0.9, 0.95], "uses torch's [0.9, 0.999]", "beside matrices", _MUON),
    Difference(f"{_PARAMS}.eps", 1e-10, "uses torch's 1e-8", "beside matrices", _MUON),
    # The mean of the gradients is the same, rounded at other places.
    Difference("gradient_predivide_factor", 1.0, "divides by the ranks first if that is exact", "", changes=False),
    # There a layer refuses inputs that are not cast.
    Difference("fp16.auto_cast", False, "casts inputs to fp16", "", changes=False),
)
"""Keys whose default differs, each with its value in DeepSpeed 0.19 and what happens here."""


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


_TABLES = json.loads(Path(__file__).with_name("deepspeed_answers.json").read_text(encoding="utf-8"))
_SECTIONS: dict[str, dict[str, Any]] = _TABLES["sections"]
_ANSWERS: dict[str, tuple[str, Any]] = _TABLES["answers"]

ANSWERED: dict[str, str] = {
    f"{section.removesuffix('_optimization')}_{key.removeprefix('stage3_')}": f"{section}.{key}"
    for section, keys in _SECTIONS.items()
    for key in keys
} | {name: path for name, (path, _) in _ANSWERS.items()}
"""Methods of DeepSpeed's engine that answer with the value of a key as it was written."""

DEFAULTS: dict[str, Any] = {
    f"{section}.{key}": value for section, keys in _SECTIONS.items() for key, value in keys.items()
} | dict(_ANSWERS.values())
"""DeepSpeed's defaults of these keys."""
