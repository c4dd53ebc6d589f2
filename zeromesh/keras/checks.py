"""Checks of a Keras model and its callbacks before anything is changed: errors tell what to write."""

from __future__ import annotations

from typing import Any

import keras
import torch

from zeromesh.config import keys
from zeromesh.config.settings import Settings
from zeromesh.keras.optimizer import check_optimizer, check_variables
from zeromesh.model.keras_layers import refuse_other_backends

_STEPS = (
    "train_step",
    "test_step",
    "predict_step",
    "make_train_function",
    "make_test_function",
    "make_predict_function",
)
_MEANS = ("sum_over_batch_size", "mean")
_FIRST_RANK = ("CSVLogger", "RemoteMonitor", "TensorBoard")  # they write files or send what is the same on all ranks
_REFUSED = {
    "BackupAndRestore": "call model.engine.save_checkpoint(folder) in a callback of your own, and "
    "model.engine.load_checkpoint(folder) before fit: it has the optimizer's states, too",
    "SwapEMAWeights": "it needs the average of whole weights, which no rank has",
}


def check_model(model: Any, settings: Settings) -> None:
    """Raise ValueError if a model cannot be distributed under these settings."""
    refuse_other_backends(model)
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"distribute needs a keras.Model, not a {type(model).__name__}; pass others to zeromesh.initialize"
        )
    if not model.compiled or model.optimizer is None:
        raise ValueError("the model is not compiled: call model.compile(optimizer=..., loss=...) before distribute")
    own = [name for name in _STEPS if getattr(type(model), name) is not getattr(keras.Model, name)]
    if own:
        raise ValueError(
            f"{type(model).__name__} has a {own[0]} of its own, which distribute would replace: override compute_loss "
            "and compute_metrics instead, or write the loop yourself with zeromesh.initialize"
        )
    if model.jit_compile:
        raise ValueError(
            "the model is compiled with jit_compile=True, which would compile the fetching of parameters: leave it "
            "out, and call model.engine.compile(), which compiles the forward of each unit"
        )
    check_optimizer(model.optimizer)
    check_variables(model.trainable_variables)
    for loss in keras.tree.flatten(model._compile_loss._user_loss if model._compile_loss else None):
        if isinstance(loss, keras.losses.Loss) and loss.reduction not in _MEANS:
            raise ValueError(
                f"the loss {loss.name} has reduction={loss.reduction!r}, which is no mean over rows that ranks could "
                'share: use reduction="sum_over_batch_size"'
            )
    _check_settings(model, settings)


def _check_settings(model: Any, settings: Settings) -> None:
    if settings.optimizer is not None or settings.scheduler is not None:
        raise ValueError(
            "the configuration has an optimizer or a scheduler, and the model is compiled with its own: leave them "
            "out of the configuration; a keras.optimizers.schedules.LearningRateSchedule is a schedule"
        )
    if settings.gradient_clipping:
        raise ValueError(
            f"{keys.CLIPPING} is {settings.gradient_clipping}, and the optimizer of the model clips by Keras' own "
            "formula: leave it out, and pass global_clipnorm to the Keras optimizer"
        )
    compute = settings.precision.compute
    wanted = None if compute is None else str(compute).removeprefix("torch.")
    if compute in (torch.bfloat16, torch.float16) and model.dtype_policy.compute_dtype != wanted:
        raise ValueError(
            f"the configuration computes in {wanted}, and the model in {model.dtype_policy.compute_dtype}: write "
            f'keras.config.set_dtype_policy("mixed_{wanted}") before the model is built'
        )


def check_callbacks(callbacks: Any, rank: int) -> list[Any]:
    """Return the callbacks of a rank as a list; raise ValueError for those that cannot work on several ranks."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        given = list(callbacks.callbacks)
    else:
        given = list(callbacks) if isinstance(callbacks, list | tuple) else [] if callbacks is None else [callbacks]
    for callback in given:
        if (name := type(callback).__name__) in _REFUSED and type(callback).__module__.startswith("keras."):
            raise ValueError(f"the callback {name} does not work on a distributed model: {_REFUSED[name]}")
    return [one for one in given if rank == 0 or type(one).__name__ not in _FIRST_RANK]
