"""A model whose rows do not make up the batch is refused with its first one; ordinary models change by nothing."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from harness import on_ranks

if find_spec("keras") is None:
    pytest.skip("keras is not installed", allow_module_level=True)


def refused() -> dict[str, tuple[Callable[[], Any], Any, str]]:
    """Return models by name, with labels and what the error says."""
    from keras_models import keras, layers, np

    ops, draw = keras.ops, np.random.default_rng(0)
    rows, classes, sets = draw.normal(size=(8, 3)), draw.integers(0, 3, size=8), draw.integers(0, 2, size=(8, 3))

    class Sum(layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.1 * ops.sum(x**2))
            return x

    class Masked(layers.Layer):
        def __init__(self) -> None:
            super().__init__(activity_regularizer=keras.regularizers.L2(1e3))
            self.supports_masking = True

        def call(self, x: Any) -> Any:
            return 2 * x

    class Most(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="most")
            self.value = self.add_variable((), "zeros", name="value")

        def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
            self.value.assign(ops.maximum(self.value, ops.max(ops.abs(y - p))))

        def result(self) -> Any:
            return self.value

    class Centred(layers.Layer):
        def call(self, x: Any, training: bool = False) -> Any:
            return x - ops.mean(x, axis=0, keepdims=True) if training else x

    def counted(y: Any, p: Any) -> Any:
        counts = ops.cast(y != 0, p.dtype)
        return ops.sum((y - p) ** 2 * counts) / ops.maximum(ops.sum(counts), 1)

    def model(*parts: Any, loss: Any = "mse", **compiled: Any) -> Any:
        made = keras.Sequential([keras.Input((4,)), *parts])
        made.compile("sgd", loss, **compiled)
        return made

    ignoring = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=255)
    mean, output = "is not a mean over rows", "output 0 of 8 rows of the model is not made of those of its parts"
    return {
        "labels that are ignored": (lambda: model(layers.Dense(3), loss=ignoring), classes, mean),
        "a loss over the batch": (lambda: model(layers.Dense(3, "sigmoid"), loss=keras.losses.Dice()), sets, mean),
        "labels that count in a loss of ones own": (lambda: model(layers.Dense(3), loss=counted), rows, mean),
        "a sum of add_loss": (lambda: model(layers.Dense(3), Sum()), rows, mean),
        "a regularizer of masked activations": (
            lambda: model(layers.Embedding(9, 3, mask_zero=True), Masked()), draw.normal(size=(8, 4, 3)), mean,
        ),
        "means over rows": (lambda: model(layers.Dense(3), Centred()), rows, output),
        "means over rows beside Dropout": (
            lambda: model(layers.Dense(3), layers.Dropout(0.5), Centred(), layers.GaussianNoise(0.1)), rows, output,
        ),
        "similarities": (
            lambda: model(layers.Dense(3), layers.Lambda(lambda x: x @ x.T), loss=lambda y, p: p**2), rows, output,
        ),
        "a maximum": (lambda: model(layers.Dense(3), metrics=[Most()]), rows, "the metric most of 8 rows is"),
    }  # fmt: skip


@on_ranks(2)
def test_what_is_not_made_of_rows_is_refused_with_the_first_batch() -> None:
    from keras_models import np
    from zeromesh.keras import distribute

    inputs = np.random.default_rng(1).integers(1, 9, size=(8, 4))
    for make, labels, text in refused().values():
        model = distribute(make(), {"zero_optimization": {"stage": 3}})
        for _ in range(2):
            with pytest.raises(ValueError, match=text):
                model.train_on_batch(inputs, labels)


@on_ranks(2)
def test_the_probe_of_an_ordinary_model_leaves_nothing_behind() -> None:
    from keras_models import assert_near, fresh, keras, layers, np
    from zeromesh.keras import distribute

    tokens = np.random.default_rng(1).integers(0, 9, size=(6, 4))
    labels = np.random.default_rng(2).integers(0, 3, size=6)

    def trained(probes: bool) -> list[Any]:
        fresh()
        parts = [
            layers.Embedding(9, 8, mask_zero=True),
            layers.GRU(8),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
        ]
        head = layers.Dense(3, activity_regularizer="l2")
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *parts, head])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
        distribute(model, {"zero_optimization": {"stage": 3}})
        if not probes:
            model.zeromesh.probes.clear()
        losses = [float(value) for value in model.train_on_batch(tokens, labels, sample_weight=np.arange(6.0))]
        return [
            losses,
            model.evaluate(tokens, labels, verbose=0),
            model.predict(tokens, verbose=0),
            model.get_weights(),
        ]

    assert_near(trained(True), trained(False), 0.0)
