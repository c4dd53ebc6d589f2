"""One embedding table whose rows are spread over the ranks of the shard group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import nn

from zeromesh.base.kernels.update_rules import state_dtype
from zeromesh.base.placement import Placement, PlacementRow, Tier
from zeromesh.base.split import Held
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.layout import Layout, Segment
from zeromesh.shard.parameters.deferred import Source
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.sizes import TableLayout
from zeromesh.shard.store.tiers import Tiers
from zeromesh.shard.tables.row_exchange import COPIES_TAG, from_all, swap, vector_of
from zeromesh.shard.tables.row_memory import RowMemory, plane_on
from zeromesh.shard.tables.row_rules import RULES, Options, RowState, rule_of

# Function of a hook, an index and the tensor that has the gradient; see ``Backward.gradient_arrived``.
Arrived = Callable[["RowArrival", int, torch.Tensor], None]

NORM_CONSTANT = 1e-7  # of torch's renormalisation: max_norm / (norm + 1e-7)


class RowArrival:
    """Hook on the rows of one lookup, which takes their gradient."""

    def __init__(self, arrived: Arrived, gradient: RowGradient, ids: torch.Tensor) -> None:
        # Weakly: the graph that has the rows must not hold the engine.
        self._arrived, self._gradient, self._ids = WeakMethod(arrived), ref(gradient), ids

    def __call__(self, rows: torch.Tensor) -> None:
        """Take the gradient of the rows, as a hook of torch."""
        if (arrived := self._arrived()) is not None:
            arrived(self, 0, rows)

    def take(self, gradient: torch.Tensor, factor: float) -> None:
        """Give the table the gradient times ``factor``."""
        if (of_rows := self._gradient()) is not None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            of_rows.take(self._ids, gradient if factor == 1.0 else gradient.to(wide) * factor)


class GradientState(Enum):
    """State of a table's gradient between two updates."""

    LOCAL = "local"  # rows of this rank's own batches, if any
    SUMMED = "summed"  # the sum over the ranks, of the rows that are here


