"""``deepspeed.ops``: optimizers with DeepSpeed's constructors, whose updates are torch's and ZeroMesh's own.

Each only adds a constructor to its base, so that engines, kernels on the host and checkpoints treat it as the base. By
itself it is an ordinary torch optimizer. Those for the host keep states of 16-bit parameters in fp32 unless told
otherwise.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from zeromesh.base.signatures import refuse
from zeromesh.deepspeed.wrappers import Named
from zeromesh.shard.optim.bound import PartHook
from zeromesh.shard.optim.lamb import Lamb
from zeromesh.shard.optim.lion import Lion

_NARROW = (torch.float16, torch.bfloat16)
_CONSTRUCTORS = json.loads(Path(__file__).with_name("optimizers.json").read_text(encoding="utf-8"))
_RENAMED = dict.fromkeys(("adam_w_mode", "adamw_mode"), "decoupled_weight_decay")
_FP32_STATES = "fp32_optimizer_states"
_ADVICE = {
    "bias_correction": "torch's Adam always corrects the bias; leave it out",
    "set_grad_none": "leave it out, and call zero_grad(set_to_none=False)",
    "amsgrad": "only Adam and AdamW have it; leave it out",
    "eps_inside_sqrt": "eps is added to the root; leave it out",
    "max_grad_norm": "set gradient_clipping in the configuration",
}
"""Parameters that some base lacks, and what to do instead."""


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


def _with_constructor(name: str, base: type[Optimizer]) -> Any:
    """Return a class of this name that adds DeepSpeed's constructor to ``base``; see ``optimizers.json``.

    The constructor raises ValueError for a parameter that ``base`` lacks, unless it has its default.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    (first, _), *defaults = _CONSTRUCTORS[name].items()
    parameters = [inspect.Parameter(key, kind, default=_value(default)) for key, default in defaults]
    signature = inspect.Signature([inspect.Parameter(key, kind) for key in ("self", first)] + parameters)
    taken = inspect.signature(base).parameters

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        del bound.arguments["self"]
        members, keeps_fp32 = bound.arguments.pop(first), bound.arguments.pop(_FP32_STATES, False)
        options = {_RENAMED.get(key, key): value for key, value in bound.arguments.items()}
        for key in [key for key in options if key not in taken]:
            default = signature.parameters[key].default
            value = options.pop(key)
            refuse(name, key, float(value) if type(default) is float else value, _ADVICE[key], default)
        base.__init__(self, members, **options)
        if keeps_fp32:
            _keep_fp32(self)

    vars(construct)["__signature__"] = signature
    namespace = {"__init__": construct, "__module__": __name__, "__doc__": base.__doc__}
    return Named(name, (base,), namespace)


def _value(default: Any) -> Any:
    return tuple(default) if isinstance(default, list) else default


FusedAdam = _with_constructor("FusedAdam", torch.optim.Adam)
"""Adam, with decoupled weight decay (AdamW) unless ``adam_w_mode`` is False."""

DeepSpeedCPUAdam = _with_constructor("DeepSpeedCPUAdam", torch.optim.Adam)
"""Adam as ``FusedAdam``; an engine updates with the native kernel what is offloaded to the host."""

DeepSpeedCPUAdagrad = _with_constructor("DeepSpeedCPUAdagrad", torch.optim.Adagrad)
FusedLion = _with_constructor("FusedLion", Lion)
DeepSpeedCPULion = _with_constructor("DeepSpeedCPULion", Lion)
FusedLamb = _with_constructor("FusedLamb", Lamb)
