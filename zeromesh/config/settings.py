"""The settings of a run: read from DeepSpeed's JSON, checked at every depth, and frozen."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from zeromesh.config.batch import solve_batch, solve_mesh
from zeromesh.config.catalogue import Entry, catalogue
from zeromesh.config.document import read_document
from zeromesh.config.errors import ConfigError
from zeromesh.config.explain import explain, gone_problems, not_yet_problems, without_effect, without_gone
from zeromesh.config.observe import CsvMonitor, Debug, FlopsProfiler, ReplicaCheck, TensorBoard, TraceSettings, Wandb
from zeromesh.config.parts import (
    ActivationCheckpointing,
    Aio,
    Bf16,
    Checkpoint,
    Communication,
    ContextParallel,
    DataTypes,
    Fp16,
    MeshSizes,
    Optimizer,
    Pipeline,
    Scheduler,
    SlotSettings,
    TensorParallel,
    TorchAutocast,
)
from zeromesh.config.printing import jsonable, without_idle
from zeromesh.config.section import (
    BatchInt,
    CountFloat,
    CountInt,
    Dtype,
    Interval,
    Names,
    PositiveFloat,
    PositiveInt,
    Section,
    as_dtype,
)
from zeromesh.config.train import HuggingFace, Lora, ModelShape, RunSettings, TextData
from zeromesh.config.unused import (
    Autotuning,
    Comet,
    CommsLogger,
    Compile,
    DataEfficiency,
    ExpertParallel,
    HybridEngine,
    Timers,
    WeightQuantization,
)
from zeromesh.config.zero import ZeroOptimization
from zeromesh.model.placement import ROWS, PlacementRow, Tier

if TYPE_CHECKING:
    from zeromesh.model.precision import LossScale, Precision

log = logging.getLogger("zeromesh")

TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}
"""DeepSpeed's names of tiers."""

BLOCK = 4096
"""Bytes of which requests of direct I/O are multiples, on all file systems."""


