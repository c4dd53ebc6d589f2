"""Run examples with ZeroMesh and in plain torch, and write their tables and pictures: ``make bench-examples``.

    python benchmarks/compare_examples.py vision bert --seeds 0 1

For each example and seed, its variants run in turn. ``figures.json`` beside
the example keeps the figures; the README between its two comments, and the picture, are made from it. ``--page`` makes
all pages from these files. ``--times 60`` measures the time of a step again, in runs of 60 steps: qualities do not
depend on how busy a machine is, and times do.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import runpy
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

from harness import free_port  # noqa: E402
from heap import Heap  # noqa: E402
from with_torchvision import allow_torchvision  # noqa: E402

EXAMPLES = ROOT / "examples"
PAGES = (EXAMPLES / "README.md", ROOT / "docs" / "examples.md")
BEGIN, END = "<!-- figures: benchmarks/compare_examples.py -->\n", "<!-- end of figures -->\n"
WARM = 0.2  # share of a run's first steps whose time does not count

OURS, DDP, ONE = "ZeroMesh, 2 ranks", "DDP, 2 ranks", "plain torch, 1 process"
Case = tuple[str, tuple[str, ...]]  # what is run, and its options
BASIC: tuple[Case, ...] = (("", ()),)
BASE = ROOT / "runs" / "examples-base"  # the model that is fine-tuned: that of the example gpt
CASES: dict[str, tuple[Case, ...]] = {
    "vision": (("resnet18", ()), ("resnet18, --sync", ("--sync",))),
    "dpo": (("", ("--base", str(BASE))),),
    "lora": tuple((method, ("--base", str(BASE), "--method", method)) for method in ("full", "lora")),
}
VARIANTS: dict[str, tuple[int, tuple[str, ...]]] = {OURS: (2, ()), DDP: (2, ("--plain",)), ONE: (1, ("--plain",))}
"""Name -> ranks, and options."""
OFFLOAD: dict[str, tuple[int, tuple[str, ...]]] = {
    "ZeroMesh": (1, ("--offload", "none")), "ZeroMesh, states on the host": (1, ("--offload", "cpu")),
    "ZeroMesh, states in files": (1, ("--offload", "nvme")), ONE: (1, ("--plain",)),
}  # fmt: skip


def run_rank(script: str, options: list[str]) -> None:
    """Run an example as one rank, in this process; print its result and the most memory that it used as JSON."""
    sys.argv = [script, *options]
    module = runpy.run_path(script)  # imports what it needs; its memory is not counted
    clock = time.perf_counter
    if os.environ.get("PROCESSOR_TIME"):
        time.perf_counter = time.process_time  # as the example calls it
    heap = Heap()
    before = heap.live()
    with heap.watch(0.01) as peak:
        result = module["train"](module["parse"](options))
    time.perf_counter = clock
    print("\n" + json.dumps(result | {"memory": peak.bytes - before}), flush=True)


def run(script: Path, ranks: int, options: tuple[str, ...], processor: bool = False) -> list[dict[str, Any]]:
    """Return what each rank printed; raise CalledProcessError if one failed.

    ``processor``: seconds are those of the processor, without waits for other ranks and other programs.
    """
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": str(free_port())}
    common |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    common |= {"PROCESSOR_TIME": "1"} if processor else {}
    command = [sys.executable, str(Path(__file__)), "--rank", str(script), *options]
    started = [
        subprocess.Popen(command, env=os.environ | common | {"RANK": str(n), "LOCAL_RANK": str(n)},
                         stdout=subprocess.PIPE, text=True)
        for n in range(ranks)
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in started]
    for process in started:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def attempt(script: Path, ranks: int, options: tuple[str, ...], processor: bool) -> list[dict[str, Any]]:
    """Run as `run` does; if a run of plain torch fails, try again up to four times.

    DistributedDataParallel of torch 2.13 with sparse gradients over gloo spoils the heap in about one run in three if
    another Python thread wakes up besides, as the one that reads the heap does.
    """
    for last in (False, False, False, False, True):
        try:
            return run(script, ranks, options, processor)
        except subprocess.CalledProcessError as error:
            if last or "--plain" not in options:
                raise
            print(f"again: {error}", file=sys.stderr, flush=True)
    raise AssertionError


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one run: those of rank 0, and the most memory of any rank."""
    own = results[0]
    steps = own["seconds"][int(len(own["seconds"]) * WARM) :]
    named = {name: value for name, value in own.items() if isinstance(value, float)}
    losses = [sum(rank["loss"][n] for rank in results) / len(results) for n in range(len(own["loss"]))]
    memory = max(rank["memory"] for rank in results)
    return {"quality": named, "step": median(steps), "memory": memory, "loss": [round(loss, 5) for loss in losses]}


