"""Teach a model a preference without a reward model: DPO, in a plain loop with a frozen reference.

    zeromesh launch --nproc 2 examples/gpt/train.py --output runs/gpt     # makes the model, once
    zeromesh launch --nproc 2 examples/dpo/train.py --base runs/gpt

A prompt is a piece of the standard library's source; preferred is the text that follows it, over the text that follows
another prompt. ``--plain`` trains with DistributedDataParallel instead, in the same loop.
"""

import argparse
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import logsigmoid
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2LMHeadModel

import zeromesh

CONFIG = json.loads(Path(__file__).with_name("config.json").read_text())
BATCH = CONFIG["train_batch_size"]  # pairs, over all ranks
PROMPT, LENGTH = 32, 64  # bytes of a prompt, and of a prompt with its answer
TEST = 256  # rows that are not trained on


def read_rows(files: int) -> torch.Tensor:
    """Return rows of LENGTH bytes (n, LENGTH) of modules of the standard library that the model has not read."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[60 : 60 + files]
    data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8).long()
    rows = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def pairs(rows: torch.Tensor) -> torch.Tensor:
    """Return rows with their own answers, then the same prompts with answers of other rows (2 n, LENGTH)."""
    other = torch.cat([rows[:, :PROMPT], rows.roll(1, 0)[:, PROMPT:]], 1)
    return torch.cat([rows, other])


def answer_likelihood(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the likelihood of each row's answer, given its prompt (n)."""
    logits = model(input_ids=rows).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(2).gather(2, rows[:, PROMPT:, None]).sum((1, 2))


@torch.no_grad()
def preferred(model: Any, rows: torch.Tensor) -> float:
    """Return the share of pairs, in per cent, whose preferred answer is the likelier one."""
    good, bad = answer_likelihood(model, pairs(rows)).chunk(2)
    return 100 * float((good > bad).double().mean())


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the loss and the seconds of each step, and how many new pairs are ranked as preferred."""
    zeromesh.init_distributed()  # one process or many, under any launcher
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    rows = read_rows(40).to(device)
    model: Any
    reference: Any
    model, reference = (
        GPT2LMHeadModel.from_pretrained(options.base, dtype=torch.get_default_dtype()).to(device) for _ in range(2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    if options.plain:
        model = DistributedDataParallel(model)
        reference.requires_grad_(False)
    else:
        model, optimizer, _, _ = zeromesh.initialize(model, optimizer, config=CONFIG)
        reference, *_ = zeromesh.initialize(reference, config=CONFIG)  # sharded, too, and without an optimizer

    generator = torch.Generator().manual_seed(options.seed)  # all ranks draw the same batch, and take their share
    before = preferred(model, rows[:TEST])
    losses, seconds = [], []
    for step in range(options.steps):
        started = time.perf_counter()
        chosen = torch.randint(TEST, len(rows), (BATCH,), generator=generator).chunk(ranks)[rank]
        batch = pairs(rows[chosen.to(device)])
        with torch.no_grad():
            usual = answer_likelihood(reference, batch)
        good, bad = (answer_likelihood(model, batch) - usual).chunk(2)
        loss = -logsigmoid(options.beta * (good - bad)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    ranked = {"pairs ranked right before, %": before, "after, %": preferred(model, rows[:TEST])}
    return {"loss": losses, "seconds": seconds, **ranked}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="runs/gpt", help="folder of the model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="DistributedDataParallel instead of ZeroMesh")
    return parser.parse_args(words)


if __name__ == "__main__":
    result = train(parse())
    if dist.get_rank() == 0:
        print(f"ranked right: {result['pairs ranked right before, %']:.1f} %, then {result['after, %']:.1f} % of pairs")
    dist.destroy_process_group()
