"""Predictions for published figures of memory."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import ceil

from published import Outcome, PublishedRow, UnjudgedError
from published_conventions import CONVENTIONS, FUSED, Published
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import Recompute
from zeromesh.apps.plan.cost.shape import TransformerCost, TransformerShape
from zeromesh.apps.plan.predict.rank_memory import Moment, RankMemory, memory_of
from zeromesh.base.placement import ROWS, Tier
from zeromesh.shard.sizes import UnitElements, Widths

GB, GIB, MIB = 1e9, 2.0**30, 2.0**20
HOST_PER_DEVICE = 1.5e12 / 16  # bytes: a DGX-2, on which the papers with offloading ran, has 1.5 TB for 16 devices

# Framework that a source has measured with; what each keeps is in the table of conventions.
FRAMEWORKS = {
    "zero2019": "zero paper", "zero_offload2021": "deepspeed", "zero3_offload2021": "deepspeed",
    "zero_infinity2021": "deepspeed", "ds_estimator": "deepspeed", "korthikanti2022": "megatron paper",
    "simumax_b200": "megatron", "torchtitan": "fsdp2", "stas00": "deepspeed", "ds_blogs": "deepspeed",
    "bigscience": "megatron", "nanotron_bench": "nanotron", "megatrain2026": "deepspeed", "torchao": "fsdp2",
    "kempner": "kempner", "bridge_notes": "megatron", "threads": "deepspeed", "primus": "megatron",
}  # fmt: skip

# Years of torchtitan that a source's rows do not say, by the hardware of its section.
YEARS = {"torchao": {"H100": 24, "MI300X": 25}, "threads": {"B200": 25}}
THIS_YEAR = 26
COMPILED_LOSS = {"logits_kept": 2.0, "logits_forward": 2.0, "logits_backward": 4.0}
# Recipes whose optimizer keeps moments and gradients in 16 bits.
BF16_STATES = {("bridge_notes", "moonlight-16b-a3b")}

# Known differences between a row and what was measured, by source and model.
CAVEATS = {
    ("simumax_b200", "llama3-405b"): "the source trained with 16 key heads; the row says 8",
    ("torchtitan", ""): "the source prints reserved memory; fragmentation is not predicted",
}


def judge(rows: Iterable[PublishedRow]) -> list[Outcome]:
    """Return an outcome for each figure of memory; those that cannot be judged have the reason in their notes."""
    found: list[Outcome] = []
    for row in rows:
        said = [name for name, value in row.measured.items() if name in QUANTITIES and value is not None]
        judges = {name: QUANTITIES[name] for name in said}
        if row.kind.startswith("max_model") and not any(name in QUANTITIES for name in row.measured):
            judges["fits"] = _largest_that_fits
        for quantity, predict in judges.items():
            try:
                found += predict(row, quantity)
            except ValueError as error:
                value = row.measured.get(quantity, 1.0)
                found.append(row.outcome(quantity, None, str(error), 0.0 if isinstance(value, Mapping) else value))
    return found


def convention_of(row: PublishedRow) -> Published:
    """Return what the row's framework keeps; raise UnjudgedError where it is not known."""
    name = FRAMEWORKS.get(row.source)
    if name is None:
        raise UnjudgedError(f"the framework of {row.source} is not known")
    return CONVENTIONS[name]


# Model states alone, by formula.


def _resting(elements: float, layout: ParallelLayout, convention: Published) -> Mapping[str, float]:
    """Return bytes of model states by tier."""
    found: dict[str, float] = defaultdict(float)
    units = [UnitElements(0.0, 1), UnitElements(elements, 1)]
    for (_, tier), size in convention.states(units, layout).resting.items():
        found[tier] += size
    return found


def _paper_states(row: PublishedRow, quantity: str) -> Iterator[Outcome]:
    convention = convention_of(row)
    bytes_each = re.search(r"(\d+)\+(\d+)\+(\d+)", row.layout.get("precision") or "")
    if bytes_each:
        parameter, gradient, rest = map(int, bytes_each.groups())
        widths = Widths(parameter, gradient, gradient, master=4, states=rest - 4)
        convention = replace(convention, widths=widths)
    layout = ParallelLayout(data=int(row.needs("layout", "dp")), row=row.placement)
    yield row.outcome(quantity, _resting(row.needs("model", "params"), layout, convention)["device"] / GB)


