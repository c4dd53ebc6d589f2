"""Embeddings with sparse gradients train as in one process, and what moves follows the rows that a batch uses."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeromesh
from harness import on_ranks, run_ranks
from run import configuration, optimizer_of, plain_step, sgd, start_engine, train_step
from zeromesh import zero

STEPS, PER_RANK = 10, 4
ROWS, WORDS = 23, 37

TORCH: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    "adam": (torch.optim.Adam, torch.optim.SparseAdam, {"lr": 0.05, "betas": (0.8, 0.99), "eps": 1e-6}),
}
"""By the name in the configuration: the optimizers of the other parameters and of tables in torch, and arguments."""


class RowwiseAdagrad(torch.optim.Optimizer):
    """One sum per row, of the mean square of its gradient; rows without a gradient stay."""

    def __init__(self, params: Any, lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                total = self.state[p].setdefault("sum", torch.zeros(p.shape[0], 1, dtype=p.dtype))
                gradient = p.grad.coalesce().to_dense()
                total += gradient.square().mean(1, keepdim=True)
                p -= group["lr"] * gradient / (total.sqrt() + group["eps"])


@dataclass(frozen=True)
class Case:
    """One training run."""

    ranks: int = 2
    kind: str = "adam"  # of the update
    stage: int = 2
    accumulation: int = 1
    clip: float = 0.0
    device: str = "none"
    mesh: tuple[int, int] | None = None  # replicate, data
    user: bool = False  # whether the user calls loss.backward()
    base: str = "sgd"  # the run's optimizer where tables have an update of their own


class Model(nn.Module):
    """Tables of every kind; the second rank has no indices for one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6, sparse=True, padding_idx=3)
        self.short = nn.Embedding(5, 3, sparse=True, max_norm=0.7)
        self.sums = nn.EmbeddingBag(ROWS, 5, sparse=True, mode="sum", include_last_offset=True)
        self.means = nn.EmbeddingBag(ROWS, 4, sparse=True, mode="mean", padding_idx=2, max_norm=1.0, norm_type=1.0)
        self.idle = nn.EmbeddingBag(3, 2, sparse=True, mode="sum")
        self.net = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, batch: "Batch") -> torch.Tensor:
        parts = [
            self.words(batch.words).mean(1),
            self.words(batch.words[:, :1]).squeeze(1)[:, :2],  # twice in one forward
            self.short(batch.short),
            self.sums(batch.bags, batch.offsets, per_sample_weights=batch.weights),
            self.means(batch.pairs),
        ]
        self.idle(batch.bags[:0], batch.offsets[:1])
        return F.mse_loss(self.net(torch.cat(parts, 1)).squeeze(1), batch.y)


@dataclass(frozen=True)
class Batch:
    """Indices of a few samples."""

    words: torch.Tensor
    short: torch.Tensor
    bags: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor
    pairs: torch.Tensor
    y: torch.Tensor


