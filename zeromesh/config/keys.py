"""Names of keys for the messages of other packages: only this package spells them."""

from __future__ import annotations

OPTIMIZER_PARAMS = "optimizer.params"
SCHEDULER_PARAMS = "scheduler.params"
UNTESTED_OPTIMIZER = "zero_allow_untested_optimizer"
CLIPPING = "gradient_clipping"
MIN_LOSS_SCALE = "fp16.min_loss_scale"

UNSHARDED = "ZeRO-0 (zero_optimization.stage = 0)"
UNSHARDED_PARAMETERS = "zero_optimization.stage 2"
PARAMETER_SLOTS = "slots.parameter"

OPTIMIZER_DEVICE = "offload_optimizer.device"
PARAMETER_DEVICE = "offload_param.device"
OFFLOADED_SHARE = "offload_optimizer.ratio"
EARLY_UPDATE = "offload_optimizer.update_during_backward"
SPLIT_MASTER = "offload_optimizer.split_master"
BUFFER_COUNT = "buffer_count"
PIN_MEMORY = "pin_memory"
HOST_MEMORY_LIMIT = "host_memory_limit"

KEEP_LAST = "checkpoint.keep_last"
RECOMPUTED = "activation_checkpointing.targets"
PARTITION_ACTIVATIONS = "activation_checkpointing.partition_activations"
CONTEXT_RANKS = "mesh.context"
ONE_CONTEXT_RANK = f"set {CONTEXT_RANKS} to 1"

PIPELINE_RANKS = "mesh.pipeline"
ONE_STAGE = f"set {PIPELINE_RANKS} to 1"
STAGE_BLOCKS = "pipeline.blocks"
PARTITION = "pipeline.partition"
SCHEDULE = "pipeline.schedule"
TENSOR_RANKS = "mesh.tensor"
TENSOR_PLAN = "tensor_parallel.plan"
SEQUENCE = "tensor_parallel.sequence"
WHOLE_SEQUENCE = f"set {SEQUENCE} to false"
