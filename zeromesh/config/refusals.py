"""Combinations of settings that are refused: a row for each says when, and which keys, rule and remedy to name.

``Settings`` reads the rows whenever settings are made, so that ``initialize`` refuses them, and the planner's search
leaves out layouts whose configuration they refuse. What depends on the model is refused where the model is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

AnySettings = TypeVar("AnySettings")

# Whether settings are refused, and the text, in which {s.seed} stands for a value of the settings.
Refusal = tuple[Callable[[AnySettings], object], str]


def problems(settings: AnySettings, rows: Sequence[Refusal[AnySettings]]) -> list[str]:
    """Return the text of each row that refuses the settings."""
    return [text.format(s=settings) for when, text in rows if when(settings)]


def _offload_refusals(section: str, device: str, old: str, least: int, stages: str) -> list[Refusal[Any]]:
    """Return the rows of a section for offload, which needs a stage of at least ``least``.

    ``device`` names its tier by either key, and ``old`` is the older key, which knows "cpu" only.
    """
    key, tier = f"zero_optimization.{section}.device", f"{{s.zero_optimization.{device}}}"
    read = {name: attrgetter(f"zero_optimization.{name}") for name in (section, device, old)}
    return [
        (
            lambda s: read[section](s) and read[old](s) not in (None, read[device](s) != "none"),
            f"{key} is '{tier}', but the older {old} is {{s.zero_optimization.{old}}}; keep one of them",
        ),
        (
            lambda s: read[device](s) != "none" and s.zero_optimization.stage < least,
            f"{key} is {tier}, and what rests there is sharded, but not at stage {{s.zero_optimization.stage}}; set "
            f"zero_optimization.stage to {stages}, also on one rank",
        ),
        (
            lambda s: read[device](s) == "nvme" and not read[section](s).nvme_path,
            f"{key} is nvme, but nvme_path is missing; set it to a folder on that device, with room for what rests "
            "there",
        ),
    ]


def _link_refusal(old: str, new: str) -> Refusal[Any]:
    """Return the row of a switch of DeepSpeed's for 8 bits, beside our key for the format."""
    return (
        lambda s: getattr(s.zero_optimization, old) and getattr(s.communication, new) not in (None, "8bit"),
        f'zero_optimization.{old} says 8 bits and communication.{new} is "{{s.communication.{new}}}"; keep one of them',
    )


