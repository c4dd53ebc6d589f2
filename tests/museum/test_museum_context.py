"""Sequences spread over ranks: silent errors of other systems, and that ours are those of one process."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from museum import require, results_of
from test_context import IDS, context, expected, fake, operands
from test_context import spread as attention_of
from test_context_models import LENGTH, Found, build, data, spread, train
from zeromesh.parallel.context.pair_rules import PairRule, RulePairs
from zeromesh.parallel.context.sequence_order import keep
from zeromesh.parallel.context.spread_attention import STRATEGIES, ring
from zeromesh.parallel.context.spread_batch import IGNORE_LABEL, split

RANKS = 2
SHAPE = {"heads": 4, "key_heads": 2}
LATE = torch.arange(3, LENGTH + 3).expand(2, LENGTH)
"""Positions that do not begin with zero."""


def sharp() -> Any:
    """Return a model whose attention is far from even."""
    model = build("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(10)
    return model


def late() -> dict[str, Tensor]:
    return data("gpt2") | {"position_ids": LATE}


def program() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in STRATEGIES:
        model = sharp()
        spread(model, strategy)
        moved = build("gpt2")
        spread(moved, strategy)
        found[strategy] = train(model, data("llama")), train(moved, late())
        found[strategy] += (attention_of(strategy, context(), torch.float64, SHAPE),)
    return found


def found_of(part: int) -> list[Found]:
    """Return for each strategy a loss that is equal on all ranks, and the mean of their gradients."""
    found = []
    for strategy in STRATEGIES:
        by_rank = [of_rank[strategy][part] for of_rank in results_of(program, RANKS)]
        assert all(torch.equal(loss, by_rank[0][0]) for loss, _ in by_rank)
        names = by_rank[0][1]
        found.append((by_rank[0][0], {name: torch.stack([own[name] for _, own in by_rank]).mean(0) for name in names}))
    return found


def whole(**arguments: Any) -> Found:
    return train(sharp(), data("llama") | arguments)


def of_parts(parts: list[Tensor]) -> Found:
    """Return the mean of what the ranks compute of logits of the whole sequences, each of its own labels."""
    model, given = sharp(), data("llama")
    logits = model(given["input_ids"]).logits
    labels = F.pad(given["labels"], (0, 1), value=IGNORE_LABEL)[:, 1:]
    means = [
        F.cross_entropy(keep(logits, rank, RANKS, 1).flatten(0, 1), (own + keep(labels, rank, RANKS, 1)).flatten())
        for rank, own in enumerate(parts)
    ]
    loss = torch.stack(means).mean()
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters()}


def scaled(found: Found, loss: float, gradient: float) -> Found:
    return found[0] * loss, {name: value * gradient for name, value in found[1].items()}


def require_both(wrong: Found, right: Found, part: int = 0, limit: float = 1e-9) -> None:
    for loss, gradients in found_of(part):
        require((loss, gradients), right, wrong, limit)


@pytest.mark.parametrize(("loss", "gradient"), [(1, 2), (1, 0.5), (0.5, 0.5), (2, 1), (2, 2)])
def test_loss_and_gradients_do_not_depend_on_the_number_of_ranks(loss: float, gradient: float) -> None:
    wrong = scaled(whole(), loss, gradient)
    for found in found_of(0):
        if loss != 1:
            require(found[0], whole()[0], wrong[0])
        if gradient != 1:
            require(found[1], whole()[1], wrong[1])


def test_labels_count_alike_however_many_a_rank_has() -> None:
    labels = F.pad(data("llama")["labels"], (0, 1), value=IGNORE_LABEL)[:, 1:]
    counts = [int((keep(labels, rank, RANKS, 1) != IGNORE_LABEL).sum()) for rank in range(RANKS)]
    assert counts[0] != counts[1]
    nothing = torch.zeros(2, LENGTH // RANKS, dtype=torch.long)
    require_both(of_parts([nothing] * RANKS), whole())


def test_positions_are_those_in_the_whole_sequence() -> None:
    # Each rank counted its own tokens from zero.
    order = torch.cat([keep(torch.arange(LENGTH)[None], rank, RANKS, 1)[0] for rank in range(RANKS)])
    positions = torch.empty(LENGTH, dtype=torch.long)
    positions[order] = torch.arange(LENGTH // RANKS).repeat(RANKS)
    seen = torch.ones(2, LENGTH)
    require_both(whole(position_ids=positions.expand(2, LENGTH), attention_mask=seen), whole())


def test_positions_that_are_given_are_used() -> None:
    right, wrong = train(build("gpt2"), late()), train(build("gpt2"), data("gpt2"))
    require_both(wrong, right, 1)


def test_labels_are_shifted_once() -> None:
    given = data("llama")
    again = F.pad(given["labels"], (0, 1), value=IGNORE_LABEL)[:, 1:]
    require_both(whole(labels=again), whole())


def test_gradients_of_attention_have_the_parts_of_all_ranks() -> None:
    right = expected(torch.float64, SHAPE)
    *xs, upstream = operands(torch.float64, **SHAPE)
    for rank, of_rank in enumerate(results_of(program, RANKS)):
        # Gradients of the keys of a rank by its own queries only.
        other = keep(torch.arange(LENGTH)[None, None, :, None].expand_as(upstream), rank, RANKS, 2)
        own = torch.zeros_like(upstream).scatter(2, other, keep(upstream, rank, RANKS, 2))
        given = [x.clone().requires_grad_() for x in xs]
        out = F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
        wrong = torch.autograd.grad(out, given, own)
        for strategy in STRATEGIES:
            for number in (1, 2):  # Of keys and values
                parts = (keep(x, rank, RANKS, 2) for x in (right[number + 1], wrong[number]))
                require(of_rank[strategy][2][number + 1], *parts)


def test_a_window_of_attention_is_not_left_out() -> None:
    *xs, upstream = operands(torch.float64, **SHAPE)
    index = torch.arange(upstream.shape[2])[None]
    rules = [PairRule("causal", index, index, 0), PairRule("window", index, index, high=3)]
    near = torch.ones(index.numel(), index.numel(), dtype=torch.bool).tril().triu(-3)
    right = F.scaled_dot_product_attention(*xs, attn_mask=near, enable_gqa=True)
    wrong = F.scaled_dot_product_attention(*xs, is_causal=True, enable_gqa=True)
    q, k, v = xs
    require(ring(q, k, v, fake(1), 0, pairs=RulePairs(rules, 1, index.numel())), right, wrong)


def test_packed_documents_are_refused_and_do_not_see_each_other() -> None:
    model, ids = sharp(), data("llama")["input_ids"]
    packed = torch.arange(LENGTH // 2).repeat(2, 2)
    apart = model(ids[:, LENGTH // 2 :]).logits
    together = model(ids, position_ids=packed, attention_mask=torch.ones_like(ids)).logits[:, LENGTH // 2 :]
    assert float((apart - together).detach().abs().max()) >= 1e-3
    with pytest.raises(ValueError, match="they stand for packed documents"):
        split({"input_ids": IDS, "position_ids": packed}, fake(RANKS))
    with pytest.raises(ValueError, match="several documents that must not see each other"):
        split({"input_ids": IDS, "documents": torch.arange(16).expand(2, 16) // 8}, fake(RANKS))
