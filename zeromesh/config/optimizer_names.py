"""Optimizers and schedules that a configuration may name."""

from __future__ import annotations

from importlib import import_module

from zeromesh.base.optimizer_table import OPTIMIZERS
from zeromesh.base.words import nearest, public_classes, show

SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest", "WSD")  # ours, in any case


EXACT_OPTIMIZERS = {name: row for table in OPTIMIZERS for names, row in table.replaces for name in names.split()}
"""Optimizers of DeepSpeed that are not here, in lower case, to what to use instead."""


GONE_PARTITIONS = {"time": "use best, which balances counted operations, or list the first block of each stage"}
"""Values of ``pipeline.partition`` that earlier versions had, and what to use instead."""


def check_partition(value: str | list[int]) -> str | list[int]:
    """Return ``value``. Raise ValueError, with the remedy, if it is one of earlier versions."""
    if isinstance(value, str) and value in GONE_PARTITIONS:
        raise ValueError(f"is not available; {GONE_PARTITIONS[value]}")
    return value


def check_optimizer(name: str) -> str:
    """Return ``name``. Raise ValueError, with a suggestion, if there is no such optimizer."""
    row = EXACT_OPTIMIZERS.get(name.lower())
    if row is not None:
        raise ValueError(f"is not available; use {row.name}: {row.why}")
    ours = tuple(row.name.lower() for row in OPTIMIZERS if row.states)
    return _check(name, ours, "torch.optim", "Optimizer")


def check_scheduler(name: str) -> str:
    """Return ``name``. Raise ValueError, with the remedy, if there is no such schedule or it needs a metric."""
    if name.lower() == "reducelronplateau":
        raise ValueError(
            "needs a metric in every step, which the engine does not have; leave the scheduler out, make one over the "
            "optimizer that initialize returns, and call its step(metric) yourself"
        )
    return _check(name, SCHEDULERS, "torch.optim.lr_scheduler", "LRScheduler")


def _check(name: str, ours: tuple[str, ...], module: str, base: str) -> str:
    if name.lower() in map(str.lower, ours):
        return name
    # Importing torch takes seconds, and another mistake in the file is told without it.
    torch_module = import_module(module)
    theirs = public_classes(torch_module, getattr(torch_module, base))
    if name.lower() in theirs:
        return name
    suggestion = nearest(name, (*ours, *(cls.__name__ for cls in theirs.values())))
    remedy = f"did you mean {show(suggestion)}?" if suggestion else "choose one of them"
    raise ValueError(f"must be one of {', '.join(ours)}, or a class of {module}; {remedy}")
