"""Attention by any rules of pairs, with keys going around the ranks, and documents placed over them."""

import random
from typing import Any
from unittest.mock import patch

import pytest
import torch

from harness import run_ranks
from test_context import TAG, context, operands, results
from zeromesh.parallel.context import pair_rules
from zeromesh.parallel.context.attention_block import PRODUCTS, AttentionBlock, attend, gradients
from zeromesh.parallel.context.document_order import BALANCE, order_of
from zeromesh.parallel.context.pair_rules import PairRule, RulePairs
from zeromesh.parallel.context.sequence_order import keep, reordered
from zeromesh.parallel.context.spread_attention import attend as attend_spread

LENGTH = 48
SHAPE = {"heads": 4, "key_heads": 2, "length": LENGTH, "value_width": 6}
INDEX = torch.arange(LENGTH)[None]
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 3 + [2] * 24 + [3] * 16, [0] * 12 + [1] * 12 + [2] * 12 + [3] * 12])
HIDDEN = torch.tensor([[1] * 13 + [0] * 35, [1] * 2 + [0] * 46])
CAUSAL = PairRule("causal", INDEX, INDEX, 0)
DOCUMENT = PairRule("document", DOCUMENTS, DOCUMENTS, 0, 0)
RULES: dict[str, list[PairRule]] = {
    "causal": [CAUSAL],
    "window": [CAUSAL, PairRule("window", INDEX, INDEX, high=6)],
    "window of both sides": [PairRule("window", INDEX, INDEX, -5, 5)],
    "chunks": [CAUSAL, PairRule("chunk", INDEX // 7, INDEX // 7, 0, 0)],
    "padding first": [CAUSAL, PairRule("padding", 0 * HIDDEN, HIDDEN, 0, 0)],
    "padding last, of both sides": [PairRule("padding", 0 * HIDDEN, HIDDEN.flip(1), 0, 0)],
    "prefix": [PairRule("causal", INDEX, INDEX * (INDEX >= 10), 0)],
    "documents": [CAUSAL, DOCUMENT],
    "documents in a window": [CAUSAL, DOCUMENT, PairRule("window", INDEX, INDEX, high=9)],
    "all": [],
}
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": torch.linspace(-1.0, 2.0, 4, dtype=torch.float64)},
    "capped": {"cap": 0.7},
}
CASES = [(rules, "plain", True) for rules in RULES] + [
    ("causal", "sinks", True), ("padding first", "sinks", True), ("window", "capped", True), ("all", "capped", True),
    ("documents", "sinks", False), ("documents", "plain", False),
]  # fmt: skip


def whole(rules: str, extras: str, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Compute attention by plain products in one process."""
    *xs, upstream = (x.double() for x in operands(dtype, **SHAPE))
    q, k, v = (x.requires_grad_() for x in xs)
    options = {name: x.clone().requires_grad_() if name == "sinks" else x for name, x in EXTRAS[extras].items()}
    scores = q @ k.repeat_interleave(2, 1).mT * q.shape[-1] ** -0.5
    if "cap" in options:
        scores = options["cap"] * torch.tanh(scores / options["cap"])
    for rule in RULES[rules]:
        difference = rule.of_queries[:, :, None] - rule.of_keys[:, None]
        scores = scores.masked_fill(~((difference >= rule.low) & (difference <= rule.high))[:, None], -torch.inf)
    more = options.get("sinks", torch.tensor([-1e300] * 4, dtype=q.dtype))  # keeps the rows of blind queries finite
    scores = torch.cat([scores, more.view(1, 4, 1, 1).expand(2, 4, LENGTH, 1)], -1)
    out = scores.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)
    return results(out, [q, k, v, *[x for name, x in options.items() if name == "sinks"]], upstream)


def by_order(x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return x if order is None else reordered(x.transpose(1, 2), order).transpose(1, 2)


def spread(cases: list[Any], dtype: torch.dtype, tile: int, degree: int) -> list[list[torch.Tensor]]:
    group, found = context(), []
    groups = group.size // degree
    with patch.object(pair_rules, "LEAST_TILE", tile):
        for rules, extras, placed in cases:
            order = order_of(DOCUMENTS, groups) if placed and "documents" in rules else None
            parts = [keep(by_order(x, order), group.rank, group.size, 2) for x in operands(dtype, **SHAPE)]
            *xs, upstream = parts
            xs = [x.requires_grad_() for x in xs]
            options: dict[str, Any] = {
                name: x.clone().requires_grad_() if name == "sinks" else x for name, x in EXTRAS[extras].items()
            }
            pairs = RulePairs(RULES[rules], groups, LENGTH, order)
            q, k, v = xs
            out = attend_spread(degree, q, k, v, group, TAG, pairs=pairs, **options)
            found.append(results(out, xs + [x for name, x in options.items() if name == "sinks"], upstream))
    return found


def compare(by_rank: list[Any], cases: list[Any], dtype: torch.dtype, tolerance: float, degree: int = 1) -> None:
    ranks = len(by_rank)
    for number, (rules, extras, placed) in enumerate(cases):
        order = order_of(DOCUMENTS, ranks // degree) if placed and "documents" in rules else None
        want = whole(rules, extras, dtype)
        for place, x in enumerate(want):
            parts = [found[number][place].double() for found in by_rank]
            if place == 4:  # sinks: each rank has the gradient of its queries
                gaps = [(sum(parts) - x).abs().max()]
            else:
                wants = [keep(by_order(x, order), rank, ranks, 2) for rank in range(ranks)]
                gaps = [((a - b).abs() / (1 + b.abs())).max() for a, b in zip(parts, wants, strict=True)]
            assert max(gaps) <= tolerance, f"{rules}, {extras}, {placed}, operand {place}: off by {float(max(gaps))}"


@pytest.mark.some(1)
@pytest.mark.parametrize(("ranks", "tile", "degree"), [(2, 5, 1), (4, 3, 2), (4, 3, 1), (2, 128, 1), (2, 5, 2)])
def test_any_rules_give_what_one_process_computes(ranks: int, tile: int, degree: int) -> None:
    compare(run_ranks(spread, ranks, CASES, torch.float64, tile, degree), CASES, torch.float64, 1e-12, degree)


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 24 * 2**-8)])
def test_any_rules_do_so_in_other_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    # Of 16 bits, see ``TOLERANCE`` of the plain ring.
    cases = [case for case in CASES if case[1] != "sinks"]
    compare(run_ranks(spread, 2, cases, dtype, 5, 1), cases, dtype, tolerance)


@pytest.mark.parametrize("cap", [None, 0.5])
def test_operators_of_the_cpu_take_masks_and_plain_products_caps(cap: float | None) -> None:
    q, k, v, upstream = operands(torch.float64, heads=4, key_heads=2)
    mask = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(1)) > 0.6
    mask[1, 0, 3] = False
    block = AttentionBlock(q, k, v, False, 0.3, mask, cap)
    out, lse = attend(block)
    assert out[1, :, 3].count_nonzero() == 0
    assert lse[1, :, 3].eq(-torch.inf).all()
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    found, want = gradients(block, upstream, out, lse), PRODUCTS.gradients(block, upstream, out, lse)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    xs = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = xs[0] @ xs[1].repeat_interleave(2, 1).mT * 0.3
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    some = scores.masked_fill(~mask, -torch.inf).softmax(-1)[mask.any(-1).expand(-1, 4, -1)]
    weights = torch.zeros_like(scores).masked_scatter(mask.any(-1, keepdim=True).expand_as(scores), some)
    plain = weights @ xs[2].repeat_interleave(2, 1)
    torch.testing.assert_close(out, plain, rtol=1e-12, atol=1e-12)
    for a, b in zip(found, torch.autograd.grad(plain, xs, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def pairs_of(rules: list[PairRule], ranks: int, order: torch.Tensor | None = None, tile: int = 4) -> RulePairs:
    with patch.object(pair_rules, "LEAST_TILE", tile):
        return RulePairs(rules, ranks, LENGTH, order)


def test_ranks_whose_keys_nobody_sees_send_nothing() -> None:
    equal = torch.arange(LENGTH)[None] // (LENGTH // 4)
    document = PairRule("document", equal, equal, 0, 0)
    assert pairs_of([CAUSAL, document], 4, order_of(equal, 4)).steps == ()
    # A window reaches the chunk before: of the rank before for an early chunk, and of the next for a late one.
    assert pairs_of(RULES["window"], 4).steps == (1, 3)
    assert pairs_of([CAUSAL], 4).steps == (1, 2, 3)


@pytest.mark.parametrize("rules", RULES)
def test_pieces_have_each_pair_that_is_seen_once(rules: str) -> None:
    ranks, part, order = 4, LENGTH // 4, order_of(DOCUMENTS, 4)
    pairs = pairs_of(RULES[rules], ranks, order, 3)
    seen = torch.ones(2, LENGTH, LENGTH, dtype=torch.bool)
    for rule in RULES[rules]:
        seen &= rule.sees(rule.of_queries, rule.of_keys)
    computed = torch.zeros(2, LENGTH, LENGTH, dtype=torch.long)
    for rank in range(ranks):
        for source in range(ranks):
            here = torch.zeros(2, part, part, dtype=torch.long)
            for piece in pairs.pieces(rank, source, part):
                mask = pairs.mask(piece, rank, source)
                x = here[piece.samples, piece.rows, piece.columns]
                x += torch.ones_like(x).tril() if piece.causal else 1 if mask is None else mask[:, 0]
            for sample in range(2):
                q, k = (keep(order, place, ranks, 1)[sample] for place in (rank, source))
                computed[sample, q[:, None], k] += here[sample]
    assert computed.equal(seen.long())


def lengths_of(draw: random.Random, length: int, mean: float) -> list[int]:
    found: list[int] = []
    while sum(found) < length:
        found.append(min(max(1, int(draw.lognormvariate(mean, 1.0))), length - sum(found)))
    return found


def numbers_of(lengths: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_documents_are_placed_so_that_ranks_have_equal_work(ranks: int) -> None:
    draw, zigzag = random.Random(ranks), []
    for mean in (4.0, 5.0, 6.0):
        documents = torch.stack([numbers_of(lengths_of(draw, 4096, mean)) for _ in range(3)])
        order = order_of(documents, ranks)
        assert order.sort(-1).values.equal(torch.arange(4096).expand(3, -1))
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents.diff() != 0
        at = torch.arange(4096) - (begins * torch.arange(4096)).cummax(-1).values  # each sees as many keys, and itself
        shares: dict[str, list[int]] = {}
        for name, numbers in (("placed", reordered(at, order)), ("zigzag", at)):
            shares[name] = [int((keep(numbers, rank, ranks, 1) + 1).sum()) for rank in range(ranks)]
            if name == "placed":
                tokens = [keep(order, rank, ranks, 1) for rank in range(ranks)]
                assert all(bool((x.diff() > 0).all()) for x in tokens)
        assert max(shares["placed"]) * ranks <= BALANCE * sum(shares["placed"])
        zigzag.append(max(shares["zigzag"]) * ranks / sum(shares["zigzag"]))
    assert max(zigzag) > BALANCE  # what placing them is for


def test_documents_that_fit_are_left_whole() -> None:
    documents = numbers_of([12, 4, 4, 12, 12, 12, 4, 4])[None]
    order = order_of(documents, 4)
    parts = [set(documents[0][keep(order, rank, 4, 1)[0]].tolist()) for rank in range(4)]
    assert sorted(map(len, parts)) == [2, 2, 2, 2]
    assert len(set().union(*parts)) == 8
