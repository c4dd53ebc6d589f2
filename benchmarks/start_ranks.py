"""Seconds until forked ranks can train a tiny model: ``python benchmarks/start_ranks.py --ranks 2 4 8 16 32``.

Each start forks ranks from a process that has imported everything, and ends when the last one has its model ready: a
process group over gloo, then DDP, FSDP2 or ``zeromesh.initialize``. The ways take turns, so that other programs of the
machine slow all of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zeromesh
import zeromesh.build  # else each rank would import it
from ranks import free_port, variables

BLOCKS, WIDTH = 4, 16


def tiny() -> nn.Sequential:
    """Return a model whose start costs next to nothing."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))


def ddp(model: nn.Module) -> object:
    """Start torch's replicated training."""
    dist.init_process_group("gloo")
    ready = DistributedDataParallel(model)
    return ready, torch.optim.AdamW(ready.parameters(), lr=1e-3)


def fsdp2(model: nn.Sequential) -> object:
    """Start torch's sharded training, a unit for each block."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def engine(model: nn.Module, stage: int) -> object:
    """Start ours."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    return zeromesh.initialize(model=model, config=config)


WAYS: dict[str, Any] = {
    "DDP": ddp,
    "ZeroMesh, stage 0": lambda model: engine(model, 0),
    "FSDP2": fsdp2,
    "ZeroMesh, stage 3": lambda model: engine(model, 3),
}
BESIDE = {"ZeroMesh, stage 0": "DDP", "ZeroMesh, stage 3": "FSDP2"}


def rank_main(way: str, environment: dict[str, str], ready: Any, leave: Any) -> None:
    """Run as a rank: start, say when that was done, and stay until all have."""
    os.environ |= environment
    torch.set_num_threads(1)
    model = tiny()
    cpu = time.process_time()
    started = WAYS[way](model)
    ready.put((time.monotonic(), time.process_time() - cpu))
    leave.wait()
    del started
    os._exit(0)  # how long a way takes to end is not compared


def start(way: str, ranks: int, limit: float) -> tuple[float, float]:
    """Return the seconds until the last rank is ready, and the mean of their processor seconds."""
    context = multiprocessing.get_context("fork")
    ready, leave, port = context.Queue(), context.Event(), free_port()
    processes = [
        context.Process(target=rank_main, args=(way, variables(ranks, rank, port), ready, leave), daemon=True)
        for rank in range(ranks)
    ]
    began = time.monotonic()
    for process in processes:
        process.start()
    times = [ready.get(timeout=limit) for _ in processes]
    leave.set()
    for process in processes:
        process.join(limit)
    return max(at for at, _ in times) - began, statistics.mean(cpu for _, cpu in times)


def main() -> None:
    """Print a table, and a line of JSON for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one start")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # What is imported or built with the first use belongs to no start.
    torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    for way in WAYS:
        start(way, 1, options.limit)
    for ranks in options.ranks:
        taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way, rounds in taken.items():
                rounds.append(start(way, ranks, options.limit))
        medians = {way: statistics.median(seconds for seconds, _ in rounds) for way, rounds in taken.items()}
        for way, rounds in taken.items():
            seconds, cpu = zip(*rounds, strict=True)
            beside = medians[BESIDE[way]] if way in BESIDE else medians[way]
            print(
                f"{ranks:3} ranks  {way:18} {medians[way]:6.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), "
                f"processor {statistics.median(cpu):.3f} s a rank, {medians[way] / beside:.2f} x",
                flush=True,
            )
        print(json.dumps({"ranks": ranks, "seconds": medians}), flush=True)


if __name__ == "__main__":
    main()
