"""Pre-train a small BERT: masked tokens, and whether two pieces of text follow each other.

    zeromesh launch --nproc 2 examples/bert/train.py

The text is the source of Python's standard library. ``--plain`` trains with DistributedDataParallel.
"""

import argparse
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForPreTraining

import zeromesh

CONFIG = json.loads(Path(__file__).with_name("config.json").read_text())
BATCH = CONFIG["train_batch_size"]  # over all ranks
PAD, CLS, SEP, MASK = range(4)


def read_pieces(files: int, length: int, entries: int) -> torch.Tensor:
    """Return consecutive pieces of text (n, length), as tokens of a vocabulary that is made for it."""
    texts = [path.read_text() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=entries, special_tokens=special))
    tokens = torch.tensor([token for text in texts for token in tokenizer.encode(text).ids])
    return tokens[: len(tokens) // length * length].view(-1, length)


def make_batch(pieces: torch.Tensor, first: torch.Tensor, entries: int, random: torch.Generator) -> dict[str, Any]:
    """Return pairs that begin with the pieces ``first``, half of them with a wrong second piece, and 15 % masked."""
    wrong = torch.rand(len(first), generator=random) < 0.5
    second = torch.where(wrong, torch.randint(len(pieces), first.shape, generator=random), first + 1)
    begun = pad(pad(pieces[first], (1, 0), value=CLS), (0, 1), value=SEP)
    ids = torch.cat([begun, pad(pieces[second], (0, 1), value=SEP)], 1)
    kinds = (torch.arange(ids.shape[1]) > pieces.shape[1] + 1).long().expand_as(ids)
    chosen = (torch.rand(ids.shape, generator=random) < 0.15) & (ids > MASK)
    labels = torch.where(chosen, ids, -100)
    # As in BERT: of the chosen, 80 % become [MASK], 10 % another token, and 10 % stay.
    fate = torch.rand(ids.shape, generator=random)
    ids = torch.where(chosen & (fate < 0.8), MASK, ids)
    ids = torch.where(chosen & (fate > 0.9), torch.randint(4, entries, ids.shape, generator=random), ids)
    return {"input_ids": ids, "token_type_ids": kinds, "labels": labels, "next_sentence_label": wrong.long()}


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the loss and the seconds of each step, and how often held-out text is found."""
    zeromesh.init_distributed()  # one process or many, under any launcher
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    pieces = read_pieces(options.files, options.length, options.entries)
    kept = len(pieces) - options.test - 1  # the last pieces are not trained on
    torch.manual_seed(options.seed)  # the same weights on all ranks
    shape = BertConfig(
        vocab_size=options.entries, hidden_size=options.width, num_hidden_layers=options.layers, num_attention_heads=4,
        intermediate_size=4 * options.width, max_position_embeddings=2 * options.length + 3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=PAD,
    )  # fmt: skip
    model: Any = BertForPreTraining(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 20, 1 - n / options.steps))
    if options.plain:
        model = DistributedDataParallel(model)
    else:
        model, optimizer, _, schedule = zeromesh.initialize(model, optimizer, lr_scheduler=schedule, config=CONFIG)

    random = torch.Generator().manual_seed(options.seed)  # all ranks draw the same batch, and take their share
    losses, seconds = [], []
    for step in range(options.steps):
        started = time.perf_counter()
        first = torch.randint(kept - 1, (BATCH,), generator=random)
        batch = make_batch(pieces[:kept], first, options.entries, random)
        loss = model(**{name: tensor.chunk(ranks)[rank].to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    held_out = torch.arange(kept, len(pieces) - 1)
    test = make_batch(pieces, held_out, options.entries, torch.Generator().manual_seed(0))
    test = {name: tensor.to(device) for name, tensor in test.items()}
    model.eval()
    with torch.no_grad():
        output = model(**test)
    tokens = (output.prediction_logits.argmax(-1) == test["labels"])[test["labels"] != -100]
    pairs = output.seq_relationship_logits.argmax(-1) == test["next_sentence_label"]
    tokens, pairs = (100 * float(right.double().mean()) for right in (tokens, pairs))
    return {"loss": losses, "seconds": seconds, "masked tokens found, %": tokens, "pairs found, %": pairs}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"files": 60, "length": 30, "entries": 512, "width": 128, "layers": 2, "steps": 300, "test": 320, "seed": 0}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--plain", action="store_true", help="DistributedDataParallel instead of ZeroMesh")
    return parser.parse_args(words)


if __name__ == "__main__":
    result = train(parse())
    if dist.get_rank() == 0:
        print(f"masked tokens found: {result['masked tokens found, %']:.1f} %, pairs: {result['pairs found, %']:.1f} %")
    dist.destroy_process_group()
