"""Measure the layouts of ``plan_rows.py`` on this machine: peak of the live heap, and time of a step.

    python benchmarks/plan_layouts.py --out runs/plan-layouts.json [--only TEXT] [--steps 5]

Each row has processes of its own. The heap is that of malloc blocks of 64 KiB and more, beyond what there
was before the model, on the rank that has most; a preloaded library (``heap_events.c``, for which a C compiler is
needed) counts at each allocation. A file that exists is gone on with: rows in it are not measured again.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import repeat
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import products
from plan_rows import Row, inputs_of, make_model, rows
from zeromesh import initialize
from zeromesh.comm.environment import init_distributed, shutdown
from zeromesh.launcher.launch import launch

CPU = torch.device("cpu")


def measure(name: str, folder: str, steps: int) -> dict[str, Any]:
    """Measure a row on one rank; states on NVMe rest in the folder."""
    init_distributed("gloo")
    if products.needed(CPU):
        products.replace()
    (row,) = (row for row in rows() if row.name == name)
    heap = ctypes.CDLL(None)  # the preloaded library's functions are in the process itself
    heap.heap_events_live.restype = heap.heap_events_peak.restype = ctypes.c_long
    _one(row, folder, heap, 0)  # what torch and the engine load at first use would count
    found = _one(row, folder, heap, steps)
    shutdown()
    return found


def _one(row: Row, folder: str, heap: ctypes.CDLL, steps: int) -> dict[str, Any]:
    gc.collect()
    before = heap.heap_events_live()
    engine, *_ = initialize(model=make_model(row.model), config=row.settings(folder))
    # Ranks that share a batch are given the same samples.
    generator = torch.Generator().manual_seed(1 + engine.data_rank)
    batch = inputs_of(row.model, row.micro_batch, generator)

    def step() -> float:
        began = time.perf_counter()
        engine.train_batch(repeat(batch))
        return time.perf_counter() - began

    for _ in range(2):
        step()
    rest = heap.heap_events_live() - before
    heap.heap_events_reset()
    step()
    peak = heap.heap_events_peak() - before
    times = [step() for _ in range(steps)]
    report = engine.memory_report()
    engine.destroy()
    states = {key: sizes for key, sizes in report.items() if key not in ("total", "measured")}
    return {"peak": peak, "rest": rest, "seconds": times, "states": states}


def _library() -> Path:
    """Return the compiled ``heap_events.c``."""
    source, library = Path(__file__).with_name("heap_events.c"), Path(tempfile.mkdtemp()) / "heap_events.so"
    subprocess.run([os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def main() -> None:
    """Measure what is not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the figures")
    parser.add_argument("--only", default="", help="measure rows whose name has this text")
    parser.add_argument("--steps", type=int, default=5, help="that are timed")
    given = parser.parse_args()
    if "heap_events" not in os.environ.get("LD_PRELOAD", ""):
        # A library can be preloaded when a process begins only.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": str(_library())})
    done = json.loads(given.out.read_text()) if given.out.is_file() else {}
    wanted = [row for row in rows() if given.only in row.name and row.name not in done]
    for number, row in enumerate(wanted, 1):
        try:
            with tempfile.TemporaryDirectory() as folder:
                by_rank = launch(measure, row.ranks, row.name, folder, given.steps)
        except RuntimeError as error:
            done[row.name] = {"error": str(error).splitlines()[-1]}
        else:
            most = max(by_rank, key=lambda rank: rank["peak"])
            slowest = [max(times) for times in zip(*(rank["seconds"] for rank in by_rank), strict=True)]
            done[row.name] = {**most, "seconds": statistics.median(slowest), "all": slowest, "peaks": [
                rank["peak"] for rank in by_rank
            ]}  # fmt: skip
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(done, indent=1) + "\n")
        shown = done[row.name].get("error") or f"{done[row.name]['peak'] / 1e6:.1f} MB"
        print(f"[{number}/{len(wanted)}] {row.name}: {shown}", flush=True)


if __name__ == "__main__":
    main()
