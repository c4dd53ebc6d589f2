"""Routers of a model: what chooses the experts of each token, its logits, and a bias that only the choice sees.

They are found by structure. The router of experts is the module beside them with a weight of one row for each expert.
Legend of shapes: T tokens of a call, K experts of each, E experts, H width.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from zeromesh.parallel.context.applied import named_arguments
from zeromesh.parallel.expert.contract import Contract, Experts
from zeromesh.parallel.expert.rehearsal import rehearsing
from zeromesh.parallel.follow.activation_parts import replace_forward

_log = logging.getLogger("zeromesh")

BIAS = re.compile(r"(^|_)(score_correction|expert)_bias$")
"""Names that families give a bias which is added to the scores for the choice, and not to the weights."""

UNTOLD = -1  # tokens of a call whose rows are sorted by expert, which does not tell which of them are padding
PRODUCTS = {functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, torch.addmm}


@dataclass(frozen=True)
class SelectionBias:
    """Bias of E elements that is added to the scores for the choice: a buffer, or a parameter that nothing trains."""

    name: str
    module: nn.Module
    attribute: str

    @property
    def tensor(self) -> Tensor:
        """The bias, which may be another tensor after the model was placed."""
        tensor = getattr(self.module, self.attribute)
        assert isinstance(tensor, Tensor)
        return tensor


@dataclass(frozen=True)
class Router:
    """Router of the experts of one layer."""

    experts: Experts  # of the layer, from whose calls their choices are known
    choices: int  # E, numbers that a choice may be: experts, and identity experts beyond them
    module: nn.Module | None  # computes the logits; None where no module beside the experts has a row for each
    bias: SelectionBias | None  # None where the choice follows from the scores alone


def find_routers(model: nn.Module, experts: Sequence[Experts]) -> list[Router]:
    """Return the router of each layer's experts. The model is left as it is."""
    modules = dict(model.named_modules())
    names = [each.name for each in experts]
    routers = []
    for each in experts:
        parent = each.name.rpartition(".")[0]
        others = [name for name in names if name != each.name and name.startswith(f"{parent}.")]
        beside = {
            name: module
            for name, module in modules.items()
            if (name == parent or name.startswith(f"{parent}.") or not parent)
            and not any(f"{name}.".startswith(f"{inner}.") for inner in [each.name, *others])
        }
        sizes = {each.count, each.count + each.beyond}
        rows = [
            name
            for name, module in beside.items()
            if any(p.ndim == 2 and len(p) in sizes for p in module._parameters.values() if p is not None)
        ]
        biases = [
            SelectionBias(f"{name}.{attribute}".lstrip("."), module, attribute)
            for name, module in beside.items()
            for attribute, tensor in (*module._buffers.items(), *module._parameters.items())
            if tensor is not None and tensor.numel() in sizes and BIAS.search(attribute)
        ]
        bias = biases[0] if len(biases) == 1 and not others else None
        router = _outermost(rows[0], parent, modules) if rows else None
        choices = bias.tensor.numel() if bias is not None else each.count + each.beyond
        routers.append(Router(each, choices, router, bias))
    return routers


def _outermost(name: str, parent: str, modules: dict[str, nn.Module]) -> nn.Module | None:
    """Return the module of a name, or the one that has it and lies directly in the parent."""
    if name == parent:
        return None
    inside = name.removeprefix(f"{parent}.").partition(".")[0]
    return modules[f"{parent}.{inside}".lstrip(".")]


