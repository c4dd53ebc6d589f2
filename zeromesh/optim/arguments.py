"""The arguments that a config gives to an optimizer or a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zeromesh.config.errors import nearest, show


def without_auto(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are given; ``"auto"`` means that one is not."""
    return {key: value for key, value in params.items() if not (isinstance(value, str) and value == "auto")}


def unknown(what: str, word: str, known: Iterable[str]) -> ValueError:
    """An error about a word, with the nearest known one and all of them. ``what`` begins the sentence."""
    choices = sorted(known)
    suggestion = nearest(word, choices)
    hint = f"did you mean {show(suggestion)}? " if suggestion else ""
    return ValueError(f"{what} {show(word)}; {hint}known are {', '.join(choices)}")
