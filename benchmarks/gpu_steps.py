"""Work of the steps of ``gpu.py``, in a process of its own: ``python gpu_steps.py JOB``, a JSON document.

A function of ``WORK`` takes the step's options and returns its figures. ``wrong`` in them lists checks that fail.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import zeromesh
from determinism import LAYOUTS
from gpu import DONE, FAILED, LEFT_OUT, NO_ROOM, ROOT, WRONG
from gpu_experts import experts
from gpu_masks import masks
from gpu_train import Figures, LeftOut, Options, tell, trace, train
from zeromesh.apps.launch.launch import launch
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.train_settings import ModelShape
from zeromesh.base.kernels.measure import synchronize
from zeromesh.base.machine import inventory
from zeromesh.base.placement import Tier
from zeromesh.comm.environment import device_of_group, init_distributed, shutdown
from zeromesh.comm.launchers import TORCHRUN
from zeromesh.config.settings import Settings
from zeromesh.shard import sharded
from zeromesh.shard.store.link import Copy, CopyStreams, Link
from zeromesh.shard.store.memory import empty_on

CLIP = 0.1  # below every norm here, so that each update is clipped


def best(do: Callable[[], object], device: torch.device, times: int = 10) -> float:
    """Return the seconds of the fastest of some calls, after three that are not counted."""
    found = []
    for _ in range(3 + times):
        synchronize(device)
        start = time.perf_counter()
        do()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found[3:])


def machine(options: Options, job: Options) -> Figures:
    """Measure what the other figures are shares of. ``width`` is of matrices, ``megabytes`` of what is copied."""
    device, width, size = torch.device(job["device"]), options["width"], options["megabytes"] << 20
    # Random numbers: zeros take less power, so that a GPU multiplies them faster.
    a, b = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    start = time.perf_counter()
    on_host = empty_on(Tier.HOST, size, torch.uint8, device)
    on_host.fill_(1)
    locked = time.perf_counter() - start
    one, other = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    about = inventory(Path(job["folder"]))
    return {
        "device": name, "cuda": torch.version.cuda, "python": about["versions"]["python"], "torch": torch.__version__,
        "memory": about["memory"], "processor": about["processor"], "instructions": about["kernels"]["instructions"],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None,
        "products": 2 * width**3 / best(lambda: a @ b, device),
        "copies": {
            "device to device, read and written": 2 * size / best(lambda: one.copy_(other), device),
            "device to host": size / best(lambda: on_host.copy_(one, non_blocking=True), device),
            "host to device": size / best(lambda: one.copy_(on_host, non_blocking=True), device),
            "page-locking new host memory": size / locked,
        },
    }  # fmt: skip


# Numerics: every ZeRO stage and dtype beside plain torch.

SMALL = ModelShape(architecture="llama", vocab_size=512, hidden_size=128, layers=4, heads=4, sequence_length=64)
SMALLER = SMALL.model_copy(update={"vocab_size": 128, "hidden_size": 64})  # of small kernels
BATCH = 4


@dataclass(frozen=True)
class Precision:
    """A dtype of training and the configuration that asks for it."""

    master: torch.dtype
    compute: torch.dtype
    config: Options
    tolerance: float  # largest relative difference of a loss
    scale: float = 1.0  # of the loss


# float64 is exact to the order of sums. 16 bits differ by their unit roundoff a few times over: 2**-8 and 2**-11.
PRECISIONS = {
    "fp64": Precision(torch.float64, torch.float64, {}, 1e-9),
    "fp32": Precision(torch.float32, torch.float32, {}, 1e-4),
    "bf16": Precision(torch.float32, torch.bfloat16, {"bf16": {"enabled": True}}, 3e-2),
    "fp16": Precision(torch.float32, torch.float16, {"fp16": {"enabled": True, "loss_scale": 128.0}}, 4e-3, 128.0),
}


def tokens_of(shape: ModelShape, device: torch.device) -> torch.Tensor:
    """Return one batch of token ids, with one more than the model's length of each sample; the same in every run."""
    count, generator = int(shape.vocab_size or 0), torch.Generator().manual_seed(1)
    return torch.randint(count, (BATCH, shape.sequence_length + 1), generator=generator).to(device)


