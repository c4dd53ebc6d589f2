"""Checks and measurements on one large GPU, step by step: ``make gpu``, or without make

    python3 benchmarks/gpu.py                  # all steps, at most 90 minutes
    python3 benchmarks/gpu.py --minutes 9      # as many as fit into 9 minutes; the same command goes on
    python3 benchmarks/gpu.py --rehearse       # all steps in a small form, on the CPU

Each step is a row of ``STEPS`` and runs in a process of its own with a time limit; what fails is recorded, and the
others go on. Results are appended to ``DATE-gpu.jsonl`` as they come: steps with a result are not run again. The page
``DATE-gpu.md`` and its pictures are written after each step.

The command needs a checkout, torch and the packages that ``import zeromesh`` needs, but no installation and no network.
Wheels of missing packages are unpacked from ``--wheels``. It compiles the native kernels if a C compiler is there.

The exit status is 1 if a step failed or found wrong numbers, and 0 if some are left for the next call.
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
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu_page

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = [sys.executable, str(Path(__file__).with_name("gpu_steps.py"))]
KERNELS = ROOT / "zeromesh" / "base" / "kernels"
SCRATCH = ROOT / "runs"  # on the disk of the checkout; folders of temporary files may be in memory
PAGE_SECONDS = 15  # that remain of a call for the page after its last step
GRACE_SECONDS = 5  # between SIGTERM, upon which a launcher ends its ranks, and SIGKILL
BUSY = 4.0  # times as long as on a GPU the rehearsal's steps may take, on a busy machine
MOST_STARTS = 2  # of a step that ends the whole call, before it counts as failed
SMALLER = (1.0, 0.92, 0.84)  # shares of the memory that a model may be planned for, in turn, until it fits
LAST_CHARACTERS = 8000

# Status of a step.
DONE, WRONG, NO_ROOM, LATE, LEFT_OUT, FAILED = "done", "wrong", "out of memory", "too late", "left out", "failed"

CPU: dict[str, Any] = {"device": "cpu"}
NVME: dict[str, Any] = {"device": "nvme"}
LLAMA_8B = {"hidden_size": 4096, "heads": 32, "kv_heads": 8, "mlp_size": 14336, "vocab_size": 128256}
QWEN_7B = {"hidden_size": 3584, "heads": 28, "kv_heads": 4, "mlp_size": 18944, "vocab_size": 152064}
WIDE = {"hidden_size": 6144, "heads": 48, "kv_heads": 8, "mlp_size": 16384, "vocab_size": 32768}
TINY = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "mlp_size": 160, "vocab_size": 256}
TINIEST = {"hidden_size": 32, "layers": 2, "heads": 2, "vocab_size": 64, "sequence_length": 16}

Row = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One row of the table."""

    name: str
    work: str  # function of gpu_steps
    minutes: float  # that it may take at the most, with all its tries
    options: Mapping[str, Any] = field(default_factory=dict)  # of the function
    group: str = ""  # of the page's tables and aims
    ranks: int = 1
    backend: str = "nccl"
    gpus: int = 1  # least number of GPUs
    key: str = ""  # of the configuration, without which the step is left out
    small: Mapping[str, Any] = field(default_factory=dict)  # further options of the rehearsal

    def job(self, rehearse: bool, host_gib: float | None = None) -> Row:
        """Return what the process of the step is told, as it is read back from JSON."""
        options = {**self.options, **(SMALL[self.work] | self.small if rehearse else {})}
        if rehearse:
            tiny = {"model": TINY, "accumulation": 2, "ratios": RATIOS[::17], "layers": 2, "budget_gb": 0.0016}
            options |= {key: value for key, value in tiny.items() if key in options}
            if "layers" in options:
                options["room"] = {}  # their number is given, whatever the memory
        backend, gpus = ("gloo", 0) if rehearse else (self.backend, self.gpus)
        job = {"work": self.work, "options": options, "ranks": self.ranks, "key": self.key, "host_gib": host_gib}
        found: Row = json.loads(json.dumps({**job, "backend": backend, "gpus": gpus}))
        return found


