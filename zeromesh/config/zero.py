"""The ``zero_optimization`` section: DeepSpeed's names for where the states of a unit rest."""

from __future__ import annotations

import sys
from typing import Literal

from zeromesh.config.section import CountInt, Fraction, Int, Names, PositiveFloat, PositiveInt, Section, key

Device = Literal["none", "cpu", "nvme"]


class OffloadOptimizer(Section):
    """The memory tier of the optimizer's state."""

    device: Device = key(
        "none", "Tier of the optimizer's state. cpu, nvme: the host has the gradients, too, and updates."
    )
    nvme_path: str | None = key(None, "Folder on the NVMe device, in which each rank has a file.")
    buffer_count: CountInt = key(
        4, "Units in host memory at a time: one is updated while others are read and written. 1: one after the other."
    )
    pin_memory: bool = key(True, "Use page-locked host memory.")
    pipeline_read: bool = key(False, "Read the next tile while the current one is updated.")
    pipeline_write: bool = key(False, "Write the last tile while the current one is updated.")
    fast_init: bool = key(False, "Faster first write to NVMe.")
    ratio: Fraction = key(
        1.0,
        "Share of the optimizer's state that is offloaded, in whole units. Units whose gradients come last stay on "
        "the device.",
    )
    update_during_backward: Fraction | None = key(
        None,
        "Share of the offloaded state, in whole units, that the host updates during the backward, where gradients "
        "come first. It needs a second copy on the host or in the file. Null: all on an accelerator if half of the "
        "host's memory stays free, else none.",
    )
    split_master: bool = key(
        False,
        "Keep only the lower half of offloaded fp32 masters, 2 bytes instead of 4; the upper half is the bf16 "
        "parameter, which must be offloaded, too. Exact, except that parameters round ties away from zero.",
    )
    super_offload: bool = key(False, "As update_during_backward = 1.")
    cpuadam_cores_perc: Fraction = key(0.8, "Share of the cores that update on the host.")


class OffloadParam(Section):
    """The memory tier of sharded parameters."""

    device: Device = key("none", "Memory of the sharded parameters.")
    nvme_path: str | None = key(None, "Folder on the NVMe device, with a file per rank; it may be the optimizer's.")
    buffer_count: CountInt = key(
        5,
        "Units whose parameters are in host memory at a time, read ahead or on the way back. 1: nothing is read ahead.",
    )
    buffer_size: CountInt = key(100_000_000, "Size of one such buffer, in elements.")
    max_in_cpu: CountInt = key(1_000_000_000, "Elements that stay in host memory.")
    pin_memory: bool = key(True, "Use page-locked host memory.")


class LeafModule(Section):
    """Modules whose parameters are fetched together."""

    classes: Names = key((), "Class names, with their package.")
    names: Names = key((), "Names of modules in the model.")
    name_suffixes: Names = key((), "Ends of names of modules.")


class ZenFlow(Section):
    """Updates of the important gradients first."""

    topk_ratio: PositiveFloat = key(0.1, "Share of gradient columns updated at once.", lt=1)
    select_strategy: Literal["step", "epoch"] | None = key(None, "When columns are selected anew.")
    select_interval: PositiveInt | None = key(None, "Steps or epochs between selections.")
    update_interval: PositiveInt | None = key(None, "Steps between updates of the other columns.")
    overlap_step: bool = key(False, "Update on the host during forward and backward.")
    offload: bool = key(False, "Keep the selected optimizer state on the host.")
    auto_ratio: Fraction = key(0.99, "Threshold by which the update interval is chosen.")
    full_warm_up_rounds: CountInt = key(0, "First rounds in which all columns are updated.")
    pt_reserved_cores_perc: Fraction = key(0.5, "Share of the cores left to PyTorch.")
    steps_per_epoch: PositiveInt | None = key(None, "Steps in one epoch.")


