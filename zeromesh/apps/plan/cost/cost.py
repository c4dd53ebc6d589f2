"""Cost of a model by unit: parameters, activations, temporaries and operations, for one micro-batch.

The numbers are those of one rank that has the whole model. ``Divided`` says how ranks that share a model divide each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import NamedTuple, Protocol


class Recompute(StrEnum):
    """Activations that are computed again in the backward."""

    NONE = "none"
    SELECTIVE = "selective"  # those of attention's scores alone (Korthikanti et al., 2022)
    PRODUCTS = "all but products"  # of a block; results of matrix products and fused attention are kept
    BLOCKS = "blocks"  # all of a block, from its input
    PLANNED = "planned"  # of each block what a plan of saved tensors says

    @property
    def repeats(self) -> bool:
        """True if blocks are checkpointed."""
        return self not in (Recompute.NONE, Recompute.SELECTIVE)


class Divided(NamedTuple):
    """Bytes, elements or operations, by how the ranks of the tensor axis divide them."""

    split: float = 0.0  # divided by the tensor ranks
    tokens: float = 0.0  # whole on each of them, or divided where the sequence is split between their layers, too
    whole: float = 0.0  # whole on each of them in any case

    def on(self, tensor: int = 1, sequence: bool = False) -> float:
        """Return the amount of one of ``tensor`` ranks; ``sequence`` is for sequence parallelism."""
        return self.split / tensor + self.tokens / (tensor if sequence else 1) + self.whole

    def plus(self, other: Divided) -> Divided:
        """Return the sum."""
        return Divided(self.split + other.split, self.tokens + other.tokens, self.whole + other.whole)

    def times(self, factor: float) -> Divided:
        """Return a multiple."""
        return Divided(self.split * factor, self.tokens * factor, self.whole * factor)


NONE = Divided()


class Frozen(NamedTuple):
    """Parameters without gradients: their elements, and bytes."""

    elements: float = 0.0
    sharded: Divided = NONE  # bytes that rest, and are gathered, as parameters with gradients are
    resident: Divided = NONE  # of those, the root's, which stay gathered
    whole: float = 0.0  # bytes on every rank in any case: scales of bitsandbytes
    unpacked: float = 0.0  # bytes of the largest quantized one as a product reads it
    packed: float = 0.0  # bytes of all quantized ones as products read them

    def plus(self, other: Frozen) -> Frozen:
        """Return both together."""
        return Frozen(
            self.elements + other.elements,
            self.sharded.plus(other.sharded),
            self.resident.plus(other.resident),
            self.whole + other.whole,
            max(self.unpacked, other.unpacked),
            self.packed + other.packed,
        )


ALL_TRAINED = Frozen()


@dataclass(frozen=True)
class ExpertCost:
    """Experts of one unit, and the tokens of a micro-batch that are sent to them."""

    parameters: float  # elements, which are among the unit's
    number: int  # experts
    chosen: int  # experts of a token
    tokens: float  # of a micro-batch
    row: float  # bytes of a token on its way
    frozen: Frozen = ALL_TRAINED  # parameters without gradients, which are among the unit's

    def ranks_of_token(self, ranks: int) -> float:
        """Return the expected number of ranks that have an expert of one token; it travels once to each of them."""
        per_rank = self.number // ranks
        missed = prod(
            max(0, self.number - per_rank - taken) / (self.number - taken)
            for taken in range(min(self.chosen, self.number))
        )
        return ranks * (1.0 - missed)


class WorkKind(StrEnum):
    """Kind of operation, which decides what bounds it."""

    PRODUCT = "product"  # of matrices
    ATTENTION = "attention"
    NORM = "norm"
    ELEMENTWISE = "elementwise"
    LOOKUP = "lookup"
    LOSS = "loss"
    CONVOLUTION = "convolution"


@dataclass(frozen=True)
class KernelWork:
    """Operations of one kernel, or of ``count`` equal ones."""

    kind: WorkKind
    flops: Divided  # a multiplication and an addition are two
    moved: Divided  # bytes read and written
    shape: tuple[int, int, int] | None = None  # of a product: rows, columns, and the length of the sums
    divided: str = ""  # dim of ``shape`` that the tensor ranks divide: "columns", "sums" or none
    count: int = 1
    groups: int = 0  # experts that share the rows of a grouped product, evenly; 0: it is no such product


@dataclass(frozen=True)
class OperatorCall:
    """One operator in a block's forward, whose results may be kept for the backward."""

    operator: str  # as "aten::mm"
    number: int  # of its calls in the block before
    size: Divided  # bytes of its results
    unsaved: Divided  # of those bytes, what autograd does not keep without checkpointing
    beyond: Divided  # bytes that live when it is done, less those that are saved when the block is done
    kernels: tuple[KernelWork, ...]
    keepable: bool = True  # false: it is changed in place later, or handed on

    @property
    def key(self) -> tuple[str, int]:
        """Name of the operator and number of its call, as plans have them."""
        return self.operator, self.number


