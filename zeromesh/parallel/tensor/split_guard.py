"""Checks that the computation between layers split by columns and the next layer split by rows is right."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.parallel.tensor.split_plan import Member, SplitPlan

# In the first pass in which gradients are computed, autograd's graph is walked from the input of the layer that is
# split by rows back to what was split. On the way nothing may be computed over the whole split dim, of which a rank has
# a part; and nothing may come from outside unless its gradient is summed, since a rank has a share of it.

# Names of autograd's nodes: operators, split layers, and activations that enter them.
ENDS = ("_MoveBackward", "ProductBackward", "_BeginBackward", "WeightGradientBackward", "_SummedBackward")
# What a node of an operator does backward and forward, where its result is whole on all ranks.
SUM, JOIN = ("nothing", "sum"), ("keep", "gather")
REDUCING = ("Mean", "Var", "Std", "LinalgVectorNorm")  # results are of all entries of a dim
OVER_KEYS = ("Sum", "Softmax", "LogSoftmax")  # the same; in attention they may be over keys, of which a rank has all
REARRANGING = ("Permute", "Squeeze", "Transpose", "Unsqueeze")  # name dims, and compute nothing


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        same: Tensor = x.view_as(x)
        return same

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def summed(x: Tensor) -> Tensor:
    """Mark an activation whose gradient is summed over the ranks wherever it is used between split layers."""
    same: Tensor = _Summed.apply(x)  # type: ignore[no-untyped-call]
    return same


class SplitGuard:
    """Check of one layer that is split by rows; it runs once."""

    def __init__(self, member: Member, resolved: SplitPlan, model: nn.Module) -> None:
        self._member, self._resolved, self._model = member, resolved, model
        self._done = False

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitGuard:
        """Skip the check in a copy of the model: it knows the model's own parameters only."""
        other = copy(self)
        other._done = True
        return other

    def check(self, x: Tensor) -> None:
        """Check what the layer's input was made of. Raise ValueError if something is not known to be right."""
        # Once: the check takes as long as the graph is large, and a model's code hardly changes between passes.
        if self._done or torch.compiler.is_compiling() or x.grad_fn is None:
            return
        self._done = True
        container, resolved = self._member.container, self._resolved
        around, every = container.rpartition(".")[0], self._resolved.heads
        # Those of the attention around the layer, or beside the module around it, as in BERT.
        beside = (other_heads for name, other_heads in every.items() if name.rpartition(".")[0] == around)
        heads = every.get(container) or next(beside, None)
        # Lengths of the split dim on this rank in the layers of the same module.
        same = [m for m in resolved.members if m.container == container and m.style.cut and m.kind == "linear"]
        splits = [resolved.held_of(m.module, "weight").split for m in (self._member, *same)]
        # A reduction over a head's width, as a norm of queries has it, is of what one rank has whole.
        widths = {split.length for split in splits if split} - ({heads.width} if heads else set())
        for node in _nodes(x):
            kind = node.name()
            if kind == "_MoveBackward" and node.settings[:2] in (SUM, JOIN):
                self._refuse("an activation from outside is used before it, whole", shares=True)
            if kind.endswith("AccumulateGrad"):
                self._require_shared(node.variable)
            if wide := widths & _reduced(node, heads is not None):
                self._refuse(f"{kind} before it works on the {max(wide)} entries of the split dim that are here")

    def _require_shared(self, variable: Tensor) -> None:
        """Check that a parameter that is used inside is split, or its gradient summed; other tensors are unknown."""
        part = self._resolved.of_parameter.get(id(variable))
        if part is not None and (part.partial or part.split):
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


class Apart:
    """Check that nothing is computed over the tokens of an activation of which a rank has a part of the sequence."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._done = False

    def check(self, x: Tensor, dim: int) -> None:
        """Check what the activation was made of since the last exchange. Raise ValueError for work over ``dim``."""
        if self._done or torch.compiler.is_compiling() or x.grad_fn is None:
            return
        self._done = True
        for node in _nodes(x):
            shape, dims = computed_over(node)
            if len(shape) == x.ndim and dim in dims and shape[dim] == x.shape[dim]:
                raise ValueError(
                    f"{node.name()} before {self._name}, or in it, computes over dim {dim} of an activation of shape "
                    f"{shape}, which is of this rank's part of the sequence; set tensor_parallel.sequence to false"
                )


def _nodes(x: Tensor) -> Iterator[Any]:
    """Yield autograd's nodes from an activation back to where it was split, exchanged, or entered split layers."""
    seen: set[Any] = set()
    stack: list[Any] = [x.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if node.name() not in ENDS:  # the split part begins at these
            stack.extend(following for following, _ in node.next_functions if following is not None)


def _reduced(node: Any, heads: bool) -> set[int]:
    """Return the length of the last dim if a node's result is known to be computed over all of it."""
    kind = node.name()
    if kind.startswith(("NativeLayerNorm", "FusedRmsNorm")):
        return {int(node._saved_normalized_shape[-1])}
    if not kind.startswith(REDUCING if heads else (*REDUCING, *OVER_KEYS)):
        return set()
    # Of attention, what has four dims is left out: it may be over keys.
    shape, dims = computed_over(node)
    return {shape[-1]} if len(shape) - 1 in dims and not (heads and len(shape) > 3) else set()


def computed_over(node: Any) -> tuple[tuple[int, ...], set[int]]:
    """Return the shape of the first input of a node's function, and the dims that the function reduces."""
    # Nothing that was saved for the backward is read but numbers: tensors may have to be computed again.
    edge = next(((other, number) for other, number in node.next_functions if other is not None), None)
    kind = node.name()
    if edge is None or kind.startswith(REARRANGING):
        return (), set()
    shape = tuple(int(size) for size in edge[0]._input_metadata[edge[1]].shape)
    dims = getattr(node, "_saved_dim", getattr(node, "_saved_dims", ()))
    if dims is None or (not hasattr(node, "_saved_dim") and kind.startswith(("Mean", "Sum"))):
        return shape, set(range(len(shape)))
    # Autograd gives negative dims as unsigned numbers of 64 bits.
    signed = [dim - 2**64 if dim > 2**63 else dim for dim in (dims if isinstance(dims, tuple) else (dims,))]
    return shape, {dim % max(len(shape), 1) for dim in signed}
