"""What ``links.py`` compares over two hosts: rows of one table, and what a rank measures of one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from cases import Case, make_batch, make_model
from hosts import sent_by_this_host
from variants import Step, ddp, fsdp2, zeromesh
from zeromesh.comm.message_formats import BLOCK

CASE = Case(batch=1, sequence=16, bf16=False, hidden=128, layers=8, vocabulary=256, warmup=1)
"""So small that a step takes seconds at 10 Mbit/s, with so many blocks that the two that stay in slots are few."""

HOSTS, RANKS = 2, 2


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        family: ZeroMesh or torch.
        make: as of ``variants.Variant``.
        link: elements over the link per step and direction that the formulas say, for each parameter; None where they
            say nothing.
        tolerance: largest relative difference of a step's loss from the first row's; only the order of sums differs, if
            nothing is rounded.
    """

    family: str
    make: Callable[..., tuple[Step, Any]]
    link: float | None
    tolerance: float = 1e-3


FLAT = {"communication": {"hierarchical": False}}
HYBRID = {"mesh": {"replicate": HOSTS, "data": RANKS}}
IN_8_BITS = {"communication": {"across_nodes_gather": "8bit", "across_nodes_reduce": "8bit"}}

ROWS: dict[str, Row] = {
    "DDP": Row("torch", partial(ddp, zero=False), None),
    "FSDP2": Row("torch", partial(fsdp2, reshard=True), None),
    "HSDP": Row("torch", partial(fsdp2, reshard=True, replicas=HOSTS), None),
    **{
        f"ZeroMesh {stage}, flat": Row("ZeroMesh", partial(zeromesh, stage=stage, further=FLAT), link)
        for stage, link in enumerate((2, 2, 2, 3))
    },
    **{
        f"ZeroMesh {stage}, hybrid": Row("ZeroMesh", partial(zeromesh, stage=stage, further=HYBRID), 1)
        for stage in (1, 3)
    },
    **{
        f"ZeroMesh {stage}, hierarchical": Row("ZeroMesh", partial(zeromesh, stage=stage), link)
        for stage, link in {0: 1, 1: 1, 3: 1.5}.items()
    },
    "ZeroMesh 3, hierarchical, 8 bits": Row(
        "ZeroMesh", partial(zeromesh, stage=3, further=IN_8_BITS), 1.5 * (1 + 4 / BLOCK) / 4, 0.02
    ),
}


class Figures(TypedDict):
    """Of one rank: seconds per step, bytes that its host sent over the link per step, and the losses of all steps."""

    seconds: float
    sent: float
    losses: list[float]


def measure(name: str, steps: int) -> Figures:
    """Train on this rank."""
    step, engine = ROWS[name].make(CASE, make_model(CASE), torch.device("cpu"))
    tokens = make_batch(CASE, dist.get_rank())
    losses = [step(tokens).detach() for _ in range(CASE.warmup)]
    dist.barrier()
    sent, began = sent_by_this_host(), time.perf_counter()
    dist.barrier()
    losses += [step(tokens).detach() for _ in range(steps)]
    dist.barrier()
    figures = Figures(
        seconds=(time.perf_counter() - began) / steps,
        sent=(sent_by_this_host() - sent) / steps,
        losses=[loss.item() for loss in losses],
    )
    dist.barrier()
    if engine is not None:
        engine.destroy()
    return figures
