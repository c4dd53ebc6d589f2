"""DeepSpeed's names without an equivalent: they can be imported, and raise an error that says what to use instead.

Programs import far more than they use, often for all of their branches at once. ``modules.json``, recorded by
``tools/deepspeed_names.py``, lists all modules, their public names, and the values of constants.
"""

from __future__ import annotations

import json
from abc import ABCMeta
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any


class NotHereError(NotImplementedError, AttributeError):
    """Use of a name of DeepSpeed that has no equivalent; also an AttributeError, so that ``hasattr`` answers False."""


class StandIn(ABCMeta):
    """Class of stand-ins, which are classes: of annotations, bases and ``isinstance``, to which nothing belongs."""

    explanation: str

    def __getattr__(cls, name: str) -> Any:
        # Those with underscores are asked of everything, by pytest and pickle among others.
        raise AttributeError(name) if name.startswith("_") else NotHereError(cls.explanation)

    def _refuse(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotHereError(cls.explanation)

    # ABCMeta keeps none of these, so that a stand-in of a list, a dict or a flag raises as one of a function does.
    __call__ = __iter__ = __len__ = __bool__ = __getitem__ = __contains__ = _refuse


@cache
def stand_in(module: str, name: str, explanation: str) -> type:
    """Return the stand-in of a name; that of an exception can be caught, and is never raised."""
    namespace = {"__module__": module, "__doc__": explanation, "explanation": explanation}
    if name.endswith(("Error", "Exception")):
        return type(name, (Exception,), namespace)
    return StandIn(name, (), namespace)


@cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """Return the rows of all modules, by their dotted names."""
    rows: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("modules.json").read_text())
    inner: dict[str, Any] = {f"{name}.{part}": {} for name, row in rows.items() for part in row.get("**", "").split()}
    return rows | {name: {"**": ""} for name in inner}


def look_up(module: str, name: str, make: Callable[[], Any]) -> Any:
    """Return a module's name as DeepSpeed has it: a constant's value, else what ``make`` returns.

    Raises:
        KeyError: DeepSpeed has no such name there.
    """
    row = table().get(module, {})
    # Names of the modules that it imports from are in reach, too, as long as they are defined there.
    for other in (row, *(table().get(source, {}) for source in row.get("*", "").split())):
        if name in other and name.strip("*"):
            return other[name]
        if name in other.get("", "").split() or (other.get("**") == "" and not name.startswith("_")):
            return make()
    raise KeyError(name)
