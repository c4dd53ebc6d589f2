"""Hugging Face models, as they are, train under every row as in plain torch."""

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks
from huggingface_models import MODELS, PAGE, VOCABULARY, Batch, Model, page, tokens
from run import configuration, plain_step, train_step, whole_state
from tensor_models import share
from zeromesh.shard.parameters import deferred

RANKS = 2
STEPS = 4
OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}
"""With torch's own eps, Adam would make a whole step of the rounding of a gradient that is zero, as of a bias before a
softmax is."""
LIMIT = 120
"""Seconds for one call of the ranks, of which importing transformers takes up to twenty."""

Result = tuple[list[float], dict[str, torch.Tensor]]
"""The losses by step, and parameters and buffers at the end."""


def batches(model: Model) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    return [model.batch(generator) for _ in range(STEPS)]


def as_it_is(model: Any) -> None:
    pass


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable()


def only_projections(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search("q_proj|v_proj", name) is not None)


def only_the_head(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layer.2." in name or "classifier" in name)


def build(name: str, change: Callable[[Any], None], dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = MODELS[name].build().to(dtype)
    change(model)
    return model.train()


@cache
def plain(name: str, change: Callable[[Any], None] = as_it_is, reference: Any = None) -> Result:
    row = MODELS[name]
    model = (reference or build)(name, change, row.dtype)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIMIZER)
    losses, shares = [], RANKS if row.per_share else 1
    for batch in batches(row):
        before = [buffer.clone() for buffer in model.buffers()]
        after = before
        mean = 0.0
        for rank in range(shares):
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
            loss = model(**share(batch, rank, shares, row.dtype), **row.arguments).loss
            (loss / shares).backward()
            mean += loss.item() / shares
            if rank == 0:  # batch statistics are those of the first rank
                after = [buffer.clone() for buffer in model.buffers()]
        for buffer, value in zip(model.buffers(), after, strict=True):
            buffer.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean)
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def config(row: int, **further: Any) -> dict[str, Any]:
    return configuration(micro=2, optimizer={"type": "AdamW", "params": OPTIMIZER}, stage=row) | further


def train(
    name: str, row: int, change: Callable[[Any], None] = as_it_is, init: bool = False, make: Any = build, **further: Any
) -> tuple[list[str], Result]:
    case = MODELS[name]
    with patch.object(deferred, "LARGE", 64), zeromesh.zero.Init(enabled=init):
        model = make(name, change, case.dtype)
    assert any(p.is_meta for p in model.parameters()) == init
    # ----
    engine = zeromesh.initialize(model=model, config=config(row, **further))[0]
    losses = []
    for batch in batches(case):
        batch = share(batch, engine.data_rank, engine.data_size, case.dtype)
        losses.append(train_step(engine, engine(**batch, **case.arguments).loss))
    # ----
    result = [unit.name for unit in engine.sharded.units[1:]], (losses, whole_state(engine.module))
    engine.destroy()
    return result


def check(name: str, results: list[tuple[list[str], Result]], expected: Result) -> None:
    case = MODELS[name]
    losses = [sum(losses) / RANKS for losses in zip(*(result[0] for _, result in results), strict=True)]
    # The losses of many texts are in fp32, whatever the model is in.
    assert losses == pytest.approx(expected[0], rel=max(case.tolerance, 1e-6), abs=0)
    for rank, (_, (_, found)) in enumerate(results):
        assert found.keys() == expected[1].keys()
        for key, want in expected[1].items():
            assert found[key].dtype == want.dtype
            gap = (found[key] - want).abs() - case.tolerance * (1 + want.abs())
            assert bool((gap <= 0).all()), f"{name}, rank {rank}: {key} is off by {float(gap.max())}"


def check_units(name: str, units: list[str]) -> None:
    found = Counter(re.sub(r"(?<=\.)\d+", "#", unit) for unit in units)
    wanted = MODELS[name].blocks
    assert {kind: found[kind] for kind in wanted} == wanted, units


def test_the_page_about_hugging_face_models_is_this_table() -> None:
    assert PAGE.read_text() == page(), "run python tests/support/huggingface_models.py"


@pytest.mark.some(10)
@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_trains_sharded_as_in_plain_torch(name: str) -> None:
    expected = plain(name)
    start = build(name, as_it_is, MODELS[name].dtype).state_dict()
    assert any(not torch.equal(value, start[key]) for key, value in expected[1].items())
    results = run_ranks(train, RANKS, name, 3, timeout=LIMIT)
    check(name, results, expected)
    for units, _ in results:
        check_units(name, units)


DEFERRED = {"init": True}
STAYING = {**DEFERRED, "slots": {"parameter": 99, "gradient": 99}}
VARIANTS: list[tuple[str, int, dict[str, Any]]] = [
    *((name, row, {}) for name, row in [("gpt2", 1), ("gpt2", 2), ("t5", 0), ("t5", 2), ("resnet", 1), ("mixtral", 2)]),
    *((name, 3, DEFERRED) for name in ("llama", "t5", "vit")),
    *((name, 3, {"change": checkpointed}) for name in ("llama", "bart", "vit")),  # by the model's own means
    *((name, 3, {"activation_checkpointing": {"enabled": True}}) for name in ("gpt2", "bart")),
]
RARER = [*((name, row, {}) for name in MODELS for row in (0, 1, 2)), *((name, 3, STAYING) for name in MODELS)]


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("name", "row", "options"), [*VARIANTS, *(pytest.param(*case, marks=pytest.mark.full) for case in RARER)]
)
def test_other_rows_and_ways_to_build_and_recompute_do_so_too(name: str, row: int, options: dict[str, Any]) -> None:
    check(name, run_ranks(train, RANKS, name, row, timeout=LIMIT, **options), plain(name))


