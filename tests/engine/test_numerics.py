"""Every combination trains to the same numbers as torch in one process."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch

import numerics
from harness import run_mpi_ranks, run_ranks
from numerics import Case, Run, assemble, build_net, plain, rounded, train_cases
from pairwise import pairwise

BUDGETS_ONLY = (
    *("row 2, host", "row 3, parameters on host", "row 1, nvme", "row 2, nvme"),
    *("row 1, host, early", "row 3, all on host, early", "row 3, nvme, early"),
    *("row 3, parameters in files", "row 3, host and files"),
    *(name for name in numerics.POLICIES if "split" in name),
)
"""These, and all others, are compared bit for bit below."""

FACTORS: dict[str, Sequence[Any]] = {
    "precision": list(numerics.PRECISIONS),
    "policy": [name for name in numerics.POLICIES if name not in BUDGETS_ONLY],
    "mesh": list(numerics.MESHES),
    "accumulation": [1, 3],
    "clip": [False, True],
    "checkpointing": [False, True],
    "offload": [False, True],
    "optimizer": list(numerics.OPTIMIZERS),
    "predivide": ["none", "factor 3", "ranks"],
    "accumulate": ["default", "fp32", "bf16"],
    "wire": ["default", "fp32", "bf16", "fp16"],
    "states": ["fp32", "bf16"],
}
PAIRS = [Case(**values) for values in pairwise(FACTORS, seed=2)]
USUAL = {**FACTORS, "policy": [name for name in FACTORS["policy"] if "slots" not in name or "all" in name]}
"""Budgets of slots, but for one, are compared bit for bit below."""

SHARDED = [name for name, (row, _) in numerics.POLICIES.items() if row > 0]
"""The policies whose optimizer is sharded, which differ only in when and where things are in memory."""

NATIVE = [
    "row 1, host", "row 2, host", "row 3, host", "row 3, all on host", "row 1, nvme", "row 2, nvme", "row 3, nvme",
    "row 1, host, early", "row 3, all on host, early", "row 3, nvme, early",
    "row 3, host and files", "row 3, all in files",
]  # fmt: skip
"""Those of which the native kernel updates all; torch's own rounds otherwise in the last place."""

IN_PART = ["row 3, half on host", "row 3, nvme and host"]

SPLIT = ["row 3, all on host, split", "row 3, all in files, split"]
"""Masters in halves round parameters otherwise: ties away from zero. They are the same wherever they rest."""

LIMIT = 240
"""Seconds that ranks have for the cases of one call."""


def run(cases: Sequence[Case], on: Callable[..., list[Any]] = run_ranks) -> list[list[Run]]:
    by_rank = on(train_cases, cases[0].ranks, cases, timeout=LIMIT)
    return [list(runs) for runs in zip(*by_rank, strict=True)]


def mean_losses(case: Case, runs: Sequence[Run]) -> list[float]:
    table = torch.tensor([run.losses for run in runs], dtype=torch.float64)
    return table.view(case.ranks, numerics.STEPS, case.accumulation).mean((0, 2)).tolist()


def check(case: Case, runs: Sequence[Run]) -> dict[str, torch.Tensor]:
    masters = assemble(runs, build_net(torch.float32))
    for other in runs[1:]:
        assert (other.rates, other.scales) == (runs[0].rates, runs[0].scales), case
        assert [str(norm) for norm in other.norms] == [str(norm) for norm in runs[0].norms], case
    check_rounded(case, runs, masters)
    usual = (case.accumulate, case.wire, case.narrow) == ("default", "default", ())
    if case.precision == "float64" and usual:
        check_plain(case, runs, masters, 1e-9)
    # Muon's directions are rounded to bf16: a sum in another order may round one of them the other way.
    if case.precision == "fp32" and usual and case.optimizer != "muon":
        check_plain(case, runs, None, 1e-5)
    return masters


def check_rounded(case: Case, runs: Sequence[Run], masters: dict[str, torch.Tensor]) -> None:
    reference, expected = rounded(case, runs)
    limit = 1e-12 if (case.precision, case.optimizer) == ("float64", "lamb") else 0.0
    for run, losses in zip(runs, reference_losses(case, reference), strict=True):
        assert run.losses == pytest.approx(losses, rel=limit, abs=0), f"{case}: losses differ"
    different = {name: (masters[name] - value).abs().max().item() for name, value in expected.items()}
    assert max(different.values()) <= limit, f"{case}: masters differ in {different}"
    assert (runs[0].scales, runs[0].rates) == (reference.scales, reference.rates), case
    assert all(run.counts.items() <= reference.counts.items() for run in runs), case
    for run in runs:
        assert set(run.states) <= set(reference.states), case
        assert bool(run.states) == bool(case.narrow), case
        for key, state in run.states.items():
            assert state.dtype is torch.bfloat16, f"{case}: {key} is {state.dtype}"
            assert torch.equal(state, reference.states[key]), f"{case}: {key} differs"
    for name, master in masters.items():
        assert torch.equal(runs[0].state[name], case.computed(master)), f"{case}: {name} is not its master, rounded"


def reference_losses(case: Case, reference: Run) -> list[list[float]]:
    table = torch.tensor(reference.losses, dtype=torch.float64).view(-1, case.ranks)
    return [table[:, rank].tolist() for rank in range(case.ranks)]


