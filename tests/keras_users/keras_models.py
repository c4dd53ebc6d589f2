"""Keras models of the tests, in float64, and the data that they train on."""

from __future__ import annotations

import contextlib
import os
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"  # before the first import

import keras
import numpy as np
import torch
from keras import layers
from keras.src.backend.common import dtypes

LENGTH, WORDS, WIDTH = 12, 40, 16


def fresh(seed: int = 0) -> None:
    """Let what is built from here on be in float64, with the same values on all ranks."""
    # Keras promotes float64 to float32 wherever types meet, as JAX does by default.
    dtypes.BIT64_TO_BIT32_DTYPE.update(float64="float64")
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(seed)


def cnn(dropout: float = 0.0) -> Any:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(6, 3, kernel_regularizer=keras.regularizers.L2(0.01)),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Dropout(dropout),
            layers.Flatten(),
            layers.Dense(16, activation="relu"),
            layers.Dense(5, activation="softmax"),
        ]
    )


def transformer(blocks: int = 3) -> Any:
    """Return a decoder as keras-hub builds them: a functional model whose blocks are layers of their own."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="embedding")(tokens)
    for number in range(blocks):
        x = Block(name=f"block_{number}")(x)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(tokens, layers.Dense(WORDS, name="head")(x))


class Block(layers.Layer):
    """Attention and a feed-forward network, each with a residual."""

    def build(self, shape: Any) -> None:
        self.norm_1, self.norm_2 = layers.LayerNormalization(), layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(2, WIDTH // 2)
        self.feed_forward = [layers.Dense(2 * WIDTH, activation="gelu"), layers.Dense(WIDTH)]
        self.norm_1.build(shape)
        self.norm_2.build(shape)
        self.attention.build(shape, shape)
        self.feed_forward[0].build(shape)
        self.feed_forward[1].build((*shape[:-1], 2 * WIDTH))

    def call(self, x: Any) -> Any:
        h = self.norm_1(x)
        x = x + self.attention(h, h, use_causal_mask=True)
        h = self.norm_2(x)
        for layer in self.feed_forward:
            h = layer(h)
        return x + h


def images(count: int = 20) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(count, 8, 8, 1)), generator.integers(0, 5, size=(count,))


def sentences(count: int = 20) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, WORDS, size=(count, LENGTH + 1))
    return tokens[:, :-1].astype("int32"), tokens[:, 1:]


CASES = {"cnn": (cnn, images), "transformer": (transformer, sentences)}


def compiled(name: str, optimizer: Any = None) -> Any:
    """Return the model of a case, compiled as users do."""
    model = CASES[name][0]()
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=name == "transformer")
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    return model


def sums(model: Any) -> list[float]:
    """Return the sums that metrics are made of, over all ranks."""
    run, variables = vars(model).get("zeromesh"), model.metrics_variables
    with contextlib.nullcontext() if run is None else run.joined(variables):
        return [float(variable.value) for variable in variables]


class Notes(keras.callbacks.Callback):
    """The metrics of every batch, as sums."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[list[float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append(sums(self.model))


def assert_near(found: Any, wanted: Any, tolerance: float = 1e-10) -> None:
    """Compare numbers, whose sums several ranks add up in another order, which a few steps amplify."""
    for one, other in zip(keras.tree.flatten(found), keras.tree.flatten(wanted), strict=True):
        pair = (torch.from_numpy(np.asarray(keras.ops.convert_to_numpy(value), np.float64)) for value in (one, other))
        torch.testing.assert_close(*pair, rtol=tolerance, atol=tolerance)
