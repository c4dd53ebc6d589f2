"""Commands of files: ``convert``, ``inspect`` and ``config``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zeromesh.apps.cli.command_errors import FAILED, command_errors


def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint of any library, or a folder of checkpoints.")],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    to: Annotated[str, typer.Option(help="Format to write: zeromesh, hf, dcp or deepspeed-universal.")] = "zeromesh",
    tag: Annotated[str | None, typer.Option(help="The checkpoint in the folder; the latest if left out.")] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Folder with a config.json of transformers, or package.module:function."),
    ] = None,
    strip: Annotated[
        str, typer.Option(metavar="PREFIX", help="Prefix to remove from names, such as Lightning's 'model.'.")
    ] = "",
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave out optimizer, scheduler and counters.")
    ] = False,
    ranks: Annotated[int, typer.Option(help="Ranks that will load deepspeed-universal into sharded parameters.")] = 0,
) -> None:
    """Convert a checkpoint of another library to ZeroMesh's format, or one of ZeroMesh to another format."""
    with command_errors():
        from zeromesh.apps.train.screen import make_console
        from zeromesh.checkpoint.weights.convert import convert_checkpoint

        shown = make_console()
        convert_checkpoint(
            source, target, to, tag=tag, model=model, strip=strip, weights_only=weights_only, ranks=ranks, console=shown
        )


def inspect(
    path: Annotated[Path, typer.Argument(help="The folder of a run, a folder of checkpoints, or one checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare all files with their hashes.")] = False,
) -> None:
    """Show what checkpoints hold, and whether they are complete."""
    with command_errors():
        from zeromesh.apps.cli.inspect import inspect as show

        sound = show(path, as_json, verify)
    if not sound:
        raise typer.Exit(FAILED)


def config(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A JSON or YAML file in DeepSpeed's format.")],
    fix: Annotated[
        bool, typer.Option("--fix", help="Print the file as ZeroMesh reads it, and each change to stderr.")
    ] = False,
) -> None:
    """Show the settings of a configuration, or rewrite one made for DeepSpeed."""
    with command_errors():
        from zeromesh.apps.cli.config import fix as rewrite
        from zeromesh.apps.cli.config import show

        (rewrite if fix else show)(path)
