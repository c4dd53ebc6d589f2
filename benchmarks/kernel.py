"""The update on the host: ZeroMesh's kernel beside torch's and DeepSpeed's, and beside the speed of memory.

    python benchmarks/kernel.py --rounds 9 --threads 1 2

AdamW over fp32 masters and moments, with gradients of 16 bits and parameters of 16 bits. What has no kernel for that
casts the gradients before and the parameters after. All rows take turns; a round's figure is the best of some
repetitions. DeepSpeed runs in an environment of its own, in processes that wait for their turns. The figures go to a
JSON file and a page. The exit status is 1 where an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
FACTOR = 0.5
"""Unscaling and clipping, which only ZeroMesh's rows do."""
BYTES = 28
"""Of a parameter's gradient, master, moments and 16-bit parameter, each read or written once or both."""

HALVES, NARROW, LEAST = "ZeroMesh, halves", "ZeroMesh, states in bf16", "ZeroMesh, halves, states in bf16"
NARROW_AVX2 = "ZeroMesh, states in bf16, AVX2"
BYTES_OF = {HALVES: 26, NARROW: 20, NARROW_AVX2: 20, LEAST: 18}
"""Bytes of rows that move fewer: of halves, the parameter is the upper one, and is not written beside the master."""

OURS, MEMORY, CASTS, DEEPSPEED = "ZeroMesh", "memory", "torch: cast, fused, cast", "DeepSpeed: cast, update, cast"
AIMS = {MEMORY: 0.9, CASTS: 1.7, DEEPSPEED: 1.1}
"""How many times as fast as this ZeroMesh is to be, at least."""

EXPLAINED = {
    MEMORY: "reference: `mul_` in place over master and moments, and a 16-bit copy; it moves the same bytes",
    OURS: "the fastest instructions of the processor, in place, with unscaling and clipping",
    "ZeroMesh, AVX2": "the same with AVX2",
    HALVES: "split master weights: the 16-bit parameter and a 16-bit remainder, 4 bytes instead of 6",
    NARROW: "moments in bf16, rounded stochastically",
    NARROW_AVX2: "the same with AVX2",
    LEAST: "both: 8 bytes at rest",
    "ZeroMesh, out of place": "writes the new master and moments to other memory",
    "torch: foreach": "only the update, with `foreach=True`, on fp32 gradients",
    "torch: fused": "only the update, with `fused=True`, on fp32 gradients",
    CASTS: "the same with the casts from and to 16 bits",
    "DeepSpeed: update": "only the update, `DeepSpeedCPUAdam`, on fp32 gradients",
    DEEPSPEED: "the same with the casts from and to 16 bits",
}

Work = Callable[[], object]


