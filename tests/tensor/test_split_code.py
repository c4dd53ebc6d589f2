"""Code around split layers that computes again, compiles or borrows weights trains as in one process, or is refused."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from harness import RankFailure, run_ranks
from same_training import require_same_training
from tensor_models import token_pair

LIMIT = 120
WIDTH = 16


@dataclass
class Output:
    hidden: Tensor


class Block(nn.Module):
    def __init__(self, code: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.other, self.code = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 4), code

    def forward(self, x: Any) -> Any:
        return self.code(self, x.hidden if isinstance(x, Output) else x)


class Net(nn.Module):
    def __init__(self, code: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(24, WIDTH), nn.Linear(WIDTH, 24)
        self.blocks = nn.ModuleList(Block(code) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.hidden if isinstance(x, Output) else x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def mlp(between: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda block, x: x + block.fc2(between(block.fc1(block.norm(x))))


def largest(h: Tensor) -> Tensor:
    return h * h.max(-1, keepdim=True).values.sigmoid()


def again(function: Callable[[Tensor], Tensor], **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda h: checkpoint(function, h, **{"use_reentrant": False, **options})


def compiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return torch.compile(function, backend="eager", fullgraph=True)


def by_heads(h: Tensor) -> Tensor:
    return h.view(*h.shape[:2], 4, -1).softmax(-1).flatten(2)


def with_condition(h: Tensor) -> Tensor:
    return torch.cond(h.sum() > 0, lambda x: x.softmax(-1), lambda x: x.sin(), (h,))


def doubled(block: Any, x: Tensor) -> Tensor:
    twice = {name: 2 * value for name, value in block.fc1.named_parameters()}
    return x + block.fc2(F.gelu(functional_call(block.fc1, twice, (x,))))


def borrowed(block: Any, x: Tensor) -> Tensor:
    return x + block.fc2(F.gelu(functional_call(block.fc1, {"weight": block.other}, (x,))))


CODES: dict[str, Callable[[Any, Tensor], Any]] = {
    "largest": mlp(largest),
    "norm": mlp(lambda h: F.layer_norm(h, h.shape[-1:])),
    "checkpoint of a part": mlp(again(largest)),
    "checkpoint of norms": mlp(again(lambda h: h - h.amax(-1, keepdim=True))),
    "reentrant checkpoint of a part": mlp(again(largest, use_reentrant=True)),
    "checkpoint of layers": lambda block, x: x + again(lambda h: block.fc2(largest(block.fc1(h))))(x),
    "compiled": mlp(compiled(F.gelu)),
    "compiled by heads": mlp(compiled(by_heads)),
    "condition": mlp(with_condition),
    "functional_call": doubled,
    "functional_call of another weight": borrowed,
    "dataclass": lambda block, x: Output(mlp(F.gelu)(block, x)),
    "named argument": lambda block, x: x + block.fc2(input=F.gelu(block.fc1(input=x))),
}
TENSOR: dict[str, Any] = {"train_batch_size": 4, "mesh": {"tensor": 2}}
AGAIN = {**TENSOR, "activation_checkpointing": {"enabled": True}}
SEQUENCE = {**TENSOR, "tensor_parallel": {"sequence": True}}


def same_as_plain(names: list[str], settings: dict[str, Any]) -> bool:
    for name in names:

        def build(name: str = name) -> nn.Module:
            torch.manual_seed(0)
            return Net(CODES[name])

        shapes = require_same_training(build, token_pair, settings)
        assert shapes["blocks.0.fc2.weight"] in ((WIDTH, WIDTH), (WIDTH // 2, 2 * WIDTH)), name
    return True


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        (["checkpoint of a part"], AGAIN),
        (["condition", "functional_call of another weight", "dataclass"], TENSOR),
        (["functional_call"], SEQUENCE),
        pytest.param(list(CODES), TENSOR, marks=pytest.mark.full),
        pytest.param(list(CODES), AGAIN, marks=pytest.mark.full),
        pytest.param([name for name in CODES if name != "dataclass"], SEQUENCE, marks=pytest.mark.full),
        pytest.param(list(CODES), {**AGAIN, "zero_optimization": {"stage": 3}}, marks=pytest.mark.full),
    ],
)
def test_code_around_split_layers_trains_as_in_one_process(names: list[str], settings: dict[str, Any]) -> None:
    assert all(run_ranks(same_as_plain, 2, names, settings, timeout=LIMIT))


def test_a_sequence_is_not_spread_over_dataclasses() -> None:
    with pytest.raises(RankFailure, match=r"a block (returned|was called with) .*Output.*tensor_parallel.sequence"):
        run_ranks(same_as_plain, 2, ["dataclass"], SEQUENCE, timeout=LIMIT)


def borrowed_by_hand() -> bool:
    plan = {"blocks.*.fc1": "colwise", "blocks.*.fc2": "rowwise"}
    return same_as_plain(["functional_call of another weight"], {**TENSOR, "tensor_parallel": {"plan": plan}})


def test_whole_weights_for_a_layer_that_is_split_by_hand_are_refused() -> None:
    with pytest.raises(RankFailure, match=r"fc1 computes with a weight of shape \(32, 16\).* style replicate"):
        run_ranks(borrowed_by_hand, 2, timeout=LIMIT)
