"""One layout of a run: how ranks share a model, a sequence and a batch, and where states rest."""

from __future__ import annotations

from dataclasses import dataclass, field

from zeromesh.apps.plan.cost.cost import Recompute
from zeromesh.base.axes import AXES, world_size
from zeromesh.base.placement import Placement
from zeromesh.comm.ordered_sums import SumPlace
from zeromesh.parallel.pipeline.schedule.simulate import Costs
from zeromesh.shard.sizes import Sharing, StateLayout, TableLayout


@dataclass(frozen=True)
class ParallelLayout(StateLayout):
    """Sizes of all axes and choices of a run."""

    data: int = 1  # ranks of a shard group
    replicate: int = 1  # shard groups that replicate each other
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1  # ranks that share experts, neighbours of one stage and replica
    expert_tensor: int = 0  # tensor ranks that divide each expert; 0: all of them where expert is 1, else none
    micro_batch: int = 1
    accumulation: int = 1  # micro-batches of an update
    schedule: str = "1f1b"
    chunks: int = 1  # stages of a pipeline rank
    costs: Costs | None = None  # measured times by which the schedule orders its actions; None: all equal
    recompute: Recompute = Recompute.NONE
    activations_on_host: bool = False  # what blocks keep for their recomputation
    sequence: bool = False  # sequence parallelism among the tensor ranks
    tables: TableLayout = field(default_factory=TableLayout)
    resting: TableLayout | None = None  # place of experts that rest; None: they do not
    ulysses: int = 1  # context ranks that share heads
    products: str = ""  # dtype of linear layers' products; "": that of the parameters

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return world_size(self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis, outermost first; 1 of those that the planner has no size for."""
        return {axis: getattr(self, axis, 1) for axis in AXES}

    @property
    def expert_split(self) -> int:
        """Number of tensor ranks that divide each expert."""
        return self.expert_tensor or (self.tensor if self.expert == 1 else 1)

    @property
    def expert_shares(self) -> int:
        """Number of ranks that share experts in units of their own; 1 where experts are in their blocks' units."""
        return self.expert * self.expert_split if self.expert > 1 else 1

    @property
    def expert_data(self) -> int:
        """Number of ranks of a stage and replica that have the same experts, over which their states are sharded."""
        return max(1, self.data * self.context * self.tensor // self.expert_shares)

    @property
    def samples(self) -> int:
        """Samples of an update."""
        return self.micro_batch * self.accumulation * self.data * self.replicate

    @property
    def stage(self) -> int:
        """The row's ZeRO number."""
        row = self.row
        return sum(state is Placement.SHARDED for state in (row.parameter, row.gradient, row.optimizer))

    def sharing(self, sums: SumPlace = SumPlace.COLLECTIVE) -> Sharing:
        """Return the ranks that share states; ``sums`` is where they sum gradients."""
        return Sharing(self.data * self.context, self.replicate, self.accumulation > 1, sums)
