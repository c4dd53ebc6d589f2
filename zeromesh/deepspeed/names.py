"""Table of the drop-in: the modules below ``deepspeed``, their public names, and the home of each name.

Modules are made from the table when they are imported (``finder.py``); homes are imported when a name is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

from zeromesh.deepspeed import stand_ins

OWN = "zeromesh.deepspeed"
ALIAS = "deepspeed"

_ZERO = "zeromesh.zero"
_NEEDS = "estimate_zero{0}_model_states_mem_needs{1}"

# Modules, ``.`` for the package itself; a home, which a dot puts into this package; and names. ``name=other`` is a name
# whose object is called ``other`` at home.
_ROWS = (
    (".", ".finder", "install"),
    (".", ".deepspeed_start", "initialize add_config_arguments set_optimizer_flags tp_model_init"),
    (". runtime.config", ".deepspeed_start", "DeepSpeedConfigError"),
    (". runtime.config", ".configuration", "DeepSpeedConfig"),
    (". comm", ".start_group", "init_distributed"),
    ("comm", ".start_group", "is_initialized"),
    (". utils utils.init_on_device", ".utilities", "OnDevice=on_device"),
    (". utils utils.logging", ".utilities", "log_dist logger"),
    ("utils utils.logging", ".utilities", "set_log_level_from_string"),
    ("utils.logging", ".utilities", "warning_once get_log_level_from_string should_log_le"),
    ("utils runtime.dataloader", ".utilities", "RepeatingLoader"),
    ("utils utils.nvtx", ".device_interface", "instrument_w_nvtx"),
    ("utils.groups", ".process_groups", "initialize"),
    ("utils.torch", ".utilities", "required_torch_version"),
    ("utils utils.tensor_fragment", _ZERO,
     "safe_get_full_fp32_param safe_update_full_grad_vectorized"),
    ("utils utils.tensor_fragment", ".local_states",
     "safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
     "safe_set_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state "
     "safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state"),
    ("utils utils.z3_leaf_module", ".leaves",
     "set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix "
     "unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module z3_leaf_parameter"),
    ("utils.zero_to_fp32", ".fp32_weights",
     "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint "
     "convert_zero_checkpoint_to_fp32_state_dict"),
    (". accelerator runtime.zero.partition_parameters", ".device_interface", "get_accelerator"),
    ("accelerator accelerator.real_accelerator", ".device_interface",
     "get_accelerator set_accelerator is_current_accelerator_supported"),
    ("accelerator accelerator.abstract_accelerator", ".device_interface", "DeepSpeedAccelerator=DeviceInterface"),
    (". runtime.engine", ".deepspeed_engine", "DeepSpeedEngine"),
    (". runtime.base_optimizer", ".wrappers", "DeepSpeedOptimizer"),
    ("runtime.base_optimizer", ".wrappers", "ZeROOptimizer"),
    ("runtime.bf16_optimizer", ".wrappers", "BF16_Optimizer"),
    ("runtime.fp16.fused_optimizer", ".wrappers", "FP16_Optimizer"),
    ("runtime.fp16.unfused_optimizer", ".wrappers", "FP16_UnfusedOptimizer"),
    ("runtime.zero.stage3", ".wrappers", "DeepSpeedZeroOptimizer_Stage3"),
    ("runtime.zero.stage_1_and_2", ".wrappers", "DeepSpeedZeroOptimizer"),
    ("checkpoint.utils", ".utilities", "clone_tensors_for_torch_save"),
    ("git_version_info", ".utilities", "torch_info"),
    ("git_version_info", ".op_builder", "compatible_ops installed_ops=compatible_ops"),
    ("git_version_info", ".finder", "version=VERSION"),
    ("launcher.runner", ".utilities", "DEEPSPEED_ENVIRONMENT_NAME"),
    ("moe moe.layer", "zeromesh.moe", "MoE"),
    ("moe.sharded_moe", "zeromesh.moe", "TopKGate MOELayer=ExpertLayer"),
    ("moe.experts", "zeromesh.moe", "Experts=ExpertList"),
    ("moe.utils", "zeromesh.moe",
     "has_moe_layers is_moe_param is_moe_param_group split_params_into_shared_and_expert_params "
     "split_params_into_different_moe_groups_for_optimizer configure_moe_param_groups"),
    ("monitor.config", ".reporting", "get_monitor_config"),
    ("monitor.monitor", ".reporting", "MonitorMaster"),
    ("ops", ".op_builder", "__compatible_ops__=compatible_ops"),
    ("ops.op_builder", ".op_builder", "OpBuilder"),
    ("ops.adagrad ops.adagrad.cpu_adagrad", ".optimizers", "DeepSpeedCPUAdagrad"),
    ("ops.adam ops.adam.cpu_adam ops.adam.fused_adam", ".optimizers", "FusedAdam DeepSpeedCPUAdam"),
    ("ops.lamb ops.lamb.fused_lamb", ".optimizers", "FusedLamb"),
    ("ops.lion ops.lion.cpu_lion ops.lion.fused_lion", ".optimizers", "FusedLion DeepSpeedCPULion"),
    (". pipe runtime.pipe runtime.pipe.engine runtime.pipe.module", ".pipeline", "PipelineModule=StagedModule"),
    (". runtime.pipe.engine", ".pipeline", "PipelineEngine"),
    ("pipe runtime.pipe runtime.pipe.engine runtime.pipe.module", ".pipeline", "PipelineError"),
    ("pipe runtime.pipe runtime.pipe.module", "zeromesh.pipe", "LayerSpec TiedLayerSpec"),
    ("runtime.pipe runtime.pipe.topology", ".pipe_topology", "ProcessTopology"),
    ("runtime.pipe.module runtime.pipe.topology", ".pipe_topology", "PipeDataParallelTopology PipelineParallelGrid"),
    ("runtime.pipe.topology", ".pipe_topology", "PipeModelDataParallelTopology _prime_factors"),
    ("runtime.pipe.schedule", ".pipe_schedule",
     "PipeSchedule TrainSchedule InferenceSchedule DataParallelSchedule PipeInstruction BufferOpInstruction "
     "OptimizerStep ReduceGrads ReduceTiedGrads LoadMicroBatch ForwardPass BackwardPass SendActivation RecvActivation "
     "SendGrad RecvGrad"),
    ("profiling.flops_profiler profiling.flops_profiler.profiler", ".reporting",
     "FlopsProfiler=OperationProfiler get_model_profile number_to_string flops_to_string macs_to_string "
     "params_to_string duration_to_string"),
    ("runtime.activation_checkpointing.checkpointing", ".recompute",
     "checkpoint non_reentrant_checkpoint=checkpoint configure is_configured reset set_num_layers "
     "partition_activations_in_checkpoint CudaRNGStatesTracker get_cuda_rng_tracker model_parallel_cuda_manual_seed"),
    ("runtime.checkpoint_engine.torch_checkpoint_engine", ".pipeline", "TorchCheckpointEngine=LayerFiles"),
    ("runtime.compiler", "torch.compiler", "disable is_compiling"),
    ("runtime.compiler", "torch._dynamo", "is_compile_supported=is_dynamo_supported"),
    ("runtime.lr_schedules", ".lr_schedules",
     "VALID_LR_SCHEDULES LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR"),
    ("runtime.torch_autocast", ".autocast",
     "get_autocast_dtype is_autocast_initialized has_comm_dtype get_comm_dtype get_all_comm_dtypes"),
    ("runtime.utils", ".device_interface", "set_random_seed"),
    ("runtime.utils", ".utilities",
     "see_memory_usage clip_grad_norm_ get_global_norm get_global_norm_of_tensors clip_tensors_by_global_norm "
     "get_weight_norm has_inf_or_nan CheckOverflow DummyOptim get_only_unique_item prefix_sum_inc call_to_str "
     "partition_uniform partition_balanced ensure_directory_exists move_to_device"),
    ("runtime.zero runtime.zero.partition_parameters", ".parameters",
     "Init=ZeroInit ZeroParamStatus register_external_parameter unregister_external_parameter GatheredParameters"),
    ("runtime.zero runtime.zero.stage3", ".parameters", "unwrap_model_for_generation"),
    ("runtime.zero runtime.zero.tiling", ".tiling",
     "TiledLinear=TiledLayer TiledLinearReturnBias=TiledLayerReturningBias"),
    ("runtime.zero.parameter_offload", ".parameters", "DeepSpeedZeRoOffload=ParameterOffload"),
    ("runtime.zero.offload_config", ".deepspeed_engine", "OffloadDeviceEnum OffloadStateTypeEnum"),
    ("runtime.zero.partition_parameters", ".parameters", "partitioned_param_data_shape"),
    ("runtime.zero.partition_parameters", ".utilities", "zero_wrapper_for_fp_tensor_constructor"),
    ("runtime.zero.partition_parameters", "torch", "_orig_torch_arange=arange"),
    ("runtime.zero.utils", ".parameters", "is_zero_param"),
    ("runtime.zero.utils", ".utilities", "ZeRORuntimeException"),
    ("sequence.layer", ".ulysses", "DistributedAttention _SeqAllToAll"),
    *((module, _ZERO, " ".join(_NEEDS.format(stage, end) for end in ("", "_all_cold", "_all_live")))
      for module, stage in (("runtime.zero.stage_1_and_2", 2), ("runtime.zero.stage3", 3))),
)  # fmt: skip

HOMES: dict[str, dict[str, tuple[str, str]]] = {}
"""Names of each module, each with its home and its name there."""
for _modules, _home, _names in _ROWS:
    for _module in _modules.split():
        _row = HOMES.setdefault("" if _module == "." else _module, {})
        for _name, _, _other in (word.partition("=") for word in _names.split()):
            _row[_name] = (OWN + _home if _home.startswith(".") else _home, _other or _name)

SAME = {
    "checkpointing": "runtime.activation_checkpointing.checkpointing",
    "comm.comm": "comm",
    "dist": "comm",
    "zero": "runtime.zero",
}
"""Modules that are another one of the table."""

REST = {
    "comm": f"{OWN}.comm_names",
    "ops.op_builder": f"{OWN}.op_builder",
    "utils.groups": f"{OWN}.process_groups",
}
"""Modules that have the names that a module's row lacks."""