def train_plain(model: nn.Module, tokens: torch.Tensor, precision: Precision) -> list[float]:
    """Return the losses of plain torch; 16 bits by a rounded copy of fp32 masters, as the engine computes."""
    compute = model if precision.compute is precision.master else copy.deepcopy(model).to(precision.compute)
    pairs = list(zip(model.parameters(), compute.parameters(), strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in tokens:
        loss = compute(step[:, :-1], step[:, 1:])
        (loss * precision.scale).backward()
        for master, parameter in pairs:
            assert parameter.grad is not None
            gradient, parameter.grad = parameter.grad.to(master.dtype) / precision.scale, None
            master.grad = gradient
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in pairs:
                parameter.copy_(master)
        losses.append(loss.item())
    return losses


def updates(engine: zeromesh.Engine, steps: torch.Tensor) -> list[float]:
    """Train with the tokens of each step, and return its loss."""
    return [engine.train_batch(iter([(step[:, :-1], step[:, 1:])])).item() for step in steps]


def numerics(options: Options, job: Options) -> Figures:
    """Compare losses of ``steps`` updates of all stages and dtypes with plain torch, on the device and its batch.

    A second engine goes on from the middle, with an even stage from a copy in memory and with an odd one from an
    asynchronous save. It must have the bits of the first one's second half.
    """
    rank, ranks, device = job["rank"], job["ranks"], torch.device(job["device"])
    shape, share, rows = SMALL.model_copy(update=options.get("shape", {})), BATCH // ranks, []
    wrong: list[str] = []
    tokens = tokens_of(shape, device).expand(options["steps"], -1, -1)
    for name, precision in PRECISIONS.items():
        torch.manual_seed(0)
        start = Decoder(shape).to(precision.master)
        expected = train_plain(copy.deepcopy(start).to(device), tokens, precision)
        for stage in range(4):
            config = {
                "train_batch_size": BATCH, "zero_optimization": {"stage": stage}, "gradient_clipping": CLIP,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **precision.config,
                "checkpoint": {"asynchronous": True} if stage % 2 else {"peer_copies": 1},
            }  # fmt: skip
            engine, *_ = zeromesh.initialize(model=copy.deepcopy(start), config=config)
            mine, half = tokens[:, rank * share : (rank + 1) * share], options["steps"] // 2
            losses = updates(engine, mine[:half])
            folder = Path(f"{job['out']}-{name}-{stage}")
            save = engine.save_checkpoint if stage % 2 else engine.save_to_memory
            save(folder)
            losses += updates(engine, mine[half:])
            wrong += [f"{one['name']} is wrong" for one in engine.check_health()["slow"] if not one["unit"]]
            difference = max(abs(a - b) / (1 + abs(b)) for a, b in zip(losses, expected, strict=True))
            report = engine.memory_report()
            try:
                raise InterruptedError
            except InterruptedError:  # a run that fails leaves its copies
                engine.destroy()
            again, *_ = zeromesh.initialize(model=copy.deepcopy(start), config=config)
            again.load_checkpoint(folder)
            resumed = again.global_steps == half and updates(again, mine[half:]) == losses[half:]
            again.destroy()
            if rank == 0:
                shutil.rmtree(folder)
            rows.append({
                "dtype": name, "stage": stage, "difference": difference, "tolerance": precision.tolerance,
                "resumed": resumed,
                "last loss": losses[-1], "reported": report["total"], "allocated": report["measured"]["live"],
            })  # fmt: skip
    # Written so that NaN is wrong, too.
    wrong += [f"stage {row['stage']} in {row['dtype']}" for row in rows if not row["difference"] <= row["tolerance"]]
    wrong += [f"stage {row['stage']} in {row['dtype']}, resumed" for row in rows if not row["resumed"]]
    return {"rows": rows, "wrong": wrong}


def layouts(options: Options, job: Options) -> Figures:
    """Compare the layouts of these ranks with one plain process on the device: see ``zeromesh.verify``."""
    shape, rows = SMALLER.model_copy(update=options.get("shape", {})), []
    tokens = tokens_of(shape, torch.device("cpu"))
    for layout in LAYOUTS:
        if layout.ranks != job["ranks"]:
            continue
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": CLIP,
            "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **layout.settings,
        }  # fmt: skip
        began = time.perf_counter()
        report = zeromesh.verify(Decoder(shape), config, (tokens[:, :-1], tokens[:, 1:]), steps=options["steps"])
        # Parameters are compared with their own masters: at most half a unit in the last place, which some have.
        shares = {
            trial.name: max(
                (one.difference / one.bound for kind, _, one in trial.worst() if kind != "parameter" and one.bound),
                default=0.0,
            )
            for trial in report.trials
        }
        rows.append({
            "layout": layout.name, "ranks": layout.ranks, "equal": report.equal, "sentence": report.sentence,
            "shares": shares, "seconds": time.perf_counter() - began,
        })  # fmt: skip
        if job["rank"] == 0:
            tell(job, {"rows": rows})
    return {"rows": rows, "wrong": [f"{row['layout']}: {row['sentence']}" for row in rows if not row["equal"]]}


# Copies: what nobody waits for must not be used before it is there.


class Blocking(Link):
    """A link whose copies the host waits for."""

    def _begin(self, *args: Any) -> Copy:
        begun = super()._begin(*args)
        begun.wait()
        return begun


class SlowStreams(CopyStreams):
    """Streams on which copies run late: until then their target holds NaN."""

    CYCLES = 1_000_000  # about half a millisecond

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy behind a pause."""
        with stream:
            if target.is_floating_point():
                on_device = target if target.is_cuda else source
                target.copy_(torch.full_like(on_device, torch.nan), non_blocking=True)
            torch.cuda._sleep(self.CYCLES)
        super().copy(stream, target, source)


def late_link(device: torch.device) -> Link:
    """Return a link whose copies run as late as they may; on a CPU they are simulated, as in the tests."""
    if device.type == "cuda":
        return Link(device, SlowStreams(device))
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from late_copies import LateStreams

    return Link(device, LateStreams())


LINKS: dict[str, Callable[[torch.device], Link]] = {
    "waited for": Blocking, "waited for, again": Blocking, "free": Link, "late copies": late_link,
    "late computation": Link,
}  # fmt: skip
HOST = {"device": "cpu"}
PLACES: dict[str, dict[str, Any]] = {
    "stage 2, optimizer": {"stage": 2, "offload_optimizer": HOST},
    "stage 3, optimizer": {"stage": 3, "offload_optimizer": HOST},
    "stage 3, optimizer, early": {"stage": 3, "offload_optimizer": {**HOST, "update_during_backward": 1.0}},
    "stage 3, parameters": {"stage": 3, "offload_param": HOST},
    "stage 3, all": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
}
# Largest norm of the difference from states on the device, relative to what was trained: the kernel on the host rounds
# differently in the last place, which bf16 makes a step of 1/256 now and then.
APART = {"fp32": 1e-4, "bf16": 5e-2}
Weights = Mapping[str, torch.Tensor]


def trained(
    shape: ModelShape, zero: Options, dtype: str, tokens: torch.Tensor, mode: str, updates: int
) -> Weights:  # fmt: skip
    """Return the weights, on the host, after some updates of two micro-batches, clipped; on rank 0."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": len(tokens), "gradient_accumulation_steps": 2, "gradient_clipping": CLIP,
        "zero_optimization": zero, "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    }  # fmt: skip
    with patch.object(sharded, "Link", LINKS[mode]):
        engine, *_ = zeromesh.initialize(model=Decoder(shape), config=config)

    def delay() -> None:
        if mode == "late computation" and tokens.is_cuda:
            torch.cuda._sleep(40 * SlowStreams.CYCLES)  # a copy that does not wait for what is computed is too early

    for number in range(2 * updates):
        batch = tokens.roll(number, 1)
        delay()
        loss = engine(batch[:, :-1], batch[:, 1:])
        delay()
        engine.backward(loss)
        delay()
        engine.step()
    found = {name: value.to("cpu", copy=True) for name, value in engine.gathered_state_dict().items()}
    engine.destroy()
    return found


def apart(one: Weights, other: Weights, start: Weights) -> float:
    """Return the norm of the difference, relative to that of what was trained."""
    pairs = [(one[name].double(), other[name].double(), start[name].double()) for name in one]
    difference = sum(float((a - b).square().sum()) for a, b, _ in pairs)
    return (difference / sum(float((b - c).square().sum()) for _, b, c in pairs)) ** 0.5


def copies(options: Options, job: Options) -> Figures:
    """Compare weights bit for bit over links, and states on the host with states on the device."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    rank, ranks, device = job["rank"], job["ranks"], torch.device(job["device"])
    shape, updates, rows = SMALL.model_copy(update=options.get("shape", {})), options["updates"], []
    tokens = tokens_of(shape, device).chunk(ranks)[rank]
    torch.manual_seed(0)
    start = Decoder(shape).state_dict()
    # Of attention's kernels, only the plain one computes the same bits in each run.
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        for dtype, tolerance in APART.items():
            for place in options.get("places", PLACES):
                zero = PLACES[place]
                plain = trained(shape, {"stage": zero["stage"]}, dtype, tokens, "free", updates)
                found = {mode: trained(shape, zero, dtype, tokens, mode, updates) for mode in LINKS}
                if rank > 0:
                    continue
                expected = found.pop("waited for")
                same = {mode: all(torch.equal(value, expected[key]) for key, value in weights.items())
                        for mode, weights in found.items()}  # fmt: skip
                row = {"dtype": dtype, "place": place, "difference": apart(expected, plain, start)}
                rows.append({**row, "tolerance": tolerance, "same": same})
    wrong = [
        f"{row['place']} in {row['dtype']}"
        for row in rows
        if not row["difference"] <= row["tolerance"] or not all(row["same"].values())
    ]
    return {"rows": rows, "wrong": wrong}


def pages(options: Options, job: Options) -> Figures:
    """Run the scripts of ``pages`` of the manual, each in a process of its own, as a reader does."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from pages import blocks_of, program

    folder, ran, wrong = Path(job["folder"]) / "pages", [], []
    variables = {key: value for key, value in os.environ.items() if key not in TORCHRUN.marks}
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
    for page in options["pages"]:
        folder.mkdir()
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "page.py").write_text(program(blocks_of((ROOT / page).read_text()), "python"))
        ended = subprocess.run(
            [sys.executable, "page.py"], cwd=folder, env={**variables, "PYTHONPATH": path}, text=True,
            capture_output=True,
        )  # fmt: skip
        shutil.rmtree(folder)
        if ended.returncode == 0:
            ran.append(page)
        elif "ModuleNotFoundError" not in ended.stderr:  # a page may need a library that is not here
            wrong.append(f"{page}: {ended.stderr[-500:]}")
    return {"pages": ran, "wrong": wrong}


