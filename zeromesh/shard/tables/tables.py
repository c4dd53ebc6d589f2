"""All tables of a model: the forwards of their modules, their gradients at a boundary, and their updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from zeromesh.base.placement import Tier
from zeromesh.base.spans import span
from zeromesh.comm.agreement import agree_run
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.parameters.absent_guard import Guard, Presence, change_class, unloaded_class
from zeromesh.shard.parameters.deferred import Source
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.store.tiers import Tiers
from zeromesh.shard.tables.lookups import Lookups, TableCall
from zeromesh.shard.tables.row_exchange import COPIES_TAG, ROWS_TAG, RowRequest, ask, from_all, swap, vector_of
from zeromesh.shard.tables.row_fetches import Beside
from zeromesh.shard.tables.stacked_rows import (
    RestingExperts,
    StackedRows,
    StackedTable,
    forward_of_stack,
    require_room,
)
from zeromesh.shard.tables.table import Arrived, GradientState, Table


@dataclass(frozen=True)
class TableSettings:
    """Tables of a model, and where their rows and states rest."""

    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    tier: Tier = Tier.DEVICE
    folder: Path | None = None  # of files on NVMe
    hot: int | None = None  # rows per table in the cache of a faster tier
    batched: bool = True  # lookups of several tables share messages
    resting: RestingExperts | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """Names of the modules whose parameters are tables."""
        stacks = self.resting.stacks if self.resting else ()
        return (*self.modules, *dict.fromkeys(weight.path for stack in stacks for weight in stack.weights))


class Tables:
    """Tables of one model, in the order of its modules."""

    def __init__(
        self,
        settings: TableSettings | None,
        mesh: Mesh,
        first: int,
        chosen: Mapping[int, torch.dtype],
        wire: torch.dtype | None,
    ) -> None:
        self._settings = settings or TableSettings()
        self._mesh = mesh
        self.every = [
            Table(name, module, first + number, mesh, self._settings.tier, chosen[id(module.weight)], wire)
            for number, (name, module) in enumerate(self._settings.modules.items())
        ]
        self.stacks: list[tuple[StackedRows, list[StackedTable]]] = []
        resting = self._settings.resting
        self.beside = Beside(mesh.device if resting else torch.device("cpu"))  # streams of a device are for experts
        for stack in resting.stacks if resting is not None else ():
            assert resting is not None
            number, common = first + len(self.every), (mesh, resting, chosen, wire, self.beside)
            here = [
                StackedTable(weight, stack.count, number + place, *common) for place, weight in enumerate(stack.weights)
            ]
            self.stacks.append((stack, here))
            self.every += here
        self.lookups = Lookups(mesh.shard, self.every, self._settings.batched)
        self._guards: dict[Table, Guard] = {}

    def __iter__(self) -> Iterator[Table]:
        return iter(self.every)

    def __len__(self) -> int:
        return len(self.every)

    @property
    def flats(self) -> list[Flat]:
        """Flat buffers of the tables."""
        return [table.flat for table in self.every]

    @property
    def trained(self) -> list[Table]:
        """Tables that have gradients."""
        return [table for table in self.every if table.flat.layout.trainable]

    def place(
        self,
        materialise: Callable[[str, nn.Parameter], Source | None] | None,
        mixed: bool,
        arrived: Arrived,
        store: Tiers,
    ) -> None:
        """Place all rows, and replace the modules' forwards. Collective; see ``Table.place`` and ``Table.spread``."""
        # Stages of a pipeline without tables take part in the agreement.
        if not self.every and self._mesh.sizes["pipeline"] == 1:
            return
        resting, stacked = self._settings.resting, [table for _, tables in self.stacks for table in tables]
        places = dict.fromkeys(self.every, (self._settings.folder, self._settings.hot))
        if resting is not None:
            places |= dict.fromkeys(stacked, (resting.folder, resting.slots))

        def make_room() -> None:
            if resting is not None:
                require_room(resting, stacked, mixed)
            for table, (folder, _) in places.items():
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                table.make_room(mixed, folder)

        # Together, as a rank without room would leave the others waiting for its rows.
        agree_run(self._mesh.group("world"), "make room for its tables", make_room)
        for table, (_, hot) in places.items():
            table.place(materialise, hot, store)
            if table not in stacked:
                table.spread(table.module, forward_of(table.module, self.lookups, table), arrived)
        for number, (stack, tables) in enumerate(self.stacks):
            forward = forward_of_stack(self, number)
            for stacked_table in tables:
                stacked_table.spread(stack.module, forward, arrived)

    def guard(self, base: type[nn.Parameter], names: Mapping[int, str]) -> None:
        """Make operations on whole weights raise; ``base`` is the class of parameters that answers for ``grad``."""
        for table in self.every:
            change_class(table.flat.parameters[0], base)
            guard = Guard(table, unloaded_class(base, table, names, table.refuse), base)
            guard.switch(Presence.UNLOADED)
            self._guards[table] = guard

    def close(self) -> None:
        """Restore the modules' own forwards."""
        self.lookups.drop()
        for table in self.every:
            table.gather_up()
        self.beside.close()

    # Gradients.

    def complete(self) -> None:
        """Sum the gradients over the ranks, each row to the rank that has it. Collective, once between updates."""
        self.lookups.finish()
        tables = [table for table in self.trained if table.gradient.state is GradientState.LOCAL]
        # Rows of experts are so large that messages of several parameters are no gain, and their copies a loss.
        for table in tables:
            if table.merges or self._mesh.shard.size == 1:
                self._complete([table])
        if rest := [table for table in tables if table.gradient.state is GradientState.LOCAL]:
            self._complete(rest)
        if tables:
            self._sum_copies(tables)

    def _complete(self, tables: Sequence[Table]) -> None:
        group, rank = self._mesh.shard, self._mesh.shard.rank
        if group.size == 1:
            for table in tables:
                ids, gradient = table.gradient.local()
                table.gradient.take_sum([ids], [gradient])
            return
        with span("reduce", "tables"):
            local_sums = [table.gradient.local() for table in tables]
            requests = [
                RowRequest(table.name, place, ids, table.per_rank)
                for place, (table, (ids, _)) in enumerate(zip(tables, local_sums, strict=True))
            ]
            route = ask(group, ROWS_TAG, requests, len(tables))
            sent, received = route.sent, route.received
            dtype = local_sums[0][1].dtype
            for _, gradient in local_sums:
                dtype = torch.promote_types(dtype, gradient.dtype)
            # One message to each rank, for all tables.
            split = [
                gradient.to(dtype).split([sent[peer][index] for peer in range(group.size)])
                for index, (_, gradient) in enumerate(local_sums)
            ]
            sends = {peer: torch.cat([by_peer[peer].reshape(-1) for by_peer in split]) for peer in range(group.size)}
            widths = [table.width for table in tables]
            sizes = {
                peer: [count * width for count, width in zip(received[peer], widths, strict=True)]
                for peer in range(group.size)
            }
            receives = {
                peer: sends[rank] if peer == rank else vector_of(sum(sizes[peer]), dtype, group)
                for peer in range(group.size)
            }
            swap(group, ROWS_TAG, sends, receives, "table_gradients")
            parts = [receives[peer].split(sizes[peer]) for peer in range(group.size)]
            for index, table in enumerate(tables):
                table.gradient.take_sum(route.of(index), [part[index].view(-1, table.width) for part in parts])

    def _sum_copies(self, tables: Sequence[Table]) -> None:
        """Sum over the ranks that hold copies of the same rows; all add in the order of ranks."""
        # Not over the tensor axis: its ranks hold copies, too, but have made the same lookups, and the same gradients.
        group = self._mesh.replicate
        if group.size == 1:
            return
        for table in tables:
            gradient, device = table.gradient, self._mesh.device
            ids, summed = gradient.ids.to(device), gradient.summed.to(device)
            gradient.take_sum(from_all(group, COPIES_TAG, ids), from_all(group, COPIES_TAG, summed))

    def scale(self, factor: float) -> None:
        """Multiply the summed gradients."""
        for table in self.every if factor != 1.0 else ():
            table.gradient.scale(factor)

    # Update.

    def update(self, optimizer: Optimizer) -> None:
        """Update the rows that have gradients, by the options of their groups."""
        self.lookups.finish()
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for table in self.every:
            for _, _, piece in table.flat.pieces if any(table.gradient.used) else ():
                group = groups.get(id(piece.parameter))
                if group is not None:
                    rule = table.rule_of(optimizer, group)
                    with span("update", table.name):
                        table.update(rule, group, optimizer.state[piece.parameter])
        self.beside.updated([layer for _, layer in self.stacks])

    @contextmanager
    def gathered(self, tables: Sequence[Table], assemble: Callable[[Flat], torch.Tensor]) -> Iterator[None]:
        """Gather the weights whole on every rank in this context. Collective."""
        self.lookups.finish()
        try:
            for table in tables:
                weight = assemble(table.flat)
                self._guards[table].switch(Presence.LOADED)
                table.flat.unbind(0, weight)
            yield
        finally:
            for table in tables:
                table.flat.rebind(0)
                table.flat.watch()
                self._guards[table].switch(Presence.UNLOADED)


