"""Lookups of several tables in one exchange: a lookup waits until a result is needed, and takes the others along.

Messages cost more than the rows in them: a recommender with 26 tables, looked up one after the other, waits for 78
messages in each forward. A model calls its tables first and uses their outputs afterwards, as a rule, so that an
output whose values come at its first use makes three messages of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch.utils._pytree import tree_map, tree_map_only

from zeromesh.comm.collectives import Group
from zeromesh.observe.spans import span
from zeromesh.shard.table.exchange import LOOKUP_TAG, Route, RowRequest, ask, swap, vector_of
from zeromesh.shard.table.table import Table

Compute = Callable[[torch.Tensor], torch.Tensor]  # output of the module, from the rows of its distinct indices


class LookupState(Enum):
    """State of one lookup."""

    WAITING = "waiting"  # its rows are asked for with the next exchange
    FOUND = "found"
    FAILED = "failed"  # the exchange raised an error


class Lookup:
    """One call of a table."""

    def __init__(self, table: Table, ids: torch.Tensor) -> None:
        self.table, self.ids = table, ids
        self.rows = table.new_rows(ids)  # a leaf of the graph
        self.state = LookupState.WAITING
        self._refill: Callable[[], None] | None = None
        self._stream = _current_stream(self.rows.device)

    def compute(self, compute: Compute) -> torch.Tensor:
        """Return the output, whose values are right once the rows are there; its graph is right at once."""
        output = compute(self.rows)

        def refill() -> None:
            if output.device.type != "cpu":
                output.record_stream(torch.accelerator.current_stream(output.device))
            # Through ``data``: nothing has read these values, and versions that were saved stay valid.
            output.data.copy_(compute(self.rows.data))

        self._refill = refill
        return output

    def begin(self) -> None:
        """Let the current stream write the rows: it waits for the stream of the call, which has the memory so far."""
        current = _current_stream(self.rows.device)
        if current is not None and current != self._stream:
            current.wait_stream(self._stream)
            self.rows.record_stream(current)

    def found(self) -> None:
        """Compute the values from the rows, which have come."""
        self.state = LookupState.FOUND
        if self._refill is not None:
            self._refill()
            self._refill = None
        current = _current_stream(self.rows.device)
        if current is not None and current != self._stream:
            # Functions after this one may use the output on the stream of the call, whichever used it first.
            self._stream.wait_stream(current)

    def failed(self) -> None:
        """Refuse later uses of the output."""
        self.state, self._refill = LookupState.FAILED, None


class Lookups:
    """Lookups of one model's tables whose rows have not been asked for yet."""

    def __init__(self, group: Group, tables: Sequence[Table], batched: bool) -> None:
        self._group, self._place = group, {table: place for place, table in enumerate(tables)}
        self._batched = batched and group.size > 1 and len(tables) > 1
        self._waiting: dict[Table, Lookup] = {}
        # The first use may be in a compiled function, and messages are not compiled.
        self.use = torch.compiler.disable(self.need) if self._batched else self.need

    def look_up(
        self, table: Table, ids: torch.Tensor, compute: Compute, at_once: bool, failure: Exception | None
    ) -> torch.Tensor:
        """Return the output of a table. Collective.

        Args:
            table: one of the model's.
            ids: int64, ascending and without duplicates.
            compute: computes the output from the rows; its shape and its graph must not depend on their values.
            at_once: True: the values are needed now.
            failure: an error to tell the other ranks and to raise.

        Raises:
            Exception: ``failure``; RuntimeError if another rank fails, or looks up other tables.
        """
        place = self._place[table]
        if failure is not None:
            self._exchange((place, failure))
        if table in self._waiting:
            self.finish()
        lookup = self._waiting[table] = Lookup(table, ids)
        if at_once or not self._batched or _transformed():
            self.need(lookup)
            return compute(lookup.rows)
        try:
            output = lookup.compute(compute)
        except Exception as error:  # of torch's function, about offsets or weights of samples
            self._exchange((place, error))
            raise
        waiting: torch.Tensor = _Wait.apply(output, lookup, self)  # type: ignore[no-untyped-call]
        return waiting

    def need(self, lookup: Lookup) -> None:
        """Have the rows of a lookup. Collective."""
        while lookup.state is LookupState.WAITING:
            self._exchange()
        if lookup.state is LookupState.FAILED:
            raise RuntimeError(f"the lookup of {lookup.table.name} failed, so its output has no values")

    def finish(self) -> None:
        """Have the rows of all lookups, before anything else is sent, or rows change. Collective."""
        while self._waiting:
            self._exchange()

    def _exchange(self, failure: tuple[int, Exception] | None = None) -> None:
        chosen = sorted(self._waiting.values(), key=lambda lookup: self._place[lookup.table])
        requests = [
            RowRequest(one.table.name, self._place[one.table], one.ids.to(self._group.device), one.table.per_rank)
            for one in chosen
        ]
        with torch.no_grad(), span("lookup", "tables"):
            try:
                route = ask(self._group, LOOKUP_TAG, requests, len(self._place), failure)
            except Exception:
                for one in self._waiting.values():
                    one.failed()
                self._waiting.clear()
                raise
            common = {request.place for request in route.requests}
            self._answer(route, [one for one in chosen if self._place[one.table] in common])

    def _answer(self, route: Route, lookups: Sequence[Lookup]) -> None:
        """Send rows to the ranks that ask for them, in one message a rank, and take those asked for."""
        group, rank = self._group, self._group.rank
        rows = [one.table.answer(torch.cat(route.of(index))) for index, one in enumerate(lookups)]
        by_table = [row.split([counts[index] for counts in route.received]) for index, row in enumerate(rows)]
        landings = [one.rows.data.split([counts[index] for counts in route.sent]) for index, one in enumerate(lookups)]
        # Rows of several dtypes travel as bytes.
        bytewise = len({one.dtype for one in rows}) > 1
        answers, coming, parts = {}, {}, {}
        for peer in range(group.size):
            answers[peer] = _pack([_flat(every[peer], bytewise) for every in by_table])
            parts[peer] = [_flat(landing[peer], bytewise) for landing in landings]
            lengths = [part.numel() for part in parts[peer]]
            coming[peer] = parts[peer][0] if len(lengths) == 1 else vector_of(sum(lengths), parts[peer][0].dtype, group)
        for one in lookups:
            one.begin()
        swap(group, LOOKUP_TAG, answers, coming, "table_rows")
        coming[rank] = answers[rank]
        for peer, message in coming.items():
            if message is not parts[peer][0]:
                torch.split_with_sizes_copy(message, [part.numel() for part in parts[peer]], out=parts[peer])
        for one in lookups:
            del self._waiting[one.table]
            one.found()


