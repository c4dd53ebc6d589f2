"""Where gradients are between autograd and their shard: copied into a slot, or left where autograd put them."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

import numerics
import zeromesh
from compare import assert_close
from harness import on_ranks
from run import sgd, start_engine, train_step
from zeromesh.comm import ordered_sums as sums
from zeromesh.shard.gradients.gradient import FullState, Gradient, ShardState
from zeromesh.shard.layout import Layout
from zeromesh.shard.parameters.slots import Slot
from zeromesh.shard.place_units import make_units

SIZE = 64


def gradient(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Gradient:
    named = [(str(number), torch.Size(shape)) for number, shape in enumerate(shapes)]
    return Gradient(Layout.build(named, dtype, True, 2), slice(0, SIZE), slice(0, SIZE), 16)


def test_a_gradient_that_is_all_of_its_buffer_stays_where_it_is() -> None:
    value = torch.empty(8, 8)
    torch.arange(float(SIZE), out=value.view(-1))
    address, found = value.data_ptr(), gradient((8, 8))
    assert found.adopt(value, 0.5)
    assert found.full.data_ptr() == address
    assert torch.equal(found.full, torch.arange(float(SIZE)) / 2)
    assert found.arrived == found.used == [True]


def test_states_follow_the_way_of_a_gradient() -> None:
    found, value = gradient((8, 8)), torch.ones(8, 8)
    assert (found.full_state, found.shard_state) == (FullState.EMPTY, ShardState.EMPTY)
    with pytest.raises(AssertionError):
        found.fill(0, value, 1.0)
    found.open(torch.empty(SIZE), Slot(4 * SIZE, torch.device("cpu"), lent=False))
    found.fill(0, value, 1.0)
    assert found.full_state is FullState.FILLING
    full, slot = found.begin_sum()
    assert (found.full_state, found.shard_state) == (FullState.EMPTY, ShardState.REDUCING)
    assert found.adopt(torch.ones(8, 8), 1.0)  # the next one fills while the sum is under way
    with pytest.raises(AssertionError, match="overwrite"):
        found.begin_sum()
    assert found.keep(full, slot) is None
    assert found.shard_state is ShardState.READY
    assert found.keep(*found.begin_sum()) is None
    assert found.shard is not None
    assert torch.equal(found.shard, torch.full((SIZE,), 2.0))
    assert found.forget() == [slot]


def held(kind: str) -> tuple[Gradient, torch.Tensor, Any]:  # A gradient that must be copied, and who else is there
    if kind == "of another dtype":
        return gradient((8, 8)), torch.ones(8, 8, dtype=torch.bfloat16), None
    if kind == "with gaps around it":
        return gradient((7, 9)), torch.ones(7, 9), None
    if kind == "one of several":
        return gradient((4, 8), (4, 8)), torch.ones(4, 8), None
    if kind == "transposed":
        return gradient((8, 8)), torch.ones(8, 8).t(), None
    if kind == "expanded":
        return gradient((8, 8)), torch.ones(8, 1).expand(8, 8), None
    if kind == "conjugated":
        return gradient((8, 8), dtype=torch.complex64), torch.full((8, 8), 1j).conj().data, None
    if kind == "negated":
        return gradient((8, 8)), torch._neg_view(torch.ones(8, 8)).data, None
    if kind == "of another library":
        return gradient((8, 8)), torch.from_numpy(np.ones((8, 8), np.float32)), None
    if kind == "part of something":
        return gradient((8, 8)), torch.ones(16, 8)[8:], None
    whole = torch.ones(8, 8)
    return gradient((8, 8)), whole.view(8, 8), whole


@pytest.mark.parametrize(
    "kind",
    ["of another dtype", "with gaps around it", "one of several", "transposed", "expanded", "conjugated", "negated",
     "of another library", "part of something", "seen by somebody else"],
)  # fmt: skip
def test_a_gradient_that_is_not_alone_in_memory_as_it_should_be_is_copied(kind: str) -> None:
    found, value, other = held(kind)
    before = value.clone()
    assert not found.adopt(value, 0.5)
    assert found.full is None
    assert torch.equal(value, before)
    del other


class Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first + second

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = gradients[0].clone()
        return value.view(8, 48), value.view(8, 48)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 8, bias=False)
        self.second = nn.Linear(48, 8, bias=False)
        self.third = nn.Linear(48, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = Shared.apply(self.first.weight, self.second.weight)
        return ((x @ weight.t()).tanh() + self.third(x)).square().mean()


def pair() -> Pair:
    torch.manual_seed(0)
    return Pair().double()


def inputs(step: int) -> torch.Tensor:
    return torch.randn(4, 48, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


@pytest.mark.parametrize("row", range(4))
@on_ranks(2)
def test_gradients_that_share_memory_are_each_counted_once(row: int) -> None:
    engine = start_engine(pair(), micro=2, accumulation=2, stage=row, optimizer=sgd(0.1), units=["Linear"])
    assert sum(g.in_place for g in engine.sharded.reducer.gradients) == 3
    for step in range(6):
        train_step(engine, engine(inputs(step).chunk(2)[engine.data_rank]))
    trained = engine.state_dict()
    model = pair()
    for step in range(0, 6, 2):
        loss = (model(inputs(step)) + model(inputs(step + 1))) / 2
        # Not ``backward`` for each: torch itself would add the second gradients into the memory that both share.
        found = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), found, strict=True):
                parameter -= 0.1 * value
    assert_close(trained, model.state_dict(), 1e-12, 1e-14)


class Looked(Pair):
    def forward(self, x: torch.Tensor, look: bool = False) -> torch.Tensor:
        h = self.second(x) + self.third(x) + self.first(x)
        return h.square().mean() + (self.first.weight.square().mean() if look else 0.0)


@on_ranks(2)
def test_after_the_last_backward_no_rank_has_units_that_others_have_not() -> None:
    engine = start_engine(
        Looked().double(), micro=2, stage=3, slots={"parameter": 99}, optimizer=sgd(0.1), units=["Linear"]
    )
    for _ in range(2):
        for step in range(2):
            engine.backward(engine(inputs(step), look=engine.data_rank == 0))
            assert all(unit.slot is None for unit in engine.sharded.units[1:])
        engine.step()


@pytest.mark.parametrize("add", [False, True])
def test_sums_of_narrower_parts_are_those_of_plain_torch_whatever_the_chunks(add: bool) -> None:
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3)]
    out = torch.full((1000,), 0.125)
    expected = (parts[0].float() + parts[1]) + parts[2] + (out if add else 0)
    with patch.object(sums, "CHUNK", 7):
        sums.accumulate(parts, out, add)
    assert torch.equal(out, expected)


def test_sums_of_narrower_parts_are_right_while_tensors_are_made_elsewhere_by_default() -> None:
    parts, out = [torch.ones(8, dtype=torch.bfloat16) for _ in range(2)], torch.zeros(8)
    with torch.device("meta"):
        sums.accumulate(parts, out, False)
    assert torch.equal(out, torch.full((8,), 2.0))


def test_the_matrix_has_a_unit_whose_gradient_is_not_copied() -> None:
    for mesh in (1, 2, 3, 4):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            named = [("wide.weight", numerics.Net().wide.weight.shape)]
            assert Layout.build(named, dtype, True, mesh).whole
    units = make_units(numerics.Net(), [])
    assert "wide" in [unit.name for unit in units]


@on_ranks(2)
def test_a_sum_does_not_wait_for_the_one_before_it() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    config = {"train_batch_size": 2, "units": ["Linear"], "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = zeromesh.initialize(model=model, config=config | {"zero_optimization": {"stage": 1}})[0]
    under_way, reducer = [], engine.sharded.reducer
    begin = reducer._reduce

    def note(*args: Any) -> None:
        begin(*args)
        under_way.append(len(reducer._in_flight))

    with patch.object(reducer, "_reduce", note):
        engine.backward(engine(torch.ones(1, 64)).sum())
    assert max(under_way) == reducer.memory.limit > 1
