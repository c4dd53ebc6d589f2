"""Every class of experts of transformers trains on ranks that share experts as the model does in one process.

The other side is the unmodified model in plain torch. Gradients are compared by the first update of SGD.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from causal_models import throughout
from compare import assert_close
from harness import RankFailure, run_ranks
from matrices import few
from mixture_models import COUNT, MIXTURES, mixture_batch
from run import configuration, sgd, whole_parameters
from zeromesh.parallel.expert.forms import Contract, find_experts

STEPS, RATE, CLIP = 3, 0.1, 1e9
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """Ranks of a run, its row of placements, and which experts tokens go to."""

    mesh: Mapping[str, int]
    row: int = 0
    accumulation: int = 1
    routing: str = "its own"

    @property
    def ranks(self) -> int:
        sizes = {**self.mesh}
        sizes.pop("expert")
        ranks = 1
        for size in sizes.values():
            ranks *= size
        return ranks


LAYOUTS = {
    "expert": Layout({"expert": 2, "data": 2}),
    "zero-3": Layout({"expert": 2, "data": 4}, row=3),
    "tensor": Layout({"expert": 2, "tensor": 2, "data": 1}, row=1),
    "pipeline": Layout({"expert": 2, "pipeline": 2, "data": 2}, accumulation=2),
    "context": Layout({"expert": 2, "context": 2, "data": 1}, row=2),
    "one expert": Layout({"expert": 2, "data": 2}, routing="one expert"),
    "empty rank": Layout({"expert": 2, "data": 2}, row=3, routing="empty rank"),
}


@dataclass
class Run:
    losses: list[float]
    norms: list[float]
    states: list[State]


def direct(model: nn.Module, routing: str) -> None:
    """Send all tokens to the last expert, or to the first half of them, with the router's weights."""
    to_last = routing == "one expert"
    replaced: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "one expert": lambda index: torch.full_like(index, COUNT - 1),
        "empty rank": lambda index: index % (COUNT // 2),
    }

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def change(value: Any) -> Any:
            is_index = isinstance(value, torch.Tensor) and value.dtype == torch.int64
            return replaced[routing](value) if is_index else value

        return tuple(change(x) for x in args), {key: change(x) for key, x in kwargs.items()}

    def lean(module: nn.Module, args: Any, logits: torch.Tensor) -> torch.Tensor:
        bias = torch.arange(COUNT, dtype=logits.dtype)
        return logits + 1e3 * (bias if to_last else -bias)

    if routing == "its own":
        return
    for experts in find_experts(model, (), 1):
        if experts.contract is Contract.ROUTED:
            experts.module.register_forward_pre_hook(before, with_kwargs=True)
        elif experts.contract is not Contract.STACKED:  # which all tokens go through
            routers = [m for m in model.modules() if type(m) is nn.Linear and m.out_features == COUNT]
            assert routers
            for router in routers:
                router.register_forward_hook(lean)


def build(name: str, layout: Layout) -> Any:
    torch.manual_seed(0)
    model = MIXTURES[name].build()
    direct(model, layout.routing)
    return model.train()


def part(step: int, number: int, parts: int) -> State:
    return {key: value.chunk(parts)[number] for key, value in mixture_batch(step).items()}


def trained(name: str, key: str) -> Run:
    """On every rank."""
    with throughout(MIXTURES[name].dtype):
        return train(name, key)


def train(name: str, key: str) -> Run:
    layout = LAYOUTS[key]
    config = configuration(
        optimizer=sgd(RATE),
        stage=layout.row,
        mesh=layout.mesh,
        clipping=CLIP,
        batch=4,
        accumulation=layout.accumulation,
    )
    engine = zeromesh.initialize(model=build(name, layout), config=config)[0]
    run = Run([], [], [])
    for step in range(STEPS):
        parts = engine.data_size * layout.accumulation
        numbers = [number * engine.data_size + engine.data_rank for number in range(layout.accumulation)]
        run.losses.append(float(engine.train_batch(iter([part(step, number, parts) for number in numbers]))))
        run.norms.append(engine.get_global_grad_norm())
        run.states.append(whole_parameters(engine.module))
    engine.destroy()
    return run


@cache
def plain(name: str, routing: str, shares: int) -> Run:
    """Plain torch in one process, on the global batch, or on shares of it where a loss is no mean over samples."""
    with throughout(MIXTURES[name].dtype):
        return plainly_trained(name, routing, shares)


def plainly_trained(name: str, routing: str, shares: int) -> Run:
    model = build(name, Layout({}, routing=routing))
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    run = Run([], [], [])
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [model(**part(step, number, shares))["loss"] / shares for number in range(shares)]
        for loss in losses:
            loss.backward()
        run.losses.append(sum(float(loss.detach()) for loss in losses))
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        run.states.append({key: value.detach().clone() for key, value in model.named_parameters()})
    return run


def check(name: str, key: str) -> None:
    layout, row = LAYOUTS[key], MIXTURES[name]
    runs = run_ranks(trained, layout.ranks, name, key, timeout=300)
    shares = layout.mesh.get("data", 1) * layout.accumulation if row.per_share else 1
    expected = plain(name, layout.routing, shares)
    for run in runs:
        assert run.losses == pytest.approx(expected.losses, rel=row.tolerance)
        assert run.norms == pytest.approx(expected.norms, rel=row.tolerance)
    for step, wanted in enumerate(expected.states):
        states = [run.states[step] for run in runs]
        assert {key for state in states for key in state} == wanted.keys()
        for state in states:  # of a stage, the parameters that it has
            assert_close(state, {key: wanted[key] for key in state}, row.tolerance)


def check_unless_refused(name: str, key: str) -> None:
    """Skip what an axis refuses for attention, recurrence or what passes between blocks, with or without experts."""
    try:
        check(name, key)
    except RankFailure as error:
        words = "cannot run under context parallelism|between blocks of a pipeline nothing passes"
        refusal = re.search(f"[^\n]*({words})[^\n]*", str(error))
        if refusal is None:
            raise
        pytest.skip(refusal[0])


@pytest.mark.parametrize("name", few(MIXTURES, "gpt_oss"))
def test_experts_on_two_ranks(name: str) -> None:
    check(name, "expert")


@pytest.mark.parametrize("name", few(MIXTURES, "deepseek_v3"))
def test_experts_and_shards_of_all_states(name: str) -> None:
    check(name, "zero-3")


@pytest.mark.full
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("key", ["tensor", "pipeline", "one expert", "empty rank"])
def test_experts_with_another_axis_or_routing(name: str, key: str) -> None:
    check_unless_refused(name, key)


SPARSE = ("axk2", "deepseek_v32", "glm_moe_dsa")
"""Models whose sparse attention reads a mask that there is none of under context parallelism: torch's error says so."""


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, row in MIXTURES.items() if "For" in row.model and name not in SPARSE])
def test_experts_and_parts_of_sequences(name: str) -> None:
    check_unless_refused(name, "context")
