"""The engine's fetches beside those of the planner's clock."""

import pytest
import torch
from torch import nn

import zeromesh
from zeromesh.apps.plan.predict.durations import UnitTime
from zeromesh.apps.plan.predict.step_clock import StepActions, StreamRules
from zeromesh.shard.parameters.fetch_order import fetches
from zeromesh.shard.parameters.residency import Residency
from zeromesh.shard.parameters.unit import Unit

ACCUMULATION = 3


class Stack(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))  # of the root
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def recorded(blocks: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """Return, by micro-batch of a step, the units whose fetches began before the first use and with each use."""
    engine, *_ = zeromesh.initialize(
        model=Stack(blocks),
        config={
            "train_batch_size": 2 * ACCUMULATION,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "Adam"},
            "zero_optimization": {"stage": 3},
            "slots": {"parameter": slots},
        },
    )
    micro_batches: list[list[list[int]]] = []
    begin, enter, enter_backward = Unit.begin_fetch, Residency.enter, Residency.enter_backward

    def begins(unit: Unit, *args: object) -> None:
        micro_batches[-1][-1].append(unit.index)
        begin(unit, *args)

    def enters(residency: Residency, unit: Unit) -> None:
        micro_batches[-1].append([])
        enter(residency, unit)

    def enters_backward(residency: Residency, unit: Unit, *args: object) -> None:
        if unit.index:  # not the root's
            micro_batches[-1].append([])
        enter_backward(residency, unit, *args)

    monkeypatch.setattr(Unit, "begin_fetch", begins)
    monkeypatch.setattr(Residency, "enter", enters)
    monkeypatch.setattr(Residency, "enter_backward", enters_backward)
    for _ in range(ACCUMULATION):
        micro_batches.append([])
        engine.backward(engine(torch.randn(2, 8)))
        engine.step()
    return micro_batches


@pytest.mark.parametrize(("blocks", "slots"), [(3, 2), (4, 4), (6, 2), (6, 3), (7, 5), (2, 6)])
def test_the_planner_fetches_what_the_engine_does(blocks: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    units = range(1, blocks + 1)  # the engine's root is unit 0
    uses = (*units, *reversed(units))
    first = [[*begun] for begun in fetches(uses, min(slots, blocks))]
    first[0].insert(0, 0)
    others = [[*begun] for begun in fetches(uses, min(slots, blocks), frozenset(units[:slots]))]
    engine = recorded(blocks, slots, monkeypatch)
    assert engine == [first, *[others] * (ACCUMULATION - 1)]

    rules = StreamRules(True, True, True, slots, gradient_slots=2, accumulation=ACCUMULATION)
    step = StepActions([UnitTime(str(unit), unit > 0, 1.0, gather=1.0) for unit in (0, *units)], rules)
    for number in range(ACCUMULATION):
        step.micro_batch(number == 0, number == ACCUMULATION - 1)
    emitted = [int(action.label.split()[1]) for action in step.actions if action.label.startswith("gather")]
    assert emitted == [unit for micro_batch in engine for begun in micro_batch for unit in begun]


def test_one_slot_serves_one_unit_at_a_time() -> None:
    assert fetches((1, 2, 2, 1), 1) == ((1,), (), (2,), (), (1,))
