"""The update rules of the host, as rows of a table, and which optimizers they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from zeromesh.base.optimizer_table import UNKNOWN, row_of

Group = Mapping[str, Any]  # hyperparameters as an optimizer's `param_groups` hold them

# Takes a step in place: of (group, number of the step, gradient, master, states).
TorchUpdate = Callable[[Group, int, torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], None]


@dataclass(frozen=True)
class UpdateRule:
    """A row of the table."""

    # Names of the states that an optimizer of torch keeps with this group, in the kernel's order.
    states: Callable[[Group], tuple[str, ...]]
    options: tuple[str, ...]  # of groups, which it computes with
    by_torch: TorchUpdate  # where there is no native kernel, in several passes over memory
    counted: bool = True  # whether the optimizer counts steps, under the name ``step``
    code: int | None = None  # the rule's number in native.h; None: torch always updates
    # What the kernel computes with, from a group and the number of the step, the first being 1.
    row: Callable[[Group, int], dict[str, float]] = lambda group, step: {}


def _adam(group: Group, step: int) -> dict[str, float]:
    """Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015)."""
    beta1, beta2 = map(float, group["betas"])
    return {
        "step": -(float(group["lr"]) / (1 - beta1**step)),
        "weight1": 1 - beta1,
        "beta2": beta2,
        "weight2": 1 - beta2,
        "root": (1 - beta2**step) ** 0.5,
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
    }


def _adamw(group: Group, step: int) -> dict[str, float]:
    """Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019)."""
    return _adam(group, step) | _decoupled(group)


def _decoupled(group: Group) -> dict[str, float]:
    return {"weight_decay": 0.0, "decay": 1 - float(group["lr"]) * float(group["weight_decay"])}


def _sgd(group: Group, step: int) -> dict[str, float]:
    """With torch's momentum, which begins as the first gradient."""
    return {
        "step": -float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "momentous": float(group["momentum"]) != 0,
        "first": step == 1,
        "nesterov": bool(group["nesterov"]),
        "beta2": float(group["momentum"]),
        "weight2": 1 - float(group["dampening"]),
    }


def _lion(group: Group, step: int) -> dict[str, float]:
    """Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023)."""
    weight, decay = map(float, group["betas"])
    return {"step": -float(group["lr"]), "weight1": weight, "weight2": 1 - decay} | _decoupled(group)


def _adagrad(group: Group, step: int) -> dict[str, float]:
    """Duchi et al., "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization" (2011)."""
    return {
        "step": -(float(group["lr"]) / (1 + (step - 1) * float(group["lr_decay"]))),
        "weight_decay": float(group["weight_decay"]),
        "eps": float(group["eps"]),
    }


def _for_torch(group: Group, *numbers: str) -> dict[str, Any]:
    """Return some options, and those that torch's functions have in common, as their arguments."""
    options: dict[str, Any] = {key: float(group[key]) for key in ("lr", "weight_decay", *numbers)}
    return options | {"maximize": bool(group.get("maximize"))}


def _adam_by_torch(
    group: Group, number: int, g: torch.Tensor, master: torch.Tensor, states: Sequence[torch.Tensor], decoupled: bool
) -> None:
    beta1, beta2 = map(float, group["betas"])
    steps = [torch.tensor(number - 1.0, device=master.device)]  # torch counts on
    options = _for_torch(group, "eps") | {"beta1": beta1, "beta2": beta2, "decoupled_weight_decay": decoupled}
    fused = master.device.type in ("cpu", "cuda", "xpu", "mps")
    adam([master], [g], [states[0]], [states[1]], [], steps, False, fused=fused, amsgrad=False, **options)


def _adagrad_by_torch(
    group: Group, number: int, g: torch.Tensor, master: torch.Tensor, states: Sequence[torch.Tensor]
) -> None:
    steps, fused = [torch.tensor(number - 1.0)], master.device.type == "cpu"
    adagrad([master], [g], [states[0]], steps, fused, foreach=False, **_for_torch(group, "eps", "lr_decay"))


def _sgd_by_torch(
    group: Group, number: int, g: torch.Tensor, master: torch.Tensor, states: Sequence[torch.Tensor]
) -> None:
    buffers = [states[0] if states and number > 1 else None]
    options = _for_torch(group, "momentum", "dampening") | {"nesterov": bool(group["nesterov"])}
    sgd([master], [g], buffers, foreach=False, **options)
    if states and number == 1 and buffers[0] is not None:
        states[0].copy_(buffers[0])  # torch has made the momentum of the first step itself


def _lion_by_torch(
    group: Group, number: int, gradient: torch.Tensor, master: torch.Tensor, states: Sequence[torch.Tensor]
) -> None:
    lr, (weight, momentum_beta) = float(group["lr"]), map(float, group["betas"])
    if group.get("maximize"):
        gradient.neg_()
    direction = torch.lerp(gradient, states[0], weight).sign_()
    master.mul_(1 - lr * float(group["weight_decay"])).add_(direction, alpha=-lr)
    states[0].lerp_(gradient, 1 - momentum_beta)