@pytest.mark.parametrize(("name", "change"), [("llama", only_projections), ("roberta", only_the_head)])
def test_models_of_which_most_is_frozen(name: str, change: Callable[[Any], None]) -> None:
    expected = plain(name, change)
    start = build(name, as_it_is, MODELS[name].dtype).state_dict()
    moved = [key for key, value in expected[1].items() if not torch.equal(value, start[key])]
    assert 0 < len(moved) < len(start) / 2
    check(name, run_ranks(train, RANKS, name, 3, change, timeout=LIMIT), expected)


class Wrapped(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(32, VOCABULARY, dtype=inner.dtype)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **rest: torch.Tensor) -> Any:
        output = self.inner(input_ids=input_ids, output_hidden_states=True, **rest)
        scores = self.head(output.hidden_states[-2]) + output.logits
        output.loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return output


def wrapped(name: str, change: Callable[[Any], None], dtype: torch.dtype) -> Any:
    return Wrapped(build(name, change, dtype))


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_hugging_face_model_inside_a_users_module(name: str) -> None:
    results = run_ranks(train, RANKS, name, 3, make=wrapped, timeout=LIMIT)
    check(name, results, plain(name, as_it_is, wrapped))
    units = [unit.removeprefix("inner.") for unit in results[0][0]]
    check_units(name, units)
    assert "head" in units


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_sixteen_bits_are_the_same_sharded_or_not(name: str) -> None:
    bf16 = {"bf16": {"enabled": True}}
    (_, expected), *_ = replicated = run_ranks(train, RANKS, name, 1, timeout=LIMIT, **bf16)
    for (_, mine), (_, other) in zip(run_ranks(train, RANKS, name, 3, timeout=LIMIT, **bf16), replicated, strict=True):
        assert mine[0] == other[0]
        assert mine[1].keys() == other[1].keys()
        assert all(torch.equal(value, other[1][key]) for key, value in mine[1].items())
    assert {value.dtype for key, value in expected[1].items()} == {torch.bfloat16}
    full, _ = plain(name)
    assert expected[0] == pytest.approx(full, rel=0.2)


def prompts(rank: int) -> torch.Tensor:
    return tokens(torch.Generator().manual_seed(rank), 2, 3 + rank)


def generated(model: Any, rank: int, **options: Any) -> list[torch.Tensor]:
    found = []
    for how in ({"do_sample": False}, {"num_beams": 2, "do_sample": False}, {"do_sample": True, "top_k": 5}):
        torch.manual_seed(rank)
        found.append(model.generate(prompts(rank), **how, **options))
    return found


def generate(name: str, row: int, options: dict[str, Any], mesh: dict[str, int]) -> list[torch.Tensor]:
    case = MODELS[name]
    engine = zeromesh.initialize(model=build(name, as_it_is, case.dtype), config=config(row) | {"mesh": mesh})[0]
    found = []
    for batch in batches(case)[:2]:
        engine.eval()
        found += generated(engine, engine.data_rank, **options)
        engine.train()
        train_step(engine, engine(**share(batch, engine.data_rank, engine.data_size, case.dtype)).loss)
    engine.eval()
    return [*found, *generated(engine, engine.data_rank, **options)]


def check_generation(
    name: str, row: int, options: dict[str, Any], further: dict[str, Any], mesh: dict[str, int] | None = None
) -> list[list[int]]:
    case, lengths = MODELS[name], []
    model = build(name, as_it_is, case.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    expected: list[list[torch.Tensor]] = [[] for _ in range(RANKS)]
    for batch in [*batches(case)[:2], None]:
        model.eval()
        for rank in range(RANKS):
            expected[rank] += generated(model, rank, **options)
        if batch is not None:
            model.train()
            plain_step(optimizer, model(**share(batch, 0, 1, case.dtype)).loss)
    for found, wanted in zip(
        run_ranks(generate, RANKS, name, row, {**options, **further}, mesh or {}, timeout=LIMIT), expected, strict=True
    ):
        assert [ids.tolist() for ids in found] == [ids.tolist() for ids in wanted]
        lengths.append([ids.shape[1] for ids in found])
    return lengths


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "row"), [("gpt2", 3), ("t5", 3), ("gpt2", 1)])
def test_models_generate_through_the_engine(name: str, row: int) -> None:
    check_generation(name, row, {"max_new_tokens": 6, "min_new_tokens": 6}, {})


@pytest.mark.parametrize(
    ("name", "row", "mesh"), [("gpt2", 3, {}), pytest.param("qwen3_moe", 1, {"expert": 2}, marks=pytest.mark.full)]
)
def test_ranks_whose_texts_end_at_different_places_generate_together(name: str, row: int, mesh: dict[str, int]) -> None:
    ends = list(range(3, VOCABULARY, 4))
    options = {"max_new_tokens": 12, "eos_token_id": ends}
    lengths = check_generation(name, row, options, {"synced_gpus": True}, mesh)
    assert lengths[0] != [length - 1 for length in lengths[1]], "the test is about lengths that differ"
