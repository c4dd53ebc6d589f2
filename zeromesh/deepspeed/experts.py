"""``deepspeed.moe``: there are no experts, and questions about them are answered so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from zeromesh.deepspeed.names import EXPERTS


class MoE(nn.Module):
    """A layer of experts, which can be imported, as modules do that may do without, but not made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"deepspeed.moe.layer.MoE: {EXPERTS}")


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether a model has layers of experts, and the experts of each: it has none."""
    return False, 0


def is_moe_param(param: object) -> bool:
    """Return whether a parameter, or a group of them, is an expert's: none is."""
    return False


def split_params_into_shared_and_expert_params(params: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return all parameters, and no experts'."""
    return list(params), []


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[Mapping[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Return the groups as they are."""
    given = [param_groups] if isinstance(param_groups, Mapping) else param_groups
    return [dict(group) for group in given]
