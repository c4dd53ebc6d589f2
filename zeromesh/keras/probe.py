"""Probe of a model on some rows, whole and in parts: what ranks with some rows each compute must make up the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zeromesh.base.dry.model_copy import undisturbed
from zeromesh.base.keras_layers import global_seed, seeds_of
from zeromesh.keras.data import rows_in
from zeromesh.keras.keras_run import DistributedRun, kept

_MOST_ROWS = 16

_DRAWS = ("bernoulli", "bernoulli_", "normal", "normal_", "rand", "rand_like", "randn", "randn_like", "uniform_")

_APART = (
    "ranks that have some rows each would compute another one. Compute each row by itself, or write the loop yourself "
    "with zeromesh.initialize, and join the rows of all ranks by zeromesh.gather_with_gradient"
)


class _SameNumbers(TorchDispatchMode):
    """Draws one number for all elements, so that Dropout and noise are the same for all rows, whole and in parts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        drawn = func(*args, **(kwargs or {}))
        return drawn.fill_(0.5) if name in _DRAWS and drawn.dtype.is_floating_point else drawn


class Probe:
    """Comparison of outputs, losses and metrics of a few rows with those of parts of them.

    The variables that a forward, a loss or a metric changes, and all generators, are as they were afterwards.

    Args:
        model: distributed.
        run: its state.
        data: a batch; with one row, that row counts twice.
        training: as the model is called.
    """

    def __init__(self, model: Any, run: DistributedRun, data: Any, training: bool) -> None:
        self._model, self._run = model, run
        parts = keras.utils.unpack_x_y_sample_weight(data)
        index = torch.arange(max(2, min(rows_in(parts), _MOST_ROWS))).clamp(max=rows_in(parts) - 1)
        device = run.engine.device
        take = lambda tensor: tensor if tensor is None else torch.as_tensor(tensor)[index].to(device)  # noqa: E731
        self._x, self._y, self._weights = keras.tree.map_structure(take, parts)
        self._rows = len(index)
        self._training = training

    def check(self, kind: str) -> None:
        """Raise ValueError where parts do not make up the whole; ``predict`` has no loss. Collective."""
        # Uneven parts, as a mean of means is right for even ones.
        first = max(1, self._rows // 3)
        with self._undisturbed():
            y_pred = self._check_rows(self._x, first, losses=kind != "predict")
            if kind == "predict":
                return
            if any(getattr(tensor, "_keras_mask", None) is not None for tensor in keras.tree.flatten(y_pred)):
                self._check_rows(_padded(self._x, first), first, losses=True)
            with self._run.finding_shapes():  # nothing is exchanged
                self._check_metrics(y_pred)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        model, joint = self._model, self._run.joint
        states = [
            variable for variable in model.non_trainable_variables if not isinstance(variable.value, torch.nn.Parameter)
        ]
        variables = [*model.metrics_variables, *states, *seeds_of(model), global_seed(make=True)]
        unchanged = kept({id(variable): variable for variable in variables}.values())
        same = _SameNumbers()  # type: ignore[no-untyped-call]
        with torch.no_grad(), unchanged, undisturbed(self._run.engine.device), joint.without_statistics(), same:
            yield

    def _output(self, x: Any) -> Any:
        return self._model._output_here(x, self._training)

    def _loss(self, x: Any, y: Any, y_pred: Any, weights: Any) -> float:
        values = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": copied(weights), "training": self._training}
        return float(loss_function(self._model)(**values))

    def _check_rows(self, x: Any, first: int, losses: bool) -> Any:
        """Compare outputs, and losses if asked; return the output of all rows."""
        parts = slice(0, self._rows), slice(0, self._rows), slice(0, first), slice(first, self._rows)
        outputs, values = [], []
        for part in parts:
            outputs.append(self._output(_cut(x, part)))
            if losses:  # at once: those of ``add_loss`` are of the last forward
                values.append(self._loss(_cut(x, part), _cut(self._y, part), outputs[-1], _cut(self._weights, part)))
        flat = [keras.tree.flatten(output) for output in outputs]
        if not all(torch.equal(tensor, again) for tensor, again in zip(flat[0], flat[1], strict=True)):
            return outputs[0]  # a model that draws random numbers cannot be compared
        for number, (joint, _, *pieces) in enumerate(zip(*flat, strict=True)):
            self._check_output(number, joint, pieces)
        if not losses:
            return outputs[0]
        shares = [
            self._run.share(output, part.stop - part.start) for output, part in zip(outputs[2:], parts[2:], strict=True)
        ]
        near = max(map(_near, flat[0]), default=0.0) or 1e-3
        self._check_loss(values, shares, near)
        # Labels or weights that the first rows happen not to have.
        half = _cut(self._weights, slice(None), lambda tensor: _halved(tensor, first))
        for value in (None, *_labels(self._model, self._run.engine.device.type == "cpu")):
            y = _cut(self._y, slice(None), partial(_filled, rows=first, value=value))
            arguments_of_parts = [
                (_cut(x, part), _cut(y, part), output, _cut(half, part))
                for part, output in zip(parts, outputs, strict=True)
            ]
            try:
                values = [self._loss(*arguments) for arguments in arguments_of_parts]
            except (IndexError, RuntimeError, ValueError):
                if value is None:
                    raise
                continue  # no label of this loss
            self._check_loss(values, shares, near)
        return outputs[0]

    def _check_output(self, number: int, joint: torch.Tensor, pieces: list[torch.Tensor]) -> None:
        joined = torch.cat(pieces) if len({piece.shape[1:] for piece in pieces if piece.ndim}) == 1 else joint[:0]
        limit = _near(joint) * max(1e-6, float(joint.abs().max())) if joint.numel() else 0.0
        if joint.shape != joined.shape or not torch.allclose(joint, joined, rtol=0, atol=limit, equal_nan=True):
            raise ValueError(
                f"output {number} of {self._rows} rows of the model is not made of those of its parts, so that a layer "
                f"computes over the rows of a batch: {_APART}"
            )

    def _check_loss(self, values: list[float], shares: list[float], near: float) -> None:
        first, again, *parts = values
        mean = sum(value * share for value, share in zip(parts, shares, strict=True)) / max(sum(shares), 1e-9)
        # A loss that draws random numbers cannot be compared, and one that is not finite tells nothing.
        if first != again or not all(map(torch.isfinite, map(torch.tensor, values))):
            return
        if abs(first - mean) > near * max(1e-6, *map(abs, parts)):
            raise ValueError(
                f"the loss of {self._rows} rows is {first:.6g}, and the mean of its values for their parts {mean:.6g}: "
                f"it (or a loss of add_loss, or a regularizer of activations) is not a mean over rows, and {_APART}; a "
                "loss of one value for each row, of which Keras takes the mean, is one. Labels that do not count "
                "(ignore_class) are rows with sample_weight 0"
            )

    def _check_metrics(self, y_pred: Any) -> None:
        model, even = self._model, self._rows // 2 * 2
        if any(tensor.ndim == 0 or len(tensor) != self._rows for tensor in keras.tree.flatten(y_pred)):
            return
        data = self._x, self._y, y_pred, self._weights
        states = []
        for part in (slice(0, even), slice(0, even // 2), slice(even // 2, even)):
            for metric in model.metrics:
                metric.reset_state()
            model.compute_metrics(*_cut(data[:3], part), sample_weight=_cut(data[3], part))
            states.append([metric_variable.value.detach().clone() for metric_variable in model.metrics_variables])
        results = []
        for values in (states[0], [half + other for half, other in zip(*states[1:], strict=True)]):
            for variable, value in zip(model.metrics_variables, values, strict=True):
                variable.assign(value)
            # Now, as a metric may return its variable.
            metric_results = keras.tree.map_structure(
                lambda metric_value: keras.ops.convert_to_tensor(metric_value).double().clone(),
                model.get_metrics_result(),
            )
            results.append(metric_results)
        for metric in model.metrics:  # some may have got their variables here
            metric.reset_state()
        for (name, joint), other in zip(results[0].items(), results[1].values(), strict=True):
            if not torch.allclose(joint, other, rtol=1e-3, atol=1e-5, equal_nan=True):
                raise ValueError(
                    f"the metric {name} of {even} rows is {_shown(joint)}, and {_shown(other)} from the sums of its "
                    "variables for their halves: it is not a function of sums over rows (a maximum, for example), and "
                    "is not known over all ranks; compute it from model.predict, or leave it out of compile"
                )


def _losses(model: Any) -> list[Any]:
    user_losses = keras.tree.flatten(model._compile_loss._user_loss if model._compile_loss else None)
    return [loss for loss in user_losses if loss is not None and not isinstance(loss, str)]


def _labels(model: Any, on_cpu: bool) -> Iterator[int]:
    """Yield labels that may count less than others: those that a loss ignores, and usual ones for a user's own loss."""
    yield from {loss.ignore_class for loss in _losses(model) if getattr(loss, "ignore_class", None) is not None}
    kinds = [getattr(loss, "fn", loss) for loss in _losses(model)]
    kinds = [kind if hasattr(kind, "__name__") else type(kind) for kind in kinds]
    user_defined = any(not str(getattr(kind, "__module__", "")).startswith("keras.src.") for kind in kinds)
    if user_defined or type(model).compute_loss is not keras.Model.compute_loss:
        yield 0
        # An index below 0 stops a GPU, and an error must not leave some ranks in a gather of parameters.
        if on_cpu and not _reads(model):
            yield -1


def loss_function(model: Any) -> Callable[..., Any]:
    """Return the function that computes a distributed model's loss; regularizers read parameters, which it fetches."""
    function: Callable[..., Any] = model.engine._compute_loss if _reads(model) else model._compute_loss
    return function


def copied(tree: Any) -> Any:
    """Return a copy of all tensors: Keras multiplies weights of samples in place by the mask of the output."""
    return keras.tree.map_structure(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, tree)


def _reads(model: Any) -> bool:
    return any(variable.regularizer is not None for variable in model.trainable_variables)


def _cut(tree: Any, part: slice, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """Return some rows of all tensors, changed by a function if there is one."""

    def cut(leaf: Any) -> Any:
        if not (isinstance(leaf, torch.Tensor) and leaf.ndim):
            return leaf
        return leaf[part] if change is None else change(leaf[part])

    return keras.tree.map_structure(cut, tree)


def _filled(tensor: torch.Tensor, rows: int, value: int | None) -> torch.Tensor:
    """Return a copy with ``value`` in the first rows; None: as it is."""
    if value is None or (tensor.dtype in (torch.bool, torch.uint8) and value < 0):
        return tensor
    filled = tensor.clone()
    filled[:rows] = value
    return filled


def _halved(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    halved = tensor.clone()
    halved[:rows] = halved[:rows] / 2 if halved.is_floating_point() else halved[:rows]
    return halved


def _padded(tree: Any, rows: int) -> Any:
    """Return inputs whose first rows are shorter sequences: 0 in the last half of their tokens."""

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        padded = tensor.clone()
        if tensor.ndim > 1:
            padded[:rows, tensor.shape[1] // 2 :] = 0
        return padded

    return _cut(tree, slice(None), pad)


def _near(like: torch.Tensor) -> float:
    return float(torch.finfo(like.dtype).eps ** 0.5) if like.is_floating_point() else 0.0


def _shown(value: torch.Tensor) -> str:
    return f"{float(value):.6g}" if value.ndim == 0 else str(value.tolist())
