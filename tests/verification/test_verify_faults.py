"""Mistakes planted into the engine are found, and the report says where and what."""

import pytest

from faults import FAULTS, found
from harness import run_ranks


def test_there_are_enough_faults() -> None:
    assert len(FAULTS) >= 25


@pytest.mark.some(2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_located(name: str) -> None:
    fault = FAULTS[name]
    by_rank = run_ranks(found, fault.ranks, name)
    verdict, sentence = by_rank[0]
    assert verdict == "APART", sentence
    for word in fault.words:
        assert word in sentence, sentence
    assert by_rank.count(by_rank[0]) == len(by_rank), "ranks have different reports"
