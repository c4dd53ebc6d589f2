"""What grows with the number of ranks, on torch's fake process group:

    python benchmarks/scale.py                                    # every cell, three rounds
    python benchmarks/scale.py --quick                            # under a minute
    python benchmarks/scale.py --worlds 1024 --stages 3 --blocks 80 --parameters 300 --only step

One process is one rank of up to 16,384: its collectives return at once, so what is measured is the rank's own work.
Each cell runs in a process of its own. Beside ZeroMesh run FSDP2 (``fully_shard``), DDP, and the model alone. The
manifest of a checkpoint of so many ranks is written and opened beside DCP's metadata. Rows go to ``scale.json``, and
``scale.md`` and a picture are made from them.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import importlib
import json
import math
import multiprocessing
import os
import pstats
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench import ROOT, commit, machine, positive
from scale_page import write_page

WIDTH, BATCH = 16, 4
"""Elements of a vector of the model, and samples of a step: the model itself takes next to no time."""

WORLDS = (8, 128, 1024, 4096, 16384)
REAL = (2, 4, 8, 16, 32)
"""Numbers of real ranks, on gloo, whose start is measured."""
STAGES = (0, 1, 3)
BLOCKS = (4, 80)
PARAMETERS = (300, 10_000)
STEPS = 7
BUSY = 20
"""Times its limit of CPU time that a cell may take on a busy machine."""

MANIFEST_STATES = ("parameter", "optimizer/exp_avg", "optimizer/exp_avg_sq")
ON_MACHINE = 8
"""Ranks of a machine."""
ELEMENTS = 4
"""Elements of each box of a checkpoint: its description is what is measured."""


@dataclass(frozen=True)
class Cell:
    """What one process measures."""

    measure: str  # a key of ``MEASURES``
    library: str
    world: int
    stage: int | None = None
    blocks: int = 0
    parameters: int = 0  # tensors of the whole model, about


class Block(nn.Module):
    """A layer and vectors, so many that it has ``parameters`` tensors."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.vectors = nn.ParameterList(torch.randn(WIDTH) for _ in range(max(1, parameters - 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = torch.stack([*self.vectors]).sum(0)
        return x + torch.tanh(self.layer(x) + shift)


def make_model(blocks: int, parameters: int) -> nn.Module:
    """Return blocks in a row that have about ``parameters`` tensors together."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(parameters // blocks) for _ in range(blocks)))


def zeromesh_step(model: nn.Module, world: int, stage: int | None) -> Callable[[torch.Tensor], None]:
    """Return one step of training by ZeroMesh."""
    import zeromesh

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    engine = zeromesh.initialize(model=model, config=config)[0]

    def step(x: torch.Tensor) -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    return step


def torch_step(model: nn.Module) -> Callable[[torch.Tensor], None]:
    """Return one step of training with torch's own optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp2_step(model: nn.Module, world: int, stage: int | None) -> Callable[[torch.Tensor], None]:
    """Return one step of training under ``fully_shard``, a unit a block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return torch_step(model)


def ddp_step(model: nn.Module, world: int, stage: int | None) -> Callable[[torch.Tensor], None]:
    """Return one step of training under DDP."""
    replica = nn.parallel.DistributedDataParallel(model)

    def all_reduce(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        dist.all_reduce(bucket.buffer())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    replica.register_comm_hook(None, all_reduce)  # what the fake group returns has no result for DDP's own
    return torch_step(replica)


def plain_step(model: nn.Module, world: int, stage: int | None) -> Callable[[torch.Tensor], None]:
    """Return one step of training of one process."""
    return torch_step(model)


LIBRARIES = {"ZeroMesh": zeromesh_step, "FSDP2": fsdp2_step, "DDP": ddp_step, "plain torch": plain_step}


class Collectives(TorchDispatchMode):
    """Counts the collectives of a step, their bytes, and the time that the fake group itself takes for them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.nbytes, self.seconds = 0, 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        start = time.process_time()
        result = func(*args, **(kwargs or {}))
        self.seconds += time.process_time() - start
        self.calls += 1
        # Of both what it reads and what it fills. Two names of one memory count once.
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.nbytes += sum({(tensor.data_ptr(), tensor.nbytes): tensor.nbytes for tensor in tensors}.values())
        return result


def resident() -> float:
    """Return the memory of this process, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def peak() -> float:
    """Return the most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def seconds_of(action: Callable[[], Any]) -> float:
    """Return the CPU time of an action of this process, all its threads."""
    start = time.process_time()
    action()
    return time.process_time() - start


