"""Shapes of transformers by name, by size, or by a list of sizes, where no model is at hand."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

from zeromesh.apps.plan.choose.space import ModelLimits
from zeromesh.apps.plan.cost.named_models import catalogue, find_model
from zeromesh.apps.plan.cost.shape import TransformerShape
from zeromesh.apps.train.train_settings import ModelShape
from zeromesh.base.words import nearest

LLAMA = TransformerShape(1, 64, 1, 32000, gated=True, biases=False, tied=False, name="llama")
GPT = TransformerShape(1, 64, 1, 50257, positions=1024, dropout=False, name="gpt")
BERT = TransformerShape(1, 64, 1, 30522, positions=512, dropout=True, name="bert")
FAMILIES = {"gpt": GPT, "llama": LLAMA, "bert": BERT}

MODELS = {name: shape for name, model in catalogue().items() if (shape := model.shape()) is not None}
"""Shapes of the catalogue's plain transformers by name."""

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([mbt])", re.IGNORECASE)
_SCALES = {"m": 1e6, "b": 1e9, "t": 1e12}
_SIZES = tuple(f.name for f in fields(TransformerShape) if f.name not in ("name", "fused_attention", "dropout"))
LARGEST = 1 << 24  # of a size of a layer


def shape_named(text: str) -> TransformerShape | None:
    """Return the shape of a name such as ``llama-3-8b``, ``7b`` or ``llama:layers=32,hidden=4096,heads=32``.

    None stands for a text of none of these forms, such as a path.

    Raises:
        ValueError: sizes that are unknown, missing or impossible.
    """
    name = text.lower()
    if (model := find_model(text)) is not None:
        return model.shape()
    if match := SIZE.fullmatch(name):
        return _of_size(float(match[1]) * _SCALES[match[2]], name)
    family, colon, sizes = text.partition(":")
    if not colon or "=" not in sizes:
        return None
    if family.lower() not in FAMILIES:
        raise ValueError(f"{family!r} is no known kind of model; take one of {', '.join(FAMILIES)}")
    return _listed(family.lower(), sizes, text)


def limits_of(shape: TransformerShape) -> ModelLimits:
    """Return the numbers that a mesh must divide."""
    causal = not shape.name.startswith("bert")
    return ModelLimits(shape.heads, shape.kv_heads or shape.heads, shape.mlp_width, causal, shape.positions)


def limits_of_decoder(shape: ModelShape) -> ModelLimits:
    """Return the numbers that a mesh must divide, from the configuration's own model."""
    width = shape.mlp_size or 4 * shape.hidden_size
    return ModelLimits(shape.heads, shape.kv_heads or shape.heads, width)


def _of_size(parameters: float, name: str) -> TransformerShape:
    """Return a decoder of about so many parameters, about 128 times as wide as it is deep, as published ones are."""
    depth = (parameters / (12 * 128**2)) ** (1 / 3)
    # Sizes that divide well: by heads of 128, and by stages.
    step = 1024 if depth >= 24 else 128
    hidden = max(step, round(depth * 128 / step) * step)
    block_parameters = parameters - 2 * LLAMA.vocabulary * hidden
    if block_parameters < 12 * hidden**2:
        raise ValueError(
            f"a model of {name} has no room for a block beside a vocabulary of {LLAMA.vocabulary}; list its sizes, as "
            "in gpt:layers=4,hidden=256,heads=4,vocabulary=4096"
        )
    layers = block_parameters / (12 * hidden**2)
    layers = round(layers / 8) * 8 if layers >= 16 else max(1, round(layers))
    width = round(8 * hidden / 3 / 256) * 256
    return replace(LLAMA, layers=layers, hidden=hidden, heads=max(1, hidden // 128), width=width, name=name)


def _listed(family: str, sizes: str, text: str) -> TransformerShape:
    values: dict[str, Any] = {}
    for part in sizes.split(","):
        key, _, value = part.strip().partition("=")
        if key not in _SIZES:
            close = nearest(key, _SIZES)
            meant = f"did you mean {close}? " if close else ""
            raise ValueError(f"{text!r}: {key!r} is no size; {meant}The sizes are {', '.join(_SIZES)}")
        values[key] = _number(key, value, text)
    missing = [key for key in ("layers", "hidden", "heads") if key not in values]
    if missing:
        raise ValueError(
            f"{text!r} lacks {' and '.join(missing)}; add them, as in {family}:layers=32,hidden=4096,heads=32"
        )
    base = FAMILIES[family]
    width = round(8 * values["hidden"] / 3 / 256) * 256 or 256
    values = ({"width": width} if base.gated else {}) | values
    flags: dict[str, Any] = {key: bool(values[key]) for key in ("gated", "biases", "tied") if key in values}
    shape = replace(base, **(values | flags), name=f"{family}-{values['layers']}x{values['hidden']}")
    if not shape.head_width and shape.hidden % shape.heads:
        raise ValueError(
            f"{text!r}: hidden = {shape.hidden} must be a multiple of heads = {shape.heads}, or give head_width"
        )
    if shape.kv_heads and shape.heads % shape.kv_heads:
        raise ValueError(f"{text!r}: kv_heads = {shape.kv_heads} must divide heads = {shape.heads}")
    if shape.experts and not (1 <= shape.chosen <= shape.experts and shape.expert_width):
        raise ValueError(
            f"{text!r}: experts = {shape.experts} needs chosen, from 1 to {shape.experts}, and expert_width; add them, "
            f"as in experts={shape.experts},chosen=1,expert_width={shape.hidden}"
        )
    return shape


def _number(key: str, value: str, text: str) -> int:
    least = 1 if key in ("layers", "hidden", "heads", "vocabulary") else 0
    if not value.isdecimal() or not least <= int(value) <= LARGEST:
        raise ValueError(f"{text!r}: {key} is {value!r}; it must be a whole number from {least} to {LARGEST}")
    return int(value)
