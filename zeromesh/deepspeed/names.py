"""Table of the drop-in: the modules below ``deepspeed``, their public names, and the home of each name.

A row of ``HOMES`` is a module; it maps homes to names. ``name=other`` is a name whose object is called ``other`` at
home. Modules are made from the table when they are imported (``finder.py``); homes are imported when a name is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from zeromesh.config import keys

OWN = "zeromesh.deepspeed"
ALIAS = "deepspeed"

_GROUP = f"{OWN}.group"
_START = f"{OWN}.start"
_ENGINE = f"{OWN}.engine"
_PARAMETERS = f"{OWN}.parameters"
_ZERO = "zeromesh.zero"
_STAGED = f"{OWN}.pipeline"
_TOPOLOGY = f"{OWN}.topology"
_RECOMPUTE = f"{OWN}.recompute"
_UTILITIES = f"{OWN}.utilities"
_DEVICES = f"{OWN}.devices"
_WRAPPERS = f"{OWN}.wrappers"
_OPTIMIZERS = f"{OWN}.optimizers"
_REPORTING = f"{OWN}.reporting"
_TIMERS = f"{OWN}.timers"

# Rows that a module and one inside of it have in common.
_CONFIG = {f"{OWN}.configuration": "DeepSpeedConfig"}
_ADAM = {_OPTIMIZERS: "FusedAdam DeepSpeedCPUAdam"}
_ADAGRAD = {_OPTIMIZERS: "DeepSpeedCPUAdagrad"}
_LION = {_OPTIMIZERS: "FusedLion DeepSpeedCPULion"}
_LAMB = {_OPTIMIZERS: "FusedLamb"}
_LOG = {_UTILITIES: "logger log_dist warning_once set_log_level_from_string get_log_level_from_string should_log_le"}
_LEAVES = {
    f"{OWN}.leaves": "set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix "
    "unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module z3_leaf_parameter",
}
_STATES = {
    _ZERO: "safe_get_full_fp32_param safe_update_full_grad_vectorized",
    f"{OWN}.local_states": "safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
    "safe_set_full_grad safe_set_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad "
    "safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state",
}
_PIPE = {_STAGED: "PipelineModule=StagedModule PipelineError", "zeromesh.pipe": "LayerSpec TiedLayerSpec"}
_PROFILER = {
    _REPORTING: "FlopsProfiler=OperationProfiler get_model_profile number_to_string flops_to_string macs_to_string "
    "params_to_string duration_to_string",
}

HOMES: dict[str, dict[str, str]] = {
    "": {
        OWN + ".finder": "install",
        _START: "initialize add_config_arguments set_optimizer_flags tp_model_init DeepSpeedConfigError",
        _GROUP: "init_distributed",
        _UTILITIES: "OnDevice log_dist logger",
        _DEVICES: "get_accelerator",
        _ENGINE: "DeepSpeedEngine",
        _WRAPPERS: "DeepSpeedOptimizer",
        _STAGED: "PipelineEngine PipelineModule=StagedModule",
        **_CONFIG,
    },
    "accelerator": {_DEVICES: "get_accelerator DeepSpeedAccelerator=DeviceInterface"},
    "accelerator.abstract_accelerator": {_DEVICES: "DeepSpeedAccelerator=DeviceInterface"},
    "checkpoint": {},
    "checkpoint.utils": {_UTILITIES: "clone_tensors_for_torch_save"},
    "comm": {_GROUP: "init_distributed is_initialized"},
    "git_version_info": {_UTILITIES: "torch_info"},
    "launcher": {},
    "moe": {},
    "moe.layer": {f"{OWN}.experts": "MoE"},
    "moe.utils": {
        f"{OWN}.experts": "has_moe_layers is_moe_param is_moe_param_group split_params_into_shared_and_expert_params "
        "split_params_into_different_moe_groups_for_optimizer",
    },
    "launcher.runner": {_UTILITIES: "DEEPSPEED_ENVIRONMENT_NAME"},
    "monitor": {},
    "monitor.config": {_REPORTING: "get_monitor_config"},
    "monitor.monitor": {_REPORTING: "MonitorMaster"},
    "ops": {f"{OWN}.op_builder": "__compatible_ops__=compatible_ops"},
    "ops.adagrad": _ADAGRAD,
    "ops.adagrad.cpu_adagrad": _ADAGRAD,
    "ops.adam": _ADAM,
    "ops.adam.cpu_adam": _ADAM,
    "ops.adam.fused_adam": _ADAM,
    "ops.lamb": _LAMB,
    "ops.lamb.fused_lamb": _LAMB,
    "ops.lion": _LION,
    "ops.lion.cpu_lion": _LION,
    "ops.lion.fused_lion": _LION,
    "ops.op_builder": {f"{OWN}.op_builder": "OpBuilder"},
    "pipe": _PIPE,
    "profiling": {},
    "profiling.flops_profiler": _PROFILER,
    "profiling.flops_profiler.profiler": _PROFILER,
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": {
        _RECOMPUTE: "checkpoint non_reentrant_checkpoint=checkpoint configure is_configured reset set_num_layers "
        "partition_activations_in_checkpoint CudaRNGStatesTracker get_cuda_rng_tracker "
        "model_parallel_cuda_manual_seed",
    },
    "runtime.base_optimizer": {_WRAPPERS: "DeepSpeedOptimizer ZeROOptimizer"},
    "runtime.bf16_optimizer": {_WRAPPERS: "BF16_Optimizer"},
    "runtime.checkpoint_engine": {},
    "runtime.checkpoint_engine.torch_checkpoint_engine": {_STAGED: "TorchCheckpointEngine=LayerFiles"},
    "runtime.compiler": {
        "torch.compiler": "disable is_compiling",
        "torch._dynamo": "is_compile_supported=is_dynamo_supported",
    },
    "runtime.config": {_START: "DeepSpeedConfigError", **_CONFIG},
    "runtime.data_pipeline": {},
    "runtime.data_pipeline.curriculum_scheduler": {f"{OWN}.curriculum": "CurriculumScheduler"},
    "runtime.dataloader": {_UTILITIES: "RepeatingLoader"},
    "runtime.engine": {_ENGINE: "DeepSpeedEngine"},
    "runtime.fp16": {},
    "runtime.fp16.fused_optimizer": {_WRAPPERS: "FP16_Optimizer"},
    "runtime.fp16.unfused_optimizer": {_WRAPPERS: "FP16_UnfusedOptimizer"},
    "runtime.lr_schedules": {
        f"{OWN}.lr_schedules": "VALID_LR_SCHEDULES LR_SCHEDULE LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR "
        "WARMUP_COSINE_LR WARMUP_LOG_RATE WARMUP_LINEAR_RATE LRRangeTest OneCycle WarmupLR WarmupDecayLR "
        "WarmupCosineLR add_tuning_arguments get_config_from_args get_lr_from_config",
    },
    "runtime.pipe": {
        **_PIPE,
        _TOPOLOGY: "ProcessTopology",
    },
    "runtime.pipe.engine": {_STAGED: "PipelineEngine PipelineError PipelineModule=StagedModule"},
    "runtime.pipe.module": {**_PIPE, _TOPOLOGY: "PipeDataParallelTopology PipelineParallelGrid"},
    "runtime.pipe.schedule": {
        f"{OWN}.schedule": "PipeSchedule TrainSchedule InferenceSchedule DataParallelSchedule PipeInstruction "
        "BufferOpInstruction OptimizerStep ReduceGrads ReduceTiedGrads LoadMicroBatch ForwardPass BackwardPass "
        "SendActivation RecvActivation SendGrad RecvGrad",
    },
    "runtime.pipe.topology": {
        _TOPOLOGY: "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid "
        "_prime_factors",
    },
    "runtime.utils": {
        _UTILITIES: "see_memory_usage clip_grad_norm_ get_global_norm get_global_norm_of_tensors "
        "clip_tensors_by_global_norm get_weight_norm has_inf_or_nan CheckOverflow DummyOptim get_only_unique_item "
        "prefix_sum_inc call_to_str partition_uniform partition_balanced ensure_directory_exists move_to_device",
        _DEVICES: "set_random_seed",
    },
    "runtime.zero": {
        _PARAMETERS: "Init=ZeroInit ZeroParamStatus register_external_parameter unregister_external_parameter "
        "unwrap_model_for_generation GatheredParameters",
        f"{OWN}.tiling": "TiledLinear=TiledLayer TiledLinearReturnBias=TiledLayerReturningBias",
    },
    "runtime.zero.parameter_offload": {_PARAMETERS: "DeepSpeedZeRoOffload=ParameterOffload"},
    "runtime.zero.offload_config": {_ENGINE: "OffloadDeviceEnum OffloadStateTypeEnum"},
    "runtime.zero.partition_parameters": {
        _PARAMETERS: "Init=ZeroInit ZeroParamStatus register_external_parameter unregister_external_parameter "
        "GatheredParameters partitioned_param_data_shape",
        _DEVICES: "get_accelerator",
        _UTILITIES: "zero_wrapper_for_fp_tensor_constructor",
        "torch": "_orig_torch_arange=arange",
    },
    "runtime.zero.stage3": {
        _WRAPPERS: "DeepSpeedZeroOptimizer_Stage3",
        _PARAMETERS: "unwrap_model_for_generation",
        _ZERO: "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold "
        "estimate_zero3_model_states_mem_needs_all_live",
    },
    "runtime.zero.stage_1_and_2": {
        _WRAPPERS: "DeepSpeedZeroOptimizer",
        _ZERO: "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold "
        "estimate_zero2_model_states_mem_needs_all_live",
    },
    "runtime.zero.tiling": {f"{OWN}.tiling": "TiledLinear=TiledLayer TiledLinearReturnBias=TiledLayerReturningBias"},
    "runtime.zero.utils": {_PARAMETERS: "is_zero_param", _UTILITIES: "ZeRORuntimeException"},
    "sequence": {},
    "sequence.layer": {f"{OWN}.ulysses": "DistributedAttention _SeqAllToAll"},
    "utils": {
        **_STATES,
        **_LEAVES,
        _UTILITIES: "logger log_dist set_log_level_from_string RepeatingLoader OnDevice",
        _DEVICES: "instrument_w_nvtx",
    },
    "utils.groups": {f"{OWN}.process_groups": "initialize"},
    "utils.init_on_device": {_UTILITIES: "OnDevice"},
    "utils.logging": _LOG,
    "utils.nvtx": {_DEVICES: "instrument_w_nvtx"},
    "utils.tensor_fragment": _STATES,
    "utils.torch": {_UTILITIES: "required_torch_version"},
    "utils.timer": {_TIMERS: "SynchronizedWallClockTimer ThroughputTimer"},
    "utils.z3_leaf_module": _LEAVES,
    "utils.zero_to_fp32": {
        f"{OWN}.fp32_weights": "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint "
        "convert_zero_checkpoint_to_fp32_state_dict",
    },
}

SAME = {
    "checkpointing": "runtime.activation_checkpointing.checkpointing",
    "comm.comm": "comm",
    "dist": "comm",
    "zero": "runtime.zero",
}
"""Modules that are another one of the table."""

REST = {
    "comm": f"{OWN}.collectives",
    "ops.op_builder": f"{OWN}.op_builder",
    "runtime.lr_schedules": f"{OWN}.lr_schedules",
    "utils.groups": f"{OWN}.process_groups",
}
"""Modules that have the names that a module's row lacks."""

