"""Report card of the planner: ``python -m zeromesh.plan.validate ROWS.json [--markdown FILE]``."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

from zeromesh.plan import published_memory, published_time
from zeromesh.plan.fitting import time_card
from zeromesh.plan.published import Outcome, PublishedRow, PublishedRows, read_rows

WORST = 3  # rows of a group that are named


class Aim(NamedTuple):
    """Errors that a group is to stay below, in parts; 0: every row as printed."""

    mean: float
    most: float

    @property
    def text(self) -> str:
        """The aim for the reader."""
        if not self.most:
            return "as printed"
        return f"{self.mean:.0%} mean" + (f", {self.most:.1%} max".replace(".0%", "%") if self.most < inf else "")


AIMS: dict[tuple[str, str], Aim] = {
    ("zero2019", "states_gb_per_gpu"): Aim(0, 0),
    ("ds_estimator", "states_gib_per_gpu"): Aim(0, 0),
    ("ds_estimator", "host_gib_per_node"): Aim(0, 0),
    ("korthikanti2022", "states_gib"): Aim(0, 0),
    ("korthikanti2022", "activation_gib"): Aim(0, 0),
    ("simumax_b200", "memory_gib"): Aim(0.01, 0.025),
    ("torchtitan", "memory_gib"): Aim(0.03, inf),
}
"""Aims by source and quantity."""

TIME_AIM = Aim(0.05, 0.12)
TIMES = ("step_s", "tflops_per_gpu", "tokens_per_s_per_gpu", "mfu_percent", "days_for_300B_tokens")

# Values that follow from others of the row, or are another program's predictions.
SECONDARY = ("derived_", "simumax_", "percent_of_peak", "aggregate_pflops", "hfu_percent", "three_d_needs_gpus")


JUDGES: tuple[Callable[[Iterable[PublishedRow]], list[Outcome]], ...] = (published_memory.judge, published_time.judge)
"""Functions that predict figures."""


def outcomes_of(published: PublishedRows) -> list[Outcome]:
    """Return the outcomes of all figures of all rows, those without a prediction with the reason."""
    found = [outcome for judge in JUDGES for outcome in judge(published.rows)]
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
    def mean(self) -> float:
        """Mean error."""
        return sum(self.errors) / len(self.errors)

    @property
    def aim(self) -> Aim | None:
        """The aim, if there is one."""
        return AIMS.get((self.source, self.quantity), TIME_AIM if self.quantity in TIMES else None)

    @property
    def reached(self) -> str:
        """Whether the aim was reached, for the reader."""
        if self.aim is None or not self.judged:
            return ""
        if not self.aim.most:
            return "yes" if all(outcome.printed for outcome in self.judged) else "no"
        return "yes" if self.mean <= self.aim.mean and max(self.errors) <= self.aim.most else "no"


def groups_of(outcomes: Sequence[Outcome]) -> list[ReportGroup]:
    """Return the outcomes by source and quantity."""
    parts: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        parts[outcome.source, outcome.quantity.split(".")[0]].append(outcome)
    return [
        ReportGroup(
            source, quantity, tuple(one for one in found if one.predicted is not None),
            tuple(one for one in found if one.predicted is None),
        )
        for (source, quantity), found in sorted(parts.items())
    ]  # fmt: skip


def report(published: PublishedRows, outcomes: Sequence[Outcome]) -> str:
    """Return the report card in Markdown."""
    groups = groups_of(outcomes)
    lines = ["| source | quantity | judged | of them fitted | as printed | mean error | max error | aim | reached |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for group in groups:
        if group.judged:
            printed = sum(outcome.printed for outcome in group.judged)
            lines.append(
                f"| {group.source} | {group.quantity} | {len(group.judged)} | "
                f"{len(group.judged) - len(group.errors)} | {printed} | {group.mean:.2%} | "
                f"{max(group.errors):.2%} | {group.aim.text if group.aim else ''} | {group.reached} |"
            )
    lines += ["", "## Worst rows", "", "| row | quantity | predicted | published | error | note |",
              "|---|---|---|---|---|---|"]  # fmt: skip
    for group in groups:
        wrong = [outcome for outcome in group.judged if outcome.error and not outcome.printed]
        for outcome in sorted(wrong, key=lambda one: -abs(one.error or 0.0))[:WORST]:
            lines.append(
                f"| {outcome.row} | {outcome.quantity} | {outcome.predicted:.5g} | {outcome.measured:.5g} | "
                f"{outcome.error:+.2%} | {_cell(outcome.note)} |"
            )
    lines += ["", "## Rows that cannot be judged", "", "| source | quantity | rows | reason |", "|---|---|---|---|"]
    for group in groups:
        reasons: dict[str, list[str]] = defaultdict(list)
        for outcome in group.unjudged:
            reasons[outcome.note].append(outcome.row)
        for reason, rows in reasons.items():
            shown = rows[0] if len(rows) == 1 else f"{len(rows)}: {rows[0]} to {rows[-1]}"
            lines.append(f"| {group.source} | {group.quantity} | {shown} | {_cell(reason)} |")
    lines += ["", "## Sources", ""]
    for name in sorted({row.source for row in published.rows}):
        source = published.sources.get(name, {})
        lines.append(f"- {name}: {source.get('title', 'no title')} {source.get('url', '')}".rstrip())
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


HEADER = """# Report card of the planner

The planner's predictions beside published figures, by source and quantity. `make validate-plan` writes this page from
`benchmarks/published-rows.json`. No identifier and no measured value enters a prediction of memory; formulas and the
tensors that frameworks keep are in `zeromesh/plan/shape.py`, `states.py` and `conventions.py`, each with its source.
Errors are those of rows that no constant was fitted on.

"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report card of a file of rows; return 2 for a file that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m zeromesh.plan.validate", description=__doc__)
    parser.add_argument("rows", help="JSON file of published rows")
    parser.add_argument("--markdown", help="write the page to this file")
    options = parser.parse_args(arguments)
    try:
        published = read_rows(options.rows)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    text = f"{report(published, outcomes_of(published))}\n\n{time_card(published.rows)}"
    print(text)
    if options.markdown:
        Path(options.markdown).write_text(HEADER + text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
