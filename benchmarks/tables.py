"""Large embedding tables: step time and bytes over the size of the table, beside DDP and torchrec.

    python benchmarks/tables.py --rows 1 10 30 100 --rounds 5

Two ranks, each with a batch of bags of uniformly drawn indices, so that the rows used are as many at every size, an
embedding of bags, a linear layer and AdaGrad. Variants take turns, each in processes of its own. A variant whose states
do not fit in this machine's memory, or whose steps take seconds, is left out. torchrec runs in an environment of its
own (``--torchrec PYTHON``) if there is one. The figures go to a JSON file, a page and a picture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RANKS, WIDTH, BATCH, HOT = 2, 16, 1024, 4
"""Numbers of a row; samples per rank and indices per sample."""
WARM, STEPS = 5, 20
COPIES = {"DDP, dense": 4, "DDP, sparse": 2}
"""Tables' worth of memory per rank: the weight, AdaGrad's sums, the gradient and DDP's bucket."""
MOST = {"DDP, dense": 10_000_000}
"""Rows beyond which a step takes seconds."""
OURS = {
    "ZeroMesh": {},
    "ZeroMesh, row-wise": {"optimizer": {"type": "rowwise_adagrad", "params": {"lr": 0.01}}},
    "ZeroMesh, host": {"device": "cpu"},
    "ZeroMesh, NVMe": {"device": "nvme", "cache_rows": 100_000},
}
"""Variants, and the section ``embedding_tables`` of their configuration."""
VARIANTS = (*OURS, "DDP, sparse", "DDP, dense", "torchrec")


class Model(nn.Module):
    """A table and a layer above it."""

    def __init__(self, rows: int, sparse: bool) -> None:
        super().__init__()
        # Pages of zeros take no memory until they are written.
        self.table = nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=sparse, _weight=torch.zeros(rows, WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, bags: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.head(self.table(bags)) - 1).square().mean()
        return loss


def batches(rows: int, rank: int) -> Callable[[], torch.Tensor]:
    """Return a function that draws the next batch: shape (BATCH, HOT)."""
    random = torch.Generator().manual_seed(rank)
    return lambda: torch.randint(0, rows, (BATCH, HOT), generator=random)


def ours(variant: str, rows: int) -> tuple[Callable[[torch.Tensor], None], Callable[[], float]]:
    """Return the step of a variant of ZeroMesh, and a function for the bytes sent so far."""
    import zeromesh

    section = dict(OURS[variant])
    if section.get("device") == "nvme":
        section["nvme_path"] = os.environ["TABLES_FOLDER"]
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "Adagrad", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
        "embedding_tables": section,
    }
    engine = zeromesh.initialize(model=Model(rows, sparse=True), config=config)[0]

    def step(bags: torch.Tensor) -> None:
        engine.backward(engine(bags))
        engine.step()

    return step, lambda: sum(entry["bytes"] for entry in engine.traffic_report().values())


def ddp(sparse: bool, rows: int) -> tuple[Callable[[torch.Tensor], None], Callable[[], float]]:
    """Return the step of torch's DDP, and a function for the bytes that its collectives send at least."""
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(Model(rows, sparse))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    sent = 0.0

    def step(bags: torch.Tensor) -> None:
        nonlocal sent
        optimizer.zero_grad()
        model(bags).backward()
        optimizer.step()
        # An all-reduce sends the buffer, and one of sparse tensors each rank's indices and rows.
        sent += bags.numel() * (8 + 4 * WIDTH) if sparse else 4 * rows * WIDTH

    return step, lambda: sent


def torchrec(rows: int) -> tuple[Callable[[torch.Tensor], None], Callable[[], float]]:
    """Return the step of torchrec, with AdaGrad fused into the backward; bytes are not counted."""
    # It spreads rows over GPUs only: on processors one rank has the whole table.
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingType

    dist.init_process_group("gloo")
    device = torch.device("cpu")
    config = EmbeddingBagConfig(name="table", embedding_dim=WIDTH, num_embeddings=rows, feature_names=["f"])

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, features: Any) -> torch.Tensor:
            loss: torch.Tensor = (self.head(self.bags(features).to_dict()["f"]) - 1).square().mean()
            return loss

    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.01}
    )
    constraints = {"table": ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value])}
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=RANKS, compute_device="cpu"), constraints=constraints
    )
    module = Both()
    plan = planner.collective_plan(module, [sharder], dist.GroupMember.WORLD)
    model = DistributedModelParallel(module, device=device, plan=plan, sharders=[sharder])
    optimizer = torch.optim.Adagrad([p for name, p in model.named_parameters() if "head" in name], lr=0.01)

    def step(bags: torch.Tensor) -> None:
        features = KeyedJaggedTensor(["f"], bags.flatten(), lengths=torch.full((BATCH,), HOT))
        optimizer.zero_grad()
        model(features).backward()
        optimizer.step()

    return step, lambda: float("nan")


