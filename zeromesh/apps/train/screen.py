"""Terminal output of the commands: consoles, plain text, and the log."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console

# Not from zeromesh, which would import torch: commands without a model start at once.
from zeromesh.comm.detect import Environment, is_launched

LONGEST_LINE = 200  # characters of a line of the log


def is_first() -> bool:
    """Return whether this process prints: the only one so far, or rank 0 under a launcher."""
    return not is_launched() or Environment.detect().rank == 0


def make_console(piped_width: int | None = None, quiet: bool = False) -> Console:
    """Return a console on standard output; ``piped_width`` is that of a file or a pipe."""
    _replace_what_cannot_be_encoded(sys.stdout)
    width = None if sys.stdout.isatty() else piped_width
    # It must not change texts of users, which may look like markup or emoji.
    return Console(width=width, quiet=quiet, soft_wrap=True, highlight=False, markup=False, emoji=False)


def write(text: str) -> None:
    """Write text to standard output; characters that its encoding lacks become question marks."""
    _replace_what_cannot_be_encoded(sys.stdout)
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def shown_log() -> Iterator[None]:
    """Show the log from INFO on standard error, on the first rank, unless the program has a handler already."""
    logger = logging.getLogger("zeromesh")
    if logger.handlers:  # of the user's program, which decides where the log goes
        yield
        return
    try:
        first = is_first()
    except ValueError:  # a command that needs the environment explains what is wrong
        first = True
    # A handler that does nothing on other ranks: without any, Python would print warnings itself.
    handler, level = _Lines() if first else logging.NullHandler(), logger.level
    logger.addHandler(handler)
    if level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Lines(logging.Handler):
    """Handler that writes to the present ``sys.stderr``, which a live line of progress replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            for line in (prefix + self.format(record)).splitlines():
                short = line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 3] + "..."
                print(short, file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def _replace_what_cannot_be_encoded(stream: TextIO) -> None:
    if isinstance(stream, io.TextIOWrapper):  # tests and notebooks have others
        stream.reconfigure(errors="replace")
