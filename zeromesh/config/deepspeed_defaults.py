"""Defaults of DeepSpeed 0.19 that differ from those here, and those of keys that nothing here reads.

The drop-in and ``zeromesh config --fix`` write the first into a configuration, ``initialize`` tells of them, and
``engine_answers`` answers with the second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from zeromesh.config.special_keys import OURS, look_up


class Difference(NamedTuple):
    """A key that a configuration leaves out, and what that means in both programs."""

    path: str
    theirs: Any
    ours: str
    note: str  # how the other is chosen, or why the result is the same
    optimizers: tuple[str, ...] = ()  # types in lower case that the row is about; (): all, and none
    unless: str = ""  # another key that says it, too
    changes: bool = True  # the result is another one


_PARAMS = "optimizer.params"
_MUON = ("muon",)

DIFFERENCES: tuple[Difference, ...] = (
    Difference("gradient_clipping", 1.0, "does not clip", "0 switches it off"),
    Difference(f"{_PARAMS}.weight_decay", 0.0, "uses torch's 0.01", "torch's AdamW has 0.01", ("adamw",)),
    Difference(
        f"{_PARAMS}.weight_decay",
        0.0,
        "uses torch's 0.1 for matrices and 0.01 for the rest",
        "torch's Muon has 0.1",
        _MUON,
    ),
    Difference(f"{_PARAMS}.muon_lr", 0.02, "uses 0.001", "of matrices; lr sets both", _MUON, unless=f"{_PARAMS}.lr"),
    Difference(f"{_PARAMS}.adam_lr", 3e-4, "uses 0.001", "of the rest; lr sets both", _MUON, unless=f"{_PARAMS}.lr"),
    Difference(f"{_PARAMS}.betas", [0.9, 0.95], "uses torch's [0.9, 0.999]", "beside matrices", _MUON),
    Difference(f"{_PARAMS}.eps", 1e-10, "uses torch's 1e-8", "beside matrices", _MUON),
    # The mean of the gradients is the same, rounded at other places.
    Difference("gradient_predivide_factor", 1.0, "divides by the ranks first if that is exact", "", changes=False),
    # There a layer refuses inputs that are not cast.
    Difference("fp16.auto_cast", False, "casts inputs to fp16", "", changes=False),
)
"""Keys whose default differs, each with its value in DeepSpeed 0.19 and what happens here."""


def differences(document: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the keys that a configuration leaves out and whose default gives another result here.

    A configuration with a key that only ZeroMesh has was written for it, and means its defaults.
    """
    values = dict(document)
    if any(look_up(values, path)[0] for path in OURS):
        return
    kind = str(look_up(values, "optimizer.type")[1]).lower()
    # With it, DeepSpeed takes torch's class and its defaults.
    torchs = look_up(values, "optimizer.params.torch_adam")[1] is True
    for row in DIFFERENCES:
        about = not row.optimizers or (kind in row.optimizers and not torchs)
        said = any(look_up(values, path)[0] for path in (row.path, row.unless) if path)
        if row.changes and about and not said:
            yield row


_ZERO: dict[str, Any] = {
    "sub_group_size": 10**9,
    "reduce_scatter": True,
    "reduce_bucket_size": 5 * 10**8,
    "allgather_bucket_size": 5 * 10**8,
    "allgather_partitions": True,
    "allgather_sequential": False,
    "round_robin_gradients": False,
    "contiguous_gradients": True,
    "load_from_fp32_weights": True,
    "elastic_checkpoint": False,
    "ignore_unused_parameters": True,
    "legacy_stage1": False,
    "log_trace_cache_warnings": False,
    "stage3_max_live_parameters": 10**9,
    "stage3_max_reuse_distance": 10**9,
    "stage3_prefetch_bucket_size": 5 * 10**7,
    "stage3_module_granularity_threshold": 0,
    "stage3_param_persistence_threshold": 10**5,
    "stage3_model_persistence_threshold": sys.maxsize,
    "stage3_gather_16bit_weights_on_model_save": False,
}
_PROFILER: dict[str, Any] = {
    "enabled": False,
    "recompute_fwd_factor": 0.0,
    "profile_step": 1,
    "module_depth": -1,
    "top_modules": 1,
    "detailed": True,
    "output_file": None,
}
_AUTOTUNING: dict[str, Any] = {
    "enabled": False,
    "start_profile_step": 3,
    "end_profile_step": 5,
    "metric": "throughput",
    "metric_path": None,
    "model_info_path": None,
}

SECTIONS: dict[str, dict[str, Any]] = {
    "flops_profiler": _PROFILER,
    "autotuning": _AUTOTUNING,
    "zero_optimization": _ZERO,
}
"""DeepSpeed's defaults by section and key, of answers whose names are made of both."""

DEFAULTS: dict[str, Any] = {
    "torch_autocast.lower_precision_safe_modules": [],
    "fp16.fp16_master_weights_and_grads": False,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "gradient_predivide_factor": 1.0,
    "managed_gradient_accumulation": True,
    "memory_breakdown": False,
    "dump_state": False,
    "log_level": None,
    "enable_sanity_checks": False,
    "optimizer.legacy_fusion": False,
    "checkpoint.load_universal": False,
    "checkpoint.use_node_local_storage": False,
    "checkpoint.checkpoint_serialization": True,
    "data_efficiency.enabled": False,
    "data_efficiency": {},
    "data_efficiency.data_sampling.enabled": False,
    "data_efficiency.data_sampling": {},
    "data_efficiency.data_sampling.curriculum_learning.enabled": False,
    "data_efficiency.data_sampling.curriculum_learning": {},
    "data_efficiency.data_routing.random_ltd.enabled": False,
    "data_efficiency.data_routing.random_ltd": {},
    "zero_force_ds_cpu_optimizer": True,
    "zero_optimization.use_multi_rank_bucket_allreduce": True,
    "zero_optimization.zero_quantized_nontrainable_weights": False,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": 0.8,
    **{f"{section}.{key}": value for section, keys in SECTIONS.items() for key, value in keys.items()},
}
"""DeepSpeed's defaults of keys whose values are answered as they were written."""
