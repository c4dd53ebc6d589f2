"""Callbacks, files and data sets of Keras users on two ranks."""

from __future__ import annotations

import contextlib
import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness import on_ranks

if find_spec("keras") is None:
    pytest.skip("keras is not installed", allow_module_level=True)


def distributed(name: str = "cnn", stage: int = 3, **options: Any) -> Any:
    import zeromesh.keras
    from keras_models import compiled, fresh

    fresh()
    return zeromesh.keras.distribute(compiled(name), {"zero_optimization": {"stage": stage}}, **options)


@on_ranks(2)
def test_files_and_weights_are_whole(tmp_path: Path) -> None:
    from keras_models import assert_near, cnn, images, keras

    model, (x, y) = distributed(), images()
    files = [str(tmp_path / "best.keras"), str(tmp_path / "last.weights.h5")]
    saved = [
        keras.callbacks.ModelCheckpoint(files[0]),
        keras.callbacks.ModelCheckpoint(files[1], save_weights_only=True),
    ]
    model.fit(x, y, batch_size=8, epochs=1, callbacks=saved, verbose=0)
    wanted = model.get_weights()
    whole = keras.models.load_model(files[0])
    assert type(whole) is keras.Sequential
    assert_near(whole.get_weights(), wanted, 0)
    plain = cnn()
    plain.load_weights(files[1])
    assert_near(plain.get_weights(), wanted, 0)
    model.set_weights([value + 1 for value in wanted])
    assert_near(model.get_weights(), [value + 1 for value in wanted], 0)
    model.load_weights(files[1])
    assert_near(model.get_weights(), wanted, 0)
    assert_near(model.predict(x, verbose=0), whole.predict(x, verbose=0))
    with pytest.raises((OSError, RuntimeError, ValueError)):
        model.load_weights(files[1] if model.engine.mesh.rank else str(tmp_path / "none.weights.h5"))
    with pytest.raises(RuntimeError, match="before zeromesh.keras.distribute"):
        model.compile("adam", "mse")


