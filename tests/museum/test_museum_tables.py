"""Embeddings: silent errors of other systems, and that ours are those of one process."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeromesh
from museum import Weights, require, results_by_name, start
from run import sgd, start_engine, train_step

ROWS, LR, EPS = 7, 0.5, 1e-10
"""So many rows that ranks have different numbers of them."""
PADDING, VOCABULARY = 1, 9
IDS = torch.tensor([[0, 6], [5, 5], [5, 4], [6, PADDING]])
"""A row per sample: with rows that both ranks use, one twice in a sample, and of both halves of the table."""


TOKENS = torch.arange(2 * VOCABULARY).view(2, -1) % VOCABULARY
SAMPLES = torch.arange(1.0, 9.0, dtype=torch.float64).view(4, 2)


class Words(nn.Module):
    """The mean of squares of what the rows of a sample make."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        options: dict[str, Any] = {"sparse": kind != "tied"}
        if kind == "bags":
            self.table: Any = nn.EmbeddingBag(ROWS, 3, mode="mean", **options)
        else:
            self.table = nn.Embedding(ROWS, 3, padding_idx=PADDING if kind == "padded" else None, **options)
        self.head = nn.Linear(3, ROWS, bias=False)
        if kind == "tied":
            self.head.weight = self.table.weight
        self.pooled = kind == "bags"

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids) if self.pooled else self.table(ids).tanh().sum(1)
        return self.head(rows).square().sum(1).mean()


def build(kind: str) -> Words:
    torch.manual_seed(0)
    return Words(kind).double()


class Vocabulary(nn.Module):
    """A language model with a padding token, and a vocabulary that the ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4, padding_idx=PADDING)
        self.head = nn.Linear(4, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(ids).tanh()).flatten(0, 1), labels.flatten())


def vocabulary() -> Vocabulary:
    torch.manual_seed(0)
    return Vocabulary().double()


CASES = {
    "sgd": ("words", "SGD", 0),
    "sharded": ("words", "SGD", 3),
    "adagrad": ("words", "Adagrad", 2),
    "bags": ("bags", "SGD", 3),
    "padded": ("padded", "SGD", 3),
    "tied": ("tied", "SGD", 3),
}
"""By name: kind of the model, optimizer, stage."""


def train(kind: str, optimizer: str, stage: int) -> tuple[float, Weights]:
    params = {"lr": LR} | ({"eps": EPS} if optimizer == "Adagrad" else {})
    settings = {"type": optimizer, "params": params}
    engine = start(build(kind), optimizer=settings, zero_optimization={"stage": stage})
    loss = engine(IDS.chunk(2)[engine.data_rank])
    train_step(engine, loss)
    return float(loss.detach()), engine.state_dict()


def train_split() -> Weights:
    engine = start_engine(
        vocabulary(),
        batch=2,
        mesh={"tensor": 2},
        tensor_parallel={"plan": {"embedding": "embedding_rowwise", "head": "vocabulary"}},
        optimizer=sgd(LR),
    )
    train_step(engine, engine(TOKENS, TOKENS.roll(-1, 1)))
    return engine.state_dict()


def joined() -> Tensor:
    """Return the gradient of this rank's part of a batch that both ranks see, each with a loss of its own."""
    engine = start(build("words"))
    own = SAMPLES.chunk(2)[engine.data_rank].clone().requires_grad_()
    every = zeromesh.gather_with_gradient(own)
    ((engine.data_rank + 1) * every.square()).mean().backward()
    return own.grad


def program() -> dict[str, Any]:
    return {name: train(*case) for name, case in CASES.items()} | {"split": train_split(), "joined": joined()}


def plain(kind: str, share: float = 1, drop: Sequence[int] = ()) -> Weights:
    """Train in one process with a share of the table's gradient, and without some of its rows."""
    model = build(kind)
    model(IDS).backward()
    gradient = dense(model.table.weight.grad) * share
    gradient[list(drop)] = 0
    model.table.weight.grad = gradient
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return model.state_dict()


def dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


