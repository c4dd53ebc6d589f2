"""The optimizer that ``initialize`` returns: its methods act on the engine, and it has DeepSpeed's attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper, wraps
from typing import Any, Protocol
from weakref import ref

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zeromesh.base.kernels.update_rules import rule_of


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
    before, step = {k: v for k, v in vars(optimizer).items() if k == "step"}, EngineStep(optimizer, alive)
    vars(optimizer).update(step=step, zero_grad=partial(_zero_grad, alive))

    def unbind() -> None:
        vars(optimizer).pop("zero_grad", None)
        if vars(optimizer).get("step") is step:  # or a schedule is around it, and it passes all calls on
            del vars(optimizer)["step"]
            vars(optimizer).update(before)

    return unbind


class EngineStep:
    """The ``step`` of an engine's optimizer: a call of the user's updates by the engine, whose call it passes on.

    So hooks of the step run once for an update, when there are gradients.
    """

    def __init__(self, optimizer: Optimizer, engine: ref[Updates]) -> None:
        inner, before = optimizer.step, vars(optimizer).get("step", type(optimizer).step)
        function: Any = getattr(inner, "__func__", lambda _, *args, **kwargs: before(*args, **kwargs))

        @wraps(inner)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            alive = engine()
            if alive is None or alive.updating:
                return function(optimizer, *args, **kwargs)
            if any(value is not None for value in (*args, *kwargs.values())):
                raise RuntimeError(
                    "optimizer.step() with a closure would evaluate the model in the middle of an update; compute the "
                    "loss, call engine.backward(loss), and then engine.step()"
                )
            alive.update()
            return None

        # ``update_class`` looks behind it.
        vars(step).update(updates_engine=True, __wrapped__=before)
        update_wrapper(self, step)
        # Torch's schedules ask for the function. The optimizer must not hold itself alive.
        self.__func__, self._of = step, ref(optimizer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Update, or pass the engine's call on."""
        optimizer = self._of()
        assert optimizer is not None
        return self.__func__(optimizer, *args, **kwargs)


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
    hooks = (hook for table in _hooks(optimizer) for hook in table.values())
    has_rules = all(rule_of(optimizer, group) for group in optimizer.param_groups)
    return has_rules and all(isinstance(hook, PartHook) for hook in hooks)


def _hooks(optimizer: Optimizer) -> Sequence[dict[int, Any]]:
    """Return the hooks before and after the step, of the optimizer and of all."""
    return (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )


class _Pieces:
    """Stands for what an optimizer holds while a hook of the user's runs, which would take pieces for parameters."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "a hook of the optimizer's step reads its parameters or states, which are pieces on this rank: set "
            "gradient_clipping to clip, read and change gradients before the step by safe_get_full_grad and "
            "safe_set_full_grad, or use ZeRO-0 (zero_optimization.stage = 0)"
        )

    def __iter__(self, *_: Any) -> Iterator[Any]:
        return self.refused  # type: ignore[no-any-return]

    __len__ = __getitem__ = __contains__ = __iter__


@contextmanager
def pieces_hidden(optimizer: Optimizer, changed: Callable[[], None] | None) -> Iterator[None]:
    """Let hooks of the step that are not ZeroMesh's run in this context without the pieces of parameters.

    They may count, and read and set options of groups; ``changed`` is called after those that come before the step.
    """
    users = [
        (table, key, hook, None if number % 2 else changed)
        for number, table in enumerate(_hooks(optimizer))
        for key, hook in table.items()
        if not isinstance(hook, PartHook)
    ]
    for table, key, hook, after in users:
        table[key] = partial(_call_without_pieces, hook, after)
    try:
        yield
    finally:
        for table, key, hook, _ in users:
            if key in table:  # it may have removed itself
                table[key] = hook


def _call_without_pieces(
    hook: Callable[..., Any], after: Callable[[], None] | None, optimizer: Optimizer, *args: Any
) -> Any:
    entries = [(vars(optimizer), "state", optimizer.state)]
    entries += [(group, "params", group["params"]) for group in optimizer.param_groups]
    for place, name, _ in entries:
        place[name] = _Pieces()
    try:
        return hook(optimizer, *args)
    finally:
        for place, name, value in entries:
            place[name] = value
        if after is not None:
            after()


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
