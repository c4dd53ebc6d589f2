"""The page on experts names every class of experts of transformers, under what it is called with."""

from __future__ import annotations

import re

import pytest

from harness import ROOT
from mixture_models import MIXTURES
from zeromesh.parallel.expert.contract import Contract
from zeromesh.parallel.expert.forms import find_experts

PAGE = (ROOT / "docs" / "experts.md").read_text()
ROWS = {
    contract: re.search(rf"^\| {contract.name.lower()} \|.*\| (.+?) \|$", PAGE, re.MULTILINE) for contract in Contract
}
NAMES = {contract: row[1].split(", ") for contract, row in ROWS.items() if row is not None}
CONTRACTS = {name: contract for contract, names in NAMES.items() for name in names}


def test_every_class_of_experts_has_one_place() -> None:
    assert sorted(name for names in NAMES.values() for name in names) == sorted(MIXTURES)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_class_of_experts_is_where_it_belongs(name: str) -> None:
    experts = find_experts(MIXTURES[name].build(), [], 2)
    assert {each.contract for each in experts} == {CONTRACTS[name]}
