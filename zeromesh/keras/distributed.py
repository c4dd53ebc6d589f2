"""``distribute``: a compiled Keras model whose ``fit``, ``evaluate`` and ``predict`` run on all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import keras
import torch

from zeromesh.build import initialize
from zeromesh.checkpoint.random_state import share_random_state
from zeromesh.comm.agreement import agree_run
from zeromesh.comm.collectives import Group
from zeromesh.config.settings import Settings
from zeromesh.engine import Engine
from zeromesh.keras.checks import check_callbacks, check_model
from zeromesh.keras.data import Rows, checksum_of, loader_of, rows_in
from zeromesh.keras.optimizer import KerasOptimizer
from zeromesh.keras.statistics import JointBatch, JointMoments
from zeromesh.model.keras_layers import expose_layers, layers_of
from zeromesh.model.placement import Placement
from zeromesh.shard.guard import change_class
from zeromesh.zero import GatheredParameters


@dataclass
class Run:
    """State of a distributed model beside what Keras has.

    Attributes:
        engine: trains the model.
        joint: the ranks whose rows make the joint batch.
        splits: each rank gets the joint batches, and takes its rows; False: it gets its own batches.
        classes: (layer, its own class, its class here) of the model and of layers that are changed.
        symbolic: Keras is finding out shapes, without values.
        compares: the next batch is compared over the ranks.
        agrees: callbacks of the user's may stop the training on one rank.
    """

    engine: Engine
    joint: JointBatch
    splits: bool
    classes: list[tuple[Any, type, type]] = field(default_factory=list)
    symbolic: bool = False
    compares: bool = True
    agrees: bool = False

    @property
    def world(self) -> Group:
        """All ranks."""
        return self.joint.group

    def rows(self, batch: Any) -> Rows:
        """Return the rows of this rank. Collective where ranks have batches of their own."""
        if self.splits:
            if self.compares:
                self._require_same(batch)
            rows = Rows.of(batch, self.engine.data_rank, self.engine.data_size)
        else:
            count = rows_in(batch)
            total = int(self.world.exchange(torch.tensor([count])).sum())
            rows = Rows(0, count, total, self.world.size)
        self.joint.take(rows.count > 0)
        return rows

    def _require_same(self, batch: Any) -> None:
        self.compares = False
        found = self.world.exchange(torch.tensor([checksum_of(batch)], dtype=torch.float64)).flatten().tolist()
        if len(set(found)) > 1:
            raise ValueError(
                f"ranks 0 to {self.world.size - 1} got different first batches, and each would take its rows of another one: "
                "give all ranks the same data in the same order (a seed for every shuffle), or give each rank its own "
                "batches and pass distribute(..., own_batches=True)"
            )

    @contextmanager
    def joined(self, variables: list[Any]) -> Iterator[None]:
        """Let metric variables have their sums over ranks in this context. Collective."""
        if self.world.size == 1 or self.symbolic or not variables:
            yield
            return
        for variable in variables:
            if variable.aggregation != "sum":
                raise ValueError(
                    f"variable {variable.path} of a metric has aggregation={variable.aggregation!r}, so that the metric over "
                    'all ranks is not known: make it with add_variable(..., aggregation="sum"), the default'
                )
        own = [variable.value.detach().clone() for variable in variables]
        rows = self.world.exchange(torch.cat([value.reshape(-1).double() for value in own])).sum(0)
        for variable, value, part in zip(variables, own, rows.split([v.numel() for v in own]), strict=True):
            variable.assign(part.reshape(value.shape).to(value))
        try:
            yield
        finally:
            for variable, value in zip(variables, own, strict=True):
                variable.assign(value)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Give the model and its layers the classes in this context that files name."""
        for layer, own, _ in self.classes:
            change_class(layer, own)
        try:
            yield
        finally:
            for layer, _, changed in self.classes:
                change_class(layer, changed)


class _Model(Protocol):
    """What ``Agreement`` calls."""

    def begin_epoch(self) -> None: ...

    def agree_to_stop(self, each_batch: bool) -> None: ...


