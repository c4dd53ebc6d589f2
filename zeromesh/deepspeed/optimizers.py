"""``deepspeed.ops``: optimizers with DeepSpeed's constructors, whose updates are torch's and ZeroMesh's own.

Each only adds a constructor to its base, so that engines, kernels on the host and checkpoints treat it as the base. By
itself it is an ordinary torch optimizer. Those for the host keep states of 16-bit parameters in fp32 unless told
otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from zeromesh.base.signatures import refuse
from zeromesh.deepspeed.wrappers import Named
from zeromesh.shard.optim.bound import PartHook
from zeromesh.shard.optim.lamb import Lamb
from zeromesh.shard.optim.lion import Lion

_BIAS = "torch's Adam always corrects the bias; leave it out"
_NARROW = (torch.float16, torch.bfloat16)
_NONE = "leave it out, and call zero_grad(set_to_none=False)"

Betas = tuple[float, float]


def _keep_fp32(optimizer: Optimizer) -> None:
    """Update 16-bit parameters in fp32, and so keep their states in it, while no engine owns the optimizer."""
    narrow: dict[torch.Tensor, torch.Tensor] = {}  # parameters, by what is updated in their place
    for state in optimizer.state.values():  # Adagrad makes its sums at once
        state |= {key: value.float() for key, value in state.items() if getattr(value, "dtype", None) in _NARROW}

    def begin(optimizer: Any, *ignored: Any) -> None:
        # Under an engine these are pieces of masters, which have the dtype that the configuration says.
        for group in [] if "cur_scale" in vars(optimizer) else optimizer.param_groups:
            group["params"] = [widened(parameter, optimizer.state) for parameter in group["params"]]

    def widened(parameter: torch.Tensor, states: Any) -> torch.Tensor:
        if parameter.grad is None or parameter.dtype not in _NARROW:
            return parameter
        with torch.enable_grad():
            wide = parameter.detach().float().requires_grad_()
            wide.backward(parameter.grad.float())  # of a leaf, whose gradient it becomes
        _move(states, parameter, wide)
        narrow[wide] = parameter
        return wide

    def end(optimizer: Any, *ignored: Any) -> None:
        for group in optimizer.param_groups:
            group["params"] = [narrow.get(updated, updated) for updated in group["params"]]
        with torch.no_grad():
            for wide, parameter in narrow.items():
                parameter.copy_(wide)
                _move(optimizer.state, wide, parameter)
        narrow.clear()

    documents: list[dict[str, Any]] = []

    def before_load(optimizer: Any, document: dict[str, Any]) -> None:
        documents.append(document)

    def after_load(optimizer: Any) -> None:
        # torch has made them as narrow as the parameters.
        document = documents.pop()
        numbers = [number for group in document["param_groups"] for number in group["params"]]
        members = [member for group in optimizer.param_groups for member in group["params"]]
        for number, parameter in zip(numbers, members, strict=True):
            for key, value in document["state"].get(number, {}).items():
                now = optimizer.state[parameter][key]
                if getattr(now, "dtype", None) in _NARROW:
                    optimizer.state[parameter][key] = value.to(now.device, torch.float32, copy=True)

    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_load_state_dict_post_hook(after_load)
    optimizer.register_step_pre_hook(PartHook(begin))
    optimizer.register_step_post_hook(PartHook(end))


def _move(states: Any, source: torch.Tensor, target: torch.Tensor) -> None:
    if source in states:
        states[target] = states.pop(source)


class FusedAdam(torch.optim.Adam, metaclass=Named):
    """Adam, with decoupled weight decay (AdamW) unless ``adam_w_mode`` is False.

    Raises:
        ValueError: ``bias_correction`` or ``set_grad_none`` is False.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse("FusedAdam", "bias_correction", bias_correction, _BIAS, True)
        refuse("FusedAdam", "set_grad_none", set_grad_none, _NONE, True)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=adam_w_mode)


class DeepSpeedCPUAdam(torch.optim.Adam, metaclass=Named):
    """Adam as ``FusedAdam``; an engine updates with the native kernel what is offloaded to the host.

    Raises:
        ValueError: ``bias_correction`` is False.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse("DeepSpeedCPUAdam", "bias_correction", bias_correction, _BIAS, True)
        super().__init__(model_params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=adamw_mode)
        if fp32_optimizer_states:
            _keep_fp32(self)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad, metaclass=Named):
    """Torch's Adagrad.

    Raises:
        ValueError: ``amsgrad`` is True.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse("DeepSpeedCPUAdagrad", "amsgrad", amsgrad, "only Adam and AdamW have it; leave it out", False)
        super().__init__(model_params, lr=lr, weight_decay=weight_decay, eps=eps)
        if fp32_optimizer_states:
            _keep_fp32(self)


class FusedLion(Lion, metaclass=Named):
    """Lion with decoupled weight decay.

    Raises:
        ValueError: ``set_grad_none`` is False.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        refuse("FusedLion", "set_grad_none", set_grad_none, _NONE, True)
        super().__init__(params, lr, betas, weight_decay)


class DeepSpeedCPULion(Lion, metaclass=Named):
    """Lion as ``FusedLion``."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay)
        if fp32_optimizer_states:
            _keep_fp32(self)


class FusedLamb(Lamb, metaclass=Named):
    """LAMB.

    Raises:
        ValueError: ``eps_inside_sqrt`` or ``amsgrad`` is True, or ``max_grad_norm`` is not 0.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        refuse("FusedLamb", "eps_inside_sqrt", eps_inside_sqrt, "eps is added to the root; leave it out", False)
        refuse("FusedLamb", "max_grad_norm", float(max_grad_norm), "set gradient_clipping in the configuration", 0.0)
        refuse("FusedLamb", "amsgrad", amsgrad, "only Adam and AdamW have it; leave it out", False)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
        )
