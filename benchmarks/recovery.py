"""Seconds that a killed rank costs a run: ``python benchmarks/recovery.py --ranks 4 --rounds 3``.

``zeromesh train`` trains a decoder under ``zeromesh launch --max-restarts``. One rank is killed in the middle of a
step; the clock stops when that step is complete. Runs that save to the disk and runs that keep copies in memory take
turns.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KILLED = 34  # the step in which a rank is killed
EVERY = 20  # steps between checkpoints on the disk
KINDS: dict[str, dict[str, Any]] = {
    f"disk, every {EVERY} steps": {"run": {"save_every": EVERY}, "checkpoint": {"keep_last": 1}},
    "memory, every step": {"run": {"save_every": 0}, "checkpoint": {"peer_copies": 1}},
}


def settings(folder: Path, ranks: int, width: int, layers: int, kind: str) -> dict[str, Any]:
    """Return the settings of a run."""
    own = KINDS[kind]
    return {
        "train_batch_size": 2 * ranks, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "model": {
            "architecture": "llama", "hidden_size": width, "layers": layers, "heads": width // 64,
            "sequence_length": 64,
        },
        "data": {"train": str(folder / "text"), "suffixes": [".py"], "vocabulary_size": 4000},
        "checkpoint": own["checkpoint"],
        "run": {"steps": KILLED + 6, "output": str(folder / "run"), "threads": 1, "log_every": 1, **own["run"]},
    }  # fmt: skip


def rank_main(folder: Path) -> None:
    """Run as a rank: train, and die once."""
    sys.path.insert(0, str(ROOT))
    from zeromesh.apps.cli.main import main
    from zeromesh.apps.train.loop import Loop

    step, mark = Loop._step, folder / "killed"

    def faulty(self: Any, batches: Any) -> float:
        if self.engine.global_steps == KILLED - 1 and self.engine.mesh.rank == 1 and not mark.exists():
            mark.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        loss = step(self, batches)
        with (folder / f"steps-{self.engine.mesh.rank}").open("a") as file:
            file.write(f"{self.engine.global_steps} {time.time()}\n")
        return loss

    Loop._step = faulty  # type: ignore[method-assign]
    sys.argv = ["zeromesh", "train", str(folder / "run.json")]
    main()


def measure(ranks: int, width: int, layers: int, kind: str) -> dict[str, float]:
    """Return the seconds of one run: until the next attempt's first step, until the killed step, and its steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").mkdir()
        for path in sorted((ROOT / "zeromesh").rglob("*.py")):
            (folder / "text" / "-".join(path.relative_to(ROOT).parts)).write_text(path.read_text())
        (folder / "run.json").write_text(json.dumps(settings(folder, ranks, width, layers, kind)))
        command = [
            sys.executable,
            "-m",
            "zeromesh.apps.cli.main",
            "launch",
            "--nproc",
            str(ranks),
            "--max-restarts",
            "1",
        ]
        done = subprocess.run(
            [*command, __file__, "--rank", str(folder)], capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        if done.returncode:
            sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
        killed = float((folder / "killed").read_text())
        lines = [line.split() for line in (folder / "steps-0").read_text().splitlines()]
        times = [(int(step), float(at)) for step, at in lines]
        later = [(step, at) for step, at in times if at > killed]
        before = [at for _, at in times if at < killed]
        first, back = later[0][1], next(at for step, at in later if step == KILLED)
        usual = statistics.median(b - a for a, b in zip(before[-11:-1], before[-10:], strict=True))
        return {"to the first step": first - killed, "to the step": back - killed, "steps": len(
            [step for step, _ in later if step <= KILLED]), "a step before": usual}  # fmt: skip


def main() -> None:
    """Read the command line, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given.rank)
        return
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(given.rounds):
        for kind, runs in found.items():
            runs.append(measure(given.ranks, given.width, given.layers, kind))
            print(kind, {name: round(value, 2) for name, value in runs[-1].items()}, flush=True)
    for kind, runs in found.items():
        middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        print(f"{kind}: {', '.join(f'{name} {value:.2f}' for name, value in middle.items())}")


if __name__ == "__main__":
    main()
