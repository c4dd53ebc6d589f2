"""The result of a comparison: a table, JSON, and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from zeromesh.apps.plan.choose.plan_picture import PAGE_ENDS
from zeromesh.apps.verify.cause import where
from zeromesh.apps.verify.plain_training import PlainStep
from zeromesh.apps.verify.ranks import ORDER, Finding, RankResult
from zeromesh.base.chart_page import charts_html, heading, write_page
from zeromesh.base.drawing import Grid, GridCell, draw_charts
from zeromesh.base.words import counted

SHOWN = 8  # values that are apart, in the table
LEAST = 1e-17  # relative difference that counts as none in a picture


class Verdict(Enum):
    """The answer, with the exit status of the command."""

    EQUAL = 0
    APART = 1
    UNVERIFIED = 2


@dataclass(frozen=True)
class TrialReport:
    """One precision: the worst value of each kind."""

    name: str
    unit: str  # narrowest dtype that it computes in
    findings: list[Finding]

    @property
    def apart(self) -> list[Finding]:
        """Findings that are not equal, the first first."""
        return sorted((finding for finding in self.findings if not finding.equal), key=lambda finding: finding.order)

    def worst(self) -> list[tuple[str, int, Finding]]:
        """Return for each kind the number of comparisons and the one that is nearest to its bound, or beyond it."""
        kinds: dict[str, list[Finding]] = {}
        for finding in self.findings:
            kinds.setdefault(finding.kind.split()[0], []).append(finding)
        return [(kind, len(kinds[kind]), max(kinds[kind], key=_excess)) for kind in ORDER if kind in kinds]

    def missing(self, steps: Sequence[PlainStep]) -> dict[str, list[str]]:
        """Return the plain process' values that no rank has compared: names by kind."""
        compared = {(finding.step, finding.kind, finding.name) for finding in self.findings}
        missing: dict[str, list[str]] = {}
        for number, step in enumerate(steps, 1):
            for key in (key for key, value in step.values.items() if value.numel()):
                kind, _, name = key.partition("/")
                kind = "buffer" if kind.startswith("buffer") else kind
                for each in ("master", "parameter") if kind == "master" else (kind,):
                    names = missing.setdefault(each, [])
                    # Stages have a mean loss without a name.
                    if not compared & {(number, each, name), (number, each, "")} and name not in names:
                        names.append(name)
        return {kind: names for kind, names in missing.items() if names}


def _excess(finding: Finding) -> float:
    ratio = finding.difference / finding.bound if finding.bound else (math.inf if finding.difference else 0.0)
    return math.inf if math.isnan(ratio) else ratio


