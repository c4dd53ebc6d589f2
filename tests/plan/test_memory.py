"""Moments of a step: what is held when, by hand calculation and by formulas of papers."""

from dataclasses import replace

import pytest

from zeromesh.model.placement import ROWS, PlacementRow, Tier
from zeromesh.plan.conventions import CONVENTIONS, ActivationRule
from zeromesh.plan.cost import Divided, ModelCost, Recompute, UnitCost
from zeromesh.plan.layout import ParallelLayout
from zeromesh.plan.memory import RankMemory, memory_of
from zeromesh.plan.shape import TransformerCost, TransformerShape

ELEMENTS, SAVED, INPUT = 65_536, 1000.0, 100.0


class Blocks:
    """Like blocks, with an embedding and a head that keep nothing."""

    name = "blocks"

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks

    def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
        outside = Divided(1280)
        block = UnitCost(
            "block", True, Divided(ELEMENTS),
            saved={Recompute.NONE: Divided(SAVED), Recompute.BLOCKS: Divided(INPUT)},
            forward_peak=Divided(7), backward_peak=Divided(70), output=Divided(INPUT),
        )  # fmt: skip
        ends = [UnitCost(name, False, outside, resident=outside) for name in ("embedding", "head")]
        return ModelCost(self.name, micro_batch, sequence, context, (ends[0], *[block] * self.blocks, ends[1]))


def peaks(blocks: int, **choices: object) -> list[RankMemory]:
    return memory_of(Blocks(blocks), 1, ParallelLayout(**choices))  # type: ignore[arg-type]


def most_activations(rank: RankMemory) -> float:
    return max(moment.bytes.get("activation", 0.0) for moment in rank.timeline)


@pytest.mark.parametrize(
    ("schedule", "chunks", "held"),
    # Micro-batches of the rank's stages together: min(m, p - i) for 1F1B; p (v + (p-1)/p) chunks on the first rank
    # of an interleaved one (Korthikanti et al., 2022, section 4.2.3), two fewer on each next; all for GPipe.
    [("1f1b", 1, [4, 3, 2, 1]), ("gpipe", 1, [8, 8, 8, 8]), ("interleaved-1f1b", 2, [11, 9, 7, 5])],
)
def test_a_pipeline_rank_holds_what_its_schedule_says(schedule: str, chunks: int, held: list[int]) -> None:
    blocks = 8
    found = peaks(blocks, pipeline=4, accumulation=8, schedule=schedule, chunks=chunks)
    each = blocks / 4 / chunks * SAVED
    assert [most_activations(rank) for rank in found] == [count * each for count in held]
    # More micro-batches change nothing where the schedule bounds what is held.
    if schedule != "gpipe":
        longer = peaks(blocks, pipeline=4, accumulation=64, schedule=schedule, chunks=chunks)
        assert [rank.peak.total for rank in longer] == [rank.peak.total for rank in found]


def test_recomputation_holds_inputs_and_one_block() -> None:
    (plain,), (again,) = peaks(10), peaks(10, recompute=Recompute.BLOCKS)
    last, first = (
        next(moment for moment in again.timeline if moment.label.startswith(start))
        for start in ("backward of block", "backward of the first block")
    )
    assert (
        last.bytes["activation"] + last.bytes["temporary"]
        == pytest.approx(
            10 * INPUT + (SAVED - INPUT) + 70 + ELEMENTS * 2  # and a gradient in 16 bits, of unknown parts
        )
        or last.bytes["temporary"] == (SAVED - INPUT) + 70
    )
    assert last.bytes["temporary"] == SAVED - INPUT + 70
    assert last.bytes["activation"] == 10 * INPUT
    assert first.bytes["activation"] == INPUT
    assert most_activations(plain) == 10 * SAVED


def test_inputs_on_the_host_are_not_on_the_device() -> None:
    (rank,) = peaks(10, recompute=Recompute.BLOCKS, activations_on_host=True)
    assert most_activations(rank) == 0
    assert rank.states["activation", "host"] == 10 * INPUT


def test_sums_of_sharded_gradients_grow_in_the_first_backward_only() -> None:
    (one,), (two,) = peaks(10, row=ROWS[3]), peaks(10, row=ROWS[3], accumulation=2)
    parameters = 10 * ELEMENTS + 2 * 1280
    early = [moment.bytes["gradient"] for moment in one.timeline if moment.label.startswith("forward")]
    assert set(early) == {0.0}
    last = next(moment for moment in one.timeline if moment.label.startswith("backward of block"))
    first = next(moment for moment in one.timeline if moment.label.startswith("backward of the first"))
    assert last.bytes["gradient"] == pytest.approx(4 * 1280)  # of the head alone
    assert first.bytes["gradient"] == pytest.approx(4 * (parameters - ELEMENTS - 1280))
    assert max(moment.bytes["gradient"] for moment in two.timeline if moment.label.startswith("forward")) == (
        pytest.approx(4 * parameters)
    )


@pytest.mark.parametrize(("number", "bytes_each"), [(0, 16 + 2), (1, 4 + 16 / 64), (2, 2 + 16 / 64)])
def test_states_of_rows_by_the_papers_formula(number: int, bytes_each: float) -> None:
    # ZeRO (2020), section 3.1, with sums of gradients in fp32: two bytes more for each gradient element that is held.
    (rank,) = peaks(100, row=ROWS[number], data=64)
    states = sum(size for (state, _), size in rank.states.items() if state != "slot")
    assert states / (100 * ELEMENTS + 2 * 1280) == pytest.approx(bytes_each, rel=1e-3)


