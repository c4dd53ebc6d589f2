"""A run that is killed often: ``kill_soak.py FOLDER KILLS SEED MODE``; MODE is ``asynchronous`` or ``copies``.

Each attempt is a fork of this process, is killed at any moment, and goes on from what the one before has left. Prints
how often the run was killed and what it has reached, and fails if a loss is another one than in an undisturbed run.
"""

import importlib
import os
import random
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import zeromesh

LOST = {"asynchronous": 4, "copies": 0}  # steps that may be taken again, beside the one in which a run was killed


def train(folder: Path, mode: str, steps: int) -> None:
    """Train from where the run is to ``steps``, and write each loss."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.1), nn.Tanh(), nn.Linear(128, 64))
    engine, *_ = zeromesh.initialize(
        model,
        config={
            "train_batch_size": 4,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "checkpoint": {"peer_copies": 1} if mode == "copies" else {"asynchronous": True, "keep_last": 2},
        },
    )
    save = engine.save_to_memory if mode == "copies" else engine.save_checkpoint
    engine.load_checkpoint(folder / "run")
    while engine.global_steps < steps:
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(engine.global_steps)).bfloat16()
        loss = engine(inputs).float().square().mean()
        engine.backward(loss)
        engine.step()
        descriptor = os.open(folder / "losses", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, f"{engine.global_steps} {loss.item()!r}\n".encode())
        os.close(descriptor)
        save(folder / "run")
    engine.destroy()


def attempt(folder: Path, mode: str, steps: int, moment: float | None) -> int:
    """Train in a fork, which is killed some seconds after its first step, or before; return its status."""
    folder.mkdir(exist_ok=True)
    file = folder / "losses"
    file.touch()
    size, child = file.stat().st_size, os.fork()
    if not child:
        train(folder, mode, steps)
        sys.stdout.flush()
        os._exit(0)
    if moment is not None:
        while (
            moment > 0.0
            and file.stat().st_size == size
            and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ):
            time.sleep(0.002)
        time.sleep(abs(moment))
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def losses(folder: Path) -> list[tuple[int, str]]:
    """Return the steps that were taken, in order, with their losses."""
    words = [line.split() for line in (folder / "losses").read_text().splitlines()]
    return [(int(step), loss) for step, loss in words]


def main(folder: Path, kills: int, seed: int, mode: str) -> None:
    """Kill, resume, and compare."""
    # What the forks would import, each for itself.
    importlib.import_module("torch._dynamo")
    importlib.import_module("zeromesh.build")
    draw = random.Random(seed)
    for _ in range(kills):
        assert attempt(folder / "killed", mode, 1_000_000, draw.uniform(-0.05, 0.2)) == signal.SIGKILL
    taken = losses(folder / "killed")
    reached = max(step for step, _ in taken) + 3
    assert attempt(folder / "killed", mode, reached, None) == 0
    assert attempt(folder / "whole", mode, reached, None) == 0
    known, taken = dict(losses(folder / "whole")), losses(folder / "killed")
    wrong = [step for step, loss in taken if known[step] != loss]
    assert not wrong, f"steps with other losses: {wrong}"
    back = [(step, later) for (step, _), (later, _) in pairwise(taken) if not step - LOST[mode] <= later <= step + 1]
    assert not back, f"went back from, to: {back}"
    print(f"{kills} kills, {reached} steps, {len(taken) - reached} of them taken again")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
