"""State of an engine, which its parts share: what ``initialize`` made, and the run's counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from zeromesh.checkpoint.copies.background import BackgroundSaves
from zeromesh.checkpoint.copies.copies import MemoryCopies
from zeromesh.comm.course import this_rank
from zeromesh.comm.health import Health
from zeromesh.engine import reports
from zeromesh.engine.batches import MicroBatchSizes
from zeromesh.engine.computation import Computation
from zeromesh.engine.curriculum import LengthCurriculum
from zeromesh.engine.observe.observer import Observer
from zeromesh.engine.update import Update
from zeromesh.shard.optim.spikes import SpikeWatch

if TYPE_CHECKING:
    from zeromesh.engine.initialize.place_model import Placing


class EngineState:
    """State of an engine; ``Engine`` says what its attributes are. Only methods of the engine and its parts change it.

    Args:
        placing: the placed model.
        predict: the planner, see ``zeromesh.apps.plan.compare.prediction``.
    """

    def __init__(self, placing: Placing, predict: Callable[..., dict[str, Any]]) -> None:
        plan, sharded = placing.plan, placing.placed
        self.sharded, self.module, self.mesh, self.device = sharded, plan.model, plan.mesh, plan.mesh.device
        self.config = plan.settings
        self.optimizer, self.lr_scheduler = placing.optimizer, placing.scheduler
        self.context_parallel, self.activations = placing.sequences, placing.activations
        self.pipelined, self.training_dataloader = plan.stages, plan.loader
        # The position at the last update, not of the loader: batches handed out since would be lost after a restart.
        self.data_position = None if plan.loader is None else plan.loader.position
        self.passes: Iterator[Any] | None = None  # iterator of ``train_batch`` over ``training_data``
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.before, self.predict = plan.before, predict
        self.observer = Observer(plan.settings, plan.model, plan.mesh, plan.monitor)
        self.computation = _computation(placing, self.observer)
        self.stage_work = None if plan.stages is None else plan.stages.work(sharded, self.computation)
        self.accumulation = sharded.accumulation
        self.balance = placing.balance
        self.background = BackgroundSaves(plan.mesh)
        peer_copies = plan.settings.checkpoint.peer_copies
        self.copies = MemoryCopies(plan.mesh, peer_copies) if peer_copies else None
        self.update = Update(
            sharded,
            plan.settings,
            placing.optimizer,
            self.computation.first_batches,
            self.background.failed,
            placing.balance,
        )
        self.loss_scaler = self.update.scaler
        self.health = Health(plan.mesh)

    @property
    def skipped_steps(self) -> int:
        """Number of updates that were left out."""
        return self.update.skipped

    @property
    def spikes(self) -> SpikeWatch:
        """Comparison of updates with those before them."""
        return self.update.spikes

    def train_batch_size(self) -> int:
        """Samples per update over all ranks."""
        return self.config.train_micro_batch_size_per_gpu * self.accumulation.steps * self.mesh.data_size

    def change_sizes(self, sizes: Mapping[str, int]) -> None:
        """Change sizes of batches in the settings."""
        # A copy: the settings are frozen, and the user's object stays as it was given.
        self.config = self.config.model_copy(update=sizes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the micro-batches since the last update; accumulation starts anew.

        Args:
            set_to_none: accepted for torch's sake; gradients are always dropped.
        """
        # Not the optimizer's: its pieces have gradients only during an update.
        self.sharded.forget_gradients()
        self.accumulation.restart()
        if self.balance is not None:
            self.balance.forget()

    def resume(self, global_steps: int, global_samples: int, micro_steps: int, skipped_steps: int) -> None:
        """Take the counters of a checkpoint."""
        self.global_steps, self.global_samples, self.micro_steps = global_steps, global_samples, micro_steps
        self.update.resume(skipped_steps)
        this_rank.reach(global_steps)
        self.begin_update()

    def count_update(self, samples: int) -> None:
        """Count an update of so many samples, skipped or not; the micro-batches are used up."""
        self.global_steps += 1
        self.global_samples += samples
        this_rank.reach(self.global_steps)
        self.begin_update()
        if self.training_dataloader is not None:
            self.resume_data()

    def begin_update(self) -> None:
        """Prepare for the next update's samples."""
        if self.computation.curriculum is not None:
            self.computation.curriculum.begin(self.global_steps + 1)

    def forget_batches(self) -> None:
        """Drop gradients, which are of other parameters, and the iterator of ``train_batch``, which is elsewhere."""
        self.zero_grad()
        self.passes = None

    def resume_data(self) -> None:
        """Take the loader's position as that of the last update."""
        assert self.training_dataloader is not None
        self.data_position = self.training_dataloader.position


def _computation(placing: Placing, observer: Observer) -> Computation:
    plan, sharded = placing.plan, placing.placed
    settings, optimizer, activations, before = plan.settings, placing.optimizer, placing.activations, plan.before

    # Without a reference to the plan, which goes away.
    def explain() -> str:
        report = reports.memory(sharded, optimizer, activations, before)
        return reports.explain(report, sharded, optimizer, settings)

    rows = settings.train_micro_batch_size_per_gpu * settings.rows_per_sample
    sizes = MicroBatchSizes(rows, plan.says_batch and plan.mesh.rank == 0)
    chosen = settings.curriculum_learning
    lengths = LengthCurriculum(chosen, plan.model) if chosen.enabled else None
    loss_fn, balance = plan.arguments.loss_fn, placing.balance
    return Computation(sharded, settings.precision, observer, loss_fn, sizes, explain, lengths, balance)
