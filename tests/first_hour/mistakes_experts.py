"""Mistakes that several ranks make with a mixture: every forward needs all ranks that share its experts."""

from __future__ import annotations

from pathlib import Path

import mixtures
from mistakes import Mistake
from mistakes_ends import BATCHES, CIRCULAR, LAUNCH

BEGINNING = """
import os, signal
import torch, zeromesh
from mixtures import TARGETS, build_mixture, mixture_loss, token_rows

config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": STEPS, "mesh": {"expert": 2},
          "experts": {"targets": TARGETS}, "zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"}}
engine, *_ = zeromesh.initialize(model=build_mixture(torch.float32), config=config)
rank = engine.mesh.rank

def step(number):
    loss = mixture_loss(engine, token_rows(2 * number + rank))
    engine.backward(loss)
    engine.step()

def evaluate():
    engine.eval()
    with torch.no_grad():
        print(mixture_loss(engine, token_rows(100)).item())
    engine.train()

"""


def _files(end: str, steps: int = 1) -> dict[str, str]:
    """Return a training script with a mistake at its end, and the model that it trains."""
    model = Path(mixtures.__file__).read_text(encoding="utf-8")
    return {"mixtures.py": model, "train.py": BEGINNING.replace("STEPS", str(steps)) + end}


ALONE = "only at ZeRO stages 0 to 2, and where ranks share neither experts nor layers, a forward needs no other rank"
WAITS = "numbers of rows for experts 'blocks.0.experts'"

MISTAKES = [
    Mistake(
        "uneven loaders of a mixture",
        LAUNCH,
        ("error: rank 0 ended after 2 updates; rank 1 waits in update 3, in the forward", WAITS, BATCHES),
        _files("for number in range(2 + rank): step(number)"),
        status=1,
        silent_about=CIRCULAR,
    ),
    Mistake(
        "uneven micro-batches of a mixture",
        LAUNCH,
        ("error: rank 1 ended after 1 update; rank 0 waits in update 2, in the forward", BATCHES),
        _files("for number in range(4 - rank): step(number)", steps=2),
        status=1,
        silent_about=CIRCULAR,
    ),
    Mistake(
        "a mixture is evaluated on rank 0 alone, at the end",
        LAUNCH,
        (
            "error: rank 1 ended after 2 updates; rank 0 waits in a forward without gradients after 2 updates",
            WAITS,
            ALONE,
        ),
        _files("for number in range(2): step(number)\nif rank == 0: evaluate()"),
        status=1,
        silent_about=CIRCULAR,
    ),
    Mistake(
        "a mixture is evaluated on rank 0 alone, between updates",
        LAUNCH,
        (
            "in update 3, in the forward: exchange over the axis expert",
            "in update 3, in the backward: all_to_all over the axis expert",
            "Without gradients, since the last update: 1 forward on rank 0; 0 forwards on rank 1.",
            ALONE,
        ),
        _files("for number in range(4):\n    step(number)\n    if rank == 0 and number == 1: evaluate()"),
        status=70,
        silent_about=CIRCULAR,
        most_lines=20,
    ),
    Mistake(
        "a rank of a mixture is killed in its forward",
        LAUNCH,
        ("rank 1 failed first: killed by SIGKILL in step 3",),
        _files(
            "for number in range(4):\n"
            "    if rank == 1 and number == 2:\n"
            "        end = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
            "        engine.module.blocks[1].gate.register_forward_hook(end)\n"
            "    step(number)"
        ),
        status=137,
        most_lines=20,
    ),
    Mistake(
        "a rank of a mixture fails in its forward",
        LAUNCH,
        ("rank 1 failed first", "ZeroDivisionError: a router fails"),
        _files(
            "def fail(*_):\n    raise ZeroDivisionError('a router fails')\n"
            "for number in range(4):\n"
            "    if rank == 1 and number == 2: engine.module.blocks[1].gate.register_forward_pre_hook(fail)\n"
            "    step(number)"
        ),
        status=1,
        silent_about=("could not be finished", "silenced"),
        most_lines=70,  # the traceback
    ),
]