REFUSALS: list[Refusal[Any]] = [
    (
        lambda s: s.experts.auxiliary_loss == "global" and (s.mesh.pipeline or 1) > 1,
        'experts.auxiliary_loss is "global" and mesh.pipeline is {s.mesh.pipeline}, but a stage has the router logits '
        "of its own layers only; balance with experts.bias_update_rate or experts.z_loss, or set mesh.pipeline to 1",
    ),
    (
        lambda s: s.tiling.modules and s.tiling.mlp is None,
        "tiling.modules names modules, and tiling.mlp does not say how many tokens a tile has; set tiling.mlp to a "
        'number or "width", or leave tiling.modules out',
    ),
    (
        lambda s: s.tiling.mlp is not None and s.tensor_parallel.sequence,
        "tiling.mlp is {s.tiling.mlp} and tensor_parallel.sequence is true, where blocks are given parts of sequences "
        "that cannot be cut again; set tensor_parallel.sequence to false, or tiling.mlp to null",
    ),
    (
        lambda s: s.tiling.mlp is not None and s.compile.enabled,
        "tiling.mlp is {s.tiling.mlp} and compile.enabled is true, but tiles are cut outside of what is compiled; set "
        "compile.enabled to false, or tiling.mlp to null",
    ),
    (
        lambda s: s.activation_checkpointing.budget_gb is not None and not s.activation_checkpointing.planned,
        "activation_checkpointing.budget_gb is {s.activation_checkpointing.budget_gb:g}, and only a plan keeps to a "
        'budget; set activation_checkpointing.granularity to "auto" and enabled to true, or leave budget_gb out',
    ),
    *[
        (
            lambda s, read=attrgetter(key): s.activation_checkpointing.planned and read(s),
            f'activation_checkpointing.granularity is "auto", and {what}; leave {key} out, or set granularity to '
            '"full" or "selective"',
        )
        for key, what in {
            "activation_checkpointing.targets": "the planner plans for the blocks that it finds itself",
            "activation_checkpointing.cpu_checkpointing": "the planner chooses itself what is moved to the host",
            "activation_checkpointing.partition_activations": "the planner does not divide inputs among ranks",
            "pipeline.recompute": "the planner chooses itself what stages compute again",
        }.items()
    ],
    (
        lambda s: s.activation_checkpointing.planned and not isinstance(s.pipeline.schedule, str),
        'activation_checkpointing.granularity is "auto", and the planner counts the micro-batches of named schedules; '
        'pipeline.schedule is a file: name one there, or set granularity to "full" or "selective"',
    ),
    (
        lambda s: s.fp16.enabled and s.bf16.enabled,
        "fp16.enabled and bf16.enabled are true, but only one of them can be; set the others to false",
    ),
    (
        lambda s: s.zero_optimization.mics_shard_size > 0 and s.zero_optimization.zero_hpz_partition_size > 1,
        "zero_optimization.mics_shard_size and zero_hpz_partition_size say the same thing; keep one of them",
    ),
    *_offload_refusals("offload_optimizer", "optimizer_device", "cpu_offload", 1, "1, 2 or 3"),
    *_offload_refusals("offload_param", "parameter_device", "cpu_offload_param", 3, "3"),
    # A row without offloaded states has the defaults, so split_master does nothing there.
    (
        lambda s: s.zero_optimization.row_options.split_master and s.zero_optimization.early_share,
        "zero_optimization.offload_optimizer.split_master is true, and a share of "
        "{s.zero_optimization.early_share:g} is to be updated during the backward, which takes second copies of states "
        "in full; set update_during_backward to 0 and super_offload to false, or leave it out",
    ),
    (
        lambda s: (
            s.zero_optimization.row_options.split_master
            and (s.zero_optimization.parameter_device == "none" or not s.bf16.enabled)
        ),
        "zero_optimization.offload_optimizer.split_master is true, but one half of a master is its parameter in bf16, "
        "where that is offloaded, too; set bf16.enabled and offload_param.device, or leave split_master out",
    ),
    _link_refusal("zero_quantized_weights", "across_nodes_gather"),
    _link_refusal("zero_quantized_gradients", "across_nodes_reduce"),
    # A flat collective crosses nodes in the middle of its rounds, where the values are not ours to convert.
    (
        lambda s: any(s.across_nodes) and s.communication.hierarchical is False,
        "communication.hierarchical is false, but only what goes from node to node by itself is written in fewer "
        "bits; leave it out, or leave parameters and gradients as they are",
    ),
    # Parameters that come back in fewer bits must not become the values that are updated.
    (
        lambda s: s.across_nodes[0] and s.zero_optimization.stage == 0,
        "parameters are to be gathered in {s.gathered_bits} bits, but at stage 0 none are gathered; set "
        "zero_optimization.stage to 3",
    ),
    (
        lambda s: s.across_nodes[0] and s.zero_optimization.stage in (1, 2) and not (s.fp16.enabled or s.bf16.enabled),
        "parameters are to be gathered in {s.gathered_bits} bits, but at stage {s.zero_optimization.stage} without "
        "bf16 or fp16 they have no other copy that is exact; set zero_optimization.stage to 3, or bf16.enabled",
    ),
    (
        lambda s: s.bf16.bf16_master_weights_and_grads != s.bf16.bf16_optimizer_states,
        "only one of bf16.bf16_master_weights_and_grads and bf16_optimizer_states is true, but states have the "
        "dtype of what is updated; set both, or none",
    ),
    (
        lambda s: s.bf16.bf16_master_weights_and_grads and s.has_narrow_states,
        "optimizer_state_dtype (or fp32_optimizer_states = false) rounds states stochastically beside fp32 masters, "
        "and bf16.bf16_master_weights_and_grads keeps none; leave one of them out",
    ),
    (
        lambda s: s.bf16.bf16_master_weights_and_grads and s.zero_optimization.row_options.split_master,
        "zero_optimization.offload_optimizer.split_master keeps fp32 masters in halves, and "
        "bf16.bf16_master_weights_and_grads keeps none; leave one of them out",
    ),
    (
        lambda s: (
            s.float8.enabled and (s.fp16.enabled or (s.torch_autocast.enabled and s.torch_autocast.dtype == "fp16"))
        ),
        "float8.enabled is true, and products in float8 give bf16 or fp32, not fp16; set bf16.enabled",
    ),
    (
        lambda s: s.compile.mode is not None and s.compile.backend != "inductor",
        "compile.mode is {s.compile.mode!r}, which only inductor has, but compile.backend is "
        "{s.compile.backend!r}; leave one of them out",
    ),
    (
        lambda s: s.float8.gather and not s.float8.enabled,
        "float8.gather is true, but float8.enabled is not; set both, or none",
    ),
    (
        lambda s: s.float8.gather and s.zero_optimization.stage < 3,
        "float8.gather is true, but at stage {s.zero_optimization.stage} no weights are gathered for a forward; set "
        "zero_optimization.stage to 3",
    ),
    (
        lambda s: s.float8.gather and s.float8.recipe != "tensorwise",
        "float8.gather is true, and a weight travels with one scale; set float8.recipe to tensorwise",
    ),
    (
        lambda s: (
            s.float8.gather
            and (s.zero_optimization.parameter_device, s.zero_optimization.optimizer_device) != ("none", "none")
        ),
        "float8.gather is true, but weights that rest off the device are not sent in float8; leave it out, or do not "
        "offload",
    ),
    (
        lambda s: s.float8.gather and s.across_nodes[0],
        "float8.gather is true, and between nodes parameters are to be sent in {s.across_nodes[0]}; keep one of them",
    ),
    (
        lambda s: s.float8.gather and s.model_sizes["tensor"] > 1,
        "float8.gather is true, but tensor-parallel ranks share the scale of a weight; leave it out, or set "
        "mesh.tensor to 1",
    ),
    (
        lambda s: s.float8.gather and s.torch_autocast.enabled,
        "float8.gather is true, but under autocast weights are rounded to another dtype first; leave it out, or set "
        "bf16.enabled in the place of torch_autocast",
    ),
    (
        lambda s: s.embedding_tables.device == "nvme" and s.embedding_tables.nvme_path is None,
        "embedding_tables.device is nvme; name a folder with embedding_tables.nvme_path",
    ),
    (
        lambda s: s.experts.rest == "nvme" and s.experts.nvme_path is None,
        "experts.rest is nvme; name a folder with experts.nvme_path",
    ),
    (
        lambda s: s.experts.rest != "none" and any(size > 1 for size in (*s.model_sizes.values(), s.mesh.expert or 1)),
        "experts.rest is {s.experts.rest}, and the experts that rest are spread over the data-parallel ranks; leave "
        "mesh.expert, mesh.tensor, mesh.pipeline and mesh.context at 1, or experts.rest out",
    ),
    (
        lambda s: s.experts.rest != "none" and s.compile.enabled,
        "experts.rest is {s.experts.rest}, and experts that rest are not compiled; leave compile.enabled out",
    ),
    (
        lambda s: s.checkpoint.peer_copies and s.key_on_disk,
        "checkpoint.peer_copies copies the state to memory, but {s.key_on_disk} is nvme, for states that do "
        "not fit there; set checkpoint.peer_copies to 0, or the device to cpu",
    ),
    (
        lambda s: s.curriculum_learning.enabled and s.model_sizes["pipeline"] > 1,
        "curriculum_learning cuts samples, and stages exchange activations of one size; set mesh.pipeline to 1",
    ),
]
