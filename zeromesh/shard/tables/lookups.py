"""Lookups of several tables in one exchange: a lookup waits until a result is needed, and takes the others along.

Messages cost more than the rows in them: a recommender with 26 tables, looked up one after the other, waits for 78
messages in each forward. A model calls its tables first and uses their outputs afterwards, as a rule, so that an
output whose values come at its first use makes three messages of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.utils._pytree import tree_map, tree_map_only

from zeromesh.base.spans import span
from zeromesh.comm.agreement import catch
from zeromesh.comm.collectives import Group
from zeromesh.shard.tables.row_exchange import LOOKUP_TAG, Route, RowRequest, ask, swap, vector_of
from zeromesh.shard.tables.table import Table

Compute = Callable[[torch.Tensor], torch.Tensor]  # output of the module, from the rows of its distinct indices


@dataclass(frozen=True)
class TableCall:
    """Arguments of one forward of a table."""

    ids: torch.Tensor  # int64, shape (k,), ascending, without duplicates
    compute: Compute  # with a graph; its shape and its graph must not depend on values of rows
    again: Compute  # the same without a graph, from copies of arguments that the caller may change
    failure: Exception | None = None  # to tell the other ranks, and to raise


class LookupState(Enum):
    """State of one lookup."""

    WAITING = "waiting"  # its rows are asked for with the next exchange
    FOUND = "found"
    FAILED = "failed"  # the exchange raised an error


class Lookup:
    """One call of a table."""

    def __init__(self, table: Table, ids: torch.Tensor, compute: Compute) -> None:
        self.ids, self.name = ids, table.name  # not the table: an output that nobody uses must not keep it
        self.rows = table.new_rows(ids)  # a leaf of the graph
        self.state = LookupState.WAITING
        self.value: torch.Tensor | None = None  # output of the module without a graph
        self._compute = compute
        self._stream = _current_stream(self.rows.device)
        self.filled: torch.Event | None = None  # on an accelerator: the value is there

    def begin(self) -> None:
        """Let the current stream write the rows: it waits for the stream of the call, which has the memory so far."""
        current = _current_stream(self.rows.device)
        if current is not None and current != self._stream:
            current.wait_stream(self._stream)
            self.rows.record_stream(current)

    def found(self, evaluate: bool) -> None:
        """Take the rows, which have come; ``evaluate``: compute the value from them, on the stream of the call."""
        self.state = LookupState.FAILED  # until nothing can fail any more
        current = _current_stream(self.rows.device)
        if current is not None and current != self._stream:
            self._stream.wait_stream(current)
        with nullcontext() if self._stream is None else self._stream:
            if evaluate:
                self.value = self._compute(self.rows.data)
            if self._stream is not None:
                self.filled = self._stream.record_event()
        self.state = LookupState.FOUND

    def failed(self) -> None:
        """Refuse later uses of the output."""
        self.state = LookupState.FAILED


class Lookups:
    """Lookups of one model's tables whose rows have not been asked for yet."""

    _engines = itertools.count()

    def __init__(self, group: Group, tables: Sequence[Table], batched: bool) -> None:
        self._group, self._place = group, {table: place for place, table in enumerate(tables)}
        self._batched = batched and group.size > 1 and len(tables) > 1
        self._waiting: dict[Table, Lookup] = {}
        self._engine = next(Lookups._engines)
        if tables and group.size > 1:  # ranks may have made other numbers of engines before
            self._engine = int(group.exchange(torch.tensor([self._engine]), LOOKUP_TAG)[0])
        # The first use may be in a compiled function, and messages are not compiled.
        self.use = torch.compiler.disable(self.need) if self._batched else self.need

    def look_up(self, table: Table, call: TableCall, at_once: bool) -> torch.Tensor:
        """Return the output of a table. Collective.

        Args:
            table: one of the model's.
            call: its arguments.
            at_once: True: the values are needed now.

        Raises:
            Exception: that of the call; RuntimeError if another rank fails, or looks up other tables.
        """
        place = self._place[table]
        if call.failure is not None:
            self._exchange((place, call.failure))
        if table in self._waiting:
            self.finish()
        lookup = self._waiting[table] = Lookup(table, call.ids, call.again)
        # In inference mode and inside torch.func the output must be an ordinary tensor.
        plain = torch.is_inference_mode_enabled() or torch._C._functorch.peek_interpreter_stack() is not None
        if at_once or not self._batched or plain:
            self.need(lookup, evaluate=False)
            return call.compute(lookup.rows)
        try:
            output = call.compute(lookup.rows)
        except Exception as error:  # of torch's function, about offsets or weights of samples
            self._exchange((place, error))
            raise
        # Its graph is right already. Its values come later, in other memory.
        waiting: torch.Tensor = _Wait.apply(output, lookup, self)  # type: ignore[no-untyped-call]
        return waiting

    def need(self, lookup: Lookup, evaluate: bool = True) -> None:
        """Fetch the rows of a lookup, and compute its value unless ``evaluate`` is False. Collective."""
        while lookup.state is LookupState.WAITING:
            self._exchange(plain=None if evaluate else lookup)
        if lookup.state is LookupState.FAILED:
            raise RuntimeError(f"the lookup of {lookup.name} failed, so its output has no values")

    def finish(self) -> None:
        """Fetch the rows of all lookups, before anything else is sent, or rows change. Collective."""
        while self._waiting:
            self._exchange()

    def drop(self) -> None:
        """Refuse later uses of outputs whose rows have not been asked for."""
        for lookup in self._waiting.values():
            lookup.failed()
        self._waiting.clear()

    def _exchange(self, failure: tuple[int, Exception] | None = None, plain: Lookup | None = None) -> None:
        """Deal with the lookups that all ranks have; ``plain`` needs no value."""
        chosen = sorted(self._waiting, key=lambda table: self._place[table])
        requests = [
            RowRequest(table.name, self._place[table], self._waiting[table].ids.to(self._group.device), table.per_rank)
            for table in chosen
        ]
        with _unobserved(), torch.no_grad(), span("lookup", "tables"):
            try:
                route = ask(self._group, LOOKUP_TAG, requests, len(self._place), failure, self._engine)
                common = {request.place for request in route.requests}
                tables = [table for table in chosen if self._place[table] in common]
                self._answer(route, tables)
            except Exception:
                self.drop()
                raise
            lookups = [self._waiting.pop(table) for table in tables]
            errors = [
                error
                for lookup in lookups
                if (error := catch(partial(lookup.found, lookup is not plain))[1]) is not None
            ]
        if errors:
            raise errors[0]

    def _answer(self, route: Route, tables: Sequence[Table]) -> None:
        """Send rows to the ranks that ask for them, in one message a rank, and take those asked for."""
        group, rank = self._group, self._group.rank
        lookups = [self._waiting[table] for table in tables]
        rows = [table.answer(torch.cat(route.of(index))) for index, table in enumerate(tables)]
        by_table = [row.split([counts[index] for counts in route.received]) for index, row in enumerate(rows)]
        landings = [
            lookup.rows.data.split([counts[index] for counts in route.sent]) for index, lookup in enumerate(lookups)
        ]
        # Rows of several dtypes travel as bytes.
        bytewise = len({row.dtype for row in rows}) > 1
        answers, coming, parts = {}, {}, {}
        for peer in range(group.size):
            answers[peer] = _pack([_flat(every[peer], bytewise) for every in by_table])
            parts[peer] = [_flat(landing[peer], bytewise) for landing in landings]
            lengths = [part.numel() for part in parts[peer]]
            coming[peer] = parts[peer][0] if len(lengths) == 1 else vector_of(sum(lengths), parts[peer][0].dtype, group)
        for lookup in lookups:
            lookup.begin()
        swap(group, LOOKUP_TAG, answers, coming, "table_rows")
        coming[rank] = answers[rank]
        for peer, message in coming.items():
            if message is not parts[peer][0]:
                torch.split_with_sizes_copy(message, [part.numel() for part in parts[peer]], out=parts[peer])


