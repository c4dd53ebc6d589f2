"""Balance of a model's experts: how many tokens each was given, and the selection bias that evens them out.

Sources: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (arXiv 2408.15664,
algorithm 1), and DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.comm.mesh import Mesh
from zeromesh.parallel.expert.auxiliary_loss import GlobalAuxiliaryLoss
from zeromesh.parallel.expert.contract import Contract
from zeromesh.parallel.expert.router import Listener, Router

TAG = 9  # on the group of all ranks, of the counts of an update
OTHER, TOKENS, SQUARES = range(3)  # columns behind those of the experts: see ``Balance``


@dataclass(frozen=True)
class LayerLoad:
    """Load of a layer's experts in an update, over all ranks and micro-batches."""

    load: list[float]  # choices of each expert, as multiples of their mean: 1 each if they are even
    entropy: float  # of the choices, as a share of that of even ones: 1 if even, 0 if all go to one expert
    dropped: float  # share of the tokens' choices that no expert was given
    z_loss: float | None  # mean of the squares of the router's log-sum-exp; None where it is not computed


class Balance:
    """Load of the experts of each layer, and what evens it out. All ranks have one, of the whole model.

    Args:
        routers: of all layers, those of other stages included.
        mesh: of the run.
        rate: added to, or taken from, an element of the selection bias in each update; None: the bias stays.
        z_loss: coefficient of the routers' z-loss.
        factor: see ``Listener``.
        write: gives a parameter a value, on all ranks; whoever computes with it gets it after the update.
    """

    def __init__(
        self,
        routers: Sequence[Router],
        mesh: Mesh,
        rate: float | None,
        z_loss: float,
        factor: Callable[[], float],
        write: Callable[[Tensor, Tensor], None],
    ) -> None:
        self.routers, self.rate = list(routers), rate
        self.auxiliary: GlobalAuxiliaryLoss | None = None
        self.listener = Listener(routers, self._choose, self._note_squares, z_loss, factor)
        self._mesh, self._write, self._has_z = mesh, write, z_loss > 0
        self._choices = max((router.choices for router in routers), default=0)
        # Whole numbers, but for the squares: their sum is the same in any order. One row a layer: choices of each
        # expert, choices of none, tokens, squares.
        self._sums = torch.zeros(len(self.routers), self._choices + 3, dtype=torch.float64, device=mesh.device)
        self._rows = {router.experts.name: row for router, row in zip(routers, self._sums, strict=True)}
        self._agreed = torch.zeros_like(self._sums)  # of all ranks, of the last update
        self._seen: dict[str, Tensor] = {}  # selection biases that are parameters, as this update computes with them

    def use_global_loss(self, model: nn.Module) -> None:
        """Let a model take the auxiliary loss of the global batch; see ``GlobalAuxiliaryLoss.install``."""
        self.auxiliary = GlobalAuxiliaryLoss(self._mesh.group("stage"), self._mesh.group("context"), self.listener)
        self.auxiliary.install(model)

    def complete(self) -> None:
        """Add up the counts of all ranks since the last update, in one message. Collective."""
        # The ranks along the tensor axis count the same tokens, or parts of them: shares are the same either way.
        self._agreed.copy_(self._sums)
        self._mesh.group("world").all_reduce(self._agreed.view(-1), TAG)
        self._sums.zero_()
        if self.auxiliary is not None:
            self.auxiliary.restart()

    def forget(self) -> None:
        """Forget what was counted since the last update: its gradients were dropped."""
        self._sums.zero_()
        self._seen.clear()
        if self.auxiliary is not None:
            self.auxiliary.restart()

    def update_biases(self) -> None:
        """Move each selection bias by ``rate`` towards an even load, without moving its mean."""
        seen, self._seen = self._seen, {}
        if self.rate is None:
            return
        for router, sums in zip(self.routers, self._agreed, strict=True):
            if router.bias is None:
                continue
            counts = sums[: router.choices]
            change = self.rate * torch.sign(counts.mean() - counts)
            change -= change.mean()
            bias = router.bias.tensor
            if not isinstance(bias, nn.Parameter):
                # Through ``data``, which leaves the version as it is: all ranks do the same, and need not be told.
                bias.data.add_(change.view_as(bias).to(bias.dtype))
            elif router.bias.name in seen:  # else it is on another stage
                value = seen[router.bias.name]
                self._write(bias, (value.double() + change.view_as(value)).to(value.dtype))

    def report(self) -> dict[str, LayerLoad]:
        """Return the load of each layer in the last update, by the name of its experts. Waits for the device."""
        loads = {}
        for router, sums in zip(self.routers, self._agreed.cpu(), strict=True):
            counts, (other, tokens, squares) = sums[: router.choices], sums[self._choices :].tolist()
            total = float(counts.sum())
            if not total + other:
                continue
            shares = counts / max(total, 1.0)
            loads[router.experts.name] = LayerLoad(
                load=(shares * router.choices).tolist(),
                entropy=float(torch.special.entr(shares).sum()) / log(max(router.choices, 2)),
                dropped=other / (total + other),
                z_loss=squares / tokens if self._has_z and tokens else None,
            )
        return loads

    def values(self) -> dict[str, float]:
        """Return values for monitors: the load of the fullest expert, entropy, drops and z-loss of each layer."""
        values: dict[str, float] = {}
        for name, layer in self.report().items():
            place = name.removesuffix(".experts")
            figures = {"load": max(layer.load), "entropy": layer.entropy, "drops": layer.dropped, "z": layer.z_loss}
            values |= {
                f"Train/Samples/expert_{key}/{place}": value for key, value in figures.items() if value is not None
            }
        return values

    def _choose(self, router: Router, chosen: Tensor, present: Tensor | None) -> None:
        """Count the choices of a call, see ``Listener``."""
        sums, choices = self._rows[router.experts.name], self._choices
        flat = chosen.reshape(-1, chosen.shape[-1])
        weights = torch.ones(len(flat), 1, dtype=sums.dtype, device=sums.device)
        if present is not None:  # a column, which is spread over the choices of a token and not over the experts
            weights = present.to(sums).view(-1, 1)
        if router.experts.contract is not Contract.ROUTED and flat.shape[1] == router.choices:
            each = flat.to(sums) * weights
            sums[: router.choices] += each.sum(0)
            sums[choices + OTHER] += (weights * (flat.sum(1, keepdim=True) == 0)).sum()
        else:
            # Numbers of no expert, as of a token that is dropped.
            places = torch.where((flat >= 0) & (flat < router.choices), flat, choices + OTHER).long()
            sums.scatter_add_(0, places.view(-1), weights.expand(flat.shape).reshape(-1))
        bias = router.bias
        if bias is not None and self.rate is not None and bias.name not in self._seen:
            tensor = bias.tensor
            if isinstance(tensor, nn.Parameter):  # it is there now; between updates it may be in parts
                self._seen[bias.name] = tensor.detach().clone()

    def _note_squares(self, router: Router, squares: Tensor, tokens: Any) -> None:
        sums = self._rows[router.experts.name]
        sums[self._choices + SQUARES] += squares
        sums[self._choices + TOKENS] += tokens
