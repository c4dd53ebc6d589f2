"""Largest models and longest sequences of one device by the planner's memory, before and after what saves memory.

    python benchmarks/largest_models.py [--only TEXT] [--markdown FILE]

Each row asks for the most blocks, by bisection, or the most tokens, which memory follows in a line, that the planner
says fit: without memory and without the device. "Before" is AdamW with states in fp32 and blocks that are computed
again from their inputs. "After" has states and sums of gradients in bf16, tiles over tokens with a loss in chunks,
inputs of blocks on the host, and experts at rest on NVMe.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from zeromesh.apps.plan.choose.fit import lacking
from zeromesh.apps.plan.choose.layout_documents import layout_from
from zeromesh.apps.plan.cost.cost import CostSource
from zeromesh.apps.plan.cost.passes import TokenTiles, TraceOptions
from zeromesh.apps.plan.cost.resting import RestingCost
from zeromesh.apps.plan.cost.source import hugging_face_cost
from zeromesh.apps.plan.machine.cluster import Machine, Node
from zeromesh.apps.plan.machine.here import machine_here, tiles_of
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.plan.predict.rank_memory import memory_of
from zeromesh.config.settings import Settings

Json = dict[str, Any]

USUAL_TOKENS = 4096
STEP = 4096  # of tokens
CPU = {"device": "cpu", "split_master": True}
PLACES: dict[str, Json] = {
    "all on the device": {"stage": 3},
    "parameters and states on the host": {
        "stage": 3, "offload_optimizer": CPU, "offload_param": {"device": "cpu"},
    },
}  # fmt: skip
AGAIN = {"activation_checkpointing": {"enabled": True}}
BEFORE: Json = AGAIN
AFTER: Json = {
    "optimizer_state_dtype": {"exp_avg": "bf16", "exp_avg_sq": "bf16"},
    "data_types": {"grad_accum_dtype": "bf16"},
    "tiling": {"mlp": "width", "loss": True},
    "activation_checkpointing": {"enabled": True, "cpu_checkpointing": True},
}
# A mixture of this form has no MLP beside its experts to cut into tiles.
RESTING: Json = {"experts": {"rest": "nvme", "nvme_path": "/tmp"}, "tiling": {"loss": True}}


def decoder(layers: int) -> Any:
    """Return the configuration of Llama 3's form: 32 blocks are its 8 billion."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128256, hidden_size=128 * layers, intermediate_size=448 * layers, num_hidden_layers=layers,
        num_attention_heads=layers, num_key_value_heads=layers // (2 if layers % 4 else 4),
        max_position_embeddings=1 << 26, architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def mixture(layers: int) -> Any:
    """Return the configuration of Qwen3's form, 8 of 128 experts a token: 48 blocks are its 30 billion."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=151936, hidden_size=128 * layers // 3, intermediate_size=128 * layers, num_hidden_layers=layers,
        moe_intermediate_size=16 * layers, num_experts=128, num_experts_per_tok=8, head_dim=128,
        num_attention_heads=2 * layers // 3, num_key_value_heads=layers // 3, max_position_embeddings=1 << 26,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip


@cache
def cost_of(make: Callable[[int], Any], layers: int, tiles: TokenTiles, kernels: str) -> CostSource:
    """Return the cost of a model of so many blocks in bf16."""
    return hugging_face_cost(make(layers), TraceOptions(torch.bfloat16, kernels=kernels, tiles=tiles))


def missing(machine: Machine, document: Json, make: Callable[[int], Any], layers: int, tokens: int) -> Json:
    """Return the bytes that each tier lacks to train with one sample of so many tokens; below zero, what is left."""
    settings = Settings.load(
        {
            "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, **document,
        }
    )  # fmt: skip
    layout, _ = layout_from(settings, 1)
    processor = machine.nodes[0][0].device.processor
    source = cost_of(make, layers, tiles_of(settings), "cpu" if processor else "cuda")
    if layout.resting is not None:
        source = RestingCost(source, layout.widths.parameter)
    return lacking(memory_of(source, tokens, layout, machine), layout, machine)


def most(works: Callable[[int], bool], step: int, end: int) -> int:
    """Return the largest multiple of ``step`` up to ``end`` that works, where all below it do; 0: none."""
    low, high = 0, end // step + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle * step) else (low, middle)
    return low * step


def longest(machine: Machine, document: Json, layers: int) -> int:
    """Return the most tokens of a sample, of which memory is a line."""
    lengths = 1 << 15, 1 << 16
    few, more = (missing(machine, document, decoder, layers, length) for length in lengths)
    tokens = 1 << 21
    for tier, lacks in few.items():
        each = (more[tier] - lacks) / (lengths[1] - lengths[0])
        if each > 0:
            tokens = min(tokens, int(lengths[0] - lacks / each))
    return max(0, tokens // STEP * STEP)


@dataclass(frozen=True)
class Question:
    """A row of the table: the most of something on a machine."""

    machine: str
    what: str  # "dense", "mixture" or "tokens"
    place: str  # of states; experts rest on NVMe after


@cache
def machines() -> dict[str, Machine]:
    """Return the machines: with usual hosts, and a disk."""
    found = {
        "24 GB card, host of 128 GB": cluster(gpu="rtx-4090", gpus=1, host_memory=128e9),
        "80 GB card, host of 256 GB": cluster(gpu="h100", gpus=1, host_memory=256e9),
        "CPU, 23 GB": machine_here(1, 1),
    }
    sizes = {"CPU, 23 GB": 23e9}  # what the system leaves of 24 GB, whatever else runs now

    def usual(name: str, node: Node) -> Node:
        host = sizes.get(name, node.host_memory)
        device = replace(node.device, memory=host) if name in sizes else node.device
        return replace(node, disk=4e12, host_memory=host, device=device)

    return {
        name: replace(machine, nodes=tuple((usual(name, node), count) for node, count in machine.nodes))
        for name, machine in found.items()
    }


def questions() -> list[Question]:
    """Return all rows."""
    on_device, on_host = PLACES
    found = []
    for name in machines():
        places = (on_device,) if "CPU" in name else (on_device, on_host)
        found += [Question(name, what, place) for what in ("dense", "mixture") for place in places]
        found += [Question(name, "tokens", on_host)] if len(places) > 1 else []
    return found


def answer(question: Question, after: bool) -> tuple[int, str]:
    """Return the number that fits, and what it says, in words."""
    machine = machines()[question.machine]
    document = {"zero_optimization": PLACES[question.place], **(AFTER if after else BEFORE)}
    if question.what == "tokens":
        tokens = longest(machine, document, 32)
        return tokens, f"{tokens:,} tokens"
    make, step = (decoder, 2) if question.what == "dense" else (mixture, 3)
    document |= RESTING if after and question.what == "mixture" else {}
    layers = most(lambda n: max(missing(machine, document, make, n, USUAL_TOKENS).values()) <= 0, step, 60 * step)
    if not layers:
        return 0, "none"
    size = cost_of(make, layers, TokenTiles(), "cuda").at(1, USUAL_TOKENS).parameters
    return size, f"{size / 1e9:.1f} G"


NAMES = {"dense": "largest dense model", "mixture": "largest mixture", "tokens": "longest sequence, 8 G"}


def table(rows: Sequence[Question]) -> Iterator[str]:
    """Yield the lines of the table in Markdown."""
    yield "| machine | what | states | before | after |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        yield f"| {row.machine} | {NAMES[row.what]} | {row.place} | {answer(row, False)[1]} | {answer(row, True)[1]} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="file for the table")
    parser.add_argument("--only", default="", help="machines whose name has this text")
    given = parser.parse_args()
    lines = []
    for line in table([question for question in questions() if given.only in question.machine]):
        lines.append(line)
        print(line, flush=True)
    if given.markdown:
        given.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
