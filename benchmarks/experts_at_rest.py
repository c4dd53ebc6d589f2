"""A mixture whose states are four times the memory that the process may use: ``python benchmarks/experts_at_rest.py``.

Trains the same mixture of 4 x 64 experts with AdamW in processes of their own: with experts that rest in files
(``experts.rest`` = nvme), with all in memory, and by ZeRO-3 with parameters and states in files. A step touches a share
of the experts of each layer, others in each step. The process with resting experts may have a quarter of the bytes of
weights and moments beyond what it had before (RLIMIT_DATA: private memory; the kernel's cache of files does not count).
Prints seconds for a step, the growth of private memory, and the largest difference of the weights from all in memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import zeromesh

LAYERS, EXPERTS, WIDTH, INNER, TOKENS = 4, 64, 256, 256, 64
STATES = 12 * LAYERS * EXPERTS * 3 * WIDTH * INNER  # bytes of weights and two moments, of the experts alone
SHARES = (1.0, 0.5, 0.1)
STEPS = 5  # the first two are not timed: they make the states


class Experts(nn.Module):
    """Gated MLPs whose parameters are stacked."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(experts, WIDTH, INNER))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights."""
        nn.init.normal_(self.gate_up_proj, std=WIDTH**-0.5)
        nn.init.normal_(self.down_proj, std=INNER**-0.5)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each row's choices."""
        total = torch.zeros_like(hidden)
        for expert in index.unique().tolist():
            rows, places = torch.where(index == expert)
            gate, up = F.linear(hidden[rows], self.gate_up_proj[expert]).chunk(2, dim=-1)
            part = F.linear(F.silu(gate) * up, self.down_proj[expert]) * weights[rows, places, None]
            total = total.index_add(0, rows, part)
        return total


class Block(nn.Module):
    """A router, which is told the experts that it may choose, and experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, experts), Experts(experts)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return rows of shape (tokens, width)."""
        mixed: torch.Tensor = self.experts(x, index, self.gate(x).sigmoid().gather(1, index))
        return x + mixed


class Mixture(nn.Module):
    """Blocks of experts."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(experts) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer, block in enumerate(self.blocks):
            x = block(x, index[layer])
        return x.square().mean()


def batch(step: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows, and the experts of each in each layer: a share of all, drawn anew in each step."""
    random = torch.Generator().manual_seed(step)
    number = max(2, round(share * EXPERTS))
    chosen = torch.stack([torch.randperm(EXPERTS, generator=random)[:number] for _ in range(LAYERS)])
    places = torch.arange(2 * TOKENS).view(TOKENS, 2) % number
    return torch.randn(TOKENS, WIDTH, generator=random), chosen[:, places]


def private_bytes() -> int:
    """Return the bytes of private writable memory, which RLIMIT_DATA limits."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def run(case: str, share: float, folder: str) -> dict[str, Any]:
    """Train, and return what was measured."""
    disk = {"device": "nvme", "nvme_path": folder}
    sections: dict[str, Any] = {
        "resting": {"experts": {"rest": "nvme", "nvme_path": folder, "slots": 4}},
        "memory": {},
        "limited": {},
        "zero3": {"zero_optimization": {"stage": 3, "offload_param": disk, "offload_optimizer": disk}},
    }[case]
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "seed": 0, **sections}
    # Libraries and threads are there before memory is measured and limited.
    engine: Any = zeromesh.initialize(model=Mixture(2), config=config)[0]
    x, index = batch(0, 0.0)
    engine.backward(engine(x, index % 2))
    engine.step()
    engine.destroy()
    before = private_bytes()
    if case in ("resting", "limited"):
        resource.setrlimit(resource.RLIMIT_DATA, (before + STATES // 4, resource.RLIM_INFINITY))
    with zeromesh.zero.Init():
        model = Mixture()
    engine = zeromesh.initialize(model=model, config=config)[0]
    seconds, most = [], 0
    for step in range(STEPS):
        started = time.perf_counter()
        engine.backward(engine(*batch(step, share)))
        most = max(most, private_bytes())
        engine.step()
        seconds.append(time.perf_counter() - started)
        most = max(most, private_bytes())
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    weights = engine.gathered_state_dict() if case != "zero3" else {}
    torch.save(weights, f"{folder}/../{case}.pt")
    engine.destroy()
    return {"seconds": min(seconds[2:]), "bytes": most - before}


def measured(case: str, share: float, folder: Path) -> dict[str, Any]:
    """Return what a process of its own measures; an error's last line where it fails."""
    (folder / case).mkdir(exist_ok=True)
    command = [sys.executable, __file__, "--case", case, "--share", str(share), "--folder", str(folder / case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["killed"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Measure all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case")
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--folder", help="on the disk to measure; by default a temporary one")
    asked = parser.parse_args()
    if asked.case:
        print(json.dumps(run(asked.case, asked.share, asked.folder)))
        return
    print(f"states of experts: {STATES / 1e6:.0f} MB; limit of the process with resting experts: {STATES / 4e6:.0f} MB")
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        print("all in memory within that limit:", measured("limited", 0.1, folder).get("error", "trains"))
        print("share | resting s | MB | ZeRO-3 NVMe s | MB | in memory s | MB | largest difference", flush=True)
        for share in SHARES:
            rows = {case: measured(case, share, folder) for case in ("resting", "zero3", "memory")}
            cells = [
                found.get("error") or f"{found['seconds']:.3f} | {found['bytes'] / 1e6:.0f}" for found in rows.values()
            ]
            difference = "-"
            if not any("error" in rows[case] for case in ("resting", "memory")):
                first, second = (torch.load(folder / f"{case}.pt") for case in ("resting", "memory"))
                difference = str(max(float((first[key] - second[key]).abs().max()) for key in second))
            print(f"{share:.0%} | {' | '.join(cells)} | {difference}", flush=True)


if __name__ == "__main__":
    main()
