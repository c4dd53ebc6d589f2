"""Access to whole tensors of any row: read, and changed in several ways between the steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import on_ranks, run_ranks
from run import start_engine, train_step


class Sparsely(nn.Module):  # has a frozen parameter, one that nothing uses, one that only odd ranks use, and a tie
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.blocks[1].bias.requires_grad_(False)
        self.blocks[2].weight = self.blocks[0].weight
        self.unused = nn.Parameter(torch.ones(5))
        self.odd = nn.Parameter(torch.ones(7))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
        return (x * self.odd if rank % 2 else x).square().sum()


Tensors = dict[str, torch.Tensor | None]


ADAM = {"lr": 1e-2, "weight_decay": 0.1}


def sample(step: int, micro_batch: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    return torch.randn(3, 7, generator=generator, dtype=torch.float64)


def make_sparsely() -> Sparsely:
    torch.manual_seed(2)
    return Sparsely().double()


def kept(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.detach().clone()


def changed(value: torch.Tensor) -> torch.Tensor:
    return value * 0.5 + torch.arange(value.numel(), dtype=value.dtype).view(value.shape) / 100


CHANGED = ("blocks.0.weight", "blocks.0.bias", "scale", "odd")


def plain_access(ranks: int, accumulation: int) -> list[Tensors]:
    model, found = make_sparsely(), []
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAM)

    def state(key: str) -> Tensors:
        return {name: kept(optimizer.state.get(p, {}).get(key)) for name, p in named.items()}

    def backward(step: int, micro_batch: int) -> None:
        for rank in range(ranks):
            (model(sample(step, micro_batch, rank), rank) / ranks / accumulation).backward()
        found.append({name: kept(p.grad) for name, p in named.items()})

    found.append(state("exp_avg"))
    for step in range(3):
        for micro_batch in range(accumulation):
            backward(step, micro_batch)
        if step == 1:
            for name in CHANGED:
                if named[name].grad is not None:
                    named[name].grad = changed(named[name].grad)
            model.unused.grad = torch.ones_like(model.unused)
        optimizer.step()
        optimizer.zero_grad()
        found += [state("exp_avg"), state("exp_avg_sq")]
        found.append({name: kept(p) if p.requires_grad else None for name, p in named.items()})
        if step == 0:
            for name in CHANGED:
                if named[name] in optimizer.state:
                    optimizer.state[named[name]]["exp_avg"] = changed(optimizer.state[named[name]]["exp_avg"])
                named[name].data = changed(named[name].data)
    found.append({name: kept(value) for name, value in model.state_dict().items()})
    return found


def engine_access(row: int, ranks: int, accumulation: int, mesh: dict[str, int]) -> list[Tensors]:
    zero = zeromesh.zero
    engine = start_engine(
        make_sparsely(),
        micro=1,
        accumulation=accumulation,
        optimizer={"type": "AdamW", "params": ADAM},
        stage=row,
        mesh=mesh,
    )
    named, rank, found = dict(engine.module.named_parameters()), engine.data_rank, []

    def each(function: Callable[..., Any], *args: Any) -> Tensors:
        first = {name: kept(function(p, *args)) for name, p in named.items()}
        again = {name: function(p, *args) for name, p in named.items()}
        for name, value in first.items():
            assert (value is None and again[name] is None) or torch.equal(value, again[name]), f"{name}, read twice"
        return first

    with pytest.raises(RuntimeError, match="between backward and step"):
        zero.safe_set_full_grad(named["scale"], torch.tensor(1.0))
    assert set(each(zero.safe_get_full_grad).values()) == {None}
    found.append(each(zero.safe_get_full_optimizer_state, "exp_avg"))
    for step in range(3):
        for micro_batch in range(accumulation):
            engine.backward(engine(sample(step, micro_batch, rank), rank))
            found.append(each(zero.safe_get_full_grad))
            if micro_batch < accumulation - 1:
                engine.step()
        if step == 1:
            for name in CHANGED:
                if found[-1][name] is not None:
                    zero.safe_set_full_grad(named[name], changed(found[-1][name]))
            zero.safe_set_full_grad(named["unused"], torch.ones(5))
        engine.step()
        found += [each(zero.safe_get_full_optimizer_state, key) for key in ("exp_avg", "exp_avg_sq")]
        found.append(each(zero.safe_get_full_fp32_param))
        if step == 0:
            for name in CHANGED:
                state = found[-3][name]
                if state is not None:
                    zero.safe_set_full_optimizer_state(named[name], changed(state), "exp_avg")
                zero.safe_set_full_fp32_param(named[name], changed(found[-1][name]))
    with pytest.raises(ValueError, match=r"blocks.1.bias is frozen"):
        zero.safe_set_full_fp32_param(named["blocks.1.bias"], torch.zeros(7))
    with pytest.raises(ValueError, match=r"blocks.0.bias has shape \(7,\), the value given \(8,\)"):
        zero.safe_set_full_fp32_param(named["blocks.0.bias"], torch.zeros(8))
    with pytest.raises(ValueError, match="belongs to no engine"):
        zero.safe_get_full_grad(nn.Parameter(torch.zeros(2)))
    found.append(engine.gathered_state_dict())
    return found


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("row", "ranks", "mesh"),
    [(row, ranks, {}) for ranks in (1, 2) for row in range(4)]
    + [pytest.param(row, 4, {"replicate": 2, "data": 2}, marks=pytest.mark.full) for row in (0, 1, 3)],
)
def test_whole_tensors_are_what_plain_torch_has_and_changes_are_taken(row: int, ranks: int, mesh: Any) -> None:
    for accumulation in (1, 2):
        expected = plain_access(ranks, accumulation)
        results = run_ranks(engine_access, ranks, row, ranks, accumulation, mesh)
        for rank, found in enumerate(results):
            *found, whole = found
            for number, (mine, other) in enumerate(zip(found, expected[:-1], strict=True)):
                assert_close(mine, other, f"rank {rank}, read {number}")
            assert rank == 0 or whole == {}
        assert_close(results[0][-1], expected[-1], "the gathered state")


def assert_close(found: Tensors, expected: Tensors, where: str) -> None:
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        got = found[name]
        assert (got is None) == (want is None), f"{where}: {name} is {got}, not {want}"
        if got is not None and want is not None:
            assert got.shape == want.shape
            assert bool(((got - want).abs() <= 1e-9 * (1 + want.abs())).all()), f"{where}: {name}"


def write(parameter: nn.Parameter, value: float, how: str) -> None:
    with torch.no_grad():
        if how == "in place":
            parameter.fill_(value)
        else:
            parameter.data = torch.full(parameter.shape, value, dtype=parameter.dtype)


@pytest.mark.some(5)
@pytest.mark.parametrize("bf16", [False, True], ids=["float64", "bf16"])
@pytest.mark.parametrize(
    ("row", "how"), [*((row, "in place") for row in (0, 1, 2)), *((row, "new data") for row in (0, 1, 2, 3))]
)
@on_ranks(2)
def test_the_last_of_several_kinds_of_writes_counts_and_none_is_lost(row: int, bf16: bool, how: str) -> None:
    zero = zeromesh.zero
    model = make_sparsely().to(torch.float32 if bf16 else torch.float64)
    engine = start_engine(model, micro=1, optimizer={"type": "AdamW", "params": ADAM}, stage=row, bf16=bf16)
    train_step(engine, engine(sample(0, 0, engine.data_rank), engine.data_rank))
    named = dict(engine.module.named_parameters())
    first, other, last, third = (named[name] for name in ("blocks.0.weight", "blocks.0.bias", "odd", "blocks.2.bias"))
    for parameter in (first, other, third):
        write(parameter, 0.25, how)
    zero.safe_set_full_fp32_param(first, torch.full((7, 7), 1 / 3))
    zero.safe_set_full_fp32_param(last, torch.full((7,), 1 / 3))
    write(last, 0.5, how)
    write(named["scale"], 0.75, how)
    found = [{name: kept(value) for name, value in engine.state_dict().items()}]
    zero.safe_set_full_optimizer_state(first, torch.full((7, 7), 2.0), "exp_avg")
    engine.optimizer.param_groups[0]["lr"] = 0.0  # what was written is what is there after the updates
    for number in (1, 2):
        engine.backward(engine(sample(number, 0, engine.data_rank), engine.data_rank))
        if number == 2:
            write(third, 0.125, how)
            zero.safe_set_full_grad(first, torch.ones(7, 7))
        engine.step()
        found.append({name: zero.safe_get_full_fp32_param(p) for name, p in named.items()})
    narrow = 2**-8 if bf16 else 1e-6
    for number, (values, third) in enumerate(zip(found, (0.25, 0.25, 0.125), strict=True)):
        # What was set is not rounded. A master keeps its last bits where its parameter was what is written already.
        exact = 1e-6 if number > 0 else narrow
        expected = {"blocks.0.weight": (1 / 3, exact), "blocks.0.bias": (0.25, narrow), "odd": (0.5, narrow)}
        for name, (value, error) in {**expected, "scale": (0.75, narrow), "blocks.2.bias": (third, narrow)}.items():
            got = values[name].flatten().tolist()
            assert got == pytest.approx([value] * len(got), rel=error), (number, name)
