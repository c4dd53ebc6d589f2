"""Errors tell Keras users the value, the rule and what to write."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("keras") is None:
    pytest.skip("keras is not installed", allow_module_level=True)

CONFIG: dict[str, Any] = {"zero_optimization": {"stage": 2}}


def dense(**compiled: Any) -> Any:
    from keras_models import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(**{"optimizer": "adam", "loss": "mse", **compiled})
    return model


def refused(model: Any, config: dict[str, Any] = CONFIG) -> str:
    from zeromesh.keras import distribute

    with pytest.raises(ValueError) as caught:  # noqa: PT011  the callers look at the message
        distribute(model, config)
    return str(caught.value)


def test_optimizers_that_look_at_whole_variables_are_refused() -> None:
    from keras_models import keras

    assert "Adafactor, which is not known" in refused(dense(optimizer=keras.optimizers.Adafactor(0.1)))
    assert "use_ema=True" in refused(dense(optimizer=keras.optimizers.SGD(0.1, use_ema=True)))
    accumulates = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    assert "in the configuration" in refused(dense(optimizer=accumulates))


def test_the_configuration_does_not_contradict_the_compiled_model() -> None:
    assert "leave them out" in refused(dense(), CONFIG | {"optimizer": {"type": "Adam"}})
    assert "global_clipnorm" in refused(dense(), CONFIG | {"gradient_clipping": 1.0})
    assert 'set_dtype_policy("mixed_bfloat16")' in refused(dense(), CONFIG | {"bf16": {"enabled": True}})


def test_losses_and_steps_that_ranks_cannot_share_are_refused() -> None:
    from keras_models import keras

    loss = keras.losses.MeanSquaredError(reduction="sum")
    assert 'reduction="sum_over_batch_size"' in refused(dense(loss=loss))

    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            return {}

    tokens = keras.Input((4,))
    model = Own(tokens, keras.layers.Dense(3)(tokens))
    model.compile("adam", "mse")
    assert "compute_loss" in refused(model)


def test_what_is_not_compiled_or_built_is_refused() -> None:
    import zeromesh
    from keras_models import keras

    tokens = keras.Input((4,))
    assert "call model.compile" in refused(keras.Model(tokens, keras.layers.Dense(3)(tokens)))
    unbuilt = keras.Sequential([keras.layers.Dense(3)])
    unbuilt.compile("adam", "mse")
    assert "is not built" in refused(unbuilt)
    with pytest.raises(ValueError, match="is not built"):
        zeromesh.initialize(model=keras.Sequential([keras.layers.Dense(3)]), config=CONFIG)


@pytest.mark.parametrize(
    ("module", "said"), [("keras", "of Keras on the backend 'jax'"), ("tensorflow", "of TensorFlow")]
)
def test_a_model_of_another_backend_is_refused_by_name(module: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import zeromesh

    model = type("Functional", (), {"__module__": f"{module}.src.models"})()
    stand_in = SimpleNamespace(Layer=type(model), backend=SimpleNamespace(backend=lambda: "jax"))
    if module == "keras":
        monkeypatch.setitem(sys.modules, "keras", stand_in)
    with pytest.raises(ValueError, match=said) as caught:
        zeromesh.initialize(model=model, config=CONFIG)
    assert "KERAS_BACKEND=torch" in str(caught.value)
