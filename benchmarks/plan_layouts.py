"""Measure the layouts of ``plan_rows.py`` on this machine: peak of the live heap, and time of a step.

    python benchmarks/plan_layouts.py --out runs/plan-layouts.json [--only TEXT] [--steps 7] [--rounds 2]

Each row has processes of its own. The heap is that of malloc blocks of 64 KiB and more, beyond what there
was before the model, on the rank that has most; a preloaded library (``heap_events.c``, for which a C compiler is
needed) counts at each allocation. A file that exists is gone on with: rows in it are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import commit, machine
from hosts import Hosts
from plan_rows import Row, measure, rows
from zeromesh.apps.launch.launch import launch


def heap_library() -> Path:
    """Return the compiled ``heap_events.c``."""
    source, library = Path(__file__).with_name("heap_events.c"), Path(tempfile.mkdtemp()) / "heap_events.so"
    subprocess.run([os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def machine_of(ranks: int, folder: Path) -> dict[str, Any]:
    """Measure this machine with so many ranks, as ``zeromesh doctor --save`` does."""
    path = folder / f"machine-{ranks}.json"
    command = [sys.executable, "-m", "zeromesh.apps.cli.main", "doctor", "--ranks", str(ranks), "--save", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def run(row: Row, steps: int) -> dict[str, Any]:
    """Measure a row on all ranks; return the figures of the rank with the highest peak, and the slowest one's times."""
    with tempfile.TemporaryDirectory() as folder:
        if row.rate:
            with Hosts(row.ranks, 1, None if row.rate == "10gbit" else row.rate) as hosts:
                by_rank = hosts.run(measure, row.name, folder, steps, timeout=600)
        else:
            by_rank = launch(measure, row.ranks, row.name, folder, steps)
    slowest = [max(times) for times in zip(*(rank["seconds"] for rank in by_rank), strict=True)]
    return {**max(by_rank, key=lambda rank: rank["peak"]), "seconds": slowest}


def main() -> None:
    """Measure what is not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the figures")
    parser.add_argument("--only", default="", help="measure rows whose name has this text")
    parser.add_argument("--steps", type=int, default=7, help="that are timed in each round")
    parser.add_argument("--rounds", type=int, default=2, help="in which all rows take turns")
    given = parser.parse_args()
    if "heap_events" not in os.environ.get("LD_PRELOAD", ""):
        # A library can be preloaded when a process begins only.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": str(heap_library())})
    done = json.loads(given.out.read_text()) if given.out.is_file() else {}
    done = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "machines": {},
        "rows": {},
    } | done
    given.out.parent.mkdir(parents=True, exist_ok=True)
    wanted = [row for row in rows() if given.only in row.name]
    for number in range(given.rounds):
        for ranks in sorted({row.ranks for row in wanted}):
            kept = done["machines"].setdefault(str(ranks), [])
            if len(kept) <= number:
                kept.append(machine_of(ranks, given.out.parent))
        for place, row in enumerate(wanted, 1):
            found = done["rows"].setdefault(row.name, [])
            if len(found) <= number:
                found.append(run(row, 2 if row.rate == "100mbit" else given.steps))
                given.out.write_text(json.dumps(done, indent=1) + "\n")
                told = f"{found[-1]['peak'] / 1e6:.1f} MB, {statistics.median(found[-1]['seconds']):.3f} s"
                print(f"[round {number + 1}, {place}/{len(wanted)}] {row.name}: {told}", flush=True)


if __name__ == "__main__":
    main()
