"""Checkpoints, resumed runs and tied weights: silent errors of others, and that ours are those of one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeromesh
import zeromesh.deepspeed as deepspeed
from harness import run_ranks
from museum import FAR, LIMIT, Weights, gap, in_float64, require, start, weights_of, whole
from run import train_step

WORDS, BEFORE, AFTER = 7, 3, 2
"""Updates before the checkpoint, and after it."""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 4)
        self.block, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.frozen(self.block(self.embed(ids)).tanh())
        return nn.functional.cross_entropy(self.head(x), (ids * 3 + 1) % WORDS)


def ids(step: int) -> Tensor:
    return torch.randint(0, WORDS, (8,), generator=torch.Generator().manual_seed(step))


ADAM = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1}


def groups_of(model: nn.Module, backwards: bool = False) -> list[dict[str, Any]]:
    """Return two groups of the trained parameters; ``backwards`` turns the order in each around."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [[p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]]
    return [
        {"params": group[:: -1 if backwards else 1], "weight_decay": decay}
        for group, decay in zip(groups, (0.1, 0.0), strict=True)
    ]


def begin(stage: int = 2, backwards: bool = False, offloaded: bool = False, **further: Any) -> zeromesh.Engine:
    model = in_float64(Tied).float() if "bf16" in further else in_float64(Tied)
    device = {"offload_optimizer": {"device": "cpu"}} if offloaded else {}
    settings = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage, **device},
        "optimizer": {"type": "AdamW", "params": ADAM}, "units": ["Linear", "Embedding"],
        "scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}, **further,
    }  # fmt: skip
    return zeromesh.initialize(model=model, config=settings, model_parameters=groups_of(model, backwards))[0]


def advance(engine: zeromesh.Engine, first: int, updates: int) -> tuple[Weights, list[float]]:
    rates = []
    for step in range(first, first + updates):
        rates.append(engine.get_lr()[0])
        train_step(engine, engine(ids(step).chunk(engine.data_size)[engine.data_rank]))
    return whole(engine), rates


WAYS: dict[str, dict[str, Any]] = {
    "as before": {},
    "groups in another order": {"backwards": True},
    "another stage": {"stage": 3},
    "states on the host": {"offloaded": True},
}


def resume(folder: str) -> dict[str, Any]:
    """Go on from a checkpoint in several ways, with all of it and with the weights alone."""
    engine = begin()
    advance(engine, 0, BEFORE)
    engine.save_checkpoint(folder)
    found: dict[str, Any] = {"undisturbed": advance(engine, BEFORE, AFTER)}
    for way, options in WAYS.items():
        again = begin(**options)
        again.load_checkpoint(folder)
        found[way] = advance(again, BEFORE, AFTER)
    weights_only = begin()
    weights_only.load_checkpoint(folder, load_module_only=True)
    found["weights only"] = advance(weights_only, BEFORE, AFTER)
    return found


def masters(folder: str) -> tuple[Weights, Weights]:
    """Load weights into a run in bf16 that has trained others, and update once by a tiny rate: masters of both runs."""
    model = in_float64(Tied).float()
    settings = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    engine = start(model, lr=2.0, **settings)
    for step in range(2):
        train_step(engine, engine(ids(step).chunk(2)[dist.get_rank()]).float())
    engine.save_checkpoint(folder)
    kept = masters_of(engine)
    other = start(in_float64(Tied).float().apply(_away), lr=1e-6, **settings)
    other.load_checkpoint(folder, load_module_only=True)
    train_step(other, other(ids(9).chunk(2)[dist.get_rank()]).float())
    return kept, masters_of(other)


def _away(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 5.0)


def masters_of(engine: zeromesh.Engine) -> Weights:
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    found = {name: zeromesh.zero.safe_get_full_fp32_param(parameter) for name, parameter in trained.items()}
    return {name: value for name, value in found.items() if value is not None}


def tie(stage: int, deferred: bool) -> tuple[Weights, bool, float | None]:
    """Train a model whose head is the embedding, built whole or without memory: weights, whether tied, and the norm."""
    with zeromesh.zero.Init(enabled=deferred):
        model = in_float64(Tied)
    settings = {"zero_optimization": {"stage": stage}, "units": ["Linear", "Embedding"]}
    engine = zeromesh.initialize(
        model=model, config=settings | {"optimizer": {"type": "AdamW", "params": ADAM}, "train_batch_size": 8}
    )[0]
    advance(engine, 0, 3)
    state = engine.state_dict()
    same = torch.equal(state["embed.weight"], state["head.weight"]) and model.head.weight is model.embed.weight
    return whole(engine), same, engine.get_global_grad_norm()


