"""A training run that resumes from its last checkpoint when its ranks, or its nodes, are restarted.

    zeromesh launch --nproc 2 --max-restarts 3 examples/resumable.py --output runs/resumable

Comments mark the three lines that it takes. ``train_batch_size`` keeps the size of each update's batch on any number of
ranks, and ``dataloader_drop_last`` keeps its samples.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import zeromesh

CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
    "dataloader_drop_last": True,
    "checkpoint": {"keep_last": 2},
}


def main() -> None:
    """Train a small network to predict the sine of a sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/resumable"), help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    inputs = torch.randn(1000, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    loss = nn.functional.mse_loss
    engine, _, loader, _ = zeromesh.initialize(model, training_data=data, config=CONFIG, loss_fn=loss)
    assert loader is not None
    engine.load_checkpoint(arguments.output)  # 1: resume from the last checkpoint, if there is one

    def batches() -> Iterator[object]:
        while True:
            yield from loader

    stream = batches()
    while engine.global_steps < arguments.steps:  # 2: the checkpoint restores this counter
        loss_of_step = engine.train_batch(stream)
        if engine.global_steps % arguments.save_every == 0:
            engine.save_checkpoint(arguments.output)  # 3: save, as often as you like
            if engine.mesh.rank == 0:
                print(f"step {engine.global_steps}: loss {float(loss_of_step):.3f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
