"""Configuration of a layout as JSON, the layout of a configuration, and the names of placements for texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from zeromesh.base.placement import ROWS, PlacementRow, Tier
from zeromesh.config.errors import ConfigError
from zeromesh.config.settings import TIERS, Settings

NVME_FOLDER = "/local_nvme"
LEARNING_RATE = 3e-4  # of a written configuration; usual for AdamW, and the user's to change

ADVICE = {
    "sequence": "shorten the sequence",
    "host": "add host memory",
    "disk": "add NVMe disks, and keep states there",
    "nodes": "add nodes",
    "memory": "take devices with more memory",
}
"""Remedies where no layout fits, for the planner."""


class WrittenRun(NamedTuple):
    """Choices of a run that a configuration states."""

    train: int
    micro: int
    accumulation: int
    axes: Mapping[str, int]
    row: PlacementRow
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: str = ""  # granularity; "": nothing is computed again
    activations_on_host: bool = False
    sequence: bool = False
    parameter_slots: int | None = None
    gradient_slots: int | None = None
    precision: str = "bf16"  # or "fp16" or "fp32"


def stage_of(row: PlacementRow) -> int:
    """Return the ZeRO number of a row, whatever its tiers are."""
    places = (row.parameter, row.gradient, row.optimizer)
    return next(
        n for n, candidate in ROWS.items() if (candidate.parameter, candidate.gradient, candidate.optimizer) == places
    )


def row_name(row: PlacementRow) -> str:
    """Return a row's name for people, such as ``ZeRO-3, optimizer on host``."""
    name = f"ZeRO-{stage_of(row)}"
    optimizer, parameter = row.optimizer_tier, row.parameter_tier
    words = {tier: tier.value for tier in Tier} | {Tier.NVME: "NVMe"}
    if optimizer is Tier.DEVICE and parameter is Tier.DEVICE:
        return name
    share = f"{row.offloaded:.0%} of " if row.offloaded < 1 and optimizer is not Tier.DEVICE else ""
    if optimizer is parameter:
        return f"{name}, {share}all on {words[optimizer]}" + (", split masters" if row.split else "")
    parts = [f"{share}optimizer on {words[optimizer]}"] if optimizer is not Tier.DEVICE else []
    parts += [f"parameters on {words[parameter]}"] if parameter is not Tier.DEVICE else []
    return ", ".join([name, *parts])


def document_of(run: WrittenRun) -> dict[str, Any]:
    """Return the JSON document of a run, without its model and its text."""
    row, axes = run.row, {axis: size for axis, size in run.axes.items() if size > 1}
    names = {tier: name for name, tier in TIERS.items()}
    zero: dict[str, Any] = {"stage": stage_of(row)}
    for key, tier in (("offload_optimizer", row.optimizer_tier), ("offload_param", row.parameter_tier)):
        if tier is not Tier.DEVICE:
            zero[key] = {"device": names[tier]}
            if tier is Tier.NVME:
                zero[key]["nvme_path"] = NVME_FOLDER
    if row.optimizer_tier is not Tier.DEVICE:
        zero["offload_optimizer"] |= {"ratio": row.offloaded} if row.offloaded < 1 else {}
        zero["offload_optimizer"] |= {"split_master": True} if row.split else {}
    document: dict[str, Any] = {
        "train_batch_size": run.train,
        "train_micro_batch_size_per_gpu": run.micro,
        "gradient_accumulation_steps": run.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        **({run.precision: {"enabled": True}} if run.precision != "fp32" else {}),
        "zero_optimization": zero,
        # Also where it is 1: with one shard group of a replicated mesh, what is left would be another number.
        "mesh": axes | ({"data": run.axes.get("data", 1)} if axes.get("replicate") else {}),
    }
    slots = {"parameter": run.parameter_slots, "gradient": run.gradient_slots}
    document["slots"] = {name: count for name, count in slots.items() if count is not None}
    if run.axes.get("pipeline", 1) > 1:
        document["pipeline"] = {"schedule": run.schedule} | ({"chunks": run.chunks} if run.chunks > 1 else {})
    if run.sequence and run.axes.get("tensor", 1) > 1:
        document["tensor_parallel"] = {"sequence": True}
    if run.recompute:
        document["activation_checkpointing"] = {"enabled": True}
        document["activation_checkpointing"] |= {"granularity": run.recompute} if run.recompute != "full" else {}
        document["activation_checkpointing"] |= {"cpu_checkpointing": True} if run.activations_on_host else {}
    return {key: value for key, value in document.items() if value != {}}


def is_refused(run: WrittenRun) -> bool:
    """Return whether ``REFUSALS`` has a row against the configuration of a run."""
    try:
        Settings.load(document_of(run), tells=False)
    except ConfigError:
        return True
    return False


def completed_document(document: Mapping[str, Any], planned: Mapping[str, Any]) -> dict[str, Any]:
    """Return a user's document with a plan's layout in it; the user's optimizer and clipping stay."""
    users_keys = ("optimizer", "gradient_clipping")
    # A layout that says nothing of these has none of them.
    layout = ("mesh", "slots", "pipeline", "tensor_parallel", "activation_checkpointing", "bf16", "fp16", "bfloat16")
    rest = {key: value for key, value in document.items() if key not in layout}
    return rest | {key: value for key, value in planned.items() if key not in users_keys or key not in document}
