"""Reports of an engine on its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zeromesh.comm.stragglers import Busy
from zeromesh.engine import reports
from zeromesh.engine.state import EngineState
from zeromesh.parallel.activation.compiled import compile_seconds


class Reports:
    """Reports of an engine, whose methods the engine has, too."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def compile_seconds(self) -> float:
        """Return the seconds that compilation has taken in this process."""
        return compile_seconds()

    def memory_report(self) -> dict[str, Any]:
        """Bytes by state and tier that this rank allocates at the most, and the measured use of the process.

        At stage 3 slots and gradients have memory only while they are needed, and parameters of 16 bits rest in their
        masters: they count as ``optimizer``.
        """
        state = self._state
        return reports.memory(state.sharded, state.optimizer, state.activations, state.before)

    def prediction_report(
        self, model: nn.Module | Callable[[], nn.Module], inputs: Mapping[str, Any],
        loss: Callable[[Any], torch.Tensor] | None = None, memory: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return what the planner foresees of this rank's memory and of a step beside what was measured.

        It traces the model without memory, and measures the machine where neither ``ZEROMESH_MACHINE`` names its file
        nor its GPU is known: a second or two, on this rank alone. It never raises.

        Args:
            model: as the one that ``initialize`` was given, before an engine changed it; on any device, meta included.
                Or a function that makes it.
            inputs: keyword arguments of its forward for a micro-batch; only shapes and dtypes of tensors matter.
            loss: computes the loss from the model's output, unless that is the loss or has it.
            memory: a ``memory_report()`` to compare with; None takes one now.

        Returns:
            ``machine``, ``layout``, and ``notes`` on what is missing; ``device`` and ``host`` (most bytes) and ``step``
            (median seconds), each with ``predicted``, ``measured`` and ``difference``: predicted / measured - 1. What
            is not known is None. On a processor ``device`` is all memory.
        """
        report, state = memory or self.memory_report(), self._state
        return state.predict((model, inputs, loss), report, state.observer.step_seconds, state.mesh, state.config)

    def traffic_report(self, reset: bool = False) -> dict[str, dict[str, float]]:
        """Return the traffic of this rank since the last reset, by collective and axis (``"all_gather/data"``).

        For each: ``bytes``, ``calls``, ``across_nodes`` (bytes of them that went to other nodes), and
        ``relative_error`` where numbers were rounded for the links between nodes.
        """
        traffic = self._state.mesh.traffic
        by_collective: dict[str, dict[str, float]] = {}
        for key in sorted(traffic.bytes):
            entry: dict[str, float] = {
                "bytes": traffic.bytes[key],
                "calls": traffic.calls[key],
                "across_nodes": traffic.across[key],
            }
            error = traffic.relative_error(*key)
            by_collective["/".join(key)] = entry if error is None else {**entry, "relative_error": error}
        if reset:
            traffic.reset()
        return by_collective

    def check_health(self) -> dict[str, Any]:
        """Check all ranks' processors, memory and links, between updates. Collective; some tens of milliseconds.

        What is slow beside its own earlier checks, or beside the other ranks, and whose products are wrong, is logged
        on the first rank, also when it is over. See docs/monitoring.md.

        Returns:
            On all ranks the same: ``products`` (floating point operations per second by rank), ``memory`` (bytes per
            second that copies read and write by rank), ``links`` (lists of two ranks, and the bytes per second that the
            second receives from the first while all do so), ``slow`` (dicts: name, since, value, usual, unit).
        """
        return self._state.health.check(self._state.global_steps)

    def work_report(self) -> Busy | None:
        """Return each rank's seconds of work in the updates since the last call, without waits for the others.

        The work of an update of ``train_batch`` begins behind its data, of others behind the update before.

        Returns:
            None on all ranks but the first, and where waits are the device's, as with nccl.
        """
        return self._state.update.stragglers.take()

    def bound_report(self, operations: float | None = None) -> dict[str, Any] | None:
        """Return the resource that bounded the updates so far, and its distance from the limit. Collective.

        It measures the machine, for up to about two seconds.

        Args:
            operations: floating-point operations of this rank in an update; None: not known.

        Returns:
            ``bound`` (a resource), ``advice``, ``updates``, ``seconds`` of one, and in ``uses`` per resource the
            seconds spent on it and their ``share``; ``amount`` (bytes, or operations), ``rate`` and ``limit`` of them
            per second, and ``of_limit``, where they are known. None without ``wall_clock_breakdown``, and before the
            second update.
        """
        return reports.find_bounds(self._state.observer, self._state.sharded, operations)
