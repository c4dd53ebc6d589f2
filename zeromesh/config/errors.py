"""Errors of a configuration: one error lists every problem."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Iterable, Sequence

LONGEST_VALUE = 80


class ConfigError(ValueError):
    """Error of a configuration that cannot be used, with all its problems.

    Attributes:
        problems: one line per problem, each with the dotted key, the value, the rule and the remedy.
        source: the file, or what else was read.
    """

    def __init__(self, problems: Sequence[str], source: str = "the configuration") -> None:
        self.problems = tuple(problems)
        self.source = source
        if len(self.problems) == 1:
            message = f"{source}: {self.problems[0]}"
        else:
            lines = "".join(f"\n  - {problem}" for problem in self.problems)
            message = f"{source} has {len(self.problems)} problems:{lines}"
        super().__init__(message)

    # Exceptions are pickled by their message alone, and ranks send this one to each other.
    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...], str]]:
        return ConfigError, (self.problems, self.source)


def show(value: object) -> str:
    """Return ``value`` as JSON where it has such a form, shortened to one line."""
    text = f"a value of type {type(value).__name__}, too large to show"
    for form in (json.dumps, repr):
        # ValueError: Python writes no whole number of more digits than a limit.
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            text = form(value)
            break
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the singular for 1: ``1 rank``, ``2 micro-batches``."""
    plural = f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def some(items: Iterable[str], what: str = "", separator: str = ", ", most: int = 6) -> str:
    """Return the first of them, and how many more there are."""
    shown = list(items)
    more = [f"and {len(shown) - most} more {what}".rstrip()] if len(shown) > most else []
    return separator.join(shown[:most] + more)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that ``word`` was most likely meant to be, or None; letter case does not matter."""
    by_lower: dict[str, str] = {}
    for candidate in known:
        by_lower.setdefault(candidate.lower(), candidate)
    # The same parts in another order are far apart as letters: comm_overlap for overlap_comm.
    parts = sorted(word.lower().split("_"))
    matches = [other for other in by_lower if sorted(other.split("_")) == parts]
    matches = matches or difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None
