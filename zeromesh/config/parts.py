"""Sections on precision, the optimizer, activations, checkpoints, parallelism, and what a run shows of itself."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from zeromesh.config.names import check_optimizer, check_partition, check_scheduler
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
    key,
)

# Names of rows of zeromesh.comm.formats.FORMATS, which is in a layer above.
LinkFormat = Literal["16bit", "8bit"]


class Fp16(Section):
    """fp16 parameters with an fp32 master and a loss scale."""

    enabled: bool = key(False, "Compute in fp16.")
    # Unlike DeepSpeed: without it, inputs in another dtype are an error of the first layer.
    auto_cast: bool = key(True, "Cast floating-point inputs of the model to fp16 (DeepSpeed's default is false).")
    loss_scale: CountFloat = key(0.0, "A fixed loss scale; 0 means a dynamic one.")
    # 2**128 is more than fp32 holds.
    initial_scale_power: CountInt = key(16, "The dynamic scale starts at 2 to this power.", le=127)
    loss_scale_window: PositiveInt = key(1000, "Steps without overflow until the scale is doubled.")
    hysteresis: PositiveInt = key(2, "Overflows until the scale is halved.")
    consecutive_hysteresis: bool = key(False, "Refill the hysteresis after a step without overflow.")
    min_loss_scale: PositiveFloat = key(1.0, "Least value of the dynamic scale.")


class Bf16(Section):
    """bf16 parameters with an fp32 master."""

    enabled: bool = key(False, "Compute in bf16.")
    auto_cast: bool = key(True, "Cast floating-point inputs of the model to bf16 (DeepSpeed does not).")


class TorchAutocast(Section):
    """The forward under ``torch.autocast``; parameters keep their dtype."""

    enabled: bool = key(False, "Run the forward under torch.autocast.")
    dtype: Dtype = key("bf16", "Dtype of autocast; fp16 scales the loss as the fp16 section says.")


class DataTypes(Section):
    """Dtypes that differ from those of the model."""

    grad_accum_dtype: Dtype | None = key(None, "Dtype of summed gradients. Null: fp32 for 16-bit parameters.")
    buffer_dtype: Dtype | None = key(
        None,
        "Dtype of the model's floating-point buffers, except running statistics of batch norms. Null: each keeps its "
        "own.",
    )


class Optimizer(Section):
    """The optimizer that ZeroMesh builds."""

    type: str = key(..., "adam, adamw, lamb, lion, adagrad, sgd, muon, in any letter case, or a class of torch.optim.")
    # Checked when the optimizer is built, whose signature says what there is.
    params: Table = key(
        {},
        "Arguments of the optimizer, for example lr, betas, eps, weight_decay. Defaults are those of torch's "
        "optimizer of that name: AdamW has a weight_decay of 0.01, where DeepSpeed has 0.",
    )

    _known_type = field_validator("type")(check_optimizer)


class Scheduler(Section):
    """The learning-rate schedule that ZeroMesh builds."""

    type: str = key(..., "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, WSD, or a class of torch's.")
    params: Table = key({}, "Arguments of the schedule.")

    _known_type = field_validator("type")(check_scheduler)


class TableOptimizer(Section):
    """The update of rows that a batch has used."""

    type: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] = key(
        ..., "sgd, adagrad, rowwise_adagrad (one state per row), or adam (torch's SparseAdam)."
    )
    params: Table = key(
        {},
        "lr (0.01 of adagrad, else 0.001), eps, lr_decay and initial_accumulator_value of adagrad, betas of adam. "
        "Schedules change lr as that of the other parameters.",
    )


class EmbeddingTables(Section):
    """Embeddings with sparse gradients, whose rows are spread over the data-parallel ranks at every stage."""

    modules: Names | None = key(
        None, "Patterns of names of nn.Embedding and nn.EmbeddingBag. Null: those with sparse=True; []: none."
    )
    optimizer: TableOptimizer | None = key(
        None, "Update of the rows. Null: by the run's optimizer, which must be SGD, Adagrad, Adam or AdamW."
    )
    device: Literal["none", "cpu", "nvme"] = key("none", "Tier of the rows and their optimizer states.")
    nvme_path: str | None = key(None, "Folder of the rows' files on the NVMe device.")
    cache_rows: PositiveInt = key(
        100_000, "Rows of each table, the last used ones, that a GPU, or host memory before NVMe, keeps."
    )
    batch_lookups: bool = key(
        True, "Look up several tables with the same messages, when the first of their outputs is used."
    )


class ActivationCheckpointing(Section):
    """Recompute activations in the backward instead of keeping them."""

    enabled: bool = key(False, "Recompute the activations of the targets.")
    targets: Names = key((), "Class names, or glob patterns of module names, to recompute. Empty: the units.")
    granularity: Literal["full", "selective"] = key(
        "full",
        "full: compute all of the targets again. selective: keep results of matrix products and attention, too, and "
        "compute the rest again.",
    )
    partition_activations: bool = key(
        False,
        "Each tensor-parallel rank keeps a part of the inputs of the targets, and gathers them for the backward. No "
        "effect with tensor_parallel.sequence.",
    )
    cpu_checkpointing: bool = key(False, "Keep the inputs of the targets in host memory, if enabled is true.")


class TensorParallelGroup(Section):
    """Size of a tensor-parallel group."""

    tp_size: PositiveInt = key(1, "Ranks that share one layer, as mesh.tensor; 1 means that.")


class TensorParallel(Section):
    """Layers split over ranks."""

    plan: Table | None = key(
        None,
        "Glob patterns of names of modules or parameters to styles, such as colwise, rowwise or replicate. They "
        "precede the styles that are found automatically.",
    )
    sequence: bool = key(False, "Norms and dropout between split layers work on parts of the sequence.")
    autotp_size: CountInt = key(0, "Ranks that share one layer, as mesh.tensor; 0 means that.")
    tensor_parallel: TensorParallelGroup = key(TensorParallelGroup(), "Size of the group.")


class ContextParallel(Section):
    """Sequences that several ranks share."""

    strategy: Literal["ring", "ulysses"] = key(
        "ring", "ring: keys and values circulate; ulysses: a rank has all tokens of some heads."
    )


class PipelineRecord(Section):
    """The update of a pipeline that is drawn, and the folder of the drawing."""

    folder: str = key("runs/pipeline", "Folder of the files; older ones are kept.", min_length=1)
    step: PositiveInt = key(3, "The update that is recorded, counted from 1 in this process.")


class Pipeline(Section):
    """The model cut into stages."""

    stages: PositiveInt | None = key(None, "Ranks that share the layers, as mesh.pipeline.")
    schedule: str = key("1f1b", "Order of forwards and backwards; `zeromesh schedule --list` has all.")
    chunks: PositiveInt | None = key(None, "Stages per rank, where the schedule has several.")
    partition: str | list[int] = key(
        "best",
        "Distribution of blocks over stages: best (by counted operations), parameters, uniform, type:REGEX (equally "
        "many of matching classes), or the first block of each.",
    )
    blocks: list[str] = key([], "Patterns of names of the blocks, in the order in which they are called.")
    recompute: bool = key(False, "Keep only the inputs of stages, and recompute activations in idle time.")
    record: PipelineRecord | None = key(None, "Draw an update as measured, and as predicted. Null: no.")
    activation_checkpoint_interval: CountInt = key(
        0, "Layers of a PipelineModule recomputed together; 0: the model's number."
    )

    _known_partition = field_validator("partition")(check_partition)


class Checkpoint(Section):
    """Writing and loading of checkpoints."""

    keep_last: PositiveInt | None = key(
        None,
        "Checkpoints of a series (such as global_step1, global_step2) that stay in a folder; a complete new one "
        "deletes older ones. Null: all.",
    )
    on_failure: Literal["continue", "stop"] = key(
        "continue",
        "Reaction of zeromesh train to a checkpoint that cannot be written, as on a full disk: continue until the "
        "next save, or stop.",
    )


class Aio(Section):
    """Asynchronous file access for NVMe."""

    # Direct I/O takes multiples of a sector only.
    block_size: PositiveInt = key(1048576, "Bytes per request.", multiple_of=4096)
    queue_depth: PositiveInt = key(8, "Requests in flight.")


class MeshSizes(Section):
    """Sizes of the mesh of ranks; their product is the world size."""

    replicate: PositiveInt = key(1, "Shard groups that replicate each other (hybrid sharding).")
    data: Int = key(-1, "Ranks in one shard group; -1 means what is left.", ge=-1)
    pipeline: PositiveInt = key(1, "Pipeline stages.")
    context: PositiveInt = key(1, "Ranks that share one sequence.")
    tensor: PositiveInt = key(1, "Ranks that share one layer.")
    expert: PositiveInt = key(1, "Ranks that share the experts of a layer.")

    @field_validator("data")
    @classmethod
    def _data_is_a_size(cls, value: int) -> int:
        # Apart from the bound, since a range from -1 on has a 0 in it.
        if value == 0:
            raise ValueError("must be a whole number >= 1, or -1 for what is left; leave the key out for -1")
        return value


class Communication(Section):
    """Use of the links between nodes."""

    hierarchical: bool | None = key(
        None,
        "Send data between nodes once, and share them inside the nodes. Null: where nodes have equally many ranks, on "
        "gloo and mpi (nccl knows the nodes itself).",
    )
    ranks_per_node: PositiveInt | None = key(None, "Consecutive ranks with a fast link. Null: those of one machine.")
    across_nodes_gather: LinkFormat | None = key(None, "Format of parameters between nodes. Null: their own.")
    across_nodes_reduce: LinkFormat | None = key(None, "Format of gradients between nodes. Null: their own.")


class SlotSettings(Section):
    """Budgets of full-size working buffers, in units."""

    parameter: BudgetInt | None = key(None, "Units gathered at a time. Null: what the stage implies.")
    gradient: BudgetInt | None = key(None, "Units with full gradients at a time. Null: what the stage implies.")


class TensorBoard(Section):
    """Metrics for TensorBoard."""

    enabled: bool = key(False, "Write metrics for TensorBoard, after every update.")
    output_path: str = key("", "Folder of the jobs; relative to where the run is started.")
    # DeepSpeed's own, as in the other monitors, so that curves go on where they were.
    job_name: str = key("DeepSpeedJobName", "Folder of this job inside output_path.")


class Wandb(Section):
    """Metrics for Weights & Biases."""

    enabled: bool = key(False, "Send metrics to Weights & Biases, after every update.")
    group: str | None = key(None, "Group of runs.")
    team: str | None = key(None, "Team that owns the run.")
    project: str = key("deepspeed", "Project of the run.")


class CsvMonitor(Section):
    """Metrics as CSV files."""

    enabled: bool = key(False, "Write metrics as CSV files, one for each, after every update.")
    output_path: str = key("", "Folder of the jobs; relative to where the run is started.")
    job_name: str = key("DeepSpeedJobName", "Folder of this job inside output_path.")


class FlopsProfiler(Section):
    """Operations of the model, counted in one update."""

    enabled: bool = key(False, "Count the operations of one update, and report them.")
    profile_step: PositiveInt = key(1, "Updates before the one that is counted; the next one is timed.")
    module_depth: Int = key(-1, "Depth of modules to report; -1 means all.", ge=-1)
    top_modules: PositiveInt = key(1, "Modules to report per depth, those with the most operations.")
    detailed: bool = key(True, "Report every module down to module_depth, too.")
    output_file: str | None = key(None, "File of the report; an older one is kept. Null: the log.")


class TraceSettings(Section):
    """A trace of some updates."""

    enabled: bool = key(False, "Record some updates with torch's profiler.")
    start_step: PositiveInt = key(5, "The first update that is recorded, counted from 1 in this process.")
    steps: PositiveInt = key(3, "Updates that are recorded.")
    output: str = key("profile", "Folder of the files, one for each rank; older ones are kept.")
    memory: bool = key(False, "Record allocations, too.")


class ReplicaCheck(Section):
    """Comparison of the copies that several ranks hold."""

    interval: PositiveInt | None = key(None, "Updates between two exact comparisons. Null: only at_saves.")
    at_saves: bool = key(True, "Compare before each checkpoint, too, which is then not written.")


class Debug(Section):
    """Checks that take time, to find out why a program hangs."""

    collectives: bool = key(
        False,
        "Before each collective of torch.distributed that the program calls itself, compare name, dtype, shape and "
        "line of code between ranks; where they differ, an error names the lines of all.",
    )