# The process of a step.


def is_no_room(error: BaseException) -> bool:
    """Return whether memory of the device or of the host did not suffice; for the host torch raises RuntimeError."""
    words = ("out of memory", "page-locked (CUDA error 2)", "can't allocate memory", "Cannot allocate memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in words)


def outcome(error: Exception) -> Figures:
    """Return the status of a step that raised, and a message."""
    message = str(error).strip() or type(error).__name__
    if isinstance(error, LeftOut):
        return {"status": LEFT_OUT, "message": message}
    if is_no_room(error):
        return {"status": NO_ROOM, "message": message.splitlines()[0]}
    return {"status": FAILED, "message": f"{type(error).__name__}: {message}"[-2000:]}


def on_rank(job: Options) -> Figures:
    """Do the step's work on one rank."""
    environment = init_distributed(job["backend"])
    place = {"rank": environment.rank, "device": str(device_of_group(environment))}
    try:
        return WORK[job["work"]](job["options"], {**job, **place})
    finally:
        shutdown()


def require(job: Options) -> None:
    """Raise LeftOut if the machine or the library lacks what the step needs."""
    here = torch.cuda.device_count()
    if here < job["gpus"]:
        raise LeftOut(f"needs {job['gpus']} GPU(s), and there are {here}")
    if job["key"] and job["key"] not in Settings.model_fields:
        raise LeftOut(f"this version has no key {job['key']} in its configuration")


def main() -> None:
    """Do the work of a job, and write its figures or what went wrong to its file."""
    job = json.loads(sys.argv[1])
    try:
        require(job)
        found = launch(on_rank, job["ranks"], job)[0]
        wrong = ", ".join(found.get("wrong", []))
        found |= {"status": WRONG, "message": f"checks fail: {wrong}"} if wrong else {"status": DONE}
    except Exception as error:
        traceback.print_exc()
        told = Path(job["out"])
        found = (json.loads(told.read_text()) if told.exists() else {}) | outcome(error)
    tell(job, found)
    sys.stdout.flush()
    os._exit(0)  # not through destructors, which may wait for what is broken


WORK: dict[str, Callable[[Options, Options], Figures]] = {
    "machine": machine, "numerics": numerics, "layouts": layouts, "copies": copies, "pages": pages, "trace": trace,
    "train": train, "masks": masks, "experts": experts,
}  # fmt: skip

if __name__ == "__main__":
    main()