@pytest.mark.parametrize("share", [0.5, 2])
@pytest.mark.parametrize("name", ["sgd", "sharded"])
def test_sparse_gradients_are_divided_by_the_ranks_once(name: str, share: float) -> None:
    for _, found in results_by_name(program)[name]:
        require(found, plain("words"), plain("words", share))


def test_the_mean_of_a_bag_counts_the_rows_of_all_ranks() -> None:
    model = build("bags")
    rows = model.table.weight.detach()
    half = (ROWS + 1) // 2
    bags = []
    for bag in IDS:  # Each rank took the mean of the rows it has, and the sum of these was taken.
        parts = (rows[[int(row) for row in bag if (row < half) == first]] for first in (True, False))
        bags.append(sum(part.mean(0) for part in parts if len(part)))
    wrong = [float(model.head(torch.stack(part)).square().sum(1).mean().detach()) for part in (bags[:2], bags[2:])]
    right = [float(model(part).detach()) for part in IDS.chunk(2)]
    require([loss for loss, _ in results_by_name(program)["bags"]], right, wrong)
    for _, found in results_by_name(program)["bags"]:
        require(found, plain("bags"), plain("bags", 0.5))


def test_a_row_that_is_used_twice_is_one_gradient_to_the_optimizer() -> None:
    model = build("words")
    before = model.table.weight.detach().clone()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR, eps=EPS)
    model(IDS).backward()
    single = torch.zeros_like(before)
    rows, values = model.table.weight.grad._indices()[0], model.table.weight.grad._values()
    assert len(rows) > len(rows.unique())
    gradient = dense(model.table.weight.grad)
    squares = single.index_add(0, rows, values.square())  # The squares of the parts in place of that of their sum
    optimizer.step()
    right = model.state_dict()
    wrong = right | {"table.weight": before - LR * gradient / (squares.sqrt() + EPS)}
    for _, found in results_by_name(program)["adagrad"]:
        require(found, right, wrong)


def test_only_the_row_of_the_padding_token_gets_no_gradient() -> None:
    half = (ROWS + 1) // 2
    for _, found in results_by_name(program)["padded"]:
        # The number of the padding's row was taken for one in each rank's part of the table.
        require(found, plain("padded"), plain("padded", drop=[half + PADDING]))
        assert torch.equal(found["table.weight"][PADDING], build("padded").table.weight[PADDING])
    right = trained_vocabulary([])
    for found in results_by_name(program)["split"]:
        require(found, right, trained_vocabulary([(VOCABULARY + 1) // 2 + PADDING]))


def trained_vocabulary(drop: Sequence[int], words: int = VOCABULARY) -> Weights:
    """Train the split model in one process, without the gradient of some rows; only some words count in the loss."""
    model = vocabulary()
    logits = model.head(model.embedding(TOKENS).tanh()).flatten(0, 1)
    F.cross_entropy(F.pad(logits, (0, words - VOCABULARY)), TOKENS.roll(-1, 1).flatten()).backward()
    model.embedding.weight.grad[list(drop)] = 0
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return model.state_dict()


def test_words_that_fill_up_a_vocabulary_count_in_no_loss() -> None:
    for found in results_by_name(program)["split"]:
        require(found, trained_vocabulary([]), trained_vocabulary([], VOCABULARY + 1))


def test_tied_rows_are_trained_on_the_rank_that_has_fewer_of_them() -> None:
    half = (ROWS + 1) // 2
    for _, found in results_by_name(program)["tied"]:
        assert torch.equal(found["table.weight"], found["head.weight"])
        require(found, plain("tied"), plain("tied", drop=range(half, ROWS)))


def test_the_gradient_through_a_gathered_batch_is_that_of_all_ranks_losses() -> None:
    every = SAMPLES.clone().requires_grad_()
    (3 * every.square()).mean().backward()  # 1 + 2
    for rank, found in enumerate(results_by_name(program)["joined"]):
        right = every.grad.chunk(2)[rank]
        require(found, right, right * (rank + 1) / 3)  # Of its own loss only
        require(found, right, right / 2)
