"""Plans that would be silently wrong are refused in the first pass; those that are not, are not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import on_ranks
from same_training import require_same_training, train_on_engine

WIDTH, HEADS, LENGTH = 32, 4, 8


class Between(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        match self.kind:
            case "norm":
                y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
            case "layer norm":
                y = nn.functional.layer_norm(y, y.shape[-1:])
            case "softmax":
                y = y.softmax(-1)
            case "variance":
                y = y / y.std(-1, keepdim=True)
            case "parameter":
                y = y * self.scale
            case "gate":
                y = y * self.gate(x)
            case "heads":
                y = y.unflatten(-1, (-1, 8))
                y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).flatten(-2)
        return self.second(y)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Between(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Scores(nn.Module):  # attention whose scores have three dims; its output layer is in a module beside, as BERT's
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2).flatten(0, 1)
            for layer in (self.query, self.key, self.value)
        )
        y = (q @ k.transpose(1, 2)).softmax(-1) @ v
        return y.unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2)


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self = Scores()
        self.output = Output()

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.self(x))


class Bert(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x).square().mean()


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Bert(kind) if kind == "scores" else Model(kind)


def sequences(step: int) -> tuple[Tensor]:
    return (torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step)),)


def split(ranks: int, plan: dict[str, str]) -> dict[str, Any]:
    return {"mesh": {"tensor": ranks}, "tensor_parallel": {"plan": plan}}


SPLIT = {"blocks.*.first": "colwise", "blocks.*.second": "rowwise"}
SHARED = {**SPLIT, "blocks.*.scale": "replicated_with_grad_allreduce"}
APART = {"blocks.*.first": "colwise_gather_output", "blocks.*.second": "rowwise_split_input"}

WRONG = {
    "norm": "MeanBackward1 before it works on the 32 entries",
    "layer norm": "NativeLayerNormBackward0 before it",
    "softmax": "SoftmaxBackward0 before it",
    "variance": "StdBackward0 before it|VarBackward0 before it",
    "parameter": r"blocks\.0\.scale is used before it, whole.*replicated_with_grad_allreduce",
    "gate": r"is used before it, whole.*colwise_gather_output and rowwise_split_input",
}


@pytest.mark.parametrize("kind", [*WRONG, "nothing"])
@on_ranks(2)
def test_operations_that_need_all_of_the_split_dim_are_refused(kind: str) -> None:
    plan, said = SPLIT, rf"blocks\.0\.second is split by rows, but.*({WRONG.get(kind)})"
    if kind == "nothing":  # columns that are not gathered before a layer that splits its input
        plan = {"blocks.*.first": "colwise", "blocks.*.second": "rowwise_split_input"}
        said = "rowwise_split_input, reads 64 entries, but was given 32"
    with pytest.raises(ValueError, match=said):
        train_on_engine(build(kind).double(), sequences, split(2, plan))


RIGHT = [("nothing", SPLIT), ("heads", SPLIT), ("parameter", SHARED), *((kind, APART) for kind in WRONG)]


@pytest.mark.some(4)
@pytest.mark.parametrize(("kind", "plan"), RIGHT)
@on_ranks(2)
def test_right_plans_are_not_refused_and_train_alike(kind: str, plan: dict[str, str]) -> None:
    require_same_training(lambda: build(kind), sequences, split(2, plan))


@on_ranks(4)
def test_scores_over_as_many_keys_as_a_rank_has_entries_are_not_refused() -> None:
    require_same_training(lambda: build("scores"), sequences, split(4, {}))
