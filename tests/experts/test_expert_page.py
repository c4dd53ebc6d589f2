"""The page on experts names every class of experts of transformers, under what it is called with."""

from __future__ import annotations

import re
from math import comb

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


def test_bytes_that_layouts_send_are_those_of_their_formulas() -> None:
    experts, choices, width, tokens, ranks, size = 128, 8, 2048, 4096, 16, 8
    parameters = 3 * width * 768
    row = 1 - comb(experts - experts // size, choices) / comb(experts, choices)
    others = (size - 1) * row  # ranks that have an expert of a token, of even and independent choices
    rest = 6 * experts * parameters / size * (1 - size / ranks)
    zero = 6 * experts * parameters * (ranks - 1) / ranks
    tensor = 8 * (size - 1) * tokens * width + rest
    shared = 8 * others * tokens * width + 8 * others * tokens * choices + rest
    for number in (f"{zero / 1e9:.2f} GB", f"{tensor / 1e9:.2f} GB for t = 8", f"{shared / 1e9:.2f} GB for E = 8"):
        assert f"| {number} |" in PAGE
    assert f"and {others:.1f} here" in PAGE
    assert f"below {round(zero / (8 * others * width), -3):,.0f} tokens a rank" in PAGE
