"""State of an engine, which its base classes share: the parts that ``initialize`` makes, and the run's counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from zeromesh.checkpoint.copies.background import BackgroundSaves
from zeromesh.checkpoint.copies.copies import MemoryCopies
from zeromesh.comm.health import Health
from zeromesh.engine.computation import Computation
from zeromesh.engine.observe.observer import Observer
from zeromesh.engine.reports import Before
from zeromesh.engine.update import Update
from zeromesh.shard.optim.spikes import SpikeWatch
from zeromesh.shard.sharded import ShardedModel

if TYPE_CHECKING:
    from zeromesh.base.loader import Loader
    from zeromesh.config.settings import Resolved
    from zeromesh.engine.pipelined import Pipelined
    from zeromesh.parallel.activation.activation_store import ActivationStore
    from zeromesh.parallel.context.applied import SpreadSequences


@dataclass(frozen=True)
class Parts:
    """Parts of an engine, which ``initialize`` makes; ``EngineState`` describes them."""

    sharded: ShardedModel
    config: Resolved
    computation: Computation
    optimizer: Optimizer | None
    scheduler: Any
    loader: Loader | None
    observer: Observer
    context_parallel: SpreadSequences | None
    activations: ActivationStore | None
    pipelined: Pipelined | None
    before: Before
    predict: Callable[..., dict[str, Any]]  # the planner, see ``zeromesh.apps.plan.compare.prediction``


class EngineState:
    """State of an engine. Only methods of the engine change it.

    Attributes:
        module: the model, the same object that was passed in.
        mesh: the ranks.
        device: of this rank.
        optimizer: updates this rank's pieces; None if there is none.
        lr_scheduler: stepped after every update; None if there is none.
        training_dataloader: the loader of ``training_data``; None if there is none.
        data_position: its position at the last update; batches handed out since are not counted.
        config: the resolved settings.
        sharded: the model's states.
        loss_scaler: scales losses in fp16; None where they are not scaled.
        observer: measures the run.
        context_parallel: sequences spread over ranks; None where they are not.
        activations: storage of checkpointed modules' inputs until the backward; None where they stay in place.
        pipelined: pipeline stages; None where there is one stage.
        stage_work: computes this rank's stages; None where there is one stage.
        global_steps: updates so far, skipped ones included.
        global_samples: samples that all ranks have consumed in them.
        micro_steps: micro-batches so far.
    """

    def __init__(self, parts: Parts) -> None:
        self.sharded = parts.sharded
        self.module = parts.sharded.model
        self.mesh = parts.sharded.mesh
        self.device = parts.sharded.mesh.device
        self.config = parts.config
        self.optimizer = parts.optimizer
        self.lr_scheduler = parts.scheduler
        self.observer = parts.observer
        self.training_dataloader = parts.loader
        # The position at the last update, not of the loader: batches handed out since would be lost after a restart.
        self.data_position = None if parts.loader is None else parts.loader.position
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.context_parallel = parts.context_parallel
        self.activations = parts.activations
        self.pipelined = parts.pipelined
        self._before, self._predict = parts.before, parts.predict
        # Made here, because it needs the placed states and the computation.
        self.stage_work = None if parts.pipelined is None else parts.pipelined.work(parts.sharded, parts.computation)
        self._computation = parts.computation
        self._accumulation = parts.sharded.accumulation
        self._saves = BackgroundSaves(self.mesh)
        peer_copies = parts.config.checkpoint.peer_copies
        self._copies = MemoryCopies(self.mesh, peer_copies) if peer_copies else None
        self._update = Update(parts.sharded, parts.config, parts.optimizer, self._saves.failed)
        self._health = Health(self.mesh)
        self.loss_scaler = self._update.scaler
        self._passes: Iterator[Any] | None = None

    @property
    def skipped_steps(self) -> int:
        """Number of updates that were left out because a gradient was not finite, or as spikes."""
        return self._update.skipped

    @property
    def spikes(self) -> SpikeWatch:
        """Comparison of updates with those before them; ``spikes.last`` is the last update if it was a spike."""
        return self._update.spikes

    def train_batch_size(self) -> int:
        """Samples per update over all ranks."""
        return self.config.train_micro_batch_size_per_gpu * self._accumulation.steps * self.mesh.data_size

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the micro-batches since the last update; accumulation starts anew.

        Args:
            set_to_none: accepted for torch's sake; gradients are always dropped.
        """
        # Not the optimizer's: its pieces have gradients only during an update.
        self.sharded.forget_gradients()
        self._accumulation.restart()

    def resume(self, global_steps: int, global_samples: int, micro_steps: int, skipped_steps: int) -> None:
        """Take the counters of a checkpoint."""
        self.global_steps, self.global_samples, self.micro_steps = global_steps, global_samples, micro_steps
        self._update.resume(skipped_steps)
        self._begin_update()

    def _begin_update(self) -> None:
        if self._computation.curriculum is not None:
            self._computation.curriculum.begin(self.global_steps + 1)

    def resume_data(self) -> None:
        """Take the loader's position, which a checkpoint has set, as that of the last update."""
        assert self.training_dataloader is not None
        self.data_position = self.training_dataloader.position
