"""The loss of a head in chunks, its vocabulary whole or split, against torch's."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from harness import run_ranks
from zeromesh import Mesh
from zeromesh.base.linear_arithmetic import Kept, keeping
from zeromesh.parallel.head import linear_cross_entropy as loss_module
from zeromesh.parallel.head.linear_cross_entropy import CHUNK_BYTES, Vocabulary, chunk_bytes, linear_cross_entropy
from zeromesh.parallel.pipeline.runtime.weight_gradients import roots_of

TOKENS, WIDTH, ENTRIES = (2, 7), 5, 11
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed, none": {"label_smoothing": 0.3, "reduction": "none"},
    "scaled": {"scale": 0.25},
    "capped": {"softcap": 1.5},
    "all": {"label_smoothing": 0.2, "scale": 0.5, "softcap": 2.0, "ignore_index": 3},
}


def operands(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    hidden = (2 * torch.randn(*TOKENS, WIDTH)).to(dtype).requires_grad_()
    weight, bias = torch.randn(ENTRIES, WIDTH).to(dtype), torch.randn(ENTRIES).to(dtype)
    labels = torch.randint(ENTRIES, TOKENS)
    labels[0, 2] = labels[1, 5] = -100
    return hidden, weight.requires_grad_(), bias.requires_grad_(), labels


def expected(hidden: Any, weight: Any, bias: Any, labels: Any, **options: Any) -> torch.Tensor:
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


@pytest.mark.parametrize("name", ["plain", "none", "all"])
@pytest.mark.parametrize(("chunk", "room"), [(None, 1 << 26), (4, 1 << 26), (4, 4 * ENTRIES * 8), (4, 0)])
def test_gradients_of_weight_and_bias_can_come_later(
    name: str, chunk: int | None, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In full, and in part where the memory for what waits is used up."""
    monkeypatch.setattr("zeromesh.parallel.head.linear_cross_entropy.CHUNK_BYTES", room)
    hidden, weight, bias, labels = operands()
    labels = fit(labels, OPTIONS[name])
    reference = expected(hidden, weight, bias, labels, **OPTIONS[name])
    upstream = torch.linspace(0.5, 2, reference.numel(), dtype=reference.dtype).view(reference.shape)
    wanted = torch.autograd.grad(reference, (hidden, weight, bias), upstream)
    kept: Kept = []
    with keeping(kept):
        loss = linear_cross_entropy(hidden, weight, labels, bias, chunk=chunk, **OPTIONS[name])
    torch.testing.assert_close(loss, reference, rtol=1e-12, atol=1e-12)
    loss.backward(upstream, retain_graph=True)
    assert weight.grad is None
    assert bias.grad is None
    torch.testing.assert_close(hidden.grad, wanted[0], rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="computed twice.*choose another schedule, such as gpipe"):
        loss.backward(upstream, retain_graph=True)
    with Products() as later:
        torch.autograd.backward(roots_of(kept), [torch.empty_like(root) for root in roots_of(kept)])
    torch.testing.assert_close((weight.grad, bias.grad), wanted[1:], rtol=1e-12, atol=1e-12)
    tokens = len(labels.flatten())
    assert later.count == min(-(-tokens // (chunk or tokens)), room // ((chunk or tokens) * ENTRIES * 8))


def test_a_graph_may_be_used_twice_and_what_needs_no_gradient_gets_none() -> None:
    hidden, weight, _, labels = operands()
    loss = linear_cross_entropy(hidden, weight.detach(), labels, chunk=3)
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0].clone()
    (second,) = torch.autograd.grad(3 * loss, hidden)
    torch.testing.assert_close(second, 3 * first)
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels).requires_grad


