"""Command line ``zeromesh``. Each command imports what it needs when it runs, so that help comes at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from zeromesh import __version__
from zeromesh.apps.cli import (
    checkpoint_commands,
    evaluate_commands,
    init_command,
    layout_commands,
    machine_commands,
    train_commands,
)

app = typer.Typer(
    help="Train PyTorch models that do not fit, or are too slow, on one device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

COMMANDS: tuple[tuple[Callable[..., None], dict[str, Any]], ...] = (
    (init_command.init, {}),
    (train_commands.train, {}),
    (train_commands.report, {}),
    (train_commands.sample, {}),
    (train_commands.export, {}),
    (evaluate_commands.evaluate, {}),
    (evaluate_commands.chat, {}),
    (evaluate_commands.serve, {}),
    (checkpoint_commands.convert, {}),
    (checkpoint_commands.inspect, {}),
    (checkpoint_commands.config, {}),
    # What follows SCRIPT belongs to it, options too.
    (machine_commands.launch, {"context_settings": {"allow_interspersed_args": False}}),
    (machine_commands.doctor, {}),
    (layout_commands.schedule, {}),
    (layout_commands.plan, {}),
    (layout_commands.verify, {}),
)
"""Function of each command, in the order of the help, and options of its registration."""

for _function, _options in COMMANDS:
    app.command(**_options)(_function)


def main() -> None:
    """Run the command line."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zeromesh {__version__}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train PyTorch models that do not fit, or are too slow, on one device."""


if __name__ == "__main__":
    main()