_SPREAD = (
    'set "mesh": {"context": 2}, "context_parallel": {"strategy": "ulysses"} in the configuration: the '
    "engine cuts each batch over these ranks, all of which are "
    "given the same whole one, and the model returns its loss"
)
_RECOMPUTED = "call deepspeed.checkpointing.checkpoint(function, *args)"

_TENSOR = "set mesh.tensor in the configuration, which splits layers (docs/tensor.md)"
_QUANTISE = "quantise the frozen base with torchao or bitsandbytes"
_SERVE = "use an engine for inference, such as vLLM, on what engine.save_16bit_model() writes"
_GENERATE = "generate with engine.generate() or zero.unwrap_model_for_generation(engine)"
_FUNCTION = "runtime.activation_checkpointing.checkpointing.CheckpointFunction"

REFUSED = {
    "autotuning": "use `zeromesh plan`, which finds the best layout before anything runs (docs/choosing.md)",
    "compression": "prune or quantise the model with torchao before training; zeromesh leaves weights as they are",
    **dict.fromkeys(("inference", "init_inference", "InferenceEngine"), _SERVE),
    **dict.fromkeys(("DeepSpeedHybridEngine", "runtime.hybrid_engine"), _GENERATE),
    **dict.fromkeys(("module_inject", "runtime.tensor_parallel"), _TENSOR),
    "replace_transformer_layer": "use the model's own layers, under torch.compile if they should be fused",
    **dict.fromkeys(
        ("DeepSpeedTransformerLayer", "DeepSpeedTransformerConfig"),
        "use torch.nn.TransformerEncoderLayer, or the model's own layers",
    ),
    "ops.transformer": "use torch.nn.functional.scaled_dot_product_attention and torch.compile",
    "ops.sparse_attention": "use torch.nn.attention.flex_attention with a block mask",
    "linear": "use torch.nn.Linear, and peft or torchao for adapters and quantised weights",
    **dict.fromkeys(
        (f"moe.sharded_moe.{name}" for name in ("top1gating", "top2gating", "topkgating", "multiplicative_jitter")),
        "use deepspeed.moe.layer.MoE, whose gate (zeromesh.moe.TopKGate) returns weights and choices by expert",
    ),
    "runtime.data_pipeline.curriculum_scheduler": "write curriculum_learning into the configuration",
    "runtime.data_pipeline.data_sampling": "pass a sampler of your own to engine.deepspeed_io(data_sampler=...)",
    "runtime.data_pipeline.data_routing": "drop tokens in the model itself; its layers are not replaced here",
    **dict.fromkeys(("runtime.weight_quantizer", "ops.fp_quantizer"), _QUANTISE),
    "ops.aio": "offload to NVMe in the configuration, whose files the engine writes itself",
    **dict.fromkeys((_FUNCTION, "checkpointing.CheckpointFunction"), _RECOMPUTED),
    "runtime.sequence_parallel": _SPREAD,
    **dict.fromkeys(
        (
            f"runtime.lr_schedules.{name}"
            for name in ("add_tuning_arguments", "get_config_from_args", "get_lr_from_config")
        ),
        "name the scheduler in the configuration",
    ),
    "utils.timer": "set wall_clock_breakdown, or ask engine.tput_timer.avg_samples_per_sec()",
    "runtime.zero.muon": 'name {"type": "Muon"} as the optimizer in the configuration',
}
"""Names and modules that cannot be honoured, and what to use instead."""


