"""Optimizers: one row each, which is read wherever one is treated in its own way.

A row names its class by a text, so that settings are read without torch, and no room has to know the class.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple


class Scope(Enum):
    """Part of a parameter that an optimizer has to see to be right."""

    ELEMENTWISE = "each element by itself"  # so that it is right on any piece
    EXCHANGING = "pieces, and the other ranks by an exchange"
    WHOLE = "whole parameters"
    NEVER = "more than a step gives"
    UNKNOWN = ""


class OtherParam(NamedTuple):
    """A parameter that configurations made for DeepSpeed hold but that the class here does not take."""

    remedy: str = ""
    harmless: tuple[Any, ...] | None = None  # the values that change nothing here; None: any


class Counterpart(NamedTuple):
    """The optimizer here that makes the same update as one of DeepSpeed, without its approximations."""

    name: str
    why: str
    without: tuple[str, ...] = ()  # arguments that it has no use for
    params: Mapping[str, Any] = MappingProxyType({})  # arguments that it needs


@dataclass(frozen=True)
class OptimizerRow:
    """An optimizer; a configuration may write the name of its class in any letter case."""

    module: str  # that has the class
    name: str
    scope: Scope = Scope.ELEMENTWISE
    remedy: str = ""  # where it is refused
    # Of each element. Files that do not name the class are recognized by them; messages offer what has some.
    states: tuple[str, ...] = ()
    more_states: tuple[str, ...] = ()  # which some options add
    reduces_states: bool = False  # whether they have fewer elements than the parameter
    rule: str = ""  # of the update on the host, in ``kernels.update_rules``
    row_rule: str = ""  # of the update of a table's rows, in ``shard.tables.row_rules``
    fused: tuple[str, ...] = ()  # devices on which torch has an update in one kernel that is used
    other_params: Mapping[str, OtherParam] = field(default_factory=dict)
    replaces: tuple[tuple[str, Counterpart], ...] = ()  # by names of DeepSpeed's optimizers, in lower case
    deepspeed_name: str = ""  # what follows "Fused" and "DeepSpeedCPU" in the names of DeepSpeed's classes
    deepspeed_zero: bool = False  # whether DeepSpeed takes it under ZeRO without being told to

    @property
    def takes_pieces(self) -> bool:
        """True if it is right on pieces of parameters."""
        return self.scope in (Scope.ELEMENTWISE, Scope.EXCHANGING)

    def load(self) -> Any:
        """Return the class."""
        return getattr(import_module(self.module), self.name)


def _other_param(fields: Mapping[str, Any]) -> OtherParam:
    return OtherParam(fields.get("remedy", ""), tuple(fields["harmless"]) if "harmless" in fields else None)


def _counterpart(fields: Mapping[str, Any]) -> Counterpart:
    without = tuple(fields.get("without", "").split())
    return Counterpart(fields["name"], fields["why"], without, MappingProxyType(fields.get("params", {})))


def _row(fields: Mapping[str, Any]) -> OptimizerRow:
    row = dict(fields) | {
        "scope": Scope[fields.get("scope", "ELEMENTWISE")],
        "other_params": {name: _other_param(param) for name, param in fields.get("other_params", {}).items()},
        "replaces": tuple((names, _counterpart(other)) for names, other in fields.get("replaces", {}).items()),
    }
    words = {key: tuple(fields[key].split()) for key in ("states", "more_states", "fused") if key in fields}
    return OptimizerRow(**(row | words))


OPTIMIZERS = [_row(fields) for fields in json.loads(Path(__file__).with_name("optimizers.json").read_text("utf-8"))]
"""All rows; of two with one name, a configuration means the first.

SGD is not fused: with momentum, torch's fails when a parameter's first gradient comes late. Adam of the package mup is
torch's, whose weight decay is part of the gradient. States of Muon are those of its matrices.
"""

UNKNOWN = OptimizerRow("", "", Scope.UNKNOWN)


def row_of(cls: type) -> OptimizerRow:
    """Return the row of a class, ``UNKNOWN`` if it has none."""
    rows = (row for row in OPTIMIZERS if row.name == cls.__name__)
    return next((row for row in rows if getattr(sys.modules.get(row.module), row.name, None) is cls), UNKNOWN)


def row_named(name: str) -> OptimizerRow:
    """Return the row that a configuration means by a name, in any letter case; ``UNKNOWN`` if there is none."""
    return next((row for row in OPTIMIZERS if row.name.lower() == name.lower()), UNKNOWN)


def states_of(cls: type) -> frozenset[str]:
    """Return the names of the states that a class makes, by its name or its bases'; empty if that is not known.

    Other libraries have optimizers of the same names, which make the same states.
    """
    names = {base.__name__ for base in cls.__mro__}
    return frozenset(next((row.states for row in OPTIMIZERS if row.states and row.name in names), ()))


def names_by_states(states: frozenset[str]) -> list[str]:
    """Return the names of the classes that make these states."""
    rows = (row for row in OPTIMIZERS if row.states)
    return [row.name for row in rows if {*row.states} <= states <= {*row.states, *row.more_states}]
