"""Teach a small T5 to sort: its input is a name from Python's standard library, its answer the letters in order.

    zeromesh launch --nproc 2 examples/t5/train.py

``--plain`` trains with DistributedDataParallel instead, in the same loop.
"""

import argparse
import json
import re
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import T5Config, T5ForConditionalGeneration

import zeromesh

CONFIG = json.loads(Path(__file__).with_name("config.json").read_text())
BATCH = CONFIG["train_batch_size"]  # over all ranks
PAD, END, FIRST = 0, 1, 2  # tokens; FIRST is the letter a
TEST = 200  # names that are not trained on


def read_names(files: int, length: int) -> torch.Tensor:
    """Return the names of 3 to ``length`` small letters, each once, as tokens (n, length + 1) with END and PAD."""
    text = " ".join(path.read_text() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files])
    names = sorted(set(re.findall(rf"\b[a-z]{{3,{length}}}\b", text)))
    rows = [[FIRST + ord(letter) - ord("a") for letter in name] + [END] for name in names]
    tokens = torch.tensor([row + [PAD] * (length + 1 - len(row)) for row in rows])
    return tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))]


def answers(names: torch.Tensor) -> torch.Tensor:
    """Return the letters of each name in order, END behind them; -100, which is not learned, in the place of PAD."""
    last = FIRST + 26  # sorts END and PAD behind the letters, as they were
    ends = torch.where(names == END, last, torch.where(names == PAD, last + 1, names)).sort(1).values
    return torch.where(ends == last, END, torch.where(ends > last, -100, ends))


@torch.no_grad()
def exact_matches(model: Any, names: torch.Tensor) -> float:
    """Return the share of names, in per cent, whose whole answer is right, written letter by letter."""
    model.eval()
    expected = answers(names)
    written = torch.full((len(names), 1), PAD, device=names.device)  # T5 begins with PAD
    for _ in range(names.shape[1]):
        output = model(input_ids=names, attention_mask=names != PAD, decoder_input_ids=written)
        written = torch.cat([written, output.logits[:, -1:].argmax(2)], 1)
    model.train()
    return 100 * float(((written[:, 1:] == expected) | (expected == -100)).all(1).double().mean())


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the loss and the seconds of each step, and how many new names are sorted."""
    zeromesh.init_distributed()  # one process or many, under any launcher
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    names = read_names(options.files, options.length).to(device)
    torch.manual_seed(options.seed)  # the same weights on all ranks
    shape = T5Config(
        vocab_size=FIRST + 26, d_model=options.width, d_kv=options.width // 4, d_ff=4 * options.width, num_heads=4,
        num_layers=options.layers, dropout_rate=0.0, pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=PAD,
        relative_attention_max_distance=16,
    )  # fmt: skip
    model: Any = T5ForConditionalGeneration(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 20, 1 - n / options.steps))
    if options.plain:
        model = DistributedDataParallel(model)
    else:
        model, optimizer, _, schedule = zeromesh.initialize(model, optimizer, lr_scheduler=schedule, config=CONFIG)

    generator = torch.Generator().manual_seed(options.seed)  # all ranks draw the same batch, and take their share
    losses, seconds = [], []
    for step in range(options.steps):
        started = time.perf_counter()
        chosen = torch.randint(TEST, len(names), (BATCH,), generator=generator).chunk(ranks)[rank]
        batch = names[chosen.to(device)]
        loss = model(input_ids=batch, attention_mask=batch != PAD, labels=answers(batch)).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    return {"loss": losses, "seconds": seconds, "names sorted, %": exact_matches(model, names[:TEST])}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"files": 100, "length": 8, "width": 64, "layers": 2, "steps": 400, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--plain", action="store_true", help="DistributedDataParallel instead of ZeroMesh")
    return parser.parse_args(words)


if __name__ == "__main__":
    result = train(parse())
    if dist.get_rank() == 0:
        print(f"{result['names sorted, %']:.1f} % of the names are sorted")
    dist.destroy_process_group()
