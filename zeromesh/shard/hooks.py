"""Hooks of the engine: forwards of units, gradients of their outputs, saved tensors, gradients of parameters.

Tensor hooks on outputs are the only hooks on the graph. Backward identity nodes and full backward hooks would break
under in-place operations. That a gradient reaches an output of a unit means that every node created after it has run.

A graph refers to the engine weakly: the garbage collector does not see through graphs, and a model may keep one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet, ref

import torch
from torch import nn

from zeromesh.model.containers import map_tensors
from zeromesh.shard.grads import own_class
from zeromesh.shard.order import Pass
from zeromesh.shard.unit import Unit

CALL = "zeromesh.call"
"""Key in the metadata of nodes that made a unit's outputs, for the call."""


class Call:
    """One forward of a unit whose backward is to come. It lives as long as the graph that it belongs to.

    Attributes:
        unit: whose forward it was.
        version: of the unit's parameters then.
        forward: the pass of the model that it is part of.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = ref(unit)
        self.version = unit.version
        self.forward = Pass()
        self._task = -1

    @property
    def unit(self) -> Unit:
        """See the class."""
        unit = self._unit()
        assert unit is not None, "who asks is part of the engine that has the unit"
        return unit

    def belong_to(self, forward: Pass) -> None:
        """Set the pass of the model that the call is part of."""
        self.forward = forward

    def is_reached(self) -> bool:
        """Return whether this is the first gradient of an output of the call in the current backward."""
        before, self._task = self._task, torch._C._current_graph_task_id()
        return before != self._task


class ForwardListener(Protocol):
    """Receiver of forwards."""

    def forward_begins(self, unit: Unit) -> None:
        """The unit's forward is about to run."""

    def forward_ends(self, unit: Unit, call: Call | None) -> None:
        """The forward has run, or raised; ``call`` is it, if a gradient of its outputs may come."""


class BackwardListener(Protocol):
    """Receiver of backwards."""

    @property
    def calls(self) -> Mapping[Unit, WeakSet[Call]]:
        """Calls whose backward has not begun, by unit."""

    def backward_begins(self, call: Call) -> None:
        """The first gradient of an output of this call arrived."""


def computing_backward() -> bool:
    """Return whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested tuples, lists, mappings and dataclasses."""
    return _tensors_in(value, set())


def _tensors_in(value: Any, around: set[int]) -> Iterator[torch.Tensor]:
    """``around``: the containers that this one is in, as one may hold itself."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, tuple | list):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = (getattr(value, field.name, None) for field in dataclasses.fields(value))
    if items and id(value) not in around:
        for item in items:
            yield from _tensors_in(item, around | {id(value)})


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


def listen(unit: Unit, forwards: ForwardListener, backwards: BackwardListener) -> list[Any]:
    """Register the hooks of one unit."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        forwards.forward_begins(unit)

    members = {id(parameter) for parameter in unit.members}

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        call, outputs, replaced = None, list(tensors_in(output)), None
        if torch.is_grad_enabled():
            if unit.sharded and any(id(tensor) in members for tensor in outputs):
                # A view keeps the memory of the parameter, which leaves with the unit.
                replaced = map_tensors(output, lambda one: one.view_as(one) if id(one) in members else one)
                outputs = list(tensors_in(replaced))
            inputs = {id(tensor) for tensor in tensors_in((args, kwargs))}
            # A hook on a leaf would stay for ever, and below a leaf there is nothing of the unit's backward.
            new = [one for one in outputs if one.requires_grad and not one.is_leaf and id(one) not in inputs]
            if new:
                call = Call(unit)
                backwards.calls[unit].add(call)
                hook = _output_hook(call, backwards)
                for tensor in new:
                    when_computed = getattr(tensor, "when_computed", None)
                    if when_computed is None:
                        _listen_to(hook, call, tensor)
                    else:  # it is computed later, if at all, and is an output when it is there
                        when_computed(partial(_listen_to, hook, call))
        forwards.forward_ends(unit, call)
        return replaced

    return [
        # First, so that hooks of the user's see parameters; and always, so that an exception leaves no unit pinned.
        unit.module.register_forward_pre_hook(Hook(before), with_kwargs=True, prepend=True),
        unit.module.register_forward_hook(Hook(after), with_kwargs=True, always_call=True),
    ]


def _listen_to(hook: Any, call: Call, output: torch.Tensor) -> None:
    output.register_hook(hook)
    if output.grad_fn is not None:
        output.grad_fn.metadata[CALL] = call  # type: ignore[index]


def storage_of(tensor: torch.Tensor) -> int | None:
    """The address of the storage that a tensor is a view of; None for one that has none of its own."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return None  # inside torch.func


def passes_of(roots: Sequence[torch.Tensor], wanted: Collection[Pass]) -> set[Pass]:
    """Those of the passes that some tensors depend on. The search ends when all are found."""
    found: set[Pass] = set()
    seen: set[Any] = set()
    stack: list[Any] = [root.grad_fn for root in roots]
    while stack and len(found) < len(wanted):
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        call = node.metadata.get(CALL)
        if call is not None and call.forward in wanted:
            found.add(call.forward)
        stack.extend(following for following, _ in node.next_functions)
    return found


def _output_hook(call: Call, listener: BackwardListener) -> Callable[[torch.Tensor], None]:
    weak = ref(listener)  # the graph holds the hook, and must not hold the engine

    def arrived(gradient: torch.Tensor) -> None:
        alive = weak()
        if alive is not None and call.is_reached():
            alive.calls[call.unit].discard(call)
            alive.backward_begins(call)

    return arrived


class _View(NamedTuple):
    """A view of a unit's parameters, as long as it is not needed: where it lies in the unit's storage."""

    unit: ref[Unit]
    update: int
    member: int
    version: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Other(NamedTuple):
    """Any other tensor; its version is -1 where there is none."""

    version: int
    value: torch.Tensor


class SavedTensors:
    """Saves views of units' parameters as such, and has the unit fetched when autograd wants them back.

    Other tensors are passed through, with the check that nobody changed them in place, which autograd leaves to the
    hooks where there are any.

    Args:
        unit_of: the unit that a storage belongs to, by the storage's address; it may change.
        need: has a unit in memory when it returns.
    """

    def __init__(self, unit_of: Mapping[int, Unit], need: Callable[[Unit], None]) -> None:
        self._unit_of = unit_of
        self._need = need
        self._context: Any = None

    @property
    def entered(self) -> bool:
        """True if tensors are saved this way now."""
        return self._context is not None

    def enter(self) -> None:
        """Save tensors this way from here on, unless somebody else's hooks have them, or there can be no hooks.

        Then the graph may hold views, which keep their memory. Inside torch.func there can be no hooks.
        """
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
        storage = storage_of(tensor)
        if storage is None:
            return _Other(-1, tensor.detach())
        unit = self._unit_of.get(storage)
        if unit is None or not _is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
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
        return empty.set_(unit.storage, view.offset, view.shape, view.stride)


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
