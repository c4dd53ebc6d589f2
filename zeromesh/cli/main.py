"""The command ``zeromesh``. What a command needs is imported when it runs, so that help comes at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Train PyTorch models that do not fit, or are too slow, on one device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

WRONG_INPUT, FAILED, STOPPED = 2, 1, 130
"""Exit codes: something the user can put right before the start, a run that failed, and Ctrl-C."""


def main() -> None:
    """Run the command line."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zeromesh {version('zeromesh')}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train PyTorch models that do not fit, or are too slow, on one device."""


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A JSON file in DeepSpeed's format, with model, data and run.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in run.steps=100.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in run.output.")] = False,
) -> None:
    """Train a language model on text."""
    with _errors():
        from zeromesh.cli.train import train as run

        run(config, overrides or [], resume)


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="The output folder of a finished run.")],
    prompt: Annotated[str, typer.Argument(help="The beginning of the text.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="Randomness; 0 takes the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choices.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Texts to write.")] = 1,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is what a user says; write the answer.")] = False,
) -> None:
    """Continue a text with the model of a run."""
    with _errors():
        from zeromesh.cli.sample import continue_text

        continue_text(run, prompt, tokens, temperature, seed, count, chat)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The output folder of a run, finished or not.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must not exist, or be empty.")],
    tag: Annotated[
        str | None, typer.Option(help="The checkpoint, such as global_step100; the latest if left out.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Write adapters added to their model.")] = False,
) -> None:
    """Write the model of a run as a folder that from_pretrained of transformers, or of PEFT, opens."""
    with _errors():
        from zeromesh.cli.export import export as write

        write(run, folder, tag, merge)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="The folder of a run, a folder of checkpoints, or one checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare all files with their hashes.")] = False,
) -> None:
    """Show what checkpoints hold, and whether they are whole."""
    with _errors():
        from zeromesh.cli.inspect import inspect as show

        sound = show(path, as_json, verify)
    if not sound:
        raise typer.Exit(FAILED)


@contextmanager
def _errors() -> Iterator[None]:
    """Show the log, and what went wrong in words instead of a traceback; choose the exit code."""
    from zeromesh.cli.screen import shown_log
    from zeromesh.dist.launch import RankFailure

    try:
        with shown_log():
            yield
    except (ValueError, OSError) as error:
        raise _end(f"error: {error}", error, WRONG_INPUT) from None
    except (RankFailure, FloatingPointError) as error:
        raise _end(f"error: {error}", error, FAILED) from None
    except KeyboardInterrupt as error:
        raise _end("stopped", error, STOPPED) from None


def _end(message: str, error: BaseException, code: int) -> typer.Exit:
    """Show a message and what the error has on how to go on."""
    typer.secho(message, err=True, fg="red")
    for note in getattr(error, "__notes__", ()):
        typer.echo(note, err=True)
    return typer.Exit(code)


if __name__ == "__main__":
    main()