def _estimate(row: PublishedRow, quantity: str) -> Iterator[Outcome]:
    """DeepSpeed's estimators of model states, by their documented formulas."""
    low, high = (_estimated(row, quantity, more) / GIB for more in (0.0, 1e6))
    # The estimator prints elements in whole millions, cut off; the amounts lie between.
    note = f"the source prints whole millions of elements: between {low:.4g} and {high:.4g}"
    yield row.outcome(quantity, low, note)._replace(high=high)


def _estimated(row: PublishedRow, quantity: str, more: float) -> float:
    params = float(row.needs("model", "params")) + more
    # Parameters and gradients of the largest layer in 16 bits are on each device.
    layer = 4 * (float(row.needs("model", "largest_layer")) + more)
    ranks, spare = int(row.needs("layout", "dp")), 1.5  # the host's spare memory, for what is not states
    node = int(row.hardware.get("gpus_per_node") or row.needs("hardware", "gpus"))
    on_host = row.placement.optimizer_tier.value == "host", row.placement.parameter_tier.value == "host"
    share, stage, device = node / ranks, row.stage, quantity == "states_gib_per_gpu"
    if stage == 3:
        here = layer + (0.0 if all(on_host) else (2 if on_host[0] else 18) * params / ranks)
        if device:
            return here
        if row.layout.get("zero_init") == 0:
            return params * max(4 * node, (18 if all(on_host) else 16) * share if on_host[0] else 0.0) * spare
        init = (18 if all(on_host) else 16) * share * params if on_host[0] else layer * node
        return init * spare
    if stage not in (1, 2):
        raise UnjudgedError(f"the estimators cover stages 2 and 3; the row has stage {stage}")
    if device:
        return 2 * params if on_host[0] else 4 * params + 16 * params / ranks
    return params * (max(4 * ranks, 16) if on_host[0] else 4 * node) * spare


# The papers' activations: the first stage, without embedding and loss.


def paper_memory(row: PublishedRow, layout: ParallelLayout, convention: Published) -> tuple[float, float]:
    """Return bytes of states of blocks alone and of activations of the first stage."""
    shape = replace(row.shape, fused_attention=False, dropout=True)
    first = memory_of(TransformerCost(shape, convention.activations), row.sequence, layout, conventions=convention)[0]
    # States count the matrices of blocks alone: 12 h^2 elements of each.
    matrices = 12 * shape.layers * shape.hidden**2 / (layout.tensor * layout.pipeline)
    states = sum(_resting(matrices, layout, convention).values())
    return states, max(moment.bytes["activation"] for moment in first.timeline if "activation" in moment.bytes)


def _paper_activations(row: PublishedRow, quantity: str) -> Iterator[Outcome]:
    convention, layout = convention_of(row), row.parallel
    states, activations = paper_memory(row, layout, convention)
    if quantity == "percent_of_tensor_only":
        plain = paper_memory(row, replace(layout, recompute=Recompute.NONE, sequence=False), convention)[1]
        yield row.outcome(quantity, 100 * activations / plain, "the source read it off a figure")
    else:
        yield row.outcome(quantity, (states if quantity == "states_gib" else activations) / GIB)


# Allocators' peaks.


