"""Names of DeepSpeed's and torch's engines beside forward, backward and step; a new name goes here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zeromesh.base.words import counted
from zeromesh.comm.stragglers import Busy
from zeromesh.engine import reports
from zeromesh.engine.curriculum import LengthCurriculum
from zeromesh.engine.observe.monitors import Monitor
from zeromesh.engine.state import EngineState
from zeromesh.parallel.activation.compiled import compile_seconds


class Batching(EngineState):
    """Batches of an engine: their sizes, shares and boundaries."""

    @property
    def data_rank(self) -> int:
        """Index of the share of the global batch that this process feeds."""
        return self.mesh.data_rank

    @property
    def data_size(self) -> int:
        """Number of shares of the global batch."""
        return self.mesh.data_size

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
        # A copy: the settings are frozen, and the user's object stays as it was given.
        self.config = self.config.model_copy(update=sizes)

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


class Answers(EngineState):
    """Values of a run so far."""

    @property
    def curriculum_scheduler_legacy(self) -> LengthCurriculum | None:
        """Curriculum over the length of samples, whose ``get_current_difficulty()`` is that of the next update."""
        return self._computation.curriculum

    def curriculum_enabled_legacy(self) -> bool:
        """Return whether samples are cut to the length of a curriculum."""
        return self._computation.curriculum is not None

    @property
    def monitor(self) -> Monitor:
        """Writer of values for TensorBoard, Weights & Biases or CSV files; it takes the user's values, too."""
        return self.observer.monitor

    @property
    def loss_scale(self) -> float:
        """Current loss scale; 1 where the loss is not scaled."""
        return self._update.loss_scale

    @property
    def gradient_factor(self) -> float:
        """Factor that makes the mean over the ranks of the gradients' sum as it is kept."""
        return self._update.factor

    @property
    def asked(self) -> int:
        """Bits of all numbers that any rank passed to ``ask`` before the last update; 0 if none did."""
        return self._update.asked

    @property
    def updating(self) -> bool:
        """True if the optimizer's own step runs as a part of an update."""
        return self._update.runs

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

    def compile_seconds(self) -> float:
        """Return the seconds that compilation has taken in this process."""
        return compile_seconds()

    def memory_report(self) -> dict[str, Any]:
        """Bytes by state and tier that this rank allocates at the most, and the measured use of the process.

        At stage 3 slots and gradients have memory only while they are needed, and parameters of 16 bits rest in their
        masters: they count as ``optimizer``.
        """
        return reports.memory(self.sharded, self.optimizer, self.activations, self._before)

    def prediction_report(
        self, model: nn.Module | Callable[[], nn.Module], inputs: Mapping[str, Any],
        loss: Callable[[Any], torch.Tensor] | None = None, memory: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return what the planner foresees of this rank's memory and of a step beside what was measured.

        It traces the model without memory, and measures the machine where neither ``ZEROMESH_MACHINE`` names its file
        nor its GPU is known: a second or two, on this rank alone. It never raises.

        Args:
            model: as the one that ``initialize`` was given, before an engine changed it; on any device, meta included.
                Or a function that makes it.
            inputs: keyword arguments of its forward for a micro-batch; only shapes and dtypes of tensors matter.
            loss: computes the loss from the model's output, unless that is the loss or has it.
            memory: a ``memory_report()`` to compare with; None takes one now.

        Returns:
            ``machine``, ``layout``, and ``notes`` on what is missing; ``device`` and ``host`` (most bytes) and ``step``
            (median seconds), each with ``predicted``, ``measured`` and ``difference``: predicted / measured - 1. What
            is not known is None. On a processor ``device`` is all memory.
        """
        report, seconds = memory or self.memory_report(), self.observer.step_seconds
        return self._predict((model, inputs, loss), report, seconds, self.mesh, self.config)

    def traffic_report(self, reset: bool = False) -> dict[str, dict[str, float]]:
        """Return the traffic of this rank since the last reset, by collective and axis (``"all_gather/data"``).

        For each: ``bytes``, ``calls``, ``across_nodes`` (bytes of them that went to other nodes), and
        ``relative_error`` where numbers were rounded for the links between nodes.
        """
        return reports.traffic(self.mesh.traffic, reset)

    def check_health(self) -> dict[str, Any]:
        """Check all ranks' processors, memory and links, between updates. Collective; some tens of milliseconds.

        What is slow beside its own earlier checks, or beside the other ranks, and whose products are wrong, is logged
        on the first rank, also when it is over. See docs/monitoring.md.

        Returns:
            On all ranks the same: ``products`` (floating point operations per second by rank), ``memory`` (bytes per
            second that copies read and write by rank), ``links`` (lists of two ranks, and the bytes per second that the
            second receives from the first while all do so), ``slow`` (dicts: name, since, value, usual, unit).
        """
        return self._health.check(self.global_steps)

    def work_report(self) -> Busy | None:
        """Return each rank's seconds of work in the updates since the last call, without waits for the others.

        The work of an update of ``train_batch`` begins behind its data, of others behind the update before.

        Returns:
            None on all ranks but the first, and where waits are the device's, as with nccl.
        """
        return self._update.stragglers.take()

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
        # Its peak rate depends on the dtype that the model computes in.
        dtype = precision.compute or precision.autocast or torch.float32
        bounds = reports.find_bounds(self.observer, self.sharded, dtype, operations)
        return None if bounds is None else bounds.as_dict()
