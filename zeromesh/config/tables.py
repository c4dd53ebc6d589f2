"""Special keys by dotted path; the path of a section speaks for all keys in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zeromesh.observe.units import show

UNSET = "auto"
"""The value that means: as if the key were not there."""

# The reference marks them, so that a file for both programs can be written.
OURS: tuple[str, ...] = (
    "mesh",
    "communication",
    "slots",
    "host_memory_limit",
    "embedding_tables",
    "zero_optimization.offload_optimizer.update_during_backward",
    "zero_optimization.offload_optimizer.split_master",
    "units",
    "seed",
    "activation_checkpointing.enabled",
    "activation_checkpointing.targets",
    "activation_checkpointing.granularity",
    "bf16.auto_cast",
    "float8",
    "compile.enabled",
    "compile.backend",
    "compile.mode",
    "context_parallel",
    "pipeline.schedule",
    "pipeline.costs",
    "pipeline.chunks",
    "pipeline.blocks",
    "pipeline.recompute",
    "pipeline.record",
    "tensor_parallel.plan",
    "tensor_parallel.sequence",
    "profile",
    "replica_check",
    "spikes",
    "debug",
    "checkpoint.asynchronous",
    "checkpoint.keep_last",
    "checkpoint.on_failure",
    "model",
    "huggingface",
    "lora",
    "data",
    "run",
)
"""Keys that DeepSpeed does not have."""

RENAMED: dict[str, str] = {
    "bfloat16": "bf16",
    "tensor_parallel.tp": "tensor_parallel.tensor_parallel",
    "tensor_parallel.kernel_inject": "tensor_parallel.replace_with_kernel_inject",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    # DeepSpeed reads the keys of stage 3 under both names.
    **{
        f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
}
"""Other names of a key, to the one that is used here."""

_UNITS = "units are gathered whole; slots sets how many are in memory"
_ALWAYS = "always on"
_HOST_UPDATE = "the host always updates with all threads of torch, as early as possible"

WITHOUT_EFFECT: dict[str, str] = {
    "sparse_gradients": "embeddings with sparse=True always have sparse gradients",
    "zero_force_ds_cpu_optimizer": "there is no separate optimizer for the host",
    "checkpoint.tag_validation": "all ranks must pass the same tag; only zeromesh.deepspeed reads this key",
    "seq_parallel_communication_data_type": "communication_data_type sets the dtype of messages",
    "disable_allgather": "the ZeRO stage decides what is gathered",
    "dump_state": "zeromesh train writes the resolved configuration for every run",
    "disable_python_gc": "ZeroMesh does not change Python's garbage collector",
    "memory_breakdown": "call engine.memory_report() instead",
    "use_data_before_expert_parallelism": "the order of the mesh axes is fixed",
    "log_level": 'set the level of logging.getLogger("zeromesh") instead',
    "allgather_size": _UNITS,
    "timers": "throughput is always measured with the clock of the host",
    "comet": "there is no monitor for Comet",
    "flops_profiler.recompute_fwd_factor": "recomputed operations are counted when they run",
    "comms_logger": "call engine.traffic_report() instead",
    **{
        f"aio.{name}": "each of queue_depth requests has its own thread"
        for name in ("intra_op_parallelism", "single_submit", "overlap_events", "thread_count")
    },
    # Whole sections, in which anything may stand, and keys of sections that are read.
    "autotuning": "there is no search for settings; zeromesh plan chooses a layout",
    "hybrid_engine": "there is no separate engine for generation",
    **{
        f"compile.{name}": "DeepSpeed's compiler passes do not exist; compile.enabled compiles the model's blocks"
        for name in (
            "free_activation",
            "free_activation_threshold",
            "offload_activation",
            "offload_opt_states",
            "offload_parameters",
            "double_buffer",
            "symmetric_memory",
            "debug_log",
            "dump_graphs",
            "passes",
            "sync_before_reduce",
            "sync_after_reduce",
            "sync_before_allgather",
            "sync_after_allgather",
            "keep_int_input_tensors",
            "keep_all_input_tensors",
            "autoep_non_moe",
        )
    },
    # Keys of earlier versions of DeepSpeed.
    "compile.disable": "compile.enabled decides",
    "compile.fullgraph": "what torch cannot compile of a block is computed as before",
    "compile.dynamic": "torch decides, by the shapes that it meets",
    "compile.options": "torch's defaults are used; engine.compile takes options",
    "data_efficiency": "samples come in the order of the loader; only a curriculum over their length is supported",
    "expert_parallel": "expert parallelism does not exist yet",
    "tensor_parallel.dtype": "the model keeps its dtype",
    "tensor_parallel.tp_overlap_comm": "communication always overlaps with computation if the backend can",
    "tensor_parallel.vocab_parallel_lm_head": "embeddings and heads are always split by vocabulary",
    "tensor_parallel.vocab_parallel_ce_backend": "there is one cross entropy",
    "tensor_parallel.tensor_parallel.tp_grain_size": "attention heads stay whole; other dimensions are split evenly",
    "tensor_parallel.tensor_parallel.mpu": "the section mesh defines the groups of ranks",
    "tensor_parallel.tensor_parallel.tp_group": "the section mesh defines the groups of ranks",
    "tensor_parallel.injection_policy_tuple": "tensor_parallel.plan chooses the layers to split",
    "tensor_parallel.partition_config": "tensor_parallel.plan chooses the layers to split, and how",
    "tensor_parallel.preset_model": "a plan is derived for every model; tensor_parallel.plan changes it",
    "tensor_parallel.keep_module_on_host": "each rank keeps only its own part",
    "tensor_parallel.replace_with_kernel_inject": "there are no inference kernels",
    "pipeline.seed_layers": "initial values depend on the name of each parameter",
    "pipeline.pipe_partitioned": "activations are sent whole",
    "pipeline.grad_partitioned": "gradients of activations are sent whole",
    "pipeline.use_reentrant": "the section activation_checkpointing decides",
    "weight_quantization": "weights are not quantized",
    "datastates_ckpt": "checkpoints have one writer",
    "optimizer.legacy_fusion": "torch's fused updates are used where they exist",
    "torch_autocast.lower_precision_safe_modules": "communication_data_type sets the dtype of messages",
    "bf16.immediate_grad_update": "gradients are accumulated as soon as they are computed",
    "activation_checkpointing.number_checkpoints": "targets selects the modules to recompute",
    "activation_checkpointing.contiguous_memory_optimization": "torch's allocator manages activations",
    "activation_checkpointing.synchronize_checkpoint_boundary": "no synchronization is needed",
    "activation_checkpointing.profile": "the section profile records a trace",
    "checkpoint.use_node_local_storage": "every rank writes to the folder passed to save_checkpoint",
    "checkpoint.parallel_write": "all ranks always write in parallel",
    "checkpoint.checkpoint_serialization": "checkpoints have one format",
    "checkpoint.writer": "checkpoints have one writer",
    # From here on DeepSpeed's choices of how to move states, which follow from units, slots and placement here.
    "zero_optimization.mics_hierarchical_params_gather": "communication.hierarchical decides",
    **{
        f"zero_optimization.offload_optimizer.{name}": "NVMe reads and writes always overlap with the update"
        for name in ("pipeline_read", "pipeline_write", "fast_init")
    },
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _HOST_UPDATE,
    "zero_optimization.offload_param.buffer_size": "the largest unit sets the size of buffers",
    "zero_optimization.offload_param.max_in_cpu": "device sets the memory of all parameters",
    "zero_optimization.overlap_comm": "communication always overlaps with computation if the backend can",
    "zero_optimization.contiguous_gradients": _ALWAYS,
    "zero_optimization.reduce_scatter": "the ZeRO stage decides what is reduced, and how",
    "zero_optimization.reduce_bucket_size": "gradients are reduced unit by unit",
    "zero_optimization.use_multi_rank_bucket_allreduce": "gradients are reduced unit by unit",
    "zero_optimization.allgather_partitions": _ALWAYS,
    "zero_optimization.allgather_bucket_size": _UNITS,
    "zero_optimization.compute_grad_norm": _ALWAYS,
    "zero_optimization.load_from_fp32_weights": "master weights are always made from the unrounded weights",
    "zero_optimization.elastic_checkpoint": "checkpoints have one format",
    "zero_optimization.sub_group_size": "the update works on whole units",
    "zero_optimization.stage3_prefetch_bucket_size": _UNITS,
    "zero_optimization.stage3_param_persistence_threshold": _UNITS,
    "zero_optimization.stage3_model_persistence_threshold": _UNITS,
    "zero_optimization.stage3_max_live_parameters": _UNITS,
    "zero_optimization.stage3_max_reuse_distance": _UNITS,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "save_16bit_model always gathers the weights",
    "zero_optimization.stage3_module_granularity_threshold": _UNITS,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _UNITS,
    "zero_optimization.stage3_allgather_sequential": _UNITS,
    "zero_optimization.ignore_unused_parameters": "parameters without a gradient on any rank are skipped",
    "zero_optimization.legacy_stage1": "there is one engine for all stages",
    "zero_optimization.round_robin_gradients": "each rank copies only its own shard to the host",
    "zero_optimization.parameter_alignment": "parameters are always aligned",
    "zero_optimization.memory_efficient_linear": "ZeroMesh does not change torch.nn.functional.linear",
    "zero_optimization.pipeline_loading_checkpoint": "each rank reads only its own part",
    "zero_optimization.override_module_apply": "ZeroMesh does not change torch.nn.Module.apply",
    "zero_optimization.log_trace_cache_warnings": "units may be used in any order",
    "zero_optimization.enable_sanity_checks": "the engine always guards against stale memory",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "Muon is not updated from NVMe",
    "zero_optimization.leaf_module": "units names the modules that are gathered as a whole",
}
"""Keys that are accepted and change nothing, and why. Nothing reads their values, so these are not checked."""


class NotYet(NamedTuple):
    """A key of which only some values work in this version."""

    allowed: tuple[Any, ...]
    what: str


_OFF = (False,)

NOT_YET: dict[str, NotYet] = {
    "mesh.expert": NotYet((1,), "expert parallelism"),
    "expert_parallel.enabled": NotYet(_OFF, "expert parallelism"),
    "zero_optimization.zenflow": NotYet((None,), "ZenFlow, which updates important gradients first"),
    "zero_optimization.zero_quantized_nontrainable_weights": NotYet(_OFF, "quantized frozen weights"),
    "aio.use_gds": NotYet(_OFF, "GPUDirect Storage"),
    "weight_quantization": NotYet(({"enabled": False}, None), "weight quantization"),
    "fp16.fp16_master_weights_and_grads": NotYet(_OFF, "16-bit master weights"),
    "data_types.param_dtype": NotYet((None,), "a separate dtype for parameters"),
    "checkpoint.load_universal": NotYet(
        _OFF, "loading of DeepSpeed's universal checkpoints (ZeroMesh's own load in any layout)"
    ),
    "compile.deepcompile": NotYet(_OFF, "DeepCompile"),
    "compile.kwargs": NotYet(({}, None), "a table of torch.compile's arguments (engine.compile takes them)"),
    "hybrid_engine.enabled": NotYet(_OFF, "the hybrid engine"),
    "autotuning.enabled": NotYet(_OFF, "autotuning"),
    "datastates_ckpt": NotYet((False, None), "a DataStates writer of checkpoints"),
}
"""Keys that need something this version does not have; a row goes when it comes."""

_MASTER = "master weights and states are kept in fp32: exact, with 4 to 8 bytes more per parameter"

EXACT: dict[str, str] = {
    "autotuning.enabled": "the values in the file are used; zeromesh plan chooses a layout",
    "compile.deepcompile": "it only affects speed; compile.enabled compiles the model's blocks",
    "compile.kwargs": "they only affect speed; engine.compile takes them",
    "hybrid_engine.enabled": "the model generates between training steps without a separate engine",
    "aio.use_gds": "files are copied to a GPU through host memory",
    "zero_optimization.zenflow": "every update is exact; update_during_backward overlaps it with the backward",
    "zero_optimization.zeropp_loco_param": "it corrects the rounding of 4-bit gradients, which do not exist here",
    "zero_optimization.zero_quantized_nontrainable_weights": "frozen weights keep their dtype",
    "fp16.fp16_master_weights_and_grads": _MASTER,
}
"""Keys that ``adopt`` leaves out, and why a run without them computes the same, or more exactly."""

GONE: dict[str, str] = {
    "fp32_allreduce": "use communication_data_type",
    "amp": "use fp16, bf16 or torch_autocast",
    "nebula": "pass a folder to save_checkpoint",
    "compression_training": "compress the model before or after training",
    "quantize_training": "compress the model before or after training",
    "eigenvalue": "remove it: it is only used by quantize_training",
    "sparse_attention": "use a model that has sparse attention itself",
    "elasticity": "set the batch sizes directly",
    "graph_harvesting": "compile the model's blocks with compile.enabled",
    "progressive_layer_drop": "drop layers in the model",
    "zero_optimization.zeropp_loco_param": "use communication_data_type to send fewer bits",
    "zero_optimization.offload_optimizer.inexact_delay_after": "use update_during_backward",
    "zero_optimization.offload_optimizer.states_in_8_bits": "use split_master, or device = nvme, for less host memory",
    "data.workers": "set RAYON_NUM_THREADS, the number of threads of the tokenizers library",
    "run.roll_back": 'set spikes.action to "skip", or resume a copy of the run from an earlier checkpoint',
    "vocabulary_size": "set data.vocabulary_size or model.vocab_size for zeromesh train; remove it for initialize",
}
"""Keys of DeepSpeed, or of earlier versions, that are refused unless they are switched off, and what to do instead."""

ON_IF_THERE = ("sparse_attention", "zero_optimization.zeropp_loco_param")
"""Keys of ``GONE`` that any object switches on, since they have no switch inside."""

# mesh.expert stays: it is an axis of the mesh, whose sizes are multiplied.
UNREAD = frozenset({*GONE, *WITHOUT_EFFECT, *NOT_YET}) - {"mesh.expert"}
"""Keys that are not in the settings."""


def sections_of(path: str) -> set[str]:
    """Return the path of a key, and those of the sections that it is in."""
    parts = path.split(".")
    return {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}


def not_yet_problems(document: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    """Return a sentence for each key whose value needs something that this version does not have."""
    problems = []
    # A word in the place of a section asks for what the section would switch on.
    for section in dict.fromkeys(path.rpartition(".")[0] for path in NOT_YET):
        found, value = look_up(document, section)
        if section in WITHOUT_EFFECT and found and not isinstance(value, Mapping) and value not in (None, False, UNSET):
            problems.append(f"{section} = {show(value)}: must be an object; leave it out, or write {{ ... }}")
    for path, row in NOT_YET.items():
        found, value = look_up(document, path)
        # A key whose value is wrong anyway is in the list already, and is not named twice.
        if found and value not in row.allowed and not any(problem.startswith(f"{path} = ") for problem in known):
            allowed = " or ".join(show(option) for option in row.allowed)
            problem = f"{path} = {show(value)}: {row.what} is not in this version yet"
            problems.append(f"{problem}; leave the key out or set it to {allowed}")
    return problems


_EFFICIENCY = {
    "data_routing": "random-LTD, which drops tokens in layers, is not available; leave it out",
    "data_sampling": "choosing samples by difficulty is not available, except a curriculum over the length alone (one "
    "metric, seqlen, with clustering_type single_cluster); order the samples in the loader",
}


def efficiency_problems(document: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each part of ``data_efficiency`` that is on; none counts unless the section is."""
    found = look_up(document, "data_efficiency")[1]
    if not isinstance(found, Mapping):
        return [f"data_efficiency = {show(found)}: must be an object; leave it out"] if found else []
    if found.get("enabled") in (None, False):
        return []
    on = [name for name in _EFFICIENCY if enables(found.get(name))]
    return [f"data_efficiency.{name}: {_EFFICIENCY[name]}" for name in on]


