"""Sections on precision, the optimizer, the schedule, activations, checkpoints and parallelism."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from zeromesh.config.names import check_optimizer, check_scheduler
from zeromesh.config.section import (
    BudgetInt,
    CountFloat,
    CountInt,
    Dtype,
    Int,
    Names,
    PositiveFloat,
    PositiveInt,
    Section,
    Table,
    TagValidation,
)

LinkFormat = Literal["16bit", "8bit"]
"""Names of ``zeromesh.comm.formats.FORMATS``."""


class Fp16(Section):
    """fp16 parameters with an fp32 master and a loss scale."""

    enabled: bool = Field(False, description="Compute in fp16.")
    auto_cast: bool = Field(
        True, description="Cast floating-point inputs of the model to fp16 (DeepSpeed's default is false)."
    )
    loss_scale: CountFloat = Field(0.0, description="A fixed loss scale; 0 means a dynamic one.")
    initial_scale_power: CountInt = Field(16, le=127, description="The dynamic scale starts at 2 to this power.")
    loss_scale_window: PositiveInt = Field(1000, description="Steps without overflow until the scale is doubled.")
    hysteresis: PositiveInt = Field(2, description="Overflows until the scale is halved.")
    consecutive_hysteresis: bool = Field(False, description="Refill the hysteresis after a step without overflow.")
    min_loss_scale: PositiveFloat = Field(1.0, description="Least value of the dynamic scale.")
    fp16_master_weights_and_grads: bool = Field(False, description="Keep the master and gradients in fp16.")


class Bf16(Section):
    """bf16 parameters with an fp32 master."""

    enabled: bool = Field(False, description="Compute in bf16.")
    auto_cast: bool = Field(True, description="Cast floating-point inputs of the model to bf16 (DeepSpeed does not).")
    immediate_grad_update: bool = Field(False, description="Add gradients to the fp32 ones as they are produced.")
    check_grad_overflow: bool = Field(True, description="Skip updates with gradients that are not finite.")
    bf16_master_weights_and_grads: bool = Field(False, description="Keep the master and gradients in bf16.")
    bf16_optimizer_states: bool = Field(False, description="Keep the optimizer's state in bf16.")


class TorchAutocast(Section):
    """The forward under ``torch.autocast``; parameters keep their dtype."""

    enabled: bool = Field(False, description="Run the forward under torch.autocast.")
    dtype: Dtype = Field("bf16", description="Dtype of autocast; fp16 scales the loss as the fp16 section says.")
    lower_precision_safe_modules: Names | None = Field(None, description="Classes reduced in the autocast dtype.")


class DataTypes(Section):
    """Dtypes that differ from those of the model."""

    grad_accum_dtype: Dtype | None = Field(
        None, description="Dtype in which gradients are summed and kept. Null: fp32 for 16-bit parameters."
    )
    param_dtype: Dtype | None = Field(None, description="Dtype of the model's parameters.")
    buffer_dtype: Dtype | None = Field(
        None,
        description="Dtype of the model's floating-point buffers, but for running statistics of batch norms. Null: "
        "each keeps its own, in 16-bit runs too.",
    )
    keep_in_fp32_modules: Names | None = Field(None, description="Modules that stay in fp32.")


class Optimizer(Section):
    """The optimizer that ZeroMesh builds."""

    type: str = Field(
        description="adam, adamw, lamb, lion, adagrad, sgd or muon, in any letter case, or a class of torch.optim."
    )
    params: Table = Field(
        {},
        description="Arguments of the optimizer, for example lr, betas, eps, weight_decay. What is left out has the "
        "default of torch's optimizer of that name: for AdamW a weight_decay of 0.01, where DeepSpeed has 0.",
    )
    legacy_fusion: bool = Field(False, description="Use the older fused fp16 optimizer.")

    _known_type = field_validator("type")(check_optimizer)


class Scheduler(Section):
    """The learning-rate schedule that ZeroMesh builds."""

    type: str = Field(
        description="WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, WSD, or a class of "
        "torch.optim.lr_scheduler."
    )
    params: Table = Field({}, description="Arguments of the schedule.")

    _known_type = field_validator("type")(check_scheduler)


class ActivationCheckpointing(Section):
    """Recompute activations in the backward instead of keeping them."""

    enabled: bool = Field(False, description="Recompute the activations of the targets.")
    targets: Names = Field(
        (), description="Class names, or glob patterns of module names, to recompute. Empty: the units."
    )
    partition_activations: bool = Field(
        False,
        description="Each tensor-parallel rank keeps its part of what the targets are given, and gathers it for the "
        "backward. With tensor_parallel.sequence, or on one such rank, nothing changes.",
    )
    cpu_checkpointing: bool = Field(
        False, description="What the targets are given waits for the backward in host memory, if enabled is true."
    )
    number_checkpoints: CountInt | None = Field(None, description="Number of checkpoints in the model.")
    contiguous_memory_optimization: bool = Field(False, description="Keep activations in one buffer.")
    synchronize_checkpoint_boundary: bool = Field(False, description="Synchronise the device at each checkpoint.")
    profile: bool = Field(False, description="Time each checkpoint.")


class TensorParallelGroup(Section):
    """Size of a tensor-parallel group."""

    tp_size: PositiveInt = Field(1, description="Ranks that share one layer, as mesh.tensor; 1 means that.")
    tp_grain_size: PositiveInt = Field(1, description="Sizes are split in multiples of this.")
    mpu: Any = Field(None, description="An object that knows the groups of ranks.")
    tp_group: Any = Field(None, description="A process group.")


class TensorParallel(Section):
    """Layers split over ranks."""

    plan: Table | None = Field(
        None,
        description="Glob patterns of names of modules or parameters to styles, such as colwise, rowwise or replicate; "
        "they come before what is found automatically. Empty or null: that is all.",
    )
    sequence: bool = Field(False, description="Norms and dropout between split layers work on parts of the sequence.")
    autotp_size: CountInt = Field(0, description="Ranks that share one layer, as mesh.tensor; 0 means that.")
    dtype: Dtype | None = Field(None, description="Dtype to convert the model to.")
    tp_overlap_comm: bool = Field(False, description="Overlap communication with compute.")
    vocab_parallel_lm_head: bool | None = Field(None, description="Split the output layer by vocabulary.")
    vocab_parallel_ce_backend: Literal["torch", "liger"] = Field("torch", description="Code of the cross entropy.")
    tensor_parallel: TensorParallelGroup = Field(TensorParallelGroup(), description="Size of the group.")
    injection_policy_tuple: Any = Field(None, description="Layers to replace.")
    partition_config: Table | None = Field(None, description="Which layers are split, and how.")
    preset_model: str | None = Field(None, description="Name of a ready-made set of layers to split.")
    keep_module_on_host: bool = Field(False, description="Keep the model in host memory while it is split.")
    replace_with_kernel_inject: bool = Field(False, description="Replace layers by inference kernels.")


class ContextParallel(Section):
    """How ranks share one sequence."""

    strategy: Literal["ring", "ulysses"] = Field(
        "ring",
        description="ring: keys and values go around the ranks; ulysses: each rank has all tokens for some heads.",
    )


class PipelineRecord(Section):
    """Which update of a pipeline is drawn, and where."""

    folder: str = Field("runs/pipeline", min_length=1, description="Folder of the files; older ones are kept.")
    step: PositiveInt = Field(3, description="The update that is recorded, counted from 1 in this process.")


class Pipeline(Section):
    """The model cut into stages."""

    stages: PositiveInt | None = Field(None, description="Ranks that share the layers, as mesh.pipeline.")
    schedule: str = Field("1f1b", description="Order of forwards and backwards; `zeromesh schedule --list` has all.")
    chunks: PositiveInt | None = Field(None, description="Stages per rank, where the schedule has several.")
    partition: str | list[int] = Field(
        "best",
        description="How blocks are dealt to the stages: best (by counted operations), time (as measured at the "
        "start), parameters, uniform, type:REGEX (as many of the classes that match), or the first block of each.",
    )
    blocks: list[str] = Field([], description="Patterns of names of the blocks, in the order in which they are called.")
    recompute: bool = Field(
        False,
        description="Keep only what stages are given, and compute their activations again while gradients are awaited.",
    )
    record: PipelineRecord | None = Field(
        None, description="Draw when each rank computed in an update, and when it was predicted to. Null: no."
    )
    seed_layers: bool = Field(False, description="Seed each layer on its own.")
    activation_checkpoint_interval: CountInt = Field(
        0, description="Layers of a PipelineModule that are recomputed together; 0 is what the model says."
    )
    pipe_partitioned: bool = Field(True, description="Split activations over tensor-parallel ranks.")
    grad_partitioned: bool = Field(True, description="Split their gradients over tensor-parallel ranks.")
    use_reentrant: bool = Field(True, description="Kind of activation checkpointing.")


class CheckpointWriter(Section):
    """How files of a checkpoint are written."""

    type: str | None = Field(None, description="Kind of writer: mock, python or fast.")
    decoupled: bool = Field(False, description="Write while training goes on.")
    io_buffer_size: PositiveInt = Field(64 * 1024**2, description="Size of a buffer, in bytes.")
    io_buffer_double: bool = Field(True, description="Use two buffers.")
    show_statistics: bool = Field(False, description="Report the speed of writing.")
    data_parallel: str | None = Field(None, description="Who writes: replica, socket or machine.")
    io_multiplier: PositiveInt = Field(1, description="Writers per unit of data parallelism.")


class CheckpointParallelWrite(Section):
    """Which ranks write a checkpoint."""

    pipeline_stage: bool = Field(False, description="All stages of a pipeline write at once.")


class Checkpoint(Section):
    """How checkpoints are written and loaded."""

    keep_last: PositiveInt | None = Field(
        None,
        description="How many checkpoints of a series (such as global_step1, global_step2) stay in a folder; older "
        "ones are deleted when a new one is complete. Null: all.",
    )
    on_failure: Literal["continue", "stop"] = Field(
        "continue",
        description="What zeromesh train does if a checkpoint cannot be written, as on a full disk: go on and try "
        "again at the next save, or stop.",
    )
    tag_validation: TagValidation = Field(
        "Warn", description="What to do when ranks save under different tags: Ignore, Warn or Fail."
    )
    load_universal: bool = Field(False, description="Load a checkpoint that was written under another layout.")
    use_node_local_storage: bool = Field(False, description="Every node writes to its own disk.")
    parallel_write: CheckpointParallelWrite = Field(
        CheckpointParallelWrite(), description="Which ranks write a checkpoint."
    )
    checkpoint_serialization: bool = Field(True, description="Use torch's serialisation.")
    writer: CheckpointWriter | None = Field(None, description="How files are written.")


class Aio(Section):
    """Asynchronous file access for NVMe."""

    block_size: PositiveInt = Field(1048576, description="Bytes per request, a multiple of 4096.")
    queue_depth: PositiveInt = Field(8, description="Requests in flight.")
    intra_op_parallelism: PositiveInt = Field(1, description="Threads per request.")
    single_submit: bool = Field(False, description="Submit requests one by one.")
    overlap_events: bool = Field(True, description="Submit while waiting.")
    use_gds: bool = Field(False, description="Use GPU direct storage.")
    thread_count: PositiveInt | None = Field(None, description="Older name of intra_op_parallelism.")


class MeshSizes(Section):
    """Sizes of the mesh of ranks; their product is the world size."""

    replicate: PositiveInt = Field(1, description="Shard groups that replicate each other (hybrid sharding).")
    data: Int = Field(-1, ge=-1, description="Ranks in one shard group; -1 means what is left.")
    pipeline: PositiveInt = Field(1, description="Pipeline stages.")
    context: PositiveInt = Field(1, description="Ranks that share one sequence.")
    tensor: PositiveInt = Field(1, description="Ranks that share one layer.")
    expert: PositiveInt = Field(1, description="Ranks that share the experts of a layer.")

    @field_validator("data")
    @classmethod
    def _data_is_a_size(cls, value: int) -> int:
        if value == 0:
            raise ValueError("must be a whole number >= 1, or -1 for what is left; leave the key out for -1")
        return value


class Communication(Section):
    """How the links between nodes are used."""

    hierarchical: bool | None = Field(
        None,
        description="Send over the links between nodes what is needed once only, and share it inside the nodes. Null: "
        "where nodes have equally many ranks, on gloo and mpi (nccl knows the nodes itself).",
    )
    ranks_per_node: PositiveInt | None = Field(
        None, description="Ranks that share a fast link, neighbours in number. Null: those that share a machine."
    )
    across_nodes_gather: LinkFormat | None = Field(
        None, description="How parameters are written on links between nodes: 16bit, or 8bit. Null: as they are."
    )
    across_nodes_reduce: LinkFormat | None = Field(
        None, description="How gradients are written on links between nodes: 16bit, or 8bit. Null: as they are."
    )


class SlotSettings(Section):
    """Budgets of full-size working buffers, in units."""

    parameter: BudgetInt | None = Field(None, description="Units gathered at a time. Null: what the stage implies.")
    gradient: BudgetInt | None = Field(
        None, description="Units with full gradients at a time. Null: what the stage implies."
    )
