"""Calibration of the planner: ``python benchmarks/calibrate_plan.py ROWS.json [--write]``.

It writes ``zeromesh/apps/plan/machine/calibration.json``: the ratios of measured to predicted seconds of all rows of
frameworks that run the modules of a PyTorch model, as ZeroMesh does, by family of GPUs, kind of run and GPU. Frameworks
with kernels of their own count for families of which there are fewer than five other rows of any kind of run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import published_memory
from published import PublishedRow, read_rows
from published_fit import samples_of
from published_practices import Constants
from published_time import LAYER, gpu_name, machine_of, seconds_of
from zeromesh.apps.plan.machine.calibration import (
    FEW,
    NEAREST,
    PATH,
    WITH_EXPERTS,
    Groups,
    calibration_of,
    error_of,
    kind_of,
    nearest,
    reserved_margin,
    table,
)
from zeromesh.base.devices import ACCELERATORS, find_accelerator

# Chips that are the same, or two of which are one device.
FAMILIES = {
    "V100": ("v100",), "A100": ("a100",), "H100": ("h100", "h200", "h800", "gh200"), "B200": ("b200", "gb200"),
    "B300": ("b300", "gb300"), "MI300X": ("mi300x", "mi325x"), "MI355X": ("mi355x",),
}  # fmt: skip
NO_GUIDE = "power-limited"  # in the note of rows whose cards were not as their data sheet says


class CalibrationRow(NamedTuple):
    """A published step time."""

    id: str
    source: str
    family: str
    kind: str
    gpu: str  # short name
    ratio: float  # measured in parts of predicted seconds
    own_kernels: bool


def family_of(short: str) -> str:
    """Return the family of a GPU; "" for one without rows."""
    return next((name for name, words in FAMILIES.items() if short.split("-")[0] in words), "")


def rows_of(rows: Sequence[PublishedRow]) -> list[CalibrationRow]:
    """Return the step times of all rows that can be predicted, without those of single layers."""
    found = []
    for samples in samples_of(rows).values():
        for sample in samples:
            row, layout = sample.setting.row, sample.setting.layout
            if row.kind == LAYER or NO_GUIDE in row.note:
                continue
            machine = machine_of(row, layout.ranks, Constants())
            accelerator = find_accelerator(machine.nodes[0][0].device.name)
            assert accelerator is not None, gpu_name(row)
            ratio = sample.measured / seconds_of(sample.setting, Constants())
            kind = kind_of(machine, layout.ranks)
            own, short = sample.setting.practice.own_kernels, accelerator.short
            family = family_of(short) + (WITH_EXPERTS if row.model.get("experts") else "")
            found.append(CalibrationRow(row.id, row.source, family, kind, short, ratio, own))
    return found


def counted(rows: Sequence[CalibrationRow]) -> list[CalibrationRow]:
    """Return the rows that calibrate."""
    modules: dict[str, int] = defaultdict(int)
    for row in rows:
        modules[row.family] += not row.own_kernels
    return [row for row in rows if not row.own_kernels or modules[row.family] < FEW]


def reserved_of(rows: Sequence[PublishedRow]) -> list[float]:
    """Return the ratios of reserved to predicted memory, of rows that fill at least half of their device."""
    # Where little is used, what an allocator keeps beside it is much in parts of it, and does no harm.
    known = {row.id: row for row in rows if row.source in published_memory.FRAMEWORKS}
    return [
        one.measured / one.predicted
        for one in published_memory.judge(known.values())
        if one.predicted
        and (one.quantity == "reserved_gib" or "prints reserved" in one.note)
        and one.measured * 2**30 >= known[one.row].device_memory / 2
    ]


def document_of(rows: Sequence[PublishedRow]) -> dict[str, object]:
    """Return the content of the file."""
    families: dict[str, dict[str, dict[str, dict[str, list[float]]]]] = defaultdict(lambda: defaultdict(dict))
    used = counted(rows_of(rows))
    for row in sorted(used, key=lambda row: (row.family, [*NEAREST].index(row.kind), row.gpu, row.source, row.ratio)):
        of_gpu = families[row.family][row.kind].setdefault(row.gpu, {})
        of_gpu.setdefault(row.source, []).append(round(row.ratio, 3))
    return {
        "about": "measured / predicted seconds of published steps by family, kind of run, GPU and source; measured / "
        "predicted reserved memory. Written by benchmarks/calibrate_plan.py from benchmarks/published-rows.json.",
        "sources": sorted({row.source for row in used}),
        "family": {item.short: family for item in ACCELERATORS if (family := family_of(item.short)) in families},
        "families": families,
        "reserved": sorted(round(ratio, 3) for ratio in reserved_of(rows)),
    }


# The report card.


def grouped(rows: Sequence[CalibrationRow]) -> Groups:
    """Return ratios by family and kind of run, and by source."""
    groups: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row.family, row.kind][row.source].append(row.ratio)
    return groups


def errors_of(groups: Groups) -> dict[bool, float]:
    """Return the error of dense models' rows, and that of mixtures."""
    return {
        experts: error_of({key: rows for key, rows in groups.items() if key[0].endswith(WITH_EXPERTS) is experts})
        for experts in (False, True)
    }