SMALL: dict[str, dict[str, Any]] = {
    "machine": {"width": 256, "megabytes": 4},
    "numerics": {"steps": 2, "shape": TINIEST},
    "layouts": {"steps": 1, "shape": {**TINIEST, "layers": 4}},
    "copies": {"updates": 2, "shape": TINIEST, "places": ["stage 2, optimizer", "stage 3, all"]},
    "pages": {"pages": ["README.md"]},
    "trace": {"sequence": 32, "batch": 2},
    "masks": {"length": 256, "heads": 4, "key_heads": 2, "width": 16, "repeats": 2},
    "experts": {"sizes": {"layers": 1, "experts": 8, "width": 32, "inner": 16}, "shares": [1.0, 0.25], "steps": 2},
    "train": {"sequence": 32, "batch": 2, "warmup": 1, "steps": 1, "room": {"device": 3e6, "host": 3e6, "nvme": 3e6}},
}
"""Options of the rehearsal, by function; its room, in bytes, is for a few blocks."""


def host(ratio: float = 1.0, **more: Any) -> dict[str, Any]:
    """Return the placement of gradients and optimizer states on the host, or of a share of them."""
    return {"stage": 2, "offload_optimizer": {**CPU, "ratio": ratio, **more}}


def tiled(tokens: int | str) -> dict[str, Any]:
    """Return the configuration of tiles over tokens, and of a loss in chunks."""
    return {"tiling": {"mlp": tokens, "loss": True}}


# Options of training steps by group, and those of their rehearsal: Llama 3 8B with samples of 8,192 tokens; the largest
# model of a tier, whose number of blocks the planner chooses; 20 blocks of Llama 3 8B with all states on the device;
# runs whose speed others have published; Llama 3 8B with one long sample; the 20 blocks by what they save.
GROUPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "8B": (
        {"model": LLAMA_8B, "layers": 32, "sequence": 8192, "spans": True},
        {"batch": 1},
    ),
    "largest": ({"model": WIDE, "sequence": 4096}, {"backend": "aot_eager"}),
    "faster": (
        {"model": LLAMA_8B, "layers": 20, "sequence": 8192, "batch": 1, "accumulation": 2, "steps": 5,
         "recompute": "none", "kernels": True},
        {"backend": "aot_eager"},
    ),
    "published": ({"model": LLAMA_8B, "layers": 32, "sequence": 4096}, {"backend": "aot_eager"}),
    "saved": (
        {"model": LLAMA_8B, "layers": 20, "sequence": 8192, "batch": 1, "accumulation": 2, "steps": 5},
        {"sequence": 128},  # moves leave out what is smaller than 4,096 bytes
    ),
    "long": ({"model": LLAMA_8B, "layers": 32, "batch": 1}, {"sequence": 64, "config": tiled(16)}),
}  # fmt: skip


def train(group: str, name: str, minutes: float, zero: Mapping[str, Any], key: str = "", **options: Any) -> Step:
    """Return a step of a group that trains."""
    fixed, small = GROUPS[group]
    return Step(name, "train", minutes, {**fixed, "zero": zero, **options}, group, key=key, small=small)


RATIOS = [round(0.02 * number, 2) for number in range(1, 51)]
LION = {"optimizer": {"type": "Lion", "params": {"lr": 1e-5}}, "ratios": RATIOS}
WHOLE, BOTH = {"stage": 3}, {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}
SPLIT = {"stage": 3, "offload_optimizer": {**CPU, "split_master": True}, "offload_param": CPU}
FLOAT8 = {"float8": {"enabled": True}}
# As publishers filter: the head, and the small products of keys and values, stay in 16 bits.
FILTERED = ["*head*", "*.key", "*.value"]
NARROW = {"optimizer_state_dtype": {"exp_avg": "bf16", "exp_avg_sq": "bf16"}}
BF16_SUMS = {"data_types": {"grad_accum_dtype": "bf16"}}
MASKS = {"length": 16384, "heads": 32, "key_heads": 8, "width": 128, "repeats": 5}
# One copy in files, as the largest model leaves no room for a second one.
FILES = {"stage": 3, "offload_optimizer": {**NVME, "update_during_backward": 0.0}, "offload_param": CPU}

