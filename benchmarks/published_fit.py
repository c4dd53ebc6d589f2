"""Fit of a GPU's constants to half of a source's published rows, and the bar that a prediction must clear.

``python benchmarks/published_fit.py ROWS.json [SOURCE ...]`` prints ``CONSTANTS`` for ``published_practices.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from math import exp, log
from typing import NamedTuple

import torch

from published import PublishedRow, read_rows
from published_practices import Constants
from published_time import (
    LAYER,
    WITH_EXPERTS,
    Setting,
    constants_of,
    group_of,
    in_fit,
    measured_name,
    measured_seconds,
    operations,
    seconds_of,
    setting_of,
)

STEP = 0.05  # of a constant's logarithm, for its derivative
FARTHEST = 0.7  # change of a logarithm in a round
ROUNDS = 8
# First value, least and most.
RANGES = {
    "products": (0.7, 0.05, 1.0), "links": (0.7, 0.02, 1.0), "memory": (0.8, 0.1, 1.0), "host": (0.5, 0.05, 1.0),
    "step": (0.03, 0.001, 0.5), "block": (0.003, 0.0001, 0.2),
}  # fmt: skip
# What is expected before there are rows, of logarithms: a constant is near its first value, and rows scatter. A few rows
# then move a constant only as far as they say something about it.
EXPECTED, SCATTER = 0.5, 0.05
EXPECTED_WIDE = 1.5  # of links, hosts and programs, which differ more than devices do
DEVICE = ("products", "memory")


class TimedRow(NamedTuple):
    """A row that can be predicted, and the seconds that its source measured."""

    setting: Setting
    measured: float


def samples_of(rows: Sequence[PublishedRow]) -> dict[tuple[str, str], list[TimedRow]]:
    """Return the rows that say a step time and can be predicted, by source and GPU."""
    found: dict[tuple[str, str], list[TimedRow]] = {}
    for row in rows:
        if row.kind != LAYER and not measured_name(row):
            continue
        with suppress(KeyError, ValueError):
            one = TimedRow(setting := setting_of(row), measured_seconds(setting))
            seconds_of(setting, Constants())
            found.setdefault(group_of(row), []).append(one)
    return found


def fit(samples: Sequence[TimedRow], names: tuple[str, str]) -> Constants:
    """Return two constants with the least mean square of log(predicted / measured), by Gauss-Newton steps."""

    def constants(logs: torch.Tensor) -> Constants:
        return Constants(**dict(zip(names, logs.exp().tolist(), strict=True)))

    def errors(logs: torch.Tensor) -> torch.Tensor:
        ratios = [log(seconds_of(one.setting, constants(logs)) / one.measured) for one in samples]
        return torch.tensor(ratios, dtype=torch.float64)

    first, low, high = torch.tensor([RANGES[name] for name in names], dtype=torch.float64).log().T
    expected = torch.tensor([EXPECTED if name in DEVICE else EXPECTED_WIDE for name in names], dtype=torch.float64)
    pulls, logs = (SCATTER / expected).square(), first

    def loss(logs: torch.Tensor) -> torch.Tensor:
        return errors(logs).square().sum() + (pulls * (logs - first).square()).sum()

    now = errors(logs)
    for _ in range(ROUNDS):
        # Derivatives are taken towards the inside, where a constant is at its bound.
        steps = torch.diag(torch.where(logs + STEP <= high, STEP, -STEP))
        slopes = torch.stack([(errors(logs + step) - now) / step.sum() for step in steps], 1)
        change = _least_squares(slopes, now, pulls, logs - first)
        out = ((logs >= high) & (change > 0)) | ((logs <= low) & (change < 0))
        if out.any():  # a constant at its bound stays there, and the other one is solved for alone
            change = _least_squares(slopes * ~out, now, pulls, (logs - first) * ~out)
        tries = [torch.clamp(logs + part * change.clamp(-FARTHEST, FARTHEST), low, high) for part in (1.0, 0.4, 0.1)]
        better = next((one for one in tries if loss(one) < loss(logs) * (1 - 1e-5)), None)
        if better is None:
            break
        logs, now = better, errors(better)
    return constants(logs)


def _least_squares(
    slopes: torch.Tensor, errors: torch.Tensor, pulls: torch.Tensor, away: torch.Tensor
) -> torch.Tensor:
    """Return the change of the constants, which ``pulls`` draw back from where they are ``away`` from the first."""
    change: torch.Tensor = torch.linalg.solve(slopes.T @ slopes + torch.diag(pulls), -slopes.T @ errors - pulls * away)
    return change


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
        half = halves(part)[0] or part
        share = exp(sum(log(_rate(one)) for one in half) / len(half))
        found += [_rate(one) / share - 1 for one in halves(part)[1]]
    return found


def _rate(one: TimedRow) -> float:
    return operations(one.setting, executed=True) / one.measured / one.setting.layout.ranks


def halves(samples: Sequence[TimedRow]) -> tuple[list[TimedRow], list[TimedRow]]:
    """Return the rows that decide constants, and those that are held out."""
    chosen = [in_fit(one.setting.row) for one in samples]
    first, second = ([one for one, has in zip(samples, chosen, strict=True) if has is half] for half in (True, False))
    return first, second


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
        "Two constants for each source and GPU are fitted to one half of the rows. The other half is held out, and",
        "predicted. For comparison, the last two columns have the errors of a simpler prediction for these rows:",
        "one fitted efficiency (share of the peak FLOP/s) for each GPU, or for each GPU and framework. In the cells,",
        "n is the number of rows, followed by the mean and the largest error.",
        "",
        "| source | GPU | constants | fitted rows | held-out rows | one efficiency | one per framework |",
        "|---|---|---|---|---|---|---|",
    ]
    for (source, gpu), samples in samples_of(rows).items():
        constants = constants_of(samples[0].setting.row)
        errors = [errors_of(half, constants) for half in halves(samples)]
        errors += [naive_errors(samples), naive_errors(samples, by_practice=True)]
        lines.append(f"| {' | '.join([source, gpu, said(constants), *map(summary, errors)])} |")
    return "\n".join(lines)


def said(constants: Constants) -> str:
    """Return the constants that are set, for the reader."""
    return ", ".join(f"{name}={value:.3g}" for name, value in constants._asdict().items() if value is not None)


def main(arguments: Sequence[str]) -> None:
    """Print the constants and errors of all sources of a file, or of those that are named behind it."""
    path, *sources = arguments
    rows = [row for row in read_rows(path).rows if not sources or row.source in sources]
    for (source, gpu), samples in samples_of(rows).items():
        half, held = halves(samples)
        practice = samples[0].setting.practice
        names = practice.fitted_experts if gpu.endswith(WITH_EXPERTS) else practice.fitted
        constants = fit(half, names) if half else Constants()
        print(f'    ("{source}", "{gpu}"): Constants({said(constants)}),')
        print(f"        # fit {summary(errors_of(half, constants))}; held out {summary(errors_of(held, constants))}")


if __name__ == "__main__":
    main(sys.argv[1:])
