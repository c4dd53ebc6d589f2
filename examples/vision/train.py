"""Classify handwritten digits with a network of torchvision: ResNet, VGG or ViT.

    zeromesh launch --nproc 2 examples/vision/train.py --model resnet18

``--plain`` trains with DistributedDataParallel instead, in the same loop.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import get_model

import zeromesh

CONFIG = json.loads(Path(__file__).with_name("config.json").read_text())
BATCH = CONFIG["train_batch_size"]  # over all ranks
TEST = 360  # images that are not trained on


def read_digits(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1,797 images (n, 3, size, size) from 8x8 pixels, and their digits (n), in a fixed random order."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.from_numpy(digits.images)[order, None].to(torch.get_default_dtype()) / 8 - 1
    return interpolate(pixels, size).expand(-1, 3, -1, -1), torch.from_numpy(digits.target)[order]


def make_model(name: str, size: int) -> nn.Module:
    """Return a network of torchvision with random weights and ten classes."""
    extra = {"image_size": size} if name.startswith("vit") else {}
    return get_model(name, weights=None, num_classes=10, **extra)


@torch.no_grad()
def accuracy(model: Any, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of images, in per cent, whose digit is found."""
    model.eval()
    found = torch.cat([model(part).argmax(1) for part in images.split(60)])
    model.train()
    return 100 * float((found == labels).double().mean())


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the loss and the seconds of each step, and the accuracy on the test images."""
    zeromesh.init_distributed()  # one process or many, under any launcher
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    images, labels = (tensor.to(device) for tensor in read_digits(options.size))
    torch.manual_seed(options.seed)  # the same weights on all ranks
    model: Any = make_model(options.model, options.size).to(device)
    if options.sync:
        model = zeromesh.sync_batch_norm(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 10, 1 - n / options.steps))
    if options.plain:
        model = DistributedDataParallel(model)
    else:
        model, optimizer, _, schedule = zeromesh.initialize(model, optimizer, lr_scheduler=schedule, config=CONFIG)

    generator = torch.Generator().manual_seed(options.seed)  # all ranks draw the same batch
    torch.manual_seed(options.seed + rank)  # dropout differs
    losses, seconds = [], []
    for step in range(options.steps):
        started = time.perf_counter()
        batch = torch.randint(TEST, len(images), (BATCH,), generator=generator).chunk(ranks)[rank].to(device)
        loss = cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    return {"loss": losses, "seconds": seconds, "test accuracy, %": accuracy(model, images[:TEST], labels[:TEST])}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18", help="resnet50, vgg11_bn, vit_b_16 ... of torchvision")
    parser.add_argument("--size", type=int, default=32, help="pixels of a side; the digits have 8")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sync", action="store_true", help="batch statistics over all ranks")
    parser.add_argument("--plain", action="store_true", help="DistributedDataParallel instead of ZeroMesh")
    return parser.parse_args(words)


if __name__ == "__main__":
    result = train(parse())
    if dist.get_rank() == 0:
        print(f"test accuracy {result['test accuracy, %']:.1f} %")
    dist.destroy_process_group()