class Listener:
    """Listener to the routers of a model, whose modules it changes in place.

    Args:
        routers: that it hears.
        choose: is told which router chose, and what: experts (T, K), or how often each was chosen (..., E); and which
            tokens are no padding (T,), or None.
        note_squares: is told the router, the sum over tokens of the squares of which the z-loss is made, and their
            number.
        z_loss: coefficient of the mean over tokens of the square of the logits' log-sum-exp; 0 for none.
        factor: returns what the loss of the running backward is multiplied by.
    """

    def __init__(
        self,
        routers: Sequence[Router],
        choose: Callable[[Router, Tensor, Tensor | None], None],
        note_squares: Callable[[Router, Tensor, Any], None],
        z_loss: float,
        factor: Callable[[], float],
    ) -> None:
        self.is_copy = False  # of a model's, which nobody trains
        self._is_paused = False  # forwards are not heard: their graph is made by another one
        self.z_loss, self.factor = z_loss, factor
        self._choose, self._note_squares = choose, note_squares
        self._trains: bool | None = None  # the model's forward under way is one in training; None outside of one
        self._mask: Tensor | None = None  # which of its tokens are no padding, (B, S)
        self._has_told = False  # that padding cannot be told
        heard: set[int] = set()  # routers, which several modules of experts may share
        for router in routers:
            experts, contract = router.experts.module, router.experts.contract
            tells = False  # the router's result shows its choice
            if contract in (Contract.ROUTED, Contract.SORTED):
                hear = partial(torch.compiler.disable(Listener._before_experts), self, router)
                experts.register_forward_pre_hook(hear, with_kwargs=True)
            elif contract is Contract.LISTED and isinstance(router.module, nn.Linear | None):
                for number, expert in enumerate(experts.children()):
                    call = partial(torch.compiler.disable(Listener._before_expert), self, router, number)
                    expert.register_forward_pre_hook(call, with_kwargs=True)
            else:
                tells = True
            if router.module is not None and (tells or (z_loss and id(router.module) not in heard)):
                heard.add(id(router.module))
                run = partial(torch.compiler.disable(Listener._run), self, router, router.module.forward, tells)
                replace_forward(router.module, run)

    def __deepcopy__(self, memo: dict[int, Any]) -> Listener:
        """Return a listener of a copy of the model, whose choices are not counted: it is trained by nobody."""
        listener = memo[id(self)] = copy.copy(self)
        listener.is_copy = True
        return listener

    def attach(self, model: nn.Module) -> None:
        """Take in the inputs of a model's forwards, by hooks."""
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._trains = model.training and torch.is_grad_enabled()
        mask = named_arguments(type(model), args, kwargs).get("attention_mask")
        self._mask = mask.detach() != 0 if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def _end(self, *_: Any) -> None:
        self._trains = None

    def trains(self, module: nn.Module) -> bool:
        """Return whether a forward of a module is one in training, or is recomputed for one."""
        # A checkpoint runs a part of a forward without gradients, so that the whole one decides, if it was called.
        return module.training and torch.is_grad_enabled() if self._trains is None else self._trains

    def counts(self, module: nn.Module) -> bool:
        """Return whether a forward of a module is one in training that runs for the first time."""
        is_heard = not (self._is_paused or self.is_copy or rehearsing() or _recomputes())
        return is_heard and self.trains(module)

    @contextmanager
    def hearing(self, hears: bool) -> Iterator[None]:
        """Hear routers in this context, or do not."""
        before, self._is_paused = self._is_paused, not hears
        try:
            yield
        finally:
            self._is_paused = before

    def weights(self, tokens: int) -> Tensor | None:
        """Return which of a router's tokens are no padding, (T,); None if all count, or nobody can tell."""
        mask = None if self._trains is None and not _recomputes() else self._mask
        if mask is None or mask.numel() == tokens:
            return None if mask is None else mask.reshape(-1)
        if not self._has_told:
            self._has_told = True
            _log.warning(
                "a router does not tell which tokens attention_mask leaves out: padding counts as tokens in the load "
                "of experts, the selection bias and the z-loss"
            )
        return None

    def _before_experts(self, router: Router, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        if not self.counts(module):
            return
        if router.experts.contract is Contract.SORTED:  # what was sorted does not tell which rows are padding
            rows, sizes = (*args, *kwargs.values())[:2]
            if len(rows):  # else nothing was chosen, which is no token without an expert
                self._choose(router, torch.as_tensor(sizes, device=rows.device).view(1, -1), self.weights(UNTOLD))
            return
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        chosen = next(tensor for tensor in tensors if not tensor.is_floating_point())
        self._choose(router, chosen.detach(), self.weights(chosen.shape[:-1].numel()))

    def _before_expert(self, router: Router, number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Count the rows of an expert that a loop calls, which do not tell whether they are padding."""
        rows = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if len(rows) and self.counts(module):
            chosen = torch.zeros(1, router.choices, dtype=torch.int64, device=rows.device)
            chosen[0, number] = rows.shape[:-1].numel()
            self._choose(router, chosen, self.weights(UNTOLD))

    def _run(self, router: Router, forward: Callable[..., Any], tells: bool, /, *args: Any, **kwargs: Any) -> Any:
        """Run a router: its logits get the gradient of the z-loss, and its result tells the choice."""
        module = router.module
        assert module is not None
        if not self.trains(module) or rehearsing():
            return forward(*args, **kwargs)
        with _Logits(router.choices, partial(self._with_z_loss, router, module)) if self.z_loss else nullcontext():
            result = forward(*args, **kwargs)
        if tells and self.counts(module) and (chosen := _choice(result, router.choices)) is not None:
            self._choose(router, chosen, self.weights(chosen.shape[:-1].numel()))
        return result

    def _with_z_loss(self, router: Router, module: nn.Module, logits: Tensor) -> Tensor:
        weights = self.weights(logits.shape[:-1].numel())
        if self.counts(module):
            squares = logits.detach().double().logsumexp(-1).square().view(-1)
            if weights is not None:
                squares = squares * weights
            self._note_squares(router, squares.sum(), len(squares) if weights is None else weights.sum())
        if not logits.requires_grad:
            return logits
        result = _ZLoss.apply(logits, weights, self.z_loss, self.factor)  # type: ignore[no-untyped-call]
        assert isinstance(result, Tensor)
        return result


def _recomputes() -> bool:
    """Return whether autograd computes a forward again, whose backward runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def _choice(result: Any, choices: int) -> Tensor | None:
    """Return the choice in a router's result: whole numbers, or where all that has a column for each expert is not 0.

    The weights of experts that are not chosen are 0.
    """
    results = result if isinstance(result, tuple | list) else (result,)
    tensors = [each.detach() for each in results if isinstance(each, Tensor)]
    whole_numbers = next((each for each in tensors if not each.is_floating_point()), None)
    columns = [each.reshape(-1, choices) != 0 for each in tensors if each.ndim and each.shape[-1] == choices]
    if whole_numbers is not None or not columns:
        return whole_numbers
    return torch.stack([each for each in columns if len(each) == len(columns[0])]).all(0).long()


class _Logits(TorchFunctionMode):
    """Replaces the first product with a column for each expert in this context by ``then`` of it."""

    def __init__(self, choices: int, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._choices = choices
        self._then: Callable[[Tensor], Tensor] | None = then

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._then is not None and func in PRODUCTS and result.shape[-1] == self._choices:
            then, self._then = self._then, None
            return then(result)
        return result


class _ZLoss(torch.autograd.Function):
    """Logits as they are, with the gradient of a loss of their own: that of ST-MoE (arXiv 2202.08906, equation 5).

    The loss is ``coefficient * mean(logsumexp(logits) ** 2)`` over the tokens that count. It is not a part of the
    loss that the model returns, as a stage of a pipeline has none.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, weights: Tensor | None, coefficient: float, factor: Any) -> Tensor:
        ctx.save_for_backward(logits)
        # Not saved by torch, so that a recomputation, which may come after other forwards, does not replace it.
        ctx.weights, ctx.coefficient, ctx.factor = weights, coefficient, factor
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (logits,) = ctx.saved_tensors
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        size = wide.logsumexp(-1, keepdim=True)
        tokens: Any = size.numel()
        if ctx.weights is not None:
            weights = ctx.weights.to(wide.dtype).view_as(size)
            tokens, size = weights.sum().clamp(min=1), size * weights
        added = size * wide.softmax(-1) * (2 * ctx.coefficient * ctx.factor() / tokens)
        return gradient + added.to(gradient.dtype), None, None, None
