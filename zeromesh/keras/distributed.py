"""``distribute``: a compiled Keras model whose ``fit``, ``evaluate`` and ``predict`` run on all ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import torch

from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.base.keras_layers import expose_layers, layers_of
from zeromesh.base.placement import Placement
from zeromesh.build import initialize
from zeromesh.checkpoint.random_state import share_random_state
from zeromesh.comm.agreement import agree_run
from zeromesh.config.settings import Settings
from zeromesh.engine.engine import Engine
from zeromesh.keras.checks import check_model
from zeromesh.keras.data import BatchRows, loader_of
from zeromesh.keras.keras_optimizer import KerasOptimizer, without_scaling
from zeromesh.keras.keras_run import DistributedRun, kept
from zeromesh.keras.probe import Probe, copied, loss_function
from zeromesh.keras.statistics import JointBatch, JointMoments
from zeromesh.shard.parameters.absent_guard import change_class
from zeromesh.zero import GatheredParameters


class RankAgreement(keras.callbacks.Callback):  # type: ignore[misc]
    """Last of the callbacks: the order of samples, and the decision to stop, are the same on all ranks."""

    model: Any

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Share the random state that orders samples."""
        self.model.begin_epoch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop on all ranks if one does."""
        self.model.agree_to_stop(each_batch=True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop on all ranks if one does."""
        self.model.agree_to_stop(each_batch=False)


