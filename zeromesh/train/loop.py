"""The training loop: steps, and what is shown, measured and saved between them."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zeromesh.engine import Engine
from zeromesh.observe.machine import peak_bytes, peak_flops
from zeromesh.observe.metrics import MetricsLog
from zeromesh.observe.progress import Display, Figures
from zeromesh.train.check import Job
from zeromesh.train.data.loader import Batch, Share
from zeromesh.train.evaluate import HeldOut, Score
from zeromesh.train.loss import weighted
from zeromesh.train.signals import Ended, Request, leave_word

_log = logging.getLogger("zeromesh")


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    Attributes:
        step: updates so far.
        samples: samples that all ranks have consumed.
        seconds: time spent in steps, without evaluation and saving.
    """

    step: int = 0
    samples: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Loop:
    """Objects of the loop. ``metrics`` is None on all ranks but the first."""

    engine: Engine
    job: Job
    share: Share
    held_out: HeldOut
    flops_per_token: float
    metrics: MetricsLog | None
    display: Display

    def run(self, batches: Iterator[Batch], start: Progress) -> Progress:
        """Train from ``start`` to the last step; all ranks call it. The last state is saved.

        Raises:
            FloatingPointError: if the loss stops being finite.
        """
        peak = self._peak_flops()
        progress = logged = start
        while progress.step < self.job.run.steps:
            began = time.perf_counter()
            rate = self.engine.get_lr()[0]
            loss = self._step(batches)
            progress = self._advanced(progress, time.perf_counter() - began)
            if self._due(progress, self.job.run.log_every) or progress.step == 1:
                peak = self._log(progress, logged, loss, rate, peak)
                logged = progress
            saved = self._between_steps(progress)
            if self.engine.asked and not saved:
                saved = self._save(progress)
            if self.engine.asked == Request.SAVE_AND_END:
                self.display.line(f"step {progress.step}/{self.job.run.steps}  ended by a signal")
                if saved:
                    leave_word()
                    raise Ended
                raise SystemExit(128 + signal.SIGTERM)
        if progress.step > start.step and not self._due(progress, self.job.run.save_every, last=False):
            self._save(progress, last=True)
        return progress

    def _step(self, batches: Iterator[Batch]) -> float:
        """One update. Every label of the global batch counts the same, wherever it is. Returns nats per label."""
        given = [next(batches) for _ in range(self.share.micro_batches)]
        micro_batches, _ = weighted(self.engine, self.job.language, given)
        self.engine.train_batch(iter(micro_batches))
        loss = self.engine.get_mean_loss()
        assert loss is not None
        return loss

    def _advanced(self, progress: Progress, seconds: float) -> Progress:
        return Progress(progress.step + 1, progress.samples + self.share.global_batch, progress.seconds + seconds)

    def _due(self, progress: Progress, every: int, last: bool = True) -> bool:
        """Return whether a step is one of every ``every`` (0: none), or with ``last`` the last one."""
        return (every > 0 and progress.step % every == 0) or (last and progress.step == self.job.run.steps)

    def _between_steps(self, progress: Progress) -> bool:
        """Evaluate and save where it is time to; the end of the run has its own evaluation of all held-out text.

        Returns whether a checkpoint was written.
        """
        if self._due(progress, self.job.run.evaluate_every, last=False) and progress.step < self.job.run.steps:
            score = self.held_out.score(self.engine, self.job.run.evaluate_batches)
            if score is not None:
                self.show_score(progress, score)
        due = self._due(progress, self.job.run.save_every, last=False)
        return due and self._save(progress, last=progress.step == self.job.run.steps)

    def show_score(self, progress: Progress, score: Score) -> None:
        """Write a validation to the log and to the screen; those between steps are of a part of the text only."""
        if self.metrics is not None:
            self.metrics.write("validation", progress.step, loss=score.loss, bits_per_byte=score.bits_per_byte)
        self.engine.monitor.write({"Validation/Samples/loss": score.loss})
        text = "all held-out text" if progress.step == self.job.run.steps else "a part of the held-out text"
        bits = "" if score.bits_per_byte is None else f"  {score.bits_per_byte:.3f} bits per byte"
        self.display.line(
            f"step {progress.step}/{self.job.run.steps}  validation loss {score.loss:.3f}{bits}, on {text}"
        )

    def _log(self, progress: Progress, logged: Progress, loss: float, rate: float, peak_speed: float) -> float:
        """Log a step. Returns the peak operations per second, which the step may have shown to be higher."""
        tokens = (progress.samples - logged.samples) * self.job.language.sequence_length
        speed = tokens / (progress.seconds - logged.seconds)
        achieved = speed * self.flops_per_token
        peak_speed = max(peak_speed, achieved)
        peak = torch.tensor([float(peak_bytes(self.engine.device))], dtype=torch.float64)
        norm = self.engine.get_global_grad_norm()
        assert norm is not None
        figures = Figures(
            step=progress.step,
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm,
            tokens_per_second=speed,
            utilization=achieved / peak_speed,
            memory=int(self.engine.mesh.group("world").exchange(peak).max()),
            seconds_left=(self.job.run.steps - progress.step) * self.tokens_per_step / speed,
        )
        self.display.step(figures)
        if self.metrics is not None:
            self._write(progress, figures)
        return peak_speed

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks consume in one step."""
        return self.share.global_batch * self.job.language.sequence_length

    def _write(self, progress: Progress, figures: Figures) -> None:
        assert self.metrics is not None
        self.metrics.write(
            "train",
            progress.step,
            samples=progress.samples,
            tokens=progress.samples * self.job.language.sequence_length,
            loss=figures.loss,
            learning_rate=figures.learning_rate,
            gradient_norm=figures.gradient_norm,
            tokens_per_second=round(figures.tokens_per_second, 1),
            utilization=round(figures.utilization, 4),
            memory=figures.memory,
            seconds=round(progress.seconds, 3),
        )

    def _save(self, progress: Progress, last: bool = False) -> bool:
        """Write a checkpoint, and return whether that succeeded.

        A disk that is full, or cannot be written to for a while, does not end a run unless ``checkpoint.on_failure``
        says so: the next save is another try. After the last step there is none.
        """
        state = {"samples": progress.samples, "seconds": progress.seconds}
        failure: OSError | RuntimeError | None = None
        try:
            self.engine.save_checkpoint(self.job.folder.checkpoints, client_state=state)
        except (OSError, RuntimeError) as error:  # all ranks raise, one of them what went wrong
            failure = error
        failed = self.engine.mesh.group("world").exchange(torch.tensor([float(failure is not None)]))
        if bool(failed.any()):
            reason = failure or RuntimeError("the checkpoint was written, but another rank failed right after that")
            if last or self.engine.config.checkpoint.on_failure == "stop" or not bool(failed.all()):
                raise reason
            kept = self.job.folder.last_checkpoint
            _log.warning(
                "step %d: no checkpoint was written (%s); training goes on, and the next save is another try; %s",
                progress.step, reason, f"the last one is {kept}" if kept else "there is none yet",
            )  # fmt: skip
            return False
        return True

    def _peak_flops(self) -> float:
        """Operations per second that all ranks can do at best, measured at the same time."""
        dtype = self.engine.config.precision.compute or self.engine.config.precision.autocast or torch.float32
        own = torch.tensor([peak_flops(self.engine.device, dtype)], dtype=torch.float64)
        return float(self.engine.mesh.group("world").exchange(own).sum())
