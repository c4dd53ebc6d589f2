"""What changes while a pipeline trains: what is frozen, and whether there are graphs; and what must not."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeromesh
from harness import RankFailure, on_ranks, run_ranks
from zeromesh.parallel.pipeline.runtime.elsewhere import Elsewhere, counting, counts
from zeromesh.parallel.pipeline.runtime.interpreter import Interpreter
from zeromesh.parallel.pipeline.runtime.stage import Stages
from zeromesh.parallel.pipeline.schedule.actions import parse

WIDTH, SAMPLES, MICROBATCHES = 8, 2, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h).tanh()
        return (h - y).pow(2).mean()


class Context(Model):
    def __init__(self, mode: Callable[[], Any]) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        with self.mode():
            for layer in self.layers:
                h = layer(h).tanh()
        return ((h - y) * self.first.weight.sum()).pow(2).mean()


class Detached(Model):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y).detach()


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        return self.linear(x).tanh() + more


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.layers = nn.ModuleList(Added() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        more, h = self.norm(x), x
        for layer in self.layers:
            h = layer(h, more)
        return (h - y).pow(2).mean()


class Clamped(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Clamping() for _ in range(4))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight, bias = self.first.weight, self.first.bias
        weight.data.clamp_(-0.2, 0.2)
        weight.data[0] = 0.1
        weight.data.view(-1)[3:5].fill_(0.15)
        with torch.no_grad():
            bias.copy_(bias.clamp(-0.1, 0.1))
            bias[0] = 0.05
            torch.clamp(self.scale, -0.7, 0.7, out=self.scale)
            nn.init.constant_(self.scale[:2], 0.6)
        self.scale.data *= 1
        x = (x * self.scale.detach().t()).tanh() + self.scale
        return super().forward(x, y)


class Decaying(Model):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.first.weight.data.mul_(0.99)
        return super().forward(x, y)


class Clamping(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.15, 0.15)
        return super().forward(x)


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[int, Tensor]:
        return {0: x, 1: self.linear(x).tanh()}


class Keys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Numbered() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            found = layer(x)
            x = found[0] + found[1]
        return (x - y).pow(2).mean()


KINDS: dict[str, type[nn.Module]] = {
    "plain": Model,
    "detached": Detached,
    "normed": Normed,
    "keys": Keys,
    "clamped": Clamped,
    "decaying": Decaying,
}


def start(kind: str, pipeline: int, row: int = 0, schedule: str = "1f1b") -> zeromesh.Engine:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "train_batch_size": SAMPLES * MICROBATCHES,
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": row},
        "mesh": {"pipeline": pipeline},
        "pipeline": {"schedule": schedule, "chunks": 2 if schedule == "interleaved-1f1b" else None},
    }
    return zeromesh.initialize(model=KINDS[kind]().double(), config=settings)[0]


def given(step: int, samples: int = SAMPLES) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    for _ in range(MICROBATCHES):
        x, y = torch.randn(2, samples, WIDTH, generator=generator, dtype=torch.float64)
        yield 3 * x + 1, y


def numbers(kind: str, pipeline: int, schedule: str = "1f1b", row: int = 0, freezes: tuple[bool, ...] = ()) -> Any:
    engine = start(kind, pipeline, row, schedule if pipeline > 1 else "1f1b")
    found = []
    for step in range(3):
        for frozen in freezes[step : step + 1]:
            for name, parameter in engine.module.named_parameters():
                if name.startswith(("first", "layers.0", "layers.1")):
                    parameter.requires_grad_(not frozen)
        found += [float(engine.train_batch(given(step))), engine.get_global_grad_norm()]
    return [*found, float(engine.eval_batch(given(9)))]


def compare(kind: str, **options: Any) -> None:
    expected = run_ranks(numbers, 1, kind, 1, **options)[0]
    for found in run_ranks(numbers, 2, kind, 2, timeout=60, **options):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("freezes", [(True, False, True), (False, True, False)], ids=["at first", "later"])
@pytest.mark.parametrize(("schedule", "row"), [("1f1b", 0), ("zb-v", 3)])
def test_layers_may_be_frozen_between_updates(freezes: tuple[bool, ...], schedule: str, row: int) -> None:
    compare("plain", freezes=freezes, schedule=schedule, row=row)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_values_made_of_inputs_and_buffers_are_the_same_on_all_stages(schedule: str) -> None:
    compare("normed", schedule=schedule)


def test_blocks_return_mappings_with_numbers_as_keys() -> None:
    compare("keys")


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_forward_may_write_to_its_parameters_on_stages_that_do_not_have_them(schedule: str) -> None:
    compare("clamped", schedule=schedule)


def test_parameters_that_each_forward_changes_need_one_stage_per_rank() -> None:
    compare("decaying")
    with pytest.raises(
        RankFailure, match="the model's forward changes first.weight each time, outside of the pipeline"
    ):
        run_ranks(decaying_twice, 2)


def decaying_twice() -> None:
    start("decaying", 2, schedule="zb-v").train_batch(given(0))


def test_stand_ins_for_parameters_drop_writes_and_refuse_to_count() -> None:
    parameter = nn.Parameter(torch.randn(3, 4))
    zeros = Elsewhere.make("first.weight", parameter, None, torch.float64)
    assert (zeros.shape, zeros.size(), zeros.dtype, zeros.data.dtype) == ((3, 4), (3, 4), torch.float64, torch.float64)
    for alias in (zeros, zeros.data, zeros.detach()[1:], zeros.view(-1), zeros.t().chunk(2)[0]):
        alias.add_(1)
        alias[0] = 2.0
        alias.data.copy_(torch.ones(alias.shape))
        assert alias.untyped_storage().nbytes() == zeros.itemsize
    assert not zeros.any()
    made = torch.ones(3, 4, dtype=torch.float64).add_(zeros)
    assert (type(made), float(made.sum())) == (Tensor, 12.0)
    with counting():
        counts()
        for use in (lambda: zeros.data.clamp_(0, 1), lambda: zeros.fill_(1), lambda: zeros.__setitem__(0, 1.0)):
            with pytest.raises(RuntimeError, match="first.weight is needed on a stage of the pipeline that does not"):
                use()


@pytest.mark.full
@on_ranks(2)
def test_an_evaluation_fetches_the_same_whether_or_not_its_shapes_are_new() -> None:
    """Ranks of one stage may have seen different ones, and must fetch the same."""
    engine = start("plain", 2, row=3)
    order = engine.sharded.events.order
    engine.train_batch(given(0))
    found = [order.current.number, len(order.forward)]
    engine.eval_batch(given(1))
    engine.eval_batch(given(1, 3 * SAMPLES))
    before, waiting, after, left = [*found, order.current.number, len(order.forward)]
    assert (after, left) == (before, waiting) == (MICROBATCHES, 0)


class Here:
    def is_here(self, stage: int) -> bool:
        return True

    def finish(self) -> None:
        pass


class Losses:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.roots = model, []

    def stage_loss(self, stage: int, batch: Any, kept: Any, trains: bool) -> Tensor:
        return self.model(*batch)

    def stage_backward(self, stage: int, roots: Any, *_: Any) -> None:
        self.roots += roots


def test_a_loss_is_differentiated_even_if_it_has_no_graph() -> None:
    """And not left out, as what a stage hands over without one: who is to differentiate it says so."""
    work = Losses(Detached())
    schedule = parse("microbatches: 1\nplacement: 0\nrank 0: F0.0 B0.0")
    stages = Stages(work.model, [f"layers.{number}" for number in range(4)], (0,))
    losses = Interpreter(stages, Here(), work).run(schedule, 0, [torch.randn(2, SAMPLES, WIDTH)], [0])
    assert [float(root) for root in work.roots] == [float(loss) for loss in losses]


@on_ranks(2)
def test_a_loss_without_a_graph_is_refused() -> None:
    engine = start("detached", 2)
    if engine.pipelined.stages == [1]:
        with pytest.raises(ValueError, match="the loss has no graph"):
            engine.stage_work.stage_backward(1, [torch.zeros(())], None, True, None)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_stage_cannot_begin_where_the_model_sets_whether_there_are_gradients(mode: Callable[[], Any]) -> None:
    """When it puts back what was the case before the stage's blocks, there are none."""
    model = Context(mode)
    x, y = torch.randn(2, SAMPLES, WIDTH)
    stages = Stages(model, [f"layers.{number}" for number in range(4)], (0, 2))
    handed = stages.run(0, lambda: model(x, y), None)
    with pytest.raises(RuntimeError, match=r"calls layers.2 inside of torch.set_grad_enabled, enable_grad or no_grad"):
        stages.run(1, lambda: model(x, y), handed)
    assert torch.is_grad_enabled()
    with torch.no_grad():
        stages.run(1, lambda: model(x, y), handed)
