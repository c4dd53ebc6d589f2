"""Arguments of DeepSpeed's functions: its order for ``initialize``, and refusals of those that cannot be honoured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch import nn

P = ParamSpec("P")
R = TypeVar("R")

INITIALIZE = (
    "args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler", "distributed_port", "mpu",
    "dist_init_required", "collate_fn", "config", "mesh_param", "config_params",
)  # fmt: skip
"""The parameters of ``deepspeed.initialize`` in their order."""


def takes_args_first(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``initialize`` be called by position in DeepSpeed's order, too, which begins with ``args``."""

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        # A call whose first positional argument is not a module has DeepSpeed's order.
        if not arguments or isinstance(arguments[0], nn.Module):
            return function(*arguments, **named)
        keywords: dict[str, Any] = {**named, **_by_name(arguments, named)}
        return function(**keywords)  # type: ignore[call-arg]

    return call


def _by_name(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return positional arguments in DeepSpeed's order by name."""
    first = arguments[0]
    if isinstance(first, str | Path | Mapping):
        raise TypeError(
            f"the first positional argument of initialize is a {type(first).__name__}; it must be the model, or the "
            "parsed command line as in DeepSpeed: pass model= and config= by name"
        )
    if len(arguments) > len(INITIALIZE):
        raise TypeError(f"initialize takes at most {len(INITIALIZE)} positional arguments, not {len(arguments)}")
    bound = dict(zip(INITIALIZE, arguments, strict=False))
    twice = [name for name in bound if name in named]
    if twice:
        raise TypeError(
            f"initialize was given {twice[0]} twice: by name, and as positional argument "
            f"{INITIALIZE.index(twice[0]) + 1} in DeepSpeed's order, as the first one is a {type(first).__name__}, not "
            "a module; pass all of them by name"
        )
    return bound


def refuse(call: str, name: str, value: object, remedy: str, default: object = None) -> None:
    """Raise ValueError unless an argument of DeepSpeed's, which cannot be honoured, has its default."""
    # By type, too: 0 is not False, and a tensor does not compare to one truth.
    if value is not default and not (type(value) is type(default) and value == default):
        raise ValueError(f"{call}: {name} = {value!r} cannot be honoured; {remedy}")
