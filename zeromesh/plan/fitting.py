"""Fit of a GPU's constants to half of a source's published rows, and the bar that a prediction must clear.

``python -m zeromesh.plan.fitting ROWS.json`` prints the constants of all sources, for ``CONSTANTS`` of
``practices.py``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from zeromesh.plan.practices import Constants
from zeromesh.plan.published import PublishedRow, read_rows
from zeromesh.plan.published_time import (
    Setting,
    constants_of,
    gpu_name,
    in_fit,
    judged_time,
    layer_seconds,
    layer_setting,
    measured_seconds,
    operations,
    predicted,
    setting_of,
)

LAYER = "layer_time"  # kind of rows

STEP = 0.05  # of a constant's logarithm, for its derivative
ROUNDS = 8
FIRST = Constants(products=0.7, links=0.7, memory=0.8, host=0.5, step=0.03, padding=100.0)
LEAST = Constants(products=0.05, links=0.02, memory=0.1, host=0.05, step=0.001, padding=8.0)
MOST = Constants(products=1.0, links=1.0, memory=1.0, host=1.0, step=0.5, padding=400.0)


class TimedRow(NamedTuple):
    """A row that can be predicted, and the seconds that its source measured."""

    setting: Setting
    measured: float


def seconds_of(setting: Setting, constants: Constants) -> float:
    """Return the predicted seconds of a row's step, or of its layer."""
    if setting.row.kind == LAYER:
        return sum(layer_seconds(setting, constants))
    return predicted(setting, constants).seconds


def samples_of(rows: Sequence[PublishedRow]) -> dict[tuple[str, str], list[TimedRow]]:
    """Return the rows that say a step time and can be predicted, by source and GPU."""
    found: dict[tuple[str, str], list[TimedRow]] = {}
    for row in rows:
        try:
            if row.kind == LAYER:
                setting = layer_setting(row)
                measured = (float(row.measured["forward_ms"]) + float(row.measured["backward_ms"])) / 1e3
            elif judged_time(row):
                setting = setting_of(row)
                measured = measured_seconds(setting)
            else:
                continue
            seconds_of(setting, Constants())
        except (KeyError, ValueError):
            continue
        found.setdefault((row.source, gpu_name(row)), []).append(TimedRow(setting, measured))
    return found


def fit(samples: Sequence[TimedRow], names: tuple[str, str]) -> Constants:
    """Return two constants with the least mean square of log(predicted / measured), by Gauss-Newton steps."""

    def constants(logs: Sequence[float]) -> Constants:
        return Constants(**{name: math.exp(value) for name, value in zip(names, logs, strict=True)})

    def errors(logs: Sequence[float]) -> list[float]:
        return [math.log(seconds_of(one.setting, constants(logs)) / one.measured) for one in samples]

    logs = [math.log(getattr(FIRST, name)) for name in names]
    low = [math.log(getattr(LEAST, name)) for name in names]
    high = [math.log(getattr(MOST, name)) for name in names]
    now = errors(logs)
    for _ in range(ROUNDS):
        slopes = []
        for index in range(2):
            # Towards the inside, where a constant is at its bound.
            step = STEP if logs[index] + STEP <= high[index] else -STEP
            moved = errors([value + step * (place == index) for place, value in enumerate(logs)])
            slopes.append([(after - before) / step for after, before in zip(moved, now, strict=True)])
        change = _solve(slopes, now, logs, low, high)
        better = _search(errors, logs, change, now, low, high)
        if better is None:
            break
        logs, now = better
    return constants(logs)


def _solve(
    slopes: list[list[float]], now: list[float], logs: list[float], low: list[float], high: list[float]
) -> list[float]:
    """Return the step of least squares; a constant at its bound that would leave it stays."""
    first, second = slopes
    ridge = 1e-4 * len(now)  # a constant that nothing depends on stays where it is
    a, b, d = _dot(first, first) + ridge, _dot(first, second), _dot(second, second) + ridge
    e, f = -_dot(first, now), -_dot(second, now)
    change = [(e * d - b * f) / (a * d - b * b), (a * f - b * e) / (a * d - b * b)]
    for index, other, alone in ((0, 1, f / d), (1, 0, e / a)):
        value = logs[index] + change[index]
        at_bound = (logs[index] >= high[index] and value > high[index]) or (
            logs[index] <= low[index] and value < low[index]
        )
        if at_bound:
            change[index], change[other] = 0.0, alone
    return [max(-0.7, min(0.7, value)) for value in change]