def test_too_many_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="3 blocks cannot be cut into 4 stages"):
        peaks(3, pipeline=4, accumulation=4)


def test_offloaded_states_leave_the_device() -> None:
    sharded = ROWS[3].parameter
    host = PlacementRow(sharded, sharded, sharded, Tier.HOST, Tier.HOST, Tier.HOST)
    (rank,) = peaks(10, row=host, data=4)
    assert {tier for (state, tier) in rank.states if state != "slot"} == {"host"}
    assert rank.on("host") == pytest.approx((2 + 4 + 12) * (10 * ELEMENTS + 2 * 1280) / 4)


GPT22 = TransformerShape(48, 6144, 64, 51200, dropout=True, fused_attention=False)


@pytest.mark.parametrize(
    ("tensor", "sequence", "policy", "factor"),
    # Korthikanti et al. (2022), Table 2, in s b h: equations 1, 2, 4, 5 and with both methods.
    [
        (1, False, Recompute.NONE, 34 + 5 * 64 * 2048 / 6144),
        (8, False, Recompute.NONE, 10 + 24 / 8 + 5 * 64 * 2048 / (6144 * 8)),
        (8, True, Recompute.NONE, 34 / 8 + 5 * 64 * 2048 / (6144 * 8)),
        (8, False, Recompute.SELECTIVE, 10 + 24 / 8),
        (8, True, Recompute.SELECTIVE, 34 / 8),
        (1, False, Recompute.BLOCKS, 2),
    ],
)
def test_activations_of_a_block(tensor: int, sequence: bool, policy: Recompute, factor: float) -> None:
    block = TransformerCost(GPT22).at(4, 2048).units[1]
    assert block.saved[policy].on(tensor, sequence) == pytest.approx(factor * 2048 * 4 * 6144)


def test_activations_of_a_llama_block() -> None:
    # By hand: two norms' inputs and outputs, queries, keys, values and the output of attention, its log-sum-exp, the
    # gate, the product beside it, and the input of the last layer.
    shape = TransformerShape(32, 4096, 32, 128256, kv_heads=8, width=14336, gated=True, biases=False, tied=False)
    block = TransformerCost(shape).at(1, 8192).units[1]
    by_hand = 8192 * (2 * (4 * 4096 + 4096 + 2 * 1024 + 4096 + 3 * 14336) + 4 * 32)
    assert block.saved[Recompute.NONE].on() == by_hand
    assert TransformerCost(shape).at(1, 8192).parameters == 8_030_261_248  # as its model card counts


def test_every_second_product_is_kept() -> None:
    shape = TransformerShape(32, 4096, 32, 128256, kv_heads=8, width=14336, gated=True, biases=False, tied=False)
    rule = ActivationRule(every_second_product=True)
    kept = TransformerCost(shape, rule).at(2, 8192).units[1].saved[Recompute.SELECTIVE].on()
    # The block's input; products of queries, values, gate and down; attention's output with its log-sum-exp.
    assert kept == 2 * 8192 * (2 * (4096 + 4096 + 1024 + 14336 + 4096 + 4096) + 4 * 32)


def test_a_layout_of_megatron_by_hand() -> None:
    # 12 layers of Llama-3 70B on one device of a group of four, in 2 bytes of parameters, 4 of gradients and 12 / 4.
    shape = TransformerShape(12, 8192, 64, 128256, kv_heads=8, width=28672, gated=True, biases=False, tied=False)
    convention = CONVENTIONS["megatron"]
    layout = ParallelLayout(data=4, row=ROWS[1], accumulation=4)
    (rank,) = memory_of(TransformerCost(shape, convention.activations), 4096, layout, conventions=convention)
    block = 8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672
    table = 128256 * 8192
    states = (12 * (block + 2 * 8192) + 2 * table + 8192) * (2 + 4 + 12 / 4)
    kept = 12 * 4096 * (2 * (4 * 8192 + 2 * 8192 + 2 * 1024 + 3 * 28672) + 4 * 64)
    # At the output layer: placeholders of a block's gradients, and of the layer's own; the norm's input and output,
    # token numbers, logits that became their gradient, the gradient of the layer's input; two workspaces.
    rest = 2 * (block + 2 * 8192) + 2 * table + 4096 * (3 * 2 * 8192 + 8 + 2 * 128256) + 2 * 2**25
    assert rank.peak.label == "backward of head, 1 held"
    assert rank.peak.total == pytest.approx(states + kept + rest, rel=1e-9)


def test_a_tied_output_layer_has_a_copy_on_its_own_rank() -> None:
    tied = TransformerShape(4, 64, 4, 1000)
    ranks = memory_of(TransformerCost(tied), 128, ParallelLayout(pipeline=2, accumulation=2))
    untied = memory_of(TransformerCost(replace(tied, tied=False)), 128, ParallelLayout(pipeline=2, accumulation=2))
    assert ranks[1].states == untied[1].states
    whole = memory_of(TransformerCost(tied), 128, ParallelLayout())[0]
    apart = memory_of(TransformerCost(replace(tied, tied=False)), 128, ParallelLayout())[0]
    assert whole.states["parameter", "device"] == apart.states["parameter", "device"] - 2 * 64 * 1000


def test_like_blocks_are_a_run_whether_or_not_their_costs_are_one_object() -> None:
    class Apart(Blocks):
        def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
            cost = super().at(micro_batch, sequence, context)
            return replace(cost, units=tuple(replace(unit, saved=dict(unit.saved)) for unit in cost.units))

    layout = ParallelLayout(row=ROWS[3], accumulation=2)
    assert memory_of(Apart(10), 1, layout)[0].timeline == memory_of(Blocks(10), 1, layout)[0].timeline
