"""Calibration of predicted step times by GPU, from measured steps that were published.

``calibration.json`` has the ratios of measured to predicted seconds of published rows, by family of GPUs, number of
devices, GPU and source; ``benchmarks/calibrate_plan.py`` writes it from ``benchmarks/published-rows.json``. The time of
a step is multiplied by the median of the sources' medians. Rows of one source are alike, and a further run is of
another source: in the interval lie eight of ten rows by the factor of all sources but their own. Families of dense
models have its width in common, and those of mixtures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from math import exp, log, sqrt
from pathlib import Path
from statistics import median
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
Groups = Mapping[tuple[str, str], Ratios]
"""Ratios by family of GPUs and kind of run."""


def nearest(groups: Groups, family: str, kind: str) -> Ratios:
    """Return the ratios of a family's kind of run, or of the nearest kind that has some; {} without any."""
    return next((rows for near in NEAREST[kind] if (rows := groups.get((family, near)))), {})


def factor_of(ratios: Ratios) -> float:
    """Return the median of the sources' medians, by logarithms."""
    return exp(median(log(median(rows)) for rows in ratios.values()))


def error_of(groups: Groups) -> float:
    """Return how far eight of ten rows are from the factor of all other sources, as a difference of logarithms.

    Each source is left out in turn. The difference is in parts of sqrt(1 + 1 / n) for n other sources, whose median
    has an error of its own.
    """
    errors = []
    for source in {source for ratios in groups.values() for source in ratios}:
        others = {key: {name: rows[name] for name in rows if name != source} for key, rows in groups.items()}
        for key, ratios in groups.items():
            if source in ratios and (rest := nearest(others, *key)):
                middle, width = log(factor_of(rest)), sqrt(1 + 1 / len(rest))
                errors += [abs(log(ratio) - middle) / width for ratio in ratios[source]]
    return quantile(errors, 1 - 2 * TENTH) if errors else ERROR


def calibration_of(ratios: Ratios, error: float, devices: Sequence[str] = (), is_bound: bool = False) -> Calibration:
    """Return the calibration by the ratios of measured to predicted seconds of some sources' rows."""
    high = exp(error * sqrt(1 + 1 / len(ratios)))
    rows = sum(map(len, ratios.values()))
    return Calibration(factor_of(ratios), 1 / high, high, rows, tuple(devices), is_bound)


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
    name, families = table()["family"].get(short, ""), table()["families"]
    if experts and name + WITH_EXPERTS in families:
        name += WITH_EXPERTS
    family = families.get(name, {})
    for near in NEAREST[kind]:
        if rows := family.get(near):
            is_measured = any(short in of_kind for of_kind in family.values())
            error = _error(name.endswith(WITH_EXPERTS))
            return calibration_of(by_source(rows), error, tuple(rows), is_bound=not is_measured)
    return Calibration(is_bound=True)


@cache
def _error(experts: bool) -> float:
    families = table()["families"].items()
    alike = [(name, family) for name, family in families if name.endswith(WITH_EXPERTS) is experts]
    return error_of({(name, kind): by_source(rows) for name, family in alike for kind, rows in family.items()})


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
    calibrations = (calibrated(node.device, kind, experts) for node, _ in machine.nodes)
    return max(calibrations, key=lambda calibration: calibration.factor)


def reserved_margin() -> float:
    """Return the bytes that an allocator may reserve beyond the predicted ones, in parts of them: nine of ten runs."""
    return max(0.0, quantile(table()["reserved"], 1 - TENTH) - 1)
