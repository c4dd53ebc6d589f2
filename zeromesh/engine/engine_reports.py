"""Reports of an engine on its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeromesh.base.kernels.measure import best_seconds
from zeromesh.base.machine import memory_bandwidth, peak_flops
from zeromesh.base.placement import Tier
from zeromesh.comm.agreement import catch
from zeromesh.comm.mesh import Mesh
from zeromesh.comm.stragglers import Busy
from zeromesh.engine import reports
from zeromesh.engine.observe.resource_bounds import COMPUTE, DISK, HOST, LINK, NETWORK, Amount, bounds
from zeromesh.engine.state import EngineState
from zeromesh.parallel.activation.compiled import compile_seconds
from zeromesh.shard.store.file_blocks import measure_bandwidth
from zeromesh.shard.store.link import Link
from zeromesh.shard.store.memory import empty_on

if TYPE_CHECKING:
    from zeromesh.parallel.expert.balance import LayerLoad

PROBE = 64 << 20  # bytes that memory, link and disk are measured with; the network with a quarter.

TIMES = 3  # measurements of each rate, of which the best counts


class Reports:
    """Reports of an engine, whose methods the engine has, too."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def compile_seconds(self) -> float:
        """Return the seconds that compilation has taken in this process."""
        return compile_seconds()

    def expert_report(self) -> dict[str, LayerLoad]:
        """Return how evenly the experts of each layer were used in the last update, by the name of the layer's experts.

        All ranks and micro-batches are counted; padding that ``attention_mask`` names, evaluation and recomputation
        are not. Empty where nobody counts (``experts.report_load``), and before the first update. Waits for the device.
        """
        return {} if self._state.balance is None else self._state.balance.report()

    def memory_report(self) -> dict[str, Any]:
        """Bytes by state and tier that this rank allocates at the most, and the measured use of the process.

        At stage 3 slots and gradients have memory only while they are needed, and parameters of 16 bits rest in their
        masters: they count as ``optimizer``.
        """
        state = self._state
        return reports.memory(state.sharded, state.optimizer, state.activations, state.before)

    def prediction_report(
        self,
        model: nn.Module | Callable[[], nn.Module],
        inputs: Mapping[str, Any],
        loss: Callable[[Any], torch.Tensor] | None = None,
        memory: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
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
        observer, sharded = self._state.observer, self._state.sharded
        breakdown = observer.breakdown()
        if breakdown is None:
            return None
        mesh, updates = sharded.mesh, observer.updates
        amounts: dict[str, Amount] = {}
        if operations is not None:
            amounts[COMPUTE] = Amount(operations, peak_flops(mesh.device, observer.dtype))
        if sharded.host_updates.nbytes:
            busy = sharded.host_updates.seconds / updates
            amounts[HOST] = Amount(
                sharded.host_updates.nbytes / updates, memory_bandwidth(torch.get_num_threads()), busy
            )
        if sharded.link.moved:
            link, source = Link(mesh.device), torch.ones(PROBE, dtype=torch.uint8, device=mesh.device)
            target = empty_on(Tier.HOST, PROBE, torch.uint8, mesh.device, sharded.row.pinned)
            rate = PROBE / best_seconds(lambda: link.to_host(target, source).wait(), mesh.device, TIMES)
            amounts[LINK] = Amount(sharded.link.moved / updates, rate)
        disk = sharded.store.disk_traffic()
        if disk is not None:
            read, written = disk.bytes_read / updates, disk.bytes_written / updates
            most, folder = None, sharded.store.folder
            # None where there is no room to measure it: a report is not worth an error.
            rates = None if folder is None else catch(lambda: measure_bandwidth(folder, PROBE))[0]
            if rates is not None and read + written:
                most = (read + written) / (read / rates.read + written / rates.write)
            amounts[DISK] = Amount(read + written, most, disk.busy_seconds / updates)
        sent = sum(mesh.traffic.bytes.values())
        if mesh.world_size > 1:  # all ranks measure, whatever each has sent
            amounts[NETWORK] = Amount(sent / updates, network_bandwidth(mesh))
        return bounds(breakdown, amounts)


def network_bandwidth(mesh: Mesh) -> float:
    """Bytes per second that this rank sends when all ranks sum a large tensor. All call it."""
    group, tensor = mesh.group("world"), torch.ones(PROBE // 16, device=mesh.device)
    counts = (mesh.traffic.calls, mesh.traffic.bytes, mesh.traffic.across)
    saved = [dict(counted) for counted in counts]
    before = sum(mesh.traffic.bytes.values())
    listener = mesh.traffic.listen(None)

    def add_up() -> None:
        group.all_reduce(tensor, 0)
        float(tensor[0])  # when it is there

    try:
        seconds = best_seconds(add_up, mesh.device, TIMES)
        return (sum(mesh.traffic.bytes.values()) - before) / (TIMES + 1) / seconds
    finally:
        mesh.traffic.listen(listener)
        # The user's counters do not count the measurement.
        for counted, values in zip(counts, saved, strict=True):
            counted.clear()
            counted.update(values)
