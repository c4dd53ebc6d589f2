"""Texts about the certainty of a prediction: intervals of time and speed, and whether memory is safe or tight."""

from __future__ import annotations

import re

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
    seconds = seconds_text(step.seconds)
    if calibration.is_bound and not calibration.rows:
        return f"at least {seconds} (no step of this GPU was measured, so its speed is an upper bound)"
    low, high = map(seconds_text, step.interval)
    amount, _, unit = low.rpartition(" ")
    likely = f"{amount} to {high}" if high.endswith(f" {unit}") else f"{low} to {high}"
    if not calibration.rows:
        return f"{seconds} (likely {likely})"
    # Sizes of memory make no other GPU of a name.
    names = dict.fromkeys(re.sub(r"-\d+gb$", "", name).upper() for name in calibration.devices)
    *others, last = names
    listed = f"{', '.join(others)} and {last}" if others else last
    rows = f"{counted(calibration.rows, 'measured step')} on {listed}"
    bound = ", none of them on this GPU, so its speed is an upper bound" if calibration.is_bound else ""
    return f"{seconds} (likely {likely}, from {rows}{bound})"


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