class Settings(Section):
    """Every key at its value. What depends on the number of ranks is still open; ``resolve`` closes it."""

    train_batch_size: BatchInt | None = Field(
        None,
        description="Samples per update, over all ranks. Null: train_micro_batch_size_per_gpu x "
        "gradient_accumulation_steps x data-parallel ranks.",
    )
    train_micro_batch_size_per_gpu: BatchInt | None = Field(
        None, description="Samples per rank and micro-batch. Null: from the other two sizes, else 1."
    )
    gradient_accumulation_steps: BatchInt | None = Field(
        None, description="Micro-batches per update. Null: from the other two sizes, else 1."
    )
    optimizer: Optimizer | None = Field(None, description="The optimizer. Null: the one passed to initialize.")
    scheduler: Scheduler | None = Field(None, description="The schedule. Null: the one passed to initialize, or none.")
    gradient_clipping: CountFloat = Field(
        0.0,
        description="Largest global norm of the gradients; 0 means no clipping "
        "(DeepSpeed's default is 1.0 since version 0.19, and was 0 before).",
    )
    prescale_gradients: bool = Field(
        False, description="Divide gradients by the number of data-parallel ranks before they are reduced."
    )
    gradient_predivide_factor: PositiveFloat | None = Field(
        None,
        description="Divide gradients by this before they are reduced, and by the rest of the mean after. Null: by the "
        "number of data-parallel ranks where that is exact, else 1 (DeepSpeed's default is 1).",
    )
    gradient_allreduce_op: Literal["mean", "sum"] = Field("mean", description="What gradients are reduced to.")
    chunked_loss: bool = Field(
        False,
        description="Losses of a head over the vocabulary are computed a part of the tokens at a time, without all of "
        "the logits. Where mesh.tensor splits the head they always are.",
    )
    communication_data_type: Dtype | None = Field(
        None, description="Dtype of gradients on the wire. Null: the dtype of the parameters."
    )
    data_types: DataTypes = Field(DataTypes(), description="Dtypes that differ from those of the model.")
    fp16: Fp16 = Field(Fp16(), description="fp16 parameters with an fp32 master and a loss scale.")
    bf16: Bf16 = Field(Bf16(), description="bf16 parameters with an fp32 master. Also called bfloat16.")
    torch_autocast: TorchAutocast = Field(TorchAutocast(), description="The forward under torch.autocast.")
    zero_optimization: ZeroOptimization = Field(
        ZeroOptimization(),
        description="Which states are sharded, and where they rest. True and false stand for stages 1 and 0.",
    )
    mesh: MeshSizes = Field(MeshSizes(), description="Sizes of the mesh of ranks; their product is the world size.")
    communication: Communication = Field(Communication(), description="How the links between nodes are used.")
    slots: SlotSettings = Field(SlotSettings(), description="Budgets of full-size working buffers, in units.")
    units: Names = Field(
        (),
        description="Class names, or glob patterns of module names, whose parameters travel together. "
        "Empty: found automatically.",
    )
    activation_checkpointing: ActivationCheckpointing = Field(
        ActivationCheckpointing(), description="Recompute activations in the backward instead of keeping them."
    )
    host_memory_limit: PositiveInt | None = Field(
        None,
        description="Bytes of host memory that all ranks of a node may take together for what rests there. Null: what "
        "is available at the start.",
    )
    seed: CountInt = Field(1234, le=2**63 - 1, description="Seed of initial weights, dropout and the order of samples.")
    steps_per_print: Interval = Field(None, description="Updates between lines of the log. Null or 0: none.")
    wall_clock_breakdown: bool = Field(
        False, description="Log where the time goes, every steps_per_print updates; every 10 where that is not set."
    )
    profile: TraceSettings = Field(TraceSettings(), description="A trace of some updates.")
    replica_check: ReplicaCheck = Field(ReplicaCheck(), description="Comparisons of what several ranks hold copies of.")
    debug: Debug = Field(Debug(), description="Checks that take time, to find out why a program hangs.")
    tensorboard: TensorBoard = Field(TensorBoard(), description="Metrics for TensorBoard.")
    wandb: Wandb = Field(Wandb(), description="Metrics for Weights & Biases.")
    csv_monitor: CsvMonitor = Field(CsvMonitor(), description="Metrics as CSV files.")
    flops_profiler: FlopsProfiler = Field(
        FlopsProfiler(), description="Operations of the model, counted in one update."
    )
    dataloader_drop_last: bool = Field(
        False, description="Drop what is left at the end of a pass over training_data and fills no update."
    )
    zero_allow_untested_optimizer: bool = Field(
        False, description="Allow optimizers that are not known to be right on parts of parameters."
    )
    managed_gradient_accumulation: bool = Field(True, description="The engine counts micro-batches.")
    checkpoint: Checkpoint = Field(Checkpoint(), description="How checkpoints are written and loaded.")
    model: ModelShape | None = Field(None, description="The language model of zeromesh train.")
    huggingface: HuggingFace | None = Field(None, description="A model of transformers for zeromesh train.")
    lora: Lora | None = Field(None, description="Adapters that zeromesh train adds to a model of transformers.")
    data: TextData | None = Field(None, description="The text of zeromesh train.")
    run: RunSettings | None = Field(None, description="Length and output of zeromesh train.")
    pipeline: Pipeline = Field(Pipeline(), description="The model cut into stages.")
    tensor_parallel: TensorParallel = Field(TensorParallel(), description="Layers split over ranks.")
    context_parallel: ContextParallel = Field(ContextParallel(), description="How ranks share one sequence.")
    sequence_parallel_size: PositiveInt = Field(
        1, description="Ranks that share one sequence, as mesh.context; 1 means that."
    )
    expert_parallel: ExpertParallel | None = Field(None, description="Experts spread over ranks.")
    use_data_before_expert_parallelism: bool = Field(False, description="Order of the data and expert axes.")
    seq_parallel_communication_data_type: Dtype = Field(
        "fp32", description="Dtype of gradients on the wire between ranks that share a sequence."
    )
    sparse_gradients: bool = Field(False, description="Reduce gradients of embeddings as rows.")
    zero_force_ds_cpu_optimizer: bool = Field(True, description="Insist on DeepSpeed's own optimizer on the host.")
    disable_allgather: bool = Field(False, description="Broadcast updated parameters instead of gathering them.")
    allgather_size: CountInt = Field(500_000_000, description="Old form of allgather_bucket_size.")
    dump_state: bool = Field(False, description="Print the engine's state.")
    disable_python_gc: bool = Field(False, description="Switch Python's garbage collector off.")
    memory_breakdown: bool = Field(False, description="Print the memory in use.")
    log_level: str | None = Field(None, description="Level of the log.")
    timers: Timers = Field(Timers(), description="Timers of the engine.")
    comet: Comet = Field(Comet(), description="Metrics for Comet.")
    comms_logger: CommsLogger = Field(CommsLogger(), description="A log of collectives.")
    aio: Aio | None = Field(None, description="Asynchronous file access for NVMe.")
    compile: Compile = Field(Compile(), description="Compiler passes on the whole graph.")
    data_efficiency: DataEfficiency = Field(DataEfficiency(), description="Samples and tokens by difficulty.")
    autotuning: Autotuning = Field(Autotuning(), description="A search for the fastest settings.")
    hybrid_engine: HybridEngine = Field(HybridEngine(), description="Generation between training steps.")
    weight_quantization: WeightQuantization | None = Field(None, description="Weights as numbers of few bits.")
    datastates_ckpt: Any = Field(None, description="A second writer of checkpoints.")

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | Settings, overrides: Sequence[str] = ()) -> Settings:
        """The settings from a JSON file, a dict, or other settings.

        Keys that have no effect are reported once, at INFO, to the logger "zeromesh".

        Args:
            source: path of a JSON file in DeepSpeed's format, a dict of the same form, or settings.
            overrides: ``dotted.path=value``, the value as JSON; what is not JSON is a string.

        Raises:
            ConfigError: everything that is wrong, in one error.
        """
        if isinstance(source, Settings):
            if not overrides:
                return source
            source = source.model_dump(exclude_unset=True)
        if not isinstance(source, str | Path | Mapping):
            raise ConfigError([f"must be the path of a JSON file, or a dict, not {type(source).__name__}"])
        document = read_document(source, overrides)
        name = str(source) if isinstance(source, str | Path) else "the configuration"
        settings = _validate(document, name)
        idle = without_effect(document)
        if idle:
            lines = "".join(f"\n  {path}: {reason}" for path, reason in idle.items())
            log.info("these keys of the configuration have no effect:%s", lines)
        return settings

    def resolve_mesh(self, world_size: int) -> dict[str, int]:
        """The size of every axis of the mesh; their product is ``world_size``.

        ``mesh.data = -1`` becomes what is left. DeepSpeed's ``mics_shard_size`` (Zhang et al., "MiCS", 2022) and
        ``zero_hpz_partition_size`` (Wang et al., "ZeRO++", 2023) set the size of a shard group, and the groups
        replicate each other.

        Raises:
            ConfigError: the sizes do not fit the number of ranks.
        """
        return solve_mesh(self.mesh.model_dump() | self.model_sizes, self._shard_group, world_size)

    @property
    def model_sizes(self) -> dict[str, int]:
        """Return the size of each axis that shares a model, from our keys and DeepSpeed's together.

        Raises:
            ConfigError: they say different sizes.
        """
        theirs = self.tensor_parallel
        tensor = {
            "mesh.tensor": self.mesh.tensor,
            "tensor_parallel.autotp_size": max(1, theirs.autotp_size),
            "tensor_parallel.tensor_parallel.tp_size": theirs.tensor_parallel.tp_size,
        }
        context = {"mesh.context": self.mesh.context, "sequence_parallel_size": self.sequence_parallel_size}
        pipeline = {"mesh.pipeline": self.mesh.pipeline, "pipeline.stages": self.pipeline.stages or 1}
        return {"tensor": _only(tensor), "context": _only(context), "pipeline": _only(pipeline)}

    @property
    def says_batch(self) -> bool:
        """True if any of the three sizes of batches is given."""
        sizes = self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        return any(size is not None for size in sizes)

    @property
    def across_nodes(self) -> tuple[str | None, str | None]:
        """Formats of parameters and gradients on links between nodes; see ``communication``.

        DeepSpeed's ``zero_quantized_weights`` and ``zero_quantized_gradients`` (Wang et al., "ZeRO++", 2023) stand for
        8 bits.
        """
        zero, ours = self.zero_optimization, self.communication
        gather = "8bit" if zero.zero_quantized_weights else ours.across_nodes_gather
        return gather, "8bit" if zero.zero_quantized_gradients else ours.across_nodes_reduce

    def resolve(self, data_size: int, sizes: Mapping[str, int] | None = None, elastic: bool = False) -> Resolved:
        """The settings with the batch sizes worked out for ``data_size`` data-parallel ranks.

        Args:
            data_size: ranks that feed different samples.
            sizes: the mesh as it is, to be recorded; by default it stays as configured.
            elastic: keep ``train_batch_size`` whatever the number of ranks is; see ``solve_batch``.

        Raises:
            ConfigError: ``train = micro x accumulation x data_size`` does not hold or has no whole solution.
        """
        given = (self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps)
        batch = solve_batch(*given, data_size, elastic)
        values = self.model_dump(exclude_unset=True) | {
            "train_batch_size": batch.train,
            "train_micro_batch_size_per_gpu": batch.micro,
            "gradient_accumulation_steps": batch.accumulation,
        }
        if sizes is not None:
            values["mesh"] = dict(sizes)
        return Resolved.model_validate(values)

    @property
    def row(self) -> PlacementRow:
        """Placement of each state. Hybrid sharding is a matter of the mesh."""
        zero = self.zero_optimization
        return replace(
            ROWS[zero.stage],
            parameter_tier=TIERS[zero.parameter_device],
            gradient_tier=Tier.DEVICE if zero.optimizer_device == "none" else Tier.HOST,
            optimizer_tier=TIERS[zero.optimizer_device],
            offloaded=zero.offload_ratio,
            pinned=zero.pins,
            split=zero.row_options.split_master,
        )

    @property
    def precision(self) -> Precision:
        """The dtypes of the run."""
        from zeromesh.model.precision import Precision

        compute = "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else None
        autocast = self.torch_autocast.dtype if self.torch_autocast.enabled else None
        return Precision(
            compute=as_dtype(compute),
            communicate=as_dtype(self.communication_data_type),
            accumulate=as_dtype(self.data_types.grad_accum_dtype),
            buffers=as_dtype(self.data_types.buffer_dtype),
            autocast=as_dtype(autocast),
            cast_inputs=self.fp16.auto_cast if self.fp16.enabled else self.bf16.auto_cast,
            loss_scale=self._loss_scale if "fp16" in (compute, autocast) else None,
        )

    @property
    def _loss_scale(self) -> LossScale:
        from zeromesh.model.precision import LossScale

        return LossScale(
            static=self.fp16.loss_scale or None,
            initial_power=self.fp16.initial_scale_power,
            window=self.fp16.loss_scale_window,
            hysteresis=self.fp16.hysteresis,
            consecutive_hysteresis=self.fp16.consecutive_hysteresis,
            minimum=self.fp16.min_loss_scale,
        )

    @property
    def _shard_group(self) -> tuple[str, int] | None:
        """DeepSpeed's key for the size of a shard group, and its value, where one is set."""
        zero = self.zero_optimization
        if zero.mics_shard_size > 0:
            return "zero_optimization.mics_shard_size", zero.mics_shard_size
        if zero.zero_hpz_partition_size > 1:
            return "zero_optimization.zero_hpz_partition_size", zero.zero_hpz_partition_size
        return None

    def to_json(self) -> str:
        """Every value in JSON, in a fixed order, as ``load`` reads it.

        Keys without effect are in it only where they were set.
        """
        return json.dumps(self._plain(), indent=2)

    def _plain(self) -> dict[str, Any]:
        return without_idle(jsonable(self.model_dump()), jsonable(self.model_dump(exclude_unset=True)))

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        problems = [
            *_precision_problems(self),
            *_shard_group_problems(self),
            *_offload_problems(self),
            *_link_problems(self),
            *_model_problems(self),
        ]
        if problems:
            raise ConfigError(problems)
        return self


