"""Buffers: of any dtype and layout, replaced or changed, and in 16-bit runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeromesh
from harness import RankFailure, on_ranks, run_ranks
from run import sgd, start_engine, train_step

WIDTH = 6


class Holder(nn.Module):
    def __init__(self, value: torch.Tensor | None, change: Callable[[Holder, int], None] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("value", value)
        self.change = change
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.change is not None:
            self.change(self, self.forwards)
        self.forwards += 1
        return self.linear(x).square().mean()


def start(model: nn.Module, row: int = 0, **more: Any) -> zeromesh.Engine:
    return start_engine(model, more, optimizer=sgd(0.1), stage=row)


def train(engine: zeromesh.Engine, steps: int = 1) -> None:
    for _ in range(steps):
        train_step(engine, engine(torch.ones(2, WIDTH)))


DTYPES = [
    torch.int16, torch.uint16, torch.bool, torch.complex64, torch.complex128, torch.bfloat16, torch.float8_e4m3fn,
    torch.int64,
]  # fmt: skip


def wide(value: torch.Tensor) -> torch.Tensor:
    return value.resolve_conj().to(torch.complex128 if value.is_complex() else torch.float64)


@on_ranks(2)
def test_every_rank_gets_the_first_ranks_values_whatever_their_dtype() -> None:
    found = {}
    for dtype in DTYPES:
        value = (torch.arange(8).view(2, 4) + 5 * dist.get_rank()).float().to(dtype)
        found[f"{dtype}"] = start(Holder(value.t())).module.value
        found[f"{dtype}, 0-dim"] = start(Holder(value[0, 0].clone())).module.value
    found["conjugate"] = start(Holder(torch.tensor([1j * (1 + dist.get_rank())]).conj())).module.value
    found = {name: (value.dtype, wide(value)) for name, value in found.items()}
    for dtype in DTYPES:
        value = torch.arange(8).view(2, 4).float().to(dtype)
        for name, expected in ((f"{dtype}", value.t()), (f"{dtype}, 0-dim", value[0, 0])):
            assert found[name][0] == dtype
            assert torch.equal(found[name][1], wide(expected)), name
    assert found["conjugate"][1].tolist() == [-1j]


@pytest.mark.parametrize(("ranks", "row"), [(1, 0), (2, 1), (2, 3)])
@on_ranks("ranks")
def test_an_expanded_buffer_gets_memory_of_its_own(ranks: int, row: int) -> None:
    def add(module: Holder, forward: int) -> None:
        module.value[forward] += 1 + dist.get_rank()

    engine = start(Holder(torch.full((1,), 3.0 + dist.get_rank()).expand(4), add), row)
    train(engine, 2)
    assert engine.module.value.tolist() == [4.0, 4.0, 3.0, 3.0]


def test_a_sparse_buffer_is_refused_unless_it_is_no_state() -> None:
    with pytest.raises(ValueError, match=r"buffer value has layout torch.sparse_coo.*persistent=False"):
        start(Holder(torch.eye(2).to_sparse()))


def at_the_address(module: Holder, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``like`` that has the ``id`` of the module's buffer, which is gone then."""
    wanted, module.value = id(module.value), None
    others: list[torch.Tensor] = []
    while len(others) < 1000 and (not others or id(others[-1]) != wanted):
        others.append(like.clone())
    return others[-1]


TENS = [[10.0 * forward] * 3 for forward in range(4)]
BECOMES: dict[str, list[Any]] = {
    "replaced": TENS,
    "replaced on the last rank": [[7.0] * 3] * 4,
    "expanded": TENS,
    "none and back": [TENS[0], None, TENS[2], None],
    "none on the last rank": TENS,
    "none on the first rank": [TENS[0], None, *TENS[2:]],
    "longer": [[10 * forward] * (3 + forward) for forward in range(4)],
    "resized": [[10.0 * forward] * (4 + forward) for forward in range(4)],
    "inference": TENS,
}