class ZeroOptimization(Section):
    """The states that are sharded over the data-parallel ranks, and their memory tiers."""

    stage: CountInt = key(0, "Sharded states: 0 none, 1 optimizer state, 2 also gradients, 3 also parameters.", le=3)
    mics_shard_size: Int = key(
        -1,
        "Ranks in one shard group (MiCS); the groups replicate each other. -1, 0: all ranks are one group. Same as "
        "mesh.data.",
        ge=-1,
    )
    mics_hierarchical_params_gather: bool = key(False, "Gather in two steps, inside nodes first.")
    zero_hpz_partition_size: CountInt = key(
        1,
        "Ranks in one shard group (hpZ); the groups replicate each other. 0, 1: all ranks are one group. All three "
        "states are sharded inside the group.",
    )
    offload_optimizer: OffloadOptimizer | None = None
    offload_param: OffloadParam | None = None
    cpu_offload: bool | None = key(None, "Old form of offload_optimizer.device = cpu.")
    cpu_offload_param: bool | None = key(None, "Old form of offload_param.device = cpu.")
    cpu_offload_use_pin_memory: bool | None = key(None, "Old form of pin_memory in the offload sections.")
    zero_quantized_weights: bool = key(False, "Gather parameters as 8-bit numbers between nodes.")
    zero_quantized_nontrainable_weights: bool = key(False, "Keep frozen parameters as 8-bit numbers.")
    zero_quantized_gradients: bool = key(False, "Reduce gradients as 8-bit numbers between nodes (DeepSpeed: 4-bit).")
    zenflow: ZenFlow | None = key(None, "Update important gradients first, the others on the host.")
    overlap_comm: bool | None = key(None, "Overlap the reduction of gradients with the backward.")
    contiguous_gradients: bool = key(True, "Copy gradients into one buffer as they are produced.")
    reduce_scatter: bool = key(True, "Reduce-scatter gradients instead of an all-reduce.")
    reduce_bucket_size: PositiveInt = key(500_000_000, "Elements reduced at a time.")
    use_multi_rank_bucket_allreduce: bool = key(True, "Join the buckets of several ranks.")
    allgather_partitions: bool = key(True, "All-gather the updated parameters, not broadcast.")
    allgather_bucket_size: CountInt = key(500_000_000, "Elements gathered at a time.")
    compute_grad_norm: bool = key(True, "Compute the global norm of the gradients.")
    load_from_fp32_weights: bool = key(True, "Initialise the master from fp32 weights.")
    elastic_checkpoint: bool = key(False, "Write checkpoints that other rank counts can load.")
    sub_group_size: CountInt = key(1_000_000_000, "Elements updated at a time.")
    stage3_prefetch_bucket_size: CountInt = key(50_000_000, "Elements gathered ahead of their use.")
    stage3_param_persistence_threshold: CountInt = key(100_000, "Parameters with fewer elements are not sharded.")
    stage3_model_persistence_threshold: CountInt = key(sys.maxsize, "Most elements that are left unsharded.")
    stage3_max_live_parameters: CountInt = key(1_000_000_000, "Most elements gathered at a time.")
    stage3_max_reuse_distance: CountInt = key(1_000_000_000, "Keep what is used again within so many elements.")
    stage3_gather_16bit_weights_on_model_save: bool = key(False, "Gather weights in save_16bit_model.")
    stage3_module_granularity_threshold: Int = key(0, "Fetch finer modules as one.")
    stage3_use_all_reduce_for_fetch_params: bool = key(False, "Gather with an all-reduce.")
    stage3_allgather_sequential: bool = key(False, "Gather parameters one by one.")
    ignore_unused_parameters: bool = key(True, "Allow parameters without a gradient.")
    legacy_stage1: bool = key(False, "Use the old code of stage 1.")
    round_robin_gradients: bool = key(False, "Spread the copying of gradients to the host over ranks.")
    parameter_alignment: bool = key(False, "Align every parameter in the flat buffers.")
    memory_efficient_linear: bool = key(True, "Replace torch.nn.functional.linear.")
    pipeline_loading_checkpoint: bool = key(False, "Load checkpoints rank after rank.")
    override_module_apply: bool = key(True, "Replace torch.nn.Module.apply while a model is built.")
    log_trace_cache_warnings: bool = key(False, "Warn when the order of modules changes.")
    enable_sanity_checks: bool = key(False, "Check the engine's state while it runs.")
    save_muon_momentum_buffer_in_memory: bool = key(False, "Keep Muon's momentum off NVMe.")
    leaf_module: LeafModule | None = key(None, "Modules that are fetched as a whole.")

    @property
    def offload_ratio(self) -> float:
        """Share of the optimizer's state that is offloaded, where any is."""
        return 1.0 if self.offload_optimizer is None else self.offload_optimizer.ratio

    @property
    def early_share(self) -> float | None:
        """Share of the offloaded state that is updated during the backward; None: it depends on the free memory."""
        section = self.offload_optimizer
        if section is None:
            return None
        given = section.update_during_backward
        return 1.0 if given is None and section.super_offload else given

    @property
    def row_options(self) -> OffloadOptimizer:
        """Options of the offloaded optimizer states; the defaults where nothing is offloaded."""
        section = self.offload_optimizer
        return OffloadOptimizer() if section is None or section.device == "none" else section

    @property
    def pins(self) -> bool:
        """True if host memory is page-locked."""
        sections = [section for section in (self.offload_optimizer, self.offload_param) if section is not None]
        return all(section.pin_memory for section in sections) and self.cpu_offload_use_pin_memory is not False

    @property
    def optimizer_device(self) -> Device:
        """Tier of the optimizer's state, by the present keys or the older ones."""
        if self.offload_optimizer is not None:
            return self.offload_optimizer.device
        return "cpu" if self.cpu_offload else "none"

    @property
    def parameter_device(self) -> Device:
        """Tier of the parameters, by the present keys or the older ones."""
        if self.offload_param is not None:
            return self.offload_param.device
        return "cpu" if self.cpu_offload_param else "none"