class Agreement(keras.callbacks.Callback):
    """Last of the callbacks: the order of samples, and the decision to stop, are the same on all ranks."""

    model: _Model

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

    zeromesh: Run

    @property
    def engine(self) -> Engine:
        """The engine: checkpoints, memory and traffic reports."""
        return self.zeromesh.engine

    # The loops of Keras, around the steps below.

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """As in Keras; a batch is the joint one, of which each rank computes its rows."""
        call = inspect.signature(super().fit).bind(*args, **kwargs)  # type: ignore[misc]
        chosen = call.arguments
        rank, given = self.engine.mesh.rank, chosen.get("callbacks")
        callbacks = check_callbacks(given, rank)
        self.zeromesh.agrees = any(not _is_keras_own(one) for one in callbacks)
        callbacks.append(Agreement())
        if isinstance(given, keras.callbacks.CallbackList):
            given.append(callbacks[-1])
        else:
            chosen["callbacks"] = callbacks
        if chosen.get("validation_data") is not None:
            chosen["validation_data"] = loader_of(chosen["validation_data"])
        share_random_state(self.zeromesh.world)
        return self._loop_on_ranks(super().fit, call)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As in Keras; metrics are of the joint batches, and the same on all ranks."""
        return self._loop_on_ranks(super().evaluate, inspect.signature(super().evaluate).bind(*args, **kwargs))  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As in Keras; every rank gets the predictions for whole batches (for its own with ``own_batches``)."""
        return self._loop_on_ranks(super().predict, inspect.signature(super().predict).bind(*args, **kwargs))  # type: ignore[misc]

    def _loop_on_ranks(self, method: Callable[..., Any], call: inspect.BoundArguments) -> Any:
        call.arguments["x"] = loader_of(call.arguments.get("x"))
        if self.engine.mesh.rank > 0:
            call.arguments["verbose"] = 0
        self.zeromesh.compares = True
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
        self.zeromesh.compares = True

    def agree_to_stop(self, each_batch: bool) -> None:
        """Stop training on all ranks if one rank's callback asked for it."""
        run = self.zeromesh
        if run.world.size > 1 and (run.agrees or not each_batch):
            self.stop_training = bool(run.world.exchange(torch.tensor([float(self.stop_training)])).any())

    # Steps.

    def train_step(self, data: Any) -> Any:
        """Compute this rank's rows of a batch, update, and return the joint metrics."""
        x, y, weights, rows = self._rows_here(data)
        y_pred, loss, factor = self._loss_here(x, y, weights, rows, training=True)
        self._note_loss(loss, factor, rows)
        self.engine.backward(loss * factor)
        self.engine.step()
        return self._metrics_here(x, y, y_pred, weights, rows)

    def test_step(self, data: Any) -> Any:
        """Compute this rank's rows of a batch, and return the joint metrics."""
        x, y, weights, rows = self._rows_here(data)
        y_pred, loss, factor = self._loss_here(x, y, weights, rows, training=False)
        self._note_loss(loss, factor, rows)
        return self._metrics_here(x, y, y_pred, weights, rows)

    def predict_step(self, data: Any) -> Any:
        """Return the predictions for all rows of a batch."""
        x, _, _, rows = self._rows_here(data)
        found = self._output_here(x, training=False)
        return keras.tree.map_structure(lambda one: self._joined_rows(one, rows), found)

    def _rows_here(self, data: Any) -> tuple[Any, Any, Any, Rows]:
        parts = keras.utils.unpack_x_y_sample_weight(data)
        rows = self.zeromesh.rows(parts)
        device = self.engine.device
        move = lambda one: one if one is None else torch.as_tensor(one).to(device)  # noqa: E731
        return *keras.tree.map_structure(move, rows.cut(parts)), rows

    def _output_here(self, x: Any, training: bool) -> Any:
        return self.engine(x, training=training) if self._call_has_training_arg else self.engine(x)  # type: ignore[attr-defined]

    def _loss_here(self, x: Any, y: Any, weights: Any, rows: Rows, training: bool) -> tuple[Any, torch.Tensor, float]:
        """Return the output, the loss of these rows, and the factor that makes its mean over ranks the joint loss."""
        y_pred = self._output_here(x, training)
        values = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": weights, "training": training}
        # Regularizers read parameters, which the engine has to fetch.
        reads = any(v.regularizer is not None for v in self.trainable_variables)  # type: ignore[attr-defined]
        compute: Any = self.engine._compute_loss if reads else self._compute_loss  # type: ignore[attr-defined]
        loss = compute(**values)
        return y_pred, loss, self._share_here(y_pred, rows)

    def _share_here(self, y_pred: Any, rows: Rows) -> float:
        masks = [getattr(one, "_keras_mask", None) for one in keras.tree.flatten(y_pred)]
        if all(mask is None for mask in masks):
            return rows.weight
        if len(masks) > 1:
            raise ValueError(
                "the model has several outputs with masks, whose losses are means over different numbers of elements: "
                "leave out mask_zero, and pass sample_weight with zeros where elements do not count"
            )
        # Keras takes the mean over elements that are not masked, so that these are counted over the ranks.
        valid = float(masks[0].sum()) if rows.count else 0.0
        every = self.zeromesh.world.exchange(torch.tensor([valid], dtype=torch.float64))
        return valid * every.numel() / max(float(every.sum()), 1.0)

    def _note_loss(self, loss: torch.Tensor, factor: float, rows: Rows) -> None:
        # Sums over ranks are then those of the joint batch.
        self._loss_tracker.update_state(loss.detach() * factor, sample_weight=rows.total / rows.ranks)  # type: ignore[attr-defined]

    def _metrics_here(self, x: Any, y: Any, y_pred: Any, weights: Any, rows: Rows) -> Any:
        if not rows.count:
            return self.get_metrics_result()
        return self.compute_metrics(x, y, y_pred, sample_weight=weights)  # type: ignore[attr-defined]

    def get_metrics_result(self) -> Any:
        """Return the metrics over all ranks, the same on each."""
        with self.zeromesh.joined(self.metrics_variables):  # type: ignore[attr-defined]
            found = super().get_metrics_result()  # type: ignore[misc]
            if self.zeromesh.symbolic:
                return found
            # Not the variables themselves, which get their own values back.
            return keras.tree.map_structure(lambda one: keras.ops.convert_to_tensor(one).detach().clone(), found)

    def _joined_rows(self, own: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the rows of all ranks; a rank without any computed one for nothing."""
        if not self.zeromesh.splits or rows.ranks == 1:
            return own
        most = -(-rows.total // rows.ranks)
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: rows.count] = own[: rows.count]
        # As bytes, because the backends do not know every dtype.
        every = self.zeromesh.world.exchange(padded.contiguous().reshape(-1).view(torch.uint8))
        each, more = divmod(rows.total, rows.ranks)
        parts = [row.view(own.dtype).reshape(padded.shape)[: each + (n < more)] for n, row in enumerate(every)]
        return torch.cat(parts).to(own.device)

    # Building and weights.

    def _symbolic_build(self, *args: Any, **kwargs: Any) -> None:
        self.zeromesh.symbolic = True
        try:
            super()._symbolic_build(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.zeromesh.symbolic = False

    def _post_build(self) -> None:
        """Do nothing: Keras would register all variables with the model again."""

    def get_weights(self) -> list[Any]:
        """Return whole weights, on every rank."""
        with GatheredParameters(self.parameters()):  # type: ignore[attr-defined]
            found: list[Any] = super().get_weights()  # type: ignore[misc]
            return found

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
        """Write the whole model on the first rank, without the optimizer's states (``engine.save_checkpoint`` has them)."""
        self._write_first(lambda: type(self).save(self, filepath, *args, **kwargs))  # type: ignore[attr-defined]

    def _change_weights(self, what: str, action: Callable[[], Any]) -> None:
        with GatheredParameters(self.parameters(), modifier_rank=self.engine.mesh.stage_ranks[0]):  # type: ignore[attr-defined]
            agree_run(self.zeromesh.world, what, action)

    def _write_first(self, action: Callable[[], Any]) -> None:
        first = self.engine.mesh.rank == 0
        with GatheredParameters(self.parameters()), self.zeromesh.plain():  # type: ignore[attr-defined]
            agree_run(self.zeromesh.world, "write its model", action if first else lambda: None)


def _is_keras_own(callback: Any) -> bool:
    """Return whether a callback decides from metrics alone, which are the same on all ranks."""
    return type(callback).__module__.startswith("keras.src.") and type(callback).__name__ != "LambdaCallback"


def distribute(
    model: Any, config: str | Path | Mapping[str, Any] | Settings, *, own_batches: bool = False,
    joint_statistics: bool = True,
) -> Any:  # fmt: skip
    """Let a compiled Keras model train, evaluate and predict on all ranks, with its own optimizer. Collective.

    The model is changed in place. Equal to Keras on one process over the joint batches, up to rounding; ``dropout``
    draws other numbers on each rank.

    Args:
        model: built, and compiled with an optimizer that updates element by element.
        config: as ``zeromesh.initialize`` takes it, without an optimizer and a schedule: those of ``compile`` count.
        own_batches: each rank is given its own batches, as many as the others. False: each is given the joint batches,
            the same on all ranks, and takes its rows.
        joint_statistics: batch normalisation takes mean and variance over the joint batch; False: over each rank's rows.

    Returns:
        The model; ``model.engine`` is its engine.

    Raises:
        ValueError: the model, its optimizer, its losses or the configuration cannot be honoured.
    """
    settings = Settings.load(config)
    check_model(model, settings)
    expose_layers(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    variables = model.trainable_variables
    optimizer = KerasOptimizer(model.optimizer, variables, [names[id(one.value)] for one in variables])
    # Keras computes each element by itself, which the engine cannot know of this class.
    settings = settings.model_copy(update={"zero_allow_untested_optimizer": True})
    engine, *_ = initialize(model=model, optimizer=optimizer, config=settings)
    optimizer.connect(engine.mesh, settings.row.optimizer is Placement.SHARDED)
    run = Run(engine, JointBatch(engine.mesh.group("world")), not own_batches)
    vars(model)["zeromesh"] = run
    _change_classes(model, run, joint_statistics)
    # Without states, which would be of whole variables: Keras builds it in ``fit`` otherwise.
    model.optimizer.build([])
    for layer in layers_of(model):
        for generator in layer._seed_generators:
            # Or dropout would draw the same masks for the rows of each rank.
            generator.state.assign(generator.state.value + torch.tensor([engine.data_rank, 0]).to(generator.state.value))
    return model


def _change_classes(model: Any, run: Run, joint_statistics: bool) -> None:
    norms = [one for one in layers_of(model) if isinstance(one, keras.layers.BatchNormalization)]
    for layer, mixin in [(model, Distributed), *((one, JointMoments) for one in norms if joint_statistics)]:
        own = type(layer)
        run.classes.append((layer, own, type(own.__name__, (mixin, own), {"__module__": own.__module__})))
        if mixin is JointMoments:
            vars(layer)["_joint_batch"] = run.joint
    for layer, _, changed in run.classes:
        change_class(layer, changed)
