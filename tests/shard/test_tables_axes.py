"""Tables on meshes whose ranks share a batch, a sequence or a model train as in one process."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeromesh
from harness import RankFailure, run_ranks
from zeromesh import zero
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.train_settings import ModelShape

STEPS, SAMPLES, PARTS = 5, 4, 4  # samples of a micro-batch, micro-batches of an update, on all ranks together
WORDS, BAGS, WIDTH, LENGTH = 37, 23, 8, 8


@dataclass(frozen=True)
class Case:
    """One training run."""

    mesh: dict[str, int] = field(default_factory=dict)
    stage: int = 2
    kind: str = "recommender"
    rule: str = "adam"
    schedule: str = "1f1b"
    extra: dict[str, Any] = field(default_factory=dict)


class Block(nn.Module):
    """An MLP that looks up rows of its own, in every second block."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.rows = nn.Embedding(WORDS, WIDTH, sparse=True) if looks else None

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        own = 0 if self.rows is None else self.rows(ids[:, 0])
        return x + self.down(self.up(self.norm(x)).relu()) + own


class Recommender(nn.Module):
    """Tables before, in and after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True, padding_idx=3)
        self.bags = nn.EmbeddingBag(BAGS, WIDTH, sparse=True, mode="sum", max_norm=1.5)
        self.blocks = nn.ModuleList(Block(number % 2 == 1) for number in range(4))
        self.last = nn.Embedding(BAGS, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor, bags: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.words(ids).mean(1) + self.bags(bags)
        for block in self.blocks:
            x = block(x, ids)
        return F.mse_loss(self.head(x + self.last(bags[:, 0])).squeeze(1), y)


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind in ("recommender", "twice"):
        return (Recommender() if kind == "recommender" else Twice()).double()
    shape = ModelShape(
        architecture="llama", vocab_size=WORDS, hidden_size=16, layers=4, heads=4, sequence_length=LENGTH
    )
    model = Decoder(shape).double()
    model.embedding.sparse = True
    return model


def batches(kind: str, step: int, rank: int, size: int) -> Iterator[Any]:
    """Yield a share of the micro-batches of an update."""
    random = torch.Generator().manual_seed(step)
    for _ in range(PARTS):
        ids = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=random)
        bags = torch.randint(0, BAGS, (SAMPLES, 2), generator=random)
        y = torch.randn(SAMPLES, generator=random, dtype=torch.float64)
        if kind == "recommender":
            yield tuple(one.chunk(size)[rank] for one in (ids, bags, y))
        else:
            own = ids.chunk(size)[rank]
            yield (own,) if kind == "twice" else {"tokens": own, "labels": ids.roll(-1, 1).chunk(size)[rank]}


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch) if isinstance(batch, dict) else model(*batch)


RULES = {
    "adam": (torch.optim.Adam, torch.optim.SparseAdam, {"lr": 0.02, "eps": 1e-6}),
    "adagrad": (torch.optim.Adagrad, torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-6}),
}
STATES = {"adam": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum",)}


def tables_of(model: nn.Module) -> dict[str, Any]:
    kinds = nn.Embedding | nn.EmbeddingBag
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds) and module.sparse}


def plain(kind: str, rule: str, clip: float) -> dict[str, Any]:
    """Train in one process of torch."""
    model = make(kind)
    weights = {f"{name}.weight": module.weight for name, module in tables_of(model).items()}
    rest = [p for name, p in model.named_parameters() if name not in weights]
    dense, sparse, options = RULES[rule]
    optimizers = [dense(rest, **options), sparse([*weights.values()], **options)]
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for batch in batches(kind, step, 0, 1):
            loss = loss_of(model, batch) / PARTS
            loss.backward()
            total += float(loss.detach())
        values = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in model.parameters()]
        norm = float(torch.cat([value.flatten() for value in values]).norm())
        for p in model.parameters():
            p.grad = p.grad * min(1.0, clip / (norm + 1e-6))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total)
        norms.append(norm)
    states = {
        f"{name}/{key}": optimizers[1].state[weight][key] for name, weight in weights.items() for key in STATES[rule]
    }
    return {"losses": losses, "norms": norms, "state": dict(model.state_dict()), "states": states}


CLIP = 0.2


def engine_of(case: Case) -> zeromesh.Engine:
    options = dict(RULES[case.rule][2]) | ({"weight_decay": 0.0} if case.rule == "adam" else {})
    shares = case.mesh.get("data", 1) * case.mesh.get("replicate", 1)
    config = {
        "train_batch_size": SAMPLES * PARTS,
        "train_micro_batch_size_per_gpu": SAMPLES // shares,
        "gradient_clipping": CLIP,
        "optimizer": {"type": case.rule, "params": options},
        "zero_optimization": {"stage": case.stage},
        "mesh": case.mesh,
        "pipeline": {"schedule": case.schedule} if case.mesh.get("pipeline") else {},
        **case.extra,
    }
    return zeromesh.initialize(model=make(case.kind), config=config)[0]


def advance(engine: zeromesh.Engine, case: Case, steps: range) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in steps:
        losses.append(float(engine.train_batch(batches(case.kind, step, engine.data_rank, engine.data_size))))
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def states_of(engine: zeromesh.Engine, case: Case) -> dict[str, torch.Tensor]:
    """Return the optimizer states of the tables that are on this rank's stages."""
    return {
        f"{table.name}.weight/{key}": zero.safe_get_full_optimizer_state(table.module.weight, key)
        for table in engine.sharded.tables
        for key in STATES[case.rule]
    }