def measure_step(cell: Cell, steps: int) -> dict[str, Any]:
    """Measure ``initialize`` and steps of one rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    make = LIBRARIES[cell.library]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cell.world)
    x = torch.randn(BATCH, WIDTH)
    make(make_model(2, 6), cell.world, cell.stage)(x)  # what is imported and built on first use
    model = make_model(cell.blocks, cell.parameters)
    gc.collect()
    groups, before = len(dist.distributed_c10d._world.pg_map), resident()
    start = time.process_time()
    step = make(model, cell.world, cell.stage)
    initialize = time.process_time() - start
    groups = len(dist.distributed_c10d._world.pg_map) - groups
    first = seconds_of(lambda: step(x))
    times = [seconds_of(lambda: step(x)) for _ in range(steps)]
    memory = resident() - before
    profile = cProfile.Profile()
    profile.runcall(step, x)
    with Collectives() as collectives:
        step(x)
    return {
        "initialize_seconds": initialize,
        "first_step_seconds": first,
        "step_seconds": times,
        "memory_mb": memory,
        "peak_mb": peak(),
        "groups": groups,
        "python_calls": pstats.Stats(profile).total_calls,
        "collectives": collectives.calls,
        "bytes": collectives.nbytes,
        "fake_seconds": collectives.seconds,
    }


def tensors_of(blocks: int) -> Iterator[str]:
    """Yield the names of a checkpoint's tensors, of which each rank has a part."""
    for state in MANIFEST_STATES:
        yield from (f"{state}/model.layers.{block}.mlp.gate_proj.weight" for block in range(blocks))


def zeromesh_shard(rank: int, world: int, blocks: int) -> dict[str, Any]:
    """Return the entry of a rank's file of a checkpoint."""
    from zeromesh.checkpoint.boxes import Box
    from zeromesh.checkpoint.rank_manifests import shard_file
    from zeromesh.checkpoint.shard_writer import ShardLayout

    shape = (world, ELEMENTS)
    start, stop = rank * ELEMENTS, (rank + 1) * ELEMENTS
    boxes = [Box(name, shape, torch.float32, start, stop) for name in tensors_of(blocks)]
    layout = ShardLayout(boxes)
    for box in boxes:
        layout.add(box, layout.place(box), ["0" * 64])
    return layout.entry(shard_file(rank))


def zeromesh_write(folder: Path, world: int, blocks: int) -> Callable[[], Any]:
    """Write what the other ranks write; return what writes the first rank's part, and the index."""
    from zeromesh.checkpoint.rank_manifests import write_index, write_part

    facts = {"scalars": {}, "members": {}}
    for rank in range(1, world):
        write_part(folder, rank, zeromesh_shard(rank, world, blocks), facts, flush=False)
    own = zeromesh_shard(0, world, blocks)

    def write() -> None:
        write_part(folder, 0, own, facts | {"parameters": {}, "tied": {}, "extra": {}})
        write_index(folder, {"groups": []}, world)

    return write


def zeromesh_open(folder: Path, world: int, blocks: int) -> Any:
    """Open a checkpoint as a rank that goes on from it, in the middle of as many."""
    from zeromesh.checkpoint.boxes import Reader

    reader, rank = Reader(folder), world // 2
    for name in tensors_of(blocks):
        reader.require(name, rank * ELEMENTS, (rank + 1) * ELEMENTS)
    return reader


