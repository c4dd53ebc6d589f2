"""Programs of Keras users: a model, and lines that train it and return numbers, which do not depend on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from keras_models import LENGTH, WORDS, keras, layers, np, sentences, torch

_draw = np.random.default_rng(0)
X, Y = _draw.normal(size=(22, 6)), _draw.normal(size=(22, 3))
LABELS = _draw.integers(0, 3, size=22)
WEIGHTS = np.linspace(0.0, 2.0, 22)


@dataclass(frozen=True)
class Case:
    """A program: ``make`` compiles a model, ``run`` trains it; ``config`` is for several ranks only."""

    make: Callable[[], Any]
    run: Callable[[Any], Any]
    config: dict[str, Any] = field(default_factory=dict)


def dense(optimizer: Any = None, loss: Any = "mse", **options: Any) -> Any:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(9, activation="tanh"), layers.Dense(3)])
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss=loss, metrics=["mae"], **options)
    return model


def classifier() -> Any:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(9, activation="tanh"), layers.Dense(3, "softmax")])
    top = keras.metrics.SparseTopKCategoricalAccuracy(2)
    of = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy", top], "weighted_metrics": ["accuracy"]}
    model.compile(keras.optimizers.SGD(0.1), **of)
    return model


def two_outputs() -> Any:
    """Two inputs, two outputs and a layer that both use."""
    a, b = keras.Input((6,), name="a"), keras.Input((3,), name="b")
    shared = layers.Dense(9, activation="tanh")
    first, second = shared(a), shared(layers.Dense(6)(b))
    joined = layers.Dense(3, activation="softmax", name="o2")(layers.concatenate([first, second]))
    model = keras.Model({"a": a, "b": b}, {"o1": layers.Dense(3, name="o1")(first), "o2": joined})
    losses = {"o1": "mse", "o2": "sparse_categorical_crossentropy"}
    metrics = {"o1": ["mae"], "o2": ["accuracy"]}
    model.compile(keras.optimizers.Adam(0.01), losses, {"o1": 0.3, "o2": 1.0}, metrics)
    return model


def nested() -> Any:
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="relu"), layers.BatchNormalization()])
    a, b = keras.Input((6,)), keras.Input((6,))
    model = keras.Model([a, b], layers.Dense(3)(inner(a) - inner(b)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def recurrent(kind: Any) -> Any:
    model = keras.Sequential([keras.Input((LENGTH,), dtype="int32"), layers.Embedding(WORDS, 8, mask_zero=True)])
    model.add(layers.Bidirectional(kind(5)))
    model.add(layers.Dense(1))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def partly_frozen() -> Any:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(9, trainable=False), layers.BatchNormalization()])
    model.add(layers.Dense(3))
    model.layers[0].enable_lora(2)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


class Noted(layers.Layer):
    """Adds a loss of its own."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(x**2))
        return x


class OwnLoss(keras.Model):
    """A subclass with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [layers.Dense(7, kernel_regularizer="l2"), Noted(), layers.Dense(3, activity_regularizer="l2")]

    def call(self, x: Any, training: bool = False) -> Any:
        for part in self.parts:
            x = part(x)
        return x

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True) -> Any:  # type: ignore[no-untyped-def]
        return keras.ops.mean((y - y_pred) ** 2) + sum(self.losses)


def subclassed() -> Any:
    model = OwnLoss()
    model(np.zeros((1, 6)))
    model.compile(keras.optimizers.SGD(0.1), metrics=["mae"])
    return model


class Pairs(keras.utils.PyDataset):
    """Batches of three rows, with weights."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        rows = slice(3 * index, 3 * index + 3)
        return X[rows], Y[rows], np.arange(3.0) + 1


def generated(rows: int = 5) -> Iterator[Any]:
    while True:
        for start in range(0, 20, rows):
            yield X[start : start + rows], Y[start : start + rows]


def fitted(model: Any, *data: Any, **options: Any) -> Any:
    """Return the metrics of a training, and the weights after it."""
    options = {"batch_size": 5, "epochs": 2, "verbose": 0} | options
    if len(data) == 1:
        del options["batch_size"]
    history = model.fit(*(data or (X, Y)), **options).history
    return [history[key] for key in sorted(history)], model.get_weights()


