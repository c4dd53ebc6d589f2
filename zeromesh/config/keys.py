"""Names of keys for the messages of other packages, so that a renamed key is renamed in all of them."""

from __future__ import annotations

MACHINE = "ZEROMESH_MACHINE"  # variable with the path of a machine.json, in place of presets and of what is measured

OPTIMIZER_PARAMS = "optimizer.params"
SCHEDULER_PARAMS = "scheduler.params"
UNTESTED_OPTIMIZER = "zero_allow_untested_optimizer"
CLIPPING = "gradient_clipping"
SPIKE_LIMITS = "spikes.loss and spikes.norm"
FP16 = '"fp16": {"enabled": true}'
MIN_LOSS_SCALE = "fp16.min_loss_scale"
SCALE_POWER = "fp16.initial_scale_power"
SCALE_WINDOW = "fp16.loss_scale_window"
KEEP_FP32 = "data_types.keep_in_fp32_modules"

COMPILE_BACKEND = "compile.backend"
UNITS = "units"
FLOAT8 = "float8"
FLOAT8_SKIP = "float8.skip"
FLOAT8_GATHER = "float8.gather"
BF16 = '"bf16": {"enabled": true}'

MANAGED = "managed_gradient_accumulation"
MICRO_BATCH = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"

SHARD_ALL = '"zero_optimization": {"stage": 3}'
OPTIMIZER_ON_HOST = '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}'
SHARDED_ON_HOST = '"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}'
PARAMETERS_ON_HOST = '"zero_optimization": {"offload_param": {"device": "cpu"}}'
RECOMPUTE = '"activation_checkpointing": {"enabled": true}'
QUANTIZED_WEIGHTS = "zero_optimization.zero_quantized_weights"
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
PEER_COPIES = "checkpoint.peer_copies"
ASYNCHRONOUS = "checkpoint.asynchronous"
RECOMPUTED = "activation_checkpointing.targets"
PROFILE = '"profile": {"enabled": true}'
PARTITION_ACTIVATIONS = "activation_checkpointing.partition_activations"
SIZES_OF_AXES = '"mesh": {"data": 4, "tensor": 2}'
RANKS_PER_NODE = "communication.ranks_per_node"
GATHERED_BITS = "communication.across_nodes_gather"
REDUCED_BITS = "communication.across_nodes_reduce"
CONTEXT_RANKS = "mesh.context"
SPREAD_SEQUENCES = '"mesh": {"context": 2}, "context_parallel": {"strategy": "ulysses"}'
UNCHECKED = "context_parallel.unchecked"
ONE_CONTEXT_RANK = f"set {CONTEXT_RANKS} to 1"

TABLE_MODULES = "embedding_tables.modules"
TABLE_OPTIMIZER = "embedding_tables.optimizer"

PIPELINE_RANKS = "mesh.pipeline"
ONE_STAGE = f"set {PIPELINE_RANKS} to 1"
STAGE_BLOCKS = "pipeline.blocks"
PARTITION = "pipeline.partition"
SCHEDULE = "pipeline.schedule"
CHUNKS = "pipeline.chunks"
COSTS = "pipeline.costs"
STAGE_RECOMPUTE = "pipeline.recompute"
RECORD = "pipeline.record"
LOCAL_MEMORY = "communication.local_memory"
TENSOR_RANKS = "mesh.tensor"
TENSOR_PLAN = "tensor_parallel.plan"
SEQUENCE = "tensor_parallel.sequence"
WHOLE_SEQUENCE = f"set {SEQUENCE} to false"

# Of zeromesh train.
LONGEST_SEQUENCE = "huggingface.sequence_length"
SEQUENCE_LENGTH = f"model.sequence_length or {LONGEST_SEQUENCE}"
HEAD_WIDTH = "model.hidden_size / model.heads"
MODEL_VOCABULARY = "model.vocab_size"
MODEL_FOLDER = "huggingface.path"
MODEL_WEIGHTS = "huggingface.weights"
MODEL_ATTENTION = "huggingface.attention"
ADAPTED = "lora.target_modules"
SOURCES = "data.train"
HELD_OUT = "data.validation"
DATA_REVISION = "data.revision"
SUFFIXES = "data.suffixes"
RECORDS = "data.format"
RECORD_KEYS = "data.text_key, data.prompt_key, data.response_key or data.messages_key"
TOO_LONG = "data.too_long"
PADDED = 'data.packing to "pad"'
DOCUMENT_ATTENTION = "data.document_attention"
VOCABULARY = "data.vocabulary_size"
TOKENIZER = "data.tokenizer"
OUTPUT = "run.output"
OTHER_OUTPUT = f"choose another folder with --set {OUTPUT}=FOLDER"
RESUME = "run.resume"
STEPS = "run.steps"
SAVE_EVERY = "run.save_every"
LOG_EVERY = "run.log_every"
PROMPTS = "run.sample.prompts"
OPTIMIZER_ENTRY = '"optimizer": {"type": "AdamW", "params": {"lr": ...}}'
BLEND_ENTRY = f'{SOURCES} as {{"source": ..., "weight": ...}}'
