"""Section of training in bf16."""

from __future__ import annotations

from zeromesh.config.section import Section, key


class Bf16(Section):
    """Train in bf16 with fp32 master weights."""

    enabled: bool = key(False, "Train in bf16.")
    auto_cast: bool = key(True, "Cast floating-point inputs of the model to bf16 (DeepSpeed does not).")
    bf16_master_weights_and_grads: bool = key(
        False, "Update the bf16 parameters themselves: less memory, and small changes are rounded away."
    )
    bf16_optimizer_states: bool = key(
        False,
        "Keep the optimizer's states in bf16, too. It needs bf16_master_weights_and_grads, and the other way round.",
    )
    check_grad_overflow: bool = key(
        True, "Skip updates whose gradients are not finite. False: make them at ZeRO stages 1 and 2, as DeepSpeed does."
    )