class RowGradient:
    """The gradient of a table's rows between two updates, with the interface of a unit's ``Gradient``."""

    def __init__(self, table: Table, sent: torch.dtype) -> None:
        self._name, self._mesh, self._width, self._wire = table.full_name, table.mesh, table.width, table.wire
        self._first, self._rows = table.first, table.rows_here
        self._sent = sent  # dtype in which gradients travel
        self._reopened = False
        self._merges = table.merges
        self.state = GradientState.LOCAL
        self.used = [False]  # a gradient has come since the last update
        self._arrived: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.ids = torch.empty(0, dtype=torch.int64)  # of the sum, local numbers
        self.summed = torch.empty(0, self._width)

    def take(self, ids: torch.Tensor, gradient: torch.Tensor) -> None:
        """Take the gradient of rows ``ids``, ascending and without duplicates, from one lookup."""
        assert self.state is GradientState.LOCAL, self
        self.used = [True]
        gradient = gradient.cpu() if self._merges else gradient
        self._arrived.append((ids.to(gradient.device), gradient))
        if self._merges and len(self._arrived) > 1:
            self._arrived = [add_up([row_ids for row_ids, _ in self._arrived], [part for _, part in self._arrived])]

    def local(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ascending row numbers and the sums of their gradients on this rank, where messages are sent from."""
        device = torch.device("cpu") if self._merges and self._mesh.shard.size == 1 else self._mesh.device
        if len(self._arrived) == 1:
            ids, gradient = (part.to(device) for part in self._arrived[0])
        else:
            none = torch.empty(0, dtype=torch.int64, device=device), vector_of(0, self._wire, self._mesh.shard)
            every = self._arrived or [(none[0], none[1].view(0, self._width).to(device))]
            ids, gradient = add_up([row_ids for row_ids, _ in every], [part for _, part in every])
        self._arrived = []
        # What is not sent is not rounded; nor is a sum that was made before, again: all ranks know of it.
        wide = self._reopened or self._mesh.shard.size == 1
        return ids, gradient.to(torch.promote_types(self._sent, torch.float32) if wide else self._sent)

    def take_sum(self, parts: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Add up the gradients that all ranks have sent for the rows here, in the order of ranks."""
        ids, summed = add_up(parts, gradients)
        self.ids, self.summed = (ids.cpu(), summed.cpu()) if self._merges else (ids, summed)
        self.state = GradientState.SUMMED

    def values(self) -> torch.Tensor:
        """Return the summed gradient of all rows here, shape (rows here x width,); zero where a row has none."""
        dense = self.summed.new_zeros(self._rows, self._width)
        return dense.index_copy_(0, self.ids, self.summed).view(-1)

    def put(self, values: torch.Tensor) -> None:
        """Let the summed gradient be these values, shape (rows here x width,).

        Rows of zeros that have had no gradient still have none.
        """
        rows = values.view(self._rows, self._width)
        present = rows.any(1)
        present[self.ids] = True
        self.ids = present.nonzero().flatten()
        self.summed, self.used = rows[self.ids].to(self.summed.dtype), [True]

    def count_once(self, mesh: Mesh) -> None:
        """Turn the sum into a gradient of the first rank that has copies of the rows, to which more is added."""
        if self.state is GradientState.SUMMED:
            self._arrived = [(self.ids + self._first, self.summed)] if mesh.is_first_copy else []
            self.state, self._reopened = GradientState.LOCAL, True

    def counted_values(self, mesh: Mesh, index: int | None = None) -> Iterator[torch.Tensor]:
        """Yield the summed gradient, 1-D, on the first of the ranks that hold copies of the rows."""
        if all(group.rank == 0 for group in mesh.same_rows) and self.summed.numel():
            yield self.summed.reshape(-1)

    def not_finite(self) -> str | None:
        """Name the weight if its gradient has a value that is not finite; None if it has none."""
        return None if bool(self.summed.isfinite().all()) else self._name

    def scale(self, factor: float, index: int | None = None) -> None:
        """Multiply the gradient by ``factor``."""
        self._arrived = [(ids, gradient * factor) for ids, gradient in self._arrived]
        self.summed = self.summed * factor

    def mark_used(self, used: Sequence[bool]) -> None:
        """Set whether any rank has had a gradient since the last update."""
        self.used = list(used)

    def reset(self, keeps_memory: bool = True) -> None:
        """Forget the gradient."""
        self._arrived, self.state, self.used, self._reopened = [], GradientState.LOCAL, [False], False
        self.ids, self.summed = self.ids.new_empty(0), self.summed.new_empty(0, self._width)  # not views, which keep it


class Table:
    """One table: its rows here, their gradients and their updates."""

    remedy = "set sparse=False"  # where somebody wants the weight whole
    narrows = False  # states may be narrower than their master
    count = 0  # rows of the whole weight; 0: as many as its first dim has
    merges = False  # gradients of lookups go to the host, and are summed there, as they come

    def __init__(
        self,
        name: str,
        module: Any,
        number: int,
        mesh: Mesh,
        tier: Tier,
        dtype: torch.dtype,
        sent: torch.dtype | None,
        attribute: str = "weight",
    ) -> None:
        weight = module._parameters[attribute]
        self.name, self.module, self.index, self.full_name = name, module, number, f"{name}.{attribute}"
        self.count = self.count or len(weight)
        self.width = weight.numel() // self.count
        self.mesh, self.group = mesh, mesh.shard
        self.per_rank = -(-self.count // self.group.size)
        self.wire = dtype  # in which rows travel and are computed with
        row = PlacementRow(
            Placement.SHARDED,
            Placement.SHARDED,
            Placement.SHARDED,
            parameter_tier=tier,
            gradient_tier=tier,
            optimizer_tier=tier,
            pinned=False,
        )
        along = mesh.group("tensor")  # each of its ranks has a copy of the rows; the first one counts and writes
        held_part = Held(tuple(weight.shape), rank=along.rank, ranks=along.size)
        segment = Segment(self.full_name, weight.shape, 0, weight.numel(), held_part)
        size = self.per_rank * self.group.size * self.width
        layout = Layout(weight.dtype, weight.requires_grad, (segment,), self.group.size, size)
        self.flat = Flat(layout, [weight], number, row, mesh, wide_states=not self.narrows)
        self.flats = (self.flat,)
        self.sharded = True
        # Rows from ``first`` on; the last ranks may have fewer, or none.
        self.first = self.group.rank * self.per_rank
        self.rows_here = max(0, min(self.count, self.first + self.per_rank) - self.first)
        self.gradient = RowGradient(self, sent or dtype)
        self._caller = module  # whose forward looks rows up
        self._leaves: list[Any] = []
        self._folder: Path | None = None  # of files on NVMe

    def __repr__(self) -> str:
        return f"table {self.name!r}"

    def placed(self, tables: TableLayout) -> TableLayout:
        """Return the place of the rows and states; ``tables`` is that of embeddings."""
        return tables

    # Placement.

    def make_room(self, mixed: bool, folder: Path | None) -> None:
        """Make the memory of this rank's rows; ``mixed`` as for ``Flat.fill``, ``folder`` for files on NVMe."""
        tier, device, self._folder = self.flat.parameter_tier, self.mesh.device, folder
        self._plane = plane_on(tier, (self.per_rank, self.width), self.flat.master_dtype(mixed), device, folder)

    def place(
        self, materialise: Callable[[str, nn.Parameter], Source | None] | None, hot: int | None, store: Tiers
    ) -> None:
        """Take this rank's rows of the parameter into memory; the parameter keeps its shape only."""
        flat, segment, plane = self.flat, self.flat.layout.segments[0], self._plane
        weight = flat.parameters[0]
        unmade = weight.is_meta
        source = materialise(segment.name, weight) if materialise is not None else None
        if source is None:
            self._take_first_ranks(weight.detach(), plane, unmade)
        elif self.rows_here:
            start, stop = self.first * self.width, (self.first + self.rows_here) * self.width
            value = source.read(start, stop)
            if value.numel() != stop - start:
                raise ValueError(f"{source} gives {value.numel()} of the {stop - start} elements of {segment.name}")
            plane[: self.rows_here].view(-1).copy_(value)
        flat.hold_rows(plane.view(-1), self.rows_here * self.width, store)
        self.rows = self._memory(plane, hot)
        self._narrow = store.states.narrow if self.narrows else frozenset()
        store.write_back(flat, self.settle)

    def _memory(self, plane: torch.Tensor, hot: int | None) -> RowMemory:
        cached = self.mesh.device.type != "cpu" or self.flat.parameter_tier is Tier.NVME
        return RowMemory(plane, self.mesh.device, hot if cached else None)

    def _take_first_ranks(self, value: torch.Tensor, plane: torch.Tensor, unmade: bool) -> None:
        """Copy this rank's rows of the first rank's value into ``plane``. Collective.

        An ``unmade`` value was made from one seed on all ranks, and is not sent.
        """
        group, per_rank = self.group, self.per_rank

        def part(rank: int) -> torch.Tensor:
            rows = value.reshape(self.count, self.width)
            return rows[rank * per_rank : (rank + 1) * per_rank].to(self.mesh.device)

        if unmade or group.rank == 0:
            plane[: self.rows_here].copy_(part(group.rank))
        if not unmade and group.size > 1:
            tag = self.flat.tag
            landing = vector_of(self.rows_here * self.width, value.dtype, group).view(-1, self.width)
            for rank in range(1, group.size):  # one after the other, so that no copy of the whole is made
                sends = {rank: part(rank)} if group.rank == 0 else {}
                receives = {0: landing} if group.rank == rank else {}
                swap(group, tag, sends, receives, "table_values")
            if group.rank:
                plane[: self.rows_here].copy_(landing)
        for copies in () if unmade else self.mesh.same_rows:
            if copies.size > 1:
                values = plane.to(self.mesh.device)
                copies.broadcast(values)
                plane.copy_(values)

    def spread(self, caller: Any, forward: Callable[..., torch.Tensor], arrived: Arrived) -> None:
        """Replace a module's forward; autograd calls ``arrived`` with the gradients of the rows of its lookups."""
        self._notify, self._caller = arrived, caller
        vars(caller)["forward"] = forward

    def gather_up(self) -> None:
        """Restore the module's own forward, which then refuses the weight."""
        vars(self._caller).pop("forward", None)

    def wait(self) -> None:
        """Wait for what uses the rows in other threads: nothing."""

    def settle(self, forget: bool = False) -> None:
        """Let the planes have what is true of all rows; ``forget``: the planes are about to change."""
        self.rows.settle(forget)

    def follow(self) -> None:
        """Read the rows from the master's new memory; the optimizer's states have moved with it."""
        self.settle(forget=True)
        self.rows.replace([self.flat.master.view(self.per_rank, self.width)])  # the update finds the states

    # Forward.

    def new_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return memory for rows ``ids``, ascending and without duplicates, of this table.

        Returns:
            Shape (k, width), in the wire dtype; a leaf whose gradient is taken as the gradient of these rows.
        """
        # Not a view, which would keep the memory of what it is a view of.
        rows = torch.empty(ids.numel(), self.width, dtype=self.wire, device=self.group.device)
        if torch.is_grad_enabled() and self.flat.parameters[0].requires_grad:
            if has_hooks(self.flat.parameters[0]):
                self.refuse(self, f"{self.full_name} was given a hook, which expects a gradient of its shape, but it")
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(RowArrival(self._notify, self.gradient, ids))
            self._leaves = [leaf for leaf in self._leaves if leaf() is not None] + [ref(rows)]
        return rows

    def answer(self, asked: torch.Tensor) -> torch.Tensor:
        """Return rows that are here, by their local numbers: shape (k, width), in the wire dtype. Collective."""
        if self.module.max_norm is not None:
            self._renorm(asked.unique())
        return self.rows.read(asked).to(self.wire)

    def _renorm(self, ids: torch.Tensor) -> None:
        """Shorten rows that are longer than the module's ``max_norm``, in place, as torch's embedding does."""
        if self.mesh.replicate.size > 1:  # other copies of the rows are looked up by other samples
            ids = torch.cat(from_all(self.mesh.replicate, COPIES_TAG, ids)).unique()
        limit, order = float(self.module.max_norm), float(self.module.norm_type)
        norms = torch.linalg.vector_norm(self.rows.read(ids), order, dim=1, keepdim=True)
        longer = norms.flatten() > limit
        scales = limit / (norms[longer] + NORM_CONSTANT)

        def shorten(copies: list[torch.Tensor]) -> None:
            copies[0].mul_(scales.to(copies[0].device))

        self.rows.change(ids[longer], shorten, count=1)

    def leaves(self) -> list[torch.Tensor]:
        """Return the rows of lookups whose graph still exists: leaves, which autograd can be asked about."""
        return [leaf for reference in self._leaves if (leaf := reference()) is not None]

    # Update.

    def take_changes(self) -> None:
        """Raise RuntimeError if somebody put another tensor in the weight's place, which would be lost."""
        weight = self.flat.parameters[0]
        with torch._C.DisableTorchFunctionSubclass():
            same = bool(weight.is_set_to(self.flat.views[0])) or bool(self.flat.unbound)
        if not same:
            self.refuse(self, f"{self.full_name} was given new data, but it")

    def refuse(self, table: Any, name: str) -> None:
        """Raise RuntimeError: the weight is used as a whole, as its class says by ``name``."""
        raise RuntimeError(
            f"{name} has its rows spread over {self.group.size} ranks, and only its module looks them up; "
            f"read or change it inside `with zeromesh.zero.GatheredParameters([...])` on all ranks, or {self.remedy}"
        )

    def rule_of(self, optimizer: torch.optim.Optimizer, group: Options) -> str:
        """Return the name of the rule by which an optimizer updates the rows; raise ValueError if there is none."""
        return rule_of(optimizer, group, self.name)

    def update(self, rule: str, options: Options, state: dict[str, Any]) -> None:
        """Update the rows that have a gradient; ``state`` is the optimizer's for the piece here."""
        chosen, dtype = RULES[rule], self.flat.master.dtype
        self._bind(chosen.states, options, state)
        state["step"] = state["step"] + 1
        gradient = self.gradient.summed.to(self.rows.place, dtype)
        gradient = -gradient if options.get("maximize") else gradient
        number, settings = int(state["step"]), {**chosen.defaults, **options}

        def change(copies: list[torch.Tensor]) -> None:
            chosen.update(copies[0], gradient, copies[1:], number, settings)

        self.rows.change(self.gradient.ids, change)

    def _bind(self, states: Sequence[RowState], options: Options, state: dict[str, Any]) -> None:
        """Use the optimizer's states of these rows as planes; make those that are missing."""
        tier, planes = self.flat.optimizer_tier, self.rows.planes[:1]
        step = state.setdefault("step", torch.tensor(0.0))
        for key in [key for key in state if key not in ("step", *(row_state.key for row_state in states))]:
            del state[key]  # torch's Adagrad makes its own when it is built
        for row_state in states:
            shape = (self.rows_here, 1 if row_state.per_row else self.width)
            present = state.get(row_state.key, torch.empty(0))
            dtype = state_dtype(row_state.key in self._narrow, self.flat.master.dtype)
            fits = present.numel() == shape[0] * shape[1]
            if int(step) and not fits:
                raise ValueError(
                    f"{row_state.key} of {self.full_name} is missing, or of another update than before; keep the "
                    "optimizer of tables, or load the checkpoint with load_optimizer_states=False"
                )
            is_plane = any(fits and present.data_ptr() == plane.data_ptr() for plane in self.rows.planes[1:])
            # A checkpoint is read into memory.
            if not fits or present.dtype != dtype or (not is_plane and tier is Tier.NVME):
                plane = plane_on(tier, shape, dtype, self.mesh.device, self._folder)
                initial = options.get(row_state.initial, 0.0) if row_state.initial else 0.0
                if fits:
                    plane.copy_(present.view(shape))
                elif initial:
                    plane.fill_(initial)
                state[row_state.key] = plane.view(-1)
            planes.append(state[row_state.key].view(shape))
        if [plane.data_ptr() for plane in planes] != [plane.data_ptr() for plane in self.rows.planes]:
            self.settle(forget=True)
            self.rows.replace(planes)


def has_hooks(weight: torch.Tensor) -> bool:
    """Return whether a parameter has hooks on its gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        return bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))


def add_up(ids: list[torch.Tensor], gradients: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return distinct row numbers, ascending, and the sums of their gradients in at least fp32, added in order.

    Each of ``ids`` is ascending, without duplicates.
    """
    if len(ids) == 1:
        return ids[0], gradients[0].to(torch.promote_types(gradients[0].dtype, torch.float32))
    every, inverse = torch.unique(torch.cat(ids), return_inverse=True)
    values = torch.cat(gradients)
    wide = values.new_zeros(every.numel(), values.shape[1], dtype=torch.promote_types(values.dtype, torch.float32))
    return every, wide.index_add_(0, inverse, values.to(wide.dtype))
