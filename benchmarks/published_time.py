"""Predictions of step times for published rows, with two constants of a GPU that are fitted on half of a source.

The constants are the share of a device's operations that large products reach, and one of the others of ``Constants``
in ``published_practices.py``, whose ``CONSTANTS`` has them by source and GPU. Rule of the fit, by ``published_fit.py``:
rows whose identifier has an even SHA-256 decide; the constants are those with the least mean square of the logarithm of
predicted over measured time. The other half is predicted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from published import Outcome, PublishedRow, UnjudgedError, said_parts
from published_practices import (
    ASPECT,
    CONSTANTS,
    DISPATCHERS,
    LLAMA_3,
    NAMED,
    OVERLAPPED,
    PRACTICES,
    WORDS,
    Constants,
    Practice,
)
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import Recompute
from zeromesh.apps.plan.cost.shape import TransformerCost, TransformerShape
from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.plan.machine.rates import Habits
from zeromesh.apps.plan.predict.durations import Durations
from zeromesh.apps.plan.predict.time import StepTime, time_of
from zeromesh.base.placement import ROWS

WITH_EXPERTS = ", experts"  # behind the GPU of mixtures' constants
LAYER = "layer_time"  # kind of rows that time one layer


def practice_of(row: PublishedRow) -> Practice:
    """Return the practice of a row's source, and of its framework or of sharded parameters where that differs."""
    for name in (row.layout.get("framework"), "sharded" if row.stage == 3 else None):
        found = PRACTICES.get(f"{row.source}/{name}")
        if found is not None:
            return found
    return PRACTICES.get(row.source, Practice())


def in_fit(row: PublishedRow) -> bool:
    """Return true for rows that decide the constants of their source."""
    return hashlib.sha256(row.id.encode()).digest()[-1] % 2 == 0


def completed(row: PublishedRow) -> PublishedRow:
    """Return the row with the sizes that its source leaves out: named ones, or the usual ones for its parameters."""
    model = dict(row.model)
    name = str(model["name"]).lower()
    model.setdefault("vocab", WORDS.get(name.split("-")[0].split(" ")[0]))
    if model.get("layers"):
        pass
    elif name in NAMED:
        model["layers"], model["hidden"], model["heads"] = NAMED[name]
    elif (llama := re.fullmatch(r"llama[ -]?3(?:\.1)?[_ -](\d+b)", name)) and llama[1] in LLAMA_3:
        sizes = dict(zip(("layers", "hidden", "heads", "ffn"), LLAMA_3[llama[1]], strict=True))
        model |= {**sizes, "kv_heads": 8, "vocab": 128256, "gated": True, "tied": False}
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


def group_of(row: PublishedRow) -> tuple[str, str]:
    """Return the source and the GPU of a row, whose rows have constants in common; mixtures have their own."""
    return row.source, gpu_name(row) + (WITH_EXPERTS if row.model.get("experts") else "")


