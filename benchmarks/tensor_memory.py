"""What each rank holds as layers are split over 1, 2 and 4 ranks:

    python benchmarks/tensor_memory.py --case compute-bf16

The model of a case of ``cases.py`` is trained for some updates with ``mesh.tensor`` as large as there are ranks, on the
same samples. Beside what the engine counts of its own buffers stands what malloc has given out, in blocks of 64 KiB and
more, and what the kernel has mapped, both beyond what there was before the model. Shown is the rank that has the most.
The figures go to a JSON file and a page.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import products
from bench import ROOT, commit, free_name, machine, positive
from cases import CASES, Case, make_batch, make_model
from heap import Heap
from page import lines_of, link
from variants import configuration, engine_step
from worker import LARGE
from zeromesh import initialize
from zeromesh.apps.launch.launch import launch
from zeromesh.base.machine import live_bytes
from zeromesh.comm.environment import init_distributed, shutdown

SPLIT = ("parameter", "gradient", "optimizer")
LINES = {
    "parameter": "parameters for computation", "gradient": "gradients", "optimizer": "optimizer: masters and moments",
    "counted": "**these three, as the engine counts**", "heap": "**live heap after the updates**",
    "resident": "resident memory after the updates", "peak": "live heap at the peak of an update",
}  # fmt: skip
CPU = torch.device("cpu")


def measure(name: str, sequence: bool, updates: int) -> dict[str, int]:
    """On one rank: bytes, by the names of ``LINES``."""
    environment = init_distributed("gloo")
    if CASES[name].bf16 and products.needed(CPU):
        products.replace()
    further = {"mesh": {"tensor": environment.world_size}, "tensor_parallel": {"sequence": sequence}}

    def start(case: Case) -> tuple[Callable[[], Any], Any]:
        tokens = make_batch(case, 0)
        engine, *_ = initialize(model=make_model(case), config=configuration(case, 1) | further)
        step = engine_step(engine)
        for _ in range(updates):
            step(tokens)
        return lambda: step(tokens), engine

    start(CASES["tiny-bf16"])[1].destroy()  # so that what is loaded at first use is there before
    gc.collect()
    heap = Heap(LARGE)
    before, resident = heap.live(), live_bytes(CPU)
    step, engine = start(CASES[name])
    report = engine.memory_report()
    found = {state: sum(report[state].values()) for state in SPLIT}
    found |= {"counted": sum(found.values()), "heap": heap.live() - before, "resident": live_bytes(CPU) - resident}
    with heap.watch() as peak:
        step()
    engine.destroy()
    shutdown()
    return found | {"peak": peak.bytes - before}


def table(sizes: dict[str, dict[str, int]]) -> str:
    """A line per state; by tensor size its bytes, and the part of what one rank has."""
    head = ["MB on a rank", *(f"tensor {size}" for size in sizes)]
    lines = [
        [label, *(f"{of[name] / 1e6:.1f} ({of[name] / sizes['1'][name]:.3f})" for of in sizes.values())]
        for name, label in LINES.items()
        if sizes["1"][name]
    ]
    return lines_of([head, *lines])


def page(result: dict[str, Any]) -> str:
    """The page of a result."""
    settings = result["settings"]
    parts = [
        f"# Memory per rank of tensor parallelism, {result['date']}",
        f"Commit {result['commit']}; {result['machine']}; torch {result['torch']}. Made by\n"
        f"`python benchmarks/tensor_memory.py`; the figures are in [{result['name']}.json]({result['name']}.json).",
        f"{result['parameters'] / 1e6:.1f} M parameters ({settings['layers']} blocks of width {settings['hidden']}, "
        f"vocabulary of {settings['vocabulary']}), {settings['batch']} x {settings['sequence']} tokens, "
        f"{'bf16' if settings['bf16'] else 'fp32'}, AdamW.\n"
        "The number in brackets is the share of the memory of one rank alone.",
        "- *As the engine counts*: the largest value of `memory_report`. Gradients have memory only during an update.\n"
        "- *Live heap* is the memory that malloc has handed out, in blocks of at least 64 KiB, and *resident* the\n"
        "  memory that the kernel has mapped; both without the memory that was used before the model was built.\n"
        "- Each rank keeps all norms. Without sequence parallelism, each rank also keeps all activations between split "
        "layers.",
    ]
    for title, key in (("Without sequence parallelism", "whole"), ("With sequence parallelism", "sequence")):
        parts += [f"## {title}", table(result[key])]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Measure each size in processes of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), default="compute-bf16", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--sizes", type=positive, nargs="+", default=[1, 2, 4], help="of the tensor axis; 1 is first")
    parser.add_argument("--updates", type=positive, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder for page and figures")
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.figures is not None:
        (size,) = given.sizes
        ways = (False, True) if size > 1 else (False,)  # one rank runs in this process, and has nothing to spread
        found = [launch(measure, size, given.case, sequence, given.updates) for sequence in ways]
        given.figures.write_text(json.dumps({"whole": found[0], "sequence": found[-1]}))
        return
    date, case = time.strftime("%Y-%m-%d"), CASES[given.case]
    path = free_name(given.out, f"{date}-tensor-memory")
    result: dict[str, Any] = {
        "date": date, "name": path.stem, "commit": commit(), "machine": machine(), "torch": torch.__version__,
        "settings": vars(case), "parameters": sum(p.numel() for p in make_model(case).parameters()),
        "whole": {}, "sequence": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        for size in dict.fromkeys([1, *given.sizes]):
            options = ["--sizes", str(size), "--case", given.case, "--updates", str(given.updates)]
            subprocess.run([sys.executable, __file__, *options, "--figures", figures], check=True)
            for key, ranks in json.loads(figures.read_text()).items():
                result[key][str(size)] = {name: max(rank[name] for rank in ranks) for name in LINES}
    given.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    target = path.with_suffix(".md")
    target.write_text(page(result))
    link(target, f"memory per rank of tensor parallelism, {given.case}; {machine()}.")
    print(page(result))


if __name__ == "__main__":
    main()
