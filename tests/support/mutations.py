"""Documents altered at random places: what a reader must refuse, or read as if it had been written so."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

DEEP: Any = "end"
for _ in range(120):
    DEEP = [DEEP]

JUNK: tuple[Any, ...] = (
    None, True, "junk", "", "../../x", "/x", "a\0b", -1, 0, 0.5, 2**70, -(2**70), 1e308, float("inf"), float("nan"),
    [], {}, [1], ["junk", 3], {"a": 1}, {"__tuple__": 3}, {"__tensor__": ["x", "y"]}, {"__stored__": ["a/9"]},
    {"__numpy__": ["f4", "x"]}, DEEP,
)  # fmt: skip


def items(document: Any) -> list[tuple[Any, Any]]:
    """Return the keys and the values of a container; records count as dicts."""
    if isinstance(document, list):
        return [*enumerate(document)]
    fields = vars(document) if is_dataclass(document) else document
    return [*fields.items()] if isinstance(fields, dict) else []


def places(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in nested containers."""
    if above:
        yield above
    for key, value in items(document):
        yield from places(value, (*above, key))


def mutated(document: Any, generator: random.Random) -> tuple[Any, str]:
    """Return a copy with one to three values replaced, left out, or there twice; and what was done, in words."""
    altered, done = copy.deepcopy(document), []
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        every = list(places(altered))
        if not every:
            break
        # The outer values as often as the many inner ones.
        depth = generator.randint(1, max(map(len, every)))
        *above, key = generator.choice([path for path in every if len(path) == depth])
        parent = altered
        for step in above:
            parent = dict(items(parent))[step]
        if is_dataclass(parent):
            parent = vars(parent)
        what = generator.random()
        if what < 0.2:
            del parent[key]
            done.append(f"without {[*above, key]}")
        elif what < 0.3 and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
            done.append(f"{[*above, key]} twice")
        elif what < 0.4 and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
            parent[key] = generator.choice((-parent[key], parent[key] + 1, parent[key] * 2**40, float(parent[key])))
            done.append(f"{[*above, key]} = {parent[key]}")
        else:
            parent[key] = copy.deepcopy(generator.choice(JUNK))
            done.append(f"{[*above, key]} = {str(parent[key])[:40]!r}")
    return altered, "; ".join(done)
