"""Attention of sequences spread over ranks, and cutting a batch over them."""

import random
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from harness import on_ranks, run_mpi_ranks, run_ranks
from zeromesh import Mesh
from zeromesh.comm.collectives import Group
from zeromesh.parallel.context import attention_block as blocks
from zeromesh.parallel.context.applied import SpreadSequences, Unsupported
from zeromesh.parallel.context.attention_block import CPU, EFFICIENT, FLASH, PRODUCTS, AttentionBlock
from zeromesh.parallel.context.sequence_order import joined, keep
from zeromesh.parallel.context.spread_attention import STRATEGIES, attend, degree_of, ring
from zeromesh.parallel.context.spread_batch import IGNORE_LABEL, mean_loss, split

TAG = 8
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 24 * 2**-8, torch.float16: 24 * 2**-11}
"""For |a - b| / (1 + |b|), where b is computed in float64.

A gradient of a key sums up to 64 products, of 16 queries and 4 heads. In 16 bits three roundings go into each, of the
result, of the probability and of its gradient; of either sign, they add up to 3 sqrt(64) = 24 unit roundoffs.
"""

Shape = dict[str, int]
SHAPES: list[Shape] = [
    {"heads": 4, "key_heads": 4},
    {"heads": 4, "key_heads": 2},
    {"heads": 4, "key_heads": 1},
    {"heads": 12, "key_heads": 6, "width": 6, "value_width": 4},
]
CASES = [(shape, dtype) for shape in SHAPES for dtype in TOLERANCE]


def context(traffic: list[Any] | None = None) -> Group:
    mesh = Mesh({"context": dist.get_world_size()}, torch.device("cpu"))
    if traffic is not None:
        traffic.append(mesh.traffic)
    return mesh.group("context")


def fake(size: int, rank: int = 0) -> Any:  # A group for what sends nothing
    return SimpleNamespace(size=size, rank=rank, purposes={})


def operands(
    dtype: torch.dtype, heads: int, key_heads: int, batch: int = 2, length: int = 16, width: int = 8,
    value_width: int | None = None, seed: int = 0,
) -> list[torch.Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    last = value_width or width
    shapes = [(heads, width), (key_heads, width), (key_heads, last), (heads, last)]
    sizes = [(batch, count, length, size) for count, size in shapes]
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def results(out: torch.Tensor, xs: list[torch.Tensor], upstream: torch.Tensor) -> list[torch.Tensor]:
    return [out.detach(), *torch.autograd.grad(out, xs, upstream)]


def expected(dtype: torch.dtype, shape: Shape, **more: int) -> list[torch.Tensor]:
    *xs, upstream = (x.double() for x in operands(dtype, **shape, **more))
    xs = [x.requires_grad_() for x in xs]
    return results(F.scaled_dot_product_attention(*xs, is_causal=True, enable_gqa=True), xs, upstream)


def ways(ranks: int) -> tuple[str, ...]:
    return (*STRATEGIES, "both") if ranks == 4 else STRATEGIES


def degree(way: str, ranks: int) -> int:
    """Return the number of ranks that share heads."""
    return 2 if way == "both" else degree_of(way, ranks, None)


def spread(strategy: str, group: Group, dtype: torch.dtype, shape: Shape, **more: int) -> list[torch.Tensor]:
    *xs, upstream = (keep(x, group.rank, group.size, 2) for x in operands(dtype, **shape, **more))
    xs = [x.requires_grad_() for x in xs]
    return results(attend(degree(strategy, group.size), *xs, group, TAG), xs, upstream)


def compare(found: list[list[torch.Tensor]], want: list[torch.Tensor], tolerance: float) -> None:
    for rank, parts in enumerate(found):
        for part, whole in zip(parts, want, strict=True):
            own = keep(whole, rank, len(found), 2)
            gap = ((part.double() - own).abs() / (1 + own.abs())).max()
            assert gap <= tolerance, f"rank {rank}: off by {float(gap)}"


def spread_all(cases: list[tuple[Shape, torch.dtype]]) -> dict[str, list[list[torch.Tensor]]]:
    group = context()
    return {
        strategy: [spread(strategy, group, dtype, shape) for shape, dtype in cases] for strategy in ways(group.size)
    }


def compare_all(cases: list[tuple[Shape, torch.dtype]], by_rank: list[dict[str, list[list[torch.Tensor]]]]) -> None:
    for number, (shape, dtype) in enumerate(cases):
        want = expected(dtype, shape)
        for strategy in ways(len(by_rank)):
            compare([found[strategy][number] for found in by_rank], want, TOLERANCE[dtype])


@pytest.mark.some(2)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_both_strategies_compute_what_one_process_does(ranks: int) -> None:
    compare_all(CASES, run_ranks(spread_all, ranks, CASES))


@pytest.mark.full
def test_strategies_do_so_on_mpi() -> None:
    cases = [(SHAPES[1], torch.float64), (SHAPES[1], torch.bfloat16)]
    compare_all(cases, run_mpi_ranks(spread_all, 2, cases))


def random_shapes(count: int, ranks: int) -> list[tuple[Shape, Shape]]:
    draw = random.Random(7)
    found = []
    for seed in range(count):
        key_heads = draw.randint(1, 4)
        heads = key_heads * ranks * draw.randint(1, 2)
        sizes = {"batch": draw.randint(1, 3), "length": 2 * ranks * draw.randint(1, 5), "seed": seed}
        widths = {"width": draw.randint(1, 9), "value_width": draw.randint(1, 9)}
        found.append(({"heads": heads, "key_heads": key_heads}, sizes | widths))
    return found


def spread_random(count: int) -> list[dict[str, list[torch.Tensor]]]:
    group = context()
    shapes = random_shapes(count, group.size)
    names = ways(group.size)
    return [{name: spread(name, group, torch.float64, shape, **more) for name in names} for shape, more in shapes]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("ranks", "count"), [(2, 25), (4, 15), pytest.param(3, 60, marks=pytest.mark.full)]
)  # fmt: skip
def test_random_shapes(ranks: int, count: int) -> None:
    by_rank = run_ranks(spread_random, ranks, count)
    for number, (shape, more) in enumerate(random_shapes(count, ranks)):
        want = expected(torch.float64, shape, **more)
        for strategy in ways(ranks):
            compare([found[number][strategy] for found in by_rank], want, 1e-12)


