"""One layout of a run: how ranks share a model, a sequence and a batch, and where states rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from zeromesh.comm import mesh
from zeromesh.comm.sums import SumPlace
from zeromesh.model.placement import ROWS, Placement, PlacementRow
from zeromesh.pipeline.schedule.simulate import Costs
from zeromesh.plan.cost import Recompute
from zeromesh.shard.sizes import StateLayout, TableLayout, Widths

# No layout has expert ranks yet.
AXES = tuple(axis for axis in mesh.AXES if axis != "expert")


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
    widths: Widths = field(default_factory=Widths)
    in_parts: bool = True  # the optimizer can take its step unit by unit
    tables: TableLayout = field(default_factory=TableLayout)
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

    def states(self, sums: SumPlace = SumPlace.COLLECTIVE) -> StateLayout:
        """Return how states are laid out over the ranks; ``sums`` is where gradients are summed."""
        return StateLayout(
            row=self.row,
            widths=self.widths,
            ranks=self.data * self.context,
            replicate=self.replicate,
            accumulates=self.accumulation > 1,
            parameter_slots=self.parameter_slots,
            gradient_slots=self.gradient_slots,
            early=self.early,
            in_parts=self.in_parts,
            sums=sums,
        )
