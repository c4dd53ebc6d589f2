"""Pre-train a small GPT-2 on the source of Python's standard library, byte by byte.

    zeromesh launch --nproc 2 examples/gpt/train.py --output runs/gpt

``--plain`` trains with DistributedDataParallel instead, in the same loop.
"""

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import zeromesh

CONFIG = json.loads(Path(__file__).with_name("config.json").read_text())
BATCH = CONFIG["train_batch_size"]  # over all ranks


def read_bytes(files: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of ``length`` bytes (n, length) of modules of the standard library, to train on and to test on."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]
    data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8).long()
    rows = data[: len(data) // length * length].view(-1, length)
    held_out = torch.arange(len(rows)) % 50 == 0
    return rows[~held_out], rows[held_out]


@torch.no_grad()
def bits_per_byte(model: Any, rows: torch.Tensor) -> float:
    """Return the mean loss over rows, in bits."""
    model.eval()
    total = sum(len(part) * model(input_ids=part, labels=part).loss.item() for part in rows.split(64))
    model.train()
    return total / len(rows) / math.log(2)


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the loss and the seconds of each step, and the loss on the test rows."""
    zeromesh.init_distributed()  # one process or many, under any launcher
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    rows, held_out = (part.to(device) for part in read_bytes(options.files, options.length))
    torch.manual_seed(options.seed)  # the same weights on all ranks
    shape = GPT2Config(
        vocab_size=256, n_embd=options.width, n_layer=options.layers, n_head=4, n_positions=options.length,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 20, 1 - n / options.steps))
    if options.plain:
        model = DistributedDataParallel(model)
    else:
        model, optimizer, _, schedule = zeromesh.initialize(model, optimizer, lr_scheduler=schedule, config=CONFIG)

    generator = torch.Generator().manual_seed(options.seed)  # all ranks draw the same batch, and take their share
    losses, seconds = [], []
    for step in range(options.steps):
        started = time.perf_counter()
        batch = rows[torch.randint(len(rows), (BATCH,), generator=generator).chunk(ranks)[rank].to(device)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    result = {"loss": losses, "seconds": seconds, "test bits per byte": bits_per_byte(model, held_out)}
    if options.output and not options.plain:
        model.save_16bit_model(options.output)  # opens with GPT2LMHeadModel.from_pretrained
    return result


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=60, help="modules of the standard library to read")
    parser.add_argument("--length", type=int, default=64, help="bytes of a row")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="folder of the trained model")
    parser.add_argument("--plain", action="store_true", help="DistributedDataParallel instead of ZeroMesh")
    return parser.parse_args(words)


if __name__ == "__main__":
    result = train(parse())
    if dist.get_rank() == 0:
        print(f"{result['test bits per byte']:.3f} bits per byte of held-out text")
    dist.destroy_process_group()
