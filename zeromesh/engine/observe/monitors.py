"""Writers of a run's values: TensorBoard, Weights & Biases, CSV files."""

from __future__ import annotations

import csv
import io
import logging
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zeromesh.base.files import LARGEST_RECORD, read_text, write_text
from zeromesh.base.requirements import pip_install

if TYPE_CHECKING:
    from zeromesh.config.settings import Resolved, Settings

_log = logging.getLogger("zeromesh")


class MetricWriter:
    """Destination of values. A class that holds nothing back needs no ``close``."""

    def write(self, values: Mapping[str, float], samples: int, user_step: int | None = None) -> None:
        """Write values by their names, at the samples consumed so far, or at ``user_step``, of a user's own axis."""
        raise NotImplementedError

    def rewind(self, step: int) -> None:
        """Drop, or hide, the values after ``step``, from which a run continues."""
        self.close()

    def close(self) -> None:
        """Write what has not been written."""


OWN = "own_steps"  # axis of values with steps of their own, if they cannot share one with samples

OURS = ("Train_Samples_", "Validation_Samples_")  # beginnings of the names of files whose steps are samples


class CsvFiles(MetricWriter):
    """A file per name, with the columns ``step`` and the last part of the name, as DeepSpeed's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()  # the program may change its working directory
        self._folder.mkdir(parents=True, exist_ok=True)
        self._kept: dict[Path, set[str]] = {}  # steps of each file that a resumed run does not write again

    def write(self, values: Mapping[str, float], samples: int, user_step: int | None = None) -> None:
        """See ``MetricWriter``. What is in the files stays, and is added to."""
        step = samples if user_step is None else user_step
        for name, value in values.items():
            path = self._folder / (name.replace("/", "_").replace(" ", "_") + ".csv")
            if str(step) in self._kept.get(path, ()):
                continue
            new = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                if new:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([step, value])

    def rewind(self, step: int) -> None:
        """See ``MetricWriter``. Users' own values keep their own steps."""
        for path in (path for start in OURS for path in self._folder.glob(f"{start}*.csv")):
            head, *rows = list(csv.reader(read_text(path, most=LARGEST_RECORD).splitlines())) or [[]]
            if len(head) != 2 or head[0] != "step":
                continue  # it is not of our making
            # A line that was cut off, as the process was killed, goes too.
            good_rows = [row for row in rows if len(row) == 2 and row[0].isdigit() and int(row[0]) <= step]
            self._kept[path] = {row[0] for row in good_rows}
            if good_rows != rows:
                text = io.StringIO()
                csv.writer(text, lineterminator="\n").writerows([head, *good_rows])
                write_text(path, text.getvalue())


