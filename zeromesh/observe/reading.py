"""Progress of reading: a bar on a terminal that can rewrite it, plain lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from zeromesh.observe.progress import Live
from zeromesh.observe.units import bytes_text

PLAIN_SECONDS = 10.0
"""Without a terminal, a line is written when so much time has passed since the last one."""


class ReadingBar(Live):
    """Shows how many bytes were read. A context: the bar ends with it.

    Args:
        console: where to; None for nowhere.
        what: a few words.
        total: bytes.
    """

    def __init__(self, console: Console | None, what: str, total: int) -> None:
        self._console, self._what, self._total, self._read = console, what, total, 0
        self._last = time.monotonic()
        if console is not None and console.is_terminal and not console.is_dumb_terminal:
            columns = (BarColumn(20), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(TextColumn(what), *columns, console=console, transient=True)
            self._task = self._bar.add_task(what, total=total)

    def advance(self, count: int) -> None:
        """Count bytes that were read."""
        self._read += count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._read)
        elif self._console is not None and now - self._last >= PLAIN_SECONDS:
            self._last = now
            self._console.print(f"{self._what}: {bytes_text(self._read)} of {bytes_text(self._total)}")