def _search(
    errors: Callable[[Sequence[float]], list[float]], logs: list[float], change: list[float], now: list[float],
    low: list[float], high: list[float],
) -> tuple[list[float], list[float]] | None:  # fmt: skip
    """Return a point along the step that is better, and its errors; None if there is none."""
    before = _dot(now, now)
    for factor in (1.0, 0.4, 0.1):
        point = [min(h, max(b, v + factor * c)) for v, c, b, h in zip(logs, change, low, high, strict=True)]
        found = errors(point)
        if _dot(found, found) < before * (1 - 1e-5):
            return point, found
    return None


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def naive_errors(samples: Sequence[TimedRow], by_practice: bool = False) -> list[float]:
    """Return the relative errors of held-out rows where one share of executed operations is taken for a source.

    The share is the geometric mean of the rows that decide constants; with ``by_practice`` each framework of the source
    has a share of its own.
    """
    parts: dict[int, list[TimedRow]] = {}
    for one in samples:
        parts.setdefault(id(one.setting.practice) if by_practice else 0, []).append(one)
    found: list[float] = []
    for part in parts.values():
        half = [one for one in part if in_fit(one.setting.row)] or part
        share = math.exp(sum(math.log(_rate(one)) for one in half) / len(half))
        found += [_rate(one) / share - 1 for one in part if not in_fit(one.setting.row)]
    return found


def _rate(one: TimedRow) -> float:
    return operations(one.setting, executed=True) / one.measured / one.setting.layout.ranks


def errors_of(samples: Sequence[TimedRow], constants: Constants) -> list[float]:
    """Return the relative errors of predicted times."""
    return [seconds_of(one.setting, constants) / one.measured - 1 for one in samples]


def summary(errors: Sequence[float]) -> str:
    """Return number, mean and largest of relative errors, for the reader."""
    if not errors:
        return "n 0"
    sizes = [abs(one) for one in errors]
    return f"n {len(sizes)}, mean {100 * sum(sizes) / len(sizes):.1f} %, max {100 * max(sizes):.1f} %"


def time_card(rows: Sequence[PublishedRow]) -> str:
    """Return a table of errors in time, by source, GPU and half, with the committed constants, in Markdown."""
    lines = [
        "## Step times by half",
        "",
        "Two constants of each GPU were fitted to one half of a source's rows; the other half is predicted. Beside it",
        "is the error of one efficiency for the source and GPU, and of one for each of its frameworks.",
        "",
        "| source | GPU | constants | half of the fit | held out | one efficiency | one a framework |",
        "|---|---|---|---|---|---|---|",
    ]
    for (source, gpu), samples in samples_of(rows).items():
        constants = constants_of(samples[0].setting.row)
        half = [one for one in samples if in_fit(one.setting.row)]
        held = [one for one in samples if not in_fit(one.setting.row)]
        cells = [
            source, gpu, said(constants), summary(errors_of(half, constants)), summary(errors_of(held, constants)),
            summary(naive_errors(samples)), summary(naive_errors(samples, by_practice=True)),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def said(constants: Constants) -> str:
    """Return the constants that are set, for the reader."""
    return ", ".join(f"{name}={value:.3g}" for name, value in constants._asdict().items() if value is not None)


class Fitted(NamedTuple):
    """Constants of a GPU in a source, and relative errors."""

    source: str
    gpu: str
    constants: Constants
    fit: list[float]  # errors of the half that decides
    held: list[float]  # errors of the other half
    naive: list[float]  # errors of the other half by one efficiency

    @property
    def line(self) -> str:
        """The constants and errors for the reader."""
        return (
            f'    ("{self.source}", "{self.gpu}"): Constants({said(self.constants)}),\n'
            f"        # fit {summary(self.fit)}; held out {summary(self.held)}; one efficiency {summary(self.naive)}"
        )


def fitted(samples: Sequence[TimedRow], names: tuple[str, str] | None = None) -> Fitted:
    """Fit the constants of rows of one source and GPU; ``names``: other constants than the practice's."""
    row = samples[0].setting.row
    half = [one for one in samples if in_fit(one.setting.row)]
    held = [one for one in samples if not in_fit(one.setting.row)]
    constants = fit(half, names or samples[0].setting.practice.fitted) if half else Constants()
    errors = (errors_of(half, constants), errors_of(held, constants), naive_errors(samples))
    return Fitted(row.source, gpu_name(row), constants, *errors)


def main(arguments: Sequence[str]) -> None:
    """Print the constants and errors of all sources of a file, or of those that are named behind it."""
    path, *sources = arguments
    names = tuple(one for one in sources if one in Constants._fields)
    sources = [one for one in sources if one not in names]
    rows = [row for row in read_rows(path).rows if not sources or row.source in sources]
    for samples in samples_of(rows).values():
        found = fitted(samples, (names[0], names[1]) if len(names) == 2 else None)
        print(found.line, flush=True)
        if sources:
            for one, error in zip(samples, errors_of(samples, found.constants), strict=True):
                print(f"{one.setting.row.id} {error:+.1%} {'fit' if in_fit(one.setting.row) else ''}")


if __name__ == "__main__":
    main(sys.argv[1:])
