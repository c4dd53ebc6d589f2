"""Means over tokens, micro-batches and ranks: silent errors of others, and that ours are those of one process."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeromesh
from harness import run_ranks
from museum import Weights, in_float64, require, results_by_name, start, weights_of, whole
from run import train_step
from zeromesh.apps.train.data.ordered_loader import NO_LABEL, Batch
from zeromesh.apps.train.run_loss import weighted

WORDS, ROWS, LENGTH = 7, 8, 6
LABELS = (1, 1, 2, 1, 6, 6, 5, 6)
"""Learned tokens of each row of the joint batch."""


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 5), nn.Linear(5, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).tanh())


def joint_batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = (ids * 3 + 1) % WORDS
    for row, count in enumerate(LABELS):
        labels[row, count:] = NO_LABEL
    return ids, labels


def loss_of(model: Any, ids: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction=reduction)


def micro_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return the joint batch in so many parts."""
    return list(zip(*(part.chunk(count) for part in joint_batch()), strict=True))


def own(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's micro-batches of an update."""
    return micro_batches(steps * dist.get_world_size())[dist.get_rank() :: dist.get_world_size()]


def train_words(steps: int) -> tuple[float | None, float | None, Weights, int]:
    """Train on all learned tokens alike, as ``zeromesh train`` does: loss, norm, weights and number of labels."""
    engine = start(
        in_float64(Words), gradient_accumulation_steps=steps, train_micro_batch_size_per_gpu=ROWS // 2 // steps
    )
    language: Any = SimpleNamespace(logits=lambda model, batch: model(batch.tokens))
    given, labels = weighted(engine, language, [Batch(ids, labels) for ids, labels in own(steps)])
    engine.train_batch(iter(given))
    return engine.get_mean_loss(), engine.get_global_grad_norm(), whole(engine), labels


def train_plainly(steps: int, divided: bool = False) -> tuple[float | None, float | None, Weights]:
    """Train on the mean of the micro-batches' means; ``divided``: the caller divides by their number itself."""
    engine = start(
        in_float64(Words), gradient_accumulation_steps=steps, train_micro_batch_size_per_gpu=ROWS // 2 // steps
    )
    for ids, labels in own(steps):
        labels = labels.masked_fill(labels == NO_LABEL, 0)  # as many in every row
        loss = loss_of(engine, ids, labels)
        engine.backward(loss / steps if divided else loss, scale_wrt_gas=not divided)
        engine.step()
    return engine.get_mean_loss(), engine.get_global_grad_norm(), whole(engine)


def without_sync() -> list[Weights]:
    """Train with micro-batches whose gradients stay on the rank until the last one."""
    found = []
    for stage in (0, 2):
        engine = start(in_float64(Words), zero_optimization={"stage": stage}, gradient_accumulation_steps=2)
        first, last = own(2)
        with engine.no_sync():
            engine.backward(loss_of(engine, *first))
        train_step(engine, loss_of(engine, *last))
        found.append(whole(engine))
    return found


def program() -> dict[str, Any]:
    return {
        "tokens": {steps: train_words(steps) for steps in (1, 2, 4)},
        "means": {steps: train_plainly(steps) for steps in (1, 2, 4)},
        "divided": train_plainly(2, divided=True),
        "without sync": without_sync(),
    }


def alone(loss: Tensor, model: nn.Module) -> tuple[float, float, Weights]:
    """Update once in one process: the loss, the norm of its gradient, and the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.zero_grad()
    loss.backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    optimizer.step()
    return loss.item(), norm, weights_of(model)


def update(means: int) -> tuple[float, float, Weights]:
    """Update once on the mean over ``means`` parts of the joint batch of their means over tokens."""
    model = in_float64(Words)
    return alone(torch.stack([loss_of(model, *part) for part in micro_batches(means)]).mean(), model)


def test_every_token_counts_once_however_micro_batches_are_filled() -> None:
    right = update(1)
    for found in results_by_name(program)["tokens"]:
        for steps in (2, 4):
            loss, norm, weights, labels = found[steps]
            assert labels == sum(LABELS)
            require(loss, right[0], update(2 * steps)[0])
            require(norm, right[1], update(2 * steps)[1])
            require(weights, right[2], update(2 * steps)[2])


def test_a_rank_with_fewer_tokens_has_a_smaller_share() -> None:
    right, mean_of_ranks = update(1), update(2)
    for found in results_by_name(program)["tokens"]:
        require(found[1][2], right[2], mean_of_ranks[2])


def plain_means() -> tuple[float, float, Weights]:
    model, (ids, labels) = in_float64(Words), joint_batch()
    return alone(loss_of(model, ids, labels.masked_fill(labels == NO_LABEL, 0)), model)


def test_the_reported_loss_does_not_depend_on_the_accumulation_steps() -> None:
    right = plain_means()[0]
    for found in results_by_name(program)["means"]:
        for steps in (1, 2, 4):
            require(found[steps][0], right, right / 2)  # divided by the steps, as one that is differentiated


def test_gradients_do_not_depend_on_the_accumulation_steps() -> None:
    _, norm, weights = plain_means()
    before = weights_of(in_float64(Words))
    for found in results_by_name(program)["means"]:
        for steps in (1, 2, 4):
            require(found[steps][1], norm, norm * 2)  # summed
            halved = {name: before[name] + (weights[name] - before[name]) / 2 for name in weights}
            require(found[steps][2], weights, halved)  # divided twice


def test_a_loss_that_the_caller_divides_is_divided_once() -> None:
    loss, norm, weights = plain_means()
    for found in results_by_name(program)["divided"]:
        require(found[0], loss, loss / 2)
        require(found[1], norm, norm / 2)
        require(found[2], weights, weights_of(in_float64(Words)))


def test_the_last_micro_batch_of_an_update_is_the_one_that_is_reduced() -> None:
    right = update(4)[2]
    model = in_float64(Words)
    losses = [loss_of(model, *part) for part in micro_batches(4)]
    # Where the first one is reduced instead, rank 0 has the mean over both ranks of their first, and its own second.
    wrong = alone((losses[0] + losses[1]) / 4 + losses[2] / 2, model)[2]
    for found in results_by_name(program)["without sync"]:
        for weights in found:
            require(weights, right, wrong)


class Samples(torch.utils.data.Dataset[Tensor]):
    """Six numbers; two ranks with two micro-batches of one sample each take four of them in an update."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([4.0**index], dtype=torch.float64)


def short_passes() -> list[tuple[float, int]]:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    settings = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }  # fmt: skip
    engine = zeromesh.initialize(
        model=model, config=settings, training_data=Samples(), loss_fn=lambda out, _: out.mean(), collate_fn=pairs
    )[0]
    return [(float(engine.train_batch()), engine.global_samples) for _ in range(3)]


