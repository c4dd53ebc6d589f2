"""Command line ``zeromesh``. Each command imports what it needs when it runs, so that help comes at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

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
from zeromesh.apps.cli.help import Command, CommandGroup

app = typer.Typer(
    cls=CommandGroup,
    help="Train PyTorch models that do not fit, or are too slow, on one device.",
    epilog="First steps: docs/getting-started.md. Completion of commands: zeromesh --install-completion",
    invoke_without_command=True,
    context_settings={"help_option_names": ["--help", "-h"]},  # of the commands, too
    pretty_exceptions_enable=False,
)

TRAIN, PREPARE, FILES = "Train a model and use it", "Before a run", "Checkpoints"
"""Groups of commands in the help, in this order."""


class CommandRow(NamedTuple):
    """One command of the command line."""

    function: Callable[..., None]
    group: str
    example: str  # a whole command, for the end of its help
    options: Mapping[str, Any] = {}  # of its registration with typer


COMMANDS = (
    CommandRow(init_command.init, TRAIN, "zeromesh init models/tiny examples/chat.jsonl --lora"),
    CommandRow(train_commands.train, TRAIN, "zeromesh train examples/stdlib.json --set run.steps=100"),
    CommandRow(
        machine_commands.launch,
        TRAIN,
        "zeromesh launch --nproc 2 examples/resumable.py",
        {"context_settings": {"allow_interspersed_args": False}},  # what follows SCRIPT belongs to it, options too
    ),
    CommandRow(train_commands.report, TRAIN, "zeromesh report runs/stdlib"),
    CommandRow(train_commands.sample, TRAIN, 'zeromesh sample runs/stdlib "def " --tokens 50'),
    CommandRow(evaluate_commands.evaluate, TRAIN, "zeromesh evaluate runs/stdlib"),
    CommandRow(evaluate_commands.chat, TRAIN, "zeromesh chat runs/chat"),
    CommandRow(evaluate_commands.serve, TRAIN, "zeromesh serve runs/chat"),
    CommandRow(train_commands.export, TRAIN, "zeromesh export runs/chat my-model"),
    CommandRow(machine_commands.doctor, PREPARE, "zeromesh doctor --ranks 2"),
    CommandRow(layout_commands.plan, PREPARE, "zeromesh plan llama-3-8b --gpu h100 --batch 64 --sequence 4096"),
    CommandRow(layout_commands.verify, PREPARE, "zeromesh verify examples/stdlib.json --ranks 2"),
    CommandRow(layout_commands.schedule, PREPARE, "zeromesh schedule --name zb-h1 --stages 4 --microbatches 8"),
    CommandRow(checkpoint_commands.config, PREPARE, "zeromesh config ds_config.json --fix > config.json"),
    CommandRow(checkpoint_commands.inspect, FILES, "zeromesh inspect runs/stdlib --verify"),
    CommandRow(checkpoint_commands.convert, FILES, "zeromesh convert runs/stdlib/checkpoints weights --to hf"),
)
"""Commands in the order of the help."""

for _row in COMMANDS:
    app.command(cls=Command, rich_help_panel=_row.group, epilog=f"Example: {_row.example}", **_row.options)(
        _row.function
    )


def main() -> None:
    """Run the command line."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zeromesh {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train PyTorch models that do not fit, or are too slow, on one device."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


if __name__ == "__main__":
    main()
