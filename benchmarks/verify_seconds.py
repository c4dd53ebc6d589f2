"""Seconds of ``zeromesh.verify`` on ten models in four layouts, and with each planted mistake: the tables of verify.md.

    OMP_NUM_THREADS=1 python benchmarks/verify_seconds.py [--rounds 3]

Runs the comparisons of tests/verification on two ranks that are running already, and prints medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLACES = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "verification")]
sys.path[:0] = PLACES
os.environ["PYTHONPATH"] = os.pathsep.join([*PLACES, os.environ.get("PYTHONPATH", "")])

from faults import FAULTS, found  # noqa: E402
from harness import close_pools, run_ranks  # noqa: E402
from page import lines_of  # noqa: E402
from test_verify_models import CASES, FAMILIES, LAYOUTS, outcome  # noqa: E402


def timed(rounds: int, ranks: int, work: Any, *arguments: str) -> tuple[str, float]:
    """Return the verdict, and the median of the seconds."""
    seconds, verdict = [], ""
    for _ in range(rounds):
        began = time.perf_counter()
        verdict = run_ranks(work, ranks, *arguments, timeout=600)[0][0]
        seconds.append(time.perf_counter() - began)
    return verdict.lower(), statistics.median(seconds)


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    run_ranks(outcome, 2, FAMILIES[0], next(iter(LAYOUTS)))  # imports
    rows = [["model", *LAYOUTS]]
    for family in FAMILIES:
        row = [family]
        for layout in LAYOUTS:
            known = (family, layout) in CASES
            row.append("{}, {:.1f}".format(*timed(rounds, 2, outcome, family, layout)) if known else "not split")
        rows.append(row)
        print(row, flush=True)
    planted = [["mistake", "verdict", "s"]]
    for name, fault in FAULTS.items():
        verdict, seconds = timed(rounds, fault.ranks, found, name)
        planted.append([name, verdict, f"{seconds:.1f}"])
        print(planted[-1], flush=True)
    print(lines_of(rows), lines_of(planted), sep="\n\n")
    close_pools()


if __name__ == "__main__":
    main()
