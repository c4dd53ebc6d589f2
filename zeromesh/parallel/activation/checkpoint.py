"""Activation checkpointing: keep a module's inputs, compute its activations again in the backward.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from zeromesh.base.saved_tensors import BlockPlan, Saved
from zeromesh.parallel.activation.choices import chooses, with_choices
from zeromesh.parallel.activation.repeat import Repeatable, modules_of

if TYPE_CHECKING:
    from zeromesh.parallel.activation.activation_store import ActivationStore


class _How(NamedTuple):
    """Way in which a block is checkpointed."""

    plan: BlockPlan
    store: ActivationStore | None = None  # where the plan moves tensors to; None: they stay where they are
    compiled: Callable[[], tuple[Any, Any]] | None = None  # contexts in which torch's compiler traces it, if it keeps


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` and keep only its inputs; its activations are computed again in the backward.

    Random numbers, such as dropout's, are the same both times. If ``function`` is a module, or a method of one, the
    buffers are, too, and change once.

    Args:
        function: any callable on tensors; it is called again in the backward and must compute the same.
        *args: its arguments.
        **kwargs: its keyword arguments.
    """
    return checkpoint_with(None, function, *args, **kwargs)


def checkpoint_with(store: ActivationStore | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a call, as ``checkpoint``; its inputs wait in a store, or, for None, where they are."""
    return _checkpoint(_How(BlockPlan(Saved.MOVE), store), function, modules_of(function), args, kwargs)


def _checkpoint(
    how: _How, function: Callable[..., Any], modules: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # Imported here: it loads parts of torch that a run without checkpointing does not need.
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    plan, store, compiled = how
    visit = None if store is None else store.visit(function)
    options: dict[str, Any] = {"use_reentrant": False}
    if compiled is not None:
        if torch.compiler.is_compiling():
            options["context_fn"] = compiled
        else:
            from zeromesh.parallel.activation.selective import BlockResults

            results = BlockResults(plan, modules[0], visit)
            function, options["context_fn"] = partial(results.run, function), results.contexts
    if visit is not None and plan.inputs is Saved.MOVE:
        function, tensors = visit.keep_inputs(function, args, kwargs)
        args, kwargs = tuple(tensors), {}  # the others would be held while the block computes
    if chooses(modules):
        options["context_fn"] = partial(with_choices, modules, options.get("context_fn"))
    if any(isinstance(module, nn.RReLU) for module in modules):
        # It keeps its random slopes before it has drawn them; a recomputation that stops there never draws them.
        options["early_stop"] = False
    # Without reentrant autograd, which keeps hooks, keyword arguments and random states right.
    return torch_checkpoint(Repeatable(function, modules), *args, **kwargs, **options)


def checkpoint_parts(
    function: Callable[..., Any],
    modules: Sequence[nn.Module],
    tensors: Sequence[Tensor],
    cut: Callable[[Tensor], Sequence[Tensor]],
) -> list[Any]:
    """Call a function with each part of some tensors, and keep only these.

    They are saved before the first call: a block around it that is computed again, and ends with it, stops there.

    Args:
        function: takes one part of each tensor.
        modules: that it computes with.
        tensors: to cut.
        cut: returns the parts of a tensor, as views.

    Returns:
        What each call returns.
    """
    # A recomputation would be outside of torch.func's transforms, and of automatic differentiation forward.
    transforms = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    if transforms or not torch.is_grad_enabled():
        return [function(*part) for part in zip(*map(cut, tensors), strict=True)]
    if torch.compiler.is_compiling():  # the graph would break at what saves the tensors
        how = _How(BlockPlan())
        return [_checkpoint(how, function, modules, part, {}) for part in zip(*map(cut, tensors), strict=True)]
    inputs = _Saved(tensors, cut)
    results = []
    for number, part in enumerate(zip(*map(cut, tensors), strict=True)):
        call = partial(inputs.call, function, number, [part])
        # What torch saves for the call itself is nothing that a block around it would have to compute again.
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            # Of no elements: torch keeps the random states of the devices of what it is given.
            results.append(_checkpoint(_How(BlockPlan()), call, modules, (part[0].new_empty(0),), {}))
    return results


class _Saved:
    """Tensors that autograd has saved, to be cut in the backward."""

    def __init__(self, tensors: Sequence[Tensor], cut: Callable[[Tensor], Sequence[Tensor]]) -> None:
        self._node: Any = _Save.apply(torch.empty(0, device="cpu", requires_grad=True), *tensors)  # type: ignore[no-untyped-call]
        self._cut, self._parts, self._task = cut, dict[int, tuple[Tensor, ...]](), -1

    def call(self, function: Callable[..., Any], number: int, first: list[tuple[Tensor, ...]], _: Tensor) -> Any:
        """Call a function with a part, which is given at first, and taken from what was saved later."""
        return function(*(first.pop() if first else self._part(number)))

    def _part(self, number: int) -> tuple[Tensor, ...]:
        """Return one part of each tensor."""
        task = torch._C._current_graph_task_id()
        if task == -1 or task != self._task or number not in self._parts:
            # Once for all parts of a backward: a checkpoint around this gives what it computes again only once.
            parts = zip(*map(self._cut, self._node.grad_fn.saved_tensors), strict=True)
            self._parts, self._task = dict(enumerate(parts)), task
        return self._parts.pop(number)


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, empty: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return empty.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("nobody differentiates by what is only saved")


def checkpoint_modules(
    modules: Iterable[nn.Module], store: ActivationStore | None = None, plan: BlockPlan | None = None
) -> None:
    """Checkpoint the forward of each module, in place.

    Args:
        modules: each is a block.
        store: where the plan moves tensors to; None: they stay where they are.
        plan: of each of these modules; None: of their inputs alone, which stay, or go where there is a store.
    """
    plan = plan or BlockPlan(inputs=Saved.KEEP if store is None else Saved.MOVE)
    how = _How(plan, store)
    if plan.results or plan.keeps is not None:
        from zeromesh.parallel.activation.selective import compiled_contexts

        how = _How(plan, store, compiled_contexts(plan))
    # Their forward and not they themselves: their hooks run around it, once.
    for module in () if plan.keeps_all else modules:
        module.forward = partial(_without_cache, module.forward, how, module)


def compile_forward(module: nn.Module, **options: Any) -> None:
    """Compile the module's forward."""
    forward: Any = module.forward
    # Inside the checkpoint if the inputs wait elsewhere, since moving them cannot be traced, and where experts are: the
    # graph breaks there, and torch compiles a recomputed region only as one graph.
    apart = isinstance(forward, partial) and forward.func is _without_cache
    if apart and (forward.args[1].store is not None or chooses(module.modules())):
        compiled: Any = partial(_without_cache, torch.compile(forward.args[0], **options), *forward.args[1:])
    else:
        compiled = torch.compile(forward, **options)
    module.forward = compiled


def _without_cache(forward: Callable[..., Any], how: _How, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a call, without the cache of keys and values that transformers may pass."""
    # What is computed twice must not be added to a cache twice.
    if torch.is_grad_enabled():
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        kwargs |= {"use_cache": False} if kwargs.get("use_cache") else {}
    # The module's own forward may have been replaced by a function that does not show it.
    return _checkpoint(how, forward, list(module.modules()), args, kwargs)


def _is_cache(value: Any) -> bool:
    """Return whether it is one of transformers', in which each block leaves its keys and values."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")
