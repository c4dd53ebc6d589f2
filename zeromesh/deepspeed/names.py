"""Table of the drop-in: the modules below ``deepspeed``, their public names, and the home of each name.

A row of ``HOMES`` is a module; it maps homes to names. ``name=other`` is a name whose object is called ``other`` at
home. Modules are made from the table when they are imported (``finder.py``); homes are imported when a name is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from zeromesh.config import keys

OWN = "zeromesh.deepspeed"
ALIAS = "deepspeed"

_GROUP = f"{OWN}.group"
_START = f"{OWN}.start"
_ENGINE = f"{OWN}.engine"
_PARAMETERS = f"{OWN}.parameters"
_ZERO = "zeromesh.zero"
_PIPE = "zeromesh.pipe"
_RECOMPUTE = "zeromesh.activation.checkpoint"

HOMES: dict[str, dict[str, str]] = {
    "": {
        OWN + ".finder": "install",
        _START: "initialize add_config_arguments",
        _GROUP: "init_distributed",
        _ENGINE: "DeepSpeedEngine PipelineEngine",
        _PARAMETERS: "DeepSpeedOptimizer",
        _PIPE: "PipelineModule",
        "zeromesh.config.errors": "DeepSpeedConfigError=ConfigError",
    },
    "comm": {_GROUP: "init_distributed"},
    "ops": {},
    "ops.adam": {},
    "pipe": {_PIPE: "PipelineModule LayerSpec TiedLayerSpec"},
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": {_RECOMPUTE: "checkpoint"},
    "runtime.base_optimizer": {_PARAMETERS: "DeepSpeedOptimizer ZeROOptimizer=DeepSpeedOptimizer"},
    "runtime.config": {"zeromesh.config.errors": "DeepSpeedConfigError=ConfigError"},
    "runtime.engine": {_ENGINE: "DeepSpeedEngine"},
    "runtime.pipe": {_PIPE: "PipelineModule LayerSpec TiedLayerSpec"},
    "runtime.pipe.engine": {_ENGINE: "PipelineEngine"},
    "runtime.pipe.module": {_PIPE: "PipelineModule LayerSpec TiedLayerSpec"},
    "runtime.zero": {
        _PARAMETERS: "Init=ZeroInit ZeroParamStatus register_external_parameter unregister_external_parameter "
        "unwrap_model_for_generation",
        _ZERO: "GatheredParameters TiledLinear",
    },
    "runtime.zero.partition_parameters": {
        _PARAMETERS: "Init=ZeroInit ZeroParamStatus register_external_parameter unregister_external_parameter",
        _ZERO: "GatheredParameters",
    },
    "runtime.zero.stage3": {
        _PARAMETERS: "unwrap_model_for_generation",
        _ZERO: "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold "
        "estimate_zero3_model_states_mem_needs_all_live",
    },
    "runtime.zero.stage_1_and_2": {
        _ZERO: "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold "
        "estimate_zero2_model_states_mem_needs_all_live",
    },
    "runtime.zero.tiling": {_ZERO: "TiledLinear"},
    "runtime.zero.utils": {_PARAMETERS: "is_zero_param"},
    "utils": {
        _ZERO: "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
        "safe_set_full_grad safe_set_full_optimizer_state",
    },
}

SAME = {
    "checkpointing": "runtime.activation_checkpointing.checkpointing",
    "comm.comm": "comm",
    "dist": "comm",
    "zero": "runtime.zero",
}
"""Modules that are another one of the table."""

REST = {"comm": "torch.distributed"}
"""Where a module finds the names that its row lacks."""

REFUSED = {
    "autotuning": "use `zeromesh plan`, which finds the best layout before anything runs (docs/choosing.md)",
    "compression": "prune or quantise the model with torchao before training; zeromesh leaves weights as they are",
    "inference": "use an engine for inference, such as vLLM, on what engine.save_16bit_model() writes",
    "init_inference": "use an engine for inference, such as vLLM, on what engine.save_16bit_model() writes",
    "InferenceEngine": "use an engine for inference, such as vLLM, on what engine.save_16bit_model() writes",
    "DeepSpeedHybridEngine": "generate with engine.generate() or zero.unwrap_model_for_generation(engine)",
    "module_inject": f"set {keys.TENSOR_RANKS} in the configuration, which splits layers (docs/tensor.md)",
    "replace_transformer_layer": "use the model's own layers, under torch.compile if they should be fused",
    "DeepSpeedTransformerLayer": "use torch.nn.TransformerEncoderLayer, or the model's own layers",
    "DeepSpeedTransformerConfig": "use torch.nn.TransformerEncoderLayer, or the model's own layers",
    "ops.transformer": "use torch.nn.functional.scaled_dot_product_attention and torch.compile",
    "ops.sparse_attention": "use torch.nn.attention.flex_attention with a block mask",
    "ops.op_builder": "nothing is compiled at run time; kernels come with the package",
    "runtime.hybrid_engine": "generate with engine.generate() or zero.unwrap_model_for_generation(engine)",
}
"""Names and modules that cannot be honoured, and what to use instead."""


def modules() -> frozenset[str]:
    """Return the dotted names of all modules below ``deepspeed``; the package itself is ``""``."""
    named = {*HOMES, *SAME}
    # A package may have no names of its own.
    return frozenset(named | {part for name in named for part in _parents(name)})


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def names(module: str) -> dict[str, tuple[str, str]]:
    """Return the public names of a module, each with its home and its name there."""
    rows = HOMES.get(SAME.get(module, module), {})
    pairs = ((home, word.partition("=")) for home, words in rows.items() for word in words.split())
    return {name: (home, other or name) for home, (name, _, other) in pairs}


def remedy(dotted: str) -> str | None:
    """Return what to use instead of a name that is refused, or is in a module that is; None for others."""
    return next((REFUSED[part] for part in (dotted, *_parents(dotted)) if part in REFUSED), None)


def explain(dotted: str) -> str:
    """Return the message about a name below ``deepspeed`` that there is not."""
    instead = remedy(dotted)
    return (
        f"zeromesh, which stands in for deepspeed, has no {ALIAS}.{dotted}: {instead}"
        if instead is not None
        else f"zeromesh, which stands in for deepspeed, has no {ALIAS}.{dotted}; docs/deepspeed.md lists what it has"
    )


def resolve(module: str, name: str) -> Any:
    """Return an attribute of a module of the table; raise AttributeError if it has none of this name."""
    found, dotted = names(module), f"{module}.{name}".lstrip(".")
    if name in found:
        home, other = found[name]
        return getattr(import_module(home), other)
    if dotted in modules():
        return import_module(f"{OWN}.{dotted}")
    if name == "__all__":
        return sorted(found)
    if name.startswith("__"):
        raise AttributeError(f"module {OWN}.{module} has no attribute {name}")
    if module in REST:
        return getattr(import_module(REST[module]), name)
    raise AttributeError(explain(dotted))