def work(variant: str, rows: int) -> None:
    """Run one variant on this rank; the first one prints the figures."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    draw = batches(rows, rank)
    if variant in OURS:
        step, sent = ours(variant, rows)
    else:
        step, sent = torchrec(rows) if variant == "torchrec" else ddp(variant == "DDP, sparse", rows)
    for _ in range(WARM):
        step(draw())
    before, seconds = sent(), []
    for _ in range(STEPS):
        bags = draw()
        dist.barrier()
        began = time.perf_counter()
        step(bags)
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        print(json.dumps({"ms": 1e3 * median(seconds), "mb": (sent() - before) / STEPS / 1e6}))
    dist.destroy_process_group()


def run(variant: str, rows: int, python: str) -> dict[str, float] | None:
    """Return the figures of one run; None if it did not end well."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TABLES_FOLDER": folder, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [python, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--master-port=0"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", __file__, "--work", variant]
        done = subprocess.run([*command, "--rows", str(rows)], capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"ms"')]
    if not lines:
        print(f"{variant}, {rows:,} rows: {(done.stderr.strip().splitlines() or ['no output'])[-1]}", file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(lines[0])
    return found


def fits(variant: str, rows: int) -> bool:
    """Return whether the variant's tables fit in three quarters of this machine's memory, and its time in minutes."""
    if rows > MOST.get(variant, rows):
        return False
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return COPIES.get(variant, 0) * RANKS * rows * WIDTH * 4 < 0.75 * total


def page(figures: list[dict[str, Any]], name: str, rounds: int) -> str:
    """Return the page of the figures."""
    sizes = sorted({one["rows"] for one in figures})
    lines = [
        f"# Embedding tables, {name[:10]}",
        "",
        f"Made by `make bench-tables`; torch {torch.__version__}, {RANKS} ranks (one thread each) on {os.cpu_count()} "
        "cores. ZeroMesh sends through memory, the others over gloo. "
        f"The model has one table with rows of {WIDTH} fp32 numbers. Each rank looks up {BATCH} bags of {HOT} "
        "uniformly random indices per step, and AdaGrad updates the rows. Variants take turns "
        f"for {rounds} rounds of {STEPS} steps. The table has the median of the rounds, and the least and the most. "
        "*MB per step* is what a rank sends; for DDP, the least that its collectives can send.",
        "",
        f"![Step time over the size of the table]({name}.png)",
        "",
        "| ms per step (least - most) | " + " | ".join(f"{size / 1e6:g} M rows" for size in sizes) + " | MB per step |",
        "|---|" + "---|" * (len(sizes) + 1),
    ]
    for variant in VARIANTS:
        mine = {one["rows"]: one for one in figures if one["variant"] == variant}
        if not mine:
            continue
        cells = [
            f"{median(mine[size]['ms']):.1f} ({min(mine[size]['ms']):.1f} - {max(mine[size]['ms']):.1f})"
            if size in mine
            else "-"
            for size in sizes
        ]
        sent = [mine[size]["mb"] for size in sorted(mine)]
        moved = "not counted" if sent[0] != sent[0] else f"{sent[0]:.3g}"
        moved += f" to {sent[-1]:.4g}" if sent[-1] > 1.05 * sent[0] else ""
        lines.append(f"| {variant} | " + " | ".join(cells) + f" | {moved} |")
    return "\n".join(lines) + "\n"


def draw(figures: list[dict[str, Any]], file: Path) -> None:
    """Draw step time over the size of the table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for variant in VARIANTS:
        mine = sorted((one["rows"], one["ms"]) for one in figures if one["variant"] == variant)
        if mine:
            style = "--" if variant not in OURS else "-"
            axes.plot([rows for rows, _ in mine], [min(ms) for _, ms in mine], style, marker="o", label=variant)
    axes.set(xscale="log", yscale="log", xlabel="rows of the table", ylabel="ms per step, least of the rounds")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def main() -> None:
    """Parse the arguments and run all variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, nargs="+", default=[1, 10, 30, 100], help="millions of rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--torchrec", default="", help="Python of an environment with torchrec")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.work:
        work(chosen.work, int(chosen.rows[0]))
        return
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for number in range(chosen.rounds):
        for millions in chosen.rows:
            rows = int(millions * 1e6)
            for variant in chosen.variants:
                python = chosen.torchrec if variant == "torchrec" else sys.executable
                result = run(variant, rows, python) if python and fits(variant, rows) else None
                if result is not None:
                    entry = found.setdefault((variant, rows), {"variant": variant, "rows": rows, "ms": [], "mb": 0.0})
                    entry["ms"].append(result["ms"])
                    entry["mb"] = result["mb"]
                    print(f"round {number + 1}, {variant}, {rows:,} rows: {result['ms']:.1f} ms, {result['mb']:.3g} MB")
    name = f"{date.today():%Y-%m-%d}-tables"
    chosen.out.mkdir(parents=True, exist_ok=True)
    figures = list(found.values())
    (chosen.out / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    draw(figures, chosen.out / f"{name}.png")
    (chosen.out / f"{name}.md").write_text(page(figures, name, chosen.rounds), encoding="utf-8")


if __name__ == "__main__":
    main()
