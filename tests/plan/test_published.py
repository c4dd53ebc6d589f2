"""Rows of published figures: read strictly, judged by what they state, reported by source."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from published import Outcome, PublishedRow, read_rows
from published_memory import judge
from validate_plan import groups_of, main, outcomes_of
from zeromesh.apps.plan.cost.cost import Recompute
from zeromesh.base.placement import Placement, Tier

FILE = Path(__file__).parents[2] / "benchmarks" / "published-rows.json"


def entry(**changes: Any) -> dict[str, Any]:
    row = {
        "id": "x-1", "source": "simumax_b200", "where": "", "kind": "peak_memory", "note": "",
        "model": {"name": "llama", "layers": 2, "hidden": 64, "heads": 4, "vocab": 1000, "seq": 128},
        "hardware": {"gpu": "H100-80GB", "gpus": 8},
        "layout": {"tp": 2, "pp": 2, "dp": 2, "micro_batch": 1, "micro_batches": 4, "zero": 1},
        "measured": {"memory_gib": 1.5},
    }  # fmt: skip
    return row | changes


def write(folder: Path, *rows: Any, **more: Any) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps({"rows": list(rows), **more}))
    return path


def read_one(folder: Path, row: dict[str, Any], **more: Any) -> PublishedRow:
    return read_rows(write(folder, row, **more)).rows[0]


def test_a_row_states_a_shape_and_a_layout(tmp_path: Path) -> None:
    said = {"fsdp": 4, "tp": 2, "pp": 2, "vp": 2, "global_batch": 32, "micro_batch": 2}
    said |= {"recompute": "selective+sequence"}
    row = read_one(tmp_path, entry(layout=said, hardware={"gpu": "H100-96GB (500 W)", "gpus": 16}))
    layout = row.parallel
    assert (layout.data, layout.tensor, layout.pipeline, layout.chunks) == (4, 2, 2, 2)
    assert (layout.micro_batch, layout.accumulation, layout.samples) == (2, 4, 32)
    assert (layout.schedule, layout.recompute, layout.sequence) == ("interleaved-1f1b", Recompute.SELECTIVE, True)
    assert layout.row.parameter is Placement.SHARDED
    assert row.device_memory == 96 * 2**30
    assert (row.shape.vocabulary, row.shape.mlp_width, row.sequence) == (1000, 256, 128)


def test_a_row_s_own_sizes_win_over_the_table_of_models(tmp_path: Path) -> None:
    models = {"llama": {"layers": 80, "hidden": 4096, "params": 7e10, "kv_heads": 2}}
    row = read_one(tmp_path, entry(), models=models)
    assert (row.shape.layers, row.shape.hidden, row.shape.kv_heads) == (2, 64, 2)
    assert "params" not in row.model  # those of 80 layers


@pytest.mark.parametrize(
    ("offload", "stage", "tiers"),
    [
        ("optimizer cpu", 3, (Tier.DEVICE, Tier.HOST)),
        ("optimizer+gradients cpu", 2, (Tier.DEVICE, Tier.HOST)),
        ("all cpu", 3, (Tier.HOST, Tier.HOST)),
        ("nvme", 3, (Tier.NVME, Tier.NVME)),
        (None, 2, (Tier.DEVICE, Tier.DEVICE)),
    ],
)
def test_words_for_offloading(tmp_path: Path, offload: str | None, stage: int, tiers: tuple[Tier, Tier]) -> None:
    row = read_one(tmp_path, entry(layout={"zero": stage, "dp": 8, "offload": offload}))
    assert (row.placement.parameter_tier, row.placement.optimizer_tier) == tiers


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"name": "x", "layers": -3}}, "row 0 (x-1): model.layers is -3; it must be a whole number above 0"),
        ({"model": {"layers": 2}}, "row 0 (x-1): model.name is missing"),
        ({"layout": {"dp": "four"}}, "row 0 (x-1): layout.dp is 'four'"),
        ({"layout": {"compile": 1}}, "row 0 (x-1): layout.compile is 1; it must be true or false"),
        ({"measured": {}}, "row 0 (x-1): measured is empty"),
        ({"measured": {"memory_gib": "much"}}, "row 0 (x-1): measured.memory_gib is 'much'"),
        ({"hardware": None}, "row 0 (x-1): hardware is None; it must be an object"),
        ({"id": 7}, "row 0: id is 7; it must be a text"),
    ],
)
def test_bad_rows_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    path = write(tmp_path, entry(**change))
    with pytest.raises(ValueError, match=re.escape(said)):
        read_rows(path)
    assert main([str(path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": {}}', '{"rows": [], "models": []}'])
def test_bad_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert main([str(tmp_path / "none.json")]) == 2
    with pytest.raises(ValueError, match="of several rows"):
        read_rows(write(tmp_path, entry(), entry()))


def test_what_a_row_does_not_say_is_a_reason(tmp_path: Path) -> None:
    (outcome,) = judge([read_one(tmp_path, entry(model={"name": "secret", "seq": 128}))])
    assert (outcome.predicted, outcome.note) == (None, "the row does not say model.layers")
    (outcome,) = judge([read_one(tmp_path, entry(source="elsewhere"))])
    assert "elsewhere" in outcome.note
    (outcome,) = judge([read_one(tmp_path, entry(layout=entry()["layout"] | {"twist": 3}))])
    assert "ignored: layout.twist" in outcome.note


def predicted(folder: Path, **layout: Any) -> float:
    (outcome,) = judge([read_one(folder, entry(source="torchtitan", layout={"micro_batch": 1, **layout}))])
    assert outcome.predicted is not None
    return outcome.predicted * 2**30


def test_torchtitan_s_figures_have_what_its_allocator_cannot_use_for_logits(tmp_path: Path) -> None:
    # Selective recomputation keeps the first product of a block; without compilation its activation is there, too.
    eager, compiled = (predicted(tmp_path, fsdp=8, recompute="selective", compile=flag) for flag in (False, True))
    assert eager - compiled == 2 * 128 * 256
    # Sums over tensor ranks have the size of the stream, and are copied, unless they begin with the product.
    plain, early = (predicted(tmp_path, fsdp=1, tp=8, recompute="full", async_tp=flag) for flag in (False, True))
    assert plain - early == 2 * 128 * 64 - 2 * 128 * 256 / 8


def test_torchtitan_s_pipelines_keep_outputs_of_all_micro_batches(tmp_path: Path) -> None:
    few, many = (predicted(tmp_path, fsdp=4, pp=2, micro_batches=count) for count in (4, 8))
    # The last stage's logits, and buffers for activations and gradients from both sides.
    assert many - few == 4 * (2 * 128 * 1000 + 2 * 2 * 128 * 64)


def test_mixtures_of_experts_have_their_reason(tmp_path: Path) -> None:
    (outcome,) = judge([read_one(tmp_path, entry(layout=entry()["layout"] | {"ep": 4}))])
    assert outcome.predicted is None
    assert "experts" in outcome.note


def test_neither_names_nor_measured_values_enter_a_prediction(tmp_path: Path) -> None:
    first, second = (
        judge([read_one(tmp_path, entry(id=name, measured={"memory_gib": size}))])[0]
        for name, size in (("a", 1.0), ("b", 9.0))
    )
    assert first.predicted == second.predicted


@pytest.mark.parametrize(
    ("predicted", "measured", "decimals", "printed"),
    [(31.40625, 31.4, 1, True), (1.875, 1.88, 2, True), (4187.5, 4187, 0, True), (31.46, 31.4, 1, True),
     (31.51, 31.4, 1, False), (31.34, 31.4, 1, False)],
)  # fmt: skip
def test_figures_as_printed(predicted: float, measured: float, decimals: int, printed: bool) -> None:
    assert Outcome("r", "s", "q", predicted, measured, decimals=decimals).printed is printed


def test_errors_are_those_of_rows_that_no_constant_was_fitted_on() -> None:
    outcomes = [Outcome("r", "s", "step_s", 2.0, 1.0, fitted=True), Outcome("t", "s", "step_s", 1.5, 1.0)]
    (group,) = groups_of(outcomes)
    assert (group.errors, group.reached) == ([0.5], False)


def test_the_aims_for_memory_are_reached() -> None:
    published = read_rows(FILE)
    groups = {(group.source, group.quantity): group for group in groups_of(judge(published.rows))}
    for source, quantity in (
        ("zero2019", "states_gb_per_gpu"), ("ds_estimator", "states_gib_per_gpu"),
        ("ds_estimator", "host_gib_per_node"),
        ("korthikanti2022", "states_gib"), ("korthikanti2022", "activation_gib"), ("simumax_b200", "memory_gib"),
    ):  # fmt: skip
        assert groups[source, quantity].reached, (source, quantity)
    assert len(groups["zero2019", "states_gb_per_gpu"].judged) == 54
    assert sum(outcome.predicted is not None for outcome in groups["simumax_b200", "memory_gib"].judged) == 14


@pytest.mark.full
def test_the_command_reports_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    rows = write(tmp_path, entry(), entry(id="x-2", source="new", measured={"wonders": 7}))
    assert main([str(rows), "--markdown", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("# Planner report card")
    assert "| simumax_b200 | memory_gib | 1 |" in text
    assert "| new | wonders | x-2 | nothing predicts this quantity |" in text
    assert capsys.readouterr().out.strip() in text
    outcomes = outcomes_of(read_rows(FILE))
    rows_with_outcome = {outcome.row for outcome in outcomes}
    assert {row.id for row in read_rows(FILE).rows} - rows_with_outcome == set()
