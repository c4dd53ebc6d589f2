"""Sections on precision, the optimizer, activations, checkpoints, parallelism, and what a run shows of itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, field_validator, model_validator

from zeromesh.config.optimizer_names import check_optimizer, check_partition, check_scheduler
from zeromesh.config.section import (
    BudgetInt,
    CountFloat,
    CountInt,
    Int,
    Names,
    PositiveFloat,
    PositiveInt,
    Section,
    SizeInt,
    Table,
    key,
)

# Names of rows of zeromesh.comm.message_formats.FORMATS, which is in a layer above.
LinkFormat = Literal["16bit", "8bit"]


class Compile(Section):
    """Compile the forward of each unit (a block of the model) with ``torch.compile``."""

    enabled: bool = key(False, "Compile the units, when the first step calls them.")
    backend: str = key("inductor", "Backend of torch.compile, such as inductor, aot_eager or eager.", min_length=1)
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = key(
        None, "Mode of the backend inductor. Null: torch's default."
    )


class Optimizer(Section):
    """The optimizer that ZeroMesh builds."""

    type: str = key(
        ...,
        "Name of the optimizer: adam, adamw, lamb, lion, adagrad, sgd, muon (in any case), or a class of torch.optim.",
    )
    # Checked when the optimizer is built, whose signature says what there is.
    params: Table = key(
        {},
        "Arguments of the optimizer, such as lr, betas, eps, weight_decay. Defaults are torch's: AdamW has a "
        "weight_decay of 0.01 (DeepSpeed: 0).",
    )

    _known_type = field_validator("type")(check_optimizer)


class Scheduler(Section):
    """The learning-rate schedule that ZeroMesh builds."""

    type: str = key(
        ...,
        "Name of the schedule: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, WSD, or a class of "
        "torch.optim.lr_scheduler.",
    )
    params: Table = key({}, "Arguments of the schedule.")

    _known_type = field_validator("type")(check_scheduler)


class TableOptimizer(Section):
    """The optimizer of embedding tables."""

    type: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] = key(
        ..., "Update of the rows: sgd, adagrad, rowwise_adagrad (one state per row), or adam (torch's SparseAdam)."
    )
    params: Table = key(
        {},
        "Arguments: lr (default 0.01 for adagrad, otherwise 0.001); eps; lr_decay and initial_accumulator_value for "
        "adagrad; betas for adam. Schedules apply to lr too.",
    )


class EmbeddingTables(Section):
    """Embeddings with sparse gradients. Their rows are distributed over the data-parallel ranks at every stage."""

    modules: Names | None = key(
        None, "Name patterns of nn.Embedding and nn.EmbeddingBag modules. Null: those with sparse=True. []: none."
    )
    optimizer: TableOptimizer | None = key(
        None, "Optimizer of the tables. Null: that of the run, which must be SGD, Adagrad, Adam or AdamW."
    )
    device: Literal["none", "cpu", "nvme"] = key("none", "Memory of the rows and their optimizer states.")
    nvme_path: str | None = key(None, "Folder on the NVMe device for the files of the rows.")
    cache_rows: PositiveInt = key(
        100_000, "Most recently used rows of each table that stay on the GPU, or in host memory for device = nvme."
    )
    batch_lookups: bool = key(
        True, "Look up several tables with the same messages, when the first of their outputs is used."
    )


class ExpertSettings(Section):
    """Experts of a mixture. The ranks of mesh.expert share them."""

    targets: Names = key(
        (),
        "Class names or glob patterns of module names: the modules that hold the experts of a layer. Empty: those that "
        "are found by the shapes of their parameters.",
    )
    auxiliary_loss: Literal["model", "global"] = key(
        "model",
        "Tokens of the auxiliary loss that the model adds (output_router_logits). model: those of this rank's "
        "micro-batch. global: fractions of tokens are those of all ranks and of the micro-batches so far.",
    )
    z_loss: CountFloat = key(
        0.0,
        "Coefficient of the routers' z-loss (ST-MoE): the mean over tokens of the square of the log-sum-exp of the "
        "logits, summed over layers. It changes gradients, and not the loss that the model returns.",
    )
    bias_update_rate: PositiveFloat | None = key(
        None,
        "Add to the selection bias of an expert with fewer tokens than the mean, and take from that of others, so much "
        "in each update (DeepSeek-V3: 0.001). Null: the bias stays as it is.",
    )
    report_load: bool | None = key(
        None,
        "Count the tokens of each expert for engine.expert_report() and the monitors. Null: where there is a monitor, "
        "in zeromesh train, and with bias_update_rate.",
    )
    rest: Literal["none", "cpu", "nvme"] = key(
        "none",
        "Memory in which the weights and optimizer states of experts rest. cpu, nvme: a forward fetches the experts "
        "that the router has chosen, and an update changes these alone; the steps that the others miss are made up for "
        "when they are next used.",
    )
    nvme_path: str | None = key(None, "Folder on the NVMe device for the files of experts that rest there.")
    slots: PositiveInt = key(
        8, "Most recently used experts of each layer that stay in host memory, with their states, for rest = nvme."
    )


class Tiling(Section):
    """Compute what treats tokens apart a few tokens at a time, so that long sequences fit."""

    mlp: Literal["width"] | PositiveInt | None = key(
        None,
        "Tokens of a tile, in which MLPs compute forward and backward; their activations are recomputed tile by tile. "
        "width: the larger of 1024 and the width of a token. Null: no tiles.",
    )
    modules: Names = key(
        (),
        "Class names or glob patterns of module names to compute in tiles. Empty: all modules whose code is found to "
        "compute each token by itself, with two matrix products or more.",
    )
    loss: bool = key(False, "Compute the loss in chunks of tokens, too: the same as chunked_loss.")


class TensorParallelGroup(Section):
    """Size of a tensor-parallel group."""

    tp_size: PositiveInt = key(1, "The same as mesh.tensor. 1: mesh.tensor decides.")


class TensorParallel(Section):
    """Tensor parallelism: layers split over ranks. mesh.tensor sets the number of ranks."""

    plan: Table | None = key(
        None,
        "Styles, such as colwise, rowwise or replicate, by glob pattern of module or parameter names. They take "
        "precedence over the styles that are found automatically.",
    )
    sequence: bool = key(
        False, "Sequence parallelism: norms and dropout between split layers compute on parts of the sequence."
    )
    autotp_size: CountInt = key(0, "The same as mesh.tensor. 0: mesh.tensor decides.")
    tensor_parallel: TensorParallelGroup = key(TensorParallelGroup(), "DeepSpeed's form of mesh.tensor.")


class ContextParallel(Section):
    """Context parallelism: sequences split over ranks. mesh.context sets the number of ranks."""

    strategy: Literal["ring", "ulysses", "auto"] = key(
        "auto",
        "ring: ranks pass keys and values on. ulysses: each rank computes some heads on all tokens. auto: ring for "
        "causal attention; else ulysses among as many ranks as the heads allow, and ring among groups of these; any "
        "other code on parts of sequences.",
    )
    ulysses_degree: CountInt = key(
        0,
        "Neighbouring ranks that share heads under ring or auto, in causal attention, too; groups of so many ranks "
        "pass keys and values on. 0: the strategy decides.",
    )
    unchecked: list[str] = key(
        [], "Names of modules that compute each token by itself, though a check of the code cannot tell; * for parts."
    )


class PipelineRecord(Section):
    """Draw one update of the pipeline, as predicted and as measured."""

    folder: str = key("runs/pipeline", "Folder of the files. Older files are kept.", min_length=1)
    step: PositiveInt = key(3, "Update to record, counted from 1 in this process.")


class ScheduleFile(Section):
    """A schedule of the user's own."""

    file: str = key(..., "Path of the schedule.", min_length=1)


