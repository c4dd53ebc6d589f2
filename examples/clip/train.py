"""Train two towers, of images and of texts, to find each other: CLIP.

    zeromesh launch --nproc 2 examples/clip/train.py

An image shows four handwritten digits, and its text names them. ``--plain`` uses DistributedDataParallel.
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
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel
from transformers import CLIPConfig, CLIPModel

import zeromesh

CONFIG = json.loads(Path(__file__).with_name("config.json").read_text())
BATCH = CONFIG["train_batch_size"]  # over all ranks
TEST = 360  # digits that are not trained on
START, END = 10, 11  # tokens, beside one for each digit


class Digits:
    """Pairs of an image of four digits, 2 x 2, and the text that names them."""

    def __init__(self, part: slice) -> None:
        data = load_digits()
        order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))[part]
        self.images = torch.from_numpy(data.images)[order].to(torch.get_default_dtype()) / 8 - 1
        self.labels = torch.from_numpy(data.target)[order]

    def draw(self, count: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images (count, 3, 16, 16) and texts (count, 6)."""
        chosen = torch.randint(len(self.labels), (count, 2, 2), generator=random)
        images = self.images[chosen].transpose(2, 3).reshape(count, 1, 16, 16)
        texts = pad(pad(self.labels[chosen].flatten(1), (1, 0), value=START), (0, 1), value=END)
        return images.expand(-1, 3, -1, -1), texts


class GlobalContrast(nn.Module):
    """CLIP with random weights, and its loss over the batches of all ranks."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": 4, "image_size": 16, "patch_size": 8}
        text = {**sizes, "vocab_size": 12, "max_position_embeddings": 6, "bos_token_id": START, "eos_token_id": END}
        self.clip = CLIPModel(CLIPConfig(text_config=text, vision_config=sizes, projection_dim=width))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the loss of this rank's pairs, and the features of its images and texts (count, width)."""
        found = self.clip(pixel_values=images, input_ids=texts)
        image, text = found.image_embeds, found.text_embeds
        # With gradients: the texts of this rank are learned from the images of all ranks.
        all_images, all_texts = zeromesh.gather_with_gradient(image), zeromesh.gather_with_gradient(text)
        scale = self.clip.logit_scale.exp()
        own = torch.arange(len(image), device=image.device) + dist.get_rank() * len(image)
        loss = cross_entropy(scale * image @ all_texts.t(), own) + cross_entropy(scale * text @ all_images.t(), own)
        return loss / 2, image, text


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the loss and the seconds of each step, and how many texts of new images are found."""
    zeromesh.init_distributed()  # one process or many, under any launcher
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(options.seed)  # the same weights on all ranks
    model: Any = GlobalContrast(options.width, options.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 20, 1 - n / options.steps))
    if options.plain:
        model = DistributedDataParallel(model)
    else:
        model, optimizer, _, schedule = zeromesh.initialize(model, optimizer, lr_scheduler=schedule, config=CONFIG)

    digits, random = Digits(slice(TEST, None)), torch.Generator().manual_seed(options.seed)
    losses, seconds = [], []
    for step in range(options.steps):
        started = time.perf_counter()
        images, texts = (part.chunk(ranks)[rank].to(device) for part in digits.draw(BATCH, random))
        loss, _, _ = model(images, texts)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    model.eval()
    images, texts = (part.to(device) for part in Digits(slice(TEST)).draw(256, torch.Generator().manual_seed(0)))
    with torch.no_grad():
        _, image, text = model(images, texts)
    found = (texts[(image @ text.t()).argmax(1)] == texts).all(1)
    return {"loss": losses, "seconds": seconds, "texts found among 256, %": 100 * float(found.double().mean())}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"width": 64, "layers": 2, "steps": 120, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--plain", action="store_true", help="DistributedDataParallel instead of ZeroMesh")
    return parser.parse_args(words)


if __name__ == "__main__":
    result = train(parse())
    if dist.get_rank() == 0:
        print(f"{result['texts found among 256, %']:.1f} % of texts found among 256")
    dist.destroy_process_group()
