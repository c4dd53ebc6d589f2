"""Models to be planned for: of transformers by configuration, folder or name, without weights."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeromesh.apps.plan.choose.space import ModelLimits
from zeromesh.apps.plan.cost.cost import CostSource
from zeromesh.apps.plan.cost.cost_trace import InputsOf, TracedCost
from zeromesh.apps.plan.cost.passes import Inputs, TraceOptions
from zeromesh.apps.plan.cost.repeated_blocks import RepeatedCost, shortened
from zeromesh.base.dry.model_inputs import InputSizes, inputs_of
from zeromesh.base.files import LARGEST_TEXT, require_regular
from zeromesh.base.lengths import option, positions
from zeromesh.base.requirements import imported
from zeromesh.checkpoint.weights.hub_models import configured

CONFIG = "config.json"


def hugging_face_cost(
    source: Any,
    options: TraceOptions | None = None,
    *,
    attention: str = "",
    adapt: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> CostSource:
    """Return the cost of a model of transformers, which is made on the meta device when a trace is needed.

    Of a stack of like blocks only a few are traced.

    Args:
        source: a configuration, a folder with a ``config.json``, such a file, or a name on the Hugging Face hub.
        options: dtypes and kernels.
        attention: "sdpa" or "eager"; by default the first where the model has it.
        adapt: adds adapters to the model.

    Raises:
        ValueError: transformers is missing, or does not know the model.
    """
    config = deepcopy(configuration_of(source))
    # Keys and values for generation would be kept through the backward.
    config.use_cache = False
    kind = class_of(config)
    if attention:
        config.update({"_attn_implementation": attention})

    def make(of: Any) -> nn.Module:
        with configured(source), torch.device("meta"):
            model = kind(of)
        return adapt(model)

    name = str(getattr(config, "name_or_path", "") or kind.__name__)
    inputs = inputs_by_size(kind, config)

    def traced(of: Any) -> TracedCost:
        return TracedCost(lambda: make(of), inputs, options, name=name)

    short = shortened(config, make)
    return RepeatedCost(traced(short[0]), traced(config), short[1]) if short else traced(config)


def configuration_of(source: Any) -> Any:
    """Return a configuration of transformers; raise ValueError if it cannot be read."""
    transformers = _transformers()
    if isinstance(source, transformers.PretrainedConfig):
        return source
    path = Path(source)
    local = path.exists()
    try:
        folder = path.parent if path.is_file() else path
        if local:
            require_regular(folder / CONFIG, LARGEST_TEXT)
        # Without the argument it would ask at the terminal whether to run code that lies in the folder.
        with configured(source):
            return transformers.AutoConfig.from_pretrained(
                str(folder if local else source), local_files_only=local, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError) as error:
        text = str(error).strip().splitlines()[0]
        raise ValueError(
            f"no configuration of a model was found for {str(source)!r}: {text}; give a folder with a {CONFIG}, that "
            "file, or the name of a model on the Hugging Face hub"
        ) from error


def limits_of_configuration(config: Any) -> ModelLimits:
    """Return the numbers that a mesh must divide, from a configuration of transformers."""
    heads = int(option(config, "num_attention_heads", "n_head", "num_heads"))
    hidden = int(option(config, "hidden_size", "n_embd", "d_model"))
    width = int(option(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff")) or 4 * hidden
    kinds = [str(name) for name in getattr(config, "architectures", None) or ()]
    # Only what names itself a causal decoder is one; the engine refuses the others.
    causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in kinds)
    kv_heads = int(option(config, "num_key_value_heads")) or heads
    return ModelLimits(heads, kv_heads, width, causal, positions(config) or 0)


def token_inputs(ids: str = "input_ids", labels: str | None = "labels") -> InputsOf:
    """Return a function that makes ids and labels of shape (micro-batch, sequence), under their names."""

    def make(micro_batch: int, sequence: int) -> Inputs:
        shape = (micro_batch, sequence)
        return {name: torch.empty(shape, dtype=torch.long, device="meta") for name in (ids, labels) if name}

    return make


def _transformers() -> Any:
    return imported("transformers", "planning for a model of Hugging Face needs transformers")


def class_of(config: Any) -> type[nn.Module]:
    """Return the class that the configuration names, or the causal or plain one for its type."""
    transformers = _transformers()
    for name in getattr(config, "architectures", None) or ():
        if isinstance(kind := getattr(transformers, str(name), None), type):
            return kind
    for mapping in ("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_MAPPING"):
        try:
            entry = getattr(transformers, mapping)[type(config)]
        except KeyError:
            continue
        kinds: tuple[type[nn.Module], ...] = entry if isinstance(entry, tuple) else (entry,)
        return kinds[0]
    # A text model of one with several parts, whose own configuration is in no table: the one beside it in its package.
    package = type(config).__module__.split(".")[-2]
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    beside = getattr(transformers, names.get(package, ""), None)
    if isinstance(beside, type) and getattr(beside, "config_class", None) is type(config):
        return beside
    raise ValueError(
        f"transformers {transformers.__version__} has no model for a configuration of type {config.model_type!r}; pass "
        "the module itself"
    )


def inputs_by_size(kind: type[nn.Module], config: Any) -> InputsOf:
    """Return a function that makes the inputs of a class."""

    def make(micro_batch: int, sequence: int) -> Inputs:
        sizes = InputSizes(micro_batch, sequence, image=224, frames=2 * (sequence // 2), sound=sequence)
        return inputs_of(kind, config, sizes)

    return make
