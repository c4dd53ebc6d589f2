"""Cost of any model, traced on the meta device: without memory, and without the device that is planned for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zeromesh.apps.plan.cost.cost import (
    NONE,
    Divided,
    ExpertCost,
    KernelWork,
    ModelCost,
    OperatorCall,
    TableCost,
    UnitCost,
    WorkKind,
)
from zeromesh.apps.plan.cost.estimate import estimate
from zeromesh.apps.plan.cost.live import cuts_of
from zeromesh.apps.plan.cost.passes import (
    MOST_TENSOR,
    PHASES,
    WHOLE_SEQUENCES,
    Inputs,
    Loss,
    TracedUnit,
    TraceError,
    TraceOptions,
    trace,
)
from zeromesh.base.lengths import option

InputsOf = Callable[[int, int], Inputs]  # of micro-batch and sequence

PEAKS = ("forward_peak", "backward_peak", "early_peak", "gradient_peak")
# Micro-batches that are traced. What a batch costs beyond them follows on a line; one sample is another case, as dims
# of one have no strides and need no copies.
TRACED = (2, 3)
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
"""Names of the number of experts of a token in configurations of transformers."""
BALANCED = "each expert is taken to get as many tokens as the others"
LARGEST_TRIED = 1024  # micro-batch up to which the moments of the peaks are searched


@dataclass(frozen=True)
class CostTable:
    """Costs of two micro-batches that run the same operators, from which that of any other follows; or one's."""

    batches: tuple[int, ...]
    costs: tuple[ModelCost, ...]
    # By unit and peak, moments that may be the peak's for some batch, in both traces.
    moments: tuple[dict[str, tuple[tuple[Divided, ...], ...]], ...] = ()

    def at(self, micro_batch: int) -> ModelCost:
        """Return the cost of a micro-batch."""
        if len(self.batches) == 1:
            return self.costs[0]
        weight = (micro_batch - self.batches[0]) / (self.batches[1] - self.batches[0])
        first, second = self.costs
        units = []
        for smaller, larger, moments in zip(first.units, second.units, self.moments, strict=True):
            unit = _line(smaller, larger, weight)
            peaks = {
                name: _cover([_line(pair[0], pair[1], weight) for pair in pairs]) for name, pairs in moments.items()
            }
            units.append(replace(unit, **peaks))
        return replace(first, micro_batch=micro_batch, units=tuple(units))


