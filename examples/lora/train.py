"""Fine-tune a model on one device, wholly or with LoRA, with states of the optimizer on the host or in files.

    zeromesh launch --nproc 2 examples/gpt/train.py --output runs/gpt     # makes the model, once
    python examples/lora/train.py --base runs/gpt --method lora --offload cpu

The model, which has read Python, learns to chat from ``examples/chat.jsonl``. ``--plain`` trains in plain torch.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import GPT2LMHeadModel

import zeromesh

CONFIG = json.loads(Path(__file__).with_name("config.json").read_text())
CHATS = Path(__file__).parents[1] / "chat.jsonl"
BATCH = CONFIG["train_batch_size"]
RATES = {"full": 5e-4, "lora": 5e-3}
LORA = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)


def read_chats(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of ``length`` bytes (n, length) of the chats, to train on and to test on."""
    chats = [json.loads(line)["messages"] for line in CHATS.read_text().splitlines()]
    text = "\n".join(f"{one['role']}: {one['content']}" for chat in chats for one in chat).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = data[: len(data) // length * length].view(-1, length)
    held_out = torch.arange(len(rows)) % 8 == 0
    return rows[~held_out], rows[held_out]


def prepare(options: argparse.Namespace) -> tuple[Any, torch.optim.Optimizer]:
    """Return the model and its optimizer."""
    rate, dtype = RATES[options.method], torch.get_default_dtype()
    if options.plain:
        model: Any = GPT2LMHeadModel.from_pretrained(options.base, dtype=dtype)
        model = peft.get_peft_model(model, LORA) if options.method == "lora" else model
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
    model = zeromesh.from_pretrained(options.base, GPT2LMHeadModel, dtype=dtype)  # initialize reads the values
    if options.method == "lora":
        with zeromesh.zero.Init():
            model = peft.get_peft_model(model, LORA)
    config = {**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.0}}}
    if options.offload != "none":
        states = {"device": options.offload} | ({"nvme_path": options.files} if options.offload == "nvme" else {})
        config["zero_optimization"] = {**config["zero_optimization"], "offload_optimizer": states}
    return zeromesh.initialize(model, config=config)[:2]


def memory(model: Any, optimizer: torch.optim.Optimizer, gradients: int) -> dict[str, float]:
    """Return the MB of weights, gradients and optimizer states on the device, on the host and in files."""
    tiers = dict.fromkeys(("device", "host", "nvme"), 0.0)
    if hasattr(model, "memory_report"):
        for state in ("parameter", "gradient", "optimizer", "slot"):
            for tier, size in model.memory_report()[state].items():
                tiers[tier] += size
    else:
        states = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        tiers["device"] = gradients + sum(t.nbytes for t in [*model.parameters(), *states])
    return {f"{tier}, MB": size / 1e6 for tier, size in tiers.items()}


@torch.no_grad()
def bits_per_byte(model: Any, rows: torch.Tensor) -> float:
    """Return the mean loss over rows, in bits."""
    bits = model.eval()(input_ids=rows, labels=rows).loss.item() / math.log(2)
    model.train()
    return bits


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Fine-tune, and return the loss and the seconds of each step, the loss on the test rows, and memory."""
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    if options.offload == "nvme":
        Path(options.files).mkdir(parents=True, exist_ok=True)  # on a fast disk, in a real run
    model, optimizer = prepare(options)
    rows, held_out = (part.to(model.device) for part in read_chats(64))
    before, gradients, losses, seconds = bits_per_byte(model, held_out), 0, [], []
    for step in range(options.steps):
        started = time.perf_counter()
        batch = rows[torch.randint(len(rows), (BATCH,), generator=generator).to(rows.device)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        if options.plain and step == 0:
            gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
        if step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    bits = {"bits per byte before": before, "after": bits_per_byte(model, held_out)}
    return {"loss": losses, "seconds": seconds, **bits, **memory(model, optimizer, gradients)}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="runs/gpt", help="folder of the model")
    parser.add_argument("--method", choices=RATES, default="lora")
    parser.add_argument("--offload", choices=("none", "cpu", "nvme"), default="cpu", help="where states rest")
    parser.add_argument("--files", default="runs/nvme", help="folder of the states with --offload nvme")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="plain torch instead of ZeroMesh")
    return parser.parse_args(words)


if __name__ == "__main__":
    result = train(parse())
    print(", ".join(f"{name}: {value:.3f}" for name, value in result.items() if isinstance(value, float)))
