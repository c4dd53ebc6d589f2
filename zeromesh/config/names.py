"""Optimizers and schedules that a configuration may name."""

from __future__ import annotations

from zeromesh.config.errors import nearest, show

OPTIMIZERS = ("adam", "adamw", "lamb", "lion", "adagrad", "sgd", "muon")  # ours, in any letter case
SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest", "WSD")  # ours, in any case

# Optimizers of DeepSpeed that are not here, by what to use instead, with the reason why that does as well.
_INSTEAD = (
    ("fusedadam cpuadam deepspeedcpuadam", "adam or adamw", "; torch's fused update is taken where there is one"),
    ("fusedlamb", "lamb", "; torch's fused update is taken where there is one"),
    ("fusedlion cpulion deepspeedcpulion", "lion", "; torch's fused update is taken where there is one"),
    ("cpuadagrad deepspeedcpuadagrad", "adagrad", "; torch's fused update is taken where there is one"),
    ("onebitadam zerooneadam", "adam", "; gradients travel in 16 bits under fp16 or bf16"),
    ("onebitlamb", "lamb", "; gradients travel in 16 bits under fp16 or bf16"),
    ("muadam", "adam", ", and pass parameter groups with muP's learning rates to initialize"),
    ("muadamw", "adamw", ", and pass parameter groups with muP's learning rates to initialize"),
    ("musgd", "sgd", ", and pass parameter groups with muP's learning rates to initialize"),
)
GONE_OPTIMIZERS = {name: f"use {plain}{why}" for names, plain, why in _INSTEAD for name in names.split()}


GONE_PARTITIONS = {"time": "use best, which balances counted operations, or list the first block of each stage"}
"""Values of ``pipeline.partition`` that earlier versions had, and what to use instead."""


def check_partition(value: str | list[int]) -> str | list[int]:
    """Return ``value``. Raise ValueError, with the remedy, if it is one of earlier versions."""
    if isinstance(value, str) and value in GONE_PARTITIONS:
        raise ValueError(f"is not available; {GONE_PARTITIONS[value]}")
    return value


def check_optimizer(name: str) -> str:
    """Return ``name``. Raise ValueError, with a suggestion, if there is no such optimizer."""
    # Imported late, because the command line reads settings before anything needs torch.
    import torch

    if name.lower() in GONE_OPTIMIZERS:
        raise ValueError(f"is not available; {GONE_OPTIMIZERS[name.lower()]}")
    return _check(name, OPTIMIZERS, public_classes(torch.optim, torch.optim.Optimizer), "torch.optim")


def check_scheduler(name: str) -> str:
    """Return ``name``. Raise ValueError, with the remedy, if there is no such schedule or it needs a metric."""
    from torch.optim import lr_scheduler

    if name.lower() == "reducelronplateau":
        raise ValueError(
            "needs a metric in every step, which the engine does not have; leave the scheduler out, make one over the "
            "optimizer that initialize returns, and call its step(metric) yourself"
        )
    return _check(name, SCHEDULERS, public_classes(lr_scheduler, lr_scheduler.LRScheduler), "torch.optim.lr_scheduler")


def public_classes(module: object, base: type) -> dict[str, type]:
    """Return the public subclasses of ``base`` in ``module``, by name in lower case."""
    # Read from torch, so that a class of a newer version is known.
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    found = {name: value for name, value in public.items() if isinstance(value, type) and value is not base}
    return {name.lower(): value for name, value in found.items() if issubclass(value, base)}


def _check(name: str, ours: tuple[str, ...], theirs: dict[str, type], module: str) -> str:
    if name.lower() in {*map(str.lower, ours), *theirs}:
        return name
    suggestion = nearest(name, (*ours, *(cls.__name__ for cls in theirs.values())))
    remedy = f"did you mean {show(suggestion)}?" if suggestion else "choose one of them"
    raise ValueError(f"must be one of {', '.join(ours)}, or a class of {module}; {remedy}")
