"""Lion: the sign of an interpolated momentum; and the ``step`` that the optimizers of this package share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class StepOptimizer(torch.optim.Optimizer):
    """Optimizer whose ``step`` evaluates a closure and then calls ``_update``."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. All ranks must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        raise NotImplementedError


class Lion(StepOptimizer):
    """Lion with decoupled weight decay (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023).

    Works element by element, so it needs nothing but the rank's own pieces.

    Args:
        params: parameters or groups of them, of any floating dtype.
        lr: learning rate; about a tenth to a third of what AdamW would get.
        betas: weight of the momentum in the update, and its decay.
        weight_decay: decoupled, multiplied with ``lr``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    def _move(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        momentum = state["exp_avg"]
        weight, decay = group["betas"]
        direction = torch.lerp(gradient, momentum, weight).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"])
        momentum.lerp_(gradient, 1 - decay)
