"""Help of commands as users read it: a flag is shown by its name alone, and a key of the settings is no flag."""

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

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; an option that is a key of the configuration is told how ``--set`` takes it."""
        options = {name for parameter in self.params for name in parameter.opts} | {*ctx.help_option_names}
        for option in (argument.partition("=")[0] for argument in args if "--set" in options):
            if option.startswith("--") and option not in options and (key := _key_of(option)):
                ctx.fail(f"No such option: {option}; a key of the configuration is set by --set {key}=VALUE")
        return super().parse_args(ctx, args)


class CommandGroup(TyperGroup):
    """All commands, with the same flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options, as they are parsed and shown."""
        return [_as_shown(parameter) for parameter in super().get_params(ctx)]


def _key_of(option: str) -> str | None:
    """Return the key of the settings that an option names, as in ``--steps`` or ``--run.steps``."""
    from zeromesh.apps.train.train_settings import TrainSettings
    from zeromesh.config.catalogue import suggest
    from zeromesh.config.settings import entries
    from zeromesh.config.special_keys import PLACES

    keys, name = entries(TrainSettings), option.lstrip("-").replace("-", "_")
    key = suggest(keys, name)
    return name if name in keys else key if name in PLACES or (key and key.endswith(f".{name}")) else None


@cache  # the parser compares parameters by identity
def _as_shown(parameter: Any) -> Any:
    if not getattr(parameter, "is_flag", False):
        return parameter
    shown = copy(parameter)
    shown.metavar = ""
    return shown
