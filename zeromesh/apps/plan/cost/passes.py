"""One forward and backward of a model on the meta device, and what they say of each of its units."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves

from zeromesh.apps.plan.cost.casts import autocast_of
from zeromesh.apps.plan.cost.cost import (
    ALL_TRAINED,
    NONE,
    Divided,
    Frozen,
    KernelWork,
    OperatorCall,
    Recompute,
    TableCost,
    WorkKind,
)
from zeromesh.apps.plan.cost.live import Cuts, StorageRecorder, TensorShare, TracedProduct, TracedStorage, divide
from zeromesh.apps.plan.cost.meta_kernels import kernels_of
from zeromesh.apps.plan.cost.packed import Packing, frozen_of, packed_weights
from zeromesh.apps.plan.cost.traced_tables import TracedTables
from zeromesh.base.dry.dry_run import DryRun
from zeromesh.base.dry.meta_values import literals
from zeromesh.base.dry.model_copy import dry, imitated
from zeromesh.base.dry.model_inputs import inputs_without_memory
from zeromesh.base.operation_counts import losses_of
from zeromesh.parallel.activation.tiles import find_tiled, tile_modules
from zeromesh.parallel.expert.forms import find_experts
from zeromesh.parallel.head.logits import Logits
from zeromesh.parallel.tensor.derive import heads_over_vocabulary
from zeromesh.parallel.tensor.split_model import chunk_losses
from zeromesh.shard.find_units import CONTAINERS, assign, find_units

Inputs = Mapping[str, Any]
Loss = Callable[[Any], Tensor]

PHASES = ("forward", "input", "weight", "again")
# Tensor ranks with which peaks are compared: those of a node. Between them, the bound that holds for both holds, too.
MOST_TENSOR = 8


class TraceError(RuntimeError):
    """A model whose forward or backward does not run on the meta device; the text says where it stops."""


class TokenTiles(NamedTuple):
    """Tiles over tokens, in which the engine computes modules and the loss; see the settings ``tiling``."""

    tokens: int | Literal["width"] | None = None  # of a tile; None: modules are computed at once
    modules: tuple[str, ...] = ()  # class names or patterns of names; none: all that are found
    loss: bool = False

    def cut(self, model: nn.Module, original: nn.Module) -> None:
        """Have a copy of a model compute in tiles, in place; raise ValueError as ``find_tiled``."""
        if self.tokens is not None:
            named = find_units(original, self.modules) if self.modules else None
            tile_modules(model, find_tiled(original, named), self.tokens)
        if self.loss:
            chunk_losses(model, heads_over_vocabulary(original), nullcontext)


WHOLE_SEQUENCES = TokenTiles()


@dataclass(frozen=True)
class TraceOptions:
    """Choices that decide what a model saves."""

    dtype: torch.dtype | None = None  # of parameters and floating-point inputs; None leaves them as they are
    autocast: torch.dtype | None = None  # of ``torch.autocast`` around the forward
    kernels: str = "cuda"  # device whose kernels are used: "cuda" or "cpu"
    packing: Packing | None = None  # of the frozen weights of linear layers
    tables: tuple[str, ...] | None = None  # patterns of names of tables; None: embeddings with sparse=True
    tiles: TokenTiles = WHOLE_SEQUENCES


@dataclass
class TracedUnit:
    """One unit's amounts, before batches are combined."""

    name: str
    block: bool
    parameters: Divided = NONE
    resident: Divided = NONE
    frozen: Frozen = ALL_TRAINED
    saved: dict[Recompute, Divided] = field(default_factory=dict)
    output: Divided = NONE
    joins: float = 0.0
    works: dict[str, list[KernelWork]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    # Bytes at every moment, beyond what this unit and those before it save.
    forward: list[Divided] = field(default_factory=list)
    backward: list[Divided] = field(default_factory=list)
    gradients: list[Divided] = field(default_factory=list)  # of parameters, at the moments of ``backward``
    begun: int | None = None  # number of those moments before the first gradient was accumulated
    tensors: int = 0  # parameters with gradients that are not the root's
    calls: list[OperatorCall] = field(default_factory=list)  # of a block, whose results may be kept
    tables: list[TableCost] = field(default_factory=list)
    expert_elements: float = 0.0  # of those with gradients
    expert_frozen: Frozen = ALL_TRAINED  # of those without
    experts: int = 0  # number of experts

    def add_experts(self, count: int, elements: int, frozen: Frozen = ALL_TRAINED) -> None:
        """Count a parameter of experts, of which the layer has ``count``."""
        self.experts = count
        self.expert_elements += elements
        self.expert_frozen = self.expert_frozen.plus(frozen)

    def add_parameters(self, amount: Divided, root: bool) -> None:
        """Add elements with gradients; those of the root stay in memory."""
        self.parameters = self.parameters.plus(amount)
        self.resident = self.resident.plus(amount) if root else self.resident
        self.tensors += not root

    def add_frozen(self, frozen: Frozen) -> None:
        """Add elements without gradients; each product reads quantized ones, and writes them in full."""
        self.frozen = self.frozen.plus(frozen)
        if frozen.packed:
            moved = frozen.sharded.plus(Divided(whole=frozen.whole + frozen.packed))
            work = KernelWork(WorkKind.ELEMENTWISE, Divided(whole=frozen.elements), moved)
            self.works["forward"].append(work)
            self.works["input"].append(work)

    def accumulate(self) -> None:
        """Note that a gradient was accumulated after the moments of the backward so far."""
        self.begun = len(self.backward) if self.begun is None else self.begun

    def add_joins(self, size: float) -> None:
        """Add bytes that tensor ranks sum."""
        self.joins += size


class TracedModel(NamedTuple):
    """A model's units in the order of its forward."""

    units: list[TracedUnit]
    balanced: bool  # experts were taken to get equal numbers of tokens


def trace(model: nn.Module, inputs: Inputs, options: TraceOptions, loss: Loss | None, cuts: Cuts) -> TracedModel:
    """Return what a forward and a backward say of a model's units; the model stays as it is.

    Args:
        model: its parameters may be on any device, meta included.
        inputs: keyword arguments of the forward; only shapes and dtypes of tensors matter.
        options: dtypes and kernels.
        loss: computes the loss from the output; None: it is the output's ``loss``, or all of its tensors get gradients.
        cuts: dims in which parameters are cut over tensor ranks, by name.

    Raises:
        TraceError: an operator needs values, or fails.
    """
    run = _Trace(model, options, loss, cuts)
    try:
        with dry(model):
            return TracedModel(run.run(inputs), run.dry_run.values.balanced)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(run.where(error)) from error


class _Trace:
    def __init__(self, original: nn.Module, options: TraceOptions, loss: Loss | None, cuts: Cuts) -> None:
        try:
            model = imitated(original, options.dtype, hooked=True)[0]
        except Exception as error:  # a model may have what cannot be copied
            raise TraceError(f"{type(original).__name__} cannot be copied: {error}") from error
        options.tiles.cut(model, original)
        self.original, self.model, self.options, self.loss = original, model.train(), options, loss
        self.tables = TracedTables(model, options.tables)
        self.experts = experts_of(original)
        self.names = [name for name, _ in find_units(model) if name not in self.tables.modules]
        modules = dict(model.named_modules())
        self.modules = [modules[name] for name in self.names]
        self.blocks = [is_block(name, modules) for name in self.names]
        self.owned = assign(model, self.names)
        self.state = dict((*model.named_parameters(), *model.named_buffers()))
        self.cuts = {id(model.get_parameter(name)): cut for name, cut in cuts.items()}
        originals = {id(tensor) for tensor in (*original.parameters(), *original.buffers())}
        originals -= {id(tensor) for tensor in self.state.values()}
        tensors = list(model.parameters()), list(model.buffers())
        self.recorder = StorageRecorder(self.cuts, *tensors, originals, options.tiles.loss)
        self.dry_run = DryRun(self.recorder)
        self.slots = [-1]  # by number of the recorder's slot, the unit; -1 between units
        self.places: list[int] = []  # by slot, the place of a unit in the cost
        self.entered: dict[int, list[TracedStorage]] = {}  # by unit, the storages of arguments of its calls
        self.handed: dict[int, Divided] = {}  # by unit, what it returns
        self.order: list[int] = []  # units by their first call

    def run(self, inputs: Inputs) -> list[TracedUnit]:
        for unit, module in enumerate(self.modules):
            module.register_forward_pre_hook(self._enter(unit), with_kwargs=True, prepend=True)
            module.register_forward_hook(self._leave(unit), always_call=True)
        values = inputs_without_memory(dict(inputs), self.options.dtype)
        input_storages = [self.recorder.find(tensor) for tensor in tree_leaves(values) if isinstance(tensor, Tensor)]
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.recorder.accumulated)
        self.tables.replace_lookups(lambda: self.recorder.slot)
        with _collecting(), kernels_of(self.options.kernels), literals(), torch.enable_grad(), torch.device("meta"):
            return self._units(*self._run(values, input_storages))

    def _run(self, values: Inputs, input_storages: Sequence[TracedStorage]) -> tuple[list[TracedStorage], int]:
        """Run both passes; return the storages that live between them, and the number of events until then."""
        recorder, autocast = self.recorder, self.options.autocast
        saving = torch.autograd.graph.saved_tensors_hooks(recorder.saves, lambda tensor: tensor)
        with ExitStack() as stack, self.dry_run, saving:
            with autocast_of(self.options.kernels, autocast):
                output = self.model(**values)
                # A loss may read parameters of the user's model itself, and again where the backward recomputes it.
                stack.enter_context(_reparametrize_module(self.original, self.state))
                ends = list(losses_of(output)) if self.loss is None else [self.loss(output)]
            del output
            ends = [tensor for tensor in ends if tensor.requires_grad]
            if not ends:
                raise TraceError("no output of the model depends on a trained parameter")
            alive = list(recorder.alive())
            last = {id(recorder.find(tensor)) for tensor in ends} | {id(stored) for stored in input_storages}
            for stored in alive:
                if stored.saver < 0 and id(stored) not in last:
                    stored.keep(stored.slot)  # by other means than autograd's, as an attribute of a context
            count = len(recorder.events)
            grads = [None if tensor.numel() == 1 else torch.empty_like(tensor) for tensor in ends]
            torch.autograd.backward(ends, grads)
            del ends, grads
        return [stored for stored in alive if stored.saver >= 0], count

    def where(self, error: Exception) -> str:
        """Return the place of an error, as a clause."""
        unit = self.slots[self.recorder.slot]
        name = type(self.model).__name__ if unit < 0 else self.names[unit]
        text = (str(error) or type(error).__name__).strip().splitlines()[0]
        return f"{name} does not run on the meta device, where tensors have no values: {text}"

    # Hooks of units.

    def _enter(self, unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # a recomputation of the model's own
            recorder, block = self.recorder, self.blocks[unit]
            if unit not in self.order:
                self.order.append(unit)
            entered = self.entered.setdefault(unit, [])
            for tensor in _stored((args, kwargs)):
                stored = recorder.find(tensor)
                entered.append(stored)
                if block and tensor.requires_grad:
                    stored.change(TensorShare.TOKENS, only=TensorShare.WHOLE)
            self._begin(unit)

        return hook

    def _leave(self, unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return
            handed = NONE
            for tensor in _stored(output):
                if tensor.requires_grad:
                    handed = handed.plus(divide(tensor.nbytes, self.recorder.find(tensor).share))
            self.handed[unit] = handed
            self._begin(-1)

        return hook

    def _begin(self, unit: int) -> None:
        self.slots.append(unit)
        self.recorder.begin(len(self.slots) - 1, unit >= 0 and self.blocks[unit])

    # Amounts of units.

    def _units(self, saved: Sequence[TracedStorage], forwards: int) -> list[TracedUnit]:
        units = self._ordered()
        for slot, size in self.recorder.sums.items():
            units[self.places[slot]].add_joins(size)
        for work in self.recorder.works:
            units[self.places[work.slot]].works[work.phase].append(work.kernel)
        self._add_parameters(units)
        boundary = self._add_saved(units, saved)
        beyond = self._add_peaks(units, forwards)
        self._add_calls(units, boundary, {id(stored): self.places[stored.saver] for stored in saved}, beyond)
        return units

    def _ordered(self) -> list[TracedUnit]:
        """Return the units in order, and give each slot one; the root's belong to units beside them where they can."""
        for unit in range(len(self.names)):
            if unit not in self.order:  # never called: after the one that is registered before it
                self.order.insert(self.order.index(unit - 1) + 1 if unit - 1 in self.order else 0, unit)
        units = [TracedUnit(self.names[n], self.blocks[n], output=self.handed.get(n, NONE)) for n in self.order]
        place = {unit: index for index, unit in enumerate(self.order)}
        first = next((unit for unit in self.slots if unit >= 0), -1)
        last = next((unit for unit in reversed(self.slots) if unit >= 0), -1)
        name = type(self.model).__name__
        shift, start, end = 0, 0, len(units) - 1
        if first < 0 or self.blocks[first]:
            handed = NONE
            for stored in self.entered.get(first, ()):
                handed = handed.plus(stored.divided()) if stored.share is not TensorShare.WHOLE else handed
            units.insert(0, TracedUnit(f"before {self.names[first]}" if first >= 0 else name, False, output=handed))
            shift, end = 1, end + 1
        if last >= 0 and self.blocks[last]:
            units.append(TracedUnit(f"after {self.names[last]}", False))
            end += 1
        seen: int | None = None
        following = -1
        nexts = []  # by slot, the next unit
        for unit in reversed(self.slots):
            following = unit if unit >= 0 else following
            nexts.append(following)
        for unit, following in zip(self.slots, reversed(nexts), strict=True):
            if unit >= 0:
                seen = place[unit] + shift
                self.places.append(seen)
            elif seen is None:
                self.places.append(start)
            elif following < 0:
                self.places.append(end)
            else:
                # Between a block and a head, as a norm: the head's.
                after = units[seen].block and not self.blocks[following]
                self.places.append(place[following] + shift if after else seen)
        return units

    def _add_parameters(self, units: Sequence[TracedUnit]) -> None:
        by_name = {unit.name: unit for unit in units}
        packed = packed_weights(self.model) if self.options.packing is not None else set()
        reads = self.recorder.first_reads
        for first, table in self.tables.costs():
            units[self.places[first]].tables.append(table)
        for name, owned in self.owned.items():
            for path, parameter in owned:
                if path in self.tables.weights:
                    continue
                slot = reads.get(parameter.untyped_storage()._cdata)
                # The root's belong to the unit that reads them first.
                unit = by_name[name] if name else units[self.places[slot] if slot is not None else 0]
                share = TensorShare.SPLIT if id(parameter) in self.cuts else TensorShare.WHOLE
                is_expert = path in self.experts
                if parameter.requires_grad:
                    unit.add_parameters(divide(parameter.numel(), share), not name)
                    if is_expert:
                        unit.add_experts(self.experts[path], parameter.numel())
                    continue
                form = self.options.packing
                is_stacked = is_expert and parameter.ndim > 2 and form is not None and form.stacked
                form = form if is_stacked or id(parameter) in packed else None
                frozen = frozen_of(parameter, parameter.element_size(), divide(1, share), not name, form)
                unit.add_frozen(frozen)
                if is_expert:
                    unit.add_experts(self.experts[path], 0, frozen)

    def _add_saved(self, units: Sequence[TracedUnit], saved: Sequence[TracedStorage]) -> set[int]:
        """Note what units save; return the ``id`` of storages that blocks are called with."""
        everything: dict[int, list[TracedStorage]] = {}
        for stored in saved:
            everything.setdefault(self.places[stored.saver], []).append(stored)
        entered: dict[int, list[TracedStorage]] = {}
        for unit, index in zip(self.slots, self.places, strict=True):
            if unit >= 0:
                entered[index] = self.entered[unit]
        products: dict[int, list[TracedProduct]] = {}
        for product in self.recorder.products:
            products.setdefault(self.places[product.stored.slot], []).append(product)
        seen: set[int] = set()
        for index, traced_unit in enumerate(units):
            storages = everything.get(index, [])
            for stored in () if traced_unit.block else storages:
                # Outside of the blocks, sequences are whole on each rank.
                stored.change(TensorShare.WHOLE, only=TensorShare.TOKENS)
            traced_unit.saved[Recompute.NONE] = _sum(storages)
            traced_unit.saved[Recompute.SELECTIVE] = _sum([s for s in storages if not (traced_unit.block and s.scores)])
            inputs = entered.get(index, []) if traced_unit.block else storages
            new_inputs = [stored for stored in inputs if not stored.known and id(stored) not in seen]
            new_inputs = list({id(stored): stored for stored in new_inputs}.values())
            seen |= {id(stored) for stored in new_inputs}
            traced_unit.saved[Recompute.BLOCKS] = _sum(new_inputs)
            # All that a block has while its backward goes on after a recomputation, until there is a plan.
            traced_unit.saved[Recompute.PLANNED] = _sum([*{id(x): x for x in (*storages, *new_inputs)}.values()])
            kept_products = [
                product for product in products.get(index, []) if traced_unit.block and id(product.stored) not in seen
            ]
            traced_unit.saved[Recompute.PRODUCTS] = _sum([*new_inputs, *kept_products])
        return seen | {id(stored) for storages in entered.values() for stored in storages}

    def _add_calls(
        self, units: Sequence[TracedUnit], boundary: set[int], saved: Mapping[int, int], beyond: Sequence[Divided]
    ) -> None:
        """Note the operators of blocks; what blocks hand on (``boundary``) is kept as another's input.

        ``saved`` has the place of the unit that saves a storage, ``beyond`` the bytes that live after each event.
        """
        for call in reversed(self.recorder.calls):
            index = self.places[call.slot]
            if not units[index].block:
                continue
            changed = any(id(stored) in self.recorder.written | boundary for stored in call.results)
            unsaved = _sum([stored for stored in call.results if saved.get(id(stored)) != index])
            size, live = _sum(call.results), beyond[call.events - 1]
            entry = OperatorCall(call.operator, call.number, size, unsaved, live, call.kernels, not changed)
            units[index].calls.insert(0, entry)

    def _add_peaks(self, units: Sequence[TracedUnit], forwards: int) -> list[Divided]:
        """Note how much lives while units compute; return it for each event, less what is saved behind its unit."""
        base, total, amounts = [], NONE, list[Divided]()
        for unit in units:
            total = total.plus(unit.saved[Recompute.NONE])
            base.append(total.times(-1.0))
        live, gradients = base[0].times(0.0), NONE
        accumulated = deque(self.recorder.accumulations)
        for number, event in enumerate(self.recorder.events):
            while accumulated and accumulated[0][0] <= number:
                units[self.places[accumulated.popleft()[1]]].accumulate()
            amount = event.stored.divided()
            amount = amount if event.sign > 0 else amount.times(-1.0)
            if event.stored.gradient:
                gradients = gradients.plus(amount)
            else:
                live = live.plus(amount)
            index = self.places[event.slot]
            unit, beyond = units[index], live.plus(base[index])
            amounts.append(beyond)
            if number < forwards:
                unit.forward.append(beyond)
            else:
                unit.backward.append(beyond)
                unit.gradients.append(gradients)
        return amounts


def _stored(values: Any) -> list[Tensor]:
    """Return the meta tensors among values, without logits that a loss computes in chunks, which have no storage."""
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_meta and not isinstance(x, Logits)]


def _sum(stored: Sequence[TracedStorage | TracedProduct]) -> Divided:
    total = NONE
    for entry in stored:
        total = total.plus(entry.divided())
    return total


@contextmanager
def _collecting() -> Iterator[None]:
    """Collect no garbage in between: tensors in cycles would be freed at moments that differ from run to run."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def experts_of(model: nn.Module) -> dict[str, int]:
    """Return the names of the parameters that experts have, with the number of experts beside them."""
    try:
        layers = find_experts(model, (), 1)
    except ValueError:  # what looks like experts is called in a way that ranks cannot share
        return {}
    return {name: layer.count for layer in layers for name in layer.splits}


def is_block(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a unit is one of several of its class in one list."""
    around = modules[name.rpartition(".")[0]]
    kinds = Counter(type(child) for child in around.children())
    return isinstance(around, CONTAINERS) and kinds[type(modules[name])] > 1
