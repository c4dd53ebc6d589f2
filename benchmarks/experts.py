"""Steps of mixtures whose ranks share experts, beside ZeRO-3, DDP and FSDP2 of the same model:

    python benchmarks/experts.py --ranks 2 4 --experts 8 64

A decoder of transformers with random weights trains by AdamW in fp32. The ways take turns in the same processes, so
that a machine whose speed drifts is the same to all; a time is that of the slowest rank. Beside the steps stand the
bytes that a rank sends, the memory of its states, and one exchange of a layer's rows beside torch's
``all_to_all_single`` of the same rows. The figures go to a JSON file and a page.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn

from bench import ROOT, commit, free_name, machine, positive
from page import lines_of, link
from zeromesh.apps.launch.launch import launch
from zeromesh.comm.environment import init_distributed, shutdown

WIDTH, INNER, LAYERS, VOCABULARY, LENGTH = 256, 256, 2, 512, 128
CHOSEN = {8: 2, 64: 8}
"""Experts of a layer -> how many of them compute a token."""


@dataclass
class Way:
    """A way to train: its step, and what a rank sends and has."""

    step: Callable[[torch.Tensor], float]
    sent: Callable[[], dict[str, int]] = dict
    states: Callable[[], int] = int
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def decoder(experts: int) -> nn.Module:
    """Return the same model on each rank."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        moe_intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=CHOSEN.get(experts, 2),
        max_position_embeddings=LENGTH,
    )
    return Qwen3MoeForCausalLM(config)