class TensorBoardFiles(MetricWriter):
    """Event files for TensorBoard; of a run that went back, what lies after the point it went on from is hidden."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings(action="ignore"):  # of tensorboard about its own dependencies
            from torch.utils.tensorboard import SummaryWriter

        self._folder = folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._open: Callable[..., Any] = SummaryWriter
        self._writers: dict[Path, Any] = {}

    def write(self, values: Mapping[str, float], samples: int, user_step: int | None = None) -> None:
        """See ``MetricWriter``."""
        # TensorBoard hides by steps, whatever the name. So values with steps of their own are a run beside it.
        folder, step = (self._folder, samples) if user_step is None else (self._folder / OWN, user_step)
        if folder not in self._writers:
            self._writers[folder] = self._open(str(folder))
        for name, value in values.items():
            self._writers[folder].add_scalar(name, value, step)
        self._writers[folder].flush()

    def rewind(self, step: int) -> None:
        """See ``MetricWriter``."""
        self.close()
        self._writers = {self._folder: self._open(str(self._folder), purge_step=step + 1)}

    def close(self) -> None:
        """See ``MetricWriter``."""
        for writer in self._writers.values():
            writer.close()


class WandbRun(MetricWriter):
    """A run of Weights & Biases, begun with the first value."""

    def __init__(self, group: str | None, team: str | None, project: str) -> None:
        import wandb

        self._begin: Callable[[], Any] = partial(wandb.init, project=project, group=group, entity=team)
        self._run: Any = None

    def write(self, values: Mapping[str, float], samples: int, user_step: int | None = None) -> None:
        """See ``MetricWriter``."""
        if self._run is None:
            self._run = self._begin()
        # Steps must not fall there, so a user's own steps are a value beside the others.
        self._run.log(dict(values) if user_step is None else {**values, OWN: user_step}, step=samples)

    def close(self) -> None:
        """See ``MetricWriter``."""
        run, self._run = self._run, None  # after a rewind a new run begins, as what was sent stays where it is
        if run is not None:
            run.finish()


MONITORS: dict[str, Callable[[Any], MetricWriter]] = {
    "tensorboard": lambda chosen: TensorBoardFiles(Path(chosen.output_path) / chosen.job_name),
    "csv_monitor": lambda chosen: CsvFiles(Path(chosen.output_path) / chosen.job_name),
    "wandb": lambda chosen: WandbRun(chosen.group, chosen.team, chosen.project),
}
"""Function that opens each writer, by the name of its section and, unless it needs none, of its package."""


class Monitor:
    """Writers of a run's values by name; there are none on ranks other than the first."""

    def __init__(self, writers: Mapping[str, MetricWriter] | None = None) -> None:
        self.samples = 0
        self._writers = dict(writers or {})

    def advance(self, samples: int) -> None:
        """Set the samples that all ranks have consumed, the place on the x axis by default."""
        self.samples = samples

    @property
    def enabled(self) -> bool:
        """True if what this rank writes goes anywhere."""
        return bool(self._writers)

    def write(self, values: Mapping[str, float | torch.Tensor], step: int | None = None) -> None:
        """Write values by name, such as ``{"Train/accuracy": 0.9}``. Any rank may call it; the first one writes.

        Args:
            values: numbers, or tensors of one element.
            step: place on the x axis, a whole number; the samples that have been consumed by default.

        Raises:
            TypeError: a name is not a string, or the step no whole number.
            ValueError: a value is not one number.
        """
        for name, value in values.items():  # on all ranks: a mistake on the first alone would leave the others waiting
            _require_number(name, value)
        try:
            user_step = None if step is None else operator.index(step)
        except TypeError:
            raise TypeError(f"step = {step!r} is a {type(step).__name__}; it must be a whole number: an int") from None
        if self._writers:
            numbers = {name: float(value) for name, value in values.items()}
            self._each(lambda writer: writer.write(numbers, self.samples, user_step))

    def rewind(self, samples: int) -> None:
        """Continue from a checkpoint after so many samples."""
        self.samples = samples
        self._each(lambda writer: writer.rewind(samples))

    def close(self) -> None:
        """Write what has not been written."""
        self._each(lambda writer: writer.close())

    def _each(self, action: Callable[[MetricWriter], None]) -> None:
        for name, writer in list(self._writers.items()):
            try:
                action(writer)
            except Exception as error:  # whatever it is, training is worth more
                del self._writers[name]
                _log.warning("%s failed: nothing more is written to it, and training continues: %s", name, error)


def open_monitors(settings: Settings | Resolved, rank: int) -> Monitor:
    """Open the monitors that are switched on; only the first rank has any.

    Raises:
        ImportError: the package of one is missing.
        OSError: its folder cannot be made.
    """
    writers = {}
    for name, open_writer in MONITORS.items() if rank == 0 else ():
        if (section := getattr(settings, name)).enabled:
            try:
                writers[name] = open_writer(section)
            except ImportError as error:
                text = f"{name} needs the package {name}, which is not installed ({error}): {pip_install(name)}"
                raise ImportError(text) from error
    return Monitor(writers)


def _require_number(name: Any, value: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is a {type(name).__name__}; a name is a string, such as 'Train/accuracy'")
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return
        raise ValueError(f"{name} is a tensor of shape {tuple(value.shape)}; write one number, such as its mean")
    try:
        float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} = {value!r} is not a number") from error


def learning_values(
    loss: float | None, rates: Sequence[float], norm: float | None, loss_scale: float | None
) -> dict[str, float]:
    """Return the values of an update, under DeepSpeed's names where it has them."""
    figures = {"train_loss": loss, "lr": rates[0] if rates else None, "loss_scale": loss_scale, "grad_norm": norm}
    return {f"Train/Samples/{name}": value for name, value in figures.items() if value is not None}
