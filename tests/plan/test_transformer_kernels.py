"""Operations of kernels beside the closed forms of papers."""

from dataclasses import replace

import pytest

from zeromesh.apps.plan.cost.cost import Divided
from zeromesh.apps.plan.cost.shape import TransformerCost, TransformerShape, block_kernels, head_kernels
from zeromesh.apps.plan.predict.conventions import PLAIN

SHAPE = TransformerShape(4, 256, 8, 1000, fused_attention=False)
BATCH, LENGTH = 2, 128


def flops(works):
    return sum(work.flops.on() * work.count for work in works if work.shape or work.kind == "attention")


def test_products_of_a_block():
    # 24 B s h^2 for the matrices and 4 B s^2 h for the scores (Narayanan et al., 2021, appendix).
    found = block_kernels(SHAPE, BATCH, LENGTH)
    matrices, scores = 24 * BATCH * LENGTH * 256**2, 4 * BATCH * LENGTH**2 * 256
    # The softmax counts an operation for each element that it moves.
    softmax = sum(w.flops.on() for w in found.forward if w.kind == "attention" and w.shape is None)
    assert flops(found.forward) - softmax == pytest.approx(matrices + scores)
    assert flops(found.weight) == pytest.approx(matrices)
    softmax = sum(w.flops.on() for w in found.input if w.kind == "attention" and w.shape is None)
    assert flops(found.input) - softmax == pytest.approx(matrices + 2 * scores)


def test_fused_attention_skips_the_masked_half():
    found = block_kernels(TransformerShape(4, 256, 8, 1000), BATCH, LENGTH).forward
    attention = [work for work in found if work.kind == "attention"]
    assert flops(attention) == pytest.approx(2 * BATCH * LENGTH**2 * 256)


def test_context_ranks_share_a_sequence():
    whole, part = block_kernels(SHAPE, BATCH, LENGTH), block_kernels(SHAPE, BATCH, LENGTH, context=4)
    for one, other in zip(whole, part, strict=True):
        assert flops(one) == pytest.approx(4 * flops(other))


def test_head_and_grouped_keys():
    assert flops(head_kernels(SHAPE, BATCH, LENGTH).forward) == pytest.approx(2 * BATCH * LENGTH * 256 * 1000)
    grouped = TransformerShape(4, 256, 8, 1000, kv_heads=2, width=512, gated=True)
    found = block_kernels(grouped, BATCH, LENGTH)
    # Queries and output 256 x 256 each, keys and values 256 x 64 each, and three matrices of 256 x 512.
    assert flops(found.weight) == pytest.approx(2 * BATCH * LENGTH * 256 * (2 * 256 + 2 * 64 + 3 * 512))


def test_weight_gradients_take_all_parameters_of_matrices():
    cost = TransformerCost(SHAPE).at(BATCH, LENGTH)
    products = sum(work.flops.on() for unit in cost.units for work in unit.weight if work.shape)
    matrices = 4 * 12 * 256**2 + 1000 * 256
    assert products == pytest.approx(2 * BATCH * LENGTH * matrices)


def test_sums_that_are_reordered_are_there_twice():
    rule = replace(PLAIN, reordered_sums=True)
    block = TransformerCost(SHAPE, rule).at(BATCH, LENGTH).units[1]
    tokens = BATCH * LENGTH
    assert block.backward_peak == Divided(split=2 * tokens * 4 * 256, whole=2 * (2 * tokens * 256))
