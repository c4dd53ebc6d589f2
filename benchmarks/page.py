"""From the figures of ``bench.py`` to a page with tables and a picture: ``python benchmarks/page.py FIGURES.json``."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from picture import draw

CaseResult = dict[str, Any]
"""Of one case: settings, number of parameters, and a row per variant; see ``bench.Bench.case``."""

TITLES = {
    "mpi": "Step time with MPI",
    "pipeline": "Step time of pipelines",
    "tensor": "Step time of tensor parallelism",
    "offload": "Step time with offload",
}
"""Title of a page by the part of its name after the date."""

LIST = "<!-- the newest page comes first -->\n"
"""After this line of the README beside it, a page is linked."""

OFF_DEVICE = ("host", "all on host", "nvme", "CPU offload")
"""Suffixes of the names of rows that keep some of their states on the host."""

SPANS = {
    "fetch": "parameters: start all-gathers",
    "wait_fetch": "parameters: wait for all-gathers",
    "evict": "parameters: free slots",
    "accumulate": "gradients: copy into slots",
    "reduce": "gradients: fill missing ones with zeros, start reductions",
    "wait_reduce": "gradients: wait for reductions",
    "offload": "gradients: copy to the host",
    "norm": "gradient norm",
    "agree": "exchange norm and losses",
    "take_changes": "look for changed parameters",
    "clip": "clip",
    "update": "update",
    "update_on_host": "update on the host",
    "publish": "write and send new parameters",
}
"""Names of the engine's spans in the table; others are shown by their own name."""

