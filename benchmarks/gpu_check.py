"""Checks on a machine with a GPU that the engine computes there what plain torch does; unattended, about two minutes.

    python benchmarks/gpu_check.py            # one rank with nccl, then two ranks that share the device with gloo
    python benchmarks/gpu_check.py --json out.json

For every ZeRO row and dtype a small decoder trains for ten steps beside plain torch on the same device and batch.
Prints a line per case, with memory as reported and as the allocator counts it, and exits with 1 if one differs.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zeromesh
from zeromesh.architectures.decoder import Decoder
from zeromesh.config.train import ModelShape
from zeromesh.dist.environment import device_for, init_distributed, shutdown
from zeromesh.dist.launch import launch

STEPS, BATCH, LENGTH, VOCABULARY = 10, 4, 64, 512
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
    shape = ModelShape(
        architecture="llama", vocab_size=VOCABULARY, hidden_size=128, layers=4, heads=4, sequence_length=LENGTH
    )
    tokens = torch.randint(VOCABULARY, (1, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1)).to(device)
    tokens = tokens.expand(STEPS, -1, -1)
    for name, dtype in (("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.float32)):
        torch.manual_seed(0)
        start = Decoder(shape).to(dtype)
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


def main() -> None:
    """Run the checks for each way to communicate and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures here")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    ways = [("nccl", 1), ("gloo", 2)] if cuda else [("gloo", 1), ("gloo", 2)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for backend, ranks in ways:
            out = str(Path(folder) / f"{backend}{ranks}.json")
            # Always in fresh processes: one that has started CUDA cannot start another backend cleanly.
            launch(check, ranks, backend, out)
            rows += json.loads(Path(out).read_text())
    for row in rows:
        print("ok  " if row["fits"] else "BAD ", " ".join(f"{key}={value}" for key, value in row.items()))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    sys.exit(0 if all(row["fits"] for row in rows) else 1)


if __name__ == "__main__":
    main()
