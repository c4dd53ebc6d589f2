"""Speed and size of models whose states rest off the device, on one large GPU; unattended, in minutes.

    python setup.py build_ext --inplace          # the native update, for the Python of that machine
    python benchmarks/gpu_offload.py --out runs/gpu-offload
    python benchmarks/gpu_offload.py --tiny      # shows on any machine that it runs

Growing GPT models are trained in bf16 with AdamW on one rank, with their states on the device, with the optimizer's on
the host, with parameters there, too, and in files, beside DeepSpeed where it can be imported. A tier's models grow
until one does not fit; then the number of blocks between is halved some times, for the largest that does. Each case
has a process of its own, so that one which fails, or is ended for its memory or its time, is a line of the table. What
would need more host memory than there is is not started, as the system might end more than that process.

The figures go to a JSON file after each case, and to a page. The exit status is 1 if a case failed in another way than
for want of memory, time or something that is not installed. ``--tiers "ZeroMesh, device" --minutes 9`` is shorter.
Where the machine locks no pages of memory, ``PAGEABLE=1`` does without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zeromesh.config.train import ModelShape
from zeromesh.observe.machine import memory, peak_bytes
from zeromesh.train.architectures.decoder import Decoder
from zeromesh.train.architectures.flops import parameters, training_flops_per_token

ROOT = Path(__file__).resolve().parents[1]
ADAMW = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
CPU: dict[str, Any] = {"device": "cpu"}
NVME: dict[str, Any] = {"device": "nvme"}
WARMUP, STEPS = 2, 4
TILE = (1 << 18) + 3
"""Elements that are drawn of each tensor; the rest repeats them, at places that no width is a multiple of."""
CHILD = [sys.executable, __file__, "--child"]
TOLERANCE = 0.02
"""Largest relative difference of a loss between tiers: other code updates, and what is computed with has 16 bits."""
SPARE = 0.92
"""Of the host memory that is available, what a case may be expected to take."""
LAST_CHARACTERS = 2000

FITS, NO_ROOM, LATE, MISSING, FAILED = "fits", "out of memory", "too late", "not available", "failed"


@dataclass(frozen=True)
class Tier:
    """One row.

    Attributes:
        family: ZeroMesh or DeepSpeed.
        stage: of ZeRO.
        places: where states rest, as keys of ``zero_optimization``.
        host: bytes per parameter on the host, of one rank and one micro-batch.
    """

    family: str
    stage: int
    places: dict[str, Any]
    host: int


TIERS = {
    "ZeroMesh, device": Tier("ZeroMesh", 3, {}, 0),
    "ZeroMesh, optimizer on host": Tier("ZeroMesh", 3, {"offload_optimizer": CPU}, 14),
    "ZeroMesh, all on host": Tier("ZeroMesh", 3, {"offload_optimizer": CPU, "offload_param": CPU}, 16),
    "ZeroMesh, optimizer on nvme": Tier("ZeroMesh", 3, {"offload_optimizer": NVME, "offload_param": CPU}, 4),
    "ZeroMesh, nvme": Tier("ZeroMesh", 3, {"offload_optimizer": NVME, "offload_param": NVME}, 0),
    "DeepSpeed, device": Tier("DeepSpeed", 3, {}, 0),
    "DeepSpeed, optimizer on host": Tier("DeepSpeed", 3, {"offload_optimizer": CPU}, 16),
    "DeepSpeed, all on host": Tier("DeepSpeed", 3, {"offload_optimizer": CPU, "offload_param": CPU}, 18),
}


@dataclass(frozen=True)
class Size:
    """A model and its batch: width, blocks, entries of the vocabulary, tokens per sample and samples per step."""

    hidden: int
    layers: int
    vocabulary: int
    sequence: int
    batch: int

    @property
    def shape(self) -> ModelShape:
        """Of a GPT with heads of 128, or of four heads where it is narrow."""
        return ModelShape(
            architecture="gpt", vocab_size=self.vocabulary, hidden_size=self.hidden, layers=self.layers,
            heads=max(4, self.hidden // 128), sequence_length=self.sequence,
        )  # fmt: skip


LARGE = ((1024, 24), (2048, 24), (2560, 32), (4096, 32), (5120, 40), (6144, 44), (7168, 48), (8192, 64))
SMALL = ((64, 2),)
"""Width and blocks of the models, which grow."""


def fill(name: str, parameter: torch.Tensor) -> None:
    """Draw the beginning of a weight, and repeat it."""
    if parameter.dim() < 2:
        nn.init.constant_(parameter, 1.0 if name.endswith("norm.weight") else 0.0)
        return
    flat = parameter.detach().view(-1)
    done = min(TILE, flat.numel())
    flat[:done].normal_(std=0.02)
    while done < flat.numel():
        more = min(done, flat.numel() - done)
        flat[done : done + more].copy_(flat[:more])
        done += more


class Quick(Decoder):
    """The decoder with weights that cost little: billions of random numbers take longer than what is measured."""

    def reset_parameters(self) -> None:
        """Fill all that is there: under DeepSpeed's ``zero.Init`` nothing is."""
        for name, parameter in self.named_parameters():
            if parameter.numel():
                fill(name, parameter)


