"""One rank of one variant: ``python worker.py JOB`` with torchrun's variables, or as a rank of ``mpiexec``.

``JOB`` is the name of a JSON file; what it holds is said at ``Job``. Rank 0 writes what it measured, ``Figures``, to
the file that the job names. All variants are measured so, whichever environment they need.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypedDict

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import products
from cases import CASES, batch_of, make_model
from heap import Heap, Peak
from variants import VARIANTS
from wire import sent_by_this_process
from zeromesh.comm.environment import device_for, init_distributed, shutdown
from zeromesh.comm.mpi import backend as mpi

LARGE = 65536
"""Bytes. Smaller blocks are mostly Python's and libraries' own, which differ between environments."""


class Job(TypedDict):
    """``watch`` is time, memory or spans; ``began`` is when the processes were started, in seconds since the epoch."""

    variant: str
    case: str
    watch: str
    backend: str | None
    steps: int
    began: float
    out: str


class Figures(TypedDict):
    """Of rank 0.

    Attributes:
        times: seconds of each step after the warm-up.
        cpu: seconds of processor time per step.
        wire: bytes that a step sends, the mean over ranks; None where they do not go over TCP.
        losses: of every step, those of the warm-up too; the mean over ranks.
        first: seconds from the start of the processes to the end of the first step.
        peak: bytes of memory at the most; None unless watched.
        spans: a ``Breakdown``; None unless watched.
        versions: of Python and packages.
        device: of rank 0.
        replaced: whether bf16 is multiplied in fp32; see ``products.py``.
    """

    times: list[float]
    cpu: float
    wire: float | None
    losses: list[float]
    first: float
    peak: int | None
    spans: dict[str, Any] | None
    versions: dict[str, str]
    device: str
    replaced: bool


@contextmanager
def watched(device: torch.device, watch: bool) -> Iterator[Peak]:
    """The most memory in use while the context lasts, beyond what was in use before; 0 unless ``watch``."""
    peak = Peak()
    if not watch:
        yield peak
    elif device.type == "cpu":
        heap = Heap(LARGE)
        before = heap.live()
        with heap.watch() as found:
            yield peak
        peak.bytes = found.bytes - before
    else:
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        yield peak
        peak.bytes = torch.accelerator.max_memory_allocated() - before


def mean(value: float, device: torch.device) -> float:
    """Over the ranks."""
    total = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def versions() -> dict[str, str]:
    """Of what the figures depend on, as far as it is installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("deepspeed", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def measure(job: Job) -> Figures:
    """Train, and watch."""
    environment = init_distributed(job["backend"])
    case = CASES[job["case"]]
    backend = job["backend"] or dist.get_backend()
    device = device_for(environment, backend)
    replaced = case.bf16 and products.needed(device)
    if replaced:
        products.replace()
    variant = VARIANTS[job["variant"]]
    tokens = batch_of(case, variant.whole, environment.rank, environment.world_size).to(device)
    times: list[float] = []
    losses: list[torch.Tensor] = []
    timer = None
    with watched(device, job["watch"] == "memory" and environment.rank == 0) as peak:
        step, engine = variant.make(case, make_model(case), device)
        if job["watch"] == "spans":
            from zeromesh.engine.observe.breakdown import Timer

            engine.observer.spans.timed = True
            timer = Timer(engine.observer.spans)
        for index in range(case.warmup + job["steps"]):
            if index == case.warmup:
                sent, cpu = sent_by_this_process(), time.process_time()
                dist.barrier()
                if timer is not None:
                    timer.begin()
            start = time.perf_counter()
            losses.append(step(tokens).detach())
            if device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - start)
            if index == 0:
                first = time.time() - job["began"]
        spans = None if timer is None else asdict(timer.take(job["steps"]))
        cpu = (time.process_time() - cpu) / job["steps"]
        dist.barrier()
        wire = mean((sent_by_this_process() - sent) / job["steps"], device)
    figures = Figures(
        times=times[case.warmup :], cpu=cpu, wire=wire if backend == "gloo" else None,
        losses=[mean(loss.item(), device) for loss in losses], first=first,
        peak=peak.bytes if job["watch"] == "memory" else None, spans=spans, versions=versions(), device=str(device),
        replaced=replaced,
    )  # fmt: skip
    dist.barrier()
    shutdown()
    return figures


if __name__ == "__main__":
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    rank = mpi.rank_and_size()[0] if job["backend"] == "mpi" else int(os.environ.get("RANK", "0"))
    figures = measure(job)
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(figures))
