"""Lookups of several tables share messages, and their outputs behave as ordinary tensors."""

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeromesh
from harness import on_ranks, run_ranks
from run import sgd, start_engine, train_step
from zeromesh.shard.tables.lookups import TableOutput

ROWS, PER_RANK, STEPS = 19, 4, 3
Program = Callable[["Towers", torch.Tensor], torch.Tensor]


class Towers(nn.Module):
    """Three tables, and a block that is a unit of its own."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(ROWS, 4, sparse=True), nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=True)
        self.c = nn.EmbeddingBag(ROWS, 4, mode="max")  # torch has no sparse gradients of it
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 1)
        self.program = program
        self.kept: list[Any] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.program(self, ids)


def add_in_place(model: Towers, ids: torch.Tensor) -> torch.Tensor:
    a, b = model.a(ids[:, 0]), model.b(ids)
    a += b
    b.mul_(2).tanh_()
    a[:, 1] = b[:, 0]
    return model.head(a * b).mean()


def change_views(model: Towers, ids: torch.Tensor) -> torch.Tensor:
    a, b = model.a(ids), model.b(ids)
    first, *rest = a.unbind(1)
    view = b.view(2, -1)
    view[0].add_(1)
    return model.head(first.contiguous() + sum(rest) + b.relu_()).sum() / len(ids)


def checkpointed(model: Towers, ids: torch.Tensor, reentrant: bool) -> torch.Tensor:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return model.block(x + model.b(ids)) * model.a(ids[:, 1])

    x = model.a(ids[:, 0])
    return model.head(checkpoint(inner, x, use_reentrant=reentrant)).mean()  # type: ignore[no-untyped-call]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * gradient


def through_functions(model: Towers, ids: torch.Tensor) -> torch.Tensor:
    a, b = model.a(ids[:, 0]), model.b(ids)
    squared: torch.Tensor = Double.apply(a)  # type: ignore[no-untyped-call]
    return model.head(squared + b.clone()).mean()


def penalised(model: Towers, ids: torch.Tensor) -> torch.Tensor:
    a, b = model.a(ids[:, 0]), model.b(ids)
    score = model.head(torch.tanh(a) * b).sum()
    (slope,) = torch.autograd.grad(score, [a], create_graph=True)
    return (score + slope.square().sum()) / len(ids)


def used_by_one_rank(model: Towers, ids: torch.Tensor) -> torch.Tensor:
    a, b = model.a(ids[:, 0]), model.b(ids)
    if int(ids[0, 2]) % 2:  # other ranks come to the block without having used an output
        str(a.mean().item())
    x = model.block(torch.ones(len(ids), 4))
    return model.head(x + a).mean() + 0.0 * b.sum()


def ignored(model: Towers, ids: torch.Tensor) -> torch.Tensor:
    a, _ = model.a(ids[:, 0]), model.b(ids)
    x = a if int(ids[0, 2]) % 2 else torch.zeros(len(ids), 4)
    return model.head(x).mean() + model.block(torch.ones(1, 4)).sum()


def twice(model: Towers, ids: torch.Tensor) -> torch.Tensor:
    parts = [
        model.a(ids[:, 0]),
        model.a(ids[:, 1]),
        model.c(ids),
        model.b(ids),
        model.c(ids[:, :1]),
        model.a(ids[:, 2]),
    ]
    return model.head(torch.stack(parts).prod(0)).mean()


def kept_for_later(model: Towers, ids: torch.Tensor) -> torch.Tensor:
    # Outputs of a forward are used after the update, and still have the values from before it.
    value = sum((torch.sin(one.detach()).sum() for one in model.kept), torch.zeros(()))
    model.kept = [model.a(ids[:, 0]), model.b(ids)]
    return model.head(model.c(ids)).mean() * (1 + value / 100 / len(ids)) + model.a(ids[:, 1]).mean()


def weighted(model: Towers, ids: torch.Tensor) -> torch.Tensor:
    weights = model.block(torch.ones(ids.shape[0], 4))[:, :3]
    return model.head(model.b(ids, per_sample_weights=weights) + model.a(ids[:, 0])).mean()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.sigmoid() * b


def through_script(model: Towers, ids: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(product)
    return model.head(scripted(model.a(ids[:, 0]), model.b(ids))).mean()


def compiled(model: Towers, ids: torch.Tensor) -> torch.Tensor:
    def towers(a: torch.Tensor) -> torch.Tensor:
        return a.sin() * model.b(ids) + model.c(ids)

    return model.head(torch.compile(towers, backend="eager")(model.a(ids[:, 0]))).mean()


def reused(model: Towers, ids: torch.Tensor) -> torch.Tensor:
    offsets, weights = torch.tensor([0, 2]), torch.ones(6)
    with torch.no_grad():
        bags = model.b(ids[:2].flatten(), offsets, weights)
    offsets[1], weights[:] = 5, 3.0  # the output is that of the arguments at the call
    return model.head(bags).mean() + model.head(model.a(ids[:, 0])).mean() + 0.0 * model.b(ids).sum()


PROGRAMS: dict[str, Program] = {
    "reused": reused,
    "in place": add_in_place,
    "views": change_views,
    "checkpoint": partial(checkpointed, reentrant=False),
    "reentrant checkpoint": partial(checkpointed, reentrant=True),
    "function": through_functions,
    "penalty": penalised,
    "one rank": used_by_one_rank,
    "ignored": ignored,
    "twice": twice,
    "later": kept_for_later,
    "weights": weighted,
    "script": through_script,
    "compile": compiled,
}


def indices(step: int, ranks: int, rank: int | None = None) -> torch.Tensor:
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ROWS, (PER_RANK * ranks, 3), generator=random)
    ids[:, 2] = torch.arange(ranks).repeat_interleave(PER_RANK)  # so that ranks tell themselves apart
    return ids if rank is None else ids[rank * PER_RANK : (rank + 1) * PER_RANK]


def made(program: Program) -> Towers:
    torch.manual_seed(0)
    return Towers(program).double()


def plain(program: Program, ranks: int) -> dict[str, torch.Tensor]:
    model = made(program)
    kept: list[list[Any]] = [[] for _ in range(ranks)]
    for step in range(STEPS):
        for rank in range(ranks):
            model.kept = kept[rank]
            (model(indices(step, ranks, rank)) / ranks).backward()
            kept[rank] = model.kept
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * (parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
        model.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def trained(stage: int, batched: bool = True, names: tuple[str, ...] = tuple(PROGRAMS)) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    found = {}
    try:
        for name in names:
            engine = start_engine(
                made(PROGRAMS[name]),
                micro=PER_RANK,
                optimizer=sgd(0.1),
                stage=stage,
                units=["block"],
                embedding_tables={"modules": ["a", "b", "c"], "batch_lookups": batched},
            )
            for step in range(STEPS):
                train_step(engine, engine(indices(step, engine.mesh.shard.size, engine.data_rank)))
            found[name] = engine.gathered_state_dict()
            engine.destroy()
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def compare(found: dict[str, Any], ranks: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        expected = {name: plain(PROGRAMS[name], ranks) for name in found}
    finally:
        torch.set_default_dtype(torch.float32)
    for name, weights in expected.items():
        for key, value in weights.items():
            torch.testing.assert_close(
                found[name][key], value, rtol=1e-11, atol=1e-13, msg=partial("{}, {}: {}".format, name, key)
            )


def test_outputs_of_tables_behave_as_ordinary_tensors() -> None:
    compare(run_ranks(trained, 2, 3)[0], 2)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("batched", [False, True])
def test_they_do_so_at_every_stage(ranks: int, stage: int, batched: bool) -> None:
    compare(run_ranks(trained, ranks, stage, batched)[0], ranks)


class Many(nn.Module):
    """Tables of several widths and dtypes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        kinds = [(3, torch.float32), (5, torch.float64), (3, torch.bfloat16)]
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(7, width, mode="mean", sparse=True, dtype=dtype)
            for width, dtype in (kinds[n % len(kinds)] for n in range(count))
        )
        self.head = nn.Linear(1, 1)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> list[torch.Tensor]:
        return [table(ids, offsets) for table in self.tables]


