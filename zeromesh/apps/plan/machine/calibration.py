"""Calibration of predicted step times by GPU, from measured steps that were published.

``calibration.json`` has the ratios of measured to predicted seconds of published rows, by family of GPUs, number of
devices and GPU; ``benchmarks/calibrate_plan.py`` writes it from ``benchmarks/published-rows.json``. The time of a step
is multiplied by the median of the ratios, and its interval is that in which eight of ten further rows are expected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from zeromesh.apps.plan.machine.cluster import Device, Machine
from zeromesh.base.devices import find_accelerator

ONE, NODE, NODES = "one device", "one node", "several nodes"
NEAREST = {ONE: (ONE, NODE, NODES), NODE: (NODE, NODES, ONE), NODES: (NODES, NODE, ONE)}
"""Kinds of runs, and whose rows stand in for them, the nearest first."""

TENTH = 0.1  # share of the rows on either side of an interval
FEW = 5  # rows; fewer say too little of their spread
FEW_ERROR = 0.15  # by which an interval of few rows, or of none on a processor, is wider on each side

PATH = Path(__file__).with_name("calibration.json")


class Calibration(NamedTuple):
    """The factor and the interval of predicted times, from measured steps."""

    factor: float = 1.0  # of the seconds that the rates of the machine give
    low: float = 1 - FEW_ERROR  # ends of the interval, in parts of the calibrated seconds
    high: float = 1 + FEW_ERROR
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


def calibration_of(ratios: Sequence[float], devices: Sequence[str] = (), is_bound: bool = False) -> Calibration:
    """Return the calibration by the ratios of measured to predicted seconds of some rows."""
    factor = median(ratios)
    low, high = quantile(ratios, TENTH), quantile(ratios, 1 - TENTH)
    if len(ratios) < FEW:
        low, high = low * (1 - FEW_ERROR), high * (1 + FEW_ERROR)
    return Calibration(factor, low / factor, high / factor, len(ratios), tuple(devices), is_bound)


@cache
def table() -> Mapping[str, Any]:
    """Return the content of ``calibration.json``."""
    document: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return document


def kind_of(machine: Machine, ranks: int) -> str:
    """Return the kind of a run on so many devices of a machine."""
    devices = min(node.devices for node, _ in machine.nodes)
    return ONE if ranks == 1 else NODE if ranks <= devices else NODES


def calibrated(device: Device, kind: str) -> Calibration:
    """Return the calibration of a device; that of a processor, whose speed was measured, leaves times as they are."""
    accelerator = None if device.processor else find_accelerator(device.name)
    if accelerator is None:
        return Calibration(is_bound=not device.processor)
    return _calibrated(accelerator.short, kind)


@cache
def _calibrated(short: str, kind: str) -> Calibration:
    family = table()["families"].get(table()["family"].get(short, ""), {})
    for near in NEAREST[kind]:
        if rows := family.get(near):
            ratios = [ratio for of_gpu in rows.values() for ratio in of_gpu]
            is_measured = any(short in of_kind for of_kind in family.values())
            return calibration_of(ratios, tuple(rows), is_bound=not is_measured)
    return Calibration(is_bound=True)


def calibration_on(machine: Machine, ranks: int | None = None) -> Calibration:
    """Return the calibration of a run on a machine: that of the kind of device that slows most."""
    kind = kind_of(machine, machine.devices if ranks is None else ranks)
    return max((calibrated(node.device, kind) for node, _ in machine.nodes), key=lambda calibration: calibration.factor)


def reserved_margin() -> float:
    """Return the bytes that an allocator may reserve beyond the predicted ones, in parts of them: nine of ten runs."""
    return max(0.0, quantile(table()["reserved"], 1 - TENTH) - 1)
