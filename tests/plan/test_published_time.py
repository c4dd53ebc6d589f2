"""Published step times: arithmetic of the papers, and predictions that follow from the layout alone."""

from dataclasses import replace

import pytest

from published import PublishedRow, UnjudgedError
from published_fit import TimedRow, errors_of, fit, naive_errors, said, seconds_of, time_card
from published_practices import CONSTANTS, Constants
from published_time import (
    constants_of,
    in_fit,
    judge,
    measured_seconds,
    operations,
    predicted,
    setting_of,
    value_of,
)

GPT = {"name": "GPT 174.6B", "params": 174.6e9, "layers": 96, "hidden": 12288, "heads": 96, "vocab": 51200, "seq": 2048}
A100 = {"gpu": "A100-80GB", "gpus": 384, "gpus_per_node": 8, "peak_tflops": 312}
PTD = {"tp": 8, "pp": 12, "dp": 4, "global_batch": 1536, "micro_batch": 1, "recompute": "full"}


def row(**changes) -> PublishedRow:
    """Return the row of Narayanan et al., 2021, Table 2, for 384 GPUs, with changes."""
    measured = {"tflops_per_gpu": 153, "days_for_300B_tokens": 84}
    values = {"id": "one", "source": "megatron2021", "kind": "throughput", "where": "", "note": ""}
    return PublishedRow(**{**values, "model": GPT, "hardware": A100, "layout": PTD, "measured": measured, **changes})


def test_operations_of_the_paper():
    # 96 B s l h^2 (1 + s / 6h + V / 16 l h)
    found = operations(setting_of(row()), executed=True)
    exact = 96 * 1536 * 2048 * 96 * 12288**2 * (1 + 2048 / 6 / 12288 + 51200 / 16 / 96 / 12288)
    assert found == pytest.approx(exact)


def test_parameters_and_days_as_printed():
    outcomes = {outcome.quantity: outcome for outcome in judge([row()])}
    assert outcomes["parameters_B"].printed
    # 300e9 tokens at 153 TFLOP/s are 84.75 days; the paper cuts.
    assert outcomes["days_for_300B_tokens"].predicted == pytest.approx(84.75, abs=0.01)
    assert outcomes["tflops_per_gpu"].error == pytest.approx(0.0, abs=0.05)


def test_quantities_say_the_same_time():
    setting = setting_of(row())
    seconds = measured_seconds(setting)
    assert value_of(setting, "tflops_per_gpu", seconds) == pytest.approx(153)
    assert value_of(setting, "tokens_per_s_per_gpu", seconds) == pytest.approx(1536 * 2048 / seconds / 384)
    assert value_of(setting, "mfu_percent", seconds) == pytest.approx(100 * 153 / 312)


def test_predictions_ignore_identifiers_and_measurements():
    named = [judge([row()])[0], judge([row(id="two", where="there", measured={"tflops_per_gpu": 9})])[0]]
    assert named[0].predicted == named[1].predicted


def test_bubble_grows_with_data_ranks():
    # The batch stays, so that twice the ranks have half of the micro-batches: bubbles of 11 / 384 and 11 / 192.
    few = predicted(setting_of(row()), Constants())
    twice = row(layout={**PTD, "dp": 8}, hardware={**A100, "gpus": 768})
    more = predicted(setting_of(twice), Constants())
    assert more.seconds > few.seconds / 2
    assert 2 * more.seconds / few.seconds == pytest.approx((1 + 11 / 192) / (1 + 11 / 384), rel=0.01)


def test_rows_that_cannot_be_predicted_say_why():
    said = {
        "no preset": row(hardware={**A100, "gpu": "TPU v6e"}),
        "model.layers": row(model={"name": "unheard of", "seq": 2048, "vocab": 51200}),
        "experts": row(layout={**PTD, "ep": 8}),
        "peak_tflops": row(hardware={"gpu": "A100-80GB", "gpus": 384}, measured={"mfu_percent": 40}),
    }
    for reason, one in said.items():
        found = next(outcome for outcome in judge([one]) if outcome.quantity != "parameters_B")
        assert found.predicted is None
        assert reason in found.note


