"""Checks on a machine with a GPU that the engine computes there what plain torch does; unattended, a few minutes.

    python benchmarks/gpu_check.py            # one rank with nccl, then two ranks that share the device with gloo
    python benchmarks/gpu_check.py --json out.json

For every ZeRO row and dtype a small decoder trains for ten steps beside plain torch on the same device and batch.
Then with states on the host: parameters are compared with those of a run without, and have to be, bit for bit, those of
a run in which the host waits for each copy. At last a larger one is profiled: the copies have to run beside kernels,
and nothing may block the host in a backward. Without a GPU there is no copy to look at, and that part is left out.

Prints a line per case, with memory as reported and as the allocator counts it, and exits with 1 if one differs.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.profiler import profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zeromesh
from zeromesh.comm.environment import device_for, init_distributed, shutdown
from zeromesh.config.train import ModelShape
from zeromesh.launcher.launch import launch
from zeromesh.shard import sharded
from zeromesh.tiers.link import Copy, Link
from zeromesh.train.architectures.decoder import Decoder

STEPS, BATCH, LENGTH, VOCABULARY = 10, 4, 64, 512
SMALL = ModelShape(
    architecture="llama", vocab_size=VOCABULARY, hidden_size=128, layers=4, heads=4, sequence_length=LENGTH
)
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 3e-2}
"""Largest relative difference of the last loss. float64 is exact to the order of sums; bf16 rounds differently."""


def train_plain(model: torch.nn.Module, tokens: torch.Tensor, bf16: bool) -> list[float]:
    """Plain torch on the whole batch; bf16 by a rounded copy of an fp32 master, as the engine does."""
    compute = copy.deepcopy(model).bfloat16() if bf16 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in tokens:
        loss = compute(step[:, :-1], step[:, 1:])
        loss.backward()
        for master, parameter in zip(model.parameters(), compute.parameters(), strict=True):
            master.grad = parameter.grad.to(master.dtype) if parameter.grad is not None else None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(model.parameters(), compute.parameters(), strict=True):
                parameter.grad = None
                if bf16:
                    parameter.copy_(master)
        losses.append(loss.item())
    return losses


def check(backend: str, out: str) -> None:
    """Every row and dtype on the ranks that are running; rank 0 writes the rows."""
    environment = init_distributed(backend)
    device = device_for(environment, dist.get_backend())
    rank, ranks = environment.rank, environment.world_size
    rows: list[dict[str, Any]] = []
    tokens = torch.randint(VOCABULARY, (1, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1)).to(device)
    tokens = tokens.expand(STEPS, -1, -1)
    for name, dtype in (("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.float32)):
        torch.manual_seed(0)
        start = Decoder(SMALL).to(dtype)
        expected = train_plain(copy.deepcopy(start).to(device), tokens, name == "bf16")
        for stage in range(4):
            share = BATCH // ranks
            config = {
                "train_batch_size": BATCH, "zero_optimization": {"stage": stage}, "bf16": {"enabled": name == "bf16"},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            }  # fmt: skip
            engine, *_ = zeromesh.initialize(model=copy.deepcopy(start), config=config)
            mine = tokens[:, rank * share : (rank + 1) * share]
            losses = [engine.train_batch(iter([(step[:, :-1], step[:, 1:])])).item() for step in mine]
            difference = max(abs(a - b) / (1 + abs(b)) for a, b in zip(losses, expected, strict=True))
            memory = engine.memory_report()
            rows.append({
                "backend": backend, "ranks": ranks, "device": str(device), "dtype": name, "stage": stage,
                "difference": difference, "fits": difference <= TOLERANCE[name], "last loss": losses[-1],
                "reported": memory["total"], "allocated": memory["measured"]["live"],
            })  # fmt: skip
            engine.destroy()
            del engine
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    shutdown()


HOST = {"device": "cpu"}
OFFLOADED: dict[str, dict[str, Any]] = {
    "row 2, optimizer": {"stage": 2, "offload_optimizer": HOST},
    "row 3, optimizer": {"stage": 3, "offload_optimizer": HOST},
    "row 3, parameters": {"stage": 3, "offload_param": HOST},
    "row 3, all": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
}
APART = {"fp32": 1e-4, "bf16": 5e-2}
"""Largest norm of the difference, relative to what was trained: the kernel on the host rounds differently in the last
place, which bf16 makes a step of 1/256 now and then."""

BLOCKING = ("cudaMemcpy", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
"""Calls that return when the device has done something."""


Parameters = Mapping[str, torch.Tensor]
"""Of a model, by name."""


class Blocking(Link):
    """A link whose copies the host waits for."""

    def _begin(self, *args: Any) -> Copy:
        begun = super()._begin(*args)
        begun.wait()
        return begun


def trained(zero: dict[str, Any], bf16: bool, tokens: torch.Tensor, link: type[Link]) -> Parameters:
    """What a decoder's parameters have become, on the host, after five updates of two micro-batches; on rank 0."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": len(tokens), "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "zero_optimization": zero, "bf16": {"enabled": bf16},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    }  # fmt: skip
    with patch.object(sharded, "Link", link):
        engine, *_ = zeromesh.initialize(model=Decoder(SMALL), config=config)
    for number in range(STEPS):
        batch = tokens.roll(number, 1)
        engine.backward(engine(batch[:, :-1], batch[:, 1:]))
        engine.step()
    found = {name: value.to("cpu", copy=True) for name, value in engine.gathered_state_dict().items()}
    engine.destroy()
    return found