def forward_of(module: Any, lookups: Lookups, table: Table) -> Callable[..., torch.Tensor]:
    """Return a forward for the module, which may outlive the lookups and the table."""
    # Here, as this import takes a second, which only models with tables pay.
    disabled: Callable[..., torch.Tensor] = torch.compiler.disable(look_up)
    weak_lookups, weak_table = ref(lookups), ref(table)

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        # A compiled model gets ordinary tensors: it asks here, outside of what is disabled for the compiler.
        return disabled(module, weak_lookups(), weak_table(), torch.compiler.is_compiling(), *args, **kwargs)

    return forward


def look_up(
    module: Any, lookups: Lookups | None, table: Table | None, at_once: bool, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Return the module's output from the rows that its indices name; arguments are those of its forward."""
    if lookups is None or table is None:
        raise RuntimeError("the engine that has the rows of this table is gone; keep the engine as long as the model")
    # Of torch.func.functional_call, or of a copy of the model.
    other = module.weight is not table.flat.parameters[0]
    # Inside GatheredParameters ranks may generate texts of different lengths.
    gathered = bool(table.flat.unbound) and not torch.is_grad_enabled() and module.max_norm is None
    if other or gathered:
        output: torch.Tensor = type(module).forward(module, *args, **kwargs)
        return output
    bag = isinstance(module, nn.EmbeddingBag)
    call = (_bag if bag else _embedding)(module, table.name, *args, **kwargs)
    at_once = at_once or (bag and module.mode == "max")  # its graph depends on the rows
    # Copies of rows are shortened together, so in the order of calls, which is the same for all copies.
    at_once = at_once or (module.max_norm is not None and table.mesh.replicate.size > 1)
    return lookups.look_up(table, call, at_once)


def _embedding(module: Any, name: str, input: torch.Tensor) -> TableCall:
    ids, inverse = _distinct(input)
    padding, shape = _place_of(module.padding_idx, ids), input.shape

    def compute(rows: torch.Tensor) -> torch.Tensor:
        return F.embedding(inverse.view(shape), rows, padding)

    return TableCall(ids, compute, compute, _wrong(name, module.num_embeddings, input, None))


def _bag(
    module: Any,
    name: str,
    input: torch.Tensor,
    offsets: torch.Tensor | None = None,
    per_sample_weights: torch.Tensor | None = None,
) -> TableCall:
    ids, inverse = _distinct(input)
    padding, shape = _place_of(module.padding_idx, ids), input.shape

    def compute(offsets: torch.Tensor | None, weights: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        if not rows.shape[0]:  # torch wants a row, also where no bag has one
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return F.embedding_bag(
            inverse.view(shape),
            rows,
            offsets,
            mode=module.mode,
            per_sample_weights=weights,
            include_last_offset=module.include_last_offset,
            padding_idx=padding,
        )

    first, second = (None if tensor is None else tensor.detach().clone() for tensor in (offsets, per_sample_weights))
    failure = _wrong(name, module.num_embeddings, input, offsets)
    return TableCall(ids, partial(compute, offsets, per_sample_weights), partial(compute, first, second), failure)


def _distinct(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if input.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices of an embedding are {input.dtype}; they must be int64 or int32")
    ids, inverse = torch.unique(input.long(), return_inverse=True)
    return ids, inverse


def _place_of(padding: int | None, ids: torch.Tensor) -> int | None:
    """Return the position of the padding index among ``ids``; None if it is not there."""
    if padding is None:
        return None
    at = (ids == padding).nonzero()
    return int(at) if at.numel() else None


def _wrong(name: str, rows: int, input: torch.Tensor, offsets: torch.Tensor | None) -> IndexError | None:
    """Return the error of the first index that is out of range; None if there is none."""
    if not input.numel() or (int(input.min()) >= 0 and int(input.max()) < rows):
        return None
    at = int(((input < 0) | (input >= rows)).flatten().nonzero()[0])
    value = int(input.flatten()[at])
    sample = at // input[0].numel() if input.ndim > 1 else at
    if offsets is not None:
        sample = int((offsets <= at).sum()) - 1
    return IndexError(
        f"index {value} of sample {sample} is out of range for {name}, which has {rows} rows: indices are 0 to "
        f"{rows - 1}; map unknown values to a row of their own, or make the table larger"
    )
