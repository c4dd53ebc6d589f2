"""The model that is compared: the user's own, or a smaller one of its architecture with the same proportions."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeromesh.apps.plan.cost.cost_trace import CHOSEN
from zeromesh.apps.plan.cost.source import class_of, inputs_by_size
from zeromesh.base.requirements import user_function
from zeromesh.checkpoint.weights.hub_models import model_folder
from zeromesh.checkpoint.weights.pretrained import configuration
from zeromesh.config.settings import Settings
from zeromesh.shard.parameters.materialise import refuse_without_values

HEAD = 16  # width of a head
VOCABULARY = 96
EXPERTS = 4  # of a layer, at least
GROUP = 2  # heads of queries that share one of keys, at most
LENGTH = 16  # tokens of a sample

# By what is counted, names in configurations of transformers, which map most names of their own, as n_embd, to these.
NAMES: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


@dataclass
class Subject:
    """A model to compare with its batch, and what was changed of the user's."""

    model: nn.Module
    batch: Any
    changes: list[str] = field(default_factory=list)
    ids: int = 0  # size of a smaller vocabulary; 0: as it was


def fewest_blocks(settings: Settings, sizes: Mapping[str, int]) -> int:
    """Return the number of blocks that a smaller model has at least: one for each stage, and two."""
    chunks = settings.pipeline.chunks
    return max(2, sizes["pipeline"] * (chunks or 2) if sizes["pipeline"] > 1 else 2)


def subject_of(
    model: nn.Module | str | Path, batch: Any, sizes: Mapping[str, int], blocks: int, whole: bool
) -> Subject:
    """Return what is compared for a model or its name.

    Args:
        model: a module, a folder of transformers or its config.json, or ``package.module:function``.
        batch: one micro-batch; None takes the function's, or makes ids, labels or images for a model of transformers.
        sizes: ranks by axis, which a smaller model has to be divisible by.
        blocks: stages that a smaller model needs blocks for, at least.
        whole: compare the model as it is.

    Raises:
        ValueError: there is no such model, or no batch for it.
    """
    if isinstance(model, nn.Module):
        source = model
    else:
        source, own_batch = _named(str(model))
        batch = own_batch if batch is None else batch
    config = source if not isinstance(source, nn.Module) else getattr(source, "config", None)
    # A class of transformers that makes its model from this configuration alone.
    from_config = hasattr(config, "to_dict") and (
        config is source or getattr(source, "config_class", None) is type(config)
    )
    changes: list[str] = []
    ids = 0
    if from_config and not whole:
        smaller = _smaller(config, sizes, blocks, changes)
        kind = class_of(config) if not isinstance(source, nn.Module) else type(source)
        try:
            source, config = kind(smaller), smaller
            ids = getattr(smaller.get_text_config(), "vocab_size", 0)
        except (ValueError, TypeError, RuntimeError, AssertionError, KeyError, IndexError) as error:
            changes[:] = [f"not made smaller: {type(error).__name__}: {error}".splitlines()[0]]
    if not isinstance(source, nn.Module):
        source = class_of(config)(copy.deepcopy(config))
    if batch is None:
        if not from_config:
            raise ValueError(
                f"there is no batch for {type(source).__name__}; pass one micro-batch, or name a function that returns "
                "the model and a batch"
            )
        batch, ids = default_batch(type(source), config, lcm(2 * sizes["context"], sizes["tensor"])), 0
    refuse_without_values(source)
    return Subject(source, batch, changes, ids)


def _named(name: str) -> tuple[Any, Any]:
    """Return the configuration of a folder, or the model that a function returns; and a batch or None."""
    path = Path(name)
    if path.exists() or ":" not in name:
        folder = path if path.exists() else model_folder(name, weights=False)
        if not folder.exists():
            raise ValueError(
                f"model {name!r} is not a folder, a file or a function; name a folder with a config.json of "
                "transformers, or package.module:function"
            )
        return configuration(folder.parent if folder.is_file() else folder)[0], None
    result = user_function(name)()
    model, batch = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} returned a {type(model).__name__}; return a module, or a module and a micro-batch")
    return model, batch


