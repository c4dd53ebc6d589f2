"""Hooks on modules, and hooks for the tensors that autograd saves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from zeromesh.shard.gradients.grads import own_class
from zeromesh.shard.parameters.unit import Unit
from zeromesh.shard.parameters.use_order import Pass

CALL = "zeromesh.call"  # key in the metadata of nodes that made a unit's outputs, for the call


class Call:
    """One forward of a unit whose backward is to come. It lives as long as the graph that it belongs to."""

    def __init__(self, unit: Unit, forward: Pass) -> None:
        # Weakly: the garbage collector does not see through graphs, and a model may keep one.
        self._unit = ref(unit)
        self.version = unit.version
        self.forward = forward
        self.again = computing_backward()  # a checkpoint computes again
        self._task = -1  # of autograd: the backward whose first gradient of an output has arrived

    @property
    def unit(self) -> Unit:
        """The unit whose forward it was."""
        unit = self._unit()
        assert unit is not None, "who asks is part of the engine that has the unit"
        return unit

    def is_reached(self) -> bool:
        """Return whether this is the first gradient of an output of the call in the current backward."""
        before, self._task = self._task, torch._C._current_graph_task_id()
        return before != self._task


def computing_backward() -> bool:
    """Return whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


class Hook:
    """A hook on a unit's module. Copies of the module, those in a file too, are ordinary modules and do not have it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Signature of torch's hooks."""
        if torch.compiler.is_compiling():  # whoever compiles the module: messages between ranks stay outside
            return torch.compiler.disable(self._function)(*args)
        return self._function(*args)

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    """Placeholder of a hook in a copy of the module."""


def passes_of(roots: Sequence[torch.Tensor], wanted: Collection[Pass]) -> set[Pass]:
    """Those of the passes that some tensors depend on. The search ends when all are found."""
    passes: set[Pass] = set()
    seen: set[Any] = set()
    stack: list[Any] = [root.grad_fn for root in roots]
    while stack and len(passes) < len(wanted):
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        call = node.metadata.get(CALL)
        if call is not None and call.forward in wanted:
            passes.add(call.forward)
        stack.extend(following for following, _ in node.next_functions)
    return passes


class _View(NamedTuple):
    """A view of a unit's parameters, as long as it is not needed: where it lies in the unit's storage."""

    unit: ref[Unit]
    update: int  # updates of the unit before it was saved
    member: int
    version: int  # of the member, which tells of writes in place
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Other(NamedTuple):
    """Any other tensor; its version is -1 where there is none."""

    version: int
    value: torch.Tensor


class SavedTensors:
    """Saves views of units' parameters as such, and has the unit fetched when autograd wants them back."""

    def __init__(
        self, unit_of: Mapping[int, Unit], need: Callable[[Unit], None], stays: Callable[[Unit], bool]
    ) -> None:
        self._unit_of = unit_of  # the unit that a storage belongs to, by the storage's address; it may change
        self._stays = stays  # says whether views of a unit are saved as they are
        self._need = need  # has a unit in memory when it returns
        self._context: Any = None

    @property
    def entered(self) -> bool:
        """True if tensors are saved this way now."""
        return self._context is not None

    def enter(self) -> None:
        """Save tensors this way from here on, unless somebody else's hooks have them, or there can be no hooks."""
        autograd: Any = torch._C._autograd
        if not autograd._saved_tensors_hooks_is_enabled() or autograd._top_saved_tensors_default_hooks(True):
            return
        me = ref(self)

        def pack(tensor: torch.Tensor) -> _View | _Other:
            alive = me()
            assert alive is not None, "the model computes"
            return alive._pack(tensor)

        def unpack(packed: _View | _Other) -> torch.Tensor:
            if isinstance(packed, _Other):
                if packed.version >= 0:
                    _check_in_place(packed.version, packed.value)
                return packed.value
            alive, unit = me(), packed.unit()
            if alive is None or unit is None:
                raise RuntimeError("the engine of this graph is gone, and with it the parameters that the graph needs")
            return alive._unpack(packed, unit)

        # What is packed is no view but a description of one: a view would keep the storage, and so keep its memory.
        self._context = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        self._context.__enter__()

    def leave(self) -> None:
        """Save tensors this way no longer."""
        self._context.__exit__(None, None, None)
        self._context = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save tensors this way in this context, as far as ``enter`` can."""
        if self.entered:
            yield
            return
        self.enter()
        try:
            yield
        finally:
            if self.entered:
                self.leave()

    def _pack(self, tensor: torch.Tensor) -> _View | _Other:
        if tensor.layout is not torch.strided:
            return _Other(-1, tensor.detach())
        try:
            unit = self._unit_of.get(int(tensor.untyped_storage()._cdata))
        except NotImplementedError:  # inside torch.func
            return _Other(-1, tensor.detach())
        if unit is None or self._stays(unit) or not _is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
            return _Other(tensor._version, tensor.detach())  # a view that is kept as it is keeps its memory
        offset = int(tensor.storage_offset())
        member = unit.member_at(offset * tensor.itemsize)
        version = unit.members[member]._version
        return _View(ref(unit), unit.version, member, version, tensor.dtype, offset, tensor.shape, tensor.stride())

    def _unpack(self, view: _View, unit: Unit) -> torch.Tensor:
        check_version(unit, view.update)
        with torch._C.DisableTorchFunctionSubclass():
            _check_in_place(view.version, unit.members[view.member])
        self._need(unit)
        empty = torch.empty(0, dtype=view.dtype, device=unit.storage.device)
        return empty.set_(unit.storage if unit.lent is None else unit.lent, view.offset, view.shape, view.stride)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a view of the same memory is all there is to the tensor."""
    return own_class(type(tensor)) in (torch.Tensor, nn.Parameter)


def _check_in_place(saved: int, tensor: torch.Tensor) -> None:
    if tensor._version != saved:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {saved}"
        )


def check_version(unit: Unit, version: int) -> None:
    """Raise RuntimeError if the unit's parameters were updated since its forward."""
    if unit.version != version:
        raise RuntimeError(
            f"the parameters of {unit} were updated between a forward and its backward (update {version}, now "
            f"{unit.version}); run the backward before step, or the forward again"
        )
