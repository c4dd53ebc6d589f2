"""Models that are split over a tensor axis, as they are, train as in one process, in every combination."""

from itertools import product
from typing import Any

import pytest

from harness import run_ranks
from pairwise import pairwise
from tensor_models import MODELS, WHOLE, Case, Run, plain, train_cases

LIMIT = 120

FACTORS: dict[str, Any] = {
    "name": list(MODELS),
    "mesh": [(2, 1), (2, 2), (4, 1)],
    "row": [0, 1, 2, 3],
    "sequence": [False, True],
    "checkpointing": [False, True],
    "clip": [False, True],
    "accumulation": [1, 2],
}


def make(values: dict[str, Any]) -> Case:
    tensor, data = values["mesh"]
    return Case(**{key: value for key, value in values.items() if key != "mesh"}, tensor=tensor, data=data)


PAIRS = [make(values) for values in pairwise(FACTORS, seed=1)]


def two_of_each(factors: dict[str, Any]) -> list[dict[str, Any]]:
    """Every pair of the other factors, and every name twice."""
    names = factors["name"]
    rest = pairwise({key: values for key, values in factors.items() if key != "name"}, seed=1)
    return [{"name": names[number % len(names)], **rest[number * 5 % len(rest)]} for number in range(2 * len(names))]


def check(case: Case, runs: list[Run]) -> None:
    row = MODELS[case.name]
    expected = plain(case.name, case.clip, case.data * case.accumulation)
    losses = [sum(losses) / case.ranks for losses in zip(*(run.losses for run in runs), strict=True)]
    # The losses of many texts are in fp32, whatever the model is in.
    assert losses == pytest.approx(expected.losses, rel=max(row.tolerance, 1e-6), abs=0), case
    for run in runs:
        assert run.norms == pytest.approx(expected.norms, rel=max(row.tolerance, 1e-6), abs=0), case
        assert run.state.keys() == expected.state.keys()
        for name, want in expected.state.items():
            assert run.state[name].dtype == want.dtype
            error = ((run.state[name] - want).abs() / (1 + want.abs())).max().item()
            assert error <= row.tolerance, f"{case}: {name} is off by {error}"
    for name, (whole, part) in runs[0].parts.items() if case.tensor > 1 else ():
        if len(whole) > 1 and not WHOLE.search(name):
            check_part(case, name, whole, part)


def check_part(case: Case, name: str, whole: tuple[int, ...], part: tuple[int, ...]) -> None:
    """One dim is 1/ranks of what it was, rounded up; or as many entries of it are, and a head of keys has copies."""
    cut = [(old, new) for old, new in zip(whole, part, strict=True) if old != new]
    assert len(cut) == 1, f"{case}: {name} of shape {whole} is whole"
    (old, new), ranks = cut[0], case.tensor
    copies = 8 * (ranks // 2 - 1) * sum(key in name for key in ("k_proj", "v_proj"))
    fused = {"qkv_proj": 2 * 8 * (ranks // 2 - 1), "query_key_value": 0}
    if case.name == "falcon":  # one head of keys and one of values, on every rank
        fused["query_key_value"] = 16 * (ranks - 1) // ranks
    more = next((value for key, value in fused.items() if key in name), 0)
    if case.name in ("phi3", "falcon") and more:
        assert -(-old // ranks) <= new <= -(-old // ranks) + more, f"{case}: {name} has {new} of {old}"
        return
    assert new in (-(-old // ranks), max(8, -(-old // ranks)) if copies else -1), f"{case}: {name} has {new} of {old}"


@pytest.mark.some(10)
@pytest.mark.parametrize("case", [make(values) for values in two_of_each(FACTORS)], ids=str)
def test_a_split_model_trains_as_one_process_does(case: Case) -> None:
    runs = run_ranks(train_cases, case.ranks, [case], timeout=LIMIT)
    check(case, [of_rank[0] for of_rank in runs])


@pytest.mark.full
@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_every_pair_of_settings_and_models_trains_as_one_process_does(case: Case) -> None:
    test_a_split_model_trains_as_one_process_does(case)


DECODERS = ("llama", "qwen3", "mistral", "gpt_neox", "starcoder2")
SPREAD: dict[str, Any] = {
    "name": list(DECODERS),
    "mesh": [(1, 1, 2), (1, 1, 4), (1, 2, 2), (2, 1, 2)],
    "strategy": ["ring", "ulysses"],
    "row": [0, 1, 2, 3],
    "sequence": [False, True],
    "checkpointing": [False, True],
    "clip": [False, True],
}


def make_spread(values: dict[str, Any]) -> Case:
    tensor, data, context = values["mesh"]
    rest = {key: value for key, value in values.items() if key != "mesh"}
    rest["sequence"] = rest["sequence"] and tensor > 1
    return Case(**rest, tensor=tensor, data=data, context=context)


@pytest.mark.some(5)
@pytest.mark.parametrize("case", [make_spread(values) for values in two_of_each(SPREAD)], ids=str)
def test_sequences_spread_over_ranks_train_as_in_one_process(case: Case) -> None:
    runs = run_ranks(train_cases, case.ranks, [case], timeout=LIMIT)
    check(case, [of_rank[0] for of_rank in runs])


@pytest.mark.full
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("mesh", SPREAD["mesh"])
@pytest.mark.parametrize("strategy", SPREAD["strategy"])
def test_all_rows_with_sequences_spread_over_ranks(name: str, mesh: tuple[int, int, int], strategy: str) -> None:
    for row in range(4):
        values = {"name": name, "mesh": mesh, "strategy": strategy, "row": row, "sequence": row % 2 == 1}
        case = make_spread({**values, "checkpointing": row > 1, "clip": True})
        runs = run_ranks(train_cases, case.ranks, [case], timeout=LIMIT)
        check(case, [of_rank[0] for of_rank in runs])


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", FACTORS["mesh"])
def test_all_rows_with_and_without_sequence_parallelism(name: str, mesh: tuple[int, int]) -> None:
    tensor, data = mesh
    cases = [
        Case(name, tensor, data, row, sequence, checkpointing, clip=True)
        for row, sequence, checkpointing in product(range(4), (False, True), (False, True))
    ]
    runs = run_ranks(train_cases, tensor * data, cases, timeout=3 * LIMIT)
    for number, case in enumerate(cases):
        check(case, [of_rank[number] for of_rank in runs])
