"""A training script that is started in every way there is: ``anywhere.py FILE [--ranks N] [--steps N]``.

Rank 0 writes the losses to the file. The batch is the same on any number of ranks.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn

import zeromesh

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
    "dataloader_drop_last": True,
}


def make_engine(config: dict) -> tuple[zeromesh.Engine, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    inputs = torch.randn(50, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    engine, _, loader, _ = zeromesh.initialize(model, training_data=data, config=config, loss_fn=nn.functional.mse_loss)
    return engine, loader


def passes(loader):
    while True:
        yield from loader


def train(steps: int) -> tuple[int, list[float]]:
    engine, loader = make_engine(CONFIG)
    batches = passes(loader)
    return engine.mesh.world_size, [float(engine.train_batch(batches)) for _ in range(steps)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.ranks is None:
        result = train(arguments.steps)
        rank = torch.distributed.get_rank()
        torch.distributed.destroy_process_group()
    else:
        results = zeromesh.launch(train, arguments.ranks, arguments.steps)
        assert results == results[:1] * arguments.ranks
        rank, result = 0, results[0]
    if rank == 0:
        arguments.file.write_text(json.dumps(result))