class Resolved(Settings):
    """Settings in which nothing depends on the number of ranks any more."""

    train_batch_size: BatchInt
    train_micro_batch_size_per_gpu: BatchInt
    gradient_accumulation_steps: BatchInt

    @property
    def data_size(self) -> int:
        """Data-parallel ranks."""
        return self.train_batch_size // (self.train_micro_batch_size_per_gpu * self.gradient_accumulation_steps)

    @property
    def gradient_predivide(self) -> float | None:
        """Divisor of gradients before they are reduced; None to choose. The update does the rest of the mean."""
        return float(self.data_size) if self.prescale_gradients else self.gradient_predivide_factor


@cache
def entries() -> dict[str, Entry]:
    """Every key of the settings by its dotted path."""
    return catalogue(Settings)


def _validate(document: dict[str, Any], source: str) -> Settings:
    problems: list[str] = []
    settings = None
    try:
        settings = Settings.model_validate(without_gone(document))
    except ValidationError as error:
        problems = explain(error, entries())
    problems = [*problems, *gone_problems(document), *not_yet_problems(document, problems)]
    if problems or settings is None:
        raise ConfigError(problems, source)
    return settings


def _precision_problems(settings: Settings) -> list[str]:
    switches = {name: getattr(settings, name).enabled for name in ("fp16", "bf16", "torch_autocast")}
    on = [f"{name}.enabled" for name, enabled in switches.items() if enabled]
    if len(on) < 2:
        return []
    return [f"{' and '.join(on)} are true, but only one of them can be; set the others to false"]


