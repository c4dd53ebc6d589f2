"""A mixture whose states are four times the memory that its process may use: ``python benchmarks/experts_at_rest.py``.

First the proof: a process whose private memory is limited (RLIMIT_DATA, as ``ulimit -d``) to a quarter of the bytes of
the experts' weights and moments trains with experts that rest in files. All experts in memory do not fit into that
limit, and without a limit give the same bits. Mapped files do not count: the kernel takes their pages back when it
needs them. Then the time of a step over the share of the experts that a step touches, others in each step: with files
that the kernel caches, with files of which it keeps nothing after a step (uncached), all in memory, and by ZeRO-3 with
parameters and states in files. Each run is a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import nn

import zeromesh

CASES = ("resting", "uncached", "memory", "zero3")
MS_SYNC, MADV_PAGEOUT = 4, 21  # of Linux
TIMED = 6  # steps
STATES = 12  # bytes of a weight and its two moments in fp32


@dataclass(frozen=True)
class Sizes:
    """Sizes of a mixture, and steps of its training."""

    layers: int
    experts: int
    width: int
    inner: int
    tokens: int = 64
    steps: int = 4

    @property
    def states(self) -> int:
        """Bytes of weights and moments of all experts."""
        return STATES * self.layers * self.experts * 3 * self.width * self.inner


@dataclass(frozen=True)
class Run:
    """One training in a process of its own."""

    case: str  # one of CASES
    sizes: Sizes
    share: float  # of the experts of each layer that a step touches
    folder: str
    limit: int | None = None  # bytes of private memory
    beside: bool = False  # the limit is for what comes on top of libraries, threads and a tiny training


class Experts(nn.Module):
    """Gated MLPs whose parameters are stacked."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(sizes.experts, 2 * sizes.inner, sizes.width))
        self.down_proj = nn.Parameter(torch.empty(sizes.experts, sizes.width, sizes.inner))
        nn.init.normal_(self.gate_up_proj, std=sizes.width**-0.5)
        nn.init.normal_(self.down_proj, std=sizes.inner**-0.5)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each row's choices."""
        # Not by indices: the gradient of each of them would be as large as that of all experts.
        gate_up, down = self.gate_up_proj.unbind(), self.down_proj.unbind()
        total = torch.zeros_like(hidden)
        for expert in index.unique().tolist():
            rows, places = torch.where(index == expert)
            gate, up = F.linear(hidden[rows], gate_up[expert]).chunk(2, dim=-1)
            part = F.linear(F.silu(gate) * up, down[expert]) * weights[rows, places, None]
            total = total.index_add(0, rows, part)
        return total


class Block(nn.Module):
    """A router, which is told the experts that it may choose, and experts."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(sizes.width, sizes.experts), Experts(sizes)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return rows of shape (tokens, width)."""
        hidden = F.rms_norm(x, x.shape[-1:])
        mixed: torch.Tensor = self.experts(hidden, index, self.gate(hidden).sigmoid().gather(1, index))
        return x + mixed


class Mixture(nn.Module):
    """Blocks of experts."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer, block in enumerate(self.blocks):
            x = block(x, index[layer])
        return x.square().mean()


def batch(sizes: Sizes, step: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows, and the experts of each in each layer: a share of all, drawn anew in each step."""
    random = torch.Generator().manual_seed(step)
    number = max(2, round(share * sizes.experts))
    chosen = torch.stack([torch.randperm(sizes.experts, generator=random)[:number] for _ in range(sizes.layers)])
    places = torch.arange(2 * sizes.tokens).view(sizes.tokens, 2) % number
    return torch.randn(sizes.tokens, sizes.width, generator=random), chosen[:, places]


