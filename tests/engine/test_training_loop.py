"""What a user's loop may do: own optimizers and schedules, micro-batches by hand, whole batches."""

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import zeromesh
from compare import assert_close
from harness import on_ranks, run_ranks
from numerics import BATCH, Net, batch, build_net
from run import plain_step, train_step
from zeromesh.shard.optim import schedules

RANKS = 2
STEPS = 6
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


def config(row: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": row}, "train_micro_batch_size_per_gpu": 6, **more}


def rows_of(rank: int, micro_batch: int = 0) -> slice:
    start = 6 * (micro_batch * RANKS + rank)
    return slice(start, start + 6)


def both_ranks(micro_batch: int = 0) -> slice:
    return slice(12 * micro_batch, 12 * (micro_batch + 1))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.2},
        {"params": [p for p in trained if p.ndim < 2], "lr": 3e-2, "weight_decay": 0.0},
    ]


SETTINGS = {"warmup_min_lr": 1e-4, "warmup_max_lr": 2e-2, "warmup_num_steps": 3, "total_num_steps": 9}
SCHEDULE = {"type": "WarmupDecayLR", "params": SETTINGS}


def plain_parts(kind: str, model: Net) -> tuple[torch.optim.Optimizer, Any]:
    trained = [p for p in model.parameters() if p.requires_grad]
    match kind:
        case "objects":
            optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
            return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 5e-2], total_steps=8)
        case "named parameters":
            named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            return torch.optim.NAdam(named, lr=1e-2), None
        case "frozen parameters too":
            return torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1), None
        case "functions":
            rmsprop = torch.optim.RMSprop(trained, lr=1e-3, momentum=0.5)
            return rmsprop, torch.optim.lr_scheduler.CosineAnnealingLR(rmsprop, T_max=10)
        case "groups":
            optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
            return optimizer, schedules.build("WarmupDecayLR", SETTINGS, optimizer)
        case "function of groups":
            return torch.optim.SGD(groups(model), lr=0.1, momentum=0.9), None
        case "some parameters":
            return torch.optim.AdamW(model.blocks.parameters(), lr=1e-2, weight_decay=0.1), None
    raise AssertionError(kind)


def arguments(kind: str, model: Net) -> dict[str, Any]:
    match kind:
        case "objects" | "named parameters" | "frozen parameters too":
            optimizer, scheduler = plain_parts(kind, model)
            return {"optimizer": optimizer, "lr_scheduler": scheduler}
        case "functions":
            make = partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5)
            return {"optimizer": make, "lr_scheduler": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=10)}
        case "groups":
            return {"model_parameters": groups(model)}
        case "function of groups":
            make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
            return {"optimizer": make, "model_parameters": groups(model)}
        case "some parameters":
            return {"model_parameters": model.blocks.named_parameters()}
    raise AssertionError(kind)


def in_config(kind: str) -> dict[str, Any]:
    if kind == "groups":
        return {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "scheduler": SCHEDULE}
    return {"optimizer": ADAMW} if kind == "some parameters" else {}


