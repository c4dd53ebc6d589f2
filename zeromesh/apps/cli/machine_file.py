"""``zeromesh doctor --save``: the measured machine as a file for the planner."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from zeromesh.apps.plan.machine.measured import NodeFacts, measured_machine
from zeromesh.apps.plan.machine.speed import measure_speeds
from zeromesh.base.kernels.measure import best_seconds
from zeromesh.comm.collectives import Group
from zeromesh.shard.store.file_blocks import measure_bandwidth
from zeromesh.shard.store.nvme import MIB

DISK_BYTES = 32 * MIB
DISK_TRIES = 3
MESSAGE = 1 << 14  # elements of fp32
MESSAGES, MESSAGE_ROUNDS = 20, 3
PRODUCTS = 5  # beside each message; a few milliseconds each


def check_target(path: Path) -> None:
    """Raise ValueError if no file can be written there, before anything is measured."""
    if path.is_dir():
        raise ValueError(f"--save {path}: is a folder; give the path of the file to write, such as machine.json")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--save {path}: there is no folder {path.parent}; make it first")


def speeds_of_rank(world: Group | None, folder: Path | None, local_rank: int = 0) -> dict[str, Any]:
    """Return this rank's times; with ``folder``, those of its disk too. Collective if there is a group."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # Not the group's device: ranks that exchange data through gloo compute on accelerators all the same.
    count = torch.accelerator.device_count() if accelerator else 1
    device = torch.device(accelerator.type, local_rank % count) if accelerator else torch.device("cpu")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    disk = _disk(folder) if folder is not None else None

    def meet(value: float) -> float:
        if world is None:
            return value
        return float(world.exchange(torch.tensor([value], dtype=torch.float64)).max())

    meet(0.0)  # disks are measured while the other ranks wait
    speeds = measure_speeds(device, meet) | {"disk": disk, "load": load}
    busy = world is not None and device.type == "cpu"
    return speeds | {"busy_latency": _busy_latency(world, meet) if world is not None and busy else None}


def _busy_latency(world: Group, meet: Callable[[float], float]) -> float:
    """Return the seconds by which a small message makes a processor's computation longer."""
    # Where all cores compute, what sends and receives waits for its turn: many times what a message takes on idle ones.
    message, full = torch.zeros(MESSAGE), torch.zeros(world.size * MESSAGE)
    factors = (torch.randn(512, 384), torch.randn(384, 4096))
    # A processor without instructions for bf16 takes 50 times as long in bf16, and nobody trains in it there.
    pairs = ([factor.to(dtype) for factor in factors] for dtype in (torch.bfloat16, torch.float32))
    first, second = min(pairs, key=lambda pair: best_seconds(lambda: torch.mm(*pair), pair[0].device, tries=1))

    def seconds(sends: bool) -> float:
        meet(0.0)
        start = time.perf_counter()
        for _ in range(MESSAGES):
            pending = world.all_gather(full, message, 1) if sends else None
            for _ in range(PRODUCTS):
                torch.mm(first, second)
            if pending is not None:
                pending.wait()
        return (time.perf_counter() - start) / MESSAGES

    seconds(True)
    return max(0.0, median(seconds(True) - seconds(False) for _ in range(MESSAGE_ROUNDS)))


def save_machine(
    path: Path,
    nodes: Sequence[Mapping[str, Any]],
    node_of: Sequence[int],
    speeds: Sequence[Mapping[str, Any]],
    links: Mapping[str, Any] | None,
) -> list[str]:
    """Write the file, and return a line for each node that was busy, so that its speeds are too low.

    ``nodes`` are inventories; ``node_of`` and ``speeds`` have an entry for each rank.
    """
    facts = []
    for node, rank in zip(nodes, sorted(set(node_of)), strict=True):
        ranks = [rank_speeds for rank_speeds, where in zip(speeds, node_of, strict=True) if where == rank]
        have = node["memory"]
        memory = have["limit_bytes"] or have["total_bytes"]
        if memory is None:
            raise ValueError(f"the memory of {node['host']} is unknown on this system; write {path} by hand")
        read, write = next((rank_speeds["disk"] for rank_speeds in ranks if rank_speeds["disk"]), (0.0, 0.0))
        size = float(node["disk"]["free_bytes"] or 0) if read else 0.0
        bandwidth, cores = have["bandwidth_bytes_per_second"], node["processor"]["cores"]
        load = min(rank_speeds["load"] for rank_speeds in ranks)
        facts.append(NodeFacts(node["host"], float(memory), bandwidth, cores, (read, write, size), ranks, load))
    measured_machine(facts, links).save(path)
    return [f"{node.host}: {node.load:.1f} processes wanted to compute" for node in facts if node.busy]


def _disk(folder: Path) -> tuple[float, float]:
    """Return bytes per second read and written, as offloaded states are; 0 where the folder cannot be used."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        results = [measure_bandwidth(folder, DISK_BYTES) for _ in range(DISK_TRIES)]
        return median(result.read for result in results), median(result.write for result in results)
    return 0.0, 0.0
