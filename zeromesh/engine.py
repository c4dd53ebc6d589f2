"""The engine: forward, backward, step. A thin composition of the parts that ``build.py`` puts together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from zeromesh import batches, export, report
from zeromesh.activation.checkpoint import compile_forward
from zeromesh.bounding import find_bounds
from zeromesh.checkpoint import load, save, whole
from zeromesh.comm.agreement import agree_run
from zeromesh.comm.rank import record_step
from zeromesh.fed import FedBatches
from zeromesh.model.chain import Chain
from zeromesh.model.containers import map_tensors
from zeromesh.observe.monitors import Monitor, learning_values
from zeromesh.observe.observer import Observer
from zeromesh.observe.spans import span
from zeromesh.optim.answers import answer
from zeromesh.optim.bound import bind
from zeromesh.replicas import require_equal_replicas
from zeromesh.shard.sharded import ShardedModel
from zeromesh.shortage import Explained, explain
from zeromesh.signatures import refuse
from zeromesh.update import Update, require_same_inputs

if TYPE_CHECKING:
    from zeromesh.activation.store import ActivationStore
    from zeromesh.config.settings import Resolved
    from zeromesh.context.applied import SpreadSequences
    from zeromesh.pipelined import Pipelined, StageWork
    from zeromesh.training_data import Loader, Position

_log = logging.getLogger("zeromesh")

BY_BATCH = (
    "call engine.train_batch(iterator) and engine.eval_batch(iterator) on all ranks, with the same micro-batches on "
    "the ranks of one pipeline, or set mesh.pipeline to 1"
)


@dataclass(frozen=True)
class Parts:
    """Parts of an engine, which ``initialize`` makes.

    Attributes:
        sharded: the model's states, placed over the mesh.
        config: the resolved settings.
        optimizer: updates this rank's pieces; None if there is none.
        scheduler: stepped after every update; None if there is none.
        loss_fn: from the model's output and the labels to the loss; None if the model returns its loss.
        loader: of ``training_data``; None if there is none.
        observer: measures the run.
        fed: compares the sizes of micro-batches with the configured one.
        context_parallel: sequences spread over ranks; None where they are not.
        activations: storage of checkpointed modules' inputs until the backward; None where they stay in place.
        pipelined: pipeline stages; None where there is one stage.
    """

    sharded: ShardedModel
    config: Resolved
    optimizer: Optimizer | None
    scheduler: Any
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    loader: Loader | None
    observer: Observer
    fed: FedBatches
    context_parallel: SpreadSequences | None
    activations: ActivationStore | None
    pipelined: Pipelined | None


class Engine:
    """Trains one model over the ranks of a mesh.

    Attributes:
        module: the model, the same object that was passed in.
        optimizer: updates this rank's pieces; None if there is none.
        lr_scheduler: stepped after every update; None if there is none.
        training_dataloader: the loader of ``training_data``; None if there is none.
        data_position: how far it was at the last update; what has been handed out since is not counted.
        config: the resolved settings.
        sharded: the model's states.
        context_parallel: how its sequences are spread over ranks; None where they are not.
        activations: where inputs of checkpointed modules wait for the backward; None: where they are.
        pipelined: how it is cut into stages; None where it is not.
        stage_work: computes this rank's stages; None where there is one stage.
        global_steps: updates so far, skipped ones included.
        global_samples: that all ranks have consumed in them.
        micro_steps: micro-batches so far.
    """

    def __init__(self, parts: Parts) -> None:
        self.sharded = sharded = parts.sharded
        self.module = sharded.model
        self.mesh = sharded.mesh
        self.device = sharded.mesh.device
        self.config = parts.config
        self.optimizer = optimizer = parts.optimizer
        self.lr_scheduler = parts.scheduler
        self.observer = parts.observer
        self.training_dataloader = loader = parts.loader
        self.data_position: Position | None = None if loader is None else loader.position
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.context_parallel = parts.context_parallel
        self.activations = parts.activations
        self.pipelined = parts.pipelined
        self.stage_work = self._stage_work()
        self._fed = parts.fed
        self._loss_fn = parts.loss_fn
        self._passes: Iterator[Any] | None = None
        self._accumulation = sharded.accumulation
        self._update = Update(sharded, parts.config, optimizer)
        self.loss_scaler = self._update.scaler
        self._sharing = [axis for axis in ("tensor", "context") if self.mesh.sizes[axis] > 1]
        self._has_compared = False
        # An optimizer knows the engine by a weak reference, and the engine may live no longer than its model.
        self._unbind: Callable[[], None] | None = None if optimizer is None else bind(optimizer, self)

    def _stage_work(self) -> StageWork | None:
        if self.pipelined is None:
            return None
        from zeromesh.pipelined import StageWork

        return StageWork(self.pipelined, self.sharded, self._loss, self._differentiate, self._phase)

    def __getattr__(self, name: str) -> Any:
        """The model's own methods and attributes; its methods may use its parameters."""
        if name == "module":
            raise AttributeError(name)
        value = getattr(self.module, name)
        if getattr(value, "__self__", None) is not self.module:
            return value

        def method(*args: Any, **kwargs: Any) -> Any:
            with self._computing(), self.sharded.events.computing(), self._autocast():
                return value(*args, **kwargs)

        return method

    # Forward.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on this rank's share of a micro-batch.

        Floating-point inputs, in containers too, are cast to the dtype of a 16-bit run (``auto_cast: false`` leaves
        them alone). A container with one becomes a copy of its kind; others are passed on as they are.
        """
        if self.pipelined is not None:
            raise RuntimeError(f"the model is cut into stages, none of which computes alone; {BY_BATCH}")
        return self._forward(args, kwargs)

    forward = __call__

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._sharing and torch.is_grad_enabled():
            self._note_inputs((args, kwargs))
        if self.pipelined is None and self.module.training and torch.is_grad_enabled():
            self._fed.look((args, kwargs))
        dtype = self.config.precision.compute
        if dtype is not None and self.config.precision.cast_inputs:
            args, kwargs = map_tensors((args, kwargs), partial(batches.cast, dtype=dtype))
        with self._computing(), self.sharded.events.unwinding(), self._autocast():
            return self.module(*args, **kwargs)

    def _note_inputs(self, inputs: Any) -> None:
        """Keep a checksum of the whole numbers among the inputs, which ranks that share a batch compare.

        Losses do not tell: where ranks sum what they compute, other samples give a loss that is wrong, but one loss.
        The first inputs are compared at once, as those of other shapes cannot even be summed.
        """
        self._accumulation.inputs.append(batches.checksum(inputs, self.device))
        if not self._has_compared:
            self._has_compared = True
            for axis in self._sharing:
                found = self.mesh.group(axis).exchange(self._accumulation.inputs[-1].reshape(1)).flatten().tolist()
                ranks = next(line for line in self.mesh.lines(axis) if self.mesh.rank in line)
                require_same_inputs(ranks, found)

    def _computing(self) -> AbstractContextManager[object]:
        return self._phase("forward" if torch.is_grad_enabled() else "evaluation")

    def _phase(self, name: str) -> AbstractContextManager[object]:
        return Explained(self.observer.phase(name), self._explain_shortage)

    def _explain_shortage(self) -> str:
        return explain(self.memory_report(), self.sharded.row, self.mesh.shard.size, self.config)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.config.precision.autocast
        if dtype is None:
            return nullcontext()
        # Without a cache: it would keep a second copy of every weight until the end of the forward.
        return torch.autocast(self.device.type, dtype=dtype, cache_enabled=False)

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
        batches.check_loss(loss)
        # As what its mean over the micro-batches is made of: who divides it alone has divided it by their number.
        own = loss.detach().reshape(()).to(torch.float64, copy=True)
        self._accumulation.losses.append(own if scale_wrt_gas else own * self._accumulation.steps)
        if scale_wrt_gas and self._accumulation.steps > 1:
            loss = loss / self._accumulation.steps
        try:
            with self._accumulation.differentiating(scale_wrt_gas):
                scaled = self._accumulation.scaled(loss)
                self._differentiate([scaled], [None], self._accumulation.reduces, retain_graph)
        except BaseException:
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

    def _differentiate(
        self, roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], last: bool,
        retain_graph: bool = False, reduces: bool = True,
    ) -> None:  # fmt: skip
        """Have autograd compute gradients, and units reduced that are done with; ``last`` before an update."""
        with self._phase("backward"), self.sharded.events.backward(roots, last, reduces):
            if roots:
                torch.autograd.backward(roots, gradients, retain_graph=retain_graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the micro-batches since the last update; accumulation starts anew.

        Args:
            set_to_none: accepted for torch's sake; gradients are always dropped.
        """
        self.sharded.forget_gradients()
        self._accumulation.restart()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last one before an update."""
        return self._accumulation.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the current micro-batch is the last one before an update; holds until said otherwise."""
        self._accumulation.boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this context are not followed by an update.

        Replicated gradients stay on their rank until a backward outside of it, or ``step``.
        """
        before, self._accumulation.syncs = self._accumulation.syncs, False
        try:
            yield
        finally:
            self._accumulation.syncs = before

    # Update.

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Update the parameters at the accumulation boundary; called after every micro-batch.

        Args:
            lr_kwargs: None; the scheduler's ``step`` is called without arguments.

        Raises:
            RuntimeError: no backward came before.
            FloatingPointError: a loss was not finite on some rank, or gradients were not for many updates in a row.
        """
        advice = "pass no lr_scheduler to initialize, and call its step with these arguments yourself"
        refuse("step", "lr_kwargs", lr_kwargs or None, advice)
        if not self._accumulation.syncs:
            raise RuntimeError("step() inside no_sync(): leave the context first, the update needs the gradients' sum")
        if not self._accumulation.waits:
            raise RuntimeError(
                "step() without backward(): call engine.backward(loss) for each micro-batch first; after an update by "
                "optimizer.step() there is nothing to do"
            )
        if self.optimizer is None:
            raise RuntimeError("step() needs an optimizer: name one in the configuration, or pass optimizer=")
        self.micro_steps += self._accumulation.count()
        if self._accumulation.complete:
            self._step(self.lr_scheduler)

    def update(self) -> None:
        """Update the parameters now, with the gradients that there are: ``step()`` of the engine's optimizer.

        Nothing happens without gradients. The learning-rate schedule is left to the caller, as in torch.

        Raises:
            RuntimeError, FloatingPointError: as ``step``.
        """
        self.sharded.events.give_up_other()
        if self.optimizer is not None and self._accumulation.begun:
            if not self._accumulation.syncs:
                raise RuntimeError("optimizer.step() inside no_sync(): leave the context first")
            self.micro_steps += self._accumulation.count()
            self._step(None)

    def ask(self, number: int) -> None:
        """Let all ranks hear of ``number`` at the next update: the largest that any rank asked for is ``asked`` then.

        A handler of a signal may call it, which one rank alone may get.
        """
        self._update.ask(number)

    @property
    def asked(self) -> int:
        """The largest number that any rank passed to ``ask`` before the last update; 0 if none did."""
        return self._update.asked

    @property
    def updating(self) -> bool:
        """True if the optimizer's own step runs as a part of an update."""
        return self._update.runs

    def _step(self, schedule: Any) -> None:
        with self._phase("step"):
            self._agree_and_update(schedule)
        self.observer.after_update(self.global_steps)
        record_step(self.global_steps + 1)

    def _agree_and_update(self, schedule: Any) -> None:
        agreement = self._update.agree(self.global_steps + 1)
        rates, scale = self.get_lr(), self.loss_scale if self.loss_scaler else None
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        if self.training_dataloader is not None:
            self.data_position = self.training_dataloader.position
        if self._update.apply(agreement, self.global_steps):
            if schedule is not None:
                schedule.step()
            self._print()
        with span("monitor"):
            self._update.finish(agreement)
            values = learning_values(self._update.mean_loss, rates, self._update.norm, scale)
            self.observer.values(values, self.global_samples, self.train_batch_size())

    def _print(self) -> None:
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0 and self.mesh.rank == 0:
            _log.info("update %d: lr %s, gradient norm %.4g", self.global_steps, self.get_lr(), self._update.norm)

    # Whole batches.

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One update from as many micro-batches as are accumulated.

        Args:
            data_iter: yields ``(inputs, labels)``, or whatever the model takes if it returns its loss: a mapping of
                keyword arguments, a tuple or list of positional ones, or a single tensor. Or ``batches.WithLoss``. None
                takes what ``training_data`` has, one pass after the other.

        Returns:
            The mean loss over micro-batches and ranks: a detached 0-dim tensor, the same on every rank.

        Raises:
            StopIteration: there are too few micro-batches left for an update; none was used.
            ValueError: there is no iterator, and no ``training_data``.
        """
        data_iter = self._own_batches() if data_iter is None else data_iter
        self.train()
        if self.pipelined is not None:
            return self._train_stages([next(data_iter) for _ in range(self._accumulation.steps)])
        whole, updates = self._accumulation.counted + self._accumulation.unsynced == 0, self.global_steps
        losses = []
        # All micro-batches first, because too few of them would leave an update half done.
        for batch in [next(data_iter) for _ in range(self._accumulation.steps)]:
            loss = self._loss(batch)
            self.backward(loss)
            losses.append(loss.detach())
            self.step()
        mean = self._update.mean_loss
        if whole and self.global_steps == updates + 1 and mean is not None:  # the update was of just these
            return torch.tensor(mean, dtype=losses[0].dtype, device=losses[0].device)
        return self._mean(losses)

    def _own_batches(self) -> Iterator[Any]:
        if self.training_dataloader is None:
            raise ValueError("train_batch() without an iterator: pass one, or training_data= to initialize")
        if self._passes is None:
            self._passes = self.training_dataloader.passes()
        return self._passes

    def _train_stages(self, given: Sequence[Any]) -> torch.Tensor:
        assert self.pipelined is not None
        assert self.stage_work is not None
        for batch in given:
            self._fed.look(batch)
        try:
            losses = self.pipelined.train(self.stage_work, given)
            self._accumulation.losses = [loss.double().reshape(()) for loss in losses]
        except BaseException:
            self.zero_grad()
            raise
        self._accumulation.counted, self._accumulation.synced = self._accumulation.steps - 1, True
        self.micro_steps += self._accumulation.steps - 1
        self.step()
        return torch.tensor(self._update.mean_loss, dtype=self._loss_dtype, device=self.device)

    def _evaluate_stages(self, given: Sequence[Any]) -> list[torch.Tensor]:
        assert self.pipelined is not None
        assert self.stage_work is not None
        return self.pipelined.evaluate(self.stage_work, given)

    @property
    def _loss_dtype(self) -> torch.dtype:
        found = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return torch.promote_types(next(found, torch.float32), torch.float32)

    def eval_batch(
        self, data_iter: Iterator[Any], return_logits: bool = False, compute_loss: bool = True,
        reduce_output: str | None = "avg", bcast_loss: bool = True, num_micro_batches: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The mean loss of micro-batches, without gradients; 0-dim, on every rank.

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
        modes = [(module, module.training) for module in self.module.modules()]
        self.eval()
        try:
            with torch.no_grad():
                given = [next(data_iter) for _ in range(count)]
                losses = [self._loss(b) for b in given] if self.pipelined is None else self._evaluate_stages(given)
        finally:
            for module, mode in modes:  # some may be in evaluation mode for good
                module.training = mode
        return self._mean(losses)

    def _loss(self, batch: Any) -> torch.Tensor:
        def model(*args: Any, **kwargs: Any) -> Any:
            return self._forward(args, kwargs)

        in_pairs = isinstance(self.module, Chain)
        return batches.loss_of(map_tensors(batch, self._to_device), model, self._loss_fn, in_pairs)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        total = sum((loss.detach().double().cpu().reshape(()) for loss in losses), torch.zeros((), dtype=torch.float64))
        rows = self.mesh.group("world").exchange(torch.stack([total, torch.tensor(float(len(losses))).double()]))
        mean = rows[:, 0].sum() / rows[:, 1].sum()
        return mean.to(losses[0]) if losses else mean.to(self.device, self._loss_dtype)

    # What is the case.

    @property
    def monitor(self) -> Monitor:
        """Writer of values for TensorBoard, Weights & Biases or CSV files; it takes the user's values, too."""
        return self.observer.monitor

    @property
    def data_rank(self) -> int:
        """Index of the share of the global batch that this process feeds."""
        return self.mesh.data_rank

    @property
    def data_size(self) -> int:
        """Into how many shares the global batch is cut."""
        return self.mesh.data_size

    @property
    def loss_scale(self) -> float:
        """The current loss scale; 1 where the loss is not scaled."""
        return self._update.loss_scale

    @property
    def gradient_factor(self) -> float:
        """Factor that makes the mean over the ranks of the gradients' sum as it is kept."""
        return self._update.factor

    @property
    def skipped_steps(self) -> int:
        """Number of updates that were skipped because a gradient was not finite."""
        return self._update.skipped

    @skipped_steps.setter
    def skipped_steps(self, number: int) -> None:
        self._update.skipped = number

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group; 0 of a group that has none, as in DeepSpeed."""
        return [float(group.get("lr", 0.0)) for group in self.optimizer.param_groups] if self.optimizer else []

    def get_global_grad_norm(self) -> float | None:
        """Global norm of the last update's gradient before clipping; None before the first."""
        return self._update.norm

    def get_mean_loss(self) -> float | None:
        """Mean loss of the last update over ranks and micro-batches; no rank asks another.

        None before the first update, and where the user called ``loss.backward()`` instead of ``engine.backward``.
        """
        return self._update.mean_loss

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self._accumulation.steps

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and micro-batch."""
        return self.config.train_micro_batch_size_per_gpu

    def train_batch_size(self) -> int:
        """Samples per update over all ranks."""
        return self.config.train_micro_batch_size_per_gpu * self._accumulation.steps * self.data_size

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing how many micro-batches are accumulated.

        Raises:
            ValueError: not a multiple of what one micro-batch of all ranks holds.
        """
        each = self.config.train_micro_batch_size_per_gpu * self.data_size
        if train_batch_size <= 0 or train_batch_size % each:
            nearest = max(1, round(train_batch_size / each)) * each
            raise ValueError(
                f"train_batch_size {train_batch_size} is not a multiple of micro-batch {each // self.data_size} x "
                f"{self.data_size} ranks = {each}; the nearest is {nearest}"
            )
        self._accumulation.steps = train_batch_size // each
        sizes = {"train_batch_size": train_batch_size, "gradient_accumulation_steps": self._accumulation.steps}
        self.config = self.config.model_copy(update=sizes)

    def memory_report(self) -> dict[str, Any]:
        """Bytes by state and tier that this rank allocates at the most, and the measured use of the process.

        At stage 3 slots and gradients have memory only while they are needed, and parameters of 16 bits rest in their
        masters: they count as ``optimizer``.
        """
        return report.memory(self.sharded, self.optimizer, self.activations)

    def traffic_report(self, reset: bool = False) -> dict[str, dict[str, float]]:
        """Return the traffic of this rank since the last reset, by collective and axis (``"all_gather/data"``).

        For each: ``bytes``, ``calls``, ``across_nodes`` (bytes of them that went to other nodes), and
        ``relative_error`` where numbers were rounded for the links between nodes.
        """
        return report.traffic(self.mesh.traffic, reset)

    def bound_report(self, operations: float | None = None) -> dict[str, Any] | None:
        """Return the resource that bounded the updates so far, and its distance from the limit. Collective.

        It measures the machine, for up to about two seconds.

        Args:
            operations: floating-point operations of this rank in an update; None: not known.

        Returns:
            ``bound`` (a resource), ``advice``, ``updates``, ``seconds`` of one, and in ``uses`` per resource the
            seconds spent on it and their ``share``; ``amount`` (bytes, or operations), ``rate`` and ``limit`` of them
            per second, and ``of_limit``, where they are known. None without ``wall_clock_breakdown``, and before the
            second update.
        """
        precision = self.config.precision
        dtype = precision.compute or precision.autocast or torch.float32
        found = find_bounds(self.observer, self.sharded, dtype, operations)
        return None if found is None else found.as_dict()

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
        for unit in self.sharded.units[1:]:
            compile_forward(unit.module, **options)

    # Saving.

    def save_checkpoint(
        self, save_dir: str | Path, tag: str | None = None, client_state: dict[str, Any] | None = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False,
    ) -> Path:  # fmt: skip
        """Write all that a resumed run needs to ``save_dir/tag``; each rank writes its shards. All ranks call it.

        It is there whole or not at all, and what was there before is not touched until then. With
        ``checkpoint.keep_last`` older ones go away afterwards. See docs/checkpoints.md.

        Args:
            save_dir: a folder of checkpoints that all ranks see.
            tag: its name; None is ``global_step`` and the number of updates.
            client_state: what else to keep: numbers, strings, bytes, dates, paths, tensors, arrays, and lists, tuples,
                sets, namespaces and dicts of them. The first rank's is kept.
            save_latest: whether ``load_checkpoint`` without a tag is to find this one.
            exclude_frozen_parameters: False; a checkpoint holds the whole model.

        Returns:
            Its folder.

        Raises:
            OSError: it could not be written, or there is too little space.
            TypeError: a value of the client state cannot be kept; the message says which.
            ValueError: there is no folder, the tag is one of the names that the folder itself needs, or an argument
                cannot be honoured.
            RuntimeError: there are gradients that wait for their update, which a checkpoint does not hold.
            ReplicaMismatch: ranks have different values of what updates keep equal; see ``replica_check``.
        """
        advice = "a checkpoint holds the whole model; save_16bit_model(folder, name, True) leaves frozen parameters out"
        refuse("save_checkpoint", "exclude_frozen_parameters", exclude_frozen_parameters, advice, False)
        if save_dir is None or str(save_dir) == "":
            raise ValueError(f"save_dir is {save_dir!r}; pass the folder that checkpoints are to be in")
        if self._accumulation.begun:
            raise RuntimeError(
                "save_checkpoint() between a backward and its update: call it after the step that updates"
            )
        with self.observer.phase("checkpoint"):
            agree_run(self.mesh.group("world"), "save the checkpoint", self.sharded.take_changes)
            if self.config.replica_check.at_saves:
                require_equal_replicas(self.sharded, f"after update {self.global_steps}")
            return save.save(self, Path(save_dir), tag, client_state or {}, save_latest)

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
        custom_load_fn: Any = None, *, load_data_position: bool = True,
    ) -> tuple[str | None, dict[str, Any]]:  # fmt: skip
        """Continue from a checkpoint, of any number of ranks and any row. All ranks call it. See docs/checkpoints.md.

        Args:
            load_dir: where it was saved.
            tag: which one; None is the latest.
            load_module_strict: False leaves parameters that the checkpoint lacks as they are.
            load_optimizer_states: False keeps the optimizer's present state.
            load_lr_scheduler_states: False keeps the scheduler's present state.
            load_module_only: take parameters and buffers alone: no counters, loss scale, random state or position in
                the data, nor states of the optimizer or scheduler.
            custom_load_fn: None; each rank reads only its part of each weight, which such a function cannot be given.
            load_data_position: whether the next iterator of ``training_dataloader`` goes on where the checkpoint was
                written; False leaves the loader where it is.

        Returns:
            Its path and the client state; (None, {}) if there is no checkpoint.

        Raises:
            FileNotFoundError: a file of it is missing.
            ValueError: it does not fit, or is not what was written. Nothing has been loaded then.
        """
        advice = "load the checkpoint, and then change the values with engine.load_state_dict(state, strict=False)"
        refuse("load_checkpoint", "custom_load_fn", custom_load_fn, advice)
        self.sharded.take_changes()
        self.sharded.rest()
        states = load_optimizer_states and not load_module_only, load_lr_scheduler_states and not load_module_only
        position = load_data_position and not load_module_only
        more = {"strict": load_module_strict, "data_position": position, "progress": not load_module_only}
        loaded = load.load(self, Path(load_dir), tag, *states, **more)
        self.zero_grad()
        answer(self.optimizer, self.loss_scale, overflow=False)
        self._passes = None
        if loaded[0] is not None:
            self.observer.rewind(self.global_samples)
        return loaded

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the model's state dict with whole parameters. Collective.

        Parameters that are sharded, split or of other stages of a pipeline are in it as whole copies: every rank has
        all of the model then. ``gathered_state_dict`` gives it to the first rank alone.
        """
        if not (self.sharded.sharded or self.sharded.is_split or self.pipelined):
            found: dict[str, Any] = self.module.state_dict(*args, **kwargs)
            return found
        found = self.module.state_dict(*args, **{**kwargs, "keep_vars": True})
        copies: dict[int, torch.Tensor] = {}
        for unit in self.sharded.units:
            members = [parameter for flat in unit.flats for parameter in flat.parameters]
            with self.sharded.gathered([unit]):
                copies |= {id(parameter): parameter.detach().clone() for parameter in members}
        found = {key: copies.get(id(value), value) for key, value in found.items()}
        return whole.add_stages(self.sharded, found, kwargs.get("prefix", ""))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a state dict into the model and the masters. Collective, with the same values on all ranks.

        Of a model in stages, these are all of the model's, as ``state_dict`` gives them.
        """
        sharded = self.sharded
        with sharded.gathered(sharded.units):
            result = whole.load_here(sharded, state_dict, strict)
            for flat in sharded.flats:
                for index, segment in enumerate(flat.layout.segments):
                    sharded.take_value(flat, index, rank=0)
                    value, now = state_dict.get(segment.name), flat.parameters[index].detach()
                    if value is not None and flat.master.dtype != now.dtype and torch.equal(value.to(now), now):
                        part = segment.held.cut(value.to(self.device))
                        flat.put(segment, part.reshape(-1))  # not rounded to 16 bits
        self.sharded.publish()
        return result

    def gathered_state_dict(self) -> dict[str, torch.Tensor]:
        """The model's whole state as CPU tensors on rank 0, an empty dict elsewhere. All ranks call it."""
        return whole.gathered_state_dict(self.sharded)

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False, *, merge_adapters: bool = False,
    ) -> bool:  # fmt: skip
        """Write the model, in the dtype it computes in, as a folder that ``from_pretrained`` opens. All ranks call it.

        A model of transformers gets its configuration beside the weights; of one with PEFT's adapters, these are
        written alone, as PEFT reads them. The first rank holds one unit and one file's tensors, at most 4 GB, at once.

        Args:
            save_dir: the folder.
            save_filename: of the weights; where one file would be too large, they are numbered and there is an index.
            exclude_frozen_parameters: leave out parameters with ``requires_grad`` False; buffers are written.
            merge_adapters: write the whole model with the adapters added to it.

        Raises:
            OSError: the first rank could not write; RuntimeError on the others.
            ValueError: there are no adapters to merge, or frozen parameters would be left out of what is merged.
        """
        taken = () if self.pipelined is None else self.pipelined.taken
        chosen = export.Written(merge_adapters, exclude_frozen_parameters)
        export.save_model(self.sharded, Path(save_dir), save_filename, chosen, taken)
        return True

    def destroy(self) -> None:
        """Drain what is under way and release the hooks."""
        self.observer.close()
        if self._unbind is not None:
            self._unbind()
        self.sharded.close()