@on_ranks(2)
def test_callbacks_decide_alike_on_all_ranks() -> None:
    from keras_models import Notes, images, keras

    model, (x, y) = distributed(), images()
    rank = model.engine.mesh.rank

    class Stop(keras.callbacks.Callback):
        """Asks one rank alone."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = self.model.stop_training or (batch == 1 and rank == 1)

    notes = Notes()
    model.fit(x, y, batch_size=4, epochs=3, callbacks=[Stop(), notes], verbose=0)
    assert len(notes.logs) == 2
    rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate)
    early = keras.callbacks.EarlyStopping("loss", min_delta=1e9, restore_best_weights=True)
    history = model.fit(x, y, batch_size=10, epochs=5, callbacks=[rates, early], verbose=0).history
    assert len(history["loss"]) == 2
    assert model.engine.get_lr() == [0.01 * 0.25]
    with pytest.raises(ValueError, match="engine.save_checkpoint"):
        model.fit(x, y, callbacks=[keras.callbacks.BackupAndRestore("none")])


@on_ranks(2)
def test_logs_are_written_once_and_callbacks_are_the_same(tmp_path: Path) -> None:
    from keras_models import images, keras, torch

    class Log(keras.callbacks.CSVLogger):
        """Own callback: a rank without it must take part in the exchanges of ranks that have one."""

    model, (x, y) = distributed(), images()
    rank, file, shown = model.engine.mesh.rank, tmp_path / "log.csv", io.StringIO()
    with contextlib.redirect_stdout(shown):
        model.fit(x, y, batch_size=10, epochs=2, callbacks=[Log(str(file))], verbose=2)
    assert len(file.read_text().splitlines()) == 3
    assert bool(shown.getvalue()) == (rank == 0)
    # It disturbs the numbers by which this rank's samples are shuffled.
    draws = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: torch.rand(1))
    model.fit(x, y, batch_size=4, epochs=2, callbacks=[draws] if rank == 0 else [], verbose=0)
    with pytest.raises(ValueError, match="EarlyStopping"):
        model.fit(x, y, callbacks=[keras.callbacks.EarlyStopping("loss")] if rank else [], verbose=0)


@on_ranks(2)
def test_rows_weights_and_own_batches_are_those_of_the_joint_batch() -> None:
    from keras_models import assert_near, compiled, fresh, images, np, torch

    (x, y), every = images(9), []
    weights = np.linspace(0.5, 2.0, 9)
    for case in ("alone", "joint", "own", "loader"):
        if case == "alone":
            fresh()
            model = compiled("cnn")
        else:
            model = distributed(own_batches=case == "own")
        if case == "loader":
            sets = torch.utils.data.TensorDataset(*map(torch.from_numpy, (x, y, weights)))
            # The last batch has a row for the first rank alone.
            model.fit(torch.utils.data.DataLoader(sets, 4), verbose=0)
        elif case == "own":
            rank = model.engine.mesh.rank
            for start, stop in ((0, 4), (4, 8)):
                mine = slice(start + 3 * rank, stop if rank else start + 3)
                model.train_on_batch(x[mine], y[mine], sample_weight=weights[mine])
            with pytest.raises(ValueError, match="rows"):
                model.train_on_batch(x[:2], y[:1])
            continue
        else:
            model.fit(x, y, sample_weight=weights, batch_size=4, shuffle=False, verbose=0)
        every.append(model.get_weights())
    for found in every[1:]:
        assert_near(found, every[0])


@on_ranks(2)
def test_masked_positions_count_over_all_ranks() -> None:
    import zeromesh.keras
    from keras_models import WORDS, assert_near, fresh, keras, sentences

    def make() -> Any:
        fresh()
        layers = keras.layers
        embedding = layers.Embedding(WORDS, 8, mask_zero=True)
        model = keras.Sequential([keras.Input((12,), dtype="int32"), embedding, layers.Dense(WORDS)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss=loss)
        return model

    x, y = sentences(6)
    x[:2, 3:] = 0  # the first rank has fewer positions that count
    reference, model = make(), zeromesh.keras.distribute(make(), {"zero_optimization": {"stage": 2}})
    for one in (reference, model):
        one.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    assert_near(model.get_weights(), reference.get_weights(), 1e-12)


@on_ranks(2)
def test_different_data_on_ranks_is_an_error() -> None:
    from keras_models import images

    model, (x, y) = distributed(), images()
    with pytest.raises(ValueError, match="own_batches=True"):
        model.fit(x + model.engine.mesh.rank, y, verbose=0)


def test_arrays_of_other_libraries_are_taken_without_a_copy() -> None:
    from keras_models import np, torch
    from zeromesh.keras import batches

    class Foreign:
        """An array of a library that torch does not know."""

        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    array = np.arange(6.0)
    ((x, (y, nothing)),) = batches([(Foreign(array), (array, None))])
    assert isinstance(x, torch.Tensor)
    assert nothing is None
    array[0] = 7.0
    assert x[0] == y[0] == 7.0


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
@on_ranks(2)
def test_batches_of_tensorflow_train_as_arrays_do() -> None:
    from keras_models import assert_near, images, torch  # first: TensorFlow imports Keras
    import tensorflow  # isort: skip
    from zeromesh.keras import batches

    x, y = images()
    data = tensorflow.data.Dataset.from_tensor_slices((x, y)).batch(6)
    found, wanted = distributed(), distributed()
    found.fit(data, verbose=0)
    wanted.fit(x, y, batch_size=6, shuffle=False, verbose=0)
    assert_near(found.get_weights(), wanted.get_weights(), 0)
    assert_near(found.predict(data, verbose=0), wanted.predict(x, verbose=0))
    held = next(iter(data.take(1)))[0]
    ((one,),) = batches([(held,)])
    assert one.data_ptr() == torch.from_dlpack(held).data_ptr()
