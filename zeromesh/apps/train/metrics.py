"""Metrics as JSON lines, one record per line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NotRequired

from pydantic import TypeAdapter

from zeromesh.base.files import LARGEST_RECORD, Count, Form, Number, added_to, read_text, record_type, write_text

_RECORD = {"kind": str, "step": Count}
_FIELDS: dict[str, dict[str, Any]] = {
    "train": {
        "loss": Number,
        "gradient_norm": NotRequired[Number | None],
        "tokens_per_second": NotRequired[Number | None],
        "utilization": NotRequired[Number],
        "samples": NotRequired[Count],
    },
    "validation": {"loss": Number},
    # Loads by layer are in percent of the mean.
    "experts": {"load": dict[str, list[int]], "entropy": dict[str, float], "dropped": dict[str, float]},
    "spike": {"name": str, "value": Number, "usual": Number, "skipped": bool, "samples": NotRequired[Count]},
}
_FORMS: dict[str, Form] = {kind: TypeAdapter(record_type(_RECORD | fields)) for kind, fields in _FIELDS.items()}
_OTHER: Form = TypeAdapter(record_type(_RECORD))


def form_of(line: dict[str, Any]) -> Form:
    """Return the form of a record of metrics."""
    return _FORMS.get(line.get("kind", ""), _OTHER)


class MetricsLog:
    """Append records to a file; the run continues after ``last_step``."""

    def __init__(self, path: Path, last_step: int = 0) -> None:
        # What lies beyond are steps that were taken after the last checkpoint, and are taken again.
        lines = [line for line in read_metrics(path) if line["step"] <= last_step]
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))  # whole, whenever it is killed
        self._written = {(line["kind"], line["step"]) for line in lines}
        self._file = added_to(path)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append the record of a kind, such as "train" or "validation", for a step, unless it is there."""
        if (kind, step) in self._written:
            return
        self._written.add((kind, step))
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()  # who looks at a run, or kills it, has all

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, in order; none if it does not exist, and no line that is not a record of ours."""
    return read_records(path, form_of)[0]


def read_records(path: Path, form_of: Callable[[dict[str, Any]], Form]) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a file that have the form that ``form_of`` tells, and the number of its other lines."""
    if not path.is_file():
        return [], 0
    records, others = [], 0
    for line in filter(str.strip, read_text(path, errors="replace", most=LARGEST_RECORD).splitlines()):
        try:
            content = json.loads(line)
            form_of(content).validate_python(content, strict=True)
            records.append(content)  # what was validated lacks fields of other versions
        # A line that was cut off, or that another program or a user has changed.
        except (ValueError, TypeError, AttributeError, RecursionError):
            others += 1
    return records, others