def check_plain(case: Case, runs: Sequence[Run], masters: dict[str, torch.Tensor] | None, tolerance: float) -> None:
    reference, expected = plain(case.precision, case.clip, case.optimizer)
    for got, want in [(mean_losses(case, runs), reference.losses), (runs[0].norms, reference.norms)]:
        assert got == pytest.approx(want, rel=tolerance, abs=tolerance if masters else 0), case
    assert runs[0].rates == pytest.approx(reference.rates, rel=1e-12), case
    for name, master in (masters or {}).items():
        error = ((master - expected[name]).abs() / (1 + expected[name].abs())).max().item()
        assert error <= tolerance, f"{case}: {name} is off by {error}"


def test_the_chosen_combinations_hold_every_pair() -> None:
    chosen = pairwise(FACTORS, seed=2)
    assert chosen == [{factor: getattr(case, factor) for factor in FACTORS} for case in PAIRS]
    for one, other in combinations(FACTORS, 2):
        pairs = {(case[one], case[other]) for case in chosen}
        assert pairs == set(product(FACTORS[one], FACTORS[other]))


@pytest.mark.some(9)
@pytest.mark.parametrize("case", [Case(**values) for values in pairwise(USUAL, seed=2)], ids=str)
def test_every_pair_of_settings_trains_as_one_process_does(case: Case) -> None:
    check(case, run([case])[0])


ON_MPI = [
    Case("fp32", "row 0", "2x2", clip=True),
    Case("bf16", "row 1", "4", accumulation=3),
    Case("fp16", "row 2", "2x2", accumulate="fp32"),
    Case("bf16", "row 3", "2x2", accumulation=3, clip=True, checkpointing=True, offload=True),
    Case("float64", "row 3, 3 + 3 slots", "4", optimizer="muon"),
    Case("fp32", "row 3", "4", optimizer="lamb", predivide="ranks"),
]


@pytest.mark.some(1)
@pytest.mark.parametrize("case", ON_MPI, ids=str)
def test_on_mpi_it_trains_as_one_process_does(case: Case) -> None:
    check(case, run([case], run_mpi_ranks)[0])


@pytest.mark.full
@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_on_mpi_every_pair_of_settings_trains_as_one_process_does(case: Case) -> None:
    check(case, run([case], run_mpi_ranks)[0])


@pytest.mark.full
@pytest.mark.parametrize("case", [Case(**values) for values in pairwise(FACTORS, seed=3)], ids=str)
def test_further_pairs_of_settings_train_as_one_process_does(case: Case) -> None:
    check(case, run([case])[0])


def check_policies(shared: dict[str, Any], policies: Sequence[str]) -> None:
    cases = [Case(policy=policy, **shared) for policy in policies]
    masters = {case.policy: check(case, runs) for case, runs in zip(cases, run(cases), strict=True)}
    if shared["accumulation"] == 1:
        rest = [policy for policy in SHARDED if policy not in (*NATIVE, *IN_PART, *SPLIT)]
        for alike in (NATIVE, SPLIT, rest):
            first, *others = [masters[policy] for policy in policies if policy in alike]
            for other in others:
                assert all(torch.equal(first[name], other[name]) for name in first), shared


BITS_ON = {"float64": "2", "fp32": "3", "bf16": "2x2", "fp16": "2"}


@pytest.mark.parametrize(
    ("precision", "policies"),
    [
        pytest.param("fp16", SHARDED[::3], id="fp16, every third policy"),
        *(pytest.param(name, SHARDED, id=name, marks=pytest.mark.full) for name in BITS_ON),
    ],
)
def test_rows_and_slot_budgets_do_not_change_a_bit(precision: str, policies: list[str]) -> None:
    check_policies({"precision": precision, "mesh": BITS_ON[precision], "accumulation": 1, "clip": True}, policies)


@pytest.mark.full
def test_split_masters_match_their_reference() -> None:
    shared = {"precision": "bf16", "mesh": "2", "accumulation": 3, "clip": True, "checkpointing": True}
    check_policies(shared, SPLIT)


NARROW = ["row 0", "row 1", "row 2", "row 3", *NATIVE, *IN_PART]


@pytest.mark.parametrize(
    ("precision", "policies"),
    [
        pytest.param("fp32", ["row 2", "row 3, all on host, early", "row 3, nvme"], id="some"),
        *(pytest.param(name, NARROW, id=name, marks=pytest.mark.full) for name in ("fp32", "bf16", "fp16")),
    ],
)
def test_states_in_bf16_have_the_same_bits_in_every_row_and_tier(precision: str, policies: list[str]) -> None:
    shared = {"precision": precision, "accumulation": 3, "clip": True, "states": "bf16"}
    check_policies({**shared, "mesh": "2"}, policies)


@pytest.mark.full
def test_states_in_bf16_beside_split_masters_match_their_reference() -> None:
    check_policies({"precision": "bf16", "mesh": "2", "accumulation": 3, "clip": True, "states": "bf16"}, SPLIT)


MATRIX = {
    "precision": ["float64", "fp32", "bf16", "fp16"],
    "mesh": ["1", "2", "3", "4"],
    "accumulation": [1, 3],
    "clip": [False, True],
    "checkpointing": [False, True],
}


@pytest.mark.full
@pytest.mark.parametrize("values", list(product(*MATRIX.values())), ids=lambda values: "-".join(map(str, values)))
def test_the_whole_matrix_trains_as_one_process_does(values: tuple[Any, ...]) -> None:
    check_policies(dict(zip(MATRIX, values, strict=True)), list(numerics.POLICIES))