MODEL = "{}: model and hooks"
REST, BETWEEN, ALL = "step: the rest", "between the calls, with a barrier", "**all**"
BEYOND = "forward and backward above the floor: Python, shared cores"


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and largest."""
    return statistics.median(values), min(values), max(values)


def seconds(row: dict[str, Any]) -> tuple[float, float, float]:
    """Over the rounds: their median steps."""
    return spread([statistics.median(figures["times"]) for figures in row["rounds"]])


def measured(case: CaseResult) -> dict[str, tuple[float, float, float]]:
    """Seconds per step of every variant that did not fail."""
    return {name: seconds(row) for name, row in case["rows"].items() if row["error"] is None}


def reference(case: CaseResult) -> list[float] | None:
    """The losses that all others are compared with: those of the first variant that learns and did not fail."""
    name = next((name for name in measured(case) if name != "floor"), None)
    return None if name is None else case["rows"][name]["rounds"][0]["losses"]


def difference(case: CaseResult, name: str) -> float | None:
    """The largest relative difference of a loss, of any step and round; None for what does not learn or failed."""
    expected, row = reference(case), case["rows"][name]
    if expected is None or name == "floor" or row["error"] is not None:
        return None
    pairs = [pair for figures in row["rounds"] for pair in zip(figures["losses"], expected, strict=True)]
    found = [abs(loss - other) / abs(other) for loss, other in pairs]
    return max(found) if all(map(math.isfinite, found)) else math.nan


def differing(case: CaseResult, name: str) -> bool:
    """Whether the losses of a variant are not those of the others; so are losses that are not numbers."""
    found = difference(case, name)
    return found is not None and not found <= case["settings"]["tolerance"]


def lines_of(table: Sequence[Sequence[str]]) -> str:
    """Markdown; the first line is the head."""
    lines = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def told(value: float | None, form: str) -> str:
    """A number, or that there is none."""
    return "-" if value is None else format(value, form)


def floor_of(case: CaseResult) -> float | None:
    """Seconds per step of the floor, if it was measured."""
    return measured(case)["floor"][0] if "floor" in measured(case) else None


def case_table(case: CaseResult) -> str:
    """A line per variant."""
    head = [
        "variant", "s/step (least - most)", "ratio to floor", "CPU s/step", "MB sent per step", "peak MB",
        "first step after s", "last loss", "losses differ by",
    ]  # fmt: skip
    table, floor = [head], floor_of(case)
    for name, row in case["rows"].items():
        if row["error"] is not None:
            table.append([name, "failed, see below", *["-"] * (len(head) - 2)])
            continue

        def middle(value: Callable[[dict[str, Any]], float | None], row: dict[str, Any] = row) -> float | None:
            values = [found for figures in row["rounds"] if (found := value(figures)) is not None]
            return statistics.median(values) if values else None

        step, least, most = seconds(row)
        wire, differs = middle(lambda figures: figures["wire"]), difference(case, name)
        table.append([
            name, f"{step:.3f} ({least:.3f} - {most:.3f})", told(None if floor is None else step / floor, ".2f"),
            told(middle(lambda figures: figures["cpu"]), ".3f"), told(None if wire is None else wire / 1e6, ".1f"),
            told(None if row["peak"] is None else row["peak"] / 1e6, ".0f"),
            told(middle(lambda figures: figures["first"]), ".1f"), told(middle(lambda f: f["losses"][-1]), ".4f"),
            told(differs, ".1e") + (" **(too much)**" if differing(case, name) else ""),
        ])  # fmt: skip
    return lines_of(table)


def ratios(result: dict[str, Any]) -> str:
    """A line per variant and a column per case: times the floor."""
    cases = {name: case for name, case in result["cases"].items() if floor_of(case)}
    table = [["step time / floor", *cases]]
    for name in dict.fromkeys(name for case in cases.values() for name in case["rows"] if name != "floor"):
        found = [(measured(case).get(name), floor_of(case)) for case in cases.values()]
        table.append([name, *(f"{times[0] / floor:.2f}" if times and floor else "-" for times, floor in found)])
    return lines_of(table) if cases else ""


def offload_table(case: CaseResult) -> str:
    """What it costs that states rest on the host: times the same row without, round by round; empty without rows."""
    table = [["step time / step time without offload", "median (least - most) of the rounds"]]
    for name in measured(case):
        base, _, where = name.rpartition(", ")
        if where in OFF_DEVICE and base in measured(case):
            pairs = zip(*(case["rows"][row]["rounds"] for row in (name, base)), strict=True)
            found = [statistics.median(ours["times"]) / statistics.median(other["times"]) for ours, other in pairs]
            table.append([name, "{:.3f} ({:.3f} - {:.3f})".format(*spread(found))])
    return lines_of(table) if table[1:] else ""


def spans_table(case: CaseResult) -> str:
    """Milliseconds per update of each row of ZeroMesh; empty if none was profiled."""
    found = {name: row["spans"] for name, row in case["rows"].items() if row["spans"] is not None}
    if not found:
        return ""
    return spans_lines_table({name: spans_lines(spans, floor_of(case)) for name, spans in found.items()})


def spans_lines_table(columns: dict[str, dict[str, float]]) -> str:
    """Milliseconds by what they are for, a column each; of what ``spans_lines`` gives."""
    names = sorted({line for lines in columns.values() for line in lines}, key=_place)
    table = [["ms per update", *columns]]
    for line in names:
        table.append([line, *(f"{1e3 * lines[line]:.1f}" if line in lines else "-" for lines in columns.values())])
    return lines_of(table)


def spans_lines(spans: dict[str, Any], floor: float | None) -> dict[str, float]:
    """Seconds per update by what they are for; they add up to ``ALL``."""
    inside = spans["inside"]
    own = {name: spans["phases"][name] - sum(inside.get(name, {}).values()) for name in ("forward", "backward", "step")}
    lines = {MODEL.format(name): own[name] for name in ("forward", "backward")}
    lines |= {REST: own["step"], BETWEEN: spans["phases"]["data"] + spans["phases"]["other"]}
    for kind in {kind for kinds in inside.values() for kind in kinds}:
        lines[SPANS.get(kind, kind)] = sum(kinds.get(kind, 0.0) for kinds in inside.values())
    lines[ALL] = spans["total"]
    if floor is not None:
        lines[BEYOND] = own["forward"] + own["backward"] - floor
    return lines


def _place(line: str) -> tuple[int, str]:
    """Where a line of the table stands: in the order of an update, those that are not known in the middle."""
    first = [MODEL.format("forward"), MODEL.format("backward"), *SPANS.values()]
    last = [REST, BETWEEN, ALL, BEYOND]
    if line in last:
        return len(first) + 1 + last.index(line), line
    return first.index(line) if line in first else len(first), line


def heading(name: str, case: CaseResult) -> str:
    """What was trained, in one paragraph."""
    s = case["settings"]
    clip = f"clipped to a norm of {s['clip']:g}" if s["clip"] else "no clipping"
    return (
        f"## {name}\n\n"
        f"{case['parameters'] / 1e6:.1f} M parameters ({s['layers']} blocks of width {s['hidden']}, "
        f"vocabulary of {s['vocabulary']}), {s['batch']} x {s['sequence']} tokens per rank and step, "
        f"{'bf16' if s['bf16'] else 'fp32'}, {clip}; {s['steps']} steps per round after {s['warmup']} warm-up steps. "
        f"Losses of variants must agree within {s['tolerance']:g}."
    )


def introduction(result: dict[str, Any]) -> str:
    """What was compared, on what, and how to read it."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    first = next(iter(result["first_use"].items()), None)
    compiled = f" The first compilation, here with {first[0]}, took {first[1]:.0f} s." if first else ""
    replaced = """
- **This processor has no bf16 instructions.** In all variants, matrix products and attention of bf16 tensors are
  computed in fp32 and rounded, and take as long as in fp32 (`benchmarks/products.py`)."""
    rows = {name for case in result["cases"].values() for name in case["rows"]}
    tensor = """
- **Tensor parallelism**: each rank gets the samples of all ranks and a part of each layer. Losses, floor and
  operations per rank are therefore the same as in the other rows. torch's variant is `parallelize_module` with column
  and row styles, a split embedding and `loss_parallel`, under autocast over fp32 parameters. Megatron-Core is not
  compared, because it is not installed here."""
    pipeline = """
- **Pipelines**: each rank gets the samples of all ranks, in micro-batches of one sample, and a stage of the model.
  Losses, floor and the operations of all ranks together are therefore the same as in the other rows. All variants are
  cut by ZeroMesh's estimate of operations: also torch's `PipelineStage` (autocast over fp32 parameters; its zb-h1 is
  `ScheduleInterleavedZeroBubble` with one stage per rank) and DeepSpeed's `PipelineModule` (1f1b). Their stages have
  whole blocks, so one takes longer than the other; ZeroMesh's may begin inside of a block."""
    offload = """
- **Offload**: *host* keeps accumulated gradients, master weights and optimizer states on the host, and *all on host*
  also the parameters. DeepSpeed's *CPU offload* is its `offload_optimizer`. Without a GPU, device and host are the same
  memory: copies between them are made nevertheless, and **peak MB** counts both."""
    title = TITLES.get(result["name"][len("2000-01-01-") :], "Step time")
    return f"""# {title}, {result["date"]}

Commit {result["commit"]}; {result["machine"]}; {result["ranks"]} rank(s) with {result["threads"]} thread(s) each,
{result["backend"]}; {versions}.
Made by `make bench`; the figures are in [{result["name"]}.json]({result["name"]}.json).

All variants train the same Llama-style decoder with AdamW, from the same weights and on the same batch. They take turns
for {result["rounds"]} round(s), each in new processes. The figure of a round is its median step. The tables have the
median of the rounds, and the least and the most. *floor* is the forward and backward of all ranks without communication
and update.

- **Losses** are means over the ranks. *losses differ by* is the largest relative difference of any step from the first
  variant that trains.
- **bf16**: DDP runs autocast over fp32 parameters, as is usual, and sends fp32 gradients. The other variants compute
  with bf16 parameters, send bf16 gradients and keep fp32 master weights. All start from weights that bf16 represents
  exactly, because DeepSpeed makes its master weights after rounding. DeepSpeed 0 in bf16 also makes a first Adam step
  with zero gradients.
- **Clipping** is off in all variants, or on at norm 1 if a case says so. (DeepSpeed's default is 1.)
- **DeepSpeed** uses buckets of 4 M elements; with its defaults it reserves about 2 GB for any model. It compiles
  operators before the measurement.{compiled} *first step after* does not include this.
- **MB sent** is the mean over the ranks of the bytes that TCP sockets sent, as counted by the kernel, and of those that
  ZeroMesh's ranks of one host exchanged through memory.
- **Peak MB** is the memory that rank 0 allocated after the start of the model's construction, measured in another run;
  on a CPU in blocks of at least 64 KiB.{tensor if any("tensor parallel" in name for name in rows) else ""}{
        pipeline if any("pipeline" in name for name in rows) else ""
    }{offload if any(name.rpartition(", ")[2] in OFF_DEVICE for name in rows) else ""}{
        replaced if result.get("replaced") else ""
    }
"""


