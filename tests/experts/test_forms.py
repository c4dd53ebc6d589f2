"""Experts are found by their structure and by what they compute; what would not compute the same is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from matrices import few
from mixture_models import COUNT, MIXTURES
from zeromesh.parallel.expert.forms import Contract, find_experts

WIDTH, INNER, NUMBER = 8, 12, 6
OTHERS = {
    "llama4": (Contract.STACKED, 2),
    "jetmoe": (Contract.SORTED, 8),  # of MLPs and of attention, two layers of each
    "nllb_moe": (Contract.LISTED, 4),
    "switch_transformers": (Contract.LISTED, 4),
    "ernie4_5_vl_moe": (Contract.ROUTED, 4),  # of texts and of images
}


class Stacked(nn.Module):
    """A user's own experts; no attribute says how many they are."""

    def __init__(self, number: int = NUMBER) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.zeros(number, WIDTH, INNER)),
            nn.Parameter(torch.zeros(number, INNER, 8)),
        )
        self.bias, self.scale = nn.Parameter(torch.zeros(number, WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def compute(self, rows: torch.Tensor, expert: int, weights: torch.Tensor) -> torch.Tensor:
        return (torch.relu(rows @ self.up[expert]) @ self.down[expert] + self.bias[expert]) * self.scale * weights

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(hidden)
        for expert in range(len(self.up)):
            token, choice = torch.where(index == expert)
            total.index_add_(0, token, self.compute(hidden[token], expert, weights[token, choice, None]))
        return total


class OverTokens(Stacked):
    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, index, weights) - hidden.mean(0)


class OverRows(Stacked):
    def compute(self, rows: torch.Tensor, expert: int, weights: torch.Tensor) -> torch.Tensor:
        return super().compute(rows - rows.mean(0) if len(rows) > 1 else rows, expert, weights)


class Counting(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.lock = nn.Buffer(torch.zeros(())), None

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(hidden, index, weights)


class OverExperts(Stacked):
    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden / self.up.norm(), index, weights)


class WeightsInside(Stacked):
    def compute(self, rows: torch.Tensor, expert: int, weights: torch.Tensor) -> torch.Tensor:
        return torch.relu(rows @ self.up[expert] * weights + 1) @ self.down[expert]


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = NUMBER
        self.up, self.down = nn.Parameter(torch.zeros(NUMBER, WIDTH, 16)), nn.Parameter(torch.zeros(NUMBER, 16, WIDTH))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.einsum("erf,efh->erh", torch.einsum("erh,ehf->erf", rows, self.up).relu(), self.down)


class OverEinsum(Einsum):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows - rows.mean(1, keepdim=True))


class Layer(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, NUMBER), experts
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUMBER))


def of_list(*widths: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, width) for width in widths)


@pytest.mark.parametrize("name", few(MIXTURES, "mixtral", "jetmoe", "longcat_flash"))
def test_experts_of_every_mixture_are_found_by_their_structure(name: str) -> None:
    contract, number = OTHERS.get(name, (Contract.ROUTED, 2))
    with torch.device("meta"):
        model = MIXTURES[name].build()
    experts = find_experts(model, (), 2)
    assert [item.contract for item in experts] == [contract] * number
    for item in experts:
        assert item.count == COUNT
        assert item.splits
        for parameter, split in item.splits.items():
            assert split.size == len(model.get_parameter(parameter))
            if contract is not Contract.LISTED:
                assert split.length == -(-split.size // 2)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("kind", "contract"), [(Stacked, Contract.ROUTED), (Einsum, Contract.STACKED)])
def test_a_users_own_experts_are_found(kind: Callable[[], nn.Module], contract: Contract, device: str) -> None:
    with torch.device(device):
        model = Layer(kind())
    before = torch.get_rng_state()
    (item,) = find_experts(model, (), 3)
    assert (item.name, item.contract, item.count, item.caller) == ("experts", contract, NUMBER, "experts")
    assert item.splits["experts.up"].intervals == (((0, 2),), ((2, 4),), ((4, 6),))
    assert "experts.scale" not in item.splits
    assert torch.equal(torch.get_rng_state(), before)
    assert not hasattr(model.experts, "num_experts") or model.experts.num_experts == NUMBER


def test_a_parameter_with_as_many_entries_by_chance_is_not_divided() -> None:
    (item,) = find_experts(Layer(Stacked(WIDTH)), (), 2)
    assert {*item.splits} == {"experts.up", "experts.down", "experts.bias"}


def test_a_target_names_a_list_of_any_name_whose_members_are_on_one_rank_each() -> None:
    (item,) = find_experts(Layer(nn.Identity()), ["branches"], 2)
    assert (item.contract, item.count, item.caller) == (Contract.LISTED, NUMBER, "")
    assert [split.owner for split in item.splits.values()] == [0] * 6 + [1] * 6


def test_a_target_is_a_class_or_a_pattern_and_then_no_others_are_found() -> None:
    model = nn.ModuleList(Layer(Stacked()) for _ in range(2))
    assert [item.name for item in find_experts(model, ["Stacked"], 2)] == ["0.experts", "1.experts"]
    assert [item.name for item in find_experts(model, ["1.exp*"], 2)] == ["1.experts"]


def test_a_dense_model_on_one_rank_has_no_experts() -> None:
    assert find_experts(nn.Sequential(nn.Linear(4, 4)), (), 1) == []


def test_a_search_on_one_rank_leaves_buffers_alone_and_minds_what_cannot_be_copied() -> None:
    model = Layer(Counting())
    assert [item.name for item in find_experts(model, (), 1)] == ["experts"]
    assert model.experts.calls == 0
    model.experts.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"experts \(Counting\): as routed: TypeError: cannot pickle"):
        find_experts(model, (), 1)