STEPS = (
    Step("machine", "machine", 1.0, {"width": 8192, "megabytes": 2048}),
    Step("numerics, one rank, nccl", "numerics", 1.5, {"steps": 10}, "numerics"),
    Step("numerics, two ranks on one GPU, gloo", "numerics", 1.5, {"steps": 10}, "numerics", 2, "gloo"),
    Step("numerics, two ranks, nccl", "numerics", 2.0, {"steps": 10}, "numerics", 2, "nccl", 2),
    Step("layouts, two ranks on one GPU, gloo", "layouts", 2.0, {"steps": 2}, "layouts", 2, "gloo"),
    Step("layouts, four ranks on one GPU, gloo", "layouts", 1.0, {"steps": 2}, "layouts", 4, "gloo"),
    Step("late copies, one rank, nccl", "copies", 1.5, {"updates": 5}, "copies"),
    Step("late copies, two ranks on one GPU, gloo", "copies", 2.0, {"updates": 5}, "copies", 2, "gloo"),
    Step("pages", "pages", 1.0, {"pages": ["README.md", "docs/getting-started.md", "docs/your-model.md"]}),
    Step("trace", "trace", 1.5, {"model": LLAMA_8B, "layers": 6, "sequence": 8192, "batch": 2, "zeros": {
        "all on the device": WHOLE, "optimizer on the host": {**host(), "stage": 3}, "all on the host": BOTH,
    }}, "trace"),
    train("faster", "eager", 1.0, WHOLE),
    train("faster", "compiled blocks", 2.5, WHOLE, compile=True),
    train("faster", "compiled blocks, float8", 2.5, WHOLE, "float8", compile=True, config=FLOAT8),
    # By the planner's estimate of an H200: the first is bound by the update, the others hide it behind micro-batches.
    train("8B", "8 K, 4 samples, all states on the host", 3.0, host(), batch=4, steps=3, norm=True),
    train("8B", "8 K, 16 micro-batches, 60 % on the host", 4.0, host(0.6, update_during_backward=0.0), batch=1,
          accumulation=16, recompute="none", steps=2, warmup=1),
    train("8B", "8 K, 8 micro-batches, 45 % on the host, updated early", 3.5, host(0.45, update_during_backward=1.0),
          batch=1, accumulation=8, recompute="selective", warmup=1),
    train("largest", "all on the device", 1.0, {"stage": 2}, batch=4),
    train("largest", "optimizer on the host", 2.5, host(), batch=4),
    train("largest", "parameters and optimizer on the host", 2.5, BOTH, batch=4),
    train("largest", "device and host, AdamW", 3.0, SPLIT, batch=4, accumulation=4, steps=2, ratios=RATIOS),
    train("largest", "device and host, Lion, compiled blocks, float8", 4.5, SPLIT, "float8", batch=2, accumulation=8,
          steps=1, warmup=1, compile=True, config=FLOAT8, spans=True, **LION),
    # The model of the row above: sums in 16 bits leave memory for twice as many tokens at a time.
    train("largest", "20 G, device and host, Lion, sums in 16 bits, compiled blocks, float8", 4.0,
          {**SPLIT, "offload_optimizer": {**CPU, "split_master": True, "ratio": 0.42}}, "float8", layers=51, batch=4,
          accumulation=4, steps=2, warmup=1, compile=True, config=FLOAT8 | BF16_SUMS, spans=True,
          optimizer=LION["optimizer"]),
    train("largest", "optimizer in files", 2.0, FILES, batch=4, steps=2),
    # 8 bytes a parameter: beside the rows with states in fp32.
    train("faster", "states in bf16", 1.0, WHOLE, "optimizer_state_dtype", config=NARROW),
    train("largest", "device and host, AdamW, states in bf16", 3.0, SPLIT, "optimizer_state_dtype", batch=4,
          accumulation=4, steps=2, ratios=RATIOS, config=NARROW),
    # One long sample: the same without tiles, with tiles, and what only tiles have room for.
    train("8B", "64 K, one sample", 3.0, BOTH, "tiling", sequence=65536, batch=1, steps=2, warmup=1),
    train("long", "64 K, one sample, tiles", 3.0, BOTH, "tiling", sequence=65536, steps=2, warmup=1,
          config=tiled("width")),
    train("long", "256 K, one sample, tiles, inputs on the host", 6.0, BOTH, "tiling", sequence=262144, steps=1,
          warmup=0, config=tiled("width"), inputs_on_host=True),
    # Beside "eager", which keeps everything, 42 GB by the planner: its plan for 28 GB computes little again.
    *(
        train("saved", f"saved tensors: {what}", 1.0, WHOLE, "activation_checkpointing", **options)
        for what, options in {
            "full": {"recompute": "full"},
            "selective": {"recompute": "selective"},
            "full, inputs on the host": {"recompute": "full", "inputs_on_host": True},
            "auto, 28 GB": {"recompute": "auto", "budget_gb": 28.0},
            "auto, 18 GB": {"recompute": "auto", "budget_gb": 18.0},
        }.items()
    ),
    Step("masks, one rank", "masks", 1.0, MASKS, "masks", key="context_parallel"),
    Step("masks, two ranks on one GPU, gloo", "masks", 1.0, MASKS, "masks", 2, "gloo", key="context_parallel"),
    Step("experts at rest", "experts", 4.0, {
        "sizes": {"layers": 4, "experts": 64, "width": 2048, "inner": 1024, "tokens": 8192},
        "shares": [1.0, 0.5, 0.25, 0.1], "steps": 5,
    }, "experts", key="experts"),
    # One H100: 12,473 tokens/s with rank 16 on all projections; 272 TFLOP/s with states and parameters on the host.
    train("published", "Llama 3 8B, LoRA, 2 x 16 micro-batches", 3.0, {"stage": 0}, batch=2, accumulation=16, steps=2,
          warmup=1, adapters=16),
    train("published", "Qwen2.5 7B, all on the host, 158 samples of 1,024", 3.0, BOTH, model=QWEN_7B, layers=28,
          sequence=1024, batch=158, steps=2, warmup=1),
    train("published", "20 blocks of Llama 3 8B, compiled", 2.5, WHOLE, layers=20, batch=2, recompute="none",
          compile=True),
    *(
        train("published", f"20 blocks of Llama 3 8B, compiled, float8 {recipe}, filtered", 2.5, WHOLE, "float8",
              layers=20, batch=2, recompute="none", compile=True,
              config={"float8": {"enabled": True, "recipe": recipe, "skip": FILTERED}})
        for recipe in ("tensorwise", "rowwise")
    ),
)  # fmt: skip


