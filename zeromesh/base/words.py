"""Words and numbers for people."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Iterable

LONGEST_VALUE = 80

HEADS = ("*lm_head", "head", "*.head")
"""Patterns of the usual names of heads, whose rounding would go straight into the loss."""


def bytes_text(count: float) -> str:
    """Return bytes in decimal units: ``1234567`` is "1.23 MB"."""
    return scaled_text(count, "B")


def scaled_text(value: float, unit: str = "") -> str:
    """Return a number with three digits and a decimal prefix: ``12345`` is "12.3 k"."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5 or prefix == "P":  # 999.5 is rounded to 1000
            break
        value /= 1000
    digits = 0 if abs(value) >= 99.95 or (not prefix and value == int(value)) else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {prefix}{unit}".rstrip()


def duration_text(seconds: float) -> str:
    """Return a duration: "0:07", "12:34" or "1:02:03"."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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


def nearest(word: str, vocabulary: Iterable[str]) -> str | None:
    """Return the known word that ``word`` was most likely meant to be, or None; letter case does not matter."""
    by_lower: dict[str, str] = {}
    for candidate in vocabulary:
        by_lower.setdefault(candidate.lower(), candidate)
    # The same parts in another order are far apart as letters: comm_overlap for overlap_comm.
    parts = sorted(word.lower().split("_"))
    matches = [other for other in by_lower if sorted(other.split("_")) == parts]
    matches = matches or difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def public_classes(module: object, base: type) -> dict[str, type]:
    """Return the public subclasses of ``base`` in ``module``, by name in lower case."""
    # Read from torch, so that a class of a newer version is known.
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    classes = {name: value for name, value in public.items() if isinstance(value, type) and value is not base}
    return {name.lower(): value for name, value in classes.items() if issubclass(value, base)}
