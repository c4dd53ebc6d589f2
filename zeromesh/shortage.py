"""Out of memory: what was planned, what was in use, and what would take less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any

import torch

from zeromesh.config.settings import Resolved
from zeromesh.model.placement import Placement, PlacementRow, Tier
from zeromesh.observe.units import bytes_text

REMEDIES = 3
"""So many are told."""


class Explained(AbstractContextManager[None]):
    """A context that adds to an error for want of memory what the engine knows about it.

    Args:
        inner: the context that it stands for.
        explain: gives the text.
    """

    def __init__(self, inner: AbstractContextManager[object], explain: Callable[[], str]) -> None:
        self._inner, self._explain = inner, explain

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if error is not None and is_shortage(error) and not getattr(error, "__notes__", ()):
            with suppress(Exception):  # the shortage is what counts
                error.add_note(self._explain())
        return self._inner.__exit__(kind, error, trace)


def is_shortage(error: BaseException) -> bool:
    """Return whether an error says that there is no memory left, of a device or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate" in str(error)


def explain(report: dict[str, Any], row: PlacementRow, ranks: int, settings: Resolved) -> str:
    """Return what was planned and used, by state and tier, and what would take less, with numbers.

    Args:
        report: see ``report.memory``.
        row: where the states lie.
        ranks: over which states are sharded, or would be.
        settings: of the run.
    """
    states = [key for key, sizes in report.items() if key not in ("total", "measured") and sum(sizes.values())]
    lines = [
        f"  {state}: " + ", ".join(f"{bytes_text(size)} on {tier}" for tier, size in report[state].items() if size)
        for state in states
    ]
    measured = report["measured"]
    rest = max(0, measured["remainder"])
    remedies = [*_remedies(report, row, ranks, settings, rest)][:REMEDIES]
    return "\n".join(
        [
            f"zeromesh had planned {bytes_text(report['total'])} of states on this rank:",
            *lines,
            f"and {bytes_text(measured['peak'])} were in use at the most, of which {bytes_text(rest)} are activations, "
            "temporaries and the libraries themselves. What takes less:",
            *(f"  {number}. {remedy}" for number, remedy in enumerate(remedies, 1)),
        ]
    )


def _remedies(
    report: dict[str, Any], row: PlacementRow, ranks: int, settings: Resolved, rest: int
) -> Iterator[str]:  # fmt: skip
    def on_device(state: str) -> int:
        return int(report[state].get(Tier.DEVICE.value, 0))

    whole = [state for state in ("parameter", "gradient", "optimizer") if getattr(row, state) is not Placement.SHARDED]
    freed = sum(on_device(state) for state in whole) * (ranks - 1) // ranks
    if freed:
        yield f'"zero_optimization": {{"stage": 3}} shards {" and ".join(whole)} over {ranks} ranks: {_less(freed)}'
    if row.optimizer_tier is Tier.DEVICE and on_device("optimizer"):
        size = on_device("optimizer") // (ranks if "optimizer" in whole else 1)
        yield f'"zero_optimization": {{"offload_optimizer": {{"device": "cpu"}}}} moves {bytes_text(size)} to the host'
    micro = settings.train_micro_batch_size_per_gpu
    if micro % 2 == 0:
        steps = 2 * settings.gradient_accumulation_steps
        yield (
            f'"train_micro_batch_size_per_gpu": {micro // 2} with "gradient_accumulation_steps": {steps} halves '
            f"activations: up to {_less(rest // 2)}"
        )
    if not settings.activation_checkpointing.enabled:
        yield f'"activation_checkpointing": {{"enabled": true}} computes activations again: up to {_less(rest)}'
    if row.parameter is Placement.SHARDED and row.parameter_tier is Tier.DEVICE and on_device("parameter"):
        moved = bytes_text(on_device("parameter"))
        yield f'"zero_optimization": {{"offload_param": {{"device": "cpu"}}}} moves {moved} to the host'
    yield f"{2 * ranks} ranks instead of {ranks} at stage 3 halve all sharded states of a rank"


def _less(size: int) -> str:
    return f"{bytes_text(size)} less"