def _current_stream(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def _flat(part: torch.Tensor, bytewise: bool) -> torch.Tensor:
    return part.view(torch.uint8).view(-1) if bytewise else part.view(-1)


def _pack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def _transformed() -> bool:
    """Return whether the output must be an ordinary tensor: in inference mode, and inside torch.func."""
    return torch.is_inference_mode_enabled() or torch._C._functorch.peek_interpreter_stack() is not None


class _Wait(torch.autograd.Function):
    """Output of a lookup -> the same, with values that come at the first use."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, lookup: Lookup, lookups: Lookups) -> torch.Tensor:
        return TableOutput(output.data, lookup, lookups)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0], None, None


class TableOutput(torch.Tensor):
    """Output of a table, an ordinary tensor for all that computes with it; its first use has the rows looked up.

    It works below autograd, as torch's ``AsyncCollectiveTensor`` does: graphs are those of an ordinary tensor.
    """

    @staticmethod
    def __new__(cls, value: torch.Tensor, lookup: Lookup, lookups: Lookups) -> TableOutput:  # noqa: D102
        made: TableOutput = torch.Tensor._make_wrapper_subclass(
            cls, value.size(), strides=value.stride(), dtype=value.dtype, device=value.device
        )
        return made

    def __init__(self, value: torch.Tensor, lookup: Lookup, lookups: Lookups) -> None:
        self._value = value
        self._lookup: Lookup | None = lookup
        self._lookups: Lookups | None = lookups

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def value(self) -> torch.Tensor:
        """Return the values, without a graph. Collective at the first call."""
        if self._lookup is not None and self._lookups is not None:
            self._lookups.use(self._lookup)
            self._lookup = self._lookups = None
        return self._value

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        wrapped: dict[int, TableOutput] = {}

        def unwrap(one: TableOutput) -> torch.Tensor:
            value = one.value()
            wrapped[id(value)] = one
            return value

        args, kwargs = tree_map_only(cls, unwrap, (args, kwargs or {}))
        found = func(*args, **kwargs)
        # What a function changes in place, it returns as it was given.
        return tree_map(lambda one: wrapped.get(id(one), one), found) if func._schema.is_mutable else found

    # These look at memory, which a wrapper does not have.

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array, as torch's method does."""
        return self._plain(force).numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as a list."""
        return self.value().tolist()

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self.value().data_ptr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain(True).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self._plain(False).clone()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return repr(self.value())

    def _plain(self, force: bool) -> torch.Tensor:
        if self.requires_grad and not force:
            raise RuntimeError(
                "the output of a table requires grad, so it has no array and no copy: use .detach().numpy() or .clone()"
            )
        return self.value()