class Results:
    """The lines of a file, by step.

    A line with ``started`` says that a step began; one with ``status`` is its result. A step whose options have changed
    since has none, so that it is measured again; nor, with ``again``, has one that failed.
    """

    def __init__(self, path: Path, again: bool = False) -> None:
        self.path, self._again = path, again
        self.rows: dict[str, dict[str, Any]] = {}
        self._starts: dict[str, int] = {}
        for line in path.read_text().splitlines() if path.is_file() else ():
            with contextlib.suppress(json.JSONDecodeError):  # a call that was killed may leave half a line
                self._take(json.loads(line))

    def _take(self, row: dict[str, Any]) -> None:
        if "status" in row:
            self.rows[row["step"]] = row
        else:
            key = json.dumps([row["step"], row["job"]])
            self._starts[key] = self._starts.get(key, 0) + 1

    def add(self, row: dict[str, Any]) -> None:
        """Append a line; it is on the disk afterwards, whatever becomes of this process."""
        ends = not self.path.exists() or self.path.read_text()[-1:] in ("", "\n")
        with self.path.open("a") as file:
            file.write(("" if ends else "\n") + json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._take(row)

    def has(self, step: Step, job: Row) -> bool:
        """Return whether the step has a result with these options."""
        row = self.rows.get(step.name, {})
        return row.get("job") == job and (not self._again or row["status"] in (DONE, LEFT_OUT))

    def starts(self, step: Step, job: Row) -> int:
        """Return how often the step was started with these options."""
        return 0 if self._again else self._starts.get(json.dumps([step.name, job]), 0)


def in_process(
    command: list[str], job: Mapping[str, Any], limit: float, variables: Mapping[str, str]
) -> dict[str, Any]:
    """Run a command and return what it found, or how it ended; its processes are gone afterwards.

    Args:
        command: gets the job, with the names of a folder and of the file for its figures, as JSON in its last argument.
        job: the work.
        limit: seconds.
        variables: environment variables to set.
    """
    SCRATCH.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=SCRATCH) as name:
        out, log = Path(name) / "out.json", Path(name) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, json.dumps({**job, "folder": name, "out": str(out)})], stdout=file, stderr=file,
                env={**os.environ, **variables}, start_new_session=True,
            )  # fmt: skip
        with contextlib.suppress(OSError):  # should the system end a process for want of memory, then this one
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
        late = False
        try:
            process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=seconds)
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        tail = log.read_text(errors="replace").strip()[-LAST_CHARACTERS:]
        if "status" in found:
            return found | ({"log": tail} if found["status"] in (FAILED, WRONG, NO_ROOM) else {})
        if late:
            return {**found, "status": LATE, "message": f"not done after {limit:.0f} s", "log": tail}
        if process.returncode == -signal.SIGKILL:
            return {**found, "status": NO_ROOM, "message": "killed from outside, as for want of host memory"}
        return {**found, "status": FAILED, "message": f"ended with status {process.returncode}", "log": tail}


