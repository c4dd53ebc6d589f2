"""The mode in which models run without memory: operators give shapes and dtypes, and the values of small tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zeromesh.base.containers import map_tensors
from zeromesh.base.dry.meta_values import META, KnownValues, on_meta

_aten = torch.ops.aten


class OperatorListener:
    """Listener of a run, which notes what it needs of the operators."""

    def on_read(self, func: Any, tensors: Sequence[Tensor]) -> None:
        """See what an operator is about to read; an error that is raised here ends the run."""

    def on_operator(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """See an operator that was computed, and its result."""


class DryRun(TorchDispatchMode):
    """Context in which operators compute on the meta device.

    Args:
        listener: is told of each operator.
        guess: stands for every value that is asked for and not known, and all tensors are taken to the meta device;
            None: tensors stay where the code makes them, and an operator that lacks a value raises torch's error.
        limit: number of operators; one more raises RuntimeError.
    """

    def __init__(self, listener: OperatorListener, guess: bool | None = None, limit: float = float("inf")) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listener, self._moves, self._limit = listener, guess is not None, limit
        self.values = KnownValues(guess)  # of the tensors of this run
        self.operators = 0  # number of operators called
        # By operator and arguments, the shapes, strides and dtypes of the results; None where those do not suffice.
        self._recipes: dict[Any, tuple[Any, ...] | None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute an operator; torch calls it for every one."""
        kwargs = kwargs or {}
        self.operators += 1
        if self.operators > self._limit:
            raise RuntimeError(f"it takes more than {self._limit} operators")
        read = list(tensors_in((*args, *kwargs.values())))
        self._listener.on_read(func, read)
        if self._moves:
            args, kwargs = _moved(func, read, args, kwargs)
        is_done, result, args = self.values.before(func, args, kwargs)
        if not is_done:
            result = self._compute(func, args, kwargs)
            if torch._C._current_graph_task_id() == -1:  # nothing branches in a backward
                self.values.after(func, args, kwargs, result)
        self._listener.on_operator(func, args, kwargs, result)
        return result

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return an operator's result, or make it as it was made of tensors of the same shapes before."""
        # Most of torch's operators find their result's shape in Python, in a hundred times what a new tensor takes; and
        # the blocks of a model run the same ones.
        if func.is_view:
            return func(*args, **kwargs)
        try:
            key = (func, _form(args), _form(tuple(kwargs.items())))
            recipe = self._recipes.get(key, ())
        except TypeError:  # an argument that cannot be compared
            return func(*args, **kwargs)
        if recipe:
            if recipe[0] is None:
                return args[0]
            results = [torch.empty_strided(*form[:2], dtype=form[2], device=META) for form in recipe]
            return results[0] if recipe[0][3] else tuple(results)
        result = (_grouped_product if func is _aten._grouped_mm.default else func)(*args, **kwargs)
        if recipe is not None:
            self._recipes[key] = _recipe(func, args, kwargs, result)
        return result


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments of an operator, which are nested in lists and tuples only."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)


def _moved(
    func: Any, read: Sequence[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return arguments on the meta device, but for numbers, whose values may be asked for."""
    if not all(x.is_meta or x.ndim == 0 for x in read):
        move = lambda x: x if x.is_meta or x.ndim == 0 else on_meta(x, valued=True)  # noqa: E731
        args, kwargs = map_tensors((args, dict(kwargs)), move)
    if "device" in kwargs or (not read and any(argument.name == "device" for argument in func._schema.arguments)):
        kwargs = {**kwargs, "device": META}
    return args, kwargs


def _form(value: Any) -> Any:
    """Return what decides, of arguments of an operator, the form of its results."""
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, value.is_meta)
    return tuple(_form(item) for item in value) if isinstance(value, tuple | list) else (type(value), value)


def _grouped_product(a: Tensor, b: Tensor, offsets: Any = None, *rest: Any, **more: Any) -> Tensor:
    """Return a product of experts, of which torch knows the shape for some dtypes only."""
    if a.ndim == b.ndim == 2:
        return a.new_empty((len(offsets), a.shape[0], b.shape[1]))
    return a.new_empty((*a.shape[int(b.ndim == 2 and a.ndim == 3) : -1], b.shape[-1]))


def _recipe(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> tuple[Any, ...] | None:
    """Return how to make an operator's results again; None if they are no new tensors with storages of their own."""
    if func._schema.is_mutable:
        # An operator such as unsqueeze_ gives its argument another form each time.
        is_as_before = bool(args) and result is args[0] and torch.Tag.inplace_view not in func.tags
        return (None,) if is_as_before else None
    results = result if isinstance(result, tuple) else (result,)
    if not results or not all(isinstance(tensor, Tensor) and tensor.is_meta for tensor in results):
        return None
    taken = {tensor.untyped_storage()._cdata for tensor in tensors_in((*args, *kwargs.values())) if tensor.is_meta}
    storages = {tensor.untyped_storage()._cdata for tensor in results}
    recipe = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor is result) for tensor in results)
    again = [torch.empty_strided(*form[:2], dtype=form[2], device=META).untyped_storage().nbytes() for form in recipe]
    same = again == [tensor.untyped_storage().nbytes() for tensor in results]
    return recipe if same and len(storages) == len(results) and not storages & taken else None