@pytest.mark.parametrize("kind", BECOMES)
@on_ranks(2)
def test_a_buffer_that_is_replaced_is_the_first_ranks_after_every_update(kind: str) -> None:
    rank = dist.get_rank()

    def change(module: Holder, forward: int) -> None:
        match kind:
            case "replaced":
                module.value = at_the_address(module, torch.full((3,), 10.0 * forward + rank))
            case "replaced on the last rank":
                if rank:
                    module.value = torch.full((3,), 10.0 * forward + rank)
            case "expanded":
                module.value = torch.full((1,), 10.0 * forward + rank).expand(3)
            case "none and back":
                module.value = None if forward % 2 else torch.full((3,), 10.0 * forward + rank)
            case "none on the last rank":
                module.value = None if rank and forward == 1 else torch.full((3,), 10.0 * forward + rank)
            case "none on the first rank":
                module.value = None if not rank and forward == 1 else torch.full((3,), 10.0 * forward + rank)
            case "longer":
                module.value = torch.full((3 + forward + rank,), 10 * forward + rank, dtype=torch.int64)
            case "resized":
                module.value.data = torch.full((4 + forward,), 10.0 * forward + rank)
            case "inference":
                with torch.inference_mode():
                    module.value = torch.full((3,), 10.0 * forward + rank)

    engine = start(Holder(None if kind == "none at first" else torch.full((3,), 7.0 + rank), change), 2)
    found = []
    for _ in range(4):
        train(engine)
        value = engine.module.value
        found.append(None if value is None else value.tolist())
    assert found == BECOMES[kind]


@on_ranks(2)
def test_a_buffer_is_sent_only_when_it_changed() -> None:
    def change(module: Holder, forward: int) -> None:
        if forward == 1:
            module.value += 1

    engine = start(Holder(torch.ones(3), change), 2)
    for calls in (0, 1, 0):
        engine.traffic_report(reset=True)
        train(engine)
        found = engine.traffic_report().get("broadcast/world", {}).get("calls", 0)
        assert found == calls or dist.get_rank() != 0


def start_with_buffers_in_another_order(persistent: bool) -> None:
    model = Holder(None)
    for name in ("one", "two") if dist.get_rank() == 0 else ("two", "one"):
        model.register_buffer(name, torch.ones(len(name) + (name == "one")), persistent=persistent)
    start(model).destroy()


def test_buffers_that_are_no_state_may_be_in_another_order_on_each_rank() -> None:
    """As rotary embeddings by type of layer, which transformers registers in the order of a set of strings."""
    run_ranks(start_with_buffers_in_another_order, 2, False)
    with pytest.raises(RankFailure, match=r"two: buffer torch.float32"):
        run_ranks(start_with_buffers_in_another_order, 2, True)


@on_ranks(2)
def test_a_buffer_that_is_registered_late_stays_each_ranks_own() -> None:
    def change(module: Holder, forward: int) -> None:
        if forward == 1:
            module.register_buffer("late", torch.full((1,), float(dist.get_rank())))

    engine = start(Holder(torch.ones(3), change))
    train(engine, 2)
    assert float(engine.module.late) == dist.get_rank()


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((WIDTH,), 0.3162))
        self.register_buffer("again", self.table)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("frequencies", 10000 ** -torch.linspace(0, 1, WIDTH), persistent=False)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.inner = nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.linear(x + self.table.to(x.dtype)))
        x = self.inner(x.unsqueeze(-1).expand(-1, -1, 3)).mean(-1)
        angles = torch.arange(3.0).outer(self.frequencies)
        return (self.linear(x + self.again.to(x.dtype)) * angles.cos().to(x.dtype).sum(0)).square().mean()


def dtypes(row: int, **precision: Any) -> dict[str, torch.dtype]:
    engine = start(Positions(), row, **precision)
    train(engine, 2)
    assert engine.module.table is engine.module.again
    assert int(engine.module.norm.num_batches_tracked) == 2
    return {name: buffer.dtype for name, buffer in engine.module.named_buffers()}


@pytest.mark.parametrize("row", [0, 3])
@pytest.mark.parametrize("key", ["bf16", "fp16"])
def test_buffers_keep_their_dtype_in_a_16_bit_run(row: int, key: str) -> None:
    precision: dict[str, Any] = {key: {"enabled": True}}
    for found in run_ranks(dtypes, 2, row, **precision):
        assert found.pop("steps") == found.pop("norm.num_batches_tracked") == torch.int64
        assert found.pop("inner.num_batches_tracked") == torch.int64
        assert set(found.values()) == {torch.float32}


def test_a_buffer_has_the_values_that_it_was_given() -> None:
    engine = start(Positions(), bf16={"enabled": True})
    assert torch.equal(engine.module.table, torch.full((WIDTH,), 0.3162))


def test_buffer_dtype_converts_all_but_running_statistics_of_batch_norms() -> None:
    options: dict[str, Any] = {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "fp16"}}
    for found in run_ranks(dtypes, 2, 0, **options):
        assert found["steps"] == found["norm.num_batches_tracked"] == torch.int64
        assert found["table"] == found["frequencies"] == found["inner.running_mean"] == torch.float16
        assert found["norm.running_mean"] == found["norm.running_var"] == torch.float32


def test_without_one_they_keep_theirs() -> None:
    assert {dtype for found in run_ranks(dtypes, 1, 0) for dtype in found.values()} == {torch.float32, torch.int64}
