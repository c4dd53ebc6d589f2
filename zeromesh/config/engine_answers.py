"""Answers of DeepSpeed's engine to questions about the configuration: a table from its methods to keys.

A row has the path of a key of ``DEFAULTS``, or a function of what was asked where the answer is ours to resolve.
Keys that have no effect here are answered as they were written: a program may act on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from zeromesh.config.deepspeed_defaults import ANSWERED, DEFAULTS, RESOLVED
from zeromesh.config.document import is_unset
from zeromesh.config.errors import ConfigError
from zeromesh.config.settings import Resolved, Settings
from zeromesh.config.special_keys import RENAMED, look_up


@dataclass(frozen=True)
class Asked:
    """A configuration as it was written, and the settings that it led to."""

    document: Mapping[str, Any]
    settings: Settings | Resolved  # resolved where the answer is a size

    def value(self, path: str, default: Any) -> Any:
        """Return what was written under a key, or one of its other names; ``default`` if nothing was."""
        names = [path, *(old for old, new in RENAMED.items() if new == path)]
        answers = (look_up(dict(self.document), name) for name in names)
        return next((value for there, value in answers if there and not is_unset(value)), default)


Answer = str | Callable[[Asked], Any]

_ZERO = "zero_optimization"


def _of_settings(path: str) -> Answer:
    value = attrgetter(path)
    return lambda asked: value(asked.settings)


def _tag_validation(asked: Asked) -> str:
    mode = str(asked.value("checkpoint.tag_validation", "Warn"))
    if mode.lower() not in ("warn", "ignore", "fail"):
        problem = f'checkpoint.tag_validation = "{mode}": must be one of Warn, Ignore, Fail; choose one of them'
        raise ConfigError([problem], "the configuration")
    return mode.lower()


def _section(section: Any) -> Any:
    """Return a section as a dict; None stays None."""
    return None if section is None else section.model_dump()


def _scale_options(asked: Asked) -> dict[str, Any] | None:
    fp16 = asked.settings.fp16
    if fp16.loss_scale:
        return None
    window, least = fp16.loss_scale_window, fp16.min_loss_scale
    start = 2**fp16.initial_scale_power
    return {"init_scale": start, "scale_window": window, "delayed_shift": fp16.hysteresis, "min_scale": least}


ANSWERS: dict[str, Answer] = {
    **ANSWERED,
    **{name: _of_settings(path) for name, path in RESOLVED.items()},
    "fp16_auto_cast": lambda asked: asked.settings.fp16.auto_cast if asked.settings.fp16.enabled else None,
    "dynamic_loss_scale": lambda asked: asked.settings.fp16.loss_scale == 0,
    "initial_dynamic_scale": lambda asked: 2**asked.settings.fp16.initial_scale_power,
    "dynamic_loss_scale_args": _scale_options,
    "postscale_gradients": lambda asked: not asked.settings.prescale_gradients,
    "optimizer_name": lambda asked: asked.settings.optimizer and asked.settings.optimizer.type.lower(),
    "optimizer_params": lambda asked: asked.settings.optimizer and dict(asked.settings.optimizer.params),
    "scheduler_name": lambda asked: asked.settings.scheduler and asked.settings.scheduler.type,
    "scheduler_params": lambda asked: asked.settings.scheduler and dict(asked.settings.scheduler.params),
    "checkpoint_tag_validation_enabled": lambda asked: _tag_validation(asked) != "ignore",
    "checkpoint_tag_validation_fail": lambda asked: _tag_validation(asked) == "fail",
    "checkpoint_writer_enabled": lambda asked: asked.value("checkpoint.writer", None) is not None,
    "autotuning_profile_model_info": lambda asked: asked.value("autotuning.model_info", {}).get("profile", False),
    "zero_optimization": lambda asked: asked.settings.zero_optimization.stage > 0,
    "zero_optimization_partition_gradients": lambda asked: asked.settings.zero_optimization.stage >= 2,
    "zero_optimization_partition_weights": lambda asked: asked.settings.zero_optimization.stage >= 3,
    "zero_offload_optimizer": lambda asked: _section(asked.settings.zero_optimization.offload_optimizer),
    "zero_offload_param": lambda asked: _section(asked.settings.zero_optimization.offload_param),
    "zero_use_cpu_optimizer": lambda asked: asked.settings.zero_optimization.optimizer_device != "none",
    "zero_cpu_offload": lambda asked: asked.settings.zero_optimization.optimizer_device == "cpu",
    "zero_nvme_offload_optimizer": lambda asked: asked.settings.zero_optimization.optimizer_device == "nvme",
    "zero_overlap_comm": lambda asked: asked.value(f"{_ZERO}.overlap_comm", asked.settings.zero_optimization.stage > 2),
    "aio_config": lambda asked: _section(asked.settings.aio),
    "tensor_parallel_config": lambda asked: _section(asked.settings.tensor_parallel),
    "autotp_size": lambda asked: (
        asked.settings.model_sizes["tensor"] if asked.settings.model_sizes["tensor"] > 1 else 0
    ),
}


def answer(name: str, asked: Asked) -> Any:
    """Return the answer to one of DeepSpeed's questions."""
    row = ANSWERS[name]
    return asked.value(row, DEFAULTS[row]) if isinstance(row, str) else row(asked)
