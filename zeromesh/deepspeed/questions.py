"""Names of DeepSpeed's engine that need no method of their own: tables of attributes, questions, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, isfinite
from typing import Any

import torch

from zeromesh.comm.detect import Environment
from zeromesh.config.engine_answers import ANSWERS, Asked, answer
from zeromesh.config.settings import Resolved
from zeromesh.deepspeed.process_groups import group_of
from zeromesh.moe import MoE, has_moe_layers

Engine = Any  # a DeepSpeedEngine, which is made with these tables

ATTRIBUTES: dict[str, Callable[[Engine], Any]] = {
    "local_rank": lambda engine: Environment.detect().local_rank,
    "global_rank": lambda engine: engine.mesh.rank,
    "world_size": lambda engine: engine.mesh.world_size,
    "dp_world_size": lambda engine: engine.mesh.data_size,
    "mp_world_size": lambda engine: engine.mesh.sizes["tensor"],
    "sequence_parallel_size": lambda engine: engine.mesh.sizes["context"],
    "seq_dp_world_size": lambda engine: engine.mesh.gradients,
    "data_parallel_group": lambda engine: group_of("data_parallel", engine),
    "seq_data_parallel_group": lambda engine: group_of("sequence_data_parallel", engine),
    "pipeline_parallelism": lambda engine: engine.pipelined is not None,
    "inside_no_sync_ctxt": lambda engine: not engine._accumulation.syncs,
    "communication_data_type": lambda engine: engine.config.precision.communicate or _data_type(engine),
    "gradient_average": lambda engine: True,
    "enable_backward_allreduce": lambda engine: True,
    "has_moe_layers": lambda engine: has_moe_layers(engine.module)[0],
    "num_experts": lambda engine: [layer.num_experts for layer in engine.module.modules() if isinstance(layer, MoE)],
    "basic_optimizer": lambda engine: engine.optimizer,
    "param_names": lambda engine: {parameter: name for name, parameter in engine.module.named_parameters()},
    "torch_autocast_z0_gradscaler": lambda engine: (
        engine.loss_scaler if engine.torch_autocast_enabled() and not engine.zero_optimization() else None
    ),
    "num_stages": lambda engine: engine.mesh.sizes["pipeline"],
    "stage_id": lambda engine: engine.mesh.group("pipeline").rank,
    "micro_batches": lambda engine: engine.gradient_accumulation_steps(),
    "micro_batch_size": lambda engine: engine.train_micro_batch_size_per_gpu(),
}
"""Attributes of the engine."""


def data_seed(asked: Asked) -> int:
    """Return the seed of the order of samples: DeepSpeed leaves torch's, unless our own key is written."""
    return int(asked.value("seed", 0))


def _data_type(engine: Engine) -> torch.dtype:
    return engine.config.precision.compute or torch.float32


def _per_group(engine: Engine, name: str) -> list[Any]:
    return [group.get(name, 0.0) for group in engine.optimizer.param_groups] if engine.optimizer else []


def _times(engine: Engine) -> dict[str, float]:
    """Return the milliseconds of each phase of an update; empty unless the breakdown of time is on."""
    breakdown = engine.observer.breakdown()
    return {} if breakdown is None else {name: 1e3 * seconds for name, seconds in breakdown.phases.items()}


QUESTIONS: dict[str, Callable[[Engine], Any]] = {
    "get_batch_info": lambda engine: (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    ),
    # Of an optimizer without betas, its momentum.
    "get_mom": lambda engine: _per_group(engine, "betas" if any(_per_group(engine, "betas")) else "momentum"),
    # Infinity, also for a norm that is not a number, says that the update was skipped as an overflow.
    "get_global_grad_norm": lambda engine: norm if (norm := engine._update.norm) is None or isfinite(norm) else inf,
    "get_type": lambda engine: _per_group(engine, "type"),
    "get_loss_scale": lambda engine: float(engine.loss_scale),
    "get_data_types": lambda engine: (_data_type(engine), engine.config.precision.accumulate or _data_type(engine)),
    "get_data_parallel_rank": lambda engine: engine.mesh.data_rank,
    "get_tensor_parallel_rank": lambda engine: engine.mesh.group("tensor").rank,
    "get_model_parallel_rank": lambda engine: engine.mesh.group("tensor").rank,
    "get_pipeline_parallel_rank": lambda engine: engine.mesh.group("pipeline").rank,
    "get_sequence_parallel_group": lambda engine: group_of("sequence_parallel", engine),
    "get_wall_clock_timers": _times,
    "is_first_stage": lambda engine: engine.mesh.group("pipeline").rank == 0,
    "is_last_stage": lambda engine: engine.mesh.group("pipeline").rank == engine.mesh.sizes["pipeline"] - 1,
    "is_first_weights_partition_group": lambda engine: engine.mesh.is_first_copy,
    **dict.fromkeys(("is_deepcompile_enabled", "is_deepcompile_active"), lambda engine: False),
    **dict.fromkeys(("_backward_prologue", "_backward_epilogue"), lambda engine: None),
    "empty_partition_cache": lambda engine: engine.sharded.rest(),
    # Nothing is left to do: gradients are reduced as the backward goes on, ``step`` clips them, and shapes of
    # activations may always change.
    **dict.fromkeys(("allreduce_gradients", "clip_fp32_gradients", "reset_activation_shape"), lambda engine: None),
    **dict.fromkeys(("get_additional_losses", "collect_python_gc"), lambda engine: None),
}
"""Methods without arguments that count; any are accepted."""


def methods() -> dict[str, Callable[..., Any]]:
    """Return the methods of the tables, by name."""

    def from_table(name: str) -> Callable[..., Any]:
        # A function and not a partial, which would not be bound to the engine.
        return lambda self, *args, **kwargs: QUESTIONS[name](self)

    def from_config(name: str) -> Callable[..., Any]:
        return lambda self: answer(name, self.asked)

    return {name: from_table(name) for name in QUESTIONS} | {name: from_config(name) for name in ANSWERS}


class AnsweredConfig(dict[str, Any]):
    """The configuration as it was written, as a dict; its attributes are those of the settings."""

    # Not of the engine, whose memory would not be freed while a program keeps its configuration.
    def __init__(self, document: Mapping[str, Any], settings: Resolved) -> None:
        super().__init__(document)
        self.settings = settings

    def __getattr__(self, name: str) -> Any:
        if name == "settings":
            raise AttributeError(name)
        return getattr(self.settings, name)


class CallableScale(float):
    """The loss scale as a number, which DeepSpeed's programs call to get the configured one; 0 means dynamic."""

    configured: float

    def __new__(cls, value: float, configured: float) -> CallableScale:
        """Make the number."""
        scale = super().__new__(cls, value)
        scale.configured = configured
        return scale

    def __call__(self) -> float:
        """Return the configured scale."""
        return self.configured


class Throughput:
    """The engine's speed, as DeepSpeed's timer tells it; the engine measures by itself."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.epoch_count = 0

    @property
    def global_step_count(self) -> int:
        """Updates so far."""
        return int(self._engine.global_steps)

    def start(self) -> None:
        """Accept that a step begins."""

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Accept that a step ends."""

    def update_epoch_count(self) -> None:
        """Count a pass over the data."""
        self.epoch_count += 1

    def avg_samples_per_sec(self) -> float:
        """Return samples of all ranks per second, by the median update; minus infinity before the second one."""
        seconds = self._engine.observer.step_seconds
        return self._engine.train_batch_size() / seconds if seconds else float("-inf")
