"""Stages: parts of a model that run one after the other, on different ranks, through the model's own forward."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from zeromesh.base.buffer_memory import BufferMemory
from zeromesh.base.containers import map_tensors, tensors_of
from zeromesh.base.in_place import version
from zeromesh.parallel.activation.choices import with_choices
from zeromesh.parallel.pipeline.runtime.elsewhere import Parameters, counting, counts
from zeromesh.parallel.pipeline.runtime.outlines import imitate, outline
from zeromesh.parallel.pipeline.schedule.partition import inner

# The forward is left, and entered again, between two of the model's blocks. While a stage runs, gates stand in the
# places of the blocks: those of earlier stages return something of the right shape, the first of the stage's own is
# called with what came from the stage before, and the first of a later stage ends the forward; what that was called
# with is handed to the next stage. What the model makes of its inputs alone, such as masks and positions, every stage
# makes itself: so only what depends on parameters travels.


@dataclass(frozen=True)
class TensorForm:
    """Shape and dtype of a tensor that one stage hands to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    def empty(self, device: torch.device) -> Tensor:
        """Return memory for such a tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Header:
    """Description of a stage's outputs, for the next stage."""

    forms: tuple[TensorForm, ...]  # of the tensors that are sent
    # For each tensor in the arguments of the next block, which of those it is; -1: each stage makes it.
    places: tuple[int, ...]
    returned: Mapping[str, Any]  # list of blocks so far -> outline of what its blocks return

    def fits(self, other: Header, grad: bool) -> bool:
        """Return whether tensors of another header fit this one; ``grad``: also in whether they have gradients."""
        # What blocks return is left out: only the first header of a kind is sent, and used for all.
        mine, theirs = ([(f.shape, f.dtype, f.differentiable and grad) for f in h.forms] for h in (self, other))
        return mine == theirs and self.places == other.places

    def to_json(self) -> str:
        """Return the JSON that ``from_json`` reads."""
        forms = [[*form.shape, str(form.dtype).removeprefix("torch."), form.differentiable] for form in self.forms]
        return json.dumps([forms, self.places, self.returned])

    @classmethod
    def from_json(cls, text: str) -> Header:
        """Return the object that ``to_json`` wrote."""
        forms, places, returned = json.loads(text)
        tensor_forms = [TensorForm(tuple(form[:-2]), getattr(torch, form[-2]), form[-1]) for form in forms]
        return cls(tuple(tensor_forms), tuple(places), returned)


class Handed(NamedTuple):
    """Outputs of a stage: tensors, and their description."""

    tensors: tuple[Tensor, ...]
    header: Header