def evaluated(model: Any, *data: Any, **options: Any) -> list[float]:
    found = model.evaluate(*data, verbose=0, return_dict=True, **options)
    return [found[key] for key in sorted(found)]


def _data_sets(model: Any) -> Any:
    made = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    loader = torch.utils.data.DataLoader(made, 5)
    steps = {"steps_per_epoch": 3, "validation_data": generated(3), "validation_steps": 2}
    return (
        fitted(model, Pairs(), validation_data=Pairs(), shuffle=True),
        fitted(model, generated(), **steps),
        fitted(model, loader, validation_data=loader),
        fitted(model, torch.from_numpy(X), torch.from_numpy(Y), steps_per_epoch=2, validation_split=0.0),
        model.evaluate(generated(), steps=2, verbose=0),
        model.predict(torch.from_numpy(X), verbose=0),
    )


def _weighted(model: Any) -> Any:
    weights = {0: 1.0, 1: 3.0, 2: 0.5}
    first = fitted(model, X, LABELS, class_weight=weights, validation_split=0.2)
    return (
        first,
        fitted(model, X, LABELS, sample_weight=WEIGHTS, shuffle=False),
        model.train_on_batch(X[:5], LABELS[:5], class_weight=weights),
        model.test_on_batch(X[:1], LABELS[:1]),
        evaluated(model, X, LABELS, sample_weight=WEIGHTS, batch_size=8),
    )


def _two(model: Any) -> Any:
    x, y = {"a": X[:19], "b": Y[:19]}, {"o1": Y[:19], "o2": LABELS[:19]}
    weights = {"o1": WEIGHTS[:19], "o2": WEIGHTS[18::-1].copy()}
    return (
        fitted(model, x, y, batch_size=6, validation_split=0.2),  # batches with a row for one rank alone
        fitted(model, x, y, batch_size=6, sample_weight=weights),
        evaluated(model, x, y, batch_size=6),
        model.predict({"a": X[:1], "b": Y[:1]}, verbose=0),
    )


def _decided(model: Any) -> Any:
    of = keras.callbacks
    seen: list[float] = []
    callbacks = [
        of.EarlyStopping("val_loss", patience=1, min_delta=0.05, restore_best_weights=True),
        of.ReduceLROnPlateau("val_loss", patience=1, factor=0.5, min_delta=0.03),
        of.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        of.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"])),
    ]
    return fitted(model, epochs=6, validation_split=0.2, callbacks=callbacks), seen, float(model.optimizer.iterations)


def _frozen_later(model: Any) -> Any:
    first = fitted(model)
    model.layers[0].trainable = False
    second = fitted(model, epochs=4, initial_epoch=2)
    model.optimizer.learning_rate = 0.5
    return first, second, fitted(model)


def _masked(model: Any) -> Any:
    tokens = sentences()[0].copy()
    tokens[:, 8:] = tokens[3, 4:] = 0
    return fitted(model, tokens, Y[:20, :1])


def _trained() -> Any:
    model = dense(keras.optimizers.Nadam(0.01))
    fitted(model)
    return model


CASES: dict[str, Case] = {
    "data sets": Case(dense, _data_sets),
    "weights": Case(classifier, _weighted),
    "two outputs": Case(two_outputs, _two),
    "callbacks": Case(dense, _decided),
    "own loss": Case(subclassed, fitted),
    "used optimizer": Case(_trained, fitted),
    "function": Case(lambda: dense(loss=lambda y, p: keras.ops.mean((y - p) ** 2)), fitted),
    "nested": Case(nested, lambda model: fitted(model, [X, X[::-1].copy()], Y)),
    "frozen later": Case(dense, _frozen_later),
    "lora": Case(partly_frozen, fitted),
    "lstm": Case(lambda: recurrent(layers.LSTM), _masked),
    "gru": Case(lambda: recurrent(layers.GRU), _masked),
    "offload": Case(
        lambda: dense(keras.optimizers.AdamW(0.01, clipnorm=0.05)),
        fitted,
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    ),
    "offload of all": Case(
        _trained,
        fitted,
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
    ),
}
SHORT = ("data sets", "weights", "two outputs", "callbacks", "own loss", "used optimizer", "function")
