"""Help of commands as users read it: a flag is shown by its name alone."""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import Any

from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command whose flags are shown without the type of a value, which they do not take."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options, as they are parsed and shown."""
        return [_as_shown(parameter) for parameter in super().get_params(ctx)]


class CommandGroup(TyperGroup):
    """All commands, with the same flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options, as they are parsed and shown."""
        return [_as_shown(parameter) for parameter in super().get_params(ctx)]


@cache  # the parser compares parameters by identity
def _as_shown(parameter: Any) -> Any:
    if not getattr(parameter, "is_flag", False):
        return parameter
    shown = copy(parameter)
    shown.metavar = ""
    return shown
