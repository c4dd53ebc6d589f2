"""Matrices of tests, of which a default run takes some cases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(names: Iterable[str], *chosen: str) -> list[Any]:
    """Return these names, of which all but the chosen are for the full matrix."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.full) for name in names]
