"""A script of Horovod's usual shape: with ``horovod.torch`` in the place of ``zeromesh.horovod`` it runs there, too."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import zeromesh.horovod as hvd


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.first, self.second = nn.Linear(4 * 9, 16), nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.max_pool2d(F.relu(self.conv(images)), 2).flatten(1)
        return F.log_softmax(self.second(F.relu(self.first(hidden))), dim=1)


def digits() -> TensorDataset:
    """Noisy pictures of ten patterns."""
    generator = torch.Generator().manual_seed(5)
    patterns = torch.randn(10, 1, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 10, (64,), generator=generator)
    noise = torch.randn(64, 1, 8, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(patterns[labels] + 0.3 * noise, labels)


def metric_average(value: torch.Tensor, name: str) -> float:
    return float(hvd.allreduce(value, name=name).item())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--output")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42 + hvd.rank())
    data = digits()
    sampler: DistributedSampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)

    losses = []
    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(metric_average(loss.detach(), "train_loss"))
    if hvd.rank() == 0 and args.output:
        torch.save({"model": model.state_dict(), "losses": losses}, args.output)
        print("trained on", os.environ.get("WORLD_SIZE", "1"), "ranks")


if __name__ == "__main__":
    main()
