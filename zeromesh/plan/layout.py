"""One layout of a run: how ranks share a model, a sequence and a batch, and where states rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from zeromesh.comm import mesh
from zeromesh.model.placement import ROWS, Placement, PlacementRow, Tier
from zeromesh.pipeline.schedule.simulate import Costs
from zeromesh.plan.cost import Recompute

# No layout has expert ranks yet.
AXES = tuple(axis for axis in mesh.AXES if axis != "expert")


@dataclass(frozen=True)
class Widths:
    """Bytes of one element of each state; ``states`` are those of the optimizer beside the master."""

    parameter: int = 2
    gradient: int = 4  # of sums over micro-batches and ranks
    wire: int = 2  # of gradients that are sent
    master: int = 4  # 0 where the parameter is its own master
    states: int = 8  # of Adam: two of 4 bytes
    gathered: int = 0  # of sharded parameters that are sent; 0: as wide as they are computed with


@dataclass(frozen=True)
class TableLayout:
    """Place of the rows of embedding tables, and the states of their update."""

    tier: Tier = Tier.DEVICE
    states: int = 2  # numbers of an element; of Adam
    states_of_row: int = 0  # numbers of a row
    cached: int | None = None  # rows of each table in a cache on the device; None: there is none


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of all axes and choices of a run."""

    data: int = 1  # ranks of a shard group
    replicate: int = 1  # shard groups that replicate each other
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    row: PlacementRow = field(default_factory=lambda: ROWS[0])
    micro_batch: int = 1
    accumulation: int = 1  # micro-batches of an update
    schedule: str = "1f1b"
    chunks: int = 1  # stages of a pipeline rank
    costs: Costs | None = None  # measured times by which the schedule orders its actions; None: all equal
    recompute: Recompute = Recompute.NONE
    activations_on_host: bool = False  # what blocks keep for their recomputation
    sequence: bool = False  # sequence parallelism among the tensor ranks
    parameter_slots: int = 2  # gathered units at a time
    gradient_slots: int = 2
    early: float = 0.0  # share of states off the device whose update begins in the backward, into second copies
    widths: Widths = Widths()
    in_parts: bool = True  # the optimizer can take its step unit by unit
    tables: TableLayout = TableLayout()
    products: str = ""  # dtype of linear layers' products; "": that of the parameters

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return prod(getattr(self, axis) for axis in AXES)

    @property
    def samples(self) -> int:
        """Samples of an update."""
        return self.micro_batch * self.accumulation * self.data * self.replicate

    @property
    def stage(self) -> int:
        """The row's ZeRO number."""
        row = self.row
        return sum(state is Placement.SHARDED for state in (row.parameter, row.gradient, row.optimizer))