EXPERTS = "there are no experts yet; train a dense model, or transformers' own mixture with its experts as leaves"
_SPREAD = (
    f"set {keys.SPREAD_SEQUENCES} in the configuration: the engine cuts each batch over these ranks, all of which are "
    "given the same whole one, and the model returns its loss"
)
_RECOMPUTED = "call deepspeed.checkpointing.checkpoint(function, *args)"

REFUSED = {
    "autotuning": "use `zeromesh plan`, which finds the best layout before anything runs (docs/choosing.md)",
    "compression": "prune or quantise the model with torchao before training; zeromesh leaves weights as they are",
    "inference": "use an engine for inference, such as vLLM, on what engine.save_16bit_model() writes",
    "init_inference": "use an engine for inference, such as vLLM, on what engine.save_16bit_model() writes",
    "InferenceEngine": "use an engine for inference, such as vLLM, on what engine.save_16bit_model() writes",
    "DeepSpeedHybridEngine": "generate with engine.generate() or zero.unwrap_model_for_generation(engine)",
    "module_inject": f"set {keys.TENSOR_RANKS} in the configuration, which splits layers (docs/tensor.md)",
    "replace_transformer_layer": "use the model's own layers, under torch.compile if they should be fused",
    "DeepSpeedTransformerLayer": "use torch.nn.TransformerEncoderLayer, or the model's own layers",
    "DeepSpeedTransformerConfig": "use torch.nn.TransformerEncoderLayer, or the model's own layers",
    "ops.transformer": "use torch.nn.functional.scaled_dot_product_attention and torch.compile",
    "ops.sparse_attention": "use torch.nn.attention.flex_attention with a block mask",
    "linear": "use torch.nn.Linear, and peft or torchao for adapters and quantised weights",
    "moe.sharded_moe": EXPERTS,
    "runtime.data_pipeline.data_sampling": "pass a sampler of your own to engine.deepspeed_io(data_sampler=...)",
    "runtime.weight_quantizer": "quantise the frozen base with torchao or bitsandbytes",
    "runtime.tensor_parallel": f"set {keys.TENSOR_RANKS} in the configuration, which splits layers (docs/tensor.md)",
    "ops.fp_quantizer": "quantise the frozen base with torchao or bitsandbytes",
    "ops.aio": "offload to NVMe in the configuration, whose files the engine writes itself",
    "runtime.activation_checkpointing.checkpointing.CheckpointFunction": _RECOMPUTED,
    "checkpointing.CheckpointFunction": _RECOMPUTED,
    "runtime.data_pipeline.data_routing": "drop tokens in the model itself; its layers are not replaced here",
    "runtime.sequence_parallel": _SPREAD,
    "runtime.zero.muon": 'name {"type": "Muon"} as the optimizer in the configuration',
    "runtime.hybrid_engine": "generate with engine.generate() or zero.unwrap_model_for_generation(engine)",
}
"""Names and modules that cannot be honoured, and what to use instead."""


