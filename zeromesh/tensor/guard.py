"""Refuses what would be silently wrong between layers that are split by columns and the one by rows that follows.

In the first pass in which gradients are computed, autograd's graph is walked from the input of the layer that is split
by rows back to what was split. On the way nothing may be computed over the whole split dim, of which a rank has a part;
and nothing may come from outside unless its gradient is summed, since a rank has a share of it.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.tensor.heads import Heads
from zeromesh.tensor.plan import Member, Resolved

ENDS = ("_ProductBackward", "_BeginBackward", "_WeightGradientBackward", "_SummedBackward")
"""Nodes of split layers, and of activations that enter them."""

SUM, JOIN = ("nothing", "sum"), ("keep", "gather")
"""What operators do with the gradient, and forward, whose results are whole on all ranks."""


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        same: Tensor = x.view_as(x)
        return same

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def summed(x: Tensor) -> Tensor:
    """The same activation, of which all that is used between split layers has its gradient summed."""
    same: Tensor = _Summed.apply(x)  # type: ignore[no-untyped-call]
    return same


class Guard:
    """For one layer that is split by rows; nothing is looked at twice."""

    def __init__(self, member: Member, resolved: Resolved, model: nn.Module) -> None:
        self._member, self._resolved, self._model = member, resolved, model
        self._done = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        """A copy of the model is as right as the model, whose parameters this one knows."""
        other = copy(self)
        other._done = True
        return other

    def check(self, x: Tensor) -> None:
        """Look at what the layer's input was made of.

        Raises:
            ValueError: something that is not known to be right.
        """
        if self._done or torch.compiler.is_compiling() or x.grad_fn is None:
            return
        self._done = True
        heads = self._heads()
        widths = self._widths() - ({heads.width} if heads else set())
        seen: set[Any] = set()
        stack: list[Any] = [x.grad_fn]
        while stack:
            node = stack.pop()
            kind = node.name()
            if node in seen or kind in ENDS:
                continue
            seen.add(node)
            if kind == "_MoveBackward":
                if node.settings[:2] in (SUM, JOIN):
                    self._refuse("an activation from outside is used before it, whole", shares=True)
                continue
            if kind.endswith("AccumulateGrad"):
                self._require_shared(node.variable)
            if wide := widths & _reduced(node, heads is not None):
                self._refuse(f"{kind} before it works on the {max(wide)} entries of the split dim that are here")
            stack.extend(following for following, _ in node.next_functions if following is not None)

    def _heads(self) -> Heads | None:
        """Those of the attention that the layer is of, or that is beside the module around it, as in BERT."""
        container, heads = self._member.container, self._resolved.heads
        around = container.rpartition(".")[0]
        return heads.get(container) or next((h for name, h in heads.items() if name.rpartition(".")[0] == around), None)

    def _widths(self) -> set[int]:
        """Lengths of the split dim on this rank in the layers around."""
        container, resolved = self._member.container, self._resolved
        around = [m for m in resolved.members if m.container == container and m.style.cut and m.kind == "linear"]
        splits = [resolved.held_of(m.module, "weight").split for m in (self._member, *around)]
        return {split.length for split in splits if split}

    def _require_shared(self, variable: Tensor) -> None:
        """A parameter that is used inside is split, or its gradient is summed; of other tensors nothing is known."""
        held = self._resolved.of_parameter.get(id(variable))
        if held is not None and (held.partial or held.split):
            return
        name = next((name for name, parameter in self._model.named_parameters() if parameter is variable), None)
        if name is not None:
            self._refuse(f"{name} is used before it, whole", shares=True)

    def _refuse(self, what: str, shares: bool = False) -> None:
        name, container = self._member.name, self._member.container or "the model"
        why = "so each rank would compute a share of its gradient only" if shares else "and needs those of all ranks"
        single = ' give a parameter that is used on each entry alike the style "replicated_with_grad_allreduce", or'
        raise ValueError(
            f"{name} is split by rows, but {what}, {why}; in tensor_parallel.plan,{single if shares else ''} give the "
            f"layers of {container} the styles colwise_gather_output and rowwise_split_input, or replicate"
        )


def _reduced(node: Any, heads: bool) -> set[int]:
    """Length of the last dim, if a node's result was computed over all of it, and it is known to be so.

    Of attention, what has four dims is left out, and sums and softmaxes: they may be over keys.
    """
    kind = node.name()
    if kind.startswith(("NativeLayerNorm", "FusedRmsNorm")):
        return {int(node._saved_normalized_shape[-1])}
    if kind.startswith("Mean"):
        sizes, dims = node._saved_self_sym_sizes, node._saved_dim
    elif kind.startswith(("Var", "Std", "LinalgVectorNorm")):
        sizes, dims = node._saved_self.shape, node._saved_dim
    elif kind.startswith("Sum") and not heads and hasattr(node, "_saved_dim"):
        sizes, dims = node._saved_self_sym_sizes, node._saved_dim
    elif kind.startswith(("Softmax", "LogSoftmax")) and not heads:
        sizes, dims = node._saved_result.shape, (node._saved_dim,)
    else:
        return set()
    over_last = any(dim in (-1, 2**64 - 1, len(sizes) - 1) for dim in dims or ())  # -1 is saved as 64 bits
    return {int(sizes[-1])} if over_last and not (heads and len(sizes) > 3) else set()
