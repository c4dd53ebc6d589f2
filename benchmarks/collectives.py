"""Collectives of gloo, mpi and memory beside each other, on the ranks of one machine:

    python benchmarks/collectives.py --ranks 2 --rounds 30

All are measured in the same processes, in turns, round by round, so that a machine whose speed drifts is the same to
all. A time is that of the slowest rank, from a barrier on. The figures go to a JSON file and a page.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from bench import ROOT, commit, machine, positive
from page import link
from ranks import mpiexec, variables
from zeromesh.comm import local
from zeromesh.comm.collectives import Group
from zeromesh.comm.environment import init_distributed
from zeromesh.comm.mpi import backend as mpi
from zeromesh.comm.traffic import Traffic

CPU = torch.device("cpu")
OWN, OURS = "torch's call", "ZeroMesh's `Group`"
GLOO, MPI, MEMORY = "gloo", "mpi", "memory"
Table = dict[tuple[str, str, str], Callable[[], Any]]
"""By collective, backend and who makes the call."""


def table(group: Any, size: int) -> Table:
    """What is measured with full buffers of ``size`` bytes of fp32; each call has buffers that are touched before."""
    ranks = dist.get_world_size()
    full, other = torch.ones(size // 4), torch.ones(size // 4)
    part, total = torch.ones(size // 4 // ranks), torch.ones(size // 4 // ranks)
    found: Table = {}
    memory = local.LocalGroup.of(local.transport(required=True), group)
    carriers = {GLOO: None, MPI: mpi.group_of(group), MEMORY: memory}
    ours = {name: Group("world", group, CPU, Traffic(), carrier=carrier) for name, carrier in carriers.items()}
    for backend, point in ours.items():
        received = torch.ones(point.receive_elements(part.numel()))
        found |= {
            ("all-gather", backend, OURS): lambda p=point: p.all_gather(full, part, 3).wait(),
            ("reduce-scatter", backend, OURS): lambda p=point, r=received: p.reduce_scatter(
                other, r, total, False, 5
            ).wait(),
        }
    return found | {
        ("all-gather", GLOO, OWN): lambda: dist.all_gather_into_tensor(full, part),
        ("reduce-scatter", GLOO, OWN): lambda: dist.reduce_scatter_tensor(total, other),
        ("all-to-all", GLOO, OWN): lambda: dist.all_to_all_single(full, other),
        ("all-reduce", GLOO, OWN): lambda: dist.all_reduce(full.fill_(1)),
    }


def measure(sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """On every rank: one row for each size, collective, backend and caller, with milliseconds of each round."""
    init_distributed("mpi")
    rows = []
    for size in sizes:
        calls = table(dist.group.WORLD, size)
        times: dict[tuple[str, str, str], list[float]] = {name: [] for name in calls}
        repeat = 1 if size > 1 << 20 else 10
        for index in range(rounds * repeat + 2):
            for name, call in calls.items():
                dist.barrier()
                start = time.perf_counter()
                call()
                if index >= 2:
                    times[name].append(1e3 * (time.perf_counter() - start))
        for (collective, backend, caller), own in times.items():
            slowest = torch.tensor(own, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            row = {"size": size, "collective": collective, "backend": backend, "caller": caller}
            rows.append({**row, "ms": slowest.tolist()})
    dist.barrier()
    dist.destroy_process_group()
    return rows


def page(result: dict[str, Any]) -> str:
    """The page of a result."""
    lines = [
        f"# Collectives of gloo, mpi and memory, {result['date']}",
        "",
        f"{result['ranks']} ranks on {result['machine']}; torch {result['torch']}, {result['mpi']}; commit "
        f"{result['commit']}. The tables have milliseconds of the slowest rank: least, median and most of "
        f"{result['rounds']} rounds, in which all collectives take turns. The size is that of the full fp32 buffer. "
        "`Group` is the class that the engine uses; over memory it copies messages out of the other rank's memory, as "
        "it does by default between ranks of one machine.",
        "Made by `python benchmarks/collectives.py`.",
    ]  # fmt: skip
    for size in sorted({row["size"] for row in result["rows"]}, reverse=True):
        rows = {(r["collective"], r["backend"], r["caller"]): r["ms"] for r in result["rows"] if r["size"] == size}
        lines += ["", f"## {_bytes(size)}", "", "| | gloo, ms | mpi, ms | memory, ms |", "|---|---|---|---|"]
        for collective, caller in dict.fromkeys((name, caller) for name, _, caller in rows):
            cells = (_spread(rows.get((collective, backend, caller))) for backend in (GLOO, MPI, MEMORY))
            lines.append(f"| {collective}, {caller} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _bytes(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size} bytes"


def _spread(times: list[float] | None) -> str:
    if times is None:
        return "-"
    return " / ".join(f"{value:.3g}" for value in (min(times), median(times), max(times)))


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive, default=2, help="processes of this machine")
    parser.add_argument("--rounds", type=positive, default=30)
    parser.add_argument("--sizes", type=positive, nargs="+", default=[64 << 20, 1 << 10], help="bytes of a full buffer")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder for page and figures")
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.figures is not None:
        rows = measure(arguments.sizes, arguments.rounds)
        if mpi.rank_and_size()[0] == 0:
            arguments.figures.write_text(json.dumps(rows))
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        ours = ["--rounds", str(arguments.rounds), "--sizes", *map(str, arguments.sizes), "--figures", str(figures)]
        threads = {"OMP_NUM_THREADS": variables(arguments.ranks, 0, 0)["OMP_NUM_THREADS"], "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(
            [mpiexec(), "-n", str(arguments.ranks), sys.executable, "-W", "ignore::FutureWarning", __file__, *ours],
            env=os.environ | threads, check=True,
        )  # fmt: skip
        rows = json.loads(figures.read_text())
    from importlib.metadata import version

    result = {
        "date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine(), "ranks": arguments.ranks,
        "rounds": arguments.rounds, "torch": torch.__version__, "mpi": f"mpi4py {version('mpi4py')}", "rows": rows,
    }  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{result['date']}-collectives.json"
    path.write_text(json.dumps(result) + "\n")
    target = path.with_suffix(".md")
    target.write_text(page(result))
    link(target, f"collectives of gloo, mpi and memory; {machine()}.")
    print(page(result))


if __name__ == "__main__":
    main()