def of_engine(experts: int, samples: int, sections: dict[str, Any]) -> Way:
    """Return the way of an engine with these sections."""
    import zeromesh

    model = decoder(experts)
    config = {"train_micro_batch_size_per_gpu": samples, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    engine = zeromesh.initialize(model=model, config=config | sections)[0]

    def step(tokens: torch.Tensor) -> float:
        engine.traffic_report(reset=True)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    def sent() -> dict[str, int]:
        by_axis: dict[str, int] = {}
        for name, counts in engine.traffic_report().items():
            axis = name.partition("/")[2]
            by_axis[axis] = by_axis.get(axis, 0) + int(counts["bytes"])
        return by_axis

    return Way(step, sent, lambda: int(engine.memory_report()["total"]))


def of_torch(experts: int, samples: int, wrap: Callable[[nn.Module], nn.Module]) -> Way:
    """Return the way of a wrapped model and torch's AdamW."""
    model = wrap(decoder(experts))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(tokens: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return float(loss)

    def states() -> int:
        tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
        tensors += [x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)]
        return sum(getattr(x, "_local_tensor", x).nbytes for x in tensors)

    return Way(step, states=states)


def fully_sharded(model: nn.Module) -> nn.Module:
    """Shard each layer, its experts as a unit of their own, and the rest."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer.mlp.experts)  # type: ignore[union-attr]
        fully_shard(layer)  # type: ignore[arg-type]
    fully_shard(model)
    return model


WAYS: dict[str, Callable[[int, int], Way]] = {
    "experts shared, ZeRO-1": lambda experts, samples: of_engine(
        experts, samples, {"mesh": {"expert": dist.get_world_size()}, "zero_optimization": {"stage": 1}}
    ),
    "experts shared, ZeRO-3": lambda experts, samples: of_engine(
        experts, samples, {"mesh": {"expert": dist.get_world_size()}, "zero_optimization": {"stage": 3}}
    ),
    "ZeRO-3": lambda experts, samples: of_engine(experts, samples, {"zero_optimization": {"stage": 3}}),
    "torch DDP": lambda experts, samples: of_torch(experts, samples, nn.parallel.DistributedDataParallel),
    "torch FSDP2": lambda experts, samples: of_torch(experts, samples, fully_sharded),
}


def slowest(seconds: float) -> float:
    """Return the time of the slowest rank."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of the slowest rank, from a barrier on, and the result."""
    dist.barrier()
    began = time.perf_counter()
    result = run()
    return slowest(time.perf_counter() - began), result


def exchanges(experts: int, tokens: int, rounds: int) -> dict[str, float]:
    """Return seconds of one exchange of a layer's rows, of ours and of torch's of the same rows."""
    from zeromesh import Mesh
    from zeromesh.parallel.expert.dispatch import RowExchange

    ranks, chosen = dist.get_world_size(), CHOSEN.get(experts, 2)
    group = Mesh({"data": ranks}, torch.device("cpu")).group("data")
    exchange = RowExchange(group, 1 << 15, "benchmark")
    generator = torch.Generator().manual_seed(dist.get_rank())
    index = torch.rand(tokens, experts, generator=generator).topk(chosen).indices // (experts // ranks)
    counts = torch.stack([(index == rank).any(1).sum() for rank in range(ranks)])
    sent, received = (x.flatten().tolist() for x in exchange.counts(counts[:, None]))
    rows = torch.ones(sum(sent), WIDTH)

    def torchs() -> None:
        dist.all_to_all_single(torch.empty(sum(received), WIDTH), rows, received, sent)

    def ours() -> None:
        exchange.send([rows], sent, received)

    seconds: dict[str, list[float]] = {"all_to_all_single": [], "exchange": []}
    for _ in range(rounds + 1):
        seconds["all_to_all_single"].append(timed(torchs)[0])
        seconds["exchange"].append(timed(ours)[0])
    return {name: median(values[1:]) for name, values in seconds.items()} | {"bytes": rows.nbytes}


def measure(experts: int, samples: int, rounds: int) -> dict[str, Any]:
    """Measure all ways on this rank; return the figures of rank 0."""
    init_distributed()
    ways = {name: make(experts, samples) for name, make in WAYS.items()}
    generator = torch.Generator().manual_seed(7)
    batch = torch.randint(0, VOCABULARY, (samples * dist.get_world_size(), LENGTH), generator=generator)
    mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
    for number in range(rounds + 1):
        for name in sorted(ways, key=lambda name: ([*ways].index(name) + number) % len(ways)):
            way = ways[name]
            seconds, loss = timed(lambda way=way: way.step(mine))  # type: ignore[misc]
            if number:
                way.seconds.append(seconds)
            mean = torch.tensor(loss, dtype=torch.float64)
            dist.all_reduce(mean)
            way.losses.append(float(mean) / dist.get_world_size())
            gc.collect()
    rows = [
        {"way": name, "seconds": median(way.seconds), "all": way.seconds, "losses": way.losses, "sent": way.sent()}
        | {"states": way.states()}
        for name, way in ways.items()
    ]
    raw = exchanges(experts, samples * LENGTH, 5 * rounds)
    shutdown()
    return {"experts": experts, "chosen": CHOSEN.get(experts, 2), "rows": rows, "exchange": raw}


def page(result: dict[str, Any]) -> str:
    """Return the page of the figures."""
    parts = [
        f"# Experts that ranks share: {result['date']}\n",
        f"A decoder of transformers (Qwen3-MoE, {LAYERS} layers, width {WIDTH}, experts of {INNER}) in fp32, "
        f"{result['samples']} samples of {LENGTH} tokens on each rank, AdamW, {result['rounds']} rounds in turns; "
        f"torch {result['torch']}, commit {result['commit']}, {result['machine']}. Made by `benchmarks/experts.py`.\n",
    ]
    for case in result["cases"]:
        parts.append(f"## {case['experts']} experts, {case['chosen']} for a token, on {case['ranks']} ranks\n")
        table = [["", "step, ms", "beside the first", "bytes sent by rank 0", "states of rank 0, MB"]]
        first = case["rows"][0]["seconds"]
        for row in case["rows"]:
            sent = ", ".join(f"{axis} {count:,}" for axis, count in row["sent"].items() if count) or "not counted"
            table.append(
                [
                    row["way"],
                    f"{row['seconds'] * 1000:.0f}",
                    f"{row['seconds'] / first:.2f}",
                    sent,
                    f"{row['states'] / 1e6:.1f}",
                ]
            )
        raw = case["exchange"]
        parts += [
            lines_of(table),
            f"\nOne exchange of a layer's rows, {raw['bytes']:,} bytes on rank 0: {raw['exchange'] * 1000:.2f} ms, and "
            f"{raw['all_to_all_single'] * 1000:.2f} ms by torch's `all_to_all_single`.\n",
        ]
    return "\n".join(parts)


def main() -> None:
    """Measure each number of experts on each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive, nargs="+", default=[2, 4])
    parser.add_argument("--experts", type=positive, nargs="+", default=[8, 64])
    parser.add_argument("--samples", type=positive, default=4, help="of each rank")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder for page and figures")
    arguments = parser.parse_args()
    cases = [
        launch(measure, ranks, experts, arguments.samples, arguments.rounds)[0] | {"ranks": ranks}
        for ranks in arguments.ranks
        for experts in arguments.experts
    ]
    date = time.strftime("%Y-%m-%d")
    result = {
        "date": date,
        "commit": commit(),
        "machine": machine(),
        "torch": torch.__version__,
        "samples": arguments.samples,
        "rounds": arguments.rounds,
        "cases": cases,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = free_name(arguments.out, f"{date}-experts")
    path.write_text(json.dumps(result, indent=1) + "\n")
    target = path.with_suffix(".md")
    target.write_text(page(result))
    link(target, f"steps of mixtures whose ranks share experts, beside ZeRO-3, DDP and FSDP2; {machine()}.")
    print(page(result))


if __name__ == "__main__":
    main()