def dcp_write(folder: Path, world: int, blocks: int) -> Callable[[], Any]:
    """Describe all ranks' parts; return what then writes DCP's metadata, as its coordinator does."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    shape = torch.Size((world, ELEMENTS))
    tensors: dict[str, dcp.STORAGE_TYPES] = {}
    results: list[list[WriteResult]] = [[] for _ in range(world)]
    properties = dcp.TensorProperties(dtype=torch.float32)
    for number, name in enumerate(tensors_of(blocks)):
        parts = [torch.Size((rank, 0)) for rank in range(world)]
        size = torch.Size((1, ELEMENTS))
        chunks = [dcp.ChunkStorageMetadata(offsets=part, sizes=size) for part in parts]
        tensors[name] = dcp.TensorStorageMetadata(properties=properties, size=shape, chunks=chunks)
        for rank, part in enumerate(parts):
            info = _StorageInfo(f"__{rank}_0.distcp", number * 4 * ELEMENTS, 4 * ELEMENTS)
            results[rank].append(WriteResult(dcp.MetadataIndex(name, part, rank), 4 * ELEMENTS, info))
    writer = FileSystemWriter(folder)
    return lambda: writer.finish(dcp.Metadata(tensors), results)


def dcp_open(folder: Path, world: int, blocks: int) -> Any:
    """Open a checkpoint as each rank does."""
    from torch.distributed.checkpoint import FileSystemReader

    return FileSystemReader(folder).read_metadata()


CHECKPOINTS = {"ZeroMesh": (zeromesh_write, zeromesh_open), "DCP": (dcp_write, dcp_open)}


def measure_manifest(cell: Cell, steps: int) -> dict[str, Any]:
    """Measure the description of a checkpoint: written by the first rank, and opened by one."""
    make, read = CHECKPOINTS[cell.library]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write = seconds_of_fork(make(folder, cell.world, cell.blocks))
        size = sum(path.stat().st_size for path in folder.rglob("*"))
        opened = seconds_of_fork(lambda: read(folder, cell.world, cell.blocks))
    return {"write_seconds": write["seconds"], "write_mb": write["mb"], "file_mb": size / 1e6} | {
        "open_seconds": opened["seconds"],
        "open_mb": opened["mb"],
    }


def seconds_of_fork(action: Callable[[], Any]) -> dict[str, float]:
    """Return CPU seconds and MB of an action in a process of its own, which does not have what this one has left."""

    def run() -> dict[str, float]:
        gc.collect()
        gc.freeze()  # else the collector would touch, and so copy, all that the first process has
        before = resident()
        start = time.process_time()
        result = action()
        seconds = time.process_time() - start
        del result
        return {"seconds": seconds, "mb": max(0.0, peak() - before)}

    return in_process(run, None)


class CountingStore:
    """A store whose calls are counted, by whatever method."""

    def __init__(self, store: Any) -> None:
        self.calls, self._store = 0, store

    def clone(self) -> CountingStore:
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.calls += 1
            return method(*arguments, **keywords)

        return counted


def measure_watchdog(cell: Cell, steps: int) -> dict[str, Any]:
    """Measure what one look of the first rank's watchdog costs, which reads for all, once the rank has waited long."""
    from zeromesh.comm.watchdog import Watchdog

    def say_others(look: int) -> None:
        for number in range(1, machines):
            ranks = range(number * ON_MACHINE, min((number + 1) * ON_MACHINE, cell.world))
            line: dict[str, Any] = {"beat": f"{ranks[0]}:{look}", "place": f"place {number}", "host": f"host {number}"}
            line |= {
                "processes": dict.fromkeys(ranks, 1),
                "quiet": {},
                "waits": [],
                "due": 0,
                "waiting": None,
                "echo": None,
            }
            store.set(f"zeromesh/nodes/{number}", json.dumps(line))

    store = CountingStore(dist.HashStore())
    patience = 60.0  # its own thread looks every ten seconds, and so not at all here
    machines = -(-cell.world // ON_MACHINE)
    watchdog = Watchdog(store, 0, cell.world, patience)
    store.add("zeromesh/nodes", machines - 1)
    now, ahead = time.monotonic, 0.0
    time.monotonic = lambda: now() + ahead  # type: ignore[assignment]
    watchdog.begin("a wait")
    say_others(0)
    watchdog.check()
    ahead = 2 * patience
    calls, seconds = [], []
    for look in range(1, steps + 1):
        say_others(look)
        before = store.calls
        seconds.append(seconds_of(watchdog.check))
        calls.append(store.calls - before)
    return {"store_calls": calls, "check_seconds": seconds}


STORE_CALLS = {"set", "get", "check", "add", "wait", "compare_set", "multi_get", "multi_set", "append", "delete_key"}


def start_rank(library: str, rank: int, world: int, port: int) -> tuple[float, int]:
    """Start one real rank on gloo and train a tiny model for a step; return seconds, and calls of the store."""
    calls = 0

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            return method(*arguments, **keywords)

        return call

    for kind in (dist.Store, dist.TCPStore, dist.PrefixStore):
        for name in STORE_CALLS & vars(kind).keys():
            setattr(kind, name, counted(getattr(kind, name)))
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    begin = time.perf_counter()
    if library == "ZeroMesh":
        from zeromesh import init_distributed

        init_distributed()
    else:
        dist.init_process_group("gloo")
    LIBRARIES[library](make_model(2, 6), world, 3)(torch.randn(BATCH, WIDTH))
    return time.perf_counter() - begin, calls


def measure_start(cell: Cell, steps: int) -> dict[str, Any]:
    """Measure the start of real ranks, forked on this machine, to the end of their first step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ThreadPoolExecutor(cell.world) as pool:

        def start(rank: int) -> tuple[float, int]:
            result: tuple[float, int] = in_process(partial(start_rank, cell.library, rank, cell.world, port), None)
            return result

        rows = list(pool.map(start, range(cell.world)))
    return {"start_seconds": max(seconds for seconds, _ in rows), "start_calls": max(calls for _, calls in rows)}


MEASURES: dict[str, Callable[[Cell, int], dict[str, Any]]] = {
    "step": measure_step,
    "manifest": measure_manifest,
    "watchdog": measure_watchdog,
    "start": measure_start,
}


def in_process(action: Callable[[], Any], seconds: float | None) -> Any:
    """Return the result of an action in a process of its own, which is forked from this one.

    Raises:
        RuntimeError: it failed, or was not over after ``seconds``.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        for stream in (1, 2):  # what libraries print; errors are in the row
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            sender.send((action(), None))
        except BaseException as error:
            sender.send((None, f"{type(error).__name__}: {error}"[:300]))
        os._exit(0)  # threads of an engine, and a group that is none, have nothing to end in order

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise RuntimeError(f"not over after {seconds:.0f} s")
        result, problem = receiver.recv()
    except EOFError:
        process.join()
        late = process.exitcode == -signal.SIGXCPU
        raise RuntimeError("the CPU time was up" if late else f"the process ended with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if problem is not None:
        raise RuntimeError(problem)
    return result


def cells(chosen: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells of the command line."""
    for blocks in chosen.blocks:
        if "step" in chosen.only:
            for parameters in chosen.parameters:
                yield Cell("step", "plain torch", 1, None, blocks, parameters)
                for world in chosen.worlds:
                    for stage in chosen.stages:
                        yield Cell("step", "ZeroMesh", world, stage, blocks, parameters)
                    for library in ("FSDP2", "DDP"):
                        yield Cell("step", library, world, None, blocks, parameters)
        if "manifest" in chosen.only:
            for world in chosen.worlds:
                yield from (Cell("manifest", library, world, None, blocks) for library in CHECKPOINTS)
    if "watchdog" in chosen.only:
        yield from (Cell("watchdog", "ZeroMesh", world) for world in chosen.worlds)
    if "start" in chosen.only:
        for world in chosen.real:
            yield from (Cell("start", library, world) for library in ("ZeroMesh", "FSDP2", "DDP"))


def run_cell(cell: Cell, chosen: argparse.Namespace) -> dict[str, Any]:
    """Return a cell's row: its figures, or why it has none."""

    def run() -> dict[str, Any]:
        torch.set_num_threads(1)
        resource.setrlimit(resource.RLIMIT_AS, (chosen.memory_gib << 30,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(chosen.limit), resource.RLIM_INFINITY))
        return MEASURES[cell.measure](cell, chosen.steps)

    try:
        return asdict(cell) | {"error": None} | in_process(run, BUSY * chosen.limit)
    except RuntimeError as error:
        return asdict(cell) | {"error": str(error)}


def import_all() -> None:
    """Import what the cells need, once for all of them."""
    for name in ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "zeromesh.build"):
        importlib.import_module(name)


def main() -> None:
    """Parse the arguments, measure all cells, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=positive, nargs="+", default=list(WORLDS))
    parser.add_argument("--real", type=positive, nargs="+", default=list(REAL), help="real ranks that are started")
    parser.add_argument("--stages", type=int, nargs="+", default=list(STAGES), choices=[0, 1, 2, 3])
    parser.add_argument("--blocks", type=positive, nargs="+", default=list(BLOCKS))
    parser.add_argument("--parameters", type=positive, nargs="+", default=list(PARAMETERS), help="tensors of a model")
    parser.add_argument("--only", nargs="+", default=list(MEASURES), choices=list(MEASURES))
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=STEPS)
    parser.add_argument("--limit", type=float, default=300.0, help="CPU seconds after which a cell is given up")
    parser.add_argument("--memory-gib", type=positive, default=12, help="memory with which a cell is given up")
    parser.add_argument("--quick", action="store_true", help="few cells, one round: under a minute")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.worlds, chosen.stages, chosen.blocks, chosen.parameters = [8, 1024], [0, 3], [4], [300]
        chosen.real, chosen.rounds, chosen.steps = [2], 1, 3
    import_all()
    result: dict[str, Any] = {"date": f"{date.today():%Y-%m-%d}", "machine": machine(), "commit": commit()}
    result |= {"torch": torch.__version__, "rounds": chosen.rounds, "steps": chosen.steps, "rows": []}
    for number in range(chosen.rounds):
        for cell in cells(chosen):
            row = {"round": number} | run_cell(cell, chosen)
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "scale.json"
    rows = ",\n".join(json.dumps(row) for row in result["rows"])
    path.write_text(json.dumps(result | {"rows": None})[:-1].replace('"rows": null', f'"rows": [\n{rows}\n]') + "}\n")
    print(write_page(path))


if __name__ == "__main__":
    main()
