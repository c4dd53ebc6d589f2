"""Section ``zero_optimization``: DeepSpeed's names for where the states of a unit rest."""

from __future__ import annotations

from typing import Literal

from zeromesh.config.section import CountInt, Fraction, Int, Section, key

Device = Literal["none", "cpu", "nvme"]


class OffloadOptimizer(Section):
    """Memory of the optimizer states and the fp32 master weights."""

    device: Device = key(
        "none", "Memory of the optimizer states. cpu, nvme: gradients go to the host too, and the host updates."
    )
    nvme_path: str | None = key(None, "Folder on the NVMe device. Each rank creates a file there.")
    buffer_count: CountInt = key(
        4, "Windows of units of an NVMe offload in host memory at a time. 1: reads, update and writes do not overlap."
    )
    pin_memory: bool = key(True, "Use page-locked host memory.")
    ratio: Fraction = key(
        1.0,
        "Share of the optimizer states to offload, in whole units. The units whose gradients come last stay on the "
        "device; with several micro-batches, units that are spread over the model.",
    )
    update_during_backward: Fraction | None = key(
        None,
        "Share of the offloaded states, in whole units, that the host updates during the backward. This needs a second "
        "copy of them. Null: 1 on an accelerator, and for states on NVMe whose parameters are not, if half of the host "
        "memory stays free and the disk has room; otherwise 0.",
    )
    split_master: bool = key(
        False,
        "Store 2 bytes instead of 4 for each offloaded fp32 master weight: its lower half. The upper half is the bf16 "
        "parameter, which must be offloaded too. Exact, except that parameters round ties away from zero.",
    )
    super_offload: bool = key(False, "The same as update_during_backward = 1.")


class OffloadParam(Section):
    """Memory of the sharded parameters."""

    device: Device = key("none", "Memory of the sharded parameters.")
    nvme_path: str | None = key(
        None, "Folder on the NVMe device. Each rank creates a file there. May be the folder of offload_optimizer."
    )
    buffer_count: CountInt = key(
        5, "Units of an NVMe offload in host memory at a time, read ahead or being written. 1: no reading ahead."
    )
    pin_memory: bool = key(True, "Use page-locked host memory.")


class ZeroOptimization(Section):
    """States that are sharded over the data-parallel ranks, and the memory that holds them."""

    stage: CountInt = key(
        0, "Sharded states. 0: none. 1: optimizer states. 2: also gradients. 3: also parameters.", le=3
    )
    mics_shard_size: Int = key(
        -1,
        "Ranks per shard group (MiCS); groups hold replicas. -1, 0: all ranks are one group. The same as mesh.data.",
        ge=-1,
    )
    zero_hpz_partition_size: CountInt = key(
        1,
        "Ranks per shard group (hpZ); groups hold replicas. 0, 1: all ranks are one group. All three states are "
        "sharded inside a group.",
    )
    # None, where the older keys below say what is offloaded, if anything does.
    offload_optimizer: OffloadOptimizer | None = None
    offload_param: OffloadParam | None = None
    cpu_offload: bool | None = key(None, "Old form of offload_optimizer.device = cpu.")
    cpu_offload_param: bool | None = key(None, "Old form of offload_param.device = cpu.")
    cpu_offload_use_pin_memory: bool | None = key(None, "Old form of pin_memory in the offload sections.")
    zero_quantized_weights: bool = key(False, "Send gathered parameters in 8 bits between nodes.")
    zero_quantized_gradients: bool = key(False, "Send gradients in 8 bits between nodes (DeepSpeed: 4 bits).")

    @property
    def offload_ratio(self) -> float:
        """Share of the optimizer's state that is offloaded, where any is."""
        return self.row_options.ratio

    @property
    def early_share(self) -> float | None:
        """Share of the offloaded state that is updated during the backward; None: it depends on the free memory."""
        section = self.offload_optimizer
        if section is None:
            return None
        # DeepSpeed's SuperOffload updates everything so; a share that is given takes precedence.
        share = section.update_during_backward
        return 1.0 if share is None and section.super_offload else share

    @property
    def row_options(self) -> OffloadOptimizer:
        """Options of the offloaded optimizer states; the defaults where nothing is offloaded."""
        section = self.offload_optimizer
        # A section whose device is none may have options that would contradict the row.
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
