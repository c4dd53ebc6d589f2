"""Learning-rate schedules: each a function from the number of updates done to a learning rate.

``SCHEDULES`` has DeepSpeed's. The keyword arguments of a function are the schedule's parameters; their names, types and
defaults are read from its signature. Torch's schedules are used as they are.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from zeromesh.base.words import public_classes
from zeromesh.shard.optim.arguments import checked, unknown_parameter, without_auto

_log = logging.getLogger(__name__)

# Learning rate and first beta, from a position and a group's own learning rate; None leaves the betas.
Curve = Callable[[int, float], tuple[float, float | None]]

# DeepSpeed's timing: the n-th update, counted from 0, uses position n - 1, and position -1 is the start.

SECOND_BETA = 0.99  # the second beta of an optimizer whose first one a schedule moves, as in DeepSpeed


class RateSchedule:
    """Schedule that moves hyperparameters along one curve per parameter group; position -1 is the beginning."""

    # Not torch's LambdaLR: it multiplies the group's rate by a factor, which rounds rates that are given as they are.
    def __init__(
        self, optimizer: Optimizer, curves: Sequence[Curve], last_batch_iteration: int = -1, name: str = "Schedule"
    ) -> None:
        self.name = name
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._curves = curves
        seen: set[int] = set()
        for group in optimizer.param_groups:
            # Torch lets groups share the tensor of the optimizer's defaults; each needs a rate of its own.
            if id(group["lr"]) in seen:
                group["lr"] = _copied(group["lr"])
            seen.add(id(group["lr"]))
        # The same key as torch's: schedules made one after the other start from one learning rate.
        self._own = [float(group.setdefault("initial_lr", _copied(group["lr"]))) for group in optimizer.param_groups]
        self._apply()

    def step(self) -> None:
        """Advance by one update; call it after the optimizer's ``step``."""
        self.last_batch_iteration += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each group, as set last."""
        return list(self._last_lr)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run starts from."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()``; the groups are set at once."""
        self.last_batch_iteration = int(state["last_batch_iteration"])
        self._apply()

    def _apply(self) -> None:
        position = self.last_batch_iteration
        groups = self.optimizer.param_groups
        # All values first, so that one that cannot be computed leaves the groups alike.
        values = [curve(position, rate) for curve, rate in zip(self._curves, self._own, strict=True)]
        self._last_lr = [lr for lr, _ in values]
        for group, (lr, momentum) in zip(groups, values, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)  # a compiled update has read the tensor, and would not see another one
            else:
                group["lr"] = lr
            if momentum is not None and "betas" in group:
                group["betas"] = (momentum, SECOND_BETA, *group["betas"][2:])


def _copied(lr: Any) -> Any:
    return lr.clone() if isinstance(lr, torch.Tensor) else lr


def build(type: str, params: Mapping[str, Any], optimizer: Optimizer) -> RateSchedule | lr_scheduler.LRScheduler:
    """Make the schedule that a config names.

    Args:
        type: a name in ``SCHEDULES`` or a class of ``torch.optim.lr_scheduler``, in upper or lower case, which the
            settings have checked.
        params: its arguments; ``"auto"`` means not given. For those in ``SCHEDULES`` a list gives one value per group.
        optimizer: whose groups are moved.

    Raises:
        ValueError: for an unknown parameter, one that is missing, or a value that cannot be.
    """
    arguments, groups = without_auto(params), optimizer.param_groups
    lacking = [number for number, group in enumerate(groups) if "lr" not in group]
    if lacking:
        raise ValueError(
            f"scheduler {type} moves learning rates, but group {lacking[0]} of {optimizer.__class__.__name__} has no "
            "'lr'; give it one, or leave the scheduler out"
        )
    ours = {name.lower(): rate for name, rate in SCHEDULES.items()}.get(type.lower())
    if ours is None:
        cls: Any = public_classes(lr_scheduler, lr_scheduler.LRScheduler)[type.lower()]
        arguments = _check_params(type, arguments, cls)
        try:
            schedule: lr_scheduler.LRScheduler = cls(optimizer, **arguments)
        except (TypeError, ValueError) as error:
            raise ValueError(f"scheduler {type} with scheduler.params = {dict(arguments)}: {error}") from error
        return schedule
    start = arguments.pop("last_batch_iteration", -1)
    if not isinstance(start, int) or isinstance(start, bool) or start < -1:
        raise ValueError(f"scheduler.params.last_batch_iteration = {start!r} must be a whole number of at least -1")
    return RateSchedule(optimizer, curves_of(type, arguments, optimizer)[0], start, type)


