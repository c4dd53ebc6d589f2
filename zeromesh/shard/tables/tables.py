"""All tables of a model: their gradients at an accumulation boundary, and their updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeromesh.base.placement import Tier
from zeromesh.base.spans import span
from zeromesh.comm.agreement import agree_run
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.parameters.absent_guard import Guard, Presence, change_class, unloaded_class
from zeromesh.shard.parameters.deferred import Source
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.tables.lookup import forward_of
from zeromesh.shard.tables.lookups import Lookups
from zeromesh.shard.tables.row_exchange import COPIES_TAG, ROWS_TAG, RowRequest, ask, from_all, swap, vector_of
from zeromesh.shard.tables.row_rules import rule_of
from zeromesh.shard.tables.table import Arrived, GradientState, Table


@dataclass(frozen=True)
class TableSettings:
    """Tables of a model, and where their rows and states rest."""

    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    tier: Tier = Tier.DEVICE
    folder: Path | None = None  # of files on NVMe
    hot: int | None = None  # rows per table in the cache of a faster tier
    batched: bool = True  # lookups of several tables share messages


class Tables:
    """Tables of one model, in the order of its modules."""

    def __init__(
        self, settings: TableSettings | None, mesh: Mesh, first: int, chosen: Mapping[int, torch.dtype],
        wire: torch.dtype | None,
    ) -> None:  # fmt: skip
        self._settings = settings or TableSettings()
        self._mesh = mesh
        self.every = [
            Table(name, module, first + number, mesh, self._settings.tier, chosen[id(module.weight)], wire)
            for number, (name, module) in enumerate(self._settings.modules.items())
        ]
        self.lookups = Lookups(mesh.shard, self.every, self._settings.batched)
        self._guards: dict[Table, Guard] = {}

    def __iter__(self) -> Iterator[Table]:
        return iter(self.every)

    def __len__(self) -> int:
        return len(self.every)

    def __contains__(self, unit: object) -> bool:
        return unit in self.every

    @property
    def flats(self) -> list[Flat]:
        """Flat buffers of the tables."""
        return [table.flat for table in self.every]

    def of(self, parameter: torch.Tensor) -> Table | None:
        """Return the table whose weight this is; None if it is none's."""
        return next((table for table in self.every if table.flat.parameters[0] is parameter), None)

    def place(
        self, materialise: Callable[[str, nn.Parameter], Source | None] | None, mixed: bool, arrived: Arrived,
        recall: Callable[[], None],
    ) -> None:  # fmt: skip
        """Place all rows, and replace the modules' forwards. Collective; see ``Table.place`` and ``Table.spread``."""
        # Stages of a pipeline without tables take part in the agreement.
        if not self.every and self._mesh.sizes["pipeline"] == 1:
            return
        folder = self._settings.folder

        def make_room() -> None:
            if folder is not None and self.every:
                folder.mkdir(parents=True, exist_ok=True)
            for table in self.every:
                table.make_room(mixed, folder)

        # Together, as a rank without room would leave the others waiting for its rows.
        agree_run(self._mesh.group("world"), "make room for its tables", make_room)
        for table in self.every:
            table.place(materialise, self._settings.hot, recall)
            table.spread(forward_of(table.module, self.lookups, table), arrived)

    def guard(self, base: type[nn.Parameter], names: Mapping[int, str]) -> None:
        """Make operations on whole weights raise; ``base`` is the class of parameters that answers for ``grad``."""
        for table in self.every:
            change_class(table.flat.parameters[0], base)
            guard = Guard(table, unloaded_class(base, table, names, self.refuse), base)
            guard.switch(Presence.UNLOADED)
            self._guards[table] = guard

    def close(self) -> None:
        """Restore the modules' own forwards."""
        self.lookups.drop()
        for table in self.every:
            table.gather_up()

    def refuse(self, unit: Any, name: str) -> None:
        """Raise RuntimeError: a table's weight is used as a whole."""
        raise RuntimeError(
            f"{name} has its rows spread over {self._mesh.shard.size} ranks, and only its module looks them up; "
            "read or change it inside `with zeromesh.zero.GatheredParameters([...])` on all ranks, or set sparse=False"
        )

    # Gradients.

    def complete(self) -> None:
        """Sum the gradients over the ranks, each row to the rank that has it. Collective, once between updates."""
        self.lookups.finish()
        tables = [table for table in self.every if table.state is GradientState.LOCAL]
        if not tables:
            return
        group, rank = self._mesh.shard, self._mesh.shard.rank
        with span("reduce", "tables"):
            local_sums = [table.local() for table in tables]
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
                table.take_sum(route.of(index), [part[index].view(-1, table.width) for part in parts])
            self._sum_copies(tables)

    def _sum_copies(self, tables: Sequence[Table]) -> None:
        """Sum over the ranks that hold copies of the same rows; all add in the order of ranks."""
        # Not over the tensor axis: its ranks hold copies, too, but have made the same lookups, and the same gradients.
        group = self._mesh.replicate
        if group.size == 1:
            return
        for table in tables:
            table.take_sum(from_all(group, COPIES_TAG, table.ids), from_all(group, COPIES_TAG, table.gradient))

    def summed(self, parameters: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return the summed gradients of tables, those of ``parameters`` or all, that this rank counts in a norm."""
        if any(group.rank > 0 for group in self._mesh.same_rows):
            return []
        chosen = self.every if parameters is None else [t for t in map(self.of, parameters) if t is not None]
        return [table.gradient for table in chosen]

    def scale(self, factor: float, parameters: Sequence[torch.Tensor] | None = None) -> None:
        """Multiply the summed gradients of tables, those of ``parameters`` or all."""
        if factor != 1.0:
            chosen = self.every if parameters is None else [t for t in map(self.of, parameters) if t is not None]
            for table in chosen:
                table.scale(factor)

    def used(self) -> list[bool]:
        """Return by table whether a gradient has come on this rank since the last update."""
        return [table.used for table in self.every]

    def mark_used(self, flags: Sequence[bool]) -> None:
        """Set by table whether any rank has had a gradient since the last update."""
        for table, flag in zip(self.every, flags, strict=True):
            table.mark_used(flag)

    def reopen(self) -> None:
        """Turn the sums into gradients of single ranks, to which the next backward adds."""
        for table in self.every:
            table.reopen(counted=self._mesh.is_first_copy)

    def forget(self) -> None:
        """Forget all gradients."""
        for table in self.every:
            table.forget()

    # Update.

    def update(self, optimizer: Optimizer) -> None:
        """Update the rows that have gradients, by the options of their groups."""
        self.lookups.finish()
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for table in self.every:
            for _, _, piece in table.flat.pieces if table.used else ():
                group = groups.get(id(piece.parameter))
                if group is not None:
                    rule = rule_of(optimizer, group, table.name)
                    with span("update", table.name):
                        table.update(rule, group, optimizer.state[piece.parameter])

    def take_changes(self) -> None:
        """Raise RuntimeError if somebody put another tensor in a weight's place, which would be lost."""
        for table in self.every:
            weight = table.flat.parameters[0]
            with torch._C.DisableTorchFunctionSubclass():
                same = bool(weight.is_set_to(table.flat.views[0])) or bool(table.flat.unbound)
            if not same:
                self.refuse(table, f"{table.name}.weight was given new data, but it")

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
