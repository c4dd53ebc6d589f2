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

from zeromesh.config.errors import counted
from zeromesh.verification.cause import where
from zeromesh.verification.plain import PlainStep
from zeromesh.verification.ranks import ORDER, Finding, RankResult

SHOWN = 8  # values that are apart, in the table


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
        return sorted((one for one in self.findings if not one.equal), key=lambda one: one.order)

    def worst(self) -> list[tuple[str, int, Finding]]:
        """Return for each kind the number of comparisons and the one that is nearest to its bound, or beyond it."""
        kinds: dict[str, list[Finding]] = {}
        for one in self.findings:
            kinds.setdefault(one.kind.split()[0], []).append(one)
        return [(kind, len(kinds[kind]), max(kinds[kind], key=_excess)) for kind in ORDER if kind in kinds]

    def missing(self, steps: Sequence[PlainStep]) -> dict[str, list[str]]:
        """Return the plain process' values that no rank has compared: names by kind."""
        compared = {(one.step, one.kind, one.name) for one in self.findings}
        found: dict[str, list[str]] = {}
        for number, step in enumerate(steps, 1):
            for key in step.values:
                kind, _, name = key.partition("/")
                kind = "buffer" if kind.startswith("buffer") else kind
                for one in ("master", "parameter") if kind == "master" else (kind,):
                    # Stages have a mean loss without a name.
                    if not compared & {(number, one, name), (number, one, "")} and name not in found.get(one, ()):
                        found.setdefault(one, []).append(name)
        return found


def _excess(one: Finding) -> float:
    ratio = one.difference / one.bound if one.bound else (math.inf if one.difference else 0.0)
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
            kind = [one for one in trial.apart if (one.step, one.kind) == (first.step, first.kind)]
            # Each rank has names of its own micro-batches.
            alike = [one for one in kind if one.name == first.name or one.kind == "loss"]
            self.ranks = sorted({one.rank for one in alike})
            self.place = where(self.ranks, {one.rank: one.coordinates for one in ranks})
            # What most ranks say of this value; else what is said of other values of this kind.
            said = [one.cause for one in alike if one.cause] or [one.cause for one in kind if one.cause]
            self.cause = max(said, key=said.count, default="")
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
                    "apart": [_plain(one) for one in trial.apart],
                    "worst": {kind: _plain(one) for kind, _, one in trial.worst()},
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
            for kind, count, one in trial.worst():
                answer = "equal" if one.equal else "apart"
                place = f"step {one.step}, rank {one.rank}" + (f", {one.name}" if one.name else "")
                table.add_row(kind, str(count), f"{one.difference:.2e}", f"{one.bound:.2e}", place, answer)
            console.print(table)
            for one in trial.apart[:SHOWN]:
                because = f": {one.cause}" if one.cause else ""
                console.print(f"  apart: step {one.step}, {described(one)}, rank {one.rank} ({one.place}){because}")
            if len(trial.apart) > SHOWN:
                console.print(f"  and {len(trial.apart) - SHOWN} more")
        titles = {"changed for the comparison": self.changes, "note": self.notes, "not seen": self.unseen}
        for title, lines in titles.items():
            if lines:
                console.print(f"{title}: {', '.join(lines)}")
        console.print(f"{self.sentence} ({self.seconds:.0f} s)")

    def draw(self, file: Path) -> None:
        """Write a heat map of relative differences, parameters by steps, as a PNG.

        Raises:
            ValueError: matplotlib is not installed, or nothing was compared.
        """
        figure = require_matplotlib()(layout="constrained")
        from matplotlib.colors import LogNorm

        trials = [trial for trial in self.trials if trial.findings]
        if not trials:
            raise ValueError("there is no picture, as nothing was compared")
        weights = [[one for one in trial.findings if one.kind in ("master", "parameter")] for trial in trials]
        names = sorted(places := {one.name: one.position for one in weights[0]}, key=places.__getitem__)
        figure.set_size_inches(4 + 2 * len(trials), 1.5 + 0.16 * len(names))
        axes = figure.subplots(1, len(trials), squeeze=False, sharey=True)[0]
        image = None
        for axis, trial, found in zip(axes, trials, weights, strict=True):
            cells = [[0.0] * self.steps for _ in names]
            for one in found:
                row = cells[names.index(one.name)]
                row[one.step - 1] = max(row[one.step - 1], min(one.relative, 1.0))
            image = axis.imshow(cells, aspect="auto", cmap="magma", norm=LogNorm(1e-17, 1, clip=True))
            axis.set(title=trial.name, xlabel="step", xticks=range(self.steps), xticklabels=range(1, self.steps + 1))
        axes[0].set_yticks(range(len(names)), names, fontsize=6)
        figure.colorbar(image, ax=list(axes), label="largest relative difference")
        figure.suptitle(f"{self.model}, {self.layout}: {self.verdict.name.lower()}")
        figure.savefig(file, dpi=120)


def require_matplotlib() -> Any:
    """Return matplotlib's class of figures, which leaves the user's backend alone; raise ValueError without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"--picture needs matplotlib ({error}); pip install 'zeromesh[plots]'") from None
    return Figure


def described(one: Finding) -> str:
    """Name a value in words."""
    if one.kind == "loss" and one.name:
        share, _, micro_batch = one.name.partition(".")
        return f"loss of micro-batch {micro_batch} of data rank {share}"
    words = {
        "loss": "mean loss",
        "norm": "gradient norm",
        "rate": "learning rate of group",
        "master": "master weight",
        "frozen": "frozen weight",
    }
    kind = words.get(one.kind, f"optimizer {one.kind}" if one.kind.startswith("state ") else one.kind)
    return f"{kind} {one.name}".strip()


def _plain(one: Finding) -> dict[str, Any]:
    values = {**vars(one), "equal": one.equal}
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
