"""Parts that the museum's tests share: starting an engine, its whole weights, and comparing right with wrong."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import zeromesh
from harness import run_ranks

LIMIT = 1e-9
"""For |a - b| / (1 + |b|) in float64."""

FAR = 1e-3
"""What a wrong formula is off by at least, in the same measure: a comparison to ``LIMIT`` shows it."""

Weights = dict[str, Tensor]


def start(model: nn.Module, *, lr: float = 0.5, **settings: Any) -> zeromesh.Engine:
    """Return an engine with SGD, whose update shows the gradient itself."""
    usual = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": lr}}}
    return zeromesh.initialize(model=model, config=usual | settings)[0]


def whole(engine: zeromesh.Engine) -> Weights:
    """Return copies of all parameters. Collective."""
    with zeromesh.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def weights_of(model: nn.Module) -> Weights:
    """Return copies of the parameters of a model that is whole."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def gap(found: Any, want: Any) -> float:
    """Return the largest |a - b| / (1 + |b|) of two numbers, tensors, lists or mappings of the same form."""
    if isinstance(want, dict):
        assert found.keys() == want.keys()
        return max(gap(found[name], want[name]) for name in want)
    if isinstance(want, list | tuple):
        assert len(found) == len(want)
        return max(gap(one, other) for one, other in zip(found, want, strict=True))
    one, other = (torch.as_tensor(value).detach().double() for value in (found, want))
    assert one.shape == other.shape
    return float(((one - other).abs() / (1 + other.abs())).max())


def require(found: Any, right: Any, wrong: Any, limit: float = LIMIT) -> None:
    """Assert that what was found is right, and that what another system computed would be seen."""
    assert gap(found, right) <= limit, f"off by {gap(found, right)}"
    assert gap(wrong, right) >= max(FAR, 100 * limit), "the comparison would not see the error"


@cache
def results_of(program: Callable[..., Any], ranks: int = 2, name: str | None = None) -> list[Any]:
    """Run the program of a file once on some ranks, or that part of it, and return the results by rank."""
    return run_ranks(program, ranks, *([] if name is None else [name]))


def results_by_name(program: Callable[..., Any]) -> dict[str, list[Any]]:
    """Run the program of a file once on two ranks, and return by name what each rank has found."""
    by_rank = results_of(program)
    return {name: [of_rank[name] for of_rank in by_rank] for name in by_rank[0]}


def in_float64(model: Callable[[], nn.Module]) -> Any:
    """Return a model with the weights of seed 0."""
    torch.manual_seed(0)
    return model().double()
