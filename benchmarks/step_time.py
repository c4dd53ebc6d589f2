"""Seconds per step of each ZeRO row beside plain DDP and FSDP2, in one interleaved run.

    python benchmarks/step_time.py --case compute --rounds 5
    python benchmarks/step_time.py --case communication --dtype bf16 --rounds 5

Every variant trains the same Llama-style decoder from the same seed on the same random tokens with AdamW; their last
losses must agree. The variants take turns, round by round, each in fresh processes, so that a machine whose speed
drifts is the same to all. *floor* is forward and backward alone: no communication, no update. Wire bytes are counted on
the loopback interface, for the whole machine: nothing else may be talking. On GPUs the same runs with nccl.

With ``--memory`` the peak memory of rank 0 is measured instead of time: what malloc has handed out (on a GPU, torch's
allocator) beyond what there was before the model was built. Watching it takes time of its own.

    python benchmarks/step_time.py --case compute --dtype fp32 --memory --rounds 2
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from heap import Heap, Peak
from show import machine, table, title
from wire import sent_over_loopback
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

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


@contextmanager
def watched(device: torch.device, watch: bool) -> Iterator[Peak]:
    """The most memory in use while the context lasts, beyond what was in use before; 0 unless ``watch``."""
    peak = Peak()
    if not watch:
        yield peak
    elif device.type == "cpu":
        heap = Heap()
        before = heap.live()
        with heap.watch() as found:
            yield peak
        peak.bytes = found.bytes - before
    else:
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        yield peak
        peak.bytes = torch.accelerator.max_memory_allocated() - before


def measure(
    backend: str | None, variant: str, case_name: str, dtype_name: str, warmup: int, steps: int, memory: bool, out: str
) -> None:
    """One process of one variant; rank 0 writes the seconds of each step, the bytes on the wire and the peak memory."""
    environment = init_distributed(backend)
    device = device_for(environment, dist.get_backend())
    case, dtype = CASES[case_name], getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[dtype_name])
    generator = torch.Generator().manual_seed(1 + environment.rank)
    # The same batch every time: the loss then falls fast, and wrong gradients show.
    tokens = torch.randint(case.vocabulary, (case.batch, case.sequence + 1), generator=generator).to(device)
    times: list[float] = []
    with watched(device, memory and environment.rank == 0) as peak:
        step = VARIANTS[variant](make_model(case), dtype, device)
        for index in range(warmup + steps):
            dist.barrier()
            if index == warmup:
                before, cpu = sent_over_loopback(), time.process_time()
                dist.barrier()
            start = time.perf_counter()
            loss = step(tokens)
            if device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - start)
        cpu = (time.process_time() - cpu) / steps
        dist.barrier()
        wire = (sent_over_loopback() - before) / steps / environment.world_size
    if environment.rank == 0:
        figures = {"times": times[warmup:], "cpu": cpu, "wire": wire, "loss": loss.item(), "peak": peak.bytes}
        Path(out).write_text(json.dumps(figures))
    dist.barrier()
    shutdown()


def rounds(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run every variant, round by round."""
    out = Path(arguments.out).with_suffix(".part")
    for number in range(arguments.rounds):
        for variant in arguments.variants:
            a = arguments
            launch(measure, a.ranks, a.backend, variant, a.case, a.dtype, a.warmup, a.steps, a.memory, str(out))
            yield variant, json.loads(out.read_text())
        print(f"round {number + 1} of {arguments.rounds} done", file=sys.stderr, flush=True)
    out.unlink()


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
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of time")
    parser.add_argument("--out", default="step_time.json")
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    for variant, figures in rounds(arguments):
        results.setdefault(variant, []).append(figures)
    parameters = sum(p.numel() for p in make_model(CASES[arguments.case]).parameters())
    told = {
        "case": asdict(CASES[arguments.case]), "parameters": parameters, "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"), "machine": machine(),
    }  # fmt: skip
    run = {"arguments": vars(arguments), **told, "results": results}
    print(title(run), table(run), sep="\n\n")
    Path(arguments.out).write_text(json.dumps(run))


if __name__ == "__main__":
    main()
