"""Choices of a forward that runs again: a recomputation takes what the first forward chose, as the experts of a token.

A second decision may differ from the first where scores do, by noise of a generator of the model's own, a buffer that
has changed, or kernels that add up in another order. The gradient would be of other experts than the loss, or ranks
would exchange other rows than the graph has kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

SELECTIONS = {"topk", "sort", "max", "min", "kthvalue", "mode", "median"}
"""Operators whose results are values, and where they are in the input."""

_COMPARISONS = {"gt", "ge", "lt", "le", "eq", "ne"}
DECISIONS = {"argmax", "argmin", "multinomial", "bucketize", "searchsorted", "nonzero"} | _COMPARISONS
"""Operators whose results are places in the input, or answers to a question about it."""

WORDS = ("expert", "router", "moe", "topkgate")
"""Parts of the names of classes, in lower case, that choose experts or are chosen."""

_routers: WeakSet[nn.Module] = WeakSet()


def add_router(module: nn.Module) -> None:
    """Note that choices are made in a module, or for it, whatever its class: recomputed regions with it keep theirs."""
    _routers.add(module)


def chooses(modules: Iterable[nn.Module]) -> bool:
    """Return whether choices are made in any of these modules."""
    kinds: Iterable[Any] = ((type(module), module) for module in modules)
    return any(_routes(kind) or module in _routers for kind, module in kinds)


@cache
def _routes(kind: Any) -> bool:
    return any(word in kind.__name__.lower() for word in WORDS)


def with_choices(
    modules: Iterable[nn.Module], inner: Callable[[], tuple[Any, Any]] | None = None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a forward and of its recomputation, for ``torch.utils.checkpoint.checkpoint``.

    The second may be entered several times. Operators raise RuntimeError in it where it takes another way.

    Args:
        modules: what the forward computes with; without choices in them, the contexts are the inner ones alone.
        inner: returns contexts to enter inside of these, as those of selective recomputation.
    """
    first, again = (nullcontext(), nullcontext()) if inner is None else inner()
    if not chooses(modules):
        return first, again
    noted: list[tuple[Any, Tensor]] = []
    return _First(noted, first), _Again(noted, again)


def keep_choices(model: nn.Module) -> None:
    """Let the checkpoints that a model of transformers makes of its layers take the choices of the first forward.

    They recompute without reentrant autograd then, which computes the first forward without a graph.
    """
    from torch.utils.checkpoint import checkpoint

    for module in model.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if isinstance(function, partial) and function.func is checkpoint:
            contexts = partial(with_choices, list(module.modules()), function.keywords.get("context_fn"))
            checkpointed = partial(function, use_reentrant=False, context_fn=contexts)
            vars(module)["_gradient_checkpointing_func"] = checkpointed


def same_choice(x: Tensor, index: Tensor, name: str) -> Tensor:
    """Return ``x``; its backward raises RuntimeError if a checkpoint of torch's has computed another ``index``.

    Args:
        x: floating-point tensor with a graph, on which what the experts do depends.
        index: experts of each token, integers.
        name: of the module, for the message.
    """
    same: Tensor = _SameChoice.apply(x, index, name)  # type: ignore[no-untyped-call]
    return same


class _SameChoice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, name: str) -> Tensor:
        # A reentrant checkpoint has no graph of its first forward, so there is nothing to compare with.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if torch._C._current_graph_task_id() != -1 and hooks is None:
            raise RuntimeError(_CHOOSES_AGAIN.format(name=name, how="with use_reentrant=True, which decides again"))
        # What is saved is recomputed by a checkpoint; an attribute is not.
        ctx.index, ctx.name = index, name
        ctx.save_for_backward(index)
        same: Tensor = x.view_as(x)
        return same

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (again,) = ctx.saved_tensors
        if again.data_ptr() != ctx.index.data_ptr() and not torch.equal(again, ctx.index):
            raise RuntimeError(_CHOOSES_AGAIN.format(name=ctx.name, how="and got other experts than in the forward"))
        return gradients[0], None, None


_CHOOSES_AGAIN = (
    "torch.utils.checkpoint computed the router of {name} again {how}, so that the gradient is not that of the loss; "
    'write "activation_checkpointing": {{"enabled": true}} in the configuration in its place, or '
    "zeromesh.checkpointing.checkpoint(function, ...), which keep the experts of the first forward"
)


@cache
def _name(operator: Any) -> str:
    return str(operator._schema.name).rpartition("::")[2]


def is_choice(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator's result is a choice."""
    if kwargs.get("generator") is not None:
        return True  # torch restores the states of its own generators alone
    name = _name(operator)
    if name not in SELECTIONS and name not in DECISIONS:
        return False
    if not any(isinstance(x, Tensor) and x.is_floating_point() for x in args):
        return False  # it follows from choices
    return name not in SELECTIONS or len(operator._schema.returns) == 2


def named_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an operator is called with, by the names of its schema."""
    return dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | dict(kwargs)


class Eager(TorchDispatchMode):
    """Context that sees the operators of code that is not compiled."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as it is."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


class _First(Eager):
    """Notes choices."""

    def __init__(self, noted: list[tuple[Any, Tensor]], inner: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._noted, self._inner, self._next = noted, inner, 0

    def __enter__(self) -> Any:
        self._next = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._choose(func, args, kwargs) if is_choice(func, args, kwargs) else func(*args, **kwargs)

    def _choose(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        self._noted.append((func, (result[1] if isinstance(result, tuple) else result).detach().clone()))
        return result


class _Again(_First):
    """Gives noted choices back."""

    def _choose(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        operator, choice = self._noted[self._next] if self._next < len(self._noted) else (None, None)
        if operator is None or operator is not func or choice is None:
            raise RuntimeError(
                f"a recomputation calls {func} where the forward called {operator or 'no more of its kind'}: code that "
                "is recomputed must take the same way both times; make what it branches on a buffer, or leave the "
                "module out of activation_checkpointing.targets"
            )
        self._next += 1
        if _name(func) in SELECTIONS:
            return _selected(choice.clone(), args[0], named_arguments(func, args, kwargs).get("dim", -1))
        if func._schema.is_mutable:
            return args[0].copy_(choice)
        return choice.clone()


def _selected(index: Tensor, scores: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the values of the recomputed scores at the places chosen before, and these."""
    if scores.ndim == 0:
        return scores.clone(), index
    flat = index.ndim < scores.ndim
    values = scores.gather(dim, index.unsqueeze(dim) if flat else index)
    return values.squeeze(dim) if flat else values, index
