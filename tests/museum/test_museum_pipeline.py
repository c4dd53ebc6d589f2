"""Stages of a pipeline: silent errors of other systems, and that ours train as one process does."""

import copy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeromesh
from harness import run_ranks
from museum import FAR, LIMIT, Weights, gap, in_float64, require, results_of

MICROBATCHES, STEPS, LR, MOMENTUM = 4, 2, 0.2, 0.9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.linear(x).tanh()


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def given(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    for number in range(MICROBATCHES):
        ids = torch.randint(0, 12, (2, 5 + number % 2), generator=generator)
        yield ids, ids.roll(-1, 1)


def start(stages: int = 2, **pipeline: Any) -> zeromesh.Engine:
    settings = {
        "train_batch_size": 2 * MICROBATCHES,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": MOMENTUM}},
        "mesh": {"pipeline": stages},
        "pipeline": pipeline,
    }
    return zeromesh.initialize(model=in_float64(Tied), config=settings)[0]


Found = tuple[list[float], list[float], list[Weights]]


def advance(engine: zeromesh.Engine, steps: range) -> Found:
    """Return losses, norms, and the state after every update as all ranks see it."""
    losses, norms, states = [], [], []
    for step in steps:
        losses.append(float(engine.train_batch(given(step))))
        norms.append(float(engine.get_global_grad_norm()))
        states.append(copy.deepcopy(dict(engine.state_dict())))
    return losses, norms, states


def saved(stages: int, folder: str) -> None:
    """Save after the first update."""
    engine = start(stages)
    advance(engine, range(1))
    engine.save_checkpoint(folder)


def resumed(stages: int, folder: str) -> Found:
    engine = start(stages)
    engine.load_checkpoint(folder)
    return advance(engine, range(1, STEPS))


def program() -> dict[str, Found]:
    further: dict[str, dict[str, Any]] = {
        "1f1b": {},
        "zb-h1": {"schedule": "zb-h1"},
        "interleaved-1f1b": {"schedule": "interleaved-1f1b", "chunks": 2},
        "recomputed": {"recompute": True},
    }
    return {name: advance(start(**settings), range(STEPS)) for name, settings in further.items()}


Combine = Callable[[str, list[Tensor]], Tensor]


def mean(name: str, parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).mean(0)


@cache
def plain(combine: Combine = mean, untied: bool = False) -> Found:
    """Train in one process; ``combine`` makes the gradient of an update of those of the micro-batches."""
    model = in_float64(Tied)
    if untied:
        model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    losses, norms, states = [], [], []
    for step in range(STEPS):
        each, parts = [], []
        for batch in given(step):
            loss = model(*batch)
            each.append(float(loss.detach()))
            parts.append(torch.autograd.grad(loss, list(model.parameters())))
        for (name, parameter), *own in zip(model.named_parameters(), *parts, strict=True):
            parameter.grad = combine(name, own)
        losses.append(sum(each) / len(each))
        norms.append(float(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])))
        optimizer.step()
        states.append(copy.deepcopy(model.state_dict()))
    return losses, norms, states


def require_all(wrong: Found, *names: str) -> None:
    for found in results_of(program):
        for name in names:
            assert gap(found[name][0], plain()[0]) <= LIMIT
            assert gap(found[name][1], plain()[1]) <= LIMIT
            require(found[name][2][-1], plain()[2][-1], wrong[2][-1])


def early(name: str) -> bool:
    return name.startswith(("embedding", "blocks.0", "blocks.1"))


def test_earlier_stages_divide_by_the_micro_batches_once() -> None:
    # The loss was divided where it is computed, and the gradient again where a stage got it.
    again = plain(lambda name, parts: mean(name, parts) / (MICROBATCHES if early(name) else 1))
    require_all(again, "1f1b", "zb-h1", "interleaved-1f1b", "recomputed")


def test_all_stages_divide_by_the_micro_batches() -> None:
    require_all(plain(lambda name, parts: torch.stack(parts).sum(0)), "1f1b", "zb-h1", "interleaved-1f1b")


def test_no_stage_divides_what_is_divided_already() -> None:
    require_all(plain(lambda name, parts: mean(name, parts) / MICROBATCHES), "1f1b", "zb-h1", "interleaved-1f1b")


def test_each_micro_batch_has_the_same_weight_in_a_stages_gradient() -> None:
    def rescaled_each_time(name: str, parts: list[Tensor]) -> Tensor:
        total = torch.zeros_like(parts[0])
        for part in parts:
            total = (total + part) / MICROBATCHES
        return total

    require_all(plain(rescaled_each_time), "1f1b", "interleaved-1f1b", "zb-h1")


def test_micro_batches_of_other_lengths_do_not_replace_the_gradients_before_them() -> None:
    require_all(plain(lambda name, parts: parts[-1] / MICROBATCHES), "1f1b", "zb-h1", "interleaved-1f1b", "recomputed")


def test_gradients_of_weights_that_are_computed_later_are_scaled_as_the_others() -> None:
    def unscaled(name: str, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).sum(0) if name.endswith("linear.weight") else mean(name, parts)

    require_all(plain(unscaled), "zb-h1")


def test_a_head_that_is_the_embedding_stays_it_on_another_stage() -> None:
    wrong = plain(untied=True)
    assert gap(wrong[2][-1]["head.weight"], wrong[2][-1]["embedding.weight"]) >= FAR
    require_all(wrong, "1f1b", "zb-h1", "interleaved-1f1b", "recomputed")


def test_every_stage_shows_the_weights_of_the_latest_update() -> None:
    want = plain()[2]
    for found in results_of(program):
        for states in (of_one[2] for of_one in found.values()):
            require(states[-1], want[-1], want[-2])


def test_a_recomputed_stage_changes_its_buffers_once() -> None:
    want = {name: value for name, value in plain()[2][-1].items() if name.endswith("calls")}
    assert all(int(value) == MICROBATCHES * STEPS for value in want.values())
    for found in results_of(program):
        own = {name: found["recomputed"][2][-1][name] for name in want}
        require(own, want, {name: 2 * value for name, value in want.items()})


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_layers_of_a_checkpoint_are_those_of_the_model_and_not_of_a_stage(
    before: int, after: int, tmp_path: Path
) -> None:
    run_ranks(saved, before, before, str(tmp_path))
    _, _, states = plain()
    wrong = copy.deepcopy(states[-1])
    for kind in ("weight", "bias"):  # Each stage counted its layers from zero.
        for layer in (2, 3):
            wrong[f"blocks.{layer}.linear.{kind}"] = wrong[f"blocks.{layer - 2}.linear.{kind}"]
    for losses, norms, found in run_ranks(resumed, after, after, str(tmp_path)):
        assert gap((losses, norms), tuple(values[1:] for values in plain()[:2])) <= LIMIT
        require(found[-1], states[-1], wrong)
