"""The micro-batches of an update, wherever their backward was called from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from zeromesh.shard.optim.scaler import LossScaler


@dataclass(frozen=True)
class LossFactors:
    """The factors that a loss already carries when its backward begins."""

    scale: float = 1.0  # loss scale that it was multiplied by
    steps: int = 1  # accumulation steps that it was divided by


class _Record:
    """The factors of the backward that runs now. Process-wide, because one loss may go through several engines."""

    def __init__(self) -> None:
        self._engine: LossFactors | None = None
        self._task, self._noted = -1, LossFactors()

    @contextmanager
    def during(self, applied: LossFactors) -> Iterator[None]:
        before, self._engine = self._engine, applied
        try:
            yield
        finally:
            self._engine = before

    def note(self, applied: LossFactors, gradient: torch.Tensor) -> None:
        """Hook of a scaled loss, which runs before any other hook of its graph."""
        self._task, self._noted = torch._C._current_graph_task_id(), applied

    def find(self) -> LossFactors | None:
        """Return the factors of the current backward; None if neither an engine nor ``scale`` was involved."""
        if self._engine is not None:
            return self._engine
        return self._noted if self._task == torch._C._current_graph_task_id() else None


_record = _Record()


class Accumulation:
    """Counts micro-batches, and knows which of them is the last one before an update."""

    def __init__(self, steps: int, scaler: LossScaler | None = None, managed: bool = True) -> None:
        self.steps = steps  # micro-batches per update
        self.managed = managed  # False: every call of ``step`` is an update, of any number of micro-batches
        self.backwards = 0  # since the last update
        self.scaler = scaler  # of the loss in fp16; None where the loss is not scaled
        # Whether the current micro-batch is the last one, if the user said so; None: it is counted.
        self.boundary: bool | None = None
        self.syncs = True  # False inside `no_sync`
        self.counted = 0  # micro-batches since the last update for which `step` was called
        # Backwards since that call: in `no_sync` each is a micro-batch of its own, all others together are one.
        self.unsynced, self.synced = 0, False
        self.running = False  # a backward is running
        self._starts = False  # it is one that this engine has started
        self.losses: list[torch.Tensor] = []  # of the micro-batches since the last update, detached; float64, 0-dim
        self.inputs: list[torch.Tensor] = []  # checksums of the inputs since then
        self.samples: list[float] = []  # of each forward in training since then; NaN: not known

    @property
    def waits(self) -> bool:
        """True if there was a backward since the last call of ``step``."""
        return bool(self.unsynced or self.synced)

    @property
    def begun(self) -> bool:
        """True if an update is under way."""
        return self.waits or self.counted > 0

    @property
    def at_boundary(self) -> bool:
        """True if the current micro-batch is the last one before an update."""
        if self.boundary is not None:
            return self.boundary
        return self.managed and self.counted + self.unsynced + 1 >= self.steps

    @property
    def reduces(self) -> bool:
        """True if the backward that begins now is followed by an update."""
        return self.syncs and self.at_boundary

    @property
    def complete(self) -> bool:
        """True if the micro-batches that were counted make an update."""
        return not self.managed or self.counted >= self.steps if self.boundary is None else self.boundary

    def set_steps(self, steps: int) -> None:
        """Accumulate ``steps`` micro-batches per update from now on."""
        self.steps = steps

    def set_boundary(self, is_boundary: bool) -> None:
        """Say whether the current micro-batch is the last one, and each that follows until said otherwise."""
        self.boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this context a backward is not followed by an update."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def begin(self) -> None:
        """A backward begins."""
        self.running = True

    def end(self) -> None:
        """No backward is running any more."""
        self.running = False

    def note(self) -> None:
        """A backward has left its gradients."""
        self.backwards += 1
        if self.syncs:
            self.synced = True
        else:
            self.unsynced += 1

    def join(self) -> None:
        """Take all backwards since the last call of ``step`` for one micro-batch."""
        self.synced, self.unsynced = self.waits, 0

    def note_loss(self, loss: torch.Tensor, divided: bool) -> None:
        """Keep the loss of a micro-batch for the mean of the update; ``divided`` if the engine divides it."""
        loss_copy = loss.detach().reshape(()).to(torch.float64, copy=True)
        # A caller who divides the loss alone has divided it by the steps: the mean is over the whole losses.
        self.losses.append(loss_copy if divided else loss_copy * self.steps)

    def note_all(self, losses: Sequence[torch.Tensor]) -> None:
        """All micro-batches of an update have left their gradients at once, with these losses on this rank."""
        self.losses = [loss.double().reshape(()) for loss in losses]
        self.counted, self.unsynced, self.synced = 0, self.steps - 1, True

    def count(self) -> int:
        """Count the micro-batches whose backward has ended, and return how many they are."""
        done = self.unsynced + self.synced
        self.counted += done
        self.unsynced, self.synced = 0, False
        return done

    def noted(self) -> tuple[list[float], float, float]:
        """Return the losses since the last update, the sum of the inputs' checksums, and the mean number of samples."""
        losses: list[float] = torch.stack(self.losses).tolist() if self.losses else []
        inputs = float(torch.stack(self.inputs).sum()) if self.inputs else 0.0
        return losses, inputs, sum(self.samples) / max(1, len(self.samples))

    def restart(self) -> None:
        """Begin with the first micro-batch of an update."""
        self.counted, self.unsynced, self.synced, self.backwards = 0, 0, False, 0
        self.forget_losses()

    def forget_losses(self) -> None:
        """Forget the losses of micro-batches whose gradients were dropped."""
        self.losses.clear()
        self.inputs.clear()
        self.samples.clear()

    # Factors.

    @property
    def scale(self) -> float:
        """The loss scale; 1 where the loss is not scaled."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, in at least fp32."""
        if self.scaler is None:
            return loss
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.scaler.scale

    def scaled_by_user(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale a loss whose ``backward()`` the user calls; see ``scaled``."""
        scaled = self.scaled(loss)
        # Noted in the backward, as nobody knows before which loss, of which engine, the user will differentiate.
        if self.scaler is not None:
            scaled.register_hook(partial(_record.note, LossFactors(self.scaler.scale)))
        return scaled

    @contextmanager
    def differentiating(self, divided: bool) -> Iterator[None]:
        """Around a backward of this engine, whose loss was ``scaled`` and perhaps ``divided`` by the steps."""
        before, self._starts = self._starts, True
        try:
            with _record.during(LossFactors(self.scale, self.steps if divided else 1)):
                yield
        finally:
            self._starts = before

    def added_factor(self) -> float:
        """Return the factor of a loss whose gradient is added in the running backward, and which nobody has scaled."""
        if self._starts:  # also where the caller has divided the loss by the steps
            return self.scale / self.steps
        applied = _record.find() or LossFactors()
        return applied.scale / applied.steps  # the ``missing_factor`` follows

    def missing_factor(self) -> float:
        """Return the factor that gradients of a backward lack which this engine did not start.

        Raises:
            RuntimeError: the loss was to be scaled, and was not.
        """
        # DeepSpeed, too, divides by the accumulation steps where the user calls `loss.backward()`.
        applied = _record.find()  # None: the backward is of a loss that no engine has scaled
        if self.scaler is not None and applied is None:
            raise RuntimeError(
                f"loss.backward() in fp16 without the loss scale {self.scaler.scale:g}: small gradients would become "
                "zero; call engine.scale(loss).backward(), or engine.backward(loss)"
            )
        applied = applied or LossFactors()
        return self.scale / applied.scale * applied.steps / self.steps