@contextlib.contextmanager
def plain_layers() -> Iterator[None]:
    """Layers do not draw weights that ``Quick`` would draw again."""
    kinds: tuple[Any, ...] = (nn.Linear, nn.Embedding)
    before = [kind.reset_parameters for kind in kinds]
    for kind in kinds:
        kind.reset_parameters = lambda module: None
    try:
        yield
    finally:
        for kind, method in zip(kinds, before, strict=True):
            kind.reset_parameters = method


def configuration(tier: Tier, size: Size, folder: str) -> dict[str, Any]:
    """For both families; what is not said is off in both. Of DeepSpeed, too, host memory is page-locked for a GPU."""
    pin = own_device().type != "cpu" and "PAGEABLE" not in os.environ
    places = {
        key: {**place, "nvme_path": folder} if place is NVME else {**place, "pin_memory": pin}
        for key, place in tier.places.items()
    }
    return {
        "train_micro_batch_size_per_gpu": size.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": tier.stage, **places},
        "optimizer": {"type": "AdamW", "params": ADAMW},
    }


def zeromesh_engine(tier: Tier, size: Size, folder: str) -> Any:
    """Built without ever holding the whole model twice; blocks are computed again in the backward."""
    import zeromesh

    config = {**configuration(tier, size, folder), "activation_checkpointing": {"enabled": True, "targets": ["Block"]}}
    with zeromesh.zero.Init(), plain_layers():
        model = Quick(size.shape)
    engine, *_ = zeromesh.initialize(model=model, config=config)
    return engine


def deepspeed_engine(tier: Tier, size: Size, folder: str) -> Any:
    """DeepSpeed at its defaults; torch computes blocks again in the backward."""
    import deepspeed
    from torch.utils.checkpoint import checkpoint

    deepspeed.init_distributed(verbose=False)
    config = {**configuration(tier, size, folder), "steps_per_print": 1_000_000}
    with deepspeed.zero.Init(config_dict_or_path=config), plain_layers():
        model = Quick(size.shape)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            fill(name, parameter)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda *given, own=forward: checkpoint(own, *given, use_reentrant=False)  # type: ignore[method-assign]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def train(name: str, size: Size, folder: str) -> dict[str, Any]:
    """Some steps on one batch, timed one by one.

    Returns:
        ``times`` in seconds and ``losses`` of all steps, the first ``WARMUP`` among them; ``build``, seconds until the
        engine was there; ``device_peak`` and ``host_peak`` in bytes; ``states``, the engine's report of ZeroMesh;
        ``native``, whether the native update is there; ``spans``, a ``Breakdown`` of ZeroMesh.
    """
    from zeromesh.kernels.native import library

    tier, began = TIERS[name], time.perf_counter()
    torch.manual_seed(0)
    engine = (zeromesh_engine if tier.family == "ZeroMesh" else deepspeed_engine)(tier, size, folder)
    build = time.perf_counter() - began
    device = own_device()
    generator = torch.Generator().manual_seed(1)  # the same whatever was drawn for the weights, and where
    tokens = torch.randint(size.vocabulary, (size.batch, size.sequence + 1), generator=generator).to(device)
    times, losses, spans = [], [], None

    def step() -> None:
        start = time.perf_counter()
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)

    for _ in range(WARMUP + STEPS):
        step()
    check(losses)
    told = {"times": times.copy(), "losses": losses.copy()}
    if tier.family == "ZeroMesh":  # once more, as watching takes time
        from zeromesh.observe.breakdown import Timer

        engine.observer.spans.timed = True
        timer = Timer(engine.observer.spans)
        for _ in range(WARMUP):
            step()
        spans = asdict(timer.take(WARMUP))
    report = engine.memory_report() if tier.family == "ZeroMesh" else {}
    return {
        **told, "spans": spans, "build": build, "native": library() is not None,
        "device_peak": peak_bytes(device) if device.type != "cpu" else None,
        "host_peak": peak_bytes(torch.device("cpu")),
        "states": {state: tiers for state, tiers in report.items() if isinstance(tiers, dict) and state != "measured"},
    }  # fmt: skip