def machine() -> str:
    """Describe the processor, and the version of torch."""
    import torch

    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores of {name}, gloo, torch {torch.__version__.partition('+')[0]}"


def measure(name: str, seeds: list[int], processor: bool) -> None:
    """Run all variants of an example with some seeds, and write the figures; those of other seeds stay."""
    script, file = EXAMPLES / name / "train.py", EXAMPLES / name / "figures.json"
    if name in ("dpo", "lora") and not BASE.exists():
        run(EXAMPLES / "gpt" / "train.py", 2, ("--output", str(BASE)))
    found = [row for row in json.loads(file.read_text())["rows"] if row["seed"] not in seeds] if file.exists() else []
    for seed in seeds:
        for case, options in CASES.get(name, BASIC):
            for variant, (ranks, more) in (OFFLOAD if name == "lora" else VARIANTS).items():
                row = summary(attempt(script, ranks, (*options, *more, "--seed", str(seed)), processor))
                row = {"case": case, "variant": variant, "seed": seed} | row
                print(name, case, variant, seed, row["quality"], f"{1000 * row['step']:.0f} ms", flush=True)
                found.append(row)
                figures = {"date": datetime.date.today().isoformat(), "machine": machine(), "processor": processor}
                file.write_text(json.dumps(figures | {"rows": found}, separators=(",", ":")) + "\n")


def measure_times(name: str, seeds: list[int], steps: int) -> None:
    """Replace the times of an example's figures by those of short runs that take turns."""
    file = EXAMPLES / name / "figures.json"
    figures = json.loads(file.read_text())
    for seed in seeds:
        for row in (row for row in figures["rows"] if row["seed"] == seed):
            ranks, more = (OFFLOAD if name == "lora" else VARIANTS)[row["variant"]]
            options = (*dict(CASES.get(name, BASIC))[row["case"]], *more, "--seed", str(seed), "--steps", str(steps))
            row["step"] = summary(attempt(EXAMPLES / name / "train.py", ranks, options, False))["step"]
            print(name, row["case"], row["variant"], seed, f"{1000 * row['step']:.0f} ms", flush=True)
    figures |= {"date": datetime.date.today().isoformat(), "machine": machine(), "processor": False, "turns": steps}
    file.write_text(json.dumps(figures, separators=(",", ":")) + "\n")


def spread(values: list[float], digits: int) -> str:
    """Return the median, and the least and the largest value where they are written differently."""
    text, least, largest = (f"{value:,.{digits}f}" for value in (median(values), min(values), max(values)))
    return text if least == largest else f"{text} ({least} to {largest})"


