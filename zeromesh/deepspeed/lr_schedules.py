"""``deepspeed.runtime.lr_schedules``: the schedules as classes, and their command-line arguments."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from zeromesh.optim.schedules import SCHEDULES, RateSchedule, curves_of

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
WARMUP_TYPE, WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "warmup_type", "log", "linear"

# The last of each schedule's parameters, and the rate that it starts from or goes up to.
_LAST = inspect.Parameter("last_batch_iteration", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=-1)
_RATES = {LR_RANGE_TEST: "lr_range_test_min_lr", ONE_CYCLE: "cycle_max_lr"}


def _parameters(name: str) -> list[inspect.Parameter]:
    """Return the parameters of a schedule in DeepSpeed's order, which is that of its function here."""
    declared = list(inspect.signature(SCHEDULES[name]).parameters.values())[2:]
    return [*(one.replace(kind=_LAST.kind) for one in declared), _LAST]


def _signature(name: str) -> inspect.Signature:
    return inspect.Signature([inspect.Parameter("optimizer", _LAST.kind), *_parameters(name)])


class _Named(RateSchedule):
    """A schedule with DeepSpeed's constructor: the optimizer, then the schedule's parameters in DeepSpeed's order.

    Attributes:
        min_lrs: lowest rate of each group.
        max_lrs: highest rate of each group, that of the end of the warm-up.
    """

    def __init_subclass__(cls) -> None:
        if cls.__name__ in SCHEDULES:  # not a class that a user derives
            cls.__signature__ = _signature(cls.__name__)  # type: ignore[attr-defined]

    def __init__(self, optimizer: Optimizer, *values: Any, **named: Any) -> None:
        if not isinstance(optimizer, Optimizer):
            # An engine's wrapper, or an older one of fp16, holds torch's.
            optimizer = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is not a torch optimizer; build the schedule over one")
        name = next(cls.__name__ for cls in type(self).__mro__ if cls.__name__ in SCHEDULES)
        bound = _signature(name).bind(optimizer, *values, **named)
        bound.apply_defaults()
        given = {key: value for key, value in bound.arguments.items() if key != "optimizer" and value is not None}
        start = given.pop("last_batch_iteration")
        curves, params = curves_of(name, given, optimizer)
        vars(self).update({key: value for key, value in params.items() if key.startswith("warmup_")})
        super().__init__(optimizer, curves, start, name)
        self.min_lrs, self.max_lrs = self._bounds(params)

    def _bounds(self, params: Mapping[str, Any]) -> tuple[list[float], list[float]]:
        own, found = [float(group["initial_lr"]) for group in self.optimizer.param_groups], []
        for low in (True, False):
            key = next((key for key in params if key.endswith("_min_lr" if low else "_max_lr")), None)
            value = own if key is None else params[key]
            found.append(list(value) if isinstance(value, list | tuple) else [value] * len(own))
        if "warmup_min_ratio" in params:  # whose rates are parts of the groups' own
            found[0] = [rate * params["warmup_min_ratio"] for rate in own]
        return found[0], found[1]

    def step(self, batch_iteration: int | None = None) -> None:
        """Advance by one update, or to a number of updates."""
        if batch_iteration is not None:
            self.last_batch_iteration = batch_iteration - 1
        super().step()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at the present update."""
        return self.get_last_lr()


class LRRangeTest(_Named):
    """Rise without end, to find where training breaks; see ``SCHEDULES``."""


class WarmupLR(_Named):
    """Rise to a rate and stay there; see ``SCHEDULES``."""


class WarmupDecayLR(_Named):
    """Rise, then fall in a line; see ``SCHEDULES``."""


class WarmupCosineLR(_Named):
    """Rise, then fall along a cosine; see ``SCHEDULES``."""

    def get_lr_ratio(self) -> float:
        """Return the share of the groups' own rates that is used at the present update."""
        own = float(self.optimizer.param_groups[0]["initial_lr"])
        return self.get_last_lr()[0] / own if own else 0.0


class OneCycle(_Named):
    """Rise and fall in lines, then decay, with a momentum that does the opposite; see ``SCHEDULES``."""

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """Return the betas of each group; None where the schedule does not move them."""
        moved = [curve(self.last_batch_iteration, 1.0)[1] is not None for curve in self._curves]
        return [group["betas"] for group in self.optimizer.param_groups] if any(moved) else None


def add_tuning_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add ``--lr_schedule`` and an argument for each parameter of the schedules."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument(f"--{LR_SCHEDULE}", type=str, default=None, help="LR schedule for training.")
    seen: set[str] = set()
    for parameter in (one for name in VALID_LR_SCHEDULES for one in _parameters(name)[:-1]):
        if parameter.name in seen:  # several schedules have it
            continue
        seen.add(parameter.name)
        kind = next((k for k in ("bool", "int", "float", "str") if k in str(parameter.annotation)), "str")
        make: Any = {"bool": _truth, "int": int, "float": float, "str": str}[kind]
        # Without a default, so that only what was given goes into a configuration.
        group.add_argument(f"--{parameter.name}", type=make, default=None)
    return parser


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() in ("true", "1")


def get_config_from_args(args: Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Return the scheduler's section of a configuration from parsed arguments, and None; or None and the error."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not supported LR schedule; it must be one of {', '.join(VALID_LR_SCHEDULES)}"
    given = {one.name: getattr(args, one.name, None) for one in _parameters(name)[:-1]}
    return {"type": name, "params": {key: value for key, value in given.items() if value is not None}}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the rate that an optimizer is to be built with for a scheduler's section; None and the error."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    name = config["type"]
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not a valid LR schedule"
    key = _RATES.get(name, "warmup_max_lr")
    default = {one.name: one.default for one in _parameters(name)}.get(key)
    rate = config["params"].get(key, default if isinstance(default, float) else None)
    return (None, f"{name} has no {key} in its params") if rate is None else (_first(rate), "")


def _first(rate: float | Iterable[float]) -> float:
    return float(rate) if isinstance(rate, int | float) else float(next(iter(rate)))
