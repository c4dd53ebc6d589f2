"""Judgement of a layout that a user has: its memory and time, and layouts that are better."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeromesh.apps.plan.choose.answer import (
    LEAST_GAIN,
    fullest_text,
    layout_text,
    missing_text,
    moment_text,
    shares_text,
)
from zeromesh.apps.plan.choose.certainty import interval_text, seconds_text, tight_text
from zeromesh.apps.plan.choose.fit import lacking
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.choose.resting_experts import resting_text
from zeromesh.apps.plan.choose.search import PlanCandidate, PlanResult, search
from zeromesh.apps.plan.choose.space import PlanRequest
from zeromesh.apps.plan.cost.cost import CostSource
from zeromesh.apps.plan.predict.lower_bounds import least_memory


@dataclass(frozen=True)
class LayoutJudgement:
    """A layout's numbers, what they mean, and better layouts."""

    candidate: PlanCandidate
    over: dict[str, float]  # bytes that each tier lacks; negative where some are left
    result: PlanResult

    @property
    def fits(self) -> bool:
        """True if the layout fits on every tier."""
        return max(self.over.values()) <= 0

    @property
    def states(self) -> dict[str, dict[str, float]]:
        """Bytes of the fullest rank by tier and state: at the peak on the device, and at rest on other tiers."""
        rank = self.candidate.fullest
        by_tier = {"device": {**rank.peak.bytes, "context": rank.fixed}}
        for (state, tier), size in rank.states.items():
            if tier != "device" and size:
                by_tier.setdefault(tier, {})[state] = size
        return {tier: {state: size for state, size in states.items() if size} for tier, states in by_tier.items()}

    @property
    def better(self) -> tuple[PlanCandidate, ...]:
        """Layouts that are faster and no tighter, or all that fit where this one does not."""
        if not self.fits:
            return self.result.shown
        limit, tight = self.candidate.time.seconds * (1 - LEAST_GAIN), self.candidate.tight
        return tuple(other for other in self.result.shown if other.time.seconds < limit and other.tight <= tight)

    @property
    def sentences(self) -> list[str]:
        """The judgement in plain sentences."""
        candidate, seconds = self.candidate, self.candidate.time.seconds
        peak, rank = moment_text(candidate.fullest.peak.label), fullest_text(candidate)
        missing = missing_text(self.over, "the")
        if missing:
            sentences = [f"It does not fit: it lacks {missing}. Peak of {rank}: {peak}."]
        else:
            share = candidate.fullest.device / least_memory(candidate.machine)
            sentences = [f"It fits: {rank} uses {share:.0%} of the device's memory. Peak: {peak}."]
            if candidate.tight:
                sentences.append(f"{tight_text(candidate)}.")
        would = "would take" if missing else "takes"
        sentences.append(
            f"A step {would} {interval_text(candidate.time)}. It is bound by {candidate.time.bound}: "
            f"{shares_text(candidate)}."
        )
        request, machine = self.result.request, candidate.machine
        sentences += resting_text(request.source, request.sequence, candidate.layout, machine, candidate.time)
        if self.better:
            best = self.better[0]
            gain = "" if missing else f", {1 - best.time.seconds / seconds:.0%} less time"
            sentences.append(f"Better: {layout_text(best.layout)}, {seconds_text(best.time.seconds)}{gain}.")
        elif not missing:
            sentences.append(f"No layout that was computed is faster by more than {LEAST_GAIN:.0%}.")
        else:
            sentences.append("No other layout fits either; without --explain, the command says what helps.")
        return sentences


def judge(request: PlanRequest, layout: ParallelLayout, planned: CostSource | None = None) -> LayoutJudgement:
    """Return the judgement of a layout on the request's machine; ``planned`` is its own cost if it has a saved plan."""
    machine, answered = request.machine, replace(request, source=planned or request.source)
    ranks, time = answered.memory_on(machine, layout), answered.time_on(machine, layout)
    candidate = PlanCandidate(layout, machine, request.sequence, ranks, time)
    return LayoutJudgement(candidate, lacking(ranks, layout, machine), search(request))
