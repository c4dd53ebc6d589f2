"""Training loop: steps, and the log, the evaluations and the checkpoints between them."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from zeromesh import Engine
from zeromesh.apps.train.check import Job
from zeromesh.apps.train.data.ordered_loader import Batch, Share
from zeromesh.apps.train.goodput import Spent, TimeLog
from zeromesh.apps.train.metrics import MetricsLog
from zeromesh.apps.train.run_loss import HeldOut, Score, weighted
from zeromesh.apps.train.signals import Ended, Request, mark_saved
from zeromesh.apps.train.train_settings import EarlyStop
from zeromesh.base.machine import peak_bytes, peak_flops
from zeromesh.base.progress import Display, Figures
from zeromesh.base.words import counted

_log = logging.getLogger("zeromesh")

BEST = "best"  # tag of the checkpoint; without a number, so that checkpoint.keep_last never deletes it
MOST_LOADS = 1_000_000  # numbers in the file of metrics that are loads of experts


@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    step: int = 0  # updates
    samples: int = 0  # consumed by all ranks together
    seconds: float = 0.0  # in steps, without evaluation and saving


@dataclass
class BestLoss:
    """Lowest evaluation loss so far. A resumed run continues from ``state``."""

    loss: float | None = None  # nats per label; None before the first evaluation
    step: int = 0  # of the lowest
    level: float | None = None  # loss that the next must be below by min_delta
    waited: int = 0  # evaluations since that was reached

    @classmethod
    def of(cls, state: Mapping[str, Any] | None) -> BestLoss:
        """Return what a checkpoint's client state holds."""
        return cls(**state) if state else cls()

    @property
    def state(self) -> dict[str, Any]:
        """Values for the client state of a checkpoint."""
        return asdict(self)

    def add(self, step: int, loss: float, stop: EarlyStop | None) -> bool:
        """Take in an evaluation, and return whether it is the lowest. A loss that is not finite is none."""
        needed = 0.0 if stop is None else stop.min_delta
        self.waited += 1
        if self.level is None or loss < self.level - needed:
            self.level, self.waited = loss, 0
        if self.loss is not None and not loss < self.loss:
            return False
        self.loss, self.step = loss, step
        return True

    def ends(self, stop: EarlyStop | None) -> bool:
        """Return whether the run stops here."""
        return stop is not None and self.waited >= stop.patience


