"""Sections on the precision of a run."""

from __future__ import annotations

from typing import Literal

from zeromesh.base.words import HEADS
from zeromesh.config.section import CountFloat, CountInt, Dtype, Names, PositiveFloat, PositiveInt, Section, key


class Fp16(Section):
    """Train in fp16 with fp32 master weights and a loss scale."""

    enabled: bool = key(False, "Train in fp16.")
    # Unlike DeepSpeed: without it, inputs in another dtype are an error of the first layer.
    auto_cast: bool = key(True, "Cast floating-point inputs of the model to fp16 (DeepSpeed's default: false).")
    loss_scale: CountFloat = key(0.0, "Fixed loss scale. 0: dynamic.")
    # 2**128 is more than fp32 holds.
    initial_scale_power: CountInt = key(16, "The dynamic scale starts at 2 to the power of this number.", le=127)
    loss_scale_window: PositiveInt = key(1000, "Steps without overflow after which the scale is doubled.")
    hysteresis: PositiveInt = key(2, "Overflows after which the scale is halved.")
    consecutive_hysteresis: bool = key(False, "Restart the count of overflows after a step without overflow.")
    min_loss_scale: PositiveFloat = key(1.0, "Smallest value of the dynamic scale.")


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


class TorchAutocast(Section):
    """The forward under ``torch.autocast``; parameters keep their dtype."""

    enabled: bool = key(False, "Run the forward under torch.autocast.")
    dtype: Dtype = key("bf16", "Dtype of autocast. With fp16 the loss is scaled according to the section fp16.")


class Float8(Section):
    """Products of linear layers in float8 (e4m3 and e5m2), with scales from the numbers themselves."""

    enabled: bool = key(False, "Compute the products of linear layers in float8.")
    recipe: Literal["tensorwise", "rowwise"] = key(
        "tensorwise",
        "tensorwise: one scale per tensor, fastest. rowwise: one scale per row or column, so that an outlier costs the "
        "precision of its row only.",
    )
    skip: Names = key(
        HEADS,
        "Name patterns of linear layers that keep their products. Layers whose sizes do not divide by 16 always do.",
    )
    gather: bool = key(
        False,
        "Send the weights of these layers in float8, half of the bytes of bf16; the layers compute the same. Needs "
        "stage 3 without offload, recipe tensorwise and mesh.tensor = 1.",
    )


class DataTypes(Section):
    """Dtypes of gradients and buffers, and what stays in fp32."""

    grad_accum_dtype: Dtype | None = key(
        None, "Dtype in which gradients are accumulated. Null: fp32 for 16-bit parameters."
    )
    buffer_dtype: Dtype | None = key(
        None,
        "Dtype of the model's floating-point buffers, except running statistics of batch norms. Null: buffers keep "
        "their dtype.",
    )
    keep_in_fp32_modules: Names | None = key(
        None,
        "Patterns of names of parameters and buffers that have fp32 in a 16-bit run; * stands for any characters, and "
        "a pattern may match anywhere in a name. Null or auto: those that a model of transformers names itself "
        "(_keep_in_fp32_modules_strict; in fp16 also _keep_in_fp32_modules).",
    )
