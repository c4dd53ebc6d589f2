"""Optimizers of Keras over pieces of parameters compute what they compute over whole ones."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness import on_ranks

if find_spec("keras") is None:
    pytest.skip("keras is not installed", allow_module_level=True)


def optimizers() -> dict[str, Any]:
    from keras_models import keras

    of = keras.optimizers
    decayed = of.AdamW(0.01, weight_decay=0.1)
    decayed.exclude_from_weight_decay(var_names=["bias"])
    return {
        "sgd": of.SGD(0.1),
        "momentum": of.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        "adam": of.Adam(0.01, amsgrad=True),
        "adamw": decayed,
        "rmsprop": of.RMSprop(0.01, momentum=0.9, centered=True),
        "adagrad": of.Adagrad(0.1),
        "adadelta": of.Adadelta(1.0),
        "adamax": of.Adamax(0.01),
        "nadam": of.Nadam(0.01),
        "lion": of.Lion(0.01),
        "ftrl": of.Ftrl(0.1, l1_regularization_strength=0.01),
        "clipnorm": of.SGD(0.1, clipnorm=0.05),
        "global_clipnorm": of.SGD(0.1, global_clipnorm=0.05),
        "clipvalue": of.Adam(0.01, clipvalue=0.001),
        "schedule": of.Adam(of.schedules.ExponentialDecay(0.02, 2, 0.5)),
    }


def model_of(name: str) -> Any:
    from keras_models import fresh, keras

    fresh()
    layers = keras.layers
    model = keras.Sequential([keras.Input((6,)), layers.Dense(9, activation="tanh"), layers.Dense(3)])
    model.compile(optimizers()[name], loss="mse")
    return model


def steps(model: Any, count: int = 4, first: int = 0) -> list[Any]:
    """The weights after some calls of ``train_on_batch``."""
    from keras_models import np

    generator = np.random.default_rng(0)
    data = [(generator.normal(size=(5, 6)), generator.normal(size=(5, 3))) for _ in range(first + count)]
    for x, y in data[first:]:
        model.train_on_batch(x, y)
    return list(model.get_weights())


@on_ranks(2)
def test_updates_of_pieces_equal_those_of_keras() -> None:
    import zeromesh.keras
    from keras_models import assert_near

    for number, name in enumerate(optimizers()):
        model = zeromesh.keras.distribute(model_of(name), {"zero_optimization": {"stage": 2 + number % 2}})
        wanted, found = steps(model_of(name)), steps(model)
        assert_near(found, wanted, 1e-12)
        assert int(model.optimizer.iterations.numpy()) == 4


@pytest.mark.parametrize("name", ["adam", "nadam", pytest.param("momentum", marks=pytest.mark.full)])
@on_ranks(2)
def test_a_checkpoint_continues_the_states_of_keras_optimizers(name: str, tmp_path: Path) -> None:
    import zeromesh.keras
    from keras_models import assert_near

    model = zeromesh.keras.distribute(model_of(name), {"zero_optimization": {"stage": 3}})
    steps(model, 2)
    model.engine.save_checkpoint(tmp_path)
    wanted = steps(model, 2, first=2)
    resumed = zeromesh.keras.distribute(model_of(name), {"zero_optimization": {"stage": 2}})
    resumed.engine.load_checkpoint(tmp_path)
    assert_near(steps(resumed, 2, first=2), wanted, 1e-12)
    assert int(resumed.optimizer.iterations.numpy()) == 4
