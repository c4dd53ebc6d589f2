"""Seconds per step of each ZeRO row beside plain DDP and FSDP2, in one interleaved run.

    python benchmarks/step_time.py --case compute --rounds 5
    python benchmarks/step_time.py --case communication --dtype bf16 --rounds 5

Every variant trains the same Llama-style decoder from the same seed on the same random tokens with AdamW; their last
losses must agree. The variants take turns, round by round, each in fresh processes, so that a machine whose speed
drifts is the same to all. *floor* is forward and backward alone: no communication, no update. Wire bytes are counted on
the loopback interface, for the whole machine: nothing else may be talking. On GPUs the same runs with nccl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zeromesh.architectures.decoder import Decoder
from zeromesh.config.train import ModelShape
from zeromesh.dist.environment import device_for, init_distributed, shutdown
from zeromesh.dist.launch import launch

LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Case:
    """Sizes of a run: micro-batch per rank, tokens per sample, hidden width, layers, vocabulary."""

    batch: int
    sequence: int
    hidden: int = 512
    layers: int = 6
    vocabulary: int = 8192


CASES = {
    "compute": Case(2, 256),
    "communication": Case(1, 64),
    "large": Case(2, 256, hidden=768, layers=12, vocabulary=16384),
    "tiny": Case(1, 16, hidden=64, layers=2, vocabulary=256),
}

Step = Callable[[torch.Tensor], torch.Tensor]


def make_model(case: Case) -> Decoder:
    """The same weights in every process."""
    torch.manual_seed(0)
    return Decoder(
        ModelShape(
            architecture="llama", vocab_size=case.vocabulary, hidden_size=case.hidden, layers=case.layers,
            heads=case.hidden // 64, sequence_length=case.sequence, tie_embeddings=False,
        )
    )  # fmt: skip


def floor(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Step:
    """Forward and backward of this rank, and nothing else."""
    model.to(device, dtype)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss

    return step


def ddp(model: nn.Module, dtype: torch.dtype, device: torch.device, zero: bool = False) -> Step:
    """torch's DistributedDataParallel; 16-bit by autocast over fp32 parameters, which is how it is used."""
    wrapped = nn.parallel.DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    else:
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=LEARNING_RATE, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss: torch.Tensor = wrapped(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def fsdp2(model: Decoder, dtype: torch.dtype, device: torch.device, reshard: bool) -> Step:
    """torch's fully_shard on each block and the root."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model.to(device)
    policy = (
        MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        if dtype is not torch.float32
        else MixedPrecisionPolicy()
    )
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def zeromesh_row(model: nn.Module, dtype: torch.dtype, device: torch.device, stage: int) -> Step:
    """A row of the placement table."""
    import zeromesh

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype is torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
    }
    engine, _, _, _ = zeromesh.initialize(model=model, config=config)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        return loss

    return step


VARIANTS: dict[str, Callable[[Decoder, torch.dtype, torch.device], Step]] = {
    "floor": floor,
    "DDP": ddp,
    "DDP + ZeroRedundancyOptimizer": lambda m, t, d: ddp(m, t, d, zero=True),
    "FSDP2, no reshard (ZeRO-2)": lambda m, t, d: fsdp2(m, t, d, reshard=False),
    "FSDP2, reshard (ZeRO-3)": lambda m, t, d: fsdp2(m, t, d, reshard=True),
    "ZeroMesh 0": lambda m, t, d: zeromesh_row(m, t, d, 0),
    "ZeroMesh 1": lambda m, t, d: zeromesh_row(m, t, d, 1),
    "ZeroMesh 2": lambda m, t, d: zeromesh_row(m, t, d, 2),
    "ZeroMesh 3": lambda m, t, d: zeromesh_row(m, t, d, 3),
}


def wire_bytes() -> int:
    """Bytes that passed the loopback interface; 0 where the system does not say."""
    counters = Path("/proc/net/dev")
    if not counters.is_file():
        return 0
    line = next(line for line in counters.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def measure(
    backend: str | None, variant: str, case_name: str, dtype_name: str, warmup: int, steps: int, out: str
) -> None:
    """One process of one variant; rank 0 writes the seconds of each step and the bytes on the wire."""
    environment = init_distributed(backend)
    device = device_for(environment, dist.get_backend())
    case, dtype = CASES[case_name], getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[dtype_name])
    step = VARIANTS[variant](make_model(case), dtype, device)
    generator = torch.Generator().manual_seed(1 + environment.rank)
    # The same batch every time: the loss then falls fast, and wrong gradients show.
    tokens = torch.randint(case.vocabulary, (case.batch, case.sequence + 1), generator=generator).to(device)
    times: list[float] = []
    for index in range(warmup + steps):
        dist.barrier()
        if index == warmup:
            before, cpu = wire_bytes(), time.process_time()
            dist.barrier()
        start = time.perf_counter()
        loss = step(tokens)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    cpu = (time.process_time() - cpu) / steps
    dist.barrier()
    if environment.rank == 0:
        wire = (wire_bytes() - before) / steps / environment.world_size
        Path(out).write_text(json.dumps({"times": times[warmup:], "cpu": cpu, "wire": wire, "loss": loss.item()}))
    dist.barrier()
    shutdown()


def rounds(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run every variant, round by round."""
    out = Path(arguments.out).with_suffix(".part")
    for number in range(arguments.rounds):
        for variant in arguments.variants:
            a = arguments
            launch(measure, a.ranks, a.backend, variant, a.case, a.dtype, a.warmup, a.steps, str(out))
            yield variant, json.loads(out.read_text())
        print(f"round {number + 1} of {arguments.rounds} done", file=sys.stderr, flush=True)
    out.unlink()


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: medians over rounds of each round's median step, with the least and the largest."""
    medians = {name: [statistics.median(run["times"]) for run in runs] for name, runs in results.items()}
    base = statistics.median(medians["floor"]) if "floor" in medians else None
    lines = [
        "| variant | s/step (min - max) | ratio to floor | CPU s/step of one rank | MB on the wire per rank and step "
        "| last loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, values in medians.items():
        middle = statistics.median(values)
        ratio = f"{middle / base:.2f}" if base else ""
        wire = statistics.median(run["wire"] for run in results[name]) / 1e6
        loss, cpu = results[name][-1]["loss"], statistics.median(run["cpu"] for run in results[name])
        spread = f"{min(values):.3f} - {max(values):.3f}"
        lines.append(f"| {name} | {middle:.3f} ({spread}) | {ratio} | {cpu:.3f} | {wire:.1f} | {loss:.4f} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, measure, print the table and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), default="compute")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="gloo for several ranks on one GPU")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--out", default="step_time.json")
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    for variant, figures in rounds(arguments):
        results.setdefault(variant, []).append(figures)
    parameters = sum(p.numel() for p in make_model(CASES[arguments.case]).parameters())
    print(f"{arguments.case} {asdict(CASES[arguments.case])}, {arguments.dtype}, {arguments.ranks} ranks, "
          f"{parameters / 1e6:.1f} M parameters, torch {torch.__version__}\n")  # fmt: skip
    print(table(results))
    Path(arguments.out).write_text(json.dumps({"arguments": vars(arguments), "results": results}))


if __name__ == "__main__":
    main()