def _model_problems(settings: Settings) -> list[str]:
    if settings.model is not None and settings.huggingface is not None:
        return ["model and huggingface both describe the model to train; keep one of them"]
    if settings.lora is not None and settings.huggingface is None:
        return ["lora needs a model of transformers; name its folder with huggingface.path"]
    return []


def _link_problems(settings: Settings) -> list[str]:
    zero, ours = settings.zero_optimization, settings.communication
    pairs = {
        "zero_quantized_weights": (zero.zero_quantized_weights, "across_nodes_gather", ours.across_nodes_gather),
        "zero_quantized_gradients": (zero.zero_quantized_gradients, "across_nodes_reduce", ours.across_nodes_reduce),
    }
    problems = [
        f'zero_optimization.{old} says 8 bits and communication.{new} is "{value}"; keep one of them'
        for old, (on, new, value) in pairs.items()
        if on and value not in (None, "8bit")
    ]
    gather, reduce = settings.across_nodes
    if (gather or reduce) and ours.hierarchical is False:
        problems.append(
            "communication.hierarchical is false, but only what goes from node to node by itself is written in fewer "
            "bits; leave it out, or leave parameters and gradients as they are"
        )
    kept = settings.fp16.enabled or settings.bf16.enabled
    if gather and zero.stage < 3 and not (zero.stage > 0 and kept):
        problems.append(
            f"parameters are to be gathered in {gather.replace('bit', ' bits')}, but at stage {zero.stage} "
            + ("none are gathered" if zero.stage == 0 else "without bf16 or fp16 they have no other copy that is exact")
            + "; set zero_optimization.stage to 3"
            + (", or bf16.enabled" if zero.stage else "")
        )
    return problems