def default_batch(kind: type[nn.Module], config: Any, multiple: int) -> Any:
    """Return a micro-batch of two samples of the kinds of tensors that a class of transformers takes."""
    length = -(-LENGTH // multiple) * multiple
    generator = torch.Generator().manual_seed(1)
    entries = getattr(config.get_text_config(), "vocab_size", 2)
    tensors = {}
    for name, like in inputs_by_size(kind, config)(2, length).items():
        if like.is_floating_point():
            tensors[name] = torch.randn(like.shape, generator=generator)
        else:
            is_class = kind.__name__.endswith("Classification") and (like.ndim == 1 or name == "labels")
            below = min(entries, int(getattr(config, "num_labels", entries))) if is_class else entries
            tensors[name] = torch.randint(below, like.shape, generator=generator)
    return tensors


def _smaller(config: Any, sizes: Mapping[str, int], blocks: int, changes: list[str]) -> Any:
    """Return a copy of a configuration of transformers with fewer and narrower layers; note the changes."""
    small = copy.deepcopy(config)
    for part in (small, *(getattr(small, name) for name in getattr(small, "sub_configs", {}))):
        if hasattr(part, "to_dict"):
            _shrink(part, sizes, blocks, changes)
    return small


def _shrink(config: Any, sizes: Mapping[str, int], blocks: int, changes: list[str]) -> None:
    def number(*names: str) -> int:
        return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)

    def change(names: Sequence[str], value: int) -> None:
        for name in names:
            if (old := number(name)) > value > 0:
                setattr(config, name, value)
                if (note := f"{name} {old} -> {value}") not in changes:
                    changes.append(note)

    change(NAMES["layers"], blocks)
    layers = number("num_hidden_layers") or blocks
    for name in ("layer_types", "mlp_layer_types", "moe_layer_freq"):
        derived = isinstance(getattr(type(config), name, None), property)
        if not derived and isinstance(kinds := getattr(config, name, None), list):
            setattr(config, name, _shortened(kinds, layers))
    _shrink_experts(config, sizes, layers, number, change)
    unit = max(2, sizes["tensor"] * sizes["context"])
    heads = number(*NAMES["heads"])
    keys = number("num_key_value_heads") or heads
    # As many as the ranks divide if the user's were; others stay, and the engine says what it says of them.
    if heads and heads % keys == 0 and keys % unit == 0:
        heads = unit * min(heads // keys, GROUP)
        change(("num_key_value_heads",), unit)
        change(NAMES["heads"], heads)
    if heads and number(*NAMES["widths"]) > heads * HEAD:
        change(NAMES["widths"], heads * HEAD)
        change(("head_dim", "d_kv"), HEAD)
        change(NAMES["inner widths"], 2 * heads * HEAD)
        # Factors of rotary embeddings: one for each pair of a head's entries.
        rope = getattr(config, "rope_parameters", None) or {}
        for name in ("short_factor", "long_factor"):
            if isinstance(rope.get(name), list):
                rope[name] = rope[name][: int(HEAD * rope.get("partial_rotary_factor", 1.0)) // 2]
    entries = VOCABULARY + number("vocab_size") % sizes["tensor"]
    if number("vocab_size") > entries:
        change(("vocab_size",), entries)
        for name in NAMES["tokens"]:
            if number(name) >= VOCABULARY:
                setattr(config, name, 0)


def _shrink_experts(
    config: Any, sizes: Mapping[str, int], layers: int, number: Callable[..., int], change: Callable[..., None]
) -> None:
    """Leave fewer experts, in as many groups and layers as show what the ranks do with them."""
    ranks, groups = sizes.get("expert", 1), number("n_group")
    # Several on each rank, so that a rank chooses among its own.
    count = max(EXPERTS, 2 * ranks)
    if groups > 1 and number("topk_group"):
        change(("n_group",), 2)
        change(("topk_group",), max(1, 2 * number("topk_group") // groups))
        count *= 2
    if any(number(name) % ranks == 0 for name in NAMES["experts"] if number(name)):
        change(NAMES["experts"], count)
        change(("zero_expert_num",), 2)
        change(CHOSEN, 2)  # weights of one alone may be 1 for any router
    change(NAMES["dense layers"], layers // 2)
    change(NAMES["layers between experts"], max(1, layers))
    dense = getattr(config, "mlp_only_layers", None)
    if isinstance(dense, list):
        setattr(config, "mlp_only_layers", [layer for layer in dense if layer < layers][: layers - 1])  # noqa: B010


def _shortened(kinds: list[Any], length: int) -> list[Any]:
    """Return so many of a list, in their order, and of each kind at least one."""
    firsts = [place for place, kind in enumerate(kinds) if kind not in kinds[:place]]
    others = [place for place in range(len(kinds)) if place not in firsts]
    return [kinds[place] for place in sorted([*firsts, *others][:length])]


def without_dropout(model: nn.Module) -> bool:
    """Set all dropout of a model, rates of its modules and their configurations, to zero; return whether any was."""
    any_set = False
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                is_rate = "drop" in name.lower() or (name == "p" and "drop" in type(module).__name__.lower())
                if is_rate and isinstance(value, float) and value > 0:
                    setattr(owner, name, 0.0)
                    any_set = True
    return any_set