def machine_of(row: PublishedRow, ranks: int, constants: Constants) -> Machine:
    """Return the machine of a row; raise UnjudgedError for hardware that no preset describes."""
    gpu = str(row.needs("hardware", "gpu"))
    short = re.sub("^DGX-", "", gpu_name(row))
    machine = None
    for name in (gpu, short, re.sub(r"-\d+Gi?B$", "", short).replace("Blackwell", "GB200")):
        with suppress(ValueError):
            machine = cluster(name, **practice_of(row).cluster)
            break
    if machine is None:
        raise UnjudgedError(f"hardware.gpu is {gpu!r}; no preset has its speed")
    node = machine.nodes[0][0]
    devices = min(int(row.hardware.get("gpus_per_node") or node.devices), node.devices)
    if devices < node.devices:  # a part of a node has a part of its host
        machine = cluster(machine.nodes[0][0].device.name, devices, **practice_of(row).cluster)
        node = machine.nodes[0][0]
    device = replace(
        node.device, product_efficiency=constants.products or node.device.product_efficiency,
        memory_efficiency=constants.memory or node.device.memory_efficiency,
    )  # fmt: skip
    between = replace(machine.between, efficiency=constants.links or machine.between.efficiency)
    host = node.host_bandwidth * (constants.host or 1.0)
    node = replace(node, device=device, devices=devices, host_bandwidth=host)
    return Machine(((node, -(-ranks // devices)),), between, machine.name)


class Setting(NamedTuple):
    """Shape, layout and habits with which a row is predicted."""

    row: PublishedRow
    shape: TransformerShape
    layout: ParallelLayout
    practice: Practice
    habits: Habits


def setting_of(row: PublishedRow) -> Setting:
    """Return the setting of a row; raise UnjudgedError where it says too little."""
    if row.kind == LAYER:  # a row of one layer needs neither a vocabulary nor a batch
        size = row.needs("layout", "micro_batch")
        row = replace(row, model={"vocab": 1, **row.model}, layout={"global_batch": size, **row.layout})
    row, practice = completed(row), practice_of(row)
    if "lora" in row.where.lower() or row.layout.get("lora"):
        raise UnjudgedError("the row lacks the matrices that LoRA adapts")
    row.refuse_unknown_experts()
    _refuse_unknown_batches(row)
    shape, layout = row.shape, row.parallel
    shape = replace(shape, fused_attention=practice.fused_attention, **practice.shape)
    if practice.row is not None and row.layout.get("zero"):
        states = replace(ROWS[practice.row], optimizer_tier=layout.row.optimizer_tier)
        layout = replace(layout, row=states)
    if "sequence_parallel" not in row.layout and practice.sequence and layout.tensor > 1:
        layout = replace(layout, sequence=True)
    keeps = practice.keeps and layout.pipeline > 1
    if keeps:
        layout = replace(layout, parameter_slots=shape.layers)
    chunks, blocks = layout.chunks, shape.layers // layout.pipeline
    if layout.pipeline > 1 and chunks == 1 and blocks and "interleave" not in row.layout:
        chunks = max(count for count in range(1, practice.chunks + 1) if blocks % count == 0)
    if chunks == 1 or layout.accumulation % layout.pipeline:
        chunks, schedule = 1, "1f1b"
    else:
        schedule = "interleaved-1f1b"
    layout = replace(layout, widths=replace(layout.widths, wire=practice.wire), chunks=chunks, schedule=schedule)
    return Setting(row, shape, layout, practice, _habits(row, practice.habits, keeps))


def _refuse_unknown_batches(row: PublishedRow) -> None:
    """Raise UnjudgedError for a row that lacks the number of micro-batches, or of the ranks that share experts."""
    said = row.layout
    if "accumulation not printed" in row.note or "tokens per step are not" in row.note:
        raise UnjudgedError("the row does not say the number of micro-batches")
    pipeline, batches = int(said.get("pp") or 1), ("global_batch", "local_batch", "batch_per_dp", "micro_batches")
    if pipeline > 1 and row.kind != LAYER and not any(said.get(name) for name in batches):
        raise UnjudgedError("the row does not say the number of micro-batches of its pipeline")
    if "EP column empty" in row.note:
        raise UnjudgedError("the row does not say the number of expert ranks")


def _habits(row: PublishedRow, habits: Habits, keeps: bool) -> Habits:
    """Return the habits of a practice, with what the row says of precision, compilation and overlap."""
    precision = str(row.layout.get("precision") or "").lower()
    if "fp4" in precision:
        raise UnjudgedError("no preset has the speed of 4-bit products")
    if "fp8" in precision or "float8" in precision:
        habits = replace(habits, dtype="fp8")
    if row.layout.get("async_tp"):
        habits = replace(habits, joins_hidden=0.7, joins_hidden_back=0.7)
    habits = _expert_habits(row, habits)
    if row.layout.get("compile"):
        # Chains of elementwise kernels become one, which reads and writes about half of the bytes.
        habits = replace(habits, fusion=0.5)
    return replace(habits, even_stages=True, sums_once=keeps or habits.sums_once)


def _expert_habits(row: PublishedRow, habits: Habits) -> Habits:
    """Return habits with what a row says of dispatch and routing."""
    dispatcher = str(row.layout.get("dispatcher") or "")
    if dispatcher:
        habits = replace(habits, copies=DISPATCHERS[dispatcher])
    if row.layout.get("overlap"):
        habits = replace(habits, exchanges_hidden=OVERLAPPED)
    if again := said_parts(row):
        habits = replace(habits, selective=sum(_share(row.shape, part) for part in again))
    if "real routing" in row.note:
        habits = replace(habits, uneven=Habits().uneven)
    return habits


def _share(shape: TransformerShape, part: str) -> float:
    """Return the part of a forward that the recomputation of a module takes, by its operations."""
    active = shape.matrices(True, active=True) if shape.experts else shape.matrices(False)
    gates = 3 if shape.gated else 2
    if part == "moe" and shape.experts:
        return gates * shape.hidden * (shape.chosen * shape.expert_width + shape.shared_width) / active
    if part.startswith("dense mlp"):
        dense = 1.0 if not shape.experts else shape.dense_layers / shape.all_layers
        return dense * gates * shape.hidden * shape.mlp_width / active
    if part == "mla_up_proj" and shape.latent is not None:
        return sum(columns * sums for columns, sums, split in shape.projections if split) / active
    return 0.02  # norms and activations, which memory bounds


def predicted(setting: Setting, constants: Constants) -> StepTime:
    """Return the time of a step of a row."""
    machine = machine_of(setting.row, setting.layout.ranks, constants)
    source = TransformerCost(setting.shape)
    habits = setting.habits if constants.step is None else replace(setting.habits, between=constants.step)
    if constants.block is not None:
        sparse = sum(map(setting.shape.is_sparse, range(setting.shape.all_layers)))
        habits = replace(habits, overhead=constants.block * sparse / setting.layout.pipeline)
    return time_of(source, setting.row.sequence, setting.layout, machine, habits=habits)


def seconds_of(setting: Setting, constants: Constants) -> float:
    """Return the predicted seconds of a row's step, or of its layer."""
    if setting.row.kind == LAYER:
        return sum(layer_seconds(setting, constants))
    return predicted(setting, constants).seconds


# Quantities, and their values from the seconds of a step.


def operations(setting: Setting, executed: bool = False) -> float:
    """Return the operations of a step as the source counts them: 6 P + 12 L h s for a token, or more if executed.

    With recomputed blocks this is the formula of Narayanan et al., 2021: 96 B s l h^2 (1 + s/6h + V/16lh).
    """
    shape, layout, sequence = setting.shape, setting.layout, setting.row.sequence
    matrices = sum(shape.matrices(shape.is_sparse(layer), active=True) for layer in range(shape.all_layers))
    scores = shape.all_layers * setting.practice.causal * sequence * (shape.query_width + shape.result_width)
    again = 1.0 if executed and layout.recompute is Recompute.BLOCKS else 0.0
    head = 6 * (1 + shape.extra_heads) * shape.hidden * shape.vocabulary
    return layout.samples * sequence * ((6 + 2 * again) * (matrices + scores) + head)


def value_of(setting: Setting, name: str, seconds: float) -> float:
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
    """Return the time of a step, or of a layer, that the source measured."""
    if setting.row.kind == LAYER:
        return (float(setting.row.measured["forward_ms"]) + float(setting.row.measured["backward_ms"])) / 1e3
    name = measured_name(setting.row)
    value = float(setting.row.measured[name])
    return value if name == "step_s" else value_of(setting, name, 1.0) / value


def measured_name(row: PublishedRow) -> str:
    """Return the quantity of a row that is judged; "" where it measures no step."""
    if "throughput" not in row.kind.split("+"):
        return ""
    return next((name for name in TIMES if isinstance(row.measured.get(name), int | float)), "")


def constants_of(row: PublishedRow) -> Constants:
    """Return the constants of a row's source and GPU.

    Where none were fitted for them, large products reach the mean share of the source's other GPUs, or of the GPU in
    other sources; without either, that of the preset.
    """
    source, gpu = group_of(row)
    known = CONSTANTS.get((source, gpu))
    if known is not None:
        return known
    for place, name in enumerate((source, gpu)):
        others = [one for key, one in CONSTANTS.items() if key[place] == name]
        others = [one for one in others if one.products and (one.block is not None) is gpu.endswith(WITH_EXPERTS)]
        if others:
            blocks = [one.block for one in others if one.block is not None]
            products = median(one.products for one in others if one.products)
            return Constants(products=products, block=median(blocks) if blocks else None)
    return Constants()


# Judgement.


def judge(rows: Iterable[PublishedRow]) -> list[Outcome]:
    """Return an outcome for each row that says a time, and for what follows from it by arithmetic."""
    found: list[Outcome] = []
    for row in rows:
        if row.kind == LAYER:
            found += _layer_outcomes(row)
        elif measured_name(row):
            found += _step_outcomes(row)
        if row.source == "megatron2021":
            found += _parameter_outcomes(row)
    return found


def _step_outcomes(row: PublishedRow) -> Iterator[Outcome]:
    name = measured_name(row)
    try:
        setting = setting_of(row)
        seconds = predicted(setting, constants_of(row)).seconds
        outcome = row.outcome(name, value_of(setting, name, seconds), _note(row, setting))
        yield outcome._replace(fitted=group_of(row) in CONSTANTS and in_fit(row))
        yield from _arithmetic(setting, name)
    except ValueError as error:
        yield row.outcome(name, None, str(error))


def _note(row: PublishedRow, setting: Setting) -> str:
    half = "used to fit constants" if in_fit(row) else "held out"
    half = half if group_of(row) in CONSTANTS else "no fit"
    return f"{half}; {setting.practice.why}".removesuffix("; ")


def _arithmetic(setting: Setting, judged: str) -> Iterator[Outcome]:
    """Yield what a source computes from a time that it has measured: shares of the peak, and days of a run."""
    row = setting.row
    seconds = measured_seconds(setting)
    if judged == "step_s" and isinstance(row.measured.get("mfu_percent"), int | float) and _counts_all_samples(setting):
        share = value_of(setting, "mfu_percent", seconds)
        yield row.outcome("mfu_percent", share, "follows from the step time")
    if "days_for_300B_tokens" in row.measured:
        steps = 300e9 / (setting.layout.samples * row.sequence)
        yield row.outcome("days_for_300B_tokens", steps * seconds / 86400, "follows from the throughput")


def _counts_all_samples(setting: Setting) -> bool:
    """Return whether a source's throughput is that of its step; some count ranks that share experts as one."""
    rate = setting.row.measured.get("tokens_per_s_per_gpu")
    step = measured_seconds(setting)
    return not isinstance(rate, int | float) or abs(value_of(setting, "tokens_per_s_per_gpu", step) / rate - 1) < 0.1


def _parameter_outcomes(row: PublishedRow) -> Iterator[Outcome]:
    """Yield the number of parameters: 12 l h^2 (1 + 13/12h + (V + s)/12lh) (Narayanan et al., 2021)."""
    with suppress(UnjudgedError):
        shape, count = row.shape, float(row.needs("model", "params"))
        predicted_count = TransformerCost(shape).at(1, row.sequence).parameters
        yield row.outcome("parameters_B", predicted_count / 1e9, "a count", measured=count / 1e9)


def layer_seconds(setting: Setting, constants: Constants) -> tuple[float, float]:
    """Return the seconds of one layer's forward and backward."""
    machine = machine_of(setting.row, setting.layout.ranks, constants)
    cost = TransformerCost(setting.shape).at(setting.layout.micro_batch, setting.row.sequence)
    unit = Durations(setting.layout, machine, setting.habits).units(cost)[1]
    forward, backward = (sum(seconds for _, seconds in part) for part in (unit.compute_forward, unit.compute_backward))
    return forward, backward


def _layer_outcomes(row: PublishedRow) -> Iterator[Outcome]:
    try:
        setting = setting_of(row)
        note = _note(row, setting)
        for name, seconds in zip(("forward_ms", "backward_ms"), layer_seconds(setting, constants_of(row)), strict=True):
            yield row.outcome(name, 1e3 * seconds, note)
    except ValueError as error:
        yield row.outcome("forward_ms", None, str(error))