def leave_out(rows: Sequence[CalibrationRow], by: str) -> list[tuple[CalibrationRow, float, bool]]:
    """Return each row with its error and whether it is in the interval, by the rows without it or its source."""
    found = []
    others: dict[str, tuple[Groups, dict[bool, float]]] = {}
    for row in rows:
        name = getattr(row, by)
        if name not in others:
            groups = grouped([other for other in rows if getattr(other, by) != name])
            others[name] = groups, errors_of(groups)
        groups, errors = others[name]
        if near := nearest(groups, row.family, row.kind):
            calibration = calibration_of(near, errors[row.family.endswith(WITH_EXPERTS)])
            factor = calibration.factor
            inside = factor * calibration.low <= row.ratio <= factor * calibration.high
            found.append((row, factor / row.ratio - 1, inside))
    return found


def calibration_card(rows: Sequence[PublishedRow]) -> str:
    """Return the tables of the calibration, in Markdown."""
    used = counted(rows_of(rows))
    lines = [
        "## Calibration by GPU",
        "",
        "`zeromesh plan` multiplies the time that a machine's rates give by the median, over sources, of the medians",
        "of measured / predicted of the rows of its family of GPUs and kind of run, without any other fitted constant.",
        "Mixtures of experts have rows of their own. In the interval eight of ten further runs are expected: so many",
        "rows lie in it by the factor of all other sources; all dense models have its width in common, and all",
        "mixtures. *Before* and *after* are errors of predicted times: of the rates alone, and with a factor from all",
        "other sources. *Inside* is the share of rows that lie in the interval of the other rows; in brackets, of all",
        "sources but the row's own.",
        "Rows of frameworks with kernels of their own (Megatron, MaxText) count where a family has fewer than",
        f"{FEW} others.",
        "",
        "| family | run | rows | factor | interval | before: median, worst | after: median, worst | inside |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[CalibrationRow]] = defaultdict(list)
    for row in used:
        groups[row.family, row.kind].append(row)
    alone, apart = leave_out(used, "id"), leave_out(used, "source")
    errors = errors_of(grouped(used))
    families = sorted(groups, key=lambda key: (key[0], [*NEAREST].index(key[1])))
    for key in [*families, ("all dense", ""), ("all mixtures", "")]:
        here = groups.get(key) or [row for row in used if row.family.endswith(WITH_EXPERTS) is (key[0] != "all dense")]
        ids = {row.id for row in here}
        if not here:
            continue
        ratios: dict[str, list[float]] = defaultdict(list)
        for row in here:
            ratios[row.source].append(row.ratio)
        calibration = calibration_of(ratios, errors[key[0].endswith(WITH_EXPERTS)])
        before = [abs(1 / row.ratio - 1) for row in here]
        left = [one for one in alone if one[0].id in ids]
        others = [one for one in apart if one[0].id in ids]
        after = [abs(error) for _, error, _ in others]
        ends = f"{calibration.low:.2f} to {calibration.high:.2f}", f"{calibration.factor:.2f}"
        inside = f"{_share(left)} ({_share(others)})"
        factor = ["", ""] if not key[1] else [ends[1], ends[0]]
        lines.append(f"| {' | '.join([*key, str(len(here)), *factor, _errors(before), _errors(after), inside])} |")
    margin = table()["reserved"]
    lines += [
        "",
        f"A layout is *safe* if a device has room for {reserved_margin():.0%} more than is predicted, which",
        f"allocators reserve at most in nine of ten of {len(margin)} rows that fill half of a device or more, and",
        "*tight* otherwise.",
    ]
    return "\n".join(lines)


def _errors(errors: Sequence[float]) -> str:
    return f"{median(errors):.0%}, {max(errors):.0%}" if errors else "-"


def _share(left: Sequence[tuple[CalibrationRow, float, bool]]) -> str:
    return f"{sum(inside for *_, inside in left) / len(left):.0%}" if left else "-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the calibration of a file of rows, and write it if asked to."""
    parser = argparse.ArgumentParser(prog="python benchmarks/calibrate_plan.py", description=__doc__)
    parser.add_argument("rows", help="JSON file of published rows")
    parser.add_argument("--write", action="store_true", help="write the planner's file")
    options = parser.parse_args(arguments)
    published = read_rows(options.rows)
    document = document_of(published.rows)
    if options.write:
        text = json.dumps(document, indent=1)
        # Numbers of a list stand on one line.
        PATH.write_text(_joined(text) + "\n", encoding="utf-8")
    print(calibration_card(published.rows))
    return 0


def _joined(text: str) -> str:
    lines: list[str] = []
    for line in text.splitlines():
        inside = bool(lines) and lines[-1].rstrip().endswith(("[", ",")) and "[" in lines[-1]
        if inside and "]" not in lines[-1] and ("[" not in line):
            lines[-1] += ("" if lines[-1].endswith("[") or line.strip().startswith("]") else " ") + line.strip()
        else:
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
