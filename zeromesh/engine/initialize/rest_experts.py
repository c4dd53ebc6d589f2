"""Experts that rest on the host or in files: which they are, what is refused, and where they rest."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from zeromesh.base.quantized_layers import FOUR_BIT, is_quantized
from zeromesh.comm.mesh import Mesh
from zeromesh.config.settings import TIERS
from zeromesh.shard.optim.host import state_names
from zeromesh.shard.tables.stacked_rows import RestingExperts, StackedRows, StackedWeight, require_rules
from zeromesh.shard.tables.table import has_hooks

if TYPE_CHECKING:
    from zeromesh.config.settings import Resolved
    from zeromesh.parallel.expert.contract import Experts


def find_resting(model: nn.Module, settings: Resolved, mesh: Mesh) -> list[StackedRows]:
    """Return the experts of a model that are to rest; none where the configuration does not say so.

    Raises:
        ValueError: a model without experts, or whose experts have no rows, with the reason.
    """
    rest = settings.experts.rest
    if rest == "none":
        return []
    # Imported here: a dense model needs none of it.
    from zeromesh.parallel.expert.forms import find_experts

    if mesh.sizes["expert"] > 1:
        raise ValueError(f"experts.rest is {rest}, and mesh.expert is {mesh.sizes['expert']}; leave one of them out")
    experts = find_experts(model, settings.experts.targets, 1)
    if not experts:
        raise ValueError(f"experts.rest is {rest}, and no module of {type(model).__name__} has experts; leave it out")
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for item in experts:
        if reason := _reason(model, item, uses):
            raise ValueError(f"experts.rest is {rest}, but {item.name} cannot rest: {reason}; leave experts.rest out")
    return [_rows(model, item) for item in experts]


def _rows(model: nn.Module, item: Experts) -> StackedRows:
    """Return what rests of the experts of a layer, and what is beside it."""
    from zeromesh.parallel.expert.adapted import inner_forward, innermost, packed_steps, take_parts

    path, inner = innermost(item)
    every = []
    for name, split in item.splits.items():
        holder, _, attribute = name.rpartition(".")
        every.append(StackedWeight(holder, model.get_submodule(holder), attribute, split.dim, split.intervals[0]))
    inside = [weight for weight in every if f"{weight.path}.".startswith(f"{path}.")]
    signature = inspect.signature(inner_forward(item.module))
    return StackedRows(
        item.name,
        item.module,
        tuple(inside),
        item.count,
        item.sizes,
        [*signature.parameters][1],
        signature,
        tuple(weight for weight in every if weight not in inside),
        tuple(partial(take_parts, step, parts=item.count) for step in packed_steps(inner)),
    )


def _reason(model: nn.Module, item: Experts, uses: Mapping[int, int]) -> str | None:
    """Return why the experts of a layer cannot rest, as a clause; None if they can."""
    from zeromesh.parallel.expert.adapted import innermost, without_adapters
    from zeromesh.parallel.expert.contract import Contract
    from zeromesh.parallel.expert.forms import objection_to_single

    if item.contract is not Contract.ROUTED:
        return f"it is called with {item.contract.value}, and experts can rest that are called with their choices"
    if item.beyond:
        return f"its router also chooses {item.beyond} experts without weights"
    path, inner = innermost(item)
    for name, parameter in inner.named_parameters():
        split = item.splits.get(f"{path}.{name}")
        if split is None:
            return f"{name} has no row for each of its {item.count} experts"
        if split.dim or len(split.intervals[0]) > 1 or len(parameter) != split.size:
            return f"{name} has {len(parameter)} rows for {item.count} experts"
        if is_quantized(parameter) and FOUR_BIT not in vars(parameter):
            return f"{name} is quantized by other means than bitsandbytes in 4 bits"
        if parameter.requires_grad and inner is not item.module:
            return f"{name} is trained, and {item.name} has adapters"
        if uses[id(parameter)] > 1:
            return f"{name} is used elsewhere, too"
        if has_hooks(parameter):
            return f"{name} has hooks, which expect a gradient of its shape"
    return objection_to_single(without_adapters(model, item)) or None


def resting_settings(
    stacks: Sequence[StackedRows], settings: Resolved, optimizer: Optimizer | None, narrow: frozenset[str]
) -> RestingExperts | None:
    """Return what places resting experts, whose states named in ``narrow`` are bf16; None where there are none.

    Raises:
        ValueError: the optimizer could not make up for steps that experts miss.
    """
    if not stacks:
        return None
    chosen = settings.experts
    folder = Path(chosen.nvme_path).absolute() if chosen.rest == "nvme" and chosen.nvme_path is not None else None
    names: tuple[str, ...] = ()
    if optimizer is not None and any(weight.value.requires_grad for stack in stacks for weight in stack.weights):
        require_rules(optimizer)
        names = state_names(optimizer)
    return RestingExperts(tuple(stacks), TIERS[chosen.rest], folder, chosen.slots, names, narrow)
