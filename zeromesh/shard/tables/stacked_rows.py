"""Experts as rows of tables: a stacked parameter (experts, ...) has a row for each expert, and a call names its rows.

A forward fetches the rows of the experts that its tokens have chosen, and computes with these alone. An update changes
the rows that have gradients. What all others miss is a step with a gradient of zero, in which moments decay, and the
weights move by them and by weight decay: it is made up for, step by step, with the options of its time, when the row is
next used. So the bits of weights and states are those of an optimizer that updates all rows in every step.
Updates and fetches go on beside what is computed; whoever reads rows or states waits for their table.
Frozen weights, also packed ones, are only read. Adapters of experts stay whole on the device; a call uses the parts
that belong to its rows.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from zeromesh.base.kernels.update_pass import UpdateStep
from zeromesh.base.kernels.update_rules import RULES, rule_of, state_dtype
from zeromesh.base.placement import Tier
from zeromesh.comm.agreement import catch
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.optim.host import options_now, states_of
from zeromesh.shard.parameters.absent_guard import change_classes, watched_class
from zeromesh.shard.sizes import TableLayout
from zeromesh.shard.tables.lookups import Lookups, TableCall
from zeromesh.shard.tables.row_fetches import Beside, FetchedRows, RowFetcher
from zeromesh.shard.tables.row_memory import RowMemory
from zeromesh.shard.tables.row_rules import Options, RowState
from zeromesh.shard.tables.row_steps import RowSteps
from zeromesh.shard.tables.table import Table


@dataclass(frozen=True)
class StackedWeight:
    """A parameter with entries of each expert: so many dims ``dim`` of it, that an expert has as many of each range."""

    path: str  # name of the module that has it
    module: Any
    attribute: str
    dim: int = 0
    ranges: tuple[tuple[int, int], ...] = ()  # along the dim, each with the entries of all experts in their order

    @property
    def value(self) -> Any:
        """The parameter, or what is in its place."""
        return self.module._parameters.get(self.attribute)

    def of(self, ids: torch.Tensor, count: int) -> torch.Tensor:
        """Return the entries of some of ``count`` experts, in the layout of those of all."""
        places = []
        for start, stop in self.ranges:
            each = (stop - start) // count
            places.append((start + ids[:, None] * each + torch.arange(each, device=ids.device)).flatten())
        chosen: torch.Tensor = self.value.index_select(self.dim, torch.cat(places))
        return chosen


@dataclass(frozen=True)
class StackedRows:
    """A module that is called with rows, the experts of each, and their weights."""

    path: str  # name of the module
    module: Any
    weights: tuple[StackedWeight, ...]  # whose rows rest, those of each expert below each other
    count: int  # number of experts
    sizes: Mapping[tuple[str, str], int]  # (module inside, attribute) that says how many experts there are
    index: str  # name of the argument with the experts of each row
    signature: inspect.Signature  # of the forward
    beside: tuple[StackedWeight, ...] = ()  # adapters, which do not rest
    choose: tuple[Callable[[torch.Tensor], None], ...] = ()  # told the numbers of the experts before each call


@dataclass(frozen=True)
class RestingExperts:
    """Experts whose rows rest off the device."""

    stacks: tuple[StackedRows, ...]
    tier: Tier
    folder: Path | None  # of files on NVMe
    slots: int  # rows of each parameter that stay in host memory if the tier is NVMe
    names: tuple[str, ...]  # of the states that the optimizer keeps of each element that is trained
    narrow: frozenset[str]  # names of those that are bf16 beside an fp32 master

    def layout(self, trained: bool, master: torch.dtype) -> TableLayout:
        """Return what predictions of memory of a weight compute with."""
        kinds = [state_dtype(name in self.narrow, master) for name in self.names if trained]
        states = sum(kind.itemsize for kind in kinds) / master.itemsize
        return TableLayout(self.tier, states, 0, self.slots if self.tier is Tier.NVME else None, Tier.HOST)


class StackedTable(Table):
    """A parameter of experts. Rows are updated where they rest, or in a cache in host memory, one after the other."""

    remedy = 'set experts.rest to "none"'
    narrows = True
    merges = True  # rows are large: one sum of them is kept, and not each micro-batch's

    def __init__(
        self,
        weight: StackedWeight,
        count: int,
        number: int,
        mesh: Mesh,
        resting: RestingExperts,
        chosen: Mapping[int, torch.dtype],
        sent: torch.dtype | None,
        beside: Beside,
    ) -> None:
        self.resting, self._beside = resting, beside
        self.count = count  # a row of a packed weight has many of its entries
        dtype = chosen[id(weight.value)]
        super().__init__(weight.path, weight.module, number, mesh, resting.tier, dtype, sent, weight.attribute)
        self._asked = torch.empty(0, dtype=torch.int64)  # rows that the last call asked for
        # What uses rows in another thread: at first the update, then the fetch, if they were begun.
        self._update: Future[None] | None = None
        self._fetched: Future[FetchedRows | None] | None = None
        # Users reach the weights and states through the optimizer, while copies are elsewhere, or rows miss steps.
        self._watched: dict[type, type] = {cls: watched_class(cls, self._used) for cls in (torch.Tensor, nn.Parameter)}
        self._theirs: list[torch.Tensor] = []

    def placed(self, tables: TableLayout) -> TableLayout:
        """Return the place of the rows and states."""
        return self.resting.layout(self.flat.layout.trainable, self.flat.master.dtype)

    def _memory(self, plane: torch.Tensor, hot: int | None) -> RowMemory:
        in_files = self.flat.parameter_tier is Tier.NVME
        memory = RowMemory(plane, self.mesh.device, hot if in_files else None, on_host=True)
        self.steps = RowSteps(memory, self.rows_here, self.full_name)
        self._theirs = [piece.parameter for _, _, piece in self.flat.pieces]
        return memory

    def wait(self) -> None:
        """Wait for the update and the fetch of rows here; raise once what went wrong in them."""
        begun: list[Future[Any]] = [future for future in (self._update, self._fetched) if future is not None]
        failures = [error for future in begun if (error := future.exception()) is not None]
        self._update = None
        if failures:
            self._fetched = None
            raise failures[0]

    def fetch_ahead(self) -> None:
        """Begin to fetch the rows that were asked for last."""
        rows, update = self._asked, self._update
        if self._fetched is not None or not rows.numel():
            return

        def fetch() -> FetchedRows | None:
            if update is not None:
                update.result()
            try:
                return self._fetch(self._beside.ahead, rows)
            except torch.OutOfMemoryError:  # they are fetched when they are asked for
                return None

        self._fetched = self._beside.fetches.submit(fetch)
        change_classes(self._theirs, self._watched)

    def _fetch(self, fetcher: RowFetcher, rows: torch.Tensor) -> FetchedRows:
        return fetcher.fetch(rows, self.width, self.wire, self.steps.make_up)

    def drop(self) -> None:
        """Forget rows that were fetched, and not asked for; whether that failed, nobody has to know."""
        if self._fetched is not None:
            self._fetched.exception()  # when it is done
            self._fetched = None

    def answer(self, asked: torch.Tensor) -> torch.Tensor:
        """Return rows that are here, up to date, by their local numbers: shape (k, width), in the wire dtype."""
        self.wait()
        change_classes(self._theirs, self._watched)
        host = asked.cpu()
        rows, inverse = host.unique(return_inverse=True)
        fetched = None if self._fetched is None else self._fetched.result()
        self._fetched, self._asked = None, rows
        if fetched is None:
            fetched = self._fetch(self._beside.at_once, rows)
        values, device = fetched.arrived(), self.mesh.device
        if not torch.equal(fetched.rows, rows):
            present = torch.isin(rows, fetched.rows)
            guessed = torch.searchsorted(fetched.rows, rows[present])
            values = values.new_empty(len(rows), self.width).index_copy_(
                0, present.nonzero().flatten().to(device), values.index_select(0, guessed.to(device))
            )
            missing = self._fetch(self._beside.at_once, rows[~present])
            values.index_copy_(0, (~present).nonzero().flatten().to(device), missing.arrived())
        return values if torch.equal(rows, host) else values.index_select(0, inverse.to(device))

    def settle(self, forget: bool = False) -> None:
        """Let all rows take the steps that they miss, and the planes have their values."""
        self.wait()
        self._fetched = None if forget else self._fetched
        self.steps.make_up(torch.arange(self.rows_here))
        super().settle(forget)

    def _used(self, tensor: torch.Tensor) -> None:
        """Let weights and states that somebody uses, and may change, miss no step, and be nowhere else."""
        change_classes([tensor, *self._theirs], {watched: plain for plain, watched in self._watched.items()})
        self.settle(forget=True)

    def rule_of(self, optimizer: torch.optim.Optimizer, group: Options) -> str:
        """Return the name of the host's rule for a group; raise ValueError if there is none any more."""
        rule = rule_of(optimizer, group)
        if rule is None:
            require_rules(optimizer)
        return str(rule)

    def update(self, rule: str, options: Options, state: dict[str, Any]) -> None:
        """Begin one step: rows that have a gradient take it now, all others when they are next used."""
        self.wait()
        self.drop()
        names = RULES[rule].states(options)
        with torch._C.DisableTorchFunctionSubclass():
            self._bind([RowState(key, initial=_INITIAL.get(key)) for key in names], options, state)
        number = int(state["step"]) + 1
        step = UpdateStep(rule, options_now(options, RULES[rule].options), number)
        state["step"] = state["step"] + 1
        self._update = self._beside.updates.submit(self.steps.take, step, self.gradient.ids, self.gradient.summed)
        self._theirs = [*(piece.parameter for _, _, piece in self.flat.pieces), *(state[name] for name in names)]
        change_classes(self._theirs, self._watched)


