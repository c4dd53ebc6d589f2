"""Sequence parallelism is for blocks that are called one after the other and leave tokens apart; others are refused."""

import traceback

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness import on_ranks, run_ranks
from same_training import require_same_training, train_on_engine

WIDTH, LENGTH = 32, 8


class Block(nn.Module):
    def __init__(self, inside: str) -> None:
        super().__init__()
        self.inside = inside
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        if "positions" in inside:
            self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        match self.inside:
            case "mean of tokens":
                y = y - y.mean(1, keepdim=True)
            case "shift of tokens":
                y = y + y.roll(1, 1)
            case "softmax of tokens":
                y = y.softmax(-2)
            case "previous tokens":
                y = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
            case "apart":  # a softmax and a mean over the width, a mean over samples, and other shapes
                y = y.softmax(-1) + y.mean(-1, keepdim=True) + y.mean(0) + y.unsqueeze(1).squeeze(1)
                y = y.transpose(1, 2).transpose(-1, -2)
            case "positions of all tokens":
                y = y + self.positions(torch.arange(LENGTH))
            case "positions of a sample":  # parts of it could be taken for samples
                y = y + self.positions(torch.arange(LENGTH)[None])
        return x + self.down(self.up(y).relu())


class Mixer(nn.Module):  # an MLP over tokens (Tolstikhin et al., "MLP-Mixer", 2021)
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(LENGTH, 2 * LENGTH), nn.Linear(2 * LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x.transpose(1, 2)).relu()).transpose(1, 2)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Mixer() if kind == "mixer" else Block(kind) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        match self.kind:
            case "branches":
                x = first(x) + second(x) + third(x)
            case "backwards":
                x = third(second(first(x)) + first(x)) if not self.training else first(third(second(x)))
            case "without the first":
                x = third(second(x))
            case "without the last":
                x = second(first(x)).square()
            case "sum between":
                x = third(second(first(x).cumsum(1)))
            case "residual outside":
                x = x + second(first(x))
            case "without the second":
                x = third(first(x))
            case "twice":
                x = third(second(first(third(second(first(x))))))
            case "recomputed":
                x = checkpoint(first, x, use_reentrant=False)
                x = checkpoint(lambda y: third(second(y)), x, use_reentrant=False)
            case "recomputed, reentrant":
                x = checkpoint(first, x, use_reentrant=True)
                x = checkpoint(lambda y: third(second(y)), x, use_reentrant=True)
            case _:
                x = third(second(first(x)))
        return x.square().mean()


def build(kind: str) -> Model:
    torch.manual_seed(0)
    return Model(kind)


def sequences(step: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(4, LENGTH, WIDTH, generator=generator, dtype=torch.float64).requires_grad_(),)


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
SETTINGS = {
    "train_batch_size": 4, "mesh": {"tensor": 2}, "tensor_parallel": {"sequence": True, "plan": PLAN},
}  # fmt: skip


RIGHT = (
    "usual", "apart", "positions of all tokens", "positions of a sample", "without the second", "twice", "recomputed",
    "recomputed, reentrant",
)  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", RIGHT)
@on_ranks(2)
def test_blocks_that_are_called_one_after_the_other_compute_what_one_rank_does(kind: str) -> None:
    require_same_training(lambda: build(kind), sequences, SETTINGS)


WRONG = {
    "branches": "blocks.1 was called with something else than what blocks.0 returned",
    "backwards": "blocks.1 was called before the first",
    "without the first": "blocks.1 was called before the first",
    "without the last": "blocks.1 was the last block to be called, but blocks.2 is where the parts",
    "sum between": "blocks.1 was called with something else than what blocks.0 returned",
    "residual outside": "blocks.1 had returned this rank's part of the sequence, of shape (4, 4, 32)",
    "mean of tokens": "MeanBackward1 before blocks.0, or in it, computes over dim 1",
    "shift of tokens": "RollBackward0 before blocks.0, or in it, computes over dim 1",
    "softmax of tokens": "SoftmaxBackward0 before blocks.0, or in it, computes over dim 1",
    "previous tokens": "SliceBackward0 before blocks.0, or in it, computes over dim 1",
    "mixer": "blocks.0.up reads 8 entries and was given 4, as if they were tokens",
}


def refused(kind: str, tensor: int) -> str:  # what a rank says; ranks that fail would have to be started again
    try:
        train_on_engine(build(kind).double(), sequences, SETTINGS)
    except Exception as error:
        return "".join(traceback.format_exception_only(error))
    return "nothing"


@pytest.mark.some(5)
@pytest.mark.parametrize("kind", WRONG)
def test_blocks_that_need_tokens_of_other_ranks_are_refused(kind: str) -> None:
    said = run_ranks(refused, 2, kind, 2)
    assert any(WRONG[kind] in one for one in said), said
    assert all("set tensor_parallel.sequence to false" in one for one in said), said