def _schedule(value: Any) -> Any:
    # Said here, or pydantic would say of both forms what is wrong.
    if isinstance(value, dict) and [*value] == ["file"] and isinstance(value["file"], str) and value["file"]:
        return ScheduleFile(**value)
    if not isinstance(value, str | ScheduleFile):
        raise ValueError('must be the name of a schedule, or {"file": PATH}')
    return value


ScheduleChoice = Annotated[
    str | ScheduleFile, BeforeValidator(_schedule, json_schema_input_type=str | dict[Literal["file"], str])
]


class Pipeline(Section):
    """Pipeline parallelism: the model cut into stages. mesh.pipeline sets the number of ranks."""

    stages: PositiveInt | None = key(None, "The same as mesh.pipeline.")
    schedule: ScheduleChoice = key(
        "1f1b",
        'Order of forwards and backwards: a name of `zeromesh schedule --list`, or {"file": PATH}: text, JSON, or a '
        "table (.csv) of torch.distributed.pipelining.",
    )
    costs: str | None = key(
        None,
        "JSON file that pipeline.record wrote: search, zb-h1 and zb-v order their actions by its measured times. Null: "
        "all take the same time.",
        min_length=1,
    )
    chunks: PositiveInt | None = key(None, "Stages per rank, for schedules with several.")
    partition: str | list[int] = key(
        "best",
        "Distribution of blocks over stages. best: equal operations. parameters: equal parameters; both may cut "
        "through blocks. uniform: equal numbers of blocks. type:REGEX: equal numbers of blocks of matching classes. A "
        "list: the first block of each stage.",
    )
    blocks: list[str] = key([], "Name patterns of the blocks, in the order of the forward. Empty: found automatically.")
    recompute: bool = key(False, "Save only the inputs of stages, and recompute activations in idle time.")
    record: PipelineRecord | None = key(None, "Draw one update of the pipeline. Null: no drawing.")
    activation_checkpoint_interval: CountInt = key(
        0, "Layers of a PipelineModule that are recomputed together. 0: the number that the model has."
    )

    _known_partition = field_validator("partition")(check_partition)


