"""Compare runs of `zeromesh train` bit by bit, and layouts with one process: ``python benchmarks/determinism.py``.

Each layout trains a small decoder with dropout twice, and once more with a restart from a checkpoint in the middle: are
losses, gradient norms and weights the same to the last bit? Without dropout, for which ranks draw numbers of their own,
it is compared with one process in fp32 and bf16. The page ``docs/determinism.md`` has the table; ``--only TEXT``
chooses layouts and prints them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench import commit, machine
from page import lines_of
from zeromesh.apps.train.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
STEPS, HALF = 10, 5
HOST = {"device": "cpu"}


@dataclass(frozen=True)
class Layout:
    """A row of the table."""

    name: str
    ranks: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """Return the section of a ZeRO stage."""
    return {"zero_optimization": {"stage": stage, **more}}


def nvme(folder: str) -> dict[str, Any]:
    """Return the placement of the optimizer in files."""
    return {"device": "nvme", "nvme_path": folder}


LAYOUTS = (
    Layout("one process", 1),
    *(Layout(f"data 2, ZeRO-{stage}", 2, zero(stage)) for stage in range(4)),
    Layout("data 2, ZeRO-2, optimizer on the host", 2, zero(2, offload_optimizer=HOST)),
    Layout(
        "data 2, ZeRO-3, all on the host, updated early", 2,
        zero(3, offload_optimizer={**HOST, "update_during_backward": 1.0}, offload_param=HOST),
    ),
    Layout("data 2, ZeRO-3, optimizer in files", 2, zero(3, offload_optimizer=nvme(tempfile.gettempdir()))),
    Layout("data 2, ZeRO-3, blocks recomputed", 2, zero(3) | {"activation_checkpointing": {"enabled": True}}),
    Layout("tensor 2", 2, {"mesh": {"tensor": 2}}),
    Layout("tensor 2, sequence", 2, {"mesh": {"tensor": 2}, "tensor_parallel": {"sequence": True}}),
    Layout("context 2, ring", 2, {"mesh": {"context": 2}}),
    Layout("context 2, ulysses", 2, {"mesh": {"context": 2}, "context_parallel": {"strategy": "ulysses"}}),
    Layout("pipeline 2, 1f1b", 2, {"mesh": {"pipeline": 2}}),
    Layout("pipeline 2, zb-h1", 2, {"mesh": {"pipeline": 2}, "pipeline": {"schedule": "zb-h1"}}),
    Layout("replicate 2, data 2, ZeRO-3", 4, zero(3) | {"mesh": {"replicate": 2, "data": 2}}),
    Layout("data 2, tensor 2, ZeRO-3", 4, zero(3) | {"mesh": {"tensor": 2}}),
    Layout("data 2, pipeline 2, ZeRO-2", 4, zero(2) | {"mesh": {"pipeline": 2}}),
)  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A run's numbers."""

    steps: list[tuple[float, float]]  # losses and gradient norms
    weights: dict[str, torch.Tensor]

    def same(self, other: Trained) -> bool:
        """Return whether all bits are equal."""
        equal = all(torch.equal(one, other.weights[name]) for name, one in self.weights.items())
        return self.steps == other.steps and equal

    def apart(self, other: Trained) -> tuple[float, float]:
        """Return the largest relative difference of a loss, and that of the weights relative to what they moved by."""
        losses = max(abs(a[0] - b[0]) / abs(b[0]) for a, b in zip(self.steps, other.steps, strict=True))
        flat, base = (torch.cat([one.flatten().double() for one in run.weights.values()]) for run in (self, other))
        return losses, float((flat - base).norm() / base.norm())


