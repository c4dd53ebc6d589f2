"""Observer of an engine: monitors, time breakdown, trace, count of operations."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median

import torch
from torch import nn

from zeromesh.base.spans import Spans, collective
from zeromesh.comm.mesh import Mesh
from zeromesh.config.settings import Resolved
from zeromesh.engine.observe.breakdown import Breakdown, Timer
from zeromesh.engine.observe.monitors import Monitor
from zeromesh.engine.observe.profile import Profile
from zeromesh.engine.observe.profiler_trace import Trace

MOST_STEPS = 1000  # whose times are kept

BREAKDOWN_EVERY = 10  # updates between breakdowns where ``steps_per_print`` does not say

_log = logging.getLogger("zeromesh")


class Observer:
    """Observer of one engine on one rank; it costs nothing where the settings ask for nothing."""

    def __init__(self, settings: Resolved, model: nn.Module, mesh: Mesh, monitor: Monitor) -> None:
        every = (settings.steps_per_print or BREAKDOWN_EVERY) if settings.wall_clock_breakdown else 0
        times = bool(every) or settings.times_whole_run  # a run of ``zeromesh train`` ends with a report of its time
        self.monitor = monitor
        precision = settings.precision
        self.dtype = precision.compute or precision.autocast or torch.float32  # of products
        self.spans = Spans(mesh.device, timed=times)
        self._rank = mesh.rank
        self.updates = 0  # since the engine was made
        self._since: float | None = None
        self._steps: deque[float] = deque(maxlen=MOST_STEPS)
        self._every = every
        self._timer = Timer(self.spans) if times else None
        self._timed_from = 0
        self._whole: Breakdown | None = None
        trace, flops = settings.profile, settings.flops_profiler
        self._trace = Trace(trace, self.spans, mesh.rank, mesh.device) if trace.enabled else None
        counts = flops.enabled and mesh.rank == 0
        self._profile = Profile(flops, self.dtype, model, mesh.device, self.spans) if counts else None
        mesh.traffic.listen(collective)  # of no engine, as engines may share a mesh
        if self._trace is not None:
            self._trace.after(0)

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Return the context of a phase of the engine; see ``spans``."""
        if self._profile is not None and self._profile.counting:
            return self._counted(self._profile, name)
        if self._timer is not None and self._profile is None:  # which counts the phases of its update
            self._timer.after_phases()
        return self.spans.phase(name)

    @contextmanager
    def _counted(self, profile: Profile, name: str) -> Iterator[None]:
        with self.spans.phase(name), profile.count(name):
            yield

    def values(self, values: dict[str, float], samples: int, batch: int) -> None:
        """Write the values of an update of ``batch`` samples, after which ``samples`` have been consumed."""
        now, before = time.perf_counter(), self._since
        self._since = now
        if before is not None:
            self._steps.append(now - before)
        self.monitor.advance(samples)
        if not self.monitor.enabled:
            return
        if before is not None:
            speed = {"seconds_per_step": now - before, "samples_per_second": batch / (now - before)}
            values = values | {f"Train/Samples/{name}": value for name, value in speed.items()}
        self.monitor.write(values)

    @property
    def step_seconds(self) -> float | None:
        """Median of the seconds from one update to the next, of the last ones; None before the second."""
        return median(self._steps) if self._steps else None

    def after_update(self, step: int) -> None:
        """Take in what was seen of update ``step``, which is over."""
        self.updates += 1
        if self._trace is not None or self._profile is not None:
            with self.spans.phase("observe"):  # files are written: nobody shall take this for the engine's own time
                if self._trace is not None and not self._trace.after(self.updates):
                    self._trace = None
                if self._profile is not None:
                    self._profile.read(step)
        if self._timer is not None:
            self._timer.after_update()
            if self._every and self.updates - self._timed_from >= self._every:
                self._show(self._timer, step)
            elif self.updates == 1 and not self._every:
                self._timer.begin()  # without the first update, in which libraries load and memory is taken
                self._timed_from = 1
        if self._profile is not None and self._profile.prepare(step):
            self._profile = None

    def _show(self, timer: Timer, step: int) -> None:
        breakdown = self._take(timer)
        if self._rank == 0:
            _log.info("update %d: %s", step, breakdown.text())
        named = {name: breakdown.phases.get(name, 0.0) for name in ("forward", "backward", "step")}
        self.monitor.write({f"Train/Samples/elapsed_time_ms_{name}": 1e3 * value for name, value in named.items()})

    def _take(self, timer: Timer) -> Breakdown:
        """Return the breakdown since the last one, and begin another."""
        breakdown = timer.take(self.updates - self._timed_from)
        self._timed_from = self.updates
        self._whole = breakdown if self._whole is None else self._whole + breakdown
        timer.begin()
        return breakdown

    def breakdown(self) -> Breakdown | None:
        """Return the breakdown of all updates but the first; None without one. Waits for the device."""
        if self._timer is not None and self.updates > self._timed_from:
            self._take(self._timer)
        return self._whole

    def rewind(self, samples: int) -> None:
        """Continue from a checkpoint after so many samples."""
        self._since = None  # the time of loading is no update's
        self.monitor.rewind(samples)

    def close(self) -> None:
        """Write what has not been written."""
        if self._trace is not None:
            self._trace.close()
        self.monitor.close()