class Run:
    """Takes the steps of a table in turn.

    Args:
        steps: the table.
        results: of this and earlier calls.
        rehearse: run the small form.
        minutes: of this call; no step is started that may not be done by then.
        host_gib: host memory to plan for; None: what is available.
        variables: environment of the steps.
    """

    def __init__(
        self, steps: Iterable[Step], results: Results, rehearse: bool, minutes: float, host_gib: float | None,
        variables: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._steps, self._results, self._rehearse = tuple(steps), results, rehearse
        self._began, self._seconds, self._host_gib = time.monotonic(), 60 * minutes - PAGE_SECONDS, host_gib
        self._variables, self._commit = variables, commit()
        self.program = PROGRAM

    def all(self) -> list[Step]:
        """Run what has no result yet and fits into the time; return the steps that are left for another call."""
        left = []
        for step in self._steps:
            job = step.job(self._rehearse, self._host_gib)
            if self._results.has(step, job):
                continue
            if self._results.starts(step, job) >= MOST_STARTS:
                ended = f"the whole call ended {MOST_STARTS} times while it ran; --again tries it once more"
                self._results.add({"step": step.name, "job": job, "status": FAILED, "message": ended})
            elif self._began + self._seconds - time.monotonic() < 60 * step.minutes:
                left.append(step)
                continue
            else:
                self._one(step, job)
            gpu_page.write(self._results.path, self._results.rows, [(step.name, step.group) for step in self._steps])
        return left

    def _one(self, step: Step, job: dict[str, Any]) -> None:
        self._results.add({"step": step.name, "job": job, "started": time.time()})
        began, tries = time.monotonic(), []
        for share in SMALLER:
            limit = 60 * step.minutes - (time.monotonic() - began) - GRACE_SECONDS
            found = in_process(self.program, {**job, "share": share}, limit, self._variables)
            tries.append({"share": share, **{key: found.get(key) for key in ("layers", "status", "message")}})
            # A model of fixed size does not fit better the second time.
            if found["status"] != NO_ROOM or "layers" in job["options"] or job["work"] != "train":
                break
        seconds = time.monotonic() - began
        row = {"step": step.name, "job": job, "commit": self._commit, "seconds": seconds, "tries": tries}
        self._results.add({**row, **found})
        at = (time.monotonic() - self._began) / 60
        why = f": {found['message']}" if found.get("message") else ""
        print(f"[{at:.1f} min] {step.name}: {found['status']} ({seconds:.0f} s){why}", flush=True)


def commit() -> str:
    """Return the commit that is measured, with a note on changes that are not in it; "unknown" without git."""
    git = ["git", "-C", str(ROOT)]
    try:
        name = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "zeromesh", "benchmarks"], capture_output=True).stdout
    except FileNotFoundError:
        return "unknown"
    return (name or "unknown") + (", with changes" if changed else "")


