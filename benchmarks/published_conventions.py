"""How other frameworks and papers keep states and activations: rows of the planner's two tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.predict.conventions import ActivationRule, Convention
from zeromesh.base.placement import Placement, Tier
from zeromesh.comm.ordered_sums import SumPlace
from zeromesh.shard.sizes import (
    RankStates,
    Resting,
    UnitElements,
    Widths,
    add_size,
    bytes_of,
    largest,
    place_frozen,
)

MIB = 2.0**20


@dataclass(frozen=True)
class Published(Convention):
    """Amounts of each state that one framework, or a paper, keeps."""

    engine: bool = False
    in_master: bool = False  # sharded parameters rest in their fp32 masters, of which they are gathered
    context_shards: bool = True  # ranks that share a sequence share states, too
    gathered: int = 2  # units of sharded parameters on the device at a time: one is computed with, one arrives
    # Bytes of an element of a unit whose backward runs, for whole gradients beside the sums.
    unit_gradient: float = 0.0
    # Weight gradients go straight into the sums; for autograd there are placeholders, one of each shape, that stay.
    placeholders: bool = False
    head_gradient: float = 0.0  # bytes of an element of the output layer, while its gradient is made
    live: float = 0.0  # elements that may be gathered at a time, beside ``gathered`` units
    # Units are gathered into memory of another stream first, which the allocator does not share with computation.
    gathers_apart: bool = False
    bucket: float = 0.0  # elements of the buffers in which gradients are reduced
    # In a pipeline parameters stay gathered, and gradients whole, until the last micro-batch; each micro-batch has
    # buffers of its own for the activations and gradients that it receives.
    whole_in_pipeline: bool = False
    # Gradients stay whole on each rank, in fp32, until the last micro-batch of an update, where they are reduced.
    whole_in_accumulation: bool = False
    # Figures are what the caching allocator has reserved, and a pipeline's stages keep the outputs of all micro-batches
    # until the end of the step.
    prints_reserved: bool = False
    root_units: int = 1  # of like size that the root's parameters are in; one of them is gathered at a time
    root_experts: bool = False  # experts with ranks of their own are in the root's unit
    workspace: float = 0.0  # bytes of libraries of matrix products, from the framework's own allocator
    vocabulary_multiple: int = 1  # of rows of the embedding on each tensor rank

    def states(
        self, units: Sequence[UnitElements], layout: ParallelLayout, sums: SumPlace = SumPlace.COLLECTIVE
    ) -> RankStates:
        row, widths, ranks = layout.row, self.widths, layout.data * (layout.context if self.context_shards else 1)
        resting: Resting = {}
        total = sum(unit.size * unit.number for unit in units)
        # Units of experts have ranks of their own.
        owned = sum(unit.size * unit.number / (unit.ranks or ranks) for unit in units)
        share = {Placement.SHARDED: owned, Placement.REPLICATED: total}
        sharded = row.parameter is Placement.SHARDED
        if not (sharded and self.in_master):
            add_size(resting, "parameter", row.parameter_tier, widths.parameter * share[row.parameter])
        place_frozen(resting, units, row, ranks)
        add_size(resting, "gradient", row.gradient_tier, widths.gradient * share[row.gradient])
        add_size(resting, "optimizer", row.optimizer_tier, (widths.master + widths.states) * share[row.optimizer])
        gathered, working = 0.0, self.bucket * widths.wire
        root = units[0].size / self.root_units
        if self.root_experts:
            root += sum(unit.size * unit.number for unit in units if unit.ranks)
        apart = bytes_of(largest(((unit.size, unit.number) for unit in units[1:]), self.gathered))
        if sharded and self.whole_in_pipeline and layout.pipeline > 1:
            gathered = total
            add_size(resting, "gradient", Tier.DEVICE, total * widths.gradient)
        elif sharded and self.gathered:
            gathered = max(apart + root, min(total, self.live))
        if self.whole_in_accumulation and layout.accumulation > 1:
            resting.pop(("gradient", row.gradient_tier.value), None)
            add_size(resting, "gradient", Tier.DEVICE, 4 * total)
        if sharded and self.gathers_apart:
            working += max(root, apart) * widths.parameter
        return RankStates(resting, gathered * widths.parameter, working=working)

    def buffers(self, layout: ParallelLayout, block: float, output: float, summed: bool) -> float:
        messages = 2 * layout.accumulation * output if self.whole_in_pipeline and layout.pipeline > 1 else 0.0
        return self.workspace + messages + (block * self.widths.parameter if self.placeholders and summed else 0.0)

    def gradients(self, layout: ParallelLayout, block: float, largest: float, output: float) -> float:
        if not block:
            return largest * self.head_gradient if output <= 4 else 0.0
        return 0.0 if layout.row.gradient is Placement.REPLICATED else block * self.unit_gradient


CONVENTIONS: dict[str, Published] = {
    # Parameters and gradients in 16 bits, and 12 bytes of an fp32 master and Adam's moments, each by the row.
    "zero paper": Published(
        "ZeRO paper", Widths(parameter=2, gradient=2, wire=2), gathered=0,
        source="Rajbhandari et al., ZeRO, 2020, section 3.1",
    ),
    # Weights, sums of gradients in fp32 that are whole on each rank, and the optimizer's 12 bytes by the row. The
    # output layer and Transformer Engine have a matrix library's workspace of 32 MiB each.
    "megatron": Published(
        "Megatron-LM", Widths(parameter=2, gradient=4, wire=4), placeholders=True, head_gradient=2.0,
        workspace=64 * MIB, vocabulary_multiple=128,
        activations=ActivationRule(
            # The fused loss overwrites the 16-bit logits with their gradient.
            context_output=True, expert_results=False, logits_kept=2.0, logits_forward=2.0, logits_backward=2.0,
            source="Megatron-LM 0.14 with Transformer Engine 2.11",
        ),
        source="Megatron-LM 0.14: distributed optimizer, gradients accumulated in the kernels of products",
    ),
    # The paper's own arithmetic: 18 bytes of a parameter, and blocks alone.
    "megatron paper": Published(
        "Megatron-LM paper", Widths(parameter=2, gradient=4, wire=4), gathered=0,
        activations=ActivationRule(head=False),
        source="Korthikanti et al., Reducing Activation Recomputation, 2022, section 4",
    ),
    # fp32 parameters, gradients and moments, sharded; units are gathered in 16 bits. A unit's gradients are there in
    # 16 bits and, for their sum over ranks, in fp32.
    "fsdp2": Published(
        "FSDP2", Widths(parameter=2, gradient=4, wire=4), in_master=True, unit_gradient=6.0, whole_in_pipeline=True,
        gathers_apart=True, prints_reserved=True, workspace=32 * MIB,
        activations=ActivationRule(
            repeated_heads=True, activation_output=True, every_second_product=True, gathered_inputs=True,
            context_gathers=True, logits_apart=4.0,
            source="torchtitan of 2024: a loss in fp32 that is not compiled, and divided logits with tensor ranks; "
            "sums by torch.distributed._functional_collectives.reduce_scatter_tensor",
        ),
        source="torch.distributed.fsdp.fully_shard with mixed precision, as in torchtitan; outputs of stages by "
        "torch.distributed.pipelining before pytorch/pytorch pull request 153383 of 2025-05",
    ),
    # 16-bit parameters and gradients beside the fp32 master; defaults of stage3_max_live_parameters and, twice for
    # their overlap, of reduce_bucket_size.
    "deepspeed": Published(
        "DeepSpeed", Widths(parameter=2, gradient=2, wire=2), unit_gradient=2.0, live=1e9, bucket=1e9,
        workspace=32 * MIB,
        source="DeepSpeed's ZeRO optimizers in 16 bits; defaults of its configuration",
    ),
    # All in 16 bits; whole gradients are in fp32 while micro-batches are summed without synchronisation.
    "kempner": Published(
        "KempnerForge", Widths(parameter=2, gradient=2, wire=4, master=0, states=4), unit_gradient=6.0,
        gathers_apart=True, whole_in_accumulation=True, workspace=32 * MIB,
        activations=ActivationRule(
            repeated_heads=True, activation_output=True, whole_logits=True, logits_apart=2.0, source="KempnerForge of 2026",
        ),
        source="KempnerForge of 2026: fully_shard of a model in bf16",
    ),
    "nanotron": Published(
        "nanotron", Widths(parameter=2, gradient=4, wire=4),
        source="nanotron: sums of gradients in fp32, a sharded optimizer",
    ),
}  # fmt: skip
"""Conventions by a short name."""

# Kernels that fuse the output layer and the loss never make all logits; their norms keep their inputs and outputs,
# and their gated MLP computes the activation again. The gradient of the output layer is made in the forward.
FUSED = ActivationRule(
    logits_kept=0.0, logits_forward=0.0, logits_backward=0.0, source="Liger kernels, Hsu et al., 2024"
)
