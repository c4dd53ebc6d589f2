"""Conventions for states and activations; benchmarks/published_conventions.py has those of other frameworks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.comm.ordered_sums import SumPlace
from zeromesh.shard.sizes import RankStates, UnitElements, Widths, state_sizes


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
    last_product: bool = True  # the block's last one is among them, though nothing but the sum behind it needs it
    context_output: bool = False  # attention of context ranks keeps its output before it is sent back, too
    expert_results: bool = True  # results of experts are kept, as they are weighted after the last product
    # Bytes of an element of the logits: kept until the backward, the most during the loss's forward, and during its
    # backward, all with the 16-bit logits themselves. As torch: fp32 logarithms of the softmax; for the backward
    # their gradient, and that of the fp32 logits.
    logits_kept: float = 6.0
    logits_forward: float = 10.0
    logits_backward: float = 14.0
    whole_logits: bool = False  # tensor ranks gather their parts of the vocabulary
    logits_apart: float = 0.0  # further ones in the backward where tensor ranks divide the vocabulary
    head: bool = True  # false where a source counts blocks alone, without embedding, output layer and loss
    source: str = ""


PLAIN = ActivationRule(source="Korthikanti et al., 2022, with a fused attention; logits and loss as torch keeps them")


@dataclass(frozen=True)
class Convention:
    """Convention for states and activations: that of ZeroMesh, of which those of other frameworks are subclasses."""

    name: str = "ZeroMesh"
    widths: Widths = field(default_factory=Widths)
    engine: bool = True  # whole gradients lie in slots, and heads over divided vocabularies are computed in chunks
    activations: ActivationRule = PLAIN
    source: str = "this package: shard/sizes.py"

    def states(
        self, units: Sequence[UnitElements], layout: ParallelLayout, sums: SumPlace = SumPlace.COLLECTIVE
    ) -> RankStates:
        """Return a rank's states; what stays gathered is the first unit, and ``sums`` is where gradients are summed."""
        return state_sizes(units, layout, layout.sharing(sums))

    def buffers(self, layout: ParallelLayout, block: float, output: float, summed: bool) -> float:
        """Return bytes of further buffers, by elements of the largest block, bytes of its output, and if sums exist."""
        return 0.0

    def gradients(self, layout: ParallelLayout, block: float, largest: float, output: float) -> float:
        """Return bytes of whole gradients, unless they lie in slots, while a unit's backward runs.

        ``block`` are the elements of a block, 0 of other units; ``largest`` those of its largest parameter.
        """
        return 0.0


ZEROMESH = Convention()