def environment(folder: Path, wheels: Path | None) -> dict[str, str]:
    """Compile the kernels, unpack wheels, and return the variables of steps: where they import from, and settings."""
    if not any(KERNELS.glob("_native*.so")):
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        if not any(KERNELS.glob("_native*.so")):
            print(f"the native kernels cannot be compiled; torch updates on the host\n{done.stderr[-LAST_CHARACTERS:]}")
    paths = [str(ROOT), str(folder)]
    for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    variables = {
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "PYTHONUNBUFFERED": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # products are the same in each run, for comparisons bit by bit
        # Segments that grow: a model that fills the device would not fit into what others of fixed size leave.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    command = [sys.executable, "-c", "import gpu_steps"]  # which imports all that a step needs
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, env={**os.environ, **variables}
    )
    if done.returncode:
        error = done.stderr.strip().splitlines()[-1]
        sys.exit(
            f"{error}: the steps need it; get its wheels elsewhere with `pip download`, and name them with --wheels"
        )
    return variables


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=math.inf, help="before which the call ends; the next goes on")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder of results and page")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"), help="of the results to go on with")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="run the steps whose groups or names have one of these texts"
    )
    parser.add_argument("--again", action="store_true", help="run steps once more that failed")
    parser.add_argument("--host-gib", type=float, help="host memory of a machine that shows it only as it is used")
    parser.add_argument("--wheels", type=Path, help="folder of wheels, for packages that are not installed")
    parser.add_argument("--rehearse", action="store_true", help="a small form of all steps, on the CPU")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the step is ended, too
    given.out.mkdir(parents=True, exist_ok=True)
    results = Results(given.out / f"{given.date}-gpu{'-rehearsal' if given.rehearse else ''}.jsonl", given.again)
    slower = BUSY if given.rehearse else 1.0
    named = [step for step in STEPS if any(text in f"{step.group}: {step.name}" for text in given.only)]
    chosen = [replace(step, minutes=slower * step.minutes) for step in named]
    if not chosen:
        parser.error(f"no step has {given.only!r} in its name; there are: {'; '.join(step.name for step in STEPS)}")
    least = max(step.minutes for step in chosen) + PAGE_SECONDS / 60
    if given.minutes < least:
        parser.error(f"--minutes is {given.minutes:g}; the longest step and the page need {least:g}")
    with tempfile.TemporaryDirectory(prefix="gpu-site-") as folder:
        variables = environment(Path(folder), given.wheels)
        if given.rehearse:
            variables["CUDA_VISIBLE_DEVICES"] = ""
        left = Run(chosen, results, given.rehearse, given.minutes, given.host_gib, variables).all()
    print(f"{results.path.with_suffix('.md')} has {len(results.rows)} of {len(STEPS)} steps")
    if left:
        names = "; ".join(step.name for step in left)
        print(f"{len(left)} more need up to {sum(step.minutes for step in left):g} minutes; call it again: {names}")
    rows = [results.rows[step.name] for step in chosen if step.name in results.rows]
    bad = [f"{row['step']}: {row['message']}" for row in rows if row["status"] not in (DONE, LEFT_OUT)]
    sys.exit("\n".join(bad) or 0)


if __name__ == "__main__":
    main()
