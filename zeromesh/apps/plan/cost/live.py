"""Record of a forward and backward on the meta device: storages while they live, and the operations on them.

torch's meta tensors have shapes and no values, and autograd runs on them as on real ones: it saves the same tensors and
lets go of them at the same moments. So the memory of a step is known without memory.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeromesh.apps.plan.cost.cost import NONE, Divided, KernelWork, WorkKind
from zeromesh.base.dry.dry_run import OperatorListener, tensors_in
from zeromesh.base.operation_counts import FORMULAS
from zeromesh.parallel.activation.selective import keeps_result

NO_NODE = 1 << 62  # sequence numbers of autograd's nodes that accumulate gradients lie above


class TensorShare(IntEnum):
    """Division of a tensor over the ranks of the tensor axis; the larger one wins where two meet."""

    WHOLE = 0
    TOKENS = 1
    SPLIT = 2


class ParameterCut(NamedTuple):
    """Dim in which a parameter is cut over the tensor ranks."""

    outputs: bool  # false: its inputs, whose products are summed
    gathered: bool = False  # activations on the cut side are gathered, or split, at the layer
    rows: bool = False  # of an embedding: a sum of rows in a lookup, and the outputs of a head that is tied to it


Cuts = Mapping[str, ParameterCut]  # by names of parameters


@dataclass(slots=True, eq=False)
class TracedStorage:
    """One storage."""

    size: int  # bytes
    slot: int  # of the recorder, in which it was made
    share: TensorShare = TensorShare.WHOLE
    weight: bool = False  # a parameter, or made of parameters alone, as a cast or a transpose
    cut: ParameterCut | None = None
    known: bool = False  # a parameter or buffer of the model, which are not counted
    scores: bool = False  # of attention
    gradient: bool = False  # of a parameter
    saver: int = -1  # slot that kept it first for the backward

    def divided(self) -> Divided:
        """Return its bytes."""
        return divide(self.size, self.share)

    def change(self, share: TensorShare, only: TensorShare | None = None) -> None:
        """Set its share, or set it if it has another one."""
        if only is None or self.share is only:
            self.share = share

    def keep(self, slot: int) -> None:
        """Note that the backward needs it; the first slot that says so counts."""
        self.saver = slot if self.saver < 0 else self.saver

    def accumulate(self) -> None:
        """Note that it is the gradient of a parameter."""
        self.gradient = True

    def result(self, share: TensorShare, cut: ParameterCut | None, weight: bool, scores: bool, new: bool) -> None:
        """Note that an operator made it, or wrote to it if it is not new."""
        self.scores = self.scores or scores
        self.share = share if new else max(self.share, share)
        if new:
            self.weight, self.cut = weight, cut if weight else None


def divide(amount: float, share: TensorShare) -> Divided:
    """Return an amount that is all of one share."""
    if share is TensorShare.WHOLE:
        return Divided(whole=amount)
    return Divided(split=amount) if share is TensorShare.SPLIT else Divided(tokens=amount)


class TracedProduct(NamedTuple):
    """Result of a product or of fused attention, which selective checkpointing keeps."""

    stored: TracedStorage
    summed: bool  # over tensor ranks, behind the operator, so that it is whole on each

    def divided(self) -> Divided:
        """Return its bytes."""
        return divide(self.stored.size, TensorShare.WHOLE if self.summed else self.stored.share)


class Event(NamedTuple):
    """A storage appears or is freed."""

    stored: TracedStorage
    sign: int
    slot: int


@dataclass(slots=True)
class TracedWork:
    """One operation and where it ran."""

    slot: int
    phase: str  # forward, input, weight, or again: the model's own recomputation
    kernel: KernelWork


class TracedCall(NamedTuple):
    """One operator of the forward that makes storages."""

    slot: int
    operator: str  # as "aten::mm"
    number: int  # of calls of this operator in the slot before
    results: tuple[TracedStorage, ...]
    kernels: tuple[KernelWork, ...]
    events: int  # until it was done


class _Facts(NamedTuple):
    """Properties of an operator that do not depend on its arguments."""

    formula: Any
    kind: WorkKind
    product: bool


_KINDS: tuple[tuple[WorkKind, tuple[str, ...]], ...] = (
    (WorkKind.ATTENTION, ("scaled_dot_product", "flash_attention", "efficient_attention")),
    (WorkKind.CONVOLUTION, ("convolution",)),
    (WorkKind.LOSS, ("log_softmax", "nll_loss", "mse_loss", "binary_cross_entropy", "smooth_l1", "huber", "_ctc")),
    (WorkKind.NORM, ("layer_norm", "group_norm", "batch_norm", "rms_norm")),
    (WorkKind.LOOKUP, ("embedding", "index_select", "gather", "index_put")),
)
# Operators that only reserve memory.
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh")
_aten = torch.ops.aten
# Kernels of GPUs that skip the masked half of the scores, with the place of ``is_causal`` among their arguments.
_CAUSAL = {
    _aten._scaled_dot_product_flash_attention: 4,
    _aten._scaled_dot_product_flash_attention_backward: 11,
}
# Position of both factors among the arguments.
_FACTORS = {_aten.mm: (0, 1), _aten.addmm: (1, 2), _aten.bmm: (0, 1), _aten.baddbmm: (1, 2)}


@cache
def _facts(func: Any) -> _Facts:
    name, formula = func._overloadpacket.__name__, FORMULAS.get(func._overloadpacket)
    matching_kind = next((kind for kind, words in _KINDS if any(word in name for word in words)), None)
    kind = matching_kind or (WorkKind.PRODUCT if formula is not None else WorkKind.ELEMENTWISE)
    product = formula is not None and kind in (WorkKind.PRODUCT, WorkKind.CONVOLUTION)
    return _Facts(formula, kind, product)


class StorageRecorder(OperatorListener):
    """Record of operators on meta tensors, and of what autograd saves of them.

    A slot is a stretch of the forward in one unit, or between units; the user of this class says where they begin.
    """

    def __init__(
        self,
        cuts: Mapping[int, ParameterCut],
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        originals: Collection[int],
        lazy: bool = False,
    ) -> None:
        self._lazy = lazy  # logits in chunks have shapes that take no memory, on the meta device as elsewhere
        self._originals = originals  # by ``id``, the tensors of the user's model, which a copy does not read
        self.events: list[Event] = []
        self.works: list[TracedWork] = []
        self.accumulations: list[tuple[int, int]] = []  # of gradients: number of events before, and the slot
        self.sums: dict[int, float] = {}  # bytes that tensor ranks sum in the forward, by slot
        self.slot, self.block = 0, False
        self.first_reads: dict[int, int] = {}  # by key of a parameter's storage, the first slot that reads it
        self._live: dict[int, tuple[TracedStorage, weakref.ref[Any] | None]] = {}
        self._begins: list[int] = [0]  # sequence numbers of autograd with which slots begin
        self._slots: list[int] = [0]
        self._with_weight: set[int] = set()  # sequence numbers of nodes whose operation has a parameter
        self.products: list[TracedProduct] = []  # of the forward
        self.calls: list[TracedCall] = []  # of the forward
        self.written: set[int] = set()  # by ``id``, storages that an operator changed in place
        self._called: Counter[tuple[int, str]] = Counter()
        for tensor in (*parameters, *buffers):
            storage = tensor.untyped_storage()
            self._live[storage._cdata] = (TracedStorage(storage.nbytes(), -1, known=True), None)
        for tensor in parameters:
            stored, cut = self._live[tensor.untyped_storage()._cdata][0], cuts.get(id(tensor))
            stored.result(TensorShare.SPLIT if cut else TensorShare.WHOLE, cut, weight=True, scores=False, new=True)
        self._parameters = {id(stored): key for key, (stored, _) in self._live.items() if stored.weight}

    # Slots.

    def begin(self, slot: int, block: bool) -> None:
        """Attribute what follows in the forward, and its backward, to a slot; ``block`` is for one inside a block."""
        self.slot, self.block = slot, block
        self._begins.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._slots.append(slot)

    def find(self, tensor: Tensor) -> TracedStorage:
        """Return the record of a tensor's storage; one that is new appears now."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        entry = self._live.get(key)
        if entry is not None:
            return entry[0]
        stored = TracedStorage(storage.nbytes(), self.slot)
        self._live[key] = (stored, weakref.ref(storage, partial(self._freed, key, stored)))
        self.events.append(Event(stored, 1, self.slot))
        return stored

    def alive(self) -> Iterator[TracedStorage]:
        """Return storages that live now and are not the model's."""
        return (stored for stored, _ in list(self._live.values()) if not stored.known)

    def saves(self, tensor: Tensor) -> Tensor:
        """Note that autograd keeps a tensor; the hook of ``torch.autograd.graph.saved_tensors_hooks``."""
        if tensor.is_meta:
            self.find(tensor).keep(self.slot)
        return tensor

    def accumulated(self, parameter: Tensor) -> None:
        """Note that a parameter's gradient is complete, and drop it."""
        if parameter.grad is not None:
            self.find(parameter.grad).accumulate()
            self.accumulations.append((len(self.events), self.slot))
            del parameter.grad

    def _freed(self, key: int, stored: TracedStorage, _: Any) -> None:
        self._live.pop(key, None)
        self.events.append(Event(stored, -1, self.slot))

    # Operators.

    def on_read(self, func: Any, tensors: Sequence[Tensor]) -> None:
        """Refuse operators on the user's model itself, whose units are not followed."""
        if any(id(tensor) in self._originals for tensor in tensors):
            raise RuntimeError("a function, as one in place of a forward, computes with the model itself, not its copy")

    def on_operator(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note an operator's storages and its work."""
        if func.is_view:
            return
        facts, writes = _facts(func), func._schema.is_mutable
        backward = torch._C._current_graph_task_id() != -1
        operator, name = func._schema.name, func._overloadpacket.__name__
        number = self._called[self.slot, operator]
        if not backward:
            self._called[self.slot, operator] += 1
        if self._lazy and name in _EMPTY:  # it counts from its first use on
            return
        in_weighted = self._enter_node() if backward else False
        operands = [(tensor, self.find(tensor)) for tensor in tensors_in((*args, *kwargs.values())) if tensor.is_meta]
        weights = [stored for _, stored in operands if stored.weight]
        active = [stored for _, stored in operands if not stored.weight]
        share = max((stored.share for stored in active), default=TensorShare.WHOLE)
        cut = next((stored.cut for stored in weights if stored.cut), None)
        if cut is not None and cut.rows and active and facts.product:
            cut = ParameterCut(outputs=True)
        for stored in weights if not backward else ():
            if stored.known:
                self.first_reads.setdefault(self._parameters[id(stored)], self.slot)
        if cut is not None and cut.outputs and facts.product and not backward:
            # The engine gathers the input from the ranks' parts of a sequence, and keeps it whole.
            for stored in active:
                stored.change(TensorShare.WHOLE, only=TensorShare.TOKENS)
        if not backward and weights and active:
            self._with_weight.add(torch.autograd._get_sequence_nr() - 1)  # type: ignore[attr-defined]
        made_share = self._share_of_result(facts, share, cut, bool(active), backward)
        results = [tensor for tensor in tensors_in((result,)) if tensor.is_meta]
        operand_ids = {id(stored) for _, stored in operands}
        result_storages = [self.find(tensor) for tensor in results]
        scores = not backward and _makes_scores(facts, func, operands, results)
        for tensor, stored in zip(results, result_storages, strict=True):
            if stored.known or (id(stored) in operand_ids and not writes):
                continue
            weight = bool(weights) and not active
            stored.result(made_share, cut, weight, scores and tensor.ndim > 2, new=id(stored) not in operand_ids)
        if not backward and active and keeps_result(func):
            summed = cut is not None and not cut.outputs
            self.products += [TracedProduct(stored, summed) for stored in result_storages if not stored.known]
        crosses = facts.product or facts.kind is WorkKind.LOOKUP
        if cut and active and not backward and made_share is not TensorShare.SPLIT and crosses:
            # A gather moves half of what a sum does.
            half = 0.5 if cut.gathered and cut.outputs else 1.0
            size = sum(tensor.nbytes for tensor in results[:1])
            self.sums[self.slot] = self.sums.get(self.slot, 0.0) + half * size
        self.written |= operand_ids if writes else set()
        if name in _EMPTY or (not writes and all(id(stored) in operand_ids for stored in result_storages)):
            return
        again = backward and torch.is_grad_enabled()  # a recomputation of the model's own, or of tiles
        phase = "forward" if again or not backward else "weight" if in_weighted and not weights else "input"
        kernels = list(self._kernels(func, facts, args, kwargs, result, operands, results, cut, phase))
        self.works += [TracedWork(self.slot, "again" if again else its_phase, kernel) for kernel, its_phase in kernels]
        new_storages = tuple(x for x in result_storages if id(x) not in operand_ids and not (x.known or x.weight))
        if new_storages and not backward:
            works = tuple(kernel for kernel, _ in kernels)
            self.calls.append(TracedCall(self.slot, operator, number, new_storages, works, len(self.events)))

    def _enter_node(self) -> bool:
        """Attribute a backward's operator to the slot of the forward; return whether the forward had a parameter."""
        node = torch._C._current_autograd_node()
        number = NO_NODE if node is None else node._sequence_nr()
        if number >= NO_NODE:
            return False
        self.slot = self._slots[bisect_right(self._begins, number) - 1]
        return number in self._with_weight

    def _share_of_result(
        self, facts: _Facts, share: TensorShare, cut: ParameterCut | None, active: bool, backward: bool
    ) -> TensorShare:
        if cut is None:
            return share
        if not active or not (facts.product or facts.kind is WorkKind.LOOKUP):
            return TensorShare.SPLIT
        if cut.outputs is not backward:  # the forward of columns, the backward of rows
            return TensorShare.WHOLE if cut.gathered else TensorShare.SPLIT
        return TensorShare.TOKENS if self.block else TensorShare.WHOLE

    def _kernels(
        self,
        func: Any,
        facts: _Facts,
        args: Any,
        kwargs: Any,
        result: Any,
        operands: list[tuple[Tensor, TracedStorage]],
        results: list[Tensor],
        cut: ParameterCut | None,
        phase: str,
    ) -> Iterator[tuple[KernelWork, str]]:
        share = max((stored.share for _, stored in operands), default=TensorShare.WHOLE)
        share = TensorShare.SPLIT if cut else share
        moved = NONE
        for tensor, stored in operands:
            moved = moved.plus(divide(min(tensor.nbytes, stored.size), stored.share))
        for tensor in results:
            stored = self.find(tensor)
            moved = moved.plus(divide(min(tensor.nbytes, stored.size), stored.share))
        packet = func._overloadpacket
        if packet is _aten.convolution_backward:
            masks = (([True, False, False], "input"), ([False, True, False], "weight"))
            for mask, its_phase in masks:
                if args[-1][mask.index(True)]:
                    flops = facts.formula(*args[:-1], mask, out_val=result)
                    yield KernelWork(facts.kind, divide(flops, share), moved, divided=""), its_phase
            return
        flops = 0 if facts.formula is None else int(facts.formula(*args, **kwargs, out_val=result))
        if packet in _CAUSAL and args[_CAUSAL[packet] :][:1] == (True,):
            flops //= 2
        kind, shape, divided, groups = facts.kind, None, "", 0
        if packet is _aten._grouped_mm:
            first, second, groups = args[0], args[1], len(args[2])
            # A weight's gradient sums over the rows of each expert.
            rows, sums = (first.shape[1], first.shape[0]) if second.ndim == 2 else first.shape[-2:]
            shape = (rows, second.shape[-1], sums)
            divided = "columns" if cut is None or cut.outputs is (phase == "forward") else "sums"
        if packet in _FACTORS:
            first, second = (args[position] for position in _FACTORS[packet])
            batch = first.shape[0] if first.ndim > 2 else 1
            shape = (batch * first.shape[-2], second.shape[-1], first.shape[-1])
            if any(stored.scores for _, stored in operands) or any(self.find(tensor).scores for tensor in results):
                kind = WorkKind.ATTENTION
            if phase == "weight":
                # The dim of the gradient that is cut becomes the columns.
                if self.find(first).share is TensorShare.SPLIT and first.ndim == 2:
                    shape, divided = (shape[1], shape[0], shape[2]), "columns"
                elif self.find(second).share is TensorShare.SPLIT:
                    divided = "columns"
            elif cut is not None:
                divided = "columns" if cut.outputs is (phase == "forward") else "sums"
        yield KernelWork(kind, divide(flops, share), moved, shape, divided, groups=groups), phase


def _makes_scores(
    facts: _Facts, func: Any, operands: list[tuple[Tensor, TracedStorage]], results: list[Tensor]
) -> bool:
    """Return whether a result is attention's scores: a batch of products of activations, or made of scores."""
    of_scores = [tensor for tensor, stored in operands if stored.scores]
    if func._overloadpacket in (_aten.bmm, _aten.baddbmm):
        return not of_scores and not any(stored.weight for _, stored in operands)
    if facts.product or facts.kind is WorkKind.ATTENTION:
        return False
    largest = max((tensor.numel() for tensor in results), default=0)
    return any(tensor.numel() <= largest for tensor in of_scores)
