"""Choice of the modules whose rows are spread over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from zeromesh.base.quantized_layers import is_quantized
from zeromesh.base.substitution import own_computation
from zeromesh.shard.tables.table import has_hooks

KINDS = (nn.Embedding, nn.EmbeddingBag)


def find_tables(
    model: nn.Module, patterns: Sequence[str] | None, taken: Mapping[str, str]
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the tables of a model by name, and why each other embedding with ``sparse=True`` stays dense.

    Args:
        model: its parameters may be on any device, meta included.
        patterns: glob patterns of module names; None: embeddings with ``sparse=True``.
        taken: by name of a parameter, why another part of the layout keeps it from being a table, as a clause.

    Raises:
        ValueError: a pattern matches no embedding, or one that cannot be spread.
    """
    places = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    tables: dict[str, nn.Module] = {}
    reasons: dict[str, str] = {}
    unused = dict.fromkeys(patterns or ())
    for name, module in model.named_modules():
        if not isinstance(module, KINDS):
            continue
        hits = [pattern for pattern in patterns or () if fnmatchcase(name, pattern)]
        if not (hits or (patterns is None and module.sparse)):
            continue
        reason = _reason(name, module, places) or taken.get(f"{name}.weight")
        if reason is None:
            tables[name] = module
        elif hits:
            raise ValueError(f"embedding_tables.modules names {name}, whose rows cannot be spread: {reason}")
        else:
            reasons[name or "the model"] = reason
        for hit in hits:
            unused.pop(hit, None)
    if unused:
        names = ", ".join(name for name, module in model.named_modules() if isinstance(module, KINDS)) or "none"
        raise ValueError(
            f"embedding_tables.modules: {next(iter(unused))!r} matches no embedding of the model; it has {names}"
        )
    return tables, reasons


def _reason(name: str, module: nn.Module, places: Mapping[int, int]) -> str | None:
    """Return why a module's rows cannot be spread, as a clause; None if they can."""
    weight = module._parameters.get("weight")
    if not name:
        return "it is the whole model"
    if reason := own_computation(module, next(kind for kind in KINDS if isinstance(module, kind))):
        return reason
    if weight is None or len(module._parameters) > 1 or is_quantized(weight) or not weight.is_floating_point():
        return "its weight is not one plain parameter"
    if places[id(weight)] > 1:
        return "its weight is used elsewhere, too, where its gradient is dense"
    if not weight.requires_grad:
        return "its weight is frozen"
    if has_hooks(weight):
        return "its weight has hooks, which expect a gradient of its shape"
    if module.scale_grad_by_freq:
        return "torch has no sparse gradients with scale_grad_by_freq"
    return None