def many(count: int) -> zeromesh.Engine:
    torch.manual_seed(0)
    return start_engine(Many(count), micro=2, optimizer=sgd(0.1))


@on_ranks(2)
def test_messages_do_not_depend_on_the_number_of_tables() -> None:
    ids = torch.tensor([[1, 6], [3, 3]])
    calls = []
    for count in (2, 12):
        engine = many(count)
        engine.traffic_report(reset=True)
        outputs = engine(ids)
        torch.manual_seed(0)
        for found, expected in zip(outputs, Many(count)(ids), strict=True):
            torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
        calls.append({name: one["calls"] for name, one in engine.traffic_report().items() if name.startswith("table")})
        engine.destroy()
    assert calls[0] == calls[1] == {f"table_{kind}/data": 1 for kind in ("counts", "indices", "rows")}


@on_ranks(2)
def test_arguments_that_torch_refuses_on_one_rank_raise_on_all() -> None:
    engine = many(3)
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
    wrong = torch.tensor([1, 2]) if engine.mesh.rank else offsets
    message = "offsets\\[0\\] has to be 0" if engine.mesh.rank else "rank 1 failed in a lookup of tables.0"
    with pytest.raises((ValueError, RuntimeError), match=message):
        torch.stack(engine(ids, wrong)[::3])
    assert [one.shape for one in engine(ids, offsets)] == [(2, 3), (2, 5), (2, 3)]  # it goes on
    engine.destroy()