def apart(one: Parameters, other: Parameters, start: Parameters) -> float:
    """Norm of the difference, relative to that of what was trained."""
    pairs = [(one[name].double(), other[name].double(), start[name].double()) for name in one]
    difference = sum(float((a - b).square().sum()) for a, b, _ in pairs)
    return (difference / sum(float((b - c).square().sum()) for _, b, c in pairs)) ** 0.5


def check_offload(backend: str, out: str) -> None:
    """States on the host beside states on the device, and copies that nobody waits for beside copies that are."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    environment = init_distributed(backend)
    device = device_for(environment, dist.get_backend())
    rank, ranks = environment.rank, environment.world_size
    share, rows = BATCH // ranks, []
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1)).to(device)
    tokens = tokens[rank * share : (rank + 1) * share]
    torch.manual_seed(0)
    start = Decoder(SMALL).state_dict()
    for name in ("fp32", "bf16"):
        for where, zero in OFFLOADED.items():
            plain = trained({"stage": zero["stage"]}, name == "bf16", tokens, Link)
            waiting, free = (trained(zero, name == "bf16", tokens, link) for link in (Blocking, Link))
            if rank > 0:
                continue
            same = all(torch.equal(value, waiting[key]) for key, value in free.items())
            difference = apart(free, plain, start)
            rows.append({
                "backend": backend, "ranks": ranks, "device": str(device), "dtype": name, "on the host": where,
                "as with copies that are waited for": same, "difference to none": difference,
                "fits": same and difference <= APART[name],
            })  # fmt: skip
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    shutdown()


def check_overlap(backend: str, out: str) -> None:
    """Whether copies run beside kernels in a backward, and the host goes on, by a profile; one rank on a GPU."""
    environment = init_distributed(backend)
    device = device_for(environment, dist.get_backend())
    rows = []
    shape = ModelShape(
        architecture="gpt", vocab_size=VOCABULARY, hidden_size=1024, layers=8, heads=8, sequence_length=1024
    )
    tokens = torch.randint(VOCABULARY, (8, 1025), device=device)
    for where, zero in OFFLOADED.items():
        config = {
            "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "bf16": {"enabled": True},
            "zero_optimization": zero, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        }  # fmt: skip
        engine, *_ = zeromesh.initialize(model=Decoder(shape), config=config)
        for number in range(5):
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            if number < 4:
                engine.backward(loss)
                engine.step()
        # The first backward after an update: what it copies is not added to anything, which the host would wait for.
        torch.accelerator.synchronize()
        with profile() as profiler:
            with torch.profiler.record_function("the backward"):
                engine.backward(loss)
            torch.accelerator.synchronize()
        trace = Path(out).with_suffix(".trace")
        profiler.export_chrome_trace(str(trace))
        found = look(json.loads(trace.read_text())["traceEvents"], "the backward")
        copies = "offload_optimizer" in zero or "offload_param" in zero
        rows.append({
            "backend": backend, "device": str(device), "on the host": where, **found,
            "fits": not found["blocking"] and (found["beside kernels"] > 0.0 or not copies),
        })  # fmt: skip
        engine.destroy()
        del engine
    Path(out).write_text(json.dumps(rows))
    shutdown()


def look(events: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """What a trace says of a stretch of time that has a name.

    Args:
        events: of a trace in Chrome's format, with times in microseconds.
        name: of a range on the host; what was launched in it ends after it.

    Returns:
        ``blocking``, calls in it that made the host wait; ``copied``, seconds of copies between device and host that
        began later than it; ``beside kernels``, the share of them during which a kernel ran.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    whole = next(event for event in spans if event["name"] == name and event.get("cat") == "user_annotation")
    begin, end = whole["ts"], whole["ts"] + whole["dur"]
    calls = [e["name"] for e in spans if e.get("cat") == "cuda_runtime" and begin <= e["ts"] < end]
    later = [event for event in spans if event["ts"] >= begin]
    copies = [e for e in later if e.get("cat") == "gpu_memcpy" and ("DtoH" in e["name"] or "HtoD" in e["name"])]
    kernels = list(_joined((e["ts"], e["ts"] + e["dur"]) for e in later if e.get("cat") == "kernel"))
    copied = sum(copy["dur"] for copy in copies)
    beside = sum(
        max(0.0, min(stop, copy["ts"] + copy["dur"]) - max(start, copy["ts"]))
        for copy in copies
        for start, stop in kernels
    )
    return {
        "blocking": [call for call in calls if call in BLOCKING],
        "copied": copied / 1e6,
        "beside kernels": beside / copied if copied else 0.0,
    }


def _joined(spans: Iterator[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Stretches of time, without those that lie in another or begin in it."""
    begin, end = 0.0, 0.0
    for start, stop in sorted(spans):
        if start > end:
            if end > begin:
                yield begin, end
            begin, end = start, stop
        end = max(end, stop)
    if end > begin:
        yield begin, end


def main() -> None:
    """Run the checks for each way to communicate and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures here")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products are the same in each run
    ways = [("nccl", 1), ("gloo", 2)] if cuda else [("gloo", 1), ("gloo", 2)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for backend, ranks in ways:
            out = str(Path(folder) / f"{backend}{ranks}.json")
            # Always in fresh processes: one that has started CUDA cannot start another backend cleanly.
            parts = [check, check_offload, *([check_overlap] if cuda and ranks == 1 else [])]
            for part in parts:
                launch(part, ranks, backend, out)
                rows += json.loads(Path(out).read_text())
    for row in rows:
        print("ok  " if row["fits"] else "BAD ", " ".join(f"{key}={value}" for key, value in row.items()))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    sys.exit(0 if all(row["fits"] for row in rows) else 1)


if __name__ == "__main__":
    main()
