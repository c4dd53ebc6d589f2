"""A Keras model under ``fit`` on two ranks computes what Keras alone computes over the joint batches."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from harness import on_ranks

if find_spec("keras") is None:  # its import would need the backend to be chosen
    pytest.skip("keras is not installed", allow_module_level=True)


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, **more}


def trained(name: str, stage: int | None) -> tuple[Any, ...]:
    """Metrics of every batch, history, weights, values of ``evaluate`` and predictions after a training by ``fit``."""
    import zeromesh.keras
    from keras_models import CASES, Notes, compiled, fresh

    fresh()
    model, (x, y), notes = compiled(name), CASES[name][1](), Notes()
    if stage is not None:
        zeromesh.keras.distribute(model, config(stage))
    # 15 samples train in batches of 6, 6 and 3, and 5 validate.
    history = model.fit(x, y, batch_size=6, epochs=2, validation_split=0.25, callbacks=[notes], verbose=0)
    weights = model.get_weights()
    return (
        notes.logs,
        history.history,
        weights,
        model.evaluate(x, y, batch_size=7, verbose=0),
        model.predict(x, batch_size=7, verbose=0),
    )


@pytest.mark.parametrize(
    ("name", "stage"),
    [("cnn", 3), ("transformer", 2)]
    + [pytest.param(n, s, marks=pytest.mark.full) for n, s in [("cnn", 0), ("cnn", 2), ("transformer", 3)]],
)
@on_ranks(2)
def test_fit_equals_one_keras_process(name: str, stage: int) -> None:
    from keras_models import assert_near

    wanted, found = trained(name, None), trained(name, stage)
    assert len(found[0]) == 6
    for one, other, tolerance in zip(found, wanted, (1e-10, 1e-6, 1e-10, 1e-6, 1e-10), strict=True):
        assert_near(one, other, tolerance)  # 1e-6: Keras rounds these to fp32


@on_ranks(2)
def test_a_frozen_model_evaluates_and_fits_as_in_keras() -> None:
    import zeromesh.keras
    from keras_models import assert_near, fresh, keras, layers, np

    x, y = np.arange(48.0).reshape(8, 6) / 48, np.ones((8, 3))

    def run(stage: int | None) -> list[Any]:
        fresh()
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(3)])
        model.trainable = False
        model.compile("adam", "mse", metrics=["mae"])
        if stage is not None:
            zeromesh.keras.distribute(model, config(stage))
        with pytest.warns(UserWarning, match="does not have any trainable weights"):
            history = model.fit(x, y, batch_size=4, verbose=0).history
        return [history, model.evaluate(x, y, verbose=0), model.predict(x, verbose=0), model.get_weights()]

    assert_near(run(3), run(None), 1e-6)


@on_ranks(2)
def test_weighted_metrics_of_masked_outputs_count_by_the_weights_that_are_passed() -> None:
    import zeromesh.keras
    from keras_models import fresh, keras, layers, np

    fresh()
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int64"),
            layers.Embedding(5, 3, mask_zero=True),
            layers.LSTM(5, return_sequences=True),
        ]
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), weighted_metrics=["accuracy"])
    zeromesh.keras.distribute(model, config(3))
    ids = np.random.default_rng(0).integers(0, 5, (12, 4))
    ids[::2, 1:] = 0  # of which each rank has other numbers
    weights = np.random.default_rng(1).random((12, 4)).astype("float32")
    found = model.evaluate(ids, ids, sample_weight=weights, batch_size=6, verbose=0, return_dict=True)
    counted = weights * (ids != 0)
    right = model.predict(ids, verbose=0).argmax(-1) == ids
    assert found["accuracy"] == pytest.approx(float((right * counted).sum() / counted.sum()), rel=1e-5)
