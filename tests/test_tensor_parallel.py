"""Models that are split over a tensor axis, as they are, train as in one process, in every combination."""

from __future__ import annotations

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


CASES = [make(values) for values in pairwise(FACTORS, seed=1)]


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
    for name, (whole, part) in runs[0].parts.items():
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_split_model_trains_as_one_process_does(case: Case) -> None:
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
