"""Auxiliary loss of the global batch: the fractions of tokens are those of all ranks, and of all micro-batches so far.

Source: Qiu et al., "Demons in the Detail: On Implementing Load Balancing Loss for Training Specialized
Mixture-of-Expert Models" (arXiv 2501.11873).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.comm.collectives import Group
from zeromesh.parallel.expert.router import Listener
from zeromesh.parallel.follow.activation_parts import replace_forward

TAG = 10  # on the group of a stage
CONTEXT_TAG = 11  # on the context axis
LOSS = "load_balancing_loss_func"  # function of transformers' modules that computes the loss of all layers
TOLERANCE = 1e-4  # of the proof that it computes what is computed here


class GlobalAuxiliaryLoss:
    """Loss in place of the one that a model computes from the logits of its rank's tokens.

    With E experts, f_e the mean number of choices of expert e that a token of the global batch has, and P_e the mean of
    its probabilities, it is ``E * sum(f_e * P_e)``. A rank takes the f of all, and its part of the sum in P, times the
    number of ranks: the mean over ranks is the loss of one process.
    """

    def __init__(self, group: Group, context: Group, listener: Listener) -> None:
        self._group, self._context, self._listener = group, context, listener
        # By number of the call within a forward, as an encoder and its decoder have a loss each:
        self._sums: dict[int, Tensor] = {}  # choices of each expert and tokens since the last update, of all ranks
        self._tokens: dict[int, Tensor] = {}  # of the last forward
        self._has_looked = False  # at the first logits

    def install(self, model: nn.Module) -> None:
        """Change a model in place: forwards of it in training take this loss.

        Raises:
            ValueError: the model has no such loss, or does not add it, or defines it otherwise.
        """
        owners = dict(_owners(model))
        if not owners:
            raise ValueError(
                f'experts.auxiliary_loss is "global", but no forward of {type(model).__name__} calls {LOSS}(); use '
                "experts.bias_update_rate where the router has a selection bias, or leave the key out"
            )
        if not any(_adds_loss(module) for module in owners):
            raise ValueError(
                'experts.auxiliary_loss is "global", but the model adds no auxiliary loss: set '
                "model.config.output_router_logits = True, and router_aux_loss_coef, before initialize"
            )
        for module, function in owners.items():
            _require_definition(function.__globals__[LOSS])
            if "forward" in vars(module):
                raise ValueError(
                    f'experts.auxiliary_loss is "global", but the forward of this {type(module).__name__} was replaced '
                    "by another function; leave the key out, or give zeromesh.initialize the model as it was"
                )
            _with_loss(type(module).forward, function.__globals__[LOSS])  # raises if that cannot be done
            run = torch.compiler.disable(GlobalAuxiliaryLoss._run)
            replace_forward(module, partial(run, self, module.forward, function.__globals__[LOSS]))

    def restart(self) -> None:
        """Count anew: an update is over."""
        self._sums = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalAuxiliaryLoss:
        """Return the loss of a copy of the model, which computes its own: other ranks may have no copy."""
        loss = memo[id(self)] = copy.copy(self)
        loss._listener = copy.deepcopy(self._listener, memo)
        return loss

    def _run(self, forward: Any, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a model's forward, which finds this loss under the name of ``original``."""
        module = forward.__self__
        # Ranks may evaluate different numbers of batches, and do not wait for each other.
        if self._listener.is_copy or not self._listener.trains(module):
            return forward(*args, **kwargs)
        loss = partial(self.loss, original, self._listener.counts(module), count())
        return _with_loss(type(module).forward, loss)(module, *args, **kwargs)

    def loss(
        self,
        original: Callable[..., Any],
        is_first: bool,
        calls: Iterator[int],
        gate_logits: Any,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Any:
        """Return the loss: call ``next(calls)`` of a forward, which runs for the first time or again. Collective.

        See the model's own function, ``original``, for the other arguments.
        """
        if not isinstance(gate_logits, tuple) or num_experts is None:
            return original(gate_logits, num_experts, top_k, attention_mask)
        if not self._has_looked:
            self._has_looked = True
            _require_logits(gate_logits)
        counts, probabilities, tokens = _sums(gate_logits, num_experts, top_k, attention_mask)
        call = next(calls)
        if is_first:
            sums = torch.cat([counts, tokens.view(1)])
            self._group.all_reduce(sums, TAG)
            self._tokens[call] = sums[-1]
            self._sums[call] = self._sums[call] + sums if call in self._sums else sums
        fractions = (self._sums[call][:-1] / self._sums[call][-1]).to(probabilities.dtype)
        share = (self._group.size / self._tokens[call]).to(probabilities.dtype)
        loss = num_experts * share * (fractions * probabilities).sum()
        if self._context.size > 1:  # ranks that have parts of the same sequences come to one loss
            mean = loss.detach().view(1) / self._context.size
            self._context.all_reduce(mean, CONTEXT_TAG)
            loss = loss + (mean[0] - loss.detach())
        return loss


def _sums(logits: tuple[Tensor, ...], experts: int, top_k: int, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return over layers and tokens that are no padding: choices (E,), probabilities (E,), tokens; see ``_owners``."""
    device = logits[0].device
    dtype = torch.promote_types(logits[0].dtype, torch.float32)
    counts = torch.zeros(experts, dtype=torch.float64, device=device)
    tokens = torch.zeros((), dtype=torch.float64, device=device)
    total = torch.zeros(experts, dtype=dtype, device=device)
    present = None if mask is None else mask.reshape(-1, 1).to(device=device, dtype=dtype)
    for layer in logits:
        probabilities = layer.to(device).softmax(-1).reshape(-1, experts)
        chosen = probabilities.topk(top_k, dim=-1).indices
        weights = torch.ones_like(probabilities[:, :1], dtype=dtype) if present is None else present
        counts.scatter_add_(0, chosen.reshape(-1), weights.expand(chosen.shape).reshape(-1).double())
        total = total + (probabilities.to(dtype) * weights).sum(0)
        tokens += weights.sum()
    return counts, total, tokens


def _require_logits(layers: tuple[Tensor, ...]) -> None:
    """Raise RuntimeError if a router hands over probabilities, of which the loss would take the softmax again."""
    for number, layer in enumerate(layers):
        rows = layer.detach().double().reshape(-1, layer.shape[-1])
        if len(rows) and bool((rows >= 0).all()) and bool(((rows.sum(-1) - 1).abs() < TOLERANCE).all()):
            raise RuntimeError(
                f"the router logits of layer {number} are probabilities: the auxiliary loss takes their softmax again, "
                "which makes them nearly even whatever the router does; let the router return its logits (a newer "
                "transformers does), or set model.config.output_router_logits = False"
            )


def _owners(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield modules whose forward calls the loss by its name, and the function of the forward."""
    for module in model.modules():
        function = inspect.unwrap(type(module).forward)
        code = getattr(function, "__code__", None)
        if LOSS in getattr(code, "co_names", ()) and LOSS in function.__globals__:
            yield module, function


def _with_loss(function: Any, loss: Callable[..., Any]) -> Any:
    """Return a copy of a forward that finds ``loss`` under the name of its own: the model's module stays as it is.

    Decorators around the forward are copied with it. Raise ValueError for one that is no function.
    """
    names, cells = getattr(function, "__globals__", {}), getattr(function, "__closure__", None) or ()
    inner = getattr(function, "__wrapped__", None)
    if not isinstance(function, FunctionType) or (inner and not any(cell.cell_contents is inner for cell in cells)):
        raise ValueError(f'experts.auxiliary_loss is "global", but {function} hides the forward that calls {LOSS}()')
    if inner is None:
        names = {**names, LOSS: loss}
    else:
        copied = CellType(_with_loss(inner, loss))
        cells = tuple(copied if cell.cell_contents is inner else cell for cell in cells)
    result = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    result.__kwdefaults__ = function.__kwdefaults__
    return result


def _adds_loss(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    configs: list[Any] = [config, getattr(config, "text_config", None), getattr(config, "thinker_config", None)]
    return any(getattr(each, "output_router_logits", False) for each in configs)


def _require_definition(function: Callable[..., Any]) -> None:
    """Raise ValueError unless a model's function computes the loss that is described here, from the logits."""
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, 4, generator=generator) for _ in range(2))
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    try:
        for present in (None, mask):
            counts, total, tokens = _sums(logits, 4, 2, present)
            expected = 4 * (counts * total).sum() / tokens**2
            torch.testing.assert_close(
                torch.as_tensor(function(logits, 4, 2, present)).double(), expected, rtol=TOLERANCE, atol=0.0
            )
    except Exception as error:
        raise ValueError(
            f'experts.auxiliary_loss is "global", but {function.__module__}.{LOSS} defines another loss than E * sum('
            f"fraction of tokens * mean probability), whose sum over ranks is not known; leave the key out ({error})"
        ) from error
