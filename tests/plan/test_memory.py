"""Moments of a step: what is held when, by hand calculation and by formulas of papers."""

from dataclasses import replace

import pytest

from published_conventions import CONVENTIONS
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import NONE, Divided, KernelWork, ModelCost, Recompute, UnitCost, WorkKind
from zeromesh.apps.plan.cost.shape import TransformerCost, TransformerShape
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.plan.predict.conventions import ActivationRule
from zeromesh.apps.plan.predict.pipeline_step import stage_units
from zeromesh.apps.plan.predict.rank_memory import RankMemory, memory_of
from zeromesh.base.placement import ROWS, PlacementRow, Tier
from zeromesh.shard.sizes import Widths

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


TABLE, PLAIN = 640.0 * 64, 64_000.0  # elements of tables that are units of their own, and of blocks


class Tables:
    """Blocks between an embedding and a head of one parameter each, as a trace has them."""

    name = "tables"

    def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
        table = UnitCost("table", False, Divided(TABLE), single=True, early_peak=Divided(900), gradient_peak=Divided(5))
        block = UnitCost("block", True, Divided(PLAIN), early_peak=Divided(40), gradient_peak=Divided(60))
        head = replace(table, name="head", saved={Recompute.NONE: NONE})
        units = (table, *[block] * 4, head)
        return ModelCost(self.name, micro_batch, sequence, context, units)


def moments_of(start: str, **choices: object) -> list[dict[str, float]]:
    (rank,) = memory_of(Tables(), 1, ParallelLayout(**choices))  # type: ignore[arg-type]
    return [dict(moment.bytes) for moment in rank.timeline if moment.label.startswith(start)]


def test_a_gradient_that_autograd_leaves_in_place_comes_with_its_backward() -> None:
    # In fp32 the slots of whole gradients are as wide as what autograd makes: tables have none, blocks keep theirs.
    fp32 = Widths(parameter=4, gradient=4, wire=4, master=0)
    head = moments_of("backward of head", widths=fp32)
    assert {moment["gradient"] for moment in head} == {4 * 4 * PLAIN}
    last = moments_of("backward of table", widths=fp32)
    assert {moment["gradient"] for moment in last} == {4 * (4 * PLAIN + TABLE)}  # the head's is there by then
    (update,) = moments_of("update", widths=fp32)
    assert update["gradient"] == 4 * (4 * PLAIN + 2 * TABLE)


def test_slots_of_sharded_parameters_gradients_have_memory_from_their_first_use() -> None:
    slots = moments_of("backward", row=ROWS[3], data=2)
    gathered = 2 * 2 * PLAIN
    sums = PLAIN / 2 * 2  # of the other rank's parts, from the first reduction on
    # Head: its gradient stays where it is made, and is sent during the backward of the next block.
    assert [moment["slot"] for moment in slots[:2]] == [gathered, gathered]
    assert slots[2]["slot"] == gathered + 2 * TABLE + sums
    assert slots[3]["slot"] == gathered + 2 * TABLE + 2 * PLAIN + sums
    assert slots[4]["slot"] == gathered + 2 * PLAIN + sums
    assert slots[5]["slot"] == gathered + 2 * 2 * PLAIN + sums
    # Nothing is gathered after the last unit's parameters: only its own slot keeps memory.
    assert slots[-1]["slot"] == 2 * PLAIN + 2 * 2 * PLAIN + sums


def test_processors_receive_the_parts_of_all_other_ranks_unless_they_share_a_node() -> None:
    def sums(processor: bool, nodes: int) -> float:
        machine = cluster("a100-80gb", 4 // nodes, nodes)
        ((node, count),) = machine.nodes
        node = replace(node, device=replace(node.device, processor=processor))
        (rank,) = memory_of(Tables(), 1, ParallelLayout(row=ROWS[2], data=4), replace(machine, nodes=((node, count),)))
        return rank.states["slot", "device"]

    part = 2 * PLAIN / 4
    assert sums(True, 2) - sums(False, 2) == 2 * part
    assert sums(False, 1) - sums(True, 1) == part


def test_early_updates_have_second_copies_on_the_host() -> None:
    host = replace(ROWS[2], gradient_tier=Tier.HOST, optimizer_tier=Tier.HOST)
    first, second = (
        memory_of(Tables(), 1, ParallelLayout(row=host, data=2, early=share))[0].on("host") for share in (0.0, 0.5)
    )
    # Masters, Adam's moments and the parameters that are computed with.
    assert second - first == 0.5 * (4 + 8 + 2) * (4 * PLAIN + 2 * TABLE) / 2


def test_gradients_of_inputs_alone_free_nothing_and_add_those_of_outputs() -> None:
    work = KernelWork(WorkKind.PRODUCT, Divided(1.0), Divided(1.0), (10, 7, 3))

    class Products(Blocks):
        def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
            cost = super().at(micro_batch, sequence, context)
            return replace(cost, units=tuple(replace(u, forward=(work,)) if u.block else u for u in cost.units))

    layout = ParallelLayout(pipeline=2, accumulation=4, schedule="zb-h1")
    whole = memory_of(Products(8), 1, replace(layout, schedule="1f1b"))
    apart = memory_of(Products(8), 1, layout)
    # Four blocks' gradients of outputs, of ten times seven elements in 16 bits, beside as many micro-batches.
    assert most_activations(apart[1]) >= most_activations(whole[1]) + 3 * 2 * 70


def test_a_divided_vocabularys_loss_takes_a_chunk() -> None:
    tokens, vocabulary, width = 512, 8192, 384
    head = KernelWork(WorkKind.PRODUCT, Divided(1.0), Divided(1.0), (tokens, vocabulary, width), "columns")
    loss = KernelWork(WorkKind.LOSS, Divided(1.0), Divided(1.0))

    class Head(Tables):
        def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
            cost = super().at(micro_batch, sequence, context)
            logits = Divided(4.0 * tokens * vocabulary)
            last = replace(cost.units[-1], forward=(head, loss), saved={Recompute.NONE: logits}, early_peak=logits)
            return replace(cost, units=(*cost.units[:-1], last))

    (rank,) = memory_of(Head(), 1, ParallelLayout(tensor=2))
    (forward,) = (moment for moment in rank.timeline if moment.label == "forward of head")
    # fp32 logits of half of the vocabulary, and their gradients in 16 bits; kept are those of the head and its input.
    assert forward.bytes["temporary"] == 4 * tokens * vocabulary / 2 * 1.5
    assert forward.bytes["activation"] == 2 * (vocabulary / 2 * width + tokens * width)


def test_stages_are_cut_by_operations_as_the_engine_cuts_them() -> None:
    def unit(name: str, flops: float, block: bool = True) -> UnitCost:
        work = KernelWork(WorkKind.PRODUCT, Divided(flops), NONE)
        return UnitCost(name, block, Divided(1.0), forward=(work,))

    # The head costs as much as three blocks, so that its stage has fewer.
    units = [unit("embedding", 0.0, False), *[unit("block", 1.0)] * 6, unit("head", 3.0, False)]
    assert stage_units(units, 2) == [range(0, 6), range(6, 8)]
    assert stage_units(units, 2, even=True) == [range(0, 4), range(4, 8)]
