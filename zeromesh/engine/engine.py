"""Engine: forward, backward, step.

``computation.py`` runs forward and backward, ``update.py`` the update, ``saving.py`` saves and loads, and
``engine_reports.py`` tells of the run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from zeromesh.base.modes import modes_of, set_modes
from zeromesh.base.signatures import refuse
from zeromesh.base.spans import span
from zeromesh.base.words import counted
from zeromesh.comm.course import this_rank
from zeromesh.comm.rank import record_step
from zeromesh.engine import batches
from zeromesh.engine.delegation import Attribute, of_part
from zeromesh.engine.engine_reports import Reports
from zeromesh.engine.observe.monitors import learning_values
from zeromesh.engine.saving import Saves
from zeromesh.engine.state import EngineState
from zeromesh.parallel.activation.compiled import compile_blocks
from zeromesh.shard.optim.bound import bind
from zeromesh.shard.store import aside

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from zeromesh.base.loader import Loader, Position
    from zeromesh.comm.mesh import Mesh
    from zeromesh.config.settings import Resolved
    from zeromesh.engine.computation import Computation
    from zeromesh.engine.curriculum import LengthCurriculum
    from zeromesh.engine.observe.monitors import Monitor
    from zeromesh.engine.observe.observer import Observer
    from zeromesh.engine.pipelined import Pipelined, StageWork
    from zeromesh.engine.update import Update
    from zeromesh.parallel.activation.activation_store import ActivationStore
    from zeromesh.parallel.context.applied import SpreadSequences
    from zeromesh.shard.gradients.accumulation import Accumulation
    from zeromesh.shard.optim.scaler import LossScaler
    from zeromesh.shard.optim.spikes import SpikeWatch
    from zeromesh.shard.sharded import ShardedModel

_log = logging.getLogger("zeromesh")

BY_BATCH = (
    "call engine.train_batch(iterator) and engine.eval_batch(iterator) on all ranks, with the same micro-batches on "
    "the ranks of one pipeline, or set mesh.pipeline to 1"
)


class Engine:
    """Trains one model over the ranks of a mesh.

    The methods of its parts are its own, too: those of ``saves`` (``Saves`` in ``saving.py``) about checkpoints and
    state dicts, and those of ``reports`` (``Reports`` in ``engine_reports.py``) about the run.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self.saves, self.reports = Saves(state), Reports(state)
        # An optimizer knows the engine by a weak reference, and the engine may live no longer than its model.
        self._aside = aside.Aside(state.sharded, state.optimizer)
        self._unbind: Callable[[], None] | None = None if state.optimizer is None else bind(state.optimizer, self)

    module: Attribute[nn.Module] = Attribute("_state")
    """Model, the same object that was passed in."""
    mesh: Attribute[Mesh] = Attribute("_state")
    """Ranks."""
    device: Attribute[torch.device] = Attribute("_state")
    """Device of this rank."""
    config: Attribute[Resolved] = Attribute("_state")
    """Resolved settings."""
    optimizer: Attribute[Optimizer | None] = Attribute("_state")
    """Optimizer of this rank's pieces; None if there is none."""
    lr_scheduler: Attribute[Any] = Attribute("_state")
    """Schedule, stepped after every update; None if there is none."""
    loss_scaler: Attribute[LossScaler | None] = Attribute("_state")
    """Scaler of losses in fp16; None where they are not scaled."""
    training_dataloader: Attribute[Loader | None] = Attribute("_state")
    """Loader of ``training_data``; None if there is none."""
    data_position: Attribute[Position | None] = Attribute("_state")
    """Position of the loader at the last update; batches handed out since are not counted."""
    data_rank: Attribute[int] = Attribute("mesh")
    """Index of the share of the global batch that this process feeds."""
    data_size: Attribute[int] = Attribute("mesh")
    """Number of shares of the global batch."""
    global_steps: Attribute[int] = Attribute("_state")
    """Updates so far, skipped ones included."""
    global_samples: Attribute[int] = Attribute("_state")
    """Samples that all ranks have consumed in them."""
    micro_steps: Attribute[int] = Attribute("_state")
    """Micro-batches so far."""
    skipped_steps: Attribute[int] = Attribute("_state")
    """Number of updates that were left out because a gradient was not finite, or as spikes."""
    spikes: Attribute[SpikeWatch] = Attribute("_state")
    """Comparison of updates with those before them; ``spikes.last`` is the last update if it was a spike."""
    loss_scale: Attribute[float] = Attribute("_state.update")
    """Current loss scale; 1 where the loss is not scaled."""
    gradient_factor: Attribute[float] = Attribute("_state.update")
    """Factor that makes the mean over the ranks of the gradients' sum as it is kept."""
    asked: Attribute[int] = Attribute("_state.update")
    """Bits of all numbers that any rank passed to ``ask`` before the last update; 0 if none did."""
    updating: Attribute[bool] = Attribute("_state.update")
    """True if the optimizer's own step runs as a part of an update."""
    monitor: Attribute[Monitor] = Attribute("_state.observer")
    """Writer of values for TensorBoard, Weights & Biases or CSV files; it takes the user's values, too."""
    curriculum_scheduler_legacy: Attribute[LengthCurriculum | None] = Attribute("_state.computation", "curriculum")
    """Curriculum over the length of samples, whose ``get_current_difficulty()`` is that of the next update."""
    # Parts of the state, for other rooms.
    sharded: Attribute[ShardedModel] = Attribute("_state")
    observer: Attribute[Observer] = Attribute("_state")
    context_parallel: Attribute[SpreadSequences | None] = Attribute("_state")
    activations: Attribute[ActivationStore | None] = Attribute("_state")
    pipelined: Attribute[Pipelined | None] = Attribute("_state")
    stage_work: Attribute[StageWork | None] = Attribute("_state")

    _accumulation: Attribute[Accumulation] = Attribute("_state", "accumulation")
    _computation: Attribute[Computation] = Attribute("_state", "computation")
    _update: Attribute[Update] = Attribute("_state", "update")
    _passes: Attribute[Iterator[Any] | None] = Attribute("_state", "passes")

    save_checkpoint = of_part("saves", Saves.save_checkpoint)
    save_to_memory = of_part("saves", Saves.save_to_memory)
    wait_for_checkpoint = of_part("saves", Saves.wait_for_checkpoint)
    load_checkpoint = of_part("saves", Saves.load_checkpoint)
    state_dict = of_part("saves", Saves.state_dict)
    load_state_dict = of_part("saves", Saves.load_state_dict)
    gathered_state_dict = of_part("saves", Saves.gathered_state_dict)
    full_weights = of_part("saves", Saves.full_weights)
    save_16bit_model = of_part("saves", Saves.save_16bit_model)

    memory_report = of_part("reports", Reports.memory_report)
    prediction_report = of_part("reports", Reports.prediction_report)
    traffic_report = of_part("reports", Reports.traffic_report)
    bound_report = of_part("reports", Reports.bound_report)
    work_report = of_part("reports", Reports.work_report)
    expert_report = of_part("reports", Reports.expert_report)
    check_health = of_part("reports", Reports.check_health)
    compile_seconds = of_part("reports", Reports.compile_seconds)

    train_batch_size = of_part("_state", EngineState.train_batch_size)
    """Samples per update over all ranks: a method without arguments."""
    zero_grad = of_part("_state", EngineState.zero_grad)
    """Drop the gradients of the micro-batches since the last update; accumulation starts anew."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model; its methods may use its parameters."""
        if name == "_state":
            raise AttributeError(name)
        # A property of the engine that raised an AttributeError leads here, too, and its own message says more.
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)
        try:
            value = getattr(self.module, name)
        except AttributeError:
            if hasattr(type(self.module), name):
                raise
            raise AttributeError(
                f"{type(self).__name__!r} has no attribute {name!r}, nor has its module {type(self.module).__name__}"
            ) from None
        # Methods of the model, such as generate, run with parameters that hooks of its forward
        # would not have fetched.
        return self._computation.method(value) if getattr(value, "__self__", None) is self.module else value

    # Forward.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model on this rank's share of a micro-batch.

        Floating-point inputs, in containers too, are cast to the dtype of a 16-bit run (``auto_cast: false`` leaves
        them alone). A container with one becomes a copy of its kind; others are passed on as they are.
        """
        if self.pipelined is not None:
            raise RuntimeError(f"the model is cut into stages, none of which computes alone; {BY_BATCH}")
        return self._computation.forward(*args, **kwargs)

    forward = __call__

    # Backward.

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Compute gradients of this rank's mean loss; over ranks and micro-batches they are averaged.

        Args:
            loss: scalar; it is divided by the accumulation steps, and scaled in fp16.
            retain_graph: as in torch.
            scale_wrt_gas: divide by the accumulation steps.

        Returns:
            The loss that was differentiated, without the loss scale.

        Raises:
            ValueError: the loss is not a scalar tensor with a graph.
        """
        if self.pipelined is not None:
            raise RuntimeError(f"the model is cut into stages, whose backwards go together; {BY_BATCH}")
        self._require_trained("backward")
        batches.check_loss(loss)
        # Before the division: notes hold the mean loss as the user sees it.
        self._accumulation.note_loss(loss, divided=scale_wrt_gas)
        if scale_wrt_gas and self._accumulation.steps > 1:
            loss = loss / self._accumulation.steps
        try:
            with self._accumulation.differentiating(scale_wrt_gas):
                scaled = self._accumulation.scaled(loss)
                self._computation.differentiate([scaled], [None], self._accumulation.reduces, retain_graph)
        except BaseException:
            # Some units have reduced gradients of this micro-batch and others not: nothing of it can be used.
            self.zero_grad()
            raise
        self._accumulation.note()
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, for ``engine.scale(loss).backward()``; without one, the loss itself.

        Gradients are divided by the accumulation steps as in ``backward``. The mean loss of the update, and the check
        that it is finite, do not know of a loss whose backward is not the engine's.

        Raises:
            ValueError: the loss is not a scalar tensor with a graph.
        """
        return self._accumulation.scaled_by_user(batches.check_loss(loss))

    # Update.

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Update the parameters at the accumulation boundary; called after every micro-batch.

        Args:
            lr_kwargs: named arguments of the scheduler's ``step``.

        Raises:
            RuntimeError: no backward came before.
            FloatingPointError: a loss was not finite on some rank, or gradients were not for many updates in a row.
            OSError: an asynchronous save has failed, and ``checkpoint.on_failure`` is "stop"; the update was made.
        """
        if not self._accumulation.syncs:
            raise RuntimeError("step() inside no_sync(): leave the context first, the update needs the gradients' sum")
        self._require_trained("step")
        if not self._accumulation.waits:
            raise RuntimeError(
                "step() without backward(): call engine.backward(loss) for each micro-batch first; after an update by "
                "optimizer.step() there is nothing to do"
            )
        if self.optimizer is None:
            raise RuntimeError(
                "step() needs an optimizer, and initialize was given none: name one in the configuration, or pass "
                "yours, as in initialize(model=model, optimizer=optimizer, config=...)"
            )
        self.micro_steps += self._accumulation.count()
        if self._accumulation.complete:
            self._step(None if self.lr_scheduler is None else partial(self.lr_scheduler.step, **(lr_kwargs or {})))

    def _require_trained(self, name: str) -> None:
        if not self.sharded.count(trained=True):
            raise RuntimeError(
                f"{name}() of an engine whose model had no trainable parameters at initialize: it only evaluates; set "
                "requires_grad before initialize. For gradients of its inputs call loss.backward(), or backward() of "
                "the engine that trains what made them"
            )

    def update(self) -> None:
        """Update the parameters now, with the gradients that there are: ``step()`` of the engine's optimizer.

        Nothing happens without gradients. The learning-rate schedule is left to the caller, as in torch.

        Raises:
            RuntimeError, FloatingPointError: as ``step``.
        """
        self.sharded.events.backward.drop_failed()
        if self.optimizer is not None and self._accumulation.begun:
            if not self._accumulation.syncs:
                raise RuntimeError("optimizer.step() inside no_sync(): leave the context first")
            self.micro_steps += self._accumulation.count()
            self._step(None)

    def ask(self, number: int) -> None:
        """Let all ranks hear of ``number`` at the next update: ``asked`` has the bits of all numbers of all ranks then.

        A handler of a signal may call it, which one rank alone may get.
        """
        self._update.ask(number)

    def _step(self, schedule: Callable[[], Any] | None) -> None:
        with self._computation.phase("step"):
            self._agree_and_update(schedule)
        # After the phase, whose time it reports.
        self.observer.after_update(self.global_steps)
        record_step(self.global_steps + 1)
        if self._update.save_failed:
            self._state.background.surface(raises=self.config.checkpoint.on_failure == "stop")

    def _agree_and_update(self, schedule: Callable[[], Any] | None) -> None:
        samples = self.train_batch_size()
        if not self._accumulation.managed:
            samples = samples // self._accumulation.steps * self._accumulation.backwards
        agreement = self._update.agree(self.global_steps + 1)
        # Those of this update: the schedule and the overflow change them for the next one.
        rates, scale = self.get_lr(), self._update.loss_scale if self.loss_scaler else None
        # Skipped updates count, too, as in DeepSpeed.
        self._state.count_update(samples)
        if self._update.apply(agreement, self.global_steps):
            # Not after a skipped update: a schedule counts updates of the parameters.
            if schedule is not None:
                schedule()
            every = self.config.steps_per_print
            if every and self.global_steps % every == 0 and self.mesh.rank == 0:
                _log.info("update %d: lr %s, gradient norm %.4g", self.global_steps, self.get_lr(), self._update.norm)
        with span("monitor"):
            self._update.finish(agreement)
            values = learning_values(self._update.mean_loss, rates, self._update.norm, scale)
            if self._state.balance is not None and self.observer.monitor.enabled:
                values |= self._state.balance.values()
            self.observer.values(values, self.global_samples, samples)

    # Whole batches.

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Make one update from as many micro-batches as are accumulated.

        Args:
            data_iter: yields ``(inputs, labels)``, or whatever the model takes if it returns its loss: a mapping of
                keyword arguments, a tuple or list of positional ones, or a single tensor. Or ``batches.WithLoss``. None
                takes those of ``training_data``, one pass after the other.

        Returns:
            The mean loss over micro-batches and ranks: a detached 0-dim tensor, the same on every rank.

        Raises:
            StopIteration: there are too few micro-batches left for an update; none was used.
            ValueError: there is no iterator, and no ``training_data``.
        """
        self._require_trained("train_batch")
        data_iter = self._batches(data_iter)
        self.train()
        # All micro-batches first, because too few of them would leave an update half done.
        micro_batches = [next(data_iter) for _ in range(self._accumulation.steps)]
        self._update.stragglers.begin()
        if self.pipelined is not None:
            for batch in micro_batches:  # inputs of stages are activations, of which forwards could not tell
                self._computation.note_size(batch)
            try:
                with this_rank.within("the stages of the pipeline"):
                    self._accumulation.note_all(self.pipelined.train(micro_batches))
            except BaseException:
                self.zero_grad()
                raise
            self.step()
            # Of all ranks, because most stages have no loss of their own.
            return torch.tensor(self._update.mean_loss, dtype=self._loss_dtype, device=self.device)
        starts_update, updates = self._accumulation.counted + self._accumulation.unsynced == 0, self.global_steps
        losses = []
        for batch in micro_batches:
            loss = self._computation.loss(batch)
            self.backward(loss)
            losses.append(loss.detach())
            if self._accumulation.managed or len(losses) == len(micro_batches):
                self.step()
        mean = self._update.mean_loss
        # It costs no further exchange between the ranks.
        if starts_update and self.global_steps == updates + 1 and mean is not None:  # the update was of just these
            return torch.tensor(mean, dtype=losses[0].dtype, device=losses[0].device)
        return self._mean(losses)

    def _batches(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        """Return the micro-batches of an iterator; None: those of ``training_data``."""
        if data_iter is not None:
            return data_iter
        if self._passes is None:
            if self.training_dataloader is None:
                raise ValueError("train_batch() without an iterator: pass one, or training_data= to initialize")
            # One iterator for all calls, which goes on where the last call stopped.
            self._passes = self.training_dataloader.passes()
        return self._passes

    @property
    def _loss_dtype(self) -> torch.dtype:
        dtypes = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return torch.promote_types(next(dtypes, torch.float32), torch.float32)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> torch.Tensor:
        """Return the mean loss of micro-batches, without gradients: 0-dim, the same on every rank.

        Args:
            data_iter: as for ``train_batch``.
            return_logits: False; the loss alone is returned.
            compute_loss: True, for the same reason.
            reduce_output: ``"avg"``: the mean over the micro-batches.
            bcast_loss: accepted for DeepSpeed's sake; every rank has the loss.
            num_micro_batches: how many to take, the same number on all ranks; None: as many as ``train_batch`` takes.

        Raises:
            ValueError: an argument cannot be honoured, or ``num_micro_batches`` is below 1.
        """
        advice = "call the engine under torch.no_grad() for the model's output (a pipeline gives its loss alone)"
        refuse("eval_batch", "return_logits", return_logits, advice, False)
        refuse("eval_batch", "compute_loss", compute_loss, advice, True)
        refuse("eval_batch", "reduce_output", reduce_output, advice, "avg")
        count = self._accumulation.steps if num_micro_batches is None else num_micro_batches
        if count < 1:
            raise ValueError(f"num_micro_batches is {count}; it must be at least 1")
        modes = modes_of(self.module.modules())  # some may be in evaluation mode for good, as frozen parts
        data_iter = self._batches(data_iter)
        self.eval()
        try:
            with torch.no_grad():
                inputs = [next(data_iter) for _ in range(count)]
                stages = self.pipelined
                with this_rank.within("eval_batch()"):
                    losses = [*map(self._computation.loss, inputs)] if stages is None else stages.evaluate(inputs)
        finally:
            set_modes(modes)
        with this_rank.within("eval_batch()"):
            return self._mean(losses)

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        total = sum((loss.detach().double().cpu().reshape(()) for loss in losses), torch.zeros((), dtype=torch.float64))
        # In fp64, and with the number of losses: ranks of stages without a loss have none.
        rows = self.mesh.group("world").exchange(torch.stack([total, torch.tensor(float(len(losses))).double()]))
        mean = rows[:, 0].sum() / rows[:, 1].sum()
        return mean.to(losses[0]) if losses else mean.to(self.device, self._loss_dtype)

    # Batches.

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self._accumulation.steps

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and micro-batch."""
        return self.config.train_micro_batch_size_per_gpu

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing how many micro-batches are accumulated.

        Raises:
            ValueError: not a multiple of what one micro-batch of all ranks holds.
        """
        each = self.config.train_micro_batch_size_per_gpu * self.data_size
        # The size of a micro-batch is the loader's, so that only their number can change.
        if train_batch_size <= 0 or train_batch_size % each:
            nearest = max(1, round(train_batch_size / each)) * each
            raise ValueError(
                f"train_batch_size {train_batch_size} is not a multiple of micro-batch {each // self.data_size} x "
                f"{counted(self.data_size, 'rank')} = {each}; the nearest is {nearest}"
            )
        self._accumulation.set_steps(train_batch_size // each)
        sizes = {"train_batch_size": train_batch_size, "gradient_accumulation_steps": self._accumulation.steps}
        self._state.change_sizes(sizes)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last one before an update."""
        return self._accumulation.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the current micro-batch, and each after it, is the last one before an update."""
        self._accumulation.set_boundary(is_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in this context without an update.

        Replicated gradients stay on their rank until a backward outside of it, or ``step``.
        """
        with self._accumulation.no_sync():
            yield

    # Values of the last update.

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group; 0 of a group that has none, as in DeepSpeed."""
        # ``float`` waits for the device where a rate is a tensor there.
        return [float(group.get("lr", 0.0)) for group in self.optimizer.param_groups] if self.optimizer else []

    def get_global_grad_norm(self) -> float | None:
        """Global norm of the last update's gradient before clipping; None before the first."""
        return self._update.norm

    def get_mean_loss(self) -> float | None:
        """Mean loss of the last update over ranks and micro-batches; no rank asks another.

        None before the first update, and where the user called ``loss.backward()`` instead of ``engine.backward``.
        """
        return self._update.mean_loss

    def curriculum_enabled_legacy(self) -> bool:
        """Return whether samples are cut to the length of a curriculum."""
        return self._computation.curriculum is not None

    # The model.

    def train(self, mode: bool = True) -> Engine:
        """Put the model in training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the model in evaluation mode."""
        return self.train(False)

    def compile(self, backend: Any = "inductor", compile_kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        """Compile each unit's forward with ``torch.compile``; fetching stays outside of what is compiled.

        Args:
            backend: as in ``torch.compile``.
            compile_kwargs: further options, as DeepSpeed takes them.
            options: further options, as ``torch.compile`` takes them.
        """
        options = {"backend": backend, **(compile_kwargs or {}), **options}
        # The first unit is the model itself, whose forward calls those of the others.
        compile_blocks([unit.module for unit in self.sharded.units[1:]], options, self.mesh.rank == 0)

    def offload_states(
        self, include: Collection[str] = aside.KINDS, *, pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Move states to host memory until ``reload_states``, or until something needs them. Between updates.

        Args:
            include: ``"optimizer"``, ``"master"``, ``"parameters"``; parameters that are not sharded stay, and so does
                a master that is the parameter itself.
            pin_memory: use page-locked memory on CUDA.
            non_blocking: copy beside what the device computes.

        Raises:
            ValueError: there is no such kind of state.
            RuntimeError: gradients wait for their update.
        """
        unknown = [kind for kind in include if kind not in aside.KINDS]
        if unknown:
            raise ValueError(f"offload_states: include has {unknown[0]!r}; there are {', '.join(aside.KINDS)}")
        if self._accumulation.begun:
            raise RuntimeError("offload_states() between a backward and its update: call it after the step")
        self._aside.put(include, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the states back that ``offload_states`` has moved."""
        self._aside.bring_back(non_blocking)

    def destroy(self) -> None:
        """Wait for pending transfers and this rank's asynchronous save, and release the hooks.

        Raises:
            OSError: the save has failed, and no step or wait has told so.
        """
        self.observer.close()
        if self._unbind is not None:
            self._unbind()
        self.sharded.close()
        if self._state.copies is not None:
            error = sys.exc_info()[1]
            ends_well = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
            self._state.copies.forget(failed=not ends_well)
        self._state.background.close()
