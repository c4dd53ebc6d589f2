"""Errors of commands: messages instead of tracebacks, and exit codes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

# Exit codes: wrong input, found before the start, as typer's own; a run that failed; Ctrl-C, as shells report it.
WRONG_INPUT, FAILED, STOPPED = 2, 1, 130


@contextmanager
def command_errors() -> Iterator[None]:
    """Show the log, and errors as messages instead of tracebacks, with the exit code."""
    # Other errors are bugs of ours, and keep their traceback.
    from zeromesh.apps.train.screen import shown_log
    from zeromesh.comm.failure import RankFailure, StartError

    try:
        with shown_log():
            yield
    except (ValueError, OSError) as error:
        raise end_command(f"error: {error}", error, WRONG_INPUT) from None
    except (RankFailure, StartError, FloatingPointError) as error:
        raise end_command(f"error: {error}", error, FAILED) from None
    except KeyboardInterrupt as error:
        raise end_command("stopped", error, STOPPED) from None


def check_settings(config: Path, overrides: Sequence[str] = ()) -> None:
    """Raise ConfigError for a mistake in a configuration. torch, which takes seconds to import, is not imported."""
    from zeromesh.apps.train.train_settings import TrainSettings

    TrainSettings.load(config, overrides, tells=False)


def end_command(message: str, error: BaseException, code: int) -> typer.Exit:
    """Print a message and the notes of its error, and return the exit."""
    typer.secho(message, err=True, fg="red")
    for note in getattr(error, "__notes__", ()):
        typer.echo(note, err=True)
    return typer.Exit(code)