def groups(figures: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the rows of figures by case and variant."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in figures["rows"]:
        found.setdefault((row["case"], row["variant"]), []).append(row)
    return found


def table(figures: dict[str, Any]) -> str:
    """Return the table of an example, and the line that says where it was measured."""
    rows = groups(figures)
    cases, names = any(case for case, _ in rows), list(figures["rows"][0]["quality"])
    clock = "processor ms per step" if figures["processor"] else "ms per step"
    heads = [*(["run"] if cases else []), "", *names, clock, "MB per rank"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for (case, variant), found in rows.items():
        cells = [*([case] if cases else []), variant]
        cells += [spread([row["quality"][name] for row in found], 2) for name in names]
        cells += [spread([1000 * row["step"] for row in found], 0), spread([row["memory"] / 1e6 for row in found], 0)]
        lines.append("| " + " | ".join(cells) + " |")
    seeds = len({row["seed"] for row in figures["rows"]})
    runs = "one run each" if seeds == 1 else f"{seeds} seeds, median (least to largest)"
    what = ", in processor time of a rank, without waits: other programs ran besides" if figures["processor"] else ""
    if "turns" in figures:
        what = f" of runs of {figures['turns']} steps that took turns"
    note = (
        f"Measured on {figures['date']}: {figures['machine']}; {runs}. Time is the median step{what}; memory is the "
        "most that a rank allocated at a time, with the data and without the libraries. Each process has one thread."
    )
    return "\n".join(lines) + f"\n\n{note}\n"


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draw the loss by step of each variant, of the first case and seed."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "zeromesh"  # the same file from the same figures
    first = figures["rows"][0]
    figure, axes = pyplot.subplots(figsize=(5, 2.8), layout="constrained")
    styles = {OURS: {"linewidth": 2.5, "alpha": 0.6}, DDP: {"linestyle": "--"}, ONE: {"linestyle": ":"}}
    for row in figures["rows"]:
        if row["case"] == first["case"] and row["seed"] == 0:
            axes.plot(row["loss"], label=row["variant"], **styles.get(row["variant"], {}))
    axes.set(xlabel="step", ylabel="training loss", title=first["case"] or path.parent.name)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def overview(link: str) -> str:
    """Return the table of all examples; ``link`` leads from the page to their folders."""
    lines = ["| example | figure | ZeroMesh | DDP | one process |", "|---|---|---|---|---|"]
    for path in sorted(EXAMPLES.glob("*/figures.json")):
        rows = groups(json.loads(path.read_text()))
        case = next(iter(rows))[0]
        shown = {variant: found for (one, variant), found in rows.items() if one == case}
        ours = next(variant for variant in shown if variant.startswith("ZeroMesh"))
        figure = [name for name in shown[ours][0]["quality"] if "MB" not in name][-1]
        title = (path.parent / "README.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        cells = [
            spread([row["quality"][figure] for row in shown[variant]], 2) if variant in shown else "not measured"
            for variant in (ours, DDP, ONE)
        ]
        named = f"{figure} ({case})" if case else figure
        lines.append(f"| [{title}]({link}{path.parent.name}/README.md) | {named} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def put(page: Path, text: str) -> None:
    """Replace what a page has between the comments."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}{text}{END}{after}", encoding="utf-8")


def main() -> None:
    """Measure the named examples, or make the pages from the figures that there are."""
    if sys.argv[1:2] == ["--rank"]:
        if "vision" in sys.argv[2]:
            allow_torchvision()
        return run_rank(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="folders of examples; none: all with a train.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a run of each variant for each")
    parser.add_argument("--processor-time", action="store_true", help="of a rank, where other programs run besides")
    parser.add_argument("--times", type=int, metavar="STEPS", help="measure the time of a step only, in short runs")
    parser.add_argument("--page", action="store_true", help="measure nothing; make pages and pictures again")
    options = parser.parse_args()
    for name in options.names or sorted(path.parent.name for path in EXAMPLES.glob("*/train.py")):
        if options.times:
            measure_times(name, options.seeds, options.times)
        elif not options.page:
            measure(name, options.seeds, options.processor_time)
        if not (EXAMPLES / name / "figures.json").exists():
            continue
        figures = json.loads((EXAMPLES / name / "figures.json").read_text())
        put(EXAMPLES / name / "README.md", table(figures))
        draw(figures, EXAMPLES / name / "loss.svg")
    put(PAGES[0], overview(""))
    put(PAGES[1], overview("../examples/"))


if __name__ == "__main__":
    main()