def watch(strategy: str) -> dict[str, Any]:
    traffic: list[Any] = []
    group = context(traffic)
    pairs, events = {"attend": 0.0, "gradients": 0.0}, []
    *xs, upstream = (keep(x, group.rank, group.size, 2) for x in operands(torch.bfloat16, **SHAPES[1]))
    xs = [x.requires_grad_() for x in xs]

    def counted(name: str) -> Any:
        original = getattr(blocks, name)

        def function(block: AttentionBlock, *rest: Any) -> Any:
            events.append(name)
            pairs[name] += block.q.shape[2] * block.k.shape[2] * (0.5 if block.causal else 1)
            return original(block, *rest)

        return function

    post = Group.send_and_receive

    def posted(self: Group, sends: Any, receives: Any, tag: int, what: str) -> Any:
        events.append(what)
        return post(self, sends, receives, tag, what)

    with (
        patch.object(blocks, "attend", counted("attend")),
        patch.object(blocks, "gradients", counted("gradients")),
        patch.object(Group, "send_and_receive", posted),
    ):
        out = attend(degree(strategy, group.size), *xs, group, TAG)
        forward = {name: sent for (name, _), sent in traffic[0].bytes.items()}
        split_at = len(events)
        torch.autograd.grad(out, xs, upstream)
    both = {name: sent for (name, _), sent in traffic[0].bytes.items()}
    return {"forward": forward, "both": both, "pairs": pairs, "events": (events[:split_at], events[split_at:])}


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ring_computes_half_of_all_pairs_and_every_rank_as_many(ranks: int) -> None:
    for found in run_ranks(watch, ranks, "ring"):
        assert found["pairs"] == dict.fromkeys(("attend", "gradients"), 16 * 16 / 2 / ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_next_keys_travel_while_the_present_ones_are_used(ranks: int) -> None:
    for found in run_ranks(watch, ranks, "ring"):
        forward, backward = found["events"]
        assert forward == ["ring", "attend"] * (ranks - 1) + ["attend"]
        # The first gradients are this rank's own; what is found for other ranks' keys goes on at once.
        steps = [["ring", "gradients"]] + [["ring", "gradients", "ring gradients"]] * (ranks - 2)
        assert backward == [event for step in steps for event in step] + ["gradients", "ring gradients"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formulas(ranks: int) -> None:
    q, k, v, out = (x.nbytes // ranks for x in operands(torch.bfloat16, **SHAPES[1]))
    for found in run_ranks(watch, ranks, "ring"):
        assert found["forward"] == {"ring": (k + v) * (ranks - 1)}
        assert found["both"] == {"ring": 2 * (k + v) * (ranks - 1), "ring gradients": 2 * (k + v) * (ranks - 1)}
    times = max(1, ranks // SHAPES[1]["key_heads"])  # 2 key heads on 4 ranks are repeated
    swapped = (q + times * (k + v) + out) * (ranks - 1) // ranks
    for found in run_ranks(watch, ranks, "ulysses"):
        assert found["forward"] == {"all_to_all": swapped}
        assert found["both"] == {"all_to_all": 2 * swapped}
    for found in run_ranks(watch, ranks, "both") if ranks == 4 else ():
        swapped = (q + k + v + out) // 2
        assert found["forward"] == {"all_to_all": swapped, "ring": k + v}
        assert found["both"] == {"all_to_all": 2 * swapped, "ring": 2 * (k + v), "ring gradients": 2 * (k + v)}


@on_ranks(2)
def test_a_second_derivative_of_the_ring_is_refused() -> None:
    group = context()
    *xs, _ = (keep(x, group.rank, group.size, 2) for x in operands(torch.float64, **SHAPES[0]))
    out = ring(*[x.requires_grad_() for x in xs], group, TAG)
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(out.sum(), xs[0], create_graph=True)
    message = str(caught.value)
    assert "differentiated once only" in message
    assert "use the strategy ulysses" in message


def mixed_dtypes(strategy: str) -> list[torch.Tensor]:
    group = context()
    *xs, _ = (keep(x, group.rank, group.size, 2) for x in operands(torch.bfloat16, **SHAPES[1]))
    with torch.autocast("cpu", torch.bfloat16):
        return [attend(degree(strategy, group.size), xs[0].float(), xs[1].float(), xs[2], group, TAG)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_autocast_is_heeded(strategy: str) -> None:
    found = run_ranks(mixed_dtypes, 2, strategy)
    assert {part.dtype for (part,) in found} == {torch.bfloat16}
    compare(found, expected(torch.bfloat16, SHAPES[1])[:1], TOLERANCE[torch.bfloat16])


def test_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    *xs, _ = operands(torch.float32, 6, 2)
    with pytest.raises(ValueError, match=r"4 ranks do not divide 6 heads \(6 / 4 = 1\.5\).* 1, 2, 3, 6.* ring"):
        attend(4, *xs, fake(4), TAG)


@pytest.mark.parametrize(
    ("strategy", "ranks", "heads", "degree", "want"),
    [
        ("ring", 4, 6, 0, 1), ("ulysses", 4, 8, 0, 4), ("auto", 4, 8, 0, 4), ("auto", 4, 6, 0, 2), ("auto", 8, 4, 0, 4),
        ("auto", 4, 3, 0, 1), ("auto", 4, None, 0, 4), ("ring", 4, 6, 2, 2), ("auto", 8, 8, 2, 2),
        ("ring", 4, 6, 3, "ulysses_degree is 3, but of 4 .* 1 or 2 or 4 can share"),
        ("ulysses", 4, 8, 2, "under the strategy ulysses, 4 can share"),
        ("ring", 4, 6, 4, "4 ranks do not divide 6 heads"),
    ],
)  # fmt: skip
def test_as_many_ranks_share_heads_as_the_strategy_says(
    strategy: str, ranks: int, heads: int | None, degree: int, want: Any
) -> None:
    with pytest.raises(ValueError, match=want) if isinstance(want, str) else nullcontext():
        assert degree_of(strategy, ranks, heads, degree) == want


BLOCKS = [(4, 4, 6, 6, True), (4, 2, 6, 3, False), (4, 1, 3, 6, False), (6, 3, 1, 1, True)]


def block_of(heads: int, key_heads: int, queries: int, keys: int, causal: bool, **options: Any) -> AttentionBlock:
    generator = torch.Generator().manual_seed(3)
    sizes = [(2, heads, queries, 8), (2, key_heads, keys, 8), (2, key_heads, keys, 8)]
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64).to(**options) for size in sizes)
    return AttentionBlock(q, k, v, causal, 0.3)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", BLOCKS)
def test_plain_products_are_what_the_operator_of_the_cpu_computes(sizes: Any, dtype: torch.dtype) -> None:
    block = block_of(*sizes, dtype=dtype)
    out, lse = CPU.attend(block)
    other, its = PRODUCTS.attend(block)
    torch.testing.assert_close(its, lse)
    torch.testing.assert_close(other, out, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    # As if there were other keys, too.
    lse, out = lse + 0.4, 0.7 * out
    for one, two in zip(
        PRODUCTS.gradients(block, upstream, out, lse), CPU.gradients(block, upstream, out, lse), strict=True
    ):
        assert one.dtype == dtype
        torch.testing.assert_close(one, two, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def masked_block(sizes: Any, **options: Any) -> AttentionBlock:
    queries, keys = sizes[2:4]
    mask = torch.rand(2, 1, queries, keys, generator=torch.Generator().manual_seed(5)) > 0.5
    block = block_of(*sizes[:4], False, **options)
    return replace(block, mask=mask.to(block.q.device))


@pytest.mark.parametrize(("kernel", "masked"), [(FLASH, False), (EFFICIENT, False), (EFFICIENT, True)])
@pytest.mark.parametrize("sizes", BLOCKS)
def test_operators_of_cuda_take_what_they_are_given(sizes: Any, kernel: blocks.Kernel, masked: bool) -> None:
    options = {"dtype": torch.bfloat16, "device": "meta"}
    block = masked_block(sizes, **options) if masked else block_of(*sizes, **options)
    out, lse = kernel.attend(block)
    assert (out.shape, lse.shape, lse.dtype) == (block.q.shape, block.q.shape[:3], torch.float32)
    shapes = [x.shape for x in kernel.gradients(block, out, out, lse)]
    assert shapes == [block.q.shape, block.k.shape, block.v.shape]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA here")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", BLOCKS)
@pytest.mark.parametrize("masked", [False, True])
def test_operators_of_cuda_compute_what_plain_products_do(sizes: Any, dtype: torch.dtype, masked: bool) -> None:
    options = {"dtype": dtype, "device": "cuda"}
    block = masked_block(sizes, **options) if masked else block_of(*sizes, **options)
    of_half = EFFICIENT if masked else FLASH  # which takes no mask
    assert blocks.choose(block) is {torch.float64: PRODUCTS, torch.float32: EFFICIENT}.get(dtype, of_half)
    out, lse = blocks.attend(block)
    other, its = PRODUCTS.attend(block)
    if block.mask is not None:
        blind = ~block.mask.any(-1)
        other, lse, its = (
            other.masked_fill(blind.unsqueeze(-1), 0.0),
            *(x.masked_fill(blind, torch.inf) for x in (lse, its)),
        )
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(lse, its, **close)
    torch.testing.assert_close(out, other, **close)
    upstream = torch.randn_like(out)
    found = blocks.gradients(block, upstream, out, lse)
    for one, two in zip(found, PRODUCTS.gradients(block, upstream, out, lse), strict=True):
        torch.testing.assert_close(one, two, **close)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_rank_has_an_early_and_a_late_chunk(ranks: int) -> None:
    last, x = 4 * ranks - 1, torch.arange(4 * ranks)
    parts = [keep(x, rank, ranks, 0) for rank in range(ranks)]
    for begin, part in zip(range(0, 2 * ranks, 2), parts, strict=True):
        assert part.tolist() == [begin, begin + 1, last - begin - 1, last - begin]
    assert torch.equal(joined(parts, 0), x)


@pytest.mark.parametrize(
    ("length", "message"), [(22, r"22 = 2 x 8 \+ 6\).* 16 and 24"), (3, r"3 = 0 x 8 \+ 3\).* are 8"), (0, "are 8")]
)
def test_lengths_that_cannot_be_cut_are_refused(length: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"{length} tokens.* 2 x 4 .*{message}"):
        keep(torch.zeros(2, length), 1, 4, 1)


IDS = torch.arange(100, 132).view(2, 16)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_label_of_a_ranks_last_token_is_the_next_one_of_the_sequence(rank: int) -> None:
    part = split({"input_ids": IDS, "labels": IDS, "use_cache": False}, fake(2, rank))
    assert part["use_cache"] is False
    begin, late = 4 * rank, 12 - 4 * rank
    positions = [*range(begin, begin + 4), *range(late, late + 4)]
    assert part["position_ids"].tolist() == [positions] * 2
    assert torch.equal(part["input_ids"], IDS[:, positions])
    following = torch.cat([IDS[:, 1:], torch.full((2, 1), IGNORE_LABEL)], 1)
    assert torch.equal(part["labels"], following[:, positions])
    already = split({"tokens": IDS, "labels": following, "positions": None}, fake(2, rank), "positions", shift=False)
    assert torch.equal(already["labels"], part["labels"])
    assert torch.equal(already["positions"], part["position_ids"])
    given = split({"input_ids": IDS, "labels": IDS, "shift_labels": following}, fake(2, rank))
    assert torch.equal(given["labels"], part["labels"])
    assert "shift_labels" not in given


@pytest.mark.parametrize("shapes", [[(2, 4), (1, 4), (1, 4)], [(2, 4), (2, 4), (2, 1)], [(2, 4), (2, 3), (2, 3)]])
def test_queries_keys_and_values_that_torch_would_broadcast_are_refused(shapes: list[tuple[int, int]]) -> None:
    tensors = [torch.ones(*shape, 4, 8) for shape in shapes]
    for strategy in STRATEGIES:
        with pytest.raises(Unsupported, match="of one batch and sequence, without a cache"):
            SpreadSequences(strategy, fake(2), TAG).attend(*tensors)


def test_embeddings_are_cut_and_their_gradient_comes_back() -> None:
    x = torch.randn(2, 16, 3, requires_grad=True)
    part = split({"inputs_embeds": x}, fake(2, 1))["inputs_embeds"]
    assert torch.equal(part, x[:, 4:12])
    part.sum().backward()
    assert x.grad.sum((0, 2)).tolist() == [0] * 4 + [6] * 8 + [0] * 4


def test_padding_at_the_end_is_left_out_where_nothing_that_counts_sees_it() -> None:
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 11:] = 0
    labels = IDS.masked_fill(mask == 0, IGNORE_LABEL)
    assert "attention_mask" not in split({"input_ids": IDS, "labels": labels, "attention_mask": mask}, fake(2))
    assert "attention_mask" not in split({"input_ids": IDS, "attention_mask": torch.ones(2, 16)}, fake(2))
    with pytest.raises(ValueError, match="hidden tokens have labels: give them the label -100"):
        split({"input_ids": IDS, "labels": IDS, "attention_mask": mask}, fake(2))


REFUSED = {
    "before others: pad at the end": {"attention_mask": torch.ones(2, 16).index_fill_(1, torch.tensor([0]), 0)},
    r"shape \(2, 1, 16, 16\) and not \(2, 16\)": {"attention_mask": torch.ones(2, 1, 16, 16)},
    "they stand for packed documents": {"position_ids": torch.arange(8).repeat(2, 2)},
    "do not count up": {"position_ids": torch.zeros(3, 2, 16)},
    "several documents that must not see each other": {"documents": torch.arange(16).expand(2, 16) // 8},
    r"tensor weights_of_tokens of shape \(2, 16\)": {"weights_of_tokens": IDS},
    "should have 16 tokens": {"labels": IDS[:, :12]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_sequences_that_cannot_be_cut_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split({"input_ids": IDS} | REFUSED[message], fake(2))


def test_a_batch_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="the batch has pixels, but none of input_ids"):
        split({"pixels": IDS}, fake(2))


LABELS = [[5, IGNORE_LABEL, 2], [IGNORE_LABEL] * 3, [1, 2, 3], [IGNORE_LABEL, IGNORE_LABEL, 0]]


def weighted() -> tuple[torch.Tensor, torch.Tensor]:
    group = context()
    x = torch.arange(4.0 * 3 * 6, dtype=torch.float64).sin().view(4, 3, 6)[group.rank].requires_grad_()
    labels = torch.tensor(LABELS[group.rank])
    loss = mean_loss(F.cross_entropy(x, labels), labels, group, TAG)
    (gradient,) = torch.autograd.grad(loss, x)
    return loss.detach(), gradient


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_mean_loss_is_that_of_all_tokens_however_they_are_spread(ranks: int) -> None:
    x = torch.arange(4.0 * 3 * 6, dtype=torch.float64).sin().view(4, 3, 6)[:ranks].requires_grad_()
    want = F.cross_entropy(x.flatten(0, 1), torch.tensor(LABELS[:ranks]).flatten())
    (gradient,) = torch.autograd.grad(want, x)
    for rank, (loss, own) in enumerate(run_ranks(weighted, ranks)):
        torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(own / ranks, gradient[rank], rtol=1e-12, atol=1e-15)