class Memory:
    """What is updated: ``elements`` parameters."""

    def __init__(self, elements: int) -> None:
        from zeromesh.base.kernels.halves import split
        from zeromesh.shard.store.memory import empty

        def make(dtype: torch.dtype) -> torch.Tensor:
            return empty(elements, dtype, torch.device("cpu")).zero_()

        torch.manual_seed(0)
        self.gradient, self.output = make(torch.bfloat16).normal_(), make(torch.bfloat16)
        self.wide = make(torch.float32).copy_(self.gradient)
        self.master = torch.nn.Parameter(make(torch.float32).normal_())
        self.master.grad = self.wide
        self.states = make(torch.float32), make(torch.float32)
        self.narrow = make(torch.bfloat16), make(torch.bfloat16)
        self.halves = make(torch.bfloat16), make(torch.int16)
        for half, values in zip(self.halves, split(self.master.detach()), strict=True):
            half.copy_(values)
        self.new = [make(torch.float32) for _ in range(3)]

    def cast(self, step: Work) -> Work:
        """A step between casts."""

        def work() -> None:
            self.wide.copy_(self.gradient)
            step()
            with torch.no_grad():
                self.output.copy_(self.master)

        return work

    def here(self) -> dict[str, Callable[[int], object]]:
        """The rows of this environment; each takes a number of threads."""
        from zeromesh.base.kernels.native import library
        from zeromesh.base.kernels.update_pass import UpdatePiece, UpdateStep, update

        native = library()
        assert native is not None, "the kernels are not built"
        first, second = self.states
        master, step = self.master.detach(), UpdateStep("adamw", ADAMW, 10)
        piece = UpdatePiece(step, self.gradient, master, self.states, self.output)
        other = UpdatePiece(step, self.gradient, master, self.states, self.output, self.new[0], tuple(self.new[1:]))
        upper, lower = self.halves
        halved = UpdatePiece(step, self.gradient, upper, self.states, remainder=lower)
        foreach = torch.optim.AdamW([self.master], **ADAMW, foreach=True)  # type: ignore[arg-type]
        fused = torch.optim.AdamW([self.master], **ADAMW, fused=True)  # type: ignore[arg-type]
        for optimizer in (foreach, fused):
            state = {"step": torch.tensor(9.0), "exp_avg": first, "exp_avg_sq": second}
            optimizer.state[self.master] = state

        def memory() -> None:
            for tensor in (master, first, second):
                tensor.mul_(0.999)
            self.output.copy_(self.gradient)

        ours = {OURS: lambda threads: update([piece], FACTOR, threads)}
        if "avx2" in native.sets:
            ours["ZeroMesh, AVX2"] = lambda threads: update([piece], FACTOR, threads, "avx2")
        narrow = UpdatePiece(step, self.gradient, master, self.narrow, self.output)
        least = UpdatePiece(step, self.gradient, upper, self.narrow, remainder=lower)
        ours[NARROW] = lambda threads: update([narrow], FACTOR, threads)
        if "avx2" in native.sets:
            ours[NARROW_AVX2] = lambda threads: update([narrow], FACTOR, threads, "avx2")
        ours[LEAST] = lambda threads: update([least], FACTOR, threads)
        ours["ZeroMesh, out of place"] = lambda threads: update([other], FACTOR, threads)
        ours[HALVES] = lambda threads: update([halved], FACTOR, threads)
        works = {
            MEMORY: memory, "torch: foreach": foreach.step, "torch: fused": fused.step, CASTS: self.cast(fused.step)
        }  # fmt: skip
        return {**ours, **{name: lambda threads, work=work: work() for name, work in works.items()}}

    def deepspeed(self) -> dict[str, Callable[[int], object]]:
        """The rows of the environment that has DeepSpeed, which compiles its operator at its first use."""
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam([self.master], **ADAMW, adamw_mode=True)
        optimizer.state[self.master] = {"step": 9, "exp_avg": self.states[0], "exp_avg_sq": self.states[1]}
        works = {"DeepSpeed: update": optimizer.step, DEEPSPEED: self.cast(optimizer.step)}
        return {name: lambda threads, work=work: work() for name, work in works.items()}


def best_of(repetitions: int, work: Work) -> float:
    """Seconds of the quickest one."""
    found = []
    for _ in range(repetitions):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def serve(elements: int, repetitions: int, threads: int) -> None:
    """Measure all rows of DeepSpeed for each line of the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what DeepSpeed prints is no answer
    torch.set_num_threads(threads)
    rows = Memory(elements).deepspeed()
    for work in rows.values():
        work(threads)
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        found = {name: best_of(repetitions, lambda work=work: work(threads)) for name, work in rows.items()}
        print(json.dumps(found), file=answers, flush=True)


class Served:
    """DeepSpeed with so many threads, in a process of its own: OpenMP is told the number once."""

    def __init__(self, home: Path, elements: int, repetitions: int, threads: int) -> None:
        python = home / "bin" / "python"
        more = {"TORCH_EXTENSIONS_DIR": str(home / "torch_extensions"), "OMP_NUM_THREADS": str(threads)}
        more["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        numbers = [str(number) for number in (elements, repetitions, threads)]
        self.process = subprocess.Popen(
            [python, __file__, "--serve", *numbers], env={**os.environ, **more}, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        self.read()

    def read(self) -> str:
        """A line of its answers."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise OSError(f"DeepSpeed's process ended with {self.process.wait()}; see above")
        return line

    def round(self) -> dict[str, float]:
        """Seconds of its rows."""
        assert self.process.stdin is not None
        self.process.stdin.write("round\n")
        self.process.stdin.flush()
        found: dict[str, float] = json.loads(self.read())
        return found