def curves_of(type: str, params: Mapping[str, Any], optimizer: Optimizer) -> tuple[list[Curve], dict[str, Any]]:
    """Return the curve of each parameter group for a name in ``SCHEDULES``, and the checked parameters."""
    ours = {name.lower(): rate for name, rate in SCHEDULES.items()}[type.lower()]
    params, groups = _check_params(type, params, ours), optimizer.param_groups
    curves: list[Curve] = []
    for number in range(len(groups)):
        group_params = {}
        for key, value in params.items():
            if isinstance(value, list) and len(value) != len(groups):
                raise ValueError(f"scheduler {type}: {key} has {len(value)} values for {len(groups)} parameter groups")
            group_params[key] = value[number] if isinstance(value, list) else value
        curves.append(partial(ours, **group_params))
    # The first call also raises for values that do not fit together, before any group is changed.
    if any([curve(-1, 1.0)[1] is not None for curve in curves]):
        _tell_betas(type, optimizer)
    if (highest := inspect.signature(ours).parameters.get("warmup_max_lr")) is not None:
        _tell_rates(type, params.get("warmup_max_lr", highest.default), "warmup_max_lr" in params, groups)
    return curves, params


def _tell_rates(name: str, top: Any, is_given: bool, groups: Sequence[Mapping[str, Any]]) -> None:
    """Warn where a warm-up replaces rates of the optimizer by one that nobody chose for them."""
    rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
    if not isinstance(top, int | float) or all(rate == top for rate in rates):
        return  # each group has its own rate, or was given one
    if not is_given:
        _log.warning(
            "%s rises to its default scheduler.params.warmup_max_lr of %g (as in DeepSpeed), and not to the "
            "optimizer's lr of %s; set it",
            name,
            top,
            ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates)),
        )
    elif len(set(rates)) > 1:
        _log.warning(
            "%s takes scheduler.params.warmup_max_lr of %g for all parameter groups, whose own rates are %s; give "
            "it a list with one value per group to keep them apart",
            name,
            top,
            ", ".join(f"{rate:g}" for rate in rates),
        )


def _tell_betas(name: str, optimizer: Optimizer) -> None:
    """Warn where the momentum does not move, and where the second beta changes."""
    group_betas = [group["betas"] for group in optimizer.param_groups if "betas" in group]
    if len(group_betas) < len(optimizer.param_groups):
        _log.warning("%s leaves the momentum as it is where %s has no betas", name, optimizer.__class__.__name__)
    others = [betas[1] for betas in group_betas if betas[1] != SECOND_BETA]
    if others:
        _log.warning(
            "%s moves the first beta and sets the second one to %g instead of %g (as in DeepSpeed); to keep the "
            "optimizer's betas, set scheduler.params.cycle_momentum to false",
            name,
            SECOND_BETA,
            others[0],
        )


_LEAST: dict[str, int] = {
    "warmup_num_steps": 0,
    "decay_num_steps": 0,
    "decay_step_size": 0,
    "total_num_steps": 1,
    "cycle_first_step_size": 1,
    "cycle_second_step_size": 0,
    "lr_range_test_step_size": 1,
    "step_size": 1,  # by which torch's StepLR divides
}
"""Smallest values of whole numbers."""


