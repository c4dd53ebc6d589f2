"""Train a Keras model on the digits of scikit-learn by ``fit``, alone or on several ranks.

``python train.py --alone`` is Keras by itself; ``zeromesh launch --nproc 2 train.py`` trains on two ranks.
"""

import argparse
import os
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"  # before the first import of keras

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import zeromesh.keras

CONFIG = Path(__file__).with_name("config.json")


def digits() -> tuple[Any, Any, Any, Any]:
    """Return images of shape (n, 8, 8, 1) in [0, 1] and their labels, to train and to test."""
    data = load_digits()
    images = (data.images / 16.0)[..., None].astype("float32")
    return tuple(train_test_split(images, data.target, test_size=0.25, random_state=0))


def convolutional() -> keras.Model:
    """Return a compiled convolutional network with batch normalisation."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same"),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Conv2D(32, 3, strides=2, padding="same"),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=1e-2, global_clipnorm=1.0)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    return model


def main() -> None:
    """Train, and print the accuracy on the images that were left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alone", action="store_true", help="Keras by itself, in one process")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="file of the best weights, such as best.weights.h5")
    arguments = parser.parse_args()
    keras.utils.set_random_seed(0)  # the same weights and order of samples on all ranks
    train_x, test_x, train_y, test_y = digits()
    model = convolutional()
    if not arguments.alone:
        zeromesh.keras.distribute(model, CONFIG)
    callbacks: list[Any] = [keras.callbacks.EarlyStopping("val_loss", patience=3)]
    if arguments.output is not None:
        callbacks.append(keras.callbacks.ModelCheckpoint(arguments.output, save_weights_only=True))
    validation = (test_x, test_y)
    chosen = {"batch_size": 64, "epochs": arguments.epochs, "callbacks": callbacks, "verbose": 2}
    model.fit(train_x, train_y, validation_data=validation, **chosen)
    loss, accuracy = model.evaluate(test_x, test_y, verbose=0)
    first = arguments.alone or model.engine.mesh.rank == 0
    if first:
        print(f"test loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