_INITIAL = {"sum": "initial_accumulator_value"}


def require_rules(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the host has no rules by which rows make up for steps as an optimizer takes them."""
    states_of(optimizer, "experts.rest lets experts make up for steps that they miss", "leave experts.rest out")


def require_room(resting: RestingExperts, tables: Sequence[StackedTable], mixed: bool) -> None:
    """Raise ValueError if the folder has no room for the rows and states of tables on this rank."""
    if resting.folder is None:
        return
    resting.folder.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(resting.folder).free, 0.0
    for table in tables:
        dtype = table.flat.master_dtype(mixed)
        numbers = 1 + resting.layout(table.flat.layout.trainable, dtype).states
        needed += table.per_rank * table.width * dtype.itemsize * numbers
    if needed > free:
        states = f" and the states {', '.join(resting.names)}" if resting.names else ""
        raise ValueError(
            f"experts.nvme_path {str(resting.folder)!r} has {free:,} bytes free, and the experts of this rank need "
            f"{needed:,.0f} for weights{states}; name a folder on a larger disk, or use more ranks"
        )


class Stacks(Protocol):
    """All layers of experts of a model, each with its tables."""

    stacks: list[tuple[StackedRows, list[StackedTable]]]
    lookups: Lookups
    beside: Beside


def forward_of_stack(every: Stacks, number: int) -> Callable[..., Any]:
    """Return a forward of the experts of a layer that computes with the rows of the experts that are chosen."""
    weak_stacks, own_forward = ref(every), every.stacks[number][0].module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        stacks = weak_stacks()
        if stacks is None:
            raise RuntimeError("the engine that has these experts is gone; keep the engine as long as the model")
        return _call(stacks, number, own_forward, stacks.stacks[number][0].signature.bind(*args, **kwargs))

    compiled_apart: Callable[..., Any] = torch.compiler.disable(forward)
    return compiled_apart


def _call(every: Stacks, number: int, own_forward: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
    arguments, (stack, tables) = bound.arguments, every.stacks[number]
    # Of torch.func.functional_call, or of a copy of the model.
    if any(w.value is not table.flat.parameters[0] for w, table in zip(stack.weights, tables, strict=True)):
        return own_forward(*bound.args, **bound.kwargs)
    index = arguments[stack.index]
    ids = index.long().unique()
    if not ids.numel():
        ids = ids.new_zeros(1)  # products of no expert at all are not defined
    if len(ids) == 1 and stack.beside:  # PEFT takes the adapter of a single expert for that of a plain matrix
        ids = torch.cat([ids, (ids + 1) % stack.count]).unique()
    # What went wrong in another thread, too, is for all ranks to hear.
    failure = next((error for table in tables if (error := catch(table.wait)[1]) is not None), None)
    if int(ids[0]) < 0 or int(ids[-1]) >= stack.count:
        wrong = int(ids[0]) if int(ids[0]) < 0 else int(ids[-1])
        failure = IndexError(
            f"{stack.path} was called with expert {wrong}; it has {stack.count}, whose numbers are 0 to "
            f"{stack.count - 1}. Experts without weights cannot rest: leave experts.rest out"
        )
    call = TableCall(ids, _apart, _apart, failure)
    values: list[tuple[StackedWeight, torch.Tensor]] = []
    for weight, table in zip(stack.weights, tables, strict=True):
        values.append((weight, _rows_of(stack, weight, table, every.lookups, call)))
    every.beside.called(number, [layer for _, layer in every.stacks])
    values += [(weight, weight.of(ids, stack.count)) for weight in stack.beside]
    for choose in stack.choose:
        choose(ids)
    arguments[stack.index] = torch.searchsorted(ids, index.long()).to(index.dtype)
    with _with_rows(stack, values, len(ids)):
        return own_forward(*bound.args, **bound.kwargs)


def _rows_of(
    stack: StackedRows, weight: StackedWeight, table: StackedTable, lookups: Lookups, call: TableCall
) -> torch.Tensor:
    """Return the rows of a weight that a call names; inside GatheredParameters, those that it has there."""
    reads = table.flat.unbound and call.failure is None
    gathered = weight.of(call.ids, stack.count).detach().to(table.wire) if reads else None
    if gathered is not None and not torch.is_grad_enabled():
        return gathered  # without messages: ranks may generate texts of different lengths
    length, *shape = table.flat.layout.segments[0].shape
    rows = lookups.look_up(table, call, at_once=True).view(len(call.ids) * length // stack.count, *shape)
    if gathered is not None:
        rows.data.copy_(gathered)
    return rows if table.flat.layout.trainable else nn.Parameter(rows, requires_grad=False)


class _Rows(torch.autograd.Function):
    """A leaf without memory of its own, and the values of rows -> these values, whose gradient is the leaf's."""

    @staticmethod
    def forward(leaf: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].contiguous(), None


def _apart(rows: torch.Tensor) -> torch.Tensor:
    """Return the values of rows, a leaf that stays as long as its graph: they go when nothing saves them any more.

    So a block that is computed again in the backward keeps none of them until then.
    """
    if not rows.requires_grad:
        return rows
    values = rows.data
    rows.data = values.new_empty(1).expand(values.shape)
    result: torch.Tensor = _Rows.apply(rows, values)  # type: ignore[no-untyped-call]
    return result


@contextmanager
def _with_rows(stack: StackedRows, values: Sequence[tuple[StackedWeight, torch.Tensor]], count: int) -> Iterator[None]:
    """Let the module have ``count`` experts, with these values of its parameters, in this context."""
    present = [weight.value for weight, _ in values]
    try:
        for weight, value in values:
            weight.module._parameters[weight.attribute] = value
        for path, attribute in stack.sizes:
            setattr(stack.module.get_submodule(path), attribute, count)
        yield
    finally:
        for (weight, _), value in zip(values, present, strict=True):
            weight.module._parameters[weight.attribute] = value
        for (path, attribute), size in stack.sizes.items():
            setattr(stack.module.get_submodule(path), attribute, size)