_COMMON = ("lr", "weight_decay", "maximize")

RULES: dict[str, UpdateRule] = {
    "adam": UpdateRule(
        lambda group: ("exp_avg", "exp_avg_sq"),
        (*_COMMON, "betas", "eps"),
        partial(_adam_by_torch, decoupled=False),
        code=0,
        row=_adam,
    ),
    "adamw": UpdateRule(
        lambda group: ("exp_avg", "exp_avg_sq"),
        (*_COMMON, "betas", "eps"),
        partial(_adam_by_torch, decoupled=True),
        code=0,
        row=_adamw,
    ),
    "sgd": UpdateRule(
        lambda group: ("momentum_buffer",) if float(group["momentum"]) else (),
        (*_COMMON, "momentum", "dampening", "nesterov"),
        _sgd_by_torch,
        counted=False,
        code=1,
        row=_sgd,
    ),
    "lion": UpdateRule(
        lambda group: ("exp_avg",), (*_COMMON, "betas"), _lion_by_torch, counted=False, code=2, row=_lion
    ),
    "adagrad": UpdateRule(
        lambda group: ("sum",), (*_COMMON, "eps", "lr_decay"), _adagrad_by_torch, code=3, row=_adagrad
    ),
}
"""Rules by the names that rows of ``base.optimizer_table`` have of them."""


def state_dtype(narrow: bool, master: torch.dtype) -> torch.dtype:
    """Return the dtype of a state beside its master: bf16 for a ``narrow`` one of an fp32 master."""
    return torch.bfloat16 if narrow and master is torch.float32 else master


_REFUSED = ("amsgrad", "differentiable", "capturable")


# Torch puts a wrapper of this code around the ``step`` of a class when its first object is made.
_HOOKED = Optimizer.profile_hook_step(len).__code__

# What an optimizer computes does not depend on these.
_BESIDE = frozenset({"zero_grad", "add_param_group", "state_dict", "load_state_dict"})


def update_class(optimizer: Optimizer | type[Optimizer]) -> type[Optimizer]:
    """Return the class that computes what an optimizer does: its own, or a base if that only gets a constructor.

    It is ``Optimizer``, which computes nothing, where an object has a method of its own, such as a patched ``step``.
    """
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    if isinstance(optimizer, Optimizer) and any(_is_replaced(optimizer, name) for name in vars(optimizer)):
        return Optimizer
    # Those of torch and ours are known one by one: torch's AdamW is an Adam with another constructor.
    while not (cls.__module__.startswith("torch.optim.") or row_of(cls) is not UNKNOWN) and len(cls.__bases__) == 1:
        base: Any = cls.__bases__[0]
        methods = {name: value for name, value in vars(cls).items() if callable(value) or hasattr(value, "__get__")}
        overrides = [name for name, value in methods.items() if _is_method(name) and not _is_same(value, base, name)]
        if overrides not in ([], ["__init__"]):
            break
        cls = base
    return cls


def _is_method(name: str) -> bool:
    return name not in ("__dict__", "__weakref__", "__module__", "__annotations__", "__annotate__", "__annotate_func__")


def _is_same(method: Any, base: type, name: str) -> bool:
    """Return whether a method is that of ``base``, apart from torch's wrapper; other wrappers may compute more."""
    if not hasattr(base, name):
        return False
    layers = [method, getattr(base, name)]
    for place, layer in enumerate(layers):
        while getattr(layer, "__code__", None) is _HOOKED:
            layer = layer.__wrapped__
        layers[place] = layer
    return layers[0] is layers[1]


def _is_replaced(optimizer: Optimizer, name: str) -> bool:
    """Return whether an attribute of an optimizer stands in for a method, and is no wrapper that only counts steps."""
    cls, method = type(optimizer), vars(optimizer)[name]
    if name in _BESIDE or not (callable(method) and callable(getattr(cls, name, None))):
        return False
    # Torch's schedules put one around the step that was there before, and an engine does.
    while hasattr(method, "_wrapped_by_lr_sched") or hasattr(method, "updates_engine"):
        inner = method.__wrapped__
        if inner is getattr(cls, name):
            return False
        method = inner
    return True


def rule_of(optimizer: Optimizer | type[Optimizer], group: Group) -> str | None:
    """The name of the rule that updates a group as an optimizer, or one of a class, does; None where no rule does.

    The kernel has no ``amsgrad``, ``differentiable`` and ``capturable``, and no subclasses of the optimizers that have
    more than a constructor. Which of torch's forms (``foreach``, ``fused``) a group asks for does not matter.
    """
    row = row_of(update_class(optimizer))
    if not row.rule or any(group.get(key) for key in _REFUSED):
        return None
    return "adamw" if row.rule == "adam" and group.get("decoupled_weight_decay") else row.rule