def train(cases: Sequence[Case]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        engine = engine_of(case)
        losses, norms = advance(engine, case, range(STEPS))
        here = [table.name for table in engine.sharded.tables]
        found.append(
            {
                "losses": losses,
                "norms": norms,
                "state": engine.gathered_state_dict(),
                "states": states_of(engine, case),
                "here": here,
                "rows": {table.name: table.rows_here for table in engine.sharded.tables},
            }
        )
        engine.destroy()
    return found


def close(found: Any, expected: Any, case: Case, what: str) -> None:
    found, expected = (torch.as_tensor(one, dtype=torch.float64) for one in (found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10, msg=lambda text: f"{case}, {what}: {text}")


def compare(ranks: int, cases: Sequence[Case]) -> list[list[dict[str, Any]]]:
    """Train the cases on so many ranks, and compare each rank's results with those of plain torch."""
    runs = run_ranks(train, ranks, cases, timeout=600)
    references: dict[tuple[str, str], dict[str, Any]] = {}
    for number, case in enumerate(cases):
        if (case.kind, case.rule) not in references:
            references[case.kind, case.rule] = plain(case.kind, case.rule, CLIP)
        expected = references[case.kind, case.rule]
        seen: set[str] = set()
        for run in runs:
            found = run[number]
            close(found["losses"], expected["losses"], case, "losses")
            close(found["norms"], expected["norms"], case, "norms")
            for name, value in found["states"].items():
                close(value, expected["states"][name], case, name)
            seen |= {*found["here"]}
            for name, value in found["state"].items():
                close(value, expected["state"][name], case, name)
        assert found["state"].keys() == expected["state"].keys() or not found["state"]
        assert seen == {*tables_of(make(case.kind))}, case
    return runs


TWO = [
    Case({"tensor": 2}, 1),
    Case({"pipeline": 2}, 3, schedule="interleaved-1f1b"),
    Case({"context": 2}, 2, "decoder"),
]


@pytest.mark.full
def test_tables_train_as_in_one_process_on_two_ranks_of_each_axis() -> None:
    runs = compare(2, TWO)
    assert all(run[2]["rows"]["embedding"] < WORDS for run in runs)  # rows are spread over a sequence's ranks
    assert {*runs[0][1]["here"]} != {*runs[1][1]["here"]}


SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
FOUR = [
    *(Case({"tensor": 2, "data": 2}, stage) for stage in range(4)),
    *(Case({"context": 2, "data": 2}, stage, "decoder") for stage in range(4)),
    *(Case({"pipeline": 2, "data": 2}, stage, schedule=SCHEDULES[stage + 1]) for stage in range(4)),
    *(Case({"pipeline": 4}, 1, schedule=schedule, rule="adagrad") for schedule in ("gpipe", "1f1b", "zb-h1")),
    Case({"pipeline": 2, "data": 2}, 2, schedule="gpipe", extra={"activation_checkpointing": {"enabled": True}}),
    Case({"pipeline": 2, "data": 2}, 3, extra={"pipeline": {"schedule": "interleaved-1f1b", "recompute": True}}),
    Case({"pipeline": 2, "tensor": 2}, 2, "decoder"),
    Case({"pipeline": 2, "tensor": 2}, 0, rule="adagrad", schedule="zb-h1"),
    Case({"pipeline": 2, "context": 2}, 3, "decoder", schedule="zb-v"),
    Case({"tensor": 2, "context": 2}, 1, "decoder"),
    Case({"replicate": 2, "tensor": 2}, 3, rule="adagrad"),
    Case({"replicate": 2, "context": 2}, 2, "decoder"),
    Case({"replicate": 2, "pipeline": 2}, 1),
    Case({"tensor": 2, "data": 2}, 2, "decoder", extra={"tensor_parallel": {"sequence": True}}),
    Case({"tensor": 4}, 0, extra={"embedding_tables": {"device": "cpu"}}),
]


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
def test_tables_train_as_in_one_process_on_four_ranks_of_all_axes(part: int) -> None:
    compare(4, FOUR[part::4])


@pytest.mark.full
@pytest.mark.parametrize("stage", range(4))
def test_every_stage_and_schedule_trains_as_in_one_process_on_two_ranks(stage: int) -> None:
    cases = [Case({"tensor": 2}, stage), Case({"context": 2}, stage, "decoder", rule="adagrad")]
    compare(2, [*cases, *(Case({"pipeline": 2}, stage, schedule=schedule) for schedule in SCHEDULES)])


@pytest.mark.full
def test_tables_train_as_in_one_process_on_eight_ranks() -> None:
    meshes = [{"data": 2, "pipeline": 2, "context": 2}, {"data": 2, "tensor": 2, "context": 2}]
    compare(8, [Case(mesh, 3, "decoder") for mesh in meshes])


# Checkpoints.


def save(case: Case, folder: str) -> None:
    engine = engine_of(case)
    advance(engine, case, range(2))
    engine.save_checkpoint(folder)
    engine.destroy()


def go_on(case: Case, folder: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    engine = engine_of(case)
    advance(engine, case, range(20, 21))  # states that must not stay
    engine.load_checkpoint(folder)
    losses, _ = advance(engine, case, range(2, STEPS))
    found = losses, engine.gathered_state_dict(), states_of(engine, case)
    engine.destroy()
    return found


ROWWISE_RULE = {"embedding_tables": {"optimizer": {"type": "rowwise_adagrad", "params": {"lr": 0.05}}}}
MESHES: list[tuple[int, dict[str, int]]] = [
    (2, {"tensor": 2}),
    (2, {"pipeline": 2}),
    (2, {"context": 2}),
    (2, {"data": 2}),
    (4, {"pipeline": 2, "data": 2}),
    (4, {"tensor": 2, "context": 2}),
    (1, {}),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(b, a, marks=() if (b, a) == (1, 0) else pytest.mark.full)
        for b in range(len(MESHES))
        for a in range(len(MESHES))
        if b != a
    ],
)
def test_a_checkpoint_of_tables_goes_on_on_another_mesh(before: int, after: int, tmp_path: Any) -> None:
    (ranks, mesh), (others, other) = MESHES[before], MESHES[after]
    schedule = "interleaved-1f1b"
    run_ranks(save, ranks, Case(mesh, 2, "decoder", schedule=schedule), str(tmp_path))
    then = Case(other, 3, "decoder", schedule=schedule)
    expected = plain("decoder", "adam", CLIP)
    for losses, state, states in run_ranks(go_on, others, then, str(tmp_path)):
        close(losses, expected["losses"][2:], then, "losses")
        for name, value in state.items():
            close(value, expected["state"][name], then, name)
        for name, value in states.items():
            close(value, expected["states"][name], then, name)


def go_on_by_row(mesh: dict[str, int], folder: str, loads: bool) -> dict[str, torch.Tensor]:
    case = Case(mesh, 2, extra=ROWWISE_RULE)
    engine = engine_of(case)
    if loads:
        engine.load_checkpoint(folder)
        advance(engine, case, range(2, 4))
    else:
        advance(engine, case, range(2))
        engine.save_checkpoint(folder)
        advance(engine, case, range(2, 4))
    found = engine.gathered_state_dict()
    engine.destroy()
    return found


def test_states_of_one_number_per_row_go_on_on_another_mesh(tmp_path: Any) -> None:
    expected = run_ranks(go_on_by_row, 2, {"tensor": 2}, str(tmp_path), False)[0]
    for name, value in run_ranks(go_on_by_row, 2, {"pipeline": 2}, str(tmp_path), True)[0].items():
        close(value, expected[name], Case(), name)


# Tables that stay dense.


class Twice(nn.Module):
    """The first and the last stage of a pipeline look up rows of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        return (x * self.table(input_ids)).square().mean()


def test_two_stages_of_a_rank_look_up_rows_of_one_table() -> None:
    case = Case({"pipeline": 2}, 2, "twice", schedule="zb-v")  # the first rank has the first and the last stage
    runs = compare(2, [case])
    assert [run[0]["here"] for run in runs] == [["table"], []]


def dense(mesh: dict[str, int], plan: dict[str, str], modules: Any) -> tuple[int, list[str]]:
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler = Keep()
    logging.getLogger("zeromesh").addHandler(handler)
    try:
        torch.manual_seed(0)
        config = {
            "train_batch_size": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "mesh": mesh,
            "tensor_parallel": {"plan": plan},
            "embedding_tables": {"modules": modules},
        }
        model = Twice().double() if mesh.get("pipeline") else nn.Sequential(Twice().table, nn.Linear(WIDTH, 1)).double()
        engine = zeromesh.initialize(model=model, config=config)[0]
        engine.destroy()
        return len(engine.sharded.tables), [text for text in records if "dense here" in text]
    finally:
        logging.getLogger("zeromesh").removeHandler(handler)


def test_a_table_that_several_stages_or_a_plan_need_whole_stays_dense_with_a_warning() -> None:
    (count, said), _ = run_ranks(dense, 2, {"pipeline": 2}, {}, None)
    assert count == 0
    assert "because several stages of the pipeline use it" in said[0]
    (count, said), _ = run_ranks(dense, 2, {"tensor": 2}, {"0": "embedding_rowwise"}, None)
    assert count == 0
    assert "because the tensor-parallel plan splits it" in said[0]
    with pytest.raises(RankFailure, match="names table, whose rows cannot be spread: several stages of the pipeline"):
        run_ranks(dense, 2, {"pipeline": 2}, {}, ["table"])
