"""Section on what blocks save for their backward."""

from __future__ import annotations

from typing import Literal

from zeromesh.config.section import Names, PositiveFloat, Section, key


class ActivationCheckpointing(Section):
    """Recompute activations in the backward instead of saving them."""

    enabled: bool = key(False, "Recompute the activations of the targets.")
    targets: Names = key((), "Class names or glob patterns of module names to recompute. Empty: the units.")
    granularity: Literal["full", "selective", "auto"] = key(
        "full",
        "full: save only the inputs of the targets. selective: also save the results of matrix products and attention, "
        "and recompute the rest. auto: the planner chooses for each operator of each block whether its result is "
        'saved, recomputed, or moved to host memory; "activation_checkpointing": "auto" is short for this.',
    )
    budget_gb: PositiveFloat | None = key(
        None,
        "Gigabytes (1e9 bytes) that activations and their gradients may take on a device at most. Needs granularity = "
        "auto. Null: what the planner expects states to leave of the device's memory.",
    )
    partition_activations: bool = key(
        False,
        "Divide the saved inputs among the tensor-parallel ranks, and gather them in the backward. No effect with "
        "tensor_parallel.sequence.",
    )
    cpu_checkpointing: bool = key(False, "Save the inputs of the targets in host memory. Needs enabled = true.")

    @property
    def planned(self) -> bool:
        """True if the planner chooses what becomes of each tensor that blocks save."""
        return self.enabled and self.granularity == "auto"
