"""``deepspeed.utils.timer``: named timers that wait for the device, and samples per second."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from zeromesh.deepspeed.devices import get_accelerator
from zeromesh.deepspeed.utilities import log_dist

_log = logging.getLogger("zeromesh")


def _now() -> float:
    get_accelerator().synchronize()
    return time.perf_counter()


@dataclass
class NamedTimer:
    """A stopwatch, in milliseconds."""

    name_: str
    started_: bool = False
    _start: float = 0.0
    _total: float = 0.0
    _records: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Start; RuntimeError if it runs."""
        if self.started_:
            raise RuntimeError(f"timer {self.name_} runs already: stop it first")
        self.started_, self._start = True, _now()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop, and add the time to what there is, or replace that; ``record`` counts it in the mean."""
        if not self.started_:
            raise RuntimeError(f"timer {self.name_} does not run: start it first")
        passed = 1e3 * (_now() - self._start)
        self._total, self.started_ = passed if reset else self._total + passed, False
        self._records += [passed] if record else []

    def reset(self) -> None:
        """Stop, and forget all times."""
        self.started_, self._total, self._records = False, 0.0, []

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds so far; a timer that runs goes on."""
        runs = self.started_
        if runs:
            self.stop()
        total, self._total = self._total, 0.0 if reset else self._total
        if runs:
            self.start()
        return total

    def mean(self) -> float:
        """Return the mean of the recorded times, in milliseconds; 0 without any."""
        return sum(self._records) / max(1, len(self._records))


class SynchronizedWallClockTimer:
    """Timers by name: ``timers("forward").start()``. Each waits for the device when it starts and when it stops."""

    Timer = NamedTimer

    def __init__(self) -> None:
        self.timers: dict[str, NamedTimer] = {}

    def __call__(self, name: str) -> NamedTimer:
        """Return the timer of a name, made when it is first asked for."""
        return self.timers.setdefault(name, NamedTimer(name))

    def get_timers(self) -> dict[str, NamedTimer]:
        """Return the timers by name."""
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """Return a line with the memory in use."""
        names = "memory_allocated", "max_memory_allocated"
        return " | ".join(f"{name}: {getattr(get_accelerator(), name)() / 2**30:.4f} GB" for name in names)

    def log(
        self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True, memory_breakdown: bool = False,
        ranks: list[int] | None = None,
    ) -> None:  # fmt: skip
        """Log the milliseconds of some timers, divided by ``normalizer``."""
        there = ((name, self.timers[name]) for name in names if name in self.timers)
        parts = [f"{name}: {timer.elapsed(reset) / normalizer:.2f}" for name, timer in there]
        log_dist(" | ".join(["time (ms)", *parts, *([self.memory_usage()] if memory_breakdown else [])]), ranks or [0])

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the means of some timers by name, divided by ``normalizer``."""
        found = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        for name in found if reset else ():
            self.timers[name].reset()
        return found


class ThroughputTimer:
    """Samples per second over the steps after the first ``start_step`` ones.

    It measures unless ``config.enabled`` is False. ``logging_fn``, by default the log, takes a line every
    ``steps_per_output`` steps, with ``monitor_memory`` one that has the memory in use.
    """

    def __init__(
        self, config: Any, batch_size: int, start_step: int = 2, steps_per_output: int | None = None,
        monitor_memory: bool = False, logging_fn: Callable[[str], Any] | None = None,
    ) -> None:  # fmt: skip
        self.enabled = getattr(config, "enabled", True)
        self.batch_size, self.start_step, self.steps_per_output = batch_size, start_step, steps_per_output
        self.monitor_memory, self.logging = monitor_memory, logging_fn or _log.info
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time, self._started = 0.0, 0.0

    def update_epoch_count(self) -> None:
        """Count an epoch; micro-steps are counted anew."""
        self.epoch_count, self.micro_step_count = self.epoch_count + 1, 0

    def start(self) -> None:
        """Begin a micro-step."""
        self._started = _now() if self.enabled and self.global_step_count >= self.start_step else 0.0

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-step; ``global_step``: and with it a step."""
        if not self.enabled:
            return
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self._started:
            self.total_elapsed_time, self._started = self.total_elapsed_time + _now() - self._started, 0.0
        every = self.steps_per_output
        if global_step and report_speed and every and self.global_step_count % every == 0:
            memory = f", {SynchronizedWallClockTimer.memory_usage()}" if self.monitor_memory else ""
            speed = f"{self.avg_samples_per_sec():.4g} samples/s on average"
            self.logging(f"epoch {self.epoch_count}, step {self.global_step_count}: {speed}{memory}")

    def avg_samples_per_sec(self) -> float:
        """Return the samples per second of this process; 0 before anything was measured."""
        steps = self.global_step_count - self.start_step
        return steps * self.batch_size / self.total_elapsed_time if steps > 0 and self.total_elapsed_time > 0 else 0.0
