"""Muon: momentum whose matrices are orthogonalized, with AdamW for everything that is not a hidden matrix."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from zeromesh.base.piece import Piece, PieceExchange
from zeromesh.shard.optim.lion import StepOptimizer

_ADJUST_LR = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""Factor on the learning rate by shape: Jordan 2024; Liu et al., "Muon is Scalable for LLM Training", 2025."""


class _AdamW(torch.optim.AdamW):
    """AdamW over the groups and the state of another optimizer."""

    def step_over(self, groups: list[dict[str, Any]], state: defaultdict[torch.Tensor, Any]) -> None:
        # Given anew in each step: loading a state dict replaces groups and state.
        self.param_groups, self.state = groups, state
        self.step()


# torch.optim.Muon cannot take its place: it wants whole matrices as parameters and keeps their whole momentum, on every
# rank. Its functions for the iteration and the factor are private, and the former divides a gradient in bf16 in place.
class Muon(StepOptimizer):
    """Muon (Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024), over pieces.

    The momentum lives in pieces; each bucket that holds matrices is gathered once per step, and every matrix of which
    this rank has a piece is orthogonalized whole. Numbers equal ``torch.optim.Muon``'s. Each given group becomes two,
    first its matrices, then the rest.

    Args:
        groups: dicts with ``params`` and options that override the arguments below.
        pieces: every piece this rank updates.
        exchange: how to get whole matrices.
        matrices: names of the parameters that Muon updates, the same on all ranks. Those with more than two dims are
            taken as matrices of ``shape[0]`` rows; in a mapping, of those with the value True each entry of the first
            dim, as of an expert, is a matrix.
        lr: learning rate of both parts, ``muon_lr`` and ``adam_lr`` of one; by default 1e-3.
        weight_decay: decoupled, of both parts; by default 0.1 for matrices and 0.01 for the rest, as in torch.
        momentum, nesterov, ns_coefficients, ns_steps, adjust_lr_fn: of the matrices' part, as in ``torch.optim.Muon``.
        betas, eps: of AdamW.

    Raises:
        ValueError: if ``adjust_lr_fn`` is unknown, or a parameter in ``matrices`` has fewer than two dims.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        pieces: Iterable[Piece],
        exchange: PieceExchange,
        matrices: frozenset[str] | Mapping[str, bool],
        lr: float = 1e-3,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        weight_decay: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        adjust_lr_fn: str = "original",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self._pieces = {piece.parameter: piece for piece in pieces}
        self._exchange = exchange
        self._matrices = frozenset(matrices)
        self._stacked = {name for name in matrices if isinstance(matrices, Mapping) and matrices[name]}
        muon = {
            "lr": lr if muon_lr is None else muon_lr,
            "weight_decay": 0.1 if weight_decay is None else weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        adam = {
            "lr": lr if adam_lr is None else adam_lr,
            "weight_decay": 0.01 if weight_decay is None else weight_decay,
            "betas": betas,
            "eps": eps,
        }
        halves = [half for group in groups for half in self._split(group, muon, adam)]
        self._adamw = _AdamW([half for half in halves if not half["use_muon"]])
        super().__init__(halves, {})
        for group in self.param_groups:
            rule = group.get("adjust_lr_fn", "original")
            if rule not in _ADJUST_LR:
                raise ValueError(f"adjust_lr_fn is {rule!r}; it must be one of {', '.join(_ADJUST_LR)}")
        for piece in self._pieces.values():
            if piece.name in matrices and len(piece.shape) < 2:
                raise ValueError(
                    f"parameter {piece.name} of shape {piece.shape} is not a matrix and cannot be updated by Muon; "
                    "set its attribute `use_muon = False`"
                )

    def _split(
        self, group: Mapping[str, Any], muon: Mapping[str, Any], adam: Mapping[str, Any]
    ) -> Iterable[dict[str, Any]]:
        options = {key: value for key, value in group.items() if key != "params"}
        for use_muon, defaults, own_lr in ((True, muon, "muon_lr"), (False, adam, "adam_lr")):
            members = [p for p in group["params"] if (self._pieces[p].name in self._matrices) is use_muon]
            # Two groups, so that both have a learning rate that schedules can move.
            half = {"params": members, "use_muon": use_muon, **defaults, **options}
            half["lr"] = options.get(own_lr, half["lr"])
            yield half

    def _update(self) -> None:
        pieces = {
            self._pieces[parameter].name: (self._pieces[parameter], group)
            for group in self.param_groups
            for parameter in group["params"]
            if group["use_muon"] and parameter.grad is not None
        }
        # Every bucket with a matrix, also where this rank has no gradient: gathering is collective.
        for number, bucket in enumerate(self._exchange.buckets):
            if not self._matrices.isdisjoint(bucket):
                self._update_bucket(number, {name: pieces[name] for name in bucket if name in pieces})
        self._adamw.step_over([group for group in self.param_groups if not group["use_muon"]], self.state)

    def _update_bucket(self, number: int, pieces: Mapping[str, tuple[Piece, dict[str, Any]]]) -> None:
        momenta = {name: self._momentum(piece.parameter, group) for name, (piece, group) in pieces.items()}
        gathered = self._exchange.gather(number, momenta, self._stacked)
        for name, (piece, group) in pieces.items():
            momentum = gathered[name]
            matrices = momentum if name in self._stacked else momentum.flatten(1)[None]
            update = torch.stack([orthogonalize(m, group["ns_coefficients"], group["ns_steps"]) for m in matrices])
            factor = _ADJUST_LR[group["adjust_lr_fn"]](*matrices.shape[1:])
            piece.parameter.mul_(1 - group["lr"] * group["weight_decay"])
            part = piece.cut(update.view(momentum.shape)).view_as(piece.parameter).to(piece.parameter.device)
            piece.parameter.add_(part, alpha=-group["lr"] * factor)

    def _momentum(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum: torch.Tensor = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def orthogonalize(matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int) -> torch.Tensor:
    """Return nearly the nearest orthogonal matrix, by Newton-Schulz iteration of a quintic polynomial (Jordan 2024).

    The matrix has shape (rows, columns) and any floating dtype, the result that shape in bfloat16. The default
    coefficients, of x, x^3 and x^5, push singular values to within about [0.7, 1.2].
    """
    a, b, c = coefficients
    x = matrix.bfloat16()  # its accuracy suffices for a direction
    # The smaller side is squared, which is cheaper.
    if matrix.shape[0] > matrix.shape[1]:
        x = x.T
    # The iteration converges for singular values of at most 1, which the Frobenius norm bounds.
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
