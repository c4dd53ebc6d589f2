"""Predict clicks with a DLRM: dense features, 26 embedding tables, their dot products (Naumov et al., 2019).

    zeromesh launch --nproc 2 examples/dlrm/train.py

``--plain`` trains with DistributedDataParallel instead, in the same loop.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import zeromesh

CONFIG = json.loads(Path(__file__).with_name("config.json").read_text())
BATCH = CONFIG["train_batch_size"]  # over all ranks
DENSE, TABLES, HOT = 13, 26, 2  # numbers and categories of a sample; indices of each category
WIDTH = 16  # numbers of a row


class Dlrm(nn.Module):
    """Rows of all tables and the dense features meet in dot products."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        # sparse=True: gradients have the rows of a batch only, and ZeroMesh spreads the rows over the ranks.
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, WIDTH, mode="sum", sparse=True) for size in sizes)
        self.below = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.above = nn.Sequential(nn.Linear(TABLES * (TABLES + 1) // 2 + WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        """Return logits (n) from numbers (n, 13) and indices (n, 26, hot)."""
        first = self.below(numbers)
        rows = [table(categories[:, place]) for place, table in enumerate(self.tables)]
        every = torch.stack([first, *rows], 1)
        low, high = torch.tril_indices(len(rows) + 1, len(rows) + 1, -1)
        dots = (every @ every.transpose(1, 2))[:, low, high]
        return self.above(torch.cat([first, dots], 1)).squeeze(1)


class ClickLog:
    """Clicks with a planted structure: each category has a taste, and tastes that agree make a click likely."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = torch.tensor(sizes)
        random = torch.Generator().manual_seed(0)
        self.tastes = [torch.randn(size, 4, generator=random) for size in sizes]
        self.weights = torch.randn(DENSE, generator=random)

    def draw(self, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return numbers (count, 13), indices (count, 26, hot) and clicks (count). Low indices are frequent."""
        random = torch.Generator().manual_seed(seed)
        numbers = torch.randn(count, DENSE, generator=random)
        categories = (self.sizes[:, None] * torch.rand(count, TABLES, HOT, generator=random) ** 3).long()
        tastes = torch.stack([taste[categories[:, n]].sum(1) for n, taste in enumerate(self.tastes)], 1)
        logits = numbers @ self.weights / 2 + (tastes[:, ::2] * tastes[:, 1::2]).sum((1, 2)) / 8 - 0.5
        clicks = torch.rand(count, generator=random) < logits.sigmoid()
        return numbers.to(torch.get_default_dtype()), categories, clicks.to(torch.get_default_dtype())


@torch.no_grad()
def area(model: Any, batches: list[tuple[torch.Tensor, ...]]) -> float:
    """Return the area under the ROC curve: how often a click has a higher score than none."""
    scores = torch.cat([model(numbers, categories) for numbers, categories, _ in batches])
    return float(roc_auc_score(torch.cat([clicks for *_, clicks in batches]), scores))


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the loss and the seconds of each step, and the area under the curve on new samples."""
    zeromesh.init_distributed()  # one process or many, under any launcher
    rank, ranks = dist.get_rank(), dist.get_world_size()
    log = ClickLog(sizes := [max(4, options.rows >> (place % 12)) for place in range(TABLES)])
    torch.manual_seed(options.seed)  # the same weights on all ranks
    model: Any = Dlrm(sizes)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=options.lr)  # of rows, too: it changes those of a batch only
    if options.plain:
        model = DistributedDataParallel(model)
    else:
        model, optimizer, *_ = zeromesh.initialize(model, optimizer, config=CONFIG)
    losses, seconds = [], []
    for step in range(options.steps):
        started = time.perf_counter()
        numbers, categories, clicks = (part.chunk(ranks)[rank] for part in log.draw(BATCH, 1 + step))
        loss = binary_cross_entropy_with_logits(model(numbers, categories), clicks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    test = [log.draw(BATCH, -1 - number) for number in range(10)]
    return {"loss": losses, "seconds": seconds, "AUC": area(model, test)}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="of the largest tables; others have 1/2, 1/4 ...")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="DistributedDataParallel instead of ZeroMesh")
    return parser.parse_args(words)


if __name__ == "__main__":
    result = train(parse())
    if dist.get_rank() == 0:
        print(f"AUC {result['AUC']:.4f}")
    dist.destroy_process_group()
