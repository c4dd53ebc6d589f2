"""Checks of a Keras model and its callbacks before anything is changed: errors tell what to write."""

from __future__ import annotations

from typing import Any

import keras

from zeromesh.base.keras_layers import layers_of, refuse_other_backends
from zeromesh.config.settings import Settings
from zeromesh.keras.keras_optimizer import check_optimizer, check_variables, without_scaling

_STEPS = [name.format(kind) for name in ("{}_step", "make_{}_function") for kind in ("train", "test", "predict")]
_MEANS = ("sum_over_batch_size", "mean")
_FIRST_RANK = ("CSVLogger", "RemoteMonitor", "TensorBoard")  # they write files or send what is the same on all ranks
_CALLS_USER = ("LambdaCallback",)  # what it decides need not follow from metrics
_REFUSED = {
    "BackupAndRestore": "call model.engine.save_checkpoint(folder) in a callback of your own, and "
    "model.engine.load_checkpoint(folder) before fit: it has the optimizer's states, too",
    "OrbaxCheckpoint": "use ModelCheckpoint, or model.engine.save_checkpoint(folder) in a callback of your own",
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
    overridden = [name for name in _STEPS if getattr(type(model), name) is not getattr(keras.Model, name)]
    if overridden:
        raise ValueError(
            f"{type(model).__name__} has a {overridden[0]} of its own, which distribute would replace: override "
            "compute_loss and compute_metrics instead, or write the loop yourself with zeromesh.initialize"
        )
    if model.jit_compile:
        raise ValueError(
            "the model is compiled with jit_compile=True, which would compile the fetching of parameters: leave it "
            "out, and call model.engine.compile(), which compiles the forward of each unit"
        )
    check_optimizer(without_scaling(model.optimizer))
    check_variables(model.trainable_variables)
    for loss in keras.tree.flatten(model._compile_loss._user_loss if model._compile_loss else None):
        if isinstance(loss, keras.losses.Loss) and loss.reduction not in _MEANS:
            raise ValueError(
                f"the loss {loss.name} has reduction={loss.reduction!r}, which is not a mean over rows that ranks "
                'could share: use reduction="sum_over_batch_size"'
            )
    for layer in layers_of(model):
        if getattr(layer, "stateful", False):
            raise ValueError(
                f"layer {layer.name} is stateful: its states are of the rows of a whole batch, of which each rank has "
                "some; leave stateful=True out, and pass sequences whole"
            )
    _check_settings(model, settings)
    _check_scaling(model.optimizer, settings)


def _check_scaling(optimizer: Any, settings: Settings) -> None:
    if optimizer is without_scaling(optimizer):
        return
    if settings.precision.loss_scale is None:
        raise ValueError(
            "the model computes in mixed_float16, and compile scales the loss for it, which the engine does here: "
            'add "fp16": {"enabled": true} to the configuration, or use the policy mixed_bfloat16, which needs no scale'
        )
    if (optimizer.initial_scale, optimizer.dynamic_growth_steps) != (2.0**15, 2000):
        raise ValueError(
            f"the LossScaleOptimizer has initial_scale={optimizer.initial_scale} and dynamic_growth_steps="
            f"{optimizer.dynamic_growth_steps}, and the engine scales the loss here: compile with its inner optimizer, "
            "and set fp16.initial_scale_power and fp16.loss_scale_window in the configuration"
        )


def _check_settings(model: Any, settings: Settings) -> None:
    if settings.optimizer is not None or settings.scheduler is not None:
        raise ValueError(
            "the configuration has an optimizer or a scheduler, and the model is compiled with its own: leave them "
            "out of the configuration; a keras.optimizers.schedules.LearningRateSchedule is a schedule"
        )
    if settings.gradient_clipping:
        raise ValueError(
            f"gradient_clipping is {settings.gradient_clipping}, and the optimizer of the model clips by Keras' own "
            "formula: leave it out, and pass global_clipnorm to the Keras optimizer"
        )
    if settings.zero_optimization.optimizer_device == "nvme":
        raise ValueError(
            "offload_optimizer.device is nvme, where only ZeroMesh's own updates reach the states, and the model is "
            "compiled with an optimizer of Keras: set it to cpu, or write the loop yourself with zeromesh.initialize "
            "and an optimizer of the configuration"
        )


def check_callbacks(callbacks: Any) -> list[Any]:
    """Return the callbacks as a list; raise ValueError for those that cannot work on several ranks."""
    listed = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
    every = [callback for callback in keras.tree.flatten(listed) if callback is not None]
    for callback in every:
        for name in set(_names(callback)) & set(_REFUSED):
            raise ValueError(f"the callback {name} does not work on a distributed model: {_REFUSED[name]}")
        if "TensorBoard" in _names(callback) and (callback.histogram_freq or callback.embeddings_freq):
            raise ValueError(
                f"TensorBoard has histogram_freq={callback.histogram_freq} and embeddings_freq="
                f"{callback.embeddings_freq}, which read whole weights on the first rank alone: leave them out"
            )
    return every


def of_rank(callbacks: list[Any], rank: int) -> list[Any]:
    """Return the callbacks that run on a rank: those that write a log do on the first one alone."""
    return [callback for callback in callbacks if rank == 0 or not _logs(callback)]


def names_of_all_ranks(callbacks: list[Any]) -> list[str]:
    """Return the names of Keras' own callbacks that every rank must have."""
    return [type(callback).__name__ for callback in callbacks if is_keras_own(callback) and not _logs(callback)]


def is_keras_own(callback: Any) -> bool:
    """Return whether a callback decides from metrics alone, which are the same on all ranks."""
    return type(callback).__module__.startswith("keras.src.") and type(callback).__name__ not in _CALLS_USER


def _logs(callback: Any) -> bool:
    return bool(set(_names(callback)) & set(_FIRST_RANK))


def _names(callback: Any) -> list[str]:
    """Return the names of the classes of Keras that a callback is of."""
    return [base.__name__ for base in type(callback).__mro__ if base.__module__.startswith("keras.src.")]
