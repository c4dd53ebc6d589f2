"""Progress of training and of reading: one live line on a terminal that can rewrite it, plain lines elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column

from zeromesh.base.words import bytes_text, duration_text, scaled_text

# Least time between lines without a terminal, for steps and for reading.
STEP_SECONDS = 5.0
READING_SECONDS = 10.0


@dataclass(frozen=True)
class Figures:
    """Figures of one step."""

    step: int  # steps taken
    loss: float  # mean over the global batch, nats per token
    learning_rate: float  # of the step's update
    gradient_norm: float  # before clipping
    tokens_per_second: float  # over all ranks
    utilization: float  # share of the peak operations per second that the model's arithmetic makes use of (MFU)
    memory: int  # peak bytes so far of the rank that has used most, on the device where there is one
    seconds_left: float  # estimate for the rest of the steps

    def text(self) -> str:
        """Return one line, without the step."""
        return (
            f"loss {self.loss:.3f}  lr {self.learning_rate:.2e}  norm {self.gradient_norm:.2f}  "
            f"{scaled_text(self.tokens_per_second, 'tok/s')}  MFU {self.utilization:.0%}  "
            f"{bytes_text(self.memory)}  left {duration_text(self.seconds_left)}"
        )


class Live:
    """Context in which a live line is shown, if there is one; it ends with it."""

    _bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


class Display(Live):
    """Display of the steps of a run. A context: the live line ends with it. A quiet console shows nothing."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._last_plain = float("-inf")
        if console.is_terminal and not console.is_dumb_terminal:
            figures = TextColumn("{task.description}", table_column=Column(no_wrap=False))  # two lines where narrow
            columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(12), TaskProgressColumn(), figures)
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("starting", total=steps)

    def step(self, figures: Figures) -> None:
        """Show a step: on a live line at once, elsewhere the first, the last, and one every few seconds."""
        if self._bar is not None:
            self._bar.update(self._task, completed=figures.step, description=figures.text())
            return
        now = time.monotonic()
        if figures.step == self._steps or now - self._last_plain >= STEP_SECONDS:
            self._last_plain = now
            self.line(f"step {figures.step}/{self._steps}  {figures.text()}")

    def line(self, text: str) -> None:
        """Write a line that stays."""
        self._console.print(text, markup=False)


class ReadingBar(Live):
    """Bar of bytes that were read, of a total. A context: the bar ends with it. Without a console nothing is shown."""

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
        elif self._console is not None and now - self._last >= READING_SECONDS:
            self._last = now
            self._console.print(f"{self._what}: {bytes_text(self._read)} of {bytes_text(self._total)}")


class SearchBar(Live):
    """Bar of a search that takes long, on a terminal only. A context: the bar ends with it and leaves nothing."""

    def __init__(self, console: Console, what: str) -> None:
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            # Without a total the bar moves to and fro: nobody knows how long what comes before the first step takes.
            self._task = self._bar.add_task(what, total=None)

    def told(self, what: str, done: int, most: int) -> None:
        """Show how far it is: ``most`` steps are the end at the latest."""
        if self._bar is not None:
            self._bar.update(self._task, description=what, completed=done, total=most)
