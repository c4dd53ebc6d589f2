"""Table of the drop-in, in ``names.json``: the modules below ``deepspeed``, their names, and the home of each.

Modules are made from the table when they are imported (``finder.py``); homes are imported when a name is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from zeromesh.deepspeed import stand_ins

OWN = "zeromesh.deepspeed"
ALIAS = "deepspeed"

_TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))
"""Rows of modules, ``.`` for the package itself; a home, which a dot puts into this package; and names.

``name=other`` is a name whose object is called ``other`` at home.
"""

HOMES: dict[str, dict[str, tuple[str, str]]] = {}
"""Names of each module, each with its home and its name there."""
for _modules, _home, _names in _TABLES["homes"]:
    for _module in _modules.split():
        _row = HOMES.setdefault("" if _module == "." else _module, {})
        for _name, _, _other in (word.partition("=") for word in _names.split()):
            _row[_name] = (OWN + _home if _home.startswith(".") else _home, _other or _name)

SAME: dict[str, str] = _TABLES["same"]
"""Modules that are another one of the table."""

REST: dict[str, str] = _TABLES["rest"]
"""Modules that have the names that a module's row lacks."""

REFUSED, ENGINE_REFUSED = (
    {name: remedy for remedy, refused in _TABLES[table].items() for name in refused.split()}
    for table in ("refused", "engine_refused")
)
"""Names and modules, and names of the engine, that cannot be honoured, and what to use instead."""


@cache
def modules() -> frozenset[str]:
    """Return the dotted names of all modules below ``deepspeed``; the package itself is ``""``."""
    named = {*HOMES, *SAME, *stand_ins.table()}
    # A package may have no names of its own.
    return frozenset(named | {part for name in named for part in _parents(name)})


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def names(module: str) -> dict[str, tuple[str, str]]:
    """Return the public names of a module, each with its home and its name there."""
    return HOMES.get(SAME.get(module, module), {})


def remedy(dotted: str) -> str | None:
    """Return what to use instead of a name that is refused, or is in a module that is; None for others."""
    return next((REFUSED[part] for part in (dotted, *_parents(dotted)) if part in REFUSED), None)


def explain(dotted: str) -> str:
    """Return the message about a name below ``deepspeed`` that there is not."""
    instead = remedy(dotted)
    end = "; docs/deepspeed.md lists what it has" if instead is None else f": {instead}"
    return f"zeromesh, which stands in for deepspeed, has no {ALIAS}.{dotted}{end}"


def resolve(module: str, name: str) -> Any:
    """Return an attribute of a module of the table; raise AttributeError if it has none of this name.

    A name that DeepSpeed has there and that has no home is a stand-in, which raises when it is used.
    """
    homes, dotted = names(module), f"{module}.{name}".lstrip(".")
    if name in homes:
        home, other = homes[name]
        return getattr(import_module(home), other)
    if dotted in modules():
        return import_module(f"{OWN}.{dotted}")
    if name == "__all__":
        return sorted(homes)
    if name.startswith("__"):
        raise AttributeError(f"module {OWN}.{module} has no attribute {name}")
    error = AttributeError(explain(dotted))
    if module in REST:
        try:
            return getattr(import_module(REST[module]), name)
        except AttributeError as missing:
            error = missing
    try:
        return stand_ins.look_up(module, name, lambda: _elsewhere(module, name, dotted))
    except KeyError:
        raise error from None


def _elsewhere(module: str, name: str, dotted: str) -> Any:
    """Return a class that has its home in another module's row, or the operator's builder; else a stand-in."""
    if name.endswith("Builder") and module.startswith("ops."):
        return getattr(import_module(REST["ops.op_builder"]), name)
    homes = {row[name] for row in HOMES.values() if name in row} if name[0].isupper() else set()
    if len(homes) == 1:
        home, other = homes.pop()
        return getattr(import_module(home), other)
    return stand_ins.stand_in(f"{OWN}.{module}".rstrip("."), name, explain(dotted))