def consolidate(folder: str) -> tuple[dict[str, Tensor], Weights]:
    """Return the fp32 weights of a checkpoint in bf16, and the masters and frozen weights of its run."""
    engine = begin(stage=3, bf16={"enabled": True})
    advance(engine, 0, 1)
    engine.save_checkpoint(folder)
    frozen = {name: value for name, value in whole(engine).items() if name.startswith("frozen")}
    wanted = masters_of(engine) | frozen
    read = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    return (read(folder), wanted) if dist.get_rank() == 0 else ({}, {})


def program(folder: str) -> dict[str, Any]:
    return {
        "resumed": resume(f"{folder}/resumed"),
        "masters": masters(f"{folder}/masters"),
        "tied": [tie(stage, deferred) for stage, deferred in ((0, False), (3, False), (3, True))],
        "fp32": consolidate(f"{folder}/fp32"),
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(program, 2, str(tmp_path_factory.mktemp("museum")))


Found = list[dict[str, Any]]


def test_a_resumed_optimizer_goes_on_with_its_moments_and_its_count(two_ranks: Found) -> None:
    for found in (of_rank["resumed"] for of_rank in two_ranks):
        right, wrong = found["undisturbed"][0], found["weights only"][0]
        assert gap(found["as before"][0], right) == 0.0
        for way in ("another stage", "states on the host"):
            require(found[way][0], right, wrong)


def test_states_belong_to_parameters_by_name_and_not_by_order(two_ranks: Found) -> None:
    for found in (of_rank["resumed"] for of_rank in two_ranks):
        require(found["groups in another order"][0], found["undisturbed"][0], found["weights only"][0])


def test_a_resumed_schedule_goes_on(two_ranks: Found) -> None:
    right = [0.1 * 0.5**step for step in range(BEFORE, BEFORE + AFTER)]
    for found in (of_rank["resumed"] for of_rank in two_ranks):
        for way in WAYS:
            require(found[way][1], right, [rate * 2**BEFORE for rate in right])  # from the beginning
            require(found[way][1], right, [2 * rate for rate in right])  # one update behind


def test_masters_are_those_of_the_weights_that_were_loaded(two_ranks: Found) -> None:
    for kept, loaded in (of_rank["masters"] for of_rank in two_ranks):
        # Weights of bf16 have eight bits; an update by a rate of 1e-6 is far below that.
        assert gap(loaded, kept) <= 2**-8
        assert min(float((5.0 - value).abs().max()) for value in kept.values()) > FAR


def alone() -> tuple[Weights, Weights, float, float]:
    """Train in one process, with one tied weight and with two: weights, and norms of the last gradient."""
    found: list[Any] = []
    for apart in (False, True):
        model = in_float64(Tied)
        if apart:
            model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAM)
        norm = 0.0
        for step in range(3):
            optimizer.zero_grad()
            model(ids(step)).backward()
            norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
            optimizer.step()
        found.append(({n: v for n, v in weights_of(model).items() if n != "head.weight"}, norm))
    return found[0][0], found[1][0], found[0][1], found[1][1]


def test_tied_weights_are_updated_once_and_stay_tied(two_ranks: Found) -> None:
    right, apart, norm, other = alone()
    for found in (of_rank["tied"] for of_rank in two_ranks):
        for weights, same, own in found:
            assert same
            require(weights, right, apart)
            require(own, norm, other)


def test_consolidated_weights_have_tied_and_frozen_ones_in_fp32(two_ranks: Found) -> None:
    state, masters = two_ranks[0]["fp32"]
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert torch.equal(state["head.weight"], state["embed.weight"])
    assert state.keys() == {*masters, "head.weight"}
    for name, master in masters.items():
        assert gap(state[name], master) <= LIMIT, name


class Scaled(nn.Linear):
    """Divides by the largest input so far, which is neither a parameter nor a buffer."""

    largest = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.largest = max(self.largest, float(x.detach().abs().max()))
        return super().forward(x) / self.largest

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.largest], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self.largest = float(state)


def scaled() -> Scaled:
    torch.manual_seed(0)
    return Scaled(4, 4).double()


@pytest.mark.parametrize("stage", [0, 3])
def test_scales_that_are_no_tensors_of_the_model_come_back(stage: int, tmp_path: Any) -> None:
    zero = {"zero_optimization": {"stage": stage}}
    x = torch.ones(2, 4, dtype=torch.float64)
    engine = start(scaled(), **zero)
    engine(5 * x)
    engine.save_checkpoint(tmp_path)
    resumed = start(scaled(), **zero)
    resumed.load_checkpoint(tmp_path)
    plain = scaled()
    wrong = plain(x)
    plain.set_extra_state(torch.tensor([5.0]))
    require(resumed(x), plain(x), wrong)