class Stages:
    """The stages of a model: blocks by name in the order of their calls, and the first block of each stage."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], starts: Sequence[int], first: int = 0) -> None:
        self._model, self._blocks = model, tuple(blocks)
        self._bounds = (*starts, len(blocks))
        self._first, self._watched = first, {first}  # the first stage of this rank
        self._places = [(around, child) for around, _, child in (name.rpartition(".") for name in blocks)]
        self._inner = inner(blocks)
        # Other modules in blocks that are cut through.
        self._parts = [
            (blocks[block], name)
            for block in sorted({*self._inner.values()})
            for name, _ in model.get_submodule(blocks[block]).named_children()
            if f"{blocks[block]}.{name}" not in blocks
        ]
        inside = {id(module) for name in blocks for module in model.get_submodule(name).modules()}
        self._outside = [module for module in model.modules() if id(module) not in inside]

    def buffers(self) -> BufferMemory:
        """Return the buffers of the model before a forward that will run again."""
        return BufferMemory(self._model.modules())

    def choices(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return contexts of a forward and its recomputation, which takes what was chosen, as the experts of tokens."""
        return with_choices(self._model.modules())

    def run(
        self,
        stage: int,
        call: Callable[[], Any],
        received: Handed | None,
        places: Sequence[int] | None = None,
        sends_all: bool = False,
        again: BufferMemory | None = None,
    ) -> Any:
        """Run one stage of a forward; return outputs for the next stage, or, of the last stage, what ``call`` returned.

        Args:
            stage: its number.
            call: calls the model, with the same inputs on all stages.
            received: outputs of the stage before; None for the first.
            places: as in the header of the outputs, if known; else they are found by the tensors' graphs.
            sends_all: hand over all floating-point tensors.
            again: buffers before the first run of this forward, if this is another one.
        """
        bounds = self._bounds[stage], self._bounds[stage + 1]
        before = nullcontext() if again is None else again.restored()
        with before, self._spared(stage, again is not None) as enter:
            run = _Run(self._blocks, *bounds, self._inner, received, places, sends_all, enter)
            with self._gates(run), self._without_graph(run), counting():
                try:
                    if run.is_live:
                        counts()
                    result = call()
                except _Left as left:
                    return left.handed
        if run.stop < len(self._blocks) or not run.is_live:
            expected = self._blocks[run.stop if run.is_live else run.first]
            raise RuntimeError(
                f"the model's forward ended on stage {stage} without a call of {expected}; blocks of a pipeline are "
                "called one after the other in every forward: name them in pipeline.blocks, or set mesh.pipeline to 1"
            )
        return result

    @contextmanager
    def _gates(self, run: _Run) -> Iterator[None]:
        # The modules around blocks are looked up once a run: mostly it is one list, which has all blocks.
        parents = {around: self._model.get_submodule(around) for around in {around for around, _ in self._places}}
        replaced = []
        for index, (around, child) in enumerate((*self._places, *self._parts)):
            inside = parents[around]._modules
            block = inside[child]
            if block is not None:
                replaced.append((inside, child, block))
                inside[child] = _Gate(block, index if index < len(self._places) else f"{around}.{child}", run)
        try:
            yield
        finally:
            for inside, child, block in replaced:
                inside[child] = block

    @contextmanager
    def _without_graph(self, run: _Run) -> Iterator[None]:
        """Make no graph in the model's forward, hooks aside, until the stage's own blocks are called."""
        # That code computes with zeros in the places of other stages' parameters, and nothing is to be differentiated.
        model: Any = self._model
        override, forward = vars(model).get("forward"), model.forward

        @wraps(forward)
        def begin(*args: Any, **kwargs: Any) -> Any:
            with torch.set_grad_enabled(torch.is_grad_enabled() and run.is_live):
                result = forward(*args, **kwargs)
                run.check_gradients()
                return result

        model.forward = begin
        try:
            yield
        finally:
            del model.forward
            if override is not None:
                model.forward = override

    @contextmanager
    def _spared(self, stage: int, again: bool) -> Iterator[Callable[[], None]]:
        """Replace the buffers outside of blocks by copies; yield what restores them once the stage's blocks begin."""
        # The code before a stage's blocks runs once for each stage of a rank. It must change the rank's buffers, such
        # as running statistics, once: in the run of the first stage. A recomputation must change none. The first run of
        # each stage also checks that this code changes no parameters.
        parameters = None
        if stage not in self._watched and not again:
            self._watched.add(stage)
            parameters = Parameters(self._model, self._outside)
        modules = self._outside if again or stage != self._first else []
        buffers = [(module, name, buffer) for module in modules for name, buffer in module._buffers.items()]
        for module, name, buffer in buffers:
            module._buffers[name] = None if buffer is None else buffer.clone()

        def restore() -> None:
            while buffers:
                module, name, buffer = buffers.pop()
                module._buffers[name] = buffer

        def enter() -> None:
            if not again:
                restore()
            if parameters is not None:
                parameters.require_same()

        try:
            yield enter
        finally:
            restore()


class _Left(Exception):
    """Raised where the forward reaches the end of the stage."""

    def __init__(self, handed: Handed) -> None:
        super().__init__("a stage of a pipeline ended: not an error")
        self.handed = handed


