"""Report card of the planner: ``python benchmarks/validate_plan.py ROWS.json [--markdown FILE]``."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

import published_memory
import published_time
from calibrate_plan import calibration_card
from published import Outcome, PublishedRows, read_rows
from published_fit import time_card

WORST = 3  # rows of a group that are listed


# Errors to stay below, mean and largest, by source and quantity; PRINTED: every row as its source prints it.
PRINTED = (0.0, 0.0)
AIMS: dict[tuple[str, str], tuple[float, float]] = {
    ("zero2019", "states_gb_per_gpu"): PRINTED,
    ("ds_estimator", "states_gib_per_gpu"): PRINTED,
    ("ds_estimator", "host_gib_per_node"): PRINTED,
    ("korthikanti2022", "states_gib"): PRINTED,
    ("korthikanti2022", "activation_gib"): PRINTED,
    ("simumax_b200", "memory_gib"): (0.01, 0.025),
    ("torchtitan", "memory_gib"): (0.03, inf),
}
TIME_AIM = (0.05, 0.12)
TIMES = ("step_s", "tflops_per_gpu", "tokens_per_s_per_gpu", "mfu_percent", "days_for_300B_tokens")

IN_SHORT = {
    "memory of model states": (
        "states_gb_per_gpu", "states_gib_per_gpu", "states_gib", "states_mib", "host_gib_per_node",
    ),
    "peak memory that a device allocates": ("memory_gib", "memory_gb", "peak_allocated_gb", "peak_allocated_gib"),
    "peak memory that the allocator reserves": ("reserved_gib",),
    "step time, throughput, FLOP/s": TIMES,
}  # fmt: skip
"""Rows of the first table, and their quantities."""

# Values that follow from others of the row, or are another program's predictions.
SECONDARY = ("derived_", "simumax_", "percent_of_peak", "aggregate_pflops", "hfu_percent", "three_d_needs_gpus")


def outcomes_of(published: PublishedRows) -> list[Outcome]:
    """Return the outcomes of all figures of all rows, those without a prediction with the reason."""
    found = published_memory.judge(published.rows) + published_time.judge(published.rows)
    judged = {(outcome.row, outcome.quantity.split(".")[0]) for outcome in found}
    rows = {outcome.row for outcome in found}
    for row in published.rows:
        for quantity, value in row.measured.items():
            if (row.id, quantity) in judged or value is None or isinstance(value, Mapping):
                continue
            # One figure of a row's time stands for those that follow from it.
            follows = quantity.startswith(SECONDARY) or quantity in TIMES
            if not follows or row.id not in rows:
                rows.add(row.id)
                found.append(row.outcome(quantity, None, "nothing predicts this quantity"))
    return found


class ReportGroup(NamedTuple):
    """Outcomes of one source and quantity."""

    source: str
    quantity: str
    judged: tuple[Outcome, ...]
    unjudged: tuple[Outcome, ...]

    @property
    def errors(self) -> list[float]:
        """Absolute relative errors; where constants were fitted, those of the rows that did not decide them."""
        counted = [outcome for outcome in self.judged if not outcome.fitted] or self.judged
        return [abs(outcome.error or 0.0) for outcome in counted]

    @property
    def aim(self) -> tuple[float, float] | None:
        """The aim, if there is one."""
        return AIMS.get((self.source, self.quantity), TIME_AIM if self.quantity in TIMES else None)

    @property
    def reached(self) -> bool:
        """True if the aim was reached."""
        if self.aim in (None, PRINTED):
            return all(outcome.printed for outcome in self.judged)
        mean, most = self.aim or PRINTED
        return sum(self.errors) / len(self.errors) <= mean and max(self.errors) <= most

    @property
    def cells(self) -> list[str]:
        """Columns of the first table."""
        counts = (len(self.judged), len(self.judged) - len(self.errors), sum(one.printed for one in self.judged))
        errors = (sum(self.errors) / len(self.errors), max(self.errors))
        aim = ["", ""]
        if self.aim is not None:
            mean, most = self.aim
            text = f"{mean:.0%} mean" + (f", {most:.1%} max".replace(".0%", "%") if most < inf else "")
            aim = ["as printed" if self.aim == PRINTED else text, "yes" if self.reached else "no"]
        return [self.source, self.quantity, *map(str, counts), *(f"{error:.2%}" for error in errors), *aim]


def groups_of(outcomes: Sequence[Outcome]) -> list[ReportGroup]:
    """Return the outcomes by source and quantity."""
    parts: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        parts[outcome.source, outcome.quantity.split(".")[0]].append(outcome)
    found = []
    for (source, quantity), ones in sorted(parts.items()):
        judged, unjudged = (tuple(one for one in ones if (one.predicted is None) is lacks) for lacks in (False, True))
        found.append(ReportGroup(source, quantity, judged, unjudged))
    return found


def report(published: PublishedRows, outcomes: Sequence[Outcome]) -> str:
    """Return the report card in Markdown."""
    groups = groups_of(outcomes)
    headings = "source|quantity|judged|of them fitted|as printed|mean error|max error|aim|reached"
    lines = ["## In short", "", *_table("prediction|figures|mean error|largest error", _in_short(groups))]
    lines += ["", BY_SOURCE, *_table(headings, [group.cells for group in groups if group.judged])]
    worst = []
    for group in groups:
        wrong = [outcome for outcome in group.judged if outcome.error and not outcome.printed]
        for one in sorted(wrong, key=lambda one: -abs(one.error or 0.0))[:WORST]:
            figures = f"{one.predicted:.5g}", f"{one.measured:.5g}", f"{one.error:+.2%}"
            worst.append([one.row, one.quantity, *figures, one.note])
    lines += ["", "## Worst rows", "", f"The {WORST} worst predictions for each source and quantity.", ""]
    lines += _table("row|quantity|predicted|published|error|note", worst)
    lines += ["", *calibration_card(published.rows).splitlines(), "", *time_card(published.rows).splitlines()]
    unjudged = []
    for group in groups:
        reasons: dict[str, list[str]] = defaultdict(list)
        for outcome in group.unjudged:
            reasons[outcome.note].append(outcome.row)
        for reason, rows in reasons.items():
            shown = rows[0] if len(rows) == 1 else f"{len(rows)}: {rows[0]} to {rows[-1]}"
            unjudged.append([group.source, group.quantity, shown, reason])
    lines += ["", "## Rows that cannot be judged", "", "These figures have no prediction, for the reason given.", ""]
    lines += _table("source|quantity|rows|reason", unjudged)
    lines += ["", "## Sources", ""]
    for name in sorted({row.source for row in published.rows}):
        source = published.sources.get(name, {})
        lines.append(f"- {name}: {source.get('title', 'no title')} {source.get('url', '')}".rstrip())
    return "\n".join(lines)


def _in_short(groups: Sequence[ReportGroup]) -> list[list[str]]:
    """Return the mean and the largest error of each kind of prediction."""
    found = []
    for name, quantities in IN_SHORT.items():
        errors = [error for group in groups if group.quantity in quantities and group.judged for error in group.errors]
        if errors:
            found.append([name, str(len(errors)), f"{sum(errors) / len(errors):.1%}", f"{max(errors):.1%}"])
    return found


def _table(headings: str, rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [headings.split("|"), *([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)]
    found = [f"| {' | '.join(line)} |" for line in lines]
    return [found[0], "|---" * len(lines[0]) + "|", *found[1:]]


HEADER = """# Planner report card

