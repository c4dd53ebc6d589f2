"""Calibration of predicted step times by GPU, from measured steps that were published.

``calibration.json`` has the ratios of measured to predicted seconds of published rows, by family of GPUs, number of
devices, GPU and source; ``benchmarks/calibrate_plan.py`` writes it from ``benchmarks/published-rows.json``. The time of
a step is multiplied by the median of the sources' medians. Rows of one source are alike, and a further run is of
another source: the interval, in which eight of ten further runs are expected, is that of a normal distribution of
logarithms with the spread of the sources and that of the rows of one source, which all families of dense models have in common,
and all of mixtures.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Any, NamedTuple

from zeromesh.apps.plan.machine.cluster import Device, Machine
from zeromesh.base.devices import find_accelerator

ONE, NODE, NODES = "one device", "one node", "several nodes"
NEAREST = {ONE: (ONE, NODE, NODES), NODE: (NODE, NODES, ONE), NODES: (NODES, NODE, ONE)}
"""Kinds of runs, and whose rows stand in for them, the nearest first."""

TENTH = 0.1  # share of the rows on either side of an interval
FEW = 5  # rows of a family that are enough without those of frameworks with kernels of their own
ERROR = 0.15  # half of the interval of a processor, whose speed was measured
WITH_EXPERTS = ", experts"  # behind a family's name, where the rows are of mixtures

PATH = Path(__file__).with_name("calibration.json")


class Calibration(NamedTuple):
    """The factor and the interval of predicted times, from measured steps."""

    factor: float = 1.0  # of the seconds that the rates of the machine give
    low: float = 1 - ERROR  # ends of the interval, in parts of the calibrated seconds
    high: float = 1 + ERROR
    rows: int = 0  # number of rows
    devices: tuple[str, ...] = ()  # short names of the GPUs of the rows
    is_bound: bool = False  # no row is of this GPU: runs may take longer, and the speed is an upper bound


UNCALIBRATED = Calibration()


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which one more value of the kind is expected with a probability of ``share``."""
    ordered, last = sorted(values), len(values) - 1
    place = min(max(share * (len(ordered) + 1) - 1, 0.0), last)
    below = int(place)
    return ordered[below] + (place - below) * (ordered[min(below + 1, last)] - ordered[below])


Ratios = Mapping[str, Sequence[float]]
"""Ratios of measured to predicted seconds, by source."""


class Spread(NamedTuple):
    """Standard deviations of logarithms of ratios."""

    between: float  # of the medians of sources of one family and kind of run
    within: float  # of a source's rows around their median


def spread_of(groups: Iterable[Ratios]) -> Spread:
    """Return the spread that groups of rows have in common; each group is of one family and kind of run."""
    squares, counts = [0.0, 0.0], [0, 0]
    for group in groups:
        medians = [log(median(ratios)) for ratios in group.values()]
        for place, values in enumerate((medians, *([*map(log, ratios)] for ratios in group.values()))):
            middle = fmean(values) if place == 0 else medians[place - 1]
            squares[place > 0] += sum((value - middle) ** 2 for value in values)
            counts[place > 0] += len(values) - 1
    between, within = (sqrt(square / count) if count else ERROR for square, count in zip(squares, counts, strict=True))
    return Spread(between, within)


def calibration_of(ratios: Ratios, spread: Spread, devices: Sequence[str] = (), is_bound: bool = False) -> Calibration:
    """Return the calibration by the ratios of measured to predicted seconds of some sources' rows."""
    factor = exp(median(log(median(rows)) for rows in ratios.values()))
    # Of a further source's row, whose distance from the factor has an error of its own.
    deviation = sqrt(spread.between**2 * (1 + 1 / len(ratios)) + spread.within**2)
    high = exp(NormalDist().inv_cdf(1 - TENTH) * deviation)
    return Calibration(factor, 1 / high, high, sum(map(len, ratios.values())), tuple(devices), is_bound)


@cache
def table() -> Mapping[str, Any]:
    """Return the content of ``calibration.json``."""
    document: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return document


def kind_of(machine: Machine, ranks: int) -> str:
    """Return the kind of a run on so many devices of a machine."""
    devices = min(node.devices for node, _ in machine.nodes)
    return ONE if ranks == 1 else NODE if ranks <= devices else NODES


def calibrated(device: Device, kind: str, experts: bool = False) -> Calibration:
    """Return the calibration of a device; that of a processor, whose speed was measured, leaves times as they are.

    Models with ``experts`` have rows of their own where there are some.
    """
    accelerator = None if device.processor else find_accelerator(device.name)
    if accelerator is None:
        return Calibration(is_bound=not device.processor)
    return _calibrated(accelerator.short, kind, experts)


@cache
def _calibrated(short: str, kind: str, experts: bool) -> Calibration:
    name = table()["family"].get(short, "")
    families = table()["families"]
    family = (families.get(name + WITH_EXPERTS) if experts else None) or families.get(name, {})
    for near in NEAREST[kind]:
        if rows := family.get(near):
            is_measured = any(short in of_kind for of_kind in family.values())
            spread = _spread(family is families.get(name + WITH_EXPERTS))
            return calibration_of(by_source(rows), spread, tuple(rows), is_bound=not is_measured)
    return Calibration(is_bound=True)


@cache
def _spread(experts: bool) -> Spread:
    families = [family for name, family in table()["families"].items() if name.endswith(WITH_EXPERTS) is experts]
    return spread_of(by_source(rows) for family in families for rows in family.values())


def by_source(rows: Mapping[str, Ratios]) -> Ratios:
    """Return the ratios of some GPUs by source alone."""
    ratios: dict[str, list[float]] = {}
    for of_gpu in rows.values():
        for source, values in of_gpu.items():
            ratios.setdefault(source, []).extend(values)
    return ratios


def calibration_on(machine: Machine, ranks: int | None = None, experts: bool = False) -> Calibration:
    """Return the calibration of a run on a machine: that of the kind of device that slows most."""
    kind = kind_of(machine, machine.devices if ranks is None else ranks)
    found = (calibrated(node.device, kind, experts) for node, _ in machine.nodes)
    return max(found, key=lambda calibration: calibration.factor)


def reserved_margin() -> float:
    """Return the bytes that an allocator may reserve beyond the predicted ones, in parts of them: nine of ten runs."""
    return max(0.0, quantile(table()["reserved"], 1 - TENTH) - 1)
