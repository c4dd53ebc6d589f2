"""Every variant in every case, beside each other: ``make bench``, or on a machine that has what it needs

    python benchmarks/bench.py --cases communication-bf16 --rounds 3

All variants of a case take turns, round by round, each in fresh processes, and each round begins with another one, so
that a machine whose speed drifts is the same to all. After the rounds each runs once more while its memory is watched,
and the rows of ZeroMesh once more with their spans: nothing watches the rounds. A variant that fails says so in its
row. The figures go to one JSON file, and from there to a page and a picture; see ``page.py``.

The exit status is 1 if a row of ZeroMesh failed, or its losses are not those of DDP.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from cases import CASES, DEFAULT, make_model
from page import differing, write
from ranks import RunFailed, run, variables
from variants import VARIANTS
from zeromesh.comm.environment import default_backend

ROOT = Path(__file__).resolve().parents[1]
COMPILING = 3600.0
"""Seconds that DeepSpeed's operators may take to be compiled."""

Row = dict[str, Any]
"""Of one variant in one case: what its rounds measured, its memory, its spans, and why it failed."""


def machine() -> str:
    """The device of this machine, or its processor and how many cores there are."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    model = platform.processor() or platform.machine()
    details = Path("/proc/cpuinfo")
    if details.is_file():
        names = [line.partition(":")[2].strip() for line in details.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores"


def commit() -> str:
    """The commit that is measured, with a word on changes that are not in it."""
    git = ["git", "-C", str(ROOT)]
    try:
        name = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return "unknown"
    return (name or "unknown") + (", with changes" if changed else "")


class Bench:
    """Runs variants, says how far it has come, and collects.

    Attributes:
        result: what goes to the JSON file.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._began = time.monotonic()
        self._done = 0
        self._broken: dict[str, str] = {}
        watched = [1 + (VARIANTS[name].family == "ZeroMesh") for name in arguments.variants]
        self._all = len(arguments.cases) * (arguments.rounds * len(watched) + sum(watched))
        self.result: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine(), "ranks": arguments.ranks,
            "threads": int(variables(arguments.ranks, 0, 0)["OMP_NUM_THREADS"]), "rounds": arguments.rounds,
            "backend": arguments.backend or default_backend(), "versions": {}, "first_use": {}, "cases": {},
        }  # fmt: skip

    def _run(self, name: str, case: str, watch: str, steps: int, limit: float = 0.0) -> Any:
        arguments, family = self._arguments, VARIANTS[name].family
        home = arguments.deepspeed
        python = home / "bin" / "python" if family == "DeepSpeed" else Path(sys.executable)
        # What it compiles is found there by the next run, and goes when the environment goes; ninja is there, too.
        more = {"TORCH_EXTENSIONS_DIR": str(home / "torch_extensions"), "PATH": f"{python.parent}:{os.environ['PATH']}"}
        job = {"variant": name, "case": case, "watch": watch, "steps": steps}
        job["backend"] = VARIANTS[name].backend or arguments.backend
        try:
            figures = run(
                python, arguments.ranks, job, more if family == "DeepSpeed" else {}, max(limit, arguments.limit)
            )
        except RunFailed as error:
            raise RunFailed(str(error).replace(f"{ROOT}{os.sep}", "")) from None
        for package, number in figures.pop("versions").items():
            if self.result["versions"].setdefault(package, number) != number:
                self.result["versions"][f"{package} with {family}"] = number
        self.result["device"] = figures.pop("device")
        self.result["replaced"] = self.result.get("replaced", False) | figures.pop("replaced")
        return figures

    def prepare(self) -> None:
        """Let DeepSpeed compile its operators, and find out which of its stages run at all."""
        extensions = self._arguments.deepspeed / "torch_extensions"
        compiled = any(extensions.rglob("*.so"))
        for lock in extensions.rglob("lock"):
            lock.unlink()  # left by a run that was ended as it compiled; the next one would wait for it without end
        for name in self._arguments.variants:
            if VARIANTS[name].family != "DeepSpeed":
                continue
            print(f"{name}: a first step, for which operators are compiled", flush=True)
            try:
                seconds = self._run(name, "tiny-bf16", "time", 1, COMPILING)["first"]
            except RunFailed as error:
                self._broken[name] = str(error)
                print(f"{name} does not run: {_what(str(error))}", flush=True)
            else:
                if not compiled:
                    self.result["first_use"][name] = seconds
                print(f"{name}: after {seconds:.0f} s", flush=True)

    def case(self, case: str) -> None:
        """All that is measured in one case."""
        parameters = sum(parameter.numel() for parameter in make_model(CASES[case]).parameters())
        steps = self._arguments.steps or CASES[case].steps
        rows: dict[str, Row] = {
            name: {"rounds": [], "peak": None, "spans": None, "error": self._broken.get(name)}
            for name in self._arguments.variants
        }
        settings = {**asdict(CASES[case]), "steps": steps, "tolerance": CASES[case].tolerance}
        self.result["cases"][case] = {"settings": settings, "parameters": parameters, "rows": rows}
        for label, name, watch in self._turns():
            self._done += 1
            row, started = rows[name], time.monotonic()
            if row["error"] is not None:
                continue
            try:
                figures = self._run(name, case, watch, steps if watch != "memory" else min(steps, 3))
            except RunFailed as error:
                row["error"] = str(error)
                told = f"failed: {_what(str(error))}"
            else:
                told = f"{median(figures['times']):.3f} s per step, last loss {figures['losses'][-1]:.4f}"
                if watch == "time":
                    row["rounds"].append(figures)
                elif watch == "memory":
                    row["peak"] = figures["peak"]
                    told = f"{figures['peak'] / 1e6:.0f} MB at the peak"
                else:
                    row["spans"] = figures["spans"]
            minutes, seconds = (time.monotonic() - self._began) / 60, time.monotonic() - started
            print(
                f"[{self._done}/{self._all}, {minutes:.0f} min] {case}, {label}: {name}: {told} ({seconds:.0f} s)",
                flush=True,
            )

    def _turns(self) -> Iterator[tuple[str, str, str]]:
        """Label, variant and what is watched, in the order in which they run."""
        names, rounds = self._arguments.variants, self._arguments.rounds
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                yield f"round {number + 1} of {rounds}", name, "time"
        for name in names:
            yield "memory", name, "memory"
        for name in names:
            if VARIANTS[name].family == "ZeroMesh":
                yield "spans", name, "spans"


