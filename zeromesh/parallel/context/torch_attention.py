"""Context parallelism of a torch module that calls torch's attention itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeromesh.parallel.context import spread_batch as batch
from zeromesh.parallel.context.applied import SpreadSequences, named_arguments, parameters_of, refuse
from zeromesh.parallel.follow.activation_parts import replace_forward
from zeromesh.parallel.follow.split_activation import SplitActivation
from zeromesh.parallel.follow.token_check import Following, TokenCheck, alone
from zeromesh.parallel.follow.tokens import OfLabels
from zeromesh.parallel.tensor.split_plan import matches

# Layers of torch that mix positions in their own way.
_MIXING: dict[type[nn.Module], str] = {
    nn.MultiheadAttention: "torch's own layer calls an attention that cannot be replaced",
    nn.RNNBase: "a recurrent layer reads the sequence from its begin",
}


def install(model: nn.Module, applied: SpreadSequences, unchecked: Sequence[str] = ()) -> None:
    """Change a model so that its sequences are spread over ranks. Raise Unsupported if it cannot."""
    name = type(model).__name__
    parameters = parameters_of(type(model))
    positions = next((candidate for candidate in batch.POSITIONS if candidate in parameters), None)
    if positions is None:
        raise refuse(
            name,
            f"its forward takes no {' or '.join(batch.POSITIONS)}, so it cannot know at which positions of the "
            "sequence a rank's tokens are",
            "add such an argument, int64 of shape (batch, sequence), or set mesh.context to 1",
        )
    require_no_mixing(model)
    check = check_of(model, applied, unchecked)
    # In all modules, not only the whole, as a checkpointed module runs again on its own in the backward.
    for path, module in model.named_modules():
        if not type(module).__module__.startswith("torch.nn"):
            replace_forward(module, partial(_Interception(path or name, applied, check).run, module.forward))
    check.install(model)
    replace_forward(model, partial(_run, type(model), positions, applied, check, model.forward))


def check_of(
    model: nn.Module, applied: SpreadSequences, unchecked: Sequence[str], trusted: str | None = None
) -> TokenCheck:
    """Return the check of a model's code, but for modules that compute each token by themselves."""
    check = TokenCheck(model, 2 * applied.group.size, True, trusted)  # a rank has two chunks, which are apart
    for pattern in unchecked:
        paths = [path for path, _ in model.named_modules() if matches(path, pattern)]
        if not paths:
            raise ValueError(
                f"context_parallel.unchecked has {pattern!r}, which is not a module of {type(model).__name__}; "
                "name modules of the model"
            )
        for path in paths:
            check.replace(path, alone, True)
    return check


def require_no_mixing(model: nn.Module) -> None:
    """Raise Unsupported if a layer is known to mix positions otherwise than by attention."""
    for path, module in model.named_modules():
        for kind, reason in _MIXING.items():
            if isinstance(module, kind):
                raise refuse(f"{path} ({type(module).__name__})", reason)
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and max(module.kernel_size) > 1:
            raise refuse(f"{path} ({type(module).__name__})", "a convolution reads tokens that other ranks have")


def _run(
    kind: type[nn.Module],
    positions: str,
    applied: SpreadSequences,
    check: TokenCheck,
    forward: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:  # by position alone: a model's own argument may have any of these names
    """Cut the arguments of the model's forward, and take the mean of its losses."""
    if not applied.replaces:
        return forward(*args, **kwargs)
    applied.begin()
    part = batch.split(named_arguments(kind, args, kwargs), applied.group, positions, shift=False)
    with followed(kind.__name__, check, part, applied):
        output = forward(**part)
    applied.require_attention(kind.__name__)
    if "labels" not in part:
        return output
    if not isinstance(output, Tensor) or output.numel() != 1:
        raise refuse(
            kind.__name__,
            "given labels, it returns something else than its mean loss, a scalar",
            "call it without labels, and give your loss of its output, and this rank's labels, to mean_loss",
        )
    return applied.mean_loss(output, part["labels"])


def followed(
    name: str, check: TokenCheck, part: dict[str, Any], applied: SpreadSequences
) -> AbstractContextManager[None]:
    """Return a context of a forward of some arguments. It raises Unsupported for code that mixes tokens elsewhere."""

    def call(model: nn.Module, run: Any) -> None:
        arguments = dict(part)
        for key, value in check.without_memory(part).items():
            if isinstance(value, Tensor):
                arguments[key] = value
            if isinstance(value, Tensor) and value.ndim:
                length = value.shape[1]
                own_part = run.spread(value, 1, length * applied.group.size, length)
                arguments[key] = run.unsplit(own_part).as_subclass(OfLabels) if key in batch.LABELS else own_part
        with applied.without_messages():
            model(**arguments)

    remedy = (
        "name the module in context_parallel.unchecked if it computes each token by itself, or set mesh.context to 1"
    )
    return check.followed(part, call, lambda reason: refuse(name, reason, remedy))


# The replacement in force. A backward may run on a thread of its own, where none is.
_inside: ContextVar[_Interception | None] = ContextVar("the module whose attention is replaced", default=None)


class _Interception(Following):
    """Replacement of the attention that one module calls."""

    def __init__(self, name: str, applied: SpreadSequences, check: TokenCheck) -> None:
        super().__init__(check)
        self._name, self._applied = name, applied

    def run(self, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not self._applied.replaces:
            return forward(*args, **kwargs)
        outer = _inside.get()
        token = _inside.set(self)
        try:
            # Inside of a module of the same model, the mode is in force already; errors name the inner one.
            is_there = outer is not None and outer._applied is self._applied
            with nullcontext() if is_there else self:
                return forward(*args, **kwargs)
        finally:
            _inside.reset(token)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_compiling():
            self.check.follow(func, args, kwargs, sys._getframe(1))
        if func is F.multi_head_attention_forward:
            raise refuse((_inside.get() or self)._name, "F.multi_head_attention_forward cannot be replaced")
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        # Parts of activations come back here as plain tensors, once it is known what heads they have.
        if SplitActivation in types:
            with self:
                return SplitActivation.__torch_function__(func, types, args, kwargs)
        return (_inside.get() or self)._attend(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute attention over the ranks. Raise Unsupported if it is more than causal, of a sequence to itself."""
        settings = dict(zip(("dropout_p", "is_causal"), args, strict=False)) | kwargs
        dropout, reason = settings.get("dropout_p", 0.0), ""
        if attn_mask is not None:
            reason = f"its attention has a mask, of shape {tuple(attn_mask.shape)}: only is_causal=True can be spread"
        elif not settings.get("is_causal"):
            reason = "its attention is not causal"
        elif dropout > 0:
            reason = f"its attention has dropout {dropout:g}, which ranks would have to draw alike: set it to 0"
        if reason:
            raise refuse(self._name, reason)
        return self._applied.attend(query, key, value, settings.get("scale"))
