"""How fast checkpoints are written and read, and what memory that takes, beside the disk's own speed.

    python benchmarks/checkpoint_speed.py --ranks 2 --row 3 --folder runs/speed

A Llama-style decoder (hidden size 768, 12 layers, 32,000 entries: 134 M parameters, 1.6 GB with AdamW's states) is
updated once, then saved and loaded in turn. Each round also has the ranks write as many zeros as the checkpoint has, to
files of their own, and flush them: the floor. Loading checks all hashes; the files are in the page cache.

    python benchmarks/checkpoint_speed.py --ranks 2 --row 3 --folder runs/speed --every 50

measures what a save costs training instead: windows of 50 steps without a save, after a blocking save and after an
asynchronous one, and with a copy to memory after each step, in turn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zeromesh
from heap import Heap
from zeromesh.apps.launch.launch import launch
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.train_settings import ModelShape
from zeromesh.checkpoint.save import save
from zeromesh.comm.environment import init_distributed, shutdown

SIZES = {
    "134M": {"hidden_size": 768, "layers": 12, "heads": 12, "vocab_size": 32000},
    "20M": {"hidden_size": 384, "layers": 6, "heads": 6, "vocab_size": 12000},
    "tiny": {"hidden_size": 32, "layers": 2, "heads": 2, "vocab_size": 64},
}
LENGTH = 32
MODES = ("none", "blocking", "asynchronous", "copies")


def write_zeros(folder: Path, size: int) -> None:
    """This rank's part of ``size`` bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    zeros = bytes(4 * 1024**2)
    with (folder / f"zeros_{dist.get_rank()}").open("wb") as file:
        for _ in range(size // dist.get_world_size() // len(zeros)):
            file.write(zeros)
        file.flush()
        os.fsync(file.fileno())


def measured(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds until all ranks are done, and the bytes by which this rank's live heap grew meanwhile, at most."""
    dist.barrier()
    heap = Heap()
    before = heap.live()
    with heap.watch() as peak:
        began = time.perf_counter()
        work()
        dist.barrier()
        seconds = time.perf_counter() - began
    return seconds, peak.bytes - before


def make_engine(size: str, row: int, length: int) -> zeromesh.Engine:
    init_distributed()
    torch.manual_seed(0)
    model = Decoder(ModelShape(architecture="llama", sequence_length=length, **SIZES[size]))
    settings = {
        "zero_optimization": {"stage": row},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "checkpoint": {"asynchronous": True, "peer_copies": 1},
    }
    engine, *_ = zeromesh.initialize(model=model, config=settings)
    return engine


def step(engine: zeromesh.Engine, size: str, length: int) -> None:
    """One update of random tokens."""
    engine.backward(engine(torch.randint(0, SIZES[size]["vocab_size"], (1, length))).square().mean())
    engine.step()


def run_stalls(size: str, row: int, rounds: int, folder: Path, every: int, length: int) -> None:
    """Print the seconds of windows of ``every`` steps, and of the call that saves before them."""
    engine = make_engine(size, row, length)
    windows: dict[str, list[float]] = {mode: [] for mode in MODES}
    calls: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds + 1):
        for mode in MODES:
            dist.barrier()
            began = time.perf_counter()
            if mode == "blocking":
                save(engine, folder, "saved", {})
            elif mode == "asynchronous":
                engine.save_checkpoint(folder, "saved")
            called, copying = time.perf_counter(), 0.0
            for _ in range(every):
                step(engine, size, length)
                if mode == "copies":
                    before = time.perf_counter()
                    engine.save_to_memory(folder)
                    copying += time.perf_counter() - before
            dist.barrier()
            ended = time.perf_counter()
            engine.wait_for_checkpoint()
            # The first round allocates memory, and has the first update make the optimizer's states.
            if number > 0:
                windows[mode].append(ended - began)
                calls[mode].append(called - began + copying)
    if engine.mesh.rank == 0:
        nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        print(f"{nbytes / 1e6:.0f} MB, row {row}, {engine.mesh.world_size} ranks, {rounds} rounds of {every} steps")
        idle = statistics.median(windows["none"])
        for mode, seconds in windows.items():
            middle, call = statistics.median(seconds), statistics.median(calls[mode])
            print(
                f"{mode}: {middle:.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), of which {call:.3f} s in the "
                f"call; {100 * (middle / idle - 1):+.2f} %, the call alone {100 * call / idle:.2f} %"
            )
        shutil.rmtree(folder)
    engine.destroy()
    shutdown()


def run_rank(size: str, row: int, rounds: int, folder: Path) -> None:
    engine = make_engine(size, row, LENGTH)
    step(engine, size, LENGTH)
    found: dict[str, list[tuple[float, int]]] = {"zeros": [], "save": [], "load": []}
    nbytes = 0
    for _ in range(rounds):
        found["save"].append(measured(lambda: save(engine, folder, None, {})))
        nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        found["load"].append(measured(lambda: engine.load_checkpoint(folder)))
        if engine.mesh.rank == 0:
            shutil.rmtree(folder)
        found["zeros"].append(measured(partial(write_zeros, folder, nbytes)))
        if engine.mesh.rank == 0:
            shutil.rmtree(folder)
    if engine.mesh.rank == 0:
        print(f"{nbytes / 1e6:.0f} MB, row {row}, {engine.mesh.world_size} ranks, {rounds} rounds")
        for what, runs in found.items():
            speeds = sorted(nbytes / 1e6 / seconds for seconds, _ in runs)
            middle, heap = statistics.median(speeds), max(grown for _, grown in runs)
            print(
                f"{what}: {middle:.0f} MB/s ({speeds[0]:.0f} to {speeds[-1]:.0f}), "
                f"heap at most {heap / 1e6:.0f} MB more"
            )
    engine.destroy()
    shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--row", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", choices=SIZES, default="134M")
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to be measured; it is deleted")
    parser.add_argument("--every", type=int, default=0, help="steps between saves; measures the stall of training")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a step on each rank, with --every")
    given = parser.parse_args()
    if given.folder.exists():
        parser.error(f"{given.folder} is there already; name a folder that may be deleted")
    if given.every:
        every, length = given.every, given.length
        launch(run_stalls, given.ranks, given.size, given.row, given.rounds, given.folder, every, length)
    else:
        launch(run_rank, given.ranks, given.size, given.row, given.rounds, given.folder)


if __name__ == "__main__":
    main()