def measure(given: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, by number of threads and row."""
    there: dict[int, Served] = {}
    try:
        for threads in given.threads:
            there[threads] = Served(given.deepspeed, given.elements, given.repetitions, threads)
    except OSError as error:
        print(f"DeepSpeed is not measured: {error}", flush=True)
    rows = Memory(given.elements).here()
    found: dict[str, dict[str, list[float]]] = {
        str(threads): {name: [] for name in EXPLAINED} for threads in given.threads
    }
    for number in range(-1, given.rounds):  # the first one warms up
        for threads in given.threads:
            torch.set_num_threads(threads)
            names = list(rows)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                seconds = best_of(given.repetitions, lambda name=name, threads=threads: rows[name](threads))
                found[str(threads)][name].append(seconds)
            for name, seconds in (there[threads].round() if threads in there else {}).items():
                found[str(threads)][name].append(seconds)
        print(f"round {number + 1} of {given.rounds}, load {os.getloadavg()[0]:.1f}", flush=True)
    for served in there.values():
        assert served.process.stdin is not None
        served.process.stdin.close()
        served.process.wait()
    return {threads: {name: seconds[1:] for name, seconds in of.items() if seconds} for threads, of in found.items()}


def ratios(of: dict[str, list[float]]) -> dict[str, float]:
    """How many times as fast ZeroMesh is: the median over the rounds, in each of which the rows were neighbours."""
    from statistics import median

    pairs = {name: zip(seconds, of[OURS], strict=True) for name, seconds in of.items()}
    return {name: median(other / ours for other, ours in pair) for name, pair in pairs.items()}


def missed(result: dict[str, Any]) -> list[str]:
    """Aims that are not reached."""
    return [
        f"{threads} thread(s): {ratios(of)[name]:.2f} times as fast as {name}; the target is {aim:g}"
        for threads, of in result["rows"].items()
        for name, aim in AIMS.items()
        if name in of and ratios(of)[name] < aim
    ]


def page(result: dict[str, Any]) -> str:
    """The page of a result."""
    from page import lines_of, spread

    million = result["elements"] / 1e6
    aims = "; ".join(f"{aim:g} times as fast as {name}" for name, aim in AIMS.items())
    parts = [
        f"# The update on the host, {result['date']}",
        f"""Commit {result["commit"]}; {result["machine"]}; {result["versions"]}. Made by `make bench-kernel`; the
figures are in [{result["name"]}.json]({result["name"]}.json).
Load of the machine before: {result["load"]:.1f}, after: {result["load_after"]:.1f}.""",
        f"""AdamW on {million:.0f} M parameters in one piece: fp32 masters and moments, gradients and parameters in
bf16, in huge pages. An update reads 2 + 12 bytes per parameter and writes 12 + 2: {BYTES} bytes,
{BYTES_OF[HALVES]} with halves, {BYTES_OF[NARROW]} with states in bf16, {BYTES_OF[LEAST]} with both.
All rows take turns for {result["rounds"]} rounds. The figure of a round is the best
of {result["repetitions"]} repetitions. The tables have the median of the rounds, and the least and the most. GB/s
counts these bytes, even if a row moves more. *ZeroMesh is* compares with ZeroMesh: the median over the rounds.
*at best* compares the best rounds.""",
        "\n".join(f"- **{name}**: {text}" for name, text in EXPLAINED.items()),
        f"Targets: {aims}. "
        + ("**All targets are met.**" if not result["missed"] else "**Missed:**\n\n- " + "\n- ".join(result["missed"])),
    ]
    for threads, of in result["rows"].items():
        table = [["row", "M parameters/s (least - most)", "bytes", "GB/s", "ZeroMesh is", "at best"]]
        for name in (name for name in EXPLAINED if name in of):
            middle, least, most = spread([million / seconds for seconds in of[name]])
            speed = f"{middle:.0f} ({least:.0f} - {most:.0f})"
            wide = BYTES_OF.get(name, BYTES)
            cells = [
                name,
                speed,
                str(wide),
                f"{middle * wide / 1e3:.1f}",
                f"{ratios(of)[name]:.2f} x",
                f"{min(of[name]) / min(of[OURS]):.2f} x",
            ]
            table.append(cells)
        parts += [f"## {threads} thread(s)", lines_of(table)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Measure, and write figures and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repetitions", type=int, default=3, help="of which a round takes the best")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--elements", type=int, default=32 * 1024**2, help="parameters")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder for page and figures")
    parser.add_argument(
        "--deepspeed", type=Path, default=ROOT / ".venv-deepspeed", help="the environment that has DeepSpeed"
    )
    parser.add_argument("--serve", type=int, nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        elements, repetitions, threads = given.serve
        serve(elements, repetitions, threads)
        return
    from bench import commit, free_name, machine
    from page import link

    date, load = time.strftime("%Y-%m-%d"), os.getloadavg()[0]
    given.out.mkdir(parents=True, exist_ok=True)
    path = free_name(given.out, f"{date}-kernel")
    rows = measure(given)
    result: dict[str, Any] = {
        "date": date, "name": path.stem, "commit": commit(), "machine": machine(),
        "versions": f"torch {torch.__version__}",
        "elements": given.elements, "rounds": given.rounds, "repetitions": given.repetitions, "load": load,
        "load_after": os.getloadavg()[0], "rows": rows,
    }  # fmt: skip
    result["missed"] = missed(result)
    path.write_text(json.dumps(result, indent=1) + "\n")
    target = path.with_suffix(".md")
    target.write_text(page(result))
    link(target, f"the update on the host, compared with torch's, DeepSpeed's and memory; {machine()}.")
    print(page(result))
    sys.exit(1 if result["missed"] else 0)


if __name__ == "__main__":
    main()