def _what(error: str) -> str:
    """The line that says what went wrong: the last one that names an exception, if there is one."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in error.splitlines()]
    return next((line for line in reversed(lines) if re.match(r"\w[\w.]*(Error|Exception)\b", line)), lines[-1])


def free_name(folder: Path, name: str) -> Path:
    """Where the JSON file goes: so named, and with a number if there is one already."""
    path, number = folder / f"{name}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}.json"
    return path


def positive(text: str) -> int:
    """A number of the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def main() -> None:
    """Read the command line, measure, and write the results after each case, so that an interruption keeps them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", default=DEFAULT, choices=list(CASES), metavar="CASE", help=", ".join(CASES)
    )
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--steps", type=positive, help="per round; by default what the case says")
    parser.add_argument(
        "--ranks", type=positive, default=torch.cuda.device_count() or 2, help="processes of this machine"
    )
    parser.add_argument("--backend", choices=["gloo", "nccl", "mpi"], help="gloo for several ranks on one GPU")
    parser.add_argument("--limit", type=float, default=1200, help="seconds that one run may take")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder for page and figures")
    parser.add_argument("--name", help="of page and figures, after the date")
    parser.add_argument(
        "--deepspeed", type=Path, default=ROOT / ".venv-deepspeed", help="the environment that has DeepSpeed"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the ranks are ended, too
    arguments.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments)
    path = free_name(arguments.out, "-".join(filter(None, (bench.result["date"], arguments.name))))
    bench.prepare()
    for case in arguments.cases:
        bench.case(case)
        path.write_text(json.dumps(bench.result, indent=1) + "\n")
    print(f"the figures are in {path}, the page in {write(path)}")
    bad = [
        f"{name} in {case}: {_what(row['error'] or 'its losses differ from those of the others')}"
        for case, found in bench.result["cases"].items()
        for name, row in found["rows"].items()
        if VARIANTS[name].family == "ZeroMesh" and (row["error"] is not None or differing(found, name))
    ]
    sys.exit("\n".join(bad) or 0)


if __name__ == "__main__":
    main()
