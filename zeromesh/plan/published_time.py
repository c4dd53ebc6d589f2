"""Predictions of step times for published rows, with at most two constants of a GPU that are fitted on half of a source.

The constants are the share of a device's operations that large products reach, and the share of the links between
nodes that collectives reach. ``CONSTANTS`` has them by source and GPU. Rule of the fit, by ``fitting.py``: rows whose
identifier has an even SHA-256 decide; the constants are those with the least mean square of the logarithm of predicted
over measured time. The other half is predicted.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from zeromesh.model.placement import ROWS
from zeromesh.plan.cost import Recompute
from zeromesh.plan.durations import Habits
from zeromesh.plan.layout import ParallelLayout
from zeromesh.plan.machine import Machine
from zeromesh.plan.presets import cluster
from zeromesh.plan.published import Outcome, PublishedRow, UnjudgedError
from zeromesh.plan.published_shapes import completed
from zeromesh.plan.shape import TransformerCost, TransformerShape
from zeromesh.plan.time import StepTime, time_of


class Constants(NamedTuple):
    """The fitted constants of a GPU in a source."""

    products: float  # share of the operations that large products reach
    links: float  # share of the bandwidth between nodes that collectives reach


@dataclass(frozen=True)
class Practice:
    """Facts of a source's framework that its rows do not repeat."""

    habits: Habits = Habits()
    fused_attention: bool = True
    wire: int = 2  # bytes of an element of a gradient that is sent
    row: int | None = None  # ZeRO number that its states behave as; None: as the row says
    chunks: int = 1  # the most stages of a pipeline rank where the source interleaves without saying how many
    counts_recompute: bool = False  # operations that it reports are those that were executed
    causal: float = 1.0  # share of attention's products that it counts
    seconds: tuple[str, ...] = ()  # fields of measured times
    changes: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


# All of Megatron's pipelines send in turn with computation, and each of the tensor ranks sends a part (2021b).
MEGATRON = Habits(
    dtype="fp16", reduces_early=False, publishes_early=False, messages_block=True, messages_scattered=True,
    sums_once=True,
)  # fmt: skip
CORE = Habits(joins_hidden=0.6, sums_once=True)

PRACTICES: dict[str, Practice] = {
    "megatron2021": Practice(
        MEGATRON,
        fused_attention=False,
        chunks=2,
        counts_recompute=True,
        why="Megatron-LM of 2021: scores are written to memory; gradients are summed behind the backward",
    ),
    # Each parameter was gathered by itself over one ring.
    "megatron2021/ZeRO-3": Practice(
        Habits(dtype="fp16", rails=1),
        fused_attention=False,
        counts_recompute=True,
        why="DeepSpeed 0.3 of 2021: gathers over a single ring, which uses one link of a node",
    ),
    "megatron_a100_2020": Practice(MEGATRON, fused_attention=False),
    "korthikanti2022": Practice(MEGATRON, fused_attention=False, why="Megatron-LM of 2022"),
    "megatron_h100": Practice(CORE, wire=4, chunks=6, why="Megatron Core 0.8: sums of all axes beside computation"),
    "megascale2024": Practice(
        replace(MEGATRON, dtype="bf16"), wire=4, row=1, why="Megatron-LM of 2023 with FlashAttention-2"
    ),
    "megascale2024/MegaScale": Practice(
        replace(CORE, joins_hidden=0.9), wire=4, row=1, why="sums of all axes beside computation; parallel blocks"
    ),
    "llama3": Practice(CORE, row=1, chunks=8, causal=0.5),
    "torchtitan": Practice(Habits(selective=0.45), wire=4, why="FSDP2; every second product is computed again"),
    "mosaic": Practice(why="FSDP1 of torch 2 with FlashAttention"),
    "simumax_b200": Practice(replace(CORE, joins_hidden=0.0), wire=4),
    "nemo": Practice(replace(CORE, joins_hidden=0.8), chunks=1),
    "azure2022": Practice(Habits(dtype="fp16"), fused_attention=False, counts_recompute=True),
    "bigscience": Practice(replace(MEGATRON, reduces_early=True), fused_attention=False, counts_recompute=True),
    "stas00": Practice(causal=0.5),
    "nanotron_bench": Practice(wire=4),
}


def practice_of(row: PublishedRow) -> Practice:
    """Return the practice of a row's source, and of its framework or scheme where that differs."""
    for name in (row.layout.get("scheme"), row.layout.get("framework")):
        found = PRACTICES.get(f"{row.source}/{name}")
        if found is not None:
            return found
    return PRACTICES.get(row.source, Practice())


def in_fit(row: PublishedRow) -> bool:
    """Return true for rows that decide the constants of their source."""
    return hashlib.sha256(row.id.encode()).digest()[-1] % 2 == 0