def _check_params(name: str, params: Mapping[str, Any], make: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments, each known and of the type that is declared for it; none is missing."""
    declared = inspect.signature(make).parameters
    accepted = {key: value for key, value in declared.items() if key not in ("optimizer", "position", "rate")}
    for key in params:
        if key not in accepted:
            raise unknown_parameter("scheduler.params", key, name, accepted)
    missing = [key for key, value in accepted.items() if value.default is value.empty and key not in params]
    if missing:
        raise ValueError(f"scheduler {name} needs {', '.join(map(repr, missing))}; add it to scheduler.params")
    arguments: dict[str, Any] = {}
    for key, value in params.items():
        # Of ours a list gives one value per parameter group; torch's take lists of their own meanings.
        listed = isinstance(value, list | tuple) and make in SCHEDULES.values()
        path, least = f"scheduler.params.{key}", _LEAST.get(key)
        values = [checked(path, item, accepted[key], least) for item in (value if listed else [value])]
        arguments[key] = values if listed else values[0]
    return arguments


def _warmup(position: int, kind: str, steps: int) -> float:
    """Return the part of the way from 0 to 1."""
    done, steps = max(position, 0), max(2, steps)  # by the logarithm of 1 it would be divided
    if kind == "log":
        return min(1.0, math.log(done + 1) / math.log(steps))
    if kind == "linear":
        return min(1.0, done / steps)
    raise ValueError(f"warmup_type is {kind!r}; it must be 'log' or 'linear'")


def _warmup_lr(
    position: int,
    rate: float,
    *,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> tuple[float, None]:
    """Rise to ``warmup_max_lr`` (by default each group's own rate), then stay."""
    top = rate if warmup_max_lr is None else warmup_max_lr
    return warmup_min_lr + (top - warmup_min_lr) * _warmup(position, warmup_type, warmup_num_steps), None


def _warmup_decay_lr(
    position: int,
    rate: float,
    *,
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> tuple[float, None]:
    """Rise to ``warmup_max_lr``, then fall in a line to ``warmup_min_lr`` at ``total_num_steps``."""
    steps, part = max(2, warmup_num_steps), _warmup(position, warmup_type, warmup_num_steps)
    if position >= steps:
        part = max(0.0, (total_num_steps - position) / max(1, total_num_steps - steps))
    return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * part, None


def _warmup_cosine_lr(
    position: int,
    rate: float,
    *,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> tuple[float, None]:
    """Rise to the group's own learning rate, then fall along half a cosine to ``cos_min_ratio`` of it."""
    steps, warmed = max(2, warmup_num_steps), _warmup(position, warmup_type, warmup_num_steps)
    # As in DeepSpeed: the first update has a rate of 0, the second one ``warmup_min_ratio`` of the group's.
    if position < 0:
        return 0.0, None
    if position < steps:
        return rate * (warmup_min_ratio + (1 - warmup_min_ratio) * warmed), None
    progress = min(1.0, (position - steps + 1) / max(1, total_num_steps - steps))
    return rate * (cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2), None


def _one_cycle(
    position: int,
    rate: float,
    *,
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
    decay_mom_rate: float = 0.0,
) -> tuple[float, float | None]:
    """Rise and fall in lines, then decay; the momentum does the opposite (Smith 2018, arXiv 1803.09820)."""
    first, stairs = cycle_first_step_size, cycle_first_stair_count
    second = first if cycle_second_step_size is None else cycle_second_step_size
    if position < first + second:
        part = (position + 1) % (first + second)
        half = first
        if part > first:
            part, half = first + second - part, second
            stairs = stairs if cycle_second_stair_count is None else cycle_second_stair_count
        # On stairs, rate and momentum stay for each of so many parts of that half of the cycle.
        height = part * stairs // half / stairs if stairs > 0 else part / half
        lr = cycle_min_lr + (cycle_max_lr - cycle_min_lr) * height
        # DeepSpeed's begins at its minimum, and not at the maximum that belongs to the lowest rate.
        momentum = cycle_min_mom if position < 0 else cycle_max_mom - (cycle_max_mom - cycle_min_mom) * height
    else:
        intervals = (position - first - second + 1) / decay_step_size if decay_step_size else 0.0
        lr = cycle_min_lr / (1 + decay_lr_rate * intervals)
        momentum = cycle_max_mom * (1 + decay_mom_rate * intervals)
    return lr, momentum if cycle_momentum else None


def _lr_range_test(
    position: int,
    rate: float,
    *,
    lr_range_test_min_lr: float = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> tuple[float, None]:
    """Rise without end, to find where training breaks (Smith 2018, arXiv 1803.09820)."""
    intervals = (position + 1) / lr_range_test_step_size
    if lr_range_test_staircase:
        intervals = math.floor(intervals)
    return lr_range_test_min_lr * (1 + lr_range_test_step_rate * intervals), None


_WSD_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    # Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", 2024.
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
}


def _wsd(
    position: int,
    rate: float,
    *,
    total_num_steps: int,
    warmup_num_steps: int = 0,
    decay_num_steps: int | None = None,
    min_ratio: float = 0.0,
    decay_type: str = "linear",
) -> tuple[float, None]:
    """Warm up in a line, stay at the group's own rate, fall to ``min_ratio`` of it (Hu et al., "MiniCPM", 2024)."""
    # A tenth of all steps is what MiniCPM found to suffice.
    decay_steps = max(1, round(total_num_steps / 10)) if decay_num_steps is None else decay_num_steps
    if decay_type not in _WSD_DECAYS:
        raise ValueError(f"decay_type is {decay_type!r}; it must be one of {', '.join(map(repr, _WSD_DECAYS))}")
    if decay_steps < 0 or warmup_num_steps < 0 or warmup_num_steps + decay_steps > total_num_steps:
        raise ValueError(
            f"WSD's warmup_num_steps {warmup_num_steps} and decay_num_steps {decay_steps} must be at least 0 and "
            f"together at most total_num_steps {total_num_steps}"
        )
    update, decay_start = position + 1, total_num_steps - decay_steps
    if update < warmup_num_steps:
        return rate * (update + 1) / warmup_num_steps, None
    if update < decay_start:
        return rate, None
    progress = min(1.0, (update - decay_start) / decay_steps) if decay_steps else 1.0
    return rate * (min_ratio + (1 - min_ratio) * _WSD_DECAYS[decay_type](progress)), None


SCHEDULES: dict[str, Callable[..., tuple[float, float | None]]] = {
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_decay_lr,
    "WarmupCosineLR": _warmup_cosine_lr,
    "OneCycle": _one_cycle,
    "LRRangeTest": _lr_range_test,
    "WSD": _wsd,
}
"""Function of each schedule, by name."""

RATES = {
    "warmuplr": ("warmup_min_lr", "warmup_max_lr"),
    "warmupdecaylr": ("warmup_min_lr", "warmup_max_lr"),
    "onecycle": ("cycle_min_lr", "cycle_max_lr"),
    "lrrangetest": ("lr_range_test_min_lr",),
    "onecyclelr": ("max_lr",),
    "cycliclr": ("base_lr", "max_lr"),
}
"""Parameters that are learning rates, whatever a group's own is, by lower-case name; the last one is the highest."""


def in_proportion(
    kind: str, params: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], apart: str
) -> dict[str, Any]:
    """Return parameters with which groups that have the option ``apart`` follow the others in proportion.

    Such a group has its own learning rate where the schedule is at its highest. Each schedule in ``RATES`` is a
    multiple of its rates, so that these are multiplied. Rates that are given as a list are left as they are.

    Args:
        kind: name of the schedule, in upper or lower case.
        params: its parameters, for all groups.
        groups: of the optimizer, with their own learning rates.
        apart: option of a group.
    """
    keys, values = RATES.get(kind.lower(), ()), without_auto(params)
    ours = {name.lower(): rate for name, rate in SCHEDULES.items()}.get(kind.lower())
    if ours is not None:
        declared = inspect.signature(ours).parameters
        values = {key: declared[key].default for key in keys if isinstance(declared[key].default, float)} | values
    peak = values.get(keys[-1]) if keys else None
    single = all(isinstance(values.get(key, 0.0), int | float) for key in keys)
    if not any(apart in group for group in groups) or not single or not isinstance(peak, int | float) or peak <= 0:
        return dict(params)
    shares = [float(group["lr"]) / peak if apart in group else 1.0 for group in groups]
    return {**params, **{key: [values[key] * share for share in shares] for key in keys if key in values}}