def test_names_give_sizes():
    named = row(source="mosaic", model={"name": "mpt-125m", "seq": 2048}, layout={"zero": 3, "dp": 8, "micro_batch": 4},
                hardware={**A100, "gpus": 8})  # fmt: skip
    shape = setting_of(named).shape
    assert (shape.layers, shape.hidden, shape.vocabulary) == (12, 768, 50368)
    guessed = row(model={"name": "GPT 52B", "params": 52e9, "seq": 1024}, layout={**PTD, "pp": 16, "dp": 1})
    assert (setting_of(guessed).shape.hidden, setting_of(guessed).shape.layers) == (8192, 64)
    with pytest.raises(UnjudgedError):
        setting_of(row(model={"name": "GPT", "seq": 1024}))


def test_fit_finds_the_constants_that_made_the_times():
    made = Constants(products=0.62, links=0.35)
    sharded = {**PTD, "zero": 3, "tp": 1, "pp": 1, "dp": 384}
    layouts = [{**PTD, "pp": 2, "dp": 32}, sharded, {**PTD, "pp": 2, "dp": 64}, sharded]
    model = {**GPT, "layers": 16}
    settings = [setting_of(row(id=str(n), layout=one, model=model)) for n, one in enumerate(layouts)]
    samples = [TimedRow(one, seconds_of(one, made)) for one in settings]
    found = fit(samples, ("products", "links"))
    assert found.products == pytest.approx(0.62, rel=0.01)
    assert found.links == pytest.approx(0.35, rel=0.02)
    assert max(map(abs, errors_of(samples, found))) < 0.01
    # One efficiency for all of them does not do.
    assert max(map(abs, naive_errors(samples)), default=1.0) > 0.05


def test_card_has_both_halves_and_the_bar():
    rows = [
        row(id=str(n), layout={**PTD, "pp": 2, "dp": 32 << n}, measured={"tflops_per_gpu": 150 - n}) for n in range(4)
    ]
    text = time_card(rows)
    assert f"| megatron2021 | A100-80GB | {said(CONSTANTS['megatron2021', 'A100-80GB'])} |" in text
    held = sum(not in_fit(one) for one in rows)
    assert 0 < held < 4
    assert f"| n {4 - held}, mean" in text
    assert f"| n {held}, mean" in text


def test_unknown_gpus_of_a_source_take_the_mean_of_the_others():
    assert constants_of(row()).links is not None
    other = constants_of(row(hardware={**A100, "gpu": "H800"}))
    assert (other.products, other.links) == (constants_of(row()).products, None)
    assert constants_of(row(source="nobody", hardware={**A100, "gpu": "L4"})) == Constants()


def test_committed_constants_are_two_of_a_gpu():
    for constants in CONSTANTS.values():
        values = [value for value in constants if value is not None]
        assert 1 <= len(values) <= 2
        assert constants.products is not None
        assert 0.0 < constants.products <= 1.0


def test_layer_times_of_korthikanti():
    one = row(
        source="korthikanti2022", kind="layer_time", layout={"tp": 8, "micro_batch": 4, "recompute": "none"},
        model={"name": "layer", "layers": 1, "hidden": 6144, "heads": 64, "seq": 2048},
        hardware={"gpu": "A100-80GB", "gpus": 8}, measured={"forward_ms": 7.7, "backward_ms": 11.9},
    )  # fmt: skip
    again = replace(one, layout={**one.layout, "recompute": "full"})
    (forward, backward), (forward_again, backward_again) = (
        [outcome.predicted for outcome in judge([each])] for each in (one, again)
    )
    assert forward == forward_again
    assert backward_again == pytest.approx(backward + forward, rel=1e-6)
