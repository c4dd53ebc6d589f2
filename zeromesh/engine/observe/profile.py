"""Report on a model's operations: counted in one update, timed in the next, which no counting slows down."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn

from zeromesh.base.files import free_path
from zeromesh.base.machine import peak_flops
from zeromesh.base.operation_counts import Operations
from zeromesh.base.spans import NOTHING, Spans
from zeromesh.base.words import scaled_text
from zeromesh.config.feature_sections import FlopsProfiler

_log = logging.getLogger("zeromesh")

FORMULAS = """\
  A product of m x k and k x n matrices is 2 m n k operations; attention over s tokens with heads of width d is
  4 s s d per head forwards, whatever a mask leaves out, and twice that backwards; the rest counts nothing.
  achieved = (forward + backward) / (seconds of forward + seconds of backward)
  MFU = achieved / peak, without operations that are done again; HFU = the same with them.
  For a decoder of which every parameter is trained this is 6 P + 12 L h s per token: P parameters in products, L blocks
  of width h, s tokens. `zeromesh train` reports 6 P + 6 L h s of its own decoder, as a causal mask leaves out half."""


class Profile:
    """Counter of one update of an engine; ``dtype`` is that of its products."""

    def __init__(
        self, chosen: FlopsProfiler, dtype: torch.dtype, model: nn.Module, device: torch.device, spans: Spans
    ) -> None:
        self.counting = False  # True in the update that is counted
        self._chosen, self._dtype = chosen, dtype
        # Absolute, because the program may change its folder before the report is written.
        self._output = Path(chosen.output_file).absolute() if chosen.output_file else None
        self._model = model
        self._device = device
        self._spans = spans
        self._operations = Operations(model)
        self._micro_batches = 0
        self._was_timed = spans.timed
        self._first: int | None = None  # index of the first span of the update that is timed

    def count(self, phase: str) -> AbstractContextManager[object]:
        """Return a context that counts the operations of a phase, if the phase is a part of training."""
        if phase not in ("forward", "backward"):
            return NOTHING
        self._micro_batches += phase == "backward"
        return self._operations

    def read(self, step: int) -> None:
        """Read the spans of update ``step``, which is over, and report if it is the one that is timed."""
        if self._first is None:
            return
        clock, phases = self._spans.clock, self._spans.phases[self._first :]
        seconds = dict.fromkeys(("forward", "backward"), 0.0)
        micro_batches = sum(phase.kind == "backward" for phase in phases)
        for phase in phases:
            if phase.kind in seconds:
                clock.settle(phase.end)
                seconds[phase.kind] += clock.seconds(phase.begin, phase.end) / micro_batches
        self._spans.time(self._was_timed)
        text = "\n".join(self._lines(step - 1, seconds))
        if self._output is None:
            _log.info("%s", text)
            return
        path = free_path(self._output)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        except OSError as error:  # training is worth more than the report
            _log.warning("the FLOPs report was not written: %s\n%s", error, text)
        else:
            _log.info("the FLOPs report is in %s", path)

    def prepare(self, step: int) -> bool:
        """Prepare for the update after ``step``, whose spans were read. Return whether all is done."""
        if self._first is not None or step > self._chosen.profile_step + 1:
            return True
        if self.counting:  # in the update that is over: the next one is timed
            self._spans.time(True)
            self._first = len(self._spans.phases)
        self.counting = step == self._chosen.profile_step
        return False

    def _lines(self, step: int, seconds: dict[str, float]) -> Iterator[str]:
        counted, each = self._operations, self._micro_batches
        forward, backward, again = counted.forward / each, counted.backward / each, counted.recomputed / each
        time, peak = sum(seconds.values()), peak_flops(self._device, self._dtype)
        achieved = (forward + backward) / time if time > 0 else 0.0
        parameters = [(p.numel(), p.requires_grad) for p in self._model.parameters()]
        trained = sum(count for count, trainable in parameters if trainable)
        yield f"operations of update {step} on one rank, per micro-batch, of which there were {self._micro_batches}"
        rows = {
            "parameters": f"{scaled_text(sum(c for c, _ in parameters))}, of which trained: {scaled_text(trained)}",
            "forward": f"{_flops(forward)}, {1e3 * seconds['forward']:.2f} ms",
            "backward": f"{_flops(backward)}, {1e3 * seconds['backward']:.2f} ms",
            "done again": f"{_flops(again)}, in the backward's time",
            "timed": f"in update {step + 1}",
            "achieved": f"{_flops(achieved)}/s",
            "peak": f"{_flops(peak)}/s in {str(self._dtype).removeprefix('torch.')} on {self._device.type}",
            "MFU": f"{achieved / peak:.1%}",
            "HFU": f"{achieved / peak * (1 + again / max(1.0, forward + backward)):.1%}",
        }
        yield from (f"  {name:<14}{text}" for name, text in rows.items())
        yield FORMULAS
        chosen = self._chosen
        yield from module_lines(
            self._model, counted, chosen.module_depth, chosen.top_modules, chosen.detailed, self._micro_batches
        )


def module_lines(
    model: nn.Module, counted: Operations, depth: int, top: int, detailed: bool, micro_batches: int = 1
) -> Iterator[str]:
    """Yield modules by depth, those with the most operations first; then, if ``detailed``, all in their order.

    Args:
        model: of which operations were counted.
        counted: the operations.
        depth: of the modules that are shown; -1: all.
        top: number of modules at each depth.
        detailed: show all.
        micro_batches: number by which operations are divided.
    """
    levels: dict[int, list[str]] = {}
    for name, _ in model.named_modules():
        level = name.count(".") + 1 if name else 0
        if depth < 0 or level <= depth:
            levels.setdefault(level, []).append(name)

    def inside(name: str) -> int:
        if name in counted.modules:
            return counted.modules[name]
        # One that is not called itself, such as a list, has those of its children.
        children = model.get_submodule(name).named_children()
        return sum(inside(f"{name}.{child}".lstrip(".")) for child, _ in children)

    def line(name: str, before: str) -> str:
        module, count = model.get_submodule(name), inside(name)
        size = scaled_text(sum(p.numel() for p in module.parameters()))
        label = f"{before}{name or '(model)'} ({type(module).__name__})"
        share = count / max(1, counted.forward)
        return f"    {label:<56}{size:>10} parameters  {_flops(count / micro_batches):>12}  {share:>6.1%}"

    yield "  modules with the most operations, forward"
    for level, names in levels.items():
        yield from (line(name, f"depth {level}: ") for name in sorted(names, key=lambda name: -inside(name))[:top])
    if detailed:
        yield "  all modules"
        shown = {name for names in levels.values() for name in names}
        yield from (line(name, "") for name, _ in model.named_modules() if name in shown)


def _flops(count: float) -> str:
    return scaled_text(count, "FLOP")