def check(losses: list[float]) -> None:
    """What does not learn is not measured.

    Raises:
        ValueError: a loss is no finite number, or the last one is not below the first, on a batch that is repeated.
    """
    if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        raise ValueError(f"the losses are {losses}; they must be finite and fall, so its times say nothing")


def own_device() -> torch.device:
    """The accelerator, if there is one that works."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def peak(width: int) -> dict[str, Any]:
    """Operations per second of the best of ten products of bf16 matrices, of random numbers: zeros take less power."""
    device = own_device()
    a, b = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    found = []
    for _ in range(13):
        start = time.perf_counter()
        a @ b
        if device.type != "cpu":
            torch.accelerator.synchronize()
        found.append(time.perf_counter() - start)
    name = torch.cuda.get_device_name() if device.type == "cuda" else str(device)
    return {"flops": 2 * width**3 / min(found[3:]), "width": width, "device": name}


def is_no_room(error: BaseException) -> bool:
    """Whether memory of the device or of the host did not suffice; on the host torch says so in a RuntimeError."""
    words = ("out of memory", "page-locked (CUDA error 2)", "can't allocate memory", "Cannot allocate memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in words)


def outcome(error: Exception) -> dict[str, Any]:
    """The status of a case that raised, and a message."""
    from zeromesh.config.errors import ConfigError

    what = str(error).strip() or type(error).__name__
    if is_no_room(error):
        return {"status": NO_ROOM, "message": what.splitlines()[0]}
    if isinstance(error, ConfigError) and "not in this version yet" in what:
        return {"status": MISSING, "message": what}
    return {"status": FAILED, "message": f"{type(error).__name__}: {what}"[-LAST_CHARACTERS:]}


def child(out: Path, work: Callable[[], dict[str, Any]]) -> None:
    """Do it and write what came out, or what went wrong."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # should the system end a process, then this one
    try:
        found = {"status": FITS, **work()}
    except Exception as error:
        traceback.print_exc()
        found = outcome(error)
    out.write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # not through destructors, which may wait for what is broken