class TracedCost:
    """Cost of a model at any micro-batch and sequence, from traces that are kept.

    Args:
        model: module on any device, or a function that makes it, which is called when a trace is needed.
        inputs: keyword arguments of the forward for a micro-batch and a sequence length; or those of one call, of which
            the first dim of tensors is the batch, and the second of integer tensors the sequence.
        options: dtypes and kernels.
        loss: computes the loss from the output; see ``trace``.
        name: for people; by default that of the model's class.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        inputs: Inputs | InputsOf,
        options: TraceOptions | None = None,
        loss: Loss | None = None,
        *,
        name: str = "",
    ) -> None:
        is_module = isinstance(model, nn.Module)
        self._make: Callable[[], nn.Module] = (lambda: model) if isinstance(model, nn.Module) else model
        self._inputs: InputsOf = inputs if callable(inputs) else resized(inputs)
        self._options, self._loss = options or TraceOptions(), loss
        self.name = name or (type(model).__name__ if is_module else "model")
        self._tables: dict[tuple[int, int], CostTable] = {}
        self._costs: dict[tuple[int, int, int], ModelCost] = {}

    @cached_property
    def model(self) -> nn.Module:
        """The module; it is made if need be."""
        return self._make()

    def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
        """Return the cost of a micro-batch of ``sequence`` tokens a sample, of which each context rank has a part.

        Raises:
            ValueError: a size below one, or a sequence that the context ranks do not divide.
        """
        if min(micro_batch, sequence, context) < 1 or sequence % context:
            raise ValueError(
                f"micro_batch {micro_batch}, sequence {sequence} and context {context} must be at least 1, and context "
                "must divide the sequence"
            )
        asked = (micro_batch, sequence, context)
        if asked not in self._costs:
            cost = self._table(micro_batch, sequence // context).at(micro_batch)
            self._costs[asked] = _shared(replace(cost, sequence=sequence, context=context))
        return self._costs[asked]

    def _table(self, micro_batch: int, sequence: int) -> CostTable:
        for key in ((0, sequence), (micro_batch, sequence)) if micro_batch > 1 else ((1, sequence),):
            if key in self._tables:
                return self._tables[key]
        table = self._traced(TRACED if micro_batch > 1 else (1,), micro_batch, sequence)
        self._tables[(0 if len(table.batches) > 1 else micro_batch, sequence)] = table
        return table

    def _traced(self, batches: Sequence[int], micro_batch: int, sequence: int) -> CostTable:
        model, options = self.model, self._options
        run = partial(trace, model, options=options, loss=self._loss, cuts=cuts_of(model))
        try:
            # The number of tiles is no line in the number of samples.
            batches = batches if self._options.tiles == WHOLE_SEQUENCES else (micro_batch,)
            traces = [run(self._inputs(batch, sequence)) for batch in batches]
        except TraceError as error:
            cost = estimate(model, self.name, micro_batch, sequence, options, str(error))
            return CostTable((micro_batch,), (cost,))
        # Another number of samples may take another path.
        if len(traces) == 2 and not _aligned(traces[0][0], traces[1][0]):
            batches, traces = (micro_batch,), [run(self._inputs(micro_batch, sequence))]
        chosen = option(getattr(model, "config", None), *CHOSEN) or 1
        note = BALANCED if any(balanced for _, balanced in traces) else ""
        return _table(self.name, batches, sequence, [units for units, _ in traces], note, chosen)


def sequence_of(inputs: Inputs) -> int:
    """Return the length of the sequences in the inputs of a call; 1 where there are no ids, as for images."""
    dims = [x for x in inputs.values() if isinstance(x, torch.Tensor) and x.ndim > 1]
    return next((x.shape[1] for x in dims if x.dtype in (torch.int64, torch.int32)), 1)


def resized(inputs: Inputs) -> InputsOf:
    """Return a function that makes inputs like those of one call, of any micro-batch and sequence."""
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor) and value.ndim]
    batch = tensors[0].shape[0] if tensors else 1
    length = sequence_of(inputs)

    def make(micro_batch: int, sequence: int) -> Inputs:
        def like(tensor: torch.Tensor) -> torch.Tensor:
            dims = list(tensor.shape)
            if dims and dims[0] == batch:
                dims[0] = micro_batch
            dims[1:] = [sequence if dim == length > 1 else dim for dim in dims[1:]]
            return torch.empty(dims, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

        return {name: tree_map_only(torch.Tensor, like, value) for name, value in inputs.items()}

    return make


def _shared(cost: ModelCost) -> ModelCost:
    """Have each token of a part of a sequence attend to all parts."""
    if cost.context == 1:
        return cost

    def grown(works: Sequence[KernelWork]) -> tuple[KernelWork, ...]:
        of = WorkKind.ATTENTION
        return tuple(replace(w, flops=w.flops.times(cost.context)) if w.kind is of else w for w in works)

    units = []
    for unit in cost.units:
        works: dict[str, Any] = {phase: grown(getattr(unit, phase)) for phase in PHASES}
        units.append(replace(unit, **works))
    return replace(cost, units=tuple(units))


# From traces to tables.


def _aligned(first: Sequence[TracedUnit], second: Sequence[TracedUnit]) -> bool:
    """Return whether two traces are of the same operators."""

    def form(units: Sequence[TracedUnit]) -> list[Any]:
        works = [[[(work.kind, work.divided) for work in unit.works[phase]] for phase in PHASES] for unit in units]
        counts = [(unit.name, len(unit.forward), len(unit.backward), unit.begun, len(unit.calls)) for unit in units]
        return [*works, *counts]

    return form(first) == form(second)


def _table(
    name: str, batches: Sequence[int], sequence: int, traces: Sequence[Sequence[TracedUnit]], note: str, chosen: int
) -> CostTable:
    costs: list[list[UnitCost]] = [[] for _ in traces]
    moments = []
    for same in zip(*traces, strict=True):
        works: list[dict[str, Any]] = [{} for _ in same]
        for phase in PHASES:
            # Equal ones in both traces are one of a larger count.
            counts = Counter(zip(*(unit.works[phase] for unit in same), strict=True))
            for number in range(len(same)):
                works[number][phase] = tuple(replace(key[number], count=n) for key, n in counts.items())
        peaks = _moments(same, batches)
        moments.append(peaks)
        for number, unit in enumerate(same):
            covers: dict[str, Any] = {key: _cover([pair[number] for pair in pairs]) for key, pairs in peaks.items()}
            costs[number].append(
                UnitCost(
                    unit.name,
                    unit.block,
                    unit.parameters,
                    unit.frozen,
                    saved=unit.saved,
                    output=unit.output,
                    joins=unit.joins,
                    resident=unit.resident,
                    single=unit.tensors == 1,
                    tables=tuple(unit.tables),
                    calls=tuple(unit.calls),
                    experts=_experts(unit, batches[number] * sequence, chosen),
                    **covers,
                    **works[number],
                )
            )
    models = tuple(
        ModelCost(name, b, sequence, 1, tuple(units), note=note) for b, units in zip(batches, costs, strict=True)
    )
    return CostTable(tuple(batches), models, tuple(moments))


def _experts(unit: TracedUnit, tokens: int, chosen: int) -> ExpertCost | None:
    """Return the experts of a unit, of whose ``tokens`` each goes to ``chosen`` of them."""
    if not unit.experts:
        return None
    row = unit.output.on() / tokens
    amounts = float(tokens), row, unit.expert_frozen
    return ExpertCost(unit.expert_elements, unit.experts, min(chosen, unit.experts), *amounts)


def _moments(same: Sequence[TracedUnit], batches: Sequence[int]) -> dict[str, tuple[tuple[Divided, ...], ...]]:
    """Return, by peak, the moments that are the highest for some micro-batch or number of tensor ranks."""
    peaks = {}
    for name in PEAKS:
        each = []
        for unit in same:
            beyond = unit.forward if name == "forward_peak" else unit.backward
            if name in ("early_peak", "gradient_peak"):
                beyond = [a.plus(b) for a, b in zip(beyond, unit.gradients, strict=True)]
                begun = len(beyond) if unit.begun is None else unit.begun
                # What is accumulated first is there beside the memory that it is copied into.
                beyond = beyond[:begun] if name == "early_peak" else beyond[max(0, begun - 1) :]
            full = Divided(whole=unit.frozen.unpacked)  # one quantized weight at a time is there in full
            each.append([moment.plus(full) for moment in beyond] or [NONE])
        table = torch.tensor(each, dtype=torch.float64)  # (traces, moments, shares)
        rows = [table[0]]
        if len(batches) == 2:
            slope = (table[1] - table[0]) / (batches[1] - batches[0])
            tries = [*batches, *(2**n for n in range(2, LARGEST_TRIED.bit_length()))]
            rows = [table[0] + slope * (b - batches[0]) for b in tries]
        divisors = torch.tensor([[1.0, 1.0, 1.0], [1 / MOST_TENSOR, 1.0, 1.0], [1 / MOST_TENSOR, 1 / MOST_TENSOR, 1.0]])
        highest = {int(n) for row in rows for n in (row @ divisors.double().T).argmax(0)}
        peaks[name] = tuple(tuple(moments[n] for moments in each) for n in sorted(highest))
    return peaks


def _cover(moments: Sequence[Divided]) -> Divided:
    """Return one amount that is the highest moment's for one rank, and no less than each for ``MOST_TENSOR`` ranks."""
    top = max(moments, key=lambda moment: moment.on())
    lack = 1 - 1 / MOST_TENSOR
    missing = max(moment.on(MOST_TENSOR) for moment in moments) - top.on(MOST_TENSOR)
    if missing > 0:
        top = Divided(top.split - missing / lack, top.tokens + missing / lack, top.whole)
    missing = max(moment.on(MOST_TENSOR, True) for moment in moments) - top.on(MOST_TENSOR, True)
    if missing > 0:
        top = Divided(top.split, top.tokens - missing / lack, top.whole + missing / lack)
    return top if top.on() > 0 else NONE


def _line(first: Any, second: Any, weight: float) -> Any:
    """Return what lies on the line through two values, number by number: the second has the weight 1."""
    if first == second:
        return first
    if isinstance(first, Divided):
        return Divided(*(a + (b - a) * weight for a, b in zip(first, second, strict=True)))
    if isinstance(first, dict):
        return {key: _line(value, second[key], weight) for key, value in first.items()}
    if isinstance(first, tuple):
        return tuple(_line(a, b, weight) for a, b in zip(first, second, strict=True))
    if isinstance(first, KernelWork | OperatorCall | UnitCost | TableCost | ExpertCost):
        parts = {f.name: (getattr(first, f.name), getattr(second, f.name)) for f in fields(first)}
        return replace(first, **{key: _line(a, b, weight) for key, (a, b) in parts.items() if a != b})
    if isinstance(first, int):
        return round(first + (second - first) * weight)
    return first + (second - first) * weight
