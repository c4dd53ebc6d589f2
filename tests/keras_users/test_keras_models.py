"""Keras models under ``zeromesh.initialize`` in a loop of the user's: their layers are units."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from harness import on_ranks

if find_spec("keras") is None:
    pytest.skip("keras is not installed", allow_module_level=True)


def subclassed() -> Any:
    """Blocks in a list of the model's, which torch does not see."""
    from keras_models import WIDTH, WORDS, Block, keras

    class Decoder(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = keras.layers.Embedding(WORDS, WIDTH)
            self.blocks = [Block() for _ in range(6)]
            self.head = keras.layers.Dense(WORDS)

        def call(self, tokens: Any) -> Any:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model = Decoder()
    model(keras.ops.zeros((1, 12), dtype="int32"))
    return model


def models() -> list[Any]:
    from keras_models import transformer

    return [transformer(6), subclassed()]


def most_gathered(model: Any, engine: Any, run: Any) -> int:
    """Return the most elements of sharded parameters in memory at the beginning of any layer's forward."""
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        here = sum(u.storage.nbytes() > 0 and sum(p.numel() for p in u.members) for u in engine.sharded.units)
        most = max(most, here)

    for unit in engine.sharded.units:
        unit.module.register_forward_pre_hook(look)
        unit.module.register_full_backward_pre_hook(look)
    run()
    return most


@on_ranks(2)
def test_a_loop_equals_keras_and_blocks_are_units() -> None:
    import zeromesh
    from keras_models import assert_near, fresh, keras, sentences, torch

    tokens, labels = (torch.from_numpy(one) for one in sentences(8))
    for number in range(2):
        fresh()
        reference = models()[number]
        optimizer = torch.optim.SGD([v.value for v in reference.trainable_variables], 0.1)
        fresh()
        model = models()[number]
        given = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 3}}
        engine, *_ = zeromesh.initialize(model=model, config=given | {"slots": {"parameter": 2}})
        names = [name for name, _ in (*model.named_modules(),)]
        blocks = [unit for unit in engine.sharded.units if type(unit.module).__name__ == "Block"]
        assert len(blocks) == 6, names
        mine = slice(4 * engine.mesh.rank, 4 * engine.mesh.rank + 4)

        def loss_of(one: Any, rows: slice) -> Any:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            return loss(labels[rows], one(tokens[rows], training=True))

        def steps(engine: Any = engine, mine: slice = mine) -> None:
            for _ in range(2):
                engine.backward(loss_of(engine, mine))
                engine.step()

        most = most_gathered(model, engine, steps)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(reference, slice(None)).backward()
            optimizer.step()
        with zeromesh.zero.GatheredParameters(model.parameters()):
            assert_near(model.get_weights(), reference.get_weights(), 1e-12)
        assert most <= sum(p.numel() for p in model.parameters()) / 2


@on_ranks(2)
def test_sharded_variables_say_how_to_read_and_write_them() -> None:
    import zeromesh
    from keras_models import assert_near, fresh, transformer

    fresh()
    model = transformer(2)
    given = {"optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 3}}
    engine, *_ = zeromesh.initialize(model=model, config=given)
    assert engine.sharded.sharded
    for action in (model.get_weights, lambda: model.trainable_variables[0].numpy()):
        with pytest.raises(RuntimeError, match="zeromesh.zero.GatheredParameters"):
            action()
    with zeromesh.zero.GatheredParameters(model.parameters(), modifier_rank=0):
        model.set_weights([value * 0 + 1 for value in model.get_weights()])
    with zeromesh.zero.GatheredParameters(model.parameters()):
        assert_near([value * 0 + 1 for value in model.get_weights()], model.get_weights())


@pytest.mark.full
@pytest.mark.parametrize("name", ["MobileNetV2", "ResNet50V2", "EfficientNetB0"])
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_models_of_keras_applications_fit_as_alone(name: str, stage: int) -> None:
    import zeromesh.keras
    from keras_models import assert_near, fresh, keras, np

    def make() -> Any:
        fresh()
        model = getattr(keras.applications, name)(weights=None, input_shape=(32, 32, 3), classes=5)
        for layer in model._flatten_layers():
            if isinstance(layer, keras.layers.Dropout):  # other masks on each rank
                layer.rate = 0.0
        model.compile(keras.optimizers.SGD(0.01), loss="sparse_categorical_crossentropy")
        return model

    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(16, 32, 32, 3)), generator.integers(0, 5, size=16)
    reference, model = make(), zeromesh.keras.distribute(make(), {"zero_optimization": {"stage": stage}})
    assert len(model.engine.sharded.units) > 10
    # Two updates: 50 batch norms over few samples multiply the last bit by some thousand in each.
    settings = {"batch_size": 8, "shuffle": False, "verbose": 0}
    histories = [one.fit(x, y, **settings).history["loss"] for one in (reference, model)]
    assert_near(histories[1], histories[0], 1e-6)  # Keras rounds it to fp32
    assert_near(model.get_weights(), reference.get_weights(), 1e-8)