def batch_of(step: int, share: int | None, shares: int) -> Batch:
    """Return a share of a global batch, or all. Bags of every third sample, and of the second share, are empty."""
    random = torch.Generator().manual_seed(step)
    count = PER_RANK * shares
    words = torch.randint(0, WORDS, (count, 3), generator=random)
    short = torch.randint(0, 5, (count,), generator=random)
    bags = torch.randint(0, ROWS, (count, 2), generator=random)
    pairs = torch.randint(0, ROWS, (count, 2), generator=random)
    weights = torch.rand(count, 2, generator=random, dtype=torch.float64)
    y = torch.randn(count, generator=random, dtype=torch.float64)
    mine = range(count) if share is None else range(share * PER_RANK, (share + 1) * PER_RANK)
    full = [sample for sample in mine if sample % 3 and sample // PER_RANK != 1]
    lengths = torch.tensor([2 * (sample in full) for sample in mine])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    at = torch.tensor([*mine])
    filled = torch.tensor(full, dtype=torch.int64)
    return Batch(words[at], short[at], bags[filled].flatten(), offsets, weights[filled].flatten(), pairs[at], y[at])


def make() -> Model:
    torch.manual_seed(0)
    return Model().double()


def plain(case: Case) -> dict[str, torch.Tensor]:
    """Train in one process of torch."""
    model = make()
    tables = [m.weight for m in model.children() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    if case.kind == "rowwise_adagrad":
        dense, _, options = TORCH[case.base]
        optimizers = [dense(model.net.parameters(), **options), RowwiseAdagrad(tables, 0.3, 1e-9)]
    else:
        dense, sparse, options = TORCH[case.kind]
        optimizers = [dense(model.net.parameters(), **options), sparse(tables, **options)]
    for step in range(STEPS):
        for part in range(case.accumulation):
            (model(batch_of(step * case.accumulation + part, None, case.ranks)) / case.accumulation).backward()
        if case.clip:
            clip(list(model.parameters()), case.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def clip(parameters: Sequence[torch.Tensor], limit: float) -> None:
    """Clip as torch's function, which takes no sparse gradients."""
    norm = norm_of(parameters)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad * min(1.0, limit / (float(norm) + 1e-6))


def norm_of(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]
    values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    return torch.cat([value.flatten() for value in values]).norm()


def config_of(case: Case, folder: str) -> dict[str, Any]:
    kind = case.base if case.kind == "rowwise_adagrad" else case.kind
    options = dict(TORCH[kind][2]) | ({"weight_decay": 0.0} if kind == "adam" else {})
    tables: dict[str, Any] = {"device": case.device, "cache_rows": 3}
    if case.device == "nvme":
        tables["nvme_path"] = folder
    if case.kind == "rowwise_adagrad":
        tables["optimizer"] = {"type": case.kind, "params": {"lr": 0.3, "eps": 1e-9}}
    found: dict[str, Any] = configuration(
        micro=PER_RANK,
        accumulation=case.accumulation,
        clipping=case.clip,
        optimizer={"type": kind, "params": options},
        stage=case.stage,
        embedding_tables=tables,
    )
    if case.mesh is not None:
        found["mesh"] = {"replicate": case.mesh[0], "data": case.mesh[1]}
    return found


def engine_of(case: Case, folder: str) -> zeromesh.Engine:
    return zeromesh.initialize(model=make(), config=config_of(case, folder))[0]


def advance(engine: zeromesh.Engine, case: Case, steps: range) -> None:
    for step in steps:
        for part in range(case.accumulation):
            loss = engine(batch_of(step * case.accumulation + part, engine.data_rank, case.ranks))
            if case.user:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()


def train(cases: Sequence[Case], folder: str) -> list[dict[str, torch.Tensor]]:
    found = []
    for number, case in enumerate(cases):
        engine = engine_of(case, f"{folder}/{number}")
        advance(engine, case, range(STEPS))
        found.append(engine.gathered_state_dict())
        engine.destroy()
    return found


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], case: object) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-11, atol=1e-12, msg=partial("{}, {}: {}".format, case, name)
        )


USUAL = [
    Case(),
    Case(kind="adagrad", stage=0, accumulation=2, clip=0.05, device="cpu"),
    Case(kind="rowwise_adagrad", stage=3, device="nvme", user=True),
    Case(kind="rowwise_adagrad", base="adagrad", stage=1),
    Case(kind="sgd", stage=1, clip=0.05, user=True, accumulation=2),
]


def test_tables_train_as_in_one_process(tmp_path: Path) -> None:
    runs = run_ranks(train, 2, USUAL, str(tmp_path))[0]
    for case, found in zip(USUAL, runs, strict=True):
        check(found, plain(case), case)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("kind", [*TORCH, "rowwise_adagrad"])
def test_every_update_and_stage_trains_as_in_one_process(ranks: int, device: str, kind: str, tmp_path: Path) -> None:
    cases = [Case(ranks, kind, stage, device=device) for stage in range(4)]
    cases.append(Case(ranks, kind, 2, accumulation=3, clip=0.05, device=device, user=True))
    if ranks == 4:
        cases += [Case(ranks, kind, stage, 2, 0.05, device, (2, 2)) for stage in (0, 3)]
    references: dict[Case, dict[str, torch.Tensor]] = {}
    for case, found in zip(cases, run_ranks(train, ranks, cases, str(tmp_path))[0], strict=True):
        same = replace(case, stage=0, device="none", mesh=None, user=False)
        if same not in references:
            references[same] = plain(same)
        check(found, references[same], case)


