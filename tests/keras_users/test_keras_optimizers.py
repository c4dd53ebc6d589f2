"""Optimizers of Keras over pieces of parameters compute what they compute over whole ones."""

from __future__ import annotations

import os
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
    from keras_models import fresh

    fresh()
    return dense_of(optimizers()[name])


def dense_of(optimizer: Any) -> Any:
    from keras_models import keras

    layers = keras.layers
    model = keras.Sequential([keras.Input((6,)), layers.Dense(9, activation="tanh"), layers.Dense(3)])
    model.compile(optimizer, loss="mse")
    return model


def steps(model: Any, count: int = 4, first: int = 0) -> list[Any]:
    """Return the weights after some calls of ``train_on_batch``."""
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


@on_ranks(2)
def test_accumulation_of_the_configuration_is_that_of_keras() -> None:
    import zeromesh.keras
    from keras_models import assert_near, fresh, keras

    def make(**options: Any) -> Any:
        fresh()
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.1, **options), "mse")
        return model

    accumulation = {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 3}
    model = zeromesh.keras.distribute(make(), {"zero_optimization": {"stage": 2}, **accumulation})
    assert_near(steps(model), steps(make(gradient_accumulation_steps=2)), 1e-12)
    assert int(model.optimizer.iterations.numpy()) == 2


@pytest.mark.parametrize("policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.full)])
@on_ranks(2)
def test_policies_of_16_bits_train_as_in_keras(policy: str) -> None:
    import zeromesh.keras
    from keras_models import assert_near, fresh, keras

    def make() -> Any:
        fresh()
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(policy)
        return dense_of(keras.optimizers.SGD(0.1))

    # A scale at which nothing overflows, as the two scales come down in other steps.
    half = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    section = half if policy == "mixed_float16" else {"bf16": {"enabled": True}}
    try:
        model = zeromesh.keras.distribute(make(), {"zero_optimization": {"stage": 3}, **section})
        found, wanted = steps(model), steps(make())
    finally:
        fresh()
    assert_near(found, wanted, 2e-2 if policy == "mixed_bfloat16" else 5e-3)


@on_ranks(2)
def test_states_of_an_optimizer_move_to_the_pieces_and_leave_the_files(tmp_path: Path) -> None:
    import zeromesh.keras
    from keras_models import assert_near, fresh, keras

    def trained() -> Any:
        model = model_of("nadam")
        steps(model, 2)
        return model

    reference = trained()
    file = str(tmp_path / f"{os.getpid()}.keras")
    reference.save(file)
    wanted = steps(reference, 2, first=2)
    for make in (trained, lambda: (fresh(), keras.models.load_model(file))[1]):
        model = zeromesh.keras.distribute(make(), {"zero_optimization": {"stage": 3}})
        assert_near(steps(model, 2, first=2), wanted, 1e-12)
        assert int(model.optimizer.iterations.numpy()) == 4
        assert len(model.optimizer.variables) == 2  # iterations and learning rate
