"""The settings of a run: read from DeepSpeed's JSON, checked at every depth, and frozen."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError, model_validator

from zeromesh.base.placement import ROWS, PlacementRow, Tier
from zeromesh.config import feature_sections as parts
from zeromesh.config import precision_sections as precisions
from zeromesh.config.activation_sections import ActivationCheckpointing
from zeromesh.config.batch_sizes import solve_batch, solve_mesh
from zeromesh.config.catalogue import Entry, catalogue, explain
from zeromesh.config.curriculum_section import Curriculum
from zeromesh.config.document import read_document
from zeromesh.config.errors import ConfigError
from zeromesh.config.printing import jsonable
from zeromesh.config.refusals import REFUSALS, Refusal, problems
from zeromesh.config.section import (
    BatchInt,
    CountFloat,
    CountInt,
    Dtype,
    Interval,
    Names,
    PositiveFloat,
    PositiveInt,
    ReduceOp,
    Section,
    StateDtype,
    as_dtype,
    key,
)
from zeromesh.config.special_keys import (
    APPLICATIONS,
    NOT_YET,
    UNREAD,
    WITHOUT_EFFECT,
    efficiency_problems,
    gone_problems,
    not_yet_problems,
    without,
    without_effect,
)
from zeromesh.config.zero_section import ZeroOptimization

if TYPE_CHECKING:
    from zeromesh.base.precision import LossScale, Precision

log = logging.getLogger("zeromesh")

TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST} | {tier.value: tier for tier in Tier if tier.in_blocks}


class Settings(Section):
    """Settings with every key at its value; ``resolve`` works out what depends on the number of ranks."""

    train_batch_size: BatchInt | None = key(
        None,
        "Samples per update, over all ranks. Null: train_micro_batch_size_per_gpu x gradient_accumulation_steps x "
        "number of data-parallel ranks.",
    )
    train_micro_batch_size_per_gpu: BatchInt | None = key(
        None, "Samples per rank and micro-batch. Null: follows from the other sizes, or 1."
    )
    gradient_accumulation_steps: BatchInt | None = key(
        None, "Micro-batches per update. Null: follows from the other sizes, or 1."
    )
    optimizer: parts.Optimizer | None = key(
        None, "The optimizer that ZeroMesh builds. Null: the one passed to initialize."
    )
    scheduler: parts.Scheduler | None = key(
        None, "The learning-rate schedule. Null: the one passed to initialize, or none."
    )
    gradient_clipping: CountFloat = key(
        0.0, "Clip gradients to this global norm. 0: no clipping (DeepSpeed clips at 1.0 since 0.19)."
    )
    prescale_gradients: bool = key(
        False, "Divide gradients by the number of data-parallel ranks before they are reduced."
    )
    gradient_predivide_factor: PositiveFloat | None = key(
        None,
        "Divide gradients by this number before they are reduced, and by the remaining factor of the mean afterwards. "
        "Null: the number of data-parallel ranks if that is exact, otherwise 1 (DeepSpeed's default is 1).",
    )
    gradient_allreduce_op: ReduceOp = key(
        "mean", "Average the gradients of the data-parallel ranks (mean), or add them (sum)."
    )
    managed_gradient_accumulation: bool = key(
        True,
        "Count micro-batches, and update at the accumulation boundary. False: every step() updates, with the sum of "
        "the gradients since the last one. The loss is divided by gradient_accumulation_steps all the same.",
    )
    curriculum_learning: Curriculum = Curriculum()
    chunked_loss: bool = key(
        False,
        "Compute the cross entropy of a language model in chunks of tokens, which saves the memory of the logits. "
        "Always done if mesh.tensor splits the head.",
    )
    communication_data_type: Dtype | None = key(
        None, "Dtype in which gradients are sent. Null: the dtype of the parameters."
    )
    data_types: precisions.DataTypes = precisions.DataTypes()
    optimizer_state_dtype: StateDtype | dict[str, StateDtype] | None = key(
        None,
        "Dtype of the optimizer's states beside fp32 master weights: of all, or by name, such as exp_avg. bf16 halves "
        "their memory, with stochastic rounding. Null: fp32.",
    )
    fp16: precisions.Fp16 = precisions.Fp16()
    bf16: precisions.Bf16 = key(precisions.Bf16(), "Train in bf16 with fp32 master weights.")
    torch_autocast: precisions.TorchAutocast = key(
        precisions.TorchAutocast(), "Run the forward under torch.autocast. Parameters keep their dtype."
    )
    float8: precisions.Float8 = precisions.Float8()
    compile: parts.Compile = key(
        parts.Compile(),
        "Compile the forward of each unit (a block of the model) with torch.compile. true means enabled, false "
        "and null not.",
    )
    zero_optimization: ZeroOptimization = key(
        ZeroOptimization(),
        "States that are sharded, and the memory that holds them. true means stage 1, false stage 0.",
    )
    mesh: parts.MeshSizes = parts.MeshSizes()
    communication: parts.Communication = parts.Communication()
    slots: parts.SlotSettings = parts.SlotSettings()
    embedding_tables: parts.EmbeddingTables = parts.EmbeddingTables()
    experts: parts.ExpertSettings = parts.ExpertSettings()
    units: Names = key(
        (),
        "Class names or glob patterns of module names: modules that are gathered as a whole. Empty: found "
        "automatically.",
    )
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    tiling: parts.Tiling = parts.Tiling()
    host_memory_limit: PositiveInt | None = key(
        None,
        "Largest host memory for offloaded states, in bytes, for all ranks of a node. Null: the memory that is free at "
        "the start.",
    )
    seed: CountInt = key(1234, "Seed for initial weights, dropout and the order of samples.", le=2**63 - 1)
    steps_per_print: Interval = key(None, "Updates between two lines in the log. Null or 0: no lines.")
    wall_clock_breakdown: bool = key(False, "Log the time by phase, every steps_per_print updates (default: 10).")
    profile: parts.TraceSettings = parts.TraceSettings()
    replica_check: parts.ReplicaCheck = parts.ReplicaCheck()
    spikes: parts.Spikes = parts.Spikes()
    debug: parts.Debug = parts.Debug()
    tensorboard: parts.TensorBoard = parts.TensorBoard()
    wandb: parts.Wandb = parts.Wandb()
    csv_monitor: parts.CsvMonitor = parts.CsvMonitor()
    flops_profiler: parts.FlopsProfiler = parts.FlopsProfiler()
    dataloader_drop_last: bool = key(False, "Drop the last samples of an epoch if they are too few for an update.")
    zero_allow_untested_optimizer: bool = key(
        False, "Allow optimizers of other classes on shards of parameters; a trial refuses those that are wrong there."
    )
    checkpoint: parts.Checkpoint = parts.Checkpoint()
    pipeline: parts.Pipeline = parts.Pipeline()
    tensor_parallel: parts.TensorParallel = parts.TensorParallel()
    context_parallel: parts.ContextParallel = parts.ContextParallel()
    sequence_parallel_size: PositiveInt = key(1, "The same as mesh.context. 1: mesh.context decides.")
    aio: parts.Aio | None = None

    @classmethod
    def load(
        cls, source: str | Path | Mapping[str, Any] | Settings, overrides: Sequence[str] = (), *, tells: bool = True
    ) -> Self:
        """Return the settings from a file, a dict, or other settings; report keys without effect to the log.

        Sections that only an application reads, such as ``run``, are left to it.

        Args:
            source: path of a JSON or YAML file in DeepSpeed's format, a dict of the same form, or settings.
            overrides: ``dotted.path=value``, the value as JSON; what is not JSON is a string.
            tells: False leaves the report to another reader of the same configuration.

        Raises:
            ConfigError: everything that is wrong, in one error.
        """
        if isinstance(source, Settings):
            if not overrides and isinstance(source, cls):
                return source
            # Only what was set, or defaults would count as given by the user.
            source = source.model_dump(exclude_unset=True)
        if not isinstance(source, str | Path | Mapping):
            raise ConfigError([f"must be the path of a JSON or YAML file, or a dict, not {type(source).__name__}"])
        document = read_document(source, overrides)
        name = str(source) if isinstance(source, str | Path) else "the configuration"
        settings = cls._validated(document, name)
        idle = without_effect(document)
        if idle and tells:
            lines = "".join(f"\n  {path}: {reason}" for path, reason in idle.items())
            log.info("these keys of the configuration have no effect:%s", lines)
        return settings

    @classmethod
    def reread(cls, document: Mapping[str, Any]) -> Self:
        """Return the settings that a run wrote, maybe with an earlier version; raise ValueError if no run did.

        Keys that have gone since are left out: they must not keep the run from going on. ``load`` would refuse them,
        and would report keys without effect once more.
        """
        return cls.model_validate(cls._without_unread(document))

    @classmethod
    def _without_unread(cls, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return a document without the keys that are accepted and not in these settings."""
        return without(document, UNREAD | ({*APPLICATIONS} - {*cls.model_fields}))

    @classmethod
    def _validated(cls, document: dict[str, Any], source: str) -> Self:
        messages: list[str] = []
        settings = None
        try:
            settings = cls.model_validate(cls._without_unread(document))
        except ValidationError as error:
            messages = explain(error, entries(cls))
        # All problems come in one error, so that a file is mended once.
        messages = [*messages, *gone_problems(document), *efficiency_problems(document)]
        messages += not_yet_problems(document, messages)
        if messages or settings is None:
            raise ConfigError(messages, source)
        return settings

    def resolve_mesh(self, world_size: int) -> dict[str, int]:
        """Return the size of every axis of the mesh: their product is ``world_size``, and -1 stands for what is left.

        Raises:
            ConfigError: the sizes do not fit the number of ranks.
        """
        return solve_mesh(self.mesh.model_dump() | self.model_sizes, self._shard_group, world_size)

    @property
    def model_sizes(self) -> dict[str, int]:
        """Return the size of each axis that shares a model; raise ConfigError if our key and DeepSpeed's differ."""
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
        """Formats of parameters and gradients on links between nodes; see ``communication``."""
        zero, ours = self.zero_optimization, self.communication
        # DeepSpeed's two switches stand for 8 bits (Wang et al., "ZeRO++", 2023).
        gather = "8bit" if zero.zero_quantized_weights else ours.across_nodes_gather
        return gather, "8bit" if zero.zero_quantized_gradients else ours.across_nodes_reduce

    @property
    def gathered_bits(self) -> str | None:
        """Number of bits in which parameters are sent between nodes; None for those of their dtype."""
        gather, _ = self.across_nodes
        return gather and gather.removesuffix("bit")

    def resolve(self, data_size: int, sizes: Mapping[str, int] | None = None, elastic: bool = False) -> Resolved:
        """Return the settings with the batch sizes worked out for ``data_size`` data-parallel ranks.

        Args:
            data_size: ranks that feed different samples.
            sizes: the mesh as it is, to be recorded; by default it stays as configured.
            elastic: keep ``train_batch_size`` whatever the number of ranks is; see ``solve_batch``.

        Raises:
            ConfigError: ``train = micro x accumulation x data_size`` does not hold or has no whole solution.
        """
        return Resolved.model_validate(self._resolved_values(data_size, sizes, elastic))

    def _resolved_values(self, data_size: int, sizes: Mapping[str, int] | None, elastic: bool) -> dict[str, Any]:
        """Return the values of the settings for ``resolve``."""
        batch_sizes = (self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps)
        batch = solve_batch(*batch_sizes, data_size, elastic)
        # Only what was set: a default that is passed on would count as written by the user, and would be printed.
        values = self.model_dump(exclude_unset=True) | {
            "train_batch_size": batch.train,
            "train_micro_batch_size_per_gpu": batch.micro,
            "gradient_accumulation_steps": batch.accumulation,
        }
        if sizes is not None:
            values["mesh"] = dict(sizes)  # so that a file of the run has the mesh as it was
        return values

    @property
    def times_whole_run(self) -> bool:
        """True if times by phase are kept from the first update to the last, whatever is logged."""
        return False

    @property
    def rows_per_sample(self) -> int:
        """Rows that the model is given for each sample."""
        return 1

    @property
    def row(self) -> PlacementRow:
        """Placement of each state. The mesh, not the row, says in how large groups they are sharded."""
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
    def key_on_disk(self) -> str | None:
        """The first key by which states rest in files; None if they do not."""
        zero = self.zero_optimization
        devices = {
            "zero_optimization.offload_optimizer": zero.optimizer_device,
            "zero_optimization.offload_param": zero.parameter_device,
            "embedding_tables": self.embedding_tables.device,
        }
        keys = {f"{name}.device": device for name, device in devices.items()} | {"experts.rest": self.experts.rest}
        return next((name for name, device in keys.items() if device == "nvme"), None)

    @property
    def precision(self) -> Precision:
        """The dtypes of the run."""
        # Imported late, as in as_dtype.
        from zeromesh.base.precision import Precision

        # The rules between sections refuse the first two together.
        compute = "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else None
        autocast = self.torch_autocast.dtype if self.torch_autocast.enabled else None
        return Precision(
            compute=as_dtype(compute),
            communicate=as_dtype(self.communication_data_type),
            accumulate=as_dtype(self.data_types.grad_accum_dtype),
            buffers=as_dtype(self.data_types.buffer_dtype),
            keep_fp32=self.data_types.keep_in_fp32_modules,
            autocast=as_dtype(autocast),
            narrow_masters=self.bf16.enabled and self.bf16.bf16_master_weights_and_grads,
            cast_inputs=self.fp16.auto_cast if self.fp16.enabled else self.bf16.auto_cast,
            loss_scale=self._loss_scale if "fp16" in (compute, autocast) else None,
        )

    @property
    def state_dtypes(self) -> tuple[Mapping[str, str], str]:
        """Dtypes of the optimizer's states that are named, and of all others: ``fp32`` or ``bf16``."""
        chosen = self.optimizer_state_dtype
        # DeepSpeed's key, beside which names stand for exceptions.
        wide = self.optimizer is None or self.optimizer.params.get("fp32_optimizer_states", True) is not False
        rest = "fp32" if wide else "bf16"
        return (chosen, rest) if isinstance(chosen, dict) else ({}, chosen or rest)

    @property
    def has_narrow_states(self) -> bool:
        """True if some state of the optimizer is to be bf16 beside an fp32 master."""
        named, rest = self.state_dtypes
        return "bf16" in (rest, *named.values())

    @property
    def _loss_scale(self) -> LossScale:
        from zeromesh.base.precision import LossScale

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
        # Both set it, and the groups replicate each other: Zhang et al., "MiCS", 2022; Wang et al., "ZeRO++", 2023.
        if zero.mics_shard_size > 0:
            return "zero_optimization.mics_shard_size", zero.mics_shard_size
        if zero.zero_hpz_partition_size > 1:
            return "zero_optimization.zero_hpz_partition_size", zero.zero_hpz_partition_size
        return None

    def to_json(self) -> str:
        """Return every value in JSON, in a fixed order, as ``load`` reads it."""
        return json.dumps(jsonable(self.model_dump()), indent=2)

    @classmethod
    def refusals(cls) -> Sequence[Refusal[Self]]:
        """Return the combinations of these settings that are refused."""
        return REFUSALS

    @model_validator(mode="after")
    def _combinations_are_accepted(self) -> Self:
        messages = problems(self, self.refusals())
        if messages:
            raise ConfigError(messages)
        return self


class Resolved(Settings):
    """Settings in which nothing depends on the number of ranks any more."""

    # Required here, and so never None.
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
def entries(model: type[Settings] = Settings) -> dict[str, Entry]:
    """Return every key by its dotted path, with those that are not in the settings at the end."""
    keys_by_path = catalogue(model)
    for path in [*APPLICATIONS, *WITHOUT_EFFECT, *NOT_YET]:
        inside = any(other.startswith(f"{path}.") for other in NOT_YET)
        keys_by_path.setdefault(path, Entry(path, "anything", None, False, "", inside))
    return keys_by_path


def _only(written_sizes: Mapping[str, int]) -> int:
    """Return the one size above 1 that several keys give, or 1."""
    sizes = {key: size for key, size in written_sizes.items() if size > 1}  # 1 is every key's default
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{key} = {size}" for key, size in sizes.items())
        raise ConfigError([f"{listed}; they mean the same, keep one of them"])
    return max(written_sizes.values())