class _Gate(nn.Module):
    """Stand-in of a block, to which it leaves everything but its call."""

    def __init__(self, block: nn.Module, index: int | str, run: _Run) -> None:
        super().__init__()
        # A forward may look for what is inside of its model. Past nn.Module, which would make the block a child.
        inside = {name: getattr(block, name) for name in ("training", "_modules", "_parameters", "_buffers")}
        self.__dict__.update(inside, _gated=(block, index, run))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Class of the value, for ``isinstance``."""
        return type(self.__dict__["_gated"][0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_gated"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        block, index, run = self.__dict__["_gated"]
        return run.called(block, index, args, kwargs)

    def arrive_at_gate(self, inputs: Any) -> Any:
        """Return the coming arguments of the block, for code around the calls of several blocks."""
        _, index, run = self.__dict__["_gated"]
        return run.arrived(index, inputs)


@dataclass
class _Run:
    """One forward of one stage."""

    blocks: tuple[str, ...]
    first: int
    stop: int
    inner: Mapping[int, int]  # blocks inside of others, by number -> those others
    received: Handed | None
    known_places: Sequence[int] | None
    sends_all: bool
    restore: Callable[[], None]  # is called when the stage's own blocks begin
    is_live: bool = False
    _latest: int = -1
    _returned: dict[str, Any] = field(default_factory=dict)
    _parts_called: dict[str, int] = field(default_factory=dict)
    _replaced: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _made: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.is_live = self.received is None
        self._grad = torch.is_grad_enabled()
        if self.received is not None:
            self._returned |= self.received.header.returned
            self._made += self.received.tensors

    def called(self, block: nn.Module, index: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle the model's call of a block, or of a module in a block that is cut through, which has no number."""
        if isinstance(index, str):
            return self._part(block, index, args, kwargs)
        if index <= self._latest:
            raise RuntimeError(
                f"{self.blocks[index]} was called after {self.blocks[self._latest]}; blocks of a pipeline are called "
                "one after the other: name them in that order in pipeline.blocks, or set mesh.pipeline to 1"
            )
        self._latest = index
        if index >= self.stop:
            # Only an exception leaves the user's forward from inside of it.
            raise _Left(self._hand(index, args, kwargs))
        if index in self.inner:
            if index == self.first:
                args, kwargs = self._enter(args, kwargs)
            return self._part(block, self.blocks[index], args, kwargs)
        name = self.blocks[index].rpartition(".")[0]
        begins_inside = self.inner.get(self.first) == index and not self.is_live
        if index < self.first and not begins_inside:
            return imitate(self._returned[name], args, kwargs)
        if not begins_inside:
            args, kwargs = self._as_received(args, kwargs) if self.is_live else self._enter(args, kwargs)
        arguments = [(tensor, version(tensor)) for tensor in tensors_of((args, kwargs))]
        output = block(*args, **kwargs)
        # A later stage can make these by no other way; what was only passed on, it can.
        self._made += [tensor for tensor in tensors_of(output) if not _is_passed_on(tensor, arguments)]
        self._returned[name] = outline(output)
        return output

    def _part(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle the call of a module in a block that is cut through: another stage's is not computed."""
        self._parts_called[path] = count = self._parts_called.get(path, -1) + 1
        if not self.is_live:
            return imitate(self._returned[f"{path} {count}"], args, kwargs, may_write=True)
        output = module(*args, **kwargs)
        self._made += tensors_of(output)
        self._returned[f"{path} {count}"] = outline(output)
        return output

    def arrived(self, index: int, inputs: Any) -> Any:
        """Return the inputs with which the model is going to call a block: the received ones for the first."""
        if index == self.first and not self.is_live:
            (inputs,), _ = self._enter((inputs,), {})
        return inputs

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin the stage's own blocks; return the arguments with the received tensors in their places."""
        assert self.received is not None
        # From here on the forward is the stage's own, and has a graph.
        torch.set_grad_enabled(self._grad)
        self.is_live = True
        self.restore()
        counts()
        local, places = tensors_of((args, kwargs)), self.received.header.places
        if len(local) != len(places):
            raise RuntimeError(
                f"{self.blocks[self.first]} is called with {len(local)} tensors on this stage and with {len(places)} "
                "on the one before; all stages must be given the same inputs"
            )
        values = [
            tensor if place < 0 else self.received.tensors[place] for tensor, place in zip(local, places, strict=True)
        ]
        self._replaced = [pair for pair in zip(local, values, strict=True) if pair[0] is not pair[1]]
        for number, (tensor, value) in enumerate(self._replaced):
            # Later uses of a tensor are replaced by its identity, which then would be ambiguous.
            if any(tensor is other and value is not received for other, received in self._replaced[:number]):
                raise RuntimeError(
                    f"{self.blocks[self.first]} is given one tensor twice on this stage, and two on the one before; "
                    "give it copies, or cut elsewhere with pipeline.partition"
                )
        if self.first in self.inner:
            return self._exchanged(args, kwargs)
        following = iter(values)
        return map_tensors((args, kwargs), lambda _: next(following))

    def _exchanged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the tensors themselves have the received values: the block's code has them in its variables, too."""
        for tensor, value in {id(pair[0]): pair for pair in self._replaced}.values():
            # A view, as the exchange would take the received tensor's place in the graph from it.
            alias = value.view_as(value)
            try:
                if type(tensor) is not Tensor:
                    raise RuntimeError(f"it is a {type(tensor).__name__}")
                swap_tensors(tensor, alias)
            except RuntimeError as error:
                raise RuntimeError(
                    f"no stage can begin at {self.blocks[self.first]}, as something else refers to what it is called "
                    f'with ({error}); set pipeline.partition to "uniform" or a list, which cut between blocks only'
                ) from error
        self._replaced = []
        return args, kwargs

    def _as_received(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with received tensors for those that all blocks share, as an encoder's outputs."""
        if not self._replaced:
            return args, kwargs
        pick = lambda x: next((value for tensor, value in self._replaced if tensor is x), x)  # noqa: E731
        return map_tensors((args, kwargs), pick)

    def _hand(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Handed:
        if not self.is_live:
            raise RuntimeError(
                f"{self.blocks[index]} was called, and no block of this stage, {self.blocks[self.first]} to "
                f"{self.blocks[self.stop - 1]}; blocks of a pipeline are called in every forward"
            )
        tensors = tensors_of(self._as_received(args, kwargs))
        sent: list[Tensor] = []
        places = []
        if not any(tensor.requires_grad for tensor in tensors):
            self.check_gradients()  # a context around the call may be the reason
        if self.known_places is not None and len(self.known_places) != len(tensors):
            raise RuntimeError(
                f"{self.blocks[index]} was called with {len(tensors)} tensors, and with {len(self.known_places)} for "
                "inputs of these shapes before; what passes between stages may depend on the shapes of the inputs only"
            )
        for number, tensor in enumerate(tensors):
            if not self._depends(tensor) if self.known_places is None else self.known_places[number] < 0:
                places.append(-1)
                continue
            place = next((number for number, other in enumerate(sent) if other is tensor), len(sent))
            places.append(place)
            sent += [tensor] if place == len(sent) else []
        forms = tuple(TensorForm(tuple(x.shape), x.dtype, x.requires_grad) for x in sent)
        return Handed(tuple(sent), Header(forms, tuple(places), dict(self._returned)))

    def check_gradients(self) -> None:
        """Raise RuntimeError if a context entered before the stage's blocks has switched gradients off."""
        if self.received is not None and self.is_live and self._grad and not torch.is_grad_enabled():
            raise RuntimeError(
                f"the model's forward calls {self.blocks[self.first]} inside of torch.set_grad_enabled, enable_grad or "
                "no_grad, in which no stage can begin: freeze blocks by requires_grad_(False) in its place, choose "
                "another place with pipeline.partition, or set mesh.pipeline to 1"
            )

    def _depends(self, tensor: Tensor) -> bool:
        """Return whether the next stage cannot make it of the inputs itself."""
        # With frozen parameters, requires_grad does not show all that depends on parameters.
        maybe = self.sends_all and tensor.is_floating_point()
        return maybe or tensor.requires_grad or any(tensor is other for other in self._made)


def _is_passed_on(tensor: Tensor, arguments: Sequence[tuple[Tensor, int]]) -> bool:
    """Return whether a block returned a given tensor unchanged, in a way that ``imitate`` can repeat."""
    # imitate takes the first argument of a shape and dtype, so there must be one only; and a write would be missed.
    form = tensor.shape, tensor.dtype
    alike = {id(other): before for other, before in arguments if (other.shape, other.dtype) == form}
    return alike == {id(tensor): version(tensor)}
