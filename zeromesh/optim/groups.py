"""Which parameters get weight decay, and which are matrices for Muon."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

_NORM = re.compile(r"norm(\d*d)?$", re.IGNORECASE)
"""Ends the names of norm classes: torch's, as LayerNorm and BatchNorm2d, and models' own, as LlamaRMSNorm."""

_NO_MATRIX_WORDS = ("embed", "lm_head", "classifier")
_NO_MATRIX_NAMES = frozenset({"head", "score", "wte", "wpe"})


def no_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The usual two parameter groups: weight decay for weights, none for biases and norms.

    Without decay are the parameters of norm modules (whose class, or a base of it, is called a norm), biases, and other
    parameters with fewer than two dims. Frozen parameters are left out.

    Args:
        model: its trainable parameters are split; each appears once, also if it is tied.
        weight_decay: of the first group.

    Returns:
        two groups, for an optimizer or as ``model_parameters``. Either may be empty.

    Raises:
        ValueError: if ``weight_decay`` is negative.
    """
    if weight_decay < 0:
        raise ValueError(f"weight_decay is {weight_decay}; it must be at least 0")
    decayed: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for _, owner, name, parameter in _owned_parameters(model):
        exempt = _is_norm(owner) or parameter.ndim < 2 or name.endswith("bias")
        (rest if exempt else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that Muon should update: hidden matrices, but no embeddings, output heads or norms.

    A parameter's attribute ``use_muon`` (True or False) decides where it is set. A parameter tied to an embedding or
    a head is none.
    """
    chosen: dict[nn.Parameter, str] = {}
    excluded: set[nn.Parameter] = set()
    for module_name, owner, name, parameter in _owned_parameters(model, remove_duplicate=False):
        use_muon = getattr(parameter, "use_muon", None)
        if use_muon is None:
            use_muon = parameter.ndim == 2 and not _is_norm(owner) and not _is_edge(module_name, owner)
        if not use_muon:
            excluded.add(parameter)
        chosen.setdefault(parameter, f"{module_name}.{name}".removeprefix("."))
    return frozenset(name for parameter, name in chosen.items() if parameter not in excluded)


def _owned_parameters(
    model: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Trainable parameters as (module name, module, name in it, parameter)."""
    seen: set[nn.Parameter] = set()
    for module_name, module in model.named_modules(remove_duplicate=remove_duplicate):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and not (remove_duplicate and parameter in seen):
                seen.add(parameter)
                yield module_name, module, name, parameter


def _is_norm(module: nn.Module) -> bool:
    return any(_NORM.search(cls.__name__) for cls in type(module).__mro__)


def _is_edge(name: str, module: nn.Module) -> bool:
    """Whether the module is where the model meets tokens or classes."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return True
    lower = name.lower()
    return any(word in lower for word in _NO_MATRIX_WORDS) or lower.rpartition(".")[2] in _NO_MATRIX_NAMES
