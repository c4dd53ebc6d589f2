"""The loss of a head in chunks, its vocabulary whole or split, against torch's."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from harness import run_ranks
from zeromesh.dist.mesh import Mesh
from zeromesh.tensor.loss import Vocabulary, linear_cross_entropy

TOKENS, WIDTH, ENTRIES = (2, 7), 5, 11
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed, none": {"label_smoothing": 0.3, "reduction": "none"},
    "z": {"z_loss": 1e-2},
    "scaled": {"scale": 0.25},
    "capped": {"softcap": 1.5},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-2, "scale": 0.5, "softcap": 2.0, "ignore_index": 3},
}


def operands(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    hidden = (2 * torch.randn(*TOKENS, WIDTH)).to(dtype).requires_grad_()
    weight, bias = torch.randn(ENTRIES, WIDTH).to(dtype), torch.randn(ENTRIES).to(dtype)
    labels = torch.randint(ENTRIES, TOKENS)
    labels[0, 2] = labels[1, 5] = -100
    return hidden, weight.requires_grad_(), bias.requires_grad_(), labels


def expected(hidden: Any, weight: Any, bias: Any, labels: Any, **options: Any) -> torch.Tensor:
    """With all logits at once."""
    logits = F.linear(hidden, weight, bias) * options.pop("scale", 1.0)
    cap, z = options.pop("softcap", None), options.pop("z_loss", 0.0)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    logits, flat = logits.flatten(0, -2), labels.flatten()
    reduction = options.pop("reduction", "mean")
    losses = F.cross_entropy(logits, flat, reduction="none", **options)
    counted = flat != options.get("ignore_index", -100)
    losses = losses + z * logits.logsumexp(-1).square() * counted
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() / (counted.sum() if reduction == "mean" else 1)


def fit(labels: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    return labels.where(labels != -100, options.get("ignore_index", -100))


def gradients(loss: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    upstream = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return torch.autograd.grad(loss, operands, upstream)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("chunk", [1, 4, None])
def test_loss_and_gradients_are_those_of_torch(name: str, chunk: int | None) -> None:
    hidden, weight, bias, labels = operands()
    labels = fit(labels, OPTIONS[name])
    for used in (bias, None):
        asked = [hidden, weight] + ([] if used is None else [used])
        loss = linear_cross_entropy(hidden, weight, labels, used, chunk=chunk, **OPTIONS[name])
        reference = expected(hidden, weight, used, labels, **OPTIONS[name])
        torch.testing.assert_close(loss, reference, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients(loss, *asked), gradients(reference, *asked), rtol=1e-12, atol=1e-12)


def test_a_graph_may_be_used_twice_and_what_needs_no_gradient_gets_none() -> None:
    hidden, weight, _, labels = operands()
    loss = linear_cross_entropy(hidden, weight.detach(), labels, chunk=3)
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0].clone()
    (second,) = torch.autograd.grad(3 * loss, hidden)
    torch.testing.assert_close(second, 3 * first)
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels).requires_grad


class Products(TorchDispatchMode):
    """Counts the products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "mm" in func.name()
        return func(*args, **(kwargs or {}))


def test_without_gradients_there_is_one_product_for_a_chunk() -> None:
    hidden, weight, _, labels = operands()
    with Products() as with_gradients:
        linear_cross_entropy(hidden, weight, labels)
    with torch.no_grad(), Products() as without:
        linear_cross_entropy(hidden, weight, labels)
    assert (with_gradients.count, without.count) == (3, 1)


