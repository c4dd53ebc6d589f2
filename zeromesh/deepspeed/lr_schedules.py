"""``deepspeed.runtime.lr_schedules``: the schedules as classes."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from zeromesh.shard.optim.arguments import unknown_parameter, without_auto
from zeromesh.shard.optim.schedules import SCHEDULES, RateSchedule, curves_of

_log = logging.getLogger("zeromesh")

LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"

# The last of each schedule's parameters.
_LAST = inspect.Parameter("last_batch_iteration", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=-1)


def _parameters(name: str) -> list[inspect.Parameter]:
    """Return the parameters of a schedule in DeepSpeed's order, which is that of its function here."""
    declared = list(inspect.signature(SCHEDULES[name]).parameters.values())[2:]
    return [*(parameter.replace(kind=_LAST.kind) for parameter in declared), _LAST]


def _signature(name: str) -> inspect.Signature:
    return inspect.Signature([inspect.Parameter("optimizer", _LAST.kind), *_parameters(name)])


class _Named(RateSchedule):
    """A schedule with DeepSpeed's constructor: the optimizer, then the schedule's parameters in DeepSpeed's order.

    The parameters are attributes, too, without the beginning of their name that tells the schedule.

    Attributes:
        min_lrs: lowest rate of each group.
        max_lrs: highest rate of each group, that of the end of the warm-up.
    """

    def __init_subclass__(cls) -> None:
        if cls.__name__ in SCHEDULES:  # not a class that a user derives
            cls.__signature__ = _signature(cls.__name__)  # type: ignore[attr-defined]

    def __init__(self, optimizer: Optimizer, *values: Any, **named: Any) -> None:
        name = next(cls.__name__ for cls in type(self).__mro__ if cls.__name__ in SCHEDULES)
        bound = _signature(name).bind(optimizer, *values, **named)
        if not isinstance(optimizer, Optimizer):
            # An engine's wrapper, or an older one of fp16, holds torch's.
            optimizer = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is not a torch optimizer; build the schedule over one")
        bound.apply_defaults()
        arguments = {key: value for key, value in bound.arguments.items() if key != "optimizer" and value is not None}
        start = arguments.pop("last_batch_iteration")
        for key in ("warmup_num_steps", "lr_range_test_step_size"):
            if key in arguments and (type(arguments[key]) is not int or arguments[key] < 1):
                raise ValueError(f"{key} must be a positive integer, got {arguments[key]!r}; it is a number of updates")
        if arguments.get("warmup_type", WARMUP_LOG_RATE) not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
            _log.warning(
                "warmup_type %r is neither 'log' nor 'linear': it is 'log' (as in DeepSpeed)", arguments["warmup_type"]
            )
            arguments["warmup_type"] = WARMUP_LOG_RATE
        curves, params = curves_of(name, arguments, optimizer)
        if "warmup_num_steps" in params:
            params["warmup_num_steps"] = max(2, params["warmup_num_steps"])
        vars(self).update({re.sub("^(lr_range_test_|cycle_(?!momentum))", "", key): params[key] for key in params})
        self._is_set = start == -1 and name != ONE_CYCLE
        super().__init__(optimizer, curves, start, name)
        self._bounds(params)

    def _bounds(self, params: Mapping[str, Any]) -> None:
        initial_rates = [float(group["initial_lr"]) for group in self.optimizer.param_groups]

        def per_group(end: str) -> list[float]:
            value = next((params[key] for key in params if key.endswith(end)), initial_rates)
            return list(value) if isinstance(value, list | tuple) else [value] * len(initial_rates)

        if self.name == LR_RANGE_TEST:
            self.min_lr = per_group("_min_lr")
        elif self.name == WARMUP_COSINE_LR:  # whose rates are parts of the groups' own
            self.org_lrs = initial_rates
        else:
            self.min_lrs, self.max_lrs = per_group("_min_lr"), per_group("_max_lr")
            self.delta_lrs = [high - low for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def step(self, last_batch_iteration: int | None = None, *, batch_iteration: int | None = None) -> None:
        """Advance by one update, or to a number of updates; ``batch_iteration`` is ``OneCycle``'s name of it."""
        number = batch_iteration if last_batch_iteration is None else last_batch_iteration
        if number is not None:
            self.last_batch_iteration = number - 1
        self._is_set = True
        super().step()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at the present update."""
        position = self.last_batch_iteration
        return [curve(position, rate)[0] for curve, rate in zip(self._curves, self._own, strict=True)]

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each group, as set last.

        Raises:
            AssertionError: none was set, as the schedule starts anew from a later update; call ``step`` first.
        """
        if not self._is_set:
            raise AssertionError("need to call step() first: this schedule has set no learning rate yet")
        return super().get_last_lr()

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()``; groups keep their rates, which an optimizer's state has, until ``step``."""
        self.last_batch_iteration = sd["last_batch_iteration"]

    def _apply(self) -> None:
        if self._is_set or self.last_batch_iteration == -1:
            super()._apply()


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
        return self._curves[0](self.last_batch_iteration, 1.0)[0]


class OneCycle(_Named):
    """Rise and fall in lines, then decay, with a momentum that does the opposite; see ``SCHEDULES``."""

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """Return the betas of each group; None where the schedule does not move them."""
        moved = [curve(self.last_batch_iteration, 1.0)[1] is not None for curve in self._curves]
        return [group["betas"] for group in self.optimizer.param_groups] if any(moved) else None


def configured(document: Mapping[str, Any]) -> Callable[[Optimizer], RateSchedule] | None:
    """Return what makes the scheduler of a configuration over an optimizer; None if it names none of these."""
    section, params = "scheduler", "params"
    scheduler = document.get(section)
    scheduler = scheduler if isinstance(scheduler, Mapping) else {}
    cls = {name.lower(): globals()[name] for name in VALID_LR_SCHEDULES}.get(str(scheduler.get("type")).lower())
    if cls is None:
        return None
    options = without_auto(scheduler.get(params) or {})
    parameter_names = [parameter.name for parameter in _parameters(cls.__name__)]
    for key in options:
        if key not in parameter_names:
            raise unknown_parameter("scheduler.params", key, cls.__name__, parameter_names)

    def make(optimizer: Optimizer) -> RateSchedule:
        try:
            schedule: RateSchedule = cls(optimizer, **options)
        except TypeError as error:
            raise ValueError(f"scheduler {cls.__name__} with scheduler.params = {options}: {error}") from None
        return schedule

    return make