@dataclass(frozen=True)
class Loop:
    """Training loop of one rank; ``metrics`` is None except on the first rank."""

    engine: Engine
    job: Job
    share: Share
    held_out: HeldOut
    flops_per_token: float
    metrics: MetricsLog | None
    display: Display
    times: TimeLog
    best: BestLoss

    def run(self, batches: Iterator[Batch], start: Progress) -> Progress:
        """Train from ``start`` on this rank's micro-batches to the last step, and save the last state. Collective."""
        dtype = self.engine.config.precision.compute or self.engine.config.precision.autocast or torch.float32
        # Measured on all ranks at the same time, which may share cores or the power of a machine.
        local_peak = torch.tensor([peak_flops(self.engine.device, dtype)], dtype=torch.float64)
        peak = float(self.engine.mesh.group("world").exchange(local_peak).sum())
        progress = logged = start
        stop = self.job.run.early_stop
        while progress.step < self.job.steps and not self.best.ends(stop):
            began = time.perf_counter()
            rate = self.engine.get_lr()[0]  # before the step, which sets that of the next one
            with self.times.spend(Spent.STEPS):
                loss = self._step(batches)
            seconds = progress.seconds + (time.perf_counter() - began)
            progress = Progress(progress.step + 1, progress.samples + self.share.global_batch, seconds)
            self._note_spike(progress)
            if progress.step in (1, self.job.steps) or self._due(progress, self.job.run.log_every):
                peak = self._log(progress, logged, loss, rate, peak)
                logged = progress
            saved = self._between_steps(progress)
            if self._due(progress, self.job.run.copy_every) and progress.step < self.job.steps:
                self._copy(progress)
            # The engine has agreed with all ranks on the signal, so all save at the same step.
            if self._due(progress, self.job.run.check_every) or self.engine.asked & Request.CHECK:
                self._check(progress)
            if self.engine.asked & Request.SAVE and not saved:
                saved = self._save(progress)
            if self.engine.asked & Request.END:
                saved = saved and self._complete_save(progress)
                self.display.line(f"step {progress.step}/{self.job.steps}  ended by a signal")
                if saved:
                    self._record(progress, ends=True)
                    # The launcher ends all ranks with the first, which must not be before this one has spoken.
                    self.engine.mesh.group("world").exchange(torch.zeros(1))
                    mark_saved()
                    raise Ended
                raise SystemExit(128 + signal.SIGTERM)  # as if the signal had ended it: nothing was saved
        if progress.step > start.step and not self._due(progress, self.job.run.save_every):
            self._save(progress, last=True)
        if self.best.ends(stop):
            self.display.line(
                f"step {progress.step}/{self.job.steps}  stopped early: the validation loss has not fallen for "
                f"{counted(self.best.waited, 'evaluation')}; raise run.early_stop.patience to go on with --resume"
            )
        if self.best.loss is not None:
            self.display.line(f"lowest validation loss: {self.best.loss:.3f} at step {self.best.step}")
        return progress

    def _step(self, batches: Iterator[Batch]) -> float:
        """Update once, and return the loss in nats per label."""
        # All labels of the global batch have the same weight, wherever they are, so they are counted before.
        with self.times.spend(Spent.DATA):
            local_batches = [next(batches) for _ in range(self.share.micro_batches)]
        micro_batches, _ = weighted(self.engine, self.job.language, local_batches, self.job.settings.dpo)
        self.engine.train_batch(iter(micro_batches))
        loss = self.engine.get_mean_loss()
        assert loss is not None
        return loss

    def _note_spike(self, progress: Progress) -> None:
        """Record a step that is a spike."""
        if (spike := self.engine.spikes.last) is not None and self.metrics is not None:
            values = {key: getattr(spike, key) for key in ("name", "value", "usual", "skipped")}
            self.metrics.write("spike", progress.step, samples=progress.samples, **values)

    def _due(self, progress: Progress, every: int) -> bool:
        """Return whether the step is a multiple of ``every``; 0 means never."""
        return every > 0 and progress.step % every == 0

    def _between_steps(self, progress: Progress) -> bool:
        """Evaluate and save if it is time to, and return whether a checkpoint was written."""
        run = self.job.run
        ends = progress.step == self.job.steps
        if self._due(progress, run.evaluate_every) and (run.watches_loss or not ends):
            with self.times.spend(Spent.EVALUATION):
                score = self.held_out.score(self.engine, run.evaluate_batches)
            if score is not None:
                if run.watches_loss:
                    self._compare(progress, score)
                ends = ends or self.best.ends(run.early_stop)
                # The end of the run has an evaluation of its own, on all held-out text.
                if not ends:
                    self.show_score(progress, score, on_all=False)
        return self._due(progress, run.save_every) and self._save(progress, last=ends)

    def _compare(self, progress: Progress, score: Score) -> None:
        """Take in an evaluation, and save the state if it is the best."""
        # The first rank's, so that all ranks end at the same step.
        loss = float(self.engine.mesh.group("world").exchange(torch.tensor([score.loss], dtype=torch.float64))[0])
        if self.best.add(progress.step, loss, self.job.run.early_stop) and self.job.run.keep_best:
            self._save(progress, tag=BEST)

    def show_score(self, progress: Progress, score: Score, on_all: bool = True) -> None:
        """Log and show an evaluation, on the whole held-out text or on a part of it."""
        accuracy = {} if score.accuracy is None else {"accuracy": score.accuracy}
        if self.metrics is not None:
            self.metrics.write(
                "validation", progress.step, loss=score.loss, bits_per_byte=score.bits_per_byte, **accuracy
            )
        self.engine.monitor.write({"Validation/Samples/loss": score.loss})
        text = "all held-out text" if on_all else "a part of the held-out text"
        bits = "" if score.bits_per_byte is None else f"  {score.bits_per_byte:.3f} bits per byte"
        if score.accuracy is not None:
            bits += f"  {score.accuracy:.1%} of the chosen answers preferred"
        self.display.line(f"step {progress.step}/{self.job.steps}  validation loss {score.loss:.3f}{bits}, on {text}")

    def _log(self, progress: Progress, logged: Progress, loss: float, rate: float, peak_speed: float) -> float:
        """Log a step, and return the peak operations per second, which is raised if the step was faster."""
        tokens = (progress.samples - logged.samples) * self.job.tokens_per_sample
        speed = tokens / (progress.seconds - logged.seconds)
        achieved = speed * self.flops_per_token
        # A short product measures the peak badly, and a share above 1 would be odd.
        peak_speed = max(peak_speed, achieved)
        # fp64 holds every number of bytes exactly.
        peak = torch.tensor([float(peak_bytes(self.engine.device))], dtype=torch.float64)
        norm = self.engine.get_global_grad_norm()
        assert norm is not None
        figures: dict[str, Any] = {
            "loss": loss,
            "learning_rate": rate,
            "gradient_norm": norm,
            "tokens_per_second": round(speed, 1),
            "utilization": round(achieved / peak_speed, 4),
            "memory": int(self.engine.mesh.group("world").exchange(peak).max()),
        }
        seconds_left = (self.job.steps - progress.step) * self.tokens_per_step / speed
        self.display.step(Figures(progress.step, seconds_left=seconds_left, **figures))
        self._record(progress)
        self._record_experts(progress)
        if self.metrics is not None:
            taken = {"samples": progress.samples, "tokens": progress.samples * self.job.tokens_per_sample}
            seconds = round(progress.seconds, 3)
            self.metrics.write("train", progress.step, **taken, **figures, seconds=seconds)
        return peak_speed

    def _record_experts(self, progress: Progress) -> None:
        """Record the load of each layer's experts, of so many steps that the file does not grow large."""
        if self.metrics is None or not (report := self.engine.expert_report()):
            return
        every = max(1, self.job.run.log_every)
        numbers = sum(len(layer.load) for layer in report.values()) * self.job.steps // every
        if progress.step // every % (numbers // MOST_LOADS + 1) == 0 or progress.step == self.job.steps:
            self.metrics.write(
                "experts",
                progress.step,
                load={name: [round(100 * load) for load in layer.load] for name, layer in report.items()},
                entropy={name: round(layer.entropy, 4) for name, layer in report.items()},
                dropped={name: round(layer.dropped, 4) for name, layer in report.items()},
            )

    def _record(self, progress: Progress, ends: bool = False) -> None:
        """Record the times so far, and the work of the ranks."""
        if (work := self.engine.work_report()) is not None:
            self.times.move(Spent.STEPS, Spent.IDLE, work.idle)
            shown = {"work": work.seconds, "usual": work.usual}
            each = {
                name: [round(rank_seconds / work.updates, 6) for rank_seconds in seconds]
                for name, seconds in shown.items()
            }
            self.times.note(progress.step, **each)
        self.times.record(progress.step, ends)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks consume in one step."""
        return self.share.global_batch * self.job.tokens_per_sample

    def _check(self, progress: Progress) -> None:
        """Check the hardware of all ranks."""
        health = self.engine.check_health()
        self.times.note(progress.step, health=health)
        seen = "; ".join(f"{entry['name']} is {'slow' if entry['unit'] else 'wrong'}" for entry in health["slow"])
        self.display.line(f"step {progress.step}/{self.job.steps}  hardware check: {seen or 'all as usual'}")

    def _copy(self, progress: Progress) -> None:
        """Keep the state in memory, if the run is to."""
        if self.engine.config.checkpoint.peer_copies:
            with self.times.spend(Spent.CHECKPOINTS):
                self.engine.save_to_memory(self.job.folder.checkpoints, self._client_state(progress))

    def _client_state(self, progress: Progress) -> dict[str, Any]:
        """Return what a resumed run needs beside the engine's state."""
        state = {"samples": progress.samples, "seconds": progress.seconds, "origins": self.job.origins}
        return state | ({"best": self.best.state} if self.job.run.watches_loss else {})

    def _save(self, progress: Progress, last: bool = False, tag: str | None = None) -> bool:
        """Write a checkpoint, or begin to (``checkpoint.asynchronous``), and return whether this succeeded.

        One with a tag is not what a run is resumed from.
        """
        state, latest = self._client_state(progress), tag is None
        folder = self.job.folder.checkpoints
        save = partial(self.engine.save_checkpoint, folder, tag, client_state=state, save_latest=latest)
        saved = self._succeeds(save, progress, last) and (not last or self._complete_save(progress, last))
        self._record(progress)
        return saved

    def _complete_save(self, progress: Progress, last: bool = False) -> bool:
        """Wait for an asynchronous save, and return whether it succeeded."""
        return self._succeeds(self.engine.wait_for_checkpoint, progress, last)

    def _succeeds(self, action: Callable[[], object], progress: Progress, last: bool) -> bool:
        """Call what may fail to write a checkpoint; return whether it succeeded, or raise where the run must end."""
        failure: OSError | RuntimeError | None = None
        try:
            with self.times.spend(Spent.CHECKPOINTS):
                action()
        except (OSError, RuntimeError) as error:  # raised on all ranks; one of them has the reason
            failure = error
        failed = self.engine.mesh.group("world").exchange(torch.tensor([float(failure is not None)]))
        if bool(failed.any()):
            # A full disk does not end a run: the next save is another try. But a checkpoint that only some ranks have
            # written means that they do not agree on what is there.
            reason = failure or RuntimeError("the checkpoint was written, but another rank failed right after that")
            if last or self.engine.config.checkpoint.on_failure == "stop" or not bool(failed.all()):
                raise reason
            last_tag = self.job.folder.last_checkpoint
            _log.warning(
                "step %d: no checkpoint was written (%s). Training continues, and the next save tries again; %s",
                progress.step,
                reason,
                f"the last checkpoint is {last_tag}" if last_tag else "there is no checkpoint yet",
            )
            return False
        return True