@dataclass(frozen=True)
class TableCost:
    """One embedding whose rows are spread over the ranks, or a layer's experts that rest."""

    name: str
    rows: int
    width: int  # elements of a row
    lookups: float = 0.0  # row numbers that a micro-batch of one rank looks up, repeated ones counted
    experts: bool = False  # rows are experts
    frozen: float = 0.0  # bytes of a row that has no gradient, beside its elements


@dataclass(frozen=True)
class UnitCost:
    """One unit of a model: a block, or what lies before, between and after blocks."""

    name: str
    block: bool  # true for one of a stack of like blocks, between which a pipeline can be cut
    parameters: Divided  # elements with gradients
    frozen: Frozen = ALL_TRAINED
    largest: Divided = NONE  # elements of the largest of them, whose gradient autograd makes at once
    shared: Divided = NONE  # elements that an earlier unit counts; a pipeline rank without that unit has a copy
    saved: Mapping[Recompute, Divided] = field(default_factory=dict)  # bytes kept for the backward, by policy
    output: Divided = NONE  # bytes handed to the next unit
    # The most bytes beyond what is saved, at any moment of the forward and of the backward; gradients of parameters
    # and gathered parameters are not among them.
    forward_peak: Divided = NONE
    backward_peak: Divided = NONE
    forward: tuple[KernelWork, ...] = ()
    input: tuple[KernelWork, ...] = ()  # of the gradients of inputs
    weight: tuple[KernelWork, ...] = ()  # of the gradients of parameters
    again: tuple[KernelWork, ...] = ()  # that the backward computes again in any case, as in tiles of tokens
    # As ``backward_peak``, with gradients of parameters from the operator that makes them until they are accumulated:
    # up to the first accumulation, and from it on, when the engine has memory for the unit's gradients.
    early_peak: Divided = NONE
    gradient_peak: Divided = NONE
    single: bool = False  # all its parameters, but for the root's, are one tensor, whose gradient is not copied
    # Those of ``parameters`` that no unit of the engine has, so that they stay gathered: the root's.
    resident: Divided = NONE
    joins: float = 0.0  # bytes of activations that tensor ranks sum in the forward; as many in the backward
    exchanged: Divided = NONE  # bytes of keys and values that each context rank hands on to the next
    tables: tuple[TableCost, ...] = ()  # that it looks up; their elements are not among ``parameters``
    experts: ExpertCost | None = None  # None: it has none
    calls: tuple[OperatorCall, ...] = ()  # of a block's forward, in their order; none where it was not traced
    repeated: tuple[KernelWork, ...] = ()  # kernels that ``Recompute.PLANNED`` computes again

    def elements(self, tensor: int = 1, expert: int = 1) -> tuple[float, float]:
        """Return the elements with gradients on a rank: those beside the experts, and those of experts in a unit.

        ``tensor`` ranks divide layers. ``expert`` ranks share whole experts, which then have a unit of their own.
        """
        if self.experts is None or expert == 1:
            return self.parameters.on(tensor), 0.0
        size = self.experts.parameters
        return self.parameters.plus(Divided(split=-size)).on(tensor), size / expert

    def frozen_bytes(self, tensor: int = 1, expert: int = 1) -> tuple[float, float, float]:
        """Return the bytes without gradients on a rank, as ``elements``, and last those that shard ranks have whole."""
        if self.experts is None or expert == 1:
            return self.frozen.sharded.on(tensor), 0.0, self.frozen.whole
        of_experts = self.experts.frozen
        rest = self.frozen.sharded.plus(of_experts.sharded.times(-1))
        replicated = self.frozen.whole - of_experts.whole * (1 - 1 / expert)
        return rest.on(tensor), of_experts.sharded.on() / expert, replicated


@dataclass(frozen=True)
class ModelCost:
    """Cost of a model for one micro-batch of ``micro_batch`` samples of ``sequence`` tokens.

    Where ``context`` ranks share a sequence, the amounts are those of one of them.
    """

    name: str
    micro_batch: int
    sequence: int
    context: int
    units: tuple[UnitCost, ...]  # in the order of the forward
    exact: bool = True  # false where the model could not be traced
    note: str = ""  # the reason, for the reader

    @property
    def parameters(self) -> int:
        """Number of parameters, trained or frozen; tied ones count once."""
        tables = sum(table.rows * table.width for unit in self.units for table in unit.tables)
        return round(sum(unit.parameters.on() + unit.frozen.elements for unit in self.units)) + tables

    @property
    def has_experts(self) -> bool:
        """True for a mixture of experts."""
        return any(unit.experts is not None for unit in self.units)

    @property
    def flops(self) -> float:
        """Operations of a forward and backward, without recomputation."""
        works = [work for unit in self.units for part in (unit.forward, unit.input, unit.weight) for work in part]
        return sum(work.flops.on() * work.count for work in works)


class CostSource(Protocol):
    """Model whose cost is known for any size of a micro-batch."""

    @property
    def name(self) -> str:
        """Name of the model."""
        ...

    def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
        """Return the cost of a micro-batch; ``context`` ranks share each sequence."""