def pairs(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.stack(samples), torch.zeros(len(samples))


def test_the_rest_of_a_pass_is_no_update_of_its_own_and_is_not_lost() -> None:
    found = run_ranks(short_passes, 2)
    assert found[0] == found[1]
    losses = [loss for loss, _ in found[0]]
    assert [samples for _, samples in found[0]] == [4, 8, 12]
    # Powers of four, so that the sums of four samples show which they were: in two passes each is taken twice.
    totals = [round(4 * loss) for loss in losses]
    assert sum(totals) == 2 * sum(4**number for number in range(6))
    wrong = sum(4**number for number in range(6)) * 4 / 6 + sum(4**number for number in range(6)) / 2
    require(sum(losses), sum(totals) / 4, wrong / 4)  # where a pass of three micro-batches ends with half an update


class Detour(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor, detour: bool) -> Tensor:
        return ((self.main(x) + self.side(x)) if detour else self.main(x)).square().mean()


MOMENTUM = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
USES = ((True, True), (True, False), (False, False), (False, True))
"""By update, which of the two ranks uses the side branch."""


def detour() -> Detour:
    torch.manual_seed(3)
    return Detour().double()


def sides() -> list[Tensor]:
    return list(torch.randn(4, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4)))


def train_detours() -> dict[int, Weights]:
    found = {}
    for stage in (0, 3):
        settings = {"optimizer": {"type": "SGD", "params": MOMENTUM}, "zero_optimization": {"stage": stage}}
        engine = zeromesh.initialize(model=detour(), config=settings | {"train_micro_batch_size_per_gpu": 2})[0]
        for x, uses in zip(sides(), USES, strict=True):
            rank = dist.get_rank()
            train_step(engine, engine(x.chunk(2)[rank], uses[rank]))
        found[stage] = whole(engine)
    return found


def detours_alone(zeros: bool) -> Weights:
    """Train in one process; ``zeros``: parameters that nobody used get gradients of zeros."""
    model = detour()
    optimizer = torch.optim.SGD(model.parameters(), **MOMENTUM)
    for x, uses in zip(sides(), USES, strict=True):
        torch.stack([model(part, use) for part, use in zip(x.chunk(2), uses, strict=True)]).mean().backward()
        for parameter in model.parameters() if zeros else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def test_a_parameter_that_no_rank_used_is_left_alone() -> None:
    for found in run_ranks(train_detours, 2):
        for stage in (0, 3):
            require(found[stage], detours_alone(zeros=False), detours_alone(zeros=True))