def _shard_group_problems(settings: Settings) -> list[str]:
    zero = settings.zero_optimization
    if zero.mics_shard_size > 0 and zero.zero_hpz_partition_size > 1:
        return ["zero_optimization.mics_shard_size and zero_hpz_partition_size say the same thing; keep one of them"]
    return []


def _offload_problems(settings: Settings) -> list[str]:
    zero = settings.zero_optimization
    problems = [
        f"zero_optimization.{new}.device is {device!r}, but the older {old} is {value}; keep one of them"
        for new, old, section, value in (
            ("offload_optimizer", "cpu_offload", zero.offload_optimizer, zero.cpu_offload),
            ("offload_param", "cpu_offload_param", zero.offload_param, zero.cpu_offload_param),
        )
        if section is not None and value is not None and value != ((device := section.device) != "none")
    ]
    for key, device, least, stages in (
        ("offload_optimizer", zero.optimizer_device, 1, "1, 2 or 3"),
        ("offload_param", zero.parameter_device, 3, "3"),
    ):
        if device != "none" and zero.stage < least:
            problems.append(
                f"zero_optimization.{key}.device is {device}, and what rests there is sharded, but not at stage "
                f"{zero.stage}; set zero_optimization.stage to {stages}, also on one rank"
            )
    problems += [
        f"zero_optimization.{key}.device is nvme, but nvme_path is missing; set it to a folder on that device, with "
        "room for what rests there"
        for key, section in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param))
        if section is not None and section.device == "nvme" and not section.nvme_path
    ]
    chosen = zero.row_options
    if chosen.split_master and zero.early_share:
        problems.append(
            f"zero_optimization.offload_optimizer.split_master is true, and a share of {zero.early_share:g} is to be "
            "updated during the backward, which takes second copies of states in full; set update_during_backward to 0 "
            "and super_offload to false, or leave it out"
        )
    if chosen.split_master and (zero.parameter_device == "none" or not settings.bf16.enabled):
        problems.append(
            "zero_optimization.offload_optimizer.split_master is true, but one half of a master is its parameter in "
            "bf16, where that is offloaded, too; set bf16.enabled and offload_param.device, or leave split_master out"
        )
    if settings.aio is not None and settings.aio.block_size % BLOCK:
        problems.append(
            f"aio.block_size is {settings.aio.block_size}, but requests of direct I/O are of whole blocks; set it to a "
            f"multiple of {BLOCK}"
        )
    return problems


def _only(given: Mapping[str, int]) -> int:
    """The one size above 1 that several keys give, or 1."""
    sizes = {key: size for key, size in given.items() if size > 1}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{key} = {size}" for key, size in sizes.items())
        raise ConfigError([f"{listed}; they mean the same, keep one of them"])
    return max(given.values())
