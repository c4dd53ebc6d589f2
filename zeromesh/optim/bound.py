"""The optimizer that ``initialize`` returns: its methods act on the engine, and it has DeepSpeed's attributes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import ref

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zeromesh.kernels.rules import rule_of


class Updates(Protocol):
    """The part of an engine that its optimizer calls."""

    @property
    def updating(self) -> bool:
        """True if the engine runs the optimizer's step itself."""

    def update(self) -> None:
        """Update the parameters now."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""


def bind(optimizer: Optimizer, engine: Updates) -> Callable[[], None]:
    """Let ``optimizer.step()`` be an update of the engine, and ``zero_grad()`` drop its gradients; return the undo."""
    alive = ref(engine)  # the optimizer may outlive the engine
    # The optimizer itself holds pieces of parameters, whose gradients exist only during an update.
    handle = optimizer.register_step_pre_hook(PartHook(partial(_update_first, alive)))
    optimizer.zero_grad = partial(_zero_grad, alive)  # type: ignore[method-assign]

    def unbind() -> None:
        handle.remove()
        vars(optimizer).pop("zero_grad", None)

    return unbind


def _update_first(engine: ref[Updates], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Update before a step of the user's, which then finds no gradients and does nothing."""
    alive = engine()
    if alive is None or alive.updating:
        return
    if any(value is not None for value in (*args[1:], *kwargs.values())):
        raise RuntimeError(
            "optimizer.step() with a closure would evaluate the model in the middle of an update; compute the loss, "
            "call engine.backward(loss), and then engine.step()"
        )
    alive.update()


def _zero_grad(engine: ref[Updates], set_to_none: bool = True) -> None:
    if (alive := engine()) is not None:
        alive.zero_grad(set_to_none)


@dataclass(frozen=True)
class PartHook:
    """A hook of a step that may be called for each part of it."""

    call: Callable[..., None]

    def __call__(self, *args: Any) -> None:
        """Call the hook."""
        self.call(*args)


def steps_in_parts(optimizer: Optimizer) -> bool:
    """Return whether steps of some parameters after the others are one step of all: nothing counts or watches them."""
    own = vars(optimizer).get("step")
    # Of wrappers around the step, torch's schedulers have one that counts nothing.
    if own is not None and not (
        hasattr(own, "_wrapped_by_lr_sched") and getattr(own, "__wrapped__", None) is type(optimizer).step
    ):
        return False
    hooks = (
        *optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values(),
        *_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values(),
    )  # fmt: skip
    known = all(rule_of(type(optimizer), group) for group in optimizer.param_groups)
    return known and all(isinstance(hook, PartHook) for hook in hooks)


def answer(optimizer: Optimizer | None, scale: float, overflow: bool) -> None:
    """Let ``optimizer.cur_scale``, ``.loss_scale`` and ``.overflow`` tell how the last update went."""
    if optimizer is not None:
        name_values(optimizer, cur_scale=scale, loss_scale=scale, overflow=overflow)


def name_values(optimizer: Optimizer, /, **values: Any) -> None:
    """Give an optimizer attributes that programs written for DeepSpeed read."""
    for name, value in values.items():
        # An attribute that the optimizer's own class has is left alone.
        if not hasattr(type(optimizer), name):
            setattr(optimizer, name, value)