class Checkpoint(Section):
    """Checkpoints: when they are written, how many are kept, and what happens if one cannot be written."""

    asynchronous: bool = key(
        False,
        "Write checkpoints while training goes on: save_checkpoint copies the state to host memory and returns. States "
        "on NVMe are written before it returns.",
    )
    keep_last: PositiveInt | None = key(
        None,
        "Number of checkpoints of a series (such as global_step1, global_step2) to keep in a folder. A complete new "
        "one deletes older ones. Null: keep all.",
    )
    on_failure: Literal["continue", "stop"] = key(
        "continue",
        "Reaction of zeromesh train, and of the step after an asynchronous save, if a checkpoint cannot be written, "
        "such as on a full disk: continue until the next save, or stop with the error.",
    )
    peer_copies: CountInt = key(
        0,
        "Keep the state in host memory, from which a restarted run goes on: 1 also on the next node, 2 on the next "
        "two. Each rank needs memory for two copies of its part, and for two of each part that it keeps for others. "
        "zeromesh train copies every run.copy_every steps, a script where it calls save_to_memory. 0: no copies.",
    )


class Aio(Section):
    """File access of the NVMe offload."""

    # Direct I/O takes multiples of a sector only.
    block_size: PositiveInt = key(1048576, "Bytes per request.", multiple_of=4096)
    queue_depth: PositiveInt = key(8, "Requests in flight.")


class MeshSizes(Section):
    """Number of ranks along each axis. Their product, without ``expert``, is the world size."""

    replicate: PositiveInt = key(1, "Shard groups, which hold replicas of each other (hybrid sharding).")
    data: Int = key(-1, "Data-parallel ranks in one shard group. -1: all remaining ranks.", ge=-1)
    pipeline: PositiveInt = key(1, "Pipeline-parallel ranks: each holds a part of the layers.")
    context: PositiveInt = key(1, "Context-parallel ranks: they share a sequence.")
    tensor: PositiveInt = key(1, "Tensor-parallel ranks: they share each layer.")
    expert: PositiveInt = key(
        1,
        "Expert-parallel ranks: they share the experts of a layer. Not a factor of the number of ranks: these are "
        "neighbours among those of data, context and tensor, whose product it divides.",
    )

    @field_validator("data")
    @classmethod
    def _data_is_a_size(cls, value: int) -> int:
        # Apart from the bound, since a range from -1 on has a 0 in it.
        if value == 0:
            raise ValueError("must be a whole number >= 1, or -1 for what is left; leave the key out for -1")
        return value


