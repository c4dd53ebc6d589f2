"""The interpreter carries out every action of a schedule, or refuses the schedule before the first one."""

import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from zeromesh.base.linear_arithmetic import Kept, keeping
from zeromesh.parallel.pipeline.runtime.interpreter import METHODS, Interpreter, Messages
from zeromesh.parallel.pipeline.runtime.stage import Stages
from zeromesh.parallel.pipeline.runtime.weight_gradients import postpone, roots_of
from zeromesh.parallel.pipeline.schedule.actions import Kind, Schedule, ScheduleError, parse

WIDTH, MICROBATCHES = 6, 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().sum()


class Work:
    """Stages without an engine: gradients stay where autograd puts them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def stage_loss(self, stage: int, batch: Tensor, kept: Kept | None, trains: bool) -> Tensor:
        with keeping(kept):
            return self.model(batch)

    def stage_backward(
        self, stage: int, roots: Sequence[Tensor], gradients: Sequence[Tensor] | None, last: bool, kept: Kept | None
    ) -> None:
        with keeping(kept):
            torch.autograd.backward(roots, gradients)

    def stage_weights(self, stage: int, kept: Kept, last: bool) -> None:
        roots = roots_of(kept)
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])


def batches() -> list[Tensor]:
    return [torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(MICROBATCHES)]


class Runs:
    """Two stages of a model on one rank, which may run several times."""

    def __init__(self, schedule: Schedule, rank: int = 0) -> None:
        self.model = Model().double()
        postpone(self.model)
        stages = Stages(self.model, [f"layers.{block}" for block in range(4)], (0, 2))
        group: Any = SimpleNamespace(rank=rank)
        messages = Messages(group, schedule.placement, torch.device("cpu"))
        self.interpreter = Interpreter(stages, messages, Work(self.model))
        self.schedule, self.rank = schedule, rank

    def __call__(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return losses and gradients."""
        self.model.zero_grad()
        given = [x.double() for x in batches()]
        losses = self.interpreter.run(self.schedule, self.rank, given, [0] * MICROBATCHES)
        return losses, [parameter.grad for parameter in self.model.parameters()]


def run(schedule: Schedule, rank: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    return Runs(schedule, rank)()


def of_torch(model: nn.Module | None = None) -> tuple[list[Tensor], list[Tensor]]:
    model = model or Model().double()
    model.zero_grad()
    losses = [model(x.double()) for x in batches()]
    torch.stack(losses).sum().backward()
    return [loss.detach() for loss in losses], [parameter.grad for parameter in model.parameters()]


HEAD = f"microbatches: {MICROBATCHES}\nplacement: 0 0\n"
FORWARDS = "rank 0: F0.0 F1.0 F0.1 F1.1 F0.2 F1.2 "
MIXED = {
    "whole": "B1.0 B0.0 B1.1 B0.1 B1.2 B0.2",
    "in two parts": "I1.0 I0.0 W1.0 W0.0 I1.1 I0.1 W1.1 W0.1 I1.2 W1.2 I0.2 W0.2",
    "some in two parts": "B1.0 B0.0 I1.1 I0.1 B1.2 I0.2 W1.1 W0.2 W0.1",
    "the last whole": "I1.0 I0.0 I1.1 I0.1 W1.1 W0.0 W1.0 B1.2 W0.1 B0.2",
    "some recomputed": "RECOMPUTE1.0 B1.0 RECOMPUTE0.0 I0.0 W0.0 B1.1 B0.1 I1.2 RECOMPUTE0.2 I0.2 W1.2 W0.2",
}


@pytest.mark.parametrize("name", MIXED)
def test_gradients_are_those_of_torch_however_backwards_are_divided(name: str) -> None:
    found, expected = run(parse(HEAD + FORWARDS + MIXED[name])), of_torch()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_blocks_may_be_replaced_between_runs() -> None:
    runs = Runs(parse(HEAD + FORWARDS + MIXED["whole"]))
    runs()
    torch.manual_seed(1)
    runs.model.layers[1] = nn.Linear(WIDTH, WIDTH).double()
    runs.model.layers[2].weight = nn.Parameter(torch.randn(WIDTH, WIDTH).double())
    found = runs()
    torch.testing.assert_close(found, of_torch(runs.model), rtol=1e-12, atol=1e-12)


def test_no_activation_outlives_a_run() -> None:
    runs = Runs(parse(HEAD + FORWARDS + MIXED["in two parts"]))
    made: list[ref[Tensor]] = []
    for layer in runs.model.layers:
        layer.register_forward_hook(lambda module, args, output: made.append(ref(output)))
    runs()
    gc.collect()
    assert len(made) == 4 * MICROBATCHES
    assert all(output() is None for output in made)


def refused(text: str, rank: int = 0) -> ScheduleError:
    with pytest.raises(ScheduleError) as error:
        run(parse(text), rank)
    return error.value


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("F0.0 F1.0 I1.0 B0.0", (0, -1), "missing action on rank 0: there is no W1.0"),
        ("F0.0 F1.0 B1.0 B0.0 W0.0", (0, -1), "done twice on rank 0: B0.0 does what W0.0 does"),
        ("F0.0 F1.0 B1.0 B0.0 B0.0", (0, 4), "done twice on rank 0 at position 4, B0.0"),
        ("F0.0 SA0.0 RA1.0 F1.0 B1.0 B0.0", (0, 1), "needless message on rank 0 at position 1, SA0.0"),
        ("F0.0 F1.0 B1.0 RECOMPUTE0.0 B0.0 F2.0", (0, 5), "unknown stage on rank 0 at position 5, F2.0"),
        ("F0.0 F1.0 RECOMPUTE0.0", (0, 2), "needless action on rank 0 at position 2, RECOMPUTE0.0: activations are"),
    ],
)
def test_actions_without_a_use_or_a_result_are_refused_before_the_first_one(
    text: str, place: tuple[int, int], reason: str
) -> None:
    error = refused(f"microbatches: 1\nplacement: 0 0\nrank 0: {text}")
    assert reason in str(error)
    assert (error.rank, error.position) == place


def test_a_schedule_without_the_messages_between_its_ranks_is_refused() -> None:
    error = refused("microbatches: 1\nplacement: 0 1\nrank 0: F0.0 B0.0\nrank 1: F1.0 B1.0", rank=1)
    assert "missing action on rank 1 at position 0, F1.0: it needs RA1.0, and there are no messages" in str(error)


def test_every_kind_of_action_is_carried_out() -> None:
    assert set(METHODS) == set(Kind)