def page(result: dict[str, Any], picture: bool) -> str:
    """The whole page, as Markdown."""
    parts = [introduction(result).rstrip()]
    if picture:
        parts.append(f"![Bars of seconds per step, of each variant in each case]({result['name']}.png)")
    parts.append(ratios(result))
    for name, case in result["cases"].items():
        parts += [heading(name, case), case_table(case), offload_table(case)]
        if profile := spans_table(case):
            parts += ["Time by phase, from a separate run:", profile]
        for variant, row in case["rows"].items():
            if row["error"] is not None:
                parts.append(f"{variant} failed:\n\n```text\n{row['error'].replace('```', '')}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


def write(path: Path) -> Path:
    """Write the page and the picture beside the JSON file, link the page where there is a list, and say where it is."""
    result = {**json.loads(path.read_text()), "name": path.stem}
    target = path.with_suffix(".md")
    drawn = draw(
        {name: list(case["rows"]) for name, case in result["cases"].items()},
        {name: measured(case) for name, case in result["cases"].items()},
        path.with_suffix(".png"),
    )
    target.write_text(page(result, drawn))
    link(target, f"{', '.join(result['cases'])}; {result['machine']}.")
    return target


def link(target: Path, what: str) -> None:
    """Put a page into the list of the README beside it, where there is one and the page is not there yet."""
    readme = target.with_name("README.md")
    if readme.exists() and f"({target.name})" not in (text := readme.read_text()):
        readme.write_text(text.replace(LIST, f"{LIST}- [{target.name}]({target.name}): {what}\n", 1))


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
