"""The page of ``gpu.py``, and its pictures: ``python gpu_page.py DATE-gpu.jsonl`` makes them again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from page import lines_of, link, spans_lines, spans_lines_table

Row = dict[str, Any]

BILLION, TERA, GIB = 1e9, 1e12, 2**30
# Words in the names of kernels, by kind; the first that fits counts.
KINDS = {
    "compiled": ("triton",),
    "attention": ("sdpa", "flash", "fmha"),
    "products": ("nvjet", "gemm", "cutlass", "scaled_mm", "addmm", "aten::mm"),
    "update and norm": ("dam", "multi_tensor"),
}
KEEPING, PLANNED = "eager", "saved tensors: auto, 28 GB"  # steps that keep everything, and that a plan chooses for
BLOCKS = "20 blocks of Llama 3 8B, compiled"  # step that float8 is compared with
BARS, LANES = "-speed.png", "-trace.png"
# Of Okabe and Ito, which tell apart whatever colours one sees.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


def gib(size: float | None) -> str:
    """Return bytes in GiB."""
    return "-" if size is None else f"{size / GIB:.1f}"


def short(row: Row) -> str:
    """Return the status of a step and its message, in one line."""
    return (
        " ".join(f"{row['status']}: {row['message']}".replace("|", "/").split())
        if row.get("message")
        else row["status"]
    )


def trained(row: Row) -> bool:
    """Return whether a training step has a time that counts."""
    return row["status"] == "done" and "flops" in row


class Page:
    """Results of a run, by group."""

    def __init__(self, rows: dict[str, Row], steps: Sequence[tuple[str, str]]) -> None:
        self.rows, self.steps = rows, steps
        self.machine = rows.get("machine", {})
        self.rehearsal = any(row["job"]["gpus"] == 0 for row in rows.values())

    def of(self, group: str) -> list[Row]:
        """Return the results of a group, in the order of the table."""
        return [self.rows[name] for name, own in self.steps if own == group and name in self.rows]

    def _gain(self, name: str, base: str) -> float | None:
        one, other = self.rows.get(name, {"status": ""}), self.rows.get(base, {"status": ""})
        return one["flops"] / other["flops"] - 1 if trained(one) and trained(other) else None

    def _speed(self, begin: str, figure: str, unit: float = 1.0) -> float | None:
        """Return a figure of the step whose name begins so; tokens are per second."""
        row = next((row for row in self.of("published") if row["step"].startswith(begin) and trained(row)), None)
        if row is None:
            return None
        return float(row[figure] / (row["seconds_per_update"] if figure == "tokens" else 1.0) / unit)

    def aims(self) -> str:
        """Return a table of the aims, and whether they are met."""
        speeds = [row["flops"] / TERA for row in self.of("8B") if trained(row)]
        large = [row["flops"] / TERA for row in self.of("largest") if trained(row) and row["parameters"] >= 20e9]
        most = [row["parameters"] / BILLION for row in self.of("largest") if trained(row)]
        found: list[tuple[str, float | None, float, str]] = [
            ("Llama 3 8B, states on the host, 8 K: TFLOP/s", max(speeds, default=None), 400, ".0f"),
            ("largest model: billions of parameters", max(most, default=None), 20, ".1f"),
            ("a model of 20 billion parameters or more: TFLOP/s", max(large, default=None), 450, ".0f"),
            ("compiled blocks beside eager ones", self._gain("compiled blocks", "eager"), 0.15, ".1%"),
            ("float8 beside 16 bits, compiled", self._gain("compiled blocks, float8", "compiled blocks"), 0.28, ".1%"),
            ("moves and recomputation by plan, beside all kept", self._gain(PLANNED, KEEPING), -0.05, ".1%"),
            ("Llama 3 8B, LoRA: tokens/s (one H100)", self._speed("Llama 3 8B, LoRA", "tokens"), 12473, ".0f"),
            ("Qwen2.5 7B, all on the host: TFLOP/s", self._speed("Qwen2.5 7B", "flops", TERA), 272, ".0f"),
            *(
                (
                    f"float8 {recipe}, filtered, beside 16 bits, compiled",
                    self._gain(f"{BLOCKS}, float8 {recipe}, filtered", BLOCKS),
                    least,
                    ".1%",
                )
                for recipe, least in (("tensorwise", 0.25), ("rowwise", 0.10))
            ),
        ]
        table = [["aim", "at least", "measured", "met"]]
        for name, least, aim, form in ((name, value, aim, form) for name, value, aim, form in found):
            got = "-" if least is None else format(least, form)
            table.append([name, format(aim, form), got, "not measured" if least is None else yes(least >= aim)])
        return lines_of(table)

    def steps_table(self) -> str:
        """Return a line for each step: its status and time."""
        table = [["step", "result", "seconds"]]
        for name, _ in self.steps:
            row = self.rows.get(name)
            seconds = f"{row['seconds']:.0f}" if row and "seconds" in row else "-"
            table.append([name, short(row) if row else "not run yet", seconds])
        return lines_of(table)

    def numerics(self) -> str:
        """Return the largest difference from plain torch by stage and dtype, a table for each step."""
        parts = []
        for row in self.of("numerics"):
            if "rows" not in row:
                continue
            dtypes = {one["dtype"]: one["tolerance"] for one in row["rows"]}
            table = [["stage", *(f"{name} (at most {most:g})" for name, most in dtypes.items())]]
            for stage in sorted({one["stage"] for one in row["rows"]}):
                cells = [one["difference"] for one in row["rows"] if one["stage"] == stage]
                table.append([str(stage), *(f"{cell:.1e}" for cell in cells)])
            parts.append(f"**{row['step']}**\n\n{lines_of(table)}")
        return "\n\n".join(parts)

    def layouts(self) -> str:
        """Return a line for each layout: is it equal to one plain process, and how near are the bounds?"""
        rows = [one for row in self.of("layouts") for one in row.get("rows", ())]
        table = [["layout", "ranks", "equal", "largest share of a bound, float64", "bf16", "s"]]
        for one in rows:
            shares = [f"{one['shares'].get(name, float('nan')):.2g}" for name in ("float64", "bfloat16")]
            answer = "yes" if one["equal"] else f"**no**: {one['sentence']}"
            table.append([one["layout"], str(one["ranks"]), answer, *shares, f"{one['seconds']:.1f}"])
        return lines_of(table) if rows else ""

    def copies(self) -> str:
        """Return a line for each placement and dtype, and whether its bits are those of copies that are waited for."""
        parts = []
        for row in self.of("copies"):
            if not row.get("rows"):
                continue
            modes = list(row["rows"][0]["same"])
            table = [["states on the host", "dtype", *modes, "difference from the device (at most)"]]
            for one in row["rows"]:
                cells = [yes(one["same"][mode]) for mode in modes]
                apart = f"{one['difference']:.1e} ({one['tolerance']:g})"
                table.append([one["place"], one["dtype"], *cells, apart])
            parts.append(f"**{row['step']}**\n\n{lines_of(table)}")
        return "\n\n".join(parts)

    def masks(self) -> str:
        """Return a line for each mask: its time, and how near results are to torch's with a mask of all pairs."""
        parts = []
        for row in self.of("masks"):
            if not row.get("rows"):
                continue
            dtypes = {name: most for name, (_, most) in row["rows"][0]["differences"].items()}
            table = [["mask", "pairs over causal", "ms", "ms over causal", "torch's attention, ms", "preparation, ms",
                      *(f"{name} (at most {most:.2g})" for name, most in dtypes.items())]]  # fmt: skip
            causal = row["rows"][0]
            for one in row["rows"]:
                whole = "-" if one["whole"] is None else f"{1e3 * one['whole']:.3g}"
                table.append([one["mask"], f"{one['pairs'] / causal['pairs']:.2f}", f"{1e3 * one['seconds']:.3g}",
                              f"{one['seconds'] / causal['seconds']:.2f}", whole, f"{1e3 * one['prepared']:.2g}",
                              *(f"{one['differences'][name][0]:.1e}" for name in dtypes)])  # fmt: skip
            parts.append(f"**{row['step']}**\n\n{lines_of(table)}")
        return "\n\n".join(parts)

    def experts(self) -> str:
        """Return the time of a step and the peak on the device, by the share of experts and where these are."""
        parts = []
        for row in self.of("experts"):
            if not row.get("rows"):
                continue
            cases = {one["case"]: None for one in row["rows"]}
            found = {(one["share"], one["case"]): one for one in row["rows"]}
            table = [["touched", *(f"{case}: s (GiB device)" for case in cases)]]
            for share in {one["share"]: None for one in row["rows"]}:
                cells = [found.get((share, case)) for case in cases]
                table.append([f"{share:.0%}", *(
                    "-" if one is None else
                    f"{one['seconds']:.3g}, {one['least']:.3g} to {one['most']:.3g} ({gib(one['device_peak'])})"
                    for one in cells
                )])  # fmt: skip
            differences = ", ".join(f"{case} {value:.2g}" for case, value in row.get("differences", {}).items())
            parts.append(
                f"{row['parameters'] / BILLION:.3g} G parameters of experts in bf16, with AdamW; other experts in each "
                f"step. Weights differ from those on the device, over what was trained: {differences or '-'}.\n\n"
                f"{lines_of(table)}"
            )
        return "\n\n".join(parts)

    def trained(self, group: str, base: str = "") -> str:
        """Return a line for each training step of a group, after a step of another; "" if the group has none."""
        peak = self.machine.get("products")
        table = [["step", "parameters", "tokens per update", "s per update (foreseen)", "tokens/s", "TFLOP/s",
                  "share of products", "GiB device, peak (foreseen)", "GiB host, states (foreseen)",
                  "last loss"]]  # fmt: skip
        if not self.of(group):
            return ""
        for row in [self.rows[name] for name in (base,) if name in self.rows] + self.of(group):
            if "flops" not in row:
                table.append([row["step"], short(row), *["-"] * 8])
                continue
            seconds, planned = row["seconds_per_update"], row["planned"]
            ahead = f" ({planned['seconds']:.2f})" if "seconds" in planned else ""
            ratio = f", {row['ratio']:.0%} off the device" if row.get("ratio") else ""
            on_host = sum(tiers.get("host", 0) for tiers in row["states"].values())
            table.append([
                row["step"] + ("" if trained(row) else f" **({row['status']})**"),
                f"{row['parameters'] / BILLION:.3g} G ({row['layers']} blocks{ratio})",
                f"{row['tokens']:,}", f"{seconds:.3g}{ahead}", f"{row['tokens'] / seconds:.0f}",
                f"{row['flops'] / TERA:.4g}", f"{row['flops'] / peak:.0%}" if peak else "-",
                f"{gib(row['device_peak'])} ({gib(planned['device'])})", f"{gib(on_host)} ({gib(planned['host'])})",
                f"{row['losses'][-1]:.4f}",
            ])  # fmt: skip
        norms = [
            f"Clipping in *{row['step']}*: the engine's norm is {row['norm']['engine']:.7g}, that of all gradients in "
            f"float64 {row['norm']['expected']:.7g}; the limit is {row['norm']['clip']:g}."
            for row in self.of(group)
            if "norm" in row
        ]
        notes = [f"*{row['step']}*: {row['note']}" for row in self.of(group) if "note" in row]
        return "\n\n".join([lines_of(table), *norms, *notes])

    def kinds(self) -> str:
        """Return the time of kernels by kind, in one more update of each step that was profiled."""
        table = [["step", *KINDS, "others"]]
        for row in self.rows.values():
            if row.get("kernels"):
                times = dict.fromkeys([*KINDS, "others"], 0.0)
                for name, seconds in row["kernels"].items():
                    kind = next((kind for kind, words in KINDS.items() if any(w in name for w in words)), "others")
                    times[kind] += seconds
                table.append([row["step"], *(f"{1000 * seconds:.0f}" for seconds in times.values())])
        return f"Milliseconds of kernels in one more update, by kind:\n\n{lines_of(table)}" if table[1:] else ""

    def spans(self) -> str:
        """Return where the time goes, in one more update of each step that was watched."""
        found = {row["step"]: spans_lines(row["spans"], None) for row in self.rows.values() if row.get("spans")}
        return f"Where the time goes, in one more update:\n\n{spans_lines_table(found)}" if found else ""

    def traces(self) -> str:
        """Return a line for each profiled update, and the kernels that take most of it."""
        rows = {place: one for row in self.of("trace") for place, one in row.get("rows", {}).items()}
        table = [["states", "s", "idle share", "s of copies", "copies beside kernels", "blocking calls"]]
        kernels = [["states", "kernel", "share of the update"]]
        for place, one in rows.items():
            blocking = ", ".join(sorted(set(one["blocking"]))) or "none"
            table.append([place, f"{one['seconds']:.3g}", f"{one['idle']:.1%}", f"{one['copied']:.3g}",
                          f"{one['beside kernels']:.0%}", blocking])  # fmt: skip
            kernels += [
                [place, f"`{name[:90]}`", f"{t / one['seconds']:.1%}"] for name, t in [*one["kernels"].items()][:6]
            ]
        spans = [["states", "span on the host", "begins, ms", "takes, ms"]]
        for place, one in rows.items():
            longest = sorted(one.get("host", []), key=lambda span: -span[2])[:8]
            spans += [[place, name, f"{1e3 * begin:.0f}", f"{1e3 * length:.0f}"] for name, begin, length in longest]
        return "\n\n".join([lines_of(found) for found in (table, kernels, spans) if found[1:]])

    def introduction(self, name: str) -> str:
        """Return the machine, what ran, and how to read the figures."""
        about, rows = self.machine, self.rows.values()
        host, cores = about.get("memory", {}), about.get("processor", {}).get("cores")
        whole, free = gib(host.get("total_bytes")), gib(host.get("available_bytes"))
        commits = sorted({row["commit"] for row in rows if "commit" in row})
        versions = [f"{what} {about[what]}" for what in ("python", "torch", "cuda", "nccl") if about.get(what)]
        minutes, native = sum(row.get("seconds", 0.0) for row in rows) / 60, about.get("instructions")
        kernels = f"the native kernels, {native}" if native else "**torch's kernels: native ones are missing**"
        products, file = about.get("products", 0.0) / TERA, f"{name}.jsonl"
        rates = ", ".join(f"{what} {rate / 1e9:.1f} GB/s" for what, rate in about.get("copies", {}).items())
        lines = [
            f"# One GPU, {name[:10]}",
            f"""Commit {", ".join(commits)}; {about.get("device")}, {", ".join(versions)}; {cores} cores,
{whole} GiB of host memory, {free} free. The host updates with
{kernels}. Made by `make gpu`, in {minutes:.0f} minutes; the figures are in [{file}]({file}).""",
            f"""- **TFLOP/s** are model FLOPs: 6 P + 6 L h s per token, with P parameters without the embedding,
  L blocks of width h, and s tokens per sample. With causal attention a token sees half of the others. What is computed
  again in the backward does not count.
- **Share of products**: of {products:.4g} TFLOP/s, the best of ten products of random bf16 matrices.
- **Copies**: {rates}.
- **s per update** is the mean of several updates after a warm-up, with a synchronisation before the first and after the
  last. All steps train in bf16 with fp32 masters, and clip to a norm of 1.
- **Foreseen**: by ZeroMesh's planner, from the configuration alone. It also chooses the number of blocks that fit.""",
        ]
        if self.rehearsal:
            lines.insert(1, "**A rehearsal on the CPU: its figures say nothing about GPUs.**")
        return "\n\n".join(lines)

    def text(self, name: str, pictures: Sequence[str], notes: str) -> str:
        """Return the whole page."""

        def picture(ending: str, what: str) -> str:
            return f"![{what}]({name}{ending})" if ending in pictures else ""

        sections: list[tuple[str, Callable[[], str]]] = [
            ("Aims", self.aims), ("Steps", self.steps_table), ("Numerics beside plain torch", self.numerics),
            ("Layouts beside one plain process", self.layouts), ("Copies beside computation", self.copies),
            ("Llama 3 8B", lambda: self.trained("8B")),
            ("The largest model by tier", lambda: self.trained("largest")),
            ("Llama 3 8B, long samples in tiles", lambda: self.trained("long")),
            ("What blocks save", lambda: self.trained("saved", KEEPING)),
            ("Attention under masks", self.masks), ("Experts at rest", self.experts),
            ("Compiled blocks and float8", lambda: f"{self.trained('faster')}\n\n{self.kinds()}".strip()),
            ("Runs whose speed others have published", lambda: self.trained("published")),
            ("Time by phase", self.spans),
            ("Traces", self.traces),
        ]  # fmt: skip
        parts = [self.introduction(name), picture(BARS, "Bars of TFLOP/s by step"), notes]
        for title, section in sections:
            if text := section():
                parts += [f"## {title}", text]
        parts.append(picture(LANES, "Busy share of kernels and copies over one update"))
        for row in self.rows.values():
            if row["status"] in ("failed", "wrong", "too late") and row.get("log"):
                log = row["log"].replace("```", "")
                parts.append(f"The end of the log of *{row['step']}*:\n\n```text\n{log}\n```")
        return "\n\n".join(part for part in parts if part) + "\n"