def test_sixteen_bits_are_as_near_as_logits_in_sixteen_bits_allow() -> None:
    exact = operands()
    hidden, weight, bias, labels = operands(torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, labels, bias, chunk=4)
    assert loss.dtype == torch.float32
    reference = expected(*exact)
    assert loss.item() == pytest.approx(reference.item(), rel=2e-2)
    for got, want in zip(gradients(loss, hidden, weight), gradients(reference, *exact[:2]), strict=True):
        assert got.dtype == torch.bfloat16
        assert float((got.double() - want).norm() / want.norm()) < 2e-2
    single = [operand.float().detach().requires_grad_() for operand in (hidden, weight, bias)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = linear_cross_entropy(single[0], single[1], labels, single[2], chunk=4)
    assert torch.equal(cast, loss)
    assert gradients(cast, *single)[1].dtype == torch.float32


def test_rows_of_padding_take_no_part() -> None:
    hidden, weight, bias, labels = operands()
    padded = torch.cat([weight.detach(), torch.full((3, WIDTH), 1e3, dtype=torch.float64)]).requires_grad_()
    more = torch.cat([bias.detach(), torch.full((3,), 1e3, dtype=torch.float64)]).requires_grad_()
    loss = linear_cross_entropy(hidden, padded, labels, more, vocabulary=Vocabulary(0, ENTRIES), label_smoothing=0.1)
    reference = linear_cross_entropy(hidden, weight, labels, bias, label_smoothing=0.1)
    torch.testing.assert_close(loss, reference)
    of_padding = gradients(loss, padded, more)
    of_all = gradients(reference, weight, bias)
    for got, want in zip(of_padding, of_all, strict=True):
        torch.testing.assert_close(got[:ENTRIES], want)
        assert not got[ENTRIES:].any()


def split(rows: int) -> dict[tuple[str, int | None], Any]:
    """Losses and gradients of this rank's rows of a vocabulary that is split over all ranks."""
    size = torch.distributed.get_world_size()
    group = Mesh({"tensor": size}, torch.device("cpu")).group("tensor")
    hidden, weight, bias, labels = operands()
    padding = rows * size - ENTRIES
    weight, bias = (torch.cat([w.detach(), w.new_ones(padding, *w.shape[1:])]) for w in (weight, bias))
    mine = slice(group.rank * rows, (group.rank + 1) * rows)
    own = [value[mine].clone().requires_grad_() for value in (weight, bias)]
    vocabulary = Vocabulary(mine.start, ENTRIES, group)
    found = {}
    for name, chunk in product(OPTIONS, (4, None)):
        loss = linear_cross_entropy(
            hidden, own[0], fit(labels, OPTIONS[name]), own[1], vocabulary=vocabulary, chunk=chunk, **OPTIONS[name]
        )
        found[name, chunk] = loss.detach(), *gradients(loss, hidden, *own)
    return found


# With 4 ranks the last one has padding only.
@pytest.mark.parametrize(("ranks", "rows"), [(2, 6), (3, 4), (4, 4)])
def test_a_split_vocabulary_gives_the_same_on_every_rank(ranks: int, rows: int) -> None:
    hidden, weight, bias, labels = operands()
    by_rank = run_ranks(split, ranks, rows)
    for name, chunk in product(OPTIONS, (4, None)):
        reference = expected(hidden, weight, bias, fit(labels, OPTIONS[name]), **OPTIONS[name])
        losses, *parts = zip(*(found[name, chunk] for found in by_rank), strict=True)
        assert all(torch.equal(loss, losses[0]) for loss in losses)
        torch.testing.assert_close(losses[0], reference.detach())
        want = gradients(reference, hidden, weight, bias)
        torch.testing.assert_close(sum(parts[0]), want[0])
        for got, expected_gradient in zip(parts[1:], want[1:], strict=True):
            torch.testing.assert_close(torch.cat(got)[:ENTRIES], expected_gradient)
            assert not torch.cat(got)[ENTRIES:].any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_are_refused(reduction: str) -> None:
    hidden, weight, _, labels = operands()
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction).sum()
    with pytest.raises(RuntimeError, match="create_graph is true, but linear_cross_entropy has no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_what_does_not_fit_is_refused() -> None:
    hidden, weight, _, labels = operands()
    with pytest.raises(ValueError, match="reduction is 'average', but must be one of mean, sum, none"):
        linear_cross_entropy(hidden, weight, labels, reduction="average")
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 7\), not \(14,\), and weight \(rows, 5\)"):
        linear_cross_entropy(hidden, weight, labels.flatten())
    labels[0, 0] = ENTRIES
    with pytest.raises(IndexError, match="the label 11 is not in the vocabulary of 11 entries: ids are 0 to 10"):
        linear_cross_entropy(hidden, weight, labels)
