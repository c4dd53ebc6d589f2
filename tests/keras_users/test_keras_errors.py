"""Errors tell Keras users the value, the rule and what to write."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import on_ranks

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
    said = refused(dense(optimizer=accumulates))
    assert "set gradient_accumulation_steps, and" in said
    assert "train_micro_batch_size_per_gpu" in said
    layer = keras.layers.Dense(3, kernel_constraint="non_neg")
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile("sgd", "mse")
    assert "constraint NonNeg" in refused(model)
    model = keras.Sequential([keras.Input(batch_shape=(4, 3, 2)), keras.layers.LSTM(5, stateful=True)])
    model.compile("sgd", "mse")
    assert "stateful" in refused(model)


def test_mixed_float16_has_its_loss_scaled_by_the_engine() -> None:
    from keras_models import keras

    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    assert 'add "fp16": {"enabled": true}' in refused(dense(optimizer=scaled))
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    fp16 = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    assert "initial_scale=8.0" in refused(dense(optimizer=scaled), CONFIG | fp16)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adafactor(0.1))
    assert "Adafactor" in refused(dense(optimizer=scaled))


def test_the_configuration_does_not_contradict_the_compiled_model() -> None:
    import zeromesh

    assert "leave them out" in refused(dense(), CONFIG | {"optimizer": {"type": "Adam"}})
    assert "global_clipnorm" in refused(dense(), CONFIG | {"gradient_clipping": 1.0})
    disk = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}
    assert "set it to cpu" in refused(dense(), {"zero_optimization": disk})
    assert "engine.compile()" in refused(dense(jit_compile=True))
    assert 'set_dtype_policy("mixed_bfloat16")' in refused(dense(), CONFIG | {"bf16": {"enabled": True}})
    with pytest.raises(ValueError, match=r'in float16, and the model in float(32|64): write .*"mixed_float16"'):
        zeromesh.initialize(model=dense(), config=CONFIG | {"fp16": {"enabled": True}})


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


@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline", "expert"])
@on_ranks(2)
def test_ranks_do_not_share_a_layer_of_keras(axis: str) -> None:
    import zeromesh

    model, config = dense(), CONFIG | {"mesh": {axis: 2}}
    weights = model.get_weights()
    assert f"the mesh has {axis} = 2, and Sequential is of Keras" in refused(model, config)
    with pytest.raises(ValueError, match="whose layers are not split"):
        zeromesh.initialize(model=model, config=config)
    assert all((one == other).all() for one, other in zip(weights, model.get_weights(), strict=True))


@on_ranks(2)
def test_a_distributed_model_keeps_its_optimizer_and_writes_its_files(tmp_path: Path) -> None:
    from keras_models import keras, np
    from zeromesh.keras import distribute

    model = distribute(dense(), CONFIG)
    with pytest.raises(RuntimeError, match="by its own model.save"):
        keras.saving.save_model(model, str(tmp_path / "model.keras"))
    model.optimizer = keras.optimizers.SGD(0.1)
    with pytest.raises(RuntimeError, match="set its learning_rate instead"):
        model.train_on_batch(np.ones((4, 4)), np.ones((4, 3)))


@on_ranks(2)
def test_a_loss_that_is_no_mean_over_rows_is_refused() -> None:
    from keras_models import keras, np
    from zeromesh.keras import distribute

    class Apart(keras.losses.Loss):
        """Compares the rows with each other."""

        def call(self, y: Any, p: Any) -> Any:
            return keras.ops.mean((p[:, None] - p[None]) ** 2)

    def total(y: Any, p: Any) -> Any:
        return keras.ops.sum((y - p) ** 2)

    def noise(y: Any, p: Any) -> Any:
        return keras.ops.mean((y - p) ** 2 * keras.random.uniform(keras.ops.shape(p)))

    x = np.random.default_rng(0).normal(size=(5, 4))
    for loss in (total, Apart()):
        with pytest.raises(ValueError, match="is not a mean over rows"):
            distribute(dense(loss=loss), CONFIG).train_on_batch(x, x[:, :3])
    distribute(dense(loss=noise), CONFIG).train_on_batch(x, x[:, :3])  # cannot be compared
    with pytest.raises(ValueError, match="is not a mean over rows"):
        distribute(dense(loss=total), CONFIG, own_batches=True).evaluate(x, x[:, :3], verbose=0)


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