def gone_problems(document: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each key that is refused."""
    found = {path: look_up(document, path) for path in GONE}
    return [
        f"{path} is not available; {GONE[path]}"
        for path, (there, value) in found.items()
        if there and not _switched_off(path, value)
    ]


def without_unread(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a copy of a document without the keys that are not in the settings."""
    return {
        key: without_unread(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in section.items()
        # A key with dots is none of them, though its name is the path of one.
        if f"{prefix}{key}" not in UNREAD or "." in key
    }


def without_effect(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys that the document sets and that change nothing, with the reason."""
    # A section that is refused when it is on does nothing when it is off, which is worth a line, too.
    rows = {**WITHOUT_EFFECT, **{path: "it is switched off" for path in GONE}}
    return {path: reason for path, reason in rows.items() if look_up(document, path)[0]}


def look_up(document: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    """Return whether ``path`` is in the document, and the value there."""
    value: Any = document
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return False, None
        value = value[name]
    return True, value


def _switched_off(path: str, value: Any) -> bool:
    """Return whether a section is false or empty, or an object in which nothing is enabled at any depth."""
    if path in ON_IF_THERE and isinstance(value, Mapping):
        return False
    if not isinstance(value, Mapping) or not value:
        return not value
    return not enables(value)


def enables(value: Any) -> bool:
    """Return whether ``enabled`` is anything but false, null or "auto" in an object, or in one inside it."""
    if isinstance(value, list | tuple):
        return any(map(enables, value))
    if not isinstance(value, Mapping):
        return False
    return value.get("enabled") not in (None, False, UNSET) or any(map(enables, value.values()))
