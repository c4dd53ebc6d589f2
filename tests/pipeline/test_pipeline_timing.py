"""Stages balanced by measured time. The clock of these tests goes on where models say so, and nowhere else."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import zeromesh
from harness import run_ranks
from huggingface_models import MODELS
from zeromesh.batches import loss_of
from zeromesh.pipeline.runtime import timing
from zeromesh.pipeline.runtime.cut import examine
from zeromesh.pipeline.runtime.samples import ModelInput
from zeromesh.pipeline.schedule.partition import Blocks

WIDTH = 4
CPU = torch.device("cpu")


class Clock:
    now: float
    parameters: list[tuple[int, set[torch.dtype]]]
    runs: list[float]


@contextmanager
def stopped() -> Iterator[None]:
    Clock.now, Clock.parameters, Clock.runs = 0.0, [], []
    with mock.patch.object(timing, "perf_counter", side_effect=lambda: Clock.now):
        yield


class Spend(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, time: float) -> Tensor:
        context.time = time
        Clock.now += time
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        Clock.now += 2 * context.time
        return gradient, None


def spend(x: Tensor, time: float) -> Tensor:
    return Spend.apply(x, time)


class Slow(nn.Module):
    def __init__(self, time: float) -> None:
        super().__init__()
        self.linear, self.time = nn.Linear(WIDTH, WIDTH), time

    def extra_repr(self) -> str:
        return str(self.time)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            Clock.runs.append(self.time)
        return self.linear(spend(x, self.time))


class Model(nn.Module):
    def __init__(self, times: list[float]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList(Slow(time) for time in times)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        here = [parameter for parameter in self.parameters() if not parameter.is_meta]
        Clock.parameters.append((sum(p.numel() for p in here), {p.dtype for p in here}))
        x = spend(self.embedding(ids), 5)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 1:
                x = spend(x * self.scale, 7)
        return spend(self.head(self.norm(x.flatten(0, 1))), 11)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return spend(nn.functional.cross_entropy(logits, labels.flatten()), 13)


class Loss(nn.Module):
    calls = 0

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return loss(logits, labels)


IDS = torch.arange(8).reshape(2, 4)
SAMPLE = ModelInput((IDS, IDS), partial(loss_of, loss_fn=loss))


def blocks_of(model: nn.Module) -> Blocks:
    return examine(model, sample=SAMPLE)


def same(model: nn.Module) -> nn.Module:
    return model


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_time_is_that_of_each_block_with_what_follows_it(device: str) -> None:
    with torch.device(device):
        model = Model([1, 2, 3, 4])
    with stopped():
        blocks = timing.measured(model, blocks_of(model), CPU, None, same)
    assert blocks.seconds == (3 * (5 + 1), 3 * (2 + 7), 3 * 3, 3 * (4 + 11 + 13))
    assert blocks.cut([0, 2]) == blocks_of(model).cut([0, 2])


def test_blocks_that_are_alike_are_measured_once() -> None:
    model = Model([1, 1, 2, 1, 1, 1, 1, 2, 1])
    with stopped():
        seconds = timing.measured(model, blocks_of(model), CPU, None, same).seconds
    assert seconds == (18, 24, 6, 3, 3, 3, 3, 6, 75)
    measured = ["first", "followed by more", "2", "1", "last"]
    assert len(Clock.runs) == len(seconds) + timing.REPETITIONS * len(measured)


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_parameters_of_one_block_are_there_at_a_time_as_training_has_them(dtype: torch.dtype | None) -> None:
    model = Model([1, 2, 3, 4])
    before = [(name, id(p), p._version, p.device.type, p.grad) for name, p in model.named_parameters()]
    state = torch.get_rng_state()
    with stopped():
        timing.measured(model, blocks_of(model), CPU, dtype, same)
    layer, embedding = WIDTH * (WIDTH + 1), 10 * WIDTH
    sizes = [size for size, _ in Clock.parameters if size]
    assert set(sizes) == {embedding + layer, layer + WIDTH, layer, layer + 2 * WIDTH + embedding}
    dtypes = {dtype for _, dtypes in Clock.parameters for dtype in dtypes}
    assert dtypes == {dtype or torch.float32, torch.float32}, "a batch norm keeps its own"
    assert before == [(name, id(p), p._version, p.device.type, p.grad) for name, p in model.named_parameters()]
    assert torch.equal(torch.get_rng_state(), state)
    assert model.norm.num_batches_tracked == 0


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH) for _ in range(3))
        self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x.square().mean()


@pytest.mark.full
def test_blocks_of_all_kinds_can_be_measured() -> None:
    cases: list[tuple[nn.Module, ModelInput | None]] = [
        (MODELS[kind].build().to(MODELS[kind].dtype), None) for kind in ("gpt2", "deberta", "qwen3_moe", "resnet", "t5")
    ]
    cases.append((Recurrent(), ModelInput(torch.ones(2, 3, WIDTH), loss_of)))
    for model, sample in cases:
        blocks = examine(model, sample=sample)
        seconds = timing.measured(model, blocks, CPU, None, same).seconds
        assert seconds is not None
        assert len(seconds) == len(blocks.names)


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Any:
        return torch.arange(4), torch.arange(4)


class Uneven(Model):
    def __init__(self) -> None:
        rank = torch.distributed.get_rank()
        super().__init__([400 - 399 * rank, 50, 50, 50, 1 + 399 * rank])


class Failing(Uneven):
    def forward(self, ids: Tensor) -> Tensor:
        if not ids.is_meta and torch.distributed.get_rank() == 1:
            raise RuntimeError("out of memory")
        return super().forward(ids)


def initialise(kind: str, data: bool, further: dict[str, Any]) -> Any:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zeromesh")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    torch.manual_seed(0)
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "mesh": {"pipeline": 2},
        "pipeline": {"partition": "time"},
        **further,
    }
    zeromesh.init_distributed()
    loss_fn = Loss()
    with stopped():
        try:
            engine, _, loader, _ = zeromesh.initialize(
                model=globals()[kind](), config=config, training_data=Numbers() if data else None, loss_fn=loss_fn
            )
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            logger.removeHandler(handler)
        dtypes = {dtype for _, dtypes in Clock.parameters for dtype in dtypes}
    assert loader is not None
    assert loss_fn.calls == 0
    engine.train_batch(iter(loader))
    lines = [line for text in said if "cut into stages" in text for line in text.splitlines()]
    return engine.pipelined.cut.starts, lines, dtypes


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("further", "share"),
    [({}, "53.2%"), ({"bf16": {"enabled": True}}, "53.2%"), ({"activation_checkpointing": {"enabled": True}}, "53.5%")],
    ids=str,
)
def test_all_ranks_cut_by_the_mean_of_what_they_measure(further: dict[str, Any], share: str) -> None:
    first, second = run_ranks(initialise, 2, "Uneven", True, further)
    assert first[0] == second[0] == (0, 3)
    assert (torch.bfloat16 in first[2]) == ("bf16" in further)
    title, *lines = first[1]
    assert title == 'the model is cut into stages by pipeline.partition = "time":'
    assert lines[0].startswith("  stage 0: layers.0 to layers.2, 104 parameters, 54.2% of parameters, ")
    assert lines[0].endswith(f"% of operations, {share} of time")
    assert lines[1].startswith("  stage 1: layers.3 to layers.4, 88 parameters, 45.8% of parameters, ")
    assert second[1] == []


def test_all_ranks_are_told_if_time_cannot_be_measured() -> None:
    for said in run_ranks(initialise, 2, "Uneven", False, {}):
        assert "what inputs the model takes is not known; pass training_data" in said
    other, own = run_ranks(initialise, 2, "Failing", True, {})
    assert own.startswith('ValueError: pipeline.partition is "time", and the time that blocks of Failing take cannot')
    assert other.startswith("RuntimeError: rank 1 could not cut the model into stages: pipeline.partition is")
    assert "out of memory" in other