@on_ranks(2)
def test_an_output_can_be_read_and_copied() -> None:
    engine = many(3)
    ids = torch.tensor([[1, 6], [3, 3]])
    with torch.no_grad():
        first, *_ = engine(ids)
        assert isinstance(first, TableOutput)
        expected = engine.module.tables[0](ids)
        assert first.tolist() == expected.tolist() == first.numpy().tolist()
        assert repr(first) == repr(expected + 0.0)
        for made in (copy.deepcopy(first), pickle.loads(pickle.dumps(first)), first.detach(), first.data):
            assert torch.equal(made, expected)
        assert type(pickle.loads(pickle.dumps(first))) is torch.Tensor
    with torch.inference_mode():
        found = engine(ids)[0]
    assert type(found) is torch.Tensor
    assert torch.equal(found, expected)
    graded = engine(ids)[0]
    with pytest.raises(RuntimeError, match="use .detach"):
        graded.numpy()
    with pytest.raises(RuntimeError, match="use .detach"):
        copy.deepcopy(graded)
    engine.destroy()


@on_ranks(2)
def test_an_output_gives_its_memory_only_when_the_values_are_there() -> None:
    engine = many(3)
    ids = torch.tensor([[1, 6], [3, 3]])

    def output() -> torch.Tensor:
        return engine.module.tables[0](ids)

    with torch.no_grad():
        expected = output() + 0.0
        assert torch.equal(torch.from_dlpack(output()), expected)
        assert output().untyped_storage().nbytes() == expected.untyped_storage().nbytes()
        assert torch.equal(output().share_memory_() + 0.0, expected)
        assert torch.equal(output().apply_(lambda value: 2 * value) + 0.0, 2 * expected)
        for change in (lambda x: x.unsqueeze_(0), lambda x: x.resize_(9), lambda x: x.t_()):
            with pytest.raises(RuntimeError, match="changes the shape of the output of a table"):
                change(output())
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch.utils.dlpack.to_dlpack(output())  # in C++, past the methods
        with pytest.raises(RuntimeError, match="cannot be given new data"):
            output().data = expected
    engine.destroy()


@on_ranks(2)
def test_a_lookup_that_fails_leaves_no_trace() -> None:
    engine = many(3)
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
    tables = engine.module.tables
    table = list(engine.sharded.tables)[1]
    kept = table.rows
    first, second = tables[0](ids, offsets), tables[1](ids, offsets)
    table.rows = None
    with pytest.raises(AttributeError):
        str(first + 0)
    table.rows = kept
    for one in (first, second):
        with pytest.raises(RuntimeError, match="failed, so its output has no values"):
            str(one + 0)
    assert [one.shape for one in engine(ids, offsets)] == [(2, 3), (2, 5), (2, 3)]
    waiting = tables[0](ids, offsets)
    engine.destroy()
    with pytest.raises(RuntimeError, match="has no values"):
        str(waiting + 0)


@on_ranks(2)
def test_engines_that_ranks_call_in_another_order_are_told() -> None:
    engines = [many(2), many(2)]
    ids = torch.tensor([[1, 6], [3, 3]])
    outputs = [engine.module.tables[0](ids) for engine in engines]
    with pytest.raises(RuntimeError, match="looks up tables of another engine than tables.0"):
        str(outputs[engines[0].mesh.rank] + 0)
    for engine in engines:
        engine.destroy()


def shortened(early: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Embedding(12, 4, sparse=True, max_norm=0.5).double() for name in "ab"})
    engine = start_engine(model, optimizer=sgd(0.1), mesh={"data": 2, "replicate": 2})
    b = engine.module["b"](torch.arange(3) + 3 * (engine.mesh.rank % 2))
    if early and engine.mesh.rank == 0:
        str(b + 0)
    (engine.module["a"](torch.arange(4) + 4 * (engine.mesh.rank // 2)) + 0).sum().item()
    found = engine.gathered_state_dict()
    engine.destroy()
    return found


def test_copies_of_rows_are_shortened_in_one_order() -> None:
    first, second = (run_ranks(shortened, 4, early)[0] for early in (False, True))
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Embedding(12, 4, max_norm=0.5).double() for name in "ab"})
    model["a"](torch.arange(8)), model["b"](torch.arange(6))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(first[key], value)
        torch.testing.assert_close(second[key], value)