def measured_layout(row: PublishedRow) -> tuple[TransformerCost, ParallelLayout, Published]:
    """Return what a framework trains with for a row."""
    convention = convention_of(row)
    row.refuse_unknown_experts()
    layout, shape = row.parallel, row.shape
    multiple, rule = convention.vocabulary_multiple * layout.tensor, convention.activations
    shape = replace(shape, vocabulary=ceil(shape.vocabulary / multiple) * multiple, dropout=False)
    if row.layout.get("fused_cross_entropy"):
        rule = FUSED
        convention = replace(convention, head_gradient=2.0)
    elif layout.tensor > 1:
        logits = rule.logits_backward + rule.logits_apart
        rule = replace(rule, logits_backward=logits, reordered_sums=rule.gathered_inputs)
    if convention.name == "FSDP2":
        # torchtitan divides the sequence with tensor ranks and recomputes by operators unless told otherwise; since
        # 2025 it compiles the loss, too, which then makes no logits in fp32.
        layout = replace(layout, sequence=layout.tensor > 1)
        if row.layout.get("recompute") is None:
            layout = replace(layout, recompute=Recompute.SELECTIVE)
        year = _year_of(row)
        if year >= 26:
            rule = replace(rule, last_product=False)
        if year >= 25:
            convention = replace(convention, root_units=1 if shape.tied else 2)
            rule = replace(rule, **COMPILED_LOSS) if row.layout.get("compile") else rule
    elif convention.name == "KempnerForge" and row.layout.get("compile"):
        rule = replace(rule, **COMPILED_LOSS)
        rule = replace(rule, logits_backward=rule.logits_backward + (rule.logits_apart if layout.tensor > 1 else 0.0))
    if convention.name == "KempnerForge" and shape.experts:
        # What their mixtures allocate grows by 14 bytes a parameter: gradients and moments are in fp32.
        convention = replace(convention, widths=replace(convention.widths, gradient=4, states=8))
        convention = replace(convention, root_experts="root unit" in str(row.layout.get("units")))
    if (row.source, row.model["name"]) in BF16_STATES or row.layout.get("optimizer_states") == "bf16":
        # Gradients and moments in 16 bits beside an fp32 master.
        convention = replace(convention, widths=replace(convention.widths, gradient=2, wire=2, states=4))
    if convention.name == "Megatron-LM" and "fp8" in str(row.layout.get("precision")):
        raise UnjudgedError("the row does not say what is kept in 8 bits")
    if convention.whole_in_pipeline and layout.pipeline > 1 and not row.layout.get("micro_batch"):
        # torchtitan cuts a local batch into as many micro-batches as the pipeline has ranks.
        local = layout.micro_batch * layout.accumulation
        size = max(1, local // layout.pipeline)
        layout = replace(layout, micro_batch=size, accumulation=local // size)
    return TransformerCost(shape, rule), layout, convention


def _year_of(row: PublishedRow) -> int:
    """Return the year of torchtitan that a row was measured with."""
    if year := re.search(r"\b20(\d\d)\b", row.where):
        return int(year[1])
    known = YEARS.get(row.source, {})
    gpu = str(row.hardware.get("gpu")).split("-")[0]
    return known.get(gpu, THIS_YEAR) if row.source in YEARS else 24


def _peak(row: PublishedRow, quantity: str) -> Iterator[Outcome]:
    source, layout, convention = measured_layout(row)
    ranks = memory_of(source, row.sequence, layout, conventions=convention)
    unit = MIB if quantity.endswith("mib") else GB if "_gb" in quantity else GIB
    gaps = _gaps(row, source.shape, layout) if convention.prints_reserved else lambda *_: 0.0
    found = [(moment.total + gaps(rank, moment), moment.label, rank) for rank in ranks for moment in rank.timeline]
    size, label, rank = max(found, key=lambda one: one[0])
    if "reserved" in quantity:
        size, reason = max(rank.reserved for rank in ranks), "fragmentation is not predicted"
    else:
        reason = CAVEATS.get((row.source, row.model["name"])) or CAVEATS.get((row.source, ""), "")
    note = f"{label} of pipeline rank {rank.pipeline_rank}; {reason}".removesuffix("; ")
    yield row.outcome(quantity, ceil(size / unit) if "rounded_up" in quantity else size / unit, note)


def _gaps(
    row: PublishedRow, shape: TransformerShape, layout: ParallelLayout
) -> Callable[[RankMemory, Moment], float]:  # fmt: skip
    """Return a function for the bytes beyond the tensors in use that torchtitan's allocator has at a moment."""
    tokens = 2 * layout.micro_batch * row.sequence / layout.context  # bytes of one element of each, in 16 bits
    stream, inner, logits = tokens * shape.hidden, tokens * shape.mlp_width / layout.tensor, tokens * shape.vocabulary
    # A block's forward has both products of a gated MLP and theirs at a time. Selective recomputation keeps the first,
    # and without compilation there is its activation, too.
    again = layout.recompute is Recompute.BLOCKS or not row.layout.get("compile")
    forward = inner * (3 if again else 2)
    if layout.tensor > 1:  # a sum over ranks and its copy in their order; asynchronous ones begin with the product
        forward = max(forward, stream + (inner if row.layout.get("async_tp") else stream))

    def gaps(rank: RankMemory, moment: Moment) -> float:
        # What the forward has used lies between activations that are kept, and is too small for logits.
        found = forward if moment.label.split(",")[0].endswith("of head") else 0.0
        if layout.pipeline > 1 and rank.pipeline_rank == layout.pipeline - 1:
            found += (layout.accumulation - 1) * logits / layout.tensor
        elif layout.pipeline > 1:
            found += layout.accumulation * stream / layout.tensor
        return found

    return gaps


# Largest models.


def _theory(row: PublishedRow, quantity: str) -> Iterator[Outcome]:
    """Largest models whose states fit a device, in billions of parameters, by row."""
    convention, memory = convention_of(row), row.device_memory / GIB * GB
    tensor = int(row.needs("layout", "tp"))
    for name, size in row.measured[quantity].items():
        number = re.search(r"\d", name)
        if number is None or int(number[0]) not in ROWS:
            raise UnjudgedError(f"{name!r} names no row of the table")
        layout = ParallelLayout(data=int(row.needs("layout", "dp")), row=ROWS[int(number[0])])
        largest = memory / _resting(1e9, layout, convention)["device"]
        if quantity == "theory_B":
            # The table multiplies what one rank of the tensor axis can have, after rounding it.
            note = "the paper prints trillions with one digit" if largest * tensor >= 500 else ""
            yield row.outcome(f"{quantity}.{name}", round(largest, 1) * tensor, note, size)
        else:
            yield row.outcome("fits", float(size <= largest * tensor), f"{size} B parameters, {name}", 1.0)


def _largest_that_fits(row: PublishedRow, quantity: str) -> Iterator[Outcome]:
    """Return whether the states of a model that was trained fit the tiers of the machine."""
    convention, placement = convention_of(row), row.placement
    if placement.optimizer_tier is Tier.NVME:
        placement = replace(placement, gradient_tier=Tier.NVME)  # ZeRO-Infinity keeps gradients with what they update
    if isinstance(row.layout.get("tp"), str):
        raise UnjudgedError("the row lacks the number of tensor ranks")
    params, gpus = row.needs("model", "params"), int(row.needs("hardware", "gpus"))
    split = int(row.layout.get("tp") or 1) * int(row.layout.get("pp") or 1)
    layout = ParallelLayout(data=int(row.layout.get("dp") or gpus // split), row=placement)
    on = _resting(params / split, layout, convention)
    host = float(row.hardware.get("host_gb") or 0) * GB or HOST_PER_DEVICE * max(gpus, 16)
    fits = on["device"] <= row.device_memory and on["host"] * gpus <= host
    note = f"states: {on['device'] / GB:.1f} GB per device, {on['host'] * gpus / 1e12:.2f} TB on all hosts"
    yield row.outcome("fits", float(fits), note, 1.0)


def _maximum(row: PublishedRow, quantity: str) -> Iterator[Outcome]:
    size = float(row.measured[quantity]) * 1e9
    yield from _largest_that_fits(replace(row, model={**row.model, "params": size}), quantity)


def _sequence(row: PublishedRow, quantity: str) -> Iterator[Outcome]:
    raise UnjudgedError("the row lacks the free memory, and the parts that were tiled and offloaded")


QUANTITIES: dict[str, Callable[[PublishedRow, str], Iterator[Outcome]]] = {
    "states_gb_per_gpu": _paper_states,
    "states_gib_per_gpu": _estimate,
    "host_gib_per_node": _estimate,
    "states_gib": _paper_activations,
    "activation_gib": _paper_activations,
    "percent_of_tensor_only": _paper_activations,
    "memory_gib": _peak,
    "memory_gb": _peak,
    "peak_allocated_gb": _peak,
    "peak_allocated_gib": _peak,
    "peak_allocated_mib": _peak,
    "reserved_gib": _peak,
    "reserved_mib": _peak,
    "memory_gb_rounded_up": _peak,
    "theory_B": _theory,
    "measured_B": _theory,
    "max_B": _maximum,
    "max_tokens": _sequence,
}
"""Measured values that this module predicts."""