class Distributed:
    """Mixed into the class of a Keras model by ``distribute``. All methods are collective."""

    zeromesh: DistributedRun
    stop_training: bool

    @property
    def engine(self) -> Engine:
        """The engine: checkpoints, memory and traffic reports."""
        return self.zeromesh.engine

    # The loops of Keras, around the steps below.

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Train as in Keras; a batch is the joint one, of which each rank computes its rows."""
        call = inspect.signature(super().fit).bind(*args, **kwargs)  # type: ignore[misc]
        chosen = call.arguments
        passed_callbacks = chosen.get("callbacks")
        callbacks = [*self.zeromesh.agreed_callbacks(passed_callbacks), RankAgreement()]
        if isinstance(passed_callbacks, keras.callbacks.CallbackList):
            passed_callbacks.append(callbacks[-1])
        else:
            chosen["callbacks"] = callbacks
        if chosen.get("validation_data") is not None:
            chosen["validation_data"] = loader_of(chosen["validation_data"])
        share_random_state(self.zeromesh.world)
        return self._loop_on_ranks(super().fit, *call.args, **call.kwargs)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as in Keras; metrics are of the joint batches, and the same on all ranks."""
        return self._loop_on_ranks(super().evaluate, *args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as in Keras; every rank gets the predictions for whole batches (for its own with ``own_batches``)."""
        return self._loop_on_ranks(super().predict, *args, **kwargs)  # type: ignore[misc]

    def _loop_on_ranks(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(method).bind(*args, **kwargs)
        call.arguments["x"] = loader_of(call.arguments.get("x"))
        if self.engine.mesh.rank > 0:
            call.arguments["verbose"] = 0
        self.zeromesh.compare_next()
        return method(*call.args, **call.kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Raise RuntimeError: the engine has the optimizer of the first ``compile``."""
        raise RuntimeError(
            "the model is distributed already, with the optimizer it was compiled with: call compile before "
            "zeromesh.keras.distribute, and build the model anew for another one"
        )

    def begin_epoch(self) -> None:
        """Share the random state that orders samples, and compare the next batch."""
        share_random_state(self.zeromesh.world)
        self.zeromesh.compare_next()

    def agree_to_stop(self, each_batch: bool) -> None:
        """Stop training on all ranks if one rank's callback asked for it."""
        run = self.zeromesh
        if run.world.size > 1 and (run.agrees or not each_batch):
            self.stop_training = bool(run.world.exchange(torch.tensor([float(self.stop_training)])).any())

    # Steps.

    def train_step(self, data: Any) -> Any:
        """Compute this rank's rows of a batch, update, and return the joint metrics."""
        _require_own_optimizer(self)
        x, y, weights, rows = self._rows_here(data, "train")
        with self.zeromesh.own_numbers():
            y_pred, loss = self._loss_here(x, y, weights, rows, training=True)
            if self.trainable_weights:  # type: ignore[attr-defined]
                self.engine.backward(loss)
        if self.trainable_weights:  # type: ignore[attr-defined]
            self.engine.step()
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=1)  # as Keras does
        return _joint_metrics(self, rows, x, y, y_pred, weights)

    def test_step(self, data: Any) -> Any:
        """Compute this rank's rows of a batch, and return the joint metrics."""
        x, y, weights, rows = self._rows_here(data, "test")
        y_pred, _ = self._loss_here(x, y, weights, rows, training=False)
        return _joint_metrics(self, rows, x, y, y_pred, weights)

    def predict_step(self, data: Any) -> Any:
        """Return the predictions for all rows of a batch."""
        x, _, _, rows = self._rows_here(data, "predict")
        output = self._output_here(x, training=False)
        return keras.tree.map_structure(lambda tensor: self.zeromesh.joined_rows(tensor, rows), output)

    def _rows_here(self, data: Any, kind: str) -> tuple[Any, Any, Any, BatchRows]:
        parts, run = keras.utils.unpack_x_y_sample_weight(data), self.zeromesh
        rows = run.rows(parts)
        if kind in run.probes:
            what = "compute parts of a batch"
            agree_run(run.world, what, lambda: Probe(self, run, data, training=kind == "train").check(kind))
            run.probes.remove(kind)  # not before: what is refused once is refused again
        device = self.engine.device
        move = lambda tensor: tensor if tensor is None else torch.as_tensor(tensor).to(device)  # noqa: E731
        return *keras.tree.map_structure(move, rows.cut(parts)), rows

    def _output_here(self, x: Any, training: bool) -> Any:
        return self.engine(x, training=training) if self._call_has_training_arg else self.engine(x)  # type: ignore[attr-defined]

    def _loss_here(self, x: Any, y: Any, weights: Any, rows: BatchRows, training: bool) -> tuple[Any, torch.Tensor]:
        """Return the output for these rows, and a loss whose mean over ranks is the joint one; count it."""
        y_pred = self._output_here(x, training)
        # Copies, or metrics would be weighed by what the mask of these rows has made of the weights.
        values = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": copied(weights), "training": training}
        # Losses of several outputs have metrics, in which a rank without rows of its own counts nothing.
        with nullcontext() if rows.count else kept(self.metrics_variables):  # type: ignore[attr-defined]
            loss = loss_function(self)(**values)
        factor = self.zeromesh.factor(y_pred, rows)
        # Sums over ranks are then those of the joint batch.
        self._loss_tracker.update_state(loss.detach() * factor, sample_weight=rows.total / rows.ranks)  # type: ignore[attr-defined]
        return y_pred, loss * factor

    def get_metrics_result(self) -> Any:
        """Return the metrics over all ranks, the same on each."""
        with self.zeromesh.joined(self.metrics_variables):  # type: ignore[attr-defined]
            results = super().get_metrics_result()  # type: ignore[misc]
            if self.zeromesh.symbolic:
                return results
            # Not the variables themselves, which get their own values back.
            return keras.tree.map_structure(lambda value: keras.ops.convert_to_tensor(value).detach().clone(), results)

    # Building and weights.

    def _symbolic_build(self, *args: Any, **kwargs: Any) -> None:
        with self.zeromesh.finding_shapes():
            super()._symbolic_build(*args, **kwargs)  # type: ignore[misc]

    def _post_build(self) -> None:
        """Do nothing: Keras would register all variables with the model again."""

    def get_weights(self) -> list[Any]:
        """Return whole weights, on every rank."""
        with GatheredParameters(self.parameters()):  # type: ignore[attr-defined]
            weights: list[Any] = super().get_weights()  # type: ignore[misc]
            return weights

    def set_weights(self, weights: list[Any]) -> None:
        """Take whole weights, the same on all ranks."""
        self._change_weights("set weights", lambda: super(Distributed, self).set_weights(weights))  # type: ignore[misc]

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Read whole weights; all ranks read the file."""
        self._change_weights("load weights", lambda: super(Distributed, self).load_weights(filepath, *args, **kwargs))  # type: ignore[misc]

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Write whole weights on the first rank."""
        self._write_first(lambda: type(self).save_weights(self, filepath, *args, **kwargs))

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Write the whole model on the first rank; ``engine.save_checkpoint`` has the optimizer's states, too."""
        self._write_first(lambda: type(self).save(self, filepath, *args, **kwargs))

    def save_own_variables(self, store: Any) -> None:
        """Raise RuntimeError: functions of ``keras.saving`` would write on all ranks, and gather nothing."""
        raise RuntimeError(
            "a distributed model is written by its own model.save(...) or model.save_weights(...), which gather its "
            "weights on all ranks, and write them once"
        )

    def _change_weights(self, what: str, action: Callable[[], Any]) -> None:
        with GatheredParameters(self.parameters(), modifier_rank=self.engine.mesh.stage_ranks[0]):  # type: ignore[attr-defined]
            agree_run(self.zeromesh.world, what, action)

    def _write_first(self, action: Callable[[], Any]) -> None:
        first = self.engine.mesh.rank == 0
        with GatheredParameters(self.parameters()), self.zeromesh.plain():  # type: ignore[attr-defined]
            agree_run(self.zeromesh.world, "write its model", action if first else lambda: None)