def in_process(command: list[str], job: dict[str, Any], limit: float) -> dict[str, Any]:
    """What a process of its own found, or how it ended; it and all that it started are gone then.

    Args:
        command: is given the job as JSON in its last argument.
        job: a folder, and the file for what it finds, are added.
        limit: seconds that it may take.
    """
    from ranks import free_port, variables

    with tempfile.TemporaryDirectory(prefix="offload-") as name:
        out, log = Path(name) / "out.json", Path(name) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, json.dumps({**job, "folder": name, "out": str(out)})], stdout=file, stderr=file,
                env={**os.environ, **variables(1, 0, free_port())}, start_new_session=True,
            )  # fmt: skip
        try:
            process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return {"status": LATE, "message": f"not done after {limit:.0f} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if out.exists():
            found: dict[str, Any] = json.loads(out.read_text())
            return found
        if process.returncode == -signal.SIGKILL:
            return {"status": NO_ROOM, "message": "the process was ended from outside, as for want of host memory"}
        tail = log.read_text(errors="replace").strip()[-LAST_CHARACTERS:]
        return {"status": FAILED, "message": f"ended with status {process.returncode}\n{tail}"}


def count_of(parameters: int) -> str:
    """In billions, or in millions where they are fewer."""
    return f"{parameters / 1e9:.2f} G" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"


def said(row: dict[str, Any]) -> str:
    """Why a case did not fit, in one line."""
    return " ".join(row["message"].split())


class Run:
    """Cases in turn, with what they found written after each."""

    def __init__(self, given: argparse.Namespace) -> None:
        from bench import commit, machine

        self._given, self._began = given, time.monotonic()
        self.result: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine(), "torch": torch.__version__,
            "python": sys.version.split()[0], "tiny": given.tiny, "load": os.getloadavg()[0], "host": memory(),
            "rows": [],
        }  # fmt: skip

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:.0f} s] {text}", flush=True)

    def peak(self) -> None:
        """What a row's operations are a share of."""
        found = in_process(CHILD, {"peak": 512 if self._given.tiny else 8192}, self._given.limit)
        if found["status"] != FITS:
            raise SystemExit(f"the device multiplies no matrices: {found['message']}")
        self.result["peak"] = found
        self._say(f"{found['device']}: {found['flops'] / 1e12:.2f} TFLOPS at the most")

    def case(self, name: str, size: Size) -> str:
        """Its status; a row is added and written."""
        count, left = parameters(size.shape), 60 * self._given.minutes - (time.monotonic() - self._began)
        row: dict[str, Any] = {"tier": name, "parameters": count, **asdict(size)}
        self.result["rows"].append(row)
        told = memory()
        known = [told[key] for key in ("available_bytes", "limit_bytes") if told[key] is not None]
        room = min(known, default=float("inf"))
        needed = TIERS[name].host * count
        if TIERS[name].family == "DeepSpeed" and find_spec("deepspeed") is None:
            row |= {"status": MISSING, "message": "deepspeed is not installed"}
        elif needed > SPARE * room:
            gib = 2**30
            row |= {"status": NO_ROOM}
            row["message"] = f"needs {needed / gib:.0f} GiB of the host, which has {room / gib:.0f}; not started"
        elif left <= 0:
            row |= {"status": LATE, "message": f"the run's {self._given.minutes:g} minutes are over; not started"}
        else:
            row |= in_process(CHILD, {"tier": name, "size": asdict(size)}, min(self._given.limit, max(left, 1)))
        if row["status"] == FITS:
            row["differs"] = self._difference(row)
            if row["differs"] > TOLERANCE:
                row |= {"status": FAILED, "message": f"its losses differ by {row['differs']:.1e} from its family's"}
        if row["status"] == FITS:
            step = median(row["times"][WARMUP:])
            row["seconds"], row["tokens"] = step, size.batch * size.sequence / step
            row["flops"] = row["tokens"] * training_flops_per_token(size.shape)
            row["share"] = row["flops"] / self.result["peak"]["flops"]
            found = f"{row['tokens']:.0f} tokens/s, {row['flops'] / 1e12:.2f} TFLOPS, {row['share']:.1%} of the peak"
        else:
            found = f"{row['status']}: {said(row)}"
        self._say(f"{name}, {count_of(count)} parameters ({size.layers} x {size.hidden}): {found}")
        self.write()
        return str(row["status"])

    def _difference(self, row: dict[str, Any]) -> float:
        """The largest relative difference of a loss from the first row of the family that trained the same model.

        Families may draw their weights in other places, so that they start from other ones.
        """
        family, size = TIERS[row["tier"]].family, ("hidden", "layers", "vocabulary", "sequence", "batch")
        first = next(
            other
            for other in self.result["rows"]
            if other["status"] == FITS
            and TIERS[other["tier"]].family == family
            and all(other[key] == row[key] for key in size)
        )
        return max(abs(ours / other - 1) for ours, other in zip(row["losses"], first["losses"], strict=True))

    def tier(self, name: str, sizes: list[Size]) -> None:
        """Models that grow until one does not fit, then those between."""
        fits = 0
        for size in sizes:
            status = self.case(name, size)
            if status != FITS:
                break
            fits = parameters(size.shape)
        if status != NO_ROOM:
            return
        # As wide as the one that did not fit, and no smaller than the one that did.
        counts = {layers: parameters(replace(size, layers=layers).shape) for layers in range(1, size.layers)}
        low, high = max((layers for layers, count in counts.items() if count <= fits), default=0), size.layers
        for _ in range(self._given.refine):
            middle = (low + high) // 2
            if middle == low:
                return
            status = self.case(name, replace(size, layers=middle))
            if status == FITS:
                low = middle
            elif status == NO_ROOM:
                high = middle
            else:
                return

    def write(self) -> None:
        """Figures and page, as far as they are known."""
        out = self._given.out
        (out / "gpu-offload.json").write_text(json.dumps(self.result, indent=1) + "\n")
        (out / "gpu-offload.md").write_text(page(self.result))