def modules() -> frozenset[str]:
    """Return the dotted names of all modules below ``deepspeed``; the package itself is ``""``."""
    named = {*HOMES, *SAME}
    # A package may have no names of its own.
    return frozenset(named | {part for name in named for part in _parents(name)})


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def names(module: str) -> dict[str, tuple[str, str]]:
    """Return the public names of a module, each with its home and its name there."""
    rows = HOMES.get(SAME.get(module, module), {})
    pairs = ((home, word.partition("=")) for home, words in rows.items() for word in words.split())
    return {name: (home, other or name) for home, (name, _, other) in pairs}


def remedy(dotted: str) -> str | None:
    """Return what to use instead of a name that is refused, or is in a module that is; None for others."""
    return next((REFUSED[part] for part in (dotted, *_parents(dotted)) if part in REFUSED), None)


def explain(dotted: str) -> str:
    """Return the message about a name below ``deepspeed`` that there is not."""
    instead = remedy(dotted)
    return (
        f"zeromesh, which stands in for deepspeed, has no {ALIAS}.{dotted}: {instead}"
        if instead is not None
        else f"zeromesh, which stands in for deepspeed, has no {ALIAS}.{dotted}; docs/deepspeed.md lists what it has"
    )


def resolve(module: str, name: str) -> Any:
    """Return an attribute of a module of the table; raise AttributeError if it has none of this name."""
    found, dotted = names(module), f"{module}.{name}".lstrip(".")
    if name in found:
        home, other = found[name]
        return getattr(import_module(home), other)
    if dotted in modules():
        return import_module(f"{OWN}.{dotted}")
    if name == "__all__":
        return sorted(found)
    if name.startswith("__"):
        raise AttributeError(f"module {OWN}.{module} has no attribute {name}")
    if module in REST:
        return getattr(import_module(REST[module]), name)
    raise AttributeError(explain(dotted))
