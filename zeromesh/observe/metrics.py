"""Metrics as JSON lines, one record per line, and a picture of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, Field, TypeAdapter
from typing_extensions import TypedDict

from zeromesh.model.files import LARGEST_RECORD, added_to, read_text, write_text


def _drawn(value: float) -> float:
    if abs(value) > MOST and isfinite(value):
        raise ValueError(f"{value} is no value of a run")
    return value


MOST = 1e100  # largest value whose differences and sums can be computed

Step = Annotated[int, Field(ge=0, lt=2**53)]
Number = Annotated[float, AfterValidator(_drawn)]

Form = TypeAdapter[Any]
"""Form that records have; a record may have more entries."""


class _Record(TypedDict):
    kind: str
    step: Step
    noted: NotRequired[bool]


class _Train(_Record):
    loss: Number
    gradient_norm: NotRequired[Number | None]
    tokens_per_second: NotRequired[Number | None]
    utilization: NotRequired[Number]
    samples: NotRequired[Step]


class _Validation(_Record):
    loss: Number


class _Spike(_Record):
    name: str
    value: Number
    usual: Number
    skipped: bool
    back: str | None
    mark: NotRequired[str | None]
    samples: NotRequired[Step]


_OTHER: Form = TypeAdapter(_Record)
_FORMS: dict[str, Form] = {
    "train": TypeAdapter(_Train), "validation": TypeAdapter(_Validation), "spike": TypeAdapter(_Spike),
}  # fmt: skip


def _form_of(record: dict[str, Any]) -> Form:
    return _FORMS.get(record.get("kind", ""), _OTHER)


Curve = Sequence[tuple[int, float]]  # steps and values


class MetricsLog:
    """Append records to a file; the run continues after ``last_step``."""

    def __init__(self, path: Path, last_step: int = 0) -> None:
        self._path = path
        self._open(last_step)

    def _open(self, last_step: int) -> None:
        # What lies beyond are steps that were taken after the last checkpoint, and are taken again.
        records = [record for record in read_metrics(self._path) if record["step"] <= last_step or record.get("noted")]
        write_text(self._path, "".join(json.dumps(record) + "\n" for record in records))  # whole, whenever it is killed
        self._written = {(record["kind"], record["step"]) for record in records}
        self._file = added_to(self._path)

    def forget(self, last_step: int) -> None:
        """Leave out the records of steps beyond ``last_step``, which are taken again, but not notes."""
        self._file.close()
        self._open(last_step)

    def note(self, kind: str, step: int, **values: Any) -> None:
        """Append the record of an event, which is kept whatever becomes of its step, unless it is there."""
        record = {"kind": kind, "step": step, "noted": True, **values}
        if any({**earlier, **record} == earlier for earlier in self.notes(kind)):
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append the record of a kind, such as "train" or "validation", for a step, unless it is there."""
        if (kind, step) in self._written:
            return
        self._written.add((kind, step))
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()  # who looks at a run, or kills it, has all

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of events of a kind so far."""
        return [record for record in read_metrics(self._path) if record["kind"] == kind and record.get("noted")]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, in order; none if it does not exist, and no line that is no record of ours."""
    return read_records(path, _form_of)[0]


def read_records(path: Path, form_of: Callable[[dict[str, Any]], Form]) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a file that have the form that ``form_of`` tells, and the number of its other lines."""
    if not path.is_file():
        return [], 0
    records, others = [], 0
    for line in filter(str.strip, read_text(path, errors="replace", most=LARGEST_RECORD).splitlines()):
        try:
            record = json.loads(line)
            form_of(record).validate_python(record, strict=True)
            records.append(record)
        # A line that was cut off, or that another program or a user has changed.
        except (ValueError, TypeError, AttributeError, RecursionError):
            others += 1
    return records, others


def count_others(path: Path) -> int:
    """Return the number of lines that ``read_metrics`` leaves out."""
    return read_records(path, _form_of)[1]


def loss_picture(path: Path, training: Curve, validation: Curve) -> bool:
    """Draw the loss in nats per token over the steps; return False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    # Not through pyplot, which keeps figures and chooses a backend for screens.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if training:
        axes.plot(*zip(*training, strict=True), linewidth=1, label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), marker="o", markersize=3, label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    if training or validation:
        axes.legend()
    figure.savefig(path, dpi=120)
    return True