class Products(TorchDispatchMode):
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
    hidden, weight, bias, labels = operands(torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    loss = linear_cross_entropy(hidden, weight, labels, bias, chunk=4)
    assert loss.dtype == torch.float32
    reference = expected(*exact, labels)
    # Each logit is rounded once, by its unit roundoff; of that a loss sees its label's and the rest's.
    size = float(F.linear(*exact).detach().abs().amax(-1).mean())
    assert loss.item() == pytest.approx(reference.item(), rel=0, abs=2 * 2**-8 * size)
    for got, want in zip(gradients(loss, hidden, weight), gradients(reference, *exact[:2]), strict=True):
        assert got.dtype == torch.bfloat16
        # Three roundings: of the logits' gradients, of their product, of the sum; a probability p is off by p (1 - p),
        # at most a quarter, of what the loss is.
        assert float((got.double() - want).norm() / want.norm()) < (3 + 2 * size / 4) * 2**-8
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


LARGE: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1, "ignore_index": 3},
    "smoothed, none": {"label_smoothing": 0.3, "reduction": "none"},
    "scaled": {"scale": 2.0},
}


def large_operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each token has one entry of the hidden state, so that fp32 logits, of about 1e4, are exactly the weight's."""
    torch.manual_seed(5)
    count = TOKENS[0] * TOKENS[1]
    hidden = torch.eye(count).view(*TOKENS, count)
    sign = torch.where(torch.arange(count) % 2 == 0, 1.0, -1.0)
    labels = torch.randint(ENTRIES, TOKENS)
    labels[0, 2] = labels[1, 5] = -100
    return hidden.requires_grad_(), (1e4 * sign + 2 * torch.randn(ENTRIES, count)).requires_grad_(), labels


def check_large(name: str, loss: torch.Tensor, of_hidden: torch.Tensor, of_weight: torch.Tensor) -> None:
    """Compare with float64, within what rounding of differences of logits, and of sums of them, allows.

    Any number that is relative to the maximum is wrong by less than ``(entries + 8) * eps * (1 + the largest difference
    of two logits)``: each difference and exponential is rounded, then as many are added as there are entries.
    """
    hidden, weight, labels = large_operands()
    exact = [operand.detach().double().requires_grad_() for operand in (hidden, weight)]
    reference = expected(exact[0], exact[1], None, fit(labels, LARGE[name]), **LARGE[name])
    want_hidden, want_weight = gradients(reference, *exact)
    spread = LARGE[name].get("scale", 1.0) * float((weight.amax(0) - weight.amin(0)).detach().max())
    error = (ENTRIES + 8) * torch.finfo(torch.float32).eps * (1 + spread)
    terms = labels.numel() if reference.ndim == 0 and LARGE[name].get("reduction") == "sum" else 1
    assert float((loss - reference).abs().max()) < terms * error
    largest = 2 * LARGE[name].get("scale", 1.0)  # of what comes from above
    assert float((of_weight - want_weight).abs().max()) < largest * error
    assert float((of_hidden - want_hidden).abs().max()) < 2 * ENTRIES * largest * error * float(
        weight.detach().abs().max()
    )


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("chunk", [4, None])
def test_large_logits_keep_the_digits_of_the_loss(name: str, chunk: int | None) -> None:
    hidden, weight, labels = large_operands()
    loss = linear_cross_entropy(hidden, weight, fit(labels, LARGE[name]), chunk=chunk, **LARGE[name])
    check_large(name, loss.detach(), *gradients(loss, hidden, weight))


def split_large(rows: int) -> dict[str, Any]:
    size = torch.distributed.get_world_size()
    group = Mesh({"tensor": size}, torch.device("cpu")).group("tensor")
    hidden, weight, labels = large_operands()
    padded = torch.cat([weight.detach(), weight.new_zeros(rows * size - ENTRIES, weight.shape[1])])
    own = padded[group.rank * rows : (group.rank + 1) * rows].clone().requires_grad_()
    vocabulary = Vocabulary(group.rank * rows, ENTRIES, group)
    found = {}
    for name, options in LARGE.items():
        loss = linear_cross_entropy(hidden, own, fit(labels, options), vocabulary=vocabulary, **options)
        found[name] = loss.detach(), *gradients(loss, hidden, own)
    return found