def yes(value: bool) -> str:
    """Return yes or no, the latter so that it is seen."""
    return "yes" if value else "**no**"


def draw(page: Page, folder: Path, name: str) -> list[str]:
    """Draw what there are figures for; return the endings of the pictures, none without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = []
    groups = ("8B", "largest", "faster", "published", "long", "saved")
    bars = [(row, COLOURS[groups.index(group)]) for group in groups for row in page.of(group) if trained(row)]
    if bars:
        figure = Figure(figsize=(9, 1 + 0.4 * len(bars)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for place, (row, colour) in enumerate(bars):
            axes.barh(place, row["flops"] / TERA, color=colour)
            axes.text(row["flops"] / TERA, place, f" {row['flops'] / TERA:.3g}", va="center", fontsize=8)
        axes.set_yticks(range(len(bars)), [row["step"] for row, _ in bars], fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel("TFLOP/s, model FLOPs")
        figure.savefig(folder / f"{name}{BARS}", dpi=110)
        drawn.append(BARS)
    rows = {place: one for row in page.of("trace") for place, one in row.get("rows", {}).items()}
    if rows:
        figure = Figure(figsize=(9, 1.7 * len(rows)), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (place, one) in zip(figure.subplots(len(rows), squeeze=False)[:, 0], rows.items(), strict=True):
            for number, shares in enumerate(one["lanes"].values()):
                times = [1e3 * one["seconds"] * place / len(shares) for place in range(len(shares))]
                tops = [number + 0.9 * share for share in shares]
                axes.fill_between(times, number, tops, step="post", color=COLOURS[number], linewidth=0)
            axes.set_yticks([number + 0.45 for number in range(len(one["lanes"]))], list(one["lanes"]), fontsize=8)
            axes.set_title(f"{place}: idle {one['idle']:.1%}", fontsize=9)
        axes.set_xlabel("milliseconds of an update")
        figure.savefig(folder / f"{name}{LANES}", dpi=110)
        drawn.append(LANES)
    return drawn


def write(path: Path, rows: dict[str, Row], steps: Sequence[tuple[str, str]]) -> Path:
    """Write the page and the pictures beside a file of results, and return the page's path.

    Args:
        path: of the results.
        rows: the results, by step.
        steps: names and groups, in order.
    """
    page, name, pictures, notes = Page(rows, steps), path.stem, [], ""
    try:
        pictures = draw(page, path.parent, name)
    except ImportError:
        notes = "There are no pictures: matplotlib is not installed."
    target = path.with_suffix(".md")
    target.write_text(page.text(name, pictures, notes))
    if not page.rehearsal:
        link(target, f"one GPU: numerics, offload, speed and the largest models; {page.machine.get('device')}.")
    return target


if __name__ == "__main__":
    from gpu import STEPS, Results

    print(write(Path(sys.argv[1]), Results(Path(sys.argv[1])).rows, [(step.name, step.group) for step in STEPS]))
