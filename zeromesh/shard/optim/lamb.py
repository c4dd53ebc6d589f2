"""LAMB: Adam whose step has, for each parameter, a length in proportion to the parameter's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from zeromesh.base.piece import Piece, PieceExchange
from zeromesh.shard.optim.lion import StepOptimizer


class Lamb(StepOptimizer):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020).

    The trust ratio is the norm of the whole parameter over the norm of its whole update, clamped to ``[min_coeff,
    max_coeff]``, and 1 where either norm is zero. It costs one sum over the ranks per step.

    Args:
        groups: parameters or groups of them; with an ``exchange``, those of ``pieces``.
        pieces: every piece this rank updates.
        exchange: how to reach the other pieces; None: the parameters are whole.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled; part of the update whose norm is taken.
        bias_correction: correct the moments for their start at zero.
        max_coeff, min_coeff: bounds of the trust ratio.
    """

    def __init__(
        self,
        groups: ParamsT,
        pieces: Iterable[Piece] = (),
        exchange: PieceExchange | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction)
        super().__init__(groups, defaults | {"max_coeff": max_coeff, "min_coeff": min_coeff})
        self._coefficients: list[torch.Tensor] = []
        self.spread(pieces, exchange)

    def get_lamb_coeffs(self) -> list[float]:
        """Return the trust ratios of the last update, by this rank's parameters."""
        return [float(ratio) for ratio in self._coefficients]

    def spread(self, pieces: Iterable[Piece], exchange: PieceExchange | None) -> None:
        """Update pieces of parameters from now on; ``exchange`` reaches the other ones."""
        self._exchange = exchange
        # Every rank sums a vector of all parameters, in one order, whatever it holds of them.
        buckets = () if exchange is None else exchange.buckets
        places = {name: place for place, name in enumerate(name for bucket in buckets for name in bucket)}
        self._pieces = {piece.parameter: piece for piece in pieces}
        self._places = {parameter: places[piece.name] for parameter, piece in self._pieces.items()}
        self._count = len(places)

    def _update(self) -> None:
        updates = {
            parameter: (self._direction(parameter, parameter.grad, group), group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }
        if self._exchange is None:
            self._places = {parameter: place for place, parameter in enumerate(updates)}
            self._count = len(updates)
        norms = self._norms({parameter: direction for parameter, (direction, _) in updates.items()})
        self._coefficients = []
        for parameter, (direction, group) in updates.items():
            weight_norm, update_norm = norms[:, self._places[parameter]]
            ratio = (weight_norm / update_norm).clamp(group["min_coeff"], group["max_coeff"])
            # As in the paper: an update of zero, or of a parameter that is zero, is not scaled.
            ratio = torch.where((weight_norm > 0) & (update_norm > 0), ratio, 1.0)
            self._coefficients.append(ratio)
            parameter.sub_(direction.mul_(ratio * group["lr"]))

    def _direction(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Return the update before it is scaled: Adam's, plus weight decay."""
        state = self.state[parameter]
        if not state:
            zeros = torch.zeros_like
            state.update(step=torch.tensor(0.0), exp_avg=zeros(parameter), exp_avg_sq=zeros(parameter))
        state["step"] += 1
        step = state["step"].item()
        beta1, beta2 = group["betas"]
        first: torch.Tensor = state["exp_avg"].lerp_(gradient, 1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1 = 1 - beta1**step if group["bias_correction"] else 1.0
        correction2 = 1 - beta2**step if group["bias_correction"] else 1.0
        denominator = (second / correction2).sqrt_().add_(group["eps"])
        return (first / correction1).div_(denominator).add_(parameter, alpha=group["weight_decay"])

    def _norms(self, directions: dict[torch.nn.Parameter, torch.Tensor]) -> torch.Tensor:
        """Return norms of whole parameters and updates, shape (2, parameters), float64; zero where no rank has one."""
        # A rank that holds no piece at all sums zeros that lie on the CPU.
        device = next((parameter.device for parameter in self._places), torch.device("cpu"))
        squares = torch.zeros(2, self._count, dtype=torch.float64, device=device)
        for parameter, direction in directions.items():
            for row, tensor in enumerate((parameter, direction)):
                for part in [tensor] if self._exchange is None else self._pieces[parameter].owned(tensor):
                    # In fp64: squares of many small elements vanish in fp32.
                    norm = torch.linalg.vector_norm(part, dtype=torch.float64)
                    squares[row, self._places[parameter]] += norm.square()
        total = squares.view(-1) if self._exchange is None else self._exchange.sum(squares.view(-1))
        return total.view(2, -1).sqrt()