def _joint_metrics(model: Any, rows: BatchRows, *data: Any) -> Any:
    """Count the rows of this rank, if there are any, and return the metrics over all ranks."""
    return model.compute_metrics(*data) if rows.count else model.get_metrics_result()


def _require_own_optimizer(model: Any) -> None:
    if (
        model.engine.optimizer is not None
        and without_scaling(model.optimizer) is not model.engine.optimizer.keras_optimizer
    ):
        raise RuntimeError(
            "model.optimizer was replaced after zeromesh.keras.distribute, and the engine has the one before: set its "
            "learning_rate instead, or compile with another optimizer before distribute"
        )


def distribute(
    model: Any,
    config: str | Path | Mapping[str, Any] | Settings,
    *,
    own_batches: bool = False,
    joint_statistics: bool = True,
) -> Any:
    """Let a compiled Keras model train, evaluate and predict on all ranks, with its own optimizer. Collective.

    The model is changed in place. Equal to Keras on one process over the joint batches, up to rounding; ``dropout``
    draws other numbers on each rank.

    Args:
        model: built, and compiled with an optimizer that updates element by element.
        config: as ``zeromesh.initialize`` takes it, without an optimizer and a schedule: those of ``compile`` count.
        own_batches: each rank is given its own batches, as many as the others. False: each is given the joint batches,
            the same on all ranks, and takes its rows.
        joint_statistics: batch normalisation takes statistics of the joint batch; False: of each rank's rows.

    Returns:
        The model; ``model.engine`` is its engine.

    Raises:
        ValueError: the model, its optimizer, its losses or the configuration cannot be honoured.
    """
    settings = TrainSettings.load(config)
    check_model(model, settings)
    norms = [layer for layer in layers_of(model) if isinstance(layer, keras.layers.BatchNormalization)]
    custom_norm = next(
        (norm for norm in norms if type(norm)._moments is not keras.layers.BatchNormalization._moments), None
    )
    if joint_statistics and custom_norm is not None:
        raise ValueError(
            f"layer {custom_norm.name} ({type(custom_norm).__name__}) has _moments of its own, which statistics of the "
            "joint batch would replace; pass joint_statistics=False, with which each rank takes those of its rows"
        )
    expose_layers(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    variables = model.trainable_variables
    optimizer = None
    if variables:  # a model that is frozen only evaluates
        parameters = [names[id(variable.value)] for variable in variables]
        optimizer = KerasOptimizer(without_scaling(model.optimizer), variables, parameters)
    engine, *_ = initialize(model=model, optimizer=optimizer, config=settings)
    if optimizer is not None:
        pieces = (piece for flat in engine.sharded.flats for _, _, piece in flat.pieces)
        optimizer.connect(engine.mesh, settings.row.optimizer is Placement.SHARDED, pieces)
    world = engine.mesh.group("world")
    # A model for batches of one size cannot be called with parts of them.
    sized = any(tensor.shape[0] is not None for tensor in keras.tree.flatten(getattr(model, "inputs", None) or []))
    probes = set() if sized or world.size == 1 else {"train", "test", "predict"}
    run = DistributedRun(engine, JointBatch(world, joint_statistics), not own_batches, probes=probes)
    vars(model)["zeromesh"] = run
    _change_classes(model, run)
    # Without states, which would be of whole variables: Keras builds it in ``fit`` otherwise.
    model.optimizer.build([])
    return model


def _change_classes(model: Any, run: DistributedRun) -> None:
    norms = [norm for norm in layers_of(model) if isinstance(norm, keras.layers.BatchNormalization)]
    for layer, mixin in [(model, Distributed), *((norm, JointMoments) for norm in norms)]:
        original = type(layer)
        run.classes.append(
            (layer, original, type(original.__name__, (mixin, original), {"__module__": original.__module__}))
        )
        if mixin is JointMoments:
            vars(layer)["_joint_batch"] = run.joint
    for layer, _, changed in run.classes:
        change_class(layer, changed)
