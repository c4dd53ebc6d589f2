"""Lion: the sign of an interpolated momentum; and the ``step`` that the optimizers of this package share."""

from __future__ import annotations

from collections.abc import Callable

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
            weight, decay = group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                # Before the momentum takes the gradient in: Lion's update weighs it more than its memory does.
                direction = torch.lerp(parameter.grad, momentum, weight).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - decay)
