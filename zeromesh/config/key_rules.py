"""Rules between keys of different sections; each yields a sentence per problem: the keys, the rule and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zeromesh.config.bf16 import Bf16
from zeromesh.config.feature_sections import Communication, Float8
from zeromesh.config.zero_section import ZeroOptimization


def problems(
    zero: ZeroOptimization, links: Communication, formats: tuple[str | None, str | None], switches: Mapping[str, bool]
) -> list[str]:
    """Return a sentence for each broken rule; ``formats`` are those of parameters and gradients between nodes."""
    has_masters = switches["fp16"] or switches["bf16"]
    return [
        *_precision(switches),
        *_shard_group(zero),
        *_offload(zero),
        *_split_master(zero, switches["bf16"]),
        *_links(zero, links, formats, has_masters),
    ]


def gather_problems(zero: ZeroOptimization, chosen: Float8, across: str | None, tensor: int) -> Iterator[str]:
    """Yield a sentence for each rule that ``float8.gather`` breaks; ``across``: format of parameters between nodes."""
    on = "float8.gather is true"
    if not chosen.enabled:
        yield f"{on}, but float8.enabled is not; set both, or none"
    if zero.stage < 3:
        yield f"{on}, but at stage {zero.stage} no weights are gathered for a forward; set zero_optimization.stage to 3"
    if chosen.recipe != "tensorwise":
        yield f"{on}, and a weight travels with one scale; set float8.recipe to tensorwise"
    if (zero.parameter_device, zero.optimizer_device) != ("none", "none"):
        yield f"{on}, but weights that rest off the device are not sent in float8; leave it out, or do not offload"
    if across:
        yield f"{on}, and between nodes parameters are to be sent in {across}; keep one of them"
    if tensor > 1:
        yield f"{on}, but tensor-parallel ranks share the scale of a weight; leave it out, or set mesh.tensor to 1"


def low_precision_problems(bf16: Bf16, zero: ZeroOptimization) -> Iterator[str]:
    """Yield a sentence for each rule about bf16 parameters that are updated without fp32 masters."""
    if bf16.bf16_master_weights_and_grads != bf16.bf16_optimizer_states:
        yield (
            "only one of bf16.bf16_master_weights_and_grads and bf16_optimizer_states is true, but states have the "
            "dtype of what is updated; set both, or none"
        )
    if bf16.bf16_master_weights_and_grads and zero.row_options.split_master:
        yield (
            "zero_optimization.offload_optimizer.split_master keeps fp32 masters in halves, and "
            "bf16.bf16_master_weights_and_grads keeps none; leave one of them out"
        )


def _precision(switches: Mapping[str, bool]) -> Iterator[str]:
    on = [f"{name}.enabled" for name in ("fp16", "bf16") if switches[name]]
    if len(on) > 1:
        yield f"{' and '.join(on)} are true, but only one of them can be; set the others to false"


def _shard_group(zero: ZeroOptimization) -> Iterator[str]:
    if zero.mics_shard_size > 0 and zero.zero_hpz_partition_size > 1:
        yield "zero_optimization.mics_shard_size and zero_hpz_partition_size say the same thing; keep one of them"


def _offload(zero: ZeroOptimization) -> Iterator[str]:
    # The older keys know "cpu" only, and stand for it where there is no section.
    for name, old, device, least, stages in (
        ("offload_optimizer", "cpu_offload", zero.optimizer_device, 1, "1, 2 or 3"),
        ("offload_param", "cpu_offload_param", zero.parameter_device, 3, "3"),
    ):
        key, section, older = f"zero_optimization.{name}.device", getattr(zero, name), getattr(zero, old)
        if section is not None and older is not None and older != (device != "none"):
            yield f"{key} is {device!r}, but the older {old} is {older}; keep one of them"
        if device != "none" and zero.stage < least:
            yield (
                f"{key} is {device}, and what rests there is sharded, but not at stage {zero.stage}; set "
                f"zero_optimization.stage to {stages}, also on one rank"
            )
        if device == "nvme" and not section.nvme_path:
            yield (
                f"{key} is nvme, but nvme_path is missing; set it to a folder on that device, with room for what rests "
                "there"
            )


def _split_master(zero: ZeroOptimization, bf16: bool) -> Iterator[str]:
    key = "zero_optimization.offload_optimizer.split_master"
    # A row without offloaded states has the defaults, so the key does nothing there.
    if not zero.row_options.split_master:
        return
    if zero.early_share:
        yield (
            f"{key} is true, and a share of {zero.early_share:g} is to be updated during the backward, which takes "
            "second copies of states in full; set update_during_backward to 0 and super_offload to false, or leave it "
            "out"
        )
    if zero.parameter_device == "none" or not bf16:
        yield (
            f"{key} is true, but one half of a master is its parameter in bf16, where that is offloaded, too; set "
            "bf16.enabled and offload_param.device, or leave split_master out"
        )


def _links(
    zero: ZeroOptimization, links: Communication, formats: tuple[str | None, str | None], has_masters: bool
) -> Iterator[str]:
    for old, on, new, value in (
        ("zero_quantized_weights", zero.zero_quantized_weights, "across_nodes_gather", links.across_nodes_gather),
        ("zero_quantized_gradients", zero.zero_quantized_gradients, "across_nodes_reduce", links.across_nodes_reduce),
    ):
        if on and value not in (None, "8bit"):
            yield f'zero_optimization.{old} says 8 bits and communication.{new} is "{value}"; keep one of them'
    gather, reduce = formats
    # A flat collective crosses nodes in the middle of its rounds, where the values are not ours to convert.
    if (gather or reduce) and links.hierarchical is False:
        yield (
            "communication.hierarchical is false, but only what goes from node to node by itself is written in fewer "
            "bits; leave it out, or leave parameters and gradients as they are"
        )
    # Parameters that come back in fewer bits must not become the values that are updated.
    if gather and zero.stage < 3 and not (zero.stage > 0 and has_masters):
        yield (
            f"parameters are to be gathered in {gather.replace('bit', ' bits')}, but at stage {zero.stage} "
            + ("none are gathered" if zero.stage == 0 else "without bf16 or fp16 they have no other copy that is exact")
            + "; set zero_optimization.stage to 3"
            + (", or bf16.enabled" if zero.stage else "")
        )
