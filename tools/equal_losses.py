"""Losses and norms of gradients of 16 layouts under one seed: ``equal_losses.py [--write FILE] [--against FILE]``.

A change of structure leaves every number as it was. ``--write`` keeps the numbers of the package that Python imports,
``--against`` compares with such a file, bit for bit, and ends with 1 where a layout differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeromesh

STEPS, RANKS = 4, 2
HOST = {"device": "cpu"}
BF16 = {"bf16": {"enabled": True}}


def layouts(folder: str) -> dict[str, dict[str, Any]]:
    """Return the configurations by name; ``folder`` is for states on a disk."""
    disk = {"device": "nvme", "nvme_path": folder}

    def zero(stage: int, **keys: Any) -> dict[str, Any]:
        return {"zero_optimization": {"stage": stage, **keys}}

    return {
        "zero 0": zero(0),
        "zero 1": zero(1) | BF16,
        "zero 2": zero(2) | BF16,
        "zero 3": zero(3),
        "zero 3, bf16": zero(3) | BF16,
        "zero 2, fp16": zero(2) | {"fp16": {"enabled": True, "initial_scale_power": 8}},
        "zero 2, host": zero(2, offload_optimizer=HOST) | BF16,
        "zero 2, half on the host": zero(2, offload_optimizer=HOST | {"ratio": 0.5}) | BF16,
        "zero 3, host": zero(3, offload_optimizer=HOST, offload_param=HOST) | BF16,
        "zero 3, disk": zero(3, offload_optimizer=disk, offload_param=disk) | BF16,
        "tensor": {"mesh": {"tensor": 2}},
        "tensor, sequence": {"mesh": {"tensor": 2}, "tensor_parallel": {"sequence": True}} | BF16,
        "pipeline": {"mesh": {"pipeline": 2}} | zero(1),
        "context": {"mesh": {"context": 2}} | zero(3),
        "tables": zero(1) | {"embedding_tables": {"modules": ["embedding"]}},
        "recomputation": zero(3) | {"activation_checkpointing": {"targets": ["Block"]}} | BF16,
    }


class Block(nn.Module):
    """One block of a decoder of width 32."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.query_key_value, self.output = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Attend and transform."""
        query, key, value = (
            part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.query_key_value(self.norm_1(x_BTD)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.output(attended.transpose(1, 2).flatten(2))
        return x_BTD + self.down(nn.functional.gelu(self.up(self.norm_2(x_BTD))))


class Decoder(nn.Module):
    """A decoder of four blocks that returns its loss."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.embedding, self.positions = nn.Embedding(64, 32), nn.Embedding(16, 32)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the mean cross entropy of the labels; all arguments are int64 of shape (batch, sequence)."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        logits = self.head(self.norm(self.blocks(self.embedding(input_ids) + self.positions(position_ids))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(folder: str, names: list[str]) -> dict[str, list[str]]:
    """Return losses and norms of gradients by layout, in hexadecimal."""
    numbers: dict[str, list[str]] = {}
    for name, sections in layouts(folder).items():
        if names and name not in names:
            continue
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        }
        engine, *_ = zeromesh.initialize(model=Decoder(), config=config | sections)
        generator = torch.Generator().manual_seed(engine.data_rank)
        numbers[name] = []
        for _ in range(STEPS):
            tokens = [torch.randint(64, (4, 17), generator=generator) for _ in range(2)]
            batches = iter([{"input_ids": part[:, :-1], "labels": part[:, 1:]} for part in tokens])
            numbers[name].append(float(engine.train_batch(batches)).hex())
            numbers[name].append(float(engine.get_global_grad_norm() or 0.0).hex())
        engine.destroy()
    return numbers


def main() -> int:
    """Run the layouts; return 1 if one differs from the file, 0 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="layouts; all of them by default")
    parser.add_argument("--write", type=Path, help="keep the numbers in this file")
    parser.add_argument("--against", type=Path, help="compare with the numbers in this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        numbers = zeromesh.launch(train, RANKS, folder, arguments.names)[0]
    if arguments.write:
        arguments.write.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    if arguments.against is None:
        return 0
    before = json.loads(arguments.against.read_text(encoding="utf-8"))
    differing = [name for name in numbers if numbers[name] != before.get(name)]
    for name in numbers:
        print(f"{name}: {'differs' if name in differing else 'equal'}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
