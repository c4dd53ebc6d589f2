"""A run as the planner sees it: its machine, and the cost of its model.

The machine is a file's, that of a known GPU, or what one process measures in a second.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from zeromesh.apps.plan.cost.cost_trace import TracedCost, sequence_of
from zeromesh.apps.plan.cost.passes import Inputs, Loss, TokenTiles, TraceOptions
from zeromesh.apps.plan.machine.cluster import Device, LinkSpeed, Machine, Node
from zeromesh.apps.plan.machine.presets import cluster, find_link
from zeromesh.base.kernels.measure import product_speed
from zeromesh.base.machine import MACHINE, devices, memory, memory_bandwidth, processor
from zeromesh.base.words import counted
from zeromesh.config.settings import Settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

USUAL_MEMORY = 16 * 2.0**30  # bytes of a host that does not tell its own

_log = logging.getLogger("zeromesh")


def cost_here(
    model: nn.Module | Callable[[], nn.Module], inputs: Inputs, loss: Loss | None, settings: Settings
) -> tuple[TracedCost, int]:
    """Return the cost of a run's model, and the length of its sequences; 1 where it has none.

    The model, or what makes it, is as before an engine changes it, on any device; see ``trace`` for inputs and loss.
    """
    kernels = "cuda" if torch.cuda.is_available() else "cpu"
    tables = settings.embedding_tables.modules
    precision = settings.precision
    options = TraceOptions(precision.compute, precision.autocast, kernels, tables=tables, tiles=tiles_of(settings))
    return TracedCost(model, inputs, options, loss), sequence_of(inputs)


def tiles_of(settings: Settings) -> TokenTiles:
    """Return the tiles over tokens that a configuration asks for."""
    tiling = settings.tiling
    return TokenTiles(tiling.mlp, tiling.modules, tiling.loss or settings.chunked_loss)


def machine_here(ranks: int, nodes: int) -> Machine:
    """Return the machine of a run with so many ranks on each node.

    Raises:
        ValueError: the file that ``MACHINE`` names is wrong, or its machine is too small.
    """
    if path := os.environ.get(MACHINE):
        return _part(Machine.load(path), ranks, nodes, path)
    if torch.cuda.is_available():
        try:
            usual = cluster(gpu=torch.cuda.get_device_name(), gpus=ranks, nodes=nodes)
        except ValueError as error:
            _log.warning("the planner does not know this GPU: %s", error)
        else:
            return with_host(usual)
    return _measured(ranks, nodes)


def with_host(machine: Machine) -> Machine:
    """Return a machine of tables with the memory and the cores of this host, which may be a part of a usual one."""
    cores = processor()["cores"]
    bandwidth = memory_bandwidth(cores)

    def here(node: Node) -> Node:
        return replace(node, host_memory=_free(node.host_memory), host_bandwidth=bandwidth, cores=cores)

    return replace(machine, nodes=tuple((here(node), count) for node, count in machine.nodes))


def _free(otherwise: float) -> float:
    """Return bytes of this host's memory that are free; where the system does not say it, ``otherwise``."""
    host = memory()
    return min((size for size in (host["available_bytes"], host["limit_bytes"]) if size is not None), default=otherwise)


def _part(machine: Machine, ranks: int, nodes: int, path: str) -> Machine:
    """Return the part of a machine that has one device for each rank."""
    if machine.devices == ranks * nodes:
        return machine
    for node, count in machine.nodes:
        if node.devices >= ranks and count >= nodes:
            return replace(machine, nodes=((replace(node, devices=ranks), nodes),))
    raise ValueError(
        f"{MACHINE} = {path!r} has {machine.devices} devices, too few for {ranks} ranks on {counted(nodes, 'node')}; "
        f"measure with as many, zeromesh doctor --ranks {ranks} --save FILE, or leave the variable out"
    )


def _measured(ranks: int, nodes: int) -> Machine:
    """Return a machine of what one process measures quickly; its links are those of ranks that share a host."""
    accelerator = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    cores = processor()["cores"]
    host_memory, bandwidth = _free(USUAL_MEMORY), memory_bandwidth(cores)
    flops = {name: product_speed(accelerator, dtype, 0.1) for name, dtype in DTYPES.items()}
    accelerators = devices()
    memory = float(accelerators[0]["memory_bytes"] or host_memory) if accelerators else host_memory / ranks
    copies = LinkSpeed(bandwidth / 4, 1e-4, shared=ranks)  # two copies of each message, through the host's memory
    to_host = LinkSpeed(bandwidth / 2, 1e-5, shared=ranks)
    name, speed = "this machine", bandwidth / (1 if accelerators else ranks)
    device = Device(name, memory, flops, speed, reserved=0.0, processor=not accelerators)
    node = Node(device, ranks, copies, to_host, host_memory, bandwidth, cores, name=name)
    return Machine(((node, nodes),), find_link("ethernet-10", ranks), name)
