"""Predictions of step times for published rows, with at most two constants of a GPU that are fitted on half of a source.

The constants are the share of a device's operations that large products reach, and the share of the links between
nodes that collectives reach. ``CONSTANTS`` has them by source and GPU. Rule of the fit, by ``fitting.py``: rows whose
identifier has an even SHA-256 decide; the constants are those with the least mean square of the logarithm of predicted
over measured time. The other half is predicted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from zeromesh.model.placement import ROWS
from zeromesh.plan.cost import Recompute
from zeromesh.plan.durations import Habits
from zeromesh.plan.layout import ParallelLayout
from zeromesh.plan.machine import Machine
from zeromesh.plan.presets import cluster
from zeromesh.plan.published import Outcome, PublishedRow, UnjudgedError
from zeromesh.plan.shape import TransformerCost, TransformerShape
from zeromesh.plan.time import StepTime, time_of


class Constants(NamedTuple):
    """The fitted constants of a GPU in a source; None: that of the preset."""

    products: float | None = None  # share of the operations that large products reach
    links: float | None = None  # share of the bandwidth between nodes that collectives reach
    memory: float | None = None  # share of the memory's bandwidth that kernels reach
    padding: float | None = None  # elements by which each dim of a product counts longer than it is


@dataclass(frozen=True)
class Practice:
    """Facts of a source's framework that its rows do not repeat."""

    habits: Habits = Habits()
    fused_attention: bool = True
    wire: int = 2  # bytes of an element of a gradient that is sent
    row: int | None = None  # ZeRO number that its states behave as; None: as the row says
    micro_batch: int = 0  # samples where the row does not say them; 0: all of a rank's at once, or one in a pipeline
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
CORE = Habits(joins_hidden=0.6, joins_hidden_back=1.0, sums_once=True)