class Trainer:
    """Trains layouts on one text, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        text = folder / "text"
        text.mkdir()
        for path in sorted((ROOT / "zeromesh" / "comm").glob("*.py")):
            (text / path.name).write_text(path.read_text())

    def train(self, layout: Layout, restarts: bool = False, **more: Any) -> Trained:
        """Train a layout; ``restarts``: end in the middle, and go on from the checkpoint in new processes."""
        self._count += 1
        output = self._folder / f"run-{self._count}"
        settings = {
            "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-6}},
            "model": {"architecture": "gpt", "hidden_size": 32, "layers": 4, "heads": 4, "sequence_length": 32},
            "data": {"train": str(self._folder / "text"), "suffixes": [".py"], "vocabulary_size": 300},
            "run": {
                "steps": STEPS, "output": str(output), "ranks": layout.ranks, "threads": 1, "log_every": 1,
                "save_every": HALF,
            },
            **layout.settings,
        }  # fmt: skip
        for name, value in more.items():
            settings[name] = {**settings.get(name, {}), **value}
        config = self._folder / f"run-{self._count}.json"
        config.write_text(json.dumps(settings))
        if restarts:
            self._call(config, f"run.steps={HALF}")
            self._call(config, f"run.steps={STEPS}", resume=True)
        else:
            self._call(config)
        records = [one for one in read_metrics(output / "metrics.jsonl") if one["kind"] == "train"]
        assert len(records) == STEPS, len(records)
        return Trained(
            [(one["loss"], one["gradient_norm"]) for one in records], load_file(output / "model" / "model.safetensors")
        )

    @staticmethod
    def _call(config: Path, *overrides: str, resume: bool = False) -> None:
        command = [sys.executable, "-m", "zeromesh.apps.cli.main", "train", str(config)]
        command += [word for override in overrides for word in ("--set", override)] + ["--resume"] * resume
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def row_of(trainer: Trainer, layout: Layout, bases: dict[str, Trained]) -> dict[str, Any]:
    """Return what the runs of a layout have shown; the first layout is the base of the others."""
    drops = {"model": {"dropout": 0.1}}
    first = trainer.train(layout, **drops)
    found: dict[str, Any] = {
        "layout": layout.name, "ranks": layout.ranks, "again": first.same(trainer.train(layout, **drops)),
        "restarted": first.same(trainer.train(layout, restarts=True, **drops)),
    }  # fmt: skip
    for precision, section in (("fp32", {}), ("bf16", {"bf16": {"enabled": True}})):
        run = trainer.train(layout, **section)
        found[precision] = run.apart(bases.setdefault(precision, run))
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    lines = [["layout", "ranks", "same bits again", "same bits after a restart", *(
        f"{what}, {precision}" for precision in ("fp32", "bf16") for what in ("loss", "weights")
    )]]  # fmt: skip
    for row in rows:
        apart = [f"{value:.0e}" if value else "0" for precision in ("fp32", "bf16") for value in row[precision]]
        answers = ["yes" if row[key] else "**no**" for key in ("again", "restarted")]
        lines.append([row["layout"], str(row["ranks"]), *answers, *apart])
    return lines_of(lines)


def page(rows: list[dict[str, Any]]) -> str:
    """Return the page."""
    return PAGE.format(steps=STEPS, table=table(rows), commit=commit(), processor=machine())


PAGE = """# Same seed, same bits

This page states which runs are equal to the last bit, and how far layouts are apart. `python benchmarks/determinism.py`
writes it: a decoder with 4 blocks trains {steps} updates of 8 samples with clipping.

- **Same bits again**: two runs of the same command have the same losses, gradient norms and weights, with dropout.
- **Same bits after a restart**: so has a run that ended in the middle and went on from its checkpoint in new processes,
  on the same number of ranks.
- **Loss, weights**: the largest relative difference of a loss from that of one process, and the norm of the difference
  of all weights at the end, relative to their norm; without dropout. Sums over ranks have another order than on one
  process, and each update carries the rounding on.

{table}

Made at {commit}, on {processor}.

The bits depend on more than the seed:

- **The layout**: axes, micro-batch size and number of ranks give sums another order.
- **The text**: sample *i* depends on `seed` and *i* alone. So a run on other ranks sees the same samples in each step.
- **Kernels**: on CPUs those used here are deterministic. On GPUs `torch.use_deterministic_algorithms(True)` makes
  torch's so, or raises where there is none. A copy of a run shows whether its steps have the same bits again
  ([training.md](training.md#take-steps-again)).
- **Versions and hardware**: other versions of torch, other processors and other numbers of threads may round otherwise.
"""


def main() -> None:
    """Read the command line, train, and write or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="layouts whose names have this text, beside one process; printed")
    given = parser.parse_args()
    chosen = [one for number, one in enumerate(LAYOUTS) if not number or given.only in one.name]
    rows: list[dict[str, Any]] = []
    bases: dict[str, Trained] = {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(Path(folder))
        for number, layout in enumerate(chosen, 1):
            rows.append(row_of(trainer, layout, bases))
            print(f"[{number}/{len(chosen)}] {rows[-1]}", flush=True)
    if given.only:
        print(table(rows))
    else:
        (ROOT / "docs" / "determinism.md").write_text(page(rows))
    if not all(row["again"] and row["restarted"] for row in rows):
        sys.exit("some runs have other bits")


if __name__ == "__main__":
    main()
