"""Trace of some updates by torch's profiler: one file per rank for Perfetto or chrome://tracing."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from zeromesh.base.files import free_path
from zeromesh.base.spans import PREFIX, Spans
from zeromesh.base.words import counted
from zeromesh.config.feature_sections import TraceSettings

_log = logging.getLogger("zeromesh")

MOST_SHOWN = 25  # spans in the table


class Trace:
    """Recorder of some updates on one rank, with the activities of its device and the names of spans."""

    def __init__(self, chosen: TraceSettings, spans: Spans, rank: int, device: torch.device) -> None:
        self._first, self._last = chosen.start_step, chosen.start_step + chosen.steps - 1
        self._folder = Path(chosen.output).absolute()  # the program may change its working directory
        self._spans = spans
        self._rank = rank
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile: Any = profile(activities=activities, profile_memory=chosen.memory)
        self._running = False

    def after(self, update: int) -> bool:
        """Advance after each update, and with 0 before the first. Return whether there may be more to record."""
        if self._running and update >= self._last:
            self._stop()
        elif not self._running and update == self._first - 1:
            self._start()
        return self._profile is not None

    def _start(self) -> None:
        if torch._C._autograd._profiler_enabled():  # the user's; torch can run one only
            self._profile = None
            _log.warning(
                "rank %d records no trace: another profiler is running, which a second one would end", self._rank
            )
            return
        self._profile.start()
        self._running = True
        self._spans.trace(True)

    def _stop(self) -> None:
        profile, self._profile = self._profile, None
        self._running = False
        self._spans.trace(False)
        profile.stop()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = free_path(self._folder / f"rank_{self._rank}.json")
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            _log.warning("the trace of rank %d was not written: %s", self._rank, error)
            return
        count = self._last - self._first + 1
        table, steps = span_table(profile.events(), count), counted(count, "update")
        _log.info("recorded %s in %s; spans of rank %d:\n%s", steps, path, self._rank, table)

    def close(self) -> None:
        """Write what was recorded so far, if something was."""
        if self._running:
            self._stop()


def span_table(events: Iterable[Any], updates: int) -> str:
    """Return calls and milliseconds per update of the kinds of spans, those with the most own time first."""
    calls: dict[str, int] = defaultdict(int)
    self_ms: dict[str, float] = defaultdict(float)
    total_ms: dict[str, float] = defaultdict(float)
    for event in events:
        if not event.name.startswith(PREFIX) or event.device_type.name != "CPU":
            continue
        kind, milliseconds = _kind(event), event.cpu_time_total / 1e3  # torch has microseconds
        calls[kind] += 1
        self_ms[kind] += milliseconds
        total_ms[kind] += milliseconds
        # Operators of torch may lie between a span and the one that it is in.
        around = event.cpu_parent
        while around is not None and not around.name.startswith(PREFIX):
            around = around.cpu_parent
        if around is not None:
            self_ms[_kind(around)] -= milliseconds
    lines = [f"  {'span':<28}{'calls':>8}{'own ms':>10}{'whole ms':>10}   per update"]
    for kind in sorted(self_ms, key=lambda kind: -self_ms[kind])[:MOST_SHOWN]:
        figures = f"{self_ms[kind] / updates:>10.2f}{total_ms[kind] / updates:>10.2f}"
        lines.append(f"  {kind:<28}{calls[kind] / updates:>8.1f}{figures}")
    return "\n".join(lines)


def _kind(event: Any) -> str:
    return str(event.name).removeprefix(PREFIX).split(" ")[0]