def moved(rows: int, stage: int) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(rows, 8, sparse=True), nn.Linear(8, 1))
    engine = start_engine(model, optimizer=optimizer_of("Adagrad", lr=0.1), stage=stage)
    engine.traffic_report(reset=True)
    for _ in range(2):
        train_step(engine, engine(torch.arange(10).view(5, 2) * (rows // 10)).square().mean())
    found = engine.traffic_report()
    engine.destroy()
    return found


def test_bytes_follow_the_rows_used_and_not_the_table() -> None:
    for stage in (0, 3):
        small, large = (run_ranks(moved, 2, rows, stage)[0] for rows in (100, 100_000))
        assert small == large
        # Half of the ten rows are of the other rank: 2 steps x 5 rows x 8 numbers x 4 bytes, and as much for gradients.
        assert small["table_rows/data"]["bytes"] == small["table_gradients/data"]["bytes"] == 2 * 5 * 8 * 4


@pytest.mark.usefixtures("one_rank")
def test_a_users_optimizer_updates_tables_by_its_groups() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1)).double()
    table, rest = model[0].weight, [*model[1].parameters()]
    before = table.detach().clone()
    groups = [{"params": rest}, {"params": [table], "table_rule": "sgd", "lr": 0.5, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    engine = zeromesh.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config={})[0]
    expected = before.clone()
    for step in range(3):
        weight = next(p.detach().clone() for p in rest)
        train_step(engine, engine(torch.tensor([1, 1, 3])).sum())
        rate = 0.5 / (1 + step)
        expected[1] -= rate * 2 * weight[0]
        expected[3] -= rate * weight[0]
    torch.testing.assert_close(engine.state_dict()["0.weight"], expected, rtol=1e-12, atol=1e-14)
    engine.destroy()


class Sums(nn.Module):
    """Nothing but a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(3, 4, mode="sum", sparse=True, _weight=torch.arange(12.0).view(3, 4) / 8)

    def forward(self, bags: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return self.table(bags).float().sum() * factor


@on_ranks(4)
def test_16_bit_runs_keep_rows_in_fp32_and_skip_overflows() -> None:
    # Three rows on four ranks: one has none.
    for section in ({"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}):
        engine = start_engine(Sums(), section, optimizer=sgd(2.0**-12))
        expected = torch.arange(12.0).view(3, 4) / 8
        for bags in ([[0, 0, 2]], [[2, 2, 1]]):
            train_step(engine, engine(torch.tensor(bags) * (engine.mesh.rank > 0)))
            for row in bags[0]:  # rank 0 has the first row three times
                expected[row] -= 2.0**-12 * 3 / 4
            expected[0] -= 2.0**-12 * 3 / 4
        assert torch.equal(engine.state_dict()["table.weight"], expected)
        if "fp16" in section:
            train_step(engine, engine(torch.tensor([[1, 1, 1]]), factor=1e38))
            assert engine.skipped_steps == 1
            assert torch.equal(engine.state_dict()["table.weight"], expected)
        assert engine(torch.tensor([[0]])).dtype == torch.float32
        engine.destroy()


class Twice(nn.Module):
    """A block that is recomputed, with a lookup inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Looks() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(*ids.shape, 6, dtype=torch.float64)
        for block in self.blocks:
            h = block(h, ids)
        return h.square().mean()


class Looks(nn.Module):
    """A table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(11, 6, sparse=True), nn.Linear(6, 6)

    def forward(self, h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(h + self.table(ids)))


@on_ranks(2)
def test_recomputed_and_repeated_lookups_equal_one_process() -> None:
    for recomputed in (False, True):
        torch.manual_seed(0)
        model, plain_model = Twice().double(), Twice().double()
        plain_model.load_state_dict(model.state_dict())
        engine = start_engine(
            model, micro=3, optimizer=sgd(0.1), stage=3, activation_checkpointing={"enabled": recomputed}
        )
        optimizer = torch.optim.SGD(plain_model.parameters(), lr=0.1)
        for step in range(3):
            first, second = torch.randint(0, 11, (2, 6, 2), generator=torch.Generator().manual_seed(step))
            share = slice(3 * engine.mesh.rank, 3 * engine.mesh.rank + 3)
            with torch.no_grad():
                engine(first[share])  # an evaluation leaves nothing behind
            # Two forwards before one backward, as of contrastive losses.
            train_step(engine, engine(first[share]) + 2 * engine(second[share]))
            plain_step(optimizer, plain_model(first) + 2 * plain_model(second))
        check(engine.state_dict(), plain_model.state_dict(), recomputed)
        engine.destroy()


@on_ranks(2)
def test_tables_given_in_16_bits_have_fp32_rows() -> None:
    model = Sums().bfloat16()
    engine = start_engine(model, optimizer=sgd(2.0**-12), bf16=True)
    for _ in range(4):  # bf16 would round each step away
        train_step(engine, engine(torch.tensor([[2]])))
    expected = torch.arange(12.0).view(3, 4) / 8
    expected[2] -= 4 * 2.0**-12
    master = zero.safe_get_full_fp32_param(engine.module.table.weight)
    assert master is not None
    assert torch.equal(master, expected)
    assert engine.state_dict()["table.weight"].dtype == torch.bfloat16
    engine.destroy()