class Communication(Section):
    """Communication between nodes, and between the ranks of a machine."""

    hierarchical: bool | None = key(
        None,
        "Send data between nodes once, and distribute them inside each node. Null: on with gloo and mpi if all nodes "
        "have the same number of ranks, off with nccl, which does this itself.",
    )
    ranks_per_node: PositiveInt | None = key(
        None, "Consecutive ranks that form a node. Null: the ranks of one machine."
    )
    across_nodes_gather: LinkFormat | None = key(
        None, "Format in which parameters are sent between nodes. Null: their dtype."
    )
    across_nodes_reduce: LinkFormat | None = key(
        None, "Format in which gradients are sent between nodes. Null: their dtype."
    )
    local_memory: bool | None = key(
        None,
        "Copy messages between ranks of one machine from memory to memory, instead of through sockets (backend gloo on "
        "Linux). Null: where the system permits it.",
    )


class SlotSettings(Section):
    """Numbers of full-size buffers, each for one unit (a block of the model)."""

    parameter: BudgetInt | None = key(
        None, "Units that are gathered at a time. More need more memory, and fewer gathers. Null: depends on the stage."
    )
    gradient: BudgetInt | None = key(None, "Units that have full gradients at a time. Null: depends on the stage.")


class TensorBoard(Section):
    """Metrics for TensorBoard."""

    enabled: bool = key(False, "Write metrics after every update.")
    output_path: str = key("", "Folder of the jobs, relative to the folder in which the run starts.")
    # DeepSpeed's own, as in the other monitors, so that curves go on where they were.
    job_name: str = key("DeepSpeedJobName", "Folder of this job inside output_path.")


class Wandb(Section):
    """Metrics for Weights & Biases."""

    enabled: bool = key(False, "Send metrics after every update.")
    group: str | None = key(None, "Name of a group of runs.")
    team: str | None = key(None, "Team that owns the run.")
    project: str = key("deepspeed", "Project of the run.")


class CsvMonitor(TensorBoard):
    """Metrics as CSV files."""

    enabled: bool = key(False, "Write metrics after every update, one file for each.")


class FlopsProfiler(Section):
    """Count the floating-point operations of one update."""

    enabled: bool = key(False, "Count the operations of one update, and report them.")
    profile_step: PositiveInt = key(1, "Number of updates before the one that is counted. The next one is timed.")
    module_depth: Int = key(-1, "Depth of the modules to report. -1: all.", ge=-1)
    top_modules: PositiveInt = key(1, "Number of modules to report at each depth: those with the most operations.")
    detailed: bool = key(True, "Also report every module down to module_depth.")
    output_file: str | None = key(None, "File of the report. An older file is kept. Null: the log.")


class TraceSettings(Section):
    """Record a trace of some updates."""

    enabled: bool = key(False, "Record updates with torch's profiler.")
    start_step: PositiveInt = key(5, "First update to record, counted from 1 in this process.")
    steps: PositiveInt = key(3, "Number of updates to record.")
    output: str = key("profile", "Folder of the files, one for each rank. Older files are kept.")
    memory: bool = key(False, "Also record allocations.")


class ReplicaCheck(Section):
    """Compare the copies of parameters that several ranks hold."""

    interval: PositiveInt | None = key(
        None, "Updates between two exact comparisons. Null: compare only if at_saves is true."
    )
    at_saves: bool = key(True, "Also compare before each checkpoint. If copies differ, the checkpoint is not written.")


class Spikes(Section):
    """Updates whose loss or gradient norm is far above those before them."""

    action: Literal["warn", "skip"] = key(
        "warn", "warn: log them. skip: also leave them out, on all ranks, as updates whose gradients are not finite."
    )
    loss: PositiveFloat | None = key(
        None,
        "Multiple of the median loss of the last updates above which an update is a spike. Null: do not look.",
        gt=1,
    )
    norm: PositiveFloat | None = key(
        None, "The same for the norm of the gradient before clipping. Null: do not look.", gt=1
    )
    window: SizeInt = key(
        50, "Number of the last updates. No update is a spike before there are 10, or as many as this if that is fewer."
    )

    @model_validator(mode="after")
    def _something_is_watched(self) -> Self:
        if self.action == "skip" and self.loss is None and self.norm is None:
            raise ValueError('action is "skip", but no update is a spike without loss or norm; set one of them')
        return self


class Debug(Section):
    """Slow checks that find out why a program hangs."""

    collectives: bool = key(
        False,
        "Before each collective of torch.distributed that your program calls, compare name, dtype, shape and line of "
        "code between ranks. If they differ, an error names the lines of all ranks.",
    )
