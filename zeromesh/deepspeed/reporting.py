"""``deepspeed.monitor`` and ``deepspeed.profiling``, over ZeroMesh's monitors and its count of operations."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeromesh.base.operation_counts import Operations
from zeromesh.base.signatures import refuse
from zeromesh.config.settings import Settings
from zeromesh.engine.observe.monitors import open_monitors
from zeromesh.engine.observe.profile import module_lines


def get_monitor_config(param_dict: Mapping[str, Any]) -> Settings:
    """Return the settings of the monitors in a configuration."""
    return Settings.load({name: param_dict[name] for name in param_dict if name in MONITOR_SECTIONS})


MONITOR_SECTIONS = ("tensorboard", "csv_monitor", "wandb")


class MonitorMaster:
    """The monitors that a configuration, or what ``get_monitor_config`` returns, switches on; the first rank writes."""

    def __init__(self, monitor_config: Any) -> None:
        settings = get_monitor_config(monitor_config) if isinstance(monitor_config, Mapping) else monitor_config
        self._monitor = open_monitors(settings, dist.get_rank() if dist.is_initialized() else 0)
        self.enabled = any(getattr(settings, name).enabled for name in MONITOR_SECTIONS)

    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        """Write values, each as (name, value, step)."""
        for name, value, step in event_list:
            self._monitor.write({name: value}, step)


UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2, *, of: str = "") -> str:
    """Return a number as text such as ``1.23 G``, with the largest fitting unit or a given one; ``of`` follows it."""
    prefix = None if units is None else units.removesuffix(of)
    if prefix is None:
        prefix = next((unit for unit, size in UNITS.items() if abs(num) >= size), "")
    return f"{round(num / UNITS[prefix], precision):g} {prefix}{of}".rstrip()


flops_to_string, macs_to_string, params_to_string, duration_to_string = (
    partial(number_to_string, of=unit) for unit in ("FLOPS", "MACs", "", "s")
)


class OperationProfiler:
    """Counter of a model's operations between ``start_profile`` and ``stop_profile``.

    Products of matrices, convolutions and attention count, as in ``zeromesh.base.operation_counts``; unlike
    DeepSpeed's, what is done element by element does not. A multiplication and an addition are two operations, and one
    MAC.

    Pass ``engine.module`` for an engine. Operations that are done again are counted as they happen.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        refuse("FlopsProfiler", "recompute_fwd_factor", float(recompute_fwd_factor), "leave it out", 0.0)
        self.model = model
        self.started = False
        self.reset_profile()

    def reset_profile(self) -> None:
        """Count anew."""
        self._operations, self._seconds, self._since = Operations(self.model), 0.0, 0.0

    def start_profile(self, ignore_list: Sequence[type] | None = None) -> None:
        """Count from now on; ``ignore_list`` has to be empty."""
        refuse("start_profile", "ignore_list", ignore_list or None, "leave it out; all operations count")
        if not self.started:
            self.reset_profile()
            self._operations.__enter__()
            self.started, self._since = True, time.perf_counter()

    def stop_profile(self) -> None:
        """Count no more; the counts stay."""
        if self.started:
            self._seconds += time.perf_counter() - self._since
            self._operations.__exit__(None, None, None)
            self.started = False

    def end_profile(self) -> None:
        """Count no more, and forget the counts."""
        self.stop_profile()
        self.reset_profile()

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return the operations of forwards."""
        operations = self._operations.forward
        return flops_to_string(operations) if as_string else operations

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the multiplications of forwards, each with its addition."""
        multiplications = self._operations.forward // 2
        return macs_to_string(multiplications) if as_string else multiplications

    def get_total_params(self, as_string: bool = False) -> Any:
        """Return the parameters of the model."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return params_to_string(count) if as_string else count

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return the seconds in which was counted, which counting makes longer."""
        seconds = self._seconds + (time.perf_counter() - self._since if self.started else 0.0)
        return duration_to_string(seconds) if as_string else seconds

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | Path | None = None,
    ) -> None:
        """Print, or write anew to ``output_file``, the counts of the modules to ``module_depth``; -1: of all.

        ``profile_step`` is named in the first line. The ``top_modules`` with the most operations at each depth come
        first, and with ``detailed`` all modules after them.
        """
        text = "\n".join(self._lines(profile_step, module_depth, top_modules, detailed))
        if output_file is None:
            print(text)
        else:
            Path(output_file).write_text(text + "\n")

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the modules with the most operations at each depth."""
        self.print_model_profile(1, module_depth, top_modules, detailed=False)

    def _lines(self, step: int, depth: int, top: int, detailed: bool) -> Iterable[str]:
        yield f"operations of step {step}: {self.get_total_flops(True)} in {self.get_total_duration(True)}"
        yield f"parameters: {self.get_total_params(True)}; MACs: {self.get_total_macs(True)}"
        yield from module_lines(self.model, self._operations, depth, top, detailed)


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | Path | None = None,
    ignore_modules: Sequence[type] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Return the operations, MACs and parameters of one forward of a model, in evaluation mode.

    Inputs are a tensor of ones of ``input_shape``, and ``args`` and ``kwargs``. ``warm_up`` forwards come before that
    which is counted; ``mode="generate"`` calls the model's method of this name. ``print_profile`` prints the counts by
    module, as ``print_model_profile`` does with the arguments of its names; ``as_string`` returns texts, such as
    ``1.23 GFLOPS``. ``ignore_modules`` must be None: all operations count.
    """
    if mode not in ("forward", "generate"):
        raise ValueError(f"get_model_profile: mode = {mode!r} must be 'forward' or 'generate'")
    inputs, named = list(args), dict(kwargs or {})
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(0))
        inputs.insert(0, torch.ones(tuple(input_shape), dtype=like.dtype, device=like.device))
    if not (inputs or named):
        raise ValueError("get_model_profile needs the model's inputs: pass input_shape, args or kwargs")
    call: Any = model.generate if mode == "generate" else model
    profiler, training = OperationProfiler(model), model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call(*inputs, **named)
            profiler.start_profile(ignore_modules)
            call(*inputs, **named)
    finally:
        profiler.stop_profile()
        model.train(training)
    if print_profile:
        profiler.print_model_profile(1, module_depth, top_modules, detailed, output_file)
    totals = (profiler.get_total_flops(as_string), profiler.get_total_macs(as_string))
    return *totals, profiler.get_total_params(as_string)