This page compares the predictions of `zeromesh plan` with published measurements of other frameworks.
[The benchmark of the planner](benchmarks/2026-11-25-plan.md) compares predictions with ZeroMesh itself.

- `make validate-plan` writes this page from `benchmarks/published-rows.json`.
- Predictions of memory use no measured value. The formulas are in `zeromesh/apps/plan/cost/shape.py` and
  `zeromesh/shard/sizes.py`. The tensors that each framework keeps are in `benchmarks/published_conventions.py`, with
  sources.
- `zeromesh plan` multiplies times by one factor for each family of GPUs and kind of run:
  [Calibration by GPU](#calibration-by-gpu). All other tables show how well the model of a step fits each framework:
  their predictions of time use two constants for each GPU and source. They are fitted to one half of the source's
  rows. Errors are those of the other half.
- Mixtures of experts are judged where the row or the table of models gives their sizes. They have constants of their
  own: the speed of products, and the seconds beside kernels of a block with experts. Tokens are taken to be distributed
  evenly, unless a row says that routing is real; then the busiest rank gets 1.3 times the mean, as for `zeromesh plan`.

"""

BY_SOURCE = """## By source

- *judged*: the number of compared figures; *of them fitted*: those that were used to fit constants, which do not count.
- *as printed*: predictions that are equal to the published figure, rounded as the source does.
- *aim*: the error that the planner should stay below; empty for quantities without an aim.
- *fits* is 1 if the model fits the memory of the machine.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report card of a file of rows; return 2 for a file that cannot be read."""
    parser = argparse.ArgumentParser(prog="python benchmarks/validate_plan.py", description=__doc__)
    parser.add_argument("rows", help="JSON file of published rows")
    parser.add_argument("--markdown", help="write the page to this file")
    options = parser.parse_args(arguments)
    try:
        published = read_rows(options.rows)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    text = report(published, outcomes_of(published))
    print(text)
    if options.markdown:
        Path(options.markdown).write_text(HEADER + text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