def page(result: dict[str, Any]) -> str:
    """The page of a result."""
    from page import lines_of, spans_lines, spans_lines_table

    rows, gib = result["rows"], 2**30

    def bytes_of(count: int | None) -> str:
        return "-" if count is None else f"{count / gib:.1f}"

    spans: dict[str, dict[str, float]] = {}
    largest = [["states", "largest model that fits", "tokens/s", "share of peak"]]
    for name in dict.fromkeys(row["tier"] for row in rows):
        fitting = [row for row in rows if row["tier"] == name and row["status"] == FITS]
        best = max(fitting, key=lambda row: row["parameters"], default=None)
        cells = [count_of(best["parameters"]), f"{best['tokens']:.0f}", f"{best['share']:.1%}"] if best else []
        largest.append([name, *(cells or ["-"] * 3)])
        if best and best["spans"]:
            spans[f"{name}, {count_of(best['parameters'])}"] = spans_lines(best["spans"], None)
    table = [["states", "parameters", "s/step (least - most)", "tokens/s", "TFLOPS", "share of peak", "GiB device",
              "GiB host", "s to build", "last loss", "losses differ by"]]  # fmt: skip
    for row in rows:
        model = f"{count_of(row['parameters'])} ({row['layers']} x {row['hidden']})"
        if row["status"] != FITS:
            message = said(row).replace("|", "/")
            table.append([row["tier"], model, f"{row['status']}: {message}", *["-"] * 8])
            continue
        times = row["times"][WARMUP:]
        table.append([
            row["tier"], model, f"{row['seconds']:.3f} ({min(times):.3f} - {max(times):.3f})", f"{row['tokens']:.0f}",
            f"{row['flops'] / 1e12:.2f}", f"{row['share']:.1%}", bytes_of(row["device_peak"]),
            bytes_of(row["host_peak"]), f"{row['build']:.0f}", f"{row['losses'][-1]:.4f}",
            f"{row['differs']:.1e}",
        ])  # fmt: skip
    native = all(row.get("native", True) for row in rows)
    update = "the native kernel" if native else "**torch: the native kernel is not built**"
    top, batch = result["peak"], f"{rows[0]['batch']} x {rows[0]['sequence']}"
    parts = [
        f"# States off the device, {result['date']}",
        f"""Commit {result["commit"]}; {result["machine"]}; python {result["python"]}, torch {result["torch"]}. Host:
{bytes_of(result["host"]["available_bytes"])} GiB available. Load before: {result["load"]:.1f}. Made by
`benchmarks/gpu_offload.py`; the figures are in [gpu-offload.json](gpu-offload.json).""",
        f"""GPT models in bf16 with fp32 masters, AdamW and clipping, one rank, {batch} tokens per step
and no accumulation, so that each step pays for an update. Blocks are computed again in the backward. A figure is the
median of {STEPS} steps after {WARMUP}. TFLOPS count forward and backward without what is computed again, which is up to
a third more; the peak is {top["flops"] / 1e12:.2f} TFLOPS, the best of ten products of bf16 matrices of width
{top["width"]} in the same run. GiB on the device are what torch allocated, on the host what was resident. On the host
{update} updates.""",
        lines_of(largest),
        lines_of(table),
    ]
    if spans:
        parts += ["Where the time goes, in further steps of each tier's largest model:", spans_lines_table(spans)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Read the command line and run, or be one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = Path(os.environ.get("OUT") or ROOT / "runs" / "gpu-offload")
    parser.add_argument("--out", type=Path, default=out, help="folder of figures and page; by default $OUT, if set")
    parser.add_argument("--tiers", nargs="+", default=list(TIERS), choices=list(TIERS), metavar="TIER")
    parser.add_argument("--batch", type=int, default=8, help="samples per step")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens per sample")
    parser.add_argument("--limit", type=float, default=150, help="seconds that one case may take")
    parser.add_argument("--minutes", type=float, default=25, help="after which no case is started")
    parser.add_argument("--refine", type=int, default=2, help="cases between what fits and what does not")
    parser.add_argument("--tiny", action="store_true", help="two small models, which show that it runs")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        job = given.child
        if "peak" in job:
            child(Path(job["out"]), lambda: peak(job["peak"]))
        child(Path(job["out"]), lambda: train(job["tier"], Size(**job["size"]), job["folder"]))
    vocabulary, sequence, batch = (256, 32, 2) if given.tiny else (32768, given.sequence, given.batch)
    sizes = [Size(*blocks, vocabulary, sequence, batch) for blocks in (SMALL if given.tiny else LARGE)]
    given.out.mkdir(parents=True, exist_ok=True)
    run = Run(given)
    run.peak()
    for name in given.tiers:
        run.tier(name, sizes)
    print(page(run.result))
    bad = [f"{row['tier']}: {row['message']}" for row in run.result["rows"] if row["status"] == FAILED]
    sys.exit("\n".join(bad) or 0)


if __name__ == "__main__":
    main()