def test_large_logits_keep_the_digits_where_the_vocabulary_is_split() -> None:
    by_rank = run_ranks(split_large, 3, 6)  # the last rank has padding only
    for name in LARGE:
        losses, of_hidden, of_weight = zip(*(found[name] for found in by_rank), strict=True)
        check_large(name, losses[0], sum(of_hidden), torch.cat(of_weight)[:ENTRIES])


def test_logits_that_are_minus_infinity_on_a_whole_rank_take_no_part() -> None:
    assert all(run_ranks(masked_split, 2))


def masked_split() -> bool:
    group = Mesh({"tensor": 2}, torch.device("cpu")).group("tensor")
    hidden, weight, bias, labels = operands()
    bias = torch.where(torch.arange(ENTRIES) < 6, bias.detach(), -torch.inf)
    labels = (labels % 6).where(labels >= 0, labels)
    mine = slice(group.rank * 6, (group.rank + 1) * 6)
    vocabulary = Vocabulary(mine.start, ENTRIES, group)
    weight = weight.detach().requires_grad_()
    loss = linear_cross_entropy(hidden, weight[mine], labels, bias[mine], vocabulary=vocabulary)
    reference = expected(hidden, weight, bias, labels)
    torch.testing.assert_close(loss, reference)
    got, want = gradients(loss, weight)[0], gradients(reference, weight)[0]
    torch.testing.assert_close(got[mine], want[mine])
    return True


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_are_refused(reduction: str) -> None:
    hidden, weight, _, labels = operands()
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction).sum()
    with pytest.raises(RuntimeError, match="create_graph is true, but linear_cross_entropy has no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_operands_that_do_not_fit_are_refused() -> None:
    hidden, weight, _, labels = operands()
    with pytest.raises(ValueError, match="reduction is 'average', but must be one of mean, sum, none"):
        linear_cross_entropy(hidden, weight, labels, reduction="average")
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 7\), not \(14,\), and weight \(rows, 5\)"):
        linear_cross_entropy(hidden, weight, labels.flatten())
    labels[0, 0] = ENTRIES
    with pytest.raises(IndexError, match="the label 11 is not in the vocabulary of 11 entries: ids are 0 to 10"):
        linear_cross_entropy(hidden, weight, labels)


def test_a_chunk_has_enough_tokens_for_a_wide_head(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chunk_bytes(50257, 768) == CHUNK_BYTES  # 333 tokens
    assert chunk_bytes(128256, 4096) // (4 * 128256) == 1024
    assert chunk_bytes(128256 // 8, 8192) // (4 * 128256 // 8) == 2048  # of eight tensor-parallel ranks
    assert chunk_bytes(128256, 4096, sums=False) == CHUNK_BYTES
    monkeypatch.setattr("zeromesh.parallel.head.linear_cross_entropy.CHUNK_BYTES", 1)
    sizes: list[int] = []
    own = loss_module._Chunk.__init__

    def begin(self: Any, hidden: torch.Tensor, *arguments: Any) -> None:
        sizes.append(len(hidden))
        own(self, hidden, *arguments)

    monkeypatch.setattr(loss_module._Chunk, "__init__", begin)
    hidden, weight = torch.randn(10, 12, requires_grad=True), torch.randn(40, 12, requires_grad=True)
    labels = torch.randint(0, 40, (10,))
    found = linear_cross_entropy(hidden, weight, labels)
    assert sizes == [3, 3, 3, 1]
    want = F.cross_entropy(F.linear(hidden, weight), labels)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(gradients(found, hidden, weight), gradients(want, hidden, weight))
    # Where no gradient of the head is summed, as in evaluation or beside adapters, chunks stay small.
    sizes.clear()
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels), want)
    found = linear_cross_entropy(hidden, weight.detach(), labels)
    assert sizes == [1] * 20
    torch.testing.assert_close(
        torch.autograd.grad(found, hidden)[0],
        torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight), labels), hidden)[0],
    )
