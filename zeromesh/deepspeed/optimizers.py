"""``deepspeed.ops``: optimizers with DeepSpeed's constructors, whose updates are torch's and ZeroMesh's own.

Each only adds a constructor to its base, so that engines, kernels on the host and checkpoints treat it as the base. By
itself it is an ordinary torch optimizer, whose states have the dtype of the parameters.
"""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from zeromesh.config.keys import CLIPPING
from zeromesh.optim.lamb import Lamb
from zeromesh.optim.lion import Lion
from zeromesh.signatures import refuse

_BIAS = "torch's Adam always corrects the bias; leave it out"
_STATES = "states have the dtype of the masters, or of the parameters where there is no engine; leave it out"
_NONE = "leave it out, and call zero_grad(set_to_none=False)"

Betas = tuple[float, float]


class FusedAdam(torch.optim.Adam):
    """Adam, with decoupled weight decay (AdamW) unless ``adam_w_mode`` is False.

    Raises:
        ValueError: ``bias_correction`` or ``set_grad_none`` is False.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, bias_correction: bool = True, betas: Betas = (0.9, 0.999),
        eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        refuse("FusedAdam", "bias_correction", bias_correction, _BIAS, True)
        refuse("FusedAdam", "set_grad_none", set_grad_none, _NONE, True)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=adam_w_mode)


class DeepSpeedCPUAdam(torch.optim.Adam):
    """Adam as ``FusedAdam``; an engine updates with the native kernel what is offloaded to the host.

    Raises:
        ValueError: ``bias_correction`` or ``fp32_optimizer_states`` is False.
    """

    def __init__(
        self, model_params: ParamsT, lr: float = 1e-3, bias_correction: bool = True, betas: Betas = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False, adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        refuse("DeepSpeedCPUAdam", "bias_correction", bias_correction, _BIAS, True)
        refuse("DeepSpeedCPUAdam", "fp32_optimizer_states", fp32_optimizer_states, _STATES, True)
        super().__init__(model_params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=adamw_mode)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Torch's Adagrad.

    Raises:
        ValueError: ``amsgrad`` is True, or ``fp32_optimizer_states`` False.
    """

    def __init__(
        self, model_params: ParamsT, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0,
        amsgrad: bool = False, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        refuse("DeepSpeedCPUAdagrad", "amsgrad", amsgrad, "only Adam and AdamW have it; leave it out", False)
        refuse("DeepSpeedCPUAdagrad", "fp32_optimizer_states", fp32_optimizer_states, _STATES, True)
        super().__init__(model_params, lr=lr, weight_decay=weight_decay, eps=eps)


class FusedLion(Lion):
    """Lion with decoupled weight decay.

    Raises:
        ValueError: ``set_grad_none`` is False.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, betas: Betas = (0.9, 0.999), weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        refuse("FusedLion", "set_grad_none", set_grad_none, _NONE, True)
        super().__init__(params, lr, betas, weight_decay)


class DeepSpeedCPULion(Lion):
    """Lion as ``FusedLion``.

    Raises:
        ValueError: ``fp32_optimizer_states`` is False.
    """

    def __init__(
        self, model_params: ParamsT, lr: float = 1e-3, betas: Betas = (0.9, 0.999), weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        refuse("DeepSpeedCPULion", "fp32_optimizer_states", fp32_optimizer_states, _STATES, True)
        super().__init__(model_params, lr, betas, weight_decay)


class FusedLamb(Lamb):
    """LAMB.

    Raises:
        ValueError: ``eps_inside_sqrt`` or ``amsgrad`` is True, or ``max_grad_norm`` is not 0.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, bias_correction: bool = True, betas: Betas = (0.9, 0.999),
        eps: float = 1e-8, eps_inside_sqrt: bool = False, weight_decay: float = 0.0, max_grad_norm: float = 0.0,
        max_coeff: float = 10.0, min_coeff: float = 0.01, amsgrad: bool = False,
    ) -> None:  # fmt: skip
        refuse("FusedLamb", "eps_inside_sqrt", eps_inside_sqrt, "eps is added to the root; leave it out", False)
        refuse("FusedLamb", "max_grad_norm", float(max_grad_norm), f"set {CLIPPING} in the configuration", 0.0)
        refuse("FusedLamb", "amsgrad", amsgrad, "only Adam and AdamW have it; leave it out", False)
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction,
            max_coeff=max_coeff, min_coeff=min_coeff,
        )  # fmt: skip