def rates(optimizer: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    return [(float(g["lr"]), g.get("betas"), g["weight_decay"]) for g in optimizer.param_groups]


def train_as_the_user_says(kinds: list[str], row: int) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    found = []
    for kind in kinds:
        model = build_net(torch.float64)
        given = arguments(kind, model)
        engine, optimizer, _, scheduler = zeromesh.initialize(
            model=model, config=config(row, gradient_clipping=0.5, **in_config(kind)), **given
        )
        for name, value in (("optimizer", optimizer), ("lr_scheduler", scheduler)):
            if hasattr(given.get(name), "step"):
                assert value is given[name], "an object that was passed is the one that is used"
        history = []
        for step in range(STEPS):
            engine.backward(engine(*batch(step, torch.float64, rows_of(engine.data_rank))))
            history.append(rates(optimizer))
            assert engine.get_lr() == [rate[0] for rate in history[-1]]
            engine.step()
        found.append((history, engine.gathered_state_dict()))
        engine.destroy()
    return found


def train_plainly(kind: str) -> tuple[Any, Net]:
    model = build_net(torch.float64)
    optimizer, scheduler = plain_parts(kind, model)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model.zero_grad()
        model(*batch(step, torch.float64, both_ranks())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        history.append(rates(optimizer))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return history, model


KINDS = [
    "objects",
    "named parameters",
    "frozen parameters too",
    "functions",
    "groups",
    "function of groups",
    "some parameters",
]


@pytest.mark.some(1)
@pytest.mark.parametrize("row", [0, 1, 3])
def test_optimizers_and_schedules_of_the_user_do_as_in_torch(row: int) -> None:
    for kind, (history, state) in zip(KINDS, run_ranks(train_as_the_user_says, RANKS, KINDS, row)[0], strict=True):
        expected, model = train_plainly(kind)
        assert history == expected, kind
        assert_close(state, model)


def train_by_hand(row: int, precision: str, way: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    told = {"gradient_accumulation_steps": {"config": 3, "boundary": 2}.get(way, 1)}
    bf16 = {"bf16": {"enabled": True}} if precision == "bf16" else {}
    model = build_net(torch.float64 if precision == "float64" else torch.float32)
    engine, *_ = zeromesh.initialize(model=model, config=config(row, optimizer=ADAMW, **told, **bf16))
    if way == "set_train_batch_size":
        engine.set_train_batch_size(36)
        assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (36, 3)
    losses = []
    for step in range(STEPS):
        for m in range(3):
            inputs = batch(step, torch.float32 if bf16 else torch.float64, rows_of(engine.data_rank, m))
            losses.append(_micro_batch(engine, way, inputs, m == 2))
        assert engine.global_steps == step + 1
    return engine.gathered_state_dict(), losses


def _micro_batch(engine: zeromesh.Engine, way: str, inputs: Any, last: bool) -> float:
    if way == "no_sync":
        loss = engine(*inputs)
        if last:
            train_step(engine, loss / 3)
            return loss.item()
        with engine.no_sync():
            engine.backward(loss / 3)
            with pytest.raises(RuntimeError, match="no_sync"):
                engine.step()
        return loss.item()
    if way == "boundary":
        engine.set_gradient_accumulation_boundary(last)
        assert engine.is_gradient_accumulation_boundary() is last
    loss = engine(*inputs)
    # Where the boundary is set by hand, the engine still divides by its own 2 micro-batches.
    train_step(engine, loss * 2 / 3 if way == "boundary" else loss)
    return loss.item()


@pytest.mark.some(1)
@pytest.mark.parametrize("row", [0, 1, 2, 3])
def test_every_way_to_accumulate_sums_the_same(row: int) -> None:
    model = build_net(torch.float64)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        plain_step(optimizer, model(*batch(step, torch.float64)))
    for way in ("config", "no_sync", "boundary", "set_train_batch_size"):
        state, _ = run_ranks(train_by_hand, RANKS, row, "float64", way)[0]
        assert_close(state, model)


@pytest.mark.some(1)
@pytest.mark.parametrize("row", [0, 1, 2, 3])
def test_accumulation_that_begins_late_rounds_as_one_that_was_configured(row: int) -> None:
    expected = run_ranks(train_by_hand, RANKS, row, "bf16", "config")
    got = run_ranks(train_by_hand, RANKS, row, "bf16", "set_train_batch_size")
    assert [losses for _, losses in got] == [losses for _, losses in expected]
    assert all(torch.equal(value, expected[0][0][name]) for name, value in got[0][0].items())


@pytest.mark.parametrize("row", [0, 1])
@on_ranks(RANKS)
def test_replicated_gradients_are_not_sent_without_sync(row: int) -> None:
    engine, *_ = zeromesh.initialize(model=build_net(torch.float32), config=config(row, optimizer=ADAMW))
    engine.traffic_report(reset=True)
    reports = []
    for _ in range(2):
        with engine.no_sync():
            engine.backward(engine(*batch(0, torch.float32, rows_of(engine.data_rank))))
        reports.append(engine.traffic_report(reset=True))
    train_step(engine, engine(*batch(0, torch.float32, rows_of(engine.data_rank))))
    first, second, last = [*reports, engine.traffic_report()]
    assert not first
    assert not second
    assert last["reduce_scatter/data"]["bytes"] > 0


@on_ranks(RANKS)
def test_a_batch_size_that_does_not_divide_is_refused() -> None:
    engine, *_ = zeromesh.initialize(model=build_net(torch.float32), config=config(0, optimizer=ADAMW))
    for size in (0, 7, 13):
        with pytest.raises(ValueError, match=r"6 x 2 ranks = 12; the nearest is 12"):
            engine.set_train_batch_size(size)


class Logits(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.linear = nn.Linear(5, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.linear(self.dropout(x))
        if labels is None:
            return logits.square().mean() if self.form == "tensor" else logits
        loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "tuple": (loss, logits), "dict": {"logits": logits, "loss": loss}}.get(self.form, loss)


def pairs(rank: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, RANKS, 6, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (count, RANKS, 6), generator=generator)
    return [(x[i, rank], y[i, rank]) for i in range(count)]


def train_whole_batches(form: str) -> dict[str, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Logits(form).double()
    loss_fn = nn.CrossEntropyLoss() if form == "logits" else None
    engine, *_ = zeromesh.initialize(
        model=model, config=config(3, optimizer=ADAMW, gradient_accumulation_steps=2), loss_fn=loss_fn
    )
    model.dropout.p = 0.0

    def data() -> Iterator[Any]:
        for x, y in pairs(engine.data_rank, 8):
            match form:
                case "dict":
                    yield {"x": x, "labels": y}
                case "mapping":
                    yield UserDict({"x": x, "labels": y})
                case "logits":
                    yield (x,), y
                case "tensor":
                    yield x
                case _:
                    yield x, y

    stream = data()
    losses = [engine.train_batch(stream) for _ in range(3)]
    assert engine.global_steps == 3
    assert model.training
    model.dropout.p = 0.5  # evaluation has none
    evaluated = engine.eval_batch(stream)
    assert model.training
    assert next(stream, None) is None
    assert all(loss.shape == () and not loss.requires_grad for loss in (*losses, evaluated))
    engine.eval()
    engine.eval_batch(data())
    assert not model.training, "the mode is left as it was"
    return {"losses": [loss.item() for loss in (*losses, evaluated)], "state": engine.gathered_state_dict()}


@pytest.mark.some(2)
@pytest.mark.parametrize("form", ["logits", "loss", "tuple", "dict", "mapping", "tensor"])
def test_whole_batches_give_the_mean_loss_and_the_update_of_all_micro_batches(form: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Logits("tensor" if form == "tensor" else "loss").double().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    both = [[pair[: 1 if form == "tensor" else 2] for pair in pairs(rank, 8)] for rank in range(RANKS)]
    losses = []
    for step in range(4):
        micro_batches = [both[rank][i] for i in (2 * step, 2 * step + 1) for rank in range(RANKS)]
        loss = torch.stack([model(*micro_batch) for micro_batch in micro_batches]).mean()
        losses.append(loss.item())
        if step < 3:
            plain_step(optimizer, loss)
    found = run_ranks(train_whole_batches, RANKS, form)
    assert found[0]["losses"] == found[1]["losses"]
    assert found[0]["losses"] == pytest.approx(losses, rel=1e-12)
    assert_close(found[0]["state"], model)


class TakesMapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, inputs: Any) -> torch.Tensor:
        return self.linear(inputs["x"])


@on_ranks(1)
def test_tensors_in_mappings_of_any_kind_are_cast() -> None:
    engine, *_ = zeromesh.initialize(
        model=TakesMapping(), config=config(0, optimizer=ADAMW, bf16={"enabled": True}), loss_fn=nn.CrossEntropyLoss()
    )
    seen = []
    engine.module.linear.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    inputs = UserDict({"x": torch.ones(6, 5), "name": "not a tensor"})
    engine.train_batch(iter([(inputs, torch.zeros(6, dtype=torch.int64))]))
    assert inputs["x"].dtype is torch.float32, "what the user gave is left alone"
    assert seen == [torch.bfloat16]


class Taken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.given: Any = None

    def forward(self, given: Any) -> torch.Tensor:
        self.given = given
        return self.linear.weight.sum()


class ByPosition(OrderedDict[str, Any]):
    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else list(self.values())[key]


class Listed(list[Any]):
    pass


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True)
class Record:
    a: Any
    b: Any = "b"

    def __post_init__(self) -> None:
        assert self.b == "b", "a copy is not made anew"


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda item: {"a": item},
    "a mapping of its own": lambda item: ByPosition(a=item),
    "UserDict": lambda item: UserDict(a=item),
    "list": lambda item: [item],
    "a list of its own": lambda item: Listed([item]),
    "tuple": lambda item: (item,),
    "NamedTuple": lambda item: Pair(item, "b"),
    "dataclass": lambda item: Record(item),
}


def first(container: Any) -> Any:
    if isinstance(container, Record):
        return container.a
    return container["a"] if isinstance(container, dict | UserDict) else container[0]


@on_ranks(1)
def test_containers_among_the_inputs_stay_what_they_are() -> None:
    engine = zeromesh.initialize(Taken(), config=config(0, optimizer=ADAMW, bf16={"enabled": True}))[0]

    def taken(given: Any) -> Any:
        engine(given)
        return engine.module.given

    narrow, wide = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    for kind, make in CONTAINERS.items():
        for kept in (make([]), make(narrow), make([make(1), make(None)])):
            assert taken(kept) is kept, f"{kind}: nothing in it changes"
        given = make([wide, wide.long()])
        found = taken(given)
        assert type(found) is type(given), kind
        assert [tensor.dtype for tensor in first(found)] == [torch.bfloat16, torch.int64], kind
        assert first(given)[0] is wide, f"{kind}: what the user gave is left alone"
    assert taken(ByPosition(a=wide))[0].dtype is torch.bfloat16
    assert taken(MappingProxyType({"a": wide}))["a"].dtype is torch.bfloat16
    around: list[Any] = [wide]
    around.append(around)
    assert taken(around)[0].dtype is torch.bfloat16


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@on_ranks(1)
def test_outputs_of_hugging_face_models_among_the_inputs_stay_what_they_are() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    engine = zeromesh.initialize(Taken(), config=config(3, optimizer=ADAMW, bf16={"enabled": True}))[0]
    given = BaseModelOutput(last_hidden_state=torch.ones(2), hidden_states=(torch.ones(3),))
    engine(given=given)
    found = engine.module.given
    assert type(found) is BaseModelOutput
    assert found[0] is found.last_hidden_state is found["last_hidden_state"]
    assert {found[0].dtype, found.hidden_states[0].dtype} == {torch.bfloat16}
    assert found.attentions is None
    assert given[0].dtype is torch.float32
    engine(given=found)
    assert engine.module.given is found


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.BatchNorm1d(5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ArithmeticError("bad batch")
        return self.frozen(self.trained(x)).square().mean()


@on_ranks(1)
def test_evaluation_leaves_each_module_in_its_mode_even_if_it_fails() -> None:
    engine, *_ = zeromesh.initialize(model=Frozen(), config=config(0, optimizer=ADAMW))
    engine.module.frozen.eval()
    found = []
    for value in (1.0, float("nan")):
        try:
            engine.eval_batch(iter([torch.full((6, 5), value)]))
        except ArithmeticError:
            found.append({})
        found.append({name: module.training for name, module in engine.module.named_modules()})
        assert not engine.module.trained.num_batches_tracked
    modes = {"": True, "trained": True, "frozen": False}
    assert found == [modes, {}, modes]


def test_the_batches_here_are_parts_of_the_global_batch() -> None:
    assert rows_of(1, 2).stop == both_ranks(2).stop == BATCH


class Functional(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Transformed(how) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.how == "vmap around":
                x = torch.func.vmap(block)(x)
            elif self.how == "grad around":
                x = x + torch.func.grad(lambda y, block=block: block(y).square().sum())(x)
            else:
                x = block(x)
        return (x * self.scale).square().mean()


class Transformed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def one(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.how:
            case "vmap":
                return self.down(torch.func.vmap(self.one)(x))
            case "grad":
                return self.down(x) + torch.func.grad(lambda y: self.one(y).square().sum())(x)
            case "grad of activations":
                return self.down(torch.func.vmap(torch.func.grad(lambda y: (y**3).sum()))(self.one(x)))
        return self.down(self.one(x))


def build_functional(how: str) -> Functional:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Functional(how).double()


def rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


FUNCTIONS = [(row, how) for how in ("vmap", "vmap around") for row in (0, 3)] + [
    (row, how) for how in ("grad", "grad of activations", "grad around") for row in (2, 3)
]


@pytest.mark.some(3)
@pytest.mark.parametrize(("row", "how"), FUNCTIONS)
@on_ranks(RANKS)
def test_functional_transformations_are_trained_as_in_torch(row: int, how: str) -> None:
    engine, *_ = zeromesh.initialize(model=build_functional(how), config=config(row, optimizer=ADAMW))
    gathered = row == 3 and how.startswith("grad")
    for step in range(3):
        # torch.func takes no graphs with hooks, which those of sharded parameters have unless these are gathered.
        with zeromesh.zero.GatheredParameters(list(engine.module.parameters())) if gathered else nullcontext():
            loss = engine(rows(step, engine.data_rank))
        train_step(engine, loss)
    found = engine.state_dict()
    model = build_functional(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (model(rows(step, rank)) / RANKS).backward()
        optimizer.step()
    assert_close(found, model)


@pytest.mark.some(1)
@pytest.mark.parametrize("row", [0, 3])
@on_ranks(RANKS)
def test_forward_derivatives_are_taken_through_the_engine(row: int) -> None:
    engine, *_ = zeromesh.initialize(model=build_functional(""), config=config(row, optimizer=ADAMW))
    x = rows(0, 0)
    found = torch.func.jvp(engine, (x,), (torch.ones_like(x),))
    engine.backward(engine(x))  # and nothing is left behind
    engine.step()
    found = found[0].detach(), found[1].detach()
    x = rows(0, 0)
    expected = torch.func.jvp(build_functional(""), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(found, tuple(map(torch.Tensor.detach, expected)))


@pytest.mark.full
@on_ranks(1)
def test_compile_takes_a_backend_and_options_as_deepspeed_and_as_torch() -> None:
    found = []
    for more in ({}, {"compile_kwargs": {"disable": True}}, {"disable": True}, {"compile_kwargs": None}):
        graphs: list[Any] = []

        def remember(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        engine, *_ = zeromesh.initialize(model=build_functional(""), config=config(3, optimizer=ADAMW))
        engine.compile(remember, **more)
        train_step(engine, engine(rows(0, engine.data_rank)))
        found.append(len(graphs))
    plain, in_a_dict, by_name, none = found
    assert plain == none > 0
    assert in_a_dict == by_name == 0
