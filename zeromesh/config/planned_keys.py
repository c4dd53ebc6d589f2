"""Keys whose value "auto" asks the planner for a layout, and the settings that a layout gives for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zeromesh.config.batch_sizes import ACCUMULATION, MICRO, TRAIN
from zeromesh.config.document import is_unset, whole_document
from zeromesh.config.section import Section
from zeromesh.config.special_keys import look_up

MESH, STAGE, OFFLOAD = "mesh", "zero_optimization.stage", "offload"

# What each key asks for: a whole section stands for all in it.
_ASKS = {
    "mesh": {MESH},
    "offload": {OFFLOAD},
    "zero_optimization": {STAGE, OFFLOAD},
    "zero_optimization.stage": {STAGE},
    "zero_optimization.offload_optimizer": {OFFLOAD},
    "zero_optimization.offload_optimizer.device": {OFFLOAD},
    "zero_optimization.offload_param": {OFFLOAD},
    "zero_optimization.offload_param.device": {OFFLOAD},
}


def asked_of_planner(source: str | Path | Mapping[str, Any] | Section, overrides: Sequence[str] = ()) -> frozenset[str]:
    """Return what a configuration leaves to the planner: of ``MESH``, ``STAGE``, ``OFFLOAD`` and the micro-batch."""
    if isinstance(source, Section):
        return frozenset()  # settings have no "auto" any more
    document = whole_document(source, overrides)
    asked = set()
    for path, asks in _ASKS.items():
        if is_unset(look_up(document, path)[1]):
            asked |= asks
    # A micro-batch can be chosen only for a batch that is given; without one, "auto" is what else follows.
    if is_unset(document.get(MICRO)) and isinstance(document.get(TRAIN), int):
        asked.add(MICRO)
    return frozenset(asked)


def planned_keys(source: str | Path | Mapping[str, Any] | Section, overrides: Sequence[str] = ()) -> frozenset[str]:
    """Return the paths of keys that the planner fills in."""
    asked = asked_of_planner(source, overrides)
    return frozenset(_ASKS) | ({MICRO, ACCUMULATION} if asked & {MESH, MICRO} else set())


def overrides_of(document: Mapping[str, Any], asked: frozenset[str]) -> list[str]:
    """Return overrides for ``Settings.load`` that set what was asked as a layout's document has it."""
    zero = document["zero_optimization"]
    values: dict[str, Any] = {}
    if STAGE in asked:
        values["zero_optimization.stage"] = zero["stage"]
    if OFFLOAD in asked:
        for name in ("offload_optimizer", "offload_param"):
            values |= {f"zero_optimization.{name}.{key}": value for key, value in zero.get(name, {}).items()}
    if MESH in asked:
        values |= {f"mesh.{axis}": size for axis, size in document.get("mesh", {}).items()}
        values |= {f"tensor_parallel.{key}": value for key, value in document.get("tensor_parallel", {}).items()}
    if asked & {MICRO, MESH}:
        values |= {MICRO: document[MICRO], ACCUMULATION: document[ACCUMULATION]}
    return [f"{path}={json.dumps(value)}" for path, value in values.items()]


def lines_of_overrides(overrides: Sequence[str]) -> str:
    """Return overrides for a message, one a line."""
    return "".join(f"\n  {override.replace('=', ' = ', 1)}" for override in overrides)
