"""Programs of Keras users return on several ranks what they return in one Keras process."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness import on_ranks, run_command, run_ranks

if find_spec("keras") is None:
    pytest.skip("keras is not installed", allow_module_level=True)

MOST = ("nested", "frozen later", "lora", "lstm", "gru", "offload", "offload of all")


def compare(names: Iterable[str], stages: Iterable[int]) -> None:
    import zeromesh.keras
    from keras_cases import CASES
    from keras_models import assert_near, fresh

    for name in names:
        case = CASES[name]
        fresh()
        wanted = case.run(case.make())
        for stage in stages:
            offloaded = case.config.get("zero_optimization", {})
            if stage < (3 if "offload_param" in offloaded else 1 if offloaded else 0):
                continue  # what rests on the host is sharded
            fresh()
            zero = {"stage": stage, **case.config.get("zero_optimization", {})}
            found = case.run(zeromesh.keras.distribute(case.make(), {**case.config, "zero_optimization": zero}))
            try:
                assert_near(found, wanted, 1e-6)  # Keras rounds metrics, and parts of LoRA, to fp32
            except AssertionError as error:
                error.add_note(f"{name}, stage {stage}")
                raise


@on_ranks(2)
def test_programs_return_what_keras_alone_returns() -> None:
    from keras_cases import SHORT

    compare(SHORT, [3])


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_programs_at_all_stages(ranks: int, stage: int) -> None:
    from keras_cases import SHORT

    for name in (*SHORT, *MOST):
        run_ranks(compare, ranks, [name], [stage])


def dropping(**options: Any) -> Any:
    """Return a distributed model that draws: from seed generators of layers, and from the global one."""
    import zeromesh.keras
    from keras_models import fresh, keras

    class Noise(keras.layers.Layer):
        def call(self, x: Any, training: bool = False) -> Any:
            return x + keras.random.normal(keras.ops.shape(x)) if training else x

    fresh()
    of = keras.layers
    model = keras.Sequential(
        [keras.Input((6,)), of.Dense(9), of.Dropout(0.5), of.GaussianNoise(0.1), Noise(), of.Dense(3)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return zeromesh.keras.distribute(model, {"zero_optimization": {"stage": 2}}, **options)


@on_ranks(2)
def test_dropout_and_the_order_of_samples_resume_bit_for_bit(tmp_path: Path) -> None:
    from keras_cases import X, Y
    from keras_models import assert_near

    model = dropping()
    model.fit(X, Y, batch_size=5, epochs=1, verbose=0)
    model.engine.save_checkpoint(tmp_path)
    model.fit(X, Y, batch_size=5, epochs=2, initial_epoch=1, verbose=0)
    resumed = dropping()
    resumed.fit(X[:8], Y[:8], epochs=2, verbose=0)  # draws other numbers
    resumed.engine.load_checkpoint(tmp_path)
    resumed.fit(X, Y, batch_size=5, epochs=2, initial_epoch=1, verbose=0)
    assert_near(resumed.get_weights(), model.get_weights(), 0)


def require_different(masks: list[Any], world: Any) -> None:
    from keras_models import torch

    every = [one for mask in masks for one in world.exchange(mask.detach().double())]
    assert len(every) == 2 * len(masks)
    for number, one in enumerate(every):
        assert not any(torch.equal(one, other) for other in every[:number])


@on_ranks(2)
def test_ranks_and_batches_draw_other_numbers() -> None:
    import zeromesh.keras
    from keras_models import fresh, keras, torch

    fresh()
    of, seen = keras.layers, []

    class Look(of.Layer):
        def call(self, x: Any, training: bool = False) -> Any:
            if training and not x.is_meta:
                seen.append(x[0])
            return x

    parts = [of.Dropout(0.5), Look(), of.Dropout(0.5, seed=1), Look(), of.GaussianNoise(1.0), Look()]
    model = keras.Sequential([keras.Input((64,)), *parts, of.Dense(1)])
    model.compile("sgd", "mse")
    zeromesh.keras.distribute(model, {"zero_optimization": {"stage": 2}})
    model.fit(torch.ones(6, 64), torch.ones(6, 1), batch_size=2, verbose=0)
    world = model.engine.mesh.group("world")
    seen = seen[-9:]  # of three steps; the probe before them draws one number for all elements
    for number in range(3):
        require_different(seen[number::3], world)

    fresh()
    made = keras.Sequential([keras.Input((64,)), of.Dense(2), of.GaussianNoise(1.0)])
    _engine, *_ = zeromesh.initialize(model=made, config={"optimizer": {"type": "SGD"}})
    noise = [made.layers[1](torch.zeros(64), training=True) for _ in range(3)]
    require_different([*noise, keras.random.uniform((64,))], world)


@on_ranks(2)
def test_a_checkpoint_of_two_ranks_gives_one_rank_numbers(tmp_path: Path) -> None:
    """More ranks than wrote it draw others than the first."""
    from zeromesh.base.keras_layers import seeds_of
    from zeromesh.checkpoint.random_state import derive_random_state, random_state, restore_random_state

    model = dropping()
    before, packed = [state.value.tolist() for state in seeds_of(model)], random_state(model)
    derive_random_state(packed, 5, model)
    other = [state.value.tolist() for state in seeds_of(model)]
    assert other[0] != before[0]
    restore_random_state(packed, model)
    assert [state.value.tolist() for state in seeds_of(model)] == before


LOOSE = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy, torch
import zeromesh.keras
x, y = numpy.ones((8, 4), "float32"), numpy.zeros((8, 1), "float32")
found = []
for distributed in (False, True):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    if distributed:
        zeromesh.keras.distribute(model, {"zero_optimization": {"stage": 3}})
    model.fit(x, y, batch_size=3, epochs=2, verbose=0)
    found.append(model.get_weights())
assert all((one == other).all() for one, other in zip(*found)), found
"""


@pytest.mark.full
def test_one_process_without_a_launcher_is_plain_keras() -> None:
    finished = run_command([sys.executable, "-c", LOOSE])
    assert finished.returncode == 0, finished.stdout
