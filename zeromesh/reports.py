"""Reports of an engine: memory, traffic, bounds, and remedies when memory is used up."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from zeromesh.comm.agreement import catch
from zeromesh.comm.mesh import Mesh
from zeromesh.comm.traffic import Traffic
from zeromesh.config import keys
from zeromesh.config.settings import Resolved
from zeromesh.model.placement import Placement, Tier
from zeromesh.observe.bounds import COMPUTE, DISK, HOST, LINK, NETWORK, Amount, Bounds, bounds
from zeromesh.observe.machine import live_bytes, peak_bytes, peak_flops
from zeromesh.observe.observer import Observer
from zeromesh.observe.units import bytes_text
from zeromesh.shard.accounting import allocations
from zeromesh.shard.sharded import ShardedModel
from zeromesh.tiers.bandwidth import measure_bandwidth
from zeromesh.tiers.link import Link
from zeromesh.tiers.memory import empty_on

if TYPE_CHECKING:
    from zeromesh.activation.store import ActivationStore

STATES = ("parameter", "gradient", "optimizer", "slot", "buffer", "activation")

PROBE = 64 << 20  # bytes that memory, link and disk are measured with; the network with a quarter.

TIMES = 3  # measurements of each rate, of which the best counts

REMEDIES = 3  # remedies that a note about a shortage lists


def memory(
    sharded: ShardedModel, optimizer: Optimizer | None, activations: ActivationStore | None = None
) -> dict[str, Any]:
    """Return the most bytes of this rank by state and tier.

    Returns:
        For each of ``STATES`` a dict of tier (``device``, ``host`` or ``nvme``) to bytes; ``total``, their sum;
        ``measured``, what the process uses now (``live``) and has used at most (``peak``), and ``remainder``: the peak
        less what is counted on the measured device. ``activation`` is what activation checkpointing has had in host
        memory at the most so far.
    """
    tiers: dict[str, dict[str, int]] = {state: defaultdict(int) for state in STATES}
    for state, tier, size in [*allocations(sharded), *_optimizer_state(sharded, optimizer)]:
        tiers[state][tier] += size
    if activations is not None and activations.pool is not None:
        tiers["activation"]["host"] = activations.pool.peak
    total = sum(sum(sizes.values()) for sizes in tiers.values())
    live = live_bytes(sharded.mesh.device)
    # The kernel notes peaks now and then only.
    peak = max(live, peak_bytes(sharded.mesh.device))
    cpu = sharded.mesh.device.type == "cpu"
    # On a CPU the host's tier lies in the same memory that the process is measured by.
    here = sum(sizes.get("device", 0) + (sizes.get("host", 0) if cpu else 0) for sizes in tiers.values())
    # The remainder is other activations, temporaries, fragmentation, and on a CPU Python and torch themselves.
    measured = {"live": live, "peak": peak, "remainder": peak - here}
    return {**{state: dict(sizes) for state, sizes in tiers.items()}, "total": total, "measured": measured}


def _optimizer_state(sharded: ShardedModel, optimizer: Optimizer | None) -> Iterator[tuple[str, str, int]]:
    flats = {id(piece.parameter): flat for flat in sharded.flats for _, _, piece in flat.pieces}
    for parameter, state in optimizer.state.items() if optimizer else ():
        flat = flats[id(parameter)]
        # Numbers such as the step stay on the host where the tensors rest on NVMe.
        tier = Tier.HOST if flat.optimizer_tier is Tier.NVME else flat.optimizer_tier
        for value in state.values():
            # States of the parameter's shape may be kept with the master, and are counted with it.
            if isinstance(value, torch.Tensor) and not (flat.keeps_states and value.ndim):
                yield "optimizer", tier.value, value.nbytes


def traffic(counted: Traffic, reset: bool) -> dict[str, dict[str, float]]:
    """Return the traffic by ``collective/axis``, see ``Engine.traffic_report``; ``reset`` starts the count anew."""
    found: dict[str, dict[str, float]] = {}
    for kind, axis in sorted(counted.bytes):
        found[f"{kind}/{axis}"] = {
            "bytes": counted.bytes[kind, axis],
            "calls": counted.calls[kind, axis],
            "across_nodes": counted.across[kind, axis],
        }
        error = counted.relative_error(kind, axis)
        if error is not None:
            found[f"{kind}/{axis}"]["relative_error"] = error
    if reset:
        counted.reset()
    return found


def find_bounds(
    observer: Observer, sharded: ShardedModel, dtype: torch.dtype, operations: float | None = None
) -> Bounds | None:
    """Find the resource that bounded the updates so far; see ``Engine.bound_report``. Collective."""
    found = observer.breakdown()
    if found is None:
        return None
    mesh, updates = sharded.mesh, observer.updates
    amounts: dict[str, Amount] = {}
    if operations is not None:
        amounts[COMPUTE] = Amount(operations, peak_flops(mesh.device, dtype))
    if sharded.host_updates.nbytes:
        busy = sharded.host_updates.seconds / updates
        amounts[HOST] = Amount(sharded.host_updates.nbytes / updates, memory_bandwidth(), busy)
    if sharded.link.moved:
        link, source = Link(mesh.device), torch.ones(PROBE, dtype=torch.uint8, device=mesh.device)
        target = empty_on(Tier.HOST, PROBE, torch.uint8, mesh.device, sharded.row.pinned)
        rate = PROBE / _best(lambda: link.to_host(target, source).wait())
        amounts[LINK] = Amount(sharded.link.moved / updates, rate)
    disk = sharded.store.disk_traffic()
    if disk is not None:
        read, written = disk.bytes_read / updates, disk.bytes_written / updates
        limit, folder = None, sharded.store.folder
        # None where there is no room to measure it: a report is not worth an error.
        rates = None if folder is None else catch(lambda: measure_bandwidth(folder, PROBE))[0]
        if rates is not None and read + written:
            limit = (read + written) / (read / rates.read + written / rates.write)
        amounts[DISK] = Amount(read + written, limit, disk.busy_seconds / updates)
    sent = sum(mesh.traffic.bytes.values())
    if mesh.world_size > 1:  # all ranks measure, whatever each has sent
        amounts[NETWORK] = Amount(sent / updates, network_bandwidth(mesh))
    return bounds(found, amounts)


def memory_bandwidth() -> float:
    """Bytes per second that are read and written in place in host memory, by as many threads as torch uses."""
    memory = torch.ones(PROBE // 4)
    return 2 * memory.nbytes / _best(lambda: memory.mul_(1.0))


def network_bandwidth(mesh: Mesh) -> float:
    """Bytes per second that this rank sends when all ranks sum a large tensor. All call it."""
    group, tensor = mesh.group("world"), torch.ones(PROBE // 16, device=mesh.device)
    counts = (mesh.traffic.calls, mesh.traffic.bytes, mesh.traffic.across)
    kept = [dict(counted) for counted in counts]
    before = sum(mesh.traffic.bytes.values())
    listener = mesh.traffic.listen(None)

    def add_up() -> None:
        group.all_reduce(tensor, 0)
        float(tensor[0])  # when it is there

    try:
        seconds = _best(add_up)
        return (sum(mesh.traffic.bytes.values()) - before) / (TIMES + 1) / seconds
    finally:
        mesh.traffic.listen(listener)
        # The user's counters do not count the measurement.
        for counted, values in zip(counts, kept, strict=True):
            counted.clear()
            counted.update(values)


def _best(do: Callable[[], object]) -> float:
    """Return the seconds of the fastest of ``TIMES`` runs, after one that is not counted."""
    # The first run takes memory, and makes connections.
    do()
    found = float("inf")
    for _ in range(TIMES):
        start = time.perf_counter()
        do()
        found = min(found, time.perf_counter() - start)
    return found


@contextmanager
def explained(explain: Callable[[], str]) -> Iterator[None]:
    """Add ``explain()`` as a note to an error inside that says that memory is used up."""
    try:
        yield
    except BaseException as error:
        shortage = isinstance(error, torch.OutOfMemoryError | MemoryError)
        # Torch has no class for this error on a CPU.
        shortage |= isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate" in str(error)
        # Once only: the phases nest, and each is a context like this one.
        if shortage and not getattr(error, "__notes__", ()):
            with suppress(Exception):  # the shortage is what counts
                error.add_note(explain())
        raise


def explain(report: dict[str, Any], sharded: ShardedModel, settings: Resolved) -> str:
    """Return the planned and the used memory (see ``memory``), by state and tier, and remedies with numbers."""
    states = [key for key, sizes in report.items() if key not in ("total", "measured") and sum(sizes.values())]
    lines = [
        f"  {state}: " + ", ".join(f"{bytes_text(size)} on {tier}" for tier, size in report[state].items() if size)
        for state in states
    ]
    measured = report["measured"]
    rest = max(0, measured["remainder"])
    remedies = [*_remedies(report, sharded, settings, rest)][:REMEDIES]
    return "\n".join(
        [
            f"zeromesh had planned {bytes_text(report['total'])} of states on this rank:",
            *lines,
            f"and {bytes_text(measured['peak'])} were in use at the most, of which {bytes_text(rest)} are activations, "
            "temporaries and the libraries themselves. What takes less:",
            *(f"  {number}. {remedy}" for number, remedy in enumerate(remedies, 1)),
        ]
    )


def _remedies(report: dict[str, Any], sharded: ShardedModel, settings: Resolved, rest: int) -> Iterator[str]:
    row, ranks = sharded.row, sharded.mesh.shard.size

    def on_device(state: str) -> int:
        return int(report[state].get(Tier.DEVICE.value, 0))

    whole = [state for state in ("parameter", "gradient", "optimizer") if getattr(row, state) is not Placement.SHARDED]
    freed = sum(on_device(state) for state in whole) * (ranks - 1) // ranks
    if freed:
        yield f"{keys.SHARD_ALL} shards {' and '.join(whole)} over {ranks} ranks: {_less(freed)}"
    if row.optimizer_tier is Tier.DEVICE and on_device("optimizer"):
        size = on_device("optimizer") // (ranks if "optimizer" in whole else 1)
        yield f"{keys.OPTIMIZER_ON_HOST} moves {bytes_text(size)} to the host"
    micro = settings.train_micro_batch_size_per_gpu
    if micro % 2 == 0:
        steps = 2 * sharded.accumulation.steps
        yield (
            f'"{keys.MICRO_BATCH}": {micro // 2} with "{keys.ACCUMULATION}": {steps} halves '
            f"activations: up to {_less(rest // 2)}"
        )
    if not settings.activation_checkpointing.enabled:
        yield f"{keys.RECOMPUTE} computes activations again: up to {_less(rest)}"
    if row.parameter is Placement.SHARDED and row.parameter_tier is Tier.DEVICE and on_device("parameter"):
        moved = bytes_text(on_device("parameter"))
        yield f"{keys.PARAMETERS_ON_HOST} moves {moved} to the host"
    yield f"{2 * ranks} ranks instead of {ranks} halve all sharded states of a rank"


def _less(size: int) -> str:
    return f"{bytes_text(size)} less"