def _current_stream(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def _flat(part: torch.Tensor, bytewise: bool) -> torch.Tensor:
    return part.view(torch.uint8).view(-1) if bytewise else part.view(-1)


def _pack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


@contextmanager
def _unobserved() -> Iterator[None]:
    """Hide messages in this context from torch.func and from modes, as of selective checkpoints, that see functions."""
    with ExitStack() as stack:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        if torch._C._len_torch_dispatch_stack():
            from torch.utils._python_dispatch import _disable_current_modes

            stack.enter_context(_disable_current_modes())
        yield


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
    def __new__(cls, like: torch.Tensor, lookup: Lookup, lookups: Lookups) -> TableOutput:  # noqa: D102
        wrapper: TableOutput = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=like.device
        )
        return wrapper

    def __init__(self, like: torch.Tensor, lookup: Lookup, lookups: Lookups) -> None:
        torch._C._set_throw_on_mutable_data_ptr(self)  # C++ that would read the memory that is not there raises
        self._value: torch.Tensor | None = None
        self._filled: torch.Event | None = None
        # Weakly: an output that nobody uses must not keep the tables.
        self._lookup: Lookup | None = lookup
        self._lookups = ref(lookups)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def value(self) -> torch.Tensor:
        """Return the values, without a graph. Collective at the first call.

        Raises:
            RuntimeError: the lookup failed, or its engine is gone.
        """
        if self._value is None:
            assert self._lookup is not None
            lookups = self._lookups()
            if lookups is not None:
                lookups.use(self._lookup)
            self._value, self._filled, self._lookup = self._lookup.value, self._lookup.filled, None
            if self._value is None:
                raise RuntimeError("the engine that has the rows of this output is gone; use outputs while it is there")
        if self._filled is not None:  # whichever stream the output is used on
            torch.accelerator.current_stream(self._value.device).wait_event(self._filled)
        return self._value

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        wrapped: dict[int, TableOutput] = {}

        def unwrap(output: TableOutput) -> torch.Tensor:
            value = output.value()
            wrapped[id(value)] = output
            return value

        args, kwargs = tree_map_only(cls, unwrap, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if not func._schema.is_mutable:
            return result
        for output in wrapped.values():
            output._check_shape(func)
        # A function that writes in place returns the tensor that it was given.
        return tree_map(lambda leaf: wrapped.get(id(leaf), leaf), result)

    def _check_shape(self, func: Any) -> None:
        value = self.value()
        if value.size() != self.size() or value.stride() != self.stride():
            raise RuntimeError(
                f"{func} changes the shape of the output of a table from {tuple(self.size())} to {tuple(value.size())} "
                "in place; use the function that returns a new tensor"
            )

    # A wrapper has no memory: these methods read that of the value.

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array, as torch's method does."""
        return self._plain(force).numpy(force=force)

    def share_memory_(self) -> TableOutput:
        """Move the values to shared memory."""
        self.value().share_memory_()
        return self

    def apply_(self, function: Any) -> TableOutput:
        """Replace each value by that of a function of Python."""
        self._plain(False).apply_(function)
        return self

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._plain(False).__dlpack__(**kwargs)

    @property
    def data(self) -> torch.Tensor:
        """Values, without a graph; they cannot be replaced by other memory."""
        return self.value()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise RuntimeError("the output of a table cannot be given new data; use copy_() under torch.no_grad()")

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


def _of_value(name: str) -> Callable[[TableOutput], Any]:
    return lambda output: getattr(output.value(), name)()


for _name in ("tolist", "data_ptr", "untyped_storage", "storage", "__dlpack_device__"):
    setattr(TableOutput, _name, _of_value(_name))
