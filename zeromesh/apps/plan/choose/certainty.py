"""Texts about the certainty of a prediction: intervals of time and speed, and whether memory is safe or tight."""

from __future__ import annotations

from zeromesh.apps.plan.choose.search import PlanCandidate
from zeromesh.apps.plan.machine.calibration import reserved_margin
from zeromesh.apps.plan.predict.lower_bounds import least_memory
from zeromesh.apps.plan.predict.time import StepTime
from zeromesh.base.words import bytes_text, counted


def seconds_text(seconds: float) -> str:
    """Return a time with three digits."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def interval_text(step: StepTime) -> str:
    """Return a predicted time with its interval, or as a lower bound where no steps of such a GPU were measured."""
    calibration = step.calibration
    if calibration.is_bound and not calibration.rows:
        text = f"at least {seconds_text(step.seconds)}"
        return f"{text} (its speed is an upper bound, as no measured steps of this GPU are known)"
    low, high = map(seconds_text, step.interval)
    text = f"{seconds_text(step.seconds)}, likely {low} to {high}"
    if not calibration.rows:
        return text
    text += f" by {counted(calibration.rows, 'measured step')} on {', '.join(calibration.devices)}"
    if calibration.is_bound:
        text += "; none of them is of this GPU, so take the speed as an upper bound"
    return text


def mfu_text(candidate: PlanCandidate) -> str:
    """Return the share of the peak, with its interval or as an upper bound, for a table."""
    calibration = candidate.time.calibration
    sign = "<" if calibration.is_bound else ""
    if calibration.is_bound and not calibration.rows:
        return f"{sign}{candidate.mfu:.0%}"
    low, high = (round(100 * share) for share in candidate.mfu_interval)
    return f"{sign}{candidate.mfu:.0%} {low}-{high}"


def memory_word(candidate: PlanCandidate) -> str:
    """Return "tight" for a layout that may run out of memory, else "safe"."""
    return "tight" if candidate.tight else "safe"


def tight_text(candidate: PlanCandidate) -> str:
    """Return what makes a layout tight, as a sentence."""
    return (
        f"This is tight: an allocator reserves up to {reserved_margin():.0%} more than is predicted in nine of ten "
        f"measured runs, which does not fit {bytes_text(least_memory(candidate.machine))}"
    )