def tied() -> nn.Module:
    model = Layer(of_list(4, 4))
    model.experts[1].weight = model.experts[0].weight
    return model


def without_capacity() -> nn.Module:
    model = Layer(of_list(4, 4))
    model.router.expert_capacity = 0
    return model


REFUSED = {
    "indivisible": (
        lambda: Layer(Stacked()),
        (),
        4,
        "6 experts, which 4 ranks cannot share: 6 / 4 = 1.5; .*1, 2, 3, 6",
    ),
    "dense": (lambda: nn.Sequential(nn.Linear(4, 4)), (), 2, "mesh.expert is 2, and the model has no experts"),
    "unequal": (lambda: Layer(of_list(4, 5)), (), 2, r"weight is \(4, 8\) in 0 and \(5, 8\) in 1"),
    "more in one": (
        lambda: Layer(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])),
        (),
        2,
        r"bias is \(4,\) in 0 and missing in 1",
    ),
    "batch norm": (lambda: Layer(nn.ModuleList(nn.BatchNorm1d(4) for _ in range(2))), (), 2, "statistics would differ"),
    "tied": (tied, (), 2, "experts.1.weight is experts.0.weight"),
    "no module": (lambda: Layer(Stacked()), ["ffn"], 2, '"ffn" is the name of no module.*"targets": \\["experts"\\]'),
    "a router": (lambda: Layer(Stacked()), ["router"], 2, r"router \(Linear\): none of its.*\[\"experts\"\]"),
    "over tokens": (
        lambda: Layer(OverTokens()),
        (),
        2,
        r"experts \(OverTokens\): as routed: some of its experts alone",
    ),
    "over rows": (lambda: Layer(OverRows()), (), 2, "compute something else"),
    "over stacked rows": (lambda: Layer(OverEinsum()), (), 2, "compute something else"),
    "buffers": (lambda: Layer(Counting()), (), 2, "it writes to its buffer calls"),
    "over experts": (lambda: Layer(OverExperts()), (), 2, "compute something else"),
    "weights inside": (lambda: Layer(WeightsInside()), (), 2, "compute something else"),
    "no capacity": (without_capacity, (), 2, "router.expert_capacity is 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shared_is_refused_with_a_remedy(case: str) -> None:
    build, targets, ranks, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        find_experts(build(), targets, ranks)


class RowExpert(nn.Module):
    """Layers with a function of their rows between them."""

    def __init__(self, function: Any = torch.relu, mixes_in_training: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.function, self.mixes_in_training = function, mixes_in_training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.function(self.up(x)), 0.5, self.training)
        return self.down(hidden - hidden.mean(0) if self.mixes_in_training and self.training else hidden)


def test_each_expert_of_a_list_is_proven_in_training_too() -> None:
    def over_rows(hidden: torch.Tensor) -> torch.Tensor:
        return hidden - hidden.mean(0)

    model = nn.Module()
    model.apart_experts = nn.ModuleList([RowExpert(), RowExpert(torch.tanh)])
    model.mixed_experts = nn.ModuleList([RowExpert(), RowExpert(over_rows)])
    model.trained_experts = nn.ModuleList([RowExpert(mixes_in_training=True), RowExpert(mixes_in_training=True)])
    mixes = {item.name: item.mixes for item in find_experts(model.eval(), ["*_experts"], 1)}
    assert mixes == {"apart_experts": False, "mixed_experts": True, "trained_experts": True}
