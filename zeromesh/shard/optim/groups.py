"""Parameters with weight decay, and matrices for Muon."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

# End of the names of norm classes: torch's, as LayerNorm and BatchNorm2d, and models' own, as LlamaRMSNorm.
_NORM = re.compile(r"norm(\d*d)?$", re.IGNORECASE)

# Names of modules at a model's tokens or classes, as ``embed_in``, ``lm_head`` and ``heads.0``.
_EDGE = re.compile(r"embed|(^|[._])heads?(\.|$)", re.IGNORECASE)


def no_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the usual two parameter groups: weight decay for weights, none for biases and norms.

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
        (rest if parameter.ndim < 2 or _is_bias_or_norm(owner, name) else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that Muon should update: no embeddings, heads, biases or norms."""
    edges = _edges(model)
    chosen: dict[nn.Parameter, str] = {}
    excluded: set[nn.Parameter] = set()
    for module_name, owner, name, parameter in _owned_parameters(model, remove_duplicate=False):
        # The user's word on the parameter itself decides.
        use_muon = getattr(parameter, "use_muon", None)
        if use_muon is None:
            use_muon = parameter.ndim == 2 and owner not in edges and not _is_bias_or_norm(owner, name)
        # Tied to an embedding or a head it is none, whichever name comes first.
        if not use_muon:
            excluded.add(parameter)
        chosen.setdefault(parameter, f"{module_name}.{name}".removeprefix("."))
    return frozenset(name for parameter, name in chosen.items() if parameter not in excluded)


def expert_matrices(model: nn.Module) -> dict[str, bool]:
    """Return ``hidden_matrices``, and whether each has three dims for a matrix of each expert: no convolution's."""
    stacked = {
        f"{module_name}.{name}".removeprefix(".")
        for module_name, owner, name, parameter in _owned_parameters(model, remove_duplicate=False)
        if parameter.ndim == 3 and not isinstance(owner, nn.modules.conv._ConvNd)
    }
    return {name: name in stacked for name in sorted(hidden_matrices(model))}


def _owned_parameters(
    model: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield trainable parameters as (module name, module, name in it, parameter)."""
    seen: set[nn.Parameter] = set()
    for module_name, module in model.named_modules(remove_duplicate=remove_duplicate):
        for name, parameter in module.named_parameters(recurse=False):
            # A tied parameter would be updated twice by an optimizer that has it in two groups.
            if parameter.requires_grad and not (remove_duplicate and parameter in seen):
                seen.add(parameter)
                yield module_name, module, name, parameter


def _is_bias_or_norm(owner: nn.Module, name: str) -> bool:
    return name.endswith("bias") or any(_NORM.search(cls.__name__) for cls in type(owner).__mro__)


def _edges(model: nn.Module) -> set[nn.Module]:
    """Return the modules where the model meets tokens or classes: by type, name, what the model says, and position."""
    modules = dict(model.named_modules())
    # Blocks are in numbered containers; the last linear layer outside of them is the head.
    outside = [
        module
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and not any(part.isdigit() for part in name.split("."))
    ]
    said = [module.get_output_embeddings() for module in modules.values() if hasattr(module, "get_output_embeddings")]
    matching = [
        module
        for name, module in modules.items()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or _EDGE.search(name)
    ]
    return {module for module in (*matching, *said, *outside[-1:]) if module is not None}
