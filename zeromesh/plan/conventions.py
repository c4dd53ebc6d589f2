"""Conventions of a framework for states and activations; benchmarks/published_conventions.py has those of others."""

from __future__ import annotations

from dataclasses import dataclass

from zeromesh.shard.sizes import Widths


@dataclass(frozen=True)
class ActivationRule:
    """Tensors that blocks and the loss keep for the backward, where the shape of a transformer leaves a choice."""

    repeated_heads: bool = False  # keys and values are repeated for grouped heads before attention keeps them
    activation_output: bool = False  # a gated MLP keeps the activated gate beside both products and their product
    # Bytes of an element that a norm and the layer behind it keep: its input and its output in 16 bits.
    norm_kept: float = 4.0
    context_gathers: bool = False  # attention of context ranks has the keys and values of all of them at a time
    # Inputs that are gathered from the tensor ranks' parts of a sequence are kept whole, not gathered again.
    gathered_inputs: bool = False
    # Sums over tensor ranks that are divided along a sequence are copied into the order of the ranks first.
    reordered_sums: bool = False
    # Under selective recomputation every second product is kept, and attention, instead of all but the scores.
    every_second_product: bool = False
    context_output: bool = False  # attention of context ranks keeps its output before it is sent back, too
    # Bytes of an element of the logits: kept until the backward, the most during the loss's forward, and during its
    # backward, all with the 16-bit logits themselves. As torch: fp32 logarithms of the softmax; for the backward
    # their gradient, and that of the fp32 logits.
    logits_kept: float = 6.0
    logits_forward: float = 10.0
    logits_backward: float = 14.0
    logits_apart: float = 0.0  # further ones in the backward where tensor ranks divide the vocabulary
    head: bool = True  # false where a source counts blocks alone, without embedding, output layer and loss
    source: str = ""


PLAIN = ActivationRule(source="Korthikanti et al., 2022, with a fused attention; logits and loss as torch keeps them")


@dataclass(frozen=True)
class Convention:
    """Amounts of each state that one framework, or a paper, keeps."""

    name: str
    widths: Widths
    engine: bool = False  # ZeroMesh's own arithmetic: shards, slots and wires of its gradients, padding of its units
    in_master: bool = False  # sharded parameters rest in their fp32 masters, of which they are gathered
    context_shards: bool = True  # ranks that share a sequence share states, too
    gathered: int = 2  # units of sharded parameters on the device at a time: one is computed with, one arrives
    # Bytes of an element of a unit whose backward runs, for whole gradients beside the sums.
    unit_gradient: float = 0.0
    unit_gradients: int = 1  # units for which these exist at a time
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
    # Figures are what the caching allocator has reserved, and a pipeline's stages keep the outputs of all micro-batches
    # until the end of the step.
    prints_reserved: bool = False
    workspace: float = 0.0  # bytes of libraries of matrix products, from the framework's own allocator
    vocabulary_multiple: int = 1  # of rows of the embedding on each tensor rank
    activations: ActivationRule = PLAIN
    source: str = ""


ZEROMESH = Convention(
    "ZeroMesh", Widths(), engine=True, in_master=True, source="this package: shard/accounting.py, shard/slots.py"
)
