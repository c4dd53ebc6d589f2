"""How other frameworks and papers keep states and activations: rows of the planner's two tables."""

from __future__ import annotations

from zeromesh.plan.conventions import ZEROMESH, ActivationRule, Convention
from zeromesh.shard.sizes import Widths

MIB = 2.0**20

CONVENTIONS: dict[str, Convention] = {
    "zeromesh": ZEROMESH,
    # Parameters and gradients in 16 bits, and 12 bytes of an fp32 master and Adam's moments, each by the row.
    "zero paper": Convention(
        "ZeRO paper", Widths(parameter=2, gradient=2, wire=2), gathered=0,
        source="Rajbhandari et al., ZeRO, 2020, section 3.1",
    ),
    # Weights, sums of gradients in fp32 that are whole on each rank, and the optimizer's 12 bytes by the row. The
    # output layer and Transformer Engine have a matrix library's workspace of 32 MiB each.
    "megatron": Convention(
        "Megatron-LM", Widths(parameter=2, gradient=4, wire=4), placeholders=True, head_gradient=2.0,
        workspace=64 * MIB, vocabulary_multiple=128,
        activations=ActivationRule(
            # The fused loss overwrites the 16-bit logits with their gradient.
            context_output=True, logits_kept=2.0, logits_forward=2.0, logits_backward=2.0,
            source="Megatron-LM 0.14 with Transformer Engine 2.11",
        ),
        source="Megatron-LM 0.14: distributed optimizer, gradients accumulated in the kernels of products",
    ),
    # The paper's own arithmetic: 18 bytes of a parameter, and blocks alone.
    "megatron paper": Convention(
        "Megatron-LM paper", Widths(parameter=2, gradient=4, wire=4), gathered=0,
        activations=ActivationRule(head=False),
        source="Korthikanti et al., Reducing Activation Recomputation, 2022, section 4",
    ),
    # fp32 parameters, gradients and moments, sharded; units are gathered in 16 bits. A unit's gradients are there in
    # 16 bits and, for their sum over ranks, in fp32.
    "fsdp2": Convention(
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
    "deepspeed": Convention(
        "DeepSpeed", Widths(parameter=2, gradient=2, wire=2), unit_gradient=2.0, live=1e9, bucket=1e9,
        workspace=32 * MIB,
        source="DeepSpeed's ZeRO optimizers in 16 bits; defaults of its configuration",
    ),
    "nanotron": Convention(
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