PRACTICES: dict[str, Practice] = {
    "megatron2021": Practice(
        MEGATRON, fused_attention=False, counts_recompute=True,
        why="Megatron-LM of 2021: scores are written to memory; gradients are summed behind the backward",
    ),
    # Each parameter was gathered by itself over one ring.
    "megatron2021/ZeRO-3": Practice(
        Habits(dtype="fp16", rails=1, reduces_early=False), fused_attention=False, counts_recompute=True,
        why="DeepSpeed 0.3 of 2021: gathers over a single ring, which uses one link of a node",
    ),
    "megatron_a100_2020": Practice(MEGATRON, fused_attention=False),
    "korthikanti2022": Practice(replace(MEGATRON, joins_hidden_back=1.0), fused_attention=False, why="Megatron-LM of 2022"),
    "megatron_h100": Practice(CORE, wire=4, chunks=24, why="Megatron Core 0.8: sums of all axes beside computation"),
    "megascale2024": Practice(
        replace(MEGATRON, dtype="bf16", joins_hidden_back=1.0), wire=4, row=1, why="Megatron-LM of 2023 with FlashAttention-2"
    ),
    "megascale2024/MegaScale": Practice(
        replace(CORE, joins_hidden=0.9, fusion=0.35), wire=4, row=1, why="sums of all axes beside computation; parallel blocks"
    ),
    "llama3": Practice(CORE, row=1, chunks=8, causal=0.5),
    "torchtitan": Practice(Habits(selective=0.45), wire=4, why="FSDP2; every second product is computed again"),
    "mosaic": Practice(why="FSDP1 of torch 2 with FlashAttention"),
    "simumax_b200": Practice(replace(CORE, joins_hidden=0.0), wire=4),
    "nemo": Practice(replace(CORE, joins_hidden=0.8), chunks=1),
    "azure2022": Practice(Habits(dtype="fp16"), fused_attention=False, counts_recompute=True),
    "bigscience": Practice(
        replace(MEGATRON, reduces_early=True), fused_attention=False, counts_recompute=True
    ),
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


# Sizes of models that sources name without them: layers, hidden, heads. MosaicML's configurations of MPT (2023).
NAMED: dict[str, tuple[int, int, int]] = {
    "mpt-125m": (12, 768, 12),
    "mpt-350m": (24, 1024, 16),
    "mpt-760m": (24, 1536, 12),
    "mpt-1b": (24, 2048, 16),
    "mpt-3b": (32, 2560, 20),
}
WORDS = {"mpt": 50368, "gpt": 51200}  # vocabulary by a model's first word, padded as the frameworks do
ASPECT = 128  # width divided by layers of a GPT whose sizes nobody says (Kaplan et al., 2020: 30 to 200 cost little)


def completed(row: PublishedRow) -> PublishedRow:
    """Return the row with the sizes that its source leaves out: named ones, or the usual ones for its parameters."""
    model = dict(row.model)
    name = str(model["name"]).lower()
    model.setdefault("vocab", WORDS.get(name.split("-")[0].split(" ")[0]))
    if model.get("layers"):
        pass
    elif name in NAMED:
        model["layers"], model["hidden"], model["heads"] = NAMED[name]
    elif name.startswith("gpt ") and model.get("params"):
        # P = 12 l h^2 with h = ASPECT l; layers fill the pipeline.
        hidden = 512 * max(1, round((model["params"] * ASPECT / 12) ** (1 / 3) / 512))
        stages = int(row.layout.get("pp") or 1)
        layers = stages * max(1, round(model["params"] / (12 * hidden**2) / stages))
        model |= {"layers": layers, "hidden": hidden, "heads": hidden // 128}
    return replace(row, model=model)


def gpu_name(row: PublishedRow) -> str:
    """Return the GPU's name in a row without what is said in brackets."""
    return re.sub(r" *\(.*\)", "", str(row.hardware.get("gpu")))


def judged_time(row: PublishedRow) -> bool:
    """Return true for rows that may say the time of a step."""
    return "throughput" in row.kind.split("+")


def machine_of(row: PublishedRow, ranks: int, constants: Constants) -> Machine:
    """Return the machine of a row; raise UnjudgedError for hardware that no preset describes."""
    gpu = str(row.needs("hardware", "gpu"))
    short = re.sub("^DGX-", "", gpu_name(row))
    per_node = row.hardware.get("gpus_per_node")
    machine = None
    for name in (gpu, short, re.sub(r"-\d+GB$", "", short)):
        with suppress(ValueError):
            machine = cluster(name)
            break
    if machine is None:
        raise UnjudgedError(f"hardware.gpu is {gpu!r}, of which no preset says the speed")
    node = machine.nodes[0][0]
    devices = min(int(per_node), node.devices) if per_node else node.devices
    nodes = -(-ranks // devices)
    between = machine.between
    device = node.device
    if constants.products is not None:
        device = replace(device, product_efficiency=constants.products)
    if constants.memory is not None:
        device = replace(device, memory_efficiency=constants.memory)
    if constants.padding is not None:
        device = replace(device, product_padding=constants.padding)
    if constants.links is not None:
        between = replace(between, efficiency=constants.links)
    node = replace(node, device=device)
    return Machine(((replace(node, devices=devices), nodes),), between, machine.name)


class Setting(NamedTuple):
    """What a row is predicted with."""

    row: PublishedRow
    shape: TransformerShape
    layout: ParallelLayout
    practice: Practice
    habits: Habits


def setting_of(row: PublishedRow) -> Setting:
    """Return the setting of a row; raise UnjudgedError where it says too little."""
    row, practice = completed(row), practice_of(row)
    if "moe" in str(row.model) or int(row.layout.get("ep") or 1) > 1:
        raise UnjudgedError("models of experts have no formula here")
    shape, layout = row.shape, row.parallel
    shape = replace(shape, fused_attention=practice.fused_attention)
    if practice.row is not None and row.layout.get("zero"):
        states = replace(ROWS[practice.row], optimizer_tier=layout.row.optimizer_tier)
        layout = replace(layout, row=states)
    if practice.micro_batch and not (row.layout.get("micro_batch") or row.layout.get("micro_batches")):
        own = layout.micro_batch * layout.accumulation
        size = practice.micro_batch if own % practice.micro_batch == 0 else 1
        layout = replace(layout, micro_batch=size, accumulation=own // size)
    widths = replace(layout.widths, wire=practice.wire)
    chunks = layout.chunks
    if layout.pipeline > 1 and chunks == 1 and (practice.chunks > 1) and "interleave" not in row.layout:
        chunks = _chunks(shape.layers // layout.pipeline, practice.chunks)
    interleaves = chunks > 1 and layout.accumulation % layout.pipeline == 0
    layout = replace(
        layout, widths=widths, chunks=chunks if interleaves else 1,
        schedule="interleaved-1f1b" if interleaves else "1f1b",
    )  # fmt: skip
    habits = practice.habits
    precision = str(row.layout.get("precision") or "").lower()
    if "fp8" in precision or "float8" in precision:
        habits = replace(habits, dtype="fp8")
    if row.layout.get("async_tp"):
        habits = replace(habits, joins_hidden=0.7)
    return Setting(row, shape, layout, practice, habits)


def _chunks(blocks: int, most: int) -> int:
    return max(count for count in range(1, most + 1) if blocks % count == 0) if blocks else 1


def predicted(setting: Setting, constants: Constants) -> StepTime:
    """Return the time of a step of a row."""
    machine = machine_of(setting.row, setting.layout.ranks, constants)
    source = TransformerCost(setting.shape)
    return time_of(source, setting.row.sequence, setting.layout, machine, habits=setting.habits)


# Quantities, and their values from the seconds of a step.


def operations(setting: Setting, executed: bool = False) -> float:
    """Return the operations of a step as the source counts them: 6 P + 12 L h s for a token, or more if executed.

    With the recomputation of all blocks this is the formula of Narayanan et al., 2021: 96 B s l h^2 (1 + s/6h + V/16lh).
    """
    shape, layout, sequence = setting.shape, setting.layout, setting.row.sequence
    gates = 3 if shape.gated else 2
    matrices = shape.hidden * (2 * shape.query_width + 2 * shape.key_width + gates * shape.mlp_width)
    scores = setting.practice.causal * 2 * sequence * shape.query_width
    again = 1.0 if executed and layout.recompute is Recompute.BLOCKS else 0.0
    tokens = layout.samples * sequence
    return tokens * ((6 + 2 * again) * shape.layers * (matrices + scores) + 6 * shape.hidden * shape.vocabulary)


def quantity(setting: Setting, name: str, seconds: float) -> float:
    """Return a measured quantity's value for a step of ``seconds``."""
    ranks = setting.layout.ranks
    if name == "step_s":
        return seconds
    if name == "tokens_per_s_per_gpu":
        return setting.layout.samples * setting.row.sequence / seconds / ranks
    rate = operations(setting, setting.practice.counts_recompute) / seconds / ranks
    if name == "tflops_per_gpu":
        return rate / 1e12
    return 100 * rate / (float(setting.row.needs("hardware", "peak_tflops")) * 1e12)


TIMES = ("step_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_percent")
"""Measured quantities that say the time of a step; the first one that a row has is judged."""


def measured_seconds(setting: Setting) -> float:
    """Return the time of a step that the source measured."""
    name = measured_name(setting.row)
    value = float(setting.row.measured[name])
    return value if name == "step_s" else quantity(setting, name, 1.0) / value


def measured_name(row: PublishedRow) -> str:
    """Return the quantity of a row that is judged; raise UnjudgedError where it has none."""
    for name in TIMES:
        if isinstance(row.measured.get(name), int | float):
            return name
    raise UnjudgedError("the row has no time, rate or share of the peak")