@dataclass
class Report:
    """Result of ``zeromesh.verify``."""

    verdict: Verdict
    model: str
    layout: str
    steps: int
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)  # what this comparison cannot see
    trials: list[TrialReport] = field(default_factory=list)
    reason: str = ""  # why nothing could be verified
    ranks: list[int] = field(default_factory=list)  # on which the first value is apart
    place: str = ""  # of these ranks in the mesh
    cause: str = ""
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """True if the layout trains as the plain process does."""
        return self.verdict is Verdict.EQUAL

    @property
    def first(self) -> Finding | None:
        """The first value that is apart; None if there is none."""
        return next((trial.apart[0] for trial in self.trials if trial.apart), None)

    @property
    def sentence(self) -> str:
        """The answer in a sentence."""
        first = self.first
        if self.verdict is Verdict.UNVERIFIED:
            return f"not verified: {self.reason}"
        if first is None:
            return (
                f"equal: {self.layout} trains {self.model} as one plain process does, for {counted(self.steps, 'step')}"
            )
        return (
            f"apart: first at step {first.step}, {described(first)}, on {self.place}: off by {first.difference:.3g}, "
            f"bound {first.bound:.3g}" + (f"; {self.cause}" if self.cause else "")
        )

    def refuse(self, reason: str) -> None:
        """Say why nothing can be said."""
        self.verdict, self.reason = Verdict.UNVERIFIED, reason

    def decide(self, results: Sequence[Sequence[RankResult]]) -> None:
        """Find where the first difference is, and its likely cause."""
        for trial, ranks in zip(self.trials, results, strict=True):
            if not trial.apart:
                continue
            first = trial.apart[0]
            kind = [finding for finding in trial.apart if (finding.step, finding.kind) == (first.step, first.kind)]
            # Each rank has names of its own micro-batches.
            alike = [finding for finding in kind if finding.name == first.name or finding.kind == "loss"]
            self.ranks = sorted({finding.rank for finding in alike})
            self.place = where(self.ranks, {result.rank: result.coordinates for result in ranks})
            # What most ranks say of this value; else what is said of other values of this kind.
            causes = next(
                filter(None, ([finding.cause for finding in of if finding.cause] for of in (alike, kind))), []
            )
            self.cause = max(causes, key=causes.count, default="")
            self.verdict = Verdict.APART
            return
        self.verdict = Verdict.EQUAL

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON, without infinities."""
        first = self.first
        return {
            "verdict": self.verdict.name.lower(),
            **{
                key: getattr(self, key)
                for key in ("sentence", "model", "layout", "steps", "changes", "notes", "unseen")
            },
            "first": None if first is None else _plain(first) | {"ranks": self.ranks, "place": self.place},
            "cause": self.cause,
            "trials": [
                {
                    "precision": trial.name,
                    "computes_in": trial.unit,
                    "compared": len(trial.findings),
                    "apart": [_plain(finding) for finding in trial.apart],
                    "worst": {kind: _plain(finding) for kind, _, finding in trial.worst()},
                }
                for trial in self.trials
            ],
            "reason": self.reason,
            "seconds": round(self.seconds, 2),
        }

    def show(self, console: Console) -> None:
        """Print the report."""
        for trial in self.trials:
            table = Table(title=f"in {trial.name} (round-off of {trial.unit})", title_justify="left")
            for column in ("compared", "values", "difference", "bound", "nearest to its bound", ""):
                table.add_column(column, justify="right" if column in ("values", "difference", "bound") else "left")
            for kind, count, finding in trial.worst():
                answer = "equal" if finding.equal else "apart"
                place = f"step {finding.step}, rank {finding.rank}" + (f", {finding.name}" if finding.name else "")
                table.add_row(kind, str(count), f"{finding.difference:.2e}", f"{finding.bound:.2e}", place, answer)
            console.print(table)
            for finding in trial.apart[:SHOWN]:
                because = f": {finding.cause}" if finding.cause else ""
                place = f"rank {finding.rank} ({finding.place})"
                console.print(f"  apart: step {finding.step}, {described(finding)}, {place}{because}")
            if len(trial.apart) > SHOWN:
                console.print(f"  and {len(trial.apart) - SHOWN} more")
        titles = {"changed for the comparison": self.changes, "note": self.notes, "not seen": self.unseen}
        for title, lines in titles.items():
            if lines:
                console.print(f"{title}: {', '.join(lines)}")
        console.print(f"{self.sentence} ({self.seconds:.0f} s)")

    def draw(self, file: Path) -> None:
        """Draw relative differences, parameters by steps, as a page, FILE.html, or a picture.

        Raises:
            ValueError: nothing was compared, or matplotlib is missing for a picture.
        """
        charts = [_differences(trial, self.steps) for trial in self.trials if trial.findings]
        if not charts:
            raise ValueError("there is no picture, as nothing was compared")
        title = f"{self.model}, {self.layout}: {self.verdict.name.lower()}"
        if file.suffix.lower() in PAGE_ENDS:
            write_page(file, title, [heading(title, self.sentence), charts_html(charts)])
        else:
            draw_charts(file, title, charts)


def _differences(trial: TrialReport, steps: int) -> Grid:
    weights = [finding for finding in trial.findings if finding.kind in ("master", "parameter")]
    names = sorted(places := {finding.name: finding.position for finding in weights}, key=places.__getitem__)
    largest: dict[tuple[int, int], float] = {}
    for finding in weights:
        place = names.index(finding.name), finding.step - 1
        largest[place] = max(largest.get(place, LEAST), min(finding.relative, 1.0))
    cells = {place: GridCell(1 - math.log(value) / math.log(LEAST)) for place, value in largest.items()}
    columns = [f"step {number}" for number in range(1, steps + 1)]
    return Grid(f"largest relative differences in {trial.name}, from {LEAST} to 1", names, columns, cells)


def described(finding: Finding) -> str:
    """Name a value in words."""
    if finding.kind == "loss" and finding.name:
        share, _, micro_batch = finding.name.partition(".")
        return f"loss of micro-batch {micro_batch} of data rank {share}"
    words = {
        "loss": "mean loss",
        "norm": "gradient norm",
        "rate": "learning rate of group",
        "master": "master weight",
        "frozen": "frozen weight",
    }
    kind = words.get(finding.kind, f"optimizer {finding.kind}" if finding.kind.startswith("state ") else finding.kind)
    return f"{kind} {finding.name}".strip()


def _plain(finding: Finding) -> dict[str, Any]:
    values = {**vars(finding), "equal": finding.equal}
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
