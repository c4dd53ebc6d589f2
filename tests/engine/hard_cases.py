"""All hard cases: programs that naive hooks get wrong; each is a model, a step of training, and its settings."""

import hard_cases_blocks
import hard_cases_errors
import hard_cases_graph
import hard_cases_idle
import hard_cases_recompute
from hard_case import Case

CASES: dict[str, Case] = {
    **hard_cases_graph.CASES,
    **hard_cases_idle.CASES,
    **hard_cases_blocks.CASES,
    **hard_cases_recompute.CASES,
    **hard_cases_errors.CASES,
}