@cache
def modules() -> frozenset[str]:
    """Return the dotted names of all modules below ``deepspeed``; the package itself is ``""``."""
    named = {*HOMES, *SAME, *stand_ins.table()}
    # A package may have no names of its own.
    return frozenset(named | {part for name in named for part in _parents(name)})


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def names(module: str) -> dict[str, tuple[str, str]]:
    """Return the public names of a module, each with its home and its name there."""
    return HOMES.get(SAME.get(module, module), {})


def remedy(dotted: str) -> str | None:
    """Return what to use instead of a name that is refused, or is in a module that is; None for others."""
    return next((REFUSED[part] for part in (dotted, *_parents(dotted)) if part in REFUSED), None)


def explain(dotted: str) -> str:
    """Return the message about a name below ``deepspeed`` that there is not."""
    instead = remedy(dotted)
    end = "; docs/deepspeed.md lists what it has" if instead is None else f": {instead}"
    return f"zeromesh, which stands in for deepspeed, has no {ALIAS}.{dotted}{end}"


def resolve(module: str, name: str) -> Any:
    """Return an attribute of a module of the table; raise AttributeError if it has none of this name.

    A name that DeepSpeed has there and that has no home is a stand-in, which raises when it is used.
    """
    homes, dotted = names(module), f"{module}.{name}".lstrip(".")
    if name in homes:
        home, other = homes[name]
        return getattr(import_module(home), other)
    if dotted in modules():
        return import_module(f"{OWN}.{dotted}")
    if name == "__all__":
        return sorted(homes)
    if name.startswith("__"):
        raise AttributeError(f"module {OWN}.{module} has no attribute {name}")
    error = AttributeError(explain(dotted))
    if module in REST:
        try:
            return getattr(import_module(REST[module]), name)
        except AttributeError as missing:
            error = missing
    try:
        return stand_ins.look_up(module, name, lambda: _elsewhere(module, name, dotted))
    except KeyError:
        raise error from None


def _elsewhere(module: str, name: str, dotted: str) -> Any:
    """Return a class that has its home in another module's row, or the operator's builder; else a stand-in."""
    if name.endswith("Builder") and module.startswith("ops."):
        return getattr(import_module(REST["ops.op_builder"]), name)
    homes = {row[name] for row in HOMES.values() if name in row} if name[0].isupper() else set()
    if len(homes) == 1:
        home, other = homes.pop()
        return getattr(import_module(home), other)
    return stand_ins.stand_in(f"{OWN}.{module}".rstrip("."), name, explain(dotted))