def private_bytes() -> int:
    """Return the bytes of private writable memory, which RLIMIT_DATA limits."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def throw_out(engine: Any) -> None:
    """Write what has changed of experts at rest to the disk, and let the kernel keep none of their pages."""
    library = ctypes.CDLL(None, use_errno=True)
    for plane in (plane for table in engine.sharded.tables for plane in table.rows.planes):
        first = plane.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        pages = ctypes.c_void_p(first), ctypes.c_size_t(plane.data_ptr() + plane.nbytes - first)
        for call, option in ((library.msync, MS_SYNC), (library.madvise, MADV_PAGEOUT)):
            if call(*pages, option):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def digest(engine: Any) -> str:
    """Return a hash of all weights, gathered one after the other."""
    found = hashlib.sha256()
    for name, parameter in engine.module.named_parameters():
        with zeromesh.zero.GatheredParameters([parameter]):
            found.update(name.encode())
            found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def train(run: Run) -> dict[str, Any]:
    """Train, and return seconds of each step, those of processors, the most private bytes and a hash of the weights."""
    if run.beside:
        train(replace(run, sizes=replace(run.sizes, layers=1, experts=2, steps=1), limit=None, beside=False))
    if run.limit is not None:
        limit = run.limit + (private_bytes() if run.beside else 0)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    disk = {"device": "nvme", "nvme_path": run.folder}
    rests = {"experts": {"rest": "nvme", "nvme_path": run.folder, "slots": 1}}
    sections: dict[str, Any] = {
        "resting": rests,
        "uncached": rests,
        "memory": {},
        "zero3": {"zero_optimization": {"stage": 3, "offload_param": disk, "offload_optimizer": disk}},
    }[run.case]
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "seed": 0, **sections}
    torch.manual_seed(0)
    with zeromesh.zero.Init():
        model = Mixture(run.sizes)
    engine: Any = zeromesh.initialize(model=model, config=config)[0]
    seconds, processor, most = [], [], private_bytes()
    for step in range(run.sizes.steps):
        started, worked = time.perf_counter(), time.process_time()
        engine.backward(engine(*batch(run.sizes, step, run.share)))
        most = max(most, private_bytes())
        engine.step()
        if run.case == "uncached":
            throw_out(engine)
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - worked)
        most = max(most, private_bytes())
    hashed = digest(engine)
    engine.destroy()
    return {"seconds": seconds, "processor": processor, "bytes": most, "digest": hashed}


def measured(run: Run) -> dict[str, Any]:
    """Return what a process of its own measures; an error's last line where it fails."""
    command = [sys.executable, __file__, "--run", json.dumps(asdict(run))]
    # By default glibc keeps blocks below 32 MB that are freed, and cannot always use them again.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error: " in line]
        return {"error": errors[-1] if errors else f"ended with {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def prove(sizes: Sizes, folder: str, beside: bool = False) -> dict[str, Any]:
    """Return what a limited process with resting experts, a limited one and one without a limit found."""
    share, limit = 0.1, sizes.states // 4
    return {
        "resting": measured(Run("resting", sizes, share, folder, limit, beside)),
        "limited": measured(Run("memory", sizes, share, folder, limit, beside)),
        "memory": measured(Run("memory", sizes, share, folder)),
    }


def main() -> None:
    """Measure all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", help="one run, as JSON")
    parser.add_argument("--folder", help="on the disk to measure; by default a temporary one")
    parser.add_argument("--shares", type=float, nargs="*", default=[1.0, 0.5, 0.25, 0.1])
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--no-proof", action="store_true")
    asked = parser.parse_args()
    if asked.run:
        given = json.loads(asked.run)
        print(json.dumps(train(Run(**{**given, "sizes": Sizes(**given["sizes"])}))))
        return
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        if not asked.no_proof:
            sizes = Sizes(10, 64, 256, 512)
            print(f"states of experts: {sizes.states / 1e6:.0f} MB; the process may use {sizes.states / 4e6:.0f} MB")
            for name, found in prove(sizes, folder).items():
                print(name, found, flush=True)
        print("share | " + " | ".join(f"{case} s (least to most), of processors" for case in asked.cases))
        for share in asked.shares:
            cells = []
            for case in asked.cases:
                # Experts at rest first have to miss as many steps as they will.
                before = round(2 / share) if case in ("resting", "uncached") else 2
                found = measured(Run(case, Sizes(4, 64, 256, 256, steps=before + TIMED), share, folder))
                if "error" in found:
                    cells.append(found["error"])
                    continue
                times, worked = (sorted(found[key][-TIMED:]) for key in ("seconds", "processor"))
                cells.append(f"{median(times):.3f} ({times[0]:.3f} to {times[-1]:.3f}), {median(worked):.3f}")
            print(f"{share:.0%} | {' | '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
